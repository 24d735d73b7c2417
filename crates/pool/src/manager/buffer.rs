//! How many free slices should be kept ready, so that starting a VM never waits for emptying another's memory.
//!
//! Pond (4.4, 4.5) finds that offlining at 1 to 10 GB/s suffices when a buffer of free slices is kept and refilled in
//! the background. Its size follows demand here: what the busiest of the latest windows took. Below the target,
//! scrubbing runs at full pace; above it gently, so that it does not steal tenants' bandwidth, unless so much of the
//! pool waits for it that the next wave of VMs would find the buffer too small.

use units::Ns;
use units::limits::SCRUBS_PER_HOST_MAX;

/// Length of one window of demand.
const WINDOW: Ns = Ns::secs(10);
/// How many windows are remembered.
const WINDOWS: usize = 6;
/// The least that is kept ready.
const LEAST: u32 = 4;
/// At most one part in so many of the pool is kept ready.
const POOL_PARTS: u32 = 4;
/// Slices one host scrubs at a time while the buffer is full.
const GENTLE: usize = 4;
/// Scrubbing is gentle only while less than one part in so many of the pool waits for it.
const WAITING_PARTS: u32 = 16;

/// What the pool has, in slices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Supply {
    /// All there are.
    pub pool: u32,
    /// Ready to be reserved.
    pub free: u32,
    /// Waiting for a scrubber.
    pub to_scrub: u32,
}

/// Demand for slices lately.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    window: u64,
    taken: [u32; WINDOWS],
}

impl Buffer {
    /// Slices were reserved.
    pub fn reserved(&mut self, now: Ns, slices: u32) {
        self.roll(now);
        let taken = &mut self.taken[slot(self.window)];
        *taken = taken.saturating_add(slices);
    }

    /// How many free slices to keep ready in a pool of this size.
    pub fn target(&self, pool: u32) -> u32 {
        let busiest = self.taken.iter().copied().max().unwrap_or(0);
        busiest.max(LEAST).min(pool / POOL_PARTS)
    }

    /// How many slices one host may scrub at a time.
    pub fn pace(&self, supply: Supply) -> usize {
        let enough = supply.free >= self.target(supply.pool);
        let few_wait = supply.to_scrub <= supply.pool / WAITING_PARTS;
        if enough && few_wait { GENTLE } else { SCRUBS_PER_HOST_MAX }
    }

    /// Forgets demand that is too old.
    pub fn roll(&mut self, now: Ns) {
        let window = now.0 / WINDOW.0;
        let passed = window.saturating_sub(self.window);
        for step in 1..=passed.min(WINDOWS as u64) {
            self.taken[slot(self.window + step)] = 0;
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
    fn scrubbing_is_gentle_while_enough_slices_are_free_and_few_wait() {
        let buffer = Buffer::default();
        let pace = |free, to_scrub| buffer.pace(Supply { pool: 1600, free, to_scrub });
        assert_eq!(pace(100, 100), GENTLE);
        assert_eq!(pace(1, 100), SCRUBS_PER_HOST_MAX, "too few are free");
        assert_eq!(pace(100, 101), SCRUBS_PER_HOST_MAX, "too many wait");
    }
}
