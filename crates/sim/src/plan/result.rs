//! DRAM that a policy needs, relative to a cluster whose memory is all local.

use super::{
    Cluster,
    replay::{PoolPeaks, ReplayReport},
};
use units::Fraction;

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

    /// Computes the DRAM if each VM has the same share of its memory on a pool. `peaks` must count
    /// the whole memory of each VM as used in its pool. With `share` f, `memory` M and N sockets, the
    /// cluster needs (1 - f) M N of local memory, and pools of the largest peak.
    pub fn of_fixed_share(cluster: &Cluster, share: Fraction, peaks: &PoolPeaks) -> Self {
        let memory_mib = super::to_mib(cluster.memory_per_socket) as f64;
        let per_pool_mib = share.get() * peaks.sampled_mib as f64;
        Self::new(cluster, (1.0 - share.get()) * memory_mib, peaks.pools, per_pool_mib)
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
