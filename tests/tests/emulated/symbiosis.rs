//! Test of tenants on an emulated host with cgroups, swap and DAMON. Shares must follow the demand
//! of the tenants, and their sum must not exceed the supply. A fault of one tenant or of the agent
//! must not change the shares of other tenants.

use emulated_host::rack::{Drive, TENANT_SETUP_SCRIPT};
use serde_json::Value;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
    rack::programs_dir,
};

const MEMORY_MIB: u64 = 192;
const LINK_MB_S: u64 = 40;
/// Address of the metrics endpoint of the agent, on its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";

fn start_rack() -> EmulatedRack {
    let mut plan = plan(1, &[1], "dax");
    plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
    plan.backend_toml_extra = format!(
        "[symbiosis]\ncgroups = \"/sys/fs/cgroup/tenants\"\nmemory_mib = {MEMORY_MIB}\nbandwidth_mb_s = {LINK_MB_S}\n\
         epoch_s = 5\nenforce = \"swap\"\nremote = \"/dev/vda\"\n"
    );
    plan.hosts.cpus = 2;
    plan.hosts.cmdline_extra += " psi=1";
    plan.hosts.drives = vec![Drive { mib: 1024, mb_s: 40, is_remote: false }];
    plan.hosts.programs.extend([
        artifacts().tool_path("mbw"),
        artifacts().tool_path("memcached"),
        programs_dir().join("zipf-load"),
    ]);
    plan.hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    EmulatedRack::start(plan)
}

/// Starts a program as a tenant, in a separate cgroup.
fn start_tenant(rack: &EmulatedRack, tenant: &str, program: &str) {
    let cgroup = format!("/sys/fs/cgroup/tenants/{tenant}");
    rack.run(
        0,
        &format!("mkdir {cgroup}; sh -c 'echo $$ > {cgroup}/cgroup.procs; exec {program}' > /tmp/{tenant}.log 2>&1 &"),
    );
}

fn get_shares(rack: &EmulatedRack) -> Value {
    let output = rack.rack.tarn_command(&["get", "shares", "h0", "-o", "json"]).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

/// Returns the limits of a tenant: `memory.high` in MiB, and `io.max`.
fn read_limits(rack: &EmulatedRack, tenant: &str) -> (u64, String) {
    let output = rack.run(0, &format!("cd /sys/fs/cgroup/tenants/{tenant}; cat memory.high io.max"));
    let (memory, io) = output.split_once('\n').unwrap();
    (memory.parse::<u64>().map_or(u64::MAX, |bytes| bytes >> 20), io.trim().to_owned())
}

fn read_metric(rack: &EmulatedRack, name: &str) -> f64 {
    let text = rack.run(0, &format!("wget -qO- http://{METRICS_ADDRESS}/metrics"));
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// Waits for the end of `count` epochs in any state.
fn wait_epochs(rack: &EmulatedRack, count: u32) {
    let all = || ["set", "unchanged", "blocked"].iter().map(|state| count_epochs(rack, state)).sum::<f64>();
    let before = all();
    rack.wait_until("epochs end", |_| all() >= before + f64::from(count));
}

fn count_epochs(rack: &EmulatedRack, state: &str) -> f64 {
    read_metric(
        rack,
        &format!("tarn_symbiosis_epochs_total{{host=\"h0\",backend=\"dax\",state=\"{state}\"}}"),
    )
}

#[test]
fn tenant_shares_follow_demand_and_survive_faults() {
    let rack = start_rack();
    start_tenant(&rack, "cache", "memcached -u root -s /tmp/cache.sock -m 250 -t 1");
    rack.wait_until("memcached listens", |rack| rack.run(0, "ls /tmp/cache.sock; true").starts_with("/tmp"));
    rack.run(
        0,
        "zipf-load --socket /tmp/cache.sock --keys 40000 --value-bytes 3900 --seconds 3000 > /tmp/load.log 2>&1 &",
    );
    start_tenant(&rack, "stream", "mbw -n 1000000 -t 0 72");
    rack.wait_until("both have limits", |rack| {
        read_limits(rack, "cache").0.max(read_limits(rack, "stream").0) < u64::MAX
    });
    // The sum of all shares must not exceed the supply after any epoch.
    for _ in 0..6 {
        wait_epochs(&rack, 1);
        let output = rack.run(
            0,
            "cd /sys/fs/cgroup/tenants; cat cache/memory.high stream/memory.high cache/memory.max stream/memory.max cache/io.max stream/io.max",
        );
        let lines: Vec<&str> = output.lines().collect();
        let bytes = |at: usize| lines[at].parse::<u64>().unwrap();
        assert!(bytes(0) + bytes(1) <= MEMORY_MIB << 20, "{output}");
        assert_eq!(lines[2..4], ["max", "max"], "memory.max must not be set");
        for key in ["rbps=", "wbps="] {
            let rate = |line: &str| {
                line.split_whitespace().find_map(|word| word.strip_prefix(key)?.parse::<u64>().ok())
            };
            assert!(rate(lines[4]).unwrap() + rate(lines[5]).unwrap() <= LINK_MB_S * 1_000_000, "{output}");
        }
    }
    let output = get_shares(&rack);
    let tenants = output.as_array().unwrap_or_else(|| panic!("{output}"));
    assert_eq!(tenants.len(), 2, "{output}");
    for tenant in tenants {
        assert_eq!(tenant["access_source"], "damon", "{output}");
        let name = tenant["tenant"].as_str().unwrap();
        assert_eq!(tenant["share"]["memory_mib"].as_u64(), Some(read_limits(&rack, name).0), "{output}");
    }

    assert_killed_agent_changes_no_limits(&rack);

    rack.tarn("set weights h0 cache=3");
    rack.wait_until("the weight is applied", |rack| {
        let output = get_shares(rack);
        let cache =
            output.as_array().and_then(|all| all.iter().find(|tenant| tenant["tenant"] == "cache").cloned());
        cache.is_some_and(|cache| cache["fair"]["memory_mib"].as_u64() == Some(MEMORY_MIB * 3 / 4))
    });

    // A tenant ends in the middle of an epoch, and its cgroup is removed.
    rack.run(0, "kill -9 $(pidof mbw)");
    let remove = "rmdir /sys/fs/cgroup/tenants/stream 2> /dev/null && echo gone; true";
    rack.wait_until("the cgroup of the tenant is removed", |rack| rack.run(0, remove).trim() == "gone");
    rack.wait_until("the other tenant has its share", |rack| read_limits(rack, "cache").0 >= MEMORY_MIB - 1);
}

fn assert_killed_agent_changes_no_limits(rack: &EmulatedRack) {
    let before = (read_limits(rack, "cache"), read_limits(rack, "stream"));
    let killed = rack.run(0, "pid=$(pidof host-agent); kill -9 $pid; echo $pid");
    let find_other = format!(
        "pid=$(pidof host-agent) && [ \"$pid\" != \"{}\" ] && wget -qO- http://{METRICS_ADDRESS}/metrics > /dev/null && echo $pid; true",
        killed.trim()
    );
    rack.wait_until("another agent has started", |rack| rack.run(0, &find_other).trim() != "");
    // The restarted agent only measures its first epoch and does not set shares.
    rack.wait_until("an epoch has ended", |rack| count_epochs(rack, "blocked") >= 1.0);
    assert_eq!((read_limits(rack, "cache"), read_limits(rack, "stream")), before);
}
