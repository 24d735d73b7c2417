//! Open slices, with descriptor and path, and the forms in which VMs receive them. Slices are
//! opened by the backends.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError},
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding},
};
use units::{Bytes, SLICE, UserId};

use super::{
    HostError, MemoryForm, MemoryRegion, RegionBacking,
    memory_file::{allocated, change_owner},
    process::{self, FileId},
    user_of,
};

/// Some machines hide a process even from root, which is logged once.
static UNREADABLE_PROCESSES: Once = Once::new();

/// Open slices.
#[derive(Debug, Default)]
pub(super) struct OpenSlices(Mutex<BTreeMap<Holding, (Arc<OwnedFd>, PathBuf)>>);

impl OpenSlices {
    /// A poisoned map is consistent: no call leaves it half changed.
    fn table(&self) -> MutexGuard<'_, BTreeMap<Holding, (Arc<OwnedFd>, PathBuf)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has(&self, holding: Holding) -> bool {
        self.table().contains_key(&holding)
    }

    pub(super) fn insert(&self, holding: Holding, file: File, path: PathBuf) {
        self.table().insert(holding, (Arc::new(file.into()), path));
    }

    /// Inserts a file without a name. Its path is in /proc while the agent has it open.
    pub(super) fn insert_memfd(&self, holding: Holding, file: File) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        self.insert(holding, file, path.into());
    }

    pub(super) fn file(&self, holding: Holding) -> Option<Arc<OwnedFd>> {
        self.table().get(&holding).map(|(file, _)| Arc::clone(file))
    }

    pub(super) fn files_without(&self, slices: &BTreeSet<Holding>) -> Vec<Arc<OwnedFd>> {
        let table = self.table();
        let others = table.iter().filter(|(holding, _)| !slices.contains(holding));
        others.map(|(_, (file, _))| Arc::clone(file)).collect()
    }

    pub(super) fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.table().values().map(|(file, _)| Arc::clone(file)).collect()
    }

    /// Sums the sizes of these slices' files as the file system counts them, in bytes. `None` if
    /// one is not open, or is a device.
    pub(super) fn allocated(&self, slices: &[Holding]) -> Option<Bytes> {
        let table = self.table();
        slices.iter().map(|holding| allocated(&table.get(holding)?.0)).sum()
    }

    pub(super) fn remove(&self, holding: Holding) {
        self.table().remove(&holding);
    }

    /// Returns a VM's slices, in order.
    pub(super) fn regions(
        &self,
        record: &VmRecord,
        form: MemoryForm,
    ) -> impl Iterator<Item = Result<MemoryRegion, HostError>> {
        let user = user_of(record);
        record.slices.iter().map(move |(holding, handle)| self.region(*holding, handle, form, user))
    }

    fn region(
        &self,
        holding: Holding,
        handle: &Handle,
        form: MemoryForm,
        user: UserId,
    ) -> Result<MemoryRegion, HostError> {
        let (file, path) = self.table().get(&holding).cloned().ok_or(HostError::NotOpen(holding))?;
        let backing = match form {
            MemoryForm::Descriptors => RegionBacking::Descriptor(file),
            MemoryForm::Paths | MemoryForm::SlicePaths => {
                change_owner(&file, &path, user)?;
                RegionBacking::Path(path)
            }
        };
        Ok(MemoryRegion {
            slice: Some(holding),
            emc: Arc::clone(&handle.emc),
            bytes: SLICE,
            offset: 0,
            backing,
        })
    }
}

/// Verifies after the end of a VM's process that no child of it has the slice. A missing file has
/// no users.
pub(super) fn check_unused(path: &Path) -> Result<(), HostError> {
    let metadata = match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(|errno| HostError::io("stat", path, errno))?,
    };
    check_file_unused(path, FileId::of(&metadata))
}

/// Like [`check_unused`], for a file without a name or with a known identity.
pub(super) fn check_file_unused(path: &Path, file: FileId) -> Result<(), HostError> {
    let users = process::users_of(file)
        .map_err(|error| HostError::io("find users of", path, io::Error::other(units::chain(&error))))?;
    if users.unreadable > 0 {
        UNREADABLE_PROCESSES
            .call_once(|| tracing::warn!(unseen = users.unreadable, "some processes cannot be inspected"));
    }
    if users.pids.is_empty() {
        Ok(())
    } else {
        Err(HostError::InUse { path: path.to_owned(), pids: users.pids })
    }
}
