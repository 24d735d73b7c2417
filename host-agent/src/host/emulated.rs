//! Backend `emulated`: slices are sparse files of an emulated EMC. The location of a slice is the
//! path of its file; only the EMC interprets the file name.

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding, ObservedVm, SeenDevice},
};
use rustix::fs::OFlags;
use units::{Bytes, ReservationId, SLICE};

use super::{
    Counters, Host, HostError, MemoryForm, MemoryRegion, Usage,
    local_memory::LocalMemory,
    memory_file::no_follow_flag,
    open_slices::{OpenSlices, check_slice_unused},
    process::FileId,
    zero,
};

/// Implementation of [`Host`] for the backend `emulated`.
#[derive(Debug)]
pub struct Emulated {
    local: LocalMemory,
    open: OpenSlices,
}

impl Emulated {
    /// Creates a host without open slices. If `local_dir` is set, local memory can be passed by
    /// path.
    pub fn new(local_dir: Option<PathBuf>) -> Self {
        Self { local: LocalMemory::new(local_dir), open: OpenSlices::default() }
    }
}

impl Host for Emulated {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        if self.open.has(holding) {
            return Ok(());
        }
        let path = Path::new(&*handle.place);
        let file = open_slice(path)?;
        if check_zero {
            verify_zero(&file, path)?;
        }
        self.open.insert(holding, file, path.to_owned());
        Ok(())
    }

    fn check_slices_unused(&self, record: &VmRecord) -> Result<(), HostError> {
        record.slices.values().try_for_each(|handle| check_slice_unused(Path::new(&*handle.place)))
    }

    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError> {
        if verify {
            check_slice_unused(Path::new(&*handle.place))?;
        }
        self.open.remove(holding);
        Ok(())
    }

    fn usage(&self, reservation: ReservationId, vm: &ObservedVm) -> Usage {
        let pool = self.open.allocated_bytes(&vm.slices);
        let local = self.local.allocated_bytes(reservation, vm, self.open.shared_bytes(&vm.slices));
        Usage { local, pool, overflow: None }
    }

    fn observable_files(&self, slices: &[Holding]) -> Result<BTreeSet<FileId>, &'static str> {
        self.open.observable_files(slices)
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn devices(&self) -> Vec<SeenDevice> {
        Vec::new()
    }

    /// Returns no slices: files that an earlier agent had open were closed when it ended.
    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError> {
        Ok(Vec::new())
    }

    fn close_orphaned_slice(&self, _: &str) -> Result<(), HostError> {
        Ok(())
    }

    fn scrub(&self, _: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        let path = Path::new(&*handle.place);
        let file = open_slice(path)?;
        zero::fill_with_zeros(&file, SLICE.get()).map_err(|errno| HostError::io("zero", path, errno))?;
        verify_zero(&file, path)?;
        Ok(SLICE)
    }

    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<Vec<MemoryRegion>, HostError> {
        let local = self.local.region(record, form)?;
        local.into_iter().map(Ok).chain(self.open.regions(record, form)).collect()
    }

    fn free_local_memory(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.local.free(reservation)
    }
}

/// Opens the file of a slice. The file of a revoked slice is shorter than a slice, or missing. A
/// file with several links also has a path outside the EMC, and is not accepted.
fn open_slice(path: &Path) -> Result<File, HostError> {
    let flags = no_follow_flag() | OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let file = opened.map_err(|errno| HostError::io("open", path, errno))?;
    let metadata = file.metadata().map_err(|errno| HostError::io("stat", path, errno))?;
    if !metadata.is_file() || metadata.len() != SLICE.get() {
        return Err(HostError::NotASlice { path: path.to_owned(), bytes: metadata.len() });
    }
    if metadata.nlink() > 1 {
        return Err(HostError::LinkedSlice { path: path.to_owned(), links: metadata.nlink() });
    }
    Ok(file)
}

fn verify_zero(file: &File, path: &Path) -> Result<(), HostError> {
    match zero::first_nonzero_offset(file, SLICE.get()) {
        Ok(None) => Ok(()),
        Ok(Some(at)) => Err(HostError::NotZero { path: path.to_owned(), at }),
        Err(errno) => Err(HostError::io("read", path, errno)),
    }
}

#[cfg(test)]
mod tests;
