//! Worlds to try a rack in: traces of VMs, VMs grown from a seed, the scheduler that places them, and a processor whose memory may be
//! slow. Pure: input is given, time is a number, and nothing is asked of a machine.
#![forbid(unsafe_code)]

pub mod generate;
pub mod packing;
pub mod processor;
pub mod trace;
pub mod world;
