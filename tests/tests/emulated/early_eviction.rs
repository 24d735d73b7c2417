//! Test of early eviction on an emulated host, with cgroups of a real kernel and a swap drive that Debian's
//! nbd-server serves over the network. The tenant is an unmodified memcached.

use emulated_host::rack::{Drive, TENANT_SETUP_SCRIPT};
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
    rack::programs_dir,
};

const CGROUP: &str = "/sys/fs/cgroup/tenants/cache";
/// Memory limit of the tenant.
const LIMIT_MIB: u64 = 48;
/// Largest threshold: the limit without the reserve, which is at most 1/8 of the limit.
const UPPER_MIB: u64 = 42;
/// Smallest threshold: half of the limit.
const LOWER_MIB: u64 = 24;
/// Memory that the agent does not evict because it is too little for a request.
const REQUEST_MIN_MIB: u64 = 1;
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
    plan.hosts.programs.extend([artifacts().tool_path("memcached"), programs_dir().join("zipf-load")]);
    plan.hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    EmulatedRack::start(plan)
}

/// Returns the value of a metric of the tenant.
fn read_metric(rack: &EmulatedRack, name: &str) -> Option<u64> {
    let text = rack.run(0, &format!("wget -qO- http://{METRICS_ADDRESS}/metrics"));
    let line = text.lines().find(|line| line.starts_with(name) && line.contains("tenant=\"cache\""))?;
    line.rsplit(' ').next()?.parse().ok()
}

fn evicted_bytes(rack: &EmulatedRack) -> u64 {
    read_metric(rack, "tarn_tenant_evicted_bytes_total").unwrap_or(0)
}

fn usage_mib(rack: &EmulatedRack) -> u64 {
    rack.run(0, &format!("cat {CGROUP}/memory.current")).trim().parse::<u64>().unwrap() >> 20
}

/// Fills memcached with keys in the background.
fn fill(rack: &EmulatedRack, keys: u32) {
    rack.run(
        0,
        &format!("zipf-load --socket /tmp/cache.sock --keys {keys} --value-bytes 3900 --seconds 0 > /tmp/load.log 2>&1 &"),
    );
}

fn is_filled(rack: &EmulatedRack) -> bool {
    rack.run(0, "pidof zipf-load || echo none") == "none\n"
}

#[test]
fn tenant_is_evicted_below_its_limit_and_a_stalled_drive_delays_only_evictions() {
    let mut rack = start_rack();
    let command = "memcached -u root -s /tmp/cache.sock -m 600 -t 1";
    rack.run(
        0,
        &format!(
            "mkdir {CGROUP} && echo {LIMIT_MIB}M > {CGROUP}/memory.max && \
             sh -c 'echo $$ > {CGROUP}/cgroup.procs; exec {command}' > /tmp/cache.log 2>&1 &"
        ),
    );
    rack.wait_until("memcached listens", |rack| rack.run(0, "ls /tmp/cache.sock; true").starts_with("/tmp"));
    rack.wait_until("the tenant has a threshold", |rack| {
        let threshold = read_metric(rack, "tarn_tenant_eviction_threshold_bytes");
        threshold == Some(UPPER_MIB << 20)
    });
    assert_eq!(evicted_bytes(&rack), 0, "the usage is below the threshold");

    // 16,000 values need about 70 MiB.
    fill(&rack, 16_000);
    rack.wait_until("memcached is filled", |rack| {
        let threshold = read_metric(rack, "tarn_tenant_eviction_threshold_bytes").unwrap() >> 20;
        assert!((LOWER_MIB..=UPPER_MIB).contains(&threshold), "{threshold} MiB");
        is_filled(rack)
    });
    rack.wait_until("the usage is below the largest threshold", |rack| {
        usage_mib(rack) <= UPPER_MIB + REQUEST_MIN_MIB
    });
    let evicted = evicted_bytes(&rack);
    assert!(evicted > 4 << 20, "{evicted}");

    // Evictions wait for a stalled drive. The agent still serves its other functions.
    let server = &rack.rack.hosts().nbd_servers()[0];
    server.pause().unwrap();
    fill(&rack, 24_000);
    rack.wait_until("a task of the tenant waits for the drive", |rack| {
        rack.run(
            0,
            &format!("cat {CGROUP}/io.pressure {CGROUP}/memory.pressure; cat /proc/pressure/io | grep full"),
        )
        .lines()
        .any(|line| line.starts_with("full avg10=") && !line.starts_with("full avg10=0.00"))
    });
    rack.reserve(0, "vm", 1);
    assert!(usage_mib(&rack) <= LIMIT_MIB);
    assert!(!is_filled(&rack));
    let before = evicted_bytes(&rack);
    server.resume().unwrap();
    rack.wait_until("memcached is filled again", is_filled);
    rack.wait_until("the agent evicts again", |rack| evicted_bytes(rack) > before);

    // Without the drive, the kernel cannot evict, and ends the tenant if it needs its evicted memory.
    rack.rack.hosts_mut().nbd_servers_mut()[0].kill();
    fill(&rack, 24_000);
    rack.wait_until("the load has ended", is_filled);
    rack.reserve(0, "vm2", 1);
    assert!(usage_mib(&rack) <= LIMIT_MIB);
    rack.run(0, &format!("killall memcached 2> /dev/null; while ! rmdir {CGROUP}; do sleep 0.1; done"));
    rack.wait_until("the metrics of the tenant are removed", |rack| {
        read_metric(rack, "tarn_tenant_eviction_threshold_bytes").is_none()
    });
}
