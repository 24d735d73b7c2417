//! Requirements of the kernel: version, modules, KVM, and memory hotplug policy.

use std::fs::OpenOptions;

use super::{Finding, Machine, MemoryUse, fix_for, problems_or};
use crate::host::{
    blocks,
    sysfs::{Sysfs, SysfsError},
};

/// First kernel with regions of volatile memory.
const OLDEST: (u32, u32) = (6, 3);
/// Kernel parameter that keeps added memory offline from boot on.
const STAYS_OFFLINE: &str = "memhp_default_state=offline";

/// Setting for huge pages.
const HUGE_PAGES: &str = "kernel/mm/transparent_hugepage";

/// Module, with the folder that exists once it is loaded.
struct Module {
    name: &'static str,
    driver: &'static str,
    /// The agent loads the module on demand.
    on_demand: bool,
}

const MODULES: [Module; 7] = [
    module("cxl_acpi", "bus/platform/drivers/cxl_acpi", false),
    module("cxl_pci", "bus/pci/drivers/cxl_pci", false),
    module("cxl_port", "bus/cxl/drivers/cxl_port", false),
    module("cxl_mem", "bus/cxl/drivers/cxl_mem", false),
    module("dax_cxl", "bus/cxl/drivers/cxl_dax_region", false),
    module("device_dax", "bus/dax/drivers/device_dax", true),
    module("kmem", "bus/dax/drivers/kmem", true),
];

const fn module(name: &'static str, driver: &'static str, on_demand: bool) -> Module {
    Module { name, driver, on_demand }
}

/// Checks whether regions of volatile memory can be created.
pub(super) fn release(machine: &Machine) -> Finding {
    let release = machine.proc.text("sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release.split(['.', '-']).map(|part| part.parse::<u32>().ok());
    let (oldest, newer) = (format!("{}.{}", OLDEST.0, OLDEST.1), "boot a newer kernel");
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) if (major, minor) >= OLDEST => {
            Finding::passed("kernel", format!("{release} is new enough"))
        }
        _ => Finding::problem(
            "kernel",
            format!(
                "{release:?} cannot create regions of CXL memory: {oldest} is the first version that can"
            ),
            newer,
        ),
    }
}

/// Checks whether guests can run.
pub(super) fn kvm(machine: &Machine) -> Finding {
    match OpenOptions::new().read(true).write(true).open(machine.dev.join("kvm")) {
        Ok(_) => Finding::passed("kvm", "/dev/kvm can be used"),
        Err(errno) => {
            let fix = fix_for(
                &errno,
                "`modprobe kvm_intel` or `modprobe kvm_amd`; virtualisation must be on in the firmware",
            );
            Finding::problem("kvm", format!("no guest can run: open /dev/kvm: {errno}"), fix)
        }
    }
}

/// Reports whether guests get huge pages, which their VMMs request. Guests run without them, so
/// this never fails.
pub(super) fn huge_pages(machine: &Machine) -> Finding {
    let chosen = |file: &str| {
        let choices = machine.sys.text(format!("{HUGE_PAGES}/{file}")).ok()?;
        let chosen = choices.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
        chosen.map(str::to_owned)
    };
    // Kernels since 6.12 have a file for each size, which may refer to the common one.
    let of_size = chosen("hugepages-2048kB/shmem_enabled").filter(|chosen| chosen != "inherit");
    let file = if of_size.is_some() { "hugepages-2048kB/shmem_enabled" } else { "shmem_enabled" };
    match of_size.or_else(|| chosen("shmem_enabled")).as_deref() {
        Some(chosen @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::passed("hugepages", format!("{file} is {chosen}: guest memory gets huge pages"))
        }
        Some(chosen) => Finding {
            fix: Some(format!(
                "`echo advise > /sys/{HUGE_PAGES}/{file}`, and at each boot by a line in /etc/tmpfiles.d: \
                 `w /sys/{HUGE_PAGES}/{file} - - - - advise`"
            )),
            ..Finding::passed(
                "hugepages",
                format!("{file} is {chosen}: guest memory uses pages of 4 KiB, which is slower"),
            )
        },
        None => Finding {
            fix: Some("boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE".to_owned()),
            ..Finding::passed(
                "hugepages",
                "this kernel has no huge pages for shared memory: guest memory uses pages of 4 KiB",
            )
        },
    }
}

/// Checks the modules for CXL memory.
pub(super) fn modules(machine: &Machine, used: MemoryUse) -> Vec<Finding> {
    let needed = MODULES.iter().filter(|module| module.name != "kmem" || used == MemoryUse::Blocks);
    let release = machine.proc.text("sys/kernel/osrelease").unwrap_or_default();
    let list = machine.modules.text(format!("{release}/modules.dep")).unwrap_or_default();
    let problems = needed.filter(|module| !machine.sys.has(module.driver));
    let problems = problems.filter_map(|Module { name, on_demand, .. }| match (is_listed(&list, name), on_demand) {
        (true, true) => None,
        (true, false) => Some(Finding::problem("modules", format!("{name} is not loaded"), format!("`modprobe {name}`"))),
        (false, _) => Some(Finding::problem(
            "modules",
            format!("{name} is neither loaded nor among the modules of kernel {release}"),
            format!("boot a kernel that has it (CONFIG_{}), or install the package with the rest of its modules", option(name)),
        )),
    });
    problems_or(problems.collect(), || Finding::passed("modules", "all are loaded, or loadable on demand"))
}

/// Parses `kernel/drivers/dax/kmem.ko.xz: kernel/...`.
fn is_listed(list: &str, name: &str) -> bool {
    let files = list.lines().filter_map(|line| line.split(':').next()?.rsplit('/').next());
    files.filter_map(|file| file.split_once(".ko")).any(|(listed, _)| listed.replace('-', "_") == name)
}

/// Returns the configuration option of a module.
fn option(module: &str) -> String {
    match module {
        "device_dax" => "DEV_DAX".to_owned(),
        "dax_cxl" => "DEV_DAX_CXL".to_owned(),
        "kmem" => "DEV_DAX_KMEM".to_owned(),
        cxl => cxl.to_uppercase(),
    }
}

/// Checks whether added memory stays offline: the kernel never releases memory that it uses itself.
pub(super) fn check_auto_online(machine: &Machine) -> Finding {
    let now = "`echo offline > /sys/devices/system/memory/auto_online_blocks`";
    let later = format!("{STAYS_OFFLINE} on the kernel's command line");
    match blocks::policy(&machine.sys) {
        Ok(policy) if policy == "offline" && stays_offline_at_boot(&machine.proc) => {
            Finding::passed("onlining", "added memory stays offline from boot on")
        }
        Ok(policy) if policy == "offline" => Finding {
            fix: Some(format!("to keep this from boot on: {later}")),
            ..Finding::passed("onlining", "added memory stays offline")
        },
        Ok(policy) => Finding::problem(
            "onlining",
            format!(
                "added memory comes online automatically ({policy}): the kernel would use it and never release it"
            ),
            format!("{now}; and for the next boot {later}"),
        ),
        Err(error) => unknown(&error),
    }
}

fn stays_offline_at_boot(proc: &Sysfs) -> bool {
    proc.text("cmdline").is_ok_and(|line| line.split_whitespace().any(|word| word == STAYS_OFFLINE))
}

fn unknown(error: &SysfsError) -> Finding {
    let message =
        if error.is_gone() { "this kernel cannot add memory".to_owned() } else { units::chain(error) };
    Finding::problem(
        "onlining",
        message,
        "boot a kernel with CONFIG_MEMORY_HOTPLUG and CONFIG_MEMORY_HOTREMOVE",
    )
}
