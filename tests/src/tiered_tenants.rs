//! Rack with one emulated host whose tenants share local memory and a slice by fair tiering. The tenants
//! are unmodified Debian programs that copy memory (mbw).

use std::fmt::Write as _;

use emulated_host::rack::TIERED_TENANTS_SETUP_SCRIPT;

use crate::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
};

/// Directory of the tenants' cgroups on the host.
pub const CGROUPS: &str = "/sys/fs/cgroup/tenants";
/// Reservation with the slice of the tenants.
pub const RESERVATION: &str = "slow";

/// Starts a rack whose tenants share `local_mib` MiB of local memory. Each of the named tenants has the
/// given protection, in MiB.
pub fn start_rack(local_mib: u64, protections: &[(String, u64)]) -> EmulatedRack {
    let mut plan = plan(1, &[1], "memory_block");
    let mut config = format!(
        "[tiering]\ncgroups = \"{CGROUPS}\"\nlocal_mib = {local_mib}\nreservation = \"{RESERVATION}\"\nstep_s = 2\n\
         promotion_mib_s = 32\n"
    );
    for (tenant, protection_mib) in protections {
        let _ = writeln!(config, "[tiering.tenants.{tenant}]\nprotection_mib = {protection_mib}");
    }
    plan.backend_toml_extra = config;
    plan.hosts.programs.push(artifacts().tool_path("mbw"));
    plan.hosts.script =
        format!("{TIERED_TENANTS_SETUP_SCRIPT}echo 1 > /sys/kernel/mm/numa/demotion_enabled\n");
    let rack = EmulatedRack::start(plan);
    rack.reserve(0, RESERVATION, 1);
    rack
}

/// Starts a tenant that copies memory all the time, in two arrays of half of this size.
pub fn start_tenant(rack: &EmulatedRack, tenant: &str, mib: u64) {
    let cgroup = format!("{CGROUPS}/{tenant}");
    rack.run(
        0,
        &format!(
            "mkdir -p {cgroup}; \
             sh -c 'echo $$ > {cgroup}/cgroup.procs; exec mbw -n 1000000 -t 0 {}' > /tmp/{tenant}.log 2>&1 &",
            mib / 2
        ),
    );
}

/// Kills the processes of a tenant.
pub fn end_tenant(rack: &EmulatedRack, tenant: &str) {
    rack.run(0, &format!("kill -9 $(cat {CGROUPS}/{tenant}/cgroup.procs)"));
}

/// Returns the local memory of a tenant, in MiB, as the kernel counts it.
pub fn local_mib(rack: &EmulatedRack, tenant: &str) -> u64 {
    let text = rack.run(0, &format!("cat {CGROUPS}/{tenant}/memory.numa_stat"));
    let of = |kind: &str| {
        let line = text.lines().find(|line| line.split(' ').next() == Some(kind)).unwrap_or_default();
        let bytes = line.split(' ').find_map(|word| word.strip_prefix("N0=")?.parse::<u64>().ok());
        bytes.unwrap_or(0)
    };
    (of("anon") + of("file")) >> 20
}
