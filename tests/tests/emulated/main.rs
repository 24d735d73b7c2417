//! Tests on hosts that QEMU emulates: racks in a box, with real CXL memory between real hosts, and stock Debian guests inside a
//! host. One program, so that two of its tests run at any time.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

mod agent;
mod busy;
mod faults;
mod guest;
mod host_doctor;
mod hosts;
mod linux;
mod linux_other_vmms;
mod linux_rack;
mod moves;
mod random_faults;
mod symbiosis;
