//! Settings of early eviction, and their rules.

use units::{Bytes, Fraction, Ns};

use super::{ExhaustionLimits, PullBack};

/// Settings of a [`Policy`](super::Policy). The paper prints only the largest threshold and the nominal
/// eviction rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Time after which the threshold of a tenant may change. The paper counts allocations instead.
    /// Default: 250 ms.
    pub cycle: Ns,
    /// Smallest threshold (T_lower), as a fraction of the limit. Default: 50 %.
    pub lower: Fraction,
    /// Distance of the largest threshold (T_upper) from the limit, at most 1/8 of the limit. Default: 8 MiB,
    /// as in Fastswap.
    pub reserve: Bytes,
    /// Eviction rate of a tenant before its first eviction, in bytes per second. Default: 287 MB/s, which
    /// is the rate of one CPU in the paper.
    pub nominal_eviction_bytes_per_s: Bytes,
    /// Duration of a reset (M), in cycles: each cycle returns 1/M of the remaining distance to the largest
    /// threshold. Default: 4.
    pub reset_cycles: u32,
    /// Largest part of its time in which a tenant may wait for memory that was evicted early. A tenant may
    /// also wait for at most half of the time that early eviction is expected to save. The paper has no
    /// such limit (`None`). Default: 0.5 %.
    pub loss_limit: Option<Fraction>,
    /// Formula for a higher cache miss rate. Default: [`PullBack::Arithmetic`].
    pub pull_back: PullBack,
    /// Limits of the time to exhaustion that separate the classes of flows, in ascending order. `None`
    /// separates the classes by the remaining memory. Default: `None`.
    pub exhaustion_limits: Option<ExhaustionLimits>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cycle: Ns::ms(250),
            lower: Fraction::new(0.5).expect("0.5 is a fraction"),
            reserve: Bytes::mib(8),
            nominal_eviction_bytes_per_s: Bytes::new(287_000_000),
            reset_cycles: 4,
            loss_limit: Fraction::new(0.005).ok(),
            pull_back: PullBack::default(),
            exhaustion_limits: None,
        }
    }
}

/// Error for an invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid setting {field} = {value}: {rule}")]
pub struct SettingsError {
    /// Name of the field.
    pub field: &'static str,
    /// Value of the field.
    pub value: String,
    /// Rule that the value violates.
    pub rule: &'static str,
}

impl Settings {
    /// Shortest cycle.
    const CYCLE_MIN: Ns = Ns::ms(1);
    /// Longest cycle.
    const CYCLE_MAX: Ns = Ns::secs(60);
    /// Part of the limit that the reserve does not exceed, as a divisor. A reserve as large as the limit
    /// would evict all memory.
    const RESERVE_DIVISOR: u64 = 8;
    /// Largest number of cycles of a reset.
    const RESET_CYCLES_MAX: u32 = 1000;

    /// Returns the largest threshold (T_upper) of a tenant: its limit without the reserve.
    pub fn upper_threshold(&self, limit: Bytes) -> Bytes {
        let reserve_max = Bytes::new(limit.get() / Self::RESERVE_DIVISOR);
        limit.saturating_sub(self.reserve.min(reserve_max))
    }

    /// Returns the smallest threshold (T_lower) of a tenant, at most the largest one.
    pub fn lower_threshold(&self, limit: Bytes) -> Bytes {
        self.lower.of(limit).min(self.upper_threshold(limit))
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// [`SettingsError`] for the first setting that violates its rule.
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        let require = |holds: bool, field, value: String, rule| match holds {
            true => Ok(()),
            false => Err(SettingsError { field, value, rule }),
        };
        let is_cycle_valid = (Self::CYCLE_MIN..=Self::CYCLE_MAX).contains(&self.cycle);
        require(is_cycle_valid, "cycle", format!("{} ns", self.cycle.0), "must be from 1 ms to 60 s")?;
        require(
            self.lower.get() > 0.0,
            "lower",
            self.lower.get().to_string(),
            "must be more than 0, because a threshold of 0 evicts all memory",
        )?;
        let rate = self.nominal_eviction_bytes_per_s;
        require(
            rate > Bytes::ZERO,
            "nominal_eviction_bytes_per_s",
            rate.get().to_string(),
            "must be more than 0",
        )?;
        require(
            (1..=Self::RESET_CYCLES_MAX).contains(&self.reset_cycles),
            "reset_cycles",
            self.reset_cycles.to_string(),
            "must be from 1 to 1000",
        )?;
        let limits = self.exhaustion_limits.unwrap_or([0.0; _]);
        require(
            limits.is_sorted() && limits.iter().all(|limit| limit.is_finite() && *limit >= 0.0),
            "exhaustion_limits",
            format!("{limits:?}"),
            "must be ascending numbers of seconds from 0",
        )
    }
}
