//! The agent of one host: follows the rack's orders on its machine, remembers which process is which VM, and hands VMs
//! their memory. It decides nothing about ownership: [`pool::agent`] says what to do, this performs it.

pub mod config;
pub mod convert;
pub mod driver;
pub mod host;
pub mod host_memory;
#[cfg(test)]
mod left_out;
pub mod metrics;
pub mod outbox;
mod readiness;
pub mod records;
pub mod runtime_dir;
pub mod serve;
pub mod session;
pub mod symbiosis;
pub mod usage;
