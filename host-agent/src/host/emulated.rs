//! A host whose slices are sparse files of an emulated EMC. A handle is the file's path; what its name means is the
//! EMC's business. Local memory is a memfd, or a file in a directory for VMMs that only take paths.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError},
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding, SeenDevice},
};
use rustix::{
    fs::{MemfdFlags, OFlags, SealFlags, Uid, fchown, fcntl_add_seals, memfd_create},
    io::Errno,
};
use units::{Bytes, ReservationId, SLICE};

use super::{Form, Host, HostError, Part, Place, process, process::FileId, zero};

/// Some machines hide a process even from root. That is worth one line, not one per slice.
static UNSEEN: Once = Once::new();

/// Slices as files.
#[derive(Debug)]
pub struct Emulated {
    /// Where local memory that is asked for by path lies.
    local_dir: Option<PathBuf>,
    open: Mutex<BTreeMap<Holding, Arc<OwnedFd>>>,
    /// Local memory handed out as descriptors. After a restart of the agent a VM that asks again gets new memory.
    local: Mutex<BTreeMap<ReservationId, Arc<OwnedFd>>>,
}

impl Emulated {
    /// A host with nothing open.
    pub fn new(local_dir: Option<PathBuf>) -> Self {
        Self { local_dir, open: Mutex::default(), local: Mutex::default() }
    }

    /// A poisoned map is still right: no call leaves it half changed.
    fn open(&self) -> MutexGuard<'_, BTreeMap<Holding, Arc<OwnedFd>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn local(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Arc<OwnedFd>>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slice_part(&self, holding: Holding, handle: &Handle, form: Form) -> Result<Part, HostError> {
        let open = self.open().get(&holding).cloned().ok_or(HostError::NotOpen(holding))?;
        let place = match form {
            Form::Descriptors => Place::Descriptor(open),
            Form::Paths { uid } | Form::Shown { uid } => {
                let path = PathBuf::from(&*handle.place);
                give_to(&open, &path, uid)?;
                Place::Path(path)
            }
        };
        Ok(Part { slice: Some(holding), emc: Arc::clone(&handle.emc), bytes: SLICE, offset: 0, place })
    }

    fn local_part(&self, record: &VmRecord, form: Form) -> Result<Part, HostError> {
        let place = match form {
            Form::Descriptors => Place::Descriptor(self.local_memfd(record)?),
            Form::Paths { uid } => Place::Path(self.local_file(record, uid)?),
            Form::Shown { .. } => Place::VmmsOwn,
        };
        Ok(Part { slice: None, emc: "".into(), bytes: record.local, offset: 0, place })
    }

    fn local_memfd(&self, record: &VmRecord) -> Result<Arc<OwnedFd>, HostError> {
        let mut local = self.local();
        if let Some(there) = local.get(&record.reservation) {
            return Ok(Arc::clone(there));
        }
        let made =
            make_memfd(record.local).map_err(|errno| HostError::io("make", record.vm.as_str(), errno))?;
        Ok(Arc::clone(local.entry(record.reservation).or_insert(Arc::new(made))))
    }

    fn local_path(&self, reservation: ReservationId) -> Option<PathBuf> {
        Some(self.local_dir.as_ref()?.join(format!("{reservation}.local")))
    }

    fn local_file(&self, record: &VmRecord, uid: u32) -> Result<PathBuf, HostError> {
        let path = self.local_path(record.reservation).ok_or(HostError::NoLocalDirectory)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = options.custom_flags(no_follow()).open(&path);
        let file = opened.map_err(|errno| HostError::io("make", &path, errno))?;
        file.set_len(record.local.get()).map_err(|errno| HostError::io("size", &path, errno))?;
        give_to(&OwnedFd::from(file), &path, uid)?;
        Ok(path)
    }
}

impl Host for Emulated {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        if self.open().contains_key(&holding) {
            return Ok(());
        }
        let path = Path::new(&*handle.place);
        let file = open_slice(path)?;
        if check_zero {
            see_zero(&file, path)?;
        }
        self.open().insert(holding, Arc::new(file.into()));
        Ok(())
    }

    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError> {
        if verify {
            see_unused(Path::new(&*handle.place))?;
        }
        self.open().remove(&holding);
        Ok(())
    }

    fn devices(&self) -> Vec<SeenDevice> {
        Vec::new()
    }

    /// Nothing: what an agent has open ends with it.
    fn found(&self) -> Result<Vec<Arc<str>>, HostError> {
        Ok(Vec::new())
    }

    fn clear(&self, _: &str) -> Result<(), HostError> {
        Ok(())
    }

    fn scrub(&self, _: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        let path = Path::new(&*handle.place);
        let file = open_slice(path)?;
        zero::make_zero(&file, SLICE.get()).map_err(|errno| HostError::io("zero", path, errno))?;
        see_zero(&file, path)?;
        Ok(SLICE)
    }

    fn memory(&self, record: &VmRecord, form: Form) -> Result<Vec<Part>, HostError> {
        let local = (record.local > Bytes::ZERO).then(|| self.local_part(record, form));
        let slices = record.slices.iter().map(|(holding, handle)| self.slice_part(*holding, handle, form));
        local.into_iter().chain(slices).collect()
    }

    fn free_local(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.local().remove(&reservation);
        let Some(path) = self.local_path(reservation) else { return Ok(()) };
        match fs::remove_file(&path) {
            Err(errno) if errno.kind() != io::ErrorKind::NotFound => {
                Err(HostError::io("remove", path, errno))
            }
            _ => Ok(()),
        }
    }
}

fn no_follow() -> i32 {
    i32::try_from(OFlags::NOFOLLOW.bits()).expect("flags are small numbers")
}

/// Opens what must be a whole slice. A file that was revoked is shorter, or not there.
fn open_slice(path: &Path) -> Result<File, HostError> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(no_follow()).open(path);
    let file = opened.map_err(|errno| HostError::io("open", path, errno))?;
    let metadata = file.metadata().map_err(|errno| HostError::io("ask about", path, errno))?;
    if metadata.is_file() && metadata.len() == SLICE.get() {
        Ok(file)
    } else {
        Err(HostError::NotASlice { path: path.to_owned(), bytes: metadata.len() })
    }
}

fn see_zero(file: &File, path: &Path) -> Result<(), HostError> {
    match zero::first_not_zero(file, SLICE.get()) {
        Ok(None) => Ok(()),
        Ok(Some(at)) => Err(HostError::NotZero { path: path.to_owned(), at }),
        Err(errno) => Err(HostError::io("read", path, errno)),
    }
}

/// The VM's process is gone; this sees that no child of it has the slice. What the EMC has revoked nobody has.
fn see_unused(path: &Path) -> Result<(), HostError> {
    let metadata = match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(()),
        seen => seen.map_err(|errno| HostError::io("ask about", path, errno))?,
    };
    let users = process::users_of(FileId::of(&metadata))
        .map_err(|error| HostError::io("look for users of", path, io::Error::other(units::chain(&error))))?;
    if users.unseen > 0 {
        UNSEEN.call_once(|| tracing::warn!(unseen = users.unseen, "some processes cannot be looked into"));
    }
    if users.pids.is_empty() {
        Ok(())
    } else {
        Err(HostError::InUse { path: path.to_owned(), pids: users.pids })
    }
}

/// Memory whose size its user cannot change under the agent's accounting.
fn make_memfd(bytes: Bytes) -> Result<OwnedFd, Errno> {
    let memfd = memfd_create("tarn-local", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, bytes.get())?;
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memfd)
}

/// Makes a file the uid's own, so that it can open it.
fn give_to(file: &OwnedFd, path: &Path, uid: u32) -> Result<(), HostError> {
    let owner = rustix::fs::fstat(file).map_err(|errno| HostError::io("ask about", path, errno))?.st_uid;
    if owner == uid {
        return Ok(());
    }
    fchown(file.as_fd(), Some(Uid::from_raw(uid)), None)
        .map_err(|errno| HostError::io("change the owner of", path, errno))
}

#[cfg(test)]
mod tests;
