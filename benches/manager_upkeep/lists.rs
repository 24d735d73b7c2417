//! Measures reads of the ledger under its lock: lists, metrics, capacity and alarms. A list is read
//! in pages, and the result for a list is the duration of the longest page.

use std::time::Duration;

use pool::manager::{DeviceFailure, DeviceReply, Event, Manager, SliceError};
use pool_manager::{
    convert::{
        self,
        lists::{self, ListChunk},
    },
    metrics::MetricsSnapshot,
};
use units::{EmcId, HostId, Ns, ReservationId, SliceId};

use crate::{
    HOST_COUNTS, InitialState, LARGEST_SIZE, RackSize, SimulatedRack, idle_rack, longest_us, measure_sizes,
    median_us,
};

/// Measured numbers of slices in use. The largest number is all slices of the rack.
const USED_SLICE_COUNTS: [u32; 3] = [1024, 16_384, 65_536];
/// Measured numbers of slices whose device calls fail.
const FAILING_SLICE_COUNTS: [u32; 3] = [256, 4096, 65_536];
const READ_COUNT: usize = 32;
/// Number of ticks after which the manager has made the device calls of 65,536 slices.
const TICK_COUNT: usize = 256;

/// Measures all kinds of reads and prints the results.
pub fn measure() {
    measure_sizes("list_hosts_hosts", HOST_COUNTS, |hosts| {
        longest_page_us(&idle_rack(hosts), HostId(0), lists::hosts)
    });
    measure_sizes("list_slices_slices", USED_SLICE_COUNTS, |used| {
        longest_page_us(&rack_with_used_slices(used), SliceId(0), |manager, from| {
            lists::slices(manager, from, 8192)
        })
    });
    measure_sizes("list_reservations_slices", USED_SLICE_COUNTS, |used| {
        longest_page_us(&rack_with_used_slices(used), ReservationId(0), |manager, from| {
            lists::reservations(manager, from, false, 256)
        })
    });
    measure_sizes("metrics_hosts", HOST_COUNTS, |hosts| {
        median_read_us(&idle_rack(hosts), MetricsSnapshot::of)
    });
    measure_sizes("metrics_slices", USED_SLICE_COUNTS, |used| {
        median_read_us(&rack_with_used_slices(used), MetricsSnapshot::of)
    });
    measure_sizes("capacity_hosts", HOST_COUNTS, |hosts| {
        median_read_us(&idle_rack(hosts), convert::capacity)
    });
    measure_sizes("alarms_unknown_hosts", HOST_COUNTS, |hosts| {
        median_read_us(&rack_with_silent_hosts(hosts), Manager::alarms)
    });
    measure_sizes("alarms_quarantined_slices", USED_SLICE_COUNTS, |used| {
        median_read_us(&crate::rack_with_quarantined_slices(used), Manager::alarms)
    });
    measure_sizes("alarms_failing_slices", FAILING_SLICE_COUNTS, |slices| {
        median_read_us(&rack_with_failing_slices(slices), Manager::alarms)
    });
}

fn rack_with_used_slices(used: u32) -> SimulatedRack {
    SimulatedRack::new(InitialState::with_used_slices(LARGEST_SIZE, used, 8)).into_settled()
}

fn median_read_us<T>(rack: &SimulatedRack, read: impl Fn(&Manager) -> T) -> f64 {
    median_us((0..READ_COUNT).map(|_| rack.time_read(&read)))
}

/// Reads a list repeatedly, and returns the median duration of the longest page in microseconds.
fn longest_page_us<T, K: Copy>(
    rack: &SimulatedRack,
    first: K,
    read_page: impl Fn(&Manager, K) -> ListChunk<T, K>,
) -> f64 {
    let longest = |_| {
        let (mut times, mut next) = (Vec::new(), Some(first));
        while let Some(from) = next {
            let (page, duration) = rack.time_read_with_result(|manager| read_page(manager, from));
            times.push(duration);
            next = page.next;
        }
        times.into_iter().max().unwrap_or_default()
    };
    median_us((0..READ_COUNT).map(longest).collect::<Vec<Duration>>())
}

/// Returns a rack in which the leases of all hosts have expired.
fn rack_with_silent_hosts(hosts: u32) -> SimulatedRack {
    let mut rack = idle_rack(hosts);
    rack.advance(Ns::secs(3601));
    rack.handle_event(Event::Tick);
    rack
}

/// Returns a rack in which the device grants of this number of slices fail.
fn rack_with_failing_slices(slices: u32) -> SimulatedRack {
    let state = |owner| pool::slice::State::Assigned(owner);
    let size = RackSize { hosts: 16, emcs: 4, slices: 65_536 };
    let mut rack =
        SimulatedRack::new(InitialState { state, ..InitialState::with_used_slices(size, slices, 8) });
    rack.compare_devices();
    for _ in 0..TICK_COUNT {
        rack.handle_event(Event::Tick); // each tick requests a limited number of grants
    }
    for call in rack.take_device_calls() {
        let failure =
            DeviceFailure::Slice(SliceError { message: "Is a directory".to_owned(), errno: Some(21) });
        let emc = EmcId(0);
        rack.handle_event(Event::Device(emc, DeviceReply::Failed { call, failure }));
    }
    assert!(longest_us(rack.take_times()) > 0.0);
    let failing = rack.manager.alarms().iter().filter(|alarm| alarm.reason == "SLICE_FAILING").count();
    assert!(failing > 0, "no SLICE_FAILING alarm was raised");
    rack
}
