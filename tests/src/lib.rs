//! Shared code of the system tests: racks of real processes, emulated hosts, guests and scripted
//! agents.

pub mod elected_rack;
pub mod emulated_rack;
pub mod environment;
pub mod etcd_cluster;
pub mod failover_load;
pub mod linux_guests;
pub mod pool_guest;
pub mod rack;
pub mod rehomed_guests;
pub mod scripted_agent;
pub mod simulated_etcd;
pub mod small_guests;
pub mod soft_cache;
pub mod soft_client;
pub mod soft_daemon;
pub mod soft_host;
pub mod standalone_vm;
pub mod store_in_etcd;
pub mod tiered_tenants;

/// Number of steps with faults in a run of the simulated rack.
pub const SIMULATION_STEPS: u64 = 4000;
