//! What a guest is that another VMM is to run: nodes, blocks of memory, and the words that all forms share. It knows no VMM.

use std::path::Path;

use host_memory::{Region, RegionPlace, VmMemory};
use units::{Bytes, SLICE};

use super::BackendError;
use crate::{
    config::{Config, Console},
    layout::{Layout, Local, Node, Performance, Pool, Shape},
    memory::MemoryBackendOptions,
    source::{self, EmcSlices, ReservedMemory},
};

/// As many bits of address as any processor has: how many this one has is found by the other VMM.
const ADDRESS_BITS: u8 = 52;
/// Decides whether memory that a kernel finds later can be used, and what for.
const MEMHP_DEFAULT_STATE: &str = "memhp_default_state";

/// Where a block of memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// The other VMM makes it.
    Allocated,
    /// In a file, from an offset on.
    File(String, u64),
}

/// Memory that another VMM is to map as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    /// What it is called.
    pub id: String,
    /// How much.
    pub bytes: Bytes,
    /// Where it is.
    pub location: Location,
    /// How it is taken.
    pub memory_options: MemoryBackendOptions,
}

/// A guest for another VMM.
#[derive(Clone, Debug)]
pub struct Guest {
    /// As checked, with absolute paths that are text.
    pub config: Config,
    /// Its nodes.
    pub layout: Layout,
    /// The memory of each node, in order: one block of those with processors, a block for each slice of the others.
    pub blocks: Vec<Vec<MemoryBlock>>,
    /// Which slices these are, with their epochs, for whoever wants to see that they are still the same.
    pub slices: Vec<(u32, u64)>,
}

impl Guest {
    /// Looks at the memory that the agent has for it, if it is to come from an agent.
    ///
    /// # Errors
    /// [`BackendError`]
    pub fn inspect(config: Config) -> Result<Self, BackendError> {
        match &config.agent {
            None => Self::standalone(config),
            Some(socket) => {
                let memory = source::with_agent(&config, socket, |agent, vm| agent.look(vm))?;
                Self::from_reservation(config, memory)
            }
        }
    }

    /// All of its memory is the other VMM's.
    fn standalone(config: Config) -> Result<Self, BackendError> {
        let checked = "checked: value without an agent";
        let sizes = config.local.iter().map(|node| node.size.expect(checked)).collect();
        let pool = config.pool.iter().map(|node| {
            let slices = node.size.expect(checked).as_slices().expect("checked: whole slices");
            let locations = vec![Location::Allocated; slices as usize];
            (node.performance, node.memory_options.clone(), locations)
        });
        let pool = pool.collect();
        Self::new(config, sizes, pool, Vec::new())
    }

    /// Its slices are those of a reservation.
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
        let count =
            |locations: &Vec<Location>| u32::try_from(locations.len()).expect("limited by whoever told");
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

    /// Its nodes by number, each with its memory.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        let both = self.layout.nodes.iter().zip(&self.blocks);
        both.enumerate().map(|(number, (node, blocks))| (number, node, &blocks[..]))
    }

    /// Those with processors.
    pub fn local(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| !node.is_pool())
    }

    /// Those without.
    pub fn pool(&self) -> impl Iterator<Item = (usize, &Node, &[MemoryBlock])> {
        self.nodes().filter(|(_, node, _)| node.is_pool())
    }

    /// From and to each node.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let nodes = 0..self.layout.nodes.len();
        nodes.clone().flat_map(move |from| nodes.clone().map(move |to| (from, to)))
    }

    /// From each node with processors to each node.
    pub fn initiators(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.pairs().filter(|(from, _)| !self.layout.nodes[*from].is_pool())
    }

    /// Packages, and processors of each: a package is of one node, as kernels take its processors for neighbours.
    pub fn packages(&self) -> (u32, u32) {
        let sizes: Vec<u32> = self.local().map(|(_, node, _)| node.cpus.end - node.cpus.start).collect();
        let alike = sizes.iter().all(|size| *size == sizes[0]);
        let cpus = self.layout.cpus();
        if alike { (cpus / sizes[0], sizes[0]) } else { (cpus, 1) }
    }

    /// What the kernel is told. One that finds pool memory as a device after it has started must be told to use it, and for
    /// nothing that cannot be moved.
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

    /// Without PCI a guest would not find the other VMM's disks and cards.
    ///
    /// # Errors
    /// It has some, and is told `pci=off`.
    pub fn check_pci(&self, vmm: &'static str) -> Result<(), BackendError> {
        let off = self.config.kernel.command_line.split_whitespace().any(|word| word == "pci=off");
        if off && self.config.disks.len() + self.config.nets.len() > 0 {
            let reason = "cmdline: pci=off hides its disks and cards, which are on PCI there".to_owned();
            return Err(BackendError::Unsupported { vmm, reason });
        }
        Ok(())
    }
}

/// Which slices these are.
pub(super) fn slice_epochs(memory: &VmMemory) -> Vec<(u32, u64)> {
    memory.regions.iter().filter_map(|region| region.slice).collect()
}

fn location(region: Region) -> Result<Location, BackendError> {
    match region.place {
        RegionPlace::Path(path) => Ok(Location::File(text(&path)?.to_owned(), region.offset)),
        RegionPlace::Descriptor(_) | RegionPlace::VmmsOwn => {
            unreachable!("slices that are looked at have paths")
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

/// A path as text.
pub(super) fn text(path: &Path) -> Result<&str, BackendError> {
    path.to_str().ok_or_else(|| BackendError::Path { path: path.to_owned() })
}

/// Whoever starts the other VMM may be elsewhere.
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
