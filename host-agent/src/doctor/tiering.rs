//! Checks of the requirements of fair tiering: cgroups, the kernel's demotion, a monitor of page
//! accesses, and nothing else that moves pages. The checks name the mechanisms that the agent uses.

use super::{
    Finding, Machine, problems_or_passed,
    tenants::{RequiredFile, check_cgroups},
};
use crate::{
    config::tiering::Tiering,
    host::{
        damon::Damon,
        tiers::{KernelMigration, Tiers},
    },
};

/// File of cgroups with which pages are demoted.
const RECLAIM_FILE: RequiredFile =
    RequiredFile { name: "memory.reclaim", fix: "boot Linux 5.19 or newer, which can demote pages" };
/// Name of the checks.
const CHECK: &str = "tiering";

/// Runs all checks for fair tiering.
pub(super) fn check_tiering(machine: &Machine, tiering: &Tiering) -> Vec<Finding> {
    let problems = check_cgroups(CHECK, "tiering.cgroups", &tiering.cgroups, &["memory"], &[RECLAIM_FILE])
        .into_iter()
        .chain(check_demotion(machine))
        .chain(check_promotion(machine))
        .chain(check_kernel_migration(machine))
        .chain(check_swap(machine))
        .collect();
    let mut findings = problems_or_passed(problems, || {
        let message =
            "memory.reclaim demotes pages, DAMON finds accessed pages, and move_pages promotes them";
        Finding::passed(CHECK, message)
    });
    findings.push(check_nodes(machine));
    findings
}

fn problem(message: String, fix: impl Into<String>) -> Finding {
    Finding::problem(CHECK, message, fix)
}

fn check_demotion(machine: &Machine) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !KernelMigration::read(&machine.sys, &machine.proc).demotes {
        let message =
            "pages cannot be demoted: the kernel reclaims pages instead of demoting them".to_owned();
        findings.push(problem(message, "echo 1 > /sys/kernel/mm/numa/demotion_enabled"));
    }
    if machine.proc.text("sys/vm/swappiness").is_ok_and(|value| value == "0") {
        let message = "only page cache is demoted, no other memory: vm.swappiness is 0".to_owned();
        findings.push(problem(message, "sysctl vm.swappiness=60"));
    }
    findings
}

fn check_promotion(machine: &Machine) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !Damon::is_available(&machine.sys) {
        let message = "pages are not promoted: this kernel has no DAMON".to_owned();
        findings
            .push(problem(message, "boot Linux 6.2 or newer with CONFIG_DAMON_VADDR and CONFIG_DAMON_SYSFS"));
    }
    findings
}

fn check_kernel_migration(machine: &Machine) -> impl Iterator<Item = Finding> {
    let interferences = KernelMigration::read(&machine.sys, &machine.proc).interferences();
    interferences.into_iter().map(|(message, fix)| problem(message, fix))
}

/// `memory.reclaim` of a tenant also reclaims pages in slower memory, if these can be swapped out.
fn check_swap(machine: &Machine) -> Option<Finding> {
    let swaps = machine.proc.text("swaps").unwrap_or_default();
    let device = swaps.lines().nth(1)?.split_whitespace().next()?;
    let message =
        format!("demotions can also swap out pages of slower memory, because {device} is in use as swap");
    Some(problem(message, "set memory.swap.max of the tenants' cgroups to 0, or run swapoff"))
}

fn check_nodes(machine: &Machine) -> Finding {
    let list = |nodes: &std::collections::BTreeSet<u32>| {
        nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    };
    match Tiers::find(&machine.sys) {
        Ok(tiers) => {
            let (local, slow) = (list(&tiers.local), list(&tiers.slow));
            Finding::passed(CHECK, format!("local memory: nodes {local}; slower memory: nodes {slow}"))
        }
        Err(error) => problem(
            units::chain(&error),
            "reserve pool memory for the tenants: tarn reserve --host HOST --vm NAME --pool SIZE --local 0",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::{Sysfs, fake::FakeSysfs};

    /// Returns a machine without a problem, and its tenants.
    fn machine() -> (FakeSysfs, Tiering) {
        let fake = FakeSysfs::new(&[
            ("sys/kernel/mm/numa/demotion_enabled", "true"),
            ("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "0"),
            ("sys/devices/system/node/has_memory", "0-1,3"),
            ("sys/devices/system/node/has_cpu", "0"),
            ("proc/sys/kernel/numa_balancing", "0"),
            ("proc/sys/vm/swappiness", "60"),
            ("proc/swaps", "Filename Type Size Used Priority"),
            ("tenants/cgroup.subtree_control", "memory io"),
            ("tenants/memory.reclaim", ""),
        ]);
        let tiering = Tiering {
            cgroups: fake.path("tenants"),
            local: None,
            slow: None,
            reservation: None,
            step: units::limits::TIERING_STEP_DEFAULT,
            demotion_bytes_per_s: 1,
            promotion_bytes_per_s: 1,
            tenants: std::collections::BTreeMap::new(),
        };
        (fake, tiering)
    }

    fn check(fake: &FakeSysfs, tiering: &Tiering) -> Vec<Finding> {
        let at = |dir: &str| Sysfs::at(fake.path(dir));
        let machine =
            Machine { sys: at("sys"), proc: at("proc"), dev: fake.path("dev"), modules: at("modules") };
        check_tiering(&machine, tiering)
    }

    #[test]
    fn mechanisms_and_nodes_are_named() {
        let (fake, tiering) = machine();
        let messages: Vec<String> =
            check(&fake, &tiering).into_iter().map(|finding| finding.message).collect();
        assert_eq!(
            messages,
            [
                "memory.reclaim demotes pages, DAMON finds accessed pages, and move_pages promotes them",
                "local memory: nodes 0; slower memory: nodes 1, 3",
            ]
        );
    }

    #[test]
    fn each_problem_has_a_fix() {
        for (file, text, message, fix) in [
            ("sys/kernel/mm/numa/demotion_enabled", "false", "pages cannot be demoted", "echo 1 >"),
            ("proc/sys/kernel/numa_balancing", "1", "the kernel also promotes pages", "sysctl"),
            ("sys/kernel/mm/lru_gen/enabled", "0x0007", "many times the requested memory", "echo n >"),
            ("proc/sys/vm/swappiness", "0", "vm.swappiness is 0", "sysctl"),
            ("proc/swaps", "Filename\n/dev/vda partition", "/dev/vda is in use as swap", "swapoff"),
            ("tenants/cgroup.subtree_control", "io", "lack the controllers memory", "echo '+memory'"),
            ("sys/devices/system/node/has_memory", "0", "no node without processors", "tarn reserve"),
        ] {
            let (fake, tiering) = machine();
            fake.files("", &[(file, text)]);
            let problems: Vec<Finding> =
                check(&fake, &tiering).into_iter().filter(|finding| !finding.ok).collect();
            assert_eq!(problems.len(), 1, "{file}: {problems:?}");
            assert!(problems[0].message.contains(message), "{file}: {problems:?}");
            assert!(problems[0].fix.as_ref().unwrap().contains(fix), "{file}: {problems:?}");
        }
        for (file, message) in [
            ("tenants/memory.reclaim", "no file memory.reclaim"),
            ("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "no DAMON"),
        ] {
            let (fake, tiering) = machine();
            std::fs::remove_file(fake.path(file)).unwrap();
            std::fs::remove_dir(fake.path(file).parent().unwrap()).ok();
            let problems: Vec<Finding> =
                check(&fake, &tiering).into_iter().filter(|finding| !finding.ok).collect();
            assert!(problems.len() == 1 && problems[0].message.contains(message), "{file}: {problems:?}");
        }
    }
}
