//! The CXL memory devices of this machine: which there are, and the region over each, found or made. Slices are numbered from the
//! start of their device's region; what becomes of one is `slices`'s. A device with a problem is told of and left alone.

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

/// Where the kernel shows what is on the CXL bus.
const BUS: &str = "bus/cxl/devices";

/// What a machine has.
#[derive(Debug)]
pub struct Discovered {
    /// Its memory devices, as the kernel numbers them.
    pub devices: Vec<Device>,
}

/// A CXL memory device.
#[derive(Debug)]
pub struct Device {
    /// The kernel's name for it, such as `mem0`; another boot may give it another.
    pub name: String,
    /// Its own name, as sysfs prints it, such as `0x1`: the same on every host that sees it.
    pub serial: String,
    /// How much volatile memory it has.
    pub bytes: Bytes,
    /// Its slices, or what keeps them from being used.
    pub slices: Result<Slices, Problem>,
}

impl Discovered {
    /// Looks at a machine, and makes a region over each device that has none.
    ///
    /// # Errors
    /// There is no CXL bus, or no device on it.
    pub fn find(sysfs: &Sysfs) -> Result<Self, CxlError> {
        if !sysfs.has(BUS) {
            return Err(CxlError::NoBus);
        }
        let memdevs = topology::memdevs(sysfs)?;
        if memdevs.is_empty() {
            return Err(CxlError::NoDevice);
        }
        let regions = regions(sysfs, &memdevs);
        let device = |(memdev, region): (Memdev, Result<Region, Problem>)| Device {
            slices: region.and_then(|region| Ok(Slices::open(sysfs, region)?)),
            name: memdev.name,
            serial: memdev.serial,
            bytes: memdev.bytes,
        };
        Ok(Self { devices: memdevs.into_iter().zip(regions).map(device).collect() })
    }

    /// The slices of a device.
    ///
    /// # Errors
    /// There is no such device, or it has a problem.
    pub fn slices(&self, serial: &str) -> Result<&Slices, CxlError> {
        let found = self.devices.iter().find(|device| device.serial == serial);
        let device = found.ok_or_else(|| CxlError::NoSuchDevice { serial: serial.to_owned() })?;
        device.slices.as_ref().map_err(|problem| CxlError::Problem {
            serial: serial.to_owned(),
            problem: units::chain(problem),
        })
    }
}

/// The region over each device, or what keeps it from having one. Where several are to be made, they are planned together.
fn regions(sysfs: &Sysfs, memdevs: &[Memdev]) -> Vec<Result<Region, Problem>> {
    let (mut regions, mut bare) = (BTreeMap::new(), Vec::new());
    for (number, memdev) in memdevs.iter().enumerate() {
        let is_twin = memdevs.iter().filter(|other| other.serial == memdev.serial).count() > 1;
        let site = if is_twin { Err(Problem::Twins) } else { region::survey(sysfs, memdev) };
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

/// A slice as the manager names it: `cxl:SERIAL:INDEX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceName {
    /// Its device, as sysfs prints the serial.
    pub serial: String,
    /// Which slice of it, in whole GiB from the start of the region.
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
mod tests;
