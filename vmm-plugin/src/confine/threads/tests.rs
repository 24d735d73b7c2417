//! Threads that do what they never need. Each is a thread of a process of its own, which is this test once more.

use std::{
    os::unix::process::ExitStatusExt as _,
    process::{Command, Output},
};

use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};

use super::*;

/// Which work, and which call, when this test is such a process.
const CHILD: &str = "TARN_TEST_CONFINED";

/// A call that nobody needs.
#[derive(Clone, Copy, Debug)]
enum Tries {
    Open,
    Connect,
    Thread,
    Tap,
    Code,
}

impl Tries {
    const ALL: [Self; 5] = [Self::Open, Self::Connect, Self::Tap, Self::Code, Self::Thread];

    fn call(self) -> Option<&'static str> {
        Some(match self {
            Self::Open => "openat (257)",
            Self::Connect => "socket (41)",
            Self::Tap => "ioctl (16)",
            Self::Code => "mmap (9)",
            Self::Thread => return None, // glibc blocks all signals meanwhile
        })
    }

    fn now(self) {
        match self {
            Self::Open => drop(std::fs::File::open("/")),
            Self::Connect => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            Self::Thread => drop(std::thread::spawn(|| {})),
            Self::Tap => drop(rustix::termios::tcgetwinsize(rustix::stdio::stdin())),
            Self::Code => drop(memory_for_code()),
        }
    }
}

fn memory_for_code() -> Result<MmapRegion, vm_memory::mmap::MmapRegionError> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    MmapRegionBuilder::new(4096).with_mmap_prot(protection).with_mmap_flags(flags).build()
}

/// Does what it is told, in a thread that may not; or nothing, if it is not told.
#[test]
fn child() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (work, tries) = told.split_once(' ').unwrap();
    let (work, tries) =
        (Work::ALL[work.parse::<usize>().unwrap()], Tries::ALL[tries.parse::<usize>().unwrap()]);
    rustix::thread::set_no_new_privs(true).unwrap();
    let filters = Filters::new(Seccomp::True).unwrap();
    let _ = filters.spawn(work, "confined".into(), move || tries.now()).unwrap().join();
}

fn run(work: usize, tries: usize) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "confine::threads::tests::child", "--nocapture"]);
    command.env(CHILD, format!("{work} {tries}")).output().unwrap()
}

#[test]
fn a_thread_that_does_what_it_never_needs_ends_the_process_and_is_named_with_the_call() {
    for (at, work) in Work::ALL.into_iter().enumerate() {
        for (which, tries) in Tries::ALL.into_iter().enumerate() {
            let ended = run(at, which);
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            let Some(call) = tries.call() else {
                assert_eq!(ended.status.signal(), Some(libc::SIGSYS), "{work:?} {tries:?}: {said}");
                continue;
            };
            let expected =
                format!("error: {} made the system call {call}, which it never needs", work.name());
            assert!(said.contains(&expected), "{work:?} {tries:?}: {said}");
            assert_eq!(ended.status.code(), Some(exit::FORBIDDEN.into()), "{work:?} {tries:?}");
        }
    }
}
