//! Remaining rights of a VMM with a running guest, observed from outside; guests run nevertheless.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tests::{
    place::{Place, SMALL},
    small_guests::{self as code, can_run},
};

/// How long anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// A user and a group that own nothing.
const NOBODY: &str = "65534";

/// Returns whether guests can run here, and their VMM can give up root; prints if not.
fn can_give_up() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        eprintln!("SKIPPED: only root can give up being root");
    }
    root && can_run()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A guest that writes pool memory without end.
struct Guest(Child);

impl Guest {
    fn start(place: &Place, options: &[&str]) -> Self {
        let mut all = vec!["--memory", "size=64MiB", "--pool", "size=1GiB"];
        all.extend(options);
        let mut child = place.command(&code::touch(), &all).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while place.console().len() < 3 {
            assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}");
            if child.try_wait().unwrap().is_some() {
                panic!("the guest is over: {}", said(&child.wait_with_output().unwrap()));
            }
            std::thread::yield_now();
        }
        Self(child)
    }

    fn proc(&self, what: &str) -> PathBuf {
        Path::new("/proc").join(self.0.id().to_string()).join(what)
    }

    /// Returns the kernel's status of each thread.
    fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(self.proc("task")).unwrap();
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap()).collect()
    }

    /// Each thread reports its start.
    fn has(&self, field: &str, value: &str) {
        let says = |status: &String| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            line.map(str::trim) == Some(value)
        };
        let begun = Instant::now();
        while !self.threads().iter().all(says) {
            assert!(begun.elapsed() < PATIENCE, "{field} is not {value} of {:?}", self.threads());
        }
    }

    fn has_no_capabilities(&self) {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            self.has(set, "0000000000000000");
        }
        self.has("NoNewPrivs", "1");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn no_thread_of_a_guests_process_has_a_capability_even_if_it_is_root() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let guest = Guest::start(&place, &["--unconfined"]);
    assert!(guest.threads().len() >= 3, "the main thread, a processor and a device");
    guest.has_no_capabilities();
}

#[test]
fn every_thread_of_a_guests_process_makes_no_calls_but_those_it_needs_unless_told_otherwise() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    Guest::start(&place, &[]).has("Seccomp", "2");
    Guest::start(&place, &["--seccomp", "log"]).has("Seccomp", "2");
    Guest::start(&place, &["--seccomp", "false"]).has("Seccomp", "0");
}

#[test]
fn a_guests_process_is_who_it_was_told_to_be_and_sees_nothing_but_its_folder() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let folder = place.path("empty");
    fs::create_dir(&folder).unwrap();
    let disk = format!("path={}", place.file("disk", &[0; 4096]).display());
    let options = ["--uid", NOBODY, "--gid", NOBODY, "--chroot", folder.to_str().unwrap(), "--disk", &disk];
    let guest = Guest::start(&place, &options);
    guest.has_no_capabilities();
    guest.has("Uid", &[NOBODY; 4].join("\t"));
    guest.has("Gid", &[NOBODY; 4].join("\t"));
    guest.has("Groups", "");
    assert_eq!(fs::read_link(guest.proc("root")).unwrap(), folder);
    assert_eq!(fs::read_link(guest.proc("cwd")).unwrap(), folder);
}

#[test]
fn root_without_a_user_to_become_is_refused_before_anything_starts() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let vmm = place.command(&code::hello(), &[&SMALL[..], &["--unconfined"]].concat());
    let options: Vec<_> = vmm.get_args().filter(|option| *option != "--unconfined").collect();
    let ran = Command::new(vmm.get_program()).args(options).stdin(Stdio::null()).output().unwrap();
    let expected = "error: uid: missing: as root, --uid NUMBER and --gid NUMBER must name an unprivileged user, \
                    or --unconfined must be given\n";
    assert_eq!((ran.status.code(), said(&ran).as_str()), (Some(2), expected));
    assert!(!place.has_socket() && place.console().is_empty(), "nothing ran");
}

#[test]
fn by_default_a_guests_process_sees_an_empty_root_and_has_no_directory_open() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let guest = Guest::start(&place, &["--uid", NOBODY, "--gid", NOBODY]);
    guest.has_no_capabilities();
    guest.has("Uid", &[NOBODY; 4].join("\t"));
    for directory in ["root", "cwd"] {
        assert_eq!(fs::read_dir(guest.proc(directory)).unwrap().count(), 0, "{directory}");
        let written = fs::write(guest.proc(directory).join("file"), b"").unwrap_err();
        assert_eq!(written.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{directory}");
    }
    for descriptor in fs::read_dir(guest.proc("fd")).unwrap() {
        let path = descriptor.unwrap().path();
        assert!(!fs::metadata(&path).unwrap().is_dir(), "{:?}", fs::read_link(&path));
    }
}

#[test]
fn what_a_guest_has_in_its_memory_is_in_no_core_dump() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let guest = Guest::start(&place, &[]);
    let smaps = fs::read_to_string(guest.proc("smaps")).unwrap();
    let lines: Vec<&str> =
        smaps.lines().skip_while(|line| !line.ends_with("/memfd:pool (deleted)")).collect();
    let flags = lines.iter().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn a_guest_runs_to_its_end_whatever_its_process_gives_up() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let folder = place.path("empty");
    fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    for options in [
        &["--uid", NOBODY, "--gid", NOBODY][..],
        &["--unconfined"],
        &["--seccomp", "log"],
        &["--seccomp", "false"],
        &["--uid", NOBODY, "--gid", NOBODY, "--chroot", folder],
    ] {
        let ran = place.run(&code::hello(), &[&SMALL[..], options].concat());
        assert_eq!((ran.status.code(), place.console().as_str()), (Some(0), "hello\n"), "{}", said(&ran));
    }
}

#[test]
fn what_cannot_be_given_up_is_said_before_the_guest_runs() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let full = place.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("something"), b"").unwrap();
    let folder = full.to_str().unwrap();
    let refused = |options: &[&str], exit: i32, expected: &str| {
        let ran = place.run(&code::hello(), &[&SMALL[..], options].concat());
        assert_eq!(ran.status.code(), Some(exit), "{options:?}: {}", said(&ran));
        assert!(said(&ran).contains(expected), "{options:?}: {}", said(&ran));
        assert_eq!(place.console(), "", "{options:?}: nothing ran");
    };
    refused(&["--uid", "bob", "--gid", "1"], 2, "invalid value 'bob' for '--uid <NUMBER>'");
    refused(&["--uid", "4294967295", "--gid", "1"], 2, "4294967295 is not in 1..4294967295");
    refused(&["--uid", "0", "--gid", "1"], 2, "0 is not in 1..4294967295");
    refused(&["--unconfined", "--chroot", "/"], 2, "cannot be used with");
    refused(&["--uid", NOBODY], 2, "--gid <NUMBER>");
    refused(
        &["--uid", NOBODY, "--gid", NOBODY, "--chroot", "/nowhere"],
        1,
        "chroot: cannot list /nowhere: No such file or directory",
    );
    refused(
        &["--uid", NOBODY, "--gid", NOBODY, "--chroot", folder],
        1,
        &format!("chroot: {folder} is not empty"),
    );
    refused(&["--uid", NOBODY, "--gid", NOBODY, "--chroot", "/"], 1, "chroot: / is not empty");
}

#[test]
fn who_is_not_root_is_told_that_it_cannot_give_that_up() {
    if !can_give_up() {
        return;
    }
    let place = Place::new();
    let folder = place.path("empty");
    fs::create_dir(&folder).unwrap();
    let run = |options: &[&str]| {
        let vmm = place.command(&code::hello(), &[&SMALL[..], options].concat());
        let mut command = Command::new("setpriv"); // root by name, without its powers
        command.arg("--bounding-set=-all").arg(vmm.get_program()).args(vmm.get_args());
        command.stdin(Stdio::null()).output().unwrap()
    };
    let user = ["--uid", NOBODY, "--gid", NOBODY];
    let refused = run(&[&user[..], &["--chroot", folder.to_str().unwrap()]].concat());
    let expected = format!(
        "error: chroot: cannot use {} as the root directory; needs root with CAP_SYS_ADMIN: ",
        folder.display()
    );
    assert!(said(&refused).starts_with(&expected), "{}", said(&refused));
    let refused = run(&user);
    let expected = "error: chroot: cannot create an empty file system; needs root with CAP_SYS_ADMIN: ";
    assert!(said(&refused).starts_with(expected), "{}", said(&refused));
    let ran = run(&["--unconfined"]);
    assert_eq!((ran.status.code(), place.console().as_str()), (Some(0), "hello\n"), "{}", said(&ran));
}
