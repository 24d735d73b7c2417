//! CXL memory devices of this machine, with the region of each, found or created. Slices are
//! numbered from the start of their device's region, and operated on in `slices`. A device with a
//! problem is reported and not used.

mod plan;
mod problem;
mod region;
mod topology;

use std::{collections::BTreeMap, fmt, str::FromStr};

use units::Bytes;

pub use self::problem::{CxlError, Problem};
use self::{region::Site, topology::Memdev};
use super::{
    slices::{Region, Slices},
    sysfs::{Sysfs, SysfsError},
};

/// Folder of the CXL bus.
const BUS: &str = "bus/cxl/devices";

/// CXL memory of a machine.
#[derive(Debug)]
pub struct Discovered {
    /// Memory devices, in the kernel's order.
    pub devices: Vec<Device>,
}

/// CXL memory device.
#[derive(Debug)]
pub struct Device {
    /// Name in the kernel, such as `mem0`; it may change at a reboot.
    pub name: String,
    /// Serial number as printed by sysfs, such as `0x1`: equal on every host that sees the device.
    pub serial: String,
    /// Size of its volatile memory.
    pub bytes: Bytes,
    /// Its slices, or the reason why they cannot be used.
    pub slices: Result<Slices, Problem>,
}

/// Current state of a CXL memory device.
#[derive(Debug)]
pub struct Seen {
    /// Serial number, as [`Device::serial`].
    pub serial: String,
    /// Size of its volatile memory.
    pub bytes: Bytes,
    /// Its region, or the reason why it cannot be used.
    pub sight: Result<Sight, Problem>,
}

/// State of a usable device.
#[derive(Debug)]
pub enum Sight {
    /// It has a region with slices.
    There(Slices),
    /// It has a region of this name without a driver.
    Unused(String),
    /// It has a region of this name that was not completed.
    Unfinished(String),
    /// It has no region.
    Bare {
        /// Best window for a region.
        window: String,
        /// Physical address at which it would begin.
        start: u64,
    },
}

/// Inspects a machine's memory devices, without changes.
///
/// # Errors
/// There is no CXL bus, or no device on it.
pub fn look(sysfs: &Sysfs) -> Result<Vec<Seen>, CxlError> {
    let memdevs = memdevs(sysfs)?;
    let seen = |memdev: &Memdev| Seen {
        serial: memdev.serial.clone(),
        bytes: memdev.bytes,
        sight: if is_twin(&memdevs, memdev) { Err(Problem::Twins) } else { region::look(sysfs, memdev) },
    };
    Ok(memdevs.iter().map(seen).collect())
}

fn memdevs(sysfs: &Sysfs) -> Result<Vec<Memdev>, CxlError> {
    if !sysfs.has(BUS) {
        return Err(CxlError::NoBus);
    }
    let memdevs = topology::memdevs(sysfs)?;
    if memdevs.is_empty() { Err(CxlError::NoDevice) } else { Ok(memdevs) }
}

fn is_twin(memdevs: &[Memdev], memdev: &Memdev) -> bool {
    memdevs.iter().filter(|other| other.serial == memdev.serial).count() > 1
}

impl Discovered {
    /// Inspects a machine, and creates a region for each device without one.
    ///
    /// # Errors
    /// There is no CXL bus, or no device on it.
    pub fn find(sysfs: &Sysfs) -> Result<Self, CxlError> {
        let memdevs = memdevs(sysfs)?;
        let regions = regions(sysfs, &memdevs);
        let device = |(memdev, region): (Memdev, Result<Region, Problem>)| Device {
            slices: region.and_then(|region| Ok(Slices::open(sysfs, region)?)),
            name: memdev.name,
            serial: memdev.serial,
            bytes: memdev.bytes,
        };
        Ok(Self { devices: memdevs.into_iter().zip(regions).map(device).collect() })
    }

    /// Returns the slices of a device.
    ///
    /// # Errors
    /// The device does not exist, or has a problem.
    pub fn slices(&self, serial: &str) -> Result<&Slices, CxlError> {
        let found = self.devices.iter().find(|device| device.serial == serial);
        let device = found.ok_or_else(|| CxlError::NoSuchDevice { serial: serial.to_owned() })?;
        device.slices.as_ref().map_err(|problem| CxlError::Problem {
            serial: serial.to_owned(),
            problem: units::chain(problem),
        })
    }
}

/// Returns the region of each device, or the reason why it has none. Several new regions are
/// planned together.
fn regions(sysfs: &Sysfs, memdevs: &[Memdev]) -> Vec<Result<Region, Problem>> {
    let (mut regions, mut bare) = (BTreeMap::new(), Vec::new());
    for (number, memdev) in memdevs.iter().enumerate() {
        let site = if is_twin(memdevs, memdev) { Err(Problem::Twins) } else { region::survey(sysfs, memdev) };
        match site {
            Ok(Site::Bare(device)) => bare.push((number, device)),
            Ok(Site::There(name)) => drop(regions.insert(number, region::found(sysfs, &name))),
            Err(problem) => drop(regions.insert(number, Err(problem))),
        }
    }
    for (number, device) in plan::in_order(bare) {
        regions.insert(number, region::make(sysfs, device));
    }
    regions.into_values().collect()
}

/// Slice in the manager's notation `cxl:SERIAL:INDEX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceName {
    /// Serial number of its device.
    pub serial: String,
    /// Index of the slice, in GiB from the start of the region.
    pub index: u32,
}

impl FromStr for SliceName {
    type Err = CxlError;

    fn from_str(name: &str) -> Result<Self, CxlError> {
        let parts = name.strip_prefix("cxl:").and_then(|rest| rest.rsplit_once(':'));
        let parsed = parts.and_then(|(serial, index)| Some((serial, index.parse().ok()?)));
        match parsed {
            Some((serial, index)) if !serial.is_empty() => Ok(Self { serial: serial.to_owned(), index }),
            _ => Err(CxlError::Name { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for SliceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cxl:{}:{}", self.serial, self.index)
    }
}

#[cfg(test)]
pub(crate) mod made_up;
#[cfg(test)]
mod tests;
