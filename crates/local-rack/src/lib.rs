//! A rack on this machine: configuration files of a manager and its agents, and their processes. Used by
//! the demo, the system tests and the benchmarks, which decide what runs and wait for it.
//!
//! Racks of emulated hosts with real CXL devices are in the crate `emulated-host`.
#![forbid(unsafe_code)]

mod config;
mod process;
mod programs;

pub use self::{
    config::{AgentConfig, Emc, Host, RackConfig},
    process::{Process, ProcessError},
    programs::{ProgramsError, program_dir},
};
