//! Pool manager of a rack: stores the ledger, controls the EMCs, and serves schedulers, operators
//! and agents. The crates `pool` and `prediction` make the decisions, and this crate carries them
//! out.

pub mod config;
pub mod convert;
pub mod device;
pub mod driver;
pub mod election;
pub mod emc_thread;
pub mod etcd_connection;
pub mod fence_command;
pub mod folder_access;
pub mod forecasts;
pub mod hex;
pub mod host_reports;
pub mod ledger_store;
pub mod managers;
pub mod metrics;
pub mod monitor;
pub mod offline;
pub mod plan;
pub mod plan_request;
pub mod rack_uuid_file;
pub mod records;
pub mod role;
pub mod rpc;
pub mod rpc_metrics;
pub mod serve;
pub mod shares;
pub mod store;
pub mod store_folder;
#[cfg(test)]
mod test_files;
pub mod tls;
pub mod token_paths;
pub mod tokens;
pub mod write_chunk;
