//! DRAM that a policy needs, relative to a cluster whose memory is all local.

use super::{Cluster, replay::ReplayReport};

/// DRAM of a cluster with pools.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DramNeed {
    /// Local memory of each socket, in MiB.
    pub local_per_socket_mib: f64,
    /// Memory of each pool, in MiB.
    pub per_pool_mib: f64,
    /// Local memory of all sockets, in MiB.
    pub local_mib: f64,
    /// Memory of all pools, in MiB.
    pub pools_mib: f64,
    /// Local and pool memory, as a fraction of the memory of all sockets without pools.
    pub required: f64,
}

impl DramNeed {
    /// Computes the DRAM for a local memory per socket and a memory per pool.
    pub fn new(cluster: &Cluster, local_per_socket_mib: f64, pools: u32, per_pool_mib: f64) -> Self {
        let local_mib = local_per_socket_mib * f64::from(cluster.sockets);
        let pools_mib = per_pool_mib * f64::from(pools);
        let required = (local_mib + pools_mib) / cluster.total_mib() as f64;
        Self { local_per_socket_mib, per_pool_mib, local_mib, pools_mib, required }
    }

    /// Returns the saved DRAM, as a fraction of the memory of all sockets without pools. Negative if
    /// the pools need more memory than they save.
    pub fn saved(&self) -> f64 {
        1.0 - self.required
    }
}

impl ReplayReport {
    /// Returns the rejected VMs as a fraction of all VMs.
    pub fn rejected(&self) -> f64 {
        if self.counts.vms == 0 { 0.0 } else { self.counts.rejected as f64 / self.counts.vms as f64 }
    }
}
