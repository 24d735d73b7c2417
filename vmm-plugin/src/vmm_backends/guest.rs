//! VMM-independent description of a guest for another VMM: nodes, memory blocks and command line.

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

/// Maximum number of address bits of any processor; the other VMM checks the actual number.
const ADDRESS_BITS: u8 = 52;
/// Kernel parameter: state of memory that is added after boot.
const MEMHP_DEFAULT_STATE: &str = "memhp_default_state";

/// Location of a memory block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// Allocated by the other VMM.
    Allocated,
    /// In a file, at an offset in bytes.
    File(String, u64),
}

/// A block of memory that the other VMM maps as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    /// Name of the block.
    pub id: String,
    /// Size of the block.
    pub bytes: Bytes,
    /// Location of the block.
    pub location: Location,
    /// Options of the memory backend.
    pub memory_options: MemoryBackendOptions,
}

/// A guest for another VMM.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Checked configuration; all paths are absolute and UTF-8.
    pub config: Config,
    /// Layout of the guest.
    pub layout: Layout,
    /// Memory blocks of each node: one for a node with CPUs, one per slice for a pool node.
    pub blocks: Vec<Vec<MemoryBlock>>,
    /// Slices and their epochs, to detect a changed reservation.
    pub slices: Vec<(u32, u64)>,
}

impl Guest {
    /// Inspects the memory that the agent has for the VM, if it comes from an agent.
    ///
    /// # Errors
    /// See [`BackendError`].
    pub fn inspect(config: Config) -> Result<Self, BackendError> {
        match &config.agent {
            None => Self::standalone(config),
            Some(socket) => {
                let memory = source::with_agent(&config, socket, |agent, vm| agent.inspect(vm))?;
                Self::from_reservation(config, memory)
            }
        }
    }

    /// Returns a guest whose memory the other VMM allocates.
    fn standalone(config: Config) -> Result<Self, BackendError> {
        let checked = "checked: size is required without an agent";
        let sizes = config.local.iter().map(|node| node.size.expect(checked)).collect();
        let pool = config.pool.iter().map(|node| {
            let slices = node.size.expect(checked).as_slices().expect("checked: whole slices");
            let locations = vec![Location::Allocated; slices as usize];
            (node.performance, node.memory_options.clone(), locations)
        });
        let pool = pool.collect();
        Self::new(config, sizes, pool, Vec::new())
    }

    /// Returns a guest with the slices of a reservation.
    fn from_reservation(config: Config, memory: VmMemory) -> Result<Self, BackendError> {
        let slices = slice_epochs(&memory);
        let ReservedMemory { local, pool } = ReservedMemory::from_regions(&config, memory.regions)?;
        let sizes = source::local_sizes(&config, Bytes::new(local.bytes))?;
        let pool = pool.into_iter().map(|EmcSlices { performance, memory_options, slices }| {
            let locations = slices.into_iter().map(location).collect::<Result<_, _>>()?;
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
            u32::try_from(locations.len()).expect("the agent's reply limits the slices")
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
        let blocks = local.chain(pool).enumerate().map(|(node, parts): (usize, Vec<_>)| blocks(node, parts));
        let blocks = blocks.collect();
        Ok(Self { config: with_absolute_paths(config)?, layout, blocks, slices })
    }

    /// Returns the nodes by number, each with its memory blocks.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        let both = self.layout.nodes.iter().zip(&self.blocks);
        both.enumerate().map(|(number, (node, blocks))| (number, node, &blocks[..]))
    }

    /// Returns the nodes with CPUs.
    pub fn local(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| !node.is_pool())
    }

    /// Returns the nodes without CPUs.
    pub fn pool(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| node.is_pool())
    }

    /// Returns all pairs of nodes.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let nodes = 0..self.layout.nodes.len();
        nodes.clone().flat_map(move |from| nodes.clone().map(move |to| (from, to)))
    }

    /// Returns all pairs of a node with CPUs and any node.
    pub fn initiators(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.pairs().filter(|(from, _)| !self.layout.nodes[*from].is_pool())
    }

    /// Returns the number of packages and the CPUs per package. A package belongs to one node, as
    /// kernels assume.
    pub fn packages(&self) -> (u32, u32) {
        let sizes: Vec<u32> = self.local().map(|(_, node, _)| node.cpus.end - node.cpus.start).collect();
        let alike = sizes.iter().all(|size| *size == sizes[0]);
        let cpus = self.layout.cpus();
        if alike { (cpus / sizes[0], sizes[0]) } else { (cpus, 1) }
    }

    /// Returns the kernel command line. A kernel that finds pool memory as a memory device needs
    /// a parameter to online it as movable memory.
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

    /// Checks that the guest does not disable PCI, where other VMMs have disks and network devices.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] if the guest has such devices and `pci=off`.
    pub fn check_pci(&self, vmm: &'static str) -> Result<(), BackendError> {
        let off = self.config.kernel.command_line.split_whitespace().any(|word| word == "pci=off");
        if off && self.config.disks.len() + self.config.nets.len() > 0 {
            let reason =
                "cmdline: pci=off hides its disks and network devices, which are on PCI there".to_owned();
            return Err(BackendError::Unsupported { vmm, reason });
        }
        Ok(())
    }
}

/// Returns the slices of a reservation with their epochs.
pub(super) fn slice_epochs(memory: &VmMemory) -> Vec<(u32, u64)> {
    memory.regions.iter().filter_map(|region| region.slice).collect()
}

fn location(region: Region) -> Result<Location, BackendError> {
    match region.backing {
        RegionBacking::Path(path) => Ok(Location::File(text(&path)?.to_owned(), region.offset)),
        RegionBacking::Descriptor(_) | RegionBacking::VmmAllocated => {
            unreachable!("inspected slices have paths")
        }
    }
}

fn blocks(node: usize, parts: Vec<(Bytes, Location, MemoryBackendOptions)>) -> Vec<MemoryBlock> {
    let block = |(at, (bytes, location, memory_options))| MemoryBlock {
        id: format!("node{node}-{at}"),
        bytes,
        location,
        memory_options,
    };
    parts.into_iter().enumerate().map(block).collect()
}

/// Returns a path as text.
pub(super) fn text(path: &Path) -> Result<&str, BackendError> {
    path.to_str().ok_or_else(|| BackendError::Path { path: path.to_owned() })
}

/// Makes all paths absolute: the other VMM may be started in another directory.
fn with_absolute_paths(mut config: Config) -> Result<Config, BackendError> {
    let disks = config.disks.iter_mut().map(|disk| &mut disk.path);
    let console = match &mut config.console {
        Console::File(path) => Some(path),
        Console::Terminal | Console::Null => None,
    };
    let kernel = [&mut config.kernel.kernel].into_iter().chain(config.kernel.initrd.as_mut());
    for path in kernel.chain(disks).chain(console) {
        let wrong = || BackendError::Path { path: path.clone() };
        let there = std::path::absolute(&*path).map_err(|_| wrong())?;
        *path = text(&there)?.into();
    }
    Ok(config)
}
