//! Time that a tenant loses because of early eviction.

use units::{Fraction, Ns};

use super::Counters;

/// Largest time that a tenant may lose at once, after a time without losses, in seconds. A larger loss is
/// not remembered, so that early eviction is suspended for a limited time.
const ALLOWANCE_MAX_S: f64 = 0.25;
/// Time in which the counted evictions decrease to about 1/e, in seconds. Memory that was evicted long ago, and was
/// not needed since, is unlikely to be needed.
const DECAY_TIME_S: f64 = 60.0;
/// Largest loss per second of expected saving.
const LOSS_PER_SAVING: f64 = 0.5;

/// Time that a tenant may still lose because of early eviction. It increases while memory is evicted early,
/// or while it is negative, and decreases by the time in which the tenant waits for this memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EarlyLoss {
    allowance_s: f64,
    /// Memory that was evicted early, in bytes; decreases over time.
    early_bytes: f64,
    /// All evicted memory, in bytes; decreases over time.
    evicted_bytes: f64,
}

/// Activity of a tenant in a cycle. All rates are in bytes per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cycle<'a> {
    pub elapsed: Ns,
    pub counters: &'a Counters,
    /// Whether the threshold was below the largest one, and the usage at the end of the cycle also is, so that
    /// a fixed threshold would have caused fewer evictions.
    pub is_early: bool,
    pub growth: f64,
    pub eviction: f64,
}

impl EarlyLoss {
    /// Adds a cycle. `limit` is the largest part of its time that the tenant may lose.
    pub(super) fn add_cycle(&mut self, cycle: &Cycle<'_>, limit: Fraction) {
        let evicted = super::to_f64(cycle.counters.evicted.get());
        let early = if cycle.is_early { evicted } else { 0.0 };
        let elapsed = cycle.elapsed.as_duration().as_secs_f64();
        let decay = DECAY_TIME_S / (DECAY_TIME_S + elapsed);
        self.evicted_bytes = self.evicted_bytes * decay + evicted;
        self.early_bytes = self.early_bytes * decay + early;
        // At its limit, a tenant allocates only as fast as memory is evicted. It allocates the room of each byte
        // that was evicted earlier at its own rate.
        let saved_per_byte = (cycle.eviction.recip() - cycle.growth.recip()).max(0.0);
        let saved = if early > 0.0 { early * saved_per_byte } else { 0.0 };
        let by_time = limit.get() * elapsed;
        // Early eviction is suspended while the allowance is negative, so that only time can restore it.
        let allowed = if self.is_too_large() { by_time } else { by_time.min(LOSS_PER_SAVING * saved) };
        // The counters do not distinguish memory that was evicted early.
        let early_part = if self.evicted_bytes > 0.0 { self.early_bytes / self.evicted_bytes } else { 0.0 };
        let lost = early_part * cycle.counters.fetching.as_duration().as_secs_f64().min(elapsed);
        self.allowance_s = (self.allowance_s + allowed - lost).clamp(-ALLOWANCE_MAX_S, ALLOWANCE_MAX_S);
    }

    /// Returns whether the tenant has lost more time than it may.
    pub(super) fn is_too_large(&self) -> bool {
        self.allowance_s < 0.0
    }
}
