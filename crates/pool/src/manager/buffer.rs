//! Target size of the buffer of free slices. With this buffer, starting a VM does not wait for
//! released slices to be scrubbed.
//!
//! Pond (4.4, 4.5) finds that offlining at 1 to 10 GB/s suffices if a buffer of free slices is kept
//! and refilled in the background. Here, the target is computed from recent demand and drain times:
//! it is the largest demand in any recent period that is as long as the slowest recent drain of a
//! slice.
//!
//! Below the target, scrubbing runs at full speed. It also runs at full speed while many slices
//! wait to be scrubbed, because a burst of new VMs could exceed the buffer. Otherwise scrubbing is
//! slow, to save the tenants' memory bandwidth.

use std::collections::BTreeMap;

use units::limits::SCRUBS_PER_HOST_MAX;
use units::{Ns, SliceId};

/// Length of a window of demand statistics.
const WINDOW_LENGTH: Ns = Ns::secs(10);
/// Number of stored windows; together they cover the last minute.
const WINDOW_COUNT: usize = 6;
/// Smallest target, in slices.
const BUFFER_TARGET_SLICES_MIN: u32 = 4;
/// Largest target, as a divisor of the pool size.
const BUFFER_TARGET_POOL_DIVISOR: u32 = 4;
/// Number of slices that one host scrubs at a time while the buffer is full.
const SLOW_SCRUBS_PER_HOST: usize = 4;
/// Largest number of slices waiting for a scrub with which scrubbing stays slow, as a divisor of
/// the pool size.
const BACKLOG_POOL_DIVISOR: u32 = 16;

/// Numbers of slices in the pool, by availability.
#[derive(Clone, Copy, Debug, Default)]
pub struct SliceSupply {
    /// Number of all slices.
    pub pool: u32,
    /// Number of free slices.
    pub free: u32,
    /// Number of slices that wait for a scrubber.
    pub to_scrub: u32,
}

/// Recent demand for slices, and recent drain times of slices.
#[derive(Clone, Debug, Default)]
pub struct SliceBuffer {
    window: u64,
    demand: [u32; WINDOW_COUNT],
    /// Longest drain that ended in each window.
    drain_times: [Ns; WINDOW_COUNT],
    /// Start of each drain in progress, in rack time.
    draining: BTreeMap<SliceId, Ns>,
}

impl SliceBuffer {
    /// Records that a reservation took this number of slices.
    pub fn record_demand(&mut self, now: Ns, slices: u32) {
        self.drop_expired_windows(now);
        let demand = &mut self.demand[window_index(self.window)];
        *demand = demand.saturating_add(slices);
    }

    /// Records that a slice changed to the state with this name.
    pub fn record_state_change(&mut self, now: Ns, slice: SliceId, to: &str) {
        self.drop_expired_windows(now);
        match to {
            "draining" | "scrubbing" => drop(self.draining.entry(slice).or_insert(now)),
            _ => {
                let started = self.draining.remove(&slice).filter(|_| to == "free");
                let longest = &mut self.drain_times[window_index(self.window)];
                *longest =
                    (*longest).max(started.map_or(Ns::ZERO, |started| Ns(now.0.saturating_sub(started.0))));
            }
        }
    }

    /// Returns the longest recent drain time: the time from the start of a slice's release until
    /// the slice was free. Returns 0 if no slice became free recently.
    pub fn drain_time(&self) -> Ns {
        self.drain_times.iter().copied().max().unwrap_or_default()
    }

    /// Returns the target number of free slices for a pool of this size.
    pub fn target(&self, pool: u32) -> u32 {
        let windows = self.drain_time().0.div_ceil(WINDOW_LENGTH.0).clamp(1, WINDOW_COUNT as u64);
        let ends = (0..WINDOW_COUNT as u64).map(|back| self.window.saturating_sub(back));
        let demand =
            |end: u64| (0..windows).map(|back| self.demand_of_window(end, back)).fold(0, u32::saturating_add);
        let busiest = ends.map(demand).max().unwrap_or(0);
        busiest.max(BUFFER_TARGET_SLICES_MIN).min(pool / BUFFER_TARGET_POOL_DIVISOR)
    }

    /// Returns the demand of the window that is `back` windows before window `end`.
    fn demand_of_window(&self, end: u64, back: u64) -> u32 {
        let oldest = (self.window + 1).saturating_sub(WINDOW_COUNT as u64);
        let window = end.checked_sub(back).filter(|window| *window >= oldest);
        window.map_or(0, |window| self.demand[window_index(window)])
    }

    /// Returns the maximum number of slices that one host may scrub at a time.
    pub fn scrubs_per_host(&self, supply: SliceSupply) -> usize {
        let has_enough = supply.free >= self.target(supply.pool);
        let is_backlog_small = supply.to_scrub <= supply.pool / BACKLOG_POOL_DIVISOR;
        if has_enough && is_backlog_small { SLOW_SCRUBS_PER_HOST } else { SCRUBS_PER_HOST_MAX }
    }

    /// Drops the statistics of expired windows.
    pub fn drop_expired_windows(&mut self, now: Ns) {
        let window = now.0 / WINDOW_LENGTH.0;
        let passed = window.saturating_sub(self.window);
        for step in 1..=passed.min(WINDOW_COUNT as u64) {
            let expired = window_index(self.window + step);
            (self.demand[expired], self.drain_times[expired]) = (0, Ns::ZERO);
        }
        self.window = window;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the result is less than WINDOW_COUNT")]
fn window_index(window: u64) -> usize {
    (window % WINDOW_COUNT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_equals_demand_of_busiest_recent_window() {
        let mut buffer = SliceBuffer::default();
        buffer.record_demand(Ns::secs(1), 30);
        buffer.record_demand(Ns::secs(2), 10);
        buffer.record_demand(Ns::secs(12), 5);
        assert_eq!(buffer.target(1000), 40);
        assert_eq!(buffer.target(100), 25, "the target is at most a quarter of the pool");
        buffer.drop_expired_windows(Ns::secs(65));
        assert_eq!(buffer.target(1000), 5, "demand of expired windows is dropped");
        buffer.drop_expired_windows(Ns::secs(1000));
        assert_eq!(buffer.target(1000), BUFFER_TARGET_SLICES_MIN);
    }

    #[test]
    fn target_grows_with_drain_time() {
        let mut buffer = SliceBuffer::default();
        for second in 0..50 {
            buffer.record_demand(Ns::secs(second), 2);
        }
        assert_eq!(
            (buffer.target(1000), buffer.drain_time()),
            (20, Ns::ZERO),
            "the target is the demand of one window of ten seconds"
        );
        buffer.record_state_change(Ns::secs(20), SliceId(1), "draining");
        buffer.record_state_change(Ns::secs(40), SliceId(1), "scrubbing");
        buffer.record_state_change(Ns::secs(45), SliceId(1), "free");
        assert_eq!(buffer.drain_time(), Ns::secs(25));
        assert_eq!(buffer.target(1000), 60, "the target is the demand of three windows");
        buffer.record_state_change(Ns::secs(46), SliceId(2), "draining");
        buffer.record_state_change(Ns::secs(48), SliceId(2), "quarantined");
        buffer.record_state_change(Ns::secs(58), SliceId(2), "free");
        assert_eq!(buffer.drain_time(), Ns::secs(25), "a quarantined slice does not count");
        buffer.drop_expired_windows(Ns::secs(110));
        assert_eq!(buffer.drain_time(), Ns::ZERO, "drain times of expired windows are dropped");
    }

    #[test]
    fn target_covers_all_windows_when_drain_time_exceeds_them() {
        let mut buffer = SliceBuffer::default();
        buffer.record_state_change(Ns::ZERO, SliceId(1), "draining");
        (3540..3600).for_each(|second| buffer.record_demand(Ns::secs(second), 1));
        buffer.record_state_change(Ns::secs(3599), SliceId(1), "free");
        assert_eq!(buffer.target(1000), 60);
    }

    #[test]
    fn demand_of_oldest_and_newest_window_is_not_added() {
        let mut buffer = SliceBuffer::default();
        buffer.record_state_change(Ns::secs(100), SliceId(1), "draining");
        buffer.record_demand(Ns::secs(105), 10);
        buffer.record_state_change(Ns::secs(115), SliceId(1), "free");
        buffer.record_demand(Ns::secs(155), 10);
        assert_eq!(buffer.target(1000), 10, "the target is the largest demand of two consecutive windows");
    }

    #[test]
    fn scrubbing_is_slow_while_buffer_is_full_and_backlog_small() {
        let buffer = SliceBuffer::default();
        let scrubs_per_host =
            |free, to_scrub| buffer.scrubs_per_host(SliceSupply { pool: 1600, free, to_scrub });
        assert_eq!(scrubs_per_host(100, 100), SLOW_SCRUBS_PER_HOST);
        assert_eq!(scrubs_per_host(1, 100), SCRUBS_PER_HOST_MAX, "too few slices are free");
        assert_eq!(scrubs_per_host(100, 101), SCRUBS_PER_HOST_MAX, "too many slices wait");
    }
}
