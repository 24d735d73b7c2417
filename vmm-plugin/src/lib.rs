//! Launches Linux guests under KVM whose pool memory is a CPU-less NUMA node.
//!
//! The agent of the host provides a VM's memory. This crate runs a guest on that memory, or
//! generates the arguments for another VMM. It does not decide which memory a VM gets.

pub mod acpi;
pub mod boot;
pub mod config;
pub mod confine;
pub mod control;
pub mod control_client;
pub mod devices;
pub mod exit;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod options;
pub mod platform;
pub mod rehome;
pub mod source;
pub mod tap;
pub mod thread_role;
pub mod vcpu;
mod vcpu_threads;
pub mod vmm_backends;
pub mod wakeup;
