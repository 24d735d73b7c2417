//! Agent of one host: applies the desired state of the manager to its machine, records the process
//! of each VM, and passes memory to VMs. The state machine [`pool::agent`] makes the decisions;
//! this crate performs them.

pub mod component_thread;
pub mod config;
pub mod convert;
pub mod doctor;
pub mod driver;
pub mod early_eviction;
pub mod eviction_report;
pub mod fair_tiering;
pub mod host;
pub mod host_lock;
pub mod host_memory;
mod local_socket;
pub mod manager_list;
pub mod manager_token;
pub mod metrics;
pub mod outbox;
pub mod protected_dir;
mod readiness;
pub mod records;
pub mod report_slot;
pub mod runtime_dir;
pub mod sampling;
pub mod secrets;
pub mod serve;
pub mod session;
pub mod session_channel;
mod session_log;
pub mod shares;
#[cfg(test)]
mod skipped;
pub mod soft_memory;
pub mod soft_memory_report;
pub mod symbiosis;
mod tenant_cgroups;
pub mod tenant_profiles;
pub mod tiering_report;
pub mod usage;
pub mod usage_table;
pub mod user;
pub mod vmm_client;
