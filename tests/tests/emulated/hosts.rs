//! Tests of hosts emulated by QEMU: shared devices, faults, and removal of processes and files.

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
use tests::{linux_guests::artifacts, rack::programs_dir};

/// Time limit for the reply of a host to a command.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a command on a host and returns its output without the last line break. The command must
/// succeed.
fn command_output(host: &RackHost, command: &str) -> String {
    let output = host.run(command).unwrap();
    assert_eq!(output.status, 0, "{command}: {}", output.text);
    output.text.trim_end().to_owned()
}

fn is_unresponsive(host: &RackHost) -> bool {
    matches!(host.run_with_timeout("true", REPLY_TIMEOUT), Err(HostError::NoReply { .. }))
}

/// Returns the number of processes whose working directory is this folder.
fn count_processes_in(folder: &Path) -> usize {
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path().join("cwd")).ok());
    all.filter(|path| path == folder).count()
}

#[test]
fn hosts_share_a_device_and_are_controlled_from_outside() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device { serial: 0x51, gib: 2, is_aligned: true };
    let start = Instant::now();
    let mut hosts = Hosts::start(&artifacts(), &Plan::new(2, vec![device.clone()]), folder.path()).unwrap();
    println!("two hosts were up after {:?}", start.elapsed());
    let memory = hosts.device_link(&device);
    let [first, second] = hosts.as_mut_slice() else { panic!("expected two hosts") };

    for host in [&*first, second] {
        assert_eq!(
            command_output(host, "cat /sys/bus/cxl/devices/mem0/serial; hostname"),
            format!("0x51\n{}", host.name())
        );
    }
    assert_eq!(first.run("echo no; exit 7").unwrap().status, 7);
    assert_eq!(first.run("head -c 100000 /dev/urandom; exit 3").unwrap().status, 3);
    let numbers: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(command_output(first, "seq 50000"), numbers.trim_end());

    first.pause().unwrap();
    assert!(is_unresponsive(first) && !is_unresponsive(second));
    first.resume().unwrap();
    assert_eq!(command_output(first, "echo again"), "again");

    let reaches = "ping -c 1 -W 1 10.0.2.2 > /dev/null 2>&1; echo $?";
    assert_eq!(command_output(first, reaches), "0");
    first.set_link(false).unwrap();
    assert_eq!(
        (command_output(first, reaches), command_output(second, reaches)),
        ("1".to_owned(), "0".to_owned())
    );
    first.set_link(true).unwrap();

    let boot = command_output(second, "cat /proc/sys/kernel/random/boot_id");
    for _ in 0..2 {
        let mut power_off = Command::new(programs_dir().join("power-off-host"));
        assert!(
            power_off.arg(folder.path()).arg("h1").status().unwrap().success(),
            "power-off-host must succeed even if the host is off"
        );
    }
    assert!(!second.is_powered_on().unwrap() && first.is_powered_on().unwrap());
    second.reboot().unwrap();
    assert_ne!(command_output(second, "cat /proc/sys/kernel/random/boot_id"), boot);

    let path = folder.path().canonicalize().unwrap();
    assert!(count_processes_in(&path) >= 2);
    drop(hosts);
    assert_eq!((count_processes_in(&path), memory.exists()), (0, false));
    let remaining: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(remaining, ["logs"]);
}
