//! Building blocks for a rack on this machine: configuration files and processes of a manager and
//! its agents. The demo, the system tests and the benchmarks use them.
//!
//! The crate `emulated-host` provides racks of QEMU guests with CXL devices instead.
#![forbid(unsafe_code)]

mod config;
mod process;
mod programs;

pub use self::{
    config::{AgentConfig, Emc, Host, RackConfig},
    process::{Process, ProcessError},
    programs::{ProgramsError, program_dir},
};
