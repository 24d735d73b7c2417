//! One dax device: its attributes in sysfs, and the binding of drivers.

use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

use rustix::fs::makedev;

use super::{PresentSlice, Sysfs, SysfsError};

/// Driver of a dax device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Driver `device_dax`: processes can map the device's node in /dev.
    DeviceDax,
    /// Driver `kmem`: the device is hot-added memory of the kernel.
    Kmem,
}

/// All drivers that a slice can have.
const DRIVERS: [Driver; 2] = [Driver::DeviceDax, Driver::Kmem];

impl Driver {
    /// Returns the name of the driver in sysfs, which is also the name of its module.
    pub fn module(self) -> &'static str {
        match self {
            Self::DeviceDax => "device_dax",
            Self::Kmem => "kmem",
        }
    }

    pub(super) fn folder(self) -> PathBuf {
        Path::new("bus/dax/drivers").join(self.module())
    }

    /// Binds a device to the driver. The kernel matches dax devices of CXL memory to kmem by
    /// default. Writing the name to `new_id` makes `device_dax` accept the device, and binds it
    /// immediately.
    pub(super) fn bind(self, sysfs: &Sysfs, device: &str) -> Result<(), SysfsError> {
        match self {
            Self::DeviceDax => sysfs.write(self.folder().join("new_id"), device),
            Self::Kmem => sysfs.write(self.folder().join("bind"), device),
        }
    }

    /// Unbinds a device from the driver. `remove_id` is written before `unbind`, because a stale id
    /// would bind the next device of this name automatically.
    pub(super) fn unbind(self, sysfs: &Sysfs, device: &str) -> Result<(), SysfsError> {
        if self == Self::DeviceDax {
            sysfs.write(self.folder().join("remove_id"), device)?;
        }
        sysfs.write(self.folder().join("unbind"), device)
    }

    fn from_name(name: &str) -> Option<Self> {
        DRIVERS.into_iter().find(|driver| driver.module() == name)
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.module())
    }
}

/// Memory of a dax device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceExtent {
    /// The device has no memory.
    Empty,
    /// The device has one range of physical addresses.
    At(Range<u64>),
    /// The device has several ranges.
    Scattered,
}

/// Dax device as shown by sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) extent: DeviceExtent,
    /// Alignment of mappings, in bytes.
    pub(super) align: u64,
    /// Device number: `rdev` of the node in /dev.
    pub(super) number: u64,
    pub(super) driver: Option<Driver>,
}

impl Device {
    pub(super) fn into_present_slice(self) -> PresentSlice {
        PresentSlice { device: self.name, number: self.number, driver: self.driver }
    }

    pub(super) fn occupies_range(&self, range: &Range<u64>) -> bool {
        !self.is_seed() && matches!(&self.extent, DeviceExtent::At(at) if at == range)
    }

    /// Returns whether this is the seed device of its region, which the kernel creates and never
    /// deletes.
    pub(super) fn is_seed(&self) -> bool {
        self.name.ends_with(".0")
    }

    /// Returns whether the start of the device's memory is aligned to its `align`. Otherwise its
    /// mappings would contain other memory.
    pub(super) fn is_aligned(&self) -> bool {
        matches!(&self.extent, DeviceExtent::At(range) if range.start.is_multiple_of(self.align))
    }
}

/// Returns the dax devices of a region. Devices that are removed meanwhile are skipped.
pub(super) fn read_devices(sysfs: &Sysfs, folder: &Path) -> Result<Vec<Device>, SysfsError> {
    let read = sysfs.numbered_names(folder, "dax")?.into_iter().map(|name| match read(sysfs, folder, name) {
        Ok(device) => Ok(Some(device)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    });
    read.filter_map(Result::transpose).collect()
}

/// Returns the NUMA node of a region's memory, as shown by the first dax device of the region.
pub(super) fn read_node(sysfs: &Sysfs, folder: &Path) -> Result<u32, SysfsError> {
    let devices = sysfs.numbered_names(folder, "dax")?;
    let no_device = || sysfs.unreadable_error(folder, String::new(), "a directory of dax devices");
    let file = folder.join(devices.first().ok_or_else(no_device)?).join("target_node");
    let text = sysfs.text(&file)?;
    text.parse().map_err(|_| sysfs.unreadable_error(file, text, "the number of a NUMA node"))
}

fn read(sysfs: &Sysfs, folder: &Path, name: String) -> Result<Device, SysfsError> {
    let device = folder.join(&name);
    let extent = read_extent(sysfs, &device)?;
    let (align, driver) = (sysfs.number(device.join("align"))?, sysfs.driver(&device)?);
    let driver = match driver {
        None => None,
        Some(driver) => match Driver::from_name(&driver) {
            None => return Err(sysfs.unreadable_error(device.join("driver"), driver, "device_dax or kmem")),
            driver => driver,
        },
    };
    Ok(Device { number: read_device_number(sysfs, &device)?, name, extent, align, driver })
}

fn read_device_number(sysfs: &Sysfs, device: &Path) -> Result<u64, SysfsError> {
    let text = sysfs.text(device.join("dev"))?;
    let parts =
        text.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    match parts {
        Some((major, minor)) => Ok(makedev(major, minor)),
        None => Err(sysfs.unreadable_error(device.join("dev"), text, "MAJOR:MINOR")),
    }
}

/// Returns the memory of a device. Mappings are only counted by their directory names: Linux 6.12
/// deadlocks if the files of a mapping are read while the device's memory is released.
fn read_extent(sysfs: &Sysfs, device: &Path) -> Result<DeviceExtent, SysfsError> {
    let bytes = sysfs.number(device.join("size"))?;
    match sysfs.numbered_names(device, "mapping")?.len() {
        _ if bytes == 0 => Ok(DeviceExtent::Empty),
        1 => {
            let first = sysfs.number(device.join("resource"))?;
            Ok(DeviceExtent::At(first..first + bytes))
        }
        _ => Ok(DeviceExtent::Scattered),
    }
}
