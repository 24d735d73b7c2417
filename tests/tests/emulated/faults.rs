//! Faults of hosts, of their network and of the manager, in a rack in a box with a device that nothing fences. Nothing is lost and
//! nothing is doubled: the kernels are watched all the while, VMs look for their bytes, and each fault ends within the harness's
//! patience, or in the quarantine that the test names.

use std::{path::Path, thread, time::Duration};

use emulated_host::rack::RackPlan;
use tests::real_rack::{RealRack, plan};

/// Memory that a VM writes into each slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// How fast a host scrubs: slow enough to be stopped in the middle.
const SCRUB: &str = "scrub_mib_per_s = 512";
/// After so much silence past its lease a host is stopped.
const FENCE_AFTER_S: Option<f64> = Some(6.0);
/// Lease long enough for agents on a busy machine.
const LEASE_S: f64 = 3.0;
/// How long nothing may move that has lost its host.
const STILL: Duration = Duration::from_secs(4);

fn faulty(backend: &str) -> RackPlan {
    RackPlan { backend_toml_extra: SCRUB.to_owned(), lease_ttl_s: LEASE_S, ..plan(2, &[2], backend) }
}

/// The state and the host of each slice.
fn places(rack: &RealRack) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let slices = rack.json("get slices");
    slices.as_array().unwrap().iter().map(|slice| (text(&slice["state"]), text(&slice["host"]))).collect()
}

/// The slices of a host, by number, and their states.
fn kept(rack: &RealRack, host: usize) -> Vec<(usize, String)> {
    let all = places(rack).into_iter().enumerate();
    all.filter(|(_, (_, of))| *of == format!("h{host}")).map(|(n, (state, _))| (n, state)).collect()
}

fn count(rack: &RealRack, state: &str) -> usize {
    rack.states().iter().filter(|slice| *slice == state).count()
}

/// The host that scrubs, once one does.
fn scrubber(rack: &RealRack) -> usize {
    let of = |rack: &RealRack| {
        places(rack).into_iter().find(|(state, host)| state == "scrubbing" && !host.is_empty())
    };
    rack.until("a slice is being scrubbed", |rack| of(rack).is_some());
    if of(rack).is_some_and(|(_, host)| host == "h0") { 0 } else { 1 }
}

/// Faults that separate a host from the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    Paused,
    CutOff,
    NoManager,
}

impl Silence {
    fn begin(self, rack: &mut RealRack, host: usize) {
        match self {
            Self::Paused => rack.host(host).pause().unwrap(),
            Self::CutOff => rack.host(host).set_link(false).unwrap(),
            Self::NoManager => return rack.rack.kill_manager(),
        }
        rack.until_host(host, "unknown");
    }

    fn end(self, rack: &mut RealRack, host: usize) {
        match self {
            Self::Paused => rack.host(host).resume().unwrap(),
            Self::CutOff => rack.host(host).set_link(true).unwrap(),
            Self::NoManager => rack.rack.start_manager().unwrap(),
        }
        rack.rack.wait_hosts_up(|| true).unwrap();
    }

    /// Lasts for longer than a lease: nothing of the host's moves meanwhile.
    fn pass(self, rack: &mut RealRack, host: usize, meanwhile: impl FnOnce(&RealRack)) {
        self.begin(rack, host);
        let before = (self != Self::NoManager).then(|| kept(rack, host));
        meanwhile(rack);
        thread::sleep(STILL);
        if let Some(before) = before {
            assert_eq!(kept(rack, host), before, "{self:?}");
        }
        self.end(rack, host);
    }
}

/// Life of a VM on h0, with a silence in every part.
fn live_through(rack: &mut RealRack, silence: Silence) {
    let vm = &format!("{silence:?}").to_lowercase();
    rack.tarn(&format!("reserve --host h0 --vm {vm} --pool 2GiB --cores 1 --request-id {vm}"));
    silence.pass(rack, 0, |_| {});
    rack.tarn(&format!("wait-ready {vm}"));
    rack.tarn(&format!("commit {vm}"));
    assert_eq!(rack.start_vm(0, vm, TOUCH_MIB), [0; 0]);

    silence.pass(rack, 0, |rack| assert!(rack.kernel(1).is_empty()));
    assert_eq!(rack.kernel(0).len(), 2);

    rack.tarn(&format!("release {vm}"));
    rack.until("it is being taken back", |rack| count(rack, "draining") == 2);
    let mut left = Vec::new();
    silence.pass(rack, 0, |rack| {
        if silence != Silence::Paused {
            left.extend(rack.end_vm(0, vm));
        }
    });
    if silence == Silence::Paused {
        left.extend(rack.end_vm(0, vm));
    }
    assert_eq!(left, [0; 0], "another's bytes over its own, {silence:?}");

    let scrubber = scrubber(rack);
    silence.pass(rack, scrubber, |_| {});
    rack.until_free();
    rack.assert_agreed();
}

/// A VM on a host whose slices belonged to another: they arrive zeroed, and are released.
fn use_all(rack: &RealRack, host: usize, vm: &str) {
    rack.reserve(host, vm, 2);
    assert_eq!(rack.start_vm(host, vm, TOUCH_MIB), [0; 0], "bytes of the VM before");
    assert_eq!(rack.end_vm(host, vm), [0; 0], "another's bytes over its own");
    rack.until_free();
}

/// Final state of every scenario.
fn end(rack: RealRack, looks: usize) {
    println!("no slice was on two hosts in {looks} looks");
    assert!(looks > 5);
    rack.assert_agreed();
    rack.assert_zero();
}

#[test]
fn a_silence_longer_than_a_lease_moves_nothing_and_everything_goes_on_where_it_was_with_device_dax() {
    live_through_all("dax");
}

#[test]
fn a_silence_longer_than_a_lease_moves_nothing_and_everything_goes_on_where_it_was_with_memory_blocks() {
    live_through_all("memory_block");
}

fn live_through_all(backend: &str) {
    let mut rack = RealRack::start(faulty(backend));
    let watch = rack.watch();
    for silence in [Silence::Paused, Silence::CutOff, Silence::NoManager] {
        live_through(&mut rack, silence);
    }
    use_all(&rack, 1, "after");
    end(rack, watch.end());
}

#[test]
fn a_host_that_starts_again_has_let_go_of_its_slices_and_they_are_scrubbed() {
    let mut rack = RealRack::start(faulty("memory_block"));
    let watch = rack.watch();
    rack.reserve(0, "lost", 2);
    assert_eq!(rack.start_vm(0, "lost", TOUCH_MIB), [0; 0]);
    rack.host_mut(0).power_off().unwrap();
    rack.until_host(0, "unknown");
    thread::sleep(STILL);
    assert_eq!(places(&rack), vec![("online".to_owned(), "h0".to_owned()); 2]);
    rack.host_mut(0).power_on().unwrap();
    rack.until_free();
    use_all(&rack, 0, "after");
    end(rack, watch.end());
}

#[test]
fn a_host_without_power_or_paused_past_its_lease_is_stopped_by_command_and_its_slices_live_again() {
    let mut rack = RealRack::start(RackPlan { fence_after_s: FENCE_AFTER_S, ..faulty("dax") });
    let watch = rack.watch();
    for (n, strike) in [without_power, paused, paused_while_it_scrubs].into_iter().enumerate() {
        let lost = strike(&mut rack, &format!("lost{n}"));
        rack.until_host(lost, "fenced");
        assert!(!rack.host(lost).is_on().unwrap(), "it never touches memory again");
        rack.until_free();
        rack.host_mut(lost).power_on().unwrap();
        rack.until_host(lost, "up");
    }
    use_all(&rack, 0, "after");
    end(rack, watch.end());
}

/// A VM on h0 that finds zeros and writes into its slices.
fn start_on_h0(rack: &RealRack, vm: &str, slices: u32) {
    rack.reserve(0, vm, slices);
    assert_eq!(rack.start_vm(0, vm, TOUCH_MIB), [0; 0], "bytes of the VM before");
}

fn without_power(rack: &mut RealRack, vm: &str) -> usize {
    start_on_h0(rack, vm, 2);
    rack.host_mut(0).power_off().unwrap();
    0
}

fn paused(rack: &mut RealRack, vm: &str) -> usize {
    start_on_h0(rack, vm, 2);
    rack.host(0).pause().unwrap();
    0
}

fn paused_while_it_scrubs(rack: &mut RealRack, vm: &str) -> usize {
    start_on_h0(rack, vm, 2);
    assert_eq!(rack.end_vm(0, vm), [0; 0]);
    let host = scrubber(rack);
    rack.host(host).pause().unwrap();
    host
}

#[test]
fn a_host_that_cannot_be_stopped_keeps_its_slices_until_it_gives_them_back_or_somebody_vouches_for_it() {
    let mut plan = RackPlan { fence_after_s: FENCE_AFTER_S, ..faulty("dax") };
    plan.programs.power_off = Path::new("false").to_owned();
    let mut rack = RealRack::start(plan);
    let watch = rack.watch();
    for words in ["fence h0", "fence h0 --confirm-powered-off"] {
        let refused = rack.try_tarn(words);
        assert!(!refused.status.success(), "{words}: its agent speaks: {refused:?}");
    }

    start_on_h0(&rack, "kept", 1);
    rack.host(0).pause().unwrap();
    keeps_its_slice(&rack, "beside1");
    rack.host(0).resume().unwrap();
    rack.until_host(0, "up");
    rack.until_free();
    assert_eq!(
        rack.run(0, "kill -0 $(cat /run/kept.pid) 2> /dev/null; echo $?").trim(),
        "1",
        "its VM is ended"
    );
    rack.run(0, "kill $(cat /run/kept.sleep); rm /run/kept.*");
    use_all(&rack, 0, "again");

    start_on_h0(&rack, "off", 1);
    rack.host_mut(0).power_off().unwrap();
    keeps_its_slice(&rack, "beside2");
    assert!(rack.try_tarn("fence h0").status.success(), "it is being cut off already");
    thread::sleep(STILL);
    assert_eq!(count(&rack, "free"), 1);
    rack.tarn("fence h0 --confirm-powered-off");
    rack.until_host(0, "fenced");
    rack.until_free();
    rack.host_mut(0).power_on().unwrap();
    rack.until_host(0, "up");
    use_all(&rack, 0, "back");
    end(rack, watch.end());
}

/// The slice of h0 stays with it; h1 can use the other one.
fn keeps_its_slice(rack: &RealRack, beside: &str) {
    rack.until("that h0 could not be stopped is told", |rack| {
        rack.tarn("get alarms").contains("HOST_NOT_FENCED") && rack.host_state(0) == "fencing"
    });
    rack.reserve(1, beside, 1);
    assert_eq!(rack.start_vm(1, beside, TOUCH_MIB), [0; 0]);
    let more = rack.try_tarn("reserve --host h1 --vm more --pool 1GiB --cores 1 --request-id more");
    assert!(!more.status.success(), "there is no other");
    assert_eq!(rack.end_vm(1, beside), [0; 0]);
    rack.until("the other slice is free again", |rack| count(rack, "free") == 1);
    thread::sleep(STILL);
    assert!(places(rack).contains(&("draining".to_owned(), "h0".to_owned())), "{:?}", places(rack));
}
