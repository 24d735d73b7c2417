//! Tests with files of an emulated EMC. The integration tests of this package use whole VMs.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{
        fs::{FileExt, PermissionsExt as _, chown, symlink},
        process::CommandExt as _,
    },
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use pool::agent::Process;
use units::{Epoch, Name, SliceId, UserId};

use super::{super::RegionBacking, *};
use crate::{skipped::report_skipped, user::current_user};

const SLICE_1: Holding = Holding { slice: SliceId(1), epoch: Epoch(1) };

struct Emc {
    dir: tempfile::TempDir,
    host: Emulated,
}

impl Emc {
    fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let host = Emulated::new(Some(dir.path().to_owned()));
        Self { dir, host }
    }

    fn handle(&self) -> Handle {
        Handle::new("emc", self.dir.path().join("00001.1.h0").to_str().unwrap())
    }

    fn create_slice(&self, bytes: u64) -> File {
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(true).open(&*self.handle().place).unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    fn record(&self) -> VmRecord {
        VmRecord {
            reservation: ReservationId(7),
            vm: Name::new("a").unwrap(),
            process: Process { pid: 1, started: 1, cgroup: String::new() },
            local: Bytes::mib(2),
            pinned: false,
            uid: None,
            slices: BTreeMap::from([(SLICE_1, self.handle())]),
            control_socket: None,
            is_rehomed: false,
        }
    }
}

fn descriptor(part: &MemoryRegion) -> File {
    let RegionBacking::Descriptor(fd) = &part.backing else { panic!("not a descriptor") };
    File::from(fd.try_clone().unwrap())
}

#[test]
fn revoked_or_linked_slice_is_not_opened() {
    let emc = Emc::new();
    let missing = emc.host.online(SLICE_1, &emc.handle(), true).unwrap_err();
    assert!(matches!(missing, HostError::Io { operation: "open", .. }), "{missing:?}");
    emc.create_slice(0);
    let short = emc.host.online(SLICE_1, &emc.handle(), true).unwrap_err();
    assert!(matches!(short, HostError::NotASlice { bytes: 0, .. }), "{short:?}");
    fs::remove_file(&*emc.handle().place).unwrap();
    symlink("/dev/zero", &*emc.handle().place).unwrap();
    assert!(emc.host.online(SLICE_1, &emc.handle(), false).is_err(), "a link was followed");
}

#[test]
fn slice_with_a_second_link_and_fifo_are_not_opened() {
    let emc = Emc::new();
    emc.create_slice(SLICE.get());
    let second = emc.dir.path().join("second");
    fs::hard_link(&*emc.handle().place, &second).unwrap();
    let linked = emc.host.online(SLICE_1, &emc.handle(), false).unwrap_err();
    assert!(matches!(linked, HostError::LinkedSlice { links: 2, .. }), "{linked:?}");
    fs::remove_file(&*emc.handle().place).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &*emc.handle().place, mode).unwrap();
    let fifo = emc.host.online(SLICE_1, &emc.handle(), false).unwrap_err();
    assert!(matches!(fifo, HostError::NotASlice { .. }), "{fifo:?}");
}

#[test]
fn slice_that_is_not_zero_is_not_opened() {
    let emc = Emc::new();
    emc.create_slice(SLICE.get()).write_all_at(b"x", SLICE.get() - 1).unwrap();
    let dirty = emc.host.online(SLICE_1, &emc.handle(), true).unwrap_err();
    assert_eq!(dirty.to_failure().reason, pool::protocol::FailureReason::NotZero);
    assert!(matches!(
        emc.host.memory(&emc.record(), MemoryForm::Descriptors),
        Err(HostError::NotOpen(SLICE_1))
    ));
    emc.host.online(SLICE_1, &emc.handle(), false).unwrap();
}

/// Longest time from the start of a child process until it executes its program.
const FORK_TIME_MAX: Duration = Duration::from_secs(30);

/// Repeats a call while a slice is in use. Other tests in this process start programs. A new child process
/// has copies of all descriptors until it executes its program, so that the slice can be in use for a moment.
fn while_in_use(call: impl Fn() -> Result<(), HostError>) {
    let since = Instant::now();
    loop {
        match call() {
            Err(HostError::InUse { .. }) if since.elapsed() < FORK_TIME_MAX => thread::yield_now(),
            result => return result.unwrap(),
        }
    }
}

#[test]
fn host_calls_are_idempotent() {
    let emc = Emc::new();
    emc.create_slice(SLICE.get()).write_all_at(b"x", 0).unwrap();
    for _ in 0..2 {
        assert_eq!(emc.host.scrub(SLICE_1, &emc.handle()).unwrap(), SLICE);
    }
    for _ in 0..2 {
        emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
    }
    for _ in 0..2 {
        while_in_use(|| emc.host.offline(SLICE_1, &emc.handle(), true));
        emc.host.free_local_memory(ReservationId(7)).unwrap();
    }
}

#[test]
fn slice_in_use_is_closed_only_without_verification() {
    let emc = Emc::new();
    let file = emc.create_slice(SLICE.get());
    emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(file)).spawn().unwrap();
    let error = emc.host.offline(SLICE_1, &emc.handle(), true).unwrap_err();
    assert!(matches!(&error, HostError::InUse { pids, .. } if *pids == [child.id()]), "{error:?}");
    assert!(emc.host.memory(&emc.record(), MemoryForm::Descriptors).is_ok(), "the slice was closed");
    let error = emc.host.check_slices_unused(&emc.record()).unwrap_err();
    assert!(matches!(&error, HostError::InUse { pids, .. } if *pids == [child.id()]), "{error:?}");
    emc.host.offline(SLICE_1, &emc.handle(), false).unwrap();
    emc.host.check_slices_unused(&emc.record()).unwrap_err(); // also while the slice is not open here
    child.kill().unwrap();
    child.wait().unwrap();
    while_in_use(|| emc.host.check_slices_unused(&emc.record()));
    while_in_use(|| emc.host.offline(SLICE_1, &emc.handle(), true));
}

#[test]
fn local_memory_is_the_same_until_it_is_released() {
    let emc = Emc::new();
    emc.create_slice(SLICE.get());
    emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
    let parts = emc.host.memory(&emc.record(), MemoryForm::Descriptors).unwrap();
    let lengths: Vec<_> = parts.iter().map(|part| (part.slice, part.bytes)).collect();
    assert_eq!(lengths, [(None, Bytes::mib(2)), (Some(SLICE_1), SLICE)]);
    let local = descriptor(&parts[0]);
    local.write_all_at(b"x", 5).unwrap();
    local.set_len(1).unwrap_err();
    let again = emc.host.memory(&emc.record(), MemoryForm::Descriptors).unwrap();
    let mut byte = [0];
    descriptor(&again[0]).read_exact_at(&mut byte, 5).unwrap();
    assert_eq!(byte, *b"x");
    emc.host.free_local_memory(ReservationId(7)).unwrap();
    let recreated = emc.host.memory(&emc.record(), MemoryForm::Descriptors).unwrap();
    descriptor(&recreated[0]).read_exact_at(&mut byte, 5).unwrap();
    assert_eq!(byte, [0]);
}

/// Both forms by path permit access to the files. `SlicePaths` is used before a VMM attaches, and the
/// user of this VMM must be able to open the files.
#[test]
fn memory_by_path_can_be_opened_by_vm_user_only() {
    if current_user() != UserId::ROOT {
        return report_skipped("files of VMs of other users, which requires root");
    }
    let (user, other) = (UserId::new(12345).unwrap(), 12346);
    for uid in [Some(user), None, Some(UserId::ROOT)] {
        for form in [MemoryForm::SlicePaths, MemoryForm::Paths] {
            let emc = Emc::new();
            fs::set_permissions(emc.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
            emc.create_slice(SLICE.get());
            emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
            let record = VmRecord { uid, ..emc.record() };
            for part in emc.host.memory(&record, form).unwrap() {
                let RegionBacking::Path(path) = &part.backing else {
                    assert!(form == MemoryForm::SlicePaths && part.slice.is_none(), "{part:?}");
                    continue;
                };
                assert_eq!(path.metadata().unwrap().len(), part.bytes.get());
                let can_open = |id| succeeds_as_user(id, ": <> \"$1\"", path);
                assert_eq!(can_open(user.get()), uid == Some(user), "{uid:?} {form:?}");
                assert!(!can_open(other) && can_open(0));
            }
        }
    }
    let without_dir = Emulated::new(None);
    let error = without_dir.memory(&Emc::new().record(), MemoryForm::Paths).unwrap_err();
    assert!(error.to_string().contains("backend.local_dir"), "{error}");
}

/// Runs a shell command as a user without privileges. Returns whether it succeeded.
fn succeeds_as_user(id: u32, command: &str, path: &Path) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", command, "sh"]).arg(path).stderr(Stdio::null());
    shell.uid(id).gid(id).status().unwrap().success()
}

/// Regression test: the VM's user became the owner of the file, and a manager without privileges
/// could no longer truncate it.
#[test]
fn manager_of_another_user_can_truncate_slices_attached_by_path() {
    const MANAGER: u32 = 4242;
    const OTHER: u32 = 12346;
    if current_user() != UserId::ROOT {
        return report_skipped("a slice file of another user, which requires root");
    }
    let user = UserId::new(12345).unwrap();
    let emc = Emc::new();
    fs::set_permissions(emc.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    emc.create_slice(SLICE.get());
    let path = emc.handle();
    let path = Path::new(&*path.place);
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    chown(path, Some(MANAGER), Some(MANAGER)).unwrap();
    emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
    let can_open = |id| succeeds_as_user(id, ": <> \"$1\"", path);
    assert_eq!([MANAGER, user.get(), OTHER].map(can_open), [true, false, false]);
    for uid in [Some(user), None] {
        emc.host.memory(&VmRecord { uid, ..emc.record() }, MemoryForm::SlicePaths).unwrap();
        assert_eq!([MANAGER, user.get(), OTHER].map(can_open), [true, uid.is_some(), false], "{uid:?}");
        assert!(!succeeds_as_user(user.get(), "chmod 0 \"$1\"", path), "the VM's user owns the file");
    }
    assert!(succeeds_as_user(MANAGER, ": > \"$1\"", path));
    assert_eq!(path.metadata().unwrap().len(), 0);
}

#[test]
fn pool_memory_is_measured_while_slices_are_open() {
    let emc = Emc::new();
    let file = emc.create_slice(SLICE.get());
    let record = emc.record();
    let vm = ObservedVm {
        vm: record.vm,
        pid: record.process.pid,
        slices: vec![SLICE_1],
        local: Bytes::ZERO,
        pinned: false,
        uid: None,
        rehome: pool::protocol::ObservedRehome::None,
    };
    let pool = || emc.host.usage(record.reservation, &vm).pool;
    assert_eq!(pool(), None, "the slice is not open");
    emc.host.online(SLICE_1, &emc.handle(), true).unwrap();
    assert_eq!(pool(), Some(Bytes::ZERO));
    file.write_all_at(&[1; 3 << 20], 1 << 29).unwrap();
    let touched = pool().unwrap();
    assert!((Bytes::mib(3)..=Bytes::mib(6)).contains(&touched), "{touched}");
    assert_eq!(emc.host.usage(record.reservation, &vm).local, Some(Bytes::ZERO));
}
