//! Where a guest's memory comes from: the rack, by way of the agent of this host, or this host's operating system. The answer
//! is a shape and the files behind it.

use std::{collections::BTreeMap, io, path::Path, sync::Arc};

use host_memory::{Client, ClientError, Region};
use proto::v1::MemoryForm;
use units::{Bytes, SLICE};

use crate::{
    config::{Config, LocalNode, PoolNode},
    layout::{HOLE_START, Local, Performance, Pool, Shape},
    memory::{Backing, Backings, Owner, Taking, own_file},
};

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The agent gives none.
    #[error("no memory for VM {vm} through {socket}")]
    Agent {
        /// Of which VM.
        vm: String,
        /// Where the agent is.
        socket: String,
        /// Why not.
        #[source]
        error: ClientError,
    },
    /// The agent gives something else than was reserved.
    #[error("the memory of VM {vm} is not usable: {what}")]
    Wrong {
        /// Of which VM.
        vm: String,
        /// What is wrong.
        what: String,
    },
    /// Sizes on the command line that do not add up.
    #[error(
        "memory: the sizes of the nodes are {said} together, and {reserved} of local memory are reserved for VM {vm}"
    )]
    Sizes {
        /// Of which VM.
        vm: String,
        /// What they add up to.
        said: Bytes,
        /// What is reserved.
        reserved: Bytes,
    },
    /// The operating system makes no such file.
    #[error("memory: cannot make {bytes} of {pages}{hint}")]
    Own {
        /// How much.
        bytes: Bytes,
        /// Of what.
        pages: String,
        /// What may help.
        hint: &'static str,
        /// Why not.
        #[source]
        errno: io::Error,
    },
}

/// What a guest is to look like, and the files behind it.
#[derive(Debug)]
pub struct Source {
    /// Nodes and sizes.
    pub shape: Shape,
    /// Their files.
    pub backings: Backings,
}

/// Fetches or makes the memory of a guest. The agent then knows this process as the VM's.
///
/// # Errors
/// [`SourceError`]
pub fn memory_of(config: &Config) -> Result<Source, SourceError> {
    match &config.agent {
        Some(socket) => from_agent(config, socket),
        None => own(config),
    }
}

/// Returns the shape of a guest whose memory is to come from an agent, without attaching to it: a reservation that does not fit is
/// not released.
///
/// # Errors
/// [`SourceError::Agent`] if the agent does not answer, and the others if the reservation does not match the options.
pub fn preview(config: &Config) -> Result<Shape, SourceError> {
    let Some(socket) = &config.agent else { return Ok(assumed(config)) };
    let looked = asked(config, socket, |agent, vm| match agent.inspect(vm) {
        Ok(memory) => Ok(Some(memory)),
        Err(ClientError::Rejected { .. }) => Ok(None),
        Err(error) => Err(error),
    });
    // Some backends show a VM's memory to the agent's own user only; any other refusal comes again when attaching.
    let Some(memory) = looked? else { return Ok(assumed(config)) };
    let Reserved { local, pool } = Reserved::of(config, memory.regions)?;
    let sizes = local_sizes(config, Bytes::new(local.bytes))?;
    let locals = config.local.iter().zip(sizes);
    Ok(Shape {
        local: locals.map(|(node, memory)| local_of(node, memory)).collect(),
        pool: pool
            .iter()
            .map(|OfEmc { performance, slices, .. }| pool_of(*performance, slices.len()))
            .collect(),
    })
}

/// The shape of a guest whose memory is not known yet: no pool memory, and as much local memory as lies below the devices.
fn assumed(config: &Config) -> Shape {
    let memory = |node: &LocalNode| node.size.unwrap_or(Bytes::new(HOLE_START));
    Shape { local: config.local.iter().map(|node| local_of(node, memory(node))).collect(), pool: Vec::new() }
}

fn local_of(node: &LocalNode, memory: Bytes) -> Local {
    Local { cpus: node.cpus, memory, performance: node.performance }
}

fn pool_of(performance: Performance, slices: usize) -> Pool {
    Pool { slices: u32::try_from(slices).expect("limited by the agent's answer"), performance }
}

fn own(config: &Config) -> Result<Source, SourceError> {
    let mut source = Source::empty();
    for node in &config.local {
        let bytes = node.size.expect("checked: said without an agent");
        let backing = own_backing("local", bytes, &node.taking)?;
        source.add_local(node, bytes, backing, node.taking.clone());
    }
    for node in &config.pool {
        let bytes = node.size.expect("checked: said without an agent");
        let whole = own_backing("pool", bytes, &node.taking)?;
        let slices = bytes.as_slices().expect("checked: whole slices");
        let slice = |n| Backing { offset: Bytes::slices(n).get(), ..whole.clone() };
        source.add_pool(node.performance, (0..slices).map(slice).collect(), node.taking.clone());
    }
    Ok(source)
}

fn own_backing(name: &str, bytes: Bytes, taking: &Taking) -> Result<Backing, SourceError> {
    let failed = |errno| {
        let pages = taking.hugepage_size.map_or("ordinary pages".into(), |size| format!("pages of {size}"));
        let hint =
            if taking.hugepage_size.is_some() { "; does this host have pages of that size?" } else { "" };
        SourceError::Own { bytes, pages, hint, errno }
    };
    let file = own_file(name, bytes, taking.hugepage_size).map_err(failed)?;
    Ok(Backing { file: Arc::new(file), offset: 0, owner: Owner::Local })
}

fn from_agent(config: &Config, socket: &Path) -> Result<Source, SourceError> {
    let memory = asked(config, socket, |agent, vm| agent.attach(vm, MemoryForm::Descriptors))?;
    let Reserved { local, pool } = Reserved::of(config, memory.regions)?;
    let mut source = Source::empty();
    source.split_local(config, local)?;
    for OfEmc { performance, taking, slices } in pool {
        let backings = slices.into_iter().map(|region| {
            let owner = Owner::Slice { slice: number(&region), emc: region.emc.clone() };
            backing(region, owner)
        });
        let backings = backings.collect::<Result<_, _>>().map_err(|what| wrong(config, what))?;
        source.add_pool(performance, backings, taking);
    }
    Ok(source)
}

/// Asks the agent about the memory of the VM.
///
/// # Errors
/// [`SourceError::Agent`]
pub fn asked<T>(
    config: &Config,
    socket: &Path,
    ask: impl FnOnce(Client, &str) -> Result<T, ClientError>,
) -> Result<T, SourceError> {
    let vm = config.vm.as_str();
    Client::connect(socket).and_then(|agent| ask(agent, vm)).map_err(|error| SourceError::Agent {
        vm: vm.to_owned(),
        socket: socket.display().to_string(),
        error,
    })
}

fn wrong(config: &Config, what: String) -> SourceError {
    SourceError::Wrong { vm: config.vm.to_string(), what }
}

fn number(region: &Region) -> u32 {
    region.slice.map_or(0, |(slice, _)| slice)
}

/// What an agent tells of a VM's memory, sorted.
#[derive(Debug)]
pub struct Reserved {
    /// Local memory.
    pub local: Region,
    /// A node for each EMC.
    pub pool: Vec<OfEmc>,
}

/// The slices of one EMC, and how they are to be.
#[derive(Debug)]
pub struct OfEmc {
    /// How fast they are.
    pub performance: Performance,
    /// How they are taken.
    pub taking: Taking,
    /// By their numbers.
    pub slices: Vec<Region>,
}

impl Reserved {
    /// Sorts regions as a guest is to see them.
    ///
    /// # Errors
    /// [`SourceError::Wrong`]
    pub fn of(config: &Config, regions: Vec<Region>) -> Result<Self, SourceError> {
        let (slices, local): (Vec<_>, Vec<_>) =
            regions.into_iter().partition(|region| region.slice.is_some());
        let [local] = <[Region; 1]>::try_from(local)
            .map_err(|not| wrong(config, format!("{} pieces of local memory", not.len())))?;
        let mut by_emc: BTreeMap<String, Vec<Region>> = BTreeMap::new();
        for region in slices {
            if region.bytes != SLICE.get() {
                let what = format!("slice {} has {} bytes", number(&region), region.bytes);
                return Err(wrong(config, what));
            }
            by_emc.entry(region.emc.clone()).or_default().push(region);
        }
        let mut said = config.pool.iter().filter_map(|node| node.emc.as_ref());
        if let Some(emc) = said.find(|emc| !by_emc.contains_key(*emc)) {
            return Err(wrong(config, format!("pool: emc={emc} is said, and no slice is of that EMC")));
        }
        let of_emc = |(emc, slices): (String, _)| {
            let wanted = config.pool.iter().find(|node| node.emc.as_ref() == Some(&emc));
            let wanted = wanted.or_else(|| config.pool.iter().find(|node| node.emc.is_none()));
            let (performance, taking) = wanted
                .map_or((Performance::POOL, Taking::default()), |node: &PoolNode| {
                    (node.performance, node.taking.clone())
                });
            OfEmc { performance, taking: Taking { shared: true, hugepage_size: None, ..taking }, slices }
        };
        Ok(Self { local, pool: by_emc.into_iter().map(of_emc).collect() })
    }
}

/// How much of the reserved local memory each node with processors has.
///
/// # Errors
/// [`SourceError::Sizes`]
pub fn local_sizes(config: &Config, reserved: Bytes) -> Result<Vec<Bytes>, SourceError> {
    let sizes: Vec<Bytes> = config.local.iter().map(|node| node.size.unwrap_or(reserved)).collect();
    let said: Bytes = sizes.iter().copied().sum();
    if said == reserved {
        Ok(sizes)
    } else {
        Err(SourceError::Sizes { vm: config.vm.to_string(), said, reserved })
    }
}

fn backing(region: Region, owner: Owner) -> Result<Backing, String> {
    let offset = region.offset;
    let file = region.into_file().map_err(|error| format!("it cannot be opened: {error}"))?;
    Ok(Backing { file: Arc::new(file), offset, owner })
}

impl Source {
    fn empty() -> Self {
        Self { shape: Shape { local: Vec::new(), pool: Vec::new() }, backings: Backings::default() }
    }

    fn add_local(&mut self, node: &LocalNode, memory: Bytes, backing: Backing, taking: Taking) {
        self.shape.local.push(local_of(node, memory));
        self.backings.local.push((backing, taking));
    }

    fn add_pool(&mut self, performance: Performance, slices: Vec<Backing>, taking: Taking) {
        self.shape.pool.push(pool_of(performance, slices.len()));
        self.backings.pool.push((slices, taking));
    }

    /// Reserved local memory is one file; nodes with processors have parts of it. In huge pages it is this process's own, and so is
    /// private memory: the agent measures its file, which would only seem to be in use.
    fn split_local(&mut self, config: &Config, region: Region) -> Result<(), SourceError> {
        let sizes = local_sizes(config, Bytes::new(region.bytes))?;
        let whole = backing(region, Owner::Local).map_err(|what| wrong(config, what))?;
        let mut offset = whole.offset;
        for (node, bytes) in config.local.iter().zip(sizes) {
            let part = if node.taking.hugepage_size.is_some() || !node.taking.shared {
                own_backing("local", bytes, &node.taking)?
            } else {
                Backing { offset, ..whole.clone() }
            };
            self.add_local(node, bytes, part, node.taking.clone());
            offset += bytes.get();
        }
        Ok(())
    }
}
