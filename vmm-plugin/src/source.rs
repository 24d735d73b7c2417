//! Acquires a guest's memory from the rack, through this host's agent, or from this host's
//! operating system. The result is a shape and the files behind it; `memory` maps them.

use std::{collections::BTreeMap, io, path::Path, sync::Arc};

use host_memory::{Client, ClientError, Region};
use proto::v1::MemoryForm;
use units::{Bytes, SLICE};

use crate::{
    config::{Config, LocalNode, PoolNode},
    layout::{Local, MMIO_HOLE_START, Performance, Pool, Shape},
    memory::{Backing, Backings, MemoryBackendOptions, Owner, create_memfd},
};

/// Error returned when a guest's memory cannot be acquired.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The agent refused or did not answer.
    #[error("no memory for VM {vm} through {socket}")]
    Agent {
        /// Name of the VM.
        vm: String,
        /// Socket of the agent.
        socket: String,
        /// The underlying error.
        #[source]
        error: ClientError,
    },
    /// The agent's reply does not match the reservation or the options.
    #[error("the memory of VM {vm} is not usable: {reason}")]
    Unusable {
        /// Name of the VM.
        vm: String,
        /// Description of the mismatch.
        reason: String,
    },
    /// The node sizes on the command line do not add up to the reserved local memory.
    #[error(
        "memory: the nodes have {requested} in total, but {reserved} of local memory are reserved for VM {vm}"
    )]
    Sizes {
        /// Name of the VM.
        vm: String,
        /// Sum of the node sizes.
        requested: Bytes,
        /// Reserved local memory.
        reserved: Bytes,
    },
    /// The kernel cannot create a memory file.
    #[error("memory: cannot allocate {bytes} of {pages}{hint}")]
    CreateMemfd {
        /// Size of the file.
        bytes: Bytes,
        /// Kind of pages.
        pages: String,
        /// Advice appended to the message; may be empty.
        hint: &'static str,
        /// The underlying error.
        #[source]
        errno: io::Error,
    },
}

/// Shape of a guest and its memory files.
#[derive(Debug)]
pub struct Source {
    /// Nodes and their sizes.
    pub shape: Shape,
    /// Memory files of the nodes.
    pub backings: Backings,
}

/// Acquires the memory of a guest. With an agent, this process becomes the VM's registered process.
///
/// # Errors
/// See [`SourceError`].
pub fn acquire(config: &Config) -> Result<Source, SourceError> {
    match &config.agent {
        Some(socket) => from_agent(config, socket),
        None => from_host(config),
    }
}

/// Returns the shape of a guest whose memory will come from an agent, without attaching to it: a
/// reservation that does not match stays as it is.
///
/// # Errors
/// [`SourceError::Agent`] if the agent does not answer, and the others if the reservation does not
/// match the options.
pub fn preview(config: &Config) -> Result<Shape, SourceError> {
    let Some(socket) = &config.agent else { return Ok(placeholder_shape(config)) };
    let inspected = with_agent(config, socket, |agent, vm| match agent.inspect(vm) {
        Ok(memory) => Ok(Some(memory)),
        Err(ClientError::Rejected { .. }) => Ok(None),
        Err(error) => Err(error),
    });
    // Some backends show a VM's memory to the agent's own user only. Any other refusal is repeated
    // by attach.
    let Some(memory) = inspected? else { return Ok(placeholder_shape(config)) };
    let ReservedMemory { local, pool } = ReservedMemory::from_regions(config, memory.regions)?;
    let sizes = local_sizes(config, Bytes::new(local.bytes))?;
    let locals = config.local.iter().zip(sizes);
    Ok(Shape {
        local: locals.map(|(node, memory)| local_shape(node, memory)).collect(),
        pool: pool
            .iter()
            .map(|EmcSlices { performance, slices, .. }| pool_shape(*performance, slices.len()))
            .collect(),
    })
}

/// Returns the assumed shape of a guest before its memory is known: no pool memory, and local
/// memory up to the MMIO hole.
fn placeholder_shape(config: &Config) -> Shape {
    let memory = |node: &LocalNode| node.size.unwrap_or(Bytes::new(MMIO_HOLE_START));
    Shape {
        local: config.local.iter().map(|node| local_shape(node, memory(node))).collect(),
        pool: Vec::new(),
    }
}

fn local_shape(node: &LocalNode, memory: Bytes) -> Local {
    Local { cpus: node.cpus, memory, performance: node.performance }
}

fn pool_shape(performance: Performance, slices: usize) -> Pool {
    Pool { slices: u32::try_from(slices).expect("the agent's reply limits the slices"), performance }
}

fn from_host(config: &Config) -> Result<Source, SourceError> {
    let mut source = Source::empty();
    for node in &config.local {
        let bytes = node.size.expect("checked: size is required without an agent");
        let backing = host_backing("local", bytes, &node.memory_options)?;
        source.add_local(node, bytes, backing, node.memory_options.clone());
    }
    for node in &config.pool {
        let bytes = node.size.expect("checked: size is required without an agent");
        let whole = host_backing("pool", bytes, &node.memory_options)?;
        let slices = bytes.as_slices().expect("checked: whole slices");
        let slice = |n| Backing { offset: Bytes::slices(n).get(), ..whole.clone() };
        source.add_pool(node.performance, (0..slices).map(slice).collect(), node.memory_options.clone());
    }
    Ok(source)
}

fn host_backing(
    name: &str,
    bytes: Bytes,
    memory_options: &MemoryBackendOptions,
) -> Result<Backing, SourceError> {
    let failed = |errno| {
        let pages =
            memory_options.hugepage_size.map_or("ordinary pages".into(), |size| format!("pages of {size}"));
        let hint = if memory_options.hugepage_size.is_some() {
            "; does this host have huge pages of that size?"
        } else {
            ""
        };
        SourceError::CreateMemfd { bytes, pages, hint, errno }
    };
    let file = create_memfd(name, bytes, memory_options.hugepage_size).map_err(failed)?;
    Ok(Backing { file: Arc::new(file), offset: 0, owner: Owner::Local })
}

fn from_agent(config: &Config, socket: &Path) -> Result<Source, SourceError> {
    let memory = with_agent(config, socket, |agent, vm| agent.attach(vm, MemoryForm::Descriptors))?;
    let ReservedMemory { local, pool } = ReservedMemory::from_regions(config, memory.regions)?;
    let mut source = Source::empty();
    source.split_local(config, local)?;
    for EmcSlices { performance, memory_options, slices } in pool {
        let backings = slices.into_iter().map(|region| {
            let owner = Owner::Slice { slice: slice_number(&region), emc: region.emc.clone() };
            backing(region, owner)
        });
        let backings = backings.collect::<Result<_, _>>().map_err(|reason| unusable(config, reason))?;
        source.add_pool(performance, backings, memory_options);
    }
    Ok(source)
}

/// Connects to the agent and sends a request about the VM's memory.
///
/// # Errors
/// See [`SourceError::Agent`].
pub fn with_agent<T>(
    config: &Config,
    socket: &Path,
    request: impl FnOnce(Client, &str) -> Result<T, ClientError>,
) -> Result<T, SourceError> {
    let vm = config.vm.as_str();
    Client::connect(socket).and_then(|agent| request(agent, vm)).map_err(|error| SourceError::Agent {
        vm: vm.to_owned(),
        socket: socket.display().to_string(),
        error,
    })
}

fn unusable(config: &Config, reason: String) -> SourceError {
    SourceError::Unusable { vm: config.vm.to_string(), reason }
}

fn slice_number(region: &Region) -> u32 {
    region.slice.map_or(0, |(slice, _)| slice)
}

/// A VM's reserved memory, sorted by node.
#[derive(Debug)]
pub struct ReservedMemory {
    /// Local memory.
    pub local: Region,
    /// Pool memory, one entry per EMC.
    pub pool: Vec<EmcSlices>,
}

/// The slices of one EMC and their options.
#[derive(Debug)]
pub struct EmcSlices {
    /// Latency and bandwidth.
    pub performance: Performance,
    /// Options of the memory backend.
    pub memory_options: MemoryBackendOptions,
    /// The slices, by number.
    pub slices: Vec<Region>,
}

impl ReservedMemory {
    /// Sorts an agent's regions by node and applies the options of `config`.
    ///
    /// # Errors
    /// See [`SourceError::Unusable`].
    pub fn from_regions(config: &Config, regions: Vec<Region>) -> Result<Self, SourceError> {
        let (slices, local): (Vec<_>, Vec<_>) =
            regions.into_iter().partition(|region| region.slice.is_some());
        let [local] = <[Region; 1]>::try_from(local)
            .map_err(|not| unusable(config, format!("{} regions of local memory", not.len())))?;
        let mut by_emc: BTreeMap<String, Vec<Region>> = BTreeMap::new();
        for region in slices {
            if region.bytes != SLICE.get() {
                let reason = format!("slice {} has {} bytes", slice_number(&region), region.bytes);
                return Err(unusable(config, reason));
            }
            by_emc.entry(region.emc.clone()).or_default().push(region);
        }
        let mut requested = config.pool.iter().filter_map(|node| node.emc.as_ref());
        if let Some(emc) = requested.find(|emc| !by_emc.contains_key(*emc)) {
            return Err(unusable(config, format!("pool: emc={emc}: the VM has no slice of that EMC")));
        }
        let emc_slices = |(emc, slices): (String, _)| {
            let options = config.pool.iter().find(|node| node.emc.as_ref() == Some(&emc));
            let options = options.or_else(|| config.pool.iter().find(|node| node.emc.is_none()));
            let (performance, memory_options) = options
                .map_or((Performance::POOL, MemoryBackendOptions::default()), |node: &PoolNode| {
                    (node.performance, node.memory_options.clone())
                });
            EmcSlices {
                performance,
                memory_options: MemoryBackendOptions { shared: true, hugepage_size: None, ..memory_options },
                slices,
            }
        };
        Ok(Self { local, pool: by_emc.into_iter().map(emc_slices).collect() })
    }
}

/// Returns the size of each node with vCPUs.
///
/// # Errors
/// See [`SourceError::Sizes`].
pub fn local_sizes(config: &Config, reserved: Bytes) -> Result<Vec<Bytes>, SourceError> {
    let sizes: Vec<Bytes> = config.local.iter().map(|node| node.size.unwrap_or(reserved)).collect();
    let requested: Bytes = sizes.iter().copied().sum();
    if requested == reserved {
        Ok(sizes)
    } else {
        Err(SourceError::Sizes { vm: config.vm.to_string(), requested, reserved })
    }
}

fn backing(region: Region, owner: Owner) -> Result<Backing, String> {
    let offset = region.offset;
    let file = region.into_file().map_err(|error| format!("cannot open it: {error}"))?;
    Ok(Backing { file: Arc::new(file), offset, owner })
}

impl Source {
    fn empty() -> Self {
        Self { shape: Shape { local: Vec::new(), pool: Vec::new() }, backings: Backings::default() }
    }

    fn add_local(
        &mut self,
        node: &LocalNode,
        memory: Bytes,
        backing: Backing,
        memory_options: MemoryBackendOptions,
    ) {
        self.shape.local.push(local_shape(node, memory));
        self.backings.local.push((backing, memory_options));
    }

    fn add_pool(
        &mut self,
        performance: Performance,
        slices: Vec<Backing>,
        memory_options: MemoryBackendOptions,
    ) {
        self.shape.pool.push(pool_shape(performance, slices.len()));
        self.backings.pool.push((slices, memory_options));
    }

    /// Splits the reserved local memory, which is one file, among the nodes with vCPUs. Nodes with
    /// huge pages or private memory get files of this process instead: the agent measures its own
    /// file, which would seem unused.
    fn split_local(&mut self, config: &Config, region: Region) -> Result<(), SourceError> {
        let sizes = local_sizes(config, Bytes::new(region.bytes))?;
        let whole = backing(region, Owner::Local).map_err(|reason| unusable(config, reason))?;
        let mut offset = whole.offset;
        for (node, bytes) in config.local.iter().zip(sizes) {
            let part = if node.memory_options.hugepage_size.is_some() || !node.memory_options.shared {
                host_backing("local", bytes, &node.memory_options)?
            } else {
                Backing { offset, ..whole.clone() }
            };
            self.add_local(node, bytes, part, node.memory_options.clone());
            offset += bytes.get();
        }
        Ok(())
    }
}
