//! Step limit: changes shares only part of the way from the current shares to an outcome.
//!
//! Estimates are accurate near the current share (Spirit, section 4.1). The paper therefore
//! searches only five grid steps around the current share. The fair share may then lie outside the
//! searched window, and sharing incentive is lost. Here the whole market is cleared, and all shares
//! move toward the outcome by the same fraction. A point between two splits of the supply is also a
//! split of the supply. A bundle between two bundles is worth no less than the worse of the two,
//! unless the utility jumps. If a tenant would lose at the intermediate point, the whole change is
//! applied.

use super::{Market, Outcome, goods::Bundle, rounding, utility::Utility};

/// Largest relative loss of throughput at the intermediate point, compared with the worse of the
/// current bundle and the outcome, that counts as rounding error.
const STEP_LOSS_MAX: f64 = 1e-6;

impl<U: Utility> Market<'_, U> {
    /// Moves an outcome toward the current bundles, `last`, so that no tenant's share of a good
    /// changes by more than the fraction `max` of its fair share. Spirit's five steps of 1/200
    /// correspond to 0.15 with six tenants. Returns the fraction of the change that is applied,
    /// more than 0 and at most 1. Returns 1 if the outcome is not modified.
    ///
    /// # Panics
    /// Panics if the length of `last` differs from the number of tenants of this market.
    pub fn limit_step(&self, outcome: &mut Outcome, last: &[Bundle], max: f64) -> f64 {
        assert_eq!(last.len(), self.tenants.len(), "`last` must have as many tenants as the market");
        let fraction = (0..last.len())
            .map(|tenant| self.step_fraction(tenant, last[tenant], outcome.bought[tenant], max));
        let fraction = fraction.fold(1.0, f64::min);
        let stepped = |tenant: usize| {
            self.clamp_to_limits(tenant, last[tenant].interpolate(outcome.bought[tenant], fraction))
        };
        let stepped: Vec<Bundle> = (0..last.len()).map(stepped).collect();
        let is_lossless = |tenant: usize| {
            let value = |bundle| self.value(tenant, bundle);
            value(stepped[tenant])
                >= (1.0 - STEP_LOSS_MAX) * value(last[tenant]).min(value(outcome.bought[tenant]))
        };
        if fraction >= 1.0 || !(0..last.len()).all(is_lossless) {
            return 1.0;
        }
        let shares = rounding::round_to_units(self, &stepped);
        let is_kept = |tenant: usize| {
            self.is_guarantee_kept(tenant, shares[tenant])
                || self.value(tenant, shares[tenant].into())
                    >= (1.0 - STEP_LOSS_MAX) * self.value(tenant, last[tenant])
        };
        if !(0..last.len()).all(is_kept) {
            return 1.0;
        }
        (outcome.bought, outcome.shares) = (stepped, shares);
        fraction
    }

    /// Returns the largest fraction of the change from `from` to `to` that respects the step limit
    /// of one tenant. It may exceed 1.
    fn step_fraction(&self, tenant: usize, from: Bundle, to: Bundle, max: f64) -> f64 {
        let fair = self.fair_share(tenant);
        let fraction = |from: f64, to: f64, fair: f64| max.max(0.0) * fair / (to - from).abs();
        fraction(from.memory, to.memory, fair.memory).min(fraction(
            from.bandwidth,
            to.bandwidth,
            fair.bandwidth,
        ))
    }
}
