//! Report of a guest, as text and JSON.

use emulated_host::nodes::{Node, NumaReport};
use serde::{Deserialize, Serialize};

/// Guest as seen by its own kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestTold {
    /// It reached its first program.
    pub booted: bool,
    /// Kernel release.
    pub kernel: String,
    /// NUMA nodes.
    pub nodes: Vec<GuestNode>,
}

/// Node as seen by the guest's kernel.
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

impl GuestTold {
    /// Parses the guest's console output.
    pub fn of(told: &NumaReport) -> Self {
        let node = |node: &Node| GuestNode {
            id: node.id,
            cpus: node.cpus.clone(),
            mem_mib: node.total_kib >> 10,
            distances: node.distances.clone(),
            tier: told.tier_of(node.id),
        };
        Self {
            booted: !told.kernel.is_empty(),
            kernel: told.kernel.clone(),
            nodes: told.nodes.iter().map(node).collect(),
        }
    }

    /// Checks that the guest sees one node with CPUs, and a node of two slices without any.
    ///
    /// # Errors
    /// The difference.
    pub fn is_as_asked_for(&self) -> Result<(), String> {
        const POOL_MIB: std::ops::RangeInclusive<u64> = 1950..=2048; // the kernel reserves some for itself
        let [local, pool] = &self.nodes[..] else {
            return Err(format!("the guest has {} nodes and not 2", self.nodes.len()));
        };
        let right = local.cpus.len() == 2 && pool.cpus.is_empty() && POOL_MIB.contains(&pool.mem_mib);
        let farther = local.distances[..] == [10, 18] && pool.distances[..] == [18, 10];
        if right && farther {
            Ok(())
        } else {
            Err(format!("the guest's nodes are not as asked for: {self:?}"))
        }
    }

    /// Formats the report as text.
    pub fn lines(&self) -> Vec<String> {
        let node = |node: &GuestNode| {
            let cpus = match node.cpus.len() {
                0 => "no processors".to_owned(),
                count => format!("{count} processors"),
            };
            let tier = node.tier.map_or(String::new(), |tier| format!(", tier {tier}"));
            let GuestNode { id, mem_mib, distances, .. } = node;
            format!("  node {id}: {cpus}, {mem_mib} MiB, distances {distances:?}{tier}")
        };
        let first = format!("a guest with Linux {} tells of its nodes:", self.kernel);
        [first].into_iter().chain(self.nodes.iter().map(node)).collect()
    }
}
