//! Checks of the requirements of Symbiosis: cgroups with memory, cpu and io controllers, an active
//! swap device, and a monitor of page accesses.

use std::path::Path;

use super::{Finding, Machine, problems_or_passed};
use crate::{
    config::symbiosis::Symbiosis,
    host::{damon::Damon, remote::RemoteDevice, sampler::Sampler, sysfs::Sysfs},
};

/// Controllers of cgroup v2 used to measure and limit tenants.
const CGROUP_CONTROLLERS: [&str; 3] = ["memory", "io", "cpu"];

/// Runs all checks for Symbiosis.
pub(super) fn check_tenants(machine: &Machine, symbiosis: &Symbiosis) -> Vec<Finding> {
    let problems =
        check_cgroups("tenants", "symbiosis.cgroups", &symbiosis.cgroups, &CGROUP_CONTROLLERS, &[])
            .into_iter()
            .chain(check_swap(machine, symbiosis))
            .collect();
    let mut findings = problems_or_passed(problems, || {
        let (cgroups, remote) = (symbiosis.cgroups.display(), symbiosis.remote.display());
        Finding::passed(
            "tenants",
            format!("cgroups in {cgroups} have all controllers, and {remote} is in use as swap"),
        )
    });
    findings.push(check_access_monitor(machine, symbiosis));
    findings
}

/// Fix printed if the page accesses of some tenants cannot be monitored.
const DAMON_FIX: &str = "boot a kernel with CONFIG_DAMON_VADDR and CONFIG_DAMON_SYSFS";

/// Reports whether page accesses of tenants can be monitored by DAMON, by processor samples or by
/// both.
fn check_access_monitor(machine: &Machine, symbiosis: &Symbiosis) -> Finding {
    let sampler = Sampler::open(&machine.sys, symbiosis.epoch.as_duration());
    match (sampler, Damon::is_available(&machine.sys)) {
        (Ok(sampler), true) => Finding::passed(
            "tenants",
            format!(
                "page accesses are monitored by DAMON and by processor samples of {}",
                sampler.event_name()
            ),
        ),
        (Ok(sampler), false) => Finding::problem(
            "tenants",
            format!(
                "page accesses are monitored only for tenants with enough processor samples of {}: this kernel has no DAMON",
                sampler.event_name()
            ),
            DAMON_FIX,
        ),
        (Err(error), true) => {
            let error_text = units::chain(&error);
            Finding::passed("tenants", format!("page accesses are monitored by DAMON; {error_text}"))
        }
        (Err(error), false) => Finding::problem(
            "tenants",
            format!(
                "page accesses are not monitored, so shares hardly change: this kernel has no DAMON, and {}",
                units::chain(&error)
            ),
            DAMON_FIX,
        ),
    }
}

/// File that the kernel must provide in cgroups.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequiredFile {
    /// Name of the file.
    pub name: &'static str,
    /// Advice if the cgroup has no such file.
    pub fix: &'static str,
}

/// Checks that a directory contains cgroups with these controllers, and that the kernel provides `files`.
/// `check` is the name of the check, and `field` the setting that contains the directory. The files are not
/// checked if the directory is not a cgroup or has no controller `memory`, because they are missing there with
/// any kernel.
pub(super) fn check_cgroups(
    check: &'static str,
    field: &str,
    folder: &Path,
    required: &[&'static str],
    files: &[RequiredFile],
) -> Vec<Finding> {
    let (sysfs, dir) = (Sysfs::at(folder), folder.display());
    let problem = |message, fix: String| Finding::problem(check, message, fix);
    let names: Vec<&str> = files.iter().map(|file| file.name).collect();
    let unchecked = match &*names {
        [] => String::new(),
        [name] => format!("; {name} was not checked"),
        names => format!("; {} were not checked", names.join(" and ")),
    };
    let Ok(controllers) = sysfs.text("cgroup.subtree_control") else {
        let fix = format!("mkdir {dir}, which must be in a mounted cgroup2 file system");
        return vec![problem(format!("{field}: {dir} is not a directory of cgroup v2{unchecked}"), fix)];
    };
    let is_enabled = |name: &&&str| controllers.split_whitespace().any(|enabled| enabled == **name);
    let missing: Vec<&str> = required.iter().filter(|name| !is_enabled(name)).copied().collect();
    let has_memory = is_enabled(&&"memory");
    let missing_controllers = (!missing.is_empty()).then(|| {
        let fix = format!(
            "echo '+{}' > {dir}/cgroup.subtree_control, and in every parent directory",
            missing.join(" +")
        );
        let unchecked = if has_memory { "" } else { &unchecked };
        let list = missing.join(", ");
        problem(format!("{field}: cgroups in {dir} lack the controllers {list}{unchecked}"), fix)
    });
    let missing_files = files.iter().filter(|file| has_memory && !sysfs.has(file.name)).map(|file| {
        problem(format!("{field}: the cgroup {dir} has no file {}", file.name), file.fix.to_owned())
    });
    missing_controllers.into_iter().chain(missing_files).collect()
}

fn check_swap(machine: &Machine, symbiosis: &Symbiosis) -> Option<Finding> {
    let problem = |message: String, fix: String| Some(Finding::problem("tenants", message, fix));
    let device = symbiosis.remote.display();
    match RemoteDevice::open(&symbiosis.remote, Path::new("/sys")) {
        Err(error) => problem(
            format!("symbiosis.remote: {}", units::chain(&error)),
            "set symbiosis.remote to a swap device".to_owned(),
        ),
        Ok(remote) if !remote.is_swap(&machine.proc.text("swaps").unwrap_or_default()) => {
            problem(format!("symbiosis.remote: {device} is not in use as swap"), format!("swapon {device}"))
        }
        Ok(_) => None,
    }
}
