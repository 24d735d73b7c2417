//! Reclamation weight of a process (Soft Memory, section 3.3).

use std::cmp::Ordering;

use units::limits::SOFT_CLIENT_PAGES_MAX;

/// Reclamation weight W = T + S·T/(S+T) of a process with S pages of soft memory and T pages of
/// traditional memory. 0 if both are 0.
///
/// The paper only states two properties of the weight, which W has: W grows with both S and T, and the
/// growth by S is proportional to (T/(S+T))². A process that moves data from traditional to soft memory
/// never increases its weight. The comparison is exact.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// T·(2·S+T), at most 3·2^80.
    numerator: u128,
    /// S+T, at most 2^41, and at least 1.
    denominator: u128,
}

impl Weight {
    /// Computes the weight. Values above `units::limits::SOFT_CLIENT_PAGES_MAX` count as this limit.
    pub fn new(soft_pages: u64, traditional_pages: u64) -> Self {
        let soft = u128::from(soft_pages.min(SOFT_CLIENT_PAGES_MAX));
        let traditional = u128::from(traditional_pages.min(SOFT_CLIENT_PAGES_MAX));
        Self { numerator: traditional * (2 * soft + traditional), denominator: (soft + traditional).max(1) }
    }

    /// Returns the weight in pages, rounded.
    #[expect(clippy::cast_precision_loss, reason = "the result is for display")]
    pub fn pages(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

impl Ord for Weight {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.numerator * other.denominator).cmp(&(other.numerator * self.denominator))
    }
}

impl PartialOrd for Weight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Weight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Weight {}
