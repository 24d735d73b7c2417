//! Tests of Symbiosis with simulated cgroups, which accept every write. Tests with emulated hosts
//! use cgroups of a real kernel.

use std::fs;

use units::Ns;

use super::*;
use crate::{
    config::symbiosis::TenantSettings,
    host::{cgroup::fake, sysfs::fake::FakeSysfs},
};

const SUPPLY: Supply = Supply::new(2000, 100);
const EPOCH: Duration = Duration::from_secs(10);

/// Simulated host with tenants.
struct TestHost {
    cgroups: FakeSysfs,
    runtime_dir: tempfile::TempDir,
    sys: FakeSysfs,
    state: Arc<SharesState>,
    symbiosis: Symbiosis,
    /// Major faults of each tenant so far.
    used: BTreeMap<&'static str, u64>,
    now: Duration,
}

fn config(cgroups: &FakeSysfs) -> Config {
    Config {
        cgroups: cgroups.path(""),
        supply: SUPPLY,
        epoch: Ns::secs(10),
        enforce: EnforcementMethod::Swap,
        remote: "/dev/fake".into(),
        tenants: BTreeMap::new(),
    }
}

impl TestHost {
    fn new(names: &[&'static str]) -> Self {
        Self::with(names, |_| {})
    }

    fn with(names: &[&'static str], change: impl Fn(&mut Config)) -> Self {
        let (cgroups, _) = fake::cgroups(names);
        let mut config = config(&cgroups);
        change(&mut config);
        let sys = FakeSysfs::new(&[("swaps", "Filename\n/dev/fake partition 1 0 -2")]);
        let runtime_dir = tempfile::tempdir().unwrap();
        let state = Arc::new(SharesState::default());
        let symbiosis = open_symbiosis(config, &runtime_dir, &sys, &state);
        Self { cgroups, runtime_dir, sys, state, symbiosis, used: BTreeMap::new(), now: Duration::ZERO }
    }

    /// Returns the host after a restart of the agent.
    fn restart_agent(mut self) -> Self {
        let config = self.symbiosis.config.clone();
        self.state = Arc::new(SharesState::default());
        self.symbiosis = open_symbiosis(config, &self.runtime_dir, &self.sys, &self.state);
        self
    }

    /// Adds the counters of one epoch to a tenant: 8 s of CPU time, this memory usage, and this
    /// number of major faults.
    fn add_usage(&mut self, name: &'static str, memory_mib: u64, misses: u64) {
        *self.used.entry(name).or_default() += misses;
        let worked = fs::read_to_string(self.cgroups.path(name).join("cpu.stat")).unwrap();
        let worked: u64 = worked.split_whitespace().nth(1).unwrap().parse().unwrap();
        let all = self.used[name];
        let files = [
            ("memory.current", (memory_mib << 20).to_string()),
            ("memory.swap.current", (1000_u64 << 20).to_string()),
            (
                "memory.stat",
                format!("pgmajfault {all}\nworkingset_refault_anon {all}\nworkingset_refault_file 0"),
            ),
            ("cpu.stat", format!("usage_usec {}", worked + 8_000_000)),
            ("io.stat", format!("7:7 rbytes={} wbytes=0", all * 4096)),
        ];
        files.iter().for_each(|(file, text)| self.cgroups.files(name, &[(file, text)]));
    }

    fn run_epoch(&mut self) -> Report {
        self.now += EPOCH;
        self.symbiosis.end_epoch(self.now)
    }

    /// Runs epochs with the same usage until the shares do not change any more.
    fn run_until_stable(&mut self, add_usage: &[(&'static str, u64, u64)]) -> Report {
        for _ in 0..20 {
            add_usage.iter().for_each(|(name, memory, misses)| self.add_usage(name, *memory, *misses));
            let report = self.run_epoch();
            if report.state == State::Unchanged {
                return report;
            }
        }
        panic!("the shares still change after 20 epochs: {:?}", self.run_epoch());
    }

    fn limits(&self, name: &str) -> (String, String) {
        let text = |file| fs::read_to_string(self.cgroups.path(name).join(file)).unwrap().trim().to_owned();
        (text("memory.high"), text("io.max"))
    }
}

fn open_symbiosis(
    config: Config,
    runtime_dir: &tempfile::TempDir,
    sys: &FakeSysfs,
    state: &Arc<SharesState>,
) -> Symbiosis {
    let kernel = KernelPaths { sys: sys.path(""), swaps: sys.path("swaps") };
    let remote = RemoteDevice::fake(&sys.path(""));
    Symbiosis::with(remote, config, runtime_dir.path(), kernel, Arc::clone(state), None).unwrap()
}

/// Usage of two tenants as name, memory in MiB and major faults per epoch. Only `cache` needs more
/// memory.
const TWO_TENANTS: [(&str, u64, u64); 2] = [("cache", 1000, 40_000), ("web", 1000, 10)];

fn tenant_report<'a>(report: &'a Report, name: &str) -> &'a TenantReport {
    report.tenants.iter().find(|tenant| tenant.name.as_str() == name).unwrap()
}

#[test]
fn stalled_tenant_gets_more_memory_and_matching_limits() {
    let mut host = TestHost::new(&["cache", "web"]);
    let report = host.run_until_stable(&TWO_TENANTS);
    let (cache, web) = (tenant_report(&report, "cache"), tenant_report(&report, "web"));
    assert!(cache.share.memory_mib() > web.share.memory_mib(), "{report:?}");
    assert!(cache.share.memory_pages + web.share.memory_pages <= SUPPLY.memory_pages);
    let (high, io) = host.limits("cache");
    assert_eq!(high, cache.share.memory_bytes().to_string());
    let bytes = cache.share.bandwidth_bytes_s();
    assert_eq!(io, format!("7:7 rbps={bytes} wbps={bytes}"));
    assert!(cache.gain > 1.0 && web.gain > 0.99, "{report:?}");
}

#[test]
fn demand_of_limited_tenant_excludes_limit_stall() {
    let mut host = TestHost::new(&["cache", "web"]);
    host.run_until_stable(&TWO_TENANTS);
    // The tenant uses 16 MB/s of its limit of 18 MB/s. It works for 8 s, and its device needs 4 s.
    TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
    host.cgroups.files(
        "cache",
        &[
            ("io.max", "7:7 rbps=18000000 wbps=max riops=max wiops=max"),
            ("io.pressure", "some avg10=90.00 avg60=0.00 avg300=0.00 total=7600000"),
        ],
    );
    let report = host.run_epoch();
    let cache = tenant_report(&report, "cache");
    let used = cache.measured.unwrap().used_mb_s;
    assert!((cache.demand_mb_s / used - 15.6 / 12.0).abs() < 1e-9, "{cache:?}");
    assert_eq!(
        tenant_report(&report, "web").demand_mb_s,
        tenant_report(&report, "web").measured.unwrap().used_mb_s
    );
}

#[test]
fn first_epoch_sets_no_limits() {
    let mut host = TestHost::new(&["cache", "web"]);
    let report = host.run_epoch();
    assert_eq!(
        (report.state, report.reason.as_str()),
        (State::Blocked, "no tenant has been measured for a full epoch yet")
    );
    assert_eq!(host.limits("cache").0, "max");
}

#[test]
fn restarted_agent_keeps_limits_and_weights() {
    let mut host = TestHost::new(&["cache", "web"]);
    host.state.set_weights(BTreeMap::from([(Name::new("web").unwrap(), 3.0)]));
    let earlier = host.run_until_stable(&TWO_TENANTS);
    let limits = (host.limits("cache"), host.limits("web"));
    let mut host = host.restart_agent();
    for _ in 0..3 {
        TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
        host.run_epoch();
        assert_eq!((host.limits("cache"), host.limits("web")), limits);
    }
    let after = host.state.reports.last().unwrap();
    assert_eq!(after.state, State::Unchanged, "{after:?}");
    assert_eq!((tenant_report(&after, "web").weight, tenant_report(&earlier, "web").weight), (3.0, 3.0));
}

#[test]
fn new_weight_applies_unless_it_violates_a_guarantee() {
    let least = TenantSettings { weight: 1.0, least_mib: 900, enforce: EnforcementMethod::Swap };
    let name = || Name::new("web").unwrap();
    let mut host =
        TestHost::with(&["cache", "web"], |config| config.tenants = BTreeMap::from([(name(), least)]));
    let earlier = host.run_until_stable(&TWO_TENANTS);
    host.state.set_weights(BTreeMap::from([(name(), 0.1)]));
    TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
    let blocked = host.run_epoch();
    assert_eq!(blocked.state, State::Blocked);
    assert!(
        blocked.reason.starts_with("web: ") && blocked.reason.contains("minimum memory 900 must not exceed"),
        "{}",
        blocked.reason
    );
    assert_eq!(tenant_report(&blocked, "web").share, tenant_report(&earlier, "web").share);
    host.state.set_weights(BTreeMap::from([(name(), 4.0)]));
    TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
    let changed = host.run_epoch();
    assert_eq!(changed.state, State::Set);
    assert_eq!(tenant_report(&changed, "web").fair.memory_mib(), 1600);
    assert_eq!(tenant_report(&changed, "web").weight, 4.0);
}

#[test]
fn killed_tenant_leaves_its_share_to_others() {
    let mut host = TestHost::new(&["cache", "web", "batch"]);
    let three = [("cache", 600, 40_000), ("web", 600, 10), ("batch", 600, 20_000)];
    host.run_until_stable(&three);
    fs::remove_dir_all(host.cgroups.path("batch")).unwrap();
    let two = [("cache", 600, 40_000), ("web", 600, 10)];
    let report = host.run_until_stable(&two);
    assert_eq!(report.tenants.len(), 2);
    let sum: u64 = report.tenants.iter().map(|tenant| tenant.share.memory_pages).sum();
    assert!(SUPPLY.memory_pages - sum <= 1, "{report:?}");
}

#[test]
fn unreadable_or_unwritable_cgroup_leaves_shares_unchanged() {
    let mut host = TestHost::new(&["cache", "web"]);
    let earlier = host.run_until_stable(&TWO_TENANTS);
    let limits = (host.limits("cache"), host.limits("web"));
    host.cgroups.files("web", &[("cpu.stat", "nothing")]);
    let blocked = host.run_epoch();
    assert_eq!(blocked.state, State::Blocked);
    assert!(blocked.reason.contains("web/cpu.stat contains \"nothing\""), "{}", blocked.reason);
    host.cgroups.files("web", &[("cpu.stat", "usage_usec 900000000")]);
    assert_eq!((host.limits("cache"), host.limits("web")), limits);
    // A directory in place of io.max makes writes fail.
    host.state.set_weights(BTreeMap::from([(Name::new("cache").unwrap(), 3.0)]));
    let io_max = host.cgroups.path("web").join("io.max");
    let limits_text = fs::read_to_string(&io_max).unwrap();
    fs::remove_file(&io_max).unwrap();
    fs::create_dir(&io_max).unwrap();
    TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
    let blocked = host.run_epoch();
    assert_eq!(blocked.state, State::Blocked);
    assert!(blocked.reason.starts_with("web: ") && blocked.reason.contains("io.max"), "{}", blocked.reason);
    assert_eq!(tenant_report(&blocked, "web").share, tenant_report(&earlier, "web").share);
    fs::remove_dir(&io_max).unwrap();
    fs::write(&io_max, limits_text).unwrap();
    assert_eq!((host.limits("cache"), host.limits("web")), limits);
}

#[test]
fn no_limit_is_set_without_swap() {
    let mut host = TestHost::new(&["cache", "web"]);
    host.run_epoch();
    host.sys.files("", &[("swaps", "Filename")]);
    TWO_TENANTS.iter().for_each(|(name, memory, misses)| host.add_usage(name, *memory, *misses));
    let blocked = host.run_epoch();
    assert_eq!(blocked.reason, "symbiosis.remote: /dev/fake is not in use as swap");
    assert_eq!(host.limits("cache").0, "max");
}

#[test]
fn share_of_tiered_tenant_is_reported_and_not_enforced() {
    let settings = TenantSettings { weight: 1.0, least_mib: 0, enforce: EnforcementMethod::Tiered };
    let mut host = TestHost::with(&["cache", "web"], |config| {
        config.tenants = BTreeMap::from([(Name::new("web").unwrap(), settings)]);
    });
    let report = host.run_until_stable(&TWO_TENANTS);
    assert!(tenant_report(&report, "web").problem.contains("the share is not enforced"));
    assert_eq!(host.limits("web").0, "max");
    assert_ne!(host.limits("cache").0, "max");
}

#[test]
fn pinned_vm_has_no_share_and_vm_keeps_its_local_memory() {
    let mut host = TestHost::new(&["cache", "pinned", "vm"]);
    let mut vms = [(); 2].map(|()| std::process::Command::new("sleep").arg("600").spawn().unwrap());
    host.cgroups.files("pinned", &[("cgroup.procs", &vms[0].id().to_string())]);
    host.cgroups.files("vm", &[("cgroup.procs", &vms[1].id().to_string())]);
    let record = |reservation: u32, vm: &str, pid: u32, is_pinned: bool| {
        let started = process::identify_process(pid).unwrap().started;
        let text = format!(
            r#"{{"reservation":"r-{reservation}","vm":"{vm}","pid":{pid},"started_ticks":{started},"boot_id":"b","cgroup":"/","local_bytes":{},"pinned":{is_pinned},"slices":[]}}"#,
            600_u64 << 20
        );
        let folder = host.runtime_dir.path().join("vms");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("r-{reservation}.json")), text).unwrap();
    };
    record(1, "one", vms[0].id(), true);
    record(2, "two", vms[1].id(), false);
    let report = host.run_until_stable(&[("cache", 600, 40_000), ("vm", 600, 10), ("pinned", 600, 1000)]);
    assert_eq!(report.tenants.len(), 2, "{report:?}");
    let vm = tenant_report(&report, "vm");
    assert_eq!(vm.enforce, EnforcementMethod::Tiered);
    assert!(vm.share.memory_mib() >= 600, "{report:?}");
    assert_eq!((host.limits("vm").0, host.limits("pinned").0), ("max".to_owned(), "max".to_owned()));
    for vm in &mut vms {
        vm.kill().unwrap();
        vm.wait().unwrap();
    }
}
