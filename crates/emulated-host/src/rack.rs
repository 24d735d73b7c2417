//! A rack of emulated hosts in QEMU. The hosts share CXL devices. Each host has a shell, a command
//! interface, and a network. This machine has the address 10.0.2.2 in the network. Callers control
//! power, CPU and network link of a host. A [`Plan`] defines the programs that the hosts run.
//!
//! A rack is one directory with these files:
//!
//! | Path | Content |
//! |---|---|
//! | `h0.pid` | process ID of QEMU for host `h0`; locked while QEMU runs |
//! | `h0.start` | command line of QEMU |
//! | `h0.qmp`, `h0.shell`, `h0.control` | sockets |
//! | `logs/h0.console`, `logs/h0.agent`, `logs/h0.qemu` | logs |
//! | `memory` | links to the content of each device, by serial number, and of each drive |
//! | `manager` | configuration of the manager, if the rack has one |

mod certificates;
mod config_files;
mod control;
mod deployment;
mod host;
mod hosts;
mod initrd;
mod nbd;
mod plan;
mod power;
mod qmp;
mod socket;

pub use self::{
    control::CommandOutput,
    deployment::Rack,
    host::RackHost,
    hosts::Hosts,
    nbd::NbdServer,
    plan::{Device, Drive, Plan, Programs, RackPlan, TENANT_SETUP_SCRIPT, TIERED_TENANTS_SETUP_SCRIPT},
    power::Power,
};
