//! Worlds to try a rack in: traces of VMs, VMs grown from a seed, the scheduler that places them, a processor whose memory may be
//! slow, and tenants that share a host's memory and link. Pure: input is given, time is a number, and nothing is asked of a machine.
#![forbid(unsafe_code)]

pub mod generate;
pub mod packing;
pub mod processor;
#[cfg(test)]
mod public;
pub mod symbiosis;
pub mod trace;
pub mod world;
