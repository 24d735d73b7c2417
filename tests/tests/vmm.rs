//! The VMM with guests of a few instructions, on any /dev/kvm: exits, the guests' view, and
//! rejections before the start. Linux guests are booted elsewhere.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tests::{
    place::{Place, SMALL},
    rack::programs,
    small_guests::{self as code, can_run},
};

/// How long anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_guest_is_heard_on_its_console_and_switches_itself_off() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let ran = place.run(&code::hello(), &SMALL);
    assert_eq!((code(&ran), place.console().as_str()), (Some(0), "hello\n"), "{}", said(&ran));
}

#[test]
fn a_reset_and_a_crash_have_exit_codes_of_their_own() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let reset = place.run(&code::reset(), &SMALL);
    assert_eq!((code(&reset), said(&reset).as_str()), (Some(10), "the guest requested a reset\n"));
    let crashed = place.run(&code::crash(), &SMALL);
    assert_eq!(code(&crashed), Some(11), "{}", said(&crashed));
    assert!(said(&crashed).starts_with("error: the guest crashed: vCPU 0: "), "{}", said(&crashed));
}

#[test]
fn a_guest_finds_its_nodes_from_the_root_pointer() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let options = [
        "--cpus=3",
        "--memory=size=64MiB,cpus=1",
        "--memory=size=32MiB,cpus=2",
        "--pool=size=1GiB",
        "--pool=size=2GiB",
    ];
    let ran = place.run(&code::walk(), &options);
    let (mib, gib) = (1_u64 << 20, 1_u64 << 30);
    let runs =
        [(0, 0, 64 * mib, 1), (1, 64 * mib, 32 * mib, 1), (2, 4 * gib, gib, 3), (3, 5 * gib, 2 * gib, 3)];
    let expected: String = runs
        .iter()
        .map(|(node, at, bytes, flags)| format!("{node:016x} {at:016x} {bytes:016x} {flags:016x} \n"))
        .collect();
    assert_eq!((code(&ran), place.console()), (Some(0), expected), "{}", said(&ran));
}

#[test]
fn a_guest_that_does_not_listen_is_stopped_by_the_second_signal() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut options = SMALL.to_vec();
    options.extend(["--pool", "size=1GiB"]);
    let mut guest = place.command(&code::touch(), &options).stderr(Stdio::piped()).spawn().unwrap();
    until(&mut guest, || place.console().len() > 3);
    for _ in 0..2 {
        let pid = rustix::process::Pid::from_child(&guest);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        // A signal that is still pending swallows the next: wait until the first was taken.
        until(&mut guest, || pending(pid).is_none_or(|signals| signals == 0));
    }
    assert_eq!(guest.wait().unwrap().code(), Some(12));
}

fn pending(pid: rustix::process::Pid) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Waits until something is so. The guest has until then to live.
fn until(guest: &mut Child, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        if let Some(status) = guest.try_wait().unwrap() {
            let mut stderr = String::new();
            guest.stderr.take().map(|mut from| from.read_to_string(&mut stderr));
            assert!(so(), "the guest is over: {status}: {stderr}");
            return;
        }
        std::thread::yield_now();
    }
}

#[test]
fn what_cannot_be_a_guest_is_refused_before_anything_starts() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let refused = |kernel: &[u8], options: &[&str], expected: &str| {
        let ran = place.run(kernel, options);
        assert_eq!(code(&ran), Some(1), "{options:?}: {}", said(&ran));
        assert!(said(&ran).contains(expected), "{options:?}: {}", said(&ran));
        assert_eq!(place.console(), "", "{options:?}: nothing ran");
    };
    let hello = code::hello();
    refused(b"#!/bin/sh\n", &SMALL, "must be a bzImage, or an ELF for x86-64 with a PVH entry");
    refused(&hello[..600], &SMALL, "must be a bzImage");
    refused(
        &hello,
        &["--memory", "size=32MiB"],
        "memory: 32MiB for node 0 is not possible: must be whole MiB, at least 64MiB",
    );
    refused(&hello, &["--pool", "size=1GiB"], "memory: size is missing: required with --standalone");
    let pool = |pool| ["--memory", "size=64MiB", "--pool", pool];
    refused(
        &hello,
        &pool("size=1500MiB"),
        "pool: size=1500MiB is not a whole number of slices of 1GiB, at least one",
    );
    refused(&hello, &pool("size=5000GiB"), "slices: 5000 is not possible: must be 0 to 4096");
    refused(
        &hello,
        &pool("size=1GiB,host_numa_node=77"),
        "cannot bind to a host NUMA node: 1GiB of node 1; does the node exist",
    );
    refused(
        &hello,
        &["--memory", "size=900GiB,prefault=on"],
        "memory: cannot prefault 900GiB: this host has",
    );
    refused(
        &hello,
        &["--memory", "size=900GiB,hugepages=on"],
        "; are there enough free huge pages of that size?",
    );
    let empty = place.file("empty", b"");
    let with = |option: &str, value: String| [SMALL[0].into(), SMALL[1].into(), option.to_owned(), value];
    let told = |option: &str, value: String, expected: &str| {
        let options = with(option, value);
        refused(&hello, &options.each_ref().map(String::as_str), expected);
    };
    told(
        "--initrd",
        "/nowhere/initrd".into(),
        "initrd: cannot read /nowhere/initrd: No such file or directory",
    );
    told("--disk", "path=/nowhere/disk".into(), "disk: cannot open /nowhere/disk: No such file or directory");
    // As QEMU locks it; two of our own would also see each other.
    let locked = File::create(place.path("locked")).unwrap();
    rustix::fs::fcntl_lock(&locked, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    told("--disk", format!("path={}", place.path("locked").display()), "is in use by another process");
    told("--disk", format!("path={}", empty.display()), "has 0 bytes: must be a whole number of sectors");
    told("--net", "tap=t0".into(), "net: tap and mac are required");
    told("--net", "tap=t0,mac=53:54:00:00:00:01".into(), "is not a unicast MAC address");
    told("--serial", "file=/nowhere/console".into(), "serial: cannot write /nowhere/console");
    told("--cmdline", "x".repeat(3000), "cmdline: 3000 bytes are too long: at most 2047");
    let many = place.run(&hello, &["--cpus", "65"]);
    assert_eq!(code(&many), Some(2), "clap says what it takes: {}", said(&many));
}

#[test]
fn a_disk_is_the_guests_alone() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let disk = place.file("disk", &[0; 4096]);
    let held = File::open(&disk).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let option = format!("path={}", disk.display());
    let ran = place.run(&code::hello(), &["--memory", "size=64MiB", "--disk", &option]);
    assert_eq!(code(&ran), Some(1));
    assert!(said(&ran).contains("is in use by another process"), "{}", said(&ran));
    rustix::fs::flock(&held, rustix::fs::FlockOperation::Unlock).unwrap(); // also for forked processes
    let ran = place.run(&code::hello(), &["--memory", "size=64MiB", "--disk", &option]);
    assert_eq!((code(&ran), place.console().as_str()), (Some(0), "hello\n"), "{}", said(&ran));
}

#[test]
fn who_may_not_use_kvm_is_told_so() {
    if !can_run() {
        return;
    }
    let everybody_may = fs::metadata("/dev/kvm").unwrap().permissions().mode() & 0o006 != 0;
    if everybody_may || !rustix::process::geteuid().is_root() {
        code::left_out(
            "somebody who may not use /dev/kvm: everybody may, or only root can become somebody else",
        );
        return;
    }
    let place = Place::new();
    // Where it was built others may not look. Another process copies it: this one starts programs all the time, and each of
    // them would hold the copy open for writing for a moment.
    let program = place.path("vmm-plugin");
    let copied = Command::new("cp").arg(programs().join("vmm-plugin")).arg(&program).status();
    assert!(copied.unwrap().success());
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    let as_root = place.command(&code::hello(), &[&SMALL[..], &["--unconfined"]].concat());
    let ran = Command::new(program).args(as_root.get_args()).uid(65534).gid(65534).output().unwrap();
    assert_eq!(code(&ran), Some(1));
    assert_eq!(
        said(&ran),
        "error: /dev/kvm: cannot open it; may this user open it? Its group is usually kvm: Permission denied (os error 13)\n"
    );
}

#[test]
fn a_guest_may_have_64_processors_and_no_more() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let ran = place.run(&code::hello(), &[&SMALL[..], &["--cpus", "64"]].concat());
    assert_eq!((code(&ran), place.console().as_str()), (Some(0), "hello\n"), "{}", said(&ran));
    let ran = place.run(&code::hello(), &[&SMALL[..], &["--cpus", "65"]].concat());
    assert_eq!(code(&ran), Some(2), "{}", said(&ran));
}
