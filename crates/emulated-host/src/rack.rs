//! Hosts of a rack in QEMU: they share CXL devices and have a network on which this machine is
//! 10.0.2.2, a shell, and a command interface. Power, CPU and network link are controlled from
//! outside. A [`Plan`] defines what the hosts run.
//!
//! A rack is one directory. Host `h0` has `h0.pid` (its process, locked while that lives), the
//! sockets `h0.qmp`, `h0.shell` and `h0.control`, its command line `h0.start`, and the logs
//! `logs/h0.console`, `logs/h0.agent` and `logs/h0.qemu`. The rack has `memory` (the bytes of each
//! device, by serial number) and optionally `manager`.

mod certificates;
mod config_files;
mod control;
mod deployment;
mod host;
mod hosts;
mod initrd;
mod plan;
mod power;
mod qmp;
mod socket;

pub use self::{
    control::CommandOutput,
    deployment::Rack,
    host::RackHost,
    hosts::Hosts,
    plan::{Device, Drive, Plan, Programs, RackPlan, TENANT_SETUP_SCRIPT},
    power::Power,
};
