//! Slices of one CXL region as device-dax devices, from absent to bound and back. Each call
//! inspects the current state and takes the next step until the target is reached: so every call
//! may be repeated, and remains of a killed agent are completed. Contents and memory blocks are
//! handled by the backends.
//!
//! ```text
//!  absent ──create──▶ unbound ──bind──▶ device_dax   /dev/daxX.Y can be mapped
//!    ▲                         ──bind──▶ kmem         memory blocks of a node, offline at first
//!    └──delete── unbound ◀───────unbind──┘
//! ```
//!
//! A slice is unbound from kmem only while all blocks are offline: otherwise they are lost until a
//! reboot.
//!
//! A device that was bound is never bound again: a remaining mapping would reach the memory once
//! more.

mod detached;
mod device;
mod error;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
    process::Command,
    sync::{PoisonError, RwLock, RwLockWriteGuard},
};

use units::{Bytes, SLICE};

use self::{
    detached::DetachedSteps,
    device::{Device, Extent},
};
pub use self::{
    device::Driver,
    error::{SliceError, Step},
};
use super::{
    blocks::{self, Block},
    sysfs::{Sysfs, SysfsError},
};

/// Steps after which a slice must have reached its target: a change of driver takes five.
const STEPS_MAX: usize = 8;
/// Alignments of device-dax that a slice can have, largest first.
const ALIGNMENTS: [Bytes; 2] = [Bytes::gib(1), Bytes::mib(2)];
/// Required policy of the kernel for added blocks. Where they come online by themselves, the kernel
/// uses them for anything.
const REQUIRED_POLICY: &str = "offline";

/// Range of physical memory of one device, with the kernel's dax region over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Name, such as `region0`.
    pub name: String,
    /// Physical address of its start.
    pub base: u64,
    /// Size.
    pub bytes: Bytes,
    /// Folder of its dax devices.
    pub folder: PathBuf,
}

/// Slice that has a device in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentSlice {
    /// Name of its dax device, such as `dax1.2`, and of the node in /dev.
    pub device: String,
    /// Number of the device: `rdev` of its node.
    pub number: u64,
    /// Bound driver, if any.
    pub driver: Option<Driver>,
}

/// Slices of one region.
#[derive(Debug)]
pub struct Slices {
    sysfs: Sysfs,
    region: Region,
    /// NUMA node of its memory, if the kernel uses it.
    node: u32,
    align: Bytes,
    /// Lock of the device names: a new device is recognized by a new name, so no other device may
    /// be created or removed meanwhile.
    names: RwLock<()>,
    /// Steps in which the kernel may wait for pinned pages.
    steps: DetachedSteps,
}

impl Slices {
    /// Returns the slices of a region. Empties the seed device, which the kernel creates over a
    /// whole region, and removes devices without memory.
    ///
    /// # Errors
    /// The region is not aligned, another program uses a part of it, or the kernel's error.
    pub fn open(sysfs: &Sysfs, region: Region) -> Result<Self, SliceError> {
        let slices = Self::inspect(sysfs, region)?;
        for device in slices.devices()? {
            slices.remove_unneeded(&device)?;
        }
        Ok(slices)
    }

    /// Returns the slices of a region, without changes.
    ///
    /// # Errors
    /// The region is not aligned, or the kernel's error.
    pub fn inspect(sysfs: &Sysfs, region: Region) -> Result<Self, SliceError> {
        let align = alignment(region.base)?;
        let node = device::node(sysfs, &region.folder)?;
        Ok(Self {
            sysfs: sysfs.clone(),
            region,
            node,
            align,
            names: RwLock::default(),
            steps: DetachedSteps::default(),
        })
    }

    /// Returns the names of the devices that [`Slices::open`] would remove.
    ///
    /// # Errors
    /// The same.
    pub fn devices_to_remove(&self) -> Result<Vec<String>, SliceError> {
        let mut names = Vec::new();
        for device in self.devices()? {
            if !self.should_keep(&device)? {
                self.check_not_online(&device)?;
                names.push(device.name);
            }
        }
        Ok(names)
    }

    /// Returns their region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the NUMA node of their memory, if the kernel uses it.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Returns the alignment of mappings of a slice: 1 GiB, or 2 MiB if the region is not aligned
    /// to 1 GiB.
    pub fn align(&self) -> Bytes {
        self.align
    }

    /// Returns the number of slices with a change in progress, including stuck ones.
    pub fn changing(&self) -> usize {
        self.steps.count()
    }

    /// Returns their number; a remainder behind the last whole slice is not used.
    pub fn count(&self) -> u32 {
        u32::try_from(self.region.bytes.get() / SLICE.get()).unwrap_or(u32::MAX)
    }

    /// Returns the range of a slice in physical memory.
    ///
    /// # Errors
    /// [`SliceError::IndexOutOfRange`].
    pub fn range(&self, index: u32) -> Result<Range<u64>, SliceError> {
        if index >= self.count() {
            return Err(SliceError::IndexOutOfRange {
                index,
                count: self.count(),
                region: self.region.name.clone(),
            });
        }
        let start = self.region.base + Bytes::slices(index).get();
        Ok(start..start + SLICE.get())
    }

    /// Returns the slices in the kernel, by index.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn present_slices(&self) -> Result<BTreeMap<u32, PresentSlice>, SliceError> {
        let devices = self.devices()?.into_iter();
        let slices = devices.filter_map(|device| Some((self.index_of(&device)?, device)));
        Ok(slices.map(|(index, device)| (index, device.into_present_slice())).collect())
    }

    /// Makes a slice mappable from any state, and returns its device.
    ///
    /// # Errors
    /// The kernel's error; one of its blocks is online.
    pub fn ensure_devdax(&self, index: u32) -> Result<PresentSlice, SliceError> {
        self.load_driver(Driver::DeviceDax)?;
        self.reconcile(index, Some(Driver::DeviceDax))?.ok_or(SliceError::DeviceNotCreated)
    }

    /// Makes a slice memory blocks of the kernel from any state. They are offline unless they were
    /// online before.
    ///
    /// # Errors
    /// The kernel's error; its blocks are larger than a slice or would come online by themselves.
    pub fn ensure_kmem(&self, index: u32) -> Result<PresentSlice, SliceError> {
        self.check_block_size()?;
        check_online_policy(&self.sysfs)?;
        self.load_driver(Driver::Kmem)?;
        self.reconcile(index, Some(Driver::Kmem))?.ok_or(SliceError::DeviceNotCreated)
    }

    /// Unbinds a slice, by force if it is mapped, and removes its device.
    ///
    /// # Errors
    /// The kernel's error; one of its blocks is online.
    pub fn remove(&self, index: u32) -> Result<(), SliceError> {
        self.reconcile(index, None).map(drop)
    }

    /// Returns the memory blocks of a slice that is bound to kmem, lowest first.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn blocks(&self, index: u32) -> Result<Vec<Block>, SliceError> {
        Ok(blocks::within(&self.sysfs, &self.range(index)?)?)
    }

    fn reconcile(&self, index: u32, target: Option<Driver>) -> Result<Option<PresentSlice>, SliceError> {
        let range = self.range(index)?;
        let mut is_own = false;
        for _ in 0..STEPS_MAX {
            let device = self.devices()?.into_iter().find(|device| device.is_at(&range));
            // A device with a stuck unbind has no driver in sysfs: the next step would wait for the
            // same pages.
            device.as_ref().map_or(Ok(()), |device| self.steps.check(&device.name))?;
            match next_step(device.as_ref(), target, self.align, is_own) {
                None => return Ok(device.map(Device::into_present_slice)),
                Some(step) => {
                    self.apply_step(step, &range, device.as_ref())?;
                    is_own = step == Step::Create || (is_own && step == Step::Align);
                }
            }
        }
        Err(SliceError::NotSettled { index, target, steps: STEPS_MAX })
    }

    fn apply_step(&self, step: Step, range: &Range<u64>, device: Option<&Device>) -> Result<(), SliceError> {
        match (step, device) {
            (Step::Create, _) => self.create(range),
            (_, None) => Ok(()), // no step is possible, which the next inspection reports
            (Step::Align, Some(device)) => {
                Ok(self.sysfs.write(self.device_file(device, "align"), &self.align.get().to_string())?)
            }
            (Step::Bind(driver), Some(device)) => Ok(driver.bind(&self.sysfs, &device.name)?),
            (Step::Unbind(driver), Some(device)) => self.unbind(device, driver),
            (Step::Delete, Some(device)) => self.delete(device),
        }
    }

    /// Creates the device over exactly this range: the kernel rejects it if a part is in use.
    fn create(&self, range: &Range<u64>) -> Result<(), SliceError> {
        let _names = self.lock_names();
        let stuck = self.steps.devices();
        let earlier = device::all(&self.sysfs, &self.region.folder)?;
        self.sysfs.write(self.region.folder.join("dax_region/create"), "1")?;
        let after = device::all(&self.sysfs, &self.region.folder)?;
        let ended = &stuck - &self.steps.devices();
        let created = new_device(&earlier, &ended, after).ok_or(SliceError::DeviceNotCreated)?;
        let place = format!("{:x}-{:x}", range.start, range.end - 1);
        let placed = self.sysfs.write(self.device_file(&created, "mapping"), &place);
        if placed.is_err() {
            self.release_device(&created)?;
        }
        Ok(placed?)
    }

    fn unbind(&self, device: &Device, driver: Driver) -> Result<(), SliceError> {
        self.check_not_online(device)?;
        let (sysfs, name) = (self.sysfs.clone(), device.name.clone());
        self.steps.run(&device.name, move || driver.unbind(&sysfs, &name))
    }

    /// Verifies that no memory of a device is online.
    fn check_not_online(&self, device: &Device) -> Result<(), SliceError> {
        match (device.driver, &device.extent) {
            (Some(Driver::Kmem), Extent::At(range)) => self.check_blocks_offline(&device.name, range),
            _ => Ok(()),
        }
    }

    fn check_blocks_offline(&self, device: &str, range: &Range<u64>) -> Result<(), SliceError> {
        let mut blocks = blocks::within(&self.sysfs, range)?;
        blocks.retain(|block| !block.is_offline());
        let online: Vec<_> = blocks.into_iter().map(|block| block.name).collect();
        if online.is_empty() {
            Ok(())
        } else {
            Err(SliceError::BlocksOnline { device: device.to_owned(), online })
        }
    }

    fn delete(&self, device: &Device) -> Result<(), SliceError> {
        let _names = self.lock_names();
        self.release_device(device)
    }

    /// Releases the memory of a device and deletes it. The seed device of a region cannot be
    /// deleted.
    fn release_device(&self, device: &Device) -> Result<(), SliceError> {
        let size = (device.extent != Extent::Empty).then(|| self.device_file(device, "size"));
        let delete = (!device.is_seed()).then(|| self.region.folder.join("dax_region/delete"));
        let (sysfs, name) = (self.sysfs.clone(), device.name.clone());
        self.steps.run(&device.name, move || {
            size.map_or(Ok(()), |size| sysfs.write(size, "0"))?;
            delete.map_or(Ok(()), |delete| sysfs.write(delete, &name))
        })
    }

    fn lock_names(&self) -> RwLockWriteGuard<'_, ()> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a device is kept: slices and an empty seed device are; other devices belong
    /// to the kernel, and are removed, or to another program.
    fn should_keep(&self, device: &Device) -> Result<bool, SliceError> {
        match (&device.extent, device.driver) {
            (Extent::Empty, None) => Ok(device.is_seed()),
            _ if self.index_of(device).is_some() => Ok(true),
            (_, None | Some(Driver::Kmem)) if device.is_seed() => Ok(false),
            _ => Err(SliceError::ForeignDevice { device: device.name.clone(), driver: device.driver }),
        }
    }

    fn remove_unneeded(&self, device: &Device) -> Result<(), SliceError> {
        if self.should_keep(device)? {
            return Ok(());
        }
        if let Some(driver) = device.driver {
            self.unbind(device, driver)?;
        }
        self.delete(device)
    }

    /// A seed device is not a slice, even if it has the size of one.
    fn index_of(&self, device: &Device) -> Option<u32> {
        if device.is_seed() {
            return None;
        }
        let Extent::At(range) = &device.extent else { return None };
        let index = u32::try_from(range.start.checked_sub(self.region.base)? / SLICE.get()).ok()?;
        (self.range(index).ok()? == *range).then_some(index)
    }

    fn devices(&self) -> Result<Vec<Device>, SysfsError> {
        let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        device::all(&self.sysfs, &self.region.folder)
    }

    fn device_file(&self, device: &Device, file: &str) -> PathBuf {
        self.region.folder.join(&device.name).join(file)
    }

    fn load_driver(&self, driver: Driver) -> Result<(), SliceError> {
        let folder = driver.folder();
        if self.sysfs.has(&folder) {
            return Ok(());
        }
        let loaded = Command::new("modprobe").arg(driver.module()).output();
        let output =
            loaded.map_or_else(|error| error.to_string(), |out| String::from_utf8_lossy(&out.stderr).into());
        if self.sysfs.has(&folder) { Ok(()) } else { Err(SliceError::NoDriver { driver, output }) }
    }

    fn check_block_size(&self) -> Result<(), SliceError> {
        let block = blocks::size(&self.sysfs)?;
        let fits = |bytes: u64| bytes.is_multiple_of(block.get());
        let base = self.region.base;
        if fits(base) && fits(SLICE.get()) { Ok(()) } else { Err(SliceError::BlockSize { block, base }) }
    }
}

/// Returns the device created between two listings. An abandoned step does not hold the lock of
/// names: if it ended between the listings, the new device may have the name of its device.
fn new_device(before: &[Device], ended: &BTreeSet<String>, after: Vec<Device>) -> Option<Device> {
    let (new, old): (Vec<_>, Vec<_>) =
        after.into_iter().partition(|device| !before.iter().any(|old| old.name == device.name));
    let is_reused = |device: &Device| {
        ended.contains(&device.name) && device.extent == Extent::Empty && device.driver.is_none()
    };
    new.into_iter().next().or_else(|| old.into_iter().find(is_reused))
}

/// Checks that memory blocks stay offline by default.
///
/// # Errors
/// [`SliceError::Policy`], or the kernel does not report it.
pub fn check_online_policy(sysfs: &Sysfs) -> Result<(), SliceError> {
    match blocks::policy(sysfs) {
        Ok(policy) if policy == REQUIRED_POLICY => Ok(()),
        Ok(policy) => Err(SliceError::Policy { policy }),
        Err(error) if error.is_gone() => Ok(()), // it cannot add memory at all
        Err(error) => Err(error.into()),
    }
}

/// Returns the largest alignment of an address. The kernel accepts larger ones, and then maps other
/// memory.
pub(crate) fn alignment(base: u64) -> Result<Bytes, SliceError> {
    let fitting = ALIGNMENTS.into_iter().find(|align| base.is_multiple_of(align.get()));
    fitting.ok_or(SliceError::Misaligned { base, least: ALIGNMENTS[1] })
}

/// Returns the next step from the current state to the target; `None` if it is reached. A device
/// without a driver that was not just created may have been unbound while mapped: bound again, it
/// would make the memory accessible through that mapping.
fn next_step(device: Option<&Device>, target: Option<Driver>, align: Bytes, is_own: bool) -> Option<Step> {
    let Some(device) = device else { return target.map(|_| Step::Create) };
    match (device.driver, target) {
        (Some(driver), Some(target)) if driver == target && device.is_aligned() => None,
        (Some(driver), _) => Some(Step::Unbind(driver)),
        (None, Some(_)) if !is_own => Some(Step::Delete),
        (None, Some(Driver::DeviceDax)) if device.align != align.get() => Some(Step::Align),
        (None, Some(target)) => Some(Step::Bind(target)),
        (None, None) => Some(Step::Delete),
    }
}

#[cfg(test)]
mod tests;
