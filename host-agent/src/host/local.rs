//! Local memory of VMs: a memfd, or a file in a directory for VMMs that take only paths. It is
//! independent of the kind of slices.

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

use pool::{agent::VmRecord, protocol::HaveVm};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags, Uid, fchown, fcntl_add_seals, memfd_create},
    io::Errno,
};
use units::{Bytes, ReservationId, UserId};

use super::{Form, HostError, Part, Place, memory::numa, opened::allocated, process, user_of};

/// Folder of the nodes.
const NODES: &str = "/sys/devices/system/node";

/// The local memory that was handed out.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// Where that which is asked for by path lies.
    dir: Option<PathBuf>,
    /// Nodes that it must not be of; where slices are memory of the kernel's, theirs.
    not_of: BTreeSet<u32>,
    /// As descriptors. Memory passed by an earlier agent is found in the VM's process.
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

    /// Returns how much of a running VM's local memory has pages. A guest that runs has touched some: where the file has none, its
    /// VMM uses other memory, such as huge pages of its own, and that is not measured.
    pub(super) fn allocated(&self, reservation: ReservationId, vm: &HaveVm) -> Option<Bytes> {
        if vm.local == Bytes::ZERO {
            return Some(Bytes::ZERO);
        }
        let named = || self.path(reservation).and_then(|path| open_to_examine(&path));
        let file = self.find_memfd(reservation, vm.pid, vm.local).or_else(|| named().map(Arc::new))?;
        allocated(&file).filter(|bytes| *bytes > Bytes::ZERO)
    }

    /// Returns the descriptor of a VM's local memory, also if an earlier agent handed it to the VM's process.
    fn find_memfd(&self, reservation: ReservationId, pid: u32, bytes: Bytes) -> Option<Arc<OwnedFd>> {
        if let Some(there) = self.memfds().get(&reservation) {
            return Some(Arc::clone(there));
        }
        let found = process::find_memfd_of(pid, &memfd_name(reservation)).ok().flatten()?;
        if found.metadata().ok()?.len() != bytes.get() {
            return None;
        }
        Some(Arc::clone(self.memfds().entry(reservation).or_insert(Arc::new(found.into()))))
    }

    /// A poisoned map is still right: no call leaves it half changed.
    fn memfds(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Arc<OwnedFd>>> {
        self.memfds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memfd(&self, record: &VmRecord) -> Result<Arc<OwnedFd>, HostError> {
        if let Some(there) = self.find_memfd(record.reservation, record.process.pid, record.local) {
            return Ok(there);
        }
        let failed = |doing| move |errno| HostError::io(doing, record.vm.as_str(), errno);
        let name = memfd_name(record.reservation);
        let made = make_memfd(&name, record.local).map_err(|errno| failed("make")(io::Error::from(errno)))?;
        let made = File::from(made);
        self.keep_apart(&made, record.local.get()).map_err(failed("bind to local nodes"))?;
        Ok(Arc::clone(self.memfds().entry(record.reservation).or_insert(Arc::new(made.into()))))
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

/// As it stands in /proc/PID/fd.
fn memfd_name(reservation: ReservationId) -> String {
    format!("tarn-local-{reservation}")
}

/// Opens a file for its status only, for any owner.
fn open_to_examine(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Creates memory whose size its user cannot change.
fn make_memfd(name: &str, bytes: Bytes) -> Result<OwnedFd, Errno> {
    let memfd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, bytes.get())?;
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memfd)
}

/// Open flag that rejects a link in place of the file.
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use units::Name;

    use super::*;

    const ID: ReservationId = ReservationId(7_654_321);

    fn vm() -> HaveVm {
        let (vm, local) = (Name::new("a").unwrap(), Bytes::mib(64));
        HaveVm { vm, pid: std::process::id(), slices: Vec::new(), local, pinned: false, uid: None }
    }

    fn record() -> VmRecord {
        let process = process::identify(std::process::id()).unwrap();
        let HaveVm { vm, local, pinned, .. } = vm();
        VmRecord { reservation: ID, vm, process, local, pinned, slices: BTreeMap::new(), uid: None }
    }

    #[test]
    fn touched_memory_is_measured_after_agent_restart() {
        let local = Local::new(None);
        let Place::Descriptor(memfd) = local.part(&record(), Form::Descriptors).unwrap().unwrap().place
        else {
            panic!("it is a descriptor");
        };
        assert_eq!(local.allocated(ID, &vm()), None, "its VMM uses other memory");
        let file = File::from(memfd.try_clone().unwrap());
        file.write_all_at(&[1; 3 << 20], 5 << 20).unwrap();
        let touched = local.allocated(ID, &vm()).unwrap();
        assert!((Bytes::mib(3)..=Bytes::mib(6)).contains(&touched), "{touched}");
        let next = Local::new(None);
        assert_eq!(next.allocated(ID, &vm()), Some(touched));
        let other = HaveVm { local: Bytes::mib(32), ..vm() };
        assert_eq!(Local::new(None).allocated(ID, &other), None, "a file of another size is another VM's");
        assert_eq!(Local::new(None).allocated(ReservationId(1), &vm()), None);
    }

    #[test]
    fn touched_memory_in_a_directory_is_measured() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let local = Local::new(Some(dir.path().to_owned()));
        assert_eq!(local.allocated(ID, &vm()), None, "there is none");
        let Place::Path(path) = local.part(&record(), Form::Paths).unwrap().unwrap().place else {
            panic!("it is a path");
        };
        OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[1; 4096], 0).unwrap();
        let touched = Local::new(local.dir.clone()).allocated(ID, &vm()).unwrap();
        assert!((Bytes::new(4096)..=Bytes::mib(2)).contains(&touched), "{touched}");
    }
}
