//! Layout of a guest: NUMA nodes, their memory in guest-physical space, and the MMIO hole. This
//! module is pure; memory slots, the memory map, SRAT, SLIT and HMAT are all derived from one
//! [`Layout`].
//!
//! ```text
//!   0        1 MiB             3 GiB       4 GiB            next multiple of 1 GiB
//!   | tables | local memory    | MMIO hole | local memory   | pool node 1: slices … | node 2 …
//! ```
//!
//! Nodes with CPUs come first and contain the local memory. The slices of each EMC form a node
//! without CPUs (Pond, section 4.2: zNUMA). Pool memory starts at a multiple of 1 GiB, as each
//! slice is mapped separately.

use std::ops::Range;

use units::{
    Bytes, SLICE,
    limits::{EMCS_PER_HOST_MAX, LOCAL_NODES_PER_VM_MAX, SLICES_PER_VM_MAX, VCPUS_MAX},
};

/// Start of memory that kernels may use freely; boot data is below.
pub const HIGH_MEMORY: u64 = 1 << 20;
/// Start of the MMIO hole.
pub const MMIO_HOLE_START: u64 = 3 << 30;
/// End of the MMIO hole.
pub const MMIO_HOLE_END: u64 = 4 << 30;

/// SLIT distance of a node to itself.
pub const DISTANCE_LOCAL: u8 = 10;
/// Maximum distance in a SLIT.
const DISTANCE_MAX: u64 = 254;
/// Minimum distance to another node.
const DISTANCE_OTHER_MIN: u64 = 11;

/// Latency and bandwidth of memory from the nearest CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performance {
    /// Latency of one access, in nanoseconds; 1 to 30,000.
    pub latency_ns: u16,
    /// Total bandwidth, in MB/s (10^6); 1 to 655,340.
    pub bandwidth_mbps: u32,
}

impl Performance {
    /// A DDR5 socket: 85 ns is Pond's local latency (figure 7).
    pub const LOCAL: Self = Self { latency_ns: 85, bandwidth_mbps: 200_000 };
    /// A CXL x8 link behind an EMC of a rack of 8 to 16 sockets: 155 ns in Pond's figure 7.
    pub const POOL: Self = Self { latency_ns: 155, bandwidth_mbps: 30_000 };
}

/// A NUMA node with CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Number of CPUs.
    pub cpus: u32,
    /// Size of the memory.
    pub memory: Bytes,
    /// Latency and bandwidth of the memory.
    pub performance: Performance,
}

/// A NUMA node without CPUs: the slices of one EMC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Number of slices.
    pub slices: u32,
    /// Latency and bandwidth from the first node's CPUs.
    pub performance: Performance,
}

/// Requested nodes of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Nodes with CPUs, at least one.
    pub local: Vec<Local>,
    /// Pool nodes.
    pub pool: Vec<Pool>,
}

/// Content of a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Part of a node's local memory.
    Local {
        /// Index in [`Shape::local`].
        node: usize,
        /// Offset in the node's memory, in bytes.
        offset: u64,
    },
    /// One slice.
    Slice {
        /// Index in [`Shape::pool`].
        pool: usize,
        /// Index of the slice in its node.
        slice: u32,
    },
}

/// A contiguous range of guest-physical memory with one backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address range.
    pub range: Range<u64>,
    /// Node of the region.
    pub node: u32,
    /// Content of the region.
    pub kind: RegionKind,
}

/// A NUMA node of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Numbers of its CPUs; empty for pool memory.
    pub cpus: Range<u32>,
    /// Its memory: at most one range below the MMIO hole and one above.
    pub memory: Vec<Range<u64>>,
    /// Latency and bandwidth of its memory from the nearest CPUs.
    pub performance: Performance,
}

impl Node {
    /// Returns whether the node is pool memory.
    pub fn is_pool(&self) -> bool {
        self.cpus.is_empty()
    }

    /// Returns the size of the node's memory.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.memory.iter().map(|range| range.end - range.start).sum())
    }
}

/// Error returned for an impossible shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A count is out of range.
    #[error("{what}: {count} is not possible: must be {min} to {max}")]
    Count {
        /// Name of the counted items.
        what: &'static str,
        /// The count.
        count: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// Local memory is too small or not a multiple of 1 MiB.
    #[error("memory: {memory} for node {node} is not possible: must be whole MiB, at least {min}")]
    Memory {
        /// Size of the memory.
        memory: Bytes,
        /// The node.
        node: usize,
        /// Minimum.
        min: Bytes,
    },
    /// The guest's memory exceeds the guest-physical address space.
    #[error("memory: the guest's memory ends at {end:#x}, beyond the {bits}-bit address space of this host")]
    PastAddresses {
        /// End of the guest's memory.
        end: u64,
        /// Number of guest-physical address bits.
        bits: u8,
    },
}

/// Minimum local memory of the first node: space for a kernel and an initrd.
pub const LOCAL_MEMORY_MIN: Bytes = Bytes::mib(64);

/// Nodes and memory regions of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Nodes by number, those with CPUs first.
    pub nodes: Vec<Node>,
    /// All memory regions, by address.
    pub regions: Vec<MemoryRegion>,
}

impl Layout {
    /// Computes the layout of a shape.
    ///
    /// # Errors
    /// [`ShapeError`] if a count or a size is out of range, or memory exceeds `address_bits`.
    pub fn new(shape: &Shape, address_bits: u8) -> Result<Self, ShapeError> {
        check(shape)?;
        let mut layout = Self { nodes: Vec::new(), regions: Vec::new() };
        let mut at = 0;
        for local in &shape.local {
            at = layout.add_local(local, at);
        }
        at = at.max(MMIO_HOLE_END).next_multiple_of(SLICE.get());
        for (pool, spec) in shape.pool.iter().enumerate() {
            at = layout.add_pool(pool, spec, at);
        }
        if at > 1 << address_bits {
            return Err(ShapeError::PastAddresses { end: at, bits: address_bits });
        }
        Ok(layout)
    }

    fn add_local(&mut self, local: &Local, mut at: u64) -> u64 {
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

    fn add_pool(&mut self, pool: usize, spec: &Pool, at: u64) -> u64 {
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
        let node = u32::try_from(self.nodes.len()).expect("nodes are few");
        self.regions.push(MemoryRegion { range, node, kind });
    }

    /// Returns the number of CPUs.
    pub fn cpus(&self) -> u32 {
        self.nodes.last().map_or(0, |node| node.cpus.end)
    }

    /// Returns the APIC ID of a CPU. Each node with CPUs is a package, as kernels assume that the
    /// CPUs of a package share a node.
    pub fn apic_id(&self, cpu: u32) -> u32 {
        let node = self.node_of_cpu(cpu);
        node << self.package_shift() | (cpu - self.nodes[node as usize].cpus.start)
    }

    /// Returns the number of low APIC ID bits that identify a CPU within its package.
    pub fn package_shift(&self) -> u32 {
        let most = self.nodes.iter().map(|node| node.cpus.end - node.cpus.start).max().unwrap_or(1);
        most.next_power_of_two().trailing_zeros()
    }

    /// Returns the node of a CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> u32 {
        let node = self.nodes.iter().position(|node| node.cpus.contains(&cpu));
        u32::try_from(node.unwrap_or(0)).expect("nodes are few")
    }

    /// Returns usable memory by address, with adjacent ranges merged. The lowest MiB is included.
    pub fn memory(&self) -> Vec<Range<u64>> {
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in self.nodes.iter().flat_map(|node| &node.memory) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range.clone()),
            }
        }
        joined
    }

    /// Returns the end of local memory below the MMIO hole.
    pub fn low_memory_end(&self) -> u64 {
        self.memory().first().map_or(0, |range| range.end.min(MMIO_HOLE_START))
    }

    /// Returns the latency from a CPU of `from` to memory of `to`, in nanoseconds. Memory of
    /// another node with CPUs has twice the local latency. Pool memory is behind the same switch
    /// for all nodes.
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

    /// Returns the total bandwidth from `from` to `to`, in MB/s. Between nodes with CPUs it is half
    /// the local one.
    pub fn bandwidth_mbps(&self, from: usize, to: usize) -> u64 {
        let own = u64::from(self.nodes[to].performance.bandwidth_mbps);
        if from != to && !self.nodes[to].is_pool() { own / 2 } else { own }
    }

    /// Returns the nearest node with CPUs: the node itself, or node 0 for pool memory, which is
    /// equally far from all.
    pub fn nearest_initiator(&self, node: usize) -> usize {
        if self.nodes[node].is_pool() { 0 } else { node }
    }

    /// Returns the SLIT distance between two nodes: 10 for a node itself, otherwise proportional to
    /// the latency, where 10 is the local latency of node 0.
    pub fn distance(&self, from: usize, to: usize) -> u8 {
        if from == to {
            return DISTANCE_LOCAL;
        }
        let own = u64::from(self.nodes[0].performance.latency_ns);
        let distance = (self.latency_ns(from, to) * u64::from(DISTANCE_LOCAL) + own / 2) / own;
        u8::try_from(distance.clamp(DISTANCE_OTHER_MIN, DISTANCE_MAX)).expect("clamped to at most 254")
    }
}

fn check(shape: &Shape) -> Result<(), ShapeError> {
    let cpus: u64 = shape.local.iter().map(|node| u64::from(node.cpus)).sum();
    let slices: u64 = shape.pool.iter().map(|node| u64::from(node.slices)).sum();
    let count = |what, count: u64, min: u64, max: u64| {
        if (min..=max).contains(&count) { Ok(()) } else { Err(ShapeError::Count { what, count, min, max }) }
    };
    count("nodes with processors", shape.local.len() as u64, 1, LOCAL_NODES_PER_VM_MAX as u64)?;
    count("pool nodes", shape.pool.len() as u64, 0, EMCS_PER_HOST_MAX as u64)?;
    count("cpus", cpus, 1, u64::from(VCPUS_MAX))?;
    count("slices", slices, 0, u64::from(SLICES_PER_VM_MAX))?;
    for (node, local) in shape.local.iter().enumerate() {
        count("cpus of a node", u64::from(local.cpus), 1, u64::from(VCPUS_MAX))?;
        let min = if node == 0 { LOCAL_MEMORY_MIN } else { Bytes::mib(1) };
        if local.memory < min || !local.memory.is_whole_mib() {
            return Err(ShapeError::Memory { memory: local.memory, node, min });
        }
    }
    for pool in &shape.pool {
        count("slices of a pool node", u64::from(pool.slices), 1, u64::from(SLICES_PER_VM_MAX))?;
    }
    let speeds = shape.local.iter().map(|node| node.performance);
    for speed in speeds.chain(shape.pool.iter().map(|node| node.performance)) {
        count("latency_ns", u64::from(speed.latency_ns), 1, u64::from(LATENCY_NS_MAX))?;
        count("bandwidth_mbps", u64::from(speed.bandwidth_mbps), 1, u64::from(BANDWIDTH_MBPS_MAX))?;
    }
    Ok(())
}

/// Maximum latency, in nanoseconds: twice the value must fit into 16 bits of an HMAT.
const LATENCY_NS_MAX: u16 = 30_000;
/// Maximum bandwidth, in MB/s: an HMAT has 16 bits, in units of 10 MB/s.
const BANDWIDTH_MBPS_MAX: u32 = 655_340;

#[cfg(test)]
mod tests;
