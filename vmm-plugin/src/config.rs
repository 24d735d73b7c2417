//! What a guest is to be: as written on the command line, and as checked.

use std::path::PathBuf;

use units::{
    Bytes, Name, SLICE,
    limits::{DEVICES_PER_VM_MAX, VCPUS_MAX},
};

use crate::{
    boot::Kernel,
    confine::Confinement,
    devices::virtio::net::{MacAddress, NotAMacAddress},
    layout::Performance,
    memory::Taking,
    options::{OptionError, Parts},
};

/// Where running VMs are found.
#[derive(Clone, Debug, clap::Args)]
pub struct RunDir {
    /// Where each running VM has its control socket
    #[arg(long, value_name = "DIR", default_value = "/run/tarn-vmm", env = "TARN_VMM_RUN_DIR")]
    pub run_dir: PathBuf,
}

/// A guest of this VMM's own, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct Own {
    #[command(flatten)]
    guest: Written,
    #[command(flatten)]
    at: RunDir,
    #[command(flatten)]
    confinement: Confinement,
    /// Let the guest run guests of its own: its processors have VMX or SVM, which are hidden otherwise
    #[arg(long)]
    nested: bool,
}

impl Own {
    /// Checks what can be checked without touching anything.
    ///
    /// # Errors
    /// The option, the value and the rule.
    pub fn check(self) -> Result<(Config, PathBuf, Confinement), OptionError> {
        let config = Config { nested: self.nested, ..self.guest.check()? };
        Ok((config, self.at.run_dir, self.confinement))
    }
}

/// A guest, whoever runs it, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct Written {
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
    pub taking: Taking,
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
    pub taking: Taking,
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

impl Written {
    /// Checks what can be checked without touching anything.
    ///
    /// # Errors
    /// The option, the value and the rule.
    pub fn check(self) -> Result<Config, OptionError> {
        let written = if self.memory.is_empty() { vec![String::new()] } else { self.memory.clone() };
        let alone = written.len() == 1;
        let local = written.iter().map(|text| local_node(text, alone.then_some(self.cpus)));
        let local = local.collect::<Result<Vec<_>, _>>()?;
        let pool = self.pool.iter().map(|text| pool_node(text)).collect::<Result<Vec<_>, _>>()?;
        let rules = Parts::of("memory", "")?;
        let cpus: u32 = local.iter().map(|node| node.cpus).sum();
        if !alone && cpus != self.cpus {
            return Err(
                rules.error(format!("its nodes have {cpus} cpus together, and --cpus says {}", self.cpus))
            );
        }
        if (self.standalone || !alone) && local.iter().any(|node| node.size.is_none()) {
            return Err(rules
                .error("size is missing: it must be said with --standalone, and for each of several nodes"));
        }
        check_pool(&pool, self.standalone)?;
        let console = console(&self.serial)?;
        let disks = self.disk.iter().map(|text| disk(text)).collect::<Result<Vec<_>, _>>()?;
        let nets = self.net.iter().map(|text| net(text)).collect::<Result<Vec<_>, _>>()?;
        if disks.len() + nets.len() > DEVICES_PER_VM_MAX {
            let what =
                format!("{} disks and {} cards are more than {DEVICES_PER_VM_MAX}", disks.len(), nets.len());
            return Err(Parts::of("disk", "")?.error(what));
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

fn local_node(text: &str, all_cpus: Option<u32>) -> Result<LocalNode, OptionError> {
    let mut parts = Parts::of("memory", text)?;
    let size = parts.size("size")?;
    let cpus = parts.parsed("cpus", "a number of processors")?;
    let Some(cpus) = cpus.or(all_cpus) else {
        return Err(parts.error("cpus is missing: it must be said for each of several nodes"));
    };
    let taking = taking(&mut parts)?;
    let performance = performance(&mut parts, Performance::LOCAL)?;
    parts.end()?;
    Ok(LocalNode { size, cpus, taking, performance })
}

fn pool_node(text: &str) -> Result<PoolNode, OptionError> {
    let mut parts = Parts::of("pool", text)?;
    let size = parts.size("size")?;
    if let Some(size) = size.filter(|size| size.as_slices().is_none_or(|slices| slices == 0)) {
        return Err(
            parts.error(format!("size={size} is not a whole number of slices of {SLICE}, at least one"))
        );
    }
    let emc = parts.text("emc").map(str::to_owned);
    let taking = taking(&mut parts)?;
    let performance = performance(&mut parts, Performance::POOL)?;
    parts.end()?;
    Ok(PoolNode { size, emc, taking, performance })
}

fn taking(parts: &mut Parts<'_>) -> Result<Taking, OptionError> {
    let huge = parts.switch("hugepages")?.unwrap_or(false);
    let size = parts.size("hugepage_size")?;
    if let Some(size) = size.filter(|size| !huge || !size.get().is_power_of_two()) {
        return Err(
            parts.error(format!("hugepage_size={size} must be a power of two, and wants hugepages=on"))
        );
    }
    Ok(Taking {
        shared: parts.switch("shared")?.unwrap_or(true),
        prefault: parts.switch("prefault")?.unwrap_or(false),
        hugepage_size: huge.then(|| size.unwrap_or(Bytes::mib(2))),
        host_numa_node: parts.parsed("host_numa_node", "the number of a node")?,
    })
}

fn performance(parts: &mut Parts<'_>, usual: Performance) -> Result<Performance, OptionError> {
    Ok(Performance {
        latency_ns: parts
            .parsed("latency_ns", "a number of nanoseconds up to 65535")?
            .unwrap_or(usual.latency_ns),
        bandwidth_mbps: parts.parsed("bandwidth_mbps", "a number of MB/s")?.unwrap_or(usual.bandwidth_mbps),
    })
}

fn check_pool(pool: &[PoolNode], standalone: bool) -> Result<(), OptionError> {
    let rules = Parts::of("pool", "")?;
    for (at, node) in pool.iter().enumerate() {
        match node.size {
            None if standalone => {
                return Err(rules.error("size is missing: it must be said with --standalone"));
            }
            Some(size) if !standalone => {
                return Err(
                    rules.error(format!("size={size} is not possible with an agent: it is as reserved"))
                );
            }
            _ => {}
        }
        if !standalone && (node.taking.hugepage_size.is_some() || !node.taking.shared) {
            return Err(rules.error(
                "hugepages and shared are not possible with an agent: slices are as the rack has them",
            ));
        }
        if node.emc.is_some() && pool[..at].iter().any(|other| other.emc == node.emc) {
            return Err(rules.error(format!("emc={} is said twice", node.emc.as_deref().unwrap_or_default())));
        }
    }
    Ok(())
}

fn disk(text: &str) -> Result<Disk, OptionError> {
    let mut parts = Parts::of("disk", text)?;
    let path = parts.text("path").filter(|path| !path.is_empty());
    let read_only = parts.switch("readonly")?.unwrap_or(false);
    let Some(path) = path.map(PathBuf::from) else { return Err(parts.error("path is missing")) };
    parts.end()?;
    Ok(Disk { path, read_only })
}

fn net(text: &str) -> Result<Net, OptionError> {
    let mut parts = Parts::of("net", text)?;
    let tap = parts.text("tap").map(str::to_owned);
    let mac = parts.parsed("mac", &NotAMacAddress.to_string())?;
    let (Some(tap), Some(mac)) = (tap, mac) else { return Err(parts.error("tap and mac must be said")) };
    parts.end()?;
    Ok(Net { tap, mac })
}

fn console(text: &str) -> Result<Console, OptionError> {
    match text.split_once('=') {
        None if text == "tty" => Ok(Console::Terminal),
        None if text == "null" => Ok(Console::Null),
        Some(("file", path)) if !path.is_empty() => Ok(Console::File(path.into())),
        _ => Err(Parts::of("serial", "")?.error(format!("{text:?} is not tty, null or file=PATH"))),
    }
}
