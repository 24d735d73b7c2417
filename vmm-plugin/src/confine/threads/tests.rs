//! Tests of threads that make forbidden system calls, and of a confined process without seccomp
//! filters. Each case runs in a child process, which executes this test binary.

use std::{
    os::unix::process::ExitStatusExt as _,
    process::{Command, Output},
};

use rustix::{
    fs::AtFlags,
    net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType},
};
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};

use super::*;
use crate::confine::Confinement;

/// Environment variable of a child process that makes a forbidden call. The value contains the
/// indices of the role and of the call.
const CHILD_ENV: &str = "TARN_TEST_CONFINED";

/// Environment variable of a confined child process without filters. The value is the path of an
/// existing file.
const UNFILTERED_ENV: &str = "TARN_TEST_UNFILTERED";
/// Path that does not exist.
const MISSING_PATH: &str = "/nowhere";
/// ID of an unprivileged user and group that own no files.
const NOBODY_UID: u32 = 65534;

/// Attempt to make a system call that the filters of all roles forbid.
#[derive(Clone, Copy, Debug)]
enum ForbiddenCall {
    Open,
    Socket,
    Connect,
    SendTo,
    DatagramPair,
    Bind,
    Remove,
    Kill,
    Thread,
    Ioctl,
    ExecutableMapping,
}

impl ForbiddenCall {
    const ALL: [Self; 11] = [
        Self::Open,
        Self::Socket,
        Self::Connect,
        Self::SendTo,
        Self::DatagramPair,
        Self::Bind,
        Self::Remove,
        Self::Kill,
        Self::Ioctl,
        Self::ExecutableMapping,
        Self::Thread,
    ];

    /// Returns the name and number of the call as in the error message. Returns `None` if the
    /// process ends without a message.
    fn call(self) -> Option<&'static str> {
        Some(match self {
            Self::Open => "openat (257)",
            Self::Socket => "socket (41)",
            Self::Connect => "connect (42)",
            Self::SendTo => "sendto (44)",
            Self::DatagramPair => "socketpair (53)",
            Self::Bind => "bind (49)",
            Self::Remove => "unlinkat (263)",
            Self::Kill => "kill (62)",
            Self::Ioctl => "ioctl (16)",
            Self::ExecutableMapping => "mmap (9)",
            Self::Thread => return None, // glibc blocks all signals during clone
        })
    }

    fn make_call(self) {
        let stdin = rustix::stdio::stdin();
        let nowhere = SocketAddrUnix::new(MISSING_PATH).unwrap();
        match self {
            Self::Open => drop(std::fs::File::open("/")),
            Self::Socket => drop(std::os::unix::net::UnixStream::connect(MISSING_PATH)),
            Self::Connect => drop(rustix::net::connect(stdin, &nowhere)),
            Self::SendTo => drop(rustix::net::sendto(stdin, b"x", SendFlags::empty(), &nowhere)),
            Self::DatagramPair => {
                drop(rustix::net::socketpair(
                    AddressFamily::UNIX,
                    SocketType::DGRAM,
                    SocketFlags::CLOEXEC,
                    None,
                ));
            }
            Self::Bind => drop(rustix::net::bind(stdin, &nowhere)),
            Self::Remove => drop(rustix::fs::unlinkat(rustix::fs::CWD, MISSING_PATH, AtFlags::empty())),
            Self::Kill => drop(rustix::process::test_kill_process(rustix::process::Pid::INIT)),
            Self::Thread => drop(std::thread::spawn(|| {})),
            Self::Ioctl => drop(rustix::termios::tcgetwinsize(rustix::stdio::stdin())),
            Self::ExecutableMapping => drop(map_executable()),
        }
    }
}

fn map_executable() -> Result<MmapRegion, vm_memory::mmap::MmapRegionError> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    MmapRegionBuilder::new(4096).with_mmap_prot(protection).with_mmap_flags(flags).build()
}

/// Makes a forbidden call on a confined thread. Runs only in a child process, which has the
/// environment variable [`CHILD_ENV`].
#[test]
fn child_makes_forbidden_call() {
    let Ok(arguments) = std::env::var(CHILD_ENV) else { return };
    let (role, attempt) = arguments.split_once(' ').unwrap();
    let (role, attempt) = (
        ThreadRole::ALL[role.parse::<usize>().unwrap()],
        ForbiddenCall::ALL[attempt.parse::<usize>().unwrap()],
    );
    rustix::thread::set_no_new_privs(true).unwrap();
    let filters = SeccompFilters::new(SeccompMode::True).unwrap();
    let _ = filters.spawn(role, "confined".into(), move || attempt.make_call()).unwrap().join();
}

fn run(role: usize, attempt: usize) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "confine::threads::tests::child_makes_forbidden_call", "--nocapture"]);
    command.env(CHILD_ENV, format!("{role} {attempt}")).output().unwrap()
}

#[test]
fn forbidden_system_call_ends_process_and_names_thread() {
    for (role_index, role) in ThreadRole::ALL.into_iter().enumerate() {
        for (attempt_index, attempt) in ForbiddenCall::ALL.into_iter().enumerate() {
            let output = run(role_index, attempt_index);
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            let Some(call) = attempt.call() else {
                assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{role:?} {attempt:?}: {stderr}");
                continue;
            };
            let expected = format!("error: {} made the forbidden system call {call}", role.name());
            assert!(stderr.contains(&expected), "{role:?} {attempt:?}: {stderr}");
            assert_eq!(output.status.code(), Some(exit::FORBIDDEN_SYSCALL.into()), "{role:?} {attempt:?}");
        }
    }
}

fn default_confinement() -> Confinement {
    let seccomp = SeccompMode::False;
    Confinement { uid: Some(NOBODY_UID), gid: Some(NOBODY_UID), chroot: None, unconfined: false, seccomp }
}

/// Enters the confinement and tries to access files and sockets. Runs only in a child process,
/// which has the environment variable [`UNFILTERED_ENV`].
#[test]
fn child_runs_without_filters() {
    let Ok(existing) = std::env::var(UNFILTERED_ENV) else { return };
    default_confinement().prepare().unwrap().enter().unwrap();
    let kind = |result: io::Result<()>| result.unwrap_err().kind();
    let path = std::path::Path::new(&existing);
    assert_eq!(kind(std::fs::read(path).map(drop)), io::ErrorKind::NotFound);
    assert_eq!(kind(std::fs::remove_file(path)), io::ErrorKind::NotFound);
    assert_eq!(kind(std::os::unix::net::UnixStream::connect(path).map(drop)), io::ErrorKind::NotFound);
    for created in ["/file", "file", "../file"] {
        assert_eq!(kind(std::fs::write(created, b"")), io::ErrorKind::ReadOnlyFilesystem);
    }
    for directory in ["/", ".", ".."] {
        assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0, "{directory}");
    }
    assert_eq!(kind(std::os::unix::fs::chroot("/")), io::ErrorKind::PermissionDenied);
    assert_eq!(rustix::process::getuid().as_raw(), NOBODY_UID);
}

#[test]
fn confinement_denies_files_and_sockets_without_filters() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "confine::threads::tests::child_runs_without_filters", "--nocapture"]);
    let output = command.env(UNFILTERED_ENV, &socket).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(socket.exists());
}

#[test]
fn root_without_uid_is_rejected_unless_unconfined() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: needs root");
        return;
    }
    let root_without_user = Confinement { uid: None, gid: None, ..default_confinement() };
    let error = root_without_user.clone().prepare().unwrap_err().to_string();
    assert!(error.starts_with("--uid: missing: as root, --uid NUMBER and --gid NUMBER must"), "{error}");
    Confinement { unconfined: true, ..root_without_user }.prepare().unwrap();
}
