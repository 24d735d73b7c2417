//! Local memory of VMs: a memfd, or a file in a directory for VMMs that accept only paths. All
//! backends use it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pool::{agent::VmRecord, protocol::ObservedVm};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::Errno,
};
use units::{Bytes, ReservationId, UserId};

use super::{
    HostError, MemoryForm, MemoryRegion, RegionBacking, file_owner,
    memory::numa,
    memory_file::{allocated_bytes, permit_user},
    process,
    process_memory::used_memory,
};
use crate::{
    protected_dir::{LOCAL_DIR_FIELD, ProtectedDir},
    user::current_user,
};

/// Directory of NUMA nodes in sysfs.
const NODES_FOLDER: &str = "/sys/devices/system/node";

/// Local memory of VMs.
#[derive(Debug, Default)]
pub(super) struct LocalMemory {
    /// Directory for files of local memory that is passed by path; `None` if not configured.
    dir: Option<PathBuf>,
    /// NUMA nodes that must not contain local memory: with the backend `memory_block`, the nodes of
    /// slices.
    excluded_nodes: BTreeSet<u32>,
    /// Memfds of VMs. A memfd that an earlier agent created is added when it is found in the VM's
    /// process.
    memfds: Mutex<BTreeMap<ReservationId, Arc<OwnedFd>>>,
}

impl LocalMemory {
    /// Creates an empty table. Local memory may be on all nodes.
    pub(super) fn new(dir: Option<PathBuf>) -> Self {
        Self::with_excluded_nodes(dir, BTreeSet::new())
    }

    /// Creates an empty table. Local memory is never on the excluded nodes.
    pub(super) fn with_excluded_nodes(dir: Option<PathBuf>, excluded_nodes: BTreeSet<u32>) -> Self {
        Self { dir, excluded_nodes, memfds: Mutex::default() }
    }

    /// Returns the nodes for local memory: all nodes with memory except the excluded nodes.
    pub(super) fn local_nodes(&self) -> io::Result<BTreeSet<u32>> {
        let mut nodes = numa::nodes_with_memory(Path::new(NODES_FOLDER))?;
        nodes.retain(|node| !self.excluded_nodes.contains(node));
        Ok(nodes)
    }

    /// Binds a file to all nodes except the excluded nodes. Otherwise the kernel could allocate
    /// local memory from slices that are memory blocks.
    fn bind_to_local_nodes(&self, file: &File, bytes: u64) -> io::Result<()> {
        if self.excluded_nodes.is_empty() {
            return Ok(());
        }
        numa::bind(file, bytes, &self.local_nodes()?)
    }

    /// Returns the local memory of a VM as a region; `None` if the VM has no local memory.
    pub(super) fn region(
        &self,
        record: &VmRecord,
        form: MemoryForm,
    ) -> Result<Option<MemoryRegion>, HostError> {
        if record.local == Bytes::ZERO {
            return Ok(None);
        }
        let (backing, spare) = match form {
            MemoryForm::Descriptors => {
                let memfd = self.find_or_create_memfd(record)?;
                let bytes = Bytes::new(memfd_bytes(&memfd).unwrap_or_default());
                (RegionBacking::Descriptor(memfd), bytes.saturating_sub(record.local))
            }
            MemoryForm::Paths => (RegionBacking::Path(self.create_file(record)?), Bytes::ZERO),
            MemoryForm::SlicePaths => (RegionBacking::VmmAllocated, Bytes::ZERO),
        };
        Ok(Some(MemoryRegion { slice: None, emc: "".into(), bytes: record.local, offset: 0, spare, backing }))
    }

    /// Releases the local memory of a VM, if any.
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

    /// Returns how much of a running VM's local memory is backed by pages; `None` if unknown. A
    /// running guest has always touched some memory. If the file has no pages, the VMM allocated the
    /// memory itself. Then the memory of its process counts, without `shared_slices`, the part of the slices
    /// that is shared memory.
    pub(super) fn allocated_bytes(
        &self,
        reservation: ReservationId,
        vm: &ObservedVm,
        shared_slices: Bytes,
    ) -> Option<Bytes> {
        if vm.local == Bytes::ZERO {
            return Some(Bytes::ZERO);
        }
        let file_in_dir = || self.path(reservation).and_then(|path| open_for_status(&path));
        let file = self.find_memfd(reservation, vm.pid, vm.total()).or_else(|| file_in_dir().map(Arc::new));
        let in_file = file.and_then(|file| allocated_bytes(&file)).filter(|bytes| *bytes > Bytes::ZERO);
        in_file.or_else(|| {
            let used = used_memory(vm.pid).ok()?.saturating_sub(shared_slices);
            Some(used.min(vm.local)).filter(|used| *used > Bytes::ZERO)
        })
    }

    /// Returns the memfd of a VM's local memory. Also finds a memfd that an earlier agent passed to
    /// the VM's process. It has at most the size of all memory of the VM: it contains spare memory for
    /// the VM's slices, unless the VM is pinned or an earlier version created it.
    fn find_memfd(&self, reservation: ReservationId, pid: u32, total: Bytes) -> Option<Arc<OwnedFd>> {
        if let Some(memfd) = self.memfds().get(&reservation) {
            return Some(Arc::clone(memfd));
        }
        let memfd = process::find_memfd_of(pid, &memfd_name(reservation)).ok().flatten()?;
        if memfd.metadata().ok()?.len() > total.get() {
            return None;
        }
        Some(Arc::clone(self.memfds().entry(reservation).or_insert(Arc::new(memfd.into()))))
    }

    /// Locks the memfds. A poisoned map is consistent, because each call changes it in one
    /// operation.
    fn memfds(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Arc<OwnedFd>>> {
        self.memfds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_or_create_memfd(&self, record: &VmRecord) -> Result<Arc<OwnedFd>, HostError> {
        if let Some(memfd) = self.find_memfd(record.reservation, record.process.pid, record.total()) {
            return Ok(memfd);
        }
        // Spare memory has no pages until pool memory is moved to it.
        let bytes = if record.pinned { record.local } else { record.total() };
        let failed = |operation| move |errno| HostError::io(operation, record.vm.as_str(), errno);
        let name = memfd_name(record.reservation);
        let created = make_memfd(&name, bytes)
            .map_err(|errno| failed("create local memory of VM")(io::Error::from(errno)))?;
        let created = File::from(created);
        self.bind_to_local_nodes(&created, bytes.get())
            .map_err(failed("set the memory policy of local memory of VM"))?;
        Ok(Arc::clone(self.memfds().entry(record.reservation).or_insert(Arc::new(created.into()))))
    }

    fn path(&self, reservation: ReservationId) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(file_name(reservation)))
    }

    /// Creates the file of a VM's local memory, or opens the file that an earlier call created.
    fn create_file(&self, record: &VmRecord) -> Result<PathBuf, HostError> {
        let dir = ProtectedDir::open(LOCAL_DIR_FIELD, self.dir.as_ref().ok_or(HostError::NoLocalDirectory)?)?;
        let name = file_name(record.reservation);
        let path = dir.path().join(&name);
        let file = OwnedFd::from(dir.open_or_create_file(&name)?);
        let owner = file_owner(record);
        check_owner(&file, &path, owner)?;
        let file = File::from(file);
        file.set_len(record.local.get()).map_err(|errno| HostError::io("set the size of", &path, errno))?;
        let bound = self.bind_to_local_nodes(&file, record.local.get());
        bound.map_err(|errno| HostError::io("set the memory policy of", &path, errno))?;
        permit_user(&OwnedFd::from(file), &path, owner)?;
        Ok(path)
    }
}

/// Checks that a file belongs to the agent, to root or to the user of its VM. A file of another user
/// remains from a time when other users could write to the directory.
fn check_owner(file: &OwnedFd, path: &Path, user: UserId) -> Result<(), HostError> {
    let owner = rustix::fs::fstat(file).map_err(|errno| HostError::io("stat", path, errno))?.st_uid;
    if [user, current_user(), UserId::ROOT].iter().any(|user| user.get() == owner) {
        return Ok(());
    }
    let rule =
        format!("belongs to user {owner}: must belong to the agent or to the user of the VM; remove it");
    Err(HostError::io("use", path, io::Error::new(io::ErrorKind::PermissionDenied, rule)))
}

/// Returns the name of the file of a VM's local memory in `backend.local_dir`.
fn file_name(reservation: ReservationId) -> String {
    format!("{reservation}.local")
}

/// Returns the name of a VM's memfd, as shown in /proc/PID/fd.
fn memfd_name(reservation: ReservationId) -> String {
    format!("tarn-local-{reservation}")
}

/// Opens a file only to read its status, which is possible for files of any owner.
fn open_for_status(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

fn memfd_bytes(memfd: &OwnedFd) -> Option<u64> {
    u64::try_from(rustix::fs::fstat(memfd).ok()?.st_size).ok()
}

/// Creates a memfd whose size cannot be changed by its users.
fn make_memfd(name: &str, bytes: Bytes) -> Result<OwnedFd, Errno> {
    let memfd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, bytes.get())?;
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memfd)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt as _, PermissionsExt as _};

    use units::Name;

    use super::*;

    const ID: ReservationId = ReservationId(7_654_321);

    fn vm() -> ObservedVm {
        let (vm, local) = (Name::new("a").unwrap(), Bytes::mib(64));
        ObservedVm {
            vm,
            pid: std::process::id(),
            slices: Vec::new(),
            local,
            pinned: false,
            uid: None,
            rehome: pool::protocol::ObservedRehome::None,
        }
    }

    fn record() -> VmRecord {
        let process = process::identify_process(std::process::id()).unwrap();
        let ObservedVm { vm, local, pinned, .. } = vm();
        VmRecord {
            reservation: ID,
            vm,
            process,
            local,
            pinned,
            slices: BTreeMap::new(),
            uid: None,
            control_socket: None,
            is_rehomed: false,
        }
    }

    #[test]
    fn touched_memory_is_measured_after_agent_restart() {
        let local = LocalMemory::new(None);
        let RegionBacking::Descriptor(memfd) =
            local.region(&record(), MemoryForm::Descriptors).unwrap().unwrap().backing
        else {
            panic!("not a descriptor");
        };
        let used = vec![1_u8; 64 << 20];
        let of_process = local.allocated_bytes(ID, &vm(), Bytes::ZERO);
        assert_eq!(of_process, Some(Bytes::mib(64)), "the memory of the process, at most that of the VM");
        drop(used);
        let pool = Bytes::gib(1 << 20); // more than the memory of this process
        assert_eq!(local.allocated_bytes(ID, &vm(), pool), None, "no page of the memfd is used");
        let file = File::from(memfd.try_clone().unwrap());
        file.write_all_at(&[1; 3 << 20], 5 << 20).unwrap();
        let touched = local.allocated_bytes(ID, &vm(), pool).unwrap();
        assert!((Bytes::mib(3)..=Bytes::mib(6)).contains(&touched), "{touched}");
        let after_restart = LocalMemory::new(None);
        assert_eq!(after_restart.allocated_bytes(ID, &vm(), pool), Some(touched));
        let other = ObservedVm { local: Bytes::mib(32), ..vm() };
        assert_eq!(
            LocalMemory::new(None).allocated_bytes(ID, &other, pool),
            None,
            "a memfd of another size belongs to another VM"
        );
        assert_eq!(LocalMemory::new(None).allocated_bytes(ReservationId(1), &vm(), pool), None);
        let ended = ObservedVm { pid: 0, ..vm() };
        assert_eq!(LocalMemory::new(None).allocated_bytes(ReservationId(1), &ended, Bytes::ZERO), None);
    }

    fn create_error(dir: &Path) -> String {
        let local = LocalMemory::new(Some(dir.to_owned()));
        units::chain(&local.region(&record(), MemoryForm::Paths).unwrap_err())
    }

    #[test]
    fn local_memory_is_not_created_where_others_can_write() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = create_error(dir.path());
        assert!(error.starts_with("backend.local_dir: ") && error.contains("has mode 0777"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn file_with_another_owner_or_link_is_not_used_as_local_memory() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join(file_name(ID));
        fs::write(&path, "").unwrap();
        fs::hard_link(&path, dir.path().join("second")).unwrap();
        let error = create_error(dir.path());
        assert!(error.ends_with("has 2 links: must have one"), "{error}");
        fs::remove_file(dir.path().join("second")).unwrap();
        if current_user() != UserId::ROOT {
            return crate::skipped::report_skipped(
                "local memory of another user: only root can change an owner",
            );
        }
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let error = create_error(dir.path());
        assert!(error.contains("belongs to user 65534: must belong to the agent"), "{error}");
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn touched_memory_in_a_directory_is_measured() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let local = LocalMemory::new(Some(dir.path().to_owned()));
        let pool = Bytes::gib(1 << 20); // more than the memory of this process
        assert_eq!(local.allocated_bytes(ID, &vm(), pool), None, "local memory does not exist");
        let RegionBacking::Path(path) = local.region(&record(), MemoryForm::Paths).unwrap().unwrap().backing
        else {
            panic!("not a path");
        };
        File::options().write(true).open(path).unwrap().write_all_at(&[1; 4096], 0).unwrap();
        let touched = LocalMemory::new(local.dir.clone()).allocated_bytes(ID, &vm(), pool).unwrap();
        assert!((Bytes::new(4096)..=Bytes::mib(2)).contains(&touched), "{touched}");
    }
}
