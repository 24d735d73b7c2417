//! Step limit: moves the current shares only part of the way to an outcome.
//!
//! Estimates are accurate near the current share (Spirit, section 4.1). The paper therefore
//! searches only five grid steps around it. The fair share may then lie outside the searched
//! window, and sharing incentive is lost. Here the whole market is cleared and all tenants move by
//! the same fraction toward the outcome. A point between two splits of the supply is a split of the
//! supply, too. A bundle between two bundles is worth no less than the worse of them, unless the
//! utility jumps. If a tenant would lose at the intermediate point, the outcome is applied whole.

use super::{Market, Outcome, goods::Bundle, rounding, utility::Utility};

/// Largest relative loss of throughput at the intermediate point, compared with the worse of both
/// ends.
const STEP_LOSS_MAX: f64 = 1e-6;

impl<U: Utility> Market<'_, U> {
    /// Moves an outcome toward `last` so that no share of either good changes by more than the
    /// fraction `max` of the tenant's fair share. Five of Spirit's steps of 1/200, with six
    /// tenants, correspond to 0.15. Returns the fraction of the change that was made; 1 means all
    /// of it.
    ///
    /// # Panics
    /// Panics if `last` belongs to a market with another number of tenants.
    pub fn limit_step(&self, outcome: &mut Outcome, last: &[Bundle], max: f64) -> f64 {
        assert_eq!(last.len(), self.tenants.len(), "`last` must have as many tenants as the market");
        let fraction = (0..last.len())
            .map(|tenant| self.step_fraction(tenant, last[tenant], outcome.bought[tenant], max));
        let fraction = fraction.fold(1.0, f64::min);
        let stepped = |tenant: usize| {
            self.within_limits(tenant, last[tenant].interpolate(outcome.bought[tenant], fraction))
        };
        let stepped: Vec<Bundle> = (0..last.len()).map(stepped).collect();
        let is_lossless = |tenant: usize| {
            let value = |bundle| self.tenants[tenant].utility.value(bundle);
            value(stepped[tenant])
                >= (1.0 - STEP_LOSS_MAX) * value(last[tenant]).min(value(outcome.bought[tenant]))
        };
        if fraction >= 1.0 || !(0..last.len()).all(is_lossless) {
            return 1.0;
        }
        outcome.shares = rounding::round_to_units(self, &stepped);
        outcome.bought = stepped;
        fraction
    }

    /// Returns the fraction of its change that one tenant may make.
    fn step_fraction(&self, tenant: usize, from: Bundle, to: Bundle, max: f64) -> f64 {
        let fair = self.fair_share(tenant);
        let part = |from: f64, to: f64, fair: f64| max.max(0.0) * fair / (to - from).abs();
        part(from.memory, to.memory, fair.memory).min(part(from.bandwidth, to.bandwidth, fair.bandwidth))
    }
}
