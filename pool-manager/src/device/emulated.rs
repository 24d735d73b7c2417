//! EMC emulated by a directory. Each grant is a sparse file of 1 GiB, `slices/NNNNN.EPOCH.hHOST`. A
//! revocation truncates and unlinks the file. The old owner's next access is then a fatal memory
//! error (SIGBUS), as on a real EMC, and the file of the next owner starts zeroed. The directory
//! may be on any file system, and `slices` may be a separate mount, such as hugetlbfs. Files
//! survive a restart of the manager, but like memory they need not survive a reboot: the driver
//! syncs nothing.
//!
//! The file `epochs` has one little-endian u64 per slice: twice the highest epoch, plus 1 if that
//! epoch was revoked. The driver updates the entry before it creates the file of a grant. Lower
//! epochs are always rejected.
//!
//! [`fault`] injects faults. Tests use them to check that audits detect errors.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    ops::RangeInclusive,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
};
use units::{Epoch, FencingToken, HostId, SLICE, limits::DEVICE_FREE_BYTES_MIN};

use super::{Contents, Device, DeviceError, Grant, Handle};
use epochs::EpochsFile;
use fault::{Fault, InjectedFault};

pub(super) mod epochs;
pub mod fault;

/// Name of the folder with the files of the grants.
pub(super) const SLICES_FOLDER: &str = "slices";
/// Size of an entry of the file `epochs`, in bytes.
const EPOCH_ENTRY_BYTES: u64 = 8;
/// Valid epochs: an entry of `epochs` is a u64 that contains twice the epoch.
const VALID_EPOCHS: RangeInclusive<u64> = 1..=u64::MAX >> 1;

/// Driver of an EMC emulated by a directory.
#[derive(Debug)]
pub struct Emulated {
    directory: PathBuf,
    /// Path of the subdirectory `slices`. Handles begin with this path.
    slices_path: PathBuf,
    slices_fd: File,
    epochs: EpochsFile,
    granted: BTreeMap<u32, Owner>,
    faults: InjectedFault,
    /// Free space below which grants are rejected, in bytes.
    free_bytes_min: u64,
    /// Whether the fault file was read since the last commit. It is read at most once between two
    /// commits.
    is_in_batch: bool,
    /// Whether enough free space was found since the last commit.
    has_space: bool,
}

/// Highest epoch of a slice, and whether it was revoked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EpochHistory {
    highest: Epoch,
    revoked: bool,
}

/// Owner of a granted slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    epoch: Epoch,
    host: HostId,
}

impl EpochHistory {
    fn from_entry(entry: u64) -> Self {
        Self { highest: Epoch(entry >> 1), revoked: entry & 1 == 1 }
    }

    fn to_entry(self) -> u64 {
        self.highest.0 << 1 | u64::from(self.revoked)
    }

    /// Returns whether `epoch` can no longer be granted, or is invalid.
    fn has_ended(self, epoch: Epoch) -> bool {
        epoch < self.highest || (epoch == self.highest && self.revoked) || !VALID_EPOCHS.contains(&epoch.0)
    }
}

impl Emulated {
    /// Opens the EMC in a directory, or creates an empty EMC there. Completes grants that were
    /// interrupted in an earlier process. `token` is the fencing token of an elected manager.
    ///
    /// # Errors
    /// [`DeviceError::InUse`], [`DeviceError::LaterManager`], [`DeviceError::Mismatch`] if the EMC
    /// has more than `slices` slices, or [`DeviceError::Io`].
    pub fn open(path: &Path, slices: u32, token: Option<FencingToken>) -> Result<Self, DeviceError> {
        let directory = std::path::absolute(path).map_err(io_error("resolve", path))?;
        let slices_path = directory.join(SLICES_FOLDER);
        if slices_path.to_str().is_none() {
            return Err(DeviceError::Mismatch {
                path: directory,
                what: "its path is not valid UTF-8".to_owned(),
            });
        }
        create_directory(&directory)?;
        let epochs = EpochsFile::open(&directory, slices, token)?;
        create_directory(&slices_path)?;
        let slices_fd = open_directory(&slices_path)?;
        let faults = InjectedFault::new(&directory)?;
        let (granted, free_bytes_min) = (BTreeMap::new(), DEVICE_FREE_BYTES_MIN);
        let mut device = Self {
            directory,
            slices_path,
            slices_fd,
            epochs,
            granted,
            faults,
            free_bytes_min,
            is_in_batch: false,
            has_space: false,
        };
        device.load()?;
        Ok(device)
    }

    /// Reads the existing grants.
    fn load(&mut self) -> Result<(), DeviceError> {
        let mut owners_by_slice = BTreeMap::<u32, Vec<Owner>>::new();
        for entry in fs::read_dir(&self.slices_path).map_err(io_error("list", &self.slices_path))? {
            let name = entry.map_err(io_error("list", &self.slices_path))?.file_name();
            match name.to_str().and_then(parse_file_name) {
                Some((slice, owner)) => owners_by_slice.entry(slice).or_default().push(owner),
                None => {
                    tracing::warn!(path = %self.slices_path.join(name).display(), "ignoring file: name is not SLICE.EPOCH.hHOST")
                }
            }
        }
        owners_by_slice.into_iter().try_for_each(|(slice, owners)| self.load_slice(slice, owners))
    }

    /// Loads a slice whose files exist. The file with the highest epoch is the grant, even if
    /// `epochs` records this epoch as ended: the revocation was then interrupted, or `epochs` is
    /// damaged and a VM uses the file. The manager compares the grant with the ledger, and revokes it
    /// if it has ended.
    fn load_slice(&mut self, slice: u32, mut owners: Vec<Owner>) -> Result<(), DeviceError> {
        let history = *self.history(slice)?;
        owners.sort_by_key(|owner| owner.epoch);
        let Some(newest) = owners.pop() else { return Ok(()) };
        for old in owners {
            tracing::warn!(emc = %self.directory.display(), slice, epoch = old.epoch.0, "removing the file of an earlier owner");
            let removed = self.remove_file(slice, old);
            self.tolerate_slice_failure(slice, removed)?;
        }
        if history.has_ended(newest.epoch) {
            tracing::warn!(emc = %self.directory.display(), slice, epoch = newest.epoch.0, "file of a revoked grant exists");
        } else {
            self.epochs.write(slice, EpochHistory { highest: newest.epoch, revoked: false })?;
            let created = self.create_file(slice, newest).map(drop);
            self.tolerate_slice_failure(slice, created)?;
        }
        self.granted.insert(slice, newest);
        Ok(())
    }

    /// Returns whether a call failed for this slice only, and logs the error of such a call.
    ///
    /// # Errors
    /// Returns an error that concerns the whole device.
    fn tolerate_slice_failure(&self, slice: u32, done: Result<(), DeviceError>) -> Result<bool, DeviceError> {
        match done {
            Ok(()) => Ok(false),
            Err(error @ DeviceError::Slice { .. }) => {
                let (emc, error) = (self.directory.display(), units::chain(&error));
                tracing::warn!(%emc, slice, error, "device call failed for one slice");
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    fn history(&self, slice: u32) -> Result<&EpochHistory, DeviceError> {
        let slices = u32::try_from(self.epochs.history.len()).expect("the number of slices fits into a u32");
        self.epochs.history.get(slice as usize).ok_or(DeviceError::NoSuchSlice { slice, slices })
    }

    /// Creates the file of a grant, or completes a partially created file.
    fn create_file(&self, slice: u32, owner: Owner) -> Result<File, DeviceError> {
        let name = file_name(slice, owner);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let created = rustix::fs::openat(&self.slices_fd, &name, flags, Mode::RUSR | Mode::WUSR);
        let file =
            File::from(created.map_err(|e| slice_error("create", &self.slices_path.join(&name))(e.into()))?);
        file.set_len(SLICE.get()).map_err(|errno| {
            // The grant was not published. If this unlink fails, the next start handles the file.
            let _ = rustix::fs::unlinkat(&self.slices_fd, &name, AtFlags::empty());
            slice_error("set the size of", &self.slices_path.join(&name))(errno)
        })?;
        Ok(file)
    }

    /// Truncates and unlinks the file of a grant. Truncation removes the memory from all mappings.
    fn remove_file(&mut self, slice: u32, owner: Owner) -> Result<(), DeviceError> {
        if self.faults.current() == Some(Fault::IgnoreRevoke) {
            return Ok(());
        }
        let name = file_name(slice, owner);
        let path = || self.slices_path.join(&name);
        // With O_NONBLOCK, the call does not wait for a lease on the file, but fails.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(&self.slices_fd, &name, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            opened => File::from(opened.map_err(|e| slice_error("open", &path())(e.into()))?),
        };
        self.faults.retain_bytes_before_revoke(slice, &file);
        file.set_len(0).map_err(slice_error("truncate", &path()))?;
        let unlinked = rustix::fs::unlinkat(&self.slices_fd, &name, AtFlags::empty());
        unlinked.map_err(|e| slice_error("unlink", &path())(e.into()))
    }

    /// Checks the free space. Sparse files allocate memory at the first access, and an access
    /// without free memory would kill the guest.
    fn check_disk_space(&mut self) -> Result<(), DeviceError> {
        if self.has_space {
            return Ok(());
        }
        let stats = rustix::fs::fstatvfs(&self.slices_fd);
        let space = stats.map_err(|e| io_error("get the free space of", &self.slices_path)(e.into()))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        // A hugetlbfs mount without a size limit reports 0 blocks.
        self.has_space = space.f_blocks == 0 || free >= self.free_bytes_min;
        if self.has_space {
            return Ok(());
        }
        Err(DeviceError::NoSpace { path: self.slices_path.clone(), free, min: self.free_bytes_min })
    }

    fn begin_batch(&mut self) {
        if !std::mem::replace(&mut self.is_in_batch, true) {
            self.faults.reload_fault();
        }
    }

    fn handle_of(&self, slice: u32, owner: Owner) -> Handle {
        let slices_path = self.slices_path.to_str().expect("open() checked that the path is UTF-8");
        Arc::from(format!("{slices_path}/{}", file_name(slice, owner)))
    }

    fn grant_of(&self, slice: u32, owner: Owner) -> Grant {
        Grant { slice, epoch: owner.epoch, host: owner.host, handle: self.handle_of(slice, owner) }
    }

    /// Checks that `epoch` can still be granted.
    fn check_epoch(&self, slice: u32, epoch: Epoch) -> Result<(), DeviceError> {
        let history = *self.history(slice)?;
        let stale = DeviceError::StaleEpoch { slice, epoch, highest: history.highest };
        if history.has_ended(epoch) { Err(stale) } else { Ok(()) }
    }
}

impl Device for Emulated {
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError> {
        self.begin_batch();
        let owner = Owner { epoch, host };
        let current = self.granted.get(&slice).copied();
        if let Some(Owner { epoch, host }) = current.filter(|current| *current != owner) {
            return Err(DeviceError::Held { slice, epoch, host });
        }
        self.check_epoch(slice, epoch)?;
        match current {
            Some(same) => return Ok(self.handle_of(slice, same)),
            None => self.check_disk_space()?,
        }
        self.epochs.write(slice, EpochHistory { highest: epoch, revoked: false })?;
        let file = self.create_file(slice, owner)?;
        self.faults.restore_bytes_after_grant(slice, &file);
        self.granted.insert(slice, owner);
        Ok(self.handle_of(slice, owner))
    }

    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError> {
        self.begin_batch();
        let history = *self.history(slice)?;
        if epoch >= history.highest && VALID_EPOCHS.contains(&epoch.0) {
            self.epochs.write(slice, EpochHistory { highest: epoch, revoked: true })?;
        }
        // An owner with a later epoch keeps the slice. After a failed revocation, the current owner
        // can have an earlier epoch.
        if let Some(owner) = self.granted.get(&slice).copied().filter(|owner| owner.epoch <= epoch) {
            self.remove_file(slice, owner)?;
            self.granted.remove(&slice);
        }
        Ok(())
    }

    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError> {
        let grants = self.granted.iter().filter(|(_, owner)| owner.host == host);
        let grants: Vec<Grant> = grants.map(|(slice, owner)| self.grant_of(*slice, *owner)).collect();
        let mut revoked_grants = Vec::with_capacity(grants.len());
        for grant in grants {
            let revoked = self.revoke(grant.slice, grant.epoch);
            if !self.tolerate_slice_failure(grant.slice, revoked)? {
                revoked_grants.push(grant);
            }
        }
        Ok(revoked_grants)
    }

    fn contents(&mut self) -> Result<Contents, DeviceError> {
        self.begin_batch();
        if self.faults.current() == Some(Fault::ForgetGrant)
            && let Some((slice, owner)) = self.granted.pop_first()
        {
            // Errors are ignored: this is an injected fault.
            let _ = rustix::fs::unlinkat(&self.slices_fd, file_name(slice, owner), AtFlags::empty());
        }
        Ok(Contents {
            grants: self.granted.iter().map(|(slice, owner)| self.grant_of(*slice, *owner)).collect(),
            highest: self.epochs.history.iter().map(|history| history.highest).collect(),
            handles: Vec::new(),
        })
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        (self.is_in_batch, self.has_space) = (false, false);
        Ok(()) // like memory, the files need not survive a reboot
    }
}

fn file_name(slice: u32, owner: Owner) -> String {
    format!("{slice:05}.{}.h{}", owner.epoch.0, owner.host.0)
}

fn parse_file_name(name: &str) -> Option<(u32, Owner)> {
    let mut parts = name.splitn(3, '.');
    let slice = parts.next()?.parse().ok()?;
    let epoch = Epoch(parts.next()?.parse().ok()?);
    let host = HostId(parts.next()?.strip_prefix('h')?.parse().ok()?);
    let owner = Owner { epoch, host };
    (file_name(slice, owner) == name).then_some((slice, owner))
}

fn io_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> DeviceError {
    move |errno| DeviceError::Io { operation, path: path.to_owned(), errno }
}

/// Classifies an error of a slice's file: some error codes mean that the whole directory or the
/// machine has failed, not only this slice.
fn slice_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> DeviceError {
    let path = path.to_owned();
    move |errno| match errno.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(
            Errno::NOSPC
            | Errno::DQUOT
            | Errno::ROFS
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::NOENT
            | Errno::NODEV
            | Errno::STALE,
        ) => DeviceError::Io { operation, path: path.clone(), errno },
        _ => DeviceError::Slice { operation, path: path.clone(), errno },
    }
}

/// Creates a directory and its missing parents. Other users may traverse but not list them. An
/// existing directory keeps its mode.
fn create_directory(path: &Path) -> Result<(), DeviceError> {
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        create_directory(parent)?;
    }
    match fs::create_dir(path) {
        Err(errno) if errno.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(errno) => Err(io_error("create", path)(errno)),
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(0o711))
            .map_err(io_error("set the mode of", path)),
    }
}

/// Opens a directory. Never waits, unlike opening a FIFO.
fn open_directory(path: &Path) -> Result<File, DeviceError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    opened.map(File::from).map_err(|errno| io_error("open", path)(errno.into()))
}

#[cfg(test)]
mod tests;
