//! Tests of the VMM with small guests, which run on any /dev/kvm: exit codes, ACPI tables, and
//! rejected options. Tests with Linux guests are in `emulated`.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tests::{
    rack::programs_dir,
    small_guests::{self as code, can_run_small_guests},
    standalone_vm::{SMALL_MEMORY_OPTIONS, StandaloneVm},
};

/// Time limit of every wait in these tests.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn exit_code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn guest_prints_to_console_and_powers_off() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let output = vm.run(&code::print_hello(), &SMALL_MEMORY_OPTIONS);
    assert_eq!((exit_code(&output), vm.console().as_str()), (Some(0), "hello\n"), "{}", stderr_of(&output));
}

#[test]
fn reset_and_crash_have_distinct_exit_codes() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let reset = vm.run(&code::request_reset(), &SMALL_MEMORY_OPTIONS);
    assert_eq!((exit_code(&reset), stderr_of(&reset).as_str()), (Some(10), "the guest requested a reset\n"));
    let crashed = vm.run(&code::cause_triple_fault(), &SMALL_MEMORY_OPTIONS);
    assert_eq!(exit_code(&crashed), Some(11), "{}", stderr_of(&crashed));
    assert!(stderr_of(&crashed).starts_with("error: the guest crashed: vCPU 0: "), "{}", stderr_of(&crashed));
}

#[test]
fn guest_finds_srat_nodes_from_root_pointer() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let options = [
        "--cpus=3",
        "--memory=size=64MiB,cpus=1",
        "--memory=size=32MiB,cpus=2",
        "--pool=size=1GiB",
        "--pool=size=2GiB",
    ];
    let output = vm.run(&code::print_srat(), &options);
    let (mib, gib) = (1_u64 << 20, 1_u64 << 30);
    let ranges =
        [(0, 0, 64 * mib, 1), (1, 64 * mib, 32 * mib, 1), (2, 4 * gib, gib, 3), (3, 5 * gib, 2 * gib, 3)];
    let expected: String = ranges
        .iter()
        .map(|(node, at, bytes, flags)| format!("{node:016x} {at:016x} {bytes:016x} {flags:016x} \n"))
        .collect();
    assert_eq!((exit_code(&output), vm.console()), (Some(0), expected), "{}", stderr_of(&output));
}

#[test]
fn unresponsive_guest_is_stopped_by_second_signal() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let mut options = SMALL_MEMORY_OPTIONS.to_vec();
    options.extend(["--pool", "size=1GiB"]);
    let mut guest = vm.command(&code::write_pool_memory(), &options).stderr(Stdio::piped()).spawn().unwrap();
    wait_until(&mut guest, || vm.console().len() > 3);
    for _ in 0..2 {
        let pid = rustix::process::Pid::from_child(&guest);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        // The second signal would be lost while the first is pending, so the test waits for the
        // delivery of the first signal.
        wait_until(&mut guest, || pending_signals(pid).is_none_or(|signals| signals == 0));
    }
    let output = guest.wait_with_output().unwrap();
    let message = "the guest was stopped by a second signal before it powered off\n";
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(12), message));
}

fn pending_signals(pid: rustix::process::Pid) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Waits until a condition holds. Fails if the guest ends before or after [`WAIT_TIMEOUT`].
fn wait_until(guest: &mut Child, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "the condition does not hold within {WAIT_TIMEOUT:?}");
        if let Some(status) = guest.try_wait().unwrap() {
            let mut stderr = String::new();
            guest.stderr.take().map(|mut from| from.read_to_string(&mut stderr));
            assert!(condition(), "the guest ended: {status}: {stderr}");
            return;
        }
        std::thread::yield_now();
    }
}

#[test]
fn invalid_guests_are_rejected_before_start() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let assert_rejected = |kernel: &[u8], options: &[&str], expected: &str| {
        let output = vm.run(kernel, options);
        assert_eq!(exit_code(&output), Some(1), "{options:?}: {}", stderr_of(&output));
        assert!(stderr_of(&output).contains(expected), "{options:?}: {}", stderr_of(&output));
        assert_eq!(vm.console(), "", "{options:?}: the guest started");
    };
    let hello = code::print_hello();
    assert_rejected(
        b"#!/bin/sh\n",
        &SMALL_MEMORY_OPTIONS,
        "must be a bzImage, or an ELF for x86-64 with a PVH entry",
    );
    assert_rejected(&hello[..600], &SMALL_MEMORY_OPTIONS, "must be a bzImage");
    assert_rejected(
        &hello,
        &["--memory", "size=32MiB"],
        "memory: 32MiB for node 0 is invalid: must be a multiple of 1MiB, at least 64MiB",
    );
    assert_rejected(&hello, &["--pool", "size=1GiB"], "memory: size is missing: required with --standalone");
    let pool = |pool| ["--memory", "size=64MiB", "--pool", pool];
    assert_rejected(
        &hello,
        &pool("size=1500MiB"),
        "pool: size=1500MiB is not a whole number of slices of 1GiB, at least one",
    );
    assert_rejected(&hello, &pool("size=5000GiB"), "slices: 5000 is out of range: must be 0 to 4096");
    assert_rejected(
        &hello,
        &pool("size=1GiB,host_numa_node=77"),
        "cannot bind to a host NUMA node: 1GiB of node 1; does the node exist",
    );
    assert_rejected(
        &hello,
        &["--memory", "size=900GiB,prefault=on"],
        "memory: cannot prefault 900GiB: this host has",
    );
    assert_rejected(
        &hello,
        &["--memory", "size=900GiB,hugepages=on"],
        "; are there enough free huge pages of that size?",
    );
    let empty = vm.write_file("empty", b"");
    let with = |option: &str, value: String| {
        [SMALL_MEMORY_OPTIONS[0].into(), SMALL_MEMORY_OPTIONS[1].into(), option.to_owned(), value]
    };
    let assert_option_rejected = |option: &str, value: String, expected: &str| {
        let options = with(option, value);
        assert_rejected(&hello, &options.each_ref().map(String::as_str), expected);
    };
    assert_option_rejected(
        "--initrd",
        "/nowhere/initrd".into(),
        "initrd: cannot read /nowhere/initrd: No such file or directory",
    );
    assert_option_rejected(
        "--disk",
        "path=/nowhere/disk".into(),
        "disk: cannot open /nowhere/disk: No such file or directory",
    );
    // The disk is locked with fcntl, in the same way as by QEMU.
    let locked = File::create(vm.path("locked")).unwrap();
    rustix::fs::fcntl_lock(&locked, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_option_rejected(
        "--disk",
        format!("path={}", vm.path("locked").display()),
        "is in use by another process",
    );
    assert_option_rejected(
        "--disk",
        format!("path={}", empty.display()),
        "has 0 bytes: must be a whole number of sectors",
    );
    assert_option_rejected("--net", "tap=t0".into(), "net: tap and mac are required");
    assert_option_rejected("--net", "tap=t0,mac=53:54:00:00:00:01".into(), "is not a unicast MAC address");
    assert_option_rejected(
        "--serial",
        "file=/nowhere/console".into(),
        "serial: cannot write /nowhere/console",
    );
    assert_option_rejected("--cmdline", "x".repeat(3000), "cmdline: 3000 bytes: must be at most 2047");
    let output = vm.run(&hello, &["--cpus", "65"]);
    assert_eq!(
        exit_code(&output),
        Some(2),
        "the option parser must reject the value: {}",
        stderr_of(&output)
    );
}

#[test]
fn locked_disk_is_rejected() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let disk = vm.write_file("disk", &[0; 4096]);
    let lock = File::open(&disk).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let option = format!("path={}", disk.display());
    let output = vm.run(&code::print_hello(), &["--memory", "size=64MiB", "--disk", &option]);
    assert_eq!(exit_code(&output), Some(1));
    assert!(stderr_of(&output).contains("is in use by another process"), "{}", stderr_of(&output));
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::Unlock).unwrap(); // also releases the lock for forked processes
    let output = vm.run(&code::print_hello(), &["--memory", "size=64MiB", "--disk", &option]);
    assert_eq!((exit_code(&output), vm.console().as_str()), (Some(0), "hello\n"), "{}", stderr_of(&output));
}

#[test]
fn missing_kvm_permission_is_reported() {
    if !can_run_small_guests() {
        return;
    }
    let is_world_accessible = fs::metadata("/dev/kvm").unwrap().permissions().mode() & 0o006 != 0;
    if is_world_accessible || !rustix::process::geteuid().is_root() {
        code::report_skipped(
            "user without access to /dev/kvm: all users have access, or this user is not root",
        );
        return;
    }
    let vm = StandaloneVm::new();
    // The program is copied because other users cannot read the build folder. A separate process
    // copies the program. Otherwise children of this process could inherit a descriptor that is
    // open for writing, and the copy could not be executed.
    let program = vm.path("vmm-plugin");
    let copied = Command::new("cp").arg(programs_dir().join("vmm-plugin")).arg(&program).status();
    assert!(copied.unwrap().success());
    fs::set_permissions(vm.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    let as_root = vm.command(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], &["--unconfined"]].concat());
    let output = Command::new(program).args(as_root.get_args()).uid(65534).gid(65534).output().unwrap();
    assert_eq!(exit_code(&output), Some(1));
    assert_eq!(
        stderr_of(&output),
        "error: /dev/kvm: cannot open it; add this user to the group of the file, usually kvm: Permission denied (os error 13)\n"
    );
}

#[test]
fn guest_has_at_most_64_cpus() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let output = vm.run(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], &["--cpus", "64"]].concat());
    assert_eq!((exit_code(&output), vm.console().as_str()), (Some(0), "hello\n"), "{}", stderr_of(&output));
    let output = vm.run(&code::print_hello(), &[&SMALL_MEMORY_OPTIONS[..], &["--cpus", "65"]].concat());
    assert_eq!(exit_code(&output), Some(2), "{}", stderr_of(&output));
}
