//! What a guest is to be: as written on the command line, and as checked.

use std::path::PathBuf;

use units::{
    Bytes, Name, SLICE,
    limits::{DEVICES_PER_VM_MAX, VCPUS_MAX},
};

use crate::{
    boot::Kernel,
    confine::Confinement,
    devices::virtio::net::{MacAddress, MacAddressError},
    layout::Performance,
    memory::MemoryBackendOptions,
    options::{OptionError, OptionParser},
};

/// Where running VMs are found.
#[derive(Clone, Debug, clap::Args)]
pub struct RunDirArg {
    /// Where each running VM has its control socket
    #[arg(long, value_name = "DIR", default_value = "/run/tarn-vmm", env = "TARN_VMM_RUN_DIR")]
    pub run_dir: PathBuf,
}

/// A guest of this VMM's own, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    guest: GuestArgs,
    #[command(flatten)]
    run_dir: RunDirArg,
    #[command(flatten)]
    confinement: Confinement,
    /// Let the guest run guests of its own: its processors have VMX or SVM, which are hidden otherwise
    #[arg(long)]
    nested: bool,
}

impl RunArgs {
    /// Checks what can be checked without touching anything.
    ///
    /// # Errors
    /// The option, the value and the rule.
    pub fn check(self) -> Result<(Config, PathBuf, Confinement), OptionError> {
        let config = Config { nested: self.nested, ..self.guest.check()? };
        Ok((config, self.run_dir.run_dir, self.confinement))
    }
}

/// A guest, whoever runs it, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct GuestArgs {
    /// The VM's name, as reserved
    #[arg(long)]
    pub vm: Name,
    /// Where the agent of this host hands out memory
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "/run/tarn-agent/host-memory.sock",
        env = "TARN_HOST_MEMORY"
    )]
    pub agent: PathBuf,
    /// Take memory from this host's operating system, and none from an agent
    #[arg(long)]
    pub standalone: bool,
    /// Processors
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(VCPUS_MAX)))]
    pub cpus: u32,
    /// Local memory of one node: size=2GiB,cpus=2,host_numa_node=0,hugepages=on,hugepage_size=2MiB,shared=on,prefault=on,
    /// latency_ns=85,bandwidth_mbps=200000; once for each node with processors
    #[arg(long, value_name = "PARTS")]
    pub memory: Vec<String>,
    /// Pool memory of one node: size=4GiB,emc=NAME,host_numa_node=2,hugepages=on,hugepage_size=2MiB,prefault=on,
    /// latency_ns=155,bandwidth_mbps=30000; with an agent: how that of EMC `emc`, or of all, is taken
    #[arg(long, value_name = "PARTS")]
    pub pool: Vec<String>,
    /// A bzImage, or an ELF with a PVH entry
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// A first file system
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// What the kernel is told
    #[arg(long, value_name = "TEXT", default_value = "console=ttyS0")]
    pub cmdline: String,
    /// A disk: path=FILE,readonly=on; a raw file or a block device, may be said several times
    #[arg(long, value_name = "PARTS")]
    pub disk: Vec<String>,
    /// A network card: tap=NAME,mac=52:54:00:12:34:56; may be said several times
    #[arg(long, value_name = "PARTS")]
    pub net: Vec<String>,
    /// The console: tty, null, or file=PATH
    #[arg(long, value_name = "WHERE", default_value = "tty")]
    pub serial: String,
}

/// Where the console is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Console {
    /// Standard input and output.
    Terminal,
    /// Nowhere.
    Null,
    /// Output to a file, and no input.
    File(PathBuf),
}

/// One node with processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalNode {
    /// How much memory; `None` means all that was reserved.
    pub size: Option<Bytes>,
    /// How many processors.
    pub cpus: u32,
    /// How memory is taken.
    pub memory_options: MemoryBackendOptions,
    /// How fast it is.
    pub performance: Performance,
}

/// One pool node, or how pool nodes are to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNode {
    /// How much memory, without an agent.
    pub size: Option<Bytes>,
    /// Of which EMC; `None` is any.
    pub emc: Option<String>,
    /// How memory is taken.
    pub memory_options: MemoryBackendOptions,
    /// How fast it is.
    pub performance: Performance,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// A raw file or a block device.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Net {
    /// The tap device of the host.
    pub tap: String,
    /// The card's address.
    pub mac: MacAddress,
}

/// A guest, as checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name.
    pub vm: Name,
    /// Who has its memory; `None` is this host's operating system.
    pub agent: Option<PathBuf>,
    /// Nodes with processors, at least one.
    pub local: Vec<LocalNode>,
    /// Pool nodes.
    pub pool: Vec<PoolNode>,
    /// What to boot.
    pub kernel: Kernel,
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<Disk>,
    /// Network cards, in the order in which the guest finds them.
    pub nets: Vec<Net>,
    /// Where the console is.
    pub console: Console,
    /// Whether its processors have VMX or SVM. Other VMMs decide for themselves.
    pub nested: bool,
}

impl GuestArgs {
    /// Checks what can be checked without touching anything.
    ///
    /// # Errors
    /// The option, the value and the rule.
    pub fn check(self) -> Result<Config, OptionError> {
        let node_texts = if self.memory.is_empty() { vec![String::new()] } else { self.memory.clone() };
        let is_single_node = node_texts.len() == 1;
        let local = node_texts.iter().map(|text| local_node(text, is_single_node.then_some(self.cpus)));
        let local = local.collect::<Result<Vec<_>, _>>()?;
        let pool = self.pool.iter().map(|text| pool_node(text)).collect::<Result<Vec<_>, _>>()?;
        let parser = OptionParser::new("memory", "")?;
        let cpus: u32 = local.iter().map(|node| node.cpus).sum();
        if !is_single_node && cpus != self.cpus {
            return Err(
                parser.error(format!("its nodes have {cpus} cpus together, and --cpus says {}", self.cpus))
            );
        }
        if (self.standalone || !is_single_node) && local.iter().any(|node| node.size.is_none()) {
            return Err(parser
                .error("size is missing: it must be said with --standalone, and for each of several nodes"));
        }
        check_pool(&pool, self.standalone)?;
        let console = console(&self.serial)?;
        let disks = self.disk.iter().map(|text| disk(text)).collect::<Result<Vec<_>, _>>()?;
        let nets = self.net.iter().map(|text| net(text)).collect::<Result<Vec<_>, _>>()?;
        if disks.len() + nets.len() > DEVICES_PER_VM_MAX {
            let reason =
                format!("{} disks and {} cards are more than {DEVICES_PER_VM_MAX}", disks.len(), nets.len());
            return Err(OptionParser::new("disk", "")?.error(reason));
        }
        let (kernel, initrd, command_line) = (self.kernel, self.initrd, self.cmdline);
        Ok(Config {
            vm: self.vm,
            agent: (!self.standalone).then_some(self.agent),
            local,
            pool,
            kernel: Kernel { kernel, initrd, command_line },
            disks,
            nets,
            console,
            nested: false,
        })
    }
}

fn local_node(text: &str, default_cpus: Option<u32>) -> Result<LocalNode, OptionError> {
    let mut parts = OptionParser::new("memory", text)?;
    let size = parts.size("size")?;
    let cpus = parts.parse("cpus", "a number of processors")?;
    let Some(cpus) = cpus.or(default_cpus) else {
        return Err(parts.error("cpus is missing: it must be said for each of several nodes"));
    };
    let memory_options = memory_options(&mut parts)?;
    let performance = performance(&mut parts, Performance::LOCAL)?;
    parts.finish()?;
    Ok(LocalNode { size, cpus, memory_options, performance })
}

fn pool_node(text: &str) -> Result<PoolNode, OptionError> {
    let mut parts = OptionParser::new("pool", text)?;
    let size = parts.size("size")?;
    if let Some(size) = size.filter(|size| size.as_slices().is_none_or(|slices| slices == 0)) {
        return Err(
            parts.error(format!("size={size} is not a whole number of slices of {SLICE}, at least one"))
        );
    }
    let emc = parts.string("emc").map(str::to_owned);
    let memory_options = memory_options(&mut parts)?;
    let performance = performance(&mut parts, Performance::POOL)?;
    parts.finish()?;
    Ok(PoolNode { size, emc, memory_options, performance })
}

fn memory_options(parts: &mut OptionParser<'_>) -> Result<MemoryBackendOptions, OptionError> {
    let has_huge_pages = parts.on_off("hugepages")?.unwrap_or(false);
    let size = parts.size("hugepage_size")?;
    if let Some(size) = size.filter(|size| !has_huge_pages || !size.get().is_power_of_two()) {
        return Err(
            parts.error(format!("hugepage_size={size} must be a power of two, and wants hugepages=on"))
        );
    }
    Ok(MemoryBackendOptions {
        shared: parts.on_off("shared")?.unwrap_or(true),
        prefault: parts.on_off("prefault")?.unwrap_or(false),
        hugepage_size: has_huge_pages.then(|| size.unwrap_or(Bytes::mib(2))),
        host_numa_node: parts.parse("host_numa_node", "the number of a node")?,
    })
}

fn performance(parts: &mut OptionParser<'_>, default: Performance) -> Result<Performance, OptionError> {
    Ok(Performance {
        latency_ns: parts
            .parse("latency_ns", "a number of nanoseconds up to 65535")?
            .unwrap_or(default.latency_ns),
        bandwidth_mbps: parts.parse("bandwidth_mbps", "a number of MB/s")?.unwrap_or(default.bandwidth_mbps),
    })
}

fn check_pool(pool: &[PoolNode], standalone: bool) -> Result<(), OptionError> {
    let parser = OptionParser::new("pool", "")?;
    for (index, node) in pool.iter().enumerate() {
        match node.size {
            None if standalone => {
                return Err(parser.error("size is missing: it must be said with --standalone"));
            }
            Some(size) if !standalone => {
                return Err(
                    parser.error(format!("size={size} is not possible with an agent: it is as reserved"))
                );
            }
            _ => {}
        }
        if !standalone && (node.memory_options.hugepage_size.is_some() || !node.memory_options.shared) {
            return Err(parser.error(
                "hugepages and shared are not possible with an agent: slices are as the rack has them",
            ));
        }
        if node.emc.is_some() && pool[..index].iter().any(|other| other.emc == node.emc) {
            return Err(
                parser.error(format!("emc={} is said twice", node.emc.as_deref().unwrap_or_default()))
            );
        }
    }
    Ok(())
}

fn disk(text: &str) -> Result<Disk, OptionError> {
    let mut parts = OptionParser::new("disk", text)?;
    let path = parts.string("path").filter(|path| !path.is_empty());
    let read_only = parts.on_off("readonly")?.unwrap_or(false);
    let Some(path) = path.map(PathBuf::from) else { return Err(parts.error("path is missing")) };
    parts.finish()?;
    Ok(Disk { path, read_only })
}

fn net(text: &str) -> Result<Net, OptionError> {
    let mut parts = OptionParser::new("net", text)?;
    let tap = parts.string("tap").map(str::to_owned);
    let mac = parts.parse("mac", &MacAddressError.to_string())?;
    let (Some(tap), Some(mac)) = (tap, mac) else { return Err(parts.error("tap and mac must be said")) };
    parts.finish()?;
    Ok(Net { tap, mac })
}

fn console(text: &str) -> Result<Console, OptionError> {
    match text.split_once('=') {
        None if text == "tty" => Ok(Console::Terminal),
        None if text == "null" => Ok(Console::Null),
        Some(("file", path)) if !path.is_empty() => Ok(Console::File(path.into())),
        _ => Err(OptionParser::new("serial", "")?.error(format!("{text:?} is not tty, null or file=PATH"))),
    }
}
