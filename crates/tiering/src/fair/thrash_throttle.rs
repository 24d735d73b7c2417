//! Thrash level of one tenant: halves its promotion rate while it thrashes (Equilibria, section
//! IV-F).

use std::fmt;

use units::{Bytes, Ns};

use super::{
    Factor, TenantSample, ThrashSettings,
    equations::{THRASH_LEVEL_MAX, mul_div},
};

/// Largest number of calm periods before the promotion rate of a tenant is doubled.
const RECOVERY_WAIT_MAX: u32 = 64;
/// Factor by which the number of calm periods grows each time that the tenant thrashes again.
const RECOVERY_WAIT_GROWTH: u32 = 4;
/// Number of calm periods after which a tenant counts as if it had never thrashed.
const RECOVERY_RESET_PERIODS: u32 = 4 * RECOVERY_WAIT_MAX;

/// Result of a period of the detection of thrashing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThrashState {
    /// The tenant has not been observed for a period.
    #[default]
    Unobserved,
    /// The tenant does not thrash.
    Calm,
    /// Promoted pages are demoted early, but the working set of the tenant changes. The promotion
    /// rate is not reduced.
    Transition,
    /// The tenant thrashes in steady state. The promotion rate was halved.
    Thrashing,
}

impl fmt::Display for ThrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unobserved => "not yet observed",
            Self::Calm => "not thrashing",
            Self::Transition => "working set changes",
            Self::Thrashing => "thrashing",
        })
    }
}

/// Counters at the start of a period.
#[derive(Clone, Copy, Debug)]
struct PeriodStart {
    at: Ns,
    promoted: Bytes,
    sampled_promotions: u64,
    sampled_thrashed: u64,
    active: Bytes,
    memory: Bytes,
    freed: Bytes,
}

/// Thrash level of a tenant, and the counters at the start of the period.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThrashThrottle {
    level: u8,
    state: ThrashState,
    start: PeriodStart,
    /// Promotion rate in the last period without a thrash level, in bytes per second. Levels halve
    /// this rate, because halving a limit that the tenant does not reach has no effect.
    unthrottled_rate: Bytes,
    recovery: Recovery,
}

/// Delay of the recovery.
///
/// The paper doubles the promotion rate after each calm period. But if pages stay in local memory for
/// longer than some periods, a thrashing tenant is calm until its rate is restored, and thrashes
/// again. The number of calm periods before the first doubling therefore grows each time that
/// thrashing returns. It is reset after [`RECOVERY_RESET_PERIODS`] calm periods.
#[derive(Clone, Copy, Debug, Default)]
struct Recovery {
    /// Number of calm periods before the first doubling; 0 before the tenant first thrashed.
    wait: u32,
    /// Number of consecutive calm periods.
    calm: u32,
}

impl ThrashThrottle {
    /// Starts to observe a tenant. `freed` is the cumulative size of freed pages.
    pub(super) fn new(at: Ns, sample: &TenantSample, freed: Bytes) -> Self {
        let start = PeriodStart::new(at, sample, freed);
        Self {
            level: 0,
            state: ThrashState::Unobserved,
            start,
            unthrottled_rate: Bytes::ZERO,
            recovery: Recovery::default(),
        }
    }

    /// Returns the thrash level, from 0 to [`THRASH_LEVEL_MAX`].
    pub(super) fn level(&self) -> u8 {
        self.level
    }

    /// Returns the result of the last period.
    pub(super) fn state(&self) -> ThrashState {
        self.state
    }

    /// Returns the promotion rate before the first level, in bytes per second.
    pub(super) fn unthrottled_rate(&self) -> Bytes {
        self.unthrottled_rate
    }

    /// Restarts the period, without a change of the level.
    pub(super) fn restart_period(&mut self, at: Ns, sample: &TenantSample, freed: Bytes) {
        self.start = PeriodStart::new(at, sample, freed);
    }

    /// Ends the period if it is over, and changes the level by at most 1.
    pub(super) fn observe(&mut self, at: Ns, sample: &TenantSample, freed: Bytes, settings: &ThrashSettings) {
        let elapsed = at.since(self.start.at);
        if elapsed < settings.period {
            return;
        }
        let end = PeriodStart::new(at, sample, freed);
        let period = Period { start: self.start, end, settings };
        if self.level == 0 {
            self.unthrottled_rate = per_second(end.promoted.saturating_sub(self.start.promoted), elapsed);
        }
        self.state = period.state();
        self.level = match self.state {
            ThrashState::Thrashing => {
                self.recovery.record_thrashing();
                (self.level + 1).min(THRASH_LEVEL_MAX)
            }
            ThrashState::Transition => {
                self.recovery = Recovery::default();
                self.level.saturating_sub(1)
            }
            ThrashState::Unobserved | ThrashState::Calm => {
                self.level.saturating_sub(u8::from(self.recovery.record_calm()))
            }
        };
        self.start = end;
    }
}

impl Recovery {
    /// Records a period with thrashing. If the rate was doubled before, thrashing has returned.
    fn record_thrashing(&mut self) {
        self.wait = match self.wait {
            0 => 1,
            wait if self.calm >= wait => (wait * RECOVERY_WAIT_GROWTH).min(RECOVERY_WAIT_MAX),
            wait => wait,
        };
        self.calm = 0;
    }

    /// Records a calm period. Returns whether the rate may be doubled.
    fn record_calm(&mut self) -> bool {
        self.calm = self.calm.saturating_add(1);
        if self.calm >= RECOVERY_RESET_PERIODS {
            self.wait = 0;
        }
        self.calm >= self.wait
    }
}

impl PeriodStart {
    fn new(at: Ns, sample: &TenantSample, freed: Bytes) -> Self {
        let counters = &sample.counters;
        Self {
            at,
            promoted: counters.promoted,
            sampled_promotions: counters.sampled_promotions,
            sampled_thrashed: counters.sampled_thrashed,
            active: counters.active.unwrap_or_else(|| sample.total_usage()),
            memory: sample.total_usage(),
            freed,
        }
    }
}

/// Counters at both ends of a period.
struct Period<'a> {
    start: PeriodStart,
    end: PeriodStart,
    settings: &'a ThrashSettings,
}

impl Period<'_> {
    fn state(&self) -> ThrashState {
        match (self.is_thrashing(), self.is_steady()) {
            (false, _) => ThrashState::Calm,
            (true, false) => ThrashState::Transition,
            (true, true) => ThrashState::Thrashing,
        }
    }

    fn is_thrashing(&self) -> bool {
        let thrashed = self.end.sampled_thrashed.saturating_sub(self.start.sampled_thrashed);
        let promotions = self.end.sampled_promotions.saturating_sub(self.start.sampled_promotions);
        let ratio = self.settings.thrashed_ratio_min;
        let is_ratio_reached = u128::from(thrashed) * u128::from(Factor::ONE.ppm())
            >= u128::from(promotions) * u128::from(ratio.ppm());
        u128::from(thrashed) >= self.per_elapsed(self.settings.thrashed_min) && is_ratio_reached
    }

    /// Returns whether the tenant is in steady state: the size of the active pages and the size of
    /// freed pages change slowly. New pages may start on inactive lists, so growth of the memory
    /// counts as a change, too.
    fn is_steady(&self) -> bool {
        let change =
            |size: fn(&PeriodStart) -> Bytes| size(&self.end).get().abs_diff(size(&self.start).get());
        let active_change = change(|counters| counters.active).max(change(|counters| counters.memory));
        let freed = self.end.freed.saturating_sub(self.start.freed).get();
        let limit = |fraction: Factor| self.per_elapsed(fraction.of(self.end.memory).get());
        u128::from(active_change) <= limit(self.settings.active_change_max)
            && u128::from(freed) <= limit(self.settings.freed_max)
    }

    /// Converts a limit per period to the elapsed time.
    fn per_elapsed(&self, limit: u64) -> u128 {
        let elapsed = self.end.at.since(self.start.at);
        u128::from(limit) * u128::from(elapsed.0) / u128::from(self.settings.period.0)
    }
}

/// Returns the rate in bytes per second.
fn per_second(size: Bytes, elapsed: Ns) -> Bytes {
    Bytes::new(mul_div(size.get(), Ns::secs(1).0, elapsed.0))
}
