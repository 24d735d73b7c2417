//! Worlds to try a rack in: traces of VMs, VMs grown from a seed, and the scheduler that places them. Pure: input is given,
//! time is a number, and nothing is asked of a machine.
#![forbid(unsafe_code)]

pub mod generate;
pub mod packing;
pub mod trace;
pub mod world;
