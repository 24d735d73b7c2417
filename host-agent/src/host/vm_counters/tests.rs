//! Tests with synthetic counts in the form of real event groups of Intel and AMD processors. No
//! count was measured: the machine of these tests has no processor counters.

use std::{
    collections::VecDeque,
    process::{Child, Command},
    sync::{Arc, Mutex},
};

use units::COUNTER_NAMES;

use super::*;
use crate::host::{process::identify_process, sysfs::fake::FakeSysfs};

const SAPPHIRE_RAPIDS: &str =
    "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n";
const GENOA: &str = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n";
const TURIN: &str = "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n";
const OTHER_INTEL: &str = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\n";

/// Synthetic counts of a memory-bound VM on Sapphire Rapids, one line per group: running time of
/// the thread and of the group in ms, then the events.
const GOLDEN_COVE_COUNTS: &str = "\
30000 30000 slots=180000000000 topdown-retiring=36000000000 topdown-bad-spec=9000000000 topdown-fe-bound=27000000000 topdown-be-bound=108000000000 topdown-mem-bound=72000000000
30000 30000 cycles=30000000000 instructions=24000000000 bound_on_loads=15000000000 stalls_l1d_miss=13500000000 stalls_l2_miss=12000000000 stalls_l3_miss=10500000000
30000 30000 cycles=30000000000 instructions=24000000000 bound_on_stores=600000000 l1_miss=480000000 l2_miss=240000000 l3_miss=120000000
30000 30000 cycles=30000000000 l1d_pending=60000000000 l1d_pending_cycles=20000000000 data_rd_cycles=15000000000 data_rd_four_cycles=3000000000
";
/// Synthetic counts of a VM on Zen 4.
const ZEN_4_COUNTS: &str = "\
30000 30000 ls_not_halted_cyc=30000000000 no_ops_from_frontend=18000000000 backend_stalls=90000000000 dispatched_ops=66000000000 retired_ops=60000000000
30000 30000 ls_not_halted_cyc=30000000000 instructions=45000000000 not_complete=12000000000 load_not_complete=9000000000
30000 30000 instructions=45000000000 fills=900000000 fills_beyond_l2=450000000 fills_from_memory=90000000
";

/// Source that returns recorded readings, or an error if none are left.
#[derive(Clone, Debug, Default)]
struct Recording(Arc<Mutex<VecDeque<Vec<GroupReading>>>>);

impl CounterSource for Recording {
    fn open(&self, _: u32, groups: &[EventGroup]) -> io::Result<Box<dyn ThreadCounters>> {
        let zero = |group: &EventGroup| GroupReading {
            counts: vec![0; group.events.len()],
            ..GroupReading::default()
        };
        self.0.lock().unwrap().push_front(groups.iter().map(zero).collect());
        Ok(Box::new(self.clone()))
    }
}

impl ThreadCounters for Recording {
    fn read(&mut self) -> io::Result<Vec<GroupReading>> {
        self.0.lock().unwrap().pop_front().ok_or_else(|| io::Error::other("no recorded counts"))
    }
}

/// Source that refuses all events.
#[derive(Debug)]
struct Refusing;

impl CounterSource for Refusing {
    fn open(&self, _: u32, _: &[EventGroup]) -> io::Result<Box<dyn ThreadCounters>> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "event slots: Permission denied"))
    }
}

fn parse(text: &str) -> Vec<GroupReading> {
    let group = |line: &str| {
        let mut words = line.split_whitespace();
        let mut ms = || Duration::from_millis(words.next().unwrap().parse().unwrap());
        let (enabled, running) = (ms(), ms());
        let counts = words.map(|word| word.split_once('=').unwrap().1.parse().unwrap()).collect();
        GroupReading { enabled, running, counts }
    };
    text.lines().map(group).collect()
}

/// Checks that the recorded events have the names and the order of the plan.
fn check_names(plan: &CounterPlan, text: &str) {
    for (group, line) in plan.groups.iter().zip(text.lines()) {
        let recorded = line.split_whitespace().skip(2).map(|word| word.split_once('=').unwrap().0);
        assert!(group.events.iter().map(|event| event.name).eq(recorded), "{line}");
    }
}

fn intel_sysfs() -> FakeSysfs {
    let tree = sysfs_with("config:0-7");
    let events = [("slots", "event=0x00,umask=0x4"), ("topdown-retiring", "event=0x00,umask=0x80")];
    tree.files("bus/event_source/devices/cpu/events", &events);
    tree
}

fn sysfs_with(event_format: &str) -> FakeSysfs {
    let tree = FakeSysfs::new(&[]);
    tree.files("bus/event_source/devices/cpu", &[("type", "4")]);
    let formats = [("event", event_format), ("umask", "config:8-15"), ("cmask", "config:24-31")];
    tree.files("bus/event_source/devices/cpu/format", &formats);
    tree
}

fn amd_sysfs() -> FakeSysfs {
    sysfs_with("config:0-7,32-35")
}

/// VM whose process has one thread.
struct TestVm {
    child: Child,
    process: Process,
    counters: VmCounters,
    recording: Recording,
}

const VM: ReservationId = ReservationId(1);

impl TestVm {
    fn new(sysfs: &FakeSysfs, cpuinfo: &str) -> Self {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = identify_process(child.id()).unwrap();
        let recording = Recording::default();
        let counters = VmCounters::with_cpuinfo(&sysfs.sysfs, cpuinfo, Box::new(recording.clone()));
        Self { child, process, counters, recording }
    }

    fn sample(&mut self) -> Result<CounterValues, VmCounterError> {
        self.counters.sample(VM, &self.process)
    }

    fn record(&self, readings: Vec<GroupReading>) {
        self.recording.0.lock().unwrap().push_back(readings);
    }

    /// Opens the counters, and returns the sample after these readings.
    fn sample_after(&mut self, readings: Vec<GroupReading>) -> Result<CounterValues, VmCounterError> {
        self.counters.retain(|_| false);
        self.recording.0.lock().unwrap().clear();
        assert!(matches!(self.sample(), Err(VmCounterError::JustBegun)));
        self.record(readings);
        self.sample()
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        let _ = self.child.kill(); // the test may have killed it
        let _ = self.child.wait();
    }
}

fn assert_values(values: &CounterValues, expected: &[(&str, f64)]) {
    let names: Vec<&str> = values.values.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), expected.len(), "{names:?}");
    assert!(names.iter().all(|name| COUNTER_NAMES.contains(name)), "{names:?}");
    for (name, expected) in expected {
        let value = values.values.iter().find(|(measured, _)| measured == name);
        let value = value.unwrap_or_else(|| panic!("{name} is missing from {names:?}")).1;
        assert!((value - expected).abs() < 1e-6 * expected.max(1.0), "{name} is {value}, not {expected}");
    }
}

#[test]
fn counters_of_golden_cove_follow_the_topdown_method() {
    let mut vm = TestVm::new(&intel_sysfs(), SAPPHIRE_RAPIDS);
    let plan = vm.counters.plan.as_ref().unwrap();
    check_names(plan, GOLDEN_COVE_COUNTS);
    // Configuration of MEMORY_ACTIVITY.STALLS_L3_MISS and TOPDOWN.SLOTS in Intel's encoding.
    assert_eq!(plan.groups[1].events[5].config, 0x0900_0947);
    assert_eq!((plan.groups[0].events[0].config, plan.groups[0].kind), (0x400, 4));
    let values = vm.sample_after(parse(GOLDEN_COVE_COUNTS)).unwrap();
    assert_eq!((values.missing.as_str(), values.values.len()), ("", COUNTER_NAMES.len()));
    assert_values(
        &values,
        &[
            ("retiring", 0.2),
            ("frontend_bound", 0.15),
            ("bad_speculation", 0.05),
            ("core_bound", 0.2),
            ("memory_bound", 0.4),
            ("l1_bound", 0.05),
            ("l2_bound", 0.05),
            ("l3_bound", 0.05),
            ("dram_bound", 0.35),
            ("store_bound", 0.02),
            ("dram_bandwidth_bound", 0.1),
            ("dram_latency_bound", 0.4),
            ("ipc", 0.8),
            ("l1_mpki", 20.0),
            ("l2_mpki", 10.0),
            ("l3_mpki", 5.0),
            ("memory_level_parallelism", 3.0),
        ],
    );
}

#[test]
fn counters_of_zen_name_what_the_processor_lacks() {
    let mut vm = TestVm::new(&amd_sysfs(), GENOA);
    let plan = vm.counters.plan.as_ref().unwrap();
    check_names(plan, ZEN_4_COUNTS);
    // Event numbers of more than 8 bits are split.
    assert_eq!(plan.groups[0].events[2].config, 0x1_0000_1ea0);
    let values = vm.sample_after(parse(ZEN_4_COUNTS)).unwrap();
    assert!(values.missing.starts_with("this processor lacks dram_bound, "), "{}", values.missing);
    let expected = [
        ("retiring", 1.0 / 3.0),
        ("frontend_bound", 0.1),
        ("bad_speculation", 1.0 / 30.0),
        ("core_bound", 0.125),
        ("memory_bound", 0.375),
        ("ipc", 1.5),
        ("l1_mpki", 20.0),
        ("l2_mpki", 10.0),
        ("l3_mpki", 2.0),
    ];
    assert_values(&values, &expected);
    // Zen 5 dispatches eight operations per cycle instead of six.
    let mut vm = TestVm::new(&amd_sysfs(), TURIN);
    let values = vm.sample_after(parse(ZEN_4_COUNTS)).unwrap();
    let retiring = values.values.iter().find(|(name, _)| *name == "retiring").unwrap().1;
    assert!((retiring - 0.25).abs() < 1e-9, "{retiring}");
}

#[test]
fn unknown_intel_processor_has_only_topdown_level_1() {
    let mut vm = TestVm::new(&intel_sysfs(), OTHER_INTEL);
    let mut readings = parse(GOLDEN_COVE_COUNTS);
    readings.truncate(2);
    readings[0].counts.truncate(5);
    readings[1].counts.truncate(2);
    let values = vm.sample_after(readings).unwrap();
    let expected = [("retiring", 0.2), ("frontend_bound", 0.15), ("bad_speculation", 0.05), ("ipc", 0.8)];
    assert_values(&values, &expected);
    assert!(values.missing.contains("dram_bound"), "{}", values.missing);
}

#[test]
fn machine_without_counters_names_the_reason() {
    let bare = FakeSysfs::new(&[]);
    let hybrid = FakeSysfs::new(&[]);
    hybrid.files("bus/event_source/devices/cpu_core", &[("type", "4")]);
    let broken = FakeSysfs::new(&[]);
    broken.files("bus/event_source/devices/cpu", &[("type", "4")]);
    for (tree, cpuinfo, reason) in [
        (&bare, SAPPHIRE_RAPIDS, "shows no performance counters"),
        (&hybrid, SAPPHIRE_RAPIDS, "cores of several kinds"),
        (
            &amd_sysfs(),
            "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 1\n",
            "processor model are unknown",
        ),
        (&amd_sysfs(), "", "processor model are unknown"),
        (&amd_sysfs(), SAPPHIRE_RAPIDS, "processor model are unknown"), // a hypervisor hides the metrics
        (&broken, GENOA, "sysfs does not describe"),
    ] {
        let mut vm = TestVm::new(tree, cpuinfo);
        let error = vm.sample().unwrap_err();
        assert!(error.to_string().contains(reason) && !error.is_failure(), "{error}");
    }
}

/// Pseudorandom numbers below `max`, reproducible.
fn pseudorandom(state: &mut u64, max: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % max
}

/// Multiplexing changes no counter by more than rounding, because counts are scaled.
#[test]
fn multiplexed_counts_are_scaled() {
    let mut vm = TestVm::new(&intel_sysfs(), SAPPHIRE_RAPIDS);
    let complete = vm.sample_after(parse(GOLDEN_COVE_COUNTS)).unwrap();
    let mut state = 1;
    for _ in 0..100 {
        let mut readings = parse(GOLDEN_COVE_COUNTS);
        for group in &mut readings {
            let percent = 6 + pseudorandom(&mut state, 95);
            group.running = group.running * u32::try_from(percent).unwrap() / 100;
            group.counts.iter_mut().for_each(|count| *count = *count / 100 * percent);
        }
        let scaled = vm.sample_after(readings).unwrap();
        assert_values(&scaled, &complete.values);
    }
}

/// Threads with different multiplexing contribute by their running time.
#[test]
fn threads_are_scaled_separately() {
    let vm = TestVm::new(&amd_sysfs(), GENOA);
    let group = &vm.counters.plan.as_ref().unwrap().groups[2];
    let reading = |running, counts: [u64; 4]| GroupReading {
        enabled: Duration::from_secs(10),
        running: Duration::from_secs(running),
        counts: counts.to_vec(),
    };
    let zero = GroupReading { counts: vec![0; 4], ..GroupReading::default() };
    let mut sum = GroupSum { enabled: Duration::ZERO, running: Duration::ZERO, counts: vec![0.0; 4] };
    sum.add(group, &zero, &reading(10, [1000, 10, 5, 1])).unwrap();
    sum.add(group, &zero, &reading(5, [500, 20, 10, 2])).unwrap();
    assert_eq!(sum.counts, [2000.0, 50.0, 25.0, 5.0]);
}

#[test]
fn barely_counted_group_is_missing() {
    let mut vm = TestVm::new(&intel_sysfs(), SAPPHIRE_RAPIDS);
    let mut readings = parse(GOLDEN_COVE_COUNTS);
    readings[1].running = readings[1].enabled * 4 / 100;
    let values = vm.sample_after(readings.clone()).unwrap();
    assert!(values.missing.starts_with("not measured in the interval: l1_bound"), "{}", values.missing);
    assert!(!values.values.iter().any(|(name, _)| *name == "dram_bound"));
    assert!(values.values.iter().any(|(name, _)| *name == "memory_bound"));
    readings.iter_mut().for_each(|group| group.running = Duration::ZERO);
    let error = vm.sample_after(readings).unwrap_err();
    assert!(matches!(error, VmCounterError::Multiplexed), "{error}");
}

/// Each event that is lower than in the previous sample is detected and named.
#[test]
fn counter_that_runs_backwards_gives_no_value() {
    let mut vm = TestVm::new(&intel_sysfs(), SAPPHIRE_RAPIDS);
    let readings = parse(GOLDEN_COVE_COUNTS);
    for (group, reading) in readings.iter().enumerate() {
        for event in 0..reading.counts.len() {
            vm.sample_after(readings.clone()).unwrap();
            let mut next = readings.clone();
            next[group].counts[event] -= 1;
            vm.record(next);
            let error = vm.sample().unwrap_err();
            let name = vm.counters.plan.as_ref().unwrap().groups[group].events[event].name;
            assert_eq!(error.to_string(), format!("counter {name} ran backwards"));
            assert!(error.is_failure());
            // The next sample starts again.
            assert!(matches!(vm.sample(), Err(VmCounterError::JustBegun)));
        }
    }
    let mut next = readings.clone();
    next[0].running -= Duration::from_millis(1);
    vm.sample_after(readings).unwrap();
    vm.record(next);
    assert_eq!(vm.sample().unwrap_err().to_string(), "counter time ran backwards");
}

#[test]
fn sample_counts_only_its_interval() {
    let mut vm = TestVm::new(&amd_sysfs(), GENOA);
    vm.sample_after(parse(ZEN_4_COUNTS)).unwrap();
    let mut next = parse(ZEN_4_COUNTS);
    for group in &mut next {
        group.enabled *= 2;
        group.running *= 2;
        group.counts.iter_mut().for_each(|count| *count *= 2);
    }
    next[1].counts[1] += 45_000_000_000; // twice as many instructions as in the first interval
    vm.record(next.clone());
    let ipc = |values: &CounterValues| values.values.iter().find(|(name, _)| *name == "ipc").unwrap().1;
    assert!((ipc(&vm.sample().unwrap()) - 3.0).abs() < 1e-9);
    // A VM that does not run has no ratios, but stays open.
    vm.record(next);
    assert!(matches!(vm.sample(), Err(VmCounterError::Idle(Duration::ZERO))));
    assert!(vm.counters.vms.contains_key(&VM));
}

#[test]
fn reused_pid_and_ended_process_are_not_counted() {
    let mut vm = TestVm::new(&amd_sysfs(), GENOA);
    let other = Process { started: vm.process.started + 1, ..vm.process.clone() };
    let error = vm.counters.sample(VM, &other).unwrap_err();
    assert!(matches!(error, VmCounterError::NotTheProcess { pid } if pid == vm.process.pid), "{error}");
    assert!(matches!(vm.sample(), Err(VmCounterError::JustBegun)));
    vm.child.kill().unwrap();
    vm.child.wait().unwrap();
    vm.record(parse(ZEN_4_COUNTS));
    assert!(matches!(vm.sample(), Err(VmCounterError::NotTheProcess { .. })));
    assert!(vm.counters.vms.is_empty(), "the counters of an ended process stay open");
}

#[test]
fn changed_threads_give_no_value() {
    let mut vm = TestVm::new(&amd_sysfs(), GENOA);
    vm.sample_after(parse(ZEN_4_COUNTS)).unwrap();
    let threads = &mut vm.counters.vms.get_mut(&VM).unwrap().threads;
    let thread = threads.pop_first().unwrap().1;
    threads.insert(u32::MAX, thread);
    assert!(matches!(vm.sample(), Err(VmCounterError::ThreadsChanged)));
    vm.record(parse(ZEN_4_COUNTS));
    vm.sample().unwrap();
}

#[test]
fn refused_events_are_reported_as_failure() {
    let mut vm = TestVm::new(&intel_sysfs(), SAPPHIRE_RAPIDS);
    vm.counters.source = Box::new(Refusing);
    let error = vm.sample().unwrap_err();
    assert_eq!(units::chain(&error), "perf refused to count: event slots: Permission denied");
    assert!(error.is_failure() && vm.counters.vms.is_empty());
}

#[test]
fn descriptors_of_all_vms_are_bounded() {
    let mut vm = TestVm::new(&amd_sysfs(), GENOA);
    vm.counters.descriptors_max = 20; // the process needs 13
    assert!(matches!(vm.sample(), Err(VmCounterError::JustBegun)));
    let error = vm.counters.sample(ReservationId(2), &vm.process.clone()).unwrap_err();
    assert!(matches!(error, VmCounterError::TooManyDescriptors { used: 13, needed: 13, max: 20 }), "{error}");
    vm.counters.retain(|id| id != VM);
    assert!(matches!(
        vm.counters.sample(ReservationId(2), &vm.process.clone()),
        Err(VmCounterError::JustBegun)
    ));
}
