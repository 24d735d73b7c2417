//! Generates QEMU arguments for the q35 machine of QEMU 6 or newer. The microvm machine has no
//! SRAT.
//!
//! ```text
//!   node 0, with CPUs:    a memory backend allocated by QEMU
//!   node 1, without CPUs: slice 0 is the node memory; slices 1, 2, … are pc-dimm devices
//! ```
//!
//! In QEMU, a node has one memory backend at boot. Each slice is a separate file, so further slices
//! must be memory devices. The first slice is the memory of the node because Linux assigns a memory
//! tier when a node first has memory. Linux adds memory devices before it reads the HMAT. A node
//! with only memory devices would therefore share a tier with local memory (observed with Linux
//! 6.12). Only local memory is placed below 4 GiB and all slices above, because kernels use memory
//! below 4 GiB for legacy devices.

use units::{Bytes, SLICE, limits::QEMU_MEMORY_DEVICES_MAX};

use super::{
    BackendError,
    guest::{Guest, Location, MemoryBlock, path_text},
};
use crate::config::Console;

/// Name of the executable of QEMU.
pub const VMM_PROGRAM: &str = "qemu-system-x86_64";
const VMM: &str = "qemu";
/// Size of the memory below 4 GiB on q35, if the guest has more memory than fits below the PCI
/// hole.
const LOW_MEMORY_MAX: Bytes = Bytes::gib(2);
/// Granularity of bandwidths, in MB/s. QEMU stores the bandwidths of an HMAT as 16-bit multiples of
/// a common power of two. With this granularity, every bandwidth of a layout can be stored.
const BANDWIDTH_STEP_MBPS: u64 = 16;

/// Returns the options of QEMU with their values.
///
/// # Errors
/// [`BackendError::Unsupported`] if QEMU does not support the guest, and [`BackendError::Path`] if
/// a path is not UTF-8.
pub fn options(guest: &Guest) -> Result<Vec<Vec<String>>, BackendError> {
    guest.check_pci(VMM)?;
    let mut arguments = QemuArguments::default();
    add_machine_options(guest, &mut arguments)?;
    add_node_options(guest, &mut arguments);
    add_device_options(guest, &mut arguments)?;
    add_kernel_options(guest, &mut arguments)?;
    Ok(arguments.0)
}

/// List of QEMU options, each with its value.
#[derive(Default)]
struct QemuArguments(Vec<Vec<String>>);

impl QemuArguments {
    fn flag(&mut self, name: &str) {
        self.0.push(vec![name.to_owned()]);
    }

    fn option(&mut self, name: &str, value: impl Into<String>) {
        self.0.push(vec![name.to_owned(), value.into()]);
    }
}

/// Returns the slices that are memory devices, each with the number of its node. These are all
/// slices except the first slice of each pool node.
fn memory_devices(guest: &Guest) -> impl Iterator<Item = (usize, &MemoryBlock)> {
    guest.pool_nodes().flat_map(|(number, _, blocks)| blocks[1..].iter().map(move |block| (number, block)))
}

fn add_machine_options(guest: &Guest, arguments: &mut QemuArguments) -> Result<(), BackendError> {
    let local: Bytes = guest.local_nodes().map(|(_, node, _)| node.bytes()).sum();
    let devices = u32::try_from(memory_devices(guest).count()).expect("the number of slices fits into u32");
    check_devices(devices)?;
    let boot_memory = guest.nodes().map(|(_, _, blocks)| blocks[0].bytes).sum::<Bytes>();
    let has_pool = guest.pool_nodes().next().is_some();
    let low = if has_pool && local < LOW_MEMORY_MAX {
        format!(",max-ram-below-4g={}", format_mib(local))
    } else {
        String::new()
    };
    let hotplug = if devices > 0 {
        let maximum =
            boot_memory.checked_add(Bytes::slices(devices)).expect("the layout limits the memory size");
        format!(",slots={devices},maxmem={}", format_mib(maximum))
    } else {
        String::new()
    };
    let (sockets, cores) = guest.packages();
    arguments.option("-name", format!("guest={}", escape_commas(guest.config.vm.as_str())));
    arguments.option("-machine", format!("q35,accel=kvm,hmat=on{low}"));
    arguments.option("-cpu", "host");
    arguments.option("-smp", format!("{},sockets={sockets},cores={cores},threads=1", guest.layout.cpus()));
    arguments.option("-m", format!("size={}{hotplug}", format_mib(boot_memory)));
    for flag in ["-no-user-config", "-nodefaults", "-no-reboot"] {
        arguments.flag(flag);
    }
    arguments.option("-display", "none");
    Ok(())
}

/// Checks that QEMU has enough ACPI slots for this number of memory devices.
pub(super) fn check_devices(devices: u32) -> Result<(), BackendError> {
    if devices <= QEMU_MEMORY_DEVICES_MAX {
        return Ok(());
    }
    let reason =
        format!("{devices} slices need memory devices, but QEMU has {QEMU_MEMORY_DEVICES_MAX} slots");
    Err(BackendError::Unsupported { vmm: VMM, reason })
}

fn add_node_options(guest: &Guest, arguments: &mut QemuArguments) {
    for (number, node, blocks) in guest.nodes() {
        arguments.option("-object", backend_option(&blocks[0]));
        let cpus = if node.is_pool() {
            String::new()
        } else {
            format!(",cpus={}-{}", node.cpus.start, node.cpus.end - 1)
        };
        let (id, initiator) = (&blocks[0].id, guest.layout.nearest_initiator(number));
        arguments.option("-numa", format!("node,nodeid={number}{cpus},memdev={id},initiator={initiator}"));
    }
    for (node, block) in memory_devices(guest) {
        arguments.option("-object", backend_option(block));
        arguments.option("-device", dimm_option(node, block));
    }
    add_distance_options(guest, arguments);
}

fn add_distance_options(guest: &Guest, arguments: &mut QemuArguments) {
    for (from, to) in guest.node_pairs().filter(|(from, to)| from != to) {
        arguments
            .option("-numa", format!("dist,src={from},dst={to},val={}", guest.layout.distance(from, to)));
    }
    for (from, to) in guest.initiator_pairs() {
        let pair = format!("hmat-lb,initiator={from},target={to},hierarchy=memory,data-type=access");
        arguments.option("-numa", format!("{pair}-latency,latency={}", guest.layout.latency_ns(from, to)));
        arguments.option("-numa", format!("{pair}-bandwidth,bandwidth={}M", bandwidth_mbps(guest, from, to)));
    }
}

/// Returns the bandwidth between two nodes in MB/s, rounded up to a value that QEMU can store. QEMU
/// parses the value as MiB/s but stores the number in a field with the unit MB/s.
pub(super) fn bandwidth_mbps(guest: &Guest, from: usize, to: usize) -> u64 {
    guest.layout.bandwidth_mbps(from, to).next_multiple_of(BANDWIDTH_STEP_MBPS)
}

/// Returns the option value for the memory backend object of a block.
pub(super) fn backend_option(block: &MemoryBlock) -> String {
    let MemoryBlock { id, bytes, location, memory_options } = block;
    let mut object = match location {
        Location::Allocated => format!("memory-backend-memfd,id={id}"),
        Location::File(path, offset) => {
            let offset = if *offset > 0 { format!(",offset={offset}") } else { String::new() };
            // A DAX device requires alignment to its page size, which is at most the size of a
            // slice.
            let align = format_mib(SLICE);
            format!("memory-backend-file,id={id},mem-path={}{offset},align={align}", escape_commas(path))
        }
    };
    object +=
        &format!(",size={},share={}", format_mib(*bytes), if memory_options.shared { "on" } else { "off" });
    if let Some(size) = memory_options.hugepage_size {
        object += &format!(",hugetlb=on,hugetlbsize={}", size.get());
    }
    if memory_options.prefault {
        object += ",prealloc=on";
    }
    if let Some(node) = memory_options.host_numa_node {
        object += &format!(",host-nodes={node},policy=bind");
    }
    object
}

/// Returns the option value for the pc-dimm device of a slice.
pub(super) fn dimm_option(node: usize, block: &MemoryBlock) -> String {
    format!("pc-dimm,id=dimm-{id},memdev={id},node={node}", id = block.id)
}

fn add_device_options(guest: &Guest, arguments: &mut QemuArguments) -> Result<(), BackendError> {
    arguments.option("-object", "rng-builtin,id=rng");
    arguments.option("-device", "virtio-rng-pci,rng=rng");
    for (number, disk) in guest.config.disks.iter().enumerate() {
        let (path, read_only) =
            (escape_commas(path_text(&disk.path)?), if disk.read_only { "on" } else { "off" });
        arguments
            .option("-drive", format!("if=none,id=disk{number},format=raw,readonly={read_only},file={path}"));
        arguments.option("-device", format!("virtio-blk-pci,drive=disk{number}"));
    }
    for (number, net) in guest.config.nets.iter().enumerate() {
        let tap = escape_commas(&net.tap);
        arguments.option("-netdev", format!("tap,id=net{number},ifname={tap},script=no,downscript=no"));
        arguments.option("-device", format!("virtio-net-pci,netdev=net{number},mac={}", net.mac));
    }
    Ok(())
}

fn add_kernel_options(guest: &Guest, arguments: &mut QemuArguments) -> Result<(), BackendError> {
    arguments.option(
        "-serial",
        match &guest.config.console {
            Console::Terminal => "mon:stdio".to_owned(),
            Console::Null => "null".to_owned(),
            Console::File(path) => format!("file:{}", path_text(path)?),
        },
    );
    arguments.option("-kernel", path_text(&guest.config.kernel.kernel)?);
    if let Some(initrd) = &guest.config.kernel.initrd {
        arguments.option("-initrd", path_text(initrd)?);
    }
    arguments.option("-append", guest.command_line(memory_devices(guest).next().is_some()));
    Ok(())
}

/// Formats a memory size in MiB, with the suffix `M`.
fn format_mib(bytes: Bytes) -> String {
    format!("{}M", bytes.get() >> 20)
}

/// Doubles the commas of a value, because a single comma separates keys in a QEMU option.
fn escape_commas(value: &str) -> String {
    value.replace(',', ",,")
}
