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
use self::{region::RegionState, topology::Memdev};
use super::{
    slices::{Region, Slices},
    sysfs::{Sysfs, SysfsError},
};

/// Folder of the CXL bus.
const BUS: &str = "bus/cxl/devices";

/// CXL memory of a machine.
#[derive(Debug)]
pub struct CxlMemory {
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
    /// Volatile capacity of the device.
    pub bytes: Bytes,
    /// Its slices, or the reason why they cannot be used.
    pub slices: Result<Slices, Problem>,
}

/// Current state of a CXL memory device.
#[derive(Debug)]
pub struct InspectedDevice {
    /// Serial number, as [`Device::serial`].
    pub serial: String,
    /// Volatile capacity of the device.
    pub bytes: Bytes,
    /// Region of the device, or the reason why it cannot be used.
    pub state: Result<DeviceState, Problem>,
}

/// State of a usable device.
#[derive(Debug)]
pub enum DeviceState {
    /// It has a region with slices.
    Present(Slices),
    /// It has a region of this name without a driver.
    Unbound(String),
    /// It has a region of this name that was not completed.
    Incomplete(String),
    /// It has no region.
    NoRegion {
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
pub fn inspect(sysfs: &Sysfs) -> Result<Vec<InspectedDevice>, CxlError> {
    let memdevs = memdevs(sysfs)?;
    let inspected = |memdev: &Memdev| InspectedDevice {
        serial: memdev.serial.clone(),
        bytes: memdev.bytes,
        state: if has_duplicate_serial(&memdevs, memdev) {
            Err(Problem::DuplicateSerial)
        } else {
            region::inspect(sysfs, memdev)
        },
    };
    Ok(memdevs.iter().map(inspected).collect())
}

fn memdevs(sysfs: &Sysfs) -> Result<Vec<Memdev>, CxlError> {
    if !sysfs.has(BUS) {
        return Err(CxlError::NoBus);
    }
    let memdevs = topology::memdevs(sysfs)?;
    if memdevs.is_empty() { Err(CxlError::NoDevice) } else { Ok(memdevs) }
}

fn has_duplicate_serial(memdevs: &[Memdev], memdev: &Memdev) -> bool {
    memdevs.iter().filter(|other| other.serial == memdev.serial).count() > 1
}

impl CxlMemory {
    /// Inspects a machine, and creates a region for each device without one.
    ///
    /// # Errors
    /// There is no CXL bus, or no device on it.
    pub fn discover(sysfs: &Sysfs) -> Result<Self, CxlError> {
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
        let device = self.devices.iter().find(|device| device.serial == serial);
        let device = device.ok_or_else(|| CxlError::NoSuchDevice { serial: serial.to_owned() })?;
        device.slices.as_ref().map_err(|problem| CxlError::Problem {
            serial: serial.to_owned(),
            problem: units::chain(problem),
        })
    }
}

/// Returns the region of each device, or the reason why it has none. Several new regions are
/// planned together.
fn regions(sysfs: &Sysfs, memdevs: &[Memdev]) -> Vec<Result<Region, Problem>> {
    let (mut regions, mut plans) = (BTreeMap::new(), Vec::new());
    for (number, memdev) in memdevs.iter().enumerate() {
        let site = if has_duplicate_serial(memdevs, memdev) {
            Err(Problem::DuplicateSerial)
        } else {
            region::prepare(sysfs, memdev)
        };
        match site {
            Ok(RegionState::Missing(device)) => plans.push((number, device)),
            Ok(RegionState::Present(name)) => {
                drop(regions.insert(number, region::use_existing(sysfs, &name)))
            }
            Err(problem) => drop(regions.insert(number, Err(problem))),
        }
    }
    for (number, device) in plan::assign_windows(plans) {
        regions.insert(number, region::create(sysfs, device));
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
pub(crate) mod fake;
#[cfg(test)]
mod tests;
