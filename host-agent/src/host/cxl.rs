//! Discovery of the CXL memory devices of this machine. Each device gets one region over its whole
//! memory: an existing region is used, otherwise a region is created. Slices are numbered from the
//! start of the region. The module `slices` changes them. A device with a problem is reported and
//! not used.

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

/// Directory of the devices on the CXL bus in sysfs.
const BUS: &str = "bus/cxl/devices";

/// CXL memory devices of a machine.
#[derive(Debug)]
pub struct CxlMemory {
    /// Memory devices, in the order of their kernel names.
    pub devices: Vec<Device>,
}

/// CXL memory device with its slices.
#[derive(Debug)]
pub struct Device {
    /// Name in the kernel, such as `mem0`, which may change at a reboot.
    pub name: String,
    /// Serial number in the notation of sysfs, such as `0x1`. It is the same on all hosts that
    /// share the device.
    pub serial: String,
    /// Volatile capacity of the device.
    pub bytes: Bytes,
    /// Slices of the device, or the reason why the device cannot be used.
    pub slices: Result<Slices, Problem>,
}

/// CXL memory device as found by [`inspect`], without changes.
#[derive(Debug)]
pub struct InspectedDevice {
    /// Serial number, as [`Device::serial`].
    pub serial: String,
    /// Volatile capacity of the device.
    pub bytes: Bytes,
    /// State of the device's region, or the reason why the device cannot be used.
    pub state: Result<DeviceState, Problem>,
}

/// State of the region of a usable device.
#[derive(Debug)]
pub enum DeviceState {
    /// The device has a region with slices.
    Present(Slices),
    /// The device has a region of this name that is not bound to a driver.
    Unbound(String),
    /// The device has a region of this name whose creation was interrupted.
    Incomplete(String),
    /// The device has no region.
    NoRegion {
        /// Name of the preferred window for a region.
        window: String,
        /// Physical address at which the window begins.
        start: u64,
    },
}

/// Returns the state of all CXL memory devices, without changing any.
///
/// # Errors
/// [`CxlError::NoBus`], [`CxlError::NoDevice`], or sysfs cannot be read.
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
    /// Finds all CXL memory devices, and creates a region for each device that has none.
    ///
    /// # Errors
    /// [`CxlError::NoBus`], [`CxlError::NoDevice`], or sysfs cannot be read.
    pub fn discover_devices(sysfs: &Sysfs) -> Result<Self, CxlError> {
        let memdevs = memdevs(sysfs)?;
        let regions = ensure_regions(sysfs, &memdevs);
        let device = |(memdev, region): (Memdev, Result<Region, Problem>)| Device {
            slices: region.and_then(|region| Ok(Slices::open(sysfs, region)?)),
            name: memdev.name,
            serial: memdev.serial,
            bytes: memdev.bytes,
        };
        Ok(Self { devices: memdevs.into_iter().zip(regions).map(device).collect() })
    }

    /// Returns the slices of the device with a serial number.
    ///
    /// # Errors
    /// [`CxlError::NoSuchDevice`], or [`CxlError::Problem`] if the device cannot be used.
    pub fn slices(&self, serial: &str) -> Result<&Slices, CxlError> {
        let device = self.devices.iter().find(|device| device.serial == serial);
        let device = device.ok_or_else(|| CxlError::NoSuchDevice { serial: serial.to_owned() })?;
        device.slices.as_ref().map_err(|problem| CxlError::Problem {
            serial: serial.to_owned(),
            problem: units::chain(problem),
        })
    }
}

/// Returns the region of each device, or the reason why the device has none. Creates missing
/// regions, and chooses the windows for all of them together.
fn ensure_regions(sysfs: &Sysfs, memdevs: &[Memdev]) -> Vec<Result<Region, Problem>> {
    let (mut regions, mut plans) = (BTreeMap::new(), Vec::new());
    for (number, memdev) in memdevs.iter().enumerate() {
        let region = if has_duplicate_serial(memdevs, memdev) {
            Err(Problem::DuplicateSerial)
        } else {
            region::prepare_region(sysfs, memdev)
        };
        match region {
            Ok(RegionState::Missing(device)) => plans.push((number, device)),
            Ok(RegionState::Present(name)) => {
                drop(regions.insert(number, region::use_existing_region(sysfs, &name)))
            }
            Err(problem) => drop(regions.insert(number, Err(problem))),
        }
    }
    for (number, device) in plan::assign_windows(plans) {
        regions.insert(number, region::create(sysfs, device));
    }
    regions.into_values().collect()
}

/// Name of a slice in the notation `cxl:SERIAL:INDEX` of the manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceName {
    /// Serial number of the slice's device.
    pub serial: String,
    /// Index of the slice: its distance from the start of the region, in GiB.
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
