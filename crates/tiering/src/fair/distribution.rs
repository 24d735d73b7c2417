//! Distributes the memory to demote from a tier among the tenants above their protection.

/// Number of rounds in which the distribution is proportional. A round ends with the distribution
/// of the whole size, or with at least one tenant at its limit.
const PROPORTIONAL_ROUNDS: usize = 8;

/// Part of a tenant in a distribution, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Weight: the target of Eq. 1.
    pub(super) weight: u64,
    /// Largest assigned size.
    pub(super) max: u64,
    /// Assigned size.
    pub(super) assigned: u64,
}

impl Part {
    fn is_open(&self) -> bool {
        self.weight > 0 && self.assigned < self.max
    }

    fn assign(&mut self, size: u64) -> u64 {
        let size = size.min(self.max - self.assigned);
        self.assigned += size;
        size
    }
}

/// Assigns `size` bytes to `parts` in proportion to their weights and within their limits. Returns
/// the rest that exceeds the sum of the limits. No limit exceeds its weight. The order of the parts
/// affects only the rounding.
pub(super) fn distribute(size: u64, parts: &mut [Part]) -> u64 {
    let mut left = size;
    for _ in 0..PROPORTIONAL_ROUNDS {
        let weights: u128 =
            parts.iter().filter(|part| part.is_open()).map(|part| u128::from(part.weight)).sum();
        if left == 0 || weights == 0 {
            return left;
        }
        if u128::from(left) >= weights {
            break;
        }
        // Fraction of each weight that is assigned, less than 1, in units of 2^-64.
        let fraction = (u128::from(left) << 64) / weights;
        for part in parts.iter_mut().filter(|part| part.is_open()) {
            let share = (u128::from(part.weight) * fraction + u128::from(u64::MAX)) >> 64;
            left -= part.assign(u64::try_from(share).unwrap_or(u64::MAX).min(left));
        }
    }
    for part in parts.iter_mut().filter(|part| part.is_open()) {
        left -= part.assign(left);
    }
    left
}
