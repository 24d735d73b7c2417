//! Test of reports of early eviction on an emulated host with cgroups and a swap drive of a real kernel: the
//! manager and the metrics show the decisions about a tenant until the tenant ends.

use emulated_host::rack::{Drive, TENANT_SETUP_SCRIPT};
use serde_json::Value;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
};

/// Cgroup of the tenant.
const CGROUP: &str = "/sys/fs/cgroup/tenants/copy";
/// Memory limit of the tenant, in MiB.
const LIMIT_MIB: u64 = 64;
/// Size of each of the two arrays that the tenant copies, in MiB.
const ARRAY_MIB: u64 = 48;
/// Address of the metrics endpoint of the agent, on its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";

fn start_rack() -> EmulatedRack {
    let mut plan = plan(1, &[1], "dax");
    plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
    plan.backend_toml_extra =
        "[early_eviction]\ncgroups = \"/sys/fs/cgroup/tenants\"\ndevice = \"/dev/vda\"\n".to_owned();
    plan.hosts.cpus = 2;
    plan.hosts.cmdline_extra += " psi=1";
    plan.hosts.drives = vec![Drive { mib: 1024, mb_s: 40, is_remote: false }];
    plan.hosts.programs.push(artifacts().tool_path("mbw"));
    plan.hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    EmulatedRack::start(plan)
}

/// Returns the reported tenants; null before the first report.
fn tenants(rack: &EmulatedRack) -> Value {
    let output = rack.try_tarn("get evictions h0 -o json");
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

/// Returns the number of series of the tenant in the metrics of the agent.
fn count_series(rack: &EmulatedRack) -> usize {
    let metrics = rack.run(0, &format!("wget -qO- http://{METRICS_ADDRESS}/metrics"));
    metrics.lines().filter(|line| line.contains("tenant=\"copy\"")).count()
}

#[test]
fn early_evictions_are_reported_until_the_tenant_ends() {
    let rack = start_rack();
    rack.wait_until("the agent reports no tenants", |rack| tenants(rack) == serde_json::json!([]));
    rack.run(
        0,
        &format!(
            "mkdir {CGROUP}; echo {LIMIT_MIB}M > {CGROUP}/memory.high; \
             sh -c 'echo $$ > {CGROUP}/cgroup.procs; exec mbw -n 1000000 -t 0 {ARRAY_MIB}' > /tmp/copy.log 2>&1 &"
        ),
    );
    rack.wait_until("as much memory as the limit is evicted early", |rack| {
        println!("{}", String::from_utf8_lossy(&rack.try_tarn("explain tenant h0 copy").stdout));
        tenants(rack)[0]["evicted_bytes"].as_u64().is_some_and(|evicted| evicted >= LIMIT_MIB << 20)
    });
    let explained = rack.tarn("explain tenant h0 copy");
    println!("{}\n{explained}", rack.tarn("get evictions h0 -o wide"));
    assert!(explained.contains("  early eviction of tenant copy of host h0\n"), "{explained}");
    let tenant = &tenants(&rack)[0];
    assert_eq!((&tenant["tenant"], tenant["limit_bytes"].as_u64()), (&"copy".into(), Some(LIMIT_MIB << 20)));
    assert_eq!(tenant["lower_threshold_bytes"].as_u64(), Some(32 << 20), "{tenant}");
    assert_eq!(tenant["upper_threshold_bytes"].as_u64(), Some(56 << 20), "{tenant}");
    assert_eq!(count_series(&rack), 13);

    rack.run(
        0,
        &format!(
            "kill -9 $(cat {CGROUP}/cgroup.procs); while ! rmdir {CGROUP} 2> /dev/null; do sleep 0.1; done"
        ),
    );
    rack.wait_until("the tenant has ended", |rack| tenants(rack) == serde_json::json!([]));
    assert_eq!(count_series(&rack), 0);
    rack.run(0, "swapoff /dev/vda");
    let reason = "no memory is evicted early: early_eviction.device: /dev/vda is not in use as swap";
    rack.wait_until(reason, |rack| {
        String::from_utf8_lossy(&rack.try_tarn("get evictions h0").stderr).contains(reason)
    });
}
