//! Simulation and evaluation models: VM traces and a VM generator, a best-fit scheduler, a core
//! model with slow memory, tenants that share a host's memory and link, and a seeded simulation of
//! the whole rack. Pure: input is passed in, time is a number, and nothing is read from the
//! machine.
#![forbid(unsafe_code)]

pub mod generate;
pub mod packing;
pub mod processor;
#[cfg(test)]
mod public_data;
pub mod symbiosis;
pub mod trace;
pub mod world;
