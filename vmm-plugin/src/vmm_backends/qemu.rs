//! A guest as QEMU's arguments. It wants QEMU 6 or newer and the machine q35: microvm writes no SRAT.
//!
//! ```text
//!   node 0, processors: a memory backend of QEMU's own
//!   node 1, none: slice 0 is the node's own memory · slice 1, 2, … are memory devices (pc-dimm) of the node
//! ```
//!
//! A node has one backend when a guest starts, and each slice is a file, so the others must be devices. That the first is
//! none has a reason: Linux gives a node its memory tier when it first has memory, and devices come before HMAT is read. A
//! node that has devices alone shares a tier with local memory (seen with 6.12). Memory below 4 GiB ends with the local
//! memory, so that slices lie above it, where no kernel looks for memory for the devices of old.

use units::{Bytes, SLICE, limits::QEMU_MEMORY_DEVICES_MAX};

use super::{
    BackendError,
    guest::{Guest, Location, MemoryBlock, text},
};
use crate::config::Console;

/// What the program is called.
pub const PROGRAM: &str = "qemu-system-x86_64";
const VMM: &str = "qemu";
/// Where the machine has its devices, if it has more memory than fits below them.
const LOW_MEMORY_MAX: Bytes = Bytes::gib(2);
/// QEMU packs all bandwidths of an HMAT into 16 bits each, as multiples of a power of two: with this one all that a layout
/// can have fit. In MB/s.
const BANDWIDTH_STEP: u64 = 16;

/// Options with their values, in the order in which they are given.
///
/// # Errors
/// [`BackendError::Unsupported`]
pub fn options(guest: &Guest) -> Result<Vec<Vec<String>>, BackendError> {
    guest.check_pci(VMM)?;
    let mut arguments = Arguments::default();
    machine(guest, &mut arguments)?;
    nodes(guest, &mut arguments);
    devices(guest, &mut arguments)?;
    payload(guest, &mut arguments)?;
    Ok(arguments.0)
}

/// A command line that grows.
#[derive(Default)]
struct Arguments(Vec<Vec<String>>);

impl Arguments {
    fn flag(&mut self, name: &str) {
        self.0.push(vec![name.to_owned()]);
    }

    fn option(&mut self, name: &str, value: impl Into<String>) {
        self.0.push(vec![name.to_owned(), value.into()]);
    }
}

/// Slices that are devices: all but the first of each node.
fn memory_devices(guest: &Guest) -> impl Iterator<Item = (usize, &MemoryBlock)> {
    guest.pool().flat_map(|(number, _, blocks)| blocks[1..].iter().map(move |block| (number, block)))
}

fn machine(guest: &Guest, arguments: &mut Arguments) -> Result<(), BackendError> {
    let local: Bytes = guest.local().map(|(_, node, _)| node.bytes()).sum();
    let devices = u32::try_from(memory_devices(guest).count()).expect("slices are few");
    check_devices(devices)?;
    let start = guest.nodes().map(|(_, _, blocks)| blocks[0].bytes).sum::<Bytes>();
    let has_pool = guest.pool().next().is_some();
    let low = if has_pool && local < LOW_MEMORY_MAX {
        format!(",max-ram-below-4g={}", mib(local))
    } else {
        String::new()
    };
    let hotplug = if devices > 0 {
        let most = start.checked_add(Bytes::slices(devices)).expect("checked by the layout");
        format!(",slots={devices},maxmem={}", mib(most))
    } else {
        String::new()
    };
    let (sockets, cores) = guest.packages();
    arguments.option("-name", format!("guest={}", escaped(guest.config.vm.as_str())));
    arguments.option("-machine", format!("q35,accel=kvm,hmat=on{low}"));
    arguments.option("-cpu", "host");
    arguments.option("-smp", format!("{},sockets={sockets},cores={cores},threads=1", guest.layout.cpus()));
    arguments.option("-m", format!("size={}{hotplug}", mib(start)));
    for flag in ["-no-user-config", "-nodefaults", "-no-reboot"] {
        arguments.flag(flag);
    }
    arguments.option("-display", "none");
    Ok(())
}

/// As many as an ACPI machine of QEMU's has slots for.
pub(super) fn check_devices(devices: u32) -> Result<(), BackendError> {
    if devices <= QEMU_MEMORY_DEVICES_MAX {
        return Ok(());
    }
    let reason = format!(
        "{devices} slices would be memory devices, and it has slots for {QEMU_MEMORY_DEVICES_MAX} at most"
    );
    Err(BackendError::Unsupported { vmm: VMM, reason })
}

fn nodes(guest: &Guest, arguments: &mut Arguments) {
    for (number, node, blocks) in guest.nodes() {
        arguments.option("-object", backend(&blocks[0]));
        let cpus = if node.is_pool() {
            String::new()
        } else {
            format!(",cpus={}-{}", node.cpus.start, node.cpus.end - 1)
        };
        let (id, near) = (&blocks[0].id, guest.layout.nearest_initiator(number));
        arguments.option("-numa", format!("node,nodeid={number}{cpus},memdev={id},initiator={near}"));
    }
    for (node, block) in memory_devices(guest) {
        arguments.option("-object", backend(block));
        arguments.option("-device", device(node, block));
    }
    distances(guest, arguments);
}

fn distances(guest: &Guest, arguments: &mut Arguments) {
    for (from, to) in guest.pairs().filter(|(from, to)| from != to) {
        arguments
            .option("-numa", format!("dist,src={from},dst={to},val={}", guest.layout.distance(from, to)));
    }
    for (from, to) in guest.initiators() {
        let pair = format!("hmat-lb,initiator={from},target={to},hierarchy=memory,data-type=access");
        arguments.option("-numa", format!("{pair}-latency,latency={}", guest.layout.latency_ns(from, to)));
        arguments.option("-numa", format!("{pair}-bandwidth,bandwidth={}M", bandwidth_mbps(guest, from, to)));
    }
}

/// In steps that QEMU can pack. It counts in MiB/s and writes the number where a kernel reads MB/s.
pub(super) fn bandwidth_mbps(guest: &Guest, from: usize, to: usize) -> u64 {
    guest.layout.bandwidth_mbps(from, to).next_multiple_of(BANDWIDTH_STEP)
}

/// Memory, as an object.
pub(super) fn backend(block: &MemoryBlock) -> String {
    let MemoryBlock { id, bytes, location, memory_options } = block;
    let mut object = match location {
        Location::Allocated => format!("memory-backend-memfd,id={id}"),
        Location::File(path, offset) => {
            let offset = if *offset > 0 { format!(",offset={offset}") } else { String::new() };
            // A device (DAX) is mapped nowhere but at a multiple of its pages, which are as large as a slice at most.
            let align = mib(SLICE);
            format!("memory-backend-file,id={id},mem-path={}{offset},align={align}", escaped(path))
        }
    };
    object += &format!(",size={},share={}", mib(*bytes), if memory_options.shared { "on" } else { "off" });
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

/// A slice as a device of a node.
pub(super) fn device(node: usize, block: &MemoryBlock) -> String {
    format!("pc-dimm,id=dimm-{id},memdev={id},node={node}", id = block.id)
}

fn devices(guest: &Guest, arguments: &mut Arguments) -> Result<(), BackendError> {
    arguments.option("-object", "rng-builtin,id=rng");
    arguments.option("-device", "virtio-rng-pci,rng=rng");
    for (number, disk) in guest.config.disks.iter().enumerate() {
        let (path, read_only) = (escaped(text(&disk.path)?), if disk.read_only { "on" } else { "off" });
        arguments
            .option("-drive", format!("if=none,id=disk{number},format=raw,readonly={read_only},file={path}"));
        arguments.option("-device", format!("virtio-blk-pci,drive=disk{number}"));
    }
    for (number, net) in guest.config.nets.iter().enumerate() {
        let tap = escaped(&net.tap);
        arguments.option("-netdev", format!("tap,id=net{number},ifname={tap},script=no,downscript=no"));
        arguments.option("-device", format!("virtio-net-pci,netdev=net{number},mac={}", net.mac));
    }
    Ok(())
}

fn payload(guest: &Guest, arguments: &mut Arguments) -> Result<(), BackendError> {
    arguments.option(
        "-serial",
        match &guest.config.console {
            Console::Terminal => "mon:stdio".to_owned(),
            Console::Null => "null".to_owned(),
            Console::File(path) => format!("file:{}", text(path)?),
        },
    );
    arguments.option("-kernel", text(&guest.config.kernel.kernel)?);
    if let Some(initrd) = &guest.config.kernel.initrd {
        arguments.option("-initrd", text(initrd)?);
    }
    arguments.option("-append", guest.command_line(memory_devices(guest).next().is_some()));
    Ok(())
}

/// Sizes of memory are whole MiB.
fn mib(bytes: Bytes) -> String {
    format!("{}M", bytes.get() >> 20)
}

/// In a value, commas are said twice.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}
