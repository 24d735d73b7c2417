//! Manager of a rack: it owns the ledger, makes it durable, drives the EMCs, and serves schedulers,
//! operators and agents. Decisions are made in `pool` and `prediction`; this crate performs them.

pub mod config;
pub mod convert;
pub mod device;
pub mod driver;
pub mod emc_thread;
pub mod fence_command;
pub mod forecasts;
pub mod hex;
pub mod ledger_store;
pub mod metrics;
pub mod offline;
pub mod operating_point;
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
pub mod tls;
pub mod tokens;
pub mod write_chunk;
