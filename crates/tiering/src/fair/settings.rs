//! Settings of the policy, and their rules.

use units::{Bytes, Ns, limits::PROMOTION_BYTES_PER_S_MAX};

use super::Factor;

/// Settings of a [`Policy`](super::Policy). The defaults suit hosts with hundreds of GiB of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Low watermark of each tier, as a fraction of its capacity. Demotion starts when less memory
    /// is free. Default: 1.75 %. Tenants may use the memory between the watermarks, so the shares
    /// vary by up to their difference.
    pub low_watermark: Factor,
    /// High watermark of each tier, as a fraction of its capacity. Demotion ends when as much memory
    /// is free. Default: 2 %, as `demote_scale_factor` of TPP.
    pub high_watermark: Factor,
    /// Distance from a bound, as a fraction of the bound, at which demotion and throttling begin.
    /// Default: 0.25 %.
    pub bound_margin: Factor,
    /// Smallest claim of a tenant below its protection. Default: 2 MiB, because the kernel moves a huge
    /// page as a whole.
    pub claim_min: Bytes,
    /// Promotion rate of a tenant at the factor 1 of Eq. 2 (p_base), in bytes per second. A tenant
    /// that is not throttled may promote faster. Default: 1 GiB/s.
    pub promotion_bytes_per_s: Bytes,
    /// Detection of thrashing.
    pub thrash: ThrashSettings,
}

/// Settings of the detection of thrashing (Equilibria, section IV-F). The paper gives only the
/// period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrashSettings {
    /// Time after which the thrash level of a tenant may change. Default: 5 s.
    pub period: Ns,
    /// Smallest number of sampled promotions per period that are followed by an early demotion
    /// (r_thrashing). Default: 8.
    pub thrashed_min: u64,
    /// Smallest ratio of such promotions to all sampled promotions of the period. A tenant that
    /// promotes many pages for good is not thrashing. Default: 50 %.
    pub thrashed_ratio_min: Factor,
    /// Largest change of the active pages in a period, as a fraction of the tenant's memory, in
    /// steady state. Default: 5 %.
    pub active_change_max: Factor,
    /// Largest size of freed pages in a period, as a fraction of the tenant's memory, in steady
    /// state. Default: 5 %.
    pub freed_max: Factor,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            low_watermark: Factor::from_ppm(17_500),
            high_watermark: Factor::from_ppm(20_000),
            bound_margin: Factor::from_ppm(2_500),
            claim_min: Bytes::mib(2),
            promotion_bytes_per_s: Bytes::gib(1),
            thrash: ThrashSettings::default(),
        }
    }
}

impl Default for ThrashSettings {
    fn default() -> Self {
        Self {
            period: Ns::secs(5),
            thrashed_min: 8,
            thrashed_ratio_min: Factor::from_ppm(500_000),
            active_change_max: Factor::from_ppm(50_000),
            freed_max: Factor::from_ppm(50_000),
        }
    }
}

/// Error for an invalid setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid setting {field} = {value}: {rule}")]
pub struct SettingsError {
    /// Name of the field.
    pub field: &'static str,
    /// Value of the field, in ppm, bytes per second, nanoseconds or as a number.
    pub value: u64,
    /// Rule that the value violates.
    pub rule: &'static str,
}

impl Settings {
    /// Largest high watermark: half of the tier.
    const HIGH_WATERMARK_MAX: Factor = Factor::from_ppm(500_000);
    /// Largest distance from a bound: half of the bound.
    const BOUND_MARGIN_MAX: Factor = Factor::from_ppm(500_000);

    /// Returns a bound or a protection without the margin below it.
    pub fn threshold_of(&self, bound: Bytes) -> Bytes {
        bound.saturating_sub(self.bound_margin.of(bound))
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// [`SettingsError`] for the first setting that violates its rule.
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        let rate = self.promotion_bytes_per_s.get();
        require(
            self.high_watermark <= Self::HIGH_WATERMARK_MAX,
            "high_watermark",
            self.high_watermark.ppm().into(),
            "must be at most 500000 ppm (50 %)",
        )?;
        require(
            self.low_watermark < self.high_watermark,
            "low_watermark",
            self.low_watermark.ppm().into(),
            "must be less than high_watermark, in ppm",
        )?;
        require(
            self.bound_margin <= Self::BOUND_MARGIN_MAX,
            "bound_margin",
            self.bound_margin.ppm().into(),
            "must be at most 500000 ppm (50 %)",
        )?;
        require(
            (1..=PROMOTION_BYTES_PER_S_MAX).contains(&rate),
            "promotion_bytes_per_s",
            rate,
            "must be from 1 B/s to 1 TiB/s",
        )?;
        self.thrash.check()
    }
}

impl ThrashSettings {
    /// Shortest period.
    const PERIOD_MIN: Ns = Ns::ms(100);
    /// Longest period.
    const PERIOD_MAX: Ns = Ns::secs(3600);

    fn check(&self) -> Result<(), SettingsError> {
        require(
            (Self::PERIOD_MIN..=Self::PERIOD_MAX).contains(&self.period),
            "thrash.period",
            self.period.0,
            "must be from 100 ms to 1 h, in nanoseconds",
        )?;
        require(self.thrashed_min > 0, "thrash.thrashed_min", self.thrashed_min, "must be more than 0")
    }
}

/// Returns an error for `field` unless it is valid.
pub(super) fn require(
    is_valid: bool,
    field: &'static str,
    value: u64,
    rule: &'static str,
) -> Result<(), SettingsError> {
    if is_valid { Ok(()) } else { Err(SettingsError { field, value, rule }) }
}
