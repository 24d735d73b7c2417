//! Tests on hosts emulated by QEMU: racks of hosts that share CXL memory, and stock Debian guests
//! inside a host. All these tests are in one program to limit the number of concurrent tests.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

mod access;
mod agent_crash;
mod busy_block;
mod cxl_guest;
mod early_eviction;
mod faults;
mod host_doctor;
mod hosts;
mod linux;
mod linux_other_vmms;
mod linux_rack;
mod random_faults;
mod rehomed_guest;
mod slice_moves;
mod slowed_down_guest;
mod soft_memory;
mod symbiosis;
mod tiering;
