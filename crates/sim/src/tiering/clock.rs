//! Ticks of the simulation.

/// Number of ticks per second. The controller acts once per second.
pub(super) const TICKS_PER_S: u64 = 10;
/// Duration of a tick.
pub(super) const TICK_NS: u64 = 1_000_000_000 / TICKS_PER_S;
