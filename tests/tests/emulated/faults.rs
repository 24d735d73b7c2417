//! Tests of faults of emulated hosts, of their network and of the manager. The device cannot revoke
//! access. No slice may be in two kernels, VMs check their data, and the rack must recover from
//! each fault within the time limit.

use std::{path::Path, thread, time::Duration};

use emulated_host::rack::RackPlan;
use tests::emulated_rack::{EmulatedRack, plan};

/// Memory that a VM writes to each slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Setting that limits the scrub rate, so that a test can interrupt a scrub.
const SCRUB_RATE_SETTING: &str = "scrub_mib_per_s = 512";
/// Seconds from the end of a lease until the host is fenced.
const FENCE_AFTER_S: Option<f64> = Some(6.0);
/// Duration of a lease in seconds, long enough for agents on a busy machine.
const LEASE_TTL_S: f64 = 3.0;
/// Duration of an outage after the manager has detected it.
const OUTAGE_DURATION: Duration = Duration::from_secs(2);

fn plan_with_slow_scrub(backend: &str) -> RackPlan {
    RackPlan {
        backend_toml_extra: SCRUB_RATE_SETTING.to_owned(),
        lease_ttl_s: LEASE_TTL_S,
        ..plan(2, &[2], backend)
    }
}

/// Returns the state and the host of each slice.
fn slice_owners(rack: &EmulatedRack) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let slices = rack.tarn_json("get slices");
    slices.as_array().unwrap().iter().map(|slice| (text(&slice["state"]), text(&slice["host"]))).collect()
}

/// Returns the numbers and states of the slices of a host.
fn slices_of_host(rack: &EmulatedRack, host: usize) -> Vec<(usize, String)> {
    let all = slice_owners(rack).into_iter().enumerate();
    all.filter(|(_, (_, of))| *of == format!("h{host}")).map(|(n, (state, _))| (n, state)).collect()
}

fn count_slices(rack: &EmulatedRack, state: &str) -> usize {
    rack.slice_states().iter().filter(|slice| *slice == state).count()
}

/// Waits until a host scrubs a slice, and returns the index of this host.
fn wait_for_scrubber(rack: &EmulatedRack) -> usize {
    let of = |rack: &EmulatedRack| {
        slice_owners(rack).into_iter().find(|(state, host)| state == "scrubbing" && !host.is_empty())
    };
    rack.wait_until("a slice is being scrubbed", |rack| of(rack).is_some());
    if of(rack).is_some_and(|(_, host)| host == "h0") { 0 } else { 1 }
}

/// Fault that separates a host from the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outage {
    Paused,
    CutOff,
    NoManager,
}

impl Outage {
    fn start(self, rack: &mut EmulatedRack, host: usize) {
        match self {
            Self::Paused => rack.host(host).pause().unwrap(),
            Self::CutOff => rack.host(host).set_link(false).unwrap(),
            Self::NoManager => return rack.rack.kill_manager(),
        }
        rack.wait_host_state(host, "unknown");
    }

    fn finish(self, rack: &mut EmulatedRack, host: usize) {
        match self {
            Self::Paused => rack.host(host).resume().unwrap(),
            Self::CutOff => rack.host(host).set_link(true).unwrap(),
            Self::NoManager => rack.rack.start_manager().unwrap(),
        }
        rack.rack.wait_hosts_up(|| true).unwrap();
    }

    /// Runs an outage that lasts longer than a lease. Checks that the slices of the host do not
    /// change during the outage.
    fn run(self, rack: &mut EmulatedRack, host: usize, meanwhile: impl FnOnce(&EmulatedRack)) {
        self.start(rack, host);
        let before = (self != Self::NoManager).then(|| slices_of_host(rack, host));
        meanwhile(rack);
        thread::sleep(OUTAGE_DURATION);
        if let Some(before) = before {
            assert_eq!(slices_of_host(rack, host), before, "{self:?}");
        }
        self.finish(rack, host);
    }
}

/// Runs a VM on h0, with an outage in each phase of the VM.
fn run_vm_with_outages(rack: &mut EmulatedRack, outage: Outage) {
    let vm = &format!("{outage:?}").to_lowercase();
    rack.tarn(&format!("reserve --host h0 --vm {vm} --pool 2GiB --cores 1 --request-id {vm}"));
    outage.run(rack, 0, |_| {});
    rack.tarn(&format!("wait-ready {vm}"));
    rack.tarn(&format!("commit {vm}"));
    assert_eq!(rack.start_vm(0, vm, TOUCH_MIB), [0; 0]);

    outage.run(rack, 0, |rack| assert!(rack.kernel_slices(1).is_empty()));
    assert_eq!(rack.kernel_slices(0).len(), 2);

    rack.tarn(&format!("release {vm}"));
    rack.wait_until("the slices are draining", |rack| count_slices(rack, "draining") == 2);
    let mut overwritten = Vec::new();
    outage.run(rack, 0, |rack| {
        if outage != Outage::Paused {
            overwritten.extend(rack.end_vm(0, vm));
        }
    });
    if outage == Outage::Paused {
        overwritten.extend(rack.end_vm(0, vm));
    }
    assert_eq!(overwritten, [0; 0], "found data of another VM in the slices, {outage:?}");

    let scrubber = wait_for_scrubber(rack);
    outage.run(rack, scrubber, |_| {});
    rack.wait_all_slices_free();
    rack.assert_kernels_match_manager();
}

/// Runs a VM that uses all slices. Checks that the slices are zeroed at the start and free at the
/// end.
fn use_all_slices(rack: &EmulatedRack, host: usize, vm: &str) {
    rack.reserve(host, vm, 2);
    assert_eq!(rack.start_vm(host, vm, TOUCH_MIB), [0; 0], "found data of the previous VM");
    assert_eq!(rack.end_vm(host, vm), [0; 0], "found data of another VM in the slices");
    rack.wait_all_slices_free();
}

/// Checks the final state of a test: kernels match the manager, and all devices are zero.
fn assert_final_state(rack: EmulatedRack, checks: usize) {
    println!("no slice was on two hosts in {checks} checks");
    assert!(checks > 5);
    rack.assert_kernels_match_manager();
    rack.assert_devices_zeroed();
}

#[test]
fn outage_beyond_lease_keeps_slices_with_device_dax() {
    run_vm_with_all_outages("dax");
}

#[test]
fn outage_beyond_lease_keeps_slices_with_memory_blocks() {
    run_vm_with_all_outages("memory_block");
}

fn run_vm_with_all_outages(backend: &str) {
    let mut rack = EmulatedRack::start(plan_with_slow_scrub(backend));
    let watch = rack.watch_owners();
    for outage in [Outage::Paused, Outage::CutOff, Outage::NoManager] {
        run_vm_with_outages(&mut rack, outage);
    }
    use_all_slices(&rack, 1, "after");
    assert_final_state(rack, watch.finish());
}

#[test]
fn slices_of_rebooted_host_are_scrubbed() {
    let mut rack = EmulatedRack::start(plan_with_slow_scrub("memory_block"));
    let watch = rack.watch_owners();
    rack.reserve(0, "lost", 2);
    assert_eq!(rack.start_vm(0, "lost", TOUCH_MIB), [0; 0]);
    rack.host_mut(0).power_off().unwrap();
    rack.wait_host_state(0, "unknown");
    thread::sleep(OUTAGE_DURATION);
    assert_eq!(slice_owners(&rack), vec![("online".to_owned(), "h0".to_owned()); 2]);
    rack.host_mut(0).power_on().unwrap();
    rack.wait_all_slices_free();
    use_all_slices(&rack, 0, "after");
    assert_final_state(rack, watch.finish());
}

#[test]
fn silent_host_is_fenced_by_command_and_slices_are_reused() {
    let mut rack =
        EmulatedRack::start(RackPlan { fence_after_s: FENCE_AFTER_S, ..plan_with_slow_scrub("dax") });
    let watch = rack.watch_owners();
    for (n, inject) in [power_off_h0, pause_h0, pause_scrubber].into_iter().enumerate() {
        let host = inject(&mut rack, &format!("lost{n}"));
        rack.wait_host_state(host, "fenced");
        assert!(!rack.host(host).is_powered_on().unwrap(), "the host must be off");
        rack.wait_all_slices_free();
        rack.host_mut(host).power_on().unwrap();
        rack.wait_host_state(host, "up");
    }
    use_all_slices(&rack, 0, "after");
    assert_final_state(rack, watch.finish());
}

/// Starts a VM on h0. Checks that its slices are zeroed before the VM writes to them.
fn start_vm_on_h0(rack: &EmulatedRack, vm: &str, slices: u32) {
    rack.reserve(0, vm, slices);
    assert_eq!(rack.start_vm(0, vm, TOUCH_MIB), [0; 0], "found data of the previous VM");
}

fn power_off_h0(rack: &mut EmulatedRack, vm: &str) -> usize {
    start_vm_on_h0(rack, vm, 2);
    rack.host_mut(0).power_off().unwrap();
    0
}

fn pause_h0(rack: &mut EmulatedRack, vm: &str) -> usize {
    start_vm_on_h0(rack, vm, 2);
    rack.host(0).pause().unwrap();
    0
}

fn pause_scrubber(rack: &mut EmulatedRack, vm: &str) -> usize {
    start_vm_on_h0(rack, vm, 2);
    assert_eq!(rack.end_vm(0, vm), [0; 0]);
    let host = wait_for_scrubber(rack);
    rack.host(host).pause().unwrap();
    host
}

#[test]
fn unfenceable_host_keeps_slices_until_release_or_confirmation() {
    let mut plan = RackPlan { fence_after_s: FENCE_AFTER_S, ..plan_with_slow_scrub("dax") };
    plan.programs.power_off = Path::new("false").to_owned();
    let mut rack = EmulatedRack::start(plan);
    let watch = rack.watch_owners();
    for words in ["fence h0", "fence h0 --confirm-powered-off"] {
        let output = rack.try_tarn(words);
        assert!(!output.status.success(), "{words} must fail, because the agent is connected: {output:?}");
    }

    start_vm_on_h0(&rack, "kept", 1);
    rack.host(0).pause().unwrap();
    assert_host_keeps_slice(&rack, "beside1");
    rack.host(0).resume().unwrap();
    rack.wait_host_state(0, "up");
    rack.wait_all_slices_free();
    assert_eq!(
        rack.run(0, "kill -0 $(cat /run/kept.pid) 2> /dev/null; echo $?").trim(),
        "1",
        "the VM still runs"
    );
    rack.run(0, "kill $(cat /run/kept.sleep); rm /run/kept.*");
    use_all_slices(&rack, 0, "again");

    start_vm_on_h0(&rack, "off", 1);
    rack.host_mut(0).power_off().unwrap();
    assert_host_keeps_slice(&rack, "beside2");
    assert!(rack.try_tarn("fence h0").status.success(), "fence must succeed while fencing is in progress");
    thread::sleep(OUTAGE_DURATION);
    assert_eq!(count_slices(&rack, "free"), 1);
    rack.tarn("fence h0 --confirm-powered-off");
    rack.wait_host_state(0, "fenced");
    rack.wait_all_slices_free();
    rack.host_mut(0).power_on().unwrap();
    rack.wait_host_state(0, "up");
    use_all_slices(&rack, 0, "back");
    assert_final_state(rack, watch.finish());
}

/// Checks that h0 keeps its slice and that h1 can use the other slice.
fn assert_host_keeps_slice(rack: &EmulatedRack, beside: &str) {
    rack.wait_until("the alarm that h0 is not fenced", |rack| {
        rack.tarn("get alarms").contains("HOST_NOT_FENCED") && rack.host_state(0) == "fencing"
    });
    rack.reserve(1, beside, 1);
    assert_eq!(rack.start_vm(1, beside, TOUCH_MIB), [0; 0]);
    let output = rack.try_tarn("reserve --host h1 --vm more --pool 1GiB --cores 1 --request-id more");
    assert!(!output.status.success(), "reserve must fail, because no other slice is free");
    assert_eq!(rack.end_vm(1, beside), [0; 0]);
    rack.wait_until("the other slice is free again", |rack| count_slices(rack, "free") == 1);
    thread::sleep(OUTAGE_DURATION);
    assert!(
        slice_owners(rack).contains(&("draining".to_owned(), "h0".to_owned())),
        "{:?}",
        slice_owners(rack)
    );
}
