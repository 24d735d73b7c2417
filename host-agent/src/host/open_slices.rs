//! Table of the open slices with their file descriptors and paths, and the forms in which VMs
//! receive them. The backends open the slices.

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
    HostError, MemoryForm, MemoryRegion, RegionBacking, file_owner,
    memory_file::{allocated_bytes, is_shared_memory, permit_user},
    process::{self, FileId},
};

/// Limits the warning about processes that cannot be inspected to one per run: some machines hide
/// processes even from root.
static UNREADABLE_PROCESSES_WARNING: Once = Once::new();

/// File and path of each open slice.
#[derive(Debug, Default)]
pub(super) struct OpenSlices(Mutex<BTreeMap<Holding, (Arc<OwnedFd>, PathBuf)>>);

impl OpenSlices {
    /// Locks the table. A poisoned table is consistent, because each call changes it in one
    /// operation.
    fn table(&self) -> MutexGuard<'_, BTreeMap<Holding, (Arc<OwnedFd>, PathBuf)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has(&self, holding: Holding) -> bool {
        self.table().contains_key(&holding)
    }

    pub(super) fn insert(&self, holding: Holding, file: File, path: PathBuf) {
        self.table().insert(holding, (Arc::new(file.into()), path));
    }

    /// Inserts a memfd. Its path is the agent's link in /proc, which exists while the memfd is
    /// open.
    pub(super) fn insert_memfd(&self, holding: Holding, file: File) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        self.insert(holding, file, path.into());
    }

    pub(super) fn file(&self, holding: Holding) -> Option<Arc<OwnedFd>> {
        self.table().get(&holding).map(|(file, _)| Arc::clone(file))
    }

    pub(super) fn holdings(&self) -> Vec<Holding> {
        self.table().keys().copied().collect()
    }

    pub(super) fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.table().values().map(|(file, _)| Arc::clone(file)).collect()
    }

    /// Returns the sum of the allocated sizes of these slices' files. `None` if a slice is not open
    /// or is a device.
    pub(super) fn allocated_bytes(&self, slices: &[Holding]) -> Option<Bytes> {
        let table = self.table();
        slices.iter().map(|holding| allocated_bytes(&table.get(holding)?.0)).sum()
    }

    /// Returns the part of [`Self::allocated_bytes`] that is shared memory, not device memory or a file on
    /// disk.
    pub(super) fn shared_bytes(&self, slices: &[Holding]) -> Bytes {
        let table = self.table();
        let files = slices.iter().filter_map(|holding| Some(&table.get(holding)?.0));
        files.filter(|file| is_shared_memory(file)).filter_map(|file| allocated_bytes(file)).sum()
    }

    /// Returns the identities of these slices' files for [`super::Host::observable_files`].
    pub(super) fn observable_files(&self, slices: &[Holding]) -> Result<BTreeSet<FileId>, &'static str> {
        let table = self.table();
        let identify = |holding| {
            let (file, _) = table.get(holding).ok_or("a slice of the VM is not open")?;
            match FileId::of_descriptor(file) {
                Ok(FileId::Device(_)) => Err("the slices are device memory"),
                Ok(file) => Ok(file),
                Err(_) => Err("the file of a slice cannot be examined"),
            }
        };
        slices.iter().map(identify).collect()
    }

    pub(super) fn remove(&self, holding: Holding) {
        self.table().remove(&holding);
    }

    /// Returns the slices of a VM as memory regions, in ascending order.
    pub(super) fn regions(
        &self,
        record: &VmRecord,
        form: MemoryForm,
    ) -> impl Iterator<Item = Result<MemoryRegion, HostError>> {
        let user = file_owner(record);
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
                permit_user(&file, &path, user)?;
                RegionBacking::Path(path)
            }
        };
        Ok(MemoryRegion {
            slice: Some(holding),
            emc: Arc::clone(&handle.emc),
            bytes: SLICE,
            offset: 0,
            spare: Bytes::ZERO,
            backing,
        })
    }
}

/// Checks that no other process has the file of a slice open or mapped, for example a child of an
/// ended VMM. A missing file has no users.
///
/// # Errors
/// [`HostError::InUse`] if a process has the file, or the processes cannot be listed.
pub(super) fn check_slice_unused(path: &Path) -> Result<(), HostError> {
    let metadata = match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(|errno| HostError::io("stat", path, errno))?,
    };
    check_file_unused(path, FileId::of(&metadata))
}

/// Checks like [`check_slice_unused`], for a file of known identity, such as a memfd. `path` is only used
/// in messages.
pub(super) fn check_file_unused(path: &Path, file: FileId) -> Result<(), HostError> {
    let users = process::find_users(file)
        .map_err(|error| HostError::io("find users of", path, io::Error::other(units::chain(&error))))?;
    if let Some(pid) = users.unreadable.first() {
        let processes = users.unreadable.len();
        UNREADABLE_PROCESSES_WARNING
            .call_once(|| tracing::warn!(pid, processes, "cannot inspect some processes"));
    }
    if users.pids.is_empty() {
        Ok(())
    } else {
        Err(HostError::InUse { path: path.to_owned(), pids: users.pids })
    }
}
