//! Not all at once: part of the way from the shares that tenants have to those of an outcome.
//!
//! What is estimated of a tenant is good near what it has (Spirit 4.1), so the paper searches five steps around it only; then a fair share need not be among
//! what is searched, and with it goes the promise that nobody is worse off. Here the market is cleared as ever, and everybody goes the same part of the
//! way there: what is between two splits of a supply is one too, and what is between two shares is worth no less than the lesser of both, unless
//! throughputs leap. Where somebody would lose on the way, there is no stop on it.

use super::{Market, Outcome, goods::Bundle, units_of, utility::Utility};

/// What a tenant may lose on the way against the worse of both ends, relative.
const LOSS: f64 = 1e-6;

impl<U: Utility> Market<'_, U> {
    /// Changes an outcome of this market so that nobody's share of either good changes by more than so much of its fair share, against `last`. Spirit's five
    /// steps of 1/200, with six tenants, are 0.15. Says which part of the way was gone: 1 is all of it.
    ///
    /// # Panics
    /// `last` is of a market with other tenants.
    pub fn pace(&self, outcome: &mut Outcome, last: &[Bundle], most: f64) -> f64 {
        assert_eq!(last.len(), self.tenants.len(), "shares of these tenants");
        let way = (0..last.len()).map(|tenant| self.way(tenant, last[tenant], outcome.bought[tenant], most));
        let way = way.fold(1.0, f64::min);
        let there =
            |tenant: usize| self.within_limits(tenant, last[tenant].towards(outcome.bought[tenant], way));
        let there: Vec<Bundle> = (0..last.len()).map(there).collect();
        let keeps = |tenant: usize| {
            let value = |bundle| self.tenants[tenant].utility.value(bundle);
            value(there[tenant]) >= (1.0 - LOSS) * value(last[tenant]).min(value(outcome.bought[tenant]))
        };
        if way >= 1.0 || !(0..last.len()).all(keeps) {
            return 1.0;
        }
        outcome.shares = units_of::shares(self, &there);
        outcome.bought = there;
        way
    }

    /// The part of its own way that a tenant may go.
    fn way(&self, tenant: usize, from: Bundle, to: Bundle, most: f64) -> f64 {
        let fair = self.fair(tenant);
        let part = |from: f64, to: f64, fair: f64| most.max(0.0) * fair / (to - from).abs();
        part(from.memory, to.memory, fair.memory).min(part(from.bandwidth, to.bandwidth, fair.bandwidth))
    }
}
