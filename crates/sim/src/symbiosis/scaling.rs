//! Markets with many tenants from the same traces (Spirit, figure 8), ready to be cleared. The
//! callers measure the time.

use fairness::{
    curve::Knot,
    market::{ClearingOptions, Market, MarketWarmStart, Outcome, RefineOptions, Tenant as Bidder},
    profile::TenantUtility,
};
use units::limits::REFINEMENT_TENANTS_MAX;

use super::{host::Host, mixes, tenant::Tenant};

/// Profiles of many tenants, and their host.
#[derive(Clone, Debug)]
pub struct ScalingTenants {
    host: Host,
    profiles: Vec<(Vec<Knot>, f64)>,
}

/// Tenants with their utilities.
#[derive(Debug)]
pub struct Bidders {
    host: Host,
    tenants: Vec<Bidder<TenantUtility>>,
}

/// Relative spread of the miss penalty around its mean.
const GAMMA_SPREAD: f64 = 0.2;
/// Fractional parts of its multiples are evenly distributed.
const GOLDEN_RATIO_CONJUGATE: f64 = 0.618_033_988_749_895;

impl ScalingTenants {
    /// Creates tenants from the traces in turn, with `memory` footprints per tenant and different
    /// miss penalties. As in mixes, one of six is compute-bound.
    pub fn new(traces: &[Tenant], tenants: usize, memory: f64) -> Self {
        let tenant = |at: usize| {
            let factor = 1.0 + GAMMA_SPREAD * (2.0 * (at as f64 * GOLDEN_RATIO_CONJUGATE).fract() - 1.0);
            (traces[at % traces.len()].measured().knots(), mixes::gamma(at) * factor)
        };
        Self { host: Host { memory: memory * tenants as f64 }, profiles: (0..tenants).map(tenant).collect() }
    }

    /// Creates the utilities from the miss-ratio curves.
    pub fn bidders(&self) -> Bidders {
        let bidder = |(knots, gamma): &(Vec<Knot>, f64)| {
            Bidder::new(1.0, self.host.supply(), self.host.utility(knots.clone(), *gamma, 1.0))
        };
        Bidders { host: self.host, tenants: self.profiles.iter().map(bidder).collect() }
    }

    /// Returns the tenants one epoch later, with slightly higher miss penalties.
    #[must_use]
    pub fn later(&self) -> Self {
        let later = |(at, (knots, gamma)): (usize, &(Vec<Knot>, f64))| {
            (knots.clone(), gamma * (1.0 + 0.01 * (at as f64 * GOLDEN_RATIO_CONJUGATE).fract()))
        };
        Self { profiles: self.profiles.iter().enumerate().map(later).collect(), ..*self }
    }
}

impl Bidders {
    /// Returns the number of tenants.
    pub fn count(&self) -> usize {
        self.tenants.len()
    }

    /// Returns whether a market of this size is refined.
    pub fn are_refined(&self) -> bool {
        self.tenants.len() <= REFINEMENT_TENANTS_MAX
    }

    /// Clears the market, warm-started from an earlier one.
    pub fn shares(&self, warm_start: MarketWarmStart) -> Outcome {
        self.market().clear(ClearingOptions { warm_start, turn: 0 })
    }

    /// Clears and refines the market.
    pub fn refined(&self, warm_start: MarketWarmStart) -> Outcome {
        let mut outcome = self.shares(warm_start);
        self.market().refine(&mut outcome, RefineOptions { envy_free: false, margin: 0.0 });
        outcome
    }

    fn market(&self) -> Market<'_, TenantUtility> {
        Market::new(self.host.supply(), &self.tenants).expect("tenants with equal weights and without limits")
    }
}
