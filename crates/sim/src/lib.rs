//! Simulation and evaluation models. The crate contains VM traces, a VM generator, a best-fit
//! scheduler and a model of a CPU core with slow memory. It also simulates the QoS monitor of many
//! VMs, tenants that share a host or its memory tiers, a tenant whose memory is evicted, and a whole rack with
//! faults. The crate is pure: it reads no clock, no file and no environment.
#![forbid(unsafe_code)]

pub mod eviction;
pub mod generate;
pub mod packing;
pub mod plan;
pub mod processor;
#[cfg(test)]
mod public_data;
pub mod qos;
mod scenario_error;
pub mod symbiosis;
pub mod tiering;
pub mod trace;
pub mod world;

pub use scenario_error::ScenarioError;
