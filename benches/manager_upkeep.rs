//! Measures the manager's CPU time per event, in racks of up to 1,000 hosts, 64 EMCs and 65,536
//! slices.
//!
//! Goal: the number of slices in use adds at most 1 ms to the time of an event.
//!
//! Prints the CPU time as `time NAME_SIZE VALUE us` for each size of the rack. Then prints `growth
//! NAME EXPONENT`: the time grows in proportion to the size to the power of EXPONENT.

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
    slice::{DrainStage, Owner, Quarantine, Scrub, State},
};
use pool_manager::plan::{self, Split};
use rack::{InitialState, RackSize, SimulatedRack, name, request_key};
use units::{Bytes, Ns};

/// Allocator that pool-manager uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LARGEST_SIZE: RackSize = RackSize { hosts: 1000, emcs: 64, slices: 65_536 };
const HOST_COUNTS: [u32; 3] = [10, 100, 1000];
const EMC_COUNTS: [u32; 3] = [4, 16, 64];
const SLICE_COUNTS: [u32; 3] = [1024, 16_384, 65_536];
/// Measured numbers of slices in use. The largest number leaves free slices for the measured
/// reservations.
const FILLED_SLICE_COUNTS: [u32; 3] = [1024, 16_384, 60_000];
/// Number of slices of each VM in the racks with [`FILLED_SLICE_COUNTS`] slices in use. An odd number
/// spreads the VMs evenly over the hosts. The number is large enough to stay within the limit of
/// VMs per host.
const FILLED_VM_SLICES: u32 = 15;
const VM_SLICE_COUNTS: [u32; 3] = [64, 512, 4096];
/// Number of events that each sample measures.
const EVENT_COUNT: u64 = 200;
/// Number of measured upkeep rounds.
const UPKEEP_ROUNDS: usize = 16;

fn main() {
    measure_sizes("tick_hosts", HOST_COUNTS, |hosts| measure_tick(&mut idle_rack(hosts)));
    measure_sizes("heartbeat_hosts", HOST_COUNTS, |hosts| measure_heartbeat(&mut idle_rack(hosts)));
    measure_sizes("plan_offers_hosts", HOST_COUNTS, |hosts| measure_plan_offers(&idle_rack(hosts)));
    measure_sizes("tick_unanswered_hosts", HOST_COUNTS, |hosts| {
        measure_tick(&mut rack_with_pending_orders(hosts))
    });
    measure_sizes("tick_unfenced_hosts", HOST_COUNTS, |hosts| {
        measure_tick(&mut rack_with_unfenced_hosts(hosts))
    });
    measure_sizes("heartbeat_unfenced_connected_hosts", HOST_COUNTS, |hosts| {
        measure_heartbeat(&mut rack_with_reconnected_hosts(hosts))
    });
    measure_sizes("tick_held_slices", SLICE_COUNTS, |slices| {
        measure_tick(
            &mut SimulatedRack::new(InitialState::with_used_slices(LARGEST_SIZE, slices, 8)).into_settled(),
        )
    });
    measure_sizes("tick_quarantined_slices", SLICE_COUNTS, |slices| {
        measure_tick(&mut rack_with_quarantined_slices(slices))
    });
    measure_sizes("compare_emc_held_slices", SLICE_COUNTS, measure_emc_comparison);
    measure_sizes("choose_scrubbers_emcs", EMC_COUNTS, measure_scrubber_choice);
    measure_sizes("choose_scrubbers_none_free_emcs", EMC_COUNTS, |emcs| {
        measure_tick(&mut rack_without_idle_scrubbers(emcs))
    });
    measure_sizes("release_restored_slices", SLICE_COUNTS, measure_restored_release);
    measure_sizes("ready_vm_slices", VM_SLICE_COUNTS, measure_ready_vm);
    reports::measure();
    lists::measure();
    measure_sizes("reserve_until_ready_held_slices", FILLED_SLICE_COUNTS, measure_reserve_until_ready);
    measure_sizes("reserve_longest_event_held_slices", FILLED_SLICE_COUNTS, measure_longest_reserve_event);
}

/// Runs `measure` for each size, and prints the times and their growth exponent. Skips `name` if it
/// contains none of the substrings in the command-line arguments.
fn measure_sizes(name: &str, sizes: [u32; 3], measure: impl Fn(u32) -> f64) {
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

fn to_us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn median_us(times: impl IntoIterator<Item = Duration>) -> f64 {
    let mut rounds = Rounds::default();
    times.into_iter().for_each(|time| rounds.add(to_us(time)));
    rounds.median()
}

fn longest_us(times: impl IntoIterator<Item = Duration>) -> f64 {
    to_us(times.into_iter().max().unwrap_or_default())
}

impl SimulatedRack {
    /// Processes all pending events, and discards their durations.
    fn into_settled(mut self) -> Self {
        self.settle();
        self.take_times();
        self
    }
}

fn measure_tick(rack: &mut SimulatedRack) -> f64 {
    median_us((0..EVENT_COUNT).map(|_| {
        rack.advance(Ns(1000));
        rack.handle_event(Event::Tick)
    }))
}

fn measure_heartbeat(rack: &mut SimulatedRack) -> f64 {
    median_us((0..EVENT_COUNT).map(|_| rack.send_heartbeat(0)))
}

/// Measures the part of a `PlanVm` call that runs under the manager's lock.
fn measure_plan_offers(rack: &SimulatedRack) -> f64 {
    let split = Split { local: Bytes::gib(4), pool: Bytes::slices(2) };
    median_us((0..EVENT_COUNT).map(|_| rack.time_read(|manager| plan::candidates(manager, split))))
}

/// Returns a rack with half of its slices in use and no pending work.
fn idle_rack(hosts: u32) -> SimulatedRack {
    SimulatedRack::new(InitialState::with_used_slices(
        RackSize { hosts, ..LARGEST_SIZE },
        LARGEST_SIZE.slices / 2,
        8,
    ))
    .into_settled()
}

/// Returns a rack in which each host has an unacknowledged desired state and further changes. All
/// slices are free initially, because each host reserves two slices.
fn rack_with_pending_orders(hosts: u32) -> SimulatedRack {
    let mut rack =
        SimulatedRack::new(InitialState::with_used_slices(RackSize { hosts, ..LARGEST_SIZE }, 0, 8))
            .into_settled();
    for turn in 0..2 {
        for host in 0..hosts {
            rack.submit_request(reserve(&format!("change-{turn}-{host}"), host, 1, None));
        }
        while rack.complete_store_batch() || rack.complete_device_calls() {}
        rack.advance(Ns::ms(20));
        rack.handle_event(Event::Tick);
    }
    rack
}

/// Returns a rack whose hosts all own slices of shared EMCs. Each attempt to fence a host fails.
fn rack_with_unfenced_hosts(hosts: u32) -> SimulatedRack {
    let size = RackSize { hosts, ..LARGEST_SIZE };
    let fence = Fence::Fencing { powered_off: false };
    let state = |owner| State::Draining(owner, DrainStage::Host { force: false });
    let start = InitialState {
        fence,
        state,
        is_shared: true,
        ..InitialState::with_used_slices(size, size.slices, 0)
    };
    let mut rack = SimulatedRack::new(start).into_settled();
    rack.advance(Ns::secs(3601));
    rack.handle_event(Event::Tick);
    let rack = rack.into_settled();
    let alarms = rack.manager.alarms();
    assert!(alarms.iter().any(|alarm| alarm.reason == "HOST_NOT_FENCED"), "{alarms:?}");
    rack
}

/// Returns the rack of [`rack_with_unfenced_hosts`] after all agents have reconnected, so that no
/// host needs fencing.
fn rack_with_reconnected_hosts(hosts: u32) -> SimulatedRack {
    let mut rack = rack_with_unfenced_hosts(hosts);
    rack.connect();
    rack.into_settled()
}

fn rack_with_quarantined_slices(slices: u32) -> SimulatedRack {
    let state = |_| State::Quarantined(Quarantine::LostGrant);
    SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(LARGEST_SIZE, slices, 0) })
        .into_settled()
}

/// Measures the longest event while 64 EMCs of 1,024 slices are compared with the ledger. `used`
/// slices are in use.
fn measure_emc_comparison(used: u32) -> f64 {
    let mut rack = SimulatedRack::new(InitialState::with_used_slices(LARGEST_SIZE, used, 8));
    rack.take_times();
    rack.compare_devices();
    longest_us(rack.take_times())
}

/// Measures upkeep rounds in a rack where slices of all EMCs wait for scrubbers and all hosts are
/// idle.
fn measure_scrubber_choice(emcs: u32) -> f64 {
    measure_upkeep_round_us(&mut rack_waiting_for_scrubbers(emcs))
}

fn measure_upkeep_round_us(rack: &mut SimulatedRack) -> f64 {
    median_us((0..UPKEEP_ROUNDS).map(|_| {
        rack.complete_store_batch();
        rack.advance(Ns::ms(20));
        rack.handle_event(Event::Tick)
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
            rack.handle_event(Event::Tick);
            rack.advance(Ns::ms(20));
            rack.complete_store_batch();
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
    let size = RackSize { emcs, ..LARGEST_SIZE };
    let mut rack =
        SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(size, size.slices, 0) });
    rack.compare_devices();
    rack.take_times();
    rack
}

/// Measures upkeep rounds that release slices which no host has claimed since a restore of the
/// ledger from a backup.
fn measure_restored_release(slices: u32) -> f64 {
    let state = |_: Owner| State::Quarantined(Quarantine::Restored { host: None });
    let mut rack =
        SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(LARGEST_SIZE, slices, 4) });
    rack.compare_devices();
    measure_upkeep_round_us(&mut rack)
}

/// Measures the longest event while a VM of `slices` slices becomes ready for a waiting caller, and
/// returns the duration of this event divided by `slices`.
fn measure_ready_vm(slices: u32) -> f64 {
    let size = RackSize { hosts: 16, emcs: 4, slices: 65_536 };
    let mut rack = SimulatedRack::new(InitialState::with_used_slices(size, 0, 0)).into_settled();
    rack.submit_request(reserve("large", 0, slices, Some(Ns::secs(300))));
    rack.settle();
    assert_eq!(rack.replies, 1, "the waiting caller must get exactly one reply");
    longest_us(rack.take_times()) / f64::from(slices)
}

fn rack_with_small_hosts(slices: u32) -> SimulatedRack {
    let size = RackSize { hosts: 4, emcs: 4, slices: 65_536 };
    SimulatedRack::new(InitialState::with_used_slices(size, slices, FILLED_VM_SLICES)).into_settled()
}

fn reserve_one_by_one(rack: &mut SimulatedRack) -> Vec<Duration> {
    rack.take_times();
    for number in 0..EVENT_COUNT {
        rack.submit_request(reserve(&format!("one-{number}"), (number % 4) as u32, 1, None));
        rack.settle();
    }
    rack.take_times()
}

/// Returns the mean time of all events that a one-slice reservation causes until the slice is
/// online, with `slices` slices in use on four hosts.
fn measure_reserve_until_ready(slices: u32) -> f64 {
    let times = reserve_one_by_one(&mut rack_with_small_hosts(slices));
    to_us(times.into_iter().sum()) / EVENT_COUNT as f64
}

/// Returns the duration of the longest event while one-slice reservations become online, with
/// `slices` slices in use on four hosts.
fn measure_longest_reserve_event(slices: u32) -> f64 {
    longest_us(reserve_one_by_one(&mut rack_with_small_hosts(slices)))
}

fn reserve(vm: &str, host: u32, slices: u32, wait: Option<Ns>) -> Request {
    let reserve = Reserve {
        request: request_key(vm),
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
