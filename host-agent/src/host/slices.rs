//! Slices of one CXL region, each a dax device that is created, bound to a driver, unbound and
//! deleted. Each call reads the current state from sysfs and performs one step after another until
//! the target state is reached. All calls are therefore idempotent, and also complete a slice that
//! a killed agent left between two states. The backends handle contents and memory blocks.
//!
//! ```text
//!  absent ──create──▶ unbound ──bind──▶ device_dax   /dev/daxX.Y can be mapped
//!    ▲                         ──bind──▶ kmem         memory blocks of a node, offline at first
//!    └──delete── unbound ◀───────unbind──┘
//! ```
//!
//! A slice is unbound from kmem only while all its memory blocks are offline. Otherwise its memory
//! would stay with the kernel until a reboot.
//!
//! A device that was bound is deleted and never bound again. Otherwise a process that still maps
//! the device could access the memory of the next owner.

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
    device::{Device, DeviceExtent},
};
pub use self::{
    device::Driver,
    error::{SliceError, Step},
};
use super::{
    blocks::{self, Block},
    sysfs::{Sysfs, SysfsError},
};

/// Maximum number of steps to the target state. The longest sequence of steps, a change of driver,
/// has five.
const RECONCILE_STEPS_MAX: usize = 8;
/// Device-dax alignments that divide the size of a slice, largest first.
const SLICE_ALIGNMENTS: [Bytes; 2] = [Bytes::gib(1), Bytes::mib(2)];
/// Required value of `auto_online_blocks`. With any other value the kernel onlines added blocks
/// itself, and may put unmovable pages into them.
const REQUIRED_ONLINE_POLICY: &str = "offline";

/// CXL region: range of physical memory of one device, with the dax region over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Name of the region, such as `region0`.
    pub name: String,
    /// Physical address of the region's start.
    pub base: u64,
    /// Size of the region.
    pub bytes: Bytes,
    /// Directory of the region's dax devices in sysfs.
    pub folder: PathBuf,
}

/// Slice for which a dax device exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentSlice {
    /// Name of the dax device, such as `dax1.2`, which is also the name of its node in /dev.
    pub device: String,
    /// Device number: `rdev` of the node in /dev.
    pub number: u64,
    /// Driver to which the device is bound, if any.
    pub driver: Option<Driver>,
}

/// Slices of one region.
#[derive(Debug)]
pub struct Slices {
    sysfs: Sysfs,
    region: Region,
    /// NUMA node of the memory when it is bound to kmem.
    node: u32,
    align: Bytes,
    /// Lock that is held while a device is created or removed. A created device is recognized by
    /// its new name, so no other names may change at the same time.
    names: RwLock<()>,
    /// Running steps in which the kernel may wait until pages are unpinned.
    steps: DetachedSteps,
}

impl Slices {
    /// Returns the slices of a region. Releases the memory of the seed device, which the kernel
    /// creates over the whole region, and deletes devices without memory.
    ///
    /// # Errors
    /// [`SliceError::Misaligned`], [`SliceError::ForeignDevice`] if another program uses a part of
    /// the region, or the error of a failed step.
    pub fn open(sysfs: &Sysfs, region: Region) -> Result<Self, SliceError> {
        let slices = Self::inspect(sysfs, region)?;
        for device in slices.devices()? {
            slices.remove_unneeded_device(&device)?;
        }
        Ok(slices)
    }

    /// Returns the slices of a region, without changing any device.
    ///
    /// # Errors
    /// [`SliceError::Misaligned`], or sysfs cannot be read.
    pub fn inspect(sysfs: &Sysfs, region: Region) -> Result<Self, SliceError> {
        let align = alignment(region.base)?;
        let node = device::read_node(sysfs, &region.folder)?;
        Ok(Self {
            sysfs: sysfs.clone(),
            region,
            node,
            align,
            names: RwLock::default(),
            steps: DetachedSteps::default(),
        })
    }

    /// Returns the names of the devices that [`Slices::open`] would empty or delete.
    ///
    /// # Errors
    /// [`SliceError::ForeignDevice`], [`SliceError::BlocksOnline`], or sysfs cannot be read.
    pub fn devices_to_remove(&self) -> Result<Vec<String>, SliceError> {
        let mut names = Vec::new();
        for device in self.devices()? {
            if !self.should_keep_device(&device)? {
                self.check_not_online(&device)?;
                names.push(device.name);
            }
        }
        Ok(names)
    }

    /// Returns the region that contains the slices.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the NUMA node of the slices when they are bound to kmem.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Returns the alignment of a slice's mappings: 1 GiB, or 2 MiB if the region is not aligned to
    /// 1 GiB.
    pub fn align(&self) -> Bytes {
        self.align
    }

    /// Returns the number of slices that are being changed, including stuck slices.
    pub fn changing_slice_count(&self) -> usize {
        self.steps.count()
    }

    /// Returns the number of whole slices in the region. A smaller remainder at the end is not
    /// used.
    pub fn count(&self) -> u32 {
        u32::try_from(self.region.bytes.get() / SLICE.get()).unwrap_or(u32::MAX)
    }

    /// Returns the physical address range of a slice.
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

    /// Returns the slices for which a dax device exists, by index.
    ///
    /// # Errors
    /// Sysfs cannot be read.
    pub fn present_slices(&self) -> Result<BTreeMap<u32, PresentSlice>, SliceError> {
        let devices = self.devices()?.into_iter();
        let slices = devices.filter_map(|device| Some((self.index_of(&device)?, device)));
        Ok(slices.map(|(index, device)| (index, device.into_present_slice())).collect())
    }

    /// Brings a slice from any state to the driver `device_dax`, so that it can be mapped. Returns
    /// its device.
    ///
    /// # Errors
    /// [`SliceError::BlocksOnline`] if one of the slice's memory blocks is online, or the error of
    /// a failed step.
    pub fn ensure_devdax(&self, index: u32) -> Result<PresentSlice, SliceError> {
        self.load_driver(Driver::DeviceDax)?;
        self.reconcile(index, Some(Driver::DeviceDax))?.ok_or(SliceError::DeviceNotCreated)
    }

    /// Brings a slice from any state to the driver `kmem`, so that it consists of memory blocks.
    /// New blocks are offline. Returns the slice's device.
    ///
    /// # Errors
    /// [`SliceError::BlockSize`], [`SliceError::Policy`], or the error of a failed step.
    pub fn ensure_kmem(&self, index: u32) -> Result<PresentSlice, SliceError> {
        self.check_block_size()?;
        check_online_policy(&self.sysfs)?;
        self.load_driver(Driver::Kmem)?;
        self.reconcile(index, Some(Driver::Kmem))?.ok_or(SliceError::DeviceNotCreated)
    }

    /// Unbinds a slice from its driver, even if it is mapped, and deletes its device.
    ///
    /// # Errors
    /// [`SliceError::BlocksOnline`] if one of the slice's memory blocks is online, or the error of
    /// a failed step.
    pub fn remove(&self, index: u32) -> Result<(), SliceError> {
        self.reconcile(index, None).map(drop)
    }

    /// Returns the memory blocks of a slice that is bound to kmem, in ascending order of addresses.
    ///
    /// # Errors
    /// [`SliceError::IndexOutOfRange`], or sysfs cannot be read.
    pub fn blocks(&self, index: u32) -> Result<Vec<Block>, SliceError> {
        Ok(blocks::blocks_in_range(&self.sysfs, &self.range(index)?)?)
    }

    fn reconcile(&self, index: u32, target: Option<Driver>) -> Result<Option<PresentSlice>, SliceError> {
        let range = self.range(index)?;
        let mut is_own = false;
        for _ in 0..RECONCILE_STEPS_MAX {
            let device = self.devices()?.into_iter().find(|device| device.occupies_range(&range));
            // During a stuck unbind sysfs already shows no driver. The next step would wait for the
            // same pinned pages.
            device.as_ref().map_or(Ok(()), |device| self.steps.check_not_running(&device.name))?;
            match next_step(device.as_ref(), target, self.align, is_own) {
                None => return Ok(device.map(Device::into_present_slice)),
                Some(step) => {
                    self.apply_step(step, &range, device.as_ref())?;
                    is_own = step == Step::Create || (is_own && step == Step::Align);
                }
            }
        }
        Err(SliceError::NotSettled { index, target, steps: RECONCILE_STEPS_MAX })
    }

    fn apply_step(&self, step: Step, range: &Range<u64>, device: Option<&Device>) -> Result<(), SliceError> {
        match (step, device) {
            (Step::Create, _) => self.create(range),
            (_, None) => Ok(()), // unreachable: `next_step` returns only `Create` without a device
            (Step::Align, Some(device)) => {
                Ok(self.sysfs.write(self.device_file(device, "align"), &self.align.get().to_string())?)
            }
            (Step::Bind(driver), Some(device)) => Ok(driver.bind(&self.sysfs, &device.name)?),
            (Step::Unbind(driver), Some(device)) => self.unbind(device, driver),
            (Step::Delete, Some(device)) => self.delete(device),
        }
    }

    /// Creates a device over exactly this range. The kernel rejects a range that is partly in use.
    fn create(&self, range: &Range<u64>) -> Result<(), SliceError> {
        let _names = self.lock_device_names();
        let stuck = self.steps.devices();
        let earlier = device::read_devices(&self.sysfs, &self.region.folder)?;
        self.sysfs.write(self.region.folder.join("dax_region/create"), "1")?;
        let after = device::read_devices(&self.sysfs, &self.region.folder)?;
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

    /// Checks that no memory block of a device is online.
    fn check_not_online(&self, device: &Device) -> Result<(), SliceError> {
        match (device.driver, &device.extent) {
            (Some(Driver::Kmem), DeviceExtent::At(range)) => self.check_blocks_offline(&device.name, range),
            _ => Ok(()),
        }
    }

    fn check_blocks_offline(&self, device: &str, range: &Range<u64>) -> Result<(), SliceError> {
        let mut blocks = blocks::blocks_in_range(&self.sysfs, range)?;
        blocks.retain(|block| !block.is_offline());
        let online: Vec<_> = blocks.into_iter().map(|block| block.name).collect();
        if online.is_empty() {
            Ok(())
        } else {
            Err(SliceError::BlocksOnline { device: device.to_owned(), online })
        }
    }

    fn delete(&self, device: &Device) -> Result<(), SliceError> {
        let _names = self.lock_device_names();
        self.release_device(device)
    }

    /// Releases the memory of a device and deletes it. The seed device of a region cannot be
    /// deleted.
    fn release_device(&self, device: &Device) -> Result<(), SliceError> {
        let size = (device.extent != DeviceExtent::Empty).then(|| self.device_file(device, "size"));
        let delete = (!device.is_seed()).then(|| self.region.folder.join("dax_region/delete"));
        let (sysfs, name) = (self.sysfs.clone(), device.name.clone());
        self.steps.run(&device.name, move || {
            size.map_or(Ok(()), |size| sysfs.write(size, "0"))?;
            delete.map_or(Ok(()), |delete| sysfs.write(delete, &name))
        })
    }

    fn lock_device_names(&self) -> RwLockWriteGuard<'_, ()> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether [`Slices::open`] keeps a device: a slice or an empty seed device. `open`
    /// deletes empty devices and releases the memory of a seed device. Other devices belong to
    /// another program.
    ///
    /// # Errors
    /// [`SliceError::ForeignDevice`] if the device belongs to another program.
    fn should_keep_device(&self, device: &Device) -> Result<bool, SliceError> {
        match (&device.extent, device.driver) {
            (DeviceExtent::Empty, None) => Ok(device.is_seed()),
            _ if self.index_of(device).is_some() => Ok(true),
            (_, None | Some(Driver::Kmem)) if device.is_seed() => Ok(false),
            _ => Err(SliceError::ForeignDevice { device: device.name.clone(), driver: device.driver }),
        }
    }

    fn remove_unneeded_device(&self, device: &Device) -> Result<(), SliceError> {
        if self.should_keep_device(device)? {
            return Ok(());
        }
        if let Some(driver) = device.driver {
            self.unbind(device, driver)?;
        }
        self.delete(device)
    }

    /// Returns the index of the slice to which a device belongs. A seed device is never a slice,
    /// even if its range is that of a slice.
    fn index_of(&self, device: &Device) -> Option<u32> {
        if device.is_seed() {
            return None;
        }
        let DeviceExtent::At(range) = &device.extent else { return None };
        let index = u32::try_from(range.start.checked_sub(self.region.base)? / SLICE.get()).ok()?;
        (self.range(index).ok()? == *range).then_some(index)
    }

    fn devices(&self) -> Result<Vec<Device>, SysfsError> {
        let _names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        device::read_devices(&self.sysfs, &self.region.folder)
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

/// Returns the device that was created between two listings: a device with a new name, else an
/// empty device with a reused name. A name can be reused if an abandoned step deleted the device of
/// this name between the listings, because such a step does not hold the lock of names; `ended`
/// contains the devices of such steps.
fn new_device(before: &[Device], ended: &BTreeSet<String>, after: Vec<Device>) -> Option<Device> {
    let (new, old): (Vec<_>, Vec<_>) =
        after.into_iter().partition(|device| !before.iter().any(|old| old.name == device.name));
    let is_reused = |device: &Device| {
        ended.contains(&device.name) && device.extent == DeviceExtent::Empty && device.driver.is_none()
    };
    new.into_iter().next().or_else(|| old.into_iter().find(is_reused))
}

/// Checks that the kernel leaves added memory blocks offline.
///
/// # Errors
/// [`SliceError::Policy`] if added blocks come online automatically, or sysfs cannot be read.
pub fn check_online_policy(sysfs: &Sysfs) -> Result<(), SliceError> {
    match blocks::online_policy(sysfs) {
        Ok(policy) if policy == REQUIRED_ONLINE_POLICY => Ok(()),
        Ok(policy) => Err(SliceError::Policy { policy }),
        Err(error) if error.is_gone() => Ok(()), // a kernel without memory hotplug onlines no block
        Err(error) => Err(error.into()),
    }
}

/// Returns the largest device-dax alignment that divides the address `base`. The kernel also
/// accepts alignments that do not divide `base`, but then maps the wrong memory.
///
/// # Errors
/// [`SliceError::Misaligned`] if no alignment divides `base`.
pub(crate) fn alignment(base: u64) -> Result<Bytes, SliceError> {
    let fitting = SLICE_ALIGNMENTS.into_iter().find(|align| base.is_multiple_of(align.get()));
    fitting.ok_or(SliceError::Misaligned { base, least: SLICE_ALIGNMENTS[1] })
}

/// Returns the next step from the current state to the target state; `None` if the target state is
/// reached. `is_own` means that this call created the device. Any other device without a driver is
/// deleted and not bound, because it may have been unbound while mapped: binding it again would
/// make the memory accessible through that mapping.
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
