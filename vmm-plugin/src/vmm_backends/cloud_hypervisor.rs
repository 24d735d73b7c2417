//! Generates the configuration of Cloud Hypervisor: the body of `vm.create`, or command-line
//! arguments. Each slice is a memory zone, and each node is a list of memory zones. Cloud
//! Hypervisor generates no HMAT, so the guest has distances but no latencies. It also does not mark
//! pool memory as hot-pluggable, so the guest's kernel uses more pool memory for itself.

use serde_json::{Value, json};

use super::{
    BackendError,
    guest::{Guest, Location, MemoryBlock, path_text},
};
use crate::config::Console;

/// Name of the executable of Cloud Hypervisor.
pub const VMM_PROGRAM: &str = "cloud-hypervisor";
const VMM: &str = "cloud-hypervisor";
/// Host file that provides entropy for the guest.
const RNG_SOURCE: &str = "/dev/urandom";

/// Returns the JSON body of a `vm.create` request.
///
/// # Errors
/// [`BackendError::Unsupported`] if Cloud Hypervisor does not support the guest, and
/// [`BackendError::Path`] if a path is not UTF-8.
pub fn vm_config(guest: &Guest) -> Result<Value, BackendError> {
    check_supported(guest)?;
    let zones: Vec<Value> = guest.blocks.iter().flatten().map(memory_zone_json).collect();
    let (packages, cores) = guest.packages();
    let cpus = guest.layout.cpus();
    let topology = json!({
        "threads_per_core": 1, "cores_per_die": cores, "dies_per_package": 1, "packages": packages,
    });
    let mut config = json!({
        "cpus": { "boot_vcpus": cpus, "max_vcpus": cpus, "topology": topology },
        "memory": { "size": 0, "zones": zones },
        "numa": guest.nodes().map(|(number, ..)| node_json(guest, number)).collect::<Vec<_>>(),
        "payload": {
            "kernel": path_text(&guest.config.kernel.kernel)?,
            "cmdline": guest.command_line(false),
        },
        "rng": { "src": RNG_SOURCE },
        "serial": serial_json(&guest.config.console)?,
        "console": { "mode": "Off" },
    });
    if let Some(initrd) = &guest.config.kernel.initrd {
        config["payload"]["initramfs"] = path_text(initrd)?.into();
    }
    let disks = guest.config.disks.iter();
    let disks = disks.map(|disk| {
        Ok(json!({ "path": path_text(&disk.path)?, "readonly": disk.read_only, "image_type": "Raw" }))
    });
    config["disks"] = disks.collect::<Result<Vec<_>, BackendError>>()?.into();
    let nets = guest.config.nets.iter().map(|net| json!({ "tap": net.tap, "mac": net.mac.to_string() }));
    config["net"] = nets.collect::<Vec<_>>().into();
    Ok(config)
}

fn memory_zone_json(block: &MemoryBlock) -> Value {
    let mut zone = json!({
        "id": block.id,
        "size": block.bytes.get(),
        "shared": block.memory_options.shared,
        "prefault": block.memory_options.prefault,
    });
    if let Location::File(path, _) = &block.location {
        zone["file"] = path.as_str().into();
    }
    if let Some(size) = block.memory_options.hugepage_size {
        zone["hugepages"] = true.into();
        zone["hugepage_size"] = size.get().into();
    }
    if let Some(node) = block.memory_options.host_numa_node {
        zone["host_numa_node"] = node.into();
    }
    zone
}

fn node_json(guest: &Guest, number: usize) -> Value {
    let others = guest.node_pairs().filter(|(from, to)| *from == number && to != from);
    let distance = |(from, to)| json!({ "destination": to, "distance": guest.layout.distance(from, to) });
    let ids: Vec<&String> = guest.blocks[number].iter().map(|block| &block.id).collect();
    let mut node = json!({
        "guest_numa_id": number,
        "distances": others.map(distance).collect::<Vec<_>>(),
        "memory_zones": ids,
    });
    if !guest.layout.nodes[number].is_pool() {
        node["cpus"] = guest.layout.nodes[number].cpus.clone().collect::<Vec<_>>().into();
    }
    node
}

fn serial_json(console: &Console) -> Result<Value, BackendError> {
    Ok(match console {
        Console::Terminal => json!({ "mode": "Tty" }),
        Console::Null => json!({ "mode": "Null" }),
        Console::File(path) => json!({ "mode": "File", "file": path_text(path)? }),
    })
}

/// Returns the command-line options with their values. The options are derived from the body of
/// `vm.create`, so that both describe the same guest.
///
/// # Errors
/// [`BackendError::Unsupported`] if Cloud Hypervisor does not support the guest, and
/// [`BackendError::Path`] if a path is not UTF-8.
pub fn options(guest: &Guest) -> Result<Vec<Vec<String>>, BackendError> {
    check_paths(guest)?;
    let config = vm_config(guest)?;
    let (cpus, topology) = (&config["cpus"], &config["cpus"]["topology"]);
    let cpus = format!(
        "boot={},topology={}:{}:{}:{}",
        cpus["boot_vcpus"],
        topology["threads_per_core"],
        topology["cores_per_die"],
        topology["dies_per_package"],
        topology["packages"],
    );
    let mut options = vec![
        option_with_values("--cpus", [cpus]),
        option_with_values("--memory", ["size=0".to_owned()]),
        option_with_values("--memory-zone", format_values(&config["memory"]["zones"], format_key_values)),
        option_with_values("--numa", format_values(&config["numa"], format_numa)),
        option_with_values("--kernel", [format_plain_value(&config["payload"]["kernel"])]),
        option_with_values("--cmdline", [format_plain_value(&config["payload"]["cmdline"])]),
        option_with_values("--rng", [format_key_values(&config["rng"])]),
        option_with_values("--serial", [format_console(&config["serial"])]),
        option_with_values("--console", [format_console(&config["console"])]),
    ];
    if let Some(initrd) = config["payload"].get("initramfs") {
        options.push(option_with_values("--initramfs", [format_plain_value(initrd)]));
    }
    for (name, values) in [("--disk", &config["disks"]), ("--net", &config["net"])] {
        if values.as_array().is_some_and(|values| !values.is_empty()) {
            options.push(option_with_values(name, format_values(values, format_key_values)));
        }
    }
    Ok(options)
}

fn option_with_values(name: &str, values: impl IntoIterator<Item = String>) -> Vec<String> {
    [name.to_owned()].into_iter().chain(values).collect()
}

fn format_values(values: &Value, as_text: impl Fn(&Value) -> String) -> Vec<String> {
    values.as_array().into_iter().flatten().map(as_text).collect()
}

/// Formats a JSON value without quotes. Booleans become `on` or `off`.
fn format_plain_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
        other => other.to_string(),
    }
}

/// Formats an object as `name=value,name=value`, the syntax of Cloud Hypervisor's command line.
fn format_key_values(value: &Value) -> String {
    let key_values = value.as_object().into_iter().flatten();
    let part = |(name, value): (&String, &Value)| match name.as_str() {
        "image_type" => "image_type=raw".to_owned(),
        name => format!("{name}={}", format_plain_value(value)),
    };
    key_values.map(part).collect::<Vec<_>>().join(",")
}

fn format_numa(node: &Value) -> String {
    let mut text = format!("guest_numa_id={}", node["guest_numa_id"]);
    let mut list = |name: &str, values: Vec<String>| {
        if !values.is_empty() {
            text += &format!(",{name}=[{}]", values.join(","));
        }
    };
    list("cpus", format_values(&node["cpus"], format_plain_value));
    list(
        "distances",
        format_values(&node["distances"], |other| format!("{}@{}", other["destination"], other["distance"])),
    );
    list("memory_zones", format_values(&node["memory_zones"], format_plain_value));
    text
}

/// Formats a console as an option value, such as `file=PATH` or `null`.
fn format_console(console: &Value) -> String {
    match console.get("file") {
        Some(path) => format!("file={}", format_plain_value(path)),
        None => format_plain_value(&console["mode"]).to_lowercase(),
    }
}

/// Checks that Cloud Hypervisor supports the guest.
fn check_supported(guest: &Guest) -> Result<(), BackendError> {
    guest.check_pci(VMM)?;
    let cannot = |reason| Err(BackendError::Unsupported { vmm: VMM, reason });
    for block in guest.blocks.iter().flatten() {
        match &block.location {
            Location::File(path, offset @ 1..) => {
                return cannot(format!(
                    "slice {} is at offset {offset} of {path}, but memory zones start at offset 0 of a file",
                    block.id
                ));
            }
            Location::File(..) | Location::Allocated => {}
        }
    }
    Ok(())
}

/// Checks that paths contain no character with a special meaning in a command-line option. In JSON,
/// all characters are allowed.
fn check_paths(guest: &Guest) -> Result<(), BackendError> {
    let slices = guest.blocks.iter().flatten().filter_map(|block| match &block.location {
        Location::File(path, _) => Some(path.as_str()),
        Location::Allocated => None,
    });
    let disks = guest.config.disks.iter().filter_map(|disk| disk.path.to_str());
    let console = match &guest.config.console {
        Console::File(path) => path.to_str(),
        Console::Terminal | Console::Null => None,
    };
    match slices.chain(disks).chain(console).find(|path| path.contains(['"', ',', '[', ']'])) {
        Some(path) => {
            let reason = format!(
                "path {path:?} contains '\"', ',', '[' or ']', which options of {VMM} cannot contain"
            );
            Err(BackendError::Unsupported { vmm: VMM, reason })
        }
        None => Ok(()),
    }
}
