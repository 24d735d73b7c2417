//! Tests of the restrictions of a VMM process, such as capabilities, seccomp filters, user and root
//! folder. The restrictions are read from /proc while a guest runs.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tests::{
    small_guests::{self as code, can_run_small_guests},
    standalone_vm::{SMALL_MEMORY_OPTIONS, StandaloneVm},
};

/// Time limit of every wait in these tests.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Id of an unprivileged user and group.
const NOBODY_UID: &str = "65534";

/// Returns whether guests can run on this machine and this process is root. If not, reports the
/// skipped test.
fn can_drop_root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        eprintln!("SKIPPED: restrictions of a VMM started by root: requires root");
    }
    root && can_run_small_guests()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Guest that writes to pool memory in an endless loop.
struct Guest(Child);

impl Guest {
    fn start(vm: &StandaloneVm, options: &[&str]) -> Self {
        let mut all = vec!["--memory", "size=64MiB", "--pool", "size=1GiB"];
        all.extend(options);
        let mut child = vm.command(&code::write_pool_memory(), &all).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        while vm.console().len() < 3 {
            assert!(start.elapsed() < WAIT_TIMEOUT, "no output of the guest within {WAIT_TIMEOUT:?}");
            if child.try_wait().unwrap().is_some() {
                panic!("the guest ended: {}", stderr_of(&child.wait_with_output().unwrap()));
            }
            std::thread::yield_now();
        }
        Self(child)
    }

    fn proc_path(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.0.id().to_string()).join(name)
    }

    /// Returns the content of /proc/PID/task/TID/status for each thread.
    fn thread_statuses(&self) -> Vec<String> {
        let tasks = fs::read_dir(self.proc_path("task")).unwrap();
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap()).collect()
    }

    /// Waits until a status field has this value in all threads. Fails after [`WAIT_TIMEOUT`].
    fn assert_thread_status(&self, field: &str, value: &str) {
        let matches = |status: &String| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            line.map(str::trim) == Some(value)
        };
        let start = Instant::now();
        while !self.thread_statuses().iter().all(matches) {
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "{field} is not {value} in all threads: {:?}",
                self.thread_statuses()
            );
        }
    }

    fn assert_no_capabilities(&self) {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            self.assert_thread_status(set, "0000000000000000");
        }
        self.assert_thread_status("NoNewPrivs", "1");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn vmm_threads_have_no_capabilities_even_as_root() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start(&vm, &["--unconfined"]);
    assert!(guest.thread_statuses().len() >= 3, "must have threads for main, vCPU and device");
    guest.assert_no_capabilities();
}

#[test]
fn vmm_threads_have_seccomp_filters_unless_disabled() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    Guest::start(&vm, &[]).assert_thread_status("Seccomp", "2");
    Guest::start(&vm, &["--seccomp", "log"]).assert_thread_status("Seccomp", "2");
    Guest::start(&vm, &["--seccomp", "false"]).assert_thread_status("Seccomp", "0");
}

#[test]
fn vmm_runs_with_given_user_and_root_folder() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let folder = vm.path("empty");
    fs::create_dir(&folder).unwrap();
    let disk = format!("path={}", vm.write_file("disk", &[0; 4096]).display());
    let options =
        ["--uid", NOBODY_UID, "--gid", NOBODY_UID, "--chroot", folder.to_str().unwrap(), "--disk", &disk];
    let guest = Guest::start(&vm, &options);
    guest.assert_no_capabilities();
    guest.assert_thread_status("Uid", &[NOBODY_UID; 4].join("\t"));
    guest.assert_thread_status("Gid", &[NOBODY_UID; 4].join("\t"));
    guest.assert_thread_status("Groups", "");
    assert_eq!(fs::read_link(guest.proc_path("root")).unwrap(), folder);
    assert_eq!(fs::read_link(guest.proc_path("cwd")).unwrap(), folder);
}

#[test]
fn root_without_uid_is_rejected_before_start() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let vmm = vm.command(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], &["--unconfined"]].concat());
    let options: Vec<_> = vmm.get_args().filter(|option| *option != "--unconfined").collect();
    let output = Command::new(vmm.get_program()).args(options).stdin(Stdio::null()).output().unwrap();
    let expected = "error: --uid: missing: as root, --uid NUMBER and --gid NUMBER must name an unprivileged user, \
                    or --unconfined must be given\n";
    assert_eq!((output.status.code(), stderr_of(&output).as_str()), (Some(2), expected));
    assert!(!vm.has_socket() && vm.console().is_empty(), "the guest must not start");
}

#[test]
fn vmm_has_empty_root_and_no_open_directory_by_default() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start(&vm, &["--uid", NOBODY_UID, "--gid", NOBODY_UID]);
    guest.assert_no_capabilities();
    guest.assert_thread_status("Uid", &[NOBODY_UID; 4].join("\t"));
    for directory in ["root", "cwd"] {
        assert_eq!(fs::read_dir(guest.proc_path(directory)).unwrap().count(), 0, "{directory}");
        let error = fs::write(guest.proc_path(directory).join("file"), b"").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{directory}");
    }
    for descriptor in fs::read_dir(guest.proc_path("fd")).unwrap() {
        let path = descriptor.unwrap().path();
        assert!(!fs::metadata(&path).unwrap().is_dir(), "{:?}", fs::read_link(&path));
    }
}

#[test]
fn guest_memory_is_excluded_from_core_dumps() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start(&vm, &[]);
    let smaps = fs::read_to_string(guest.proc_path("smaps")).unwrap();
    let lines: Vec<&str> =
        smaps.lines().skip_while(|line| !line.ends_with("/memfd:pool (deleted)")).collect();
    let flags = lines.iter().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn guest_runs_to_its_end_under_all_restrictions() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let folder = vm.path("empty");
    fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    for options in [
        &["--uid", NOBODY_UID, "--gid", NOBODY_UID][..],
        &["--unconfined"],
        &["--seccomp", "log"],
        &["--seccomp", "false"],
        &["--uid", NOBODY_UID, "--gid", NOBODY_UID, "--chroot", folder],
    ] {
        let output = vm.run(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], options].concat());
        assert_eq!(
            (output.status.code(), vm.console().as_str()),
            (Some(0), "hello\n"),
            "{}",
            stderr_of(&output)
        );
    }
}

#[test]
fn impossible_restrictions_are_rejected_before_start() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let full = vm.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("something"), b"").unwrap();
    let folder = full.to_str().unwrap();
    let assert_rejected = |options: &[&str], exit: i32, expected: &str| {
        let output = vm.run(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], options].concat());
        assert_eq!(output.status.code(), Some(exit), "{options:?}: {}", stderr_of(&output));
        assert!(stderr_of(&output).contains(expected), "{options:?}: {}", stderr_of(&output));
        assert_eq!(vm.console(), "", "{options:?}: the guest started");
    };
    assert_rejected(&["--uid", "bob", "--gid", "1"], 2, "invalid value 'bob' for '--uid <NUMBER>'");
    assert_rejected(&["--uid", "4294967295", "--gid", "1"], 2, "4294967295 is not in 1..4294967295");
    assert_rejected(&["--uid", "0", "--gid", "1"], 2, "0 is not in 1..4294967295");
    assert_rejected(&["--unconfined", "--chroot", "/"], 2, "cannot be used with");
    assert_rejected(&["--uid", NOBODY_UID], 2, "--gid <NUMBER>");
    assert_rejected(
        &["--uid", NOBODY_UID, "--gid", NOBODY_UID, "--chroot", "/nowhere"],
        1,
        "chroot: cannot list /nowhere: No such file or directory",
    );
    assert_rejected(
        &["--uid", NOBODY_UID, "--gid", NOBODY_UID, "--chroot", folder],
        1,
        &format!("chroot: {folder} is not empty"),
    );
    assert_rejected(
        &["--uid", NOBODY_UID, "--gid", NOBODY_UID, "--chroot", "/"],
        1,
        "chroot: / is not empty",
    );
}

#[test]
fn restrictions_without_root_are_rejected() {
    if !can_drop_root() {
        return;
    }
    let vm = StandaloneVm::new();
    let folder = vm.path("empty");
    fs::create_dir(&folder).unwrap();
    let run = |options: &[&str]| {
        let vmm = vm.command(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], options].concat());
        let mut command = Command::new("setpriv"); // runs the VMM as root without capabilities
        command.arg("--bounding-set=-all").arg(vmm.get_program()).args(vmm.get_args());
        command.stdin(Stdio::null()).output().unwrap()
    };
    let user = ["--uid", NOBODY_UID, "--gid", NOBODY_UID];
    let output = run(&[&user[..], &["--chroot", folder.to_str().unwrap()]].concat());
    let expected = format!(
        "error: --chroot: cannot use {} as the root directory; needs root with CAP_SYS_ADMIN: ",
        folder.display()
    );
    assert!(stderr_of(&output).starts_with(&expected), "{}", stderr_of(&output));
    let output = run(&user);
    let expected = "error: --chroot: cannot create an empty file system; needs root with CAP_SYS_ADMIN: ";
    assert!(stderr_of(&output).starts_with(expected), "{}", stderr_of(&output));
    let output = run(&["--unconfined"]);
    assert_eq!((output.status.code(), vm.console().as_str()), (Some(0), "hello\n"), "{}", stderr_of(&output));
}
