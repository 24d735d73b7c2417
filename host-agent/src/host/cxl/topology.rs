//! Topology of the CXL bus: memory devices, endpoints, decoders, and the windows of physical memory
//! through which an endpoint can be reached. Nothing is changed here.

use std::path::{Path, PathBuf};

use units::Bytes;

use super::{BUS, Sysfs, SysfsError};

/// Memory device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Memdev {
    pub(super) name: String,
    pub(super) serial: String,
    pub(super) bytes: Bytes,
}

/// Returns the memory devices.
pub(super) fn memdevs(sysfs: &Sysfs) -> Result<Vec<Memdev>, SysfsError> {
    let read = |name: String| {
        let device = Path::new(BUS).join(&name);
        let serial = sysfs.text(device.join("serial"))?;
        Ok(Memdev { serial, bytes: Bytes::new(sysfs.number(device.join("ram/size"))?), name })
    };
    sysfs.numbered(BUS, "mem")?.into_iter().map(read).collect()
}

/// Returns the endpoint port of a memory device as absolute path: `…/root0/port1/endpoint2`.
pub(super) fn endpoint(sysfs: &Sysfs, memdev: &Memdev) -> Result<Option<PathBuf>, SysfsError> {
    let device = sysfs.target(Path::new(BUS).join(&memdev.name))?;
    for name in sysfs.numbered(BUS, "endpoint")? {
        let endpoint = sysfs.target(Path::new(BUS).join(name))?;
        if sysfs.target(endpoint.join("uport"))? == device {
            return Ok(Some(endpoint));
        }
    }
    Ok(None)
}

/// Decoder of an endpoint: maps a part of the device's memory to host physical addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decoder {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    /// Its region; empty without one.
    pub(super) region: String,
    /// Offset in the device's memory.
    pub(super) at: u64,
}

/// Returns an endpoint's decoders, in the order in which they must be used.
pub(super) fn decoders(sysfs: &Sysfs, endpoint: &Path) -> Result<Vec<Decoder>, SysfsError> {
    let read = |name: String| {
        let folder = endpoint.join(&name);
        let region = sysfs.text(folder.join("region"))?;
        Ok(Decoder { region, at: sysfs.number(folder.join("dpa_resource"))?, name, folder })
    };
    sysfs.numbered(endpoint, "decoder")?.into_iter().map(read).collect()
}

/// Window: range of physical memory in which the firmware permits regions, with its host bridges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) start: u64,
    /// Size without regions.
    pub(super) free: u64,
    pub(super) takes_ram: bool,
    /// Host bridges, by the numbers of their ports.
    pub(super) targets: Vec<u64>,
}

/// Returns all windows of the root above an endpoint.
pub(super) fn windows(sysfs: &Sysfs, endpoint: &Path) -> Result<Vec<Window>, SysfsError> {
    let Some((root, _)) = root_and_bridge(endpoint) else { return Ok(Vec::new()) };
    let names = sysfs.numbered(root, "decoder")?;
    names.into_iter().map(|name| window(sysfs, root.join(&name), name)).collect()
}

fn window(sysfs: &Sysfs, folder: PathBuf, name: String) -> Result<Window, SysfsError> {
    let text = sysfs.text(folder.join("target_list"))?;
    let targets = text.split(',').map(str::parse).collect::<Result<_, _>>();
    Ok(Window {
        start: sysfs.number(folder.join("start"))?,
        free: sysfs.number(folder.join("size"))?.saturating_sub(used_bytes(sysfs, &folder)?),
        takes_ram: sysfs.has(folder.join("create_ram_region")),
        targets: targets
            .map_err(|_| sysfs.unreadable(folder.join("target_list"), text, "a list of numbers"))?,
        name,
        folder,
    })
}

fn used_bytes(sysfs: &Sysfs, window: &Path) -> Result<u64, SysfsError> {
    let regions = sysfs.numbered(window, "region")?;
    regions.iter().map(|region| sysfs.number(window.join(region).join("size"))).sum()
}

/// Returns the number of the host bridge above an endpoint, as used by the root's windows.
pub(super) fn bridge(sysfs: &Sysfs, endpoint: &Path) -> Result<Option<u64>, SysfsError> {
    let Some((root, bridge)) = root_and_bridge(endpoint) else { return Ok(None) };
    let above = sysfs.target(bridge.join("uport"))?;
    for port in sysfs.numbered(root, "dport")? {
        if sysfs.target(root.join(&port))? == above {
            return Ok(port.trim_start_matches("dport").parse().ok());
        }
    }
    Ok(None)
}

/// Returns the root above an endpoint, and the port directly below the root.
fn root_and_bridge(endpoint: &Path) -> Option<(&Path, &Path)> {
    let is_root =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("root"));
    let bridge = endpoint.ancestors().find(|path| path.parent().is_some_and(is_root))?;
    Some((bridge.parent()?, bridge))
}
