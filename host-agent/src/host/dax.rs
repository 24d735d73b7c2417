//! A host whose slices are device-dax ranges of CXL memory: never the kernel's own, so nothing pins them, and taken by force
//! where they must be. A slice's device exists while the slice is here. Nothing of it is left in this host's caches when it
//! goes; what another host has of it, only the manager knows.

use std::{
    fs::{File, OpenOptions},
    num::NonZeroU64,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding},
};
use units::{Bytes, ReservationId, SLICE};

use super::{
    Form, Host, HostError, Part,
    cxl::{Discovered, SliceName},
    local::{Local, no_follow},
    memory::{mapped::Mapped, throttle::Throttle},
    opened::{Opened, see_unused},
    slices::{Driver, Found, Slices},
};

/// Where the nodes of devices are.
const NODES: &str = "/dev";

/// Slices as device-dax ranges.
#[derive(Debug)]
pub struct Dax {
    cxl: Arc<Discovered>,
    local: Local,
    open: Opened,
    throttle: Throttle,
    scrubbed: AtomicU64,
}

impl Dax {
    /// A host with this CXL memory. All its scrubs together take so many bytes per second at most.
    pub fn new(cxl: Arc<Discovered>, local_dir: Option<PathBuf>, scrub_bytes_per_s: NonZeroU64) -> Self {
        let throttle = Throttle::new(scrub_bytes_per_s);
        Self {
            cxl,
            local: Local::new(local_dir),
            open: Opened::default(),
            throttle,
            scrubbed: AtomicU64::new(0),
        }
    }

    /// What has been emptied since the start, that of scrubs under way included.
    pub fn scrubbed(&self) -> Bytes {
        Bytes::new(self.scrubbed.load(Ordering::Relaxed))
    }

    fn slice(&self, handle: &Handle) -> Result<(&Slices, u32), HostError> {
        let name: SliceName = handle.place.parse()?;
        Ok((self.cxl.slices(&name.serial)?, name.index))
    }

    /// Maps a slice and makes it zero, which is seen in the memory and not in the caches.
    fn make_zero(&self, file: &File, path: &Path) -> Result<(), HostError> {
        let mapped = map(file, path)?;
        let zeroed = mapped.zero(&self.throttle, &self.scrubbed);
        zeroed.map_err(|errno| HostError::io("zero", path, errno))?;
        see_zero(&mapped, path)
    }
}

impl Host for Dax {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        if self.open.has(holding) {
            return Ok(());
        }
        let (slices, index) = self.slice(handle)?;
        let (file, path) = if check_zero { open_alone(slices, index)? } else { open(slices, index)? };
        if check_zero {
            let zero = map(&file, &path).and_then(|mapped| see_zero(&mapped, &path));
            if zero.is_err() {
                slices.remove(index)?;
            }
            zero?;
        }
        self.open.insert(holding, file, path);
        Ok(())
    }

    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError> {
        let (slices, index) = self.slice(handle)?;
        if let Some(found) = slices.found()?.get(&index) {
            let path = node(found);
            if verify {
                see_unused(&path)?;
            }
            if found.driver == Some(Driver::DeviceDax) {
                write_back(&map(&open_node(found)?, &path)?, &path)?;
            }
            slices.remove(index)?;
        }
        self.open.remove(holding);
        Ok(())
    }

    fn scrub(&self, _: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        let (slices, index) = self.slice(handle)?;
        let (file, path) = open_alone(slices, index)?;
        let zero = self.make_zero(&file, &path);
        slices.remove(index)?;
        zero.map(|()| SLICE)
    }

    fn memory(&self, record: &VmRecord, form: Form) -> Result<Vec<Part>, HostError> {
        let local = self.local.part(record, form)?;
        local.into_iter().map(Ok).chain(self.open.parts(record, form)).collect()
    }

    fn free_local(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.local.free(reservation)
    }
}

fn node(found: &Found) -> PathBuf {
    Path::new(NODES).join(&found.device)
}

fn open(slices: &Slices, index: u32) -> Result<(File, PathBuf), HostError> {
    let found = slices.ensure_devdax(index)?;
    Ok((open_node(&found)?, node(&found)))
}

/// For memory that is nobody's: a device that is still there from another epoch may have a process that still maps it.
fn open_alone(slices: &Slices, index: u32) -> Result<(File, PathBuf), HostError> {
    if let Some(found) = slices.found()?.get(&index) {
        see_unused(&node(found))?;
    }
    open(slices, index)
}

/// Opens a device's node, which must be that device's.
fn open_node(found: &Found) -> Result<File, HostError> {
    let path = node(found);
    let opened = OpenOptions::new().read(true).write(true).custom_flags(no_follow()).open(&path);
    let file = opened.map_err(|errno| HostError::io("open", &path, errno))?;
    let metadata = file.metadata().map_err(|errno| HostError::io("ask about", &path, errno))?;
    let is_it = metadata.file_type().is_char_device() && metadata.rdev() == found.number;
    if is_it { Ok(file) } else { Err(HostError::NotTheDevice { path }) }
}

fn map(file: &File, path: &Path) -> Result<Mapped, HostError> {
    Mapped::map(file, SLICE.get()).map_err(|errno| HostError::io("map", path, errno))
}

fn write_back(mapped: &Mapped, path: &Path) -> Result<(), HostError> {
    mapped.write_back().map_err(|errno| HostError::io("write back caches of", path, errno))
}

/// Before and after it is read, caches forget it: what they hold may be of a time before another host wrote it.
fn see_zero(mapped: &Mapped, path: &Path) -> Result<(), HostError> {
    write_back(mapped, path)?;
    match mapped.first_not_zero().map_err(|errno| HostError::io("read", path, errno))? {
        Some(at) => Err(HostError::NotZero { path: path.to_owned(), at }),
        None => write_back(mapped, path),
    }
}

#[cfg(test)]
mod tests;
