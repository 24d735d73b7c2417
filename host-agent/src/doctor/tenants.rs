//! Requirements of Symbiosis: cgroups with memory, cpu and io controllers, and a swap device in
//! use.

use std::path::Path;

use super::{Finding, Machine, problems_or};
use crate::{
    config::symbiosis::Symbiosis,
    host::{damon::Damon, remote::Remote, sampler::Sampler, sysfs::Sysfs},
};

/// Controllers of cgroup v2 used to measure and limit tenants.
const CONTROLLERS: [&str; 3] = ["memory", "io", "cpu"];

/// Checks all requirements.
pub(super) fn all(machine: &Machine, symbiosis: &Symbiosis) -> Vec<Finding> {
    let problems = cgroups(&symbiosis.cgroups).into_iter().chain(swap(machine, symbiosis)).collect();
    let mut findings = problems_or(problems, || {
        let (cgroups, remote) = (symbiosis.cgroups.display(), symbiosis.remote.display());
        Finding::passed(
            "tenants",
            format!("cgroups in {cgroups} are counted, and {remote} is in use as swap"),
        )
    });
    findings.push(access_monitor(machine, symbiosis));
    findings
}

/// Hint for a host without access monitor.
const BOOT: &str = "boot a kernel with CONFIG_DAMON_VADDR and CONFIG_DAMON_SYSFS";

/// Reports the access monitor of each kind of tenant.
fn access_monitor(machine: &Machine, symbiosis: &Symbiosis) -> Finding {
    let sampler = Sampler::open(&machine.sys, symbiosis.epoch.as_duration());
    match (sampler, Damon::is_available(&machine.sys)) {
        (Ok(sampler), true) => Finding::passed(
            "tenants",
            format!(
                "page accesses are monitored by the kernel's DAMON, and by processor samples of {}",
                sampler.event_name()
            ),
        ),
        (Ok(sampler), false) => Finding::problem(
            "tenants",
            format!(
                "page accesses are monitored only for tenants with enough processor samples of {}: the kernel has no DAMON",
                sampler.event_name()
            ),
            BOOT,
        ),
        (Err(error), true) => {
            let error_text = units::chain(&error);
            Finding::passed(
                "tenants",
                format!("page accesses are monitored by the kernel's DAMON; {error_text}"),
            )
        }
        (Err(error), false) => Finding::problem(
            "tenants",
            format!(
                "page accesses are not monitored, so shares hardly change: the kernel has no DAMON, and {}",
                units::chain(&error)
            ),
            BOOT,
        ),
    }
}

fn cgroups(folder: &Path) -> Option<Finding> {
    let shown = folder.display();
    let problem = |message, fix| Some(Finding::problem("tenants", message, fix));
    let Ok(controllers) = Sysfs::at(folder).text("cgroup.subtree_control") else {
        let fix = format!("mkdir {shown}; it must be a folder of cgroup v2");
        return problem(format!("symbiosis.cgroups: no cgroups in {shown}"), fix);
    };
    let missing: Vec<&str> = CONTROLLERS
        .into_iter()
        .filter(|one| !controllers.split_whitespace().any(|controllers| controllers == *one))
        .collect();
    if missing.is_empty() {
        return None;
    }
    let fix =
        format!("echo '+{}' > {shown}/cgroup.subtree_control, and in every folder above", missing.join(" +"));
    problem(format!("symbiosis.cgroups: cgroups in {shown} have no controller {}", missing.join(", ")), fix)
}

fn swap(machine: &Machine, symbiosis: &Symbiosis) -> Option<Finding> {
    let problem = |message: String, fix: String| Some(Finding::problem("tenants", message, fix));
    let shown = symbiosis.remote.display();
    match Remote::open(&symbiosis.remote, Path::new("/sys")) {
        Err(error) => {
            problem(format!("symbiosis.remote: {}", units::chain(&error)), "name a swap device".to_owned())
        }
        Ok(remote) if !remote.is_swap(&machine.proc.text("swaps").unwrap_or_default()) => {
            problem(format!("symbiosis.remote: {shown} is not in use as swap"), format!("swapon {shown}"))
        }
        Ok(_) => None,
    }
}
