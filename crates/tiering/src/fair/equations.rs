//! Equations 1 and 2 of Equilibria in integer arithmetic, with errata.

use std::fmt;

use units::Bytes;

/// Largest thrash level. The promotion rate is at least 2^-8 of the rate before thrashing was
/// detected. The paper gives no limit.
pub const THRASH_LEVEL_MAX: u8 = 8;
/// Smallest promotion factor for a tenant above its protection, 1/16 (Equilibria, section IV-E).
const PROMOTION_FACTOR_MIN: Factor = Factor(Factor::ONE.0 / 16);

/// Factor from 0 to 1, in parts per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Factor(u32);

impl Factor {
    /// Factor 1.
    pub const ONE: Self = Self(1_000_000);

    /// Creates a factor from parts per million. Larger numbers than 1,000,000 become 1.
    pub const fn from_ppm(ppm: u32) -> Self {
        Self(if ppm < Self::ONE.0 { ppm } else { Self::ONE.0 })
    }

    /// Returns the factor in parts per million.
    pub const fn ppm(self) -> u32 {
        self.0
    }

    /// Multiplies a size by the factor, rounded down.
    pub fn of(self, size: Bytes) -> Bytes {
        Bytes::new(mul_div(size.get(), self.0.into(), Self::ONE.0.into()))
    }
}

impl Default for Factor {
    fn default() -> Self {
        Self::ONE
    }
}

/// Formats the factor in percent, with one decimal place.
impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let permille = (self.0 + 500) / 1000;
        write!(f, "{}.{} %", permille / 10, permille % 10)
    }
}

/// Returns the part of an LRU list of `lru` bytes or pages that is considered for demotion, rounded
/// down (Equilibria, Eq. 1). `usage` and `protection` are those of the tenant.
///
/// Erratum: the printed equation is negative for a tenant below its protection. Section IV-D
/// exempts such a tenant, so the result is 0.
pub fn demotion_target(lru: u64, usage: u64, protection: u64) -> u64 {
    if usage <= protection { 0 } else { mul_div(lru, usage - protection, usage) }
}

/// Returns the factor of the promotion rate of a tenant, rounded to the nearest part per million
/// (Equilibria, Eq. 2).
///
/// Erratum: the printed equation takes the *minimum* of (protection/usage)⁴ and 1/16, which never
/// exceeds 1/16. The text (96 % at 1 % above the protection, 68 % at 10 %, and at least 1/16) means
/// the maximum, and at most 1. A tenant that is not throttled has the factor 1.
pub fn promotion_factor(usage: Bytes, protection: Bytes, is_throttled: bool) -> Factor {
    const FRACTION_BITS: u32 = 32;
    if !is_throttled || usage <= protection {
        return Factor::ONE;
    }
    // Sizes are reduced to 32 bits, which is precise enough for parts per million, so that no
    // division has 128 bits.
    let shift = FRACTION_BITS.saturating_sub(usage.get().leading_zeros());
    let ratio = ((protection.get() >> shift) << FRACTION_BITS) / (usage.get() >> shift);
    let ratio = ratio.min(u32::MAX.into());
    let square = (ratio * ratio) >> FRACTION_BITS;
    let fourth_power = (square * square) >> FRACTION_BITS;
    let ppm = (fourth_power * u64::from(Factor::ONE.0) + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS;
    Factor::from_ppm(u32::try_from(ppm).unwrap_or(u32::MAX)).max(PROMOTION_FACTOR_MIN)
}

/// Returns the rate of a tenant with the thrash level `level`: halved once per level (section IV-F).
pub(super) fn throttled_rate(rate: Bytes, level: u8) -> Bytes {
    Bytes::new(rate.get() >> level.min(THRASH_LEVEL_MAX))
}

/// Returns `value * numerator / denominator`, rounded down; 0 if the denominator is 0. Saturates at
/// `u64::MAX`.
pub(super) fn mul_div(value: u64, numerator: u64, denominator: u64) -> u64 {
    if denominator == 0 {
        return 0;
    }
    // Divisions of 128 bits are slow.
    if let Some(product) = value.checked_mul(numerator) {
        return product / denominator;
    }
    let quotient = u128::from(value) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(quotient).unwrap_or(u64::MAX)
}
