//! Hosts emulated by QEMU: shared devices, faults, and clean-up.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use emulated_host::{
    HostError,
    rack::{Device, Hosts, Plan, RackHost},
};
use tests::{linux_guests::bed, rack::programs};

/// How long a host that does not answer is waited for.
const SILENCE: Duration = Duration::from_secs(2);

/// Returns the output of a command, without its line break.
fn said(host: &RackHost, command: &str) -> String {
    let said = host.run(command).unwrap();
    assert_eq!(said.status, 0, "{command}: {}", said.text);
    said.text.trim_end().to_owned()
}

fn is_silent(host: &RackHost) -> bool {
    matches!(host.run_within("true", SILENCE), Err(HostError::NoReply { .. }))
}

/// Processes that name a folder.
fn processes(folder: &Path) -> usize {
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path().join("cwd")).ok());
    all.filter(|place| place == folder).count()
}

#[test]
fn hosts_share_a_device_can_be_paused_cut_off_and_switched_and_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device { serial: 0x51, gib: 2, is_aligned: true };
    let began = Instant::now();
    let mut hosts = Hosts::start(&bed(), &Plan::new(2, vec![device.clone()]), folder.path()).unwrap();
    println!("two hosts were up after {:?}", began.elapsed());
    let memory = hosts.memory_of(&device);
    let [first, second] = hosts.all_mut() else { panic!("two were planned") };

    for host in [&*first, second] {
        assert_eq!(
            said(host, "cat /sys/bus/cxl/devices/mem0/serial; hostname"),
            format!("0x51\n{}", host.name())
        );
    }
    assert_eq!(first.run("echo no; exit 7").unwrap().status, 7);
    assert_eq!(first.run("head -c 100000 /dev/urandom; exit 3").unwrap().status, 3);
    let numbers: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(said(first, "seq 50000"), numbers.trim_end());

    first.pause().unwrap();
    assert!(is_silent(first) && !is_silent(second));
    first.resume().unwrap();
    assert_eq!(said(first, "echo again"), "again");

    let reaches = "ping -c 1 -W 1 10.0.2.2 > /dev/null 2>&1; echo $?";
    assert_eq!(said(first, reaches), "0");
    first.set_link(false).unwrap();
    assert_eq!((said(first, reaches), said(second, reaches)), ("1".to_owned(), "0".to_owned()));
    first.set_link(true).unwrap();

    let boot = said(second, "cat /proc/sys/kernel/random/boot_id");
    for _ in 0..2 {
        let mut off = Command::new(programs().join("power-off-host"));
        assert!(off.arg(folder.path()).arg("h1").status().unwrap().success(), "also when it is off");
    }
    assert!(!second.is_on().unwrap() && first.is_on().unwrap());
    second.reboot().unwrap();
    assert_ne!(said(second, "cat /proc/sys/kernel/random/boot_id"), boot);

    let place = folder.path().canonicalize().unwrap();
    assert!(processes(&place) >= 2);
    drop(hosts);
    assert_eq!((processes(&place), memory.exists()), (0, false));
    let left: Vec<_> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["logs"]);
}
