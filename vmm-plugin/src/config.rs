//! Configuration of a guest: the command-line options, and the configuration that results from
//! checking the options. This module does not open files or devices.

use std::{path::PathBuf, time::Duration};

use units::{
    Bytes, Name, QuotedText, SLICE,
    limits::{DEVICES_PER_VM_MAX, GUEST_SHUTDOWN_TIMEOUT, GUEST_STOP_WAIT_MAX, VCPUS_PER_VM_MAX},
};

use crate::{
    boot::Kernel,
    confine::Confinement,
    devices::virtio::net::{MacAddress, MacAddressError},
    layout::Performance,
    memory::MemoryBackendOptions,
    options::{OptionError, OptionParser},
};

/// Option for the directory of the control sockets.
#[derive(Clone, Debug, clap::Args)]
pub struct RunDirArg {
    /// Directory of the control sockets of running VMs
    #[arg(long, value_name = "DIR", default_value = "/run/tarn-vmm", env = "TARN_VMM_RUN_DIR")]
    pub run_dir: PathBuf,
}

/// Options of the command `run`.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    guest: GuestArgs,
    #[command(flatten)]
    run_dir: RunDirArg,
    #[command(flatten)]
    confinement: Confinement,
    /// Expose VMX or SVM to the guest, for nested virtualization
    #[arg(long)]
    nested: bool,
    /// Time for the guest to power off after SIGTERM or `stop`, such as 90s. Then the VMM stops the
    /// guest [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_stop_timeout)]
    shutdown_timeout: Option<Duration>,
}

impl RunArgs {
    /// Checks the options, without opening files or devices. Returns the guest's configuration, the
    /// directory of the control sockets, and the confinement options.
    ///
    /// # Errors
    /// [`OptionError`] that names the option, its value and the violated rule.
    pub fn check(self) -> Result<(Config, PathBuf, Confinement), OptionError> {
        let shutdown_timeout = self.shutdown_timeout.unwrap_or(GUEST_SHUTDOWN_TIMEOUT.as_duration());
        let config = Config { nested: self.nested, shutdown_timeout, ..self.guest.check()? };
        Ok((config, self.run_dir.run_dir, self.confinement))
    }
}

/// Guest options that all VMMs support.
#[derive(Clone, Debug, clap::Args)]
pub struct GuestArgs {
    /// Name of the VM, as in the reservation
    #[arg(long)]
    pub vm: Name,
    /// Unix socket of the agent on this host
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "/run/tarn-agent/host-memory.sock",
        env = "TARN_HOST_MEMORY"
    )]
    pub agent: PathBuf,
    /// Allocate all memory from this host's operating system, without an agent
    #[arg(long)]
    pub standalone: bool,
    /// Number of vCPUs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(VCPUS_PER_VM_MAX)))]
    pub cpus: u32,
    /// Local memory of one NUMA node with vCPUs, repeatable:
    /// size=2GiB,cpus=2,host_numa_node=0,hugepages=on,
    /// hugepage_size=2MiB,shared=on,prefault=on,latency_ns=85,bandwidth_mbps=200000
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub memory: Vec<String>,
    /// Pool memory of one NUMA node without vCPUs, repeatable:
    /// size=4GiB,emc=NAME,host_numa_node=2,hugepages=on,
    /// hugepage_size=2MiB,prefault=on,latency_ns=155,bandwidth_mbps=30000. With an agent, the
    /// options apply to the slices of the EMC that emc names. Options without emc apply to the
    /// slices of all other EMCs
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub pool: Vec<String>,
    /// Kernel image: a bzImage, or an ELF file with a PVH entry point
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", default_value = "console=ttyS0")]
    pub cmdline: String,
    /// Disk, repeatable: path=FILE,readonly=on; a raw image or a block device
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// Network device, repeatable: tap=NAME,mac=52:54:00:12:34:56
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub net: Vec<String>,
    /// Serial console: tty, null, or file=PATH
    #[arg(long, value_name = "MODE", default_value = "tty")]
    pub serial: String,
}

/// Destination of the serial console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Console {
    /// Standard input and output of this process.
    Terminal,
    /// Discards the output and provides no input.
    Null,
    /// Writes the output to a file and provides no input.
    File(PathBuf),
}

/// Configuration of a NUMA node with vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalNode {
    /// Size of the node's memory. `None` means all reserved local memory.
    pub size: Option<Bytes>,
    /// Number of vCPUs of the node.
    pub cpus: u32,
    /// Options for allocating and mapping the node's memory.
    pub memory_options: MemoryBackendOptions,
    /// Latency and bandwidth of the node's memory, as reported to the guest.
    pub performance: Performance,
}

/// Configuration of a pool node. With an agent, the options apply to the pool nodes of one EMC or
/// of all EMCs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNode {
    /// Size of the node's memory, set only without an agent. With an agent, the reservation defines
    /// the size.
    pub size: Option<Bytes>,
    /// Name of the EMC to which the options apply. `None` means every EMC without its own entry.
    pub emc: Option<String>,
    /// Options for allocating and mapping the node's memory.
    pub memory_options: MemoryBackendOptions,
    /// Latency and bandwidth of the node's memory, as reported to the guest.
    pub performance: Performance,
}

/// Configuration of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Path of a raw image or a block device.
    pub path: PathBuf,
    /// Whether the guest cannot write the disk.
    pub read_only: bool,
}

/// Configuration of a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Net {
    /// Name of the tap device on the host.
    pub tap: String,
    /// MAC address of the network device in the guest.
    pub mac: MacAddress,
}

/// Checked configuration of a guest.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the VM.
    pub vm: Name,
    /// Unix socket of the agent that provides the memory. `None` means that this host's operating
    /// system provides the memory.
    pub agent: Option<PathBuf>,
    /// NUMA nodes with vCPUs, at least one.
    pub local: Vec<LocalNode>,
    /// Pool nodes. With an agent, only their options: the reservation defines the nodes.
    pub pool: Vec<PoolNode>,
    /// Kernel, initrd and kernel command line.
    pub kernel: Kernel,
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<Disk>,
    /// Network devices, in the order in which the guest finds them.
    pub nets: Vec<Net>,
    /// Destination of the serial console.
    pub console: Console,
    /// Whether vCPUs have VMX or SVM. Other VMMs ignore this field and use their own defaults.
    pub nested: bool,
    /// Time for the guest to power off after a shutdown request. The default for other VMMs, which
    /// have their own limits.
    pub shutdown_timeout: Duration,
}

impl GuestArgs {
    /// Checks the options, without opening files or devices.
    ///
    /// # Errors
    /// [`OptionError`] that names the option, its value and the violated rule.
    pub fn check(self) -> Result<Config, OptionError> {
        let node_texts = if self.memory.is_empty() { vec![String::new()] } else { self.memory.clone() };
        let is_single_node = node_texts.len() == 1;
        let local = node_texts.iter().map(|text| parse_local_node(text, is_single_node.then_some(self.cpus)));
        let local = local.collect::<Result<Vec<_>, _>>()?;
        let pool = self.pool.iter().map(|text| parse_pool_node(text)).collect::<Result<Vec<_>, _>>()?;
        let parser = OptionParser::new("--memory", "")?;
        let cpus: u32 = local.iter().map(|node| node.cpus).sum();
        if !is_single_node && cpus != self.cpus {
            return Err(parser.error(format!("nodes have {cpus} cpus in total, but --cpus is {}", self.cpus)));
        }
        if (self.standalone || !is_single_node) && local.iter().any(|node| node.size.is_none()) {
            return Err(parser.error("size is missing: required with --standalone and with several nodes"));
        }
        check_pool(&pool, self.standalone)?;
        let console = parse_console(&self.serial)?;
        let disks = self.disk.iter().map(|text| parse_disk(text)).collect::<Result<Vec<_>, _>>()?;
        let nets = self.net.iter().map(|text| parse_net(text)).collect::<Result<Vec<_>, _>>()?;
        if disks.len() + nets.len() > DEVICES_PER_VM_MAX {
            let reason = format!(
                "{} disks and {} network devices are too many: at most {DEVICES_PER_VM_MAX} in total",
                disks.len(),
                nets.len()
            );
            return Err(OptionParser::new("--disk", "")?.error(reason));
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
            shutdown_timeout: GUEST_SHUTDOWN_TIMEOUT.as_duration(),
        })
    }
}

/// Parses the time limit for a guest to stop.
///
/// # Errors
/// The text is not a duration, or the duration is longer than [`GUEST_STOP_WAIT_MAX`].
pub fn parse_stop_timeout(text: &str) -> Result<Duration, String> {
    let timeout = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let max = GUEST_STOP_WAIT_MAX.as_duration();
    if timeout > max {
        return Err(format!("must be at most {}", humantime::format_duration(max)));
    }
    Ok(timeout)
}

fn parse_local_node(text: &str, default_cpus: Option<u32>) -> Result<LocalNode, OptionError> {
    let mut parts = OptionParser::new("--memory", text)?;
    let size = parts.size_option("size")?;
    let cpus = parts.parse_option("cpus", "a number of CPUs")?;
    let Some(cpus) = cpus.or(default_cpus) else {
        return Err(parts.error("cpus is missing: required with several nodes"));
    };
    let memory_options = parse_memory_options(&mut parts)?;
    let performance = parse_performance(&mut parts, Performance::LOCAL)?;
    parts.finish()?;
    Ok(LocalNode { size, cpus, memory_options, performance })
}

fn parse_pool_node(text: &str) -> Result<PoolNode, OptionError> {
    let mut parts = OptionParser::new("--pool", text)?;
    let size = parts.size_option("size")?;
    if let Some(size) = size.filter(|size| size.as_slices().is_none_or(|slices| slices == 0)) {
        return Err(
            parts.error(format!("size={size} is not a whole number of slices of {SLICE}, at least one"))
        );
    }
    let emc = parts.string_option("emc").map(str::to_owned);
    let memory_options = parse_memory_options(&mut parts)?;
    let performance = parse_performance(&mut parts, Performance::POOL)?;
    parts.finish()?;
    Ok(PoolNode { size, emc, memory_options, performance })
}

fn parse_memory_options(parts: &mut OptionParser<'_>) -> Result<MemoryBackendOptions, OptionError> {
    let has_huge_pages = parts.on_off_option("hugepages")?.unwrap_or(false);
    let size = parts.size_option("hugepage_size")?;
    if let Some(size) = size.filter(|size| !has_huge_pages || !size.get().is_power_of_two()) {
        return Err(
            parts.error(format!("hugepage_size={size} must be a power of two and requires hugepages=on"))
        );
    }
    Ok(MemoryBackendOptions {
        shared: parts.on_off_option("shared")?.unwrap_or(true),
        prefault: parts.on_off_option("prefault")?.unwrap_or(false),
        hugepage_size: has_huge_pages.then(|| size.unwrap_or(Bytes::mib(2))),
        host_numa_node: parts.parse_option("host_numa_node", "the number of a NUMA node")?,
    })
}

fn parse_performance(parts: &mut OptionParser<'_>, default: Performance) -> Result<Performance, OptionError> {
    Ok(Performance {
        latency_ns: parts
            .parse_option("latency_ns", "a number of nanoseconds up to 65535")?
            .unwrap_or(default.latency_ns),
        bandwidth_mbps: parts
            .parse_option("bandwidth_mbps", "a number of MB/s")?
            .unwrap_or(default.bandwidth_mbps),
    })
}

fn check_pool(pool: &[PoolNode], standalone: bool) -> Result<(), OptionError> {
    let parser = OptionParser::new("--pool", "")?;
    for (index, node) in pool.iter().enumerate() {
        match node.size {
            None if standalone => {
                return Err(parser.error("size is missing: required with --standalone"));
            }
            Some(size) if !standalone => {
                return Err(parser.error(format!(
                    "size={size} is not allowed with an agent, because the reservation defines the size"
                )));
            }
            _ => {}
        }
        if !standalone && (node.memory_options.hugepage_size.is_some() || !node.memory_options.shared) {
            return Err(
                parser.error("hugepages and shared=off are not allowed with an agent: slices are always shared and without huge pages")
            );
        }
        if node.emc.is_some() && pool[..index].iter().any(|other| other.emc == node.emc) {
            return Err(
                parser.error(format!("emc={} is given twice", node.emc.as_deref().unwrap_or_default()))
            );
        }
    }
    Ok(())
}

fn parse_disk(text: &str) -> Result<Disk, OptionError> {
    let mut parts = OptionParser::new("--disk", text)?;
    let path = parts.string_option("path").filter(|path| !path.is_empty());
    let read_only = parts.on_off_option("readonly")?.unwrap_or(false);
    let Some(path) = path.map(PathBuf::from) else { return Err(parts.error("path is missing")) };
    parts.finish()?;
    Ok(Disk { path, read_only })
}

fn parse_net(text: &str) -> Result<Net, OptionError> {
    let mut parts = OptionParser::new("--net", text)?;
    let tap = parts.string_option("tap").map(str::to_owned);
    let mac = parts.parse_option("mac", &MacAddressError.to_string())?;
    let (Some(tap), Some(mac)) = (tap, mac) else { return Err(parts.error("tap and mac are required")) };
    parts.finish()?;
    Ok(Net { tap, mac })
}

fn parse_console(text: &str) -> Result<Console, OptionError> {
    match text.split_once('=') {
        None if text == "tty" => Ok(Console::Terminal),
        None if text == "null" => Ok(Console::Null),
        Some(("file", path)) if !path.is_empty() => Ok(Console::File(path.into())),
        _ => Err(OptionParser::new("--serial", "")?
            .error(format!("{} must be tty, null or file=PATH", QuotedText(text)))),
    }
}
