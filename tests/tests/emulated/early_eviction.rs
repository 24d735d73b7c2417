//! Test of early eviction on an emulated host, with cgroups of a real kernel and a swap drive that Debian's
//! nbd-server serves over the network. The tenants are unmodified programs.

use emulated_host::rack::{Drive, TENANT_SETUP_SCRIPT};
use serde_json::{Value, json};
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
};

/// Name of the tenant.
const TENANT: &str = "program";
/// Cgroup of the tenant.
const CGROUP: &str = "/sys/fs/cgroup/tenants/program";
/// Memory limit of the tenant.
const LIMIT: u64 = 64 << 20;
/// Largest threshold: the limit without the reserve.
const UPPER: u64 = 56 << 20;
/// Smallest threshold: half of the limit.
const LOWER: u64 = 32 << 20;
/// Programs that fill new memory one after the other, and never need evicted memory again, so that early eviction
/// reduces their waiting time.
const FILL: &str = "while true; do dd if=/dev/zero of=/dev/null bs=100000000 count=1; done";
/// Program that copies an array of 48 MiB again and again, and needs its evicted memory.
const COPY: &str = "exec mbw -n 1000000 -t 0 48";
/// Duration of a stall of the drive, in microseconds: more than the interval of reports.
const STALL_US: u64 = 5_000_000;
/// Address of the metrics endpoint of the agent, on its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";

fn start_rack() -> EmulatedRack {
    let mut plan = plan(1, &[2], "dax");
    plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
    plan.backend_toml_extra =
        "[early_eviction]\ncgroups = \"/sys/fs/cgroup/tenants\"\ndevice = \"/dev/vda\"\n".to_owned();
    plan.hosts.cpus = 2;
    plan.hosts.cmdline_extra += " psi=1";
    plan.hosts.drives = vec![Drive { mib: 1024, mb_s: 40, is_remote: true }];
    plan.hosts.programs.push(artifacts().tool_path("mbw"));
    plan.hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    EmulatedRack::start(plan)
}

/// Starts a shell with this script in the cgroup of the tenant.
fn start_tenant(rack: &EmulatedRack, script: &str) {
    rack.run(
        0,
        &format!(
            "mkdir {CGROUP}; echo {LIMIT} > {CGROUP}/memory.high; \
             sh -c 'echo $$ > {CGROUP}/cgroup.procs; {script}' > /tmp/tenant.log 2>&1 &"
        ),
    );
}

/// Ends the tenant, which may have ended, and removes its cgroup.
fn end_tenant(rack: &EmulatedRack) {
    rack.run(
        0,
        &format!("echo 1 > {CGROUP}/cgroup.kill; while ! rmdir {CGROUP} 2> /dev/null; do sleep 0.1; done"),
    );
    rack.wait_until("the tenant has ended", |rack| tenants(rack) == json!([]));
    assert_eq!(count_series(rack), 0);
}

/// Returns the reported tenants; null before the first report.
fn tenants(rack: &EmulatedRack) -> Value {
    let output = rack.try_tarn("get evictions h0 -o json");
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

/// Returns the memory that the agent evicted.
fn evicted(rack: &EmulatedRack) -> u64 {
    tenants(rack)[0]["evicted_bytes"].as_u64().unwrap_or(0)
}

/// Returns the number of series of the tenant in the metrics of the agent.
fn count_series(rack: &EmulatedRack) -> usize {
    let metrics = rack.run(0, &format!("wget -qO- http://{METRICS_ADDRESS}/metrics"));
    metrics.lines().filter(|line| line.contains(&format!("tenant={TENANT:?}"))).count()
}

/// Returns the time in which no task of the tenant could run because of memory or I/O, in microseconds.
fn stalled_us(rack: &EmulatedRack) -> u64 {
    let pressure =
        rack.run(0, &format!("cd {CGROUP}; sed -n 's/^full.*total=//p' memory.pressure io.pressure"));
    pressure.lines().map(|line| line.parse::<u64>().unwrap()).sum()
}

#[test]
fn early_eviction_survives_a_stalled_and_a_lost_drive() {
    let mut rack = start_rack();
    rack.wait_until("the agent reports no tenants", |rack| tenants(rack) == json!([]));
    start_tenant(&rack, FILL);
    rack.wait_until("a quarter of the limit is evicted early", |rack| {
        println!("{}", String::from_utf8_lossy(&rack.try_tarn("explain tenant h0 program").stdout));
        evicted(rack) >= LIMIT / 4
    });
    rack.wait_until("the threshold is lowered", |rack| {
        tenants(rack)[0]["threshold_bytes"].as_u64().is_some_and(|threshold| threshold < UPPER)
    });
    let explained = rack.tarn("explain tenant h0 program");
    assert!(explained.contains("  early eviction of tenant program of host h0\n"), "{explained}");
    let tenant = &tenants(&rack)[0];
    assert_eq!((&tenant["tenant"], tenant["limit_bytes"].as_u64()), (&TENANT.into(), Some(LIMIT)));
    assert_eq!(tenant["lower_threshold_bytes"].as_u64(), Some(LOWER), "{tenant}");
    assert_eq!(tenant["upper_threshold_bytes"].as_u64(), Some(UPPER), "{tenant}");
    assert_eq!(count_series(&rack), 13);

    // Evictions wait for a stalled drive. The agent still performs its other functions.
    let server = &rack.rack.hosts().nbd_servers()[0];
    server.pause().unwrap();
    let before = stalled_us(&rack);
    rack.wait_until("the tenant waits for the drive", |rack| stalled_us(rack) >= before + STALL_US);
    rack.reserve(0, "first", 1);
    let before = evicted(&rack);
    server.resume().unwrap();
    // More than can be missing in the last report before the stall.
    rack.wait_until("the agent evicts again", |rack| evicted(rack) >= before + LIMIT);
    end_tenant(&rack);

    // Without the drive, the kernel cannot evict, and ends the tenant when it needs its evicted memory.
    start_tenant(&rack, COPY);
    rack.wait_until("memory is evicted early", |rack| evicted(rack) > 0);
    rack.rack.hosts_mut().nbd_servers_mut()[0].kill();
    rack.wait_until("the tenant ends", |rack| rack.run(0, "pidof mbw || echo none") == "none\n");
    rack.reserve(0, "second", 1);
    end_tenant(&rack);
}
