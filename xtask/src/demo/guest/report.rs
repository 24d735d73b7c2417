//! Report of a guest, as text and JSON.

use emulated_host::nodes::{Node, NumaReport};
use serde::{Deserialize, Serialize};

/// NUMA nodes of a guest, as reported by its kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestReport {
    /// Whether the guest ran its first program.
    pub booted: bool,
    /// Kernel release.
    pub kernel: String,
    /// NUMA nodes.
    pub nodes: Vec<GuestNode>,
}

/// NUMA node of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNode {
    id: u32,
    /// Empty for pool memory.
    cpus: Vec<u32>,
    mem_mib: u64,
    distances: Vec<u32>,
    /// Memory tier; a higher number is a lower tier. `None` where the kernel has no tiers.
    tier: Option<u32>,
}

impl GuestReport {
    /// Converts the nodes parsed from the guest's console output.
    pub fn from_numa_report(numa_report: &NumaReport) -> Self {
        let node = |node: &Node| GuestNode {
            id: node.id,
            cpus: node.cpus.clone(),
            mem_mib: node.total_kib >> 10,
            distances: node.distances.clone(),
            tier: numa_report.tier_of(node.id),
        };
        Self {
            booted: !numa_report.kernel.is_empty(),
            kernel: numa_report.kernel.clone(),
            nodes: numa_report.nodes.iter().map(node).collect(),
        }
    }

    /// Checks that the guest has one node with CPUs, and one of two slices without CPUs.
    ///
    /// # Errors
    /// A description of the difference.
    pub fn check_nodes(&self) -> Result<(), String> {
        const POOL_MIB: std::ops::RangeInclusive<u64> = 1950..=2048; // the kernel reserves some for itself
        let [local, pool] = &self.nodes[..] else {
            return Err(format!("the guest has {} nodes instead of 2", self.nodes.len()));
        };
        let is_size_right = local.cpus.len() == 2 && pool.cpus.is_empty() && POOL_MIB.contains(&pool.mem_mib);
        let are_distances_right = local.distances[..] == [10, 18] && pool.distances[..] == [18, 10];
        if is_size_right && are_distances_right {
            Ok(())
        } else {
            Err(format!("the nodes of the guest are wrong: {self:?}"))
        }
    }

    /// Formats the report as text.
    pub fn lines(&self) -> Vec<String> {
        let node = |node: &GuestNode| {
            let cpus = match node.cpus.len() {
                0 => "no CPUs".to_owned(),
                count => format!("{count} CPUs"),
            };
            let tier = node.tier.map_or(String::new(), |tier| format!(", tier {tier}"));
            let GuestNode { id, mem_mib, distances, .. } = node;
            format!("  node {id}: {cpus}, {mem_mib} MiB, distances {distances:?}{tier}")
        };
        let heading = format!("NUMA nodes of a guest with Linux {}:", self.kernel);
        [heading].into_iter().chain(self.nodes.iter().map(node)).collect()
    }
}
