//! Simulation and evaluation models: VM traces and a VM generator, a best-fit scheduler, a model of
//! a CPU core with slow memory, tenants that share a host's memory and link, and a seeded
//! simulation of the whole rack. The crate is pure: it reads no clock, no file and no environment.
#![forbid(unsafe_code)]

pub mod generate;
pub mod packing;
pub mod processor;
#[cfg(test)]
mod public_data;
pub mod symbiosis;
pub mod trace;
pub mod world;
