//! Launches Linux guests under KVM whose pool memory is a NUMA node without cores. It knows no ledger and decides no policy:
//! it takes the memory that the agent of its host hands it, and builds a guest around it, or tells another VMM how to.

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
pub mod source;
pub mod tap;
pub mod vcpu;
pub mod vmm_backends;
pub mod wakeup;
