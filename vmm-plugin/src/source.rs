//! Acquires the memory of a guest from this host's agent, or from this host's operating system. The
//! result is the shape of the guest and its memory files, which `memory` maps.

use std::{collections::BTreeMap, io, path::Path, sync::Arc};

use host_memory::{Client, ClientError, Region};
use proto::v1::MemoryForm;
use units::{Bytes, SLICE};

use crate::{
    config::{Config, LocalNode, PoolNode},
    layout::{Local, MMIO_HOLE_START, Performance, Pool, Shape},
    memory::{MemoryBackendOptions, MemoryBacking, MemoryBackings, MemoryOwner, SpareMemory, create_memfd},
};

/// Error returned when the memory of a guest cannot be acquired.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The agent rejected the request or did not respond.
    #[error("cannot get the memory of VM {vm} from the agent at {socket}")]
    Agent {
        /// Name of the VM.
        vm: String,
        /// Path of the agent's socket.
        socket: String,
        /// Error returned by the agent or the connection.
        #[source]
        error: ClientError,
    },
    /// The agent's response is invalid, or does not match the options.
    #[error("the memory of VM {vm} is not usable: {reason}")]
    Unusable {
        /// Name of the VM.
        vm: String,
        /// Why the memory cannot be used.
        reason: String,
    },
    /// The sum of the node sizes on the command line differs from the reserved local memory.
    #[error(
        "--memory: the nodes have {requested} in total, but {reserved} of local memory are reserved for VM {vm}"
    )]
    Sizes {
        /// Name of the VM.
        vm: String,
        /// Sum of the node sizes.
        requested: Bytes,
        /// Size of the reserved local memory.
        reserved: Bytes,
    },
    /// A memory file cannot be created.
    #[error("memory: cannot allocate {bytes} of {pages}{hint}")]
    CreateMemfd {
        /// Size of the file.
        bytes: Bytes,
        /// Kind of pages, such as "pages of 2MiB".
        pages: String,
        /// Advice that is appended to the message, or an empty string.
        hint: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
}

/// Shape of a guest, with the memory files.
#[derive(Debug)]
pub struct Source {
    /// Nodes of the guest and their sizes.
    pub shape: Shape,
    /// Memory files of the nodes.
    pub backings: MemoryBackings,
}

/// Acquires the memory of a guest. With an agent, the agent registers this process as the process
/// of the VM, with the absolute path of its control socket.
///
/// # Errors
/// [`SourceError`] if the memory is not available or does not match the options.
pub fn acquire_memory(config: &Config, control_socket: &Path) -> Result<Source, SourceError> {
    match &config.agent {
        Some(socket) => acquire_from_agent(config, socket, control_socket),
        None => allocate_from_host(config),
    }
}

/// Returns the shape that a guest will have, without attaching to the reserved memory. If the
/// reservation does not match the options, the reservation is thus not changed.
///
/// # Errors
/// [`SourceError::Agent`] if the agent does not respond. [`SourceError::Unusable`] or
/// [`SourceError::Sizes`] if the reservation does not match the options.
pub fn preview_shape(config: &Config) -> Result<Shape, SourceError> {
    let Some(socket) = &config.agent else { return Ok(placeholder_shape(config)) };
    let inspected = with_agent(config, socket, |agent, vm| match agent.inspect(vm) {
        Ok(memory) => Ok(Some(memory)),
        Err(ClientError::Rejected { .. }) => Ok(None),
        Err(error) => Err(error),
    });
    // The agent rejects an inspection by any user but its own. An error with another cause is
    // returned again when the process attaches to the memory.
    let Some(memory) = inspected? else { return Ok(placeholder_shape(config)) };
    let ReservedMemory { local, pool } = ReservedMemory::from_regions(config, memory.regions)?;
    let sizes = local_node_sizes(config, Bytes::new(local.bytes))?;
    let locals = config.local.iter().zip(sizes);
    Ok(Shape {
        local: locals.map(|(node, memory)| local_shape(node, memory)).collect(),
        pool: pool
            .iter()
            .map(|EmcSlices { performance, slices, .. }| pool_shape(*performance, slices.len()))
            .collect(),
    })
}

/// Returns an assumed shape for a guest whose reservation cannot be inspected: no pool memory, and
/// local memory up to the MMIO hole unless the options define a size.
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
    Pool { slices: u32::try_from(slices).expect("the number of slices is limited"), performance }
}

fn allocate_from_host(config: &Config) -> Result<Source, SourceError> {
    let mut source = Source::empty();
    for node in &config.local {
        let bytes = node.size.expect("the size is checked to be set without an agent");
        let backing = allocate_backing("local", bytes, &node.memory_options)?;
        source.add_local_node(node, bytes, backing, node.memory_options.clone());
    }
    for node in &config.pool {
        let bytes = node.size.expect("the size is checked to be set without an agent");
        let whole = allocate_backing("pool", bytes, &node.memory_options)?;
        let slices = bytes.as_slices().expect("the size is checked to be whole slices");
        let slice = |n| MemoryBacking { offset: Bytes::slices(n).get(), ..whole.clone() };
        source.add_pool_node(node.performance, (0..slices).map(slice).collect(), node.memory_options.clone());
    }
    let pool_bytes = config.pool.iter().filter_map(|node| node.size).sum();
    source.backings.spare = allocate_spare(config, pool_bytes)?;
    Ok(source)
}

/// Creates spare local memory for all pool memory of a guest without an agent. The memory has no
/// pages until it is used.
fn allocate_spare(config: &Config, bytes: Bytes) -> Result<Option<SpareMemory>, SourceError> {
    if bytes.get() == 0 {
        return Ok(None);
    }
    let backing = allocate_backing("spare", bytes, &MemoryBackendOptions::default())?;
    Ok(Some(spare_memory(config, &backing, bytes.get())))
}

fn spare_memory(config: &Config, backing: &MemoryBacking, bytes: u64) -> SpareMemory {
    let host_numa_node = config.local.first().and_then(|node| node.memory_options.host_numa_node);
    SpareMemory { file: Arc::clone(&backing.file), offset: backing.offset, bytes, host_numa_node }
}

fn allocate_backing(
    name: &str,
    bytes: Bytes,
    memory_options: &MemoryBackendOptions,
) -> Result<MemoryBacking, SourceError> {
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
    Ok(MemoryBacking { file: Arc::new(file), offset: 0, owner: MemoryOwner::Local })
}

fn acquire_from_agent(config: &Config, socket: &Path, control_socket: &Path) -> Result<Source, SourceError> {
    // The agent does not need the control socket, and its protocol supports only UTF-8.
    let control_socket = control_socket.to_str().map(Path::new);
    let memory = with_agent(config, socket, |agent, vm| {
        agent.attach_with_control_socket(vm, MemoryForm::Descriptors, control_socket)
    })?;
    let ReservedMemory { local, pool } = ReservedMemory::from_regions(config, memory.regions)?;
    let mut source = Source::empty();
    source.split_local_memory(config, local)?;
    for EmcSlices { performance, memory_options, slices } in pool {
        let backings = slices.into_iter().map(|region| {
            let owner = MemoryOwner::Slice { slice: slice_number(&region), emc: region.emc.clone() };
            to_backing(region, owner)
        });
        let backings = backings.collect::<Result<_, _>>().map_err(|reason| unusable_error(config, reason))?;
        source.add_pool_node(performance, backings, memory_options);
    }
    Ok(source)
}

/// Connects to the agent and sends a request about the memory of the guest's VM.
///
/// # Errors
/// [`SourceError::Agent`] if the agent rejects the request or does not respond.
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

fn unusable_error(config: &Config, reason: String) -> SourceError {
    SourceError::Unusable { vm: config.vm.to_string(), reason }
}

fn slice_number(region: &Region) -> u32 {
    region.slice.map_or(0, |(slice, _)| slice)
}

/// Reserved memory of a VM, grouped by node.
#[derive(Debug)]
pub struct ReservedMemory {
    /// Local memory, always one region.
    pub local: Region,
    /// Pool memory, one entry per EMC in order of the EMC names.
    pub pool: Vec<EmcSlices>,
}

/// Reserved slices of one EMC, and the options that apply to the slices.
#[derive(Debug)]
pub struct EmcSlices {
    /// Latency and bandwidth of the slices, as reported to the guest.
    pub performance: Performance,
    /// Options for mapping the slices.
    pub memory_options: MemoryBackendOptions,
    /// Slices of the EMC, in the order of the agent's response.
    pub slices: Vec<Region>,
}

impl ReservedMemory {
    /// Groups the regions of an agent's response by node, and applies the options of `config`.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] if the regions are invalid or do not match the options.
    pub fn from_regions(config: &Config, regions: Vec<Region>) -> Result<Self, SourceError> {
        let (slices, local): (Vec<_>, Vec<_>) =
            regions.into_iter().partition(|region| region.slice.is_some());
        let [local] = <[Region; 1]>::try_from(local).map_err(|regions| {
            unusable_error(config, format!("{} regions of local memory, must be 1", regions.len()))
        })?;
        let mut by_emc: BTreeMap<String, Vec<Region>> = BTreeMap::new();
        for region in slices {
            if region.bytes != SLICE.get() {
                let reason =
                    format!("slice {} has {} bytes, must be {SLICE}", slice_number(&region), region.bytes);
                return Err(unusable_error(config, reason));
            }
            by_emc.entry(region.emc.clone()).or_default().push(region);
        }
        let mut requested = config.pool.iter().filter_map(|node| node.emc.as_ref());
        if let Some(emc) = requested.find(|emc| !by_emc.contains_key(*emc)) {
            return Err(unusable_error(
                config,
                format!("--pool: emc={emc}: the VM has no slice of that EMC"),
            ));
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

/// Returns the size of each node with vCPUs. A node without a size gets all reserved memory.
///
/// # Errors
/// [`SourceError::Sizes`] if the sum of the sizes differs from `reserved`.
pub fn local_node_sizes(config: &Config, reserved: Bytes) -> Result<Vec<Bytes>, SourceError> {
    let sizes: Vec<Bytes> = config.local.iter().map(|node| node.size.unwrap_or(reserved)).collect();
    let requested: Bytes = sizes.iter().copied().sum();
    if requested == reserved {
        Ok(sizes)
    } else {
        Err(SourceError::Sizes { vm: config.vm.to_string(), requested, reserved })
    }
}

fn to_backing(region: Region, owner: MemoryOwner) -> Result<MemoryBacking, String> {
    let offset = region.offset;
    let file = region.into_file().map_err(|error| format!("cannot open a memory file: {error}"))?;
    Ok(MemoryBacking { file: Arc::new(file), offset, owner })
}

impl Source {
    fn empty() -> Self {
        Self { shape: Shape { local: Vec::new(), pool: Vec::new() }, backings: MemoryBackings::default() }
    }

    fn add_local_node(
        &mut self,
        node: &LocalNode,
        memory: Bytes,
        backing: MemoryBacking,
        memory_options: MemoryBackendOptions,
    ) {
        self.shape.local.push(local_shape(node, memory));
        self.backings.local.push((backing, memory_options));
    }

    fn add_pool_node(
        &mut self,
        performance: Performance,
        slices: Vec<MemoryBacking>,
        memory_options: MemoryBackendOptions,
    ) {
        self.shape.pool.push(pool_shape(performance, slices.len()));
        self.backings.pool.push((slices, memory_options));
    }

    /// Divides the reserved local memory, which is one file, among the nodes with vCPUs. A node
    /// with huge pages or private memory gets a file that this process creates. The agent measures
    /// usage from its own file, so the agent reports no usage for such a node.
    fn split_local_memory(&mut self, config: &Config, region: Region) -> Result<(), SourceError> {
        let sizes = local_node_sizes(config, Bytes::new(region.bytes))?;
        let (bytes, spare_bytes) = (region.bytes, region.spare_bytes);
        let whole =
            to_backing(region, MemoryOwner::Local).map_err(|reason| unusable_error(config, reason))?;
        let mut offset = whole.offset;
        for (node, bytes) in config.local.iter().zip(sizes) {
            let part = if node.memory_options.hugepage_size.is_some() || !node.memory_options.shared {
                allocate_backing("local", bytes, &node.memory_options)?
            } else {
                MemoryBacking { offset, ..whole.clone() }
            };
            self.add_local_node(node, bytes, part, node.memory_options.clone());
            offset += bytes.get();
        }
        let end = MemoryBacking { offset: whole.offset + bytes, ..whole };
        self.backings.spare = (spare_bytes > 0).then(|| spare_memory(config, &end, spare_bytes));
        Ok(())
    }
}
