//! Access to slices of CXL memory through device-dax: opening, verifying, zeroing and closing them.
//! Closing flushes this host's caches, so that no stale cache line is written back later. The
//! manager decides which host owns a slice.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    num::NonZeroU64,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use pool::protocol::SeenDevice;
use units::{Bytes, SLICE};

use super::{
    HostError,
    cxl::{CxlMemory, Device, SliceName},
    memory::{mapped::MappedMemory, throttle::Throttle},
    memory_file::no_follow_flag,
    open_slices::check_slice_unused,
    slices::{PresentSlice, Slices},
};

/// Directory of device nodes.
const DEV_FOLDER: &str = "/dev";

/// Slices of a machine's CXL memory.
#[derive(Debug)]
pub struct CxlSlices {
    cxl: CxlMemory,
    /// Rate limit of all scrubs together.
    throttle: Throttle,
    /// Bytes zeroed since the start.
    scrubbed: AtomicU64,
}

impl CxlSlices {
    /// Creates the slices of these devices. `scrub_bytes_per_s` limits all scrubs together, in
    /// bytes per second.
    pub fn new(cxl: CxlMemory, scrub_bytes_per_s: NonZeroU64) -> Self {
        Self { cxl, throttle: Throttle::new(scrub_bytes_per_s), scrubbed: AtomicU64::new(0) }
    }

    /// Returns the amount of memory zeroed since the start, including scrubs in progress.
    pub(super) fn scrubbed_bytes(&self) -> Bytes {
        Bytes::new(self.scrubbed.load(Ordering::Relaxed))
    }

    /// Returns the number of slices that are being changed, including stuck slices.
    pub(super) fn changing_slice_count(&self) -> u64 {
        let usable = self.cxl.devices.iter().filter_map(|device| device.slices.as_ref().ok());
        usable.map(|slices| slices.changing_slice_count() as u64).sum()
    }

    /// Returns the devices as reported to the manager.
    pub(super) fn devices(&self) -> Vec<SeenDevice> {
        let reported = |device: &Device| {
            let (slices, problem) = match &device.slices {
                Ok(slices) => (slices.count(), None),
                Err(problem) => (0, Some(units::chain(problem))),
            };
            SeenDevice { serial: device.serial.clone(), slices, problem }
        };
        self.cxl.devices.iter().map(reported).collect()
    }

    /// Returns the NUMA nodes that contain the slices when these are used as memory blocks.
    pub(super) fn nodes(&self) -> BTreeSet<u32> {
        let usable = self.cxl.devices.iter().filter_map(|device| device.slices.as_ref().ok());
        usable.map(Slices::node).collect()
    }

    /// Finds a slice by its location `cxl:SERIAL:INDEX`. Returns all slices of its device, and the
    /// index of the slice.
    pub(super) fn slice(&self, place: &str) -> Result<(&Slices, u32), HostError> {
        let name: SliceName = place.parse()?;
        Ok((self.cxl.slices(&name.serial)?, name.index))
    }

    /// Returns the locations of all slices for which a dax device exists.
    pub(super) fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError> {
        let mut places = Vec::new();
        for device in &self.cxl.devices {
            let Ok(slices) = &device.slices else { continue };
            let name = |index| SliceName { serial: device.serial.clone(), index }.to_string();
            places.extend(slices.present_slices()?.into_keys().map(|index| Arc::from(name(index))));
        }
        Ok(places)
    }

    /// Opens a slice without verifying its contents.
    pub(super) fn open(&self, place: &str) -> Result<(File, PathBuf), HostError> {
        let (slices, index) = self.slice(place)?;
        open(slices, index)
    }

    /// Opens a slice that no process uses, and verifies that it is zero. If it is not, the slice is
    /// closed again.
    pub(super) fn open_verified_slice(&self, place: &str) -> Result<(File, PathBuf), HostError> {
        let (slices, index) = self.slice(place)?;
        let (file, path) = open_unused_slice(slices, index)?;
        match map(&file, &path).and_then(|mapped| verify_zero(&mapped, &path, None)) {
            Ok(()) => Ok((file, path)),
            Err(error) => {
                slices.remove(index)?;
                Err(error)
            }
        }
    }

    /// Checks that no process has a slice open or mapped.
    pub(super) fn check_slice_unused(&self, place: &str) -> Result<(), HostError> {
        let (slices, index) = self.slice(place)?;
        slices
            .present_slices()?
            .get(&index)
            .map_or(Ok(()), |present| check_slice_unused(&device_node(present)))
    }

    /// Revokes a slice from its users, and removes its data from the caches of this host.
    ///
    /// The caches are flushed in every call, even if the slice is closed already: its users may
    /// have written until they lost access, and an earlier agent may have ended before it flushed
    /// the caches.
    pub(super) fn close(&self, place: &str) -> Result<(), HostError> {
        let (slices, index) = self.slice(place)?;
        slices.remove(index)?;
        let (file, path) = open(slices, index)?;
        flush_caches(&map(&file, &path)?, &path)?;
        Ok(slices.remove(index)?)
    }

    /// Zeroes a slice that no process uses, verifies the zeros in memory instead of in caches, and
    /// closes the slice.
    pub(super) fn scrub(&self, place: &str) -> Result<Bytes, HostError> {
        let (slices, index) = self.slice(place)?;
        let (file, path) = open_unused_slice(slices, index)?;
        let result = self.fill_with_zeros(&file, &path);
        slices.remove(index)?;
        result.map(|()| SLICE)
    }

    fn fill_with_zeros(&self, file: &File, path: &Path) -> Result<(), HostError> {
        let mapped = map(file, path)?;
        let zeroed = mapped.zero(&self.throttle, &self.scrubbed);
        zeroed.map_err(|errno| HostError::io("zero", path, errno))?;
        verify_zero(&mapped, path, Some(&self.throttle))
    }
}

fn device_node(present: &PresentSlice) -> PathBuf {
    Path::new(DEV_FOLDER).join(&present.device)
}

fn open(slices: &Slices, index: u32) -> Result<(File, PathBuf), HostError> {
    let present = slices.ensure_devdax(index)?;
    Ok((open_device_node(&present)?, device_node(&present)))
}

/// Opens a slice after checking that no process uses it. Without the check, a process that still
/// maps a device of an earlier epoch could write to the slice.
fn open_unused_slice(slices: &Slices, index: u32) -> Result<(File, PathBuf), HostError> {
    if let Some(present) = slices.present_slices()?.get(&index) {
        check_slice_unused(&device_node(present))?;
    }
    open(slices, index)
}

/// Opens the device node in /dev, and checks that it belongs to the slice's device.
fn open_device_node(present: &PresentSlice) -> Result<File, HostError> {
    let path = device_node(present);
    let opened = OpenOptions::new().read(true).write(true).custom_flags(no_follow_flag()).open(&path);
    let file = opened.map_err(|errno| HostError::io("open", &path, errno))?;
    let metadata = file.metadata().map_err(|errno| HostError::io("stat", &path, errno))?;
    let is_same_device = metadata.file_type().is_char_device() && metadata.rdev() == present.number;
    if is_same_device { Ok(file) } else { Err(HostError::NotTheDevice { path }) }
}

fn map(file: &File, path: &Path) -> Result<MappedMemory, HostError> {
    MappedMemory::map(file, SLICE.get()).map_err(|errno| HostError::io("map", path, errno))
}

fn flush_caches(mapped: &MappedMemory, path: &Path) -> Result<(), HostError> {
    mapped.flush_caches().map_err(|errno| HostError::io("flush the caches of", path, errno))
}

/// Verifies that a slice is zero in memory. The caches are flushed before the read, because they
/// may be older than the last write of another host, and after the read, because another host may
/// write later.
fn verify_zero(mapped: &MappedMemory, path: &Path, throttle: Option<&Throttle>) -> Result<(), HostError> {
    flush_caches(mapped, path)?;
    match mapped.first_nonzero_offset(throttle).map_err(|errno| HostError::io("read", path, errno))? {
        Some(at) => Err(HostError::NotZero { path: path.to_owned(), at }),
        None => flush_caches(mapped, path),
    }
}
