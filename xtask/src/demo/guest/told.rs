//! What the guest told of itself, for people and for programs.

use emulated_host::nodes::{Node, Told};
use serde::{Deserialize, Serialize};

/// A guest, as its own kernel sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestTold {
    /// Whether it came to its first program.
    pub booted: bool,
    /// What its kernel calls itself.
    pub kernel: String,
    /// Its nodes.
    pub nodes: Vec<GuestNode>,
}

/// A node, as the guest's kernel sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNode {
    id: u32,
    /// Empty for pool memory.
    cpus: Vec<u32>,
    mem_mib: u64,
    distances: Vec<u32>,
    /// A higher number is a lower tier; missing where the kernel has no tiers.
    tier: Option<u32>,
}

impl GuestTold {
    /// Of what was read from its console.
    pub fn of(told: &Told) -> Self {
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

    /// As people read it.
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
