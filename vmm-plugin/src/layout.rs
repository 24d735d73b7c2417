//! Where everything of a guest lies: its NUMA nodes, their memory in guest-physical space, and the windows of its devices.
//! Pure, so that the memory slots, the map the kernel boots with, SRAT, SLIT and HMAT are all written from one answer.
//!
//! ```text
//!   0        1 MiB             3 GiB      4 GiB            next whole GiB
//!   | tables | local memory    | devices  | local memory   | pool node 1: slice, slice … | pool node 2 …
//! ```
//!
//! Nodes with processors come first and have the local memory; each EMC's slices are a node of their own, without any
//! (Pond, section 4.2: zNUMA). Pool memory begins at a whole GiB, as each slice is mapped on its own.

use std::ops::Range;

use units::{
    Bytes, SLICE,
    limits::{EMCS_PER_HOST_MAX, LOCAL_NODES_PER_VM_MAX, SLICES_PER_VM_MAX, VCPUS_MAX},
};

/// Below this lie the tables a kernel boots with; kernels expect no usable memory right under it.
pub const HIGH_MEMORY: u64 = 1 << 20;
/// Where the devices' window begins.
pub const MMIO_HOLE_START: u64 = 3 << 30;
/// Where it ends.
pub const MMIO_HOLE_END: u64 = 4 << 30;

/// A node's own distance in a SLIT.
pub const DISTANCE_LOCAL: u8 = 10;
/// The longest distance that a SLIT can say.
const DISTANCE_MAX: u64 = 254;
/// The shortest one to another node.
const DISTANCE_OTHER_MIN: u64 = 11;

/// How fast memory is for a processor right beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Performance {
    /// One access, in nanoseconds; 1 to 65,534.
    pub latency_ns: u16,
    /// All accesses together, in MB/s (10^6).
    pub bandwidth_mbps: u32,
}

impl Performance {
    /// A DDR5 socket: 85 ns is Pond's local latency (figure 7).
    pub const LOCAL: Self = Self { latency_ns: 85, bandwidth_mbps: 200_000 };
    /// A x8 CXL link behind an external memory controller of a rack of 8 to 16 sockets: 155 ns in Pond's figure 7.
    pub const POOL: Self = Self { latency_ns: 155, bandwidth_mbps: 30_000 };
}

/// A node with processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// How many processors it has.
    pub cpus: u32,
    /// How much memory it has.
    pub memory: Bytes,
    /// How fast that is.
    pub performance: Performance,
}

/// A node without processors: the slices of one EMC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// How many slices.
    pub slices: u32,
    /// How fast they are for the first node's processors.
    pub performance: Performance,
}

/// What a guest is to look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// At least one.
    pub local: Vec<Local>,
    /// May be empty.
    pub pool: Vec<Pool>,
}

/// What lies at a place in guest-physical space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Local memory of a node, from an offset of it on.
    Local {
        /// Which of [`Shape::local`].
        node: usize,
        /// From where on.
        offset: u64,
    },
    /// One slice.
    Slice {
        /// Which of [`Shape::pool`].
        pool: usize,
        /// Which of its slices.
        slice: u32,
    },
}

/// A run of guest-physical memory that is backed as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Where.
    pub range: Range<u64>,
    /// Of which node.
    pub node: u32,
    /// What.
    pub kind: RegionKind,
}

/// A NUMA node as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its processors; empty for pool memory.
    pub cpus: Range<u32>,
    /// Its memory, at most one run below the devices and one above.
    pub memory: Vec<Range<u64>>,
    /// How fast that is for a processor beside it.
    pub performance: Performance,
}

impl Node {
    /// Whether it is pool memory.
    pub fn is_pool(&self) -> bool {
        self.cpus.is_empty()
    }

    /// How much memory it has.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.memory.iter().map(|range| range.end - range.start).sum())
    }
}

/// Why a guest cannot look like that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Too many or too few of something.
    #[error("{what}: {count} is not possible: must be {min} to {max}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        count: u64,
        /// The fewest.
        min: u64,
        /// The most.
        max: u64,
    },
    /// Local memory that is too small or not whole MiB.
    #[error("memory: {memory} for node {node} is not possible: must be whole MiB, at least {min}")]
    Memory {
        /// How much.
        memory: Bytes,
        /// Where.
        node: usize,
        /// The least.
        min: Bytes,
    },
    /// More than an address can name.
    #[error("memory: the guest's ends at {end:#x}, past what {bits} bits of address reach on this machine")]
    PastAddresses {
        /// Where it ends.
        end: u64,
        /// What the processor has.
        bits: u8,
    },
}

/// The least local memory of the first node: a kernel and an initrd fit.
pub const LOCAL_MEMORY_MIN: Bytes = Bytes::mib(64);

/// Where everything lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The nodes in the order of their numbers, those with processors first.
    pub nodes: Vec<Node>,
    /// All memory, by address.
    pub regions: Vec<MemoryRegion>,
}

impl Layout {
    /// Finds a place for everything.
    ///
    /// # Errors
    /// [`ShapeError`]: too much or too little of something, or more than `address_bits` bits of address reach.
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

    /// How many processors the guest has.
    pub fn cpus(&self) -> u32 {
        self.nodes.last().map_or(0, |node| node.cpus.end)
    }

    /// The number by which a processor is known to interrupt controllers. Each node's are of a package of their own, as
    /// kernels take processors of one package for neighbours.
    pub fn apic_id(&self, cpu: u32) -> u32 {
        let node = self.node_of_cpu(cpu);
        node << self.package_shift() | (cpu - self.nodes[node as usize].cpus.start)
    }

    /// How many low bits of an APIC number say which processor of a package it is.
    pub fn package_shift(&self) -> u32 {
        let most = self.nodes.iter().map(|node| node.cpus.end - node.cpus.start).max().unwrap_or(1);
        most.next_power_of_two().trailing_zeros()
    }

    /// The node of a processor.
    pub fn node_of_cpu(&self, cpu: u32) -> u32 {
        let node = self.nodes.iter().position(|node| node.cpus.contains(&cpu));
        u32::try_from(node.unwrap_or(0)).expect("nodes are few")
    }

    /// Usable memory, by address, neighbours joined: what the kernel's map of memory says but for its lowest MiB.
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

    /// Up to where local memory below the devices reaches.
    pub fn low_memory_end(&self) -> u64 {
        self.memory().first().map_or(0, |range| range.end.min(MMIO_HOLE_START))
    }

    /// How long a processor of `from` waits for memory of `to`. Memory of another node with processors is as far as two
    /// hops through it; pool memory is behind the same switch for everybody.
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

    /// How much memory of `to` all processors of `from` can read together, in MB/s. Between sockets it is half.
    pub fn bandwidth_mbps(&self, from: usize, to: usize) -> u64 {
        let own = u64::from(self.nodes[to].performance.bandwidth_mbps);
        if from != to && !self.nodes[to].is_pool() { own / 2 } else { own }
    }

    /// The node with processors that is nearest to a node's memory: itself, and the first for pool memory, as every EMC is
    /// as near to it as to any other.
    pub fn nearest_initiator(&self, node: usize) -> usize {
        if self.nodes[node].is_pool() { 0 } else { node }
    }

    /// The distance from one node to another as a SLIT says it: 10 is a node's own memory, 20 twice as long a wait as for
    /// the first node's.
    pub fn distance(&self, from: usize, to: usize) -> u8 {
        if from == to {
            return DISTANCE_LOCAL;
        }
        let own = u64::from(self.nodes[0].performance.latency_ns);
        let distance = (self.latency_ns(from, to) * u64::from(DISTANCE_LOCAL) + own / 2) / own;
        u8::try_from(distance.clamp(DISTANCE_OTHER_MIN, DISTANCE_MAX)).expect("clamped to less")
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

/// The longest latency: an HMAT has 16 bits for it, and two hops are to fit.
const LATENCY_NS_MAX: u16 = 30_000;
/// The largest bandwidth: an HMAT has 16 bits for it, in tens of MB/s.
const BANDWIDTH_MBPS_MAX: u32 = 655_340;

#[cfg(test)]
mod tests;
