//! Layout of a guest: the NUMA nodes, the guest-physical addresses of their memory, and the MMIO
//! hole. Memory slots, the memory map, SRAT, SLIT and HMAT are all derived from one [`Layout`].
//! This module has no side effects.
//!
//! ```text
//!   0        1 MiB             3 GiB       4 GiB            next multiple of 1 GiB
//!   | tables | local memory    | MMIO hole | local memory   | pool node 1: slices … | node 2 …
//! ```
//!
//! Nodes with CPUs come first and contain the local memory. The slices of each EMC form a node
//! without CPUs (Pond, section 4.2: zNUMA). Pool memory starts at a multiple of 1 GiB, because each
//! slice is mapped separately.

use std::ops::Range;

use units::{
    Bytes, SLICE,
    limits::{EMCS_PER_HOST_MAX, LOCAL_NODES_PER_VM_MAX, SLICES_PER_VM_MAX, VCPUS_PER_VM_MAX},
};

/// Start of the memory into which kernels are loaded, as a guest-physical address. Boot data is at
/// lower addresses.
pub const HIGH_MEMORY_START: u64 = 1 << 20;
/// Start of the MMIO hole, as a guest-physical address.
pub const MMIO_HOLE_START: u64 = 3 << 30;
/// End of the MMIO hole (exclusive), as a guest-physical address.
pub const MMIO_HOLE_END: u64 = 4 << 30;

/// SLIT distance from a node to itself, as defined by ACPI.
pub const DISTANCE_LOCAL: u8 = 10;
/// Maximum SLIT distance: 255 means unreachable.
const DISTANCE_MAX: u64 = 254;
/// Minimum SLIT distance to another node: smaller values are reserved.
const DISTANCE_REMOTE_MIN: u64 = 11;

/// Latency and bandwidth between memory and the nearest CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performance {
    /// Latency of a memory access, in nanoseconds, from 1 to 30,000.
    pub latency_ns: u16,
    /// Total bandwidth, in MB/s (10^6 bytes per second), from 1 to 655,340.
    pub bandwidth_mbps: u32,
}

impl Performance {
    /// Performance of the DDR5 memory of a socket. Pond measures 85 ns for local memory (figure 7).
    pub const LOCAL: Self = Self { latency_ns: 85, bandwidth_mbps: 200_000 };
    /// Performance of EMC memory behind a CXL x8 link, with 8 to 16 sockets: 155 ns in figure 7 of
    /// Pond.
    pub const POOL: Self = Self { latency_ns: 155, bandwidth_mbps: 30_000 };
}

/// Requested NUMA node with CPUs and local memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Number of CPUs of the node, at least 1.
    pub cpus: u32,
    /// Size of the node's memory, a multiple of 1 MiB.
    pub memory: Bytes,
    /// Latency and bandwidth between the node's memory and its CPUs.
    pub performance: Performance,
}

/// Requested NUMA node without CPUs, which contains slices of one EMC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Number of slices of the node, at least 1.
    pub slices: u32,
    /// Latency and bandwidth between the slices and the CPUs of the first node.
    pub performance: Performance,
}

/// Requested NUMA nodes of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Nodes with CPUs, at least one.
    pub local: Vec<Local>,
    /// Nodes without CPUs, which contain pool memory.
    pub pool: Vec<Pool>,
}

/// Kind of memory in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Part of a node's local memory.
    Local {
        /// Index in [`Shape::local`].
        node: usize,
        /// Offset in the node's memory, in bytes.
        offset: u64,
    },
    /// One slice of pool memory.
    Slice {
        /// Index in [`Shape::pool`].
        pool: usize,
        /// Index of the slice within its node.
        slice: u32,
    },
}

/// Contiguous range of guest-physical memory that is backed by one part of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address range.
    pub range: Range<u64>,
    /// Number of the node that contains the region.
    pub node: u32,
    /// Kind of memory in the region.
    pub kind: RegionKind,
}

/// NUMA node of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Numbers of the node's CPUs. The range is empty for a pool node.
    pub cpus: Range<u32>,
    /// Guest-physical memory of the node: at most one range below the MMIO hole and one above.
    pub memory: Vec<Range<u64>>,
    /// Latency and bandwidth between the node's memory and the nearest CPUs.
    pub performance: Performance,
}

impl Node {
    /// Returns whether the node contains pool memory, that is, has no CPUs.
    pub fn is_pool(&self) -> bool {
        self.cpus.is_empty()
    }

    /// Returns the size of the node's memory.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.memory.iter().map(|range| range.end - range.start).sum())
    }
}

/// Error returned for a shape that a guest cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A count or a performance value is out of range.
    #[error("{name}: {count} is out of range: must be {min} to {max}")]
    Count {
        /// Name of the value in the message.
        name: &'static str,
        /// Requested value.
        count: u64,
        /// Minimum of the value.
        min: u64,
        /// Maximum of the value.
        max: u64,
    },
    /// The local memory of a node is too small or not a multiple of 1 MiB.
    #[error("--memory: {memory} for node {node} is invalid: must be a multiple of 1MiB, at least {min}")]
    Memory {
        /// Requested size.
        memory: Bytes,
        /// Number of the node.
        node: usize,
        /// Minimum size.
        min: Bytes,
    },
    /// The guest's memory exceeds the guest-physical address space.
    #[error("memory: the guest's memory ends at {end:#x}, beyond the {bits}-bit address space of this host")]
    PastAddresses {
        /// End of the guest's memory, as a guest-physical address.
        end: u64,
        /// Number of guest-physical address bits on this host.
        bits: u8,
    },
}

/// Minimum local memory of the first node, which must hold the kernel and the initrd.
pub const LOCAL_MEMORY_MIN: Bytes = Bytes::mib(64);

/// NUMA nodes and memory regions of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Nodes in the order of their numbers. Nodes with CPUs have the lowest numbers.
    pub nodes: Vec<Node>,
    /// All memory regions, in address order.
    pub regions: Vec<MemoryRegion>,
}

impl Layout {
    /// Computes the layout of a guest with the requested shape.
    ///
    /// # Errors
    /// [`ShapeError`] if a value is out of range, or if memory exceeds the address space of
    /// `address_bits` bits.
    pub fn new(shape: &Shape, address_bits: u8) -> Result<Self, ShapeError> {
        check_shape(shape)?;
        let mut layout = Self { nodes: Vec::new(), regions: Vec::new() };
        let mut at = 0;
        for local in &shape.local {
            at = layout.add_local_node(local, at);
        }
        at = at.max(MMIO_HOLE_END).next_multiple_of(SLICE.get());
        for (pool, spec) in shape.pool.iter().enumerate() {
            at = layout.add_pool_node(pool, spec, at);
        }
        if at > 1 << address_bits {
            return Err(ShapeError::PastAddresses { end: at, bits: address_bits });
        }
        Ok(layout)
    }

    fn add_local_node(&mut self, local: &Local, mut at: u64) -> u64 {
        let node = self.nodes.len();
        let mut memory = Vec::new();
        let mut offset = 0;
        while offset < local.memory.get() {
            let end = if at < MMIO_HOLE_START { MMIO_HOLE_START } else { u64::MAX };
            let range = at..end.min(at + (local.memory.get() - offset));
            self.add_region(range.clone(), RegionKind::Local { node, offset });
            offset += range.end - range.start;
            at = if range.end == MMIO_HOLE_START { MMIO_HOLE_END } else { range.end };
            memory.push(range);
        }
        let first = self.cpus();
        let cpus = first..first + local.cpus;
        self.nodes.push(Node { cpus, memory, performance: local.performance });
        at
    }

    fn add_pool_node(&mut self, pool: usize, spec: &Pool, at: u64) -> u64 {
        let address = |slice: u32| at + Bytes::slices(slice).get();
        for slice in 0..spec.slices {
            self.add_region(address(slice)..address(slice + 1), RegionKind::Slice { pool, slice });
        }
        let cpus = self.cpus()..self.cpus();
        let range = at..address(spec.slices);
        let end = range.end;
        self.nodes.push(Node { cpus, memory: vec![range], performance: spec.performance });
        end
    }

    fn add_region(&mut self, range: Range<u64>, kind: RegionKind) {
        let node = u32::try_from(self.nodes.len()).expect("the number of a node fits into u32");
        self.regions.push(MemoryRegion { range, node, kind });
    }

    /// Returns the number of CPUs of the guest.
    pub fn cpus(&self) -> u32 {
        self.nodes.last().map_or(0, |node| node.cpus.end)
    }

    /// Returns the APIC ID of a CPU. Each node with CPUs is one package, because kernels assume
    /// that all CPUs of a package are in the same node.
    pub fn apic_id(&self, cpu: u32) -> u32 {
        let node = self.node_of_cpu(cpu);
        node << self.package_shift() | (cpu - self.nodes[node as usize].cpus.start)
    }

    /// Returns the number of low APIC ID bits that identify a CPU within its package.
    pub fn package_shift(&self) -> u32 {
        let most = self.nodes.iter().map(|node| node.cpus.end - node.cpus.start).max().unwrap_or(1);
        most.next_power_of_two().trailing_zeros()
    }

    /// Returns the number of the node that contains a CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> u32 {
        let node = self.nodes.iter().position(|node| node.cpus.contains(&cpu));
        u32::try_from(node.unwrap_or(0)).expect("the number of a node fits into u32")
    }

    /// Returns the ranges of guest memory in address order, with adjacent ranges merged. The first
    /// range includes the lowest MiB, which holds boot data.
    pub fn memory(&self) -> Vec<Range<u64>> {
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in self.nodes.iter().flat_map(|node| &node.memory) {
            match merged.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => merged.push(range.clone()),
            }
        }
        merged
    }

    /// Returns the end address of the local memory that is below the MMIO hole.
    pub fn low_memory_end(&self) -> u64 {
        self.memory().first().map_or(0, |range| range.end.min(MMIO_HOLE_START))
    }

    /// Returns the latency in nanoseconds from a CPU of node `from` to memory of node `to`. Memory
    /// of another node with CPUs has twice the local latency of `to`. Pool memory has the same
    /// latency from all nodes with CPUs, because they share the switch to the pool.
    pub fn latency_ns(&self, from: usize, to: usize) -> u64 {
        let latency = |node: usize| u64::from(self.nodes[node].performance.latency_ns);
        match (from == to, self.nodes[from].is_pool(), self.nodes[to].is_pool()) {
            (true, ..) => latency(to),
            (false, false, false) => latency(to) * 2,
            (false, false, true) => latency(to),
            (false, true, false) => latency(from),
            (false, true, true) => latency(from) + latency(to),
        }
    }

    /// Returns the total bandwidth in MB/s from the CPUs of node `from` to memory of node `to`.
    /// Between two nodes with CPUs, the bandwidth is half the local bandwidth of `to`.
    pub fn bandwidth_mbps(&self, from: usize, to: usize) -> u64 {
        let own = u64::from(self.nodes[to].performance.bandwidth_mbps);
        if from != to && !self.nodes[to].is_pool() { own / 2 } else { own }
    }

    /// Returns the node with CPUs that is nearest to a node: the node itself if it has CPUs,
    /// otherwise node 0. All nodes with CPUs have the same latency to pool memory.
    pub fn nearest_initiator(&self, node: usize) -> usize {
        if self.nodes[node].is_pool() { 0 } else { node }
    }

    /// Returns the SLIT distance between two nodes. The distance of a node to itself is 10. Other
    /// distances are proportional to the latency, and 10 corresponds to the local latency of node
    /// 0.
    pub fn distance(&self, from: usize, to: usize) -> u8 {
        if from == to {
            return DISTANCE_LOCAL;
        }
        let own = u64::from(self.nodes[0].performance.latency_ns);
        let distance = (self.latency_ns(from, to) * u64::from(DISTANCE_LOCAL) + own / 2) / own;
        u8::try_from(distance.clamp(DISTANCE_REMOTE_MIN, DISTANCE_MAX)).expect("clamped to at most 254")
    }
}

fn check_shape(shape: &Shape) -> Result<(), ShapeError> {
    let cpus: u64 = shape.local.iter().map(|node| u64::from(node.cpus)).sum();
    let slices: u64 = shape.pool.iter().map(|node| u64::from(node.slices)).sum();
    let count = |name, count: u64, min: u64, max: u64| {
        if (min..=max).contains(&count) { Ok(()) } else { Err(ShapeError::Count { name, count, min, max }) }
    };
    count("nodes with cpus", shape.local.len() as u64, 1, LOCAL_NODES_PER_VM_MAX as u64)?;
    count("pool nodes", shape.pool.len() as u64, 0, EMCS_PER_HOST_MAX as u64)?;
    count("cpus", cpus, 1, u64::from(VCPUS_PER_VM_MAX))?;
    count("slices", slices, 0, u64::from(SLICES_PER_VM_MAX))?;
    for (node, local) in shape.local.iter().enumerate() {
        count("cpus of a node", u64::from(local.cpus), 1, u64::from(VCPUS_PER_VM_MAX))?;
        let min = if node == 0 { LOCAL_MEMORY_MIN } else { Bytes::mib(1) };
        if local.memory < min || !local.memory.is_whole_mib() {
            return Err(ShapeError::Memory { memory: local.memory, node, min });
        }
    }
    for pool in &shape.pool {
        count("slices of a pool node", u64::from(pool.slices), 1, u64::from(SLICES_PER_VM_MAX))?;
    }
    let performances = shape.local.iter().map(|node| node.performance);
    for performance in performances.chain(shape.pool.iter().map(|node| node.performance)) {
        count("latency_ns", u64::from(performance.latency_ns), 1, u64::from(LATENCY_NS_MAX))?;
        count("bandwidth_mbps", u64::from(performance.bandwidth_mbps), 1, u64::from(BANDWIDTH_MBPS_MAX))?;
    }
    Ok(())
}

/// Maximum latency, in nanoseconds. An HMAT entry has 16 bits and may contain twice this latency.
const LATENCY_NS_MAX: u16 = 30_000;
/// Maximum bandwidth, in MB/s. An HMAT entry has 16 bits and a unit of 10 MB/s.
const BANDWIDTH_MBPS_MAX: u32 = 655_340;

#[cfg(test)]
mod tests;
