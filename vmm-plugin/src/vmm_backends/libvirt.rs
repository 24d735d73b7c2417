//! Generates libvirt domain XML for QEMU. libvirt has elements for nodes, distances, latencies,
//! bandwidths and local memory, but not for slices. libvirt allows a file path only for NVDIMM
//! devices, which kernels do not use as RAM. libvirt also chooses the memory file of a cell. Pool
//! nodes are therefore empty cells, and all slices are memory devices in `qemu:commandline`.
//! libvirt marks a domain with `qemu:commandline` as tainted.

use quick_xml::{
    Writer,
    events::{BytesEnd, BytesStart, BytesText, Event},
};
use units::Bytes;

use super::{
    BackendError,
    guest::{Guest, path_text},
    qemu,
};
use crate::config::Console;

const VMM: &str = "libvirt";
/// XML namespace of `qemu:commandline`.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Returns the domain XML of a guest.
///
/// # Errors
/// [`BackendError::Unsupported`] if libvirt or QEMU does not support the guest, and
/// [`BackendError::Path`] if a path is not UTF-8.
pub fn domain_xml(guest: &Guest) -> Result<String, BackendError> {
    guest.check_pci(VMM)?;
    let slices = guest.pool_nodes().map(|(_, _, blocks)| blocks.len()).sum::<usize>();
    let slices = u32::try_from(slices).expect("the number of slices fits into u32");
    qemu::check_devices(slices)?;
    let local: Bytes = guest.local_nodes().map(|(_, node, _)| node.bytes()).sum();
    let mut domain = element("domain").with("type", "kvm").with("xmlns:qemu", QEMU_NAMESPACE);
    domain.add(element("name").with_text(&guest.config.vm));
    if slices > 0 {
        let most = local.checked_add(Bytes::slices(slices)).expect("the layout limits the memory size");
        domain.add(element("maxMemory").with("slots", slices).with("unit", "KiB").with_text(to_kib(most)));
    }
    domain.add(element("memory").with("unit", "KiB").with_text(to_kib(local)));
    domain.add(memory_backing_element(guest)?);
    domain.add(element("vcpu").with_text(guest.layout.cpus()));
    domain.add_optional_child(numa_tuning_element(guest));
    domain.add(os_element(guest)?);
    domain.add(element("features").with_children([element("acpi")]));
    domain.add(cpu_element(guest));
    for event in ["on_poweroff", "on_reboot", "on_crash"] {
        domain.add(element(event).with_text("destroy"));
    }
    domain.add(devices_element(guest)?);
    domain.add_optional_child(qemu_commandline_element(guest));
    Ok(domain.to_xml())
}

/// Returns the `memoryBacking` element. In libvirt, each node has a page size, and all other
/// options apply to the whole domain.
fn memory_backing_element(guest: &Guest) -> Result<XmlElement, BackendError> {
    let memory_options: Vec<_> =
        guest.local_nodes().map(|(number, _, blocks)| (number, &blocks[0].memory_options)).collect();
    let mut backing = element("memoryBacking");
    let pages = memory_options.iter().filter_map(|(number, memory_options)| {
        let size = Bytes::get(memory_options.hugepage_size?) >> 10;
        Some(element("page").with("size", size).with("unit", "KiB").with("nodeset", number))
    });
    let pages: Vec<_> = pages.collect();
    if !pages.is_empty() {
        backing.add(element("hugepages").with_children(pages));
    }
    backing.add(element("source").with("type", "memfd"));
    let prefault = memory_options.iter().filter(|(_, memory_options)| memory_options.prefault).count();
    if prefault == memory_options.len() {
        backing.add(element("allocation").with("mode", "immediate"));
    } else if prefault > 0 {
        let reason = "--memory: prefault=on must be set for all nodes with cpus or for none".to_owned();
        return Err(BackendError::Unsupported { vmm: VMM, reason });
    }
    Ok(backing)
}

/// Returns the `numatune` element, which binds local memory to NUMA nodes of the host. Returns
/// `None` if no memory is bound.
fn numa_tuning_element(guest: &Guest) -> Option<XmlElement> {
    let nodes = guest.local_nodes().filter_map(|(number, _, blocks)| {
        let node = blocks[0].memory_options.host_numa_node?;
        Some(element("memnode").with("cellid", number).with("mode", "strict").with("nodeset", node))
    });
    let nodes: Vec<_> = nodes.collect();
    (!nodes.is_empty()).then(|| element("numatune").with_children(nodes))
}

fn os_element(guest: &Guest) -> Result<XmlElement, BackendError> {
    let kernel = &guest.config.kernel;
    let machine = element("type").with("arch", "x86_64").with("machine", "q35").with_text("hvm");
    let mut boot =
        element("os").with_children([machine, element("kernel").with_text(path_text(&kernel.kernel)?)]);
    if let Some(initrd) = &kernel.initrd {
        boot.add(element("initrd").with_text(path_text(initrd)?));
    }
    boot.add(element("cmdline").with_text(guest.command_line(guest.pool_nodes().next().is_some())));
    Ok(boot)
}

fn cpu_element(guest: &Guest) -> XmlElement {
    let (sockets, cores) = guest.packages();
    let topology = element("topology").with("sockets", sockets).with("cores", cores).with("threads", 1);
    let mut numa =
        element("numa").with_children(guest.nodes().map(|(number, ..)| cell_element(guest, number)));
    numa.add(interconnects_element(guest));
    element("cpu").with("mode", "host-passthrough").with_children([topology, numa])
}

fn cell_element(guest: &Guest, number: usize) -> XmlElement {
    let node = &guest.layout.nodes[number];
    let mut cell = element("cell").with("id", number);
    cell = if node.is_pool() {
        cell.with("memory", 0).with("unit", "KiB")
    } else {
        let shared = if guest.blocks[number][0].memory_options.shared { "shared" } else { "private" };
        cell.with("cpus", format!("{}-{}", node.cpus.start, node.cpus.end - 1))
            .with("memory", to_kib(node.bytes()))
            .with("unit", "KiB")
            .with("memAccess", shared)
    };
    let sibling = |to| element("sibling").with("id", to).with("value", guest.layout.distance(number, to));
    let siblings = (0..guest.layout.nodes.len()).map(sibling);
    cell.with_children([element("distances").with_children(siblings)])
}

fn interconnects_element(guest: &Guest) -> XmlElement {
    let pair = |name, (from, to), value: u64| {
        element(name).with("initiator", from).with("target", to).with("type", "access").with("value", value)
    };
    let latency = |(from, to)| pair("latency", (from, to), guest.layout.latency_ns(from, to));
    let bandwidth =
        |(from, to)| pair("bandwidth", (from, to), qemu::bandwidth_mbps(guest, from, to)).with("unit", "MiB");
    let all = guest.initiator_pairs().map(latency).chain(guest.initiator_pairs().map(bandwidth));
    element("interconnects").with_children(all)
}

fn devices_element(guest: &Guest) -> Result<XmlElement, BackendError> {
    let mut devices = element("devices");
    for (disk, letter) in guest.config.disks.iter().zip('a'..) {
        let mut element_of_disk =
            element("disk").with("type", if disk.path.starts_with("/dev") { "block" } else { "file" });
        element_of_disk = element_of_disk.with("device", "disk").with_children([
            element("driver").with("name", "qemu").with("type", "raw"),
            element("source")
                .with(if disk.path.starts_with("/dev") { "dev" } else { "file" }, path_text(&disk.path)?),
            element("target").with("dev", format!("vd{letter}")).with("bus", "virtio"),
        ]);
        if disk.read_only {
            element_of_disk.add(element("readonly"));
        }
        devices.add(element_of_disk);
    }
    for net in &guest.config.nets {
        devices.add(element("interface").with("type", "ethernet").with_children([
            element("mac").with("address", net.mac),
            element("target").with("dev", &net.tap).with("managed", "no"),
            element("model").with("type", "virtio"),
        ]));
    }
    devices.add(serial_element(&guest.config.console)?);
    let random = element("backend").with("model", "builtin");
    devices.add(element("rng").with("model", "virtio").with_children([random]));
    devices.add(element("memballoon").with("model", "none"));
    Ok(devices)
}

/// Returns the `serial` element. `virsh console` connects to a serial console of type pty.
fn serial_element(console: &Console) -> Result<XmlElement, BackendError> {
    let target = element("target").with("port", 0);
    Ok(match console {
        Console::Terminal => element("serial").with("type", "pty").with_children([target]),
        Console::Null => element("serial").with("type", "null").with_children([target]),
        Console::File(path) => {
            let source = element("source").with("path", path_text(path)?);
            element("serial").with("type", "file").with_children([source, target])
        }
    })
}

/// Returns the `qemu:commandline` element with the QEMU arguments for all slices. Returns `None` if
/// the guest has no slices.
fn qemu_commandline_element(guest: &Guest) -> Option<XmlElement> {
    let slices =
        guest.pool_nodes().flat_map(|(number, _, blocks)| blocks.iter().map(move |block| (number, block)));
    let arguments = slices.flat_map(|(number, block)| {
        [
            "-object".to_owned(),
            qemu::backend_option(block),
            "-device".to_owned(),
            qemu::dimm_option(number, block),
        ]
    });
    let arguments: Vec<_> = arguments.map(|word| element("qemu:arg").with("value", word)).collect();
    (!arguments.is_empty()).then(|| element("qemu:commandline").with_children(arguments))
}

/// Returns a memory size in KiB.
fn to_kib(bytes: Bytes) -> u64 {
    bytes.get() >> 10
}

/// XML element with attributes, text and child elements.
#[derive(Debug, Default)]
struct XmlElement {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    text: String,
    children: Vec<XmlElement>,
}

fn element(name: &'static str) -> XmlElement {
    XmlElement { name, ..Default::default() }
}

impl XmlElement {
    fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.attributes.push((name, value.to_string()));
        self
    }

    fn with_text(self, text: impl ToString) -> Self {
        Self { text: text.to_string(), ..self }
    }

    fn with_children(mut self, elements: impl IntoIterator<Item = Self>) -> Self {
        self.children.extend(elements);
        self
    }

    fn add(&mut self, element: Self) {
        self.children.push(element);
    }

    fn add_optional_child(&mut self, element: Option<Self>) {
        self.children.extend(element);
    }

    fn to_xml(&self) -> String {
        let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
        self.write(&mut writer).expect("writing to memory succeeds");
        String::from_utf8(writer.into_inner()).expect("XML made of strings is UTF-8") + "\n"
    }

    fn write(&self, to: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        let attributes = self.attributes.iter().map(|(name, value)| (*name, value.as_str()));
        let start = BytesStart::new(self.name).with_attributes(attributes);
        if self.text.is_empty() && self.children.is_empty() {
            return to.write_event(Event::Empty(start));
        }
        to.write_event(Event::Start(start))?;
        if !self.text.is_empty() {
            to.write_event(Event::Text(BytesText::new(&self.text)))?;
        }
        self.children.iter().try_for_each(|element| element.write(to))?;
        to.write_event(Event::End(BytesEnd::new(self.name)))
    }
}
