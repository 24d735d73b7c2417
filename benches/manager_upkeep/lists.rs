//! Looks at the ledger under its lock: lists, metrics, capacity, alarms. The longest piece of each list counts.

use std::time::Duration;

use pool::manager::{DeviceDone, DeviceFailure, Event, Manager, SliceError};
use pool_manager::{
    convert::{
        self,
        lists::{self, Piece},
    },
    metrics::Snapshot,
};
use units::{EmcId, HostId, Ns, ReservationId, SliceId};

use crate::{FULL, HOSTS, Shape, Start, World, idle, longest_us, median_us, sweep};

/// Slices in use, all of them at last.
const USED: [u32; 3] = [1024, 16_384, 65_536];
/// Slices whose device calls fail.
const FAILING: [u32; 3] = [256, 4096, 65_536];
const LOOKS: usize = 32;
/// Enough to make the calls of 65,536 slices.
const DRIVE_TICKS: usize = 256;

/// Measures and prints all.
pub fn measure() {
    sweep("list_hosts_hosts", HOSTS, |hosts| pieces(&idle(hosts), HostId(0), lists::hosts));
    sweep("list_slices_slices", USED, |used| {
        pieces(&held(used), SliceId(0), |manager, from| lists::slices(manager, from, 8192))
    });
    sweep("list_reservations_slices", USED, |used| {
        pieces(&held(used), ReservationId(0), |manager, from| lists::reservations(manager, from, false, 256))
    });
    sweep("metrics_hosts", HOSTS, |hosts| look(&idle(hosts), Snapshot::of));
    sweep("metrics_slices", USED, |used| look(&held(used), Snapshot::of));
    sweep("capacity_hosts", HOSTS, |hosts| look(&idle(hosts), convert::capacity));
    sweep("alarms_unknown_hosts", HOSTS, |hosts| look(&silent(hosts), Manager::alarms));
    sweep("alarms_quarantined_slices", USED, |used| look(&crate::quarantined(used), Manager::alarms));
    sweep("alarms_failing_slices", FAILING, |slices| look(&failing(slices), Manager::alarms));
}

fn held(used: u32) -> World {
    World::new(Start::held(FULL, used, 8)).ready()
}

fn look<T>(world: &World, question: impl Fn(&Manager) -> T) -> f64 {
    median_us((0..LOOKS).map(|_| world.look(&question)))
}

/// The longest of the pieces of a list.
fn pieces<T, K: Copy>(world: &World, first: K, piece: impl Fn(&Manager, K) -> Piece<T, K>) -> f64 {
    let longest = |_| {
        let (mut times, mut next) = (Vec::new(), Some(first));
        while let Some(from) = next {
            let (found, took) = world.look_at(|manager| piece(manager, from));
            times.push(took);
            next = found.next;
        }
        times.into_iter().max().unwrap_or_default()
    };
    median_us((0..LOOKS).map(longest).collect::<Vec<Duration>>())
}

/// All hosts are silent past their leases.
fn silent(hosts: u32) -> World {
    let mut world = idle(hosts);
    world.pass(Ns::secs(3601));
    world.event(Event::Tick);
    world
}

/// So many slices whose grants fail: the first attempts of each.
fn failing(slices: u32) -> World {
    let state = |owner| pool::slice::State::Assigned(owner);
    let shape = Shape { hosts: 16, emcs: 4, slices: 65_536 };
    let mut world = World::new(Start { state, ..Start::held(shape, slices, 8) });
    world.compare_devices();
    for _ in 0..DRIVE_TICKS {
        world.event(Event::Tick); // the EMCs are asked for their grants in pieces, too
    }
    for call in world.take_calls() {
        let failure =
            DeviceFailure::Slice(SliceError { message: "Is a directory".to_owned(), errno: Some(21) });
        let emc = EmcId(0);
        world.event(Event::Device(emc, DeviceDone::Failed { call, failure }));
    }
    assert!(longest_us(world.take_times()) > 0.0);
    let failing = world.manager.alarms().iter().filter(|alarm| alarm.reason == "SLICE_FAILING").count();
    assert!(failing > 0, "no slice fails");
    world
}
