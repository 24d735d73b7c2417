//! Faults of time: jumps of the wall clock, and days in which nothing runs.

use rand::Rng as _;
use units::{Ns, UnixMs, limits::REQUEST_ID_RETENTION};

use super::World;

/// Initial time of the wall clock, in milliseconds. It is high so that backward jumps do not reach
/// zero.
const WALL_CLOCK_START_MS: u64 = 1000 * HOUR_MS;
const HOUR_MS: u64 = 3600 * 1000;
/// Maximum jump of the wall clock, in hours.
const CLOCK_JUMP_HOURS_MAX: u64 = 5;

/// Offset of the wall clock from the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct WallClock {
    offset_ms: u64,
    /// Whether jumps of the wall clock are disabled.
    is_steady: bool,
}

impl Default for WallClock {
    fn default() -> Self {
        Self { offset_ms: WALL_CLOCK_START_MS, is_steady: false }
    }
}

impl World {
    /// Disables jumps of the wall clock and starts the wall clock at zero.
    #[must_use]
    pub fn with_steady_wall_clock(mut self) -> Self {
        self.wall_clock = WallClock { offset_ms: 0, is_steady: true };
        self
    }

    pub(super) fn wall_time(&self) -> UnixMs {
        UnixMs(self.now.as_ms() + self.wall_clock.offset_ms)
    }

    /// Moves the wall clock forwards or backwards by a random time.
    pub(super) fn jump_wall_clock(&mut self) {
        let ms = self.rng.random_range(0..CLOCK_JUMP_HOURS_MAX * HOUR_MS);
        let forwards = self.random_bool(0.5);
        self.run_log.counts.clock_jumps += 1;
        if self.wall_clock.is_steady {
            return;
        }
        let offset = self.wall_clock.offset_ms;
        self.wall_clock.offset_ms = if forwards { offset + ms } else { offset.saturating_sub(ms) };
        self.log(|| format!("the wall clock jumps by {ms} ms, forwards: {forwards}"));
    }

    /// Simulates the suspension of all machines for more than a day. Pending events are delayed by
    /// the same time.
    pub(super) fn suspend_for_a_day(&mut self) {
        let span = REQUEST_ID_RETENTION.after(Ns::secs(1));
        self.end_former_leaders();
        self.log(|| "all machines are suspended for a day".into());
        self.run_log.counts.days += 1;
        self.now = self.now.after(span);
        let queue = std::mem::take(&mut self.queue);
        self.queue = queue.into_iter().map(|((at, n), event)| ((at.after(span), n), event)).collect();
        self.manager_process.delay_wakeup(span);
        for machine in &mut self.machines {
            machine.frozen_until = machine.frozen_until.after(span);
        }
        self.network.delay_arrivals(span);
        self.reset_fence_progress();
    }
}

#[cfg(test)]
mod tests {
    use crate::world::World;

    const SEED_COUNT: u64 = 40;
    const STEPS_PER_SEED: u64 = 1500;

    /// Decisions use monotonic time only, so jumps of the wall clock must not change the run.
    #[test]
    fn wall_clock_jumps_do_not_change_the_run() {
        for seed in 0..SEED_COUNT {
            let jumping = World::new(seed).run(STEPS_PER_SEED).expect("every invariant holds");
            let steady =
                World::new(seed).with_steady_wall_clock().run(STEPS_PER_SEED).expect("every invariant holds");
            assert_eq!(jumping, steady, "seed {seed}");
        }
    }
}
