//! Description of a guest that runs under another VMM: nodes, memory blocks and kernel command
//! line. The description does not depend on the VMM.

use std::path::Path;

use host_memory::{Region, RegionBacking, VmMemory};
use units::{Bytes, SLICE};

use super::BackendError;
use crate::{
    config::{Config, Console},
    layout::{Layout, Local, Node, Performance, Pool, Shape},
    memory::MemoryBackendOptions,
    source::{self, EmcSlices, ReservedMemory},
};

/// Number of guest-physical address bits: the maximum of any processor. The VMM that runs the guest
/// checks the actual limit of the host.
const ADDRESS_BITS: u8 = 52;
/// Kernel parameter that sets the state of memory that is added after boot.
const MEMHP_DEFAULT_STATE: &str = "memhp_default_state";

/// Location of the memory of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// The VMM that runs the guest allocates the memory; no file is given.
    Allocated,
    /// The memory is in the file with this path, at this offset in bytes.
    File(String, u64),
}

/// Block of guest memory that a VMM maps as one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    /// Name of the block, unique in the guest.
    pub id: String,
    /// Size of the memory.
    pub bytes: Bytes,
    /// Location of the memory.
    pub location: Location,
    /// Options for allocating and mapping the memory.
    pub memory_options: MemoryBackendOptions,
}

/// Guest that runs under another VMM.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Checked configuration. All paths are absolute and UTF-8.
    pub config: Config,
    /// NUMA nodes and memory regions of the guest.
    pub layout: Layout,
    /// Memory blocks of each node: one block for a node with CPUs, and one block per slice for a
    /// pool node.
    pub blocks: Vec<Vec<MemoryBlock>>,
    /// Number and epoch of each slice, for detecting that the reservation has changed.
    pub slices: Vec<(u32, u64)>,
}

impl Guest {
    /// Creates the description of a guest. With an agent, inspects the reserved memory of the VM.
    ///
    /// # Errors
    /// [`BackendError`] if the memory cannot be inspected or does not match the options.
    pub fn inspect(config: Config) -> Result<Self, BackendError> {
        match &config.agent {
            None => Self::without_agent(config),
            Some(socket) => {
                let memory = source::with_agent(&config, socket, |agent, vm| agent.inspect(vm))?;
                Self::from_reservation(config, memory)
            }
        }
    }

    /// Returns the description of a guest without an agent. The VMM that runs the guest allocates
    /// all memory.
    fn without_agent(config: Config) -> Result<Self, BackendError> {
        let checked = "the size is checked to be set without an agent";
        let sizes = config.local.iter().map(|node| node.size.expect(checked)).collect();
        let pool = config.pool.iter().map(|node| {
            let slices =
                node.size.expect(checked).as_slices().expect("the size is checked to be whole slices");
            let locations = vec![Location::Allocated; slices as usize];
            (node.performance, node.memory_options.clone(), locations)
        });
        let pool = pool.collect();
        Self::new(config, sizes, pool, Vec::new())
    }

    /// Returns the description of a guest with the slices of a reservation.
    fn from_reservation(config: Config, memory: VmMemory) -> Result<Self, BackendError> {
        let slices = slice_epochs(&memory);
        let ReservedMemory { local, pool } = ReservedMemory::from_regions(&config, memory.regions)?;
        let sizes = source::local_node_sizes(&config, Bytes::new(local.bytes))?;
        let pool = pool.into_iter().map(|EmcSlices { performance, memory_options, slices }| {
            let locations = slices.into_iter().map(to_location).collect::<Result<_, _>>()?;
            Ok((performance, memory_options, locations))
        });
        let pool = pool.collect::<Result<_, BackendError>>()?;
        Self::new(config, sizes, pool, slices)
    }

    pub(super) fn new(
        config: Config,
        sizes: Vec<Bytes>,
        pool: Vec<(Performance, MemoryBackendOptions, Vec<Location>)>,
        slices: Vec<(u32, u64)>,
    ) -> Result<Self, BackendError> {
        let locals = config.local.iter().zip(&sizes);
        let local = locals.map(|(node, memory)| Local {
            cpus: node.cpus,
            memory: *memory,
            performance: node.performance,
        });
        let count = |locations: &Vec<Location>| {
            u32::try_from(locations.len()).expect("the number of slices is limited")
        };
        let shape = Shape {
            local: local.collect(),
            pool: pool
                .iter()
                .map(|(performance, _, locations)| Pool {
                    slices: count(locations),
                    performance: *performance,
                })
                .collect(),
        };
        let layout = Layout::new(&shape, ADDRESS_BITS)?;
        let local = config
            .local
            .iter()
            .zip(sizes)
            .map(|(node, bytes)| vec![(bytes, Location::Allocated, node.memory_options.clone())]);
        let pool = pool.into_iter().map(|(_, memory_options, locations)| {
            locations.into_iter().map(|location| (SLICE, location, memory_options.clone())).collect()
        });
        let blocks =
            local.chain(pool).enumerate().map(|(node, parts): (usize, Vec<_>)| create_blocks(node, parts));
        let blocks = blocks.collect();
        Ok(Self { config: with_absolute_paths(config)?, layout, blocks, slices })
    }

    /// Returns each node with its number and its memory blocks, in order of the numbers.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        let nodes = self.layout.nodes.iter().zip(&self.blocks);
        nodes.enumerate().map(|(number, (node, blocks))| (number, node, &blocks[..]))
    }

    /// Returns the nodes with CPUs, in the form of [`Self::nodes`].
    pub fn local_nodes(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| !node.is_pool())
    }

    /// Returns the nodes without CPUs, in the form of [`Self::nodes`].
    pub fn pool_nodes(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| node.is_pool())
    }

    /// Returns all ordered pairs of node numbers.
    pub fn node_pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let nodes = 0..self.layout.nodes.len();
        nodes.clone().flat_map(move |from| nodes.clone().map(move |to| (from, to)))
    }

    /// Returns all ordered pairs of node numbers whose first node has CPUs.
    pub fn initiator_pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.node_pairs().filter(|(from, _)| !self.layout.nodes[*from].is_pool())
    }

    /// Returns the number of packages and the number of CPUs per package. All CPUs of a package are
    /// in the same node, as kernels assume. If nodes have different numbers of CPUs, each CPU is a
    /// package.
    pub fn packages(&self) -> (u32, u32) {
        let sizes: Vec<u32> =
            self.local_nodes().map(|(_, node, _)| node.cpus.end - node.cpus.start).collect();
        let are_sizes_equal = sizes.iter().all(|size| *size == sizes[0]);
        let cpus = self.layout.cpus();
        if are_sizes_equal { (cpus / sizes[0], sizes[0]) } else { (cpus, 1) }
    }

    /// Returns the kernel command line. If the guest has memory devices, adds the parameter that
    /// brings their memory online as movable memory, unless this parameter is already set.
    pub fn command_line(&self, has_memory_devices: bool) -> String {
        let value = &self.config.kernel.command_line;
        let is_unset =
            !value.split_whitespace().any(|word| word.split('=').next() == Some(MEMHP_DEFAULT_STATE));
        if has_memory_devices && is_unset {
            format!("{value} {MEMHP_DEFAULT_STATE}=online_movable")
        } else {
            value.clone()
        }
    }

    /// Checks that the guest's kernel can find its disks and network devices. VMMs other than this
    /// one attach them to the PCI bus.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the guest has disks or network devices and its command line
    /// contains `pci=off`.
    pub fn check_pci(&self, vmm: &'static str) -> Result<(), BackendError> {
        let off = self.config.kernel.command_line.split_whitespace().any(|word| word == "pci=off");
        if off && self.config.disks.len() + self.config.nets.len() > 0 {
            let reason =
                "--cmdline: pci=off hides its disks and network devices, which this VMM attaches to PCI"
                    .to_owned();
            return Err(BackendError::Unsupported { vmm, reason });
        }
        Ok(())
    }
}

/// Returns the number and the epoch of each slice of a reservation.
pub(super) fn slice_epochs(memory: &VmMemory) -> Vec<(u32, u64)> {
    memory.regions.iter().filter_map(|region| region.slice).collect()
}

fn to_location(region: Region) -> Result<Location, BackendError> {
    match region.backing {
        RegionBacking::Path(path) => Ok(Location::File(path_text(&path)?.to_owned(), region.offset)),
        RegionBacking::Descriptor(_) | RegionBacking::VmmAllocated => {
            unreachable!("inspected slices have paths")
        }
    }
}

fn create_blocks(node: usize, parts: Vec<(Bytes, Location, MemoryBackendOptions)>) -> Vec<MemoryBlock> {
    let block = |(at, (bytes, location, memory_options))| MemoryBlock {
        id: format!("node{node}-{at}"),
        bytes,
        location,
        memory_options,
    };
    parts.into_iter().enumerate().map(block).collect()
}

/// Returns a path as text, or [`BackendError::Path`] if the path is not UTF-8.
pub(super) fn path_text(path: &Path) -> Result<&str, BackendError> {
    path.to_str().ok_or_else(|| BackendError::Path { path: path.to_owned() })
}

/// Makes all paths absolute, because the VMM may be started in another directory.
fn with_absolute_paths(mut config: Config) -> Result<Config, BackendError> {
    let disks = config.disks.iter_mut().map(|disk| &mut disk.path);
    let console = match &mut config.console {
        Console::File(path) => Some(path),
        Console::Terminal | Console::Null => None,
    };
    let kernel = [&mut config.kernel.kernel].into_iter().chain(config.kernel.initrd.as_mut());
    for path in kernel.chain(disks).chain(console) {
        let path_error = || BackendError::Path { path: path.clone() };
        let absolute = std::path::absolute(&*path).map_err(|_| path_error())?;
        *path = path_text(&absolute)?.into();
    }
    Ok(config)
}
