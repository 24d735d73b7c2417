//! Size of the buffer of free slices, so that starting a VM never waits for reclamation.
//!
//! Pond (4.4, 4.5) finds that offlining at 1 to 10 GB/s suffices when a buffer of free slices is
//! kept and refilled in the background. Here its size follows demand and measured speed: the
//! largest demand in a period as long as the slowest slice recently needed from its last owner to
//! free. Below the target, scrubbing runs at full pace; above it slowly, to save the tenants'
//! bandwidth, unless so much of the pool waits for it that the next wave of VMs would exceed the
//! buffer.

use std::collections::BTreeMap;

use units::limits::SCRUBS_PER_HOST_MAX;
use units::{Ns, SliceId};

/// Length of a window.
const WINDOW: Ns = Ns::secs(10);
/// Number of windows.
const WINDOWS: usize = 6;
/// Smallest target.
const LEAST: u32 = 4;
/// Largest target, as the divisor of the pool's size.
const POOL_PARTS: u32 = 4;
/// Slices that one host scrubs at a time while the buffer is full.
const GENTLE: usize = 4;
/// Scrubbing is slow only while a smaller fraction of the pool, as a divisor, waits for it.
const WAITING_PARTS: u32 = 16;

/// Size of the pool, in slices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Supply {
    /// All slices.
    pub pool: u32,
    /// Free slices.
    pub free: u32,
    /// Slices waiting for a scrubber.
    pub to_scrub: u32,
}

/// Recent demand for slices, and recent durations of their return.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    window: u64,
    taken: [u32; WINDOWS],
    /// Longest return completed in a window.
    drained: [Ns; WINDOWS],
    /// Start of each return in progress.
    draining: BTreeMap<SliceId, Ns>,
}

impl Buffer {
    /// Records reserved slices.
    pub fn reserved(&mut self, now: Ns, slices: u32) {
        self.roll(now);
        let taken = &mut self.taken[slot(self.window)];
        *taken = taken.saturating_add(slices);
    }

    /// Records a change of a slice's state, by name.
    pub fn moved(&mut self, now: Ns, slice: SliceId, to: &str) {
        self.roll(now);
        match to {
            "draining" | "scrubbing" => drop(self.draining.entry(slice).or_insert(now)),
            _ => {
                let began = self.draining.remove(&slice).filter(|_| to == "free");
                let longest = &mut self.drained[slot(self.window)];
                *longest = (*longest).max(began.map_or(Ns::ZERO, |began| Ns(now.0.saturating_sub(began.0))));
            }
        }
    }

    /// Returns the longest recent time of a slice from its last owner to free; zero if none
    /// returned.
    pub fn drain_time(&self) -> Ns {
        self.drained.iter().copied().max().unwrap_or_default()
    }

    /// Returns the target number of free slices for a pool of this size.
    pub fn target(&self, pool: u32) -> u32 {
        let windows = self.drain_time().0.div_ceil(WINDOW.0).clamp(1, WINDOWS as u64);
        let ends = (0..WINDOWS as u64).map(|back| self.window.saturating_sub(back));
        let taken = |end: u64| (0..windows).map(|back| self.taken_in(end, back)).fold(0, u32::saturating_add);
        let busiest = ends.map(taken).max().unwrap_or(0);
        busiest.max(LEAST).min(pool / POOL_PARTS)
    }

    /// Returns the demand of a window that lies a number of windows before another.
    fn taken_in(&self, end: u64, back: u64) -> u32 {
        let oldest = (self.window + 1).saturating_sub(WINDOWS as u64);
        let window = end.checked_sub(back).filter(|window| *window >= oldest);
        window.map_or(0, |window| self.taken[slot(window)])
    }

    /// Returns the number of slices that one host may scrub at a time.
    pub fn pace(&self, supply: Supply) -> usize {
        let enough = supply.free >= self.target(supply.pool);
        let few_wait = supply.to_scrub <= supply.pool / WAITING_PARTS;
        if enough && few_wait { GENTLE } else { SCRUBS_PER_HOST_MAX }
    }

    /// Drops expired windows.
    pub fn roll(&mut self, now: Ns) {
        let window = now.0 / WINDOW.0;
        let passed = window.saturating_sub(self.window);
        for step in 1..=passed.min(WINDOWS as u64) {
            let forgotten = slot(self.window + step);
            (self.taken[forgotten], self.drained[forgotten]) = (0, Ns::ZERO);
        }
        self.window = window;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a remainder of WINDOWS")]
fn slot(window: u64) -> usize {
    (window % WINDOWS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_what_the_busiest_recent_window_took() {
        let mut buffer = Buffer::default();
        buffer.reserved(Ns::secs(1), 30);
        buffer.reserved(Ns::secs(2), 10);
        buffer.reserved(Ns::secs(12), 5);
        assert_eq!(buffer.target(1000), 40);
        assert_eq!(buffer.target(100), 25, "never more than a quarter of the pool");
        buffer.roll(Ns::secs(65));
        assert_eq!(buffer.target(1000), 5, "old demand is forgotten");
        buffer.roll(Ns::secs(1000));
        assert_eq!(buffer.target(1000), LEAST);
    }

    #[test]
    fn the_slower_slices_come_back_the_more_are_kept_ready() {
        let mut buffer = Buffer::default();
        for second in 0..50 {
            buffer.reserved(Ns::secs(second), 2);
        }
        assert_eq!(
            (buffer.target(1000), buffer.drain_time()),
            (20, Ns::ZERO),
            "what a window of ten seconds took"
        );
        buffer.moved(Ns::secs(20), SliceId(1), "draining");
        buffer.moved(Ns::secs(40), SliceId(1), "scrubbing");
        buffer.moved(Ns::secs(45), SliceId(1), "free");
        assert_eq!(buffer.drain_time(), Ns::secs(25));
        assert_eq!(buffer.target(1000), 60, "what three windows took");
        buffer.moved(Ns::secs(46), SliceId(2), "draining");
        buffer.moved(Ns::secs(48), SliceId(2), "quarantined");
        buffer.moved(Ns::secs(58), SliceId(2), "free");
        assert_eq!(buffer.drain_time(), Ns::secs(25), "one that was kept from everybody was not slow");
        buffer.roll(Ns::secs(110));
        assert_eq!(buffer.drain_time(), Ns::ZERO, "old speed is forgotten");
    }

    #[test]
    fn a_pool_slower_than_all_that_is_remembered_keeps_what_all_of_that_took() {
        let mut buffer = Buffer::default();
        buffer.moved(Ns::ZERO, SliceId(1), "draining");
        (3540..3600).for_each(|second| buffer.reserved(Ns::secs(second), 1));
        buffer.moved(Ns::secs(3599), SliceId(1), "free");
        assert_eq!(buffer.target(1000), 60);
    }

    #[test]
    fn demand_of_the_oldest_and_the_newest_window_is_not_added() {
        let mut buffer = Buffer::default();
        buffer.moved(Ns::secs(100), SliceId(1), "draining");
        buffer.reserved(Ns::secs(105), 10);
        buffer.moved(Ns::secs(115), SliceId(1), "free");
        buffer.reserved(Ns::secs(155), 10);
        assert_eq!(buffer.target(1000), 10, "the largest demand of two windows that follow each other");
    }

    #[test]
    fn scrubbing_is_gentle_while_enough_slices_are_free_and_few_wait() {
        let buffer = Buffer::default();
        let pace = |free, to_scrub| buffer.pace(Supply { pool: 1600, free, to_scrub });
        assert_eq!(pace(100, 100), GENTLE);
        assert_eq!(pace(1, 100), SCRUBS_PER_HOST_MAX, "too few are free");
        assert_eq!(pace(100, 101), SCRUBS_PER_HOST_MAX, "too many wait");
    }
}
