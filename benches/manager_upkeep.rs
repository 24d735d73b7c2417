//! Measures the processor time of the manager per event at growing sizes of the rack, up to 1,000 hosts, 64 EMCs and 65,536
//! slices. The aim: at most 1 ms beyond the time that an event's own content takes, and none of it grows with the slices in use.
//!
//! Prints `time NAME VALUE us` (processor time) per size and `growth NAME EXPONENT`, the power of the size with which the time grows.

#[path = "manager_upkeep/lists.rs"]
mod lists;
#[path = "manager_upkeep/reports.rs"]
mod reports;
#[path = "manager_upkeep/world.rs"]
mod world;

use std::time::Duration;

use benches::report::Rounds;
use pool::{
    ledger::Reserve,
    manager::{Ask, Event},
    record::Fence,
    slice::{Drain, Owner, Quarantine, Scrub, State},
};
use pool_manager::plan::{self, Split};
use units::{Bytes, Ns};
use world::{Shape, Start, World, name, request};

/// As in pool-manager.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const FULL: Shape = Shape { hosts: 1000, emcs: 64, slices: 65_536 };
const HOSTS: [u32; 3] = [10, 100, 1000];
const EMCS: [u32; 3] = [4, 16, 64];
const SLICES: [u32; 3] = [1024, 16_384, 65_536];
/// A rack that is filled leaves room for the reservations that are measured.
const FILLED: [u32; 3] = [1024, 16_384, 60_000];
/// Slices of each VM there. Odd, so that all hosts have as many VMs, and large enough for the limit of VMs on a host.
const FILLED_VM_SLICES: u32 = 15;
const VM_SLICES: [u32; 3] = [64, 512, 4096];
/// Events of one kind that are measured.
const EVENTS: u64 = 200;
/// Rounds of choosing scrubbers and of releasing slices after a restore that are measured.
const UPKEEP_ROUNDS: usize = 16;

fn main() {
    sweep("tick_hosts", HOSTS, |hosts| tick(&mut idle(hosts)));
    sweep("heartbeat_hosts", HOSTS, |hosts| heartbeat(&mut idle(hosts)));
    sweep("plan_offers_hosts", HOSTS, |hosts| plan_offers(&idle(hosts)));
    sweep("tick_unanswered_hosts", HOSTS, |hosts| tick(&mut unanswered(hosts)));
    sweep("tick_unfenced_hosts", HOSTS, |hosts| tick(&mut unfenced(hosts)));
    sweep("heartbeat_unfenced_connected_hosts", HOSTS, |hosts| heartbeat(&mut unfenced_connected(hosts)));
    sweep("tick_held_slices", SLICES, |slices| tick(&mut World::new(Start::held(FULL, slices, 8)).ready()));
    sweep("tick_quarantined_slices", SLICES, |slices| tick(&mut quarantined(slices)));
    sweep("compare_emc_held_slices", SLICES, compare_emc);
    sweep("choose_scrubbers_emcs", EMCS, choose_scrubbers);
    sweep("choose_scrubbers_none_free_emcs", EMCS, |emcs| tick(&mut scrubbing(emcs)));
    sweep("release_restored_slices", SLICES, release_restored);
    sweep("ready_vm_slices", VM_SLICES, ready_vm);
    reports::measure();
    lists::measure();
    sweep("reserve_until_ready_held_slices", FILLED, reserve_until_ready);
    sweep("reserve_longest_event_held_slices", FILLED, reserve_longest_event);
}

/// Measures at growing sizes and prints the times and their growth, if the command line names it or nothing.
fn sweep(name: &str, sizes: [u32; 3], measure: impl Fn(u32) -> f64) {
    let mut wanted = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).peekable();
    if wanted.peek().is_some() && !wanted.any(|part| name.contains(&part)) {
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

/// The slope of the straight line through some points.
fn slope(points: &[(f64, f64)]) -> f64 {
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let alone: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    together / alone
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

impl World {
    /// Completes everything that follows from the start, and discards its times.
    fn ready(mut self) -> Self {
        self.go();
        self.take_times();
        self
    }
}

fn tick(world: &mut World) -> f64 {
    median_us((0..EVENTS).map(|_| {
        world.pass(Ns(1000));
        world.event(Event::Tick)
    }))
}

fn heartbeat(world: &mut World) -> f64 {
    median_us((0..EVENTS).map(|_| world.heartbeat(0)))
}

/// The part of `PlanVm` that holds the lock.
fn plan_offers(world: &World) -> f64 {
    let split = Split { local: Bytes::gib(4), pool: Bytes::slices(2) };
    median_us((0..EVENTS).map(|_| world.look(|manager| plan::offers(manager, split))))
}

/// A rack that is half full, and nothing happens.
fn idle(hosts: u32) -> World {
    World::new(Start::held(Shape { hosts, ..FULL }, FULL.slices / 2, 8)).ready()
}

/// Every host has an order that it has not answered, and more news. All slices are free before: each host needs two.
fn unanswered(hosts: u32) -> World {
    let mut world = World::new(Start::held(Shape { hosts, ..FULL }, 0, 8)).ready();
    for turn in 0..2 {
        for host in 0..hosts {
            world.ask(reserve(&format!("news-{turn}-{host}"), host, 1, None));
        }
        while world.store() || world.answer_devices() {}
        world.pass(Ns::ms(20));
        world.event(Event::Tick);
    }
    world
}

/// Every host is to be cut off shared EMCs on which it holds slices, and none can be.
fn unfenced(hosts: u32) -> World {
    let shape = Shape { hosts, ..FULL };
    let fence = Fence::Fencing { powered_off: false };
    let state = |owner| State::Draining(owner, Drain::Host { force: false });
    let start = Start { fence, state, is_shared: true, ..Start::held(shape, shape.slices, 0) };
    let mut world = World::new(start).ready();
    world.pass(Ns::secs(3601));
    world.event(Event::Tick);
    let world = world.ready();
    let alarms = world.manager.alarms();
    assert!(alarms.iter().any(|alarm| alarm.reason == "HOST_NOT_FENCED"), "{alarms:?}");
    world
}

/// The agents of these hosts are connected again, so that no machine is to be stopped.
fn unfenced_connected(hosts: u32) -> World {
    let mut world = unfenced(hosts);
    world.connect();
    world.ready()
}

fn quarantined(slices: u32) -> World {
    let state = |_| State::Quarantined(Quarantine::LostGrant);
    World::new(Start { state, ..Start::held(FULL, slices, 0) }).ready()
}

/// The longest event while 64 EMCs of 1,024 slices are compared with the ledger.
fn compare_emc(held: u32) -> f64 {
    let mut world = World::new(Start::held(FULL, held, 8));
    world.take_times();
    world.compare_devices();
    longest_us(world.take_times())
}

/// A round of upkeep while slices of all EMCs wait for scrubbers and all hosts are idle.
fn choose_scrubbers(emcs: u32) -> f64 {
    round(&mut waiting(emcs))
}

fn round(world: &mut World) -> f64 {
    median_us((0..UPKEEP_ROUNDS).map(|_| {
        world.store();
        world.pass(Ns::ms(20));
        world.event(Event::Tick)
    }))
}

/// Slices of all EMCs wait for scrubbers, and no host has room for one more.
fn scrubbing(emcs: u32) -> World {
    let mut world = waiting(emcs);
    let scrubs =
        |world: &World| world.manager.durable().hosts().map(|(_, host)| host.scrubbing()).sum::<usize>();
    let mut before = 0;
    loop {
        (0..UPKEEP_ROUNDS).for_each(|_| {
            world.event(Event::Tick);
            world.pass(Ns::ms(20));
            world.store();
        });
        let now = scrubs(&world);
        if now == before {
            return world;
        }
        before = now;
    }
}

/// All slices wait, and the devices have been compared.
fn waiting(emcs: u32) -> World {
    let state = |_| State::Scrubbing(Scrub::Waiting);
    let shape = Shape { emcs, ..FULL };
    let mut world = World::new(Start { state, ..Start::held(shape, shape.slices, 0) });
    world.compare_devices();
    world.take_times();
    world
}

/// A round of upkeep while slices go back into the cycle that no host claimed after a restore.
fn release_restored(slices: u32) -> f64 {
    let state = |_: Owner| State::Quarantined(Quarantine::Restored { host: None });
    let mut world = World::new(Start { state, ..Start::held(FULL, slices, 4) });
    world.compare_devices();
    round(&mut world)
}

/// Time per slice of the longest event while a VM of so many slices is made ready for a waiting caller.
fn ready_vm(slices: u32) -> f64 {
    let shape = Shape { hosts: 16, emcs: 4, slices: 65_536 };
    let mut world = World::new(Start::held(shape, 0, 0)).ready();
    world.ask(reserve("large", 0, slices, Some(Ns::secs(300))));
    world.go();
    assert_eq!(world.replies, 1, "a waiting caller is answered");
    longest_us(world.take_times()) / f64::from(slices)
}

fn filled(slices: u32) -> World {
    let shape = Shape { hosts: 4, emcs: 4, slices: 65_536 };
    World::new(Start::held(shape, slices, FILLED_VM_SLICES)).ready()
}

fn reserve_one_by_one(world: &mut World) -> Vec<Duration> {
    world.take_times();
    for number in 0..EVENTS {
        world.ask(reserve(&format!("one-{number}"), (number % 4) as u32, 1, None));
        world.go();
    }
    world.take_times()
}

/// Time of all events of one reservation of one slice until it is online, with so many slices in use on four hosts.
fn reserve_until_ready(slices: u32) -> f64 {
    let times = reserve_one_by_one(&mut filled(slices));
    us(times.into_iter().sum()) / EVENTS as f64
}

/// The longest of them.
fn reserve_longest_event(slices: u32) -> f64 {
    longest_us(reserve_one_by_one(&mut filled(slices)))
}

fn reserve(vm: &str, host: u32, slices: u32, wait: Option<Ns>) -> Ask {
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
    Ask::Reserve { reserve, wait }
}
