//! Tests of early eviction with simulated cgroups. `cargo xtask rack eviction` runs it on a real kernel.

use std::fs;

use tiering::evict::{FlowClass, Settings, ThresholdChange};

use super::*;
use crate::{
    host::{cgroup, sysfs::fake::FakeSysfs},
    records::Records,
};

/// Simulated host with a swap device.
struct FakeHost {
    sys: FakeSysfs,
    cgroups: FakeSysfs,
    runtime_dir: tempfile::TempDir,
    eviction: EarlyEviction,
    now: Ns,
}

impl FakeHost {
    fn new(tenants: &[&str], io_classes: bool) -> Self {
        let sys = FakeSysfs::new(&[
            ("dev/block/7:7/stat", "0 0 0 0 0 0 0 0"),
            ("dev/block/7:7/queue/scheduler", "none [bfq]"),
            ("proc/swaps", "Filename Type Size Used Priority\n/dev/fake partition 1 0 -2"),
        ]);
        let (cgroups, _) = cgroup::fake::cgroups(tenants);
        tenants.iter().for_each(|tenant| cgroups.files(tenant, &[("io.bfq.weight", "")]));
        let runtime_dir = tempfile::tempdir().unwrap();
        let config = Config {
            cgroups: cgroups.path(""),
            device: "/dev/fake".into(),
            settings: Settings { cycle: Ns::secs(1), ..Settings::default() },
            io_classes,
        };
        let (root, proc) = (sys.path(""), sys.path("proc"));
        let inputs = Inputs { config, runtime_dir: runtime_dir.path().to_owned(), sys: root.clone(), proc };
        let eviction = EarlyEviction::with(RemoteDevice::fake(&root), inputs);
        Self { sys, cgroups, runtime_dir, eviction, now: Ns::ZERO }
    }

    /// Sets the usage of a tenant, its limit (200 MiB) and its cumulative counters. It reaches its limit once
    /// per millisecond in which it is stalled.
    fn set(&self, tenant: &str, usage_mib: u64, reclaimed_mib: u64, stalled_ms: u64) {
        let stat = format!("pgsteal {}\npgmajfault 0", reclaimed_mib * 256);
        let events = format!("low 0\nhigh {stalled_ms}\nmax 0");
        let pressure =
            ["some", "full"].map(|tasks| format!("{tasks} avg10=0.00 total={}", stalled_ms * 1000));
        let files = [
            ("memory.current", &*(usage_mib << 20).to_string()),
            ("memory.high", "209715200"),
            ("memory.stat", &stat),
            ("memory.events.local", &events),
            ("memory.pressure", &pressure.join("\n")),
        ];
        self.cgroups.files(tenant, &files);
    }

    /// Performs the next cycle, one second after the last one.
    fn cycle(&mut self) -> Report {
        self.now = self.now.after(Ns::secs(1));
        self.eviction.begin_cycle(self.now)
    }

    /// Evicts memory, and returns the time until the next call.
    fn evict(&mut self) -> Duration {
        self.eviction.evict(self.now)
    }

    /// Lets a tenant make a request of 1 MiB that takes `ms` and evicts `evicted_kib`.
    fn add_request(&mut self, tenant: &str, ms: u64, evicted_kib: u64) {
        let (name, now) = (Name::new(tenant).unwrap(), self.now);
        let tenant = self.eviction.tenants.get_mut(&name).unwrap();
        let evicted = Bytes::new(evicted_kib << 10);
        let (class, requested, elapsed) = (tenant.class, Bytes::mib(1), Ns::ms(ms));
        tenant.requests.add(&Request { class, requested, evicted, elapsed, now });
    }

    /// Returns the value that was written to the file with the priority of I/O; empty without one.
    fn priority(&self, tenant: &str) -> String {
        self.cgroups.sysfs.text(format!("{tenant}/io.bfq.weight")).unwrap()
    }

    /// Returns the last request to reclaim memory of a tenant, in bytes, and removes it.
    fn take_request(&self, tenant: &str) -> Option<u64> {
        let text = self.cgroups.sysfs.text(format!("{tenant}/memory.reclaim")).unwrap();
        self.cgroups.files(tenant, &[("memory.reclaim", "")]);
        text.parse().ok()
    }
}

#[test]
fn memory_above_the_largest_threshold_is_evicted() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    let report = host.cycle();
    assert_eq!((&*report.reason, report.tenants.len()), ("", 1));
    assert_eq!(report.tenants[0].decided.threshold, Bytes::mib(192), "the limit without 8 MiB");
    assert_eq!(host.evict(), Duration::ZERO);
    assert_eq!(host.take_request("db"), Some(256 << 10));
    host.set("db", 192, 3, 0);
    assert_eq!(host.evict(), Duration::MAX);
    assert_eq!(host.take_request("db"), None);
    assert_eq!(host.cycle().tenants[0].counts.evicted, Bytes::new(256 << 10));
}

#[test]
fn threshold_is_lowered_for_a_tenant_that_grows_faster_than_it_is_evicted() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 192, 0, 0);
    host.cycle();
    // It grows by 50 MiB while it runs, and waits half of the second for the eviction of 42 MiB.
    host.set("db", 200, 42, 500);
    let decided = host.cycle().tenants[0].decided;
    assert_eq!((decided.change, decided.threshold), (ThresholdChange::Lowered, Bytes::new(169_114_337)));
    assert_eq!(decided.growth_bytes_per_s, Bytes::mib(100));
    assert_eq!(decided.eviction_bytes_per_s, Bytes::mib(84));
    assert_eq!(decided.class, FlowClass::URGENT);
    host.evict();
    assert_eq!(host.take_request("db"), Some(256 << 10));
}

#[test]
fn class_sets_the_priority_of_io() {
    let mut host = FakeHost::new(&["calm", "urgent"], true);
    host.set("calm", 100, 0, 0);
    host.set("urgent", 199, 0, 0);
    host.cycle();
    host.set("urgent", 199, 0, 100);
    let report = host.cycle();
    let classes: Vec<u8> = report.tenants.iter().map(|tenant| tenant.decided.class.number()).collect();
    assert_eq!(classes, [6, 1]);
    assert_eq!(["calm", "urgent"].map(|tenant| host.priority(tenant)), ["7:7 71", "7:7 400"]);
}

#[test]
fn tenant_with_a_slow_device_does_not_delay_others() {
    let mut host = FakeHost::new(&["fast", "slow"], false);
    ["fast", "slow"].iter().for_each(|tenant| host.set(tenant, 195, 0, 0));
    host.cycle();
    host.add_request("slow", 1000, 1024);
    for _ in 0..3 {
        host.evict();
        assert_eq!((host.take_request("slow"), host.take_request("fast").is_some()), (None, true));
    }
    host.add_request("fast", 1200, 1024);
    host.evict();
    assert_eq!((host.take_request("slow"), host.take_request("fast")), (Some(256 << 10), None));
    // Without memory to evict, fast does not gain an advantage for later.
    host.set("fast", 100, 0, 0);
    host.add_request("slow", 1000, 1024);
    host.evict();
    host.set("fast", 195, 0, 0);
    host.add_request("fast", 2000, 1024);
    host.take_request("slow");
    host.evict();
    assert_eq!((host.take_request("slow").is_some(), host.take_request("fast")), (true, None));
}

#[test]
fn requests_pause_if_the_kernel_evicts_too_little() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    host.cycle();
    host.add_request("db", 1, 511);
    assert_eq!(host.evict(), Duration::from_millis(10));
    assert_eq!(host.take_request("db"), None);
    host.now = host.now.after(Ns::ms(10));
    assert_eq!(host.evict(), Duration::ZERO);
    assert_eq!(host.take_request("db"), Some(256 << 10));
}

#[test]
fn next_check_is_before_a_growing_tenant_reaches_its_threshold() {
    assert_eq!(time_to_grow(Bytes::mib(50), Bytes::mib(100)), Duration::from_millis(500));
    assert_eq!(time_to_grow(Bytes::ZERO, Bytes::mib(100)), CHECK_INTERVAL_MIN);
    assert_eq!(time_to_grow(Bytes::mib(50), Bytes::ZERO), Duration::MAX);
    assert_eq!(time_to_grow(Bytes::new(u64::MAX), Bytes::new(1)), Duration::from_nanos(u64::MAX));
}

#[test]
fn swapoff_stops_eviction_and_restores_priorities() {
    let mut host = FakeHost::new(&["db"], true);
    host.set("db", 195, 0, 0);
    host.cycle();
    assert_eq!(host.priority("db"), "7:7 283");
    host.sys.files("proc", &[("swaps", "Filename Type Size Used Priority")]);
    assert_eq!(host.cycle().reason, "early_eviction.device: /dev/fake is not in use as swap");
    assert_eq!(host.evict(), Duration::MAX);
    assert_eq!(host.take_request("db"), None);
    assert_eq!(host.priority("db"), "7:7 default");
}

#[test]
fn priorities_are_unchanged_unless_they_are_configured() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    host.cycle();
    assert_eq!(host.priority("db"), "");
}

#[test]
fn failed_request_is_reported_and_repeated_after_a_pause() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    host.cycle();
    fs::remove_file(host.cgroups.path("db/memory.reclaim")).unwrap();
    assert_eq!(host.evict(), Duration::ZERO);
    assert!(host.evict() >= Duration::from_millis(10));
    host.cgroups.files("db", &[("memory.reclaim", "")]);
    host.evict();
    assert_eq!(host.take_request("db"), None);
    for _ in 0..2 {
        let report = host.cycle();
        assert!(report.tenants[0].problem.contains("memory.reclaim"), "{report:?}");
    }
    host.evict();
    assert_eq!(host.take_request("db"), Some(256 << 10));
    assert_eq!(host.cycle().tenants[0].problem, "");
}

#[test]
fn priority_of_a_new_tenant_is_restored() {
    let mut host = FakeHost::new(&["db", "free"], true);
    host.set("db", 195, 0, 0);
    host.cgroups.files("free", &[("io.bfq.weight", "7:7 400")]);
    host.cycle();
    assert_eq!(["db", "free"].map(|tenant| host.priority(tenant)), ["7:7 283", "7:7 default"]);
    host.cgroups.files("free", &[("io.bfq.weight", "by others")]);
    host.cycle();
    assert_eq!(host.priority("free"), "by others");
}

#[test]
fn changed_scheduler_changes_the_method_of_priorities() {
    let mut host = FakeHost::new(&["db"], true);
    host.cgroups.files("db", &[("io.prio.class", "")]);
    host.set("db", 199, 0, 0);
    host.cycle();
    assert_eq!(host.priority("db"), "7:7 283");
    host.sys.files("dev/block/7:7/queue", &[("scheduler", "[mq-deadline] bfq")]);
    host.set("db", 199, 0, 100);
    host.cycle();
    assert_eq!(host.priority("db"), "7:7 default");
    assert_eq!(host.cgroups.sysfs.text("db/io.prio.class").unwrap(), "promote-to-rt");
}

#[test]
fn cgroup_of_the_same_name_is_a_new_tenant() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    host.cycle();
    host.evict();
    assert_eq!(host.cycle().tenants[0].counts.evicted, Bytes::new(256 << 10));
    fs::rename(host.cgroups.path("db"), host.cgroups.path("old")).unwrap();
    assert_eq!(host.evict(), Duration::MAX, "the tenant has ended in the cycle");
    cgroup::fake::add(&host.cgroups, "db");
    host.set("db", 195, 0, 0);
    assert_eq!(host.evict(), Duration::MAX, "the decision was for another cgroup");
    assert_eq!(host.take_request("db"), None);
    let report = host.cycle();
    let evicted: Vec<_> =
        report.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.counts.evicted)).collect();
    assert_eq!(evicted, [("db", Bytes::ZERO), ("old", Bytes::ZERO)]);
}

#[test]
fn memory_of_vms_and_of_cgroups_without_a_limit_is_not_evicted() {
    let mut host = FakeHost::new(&["free", "vm"], false);
    host.set("vm", 195, 0, 0);
    let own = std::process::id();
    let folder = fs::canonicalize(host.cgroups.path("")).unwrap();
    let cgroup = format!("0::/{}/vm", folder.file_name().unwrap().to_str().unwrap());
    host.sys.files(&format!("proc/{own}"), &[("cgroup", &cgroup)]);
    Records::open(host.runtime_dir.path(), "boot").unwrap().write(&records::fake::vm_record(own)).unwrap();
    host.cgroups.files("free", &[("memory.current", "1099511627776")]);
    assert_eq!(host.cycle().tenants.len(), 0);
    assert_eq!(host.evict(), Duration::MAX);
    assert_eq!((host.take_request("vm"), host.take_request("free")), (None, None));
}

#[test]
fn memory_of_the_agent_is_not_evicted() {
    let mut host = FakeHost::new(&["agent"], false);
    host.set("agent", 195, 0, 0);
    let folder = fs::canonicalize(host.cgroups.path("")).unwrap();
    let cgroup = format!("0::/{}/agent", folder.file_name().unwrap().to_str().unwrap());
    host.sys.files(&format!("proc/{}", std::process::id()), &[("cgroup", &cgroup)]);
    assert_eq!(host.cycle().tenants.len(), 0);
}

#[test]
fn tenant_whose_limit_is_removed_is_not_evicted_any_more() {
    let mut host = FakeHost::new(&["db"], true);
    host.set("db", 195, 0, 0);
    host.cycle();
    host.cgroups.files("db", &[("memory.high", "max")]);
    assert_eq!(host.cycle().tenants.len(), 0);
    assert_eq!(host.evict(), Duration::MAX);
    assert_eq!(host.take_request("db"), None);
    assert_eq!(host.priority("db"), "7:7 default");
}

#[test]
fn unreadable_cgroup_does_not_affect_other_tenants() {
    let mut host = FakeHost::new(&["a", "b"], true);
    host.set("a", 195, 0, 0);
    host.set("b", 195, 0, 0);
    host.cycle();
    assert_eq!(host.priority("a"), "7:7 283");
    fs::remove_file(host.cgroups.path("a/memory.pressure")).unwrap();
    let names =
        |report: Report| report.tenants.iter().map(|tenant| tenant.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(host.cycle()), ["b"]);
    assert_eq!(host.priority("a"), "7:7 default");
    assert_eq!(*host.eviction.ignored.names(), ["a".to_owned()].into());
    host.set("a", 195, 0, 0);
    assert_eq!(names(host.cycle()), ["a", "b"]);
    assert_eq!(*host.eviction.ignored.names(), [].into());
}

#[test]
fn less_than_the_smallest_request_is_not_evicted() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 192, 0, 0);
    host.cycle();
    host.cgroups.files("db", &[("memory.current", &((192 << 20) + 4000_u64).to_string())]);
    assert_eq!(host.evict(), Duration::MAX);
    assert_eq!(host.take_request("db"), None);
}

#[test]
fn nothing_is_evicted_while_the_kernel_demotes_memory() {
    let mut host = FakeHost::new(&["db"], false);
    host.set("db", 195, 0, 0);
    host.sys.files("kernel/mm/numa", &[("demotion_enabled", "true")]);
    assert_eq!(host.cycle().reason, "", "there is no slower memory");
    host.sys.files("devices/system/node", &[("has_memory", "0,2"), ("has_cpu", "0")]);
    assert!(host.cycle().reason.starts_with("the kernel demotes memory instead of evicting it"));
    assert_eq!(host.evict(), Duration::MAX);
}
