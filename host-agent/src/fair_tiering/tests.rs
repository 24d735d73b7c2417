//! Tests of fair tiering with simulated cgroups, nodes and page moves.

use std::{
    fs, io,
    ops::Range,
    sync::{Mutex, MutexGuard},
};

use units::limits::PAGE_MOVES_MIB_PER_S_DEFAULT;

use super::{accesses::TenantProcess, *};
use crate::{
    config::tiering::TenantSettings,
    host::{
        cgroup::{self, ReclaimResult},
        damon,
        memory::numa::{PromotionLimits, PromotionResult},
        sysfs::fake::FakeSysfs,
    },
    records::Records,
    tiering_report::Moves,
};

const LOCAL_MIB: u64 = 1000;
const SLOW_MIB: u64 = 2000;
/// Node with local memory, and node with slower memory.
const NODES: [u32; 2] = [0, 2];

/// Memory of a simulated tenant, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    local: u64,
    slow: u64,
    /// Local memory that cannot be demoted.
    locked: u64,
}

/// Simulated kernel: memory of all tenants, which files of cgroups and nodes show.
struct Kernel {
    sys: FakeSysfs,
    cgroups: FakeSysfs,
    tenants: BTreeMap<String, Memory>,
    /// Requests to demote, as tenant and size.
    requests: Vec<(String, u64)>,
    /// Whether the next request removes the cgroup of its tenant.
    ends_tenant: bool,
}

#[derive(Clone)]
struct FakeMover(Arc<Mutex<Kernel>>);

impl std::fmt::Debug for FakeMover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeMover")
    }
}

impl Kernel {
    /// Writes the memory to the files.
    fn update_files(&self) {
        for (name, memory) in &self.tenants {
            let stat = format!("anon N0={} N2={}\nfile N0=0 N2=0", memory.local, memory.slow);
            self.cgroups.files(name, &[("memory.numa_stat", &stat)]);
        }
        let used = |of: fn(&Memory) -> u64| self.tenants.values().map(of).sum::<u64>();
        let used = [used(|memory| memory.local), used(|memory| memory.slow)];
        for ((node, total), used) in NODES.iter().zip([LOCAL_MIB, SLOW_MIB]).zip(used) {
            let free = (total << 10).saturating_sub(used >> 10);
            let meminfo = format!("Node {node} MemTotal: {} kB\nNode {node} MemFree: {free} kB", total << 10);
            self.sys.files(&format!("devices/system/node/node{node}"), &[("meminfo", &meminfo)]);
        }
    }
}

impl PageMover for FakeMover {
    fn demote(&mut self, tenant: &Name, bytes: Bytes) -> Result<ReclaimResult, SysfsError> {
        let mut kernel = self.0.lock().unwrap();
        kernel.requests.push((tenant.to_string(), bytes.get()));
        if kernel.ends_tenant {
            kernel.tenants.remove(tenant.as_str());
            fs::remove_dir_all(kernel.cgroups.path(tenant.as_str())).unwrap();
            return kernel
                .cgroups
                .sysfs
                .write(format!("{tenant}/memory.reclaim"), "1")
                .map(|()| ReclaimResult::Complete);
        }
        let memory = kernel.tenants.get_mut(tenant.as_str()).unwrap();
        let moved = bytes.get().min(memory.local.saturating_sub(memory.locked));
        memory.local -= moved;
        memory.slow += moved;
        kernel.update_files();
        Ok(if moved == bytes.get() { ReclaimResult::Complete } else { ReclaimResult::Incomplete })
    }

    fn promote(
        &mut self,
        process: &TenantProcess,
        ranges: &[Range<usize>],
        _: &Tiers,
        to: u32,
        limits: PromotionLimits,
    ) -> io::Result<PromotionResult> {
        assert_eq!(to, NODES[0]);
        let mut kernel = self.0.lock().unwrap();
        let pages: Vec<usize> = ranges.iter().flat_map(|range| range.clone().step_by(4096)).collect();
        let memory = kernel.tenants.get_mut(process.tenant.as_str()).ok_or(io::ErrorKind::NotFound)?;
        let count = pages
            .len()
            .min(limits.moved)
            .min(limits.examined)
            .min(usize::try_from(memory.slow).unwrap() / 4096);
        memory.slow -= count as u64 * 4096;
        memory.local += count as u64 * 4096;
        kernel.update_files();
        let moved = pages[..count].to_vec();
        Ok(PromotionResult { examined: count, moved, failed: BTreeMap::new() })
    }

    fn slow_pages(&self, _: u32, pages: &[usize], _: &Tiers) -> io::Result<Vec<usize>> {
        Ok(pages.to_vec())
    }
}

/// Host with the tenants `a` and `b`, whose processes are 1 and 2.
struct TestHost {
    kernel: Arc<Mutex<Kernel>>,
    tiering: FairTiering,
    reports: Arc<ReportSlot<Report>>,
    shares: Arc<SharesState>,
    runtime_dir: tempfile::TempDir,
    now: Ns,
}

impl TestHost {
    fn new(tenants: [Memory; 2], change: impl FnOnce(&mut Config)) -> Self {
        let (cgroups, _) = cgroup::fake::cgroups(&["a", "b"]);
        for (name, pid) in [("a", "1"), ("b", "2")] {
            cgroups.files(name, &[("cgroup.procs", pid)]);
        }
        let sys = damon::fake::damon(2, &[("0", "1073741824", "30")]);
        sys.files("devices/system/node", &[("has_memory", "0,2"), ("has_cpu", "0")]);
        sys.files("kernel/mm/numa", &[("demotion_enabled", "true")]);
        let mut config = Config {
            cgroups: cgroups.path(""),
            local: None,
            slow: None,
            reservation: None,
            step: Ns::secs(1),
            demotion_bytes_per_s: PAGE_MOVES_MIB_PER_S_DEFAULT << 20,
            promotion_bytes_per_s: PAGE_MOVES_MIB_PER_S_DEFAULT << 20,
            tenants: BTreeMap::new(),
        };
        change(&mut config);
        let runtime_dir = tempfile::tempdir().unwrap();
        let (shares, reports) = (Arc::<SharesState>::default(), Arc::<ReportSlot<Report>>::default());
        let inputs = Inputs {
            config,
            runtime_dir: runtime_dir.path().to_owned(),
            slices: None,
            kernel: KernelRoots { sys: sys.path(""), proc: sys.path("") },
            shares: Arc::clone(&shares),
            profiles: None,
            reports: Arc::clone(&reports),
        };
        let tenants = ["a", "b"].map(str::to_owned).into_iter().zip(tenants).collect();
        let kernel = Kernel { sys, cgroups, tenants, requests: Vec::new(), ends_tenant: false };
        kernel.update_files();
        let kernel = Arc::new(Mutex::new(kernel));
        let tiering = FairTiering::with(Box::new(FakeMover(Arc::clone(&kernel))), inputs).unwrap();
        Self { kernel, tiering, reports, shares, runtime_dir, now: Ns::ZERO }
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    fn step(&mut self) -> Report {
        self.now = self.now.after(Ns::secs(1));
        self.tiering.step(self.now)
    }

    /// Runs steps until the first one that can promote pages.
    fn step_to_first_promotion(&mut self) {
        self.step();
        self.step(); // the processes are older than a step
        self.tiering.promoter.monitor.skip_first_result_delay();
        self.step();
    }

    /// Returns the local memory of both tenants, in MiB.
    fn local_mib(&self) -> [u64; 2] {
        let kernel = self.kernel();
        ["a", "b"].map(|name| kernel.tenants[name].local >> 20)
    }
}

fn memory(local_mib: u64, slow_mib: u64) -> Memory {
    Memory { local: local_mib << 20, slow: slow_mib << 20, locked: 0 }
}

fn limits(protection_mib: u64, bound_mib: Option<u64>) -> TenantSettings {
    TenantSettings { protection: Some(Bytes::mib(protection_mib)), bound: bound_mib.map(Bytes::mib) }
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Returns the record of a VM with two slices.
fn protect_both(config: &mut Config) {
    config.tenants = [(name("a"), limits(400, None)), (name("b"), limits(400, None))].into();
}

#[test]
fn only_tenant_above_its_protection_is_demoted() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    for _ in 0..5 {
        host.step();
    }
    let [a, b] = host.local_mib();
    assert_eq!(b, 395);
    assert!((580..=586).contains(&a), "2 % of 1000 MiB are free, {a} MiB");
    let report = host.reports.last().unwrap();
    assert_eq!((report.tenants[0].problem.as_str(), report.tenants[1].moves), ("", Moves::default()));
    assert!(report.tenants[0].moves.demoted >= Bytes::mib(14), "{report:?}");
}

#[test]
fn bound_is_enforced_while_memory_is_free() {
    let bound = |config: &mut Config| config.tenants = [(name("a"), limits(0, Some(200)))].into();
    let mut host = TestHost::new([memory(600, 0), memory(100, 0)], bound);
    host.step();
    assert!(host.local_mib()[0] <= 200, "{:?}", host.local_mib());
    assert_eq!(host.local_mib()[1], 100);
}

#[test]
fn demotion_is_limited_to_the_configured_rate() {
    let slow = |config: &mut Config| {
        config.tenants = [(name("a"), limits(0, Some(200)))].into();
        config.demotion_bytes_per_s = 10 << 20;
    };
    let mut host = TestHost::new([memory(600, 0), memory(100, 0)], slow);
    host.step();
    host.step();
    assert_eq!(host.local_mib(), [580, 100]);
}

#[test]
fn configured_sizes_limit_the_memory_of_tenants() {
    let small =
        |config: &mut Config| (config.local, config.slow) = (Some(Bytes::mib(300)), Some(Bytes::mib(50)));
    let mut host = TestHost::new([memory(200, 0), memory(120, 0)], small);
    for _ in 0..5 {
        host.step();
    }
    let sum: u64 = host.local_mib().iter().sum();
    assert!((290..=295).contains(&sum), "2 % of 300 MiB are free, {sum} MiB are used");
    // Slower memory is full, so the rest of the tenants' growth cannot be demoted.
    host.kernel().tenants.insert("b".to_owned(), memory(200, 20));
    host.kernel().update_files();
    let report = host.step();
    let slow: u64 = host.kernel().tenants.values().map(|memory| memory.slow).sum();
    assert!(slow <= 50 << 20, "{slow}");
    assert!(report.tiers[0].shortfall > Bytes::mib(30), "{report:?}");
}

#[test]
fn memory_that_cannot_be_demoted_is_reported_and_not_retried_at_once() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    host.kernel().tenants.get_mut("a").unwrap().locked = 600 << 20;
    let report = host.step();
    let problem = "the kernel demoted 0B of";
    assert!(report.tenants[0].problem.starts_with(problem), "{report:?}");
    for _ in 0..30 {
        host.step();
    }
    let requests = host.kernel().requests.len();
    assert!((4..=6).contains(&requests), "the delay is doubled, {requests} requests in 31 s");
    assert_eq!(host.local_mib(), [600, 395]);
    host.kernel().tenants.get_mut("a").unwrap().locked = 0;
    for _ in 0..33 {
        host.step();
    }
    assert_eq!(host.step().tenants[0].problem, "");
    assert!(host.local_mib()[0] < 590);
}

#[test]
fn tenant_that_ends_during_a_step_is_forgotten() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    host.kernel().ends_tenant = true;
    host.step();
    host.kernel().ends_tenant = false;
    let report = host.step();
    assert_eq!((report.reason.as_str(), report.tenants.len()), ("", 1));
    // A new cgroup of the same name is another tenant.
    let before = host.tiering.tenants[&name("b")].id;
    let folder = host.kernel().cgroups.path("");
    fs::rename(folder.join("b"), folder.join("c")).unwrap();
    cgroup::fake::add(&host.kernel().cgroups, "b");
    host.step();
    assert_ne!(host.tiering.tenants[&name("b")].id, before);
}

#[test]
fn cgroups_of_vms_and_with_invalid_names_are_no_tenants() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    let own = std::process::id();
    let folder = fs::canonicalize(host.kernel().cgroups.path("")).unwrap();
    let folder = folder.file_name().unwrap().to_str().unwrap().to_owned();
    host.kernel().sys.files(&own.to_string(), &[("cgroup", &format!("0::/{folder}/a/below"))]);
    cgroup::fake::add(&host.kernel().cgroups, "no name");
    Records::open(host.runtime_dir.path(), "boot").unwrap().write(&records::fake::vm_record(own)).unwrap();
    let report = host.step();
    let names: Vec<&str> = report.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    assert_eq!(names, ["b"]);
    // The VM leaves 380 MiB without the high watermark, so that the protection of b is reduced.
    assert_eq!(report.tenants[0].decided.fast().scaled_protection, Bytes::mib(380));
    assert_eq!(host.kernel().requests, [("b".to_owned(), 15 << 20)]);
}

#[test]
fn nothing_is_moved_while_the_kernel_does_not_demote() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    host.kernel().sys.files("kernel/mm/numa", &[("demotion_enabled", "false")]);
    let report = host.step();
    assert!(report.reason.contains("demotion_enabled is not true"), "{report:?}");
    assert!(host.kernel().requests.is_empty());
}

#[test]
fn page_cache_of_other_programs_counts_as_free() {
    let mut host = TestHost::new([memory(400, 0), memory(395, 0)], protect_both);
    let meminfo = |cache_mib: u64| {
        let (total, free) = (LOCAL_MIB << 10, 5 << 10);
        format!(
            "Node 0 MemTotal: {total} kB\nNode 0 MemFree: {free} kB\nNode 0 Inactive(file): {} kB",
            cache_mib << 10
        )
    };
    host.kernel().sys.files("devices/system/node/node0", &[("meminfo", &meminfo(200))]);
    assert_eq!(host.step().tiers[0].free, Bytes::mib(205));
    // Page cache of the tenants themselves is demoted instead.
    let stat = format!("anon N0={} N2=0\nfile N0={} N2=0", 200 << 20, 200 << 20);
    host.kernel().cgroups.files("a", &[("memory.numa_stat", &stat)]);
    assert_eq!(host.step().tiers[0].free, Bytes::mib(5));
}

#[test]
fn memory_that_cannot_be_demoted_leaves_the_rate_limit_to_others() {
    let bounds = |config: &mut Config| {
        config.tenants = ["a", "b"].map(|tenant| (name(tenant), limits(0, Some(100)))).into();
        config.demotion_bytes_per_s = 50 << 20;
    };
    let mut host = TestHost::new([memory(400, 0), memory(400, 0)], bounds);
    host.kernel().tenants.get_mut("a").unwrap().locked = 400 << 20;
    for _ in 0..8 {
        host.step();
    }
    let [a, b] = host.local_mib();
    assert!(a == 400 && b <= 200, "{a} {b}");
}

#[test]
fn slices_of_the_reservation_limit_slower_memory() {
    let bound = |config: &mut Config| config.tenants = [(name("a"), limits(0, Some(200)))].into();
    let mut host = TestHost::new([memory(600, 900), memory(100, 100)], bound);
    let slices = Arc::new(AtomicU64::new(0));
    host.tiering.inputs.slices = Some(Arc::clone(&slices));
    assert_eq!(host.step().reason, "no slice of the reservation tiering.reservation is online");
    slices.store(1, Ordering::Relaxed);
    let report = host.step();
    assert_eq!((report.tiers[1].capacity, report.tiers[1].free), (Bytes::gib(1), Bytes::mib(24)));
    assert!(host.local_mib()[0] >= 576, "the other slices belong to VMs");
}

#[test]
fn nothing_is_moved_before_the_first_shares_of_symbiosis() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    host.tiering.inputs.profiles = Some(Arc::default());
    assert_eq!(host.step().reason, "waiting for the first shares of Symbiosis");
    assert!(host.kernel().requests.is_empty());
}

#[test]
fn nothing_is_moved_without_slower_memory() {
    let mut host = TestHost::new([memory(600, 0), memory(395, 0)], protect_both);
    host.kernel().sys.files("devices/system/node", &[("has_memory", "0")]);
    let report = host.step();
    assert_eq!(report.reason, "no node without processors has memory: no slice is online as memory blocks");
    host.kernel().sys.files("devices/system/node", &[("has_memory", "0,2")]);
    assert_eq!(host.step().reason, "");
}

#[test]
fn share_of_symbiosis_is_the_default_protection() {
    use crate::{config::symbiosis::EnforcementMethod, shares};
    let mut host = TestHost::new([memory(300, 0), memory(300, 0)], |config| {
        config.tenants = [(name("b"), limits(70, None))].into();
    });
    let shares_of = |text: &str, enforce| {
        let share = fairness::market::Share::new(250, 1);
        shares::TenantReport { share, ..shares::TenantReport::new(&name(text), enforce, "") }
    };
    let supply = fairness::market::Supply { memory_pages: 1 << 20, bandwidth_kb_s: 1000 };
    let store = |of_a| {
        let tenants = vec![shares_of("a", of_a), shares_of("b", EnforcementMethod::Tiered)];
        let undecided = shares::Report::undecided_report(1, supply, String::new());
        host.shares.reports.store(shares::Report { state: shares::State::Set, tenants, ..undecided });
    };
    store(EnforcementMethod::Tiered);
    let protections = |report: &Report| [0, 1].map(|at| report.tenants[at].decided.fast().protection);
    assert_eq!(protections(&host.tiering.step(Ns::secs(1))), [250, 70].map(Bytes::mib));
    store(EnforcementMethod::Advise);
    assert_eq!(protections(&host.tiering.step(Ns::secs(2))), [0, 70].map(Bytes::mib));
}

#[test]
fn accessed_pages_in_slower_memory_are_promoted() {
    let mut host = TestHost::new([memory(100, 200), memory(100, 0)], protect_both);
    host.step_to_first_promotion();
    assert_eq!(host.local_mib()[0], 300, "all 200 MiB fit into the rate limit of a second");
    let report = host.step();
    assert_eq!(report.tenants[0].moves.promoted, Bytes::mib(200));
    assert_eq!(report.problems, [""; 0]);
    assert!(report.tenants[0].thrash.promotions > 0);
}

#[test]
fn pages_are_promoted_to_the_node_of_the_tenant_if_it_has_room() {
    let mut host = TestHost::new([memory(100, 300), memory(700, 0)], protect_both);
    host.step();
    let target = |free: &[(u32, u64)]| {
        let nodes = free.iter().map(|(node, mib)| (*node, Bytes::mib(*mib))).collect();
        host.tiering.promotion_target(&name("a"), &nodes).map(|(node, room)| (node, room.get() >> 20))
    };
    assert_eq!(target(&[(0, 50), (1, 90)]), Some((0, 50)));
    assert_eq!(target(&[(1, 90), (3, 91)]), Some((3, 91)), "the node of the tenant is full");
    assert_eq!(target(&[]), None);
    host.kernel().cgroups.files("a", &[("cpuset.mems.effective", "1-2")]);
    assert_eq!(target(&[(0, 50), (1, 90), (3, 91)]), Some((1, 90)), "the cpuset permits only node 1");
    let tiers = Tiers { local: [0].into(), slow: [2].into() };
    let room = |host: &TestHost, capacity_mib: u64| {
        host.tiering.local_nodes_with_room(&tiers, Bytes::mib(capacity_mib)).unwrap()
    };
    assert_eq!(
        room(&host, 1000),
        [(0, Bytes::new(191_365_120))].into(),
        "200 MiB are free, 17.5 MiB are reserved"
    );
    host.kernel().tenants.get_mut("b").unwrap().local = 885 << 20;
    host.kernel().update_files();
    assert_eq!(room(&host, 1000), [].into());
    assert_eq!(
        room(&host, 200),
        [(0, Bytes::new(12_058_624))].into(),
        "3.5 MiB of the tenants' 200 MiB are reserved"
    );
}

#[test]
fn tenant_promotes_up_to_its_protection_in_one_step() {
    let mut host = TestHost::new([memory(100, 300), memory(700, 0)], |config| {
        config.tenants = [(name("a"), limits(150, None))].into();
    });
    host.step_to_first_promotion();
    assert_eq!(host.local_mib(), [150, 700], "200 MiB are free");
    host.step();
    assert_eq!(host.local_mib(), [280, 700], "20 MiB remain free");
}

#[test]
fn tenant_less_than_a_huge_page_below_its_protection_promotes_a_huge_page() {
    for (bound_mib, local_mib) in [(None, 151), (Some(150), 149)] {
        let mut host = TestHost::new([memory(149, 300), memory(700, 0)], |config| {
            config.tenants = [(name("a"), limits(150, bound_mib))].into();
        });
        host.step_to_first_promotion();
        assert_eq!(host.local_mib(), [local_mib, 700], "bound of {bound_mib:?} MiB");
    }
}
