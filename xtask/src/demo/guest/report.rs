//! Report of a guest about its NUMA nodes, as text and JSON.

use emulated_host::nodes::{Node, NumaReport};
use serde::{Deserialize, Serialize};

/// NUMA nodes of a guest, as reported by the guest kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestReport {
    /// Whether the guest ran its first program.
    pub booted: bool,
    /// Release of the guest kernel. Empty if the guest did not boot.
    pub kernel: String,
    /// NUMA nodes, in the order of the guest's output.
    pub nodes: Vec<GuestNode>,
}

/// NUMA node of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNode {
    id: u32,
    /// CPUs of the node. Empty for a node of pool memory.
    cpus: Vec<u32>,
    mem_mib: u64,
    distances: Vec<u32>,
    /// Memory tier: a higher number means slower memory. `None` if the kernel reports no tiers.
    tier: Option<u32>,
}

impl GuestReport {
    /// Creates the report from the parsed console output of the guest.
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

    /// Checks that the guest has two nodes: one with two CPUs, and one with two slices and no CPUs.
    ///
    /// # Errors
    /// Returns a description of the difference.
    pub fn check_nodes(&self) -> Result<(), String> {
        // Two slices, less the memory that the guest kernel reserves.
        const POOL_MIB: std::ops::RangeInclusive<u64> = 1950..=2048;
        let [local, pool] = &self.nodes[..] else {
            return Err(format!("the guest has {} NUMA nodes, must have 2", self.nodes.len()));
        };
        let is_size_right = local.cpus.len() == 2 && pool.cpus.is_empty() && POOL_MIB.contains(&pool.mem_mib);
        let are_distances_right = local.distances[..] == [10, 18] && pool.distances[..] == [18, 10];
        if is_size_right && are_distances_right {
            Ok(())
        } else {
            Err(format!("CPUs, size or distances of a NUMA node of the guest are wrong: {self:?}"))
        }
    }

    /// Formats the report as lines of text.
    pub fn to_lines(&self) -> Vec<String> {
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
