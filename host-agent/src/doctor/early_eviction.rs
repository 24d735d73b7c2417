//! Checks of the requirements of early eviction: cgroups, an active swap device, pressure stall information,
//! and an I/O scheduler that honours classes, if they are configured.

use std::path::Path;

use super::{
    Finding, Machine, problems_or_passed,
    tenants::{RequiredFile, check_cgroups},
};
use crate::{
    config::early_eviction::EarlyEviction,
    early_eviction::{IoPriority, demotes_memory},
    host::remote::RemoteDevice,
};

/// Kernel parameter that enables zswap.
const ZSWAP_FILE: &str = "module/zswap/parameters/enabled";
/// Files of cgroups with which memory is evicted early, and waiting tenants are found.
const REQUIRED_FILES: [RequiredFile; 2] = [
    RequiredFile { name: "memory.reclaim", fix: "boot Linux 5.19 or newer" },
    RequiredFile {
        name: "memory.pressure",
        fix: "boot a kernel with CONFIG_PSI, and with the parameter psi=1",
    },
];
/// Name of the checks.
const CHECK: &str = "early eviction";

/// Runs all checks for early eviction.
pub(super) fn check_early_eviction(machine: &Machine, eviction: &EarlyEviction) -> Vec<Finding> {
    let required: &[&str] = if eviction.io_classes { &["memory", "cpu", "io"] } else { &["memory", "cpu"] };
    let device = RemoteDevice::open(&eviction.device, Path::new("/sys"));
    let field = "early_eviction.cgroups";
    let problems = check_cgroups(CHECK, field, &eviction.cgroups, required, &REQUIRED_FILES)
        .into_iter()
        .chain(check_demotion(machine))
        .chain(check_zswap(machine))
        .chain(match &device {
            Ok(device) => check_swap(machine, device),
            Err(error) => Some(problem(
                format!("early_eviction.device: {}", units::chain(error)),
                "set early_eviction.device to a swap device",
            )),
        })
        .collect();
    let mut findings = problems_or_passed(problems, || {
        let message = "memory.reclaim evicts memory, and pressure stall information shows waiting tenants";
        Finding::passed(CHECK, message)
    });
    if eviction.io_classes
        && let Ok(device) = device
    {
        findings.push(check_io_priority(&IoPriority::find(&machine.sys, device.number())));
    }
    findings
}

fn problem(message: String, fix: impl Into<String>) -> Finding {
    Finding::problem(CHECK, message, fix)
}

fn check_demotion(machine: &Machine) -> Option<Finding> {
    demotes_memory(&machine.sys, &machine.proc).then(|| {
        let message = "the kernel demotes memory to slower memory instead of evicting it".to_owned();
        problem(message, "echo 0 > /sys/kernel/mm/numa/demotion_enabled, or remove [early_eviction]")
    })
}

fn check_swap(machine: &Machine, device: &RemoteDevice) -> Option<Finding> {
    let swaps = machine.proc.text("swaps").unwrap_or_default();
    let path = device.path().display();
    if !device.is_swap(&swaps) {
        let message = format!("early_eviction.device: {path} is not in use as swap");
        return Some(problem(message, format!("swapon {path}")));
    }
    let others = device.other_swaps(&swaps).join(" ");
    if others.is_empty() {
        return None;
    }
    let message = format!("the kernel also evicts memory to other swap devices than {path}: {others}");
    Some(problem(message, format!("swapoff {others}")))
}

fn check_zswap(machine: &Machine) -> Option<Finding> {
    (machine.sys.text(ZSWAP_FILE).is_ok_and(|enabled| enabled == "Y")).then(|| {
        let message = "zswap keeps evicted memory on this host, compressed".to_owned();
        problem(message, format!("echo N > /sys/{ZSWAP_FILE}"))
    })
}

fn check_io_priority(priority: &IoPriority) -> Finding {
    match priority {
        IoPriority::Unsupported { .. } => problem(
            priority.description(),
            "set the scheduler bfq or mq-deadline in queue/scheduler of the device, or io_classes = false",
        ),
        IoPriority::Weight { .. } | IoPriority::RealTime => Finding::passed(CHECK, priority.description()),
    }
}

#[cfg(test)]
mod tests {
    use tiering::evict::Settings;

    use super::*;
    use crate::host::sysfs::{Sysfs, fake::FakeSysfs};

    /// Regression test: the doctor advised to boot another kernel if the folder was missing, or had no
    /// controller `memory`.
    #[test]
    fn missing_cgroup_is_one_problem_and_kernel_files_are_not_checked() {
        let fake = FakeSysfs::new(&[("root/cgroup.subtree_control", "cpu")]);
        let machine = Machine {
            sys: Sysfs::at(fake.path("sys")),
            proc: Sysfs::at(fake.path("proc")),
            ..Machine::this()
        };
        for (folder, expected) in [
            (
                "missing",
                "/missing is not a directory of cgroup v2; memory.reclaim and memory.pressure were not checked",
            ),
            (
                "root",
                "/root lack the controllers memory; memory.reclaim and memory.pressure were not checked",
            ),
        ] {
            let eviction = EarlyEviction {
                cgroups: fake.path(folder),
                device: "/dev/null".into(),
                settings: Settings::default(),
                io_classes: false,
            };
            let findings = check_early_eviction(&machine, &eviction);
            let messages: Vec<&str> = findings.iter().map(|finding| &*finding.message).collect();
            assert_eq!(messages.len(), 2, "{messages:?}");
            assert!(messages[0].ends_with(expected), "{messages:?}");
            assert!(messages[1].starts_with("early_eviction.device: "), "{messages:?}");
        }
    }

    #[test]
    fn each_missing_requirement_is_a_problem_with_a_fix() {
        let fake = FakeSysfs::new(&[
            ("tenants/cgroup.subtree_control", "memory cpu"),
            ("tenants/memory.reclaim", ""),
            ("proc/swaps", "Filename Type Size Used Priority"),
            ("sys/kernel/mm/numa/demotion_enabled", "true"),
            ("sys/module/zswap/parameters/enabled", "Y"),
            ("sys/devices/system/node/has_memory", "0,2"),
            ("sys/devices/system/node/has_cpu", "0"),
        ]);
        let machine = Machine {
            sys: Sysfs::at(fake.path("sys")),
            proc: Sysfs::at(fake.path("proc")),
            ..Machine::this()
        };
        let eviction = EarlyEviction {
            cgroups: fake.path("tenants"),
            device: "/dev/null".into(),
            settings: Settings::default(),
            io_classes: true,
        };
        let findings = check_early_eviction(&machine, &eviction);
        let texts: Vec<String> = findings.iter().map(|finding| format!("{finding:?}")).collect();
        let all = texts.join("\n");
        for expected in [
            "lack the controllers io",
            "has no file memory.pressure",
            "demotes memory to slower memory instead of evicting it",
            "zswap keeps evicted memory on this host, compressed",
            "early_eviction.device: /dev/null is not a block device",
        ] {
            assert!(all.contains(expected), "{expected}: {all}");
        }
        assert_eq!(findings.len(), 5);
        let unsupported = check_io_priority(&IoPriority::Unsupported { scheduler: "none".to_owned() });
        assert!(!unsupported.ok && unsupported.message.contains("the scheduler none has no priorities"));
        let device = RemoteDevice::fake(&fake.path("sys"));
        assert!(check_swap(&machine, &device).unwrap().message.ends_with("/dev/fake is not in use as swap"));
        let with_swaps = |names: &[&str]| {
            let lines: String = names.iter().map(|name| format!("\n{name} partition 1 0 -2")).collect();
            fake.files("proc", &[("swaps", &format!("Filename Type Size Used Priority{lines}"))]);
            check_swap(&machine, &device).map(|finding| finding.fix.unwrap_or_default())
        };
        assert_eq!(with_swaps(&["/dev/fake"]), None);
        let fix = with_swaps(&["/dev/zram0", "/dev/fake", "/swap"]).unwrap();
        assert_eq!(fix, "swapoff /dev/zram0 /swap");
    }
}
