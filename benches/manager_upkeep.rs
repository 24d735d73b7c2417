//! Measures the manager's CPU time per event, in racks of up to 1,000 hosts, 64 EMCs and 65,536
//! slices.
//!
//! Goal: an event costs at most 1 ms more than its content requires, for any number of slices in
//! use.
//!
//! Prints `time NAME_SIZE VALUE us` (CPU time) for each size of the rack. Then prints `growth NAME
//! EXPONENT`, where the time grows in proportion to the size to the power of EXPONENT.

#[path = "manager_upkeep/lists.rs"]
mod lists;
#[path = "manager_upkeep/rack.rs"]
mod rack;
#[path = "manager_upkeep/reports.rs"]
mod reports;

use std::time::Duration;

use benches::report::Rounds;
use pool::{
    ledger::Reserve,
    manager::{Event, Request},
    record::Fence,
    slice::{Drain, Owner, Quarantine, Scrub, State},
};
use pool_manager::plan::{self, Split};
use rack::{InitialState, RackSize, SimulatedRack, name, request};
use units::{Bytes, Ns};

/// Allocator that pool-manager uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const FULL: RackSize = RackSize { hosts: 1000, emcs: 64, slices: 65_536 };
const HOSTS: [u32; 3] = [10, 100, 1000];
const EMCS: [u32; 3] = [4, 16, 64];
const SLICES: [u32; 3] = [1024, 16_384, 65_536];
/// Measured numbers of slices in use. The largest number leaves free slices for the measured
/// reservations.
const FILLED: [u32; 3] = [1024, 16_384, 60_000];
/// Number of slices of each VM in the racks with [`FILLED`] slices in use. An odd number spreads
/// the VMs evenly over the hosts. It is large enough to stay within the limit of VMs per host.
const FILLED_VM_SLICES: u32 = 15;
const VM_SLICES: [u32; 3] = [64, 512, 4096];
/// Number of events that each sample measures.
const EVENTS: u64 = 200;
/// Number of measured upkeep rounds.
const UPKEEP_ROUNDS: usize = 16;

fn main() {
    sweep("tick_hosts", HOSTS, |hosts| tick(&mut idle_rack(hosts)));
    sweep("heartbeat_hosts", HOSTS, |hosts| heartbeat(&mut idle_rack(hosts)));
    sweep("plan_offers_hosts", HOSTS, |hosts| plan_offers(&idle_rack(hosts)));
    sweep("tick_unanswered_hosts", HOSTS, |hosts| tick(&mut rack_with_pending_orders(hosts)));
    sweep("tick_unfenced_hosts", HOSTS, |hosts| tick(&mut rack_with_unfenced_hosts(hosts)));
    sweep("heartbeat_unfenced_connected_hosts", HOSTS, |hosts| {
        heartbeat(&mut rack_with_reconnected_hosts(hosts))
    });
    sweep("tick_held_slices", SLICES, |slices| {
        tick(&mut SimulatedRack::new(InitialState::with_used_slices(FULL, slices, 8)).settled())
    });
    sweep("tick_quarantined_slices", SLICES, |slices| tick(&mut rack_with_quarantined_slices(slices)));
    sweep("compare_emc_held_slices", SLICES, compare_emc);
    sweep("choose_scrubbers_emcs", EMCS, choose_scrubbers);
    sweep("choose_scrubbers_none_free_emcs", EMCS, |emcs| tick(&mut rack_without_idle_scrubbers(emcs)));
    sweep("release_restored_slices", SLICES, release_restored);
    sweep("ready_vm_slices", VM_SLICES, ready_vm);
    reports::measure();
    lists::measure();
    sweep("reserve_until_ready_held_slices", FILLED, reserve_until_ready);
    sweep("reserve_longest_event_held_slices", FILLED, reserve_longest_event);
}

/// Runs `measure` for each size, and prints the times and their growth exponent. Skips `name` if it
/// contains none of the substrings in the command-line arguments.
fn sweep(name: &str, sizes: [u32; 3], measure: impl Fn(u32) -> f64) {
    let mut filters = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).peekable();
    if filters.peek().is_some() && !filters.any(|part| name.contains(&part)) {
        return;
    }
    let times = sizes.map(|size| {
        let us = measure(size);
        println!("time {name}_{size} {us:.1} us");
        us
    });
    let points: Vec<(f64, f64)> =
        sizes.iter().zip(times).map(|(size, us)| (f64::from(*size).ln(), us.ln())).collect();
    println!("growth {name} {:.2}", slope(&points));
}

/// Returns the slope of a least-squares line through (x, y) points.
fn slope(points: &[(f64, f64)]) -> f64 {
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let variance: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    covariance / variance
}

fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn median_us(times: impl IntoIterator<Item = Duration>) -> f64 {
    let mut rounds = Rounds::default();
    times.into_iter().for_each(|time| rounds.add(us(time)));
    rounds.median()
}

fn longest_us(times: impl IntoIterator<Item = Duration>) -> f64 {
    us(times.into_iter().max().unwrap_or_default())
}

impl SimulatedRack {
    /// Processes all pending events, and discards their durations.
    fn settled(mut self) -> Self {
        self.settle();
        self.take_times();
        self
    }
}

fn tick(rack: &mut SimulatedRack) -> f64 {
    median_us((0..EVENTS).map(|_| {
        rack.advance(Ns(1000));
        rack.event(Event::Tick)
    }))
}

fn heartbeat(rack: &mut SimulatedRack) -> f64 {
    median_us((0..EVENTS).map(|_| rack.heartbeat(0)))
}

/// Measures the part of a `PlanVm` call that runs under the manager's lock.
fn plan_offers(rack: &SimulatedRack) -> f64 {
    let split = Split { local: Bytes::gib(4), pool: Bytes::slices(2) };
    median_us((0..EVENTS).map(|_| rack.time_read(|manager| plan::candidates(manager, split))))
}

/// Returns a rack with half of its slices in use and no pending work.
fn idle_rack(hosts: u32) -> SimulatedRack {
    SimulatedRack::new(InitialState::with_used_slices(RackSize { hosts, ..FULL }, FULL.slices / 2, 8))
        .settled()
}

/// Returns a rack in which each host has an unacknowledged desired state and further changes. All
/// slices are free initially, because each host reserves two.
fn rack_with_pending_orders(hosts: u32) -> SimulatedRack {
    let mut rack =
        SimulatedRack::new(InitialState::with_used_slices(RackSize { hosts, ..FULL }, 0, 8)).settled();
    for turn in 0..2 {
        for host in 0..hosts {
            rack.submit(reserve(&format!("change-{turn}-{host}"), host, 1, None));
        }
        while rack.store() || rack.complete_device_calls() {}
        rack.advance(Ns::ms(20));
        rack.event(Event::Tick);
    }
    rack
}

/// Returns a rack in which all hosts own slices of shared EMCs, and fencing of each host fails.
fn rack_with_unfenced_hosts(hosts: u32) -> SimulatedRack {
    let size = RackSize { hosts, ..FULL };
    let fence = Fence::Fencing { powered_off: false };
    let state = |owner| State::Draining(owner, Drain::Host { force: false });
    let start = InitialState {
        fence,
        state,
        is_shared: true,
        ..InitialState::with_used_slices(size, size.slices, 0)
    };
    let mut rack = SimulatedRack::new(start).settled();
    rack.advance(Ns::secs(3601));
    rack.event(Event::Tick);
    let rack = rack.settled();
    let alarms = rack.manager.alarms();
    assert!(alarms.iter().any(|alarm| alarm.reason == "HOST_NOT_FENCED"), "{alarms:?}");
    rack
}

/// Returns the rack of [`rack_with_unfenced_hosts`] after all agents have reconnected, so that no
/// host needs fencing.
fn rack_with_reconnected_hosts(hosts: u32) -> SimulatedRack {
    let mut rack = rack_with_unfenced_hosts(hosts);
    rack.connect();
    rack.settled()
}

fn rack_with_quarantined_slices(slices: u32) -> SimulatedRack {
    let state = |_| State::Quarantined(Quarantine::LostGrant);
    SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(FULL, slices, 0) }).settled()
}

/// Measures the longest event while 64 EMCs of 1,024 slices are compared with the ledger, of which
/// `used` slices are in use.
fn compare_emc(used: u32) -> f64 {
    let mut rack = SimulatedRack::new(InitialState::with_used_slices(FULL, used, 8));
    rack.take_times();
    rack.compare_devices();
    longest_us(rack.take_times())
}

/// Measures upkeep rounds in a rack where slices of all EMCs wait for scrubbers and all hosts are
/// idle.
fn choose_scrubbers(emcs: u32) -> f64 {
    upkeep_round_us(&mut rack_waiting_for_scrubbers(emcs))
}

fn upkeep_round_us(rack: &mut SimulatedRack) -> f64 {
    median_us((0..UPKEEP_ROUNDS).map(|_| {
        rack.store();
        rack.advance(Ns::ms(20));
        rack.event(Event::Tick)
    }))
}

/// Returns a rack in which slices of all EMCs wait for scrubbers, and no host can take another
/// scrub.
fn rack_without_idle_scrubbers(emcs: u32) -> SimulatedRack {
    let mut rack = rack_waiting_for_scrubbers(emcs);
    let scrubs = |rack: &SimulatedRack| {
        rack.manager.durable().hosts().map(|(_, host)| host.scrubbing()).sum::<usize>()
    };
    let mut before = 0;
    loop {
        (0..UPKEEP_ROUNDS).for_each(|_| {
            rack.event(Event::Tick);
            rack.advance(Ns::ms(20));
            rack.store();
        });
        let now = scrubs(&rack);
        if now == before {
            return rack;
        }
        before = now;
    }
}

/// Returns a rack in which all slices wait for scrubbers, and the contents of all devices have been
/// compared with the ledger.
fn rack_waiting_for_scrubbers(emcs: u32) -> SimulatedRack {
    let state = |_| State::Scrubbing(Scrub::Waiting);
    let size = RackSize { emcs, ..FULL };
    let mut rack =
        SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(size, size.slices, 0) });
    rack.compare_devices();
    rack.take_times();
    rack
}

/// Measures upkeep rounds that release slices which no host has claimed since a restore of the
/// ledger from a backup.
fn release_restored(slices: u32) -> f64 {
    let state = |_: Owner| State::Quarantined(Quarantine::Restored { host: None });
    let mut rack =
        SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(FULL, slices, 4) });
    rack.compare_devices();
    upkeep_round_us(&mut rack)
}

/// Measures the longest event while a VM of `slices` slices becomes ready for a waiting caller, and
/// returns its duration divided by `slices`.
fn ready_vm(slices: u32) -> f64 {
    let size = RackSize { hosts: 16, emcs: 4, slices: 65_536 };
    let mut rack = SimulatedRack::new(InitialState::with_used_slices(size, 0, 0)).settled();
    rack.submit(reserve("large", 0, slices, Some(Ns::secs(300))));
    rack.settle();
    assert_eq!(rack.replies, 1, "the waiting caller must get exactly one reply");
    longest_us(rack.take_times()) / f64::from(slices)
}

fn rack_with_small_hosts(slices: u32) -> SimulatedRack {
    let size = RackSize { hosts: 4, emcs: 4, slices: 65_536 };
    SimulatedRack::new(InitialState::with_used_slices(size, slices, FILLED_VM_SLICES)).settled()
}

fn reserve_one_by_one(rack: &mut SimulatedRack) -> Vec<Duration> {
    rack.take_times();
    for number in 0..EVENTS {
        rack.submit(reserve(&format!("one-{number}"), (number % 4) as u32, 1, None));
        rack.settle();
    }
    rack.take_times()
}

/// Returns the mean time of all events that a one-slice reservation causes until the slice is
/// online, with `slices` slices in use on four hosts.
fn reserve_until_ready(slices: u32) -> f64 {
    let times = reserve_one_by_one(&mut rack_with_small_hosts(slices));
    us(times.into_iter().sum()) / EVENTS as f64
}

/// Returns the duration of the longest event while one-slice reservations become online, with
/// `slices` slices in use on four hosts.
fn reserve_longest_event(slices: u32) -> f64 {
    longest_us(reserve_one_by_one(&mut rack_with_small_hosts(slices)))
}

fn reserve(vm: &str, host: u32, slices: u32, wait: Option<Ns>) -> Request {
    let reserve = Reserve {
        request: request(vm),
        host: name(&format!("h{host}")),
        vm: name(vm),
        slices,
        local: Bytes::ZERO,
        cores: 0,
        pinned: false,
        commit_within: Ns::secs(3000),
        uid: None,
    };
    Request::Reserve { reserve, wait }
}
