//! Capacity planning: replays the VMs of a trace on a cluster, and computes the DRAM that the
//! cluster needs with and without memory pools (Pond, sections 3.1 and 6.5, figures 1c and 11).
//!
//! The placement follows these rules, so that other programs can reproduce it:
//!
//! - VMs arrive in the order of (arrival, id). Ids of digits are compared as numbers. Other ids keep
//!   the order of the file.
//! - Departures up to a second are handled before the arrivals of this second. A VM without a
//!   departure runs to the end. A VM that departs when it arrives is not placed.
//! - A VM runs on one socket with enough free cores and memory. Of several sockets, the one with the
//!   fewest free cores is chosen, then the least free memory, then the lowest number. If no socket
//!   fits, the VM is rejected. Nothing is overcommitted.
//! - A sample at a second sees the departures and arrivals up to this second. The first sample is at
//!   the end of the warm-up, and the last one at or before the last event.
//! - With pools of k sockets, socket i belongs to pool i mod (sockets / k). Every pool is as large as
//!   the largest use of any pool in a sample.
//!
//! [`input`] reads and orders the VMs, [`customers`] models the values that traces do not contain,
//! [`forecast`] predicts the pool memory of a VM, [`sockets`] finds the socket of a VM, [`replay`]
//! replays the VMs, [`slices`] replays their slices, and [`result`] computes the DRAM. The memory of a
//! replay is linear in the number of sockets and of VMs that run at the same time.

pub mod attachment;
pub mod customers;
pub mod forecast;
pub mod input;
pub mod replay;
pub mod result;
pub mod slices;
pub mod sockets;

#[cfg(test)]
mod tests;

use units::Bytes;

/// Sockets of a cluster, all of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Number of sockets, at least 1.
    pub sockets: u32,
    /// Cores of each socket, at least 1.
    pub cores_per_socket: u32,
    /// Memory of each socket, in whole MiB, at least 1 MiB.
    pub memory_per_socket: Bytes,
}

impl Cluster {
    /// Returns whether pools of `sockets` sockets divide the cluster evenly.
    pub fn is_divided_by(&self, sockets: u32) -> bool {
        sockets > 0 && self.sockets.is_multiple_of(sockets)
    }

    /// Returns the memory of all sockets in MiB.
    pub fn total_mib(&self) -> u64 {
        u64::from(self.sockets) * to_mib(self.memory_per_socket)
    }
}

/// Converts a size to whole MiB, rounded down.
pub(crate) fn to_mib(size: Bytes) -> u64 {
    size.get() >> 20
}
