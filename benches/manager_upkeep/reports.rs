//! Measures events that concern one host or EMC with many slices: reports of an agent, complete
//! desired states, comparisons with a device, and fencing.

use pool::{
    manager::{Event, Request},
    protocol::{Holding, ObservedState, ObservedVm},
    record::Stage,
};
use units::{
    Bytes, DesiredVersion, HostId,
    limits::{REPORT_PART_ENTRIES_MAX, RESERVATIONS_PER_HOST_MAX},
};

use crate::{
    InitialState, RackSize, SimulatedRack, longest_us, measure_sizes, median_us, name,
    rack::{self, session},
};

/// Measured numbers of slices per host, in a rack of 16 hosts.
const HOST_SLICE_COUNTS: [u32; 3] = [64, 512, 4096];
/// Measured numbers of slices per EMC, in a rack of four EMCs.
const EMC_SLICE_COUNTS: [u32; 3] = [1024, 4096, 16_384];
const HOST_COUNT: u32 = 16;
const ROUND_COUNT: usize = 32;

/// Measures all kinds of events and prints the results.
pub fn measure() {
    measure_sizes("heartbeat_host_slices", HOST_SLICE_COUNTS, |slices| {
        crate::measure_heartbeat(&mut rack_with_host_slices(slices))
    });
    measure_sizes("report_part_host_slices", HOST_SLICE_COUNTS, |slices| {
        measure_report(slices, REPORT_PART_ENTRIES_MAX)
    });
    measure_sizes("report_undivided_host_slices", HOST_SLICE_COUNTS, |slices| {
        measure_report(slices, usize::MAX)
    });
    measure_sizes("report_released_part_host_slices", HOST_SLICE_COUNTS, |slices| {
        measure_release_report(slices, REPORT_PART_ENTRIES_MAX)
    });
    measure_sizes("complete_order_host_slices", HOST_SLICE_COUNTS, measure_complete_order);
    measure_sizes("compare_emc_slices", EMC_SLICE_COUNTS, measure_comparison);
    measure_sizes("fence_host_slices", HOST_SLICE_COUNTS, measure_fence);
}

/// Returns a rack in which each host owns this number of slices, eight per VM.
fn rack_with_host_slices(slices: u32) -> SimulatedRack {
    let size = RackSize { hosts: HOST_COUNT, emcs: 4, slices: 65_536 };
    SimulatedRack::new(InitialState::with_used_slices(size, slices * HOST_COUNT, 8)).into_settled()
}

/// Returns a complete report of the first host.
fn build_complete_report(rack: &SimulatedRack, sequence: u64) -> ObservedState {
    let ledger = rack.manager.durable();
    let entry = ledger.host(HostId(0)).expect("the first host exists");
    let holding = |slice| Holding { slice, epoch: ledger.slot(slice).unwrap_or_default().epoch };
    let vm = |id| {
        let reservation = ledger.reservation(id).expect("the reservation of a host exists");
        assert_eq!(reservation.stage, Stage::Committed);
        let slices = reservation.slices.iter().map(|slice| holding(*slice)).collect();
        let vm = ObservedVm {
            vm: reservation.vm.clone(),
            pid: 1,
            slices,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: pool::protocol::ObservedRehome::None,
        };
        (id, vm)
    };
    assert!(entry.reservations().len() <= RESERVATIONS_PER_HOST_MAX);
    ObservedState {
        sequence,
        after: sequence - 1,
        whole: true,
        number: DesiredVersion { generation: ledger.meta().generation, revision: ledger.meta().revision },
        online: entry.held().map(holding).collect(),
        vms: entry.reservations().map(vm).collect(),
        ..ObservedState::default()
    }
}

/// Measures the longest event while a host sends a complete report without changes. The report is
/// split into parts of at most `max_facts` facts.
fn measure_report(slices: u32, max_facts: usize) -> f64 {
    let mut rack = rack_with_host_slices(slices);
    let longest = (1..=ROUND_COUNT as u64).map(|round| {
        let parts = build_complete_report(&rack, round).into_parts(max_facts);
        let times = parts.into_iter().map(|part| rack.handle_event(Event::AgentReport(session(0), part)));
        times.max().unwrap_or_default()
    });
    median_us(longest.collect::<Vec<_>>())
}

/// Measures the longest event while the first host reports that it released all its slices. The
/// report is split into parts of at most `max_facts` facts.
fn measure_release_report(slices: u32, max_facts: usize) -> f64 {
    let mut rack = rack_with_host_slices(slices);
    let names: Vec<_> = rack.vms_of(HostId(0));
    for vm in names {
        rack.submit_request(rack::release_request(vm));
    }
    while rack.complete_store_batch() || rack.complete_device_calls() {}
    let released = build_complete_release_report(&rack);
    rack.take_times();
    for part in released.into_parts(max_facts) {
        rack.handle_event(Event::AgentReport(session(0), part));
    }
    longest_us(rack.take_times())
}

fn build_complete_release_report(rack: &SimulatedRack) -> ObservedState {
    let ledger = rack.manager.durable();
    let held = ledger.host(HostId(0)).into_iter().flat_map(|entry| entry.held());
    let holding = |slice| Holding { slice, epoch: ledger.slot(slice).unwrap_or_default().epoch };
    ObservedState {
        sequence: 1,
        whole: true,
        released: held.map(holding).collect(),
        ..ObservedState::default()
    }
}

/// Measures the longest event until a reconnected agent receives its complete desired state.
fn measure_complete_order(slices: u32) -> f64 {
    let mut rack = rack_with_host_slices(slices);
    let longest = (0..ROUND_COUNT).map(|_| {
        rack.take_times();
        rack.reconnect(0);
        while !rack.has_desired_state(0) {
            rack.handle_event(Event::Tick);
        }
        rack.take_times().into_iter().max().unwrap_or_default()
    });
    median_us(longest.collect::<Vec<_>>())
}

/// Measures the longest event while an EMC is compared with the ledger. All slices of the EMC are
/// in use.
fn measure_comparison(slices: u32) -> f64 {
    let size = RackSize { hosts: HOST_COUNT, emcs: 4, slices: slices * 4 };
    let mut rack = SimulatedRack::new(InitialState::with_used_slices(size, size.slices, 8));
    rack.take_times();
    rack.compare_devices();
    longest_us(rack.take_times())
}

/// Measures the longest event from the fencing of a host until all slices of the host wait for a
/// scrubber.
fn measure_fence(slices: u32) -> f64 {
    let mut rack = rack_with_host_slices(slices);
    rack.handle_event(Event::AgentDown(session(0)));
    rack.take_times();
    rack.submit_request(Request::Fence {
        host: name("h0"),
        powered_off: false,
        actor: pool::audit::Actor::Manager,
        reason: String::new(),
    });
    for _ in 0..4 {
        while rack.complete_store_batch() || rack.complete_device_calls() {}
        rack.advance(units::Ns::ms(20));
        rack.handle_event(Event::Tick);
    }
    longest_us(rack.take_times())
}
