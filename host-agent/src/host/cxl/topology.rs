//! Topology of the CXL bus in sysfs: memory devices, endpoint ports, decoders, and the windows of
//! physical memory through which a device can be accessed. This module only reads sysfs.

use std::path::{Path, PathBuf};

use units::Bytes;

use super::{BUS, Sysfs, SysfsError};

/// CXL memory device (`memdev`) in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Memdev {
    pub(super) name: String,
    pub(super) serial: String,
    /// Volatile capacity.
    pub(super) bytes: Bytes,
}

/// Returns all CXL memory devices.
pub(super) fn memdevs(sysfs: &Sysfs) -> Result<Vec<Memdev>, SysfsError> {
    let read = |name: String| {
        let device = Path::new(BUS).join(&name);
        let serial = sysfs.text(device.join("serial"))?;
        Ok(Memdev { serial, bytes: Bytes::new(sysfs.number(device.join("ram/size"))?), name })
    };
    sysfs.numbered_names(BUS, "mem")?.into_iter().map(read).collect()
}

/// Returns the absolute path of a memory device's endpoint port, such as `…/root0/port1/endpoint2`.
pub(super) fn endpoint(sysfs: &Sysfs, memdev: &Memdev) -> Result<Option<PathBuf>, SysfsError> {
    let device = sysfs.target(Path::new(BUS).join(&memdev.name))?;
    for name in sysfs.numbered_names(BUS, "endpoint")? {
        let endpoint = sysfs.target(Path::new(BUS).join(name))?;
        if sysfs.target(endpoint.join("uport"))? == device {
            return Ok(Some(endpoint));
        }
    }
    Ok(None)
}

/// Endpoint decoder: maps a part of the device's memory to host physical addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decoder {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    /// Name of the decoder's region, or empty.
    pub(super) region: String,
    /// Offset of the mapped part in the device's memory (DPA), in bytes.
    pub(super) at: u64,
}

/// Returns the decoders of an endpoint port, in the order in which they must be programmed.
pub(super) fn decoders(sysfs: &Sysfs, endpoint: &Path) -> Result<Vec<Decoder>, SysfsError> {
    let read = |name: String| {
        let folder = endpoint.join(&name);
        let region = sysfs.text(folder.join("region"))?;
        Ok(Decoder { region, at: sysfs.number(folder.join("dpa_resource"))?, name, folder })
    };
    sysfs.numbered_names(endpoint, "decoder")?.into_iter().map(read).collect()
}

/// CXL window (root decoder): range of physical memory in which the firmware permits regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) start: u64,
    /// Space that no region uses, in bytes.
    pub(super) free: u64,
    /// Whether the window accepts regions of volatile memory.
    pub(super) supports_ram: bool,
    /// Port numbers of the host bridges over which the window is interleaved.
    pub(super) targets: Vec<u64>,
}

/// Returns all windows of the CXL root above an endpoint port.
pub(super) fn windows(sysfs: &Sysfs, endpoint: &Path) -> Result<Vec<Window>, SysfsError> {
    let Some((root, _)) = root_and_bridge(endpoint) else { return Ok(Vec::new()) };
    let names = sysfs.numbered_names(root, "decoder")?;
    names.into_iter().map(|name| read_window(sysfs, root.join(&name), name)).collect()
}

fn read_window(sysfs: &Sysfs, folder: PathBuf, name: String) -> Result<Window, SysfsError> {
    let text = sysfs.text(folder.join("target_list"))?;
    let targets = text.split(',').map(str::parse).collect::<Result<_, _>>();
    Ok(Window {
        start: sysfs.number(folder.join("start"))?,
        free: sysfs.number(folder.join("size"))?.saturating_sub(used_bytes(sysfs, &folder)?),
        supports_ram: sysfs.has(folder.join("create_ram_region")),
        targets: targets.map_err(|_| {
            sysfs.unreadable_error(folder.join("target_list"), text, "a list of port numbers")
        })?,
        name,
        folder,
    })
}

fn used_bytes(sysfs: &Sysfs, window: &Path) -> Result<u64, SysfsError> {
    let regions = sysfs.numbered_names(window, "region")?;
    regions.iter().map(|region| sysfs.number(window.join(region).join("size"))).sum()
}

/// Returns the port number of the host bridge above an endpoint port, as in [`Window::targets`].
pub(super) fn bridge(sysfs: &Sysfs, endpoint: &Path) -> Result<Option<u64>, SysfsError> {
    let Some((root, bridge)) = root_and_bridge(endpoint) else { return Ok(None) };
    let above = sysfs.target(bridge.join("uport"))?;
    for port in sysfs.numbered_names(root, "dport")? {
        if sysfs.target(root.join(&port))? == above {
            return Ok(port.trim_start_matches("dport").parse().ok());
        }
    }
    Ok(None)
}

/// Returns the CXL root above an endpoint port, and the port directly below the root.
fn root_and_bridge(endpoint: &Path) -> Option<(&Path, &Path)> {
    let is_root =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("root"));
    let bridge = endpoint.ancestors().find(|path| path.parent().is_some_and(is_root))?;
    Some((bridge.parent()?, bridge))
}
