//! Local memory of VMs: a memfd, or a file in a directory for VMMs that only take paths. It is the same whatever slices are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pool::agent::VmRecord;
use rustix::{
    fs::{MemfdFlags, OFlags, SealFlags, Uid, fchown, fcntl_add_seals, memfd_create},
    io::Errno,
};
use units::{Bytes, ReservationId, UserId};

use super::{Form, HostError, Part, Place, memory::numa, user_of};

/// What the kernel says of nodes.
const NODES: &str = "/sys/devices/system/node";

/// The local memory that was handed out.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// Where that which is asked for by path lies.
    dir: Option<PathBuf>,
    /// Nodes that it must not be of; where slices are memory of the kernel's, theirs.
    not_of: BTreeSet<u32>,
    /// As descriptors. After a restart of the agent a VM that asks again gets new memory.
    memfds: Mutex<BTreeMap<ReservationId, Arc<OwnedFd>>>,
}

impl Local {
    /// None yet.
    pub(super) fn new(dir: Option<PathBuf>) -> Self {
        Self::beside(dir, BTreeSet::new())
    }

    /// None yet, and never of these nodes.
    pub(super) fn beside(dir: Option<PathBuf>, not_of: BTreeSet<u32>) -> Self {
        Self { dir, not_of, memfds: Mutex::default() }
    }

    /// Where slices are memory of the kernel's, the kernel would take local memory from them, too.
    fn keep_apart(&self, file: &File, bytes: u64) -> io::Result<()> {
        if self.not_of.is_empty() {
            return Ok(());
        }
        let mut nodes = numa::with_memory(Path::new(NODES))?;
        nodes.retain(|node| !self.not_of.contains(node));
        numa::bind(file, bytes, &nodes)
    }

    /// A VM's, if it has any.
    pub(super) fn part(&self, record: &VmRecord, form: Form) -> Result<Option<Part>, HostError> {
        if record.local == Bytes::ZERO {
            return Ok(None);
        }
        let place = match form {
            Form::Descriptors => Place::Descriptor(self.memfd(record)?),
            Form::Paths => Place::Path(self.file(record)?),
            Form::Shown => Place::VmmsOwn,
        };
        Ok(Some(Part { slice: None, emc: "".into(), bytes: record.local, offset: 0, place }))
    }

    /// Gives it back, if there is any.
    pub(super) fn free(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.memfds().remove(&reservation);
        let Some(path) = self.path(reservation) else { return Ok(()) };
        match fs::remove_file(&path) {
            Err(errno) if errno.kind() != io::ErrorKind::NotFound => {
                Err(HostError::io("remove", path, errno))
            }
            _ => Ok(()),
        }
    }

    /// A poisoned map is still right: no call leaves it half changed.
    fn memfds(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Arc<OwnedFd>>> {
        self.memfds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memfd(&self, record: &VmRecord) -> Result<Arc<OwnedFd>, HostError> {
        let mut memfds = self.memfds();
        if let Some(there) = memfds.get(&record.reservation) {
            return Ok(Arc::clone(there));
        }
        let failed = |doing| move |errno| HostError::io(doing, record.vm.as_str(), errno);
        let made = make_memfd(record.local).map_err(|errno| failed("make")(io::Error::from(errno)))?;
        let made = File::from(made);
        self.keep_apart(&made, record.local.get()).map_err(failed("bind to local nodes"))?;
        Ok(Arc::clone(memfds.entry(record.reservation).or_insert(Arc::new(made.into()))))
    }

    fn path(&self, reservation: ReservationId) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{reservation}.local")))
    }

    fn file(&self, record: &VmRecord) -> Result<PathBuf, HostError> {
        let path = self.path(record.reservation).ok_or(HostError::NoLocalDirectory)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = options.custom_flags(no_follow()).open(&path);
        let file = opened.map_err(|errno| HostError::io("make", &path, errno))?;
        file.set_len(record.local.get()).map_err(|errno| HostError::io("size", &path, errno))?;
        let apart = self.keep_apart(&file, record.local.get());
        apart.map_err(|errno| HostError::io("bind to local nodes", &path, errno))?;
        give_to(&OwnedFd::from(file), &path, user_of(record))?;
        Ok(path)
    }
}

/// Memory whose size its user cannot change under the agent's accounting.
fn make_memfd(bytes: Bytes) -> Result<OwnedFd, Errno> {
    let memfd = memfd_create("tarn-local", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, bytes.get())?;
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memfd)
}

/// A flag of open, so that a link that somebody puts in a file's place leads nowhere.
pub(super) fn no_follow() -> i32 {
    i32::try_from(OFlags::NOFOLLOW.bits()).expect("flags are small numbers")
}

/// Makes a user the owner of a file, so that it can open it.
pub(super) fn give_to(file: &OwnedFd, path: &Path, user: UserId) -> Result<(), HostError> {
    let owner = rustix::fs::fstat(file).map_err(|errno| HostError::io("ask about", path, errno))?.st_uid;
    if owner == user.get() {
        return Ok(());
    }
    fchown(file.as_fd(), Some(Uid::from_raw(user.get())), None)
        .map_err(|errno| HostError::io("change the owner of", path, errno))
}
