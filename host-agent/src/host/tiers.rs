//! Memory tiers of this machine: nodes with processors contain local memory, nodes without processors
//! contain slower memory, such as slices of a CXL device that are online as memory blocks. Also reads the
//! settings of the kernel that move pages between nodes. Nothing is changed.

use std::{collections::BTreeSet, path::Path};

use super::{
    HostError,
    memory::usage::{NodeMemory, read_node_memory},
    sysfs::{Sysfs, SysfsError, parse_ranges},
};

/// Directory of NUMA nodes, relative to the root of sysfs.
const NODES_FOLDER: &str = "devices/system/node";
/// Setting that lets the kernel demote pages instead of reclaiming them.
const DEMOTION_FILE: &str = "kernel/mm/numa/demotion_enabled";
/// Setting of the multi-generational LRU. Its first bit enables the LRU.
const LRU_GEN_FILE: &str = "kernel/mm/lru_gen/enabled";
/// Setting of NUMA balancing, relative to the root of procfs.
const NUMA_BALANCING_FILE: &str = "sys/kernel/numa_balancing";

/// Reason why the tiers of this machine cannot be determined.
#[derive(Debug, thiserror::Error)]
pub enum TiersError {
    /// A file of sysfs cannot be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The memory of a node cannot be read.
    #[error(transparent)]
    Node(#[from] HostError),
    /// No node without processors has memory.
    #[error("no node without processors has memory: no slice is online as memory blocks")]
    NoSlowMemory,
}

/// NUMA nodes of both tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Nodes with processors and memory.
    pub local: BTreeSet<u32>,
    /// Nodes with memory and without processors.
    pub slow: BTreeSet<u32>,
}

impl Tiers {
    /// Finds the nodes of both tiers. `sys` is the root of sysfs.
    ///
    /// # Errors
    /// [`TiersError`].
    pub fn find(sys: &Sysfs) -> Result<Self, TiersError> {
        let nodes = |list: &str| -> Result<BTreeSet<u32>, TiersError> {
            let file = format!("{NODES_FOLDER}/{list}");
            let text = sys.text(&file)?;
            let ranges = parse_ranges::<u32>(&text);
            let ranges = ranges.ok_or_else(|| sys.unreadable_error(file, text, "a list of nodes"))?;
            Ok(ranges.into_iter().flatten().collect())
        };
        let (with_memory, with_cpu) = (nodes("has_memory")?, nodes("has_cpu")?);
        let (local, slow) = with_memory.into_iter().partition(|node| with_cpu.contains(node));
        let tiers = Self { local, slow };
        if tiers.slow.is_empty() { Err(TiersError::NoSlowMemory) } else { Ok(tiers) }
    }

    /// Returns the total and free memory of some nodes. `sys` is the root of sysfs.
    ///
    /// # Errors
    /// [`TiersError::Node`], also if a node was removed meanwhile.
    pub fn memory_of(sys: &Path, nodes: &BTreeSet<u32>) -> Result<NodeMemory, TiersError> {
        let mut sum = NodeMemory::default();
        for node in nodes {
            let memory = read_node_memory(&sys.join(NODES_FOLDER), *node)?;
            sum.total = sum.total.saturating_add(memory.total);
            sum.free = sum.free.saturating_add(memory.free);
            sum.inactive_files = sum.inactive_files.saturating_add(memory.inactive_files);
        }
        Ok(sum)
    }
}

/// Settings of the kernel that move pages between tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelMigration {
    /// Whether the kernel demotes pages instead of reclaiming them.
    pub demotes: bool,
    /// Mode of NUMA balancing. All modes except 0 also move pages from slower memory to local memory.
    pub numa_balancing: u64,
    /// Whether the multi-generational LRU is enabled.
    pub multi_generational_lru: bool,
}

impl KernelMigration {
    /// Reads the settings. `sys` and `proc` are the roots of sysfs and procfs. A kernel without a
    /// setting does not have the function.
    pub fn read(sys: &Sysfs, proc: &Sysfs) -> Self {
        let demotion = sys.text(DEMOTION_FILE).unwrap_or_default();
        Self {
            demotes: ["true", "1"].contains(&&*demotion),
            numa_balancing: proc.number(NUMA_BALANCING_FILE).unwrap_or(0),
            multi_generational_lru: sys.text(LRU_GEN_FILE).is_ok_and(|bits| {
                let bits = u64::from_str_radix(bits.trim_start_matches("0x"), 16);
                bits.is_ok_and(|bits| bits & 1 == 1)
            }),
        }
    }

    /// Returns how the settings interfere with fair tiering, each with a command that changes the setting.
    pub fn interferences(&self) -> Vec<(String, &'static str)> {
        let mut found = Vec::new();
        if self.numa_balancing > 0 {
            let mode = self.numa_balancing;
            let message = format!(
                "the kernel also promotes pages, without the limits of tenants: kernel.numa_balancing is {mode}"
            );
            found.push((message, "sysctl kernel.numa_balancing=0"));
        }
        if self.multi_generational_lru {
            // It does not end the reclaim of a cgroup at the requested size (`should_abort_scan` in Linux).
            let message = "the kernel may demote many times the requested memory: the multi-generational LRU is enabled";
            found.push((message.to_owned(), "echo n > /sys/kernel/mm/lru_gen/enabled"));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use units::Bytes;

    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    fn machine(with_memory: &str, with_cpu: &str) -> FakeSysfs {
        let fake = FakeSysfs::new(&[]);
        fake.files(NODES_FOLDER, &[("has_memory", with_memory), ("has_cpu", with_cpu)]);
        fake
    }

    #[test]
    fn nodes_without_processors_are_slow_memory() {
        let tiers = Tiers::find(&machine("0-1,3", "0,2").sysfs).unwrap();
        assert_eq!(tiers, Tiers { local: [0].into(), slow: [1, 3].into() });
        let error = Tiers::find(&machine("0-1", "0-1").sysfs).unwrap_err();
        assert!(matches!(error, TiersError::NoSlowMemory), "{error}");
        let error = Tiers::find(&machine("0-x", "0").sysfs).unwrap_err().to_string();
        assert!(error.ends_with("has_memory contains \"0-x\", expected a list of nodes"), "{error}");
    }

    #[test]
    fn memory_of_nodes_is_summed() {
        let fake = machine("0-1", "0");
        for (node, free) in [(0, 1024), (1, 2048)] {
            let meminfo = format!(
                "Node {node} MemTotal: 4096 kB\nNode {node} MemFree: {free} kB\nNode {node} Inactive(file): 512 kB"
            );
            fake.files(&format!("{NODES_FOLDER}/node{node}"), &[("meminfo", &meminfo)]);
        }
        let memory = Tiers::memory_of(&fake.path(""), &[0, 1].into()).unwrap();
        assert_eq!(
            memory,
            NodeMemory { total: Bytes::mib(8), free: Bytes::mib(3), inactive_files: Bytes::mib(1) }
        );
        let error = Tiers::memory_of(&fake.path(""), &[2].into()).unwrap_err();
        assert!(matches!(error, TiersError::Node(_)), "{error}");
    }

    #[test]
    fn kernel_migration_is_read_from_its_settings() {
        let read = |demotion: &str, balancing: &str, lru_gen: &str| {
            let files =
                [(DEMOTION_FILE, demotion), (NUMA_BALANCING_FILE, balancing), (LRU_GEN_FILE, lru_gen)];
            let fake = FakeSysfs::new(&files);
            KernelMigration::read(&fake.sysfs, &fake.sysfs)
        };
        let settings = |demotes, numa_balancing, multi_generational_lru| KernelMigration {
            demotes,
            numa_balancing,
            multi_generational_lru,
        };
        assert_eq!(read("true", "1", "0x0007"), settings(true, 1, true));
        assert_eq!(read("false", "0", "0x0006"), settings(false, 0, false));
        assert!(!read("false", "0", "y").multi_generational_lru);
        assert_eq!(settings(true, 0, false).interferences(), []);
        let found = settings(true, 2, true).interferences();
        assert!(found[0].0.contains("kernel.numa_balancing is 2") && found[0].1.starts_with("sysctl"));
        assert!(found[1].0.contains("multi-generational LRU") && found[1].1.starts_with("echo n"));
        let missing = FakeSysfs::new(&[]).sysfs;
        assert_eq!(KernelMigration::read(&missing, &missing), settings(false, 0, false));
    }
}
