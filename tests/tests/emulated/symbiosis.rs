//! Tenants of a real host, with real cgroups, swap and DAMON: shares follow the tenants' behaviour,
//! their sum never exceeds the supply, and a fault of one tenant or of the agent does not change
//! the others' shares.

use emulated_host::rack::{Drive, TENANT_SETUP_SCRIPT};
use serde_json::Value;
use tests::{
    linux_guests::bed,
    rack::programs,
    real_rack::{RealRack, plan},
};

const MEMORY_MIB: u64 = 192;
const LINK_MB_S: u64 = 40;
/// Where the agent's metrics are, in its host.
const METRICS: &str = "127.0.0.1:9751";

fn rack() -> RealRack {
    let mut plan = plan(1, &[1], "dax");
    plan.agent_toml_extra = format!("metrics_listen = {METRICS:?}\n");
    plan.backend_toml_extra = format!(
        "[symbiosis]\ncgroups = \"/sys/fs/cgroup/tenants\"\nmemory_mib = {MEMORY_MIB}\nbandwidth_mb_s = {LINK_MB_S}\n\
         epoch_s = 5\nenforce = \"swap\"\nremote = \"/dev/vda\"\n"
    );
    plan.hosts.cpus = 2;
    plan.hosts.append += " psi=1";
    plan.hosts.drives = vec![Drive { mib: 1024, mb_s: 40 }];
    plan.hosts.programs.extend([bed().tool("mbw"), bed().tool("memcached"), programs().join("zipf-load")]);
    plan.hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    RealRack::start(plan)
}

/// Starts a program as a tenant.
fn begin(rack: &RealRack, tenant: &str, program: &str) {
    let cgroup = format!("/sys/fs/cgroup/tenants/{tenant}");
    rack.run(
        0,
        &format!("mkdir {cgroup}; sh -c 'echo $$ > {cgroup}/cgroup.procs; exec {program}' > /tmp/{tenant}.log 2>&1 &"),
    );
}

fn shares(rack: &RealRack) -> Value {
    let told = rack.rack.tarn(&["get", "shares", "h0", "-o", "json"]).output().unwrap();
    serde_json::from_slice(&told.stdout).unwrap_or(Value::Null)
}

/// A tenant's `memory.high` in MiB, and its `io.max`.
fn limits(rack: &RealRack, tenant: &str) -> (u64, String) {
    let said = rack.run(0, &format!("cd /sys/fs/cgroup/tenants/{tenant}; cat memory.high io.max"));
    let (memory, io) = said.split_once('\n').unwrap();
    (memory.parse::<u64>().map_or(u64::MAX, |bytes| bytes >> 20), io.trim().to_owned())
}

fn metric(rack: &RealRack, name: &str) -> f64 {
    let text = rack.run(0, &format!("wget -qO- http://{METRICS}/metrics"));
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// Waits for epochs with any result.
fn epochs(rack: &RealRack, count: u32) {
    let all = || ["set", "unchanged", "blocked"].iter().map(|state| ended(rack, state)).sum::<f64>();
    let before = all();
    rack.until("epochs end", |_| all() >= before + f64::from(count));
}

fn ended(rack: &RealRack, state: &str) -> f64 {
    metric(rack, &format!("tarn_symbiosis_epochs_total{{host=\"h0\",backend=\"dax\",state=\"{state}\"}}"))
}

#[test]
fn tenants_get_shares_by_what_they_do_and_keep_them_whatever_happens_to_others_or_to_the_agent() {
    let rack = rack();
    begin(&rack, "cache", "memcached -u root -s /tmp/cache.sock -m 250 -t 1");
    rack.until("memcached listens", |rack| rack.run(0, "ls /tmp/cache.sock; true").starts_with("/tmp"));
    rack.run(
        0,
        "zipf-load --socket /tmp/cache.sock --keys 40000 --value-bytes 3900 --seconds 3000 > /tmp/load.log 2>&1 &",
    );
    begin(&rack, "stream", "mbw -n 1000000 -t 0 72");
    rack.until("both have limits", |rack| limits(rack, "cache").0.max(limits(rack, "stream").0) < u64::MAX);
    // The sum never exceeds the supply, however often shares change.
    for _ in 0..6 {
        epochs(&rack, 1);
        let said = rack.run(
            0,
            "cd /sys/fs/cgroup/tenants; cat cache/memory.high stream/memory.high cache/memory.max stream/memory.max cache/io.max stream/io.max",
        );
        let lines: Vec<&str> = said.lines().collect();
        let bytes = |at: usize| lines[at].parse::<u64>().unwrap();
        assert!(bytes(0) + bytes(1) <= MEMORY_MIB << 20, "{said}");
        assert_eq!(lines[2..4], ["max", "max"], "memory.max is the tenants' own");
        for way in ["rbps=", "wbps="] {
            let rate = |line: &str| {
                line.split_whitespace().find_map(|word| word.strip_prefix(way)?.parse::<u64>().ok())
            };
            assert!(rate(lines[4]).unwrap() + rate(lines[5]).unwrap() <= LINK_MB_S * 1_000_000, "{said}");
        }
    }
    let told = shares(&rack);
    let tenants = told.as_array().unwrap_or_else(|| panic!("{told}"));
    assert_eq!(tenants.len(), 2, "{told}");
    for tenant in tenants {
        assert_eq!(tenant["access_source"], "damon", "{told}");
        let name = tenant["tenant"].as_str().unwrap();
        assert_eq!(tenant["share"]["memory_mib"].as_u64(), Some(limits(&rack, name).0), "{told}");
    }

    an_agent_that_is_killed_changes_nothing(&rack);

    rack.tarn("set weights h0 cache=3");
    rack.until("the weight counts", |rack| {
        let told = shares(rack);
        let cache = told.as_array().and_then(|all| all.iter().find(|one| one["tenant"] == "cache").cloned());
        cache.is_some_and(|cache| cache["fair"]["memory_mib"].as_u64() == Some(MEMORY_MIB * 3 / 4))
    });

    // Killed in the middle of an epoch, with its cgroup.
    rack.run(0, "kill -9 $(pidof mbw)");
    let remove = "rmdir /sys/fs/cgroup/tenants/stream 2> /dev/null && echo gone; true";
    rack.until("its cgroup is gone", |rack| rack.run(0, remove).trim() == "gone");
    rack.until("its share is the other's", |rack| limits(rack, "cache").0 >= MEMORY_MIB - 1);
}

fn an_agent_that_is_killed_changes_nothing(rack: &RealRack) {
    let before = (limits(rack, "cache"), limits(rack, "stream"));
    rack.run(0, "kill -9 $(pidof host-agent)");
    rack.until("another agent has begun", |rack| rack.run(0, "pidof host-agent; true").trim() != "");
    // Its first epoch is measured only.
    rack.until("an epoch is over", |rack| ended(rack, "blocked") >= 1.0);
    assert_eq!((limits(rack, "cache"), limits(rack, "stream")), before);
}
