//! Requirements of Symbiosis: cgroups with memory, cpu and io controllers, and a swap device in
//! use.

use std::path::Path;

use super::{Finding, Machine, each};
use crate::{
    config::symbiosis::Symbiosis,
    host::{damon::Damon, remote::Remote, sampler::Sampler, sysfs::Sysfs},
};

/// Controllers of cgroup v2 used to measure and limit tenants.
const CONTROLLERS: [&str; 3] = ["memory", "io", "cpu"];

/// Checks all requirements.
pub(super) fn all(machine: &Machine, symbiosis: &Symbiosis) -> Vec<Finding> {
    let wrong = cgroups(&symbiosis.cgroups).into_iter().chain(swap(machine, symbiosis)).collect();
    let mut found = each(wrong, || {
        let (cgroups, remote) = (symbiosis.cgroups.display(), symbiosis.remote.display());
        Finding::good("tenants", format!("cgroups in {cgroups} are counted, and {remote} is in use as swap"))
    });
    found.push(sight(machine, symbiosis));
    found
}

/// Hint for a host without access monitor.
const BOOT: &str = "boot a kernel with CONFIG_DAMON_VADDR and CONFIG_DAMON_SYSFS";

/// Reports the access monitor of each kind of tenant.
fn sight(machine: &Machine, symbiosis: &Symbiosis) -> Finding {
    let sampler = Sampler::open(&machine.sys, symbiosis.epoch.as_duration());
    match (sampler, Damon::is_there(&machine.sys)) {
        (Ok(sampler), true) => Finding::good(
            "tenants",
            format!(
                "which pages they touch is seen by the kernel's DAMON, and by the processor's samples of {}",
                sampler.what()
            ),
        ),
        (Ok(sampler), false) => Finding::bad(
            "tenants",
            format!(
                "which pages they touch is seen only of those of which the processor takes enough samples of {}: the kernel has no DAMON",
                sampler.what()
            ),
            BOOT,
        ),
        (Err(error), true) => {
            let why = units::chain(&error);
            Finding::good("tenants", format!("which pages they touch is seen by the kernel's DAMON; {why}"))
        }
        (Err(error), false) => Finding::bad(
            "tenants",
            format!(
                "nobody sees which pages they touch, and so they mostly keep what they have: the kernel has no DAMON, and {}",
                units::chain(&error)
            ),
            BOOT,
        ),
    }
}

fn cgroups(folder: &Path) -> Option<Finding> {
    let shown = folder.display();
    let bad = |what, mend| Some(Finding::bad("tenants", what, mend));
    let Ok(given) = Sysfs::at(folder).text("cgroup.subtree_control") else {
        let mend = format!("mkdir {shown}; it must be a folder of cgroup v2");
        return bad(format!("symbiosis.cgroups: there are no cgroups in {shown}"), mend);
    };
    let missing: Vec<&str> =
        CONTROLLERS.into_iter().filter(|one| !given.split_whitespace().any(|given| given == *one)).collect();
    if missing.is_empty() {
        return None;
    }
    let mend =
        format!("echo '+{}' > {shown}/cgroup.subtree_control, and in every folder above", missing.join(" +"));
    bad(format!("symbiosis.cgroups: cgroups in {shown} have no controller {}", missing.join(", ")), mend)
}

fn swap(machine: &Machine, symbiosis: &Symbiosis) -> Option<Finding> {
    let bad = |what: String, mend: String| Some(Finding::bad("tenants", what, mend));
    let shown = symbiosis.remote.display();
    match Remote::open(&symbiosis.remote, Path::new("/sys")) {
        Err(error) => {
            bad(format!("symbiosis.remote: {}", units::chain(&error)), "name a swap device".to_owned())
        }
        Ok(remote) if !remote.is_swap(&machine.proc.text("swaps").unwrap_or_default()) => {
            bad(format!("symbiosis.remote: {shown} is not in use as swap"), format!("swapon {shown}"))
        }
        Ok(_) => None,
    }
}
