//! Hosts of a rack that run until they are told not to, beside one another: each has its share of the same CXL devices, a network
//! on which this machine is 10.0.2.2, a shell, and a way to run commands in it. Their power, their processor and their link can
//! be cut from outside. What they run is their plan's.
//!
//! All of a rack is in one folder: for host `h0`, `h0.pid` (its process, locked as long as that lives), `h0.qmp`, `h0.shell` and
//! `h0.control` (sockets), `h0.start` (what starts it), `logs/h0.console`, `logs/h0.agent` and `logs/h0.qemu`; for all, `memory`
//! (the bytes of each device, by its serial) and, if it has one, `manager`.

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
    deployment::{Programs, Rack, RackPlan},
    host::RackHost,
    hosts::Hosts,
    plan::{Device, Drive, Plan, TENANT_SETUP_SCRIPT},
    power::Power,
};
