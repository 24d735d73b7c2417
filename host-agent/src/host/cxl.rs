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

/// A CXL memory device as it stands, with nothing made of it.
#[derive(Debug)]
pub struct Seen {
    /// Its own name, as [`Device::serial`].
    pub serial: String,
    /// How much volatile memory it has.
    pub bytes: Bytes,
    /// What is over it, or what keeps it from being used.
    pub sight: Result<Sight, Problem>,
}

/// What stands over a device that can be used.
#[derive(Debug)]
pub enum Sight {
    /// A region with its slices.
    There(Slices),
    /// A region of this name that no driver has yet.
    Unused(String),
    /// A region of this name that was never finished.
    Unfinished(String),
    /// None yet.
    Bare {
        /// The best window for one.
        window: String,
        /// Where that begins in the host's physical memory.
        start: u64,
    },
}

/// Looks at a machine's memory devices, and changes nothing.
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
    /// Looks at a machine, and makes a region over each device that has none.
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
pub(crate) mod made_up;
#[cfg(test)]
mod tests;
