//! Events of one host, EMC or fence with many slices: reports, complete orders, comparisons.

use pool::{
    manager::{Ask, Event},
    protocol::{Have, HaveVm, Holding},
    record::Stage,
};
use units::{
    Bytes, DesiredVersion, HostId,
    limits::{REPORT_PART_FACTS_MAX, RESERVATIONS_PER_HOST_MAX},
};

use crate::{
    Shape, Start, World, longest_us, median_us, name, sweep,
    world::{self, session},
};

/// Slices of one of 16 hosts.
const HOST_SLICES: [u32; 3] = [64, 512, 4096];
/// Slices of one of four EMCs.
const EMC_SLICES: [u32; 3] = [1024, 4096, 16_384];
const HOSTS: u32 = 16;
const ROUNDS: usize = 32;

/// Measures and prints all.
pub fn measure() {
    sweep("heartbeat_host_slices", HOST_SLICES, |slices| crate::heartbeat(&mut host_of(slices)));
    sweep("report_part_host_slices", HOST_SLICES, |slices| report(slices, REPORT_PART_FACTS_MAX));
    sweep("report_undivided_host_slices", HOST_SLICES, |slices| report(slices, usize::MAX));
    sweep("report_released_part_host_slices", HOST_SLICES, |slices| released(slices, REPORT_PART_FACTS_MAX));
    sweep("complete_order_host_slices", HOST_SLICES, complete_order);
    sweep("compare_emc_slices", EMC_SLICES, compare);
    sweep("fence_host_slices", HOST_SLICES, fence);
}

/// A rack in which each host holds so many slices, in VMs of eight.
fn host_of(slices: u32) -> World {
    let shape = Shape { hosts: HOSTS, emcs: 4, slices: 65_536 };
    World::new(Start::held(shape, slices * HOSTS, 8)).ready()
}

/// A whole report of the first host.
fn whole(world: &World, sequence: u64) -> Have {
    let ledger = world.manager.durable();
    let entry = ledger.host(HostId(0)).expect("there is a first host");
    let holding = |slice| Holding { slice, epoch: ledger.slot(slice).unwrap_or_default().epoch };
    let vm = |id| {
        let reservation = ledger.reservation(id).expect("a host's reservation is there");
        assert_eq!(reservation.stage, Stage::Committed);
        let slices = reservation.slices.iter().map(|slice| holding(*slice)).collect();
        let vm = HaveVm {
            vm: reservation.vm.clone(),
            pid: 1,
            slices,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
        };
        (id, vm)
    };
    assert!(entry.reservations().len() <= RESERVATIONS_PER_HOST_MAX);
    Have {
        sequence,
        after: sequence - 1,
        whole: true,
        number: DesiredVersion { generation: ledger.meta().generation, revision: ledger.meta().revision },
        online: entry.held().map(holding).collect(),
        vms: entry.reservations().map(vm).collect(),
        ..Have::default()
    }
}

/// The longest event of a whole report in parts of so many facts, without news.
fn report(slices: u32, most: usize) -> f64 {
    let mut world = host_of(slices);
    let longest = (1..=ROUNDS as u64).map(|round| {
        let parts = whole(&world, round).into_parts(most);
        let times = parts.into_iter().map(|part| world.event(Event::AgentHave(session(0), part)));
        times.max().unwrap_or_default()
    });
    median_us(longest.collect::<Vec<_>>())
}

/// The longest event while the first host reports that it gave all its slices back.
fn released(slices: u32, most: usize) -> f64 {
    let mut world = host_of(slices);
    let names: Vec<_> = world.vms_of(HostId(0));
    for vm in names {
        world.ask(world::release(vm));
    }
    while world.store() || world.answer_devices() {}
    let released = whole_released(&world);
    world.take_times();
    for part in released.into_parts(most) {
        world.event(Event::AgentHave(session(0), part));
    }
    longest_us(world.take_times())
}

fn whole_released(world: &World) -> Have {
    let ledger = world.manager.durable();
    let held = ledger.host(HostId(0)).into_iter().flat_map(|entry| entry.held());
    let holding = |slice| Holding { slice, epoch: ledger.slot(slice).unwrap_or_default().epoch };
    Have { sequence: 1, whole: true, released: held.map(holding).collect(), ..Have::default() }
}

/// The longest event until a host whose agent has connected again is sent its complete order.
fn complete_order(slices: u32) -> f64 {
    let mut world = host_of(slices);
    let longest = (0..ROUNDS).map(|_| {
        world.take_times();
        world.reconnect(0);
        while !world.has_order(0) {
            world.event(Event::Tick);
        }
        world.take_times().into_iter().max().unwrap_or_default()
    });
    median_us(longest.collect::<Vec<_>>())
}

/// The longest event while an EMC with so many slices, all in use, is compared with the ledger.
fn compare(slices: u32) -> f64 {
    let shape = Shape { hosts: HOSTS, emcs: 4, slices: slices * 4 };
    let mut world = World::new(Start::held(shape, shape.slices, 8));
    world.take_times();
    world.compare_devices();
    longest_us(world.take_times())
}

/// The longest event while a host is fenced until all its slices wait for a scrubber.
fn fence(slices: u32) -> f64 {
    let mut world = host_of(slices);
    world.event(Event::AgentDown(session(0)));
    world.take_times();
    world.ask(Ask::Fence {
        host: name("h0"),
        powered_off: false,
        actor: pool::audit::Actor::Manager,
        reason: String::new(),
    });
    for _ in 0..4 {
        while world.store() || world.answer_devices() {}
        world.pass(units::Ns::ms(20));
        world.event(Event::Tick);
    }
    longest_us(world.take_times())
}
