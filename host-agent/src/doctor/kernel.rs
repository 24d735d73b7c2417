//! Checks of the kernel: version, modules, KVM, huge pages, and memory hotplug policy.

use std::fs::OpenOptions;

use super::{CxlBackend, Finding, Machine, fix_for, problems_or_passed};
use crate::host::{
    blocks,
    sysfs::{Sysfs, SysfsError},
};

/// First kernel version, major and minor, that can create CXL regions of volatile memory.
const KERNEL_VERSION_MIN: (u32, u32) = (6, 3);
/// Kernel parameter that keeps added memory offline from boot on.
const KEEP_OFFLINE_PARAMETER: &str = "memhp_default_state=offline";

/// Directory of the settings for transparent huge pages in sysfs.
const HUGE_PAGES: &str = "kernel/mm/transparent_hugepage";

/// Kernel module required for CXL memory.
struct KernelModule {
    name: &'static str,
    /// Directory in sysfs that exists once the module is loaded.
    driver: &'static str,
    /// Whether the agent loads the module on demand.
    on_demand: bool,
}

const MODULES: [KernelModule; 7] = [
    module("cxl_acpi", "bus/platform/drivers/cxl_acpi", false),
    module("cxl_pci", "bus/pci/drivers/cxl_pci", false),
    module("cxl_port", "bus/cxl/drivers/cxl_port", false),
    module("cxl_mem", "bus/cxl/drivers/cxl_mem", false),
    module("dax_cxl", "bus/cxl/drivers/cxl_dax_region", false),
    module("device_dax", "bus/dax/drivers/device_dax", true),
    module("kmem", "bus/dax/drivers/kmem", true),
];

const fn module(name: &'static str, driver: &'static str, on_demand: bool) -> KernelModule {
    KernelModule { name, driver, on_demand }
}

/// Checks whether the kernel version can create CXL regions of volatile memory.
pub(super) fn check_release(machine: &Machine) -> Finding {
    let release = machine.proc.text("sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release.split(['.', '-']).map(|part| part.parse::<u32>().ok());
    let version_min = format!("{}.{}", KERNEL_VERSION_MIN.0, KERNEL_VERSION_MIN.1);
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_VERSION_MIN => {
            Finding::passed("kernel", format!("version {release} supports CXL regions"))
        }
        _ => Finding::problem(
            "kernel",
            format!(
                "version {release:?} cannot create regions of CXL memory: version {version_min} or later is required"
            ),
            "boot a newer kernel",
        ),
    }
}

/// Checks whether this process can open /dev/kvm, which every guest requires.
pub(super) fn check_kvm(machine: &Machine) -> Finding {
    match OpenOptions::new().read(true).write(true).open(machine.dev.join("kvm")) {
        Ok(_) => Finding::passed("kvm", "/dev/kvm can be used"),
        Err(errno) => {
            let fix = fix_for(
                &errno,
                "enable virtualization in the firmware, then `modprobe kvm_intel` or `modprobe kvm_amd`",
            );
            Finding::problem("kvm", format!("no guest can run: cannot open /dev/kvm: {errno}"), fix)
        }
    }
}

/// Reports whether guest memory gets huge pages. Guests also run without huge pages, so this check
/// always passes.
pub(super) fn check_huge_pages(machine: &Machine) -> Finding {
    // sysfs shows the selected value in brackets: `always [advise] never`.
    let selected = |file: &str| {
        let choices = machine.sys.text(format!("{HUGE_PAGES}/{file}")).ok()?;
        let selected = choices.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
        selected.map(str::to_owned)
    };
    // Since kernel 6.12 each page size has its own setting; `inherit` means the global setting.
    let of_size = selected("hugepages-2048kB/shmem_enabled").filter(|value| value != "inherit");
    let file = if of_size.is_some() { "hugepages-2048kB/shmem_enabled" } else { "shmem_enabled" };
    match of_size.or_else(|| selected("shmem_enabled")).as_deref() {
        Some(value @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::passed("hugepages", format!("{file} is {value}: guest memory gets huge pages"))
        }
        Some(value) => Finding {
            fix: Some(format!(
                "`echo advise > /sys/{HUGE_PAGES}/{file}`; for every boot, add a line to a file in /etc/tmpfiles.d: \
                 `w /sys/{HUGE_PAGES}/{file} - - - - advise`"
            )),
            ..Finding::passed(
                "hugepages",
                format!("{file} is {value}: guest memory uses pages of 4 KiB, which are slower"),
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

/// Checks that each module for CXL memory is loaded, or can be loaded on demand.
pub(super) fn check_modules(machine: &Machine, backend: CxlBackend) -> Vec<Finding> {
    let needed = MODULES.iter().filter(|module| module.name != "kmem" || backend == CxlBackend::Blocks);
    let release = machine.proc.text("sys/kernel/osrelease").unwrap_or_default();
    let list = machine.modules.text(format!("{release}/modules.dep")).unwrap_or_default();
    let problems = needed.filter(|module| !machine.sys.has(module.driver));
    let problems = problems.filter_map(|KernelModule { name, on_demand, .. }| match (is_listed(&list, name), on_demand) {
        (true, true) => None,
        (true, false) => Some(Finding::problem("modules", format!("{name} is not loaded"), format!("`modprobe {name}`"))),
        (false, _) => Some(Finding::problem(
            "modules",
            format!("{name} is neither loaded nor installed for kernel {release}"),
            format!("boot a kernel with CONFIG_{}, or install the package with the other modules of this kernel", config_option(name)),
        )),
    });
    problems_or_passed(problems.collect(), || {
        Finding::passed("modules", "all modules are loaded, or can be loaded on demand")
    })
}

/// Returns whether modules.dep contains a module, in a line such as
/// `kernel/drivers/dax/kmem.ko.xz: kernel/...`.
fn is_listed(list: &str, name: &str) -> bool {
    let files = list.lines().filter_map(|line| line.split(':').next()?.rsplit('/').next());
    files.filter_map(|file| file.split_once(".ko")).any(|(listed, _)| listed.replace('-', "_") == name)
}

/// Returns the kernel configuration option of a module, without `CONFIG_`.
fn config_option(module: &str) -> String {
    match module {
        "device_dax" => "DEV_DAX".to_owned(),
        "dax_cxl" => "DEV_DAX_CXL".to_owned(),
        "kmem" => "DEV_DAX_KMEM".to_owned(),
        cxl => cxl.to_uppercase(),
    }
}

/// Checks whether hot-added memory stays offline. The kernel may allocate unmovable pages in memory
/// that comes online automatically, so that this memory can never be removed.
pub(super) fn check_auto_online(machine: &Machine) -> Finding {
    let now = "`echo offline > /sys/devices/system/memory/auto_online_blocks`";
    let later = format!("add {KEEP_OFFLINE_PARAMETER} to the kernel command line");
    match blocks::online_policy(&machine.sys) {
        Ok(policy) if policy == "offline" && keeps_new_memory_offline(&machine.proc) => {
            Finding::passed("auto_online", "hot-added memory stays offline, also after a reboot")
        }
        Ok(policy) if policy == "offline" => Finding {
            fix: Some(format!("to keep this after a reboot, {later}")),
            ..Finding::passed("auto_online", "hot-added memory stays offline until the next reboot")
        },
        Ok(policy) => Finding::problem(
            "auto_online",
            format!(
                "hot-added memory comes online automatically ({policy}): the kernel may use it and never release it"
            ),
            format!("{now}; for the next boot, {later}"),
        ),
        Err(error) => unknown_policy_finding(&error),
    }
}

fn keeps_new_memory_offline(proc: &Sysfs) -> bool {
    proc.text("cmdline").is_ok_and(|line| line.split_whitespace().any(|word| word == KEEP_OFFLINE_PARAMETER))
}

fn unknown_policy_finding(error: &SysfsError) -> Finding {
    let message =
        if error.is_gone() { "this kernel has no memory hotplug".to_owned() } else { units::chain(error) };
    Finding::problem(
        "auto_online",
        message,
        "boot a kernel with CONFIG_MEMORY_HOTPLUG and CONFIG_MEMORY_HOTREMOVE",
    )
}
