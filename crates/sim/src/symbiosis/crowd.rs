//! Markets of ever more tenants out of the same traces (Spirit's figure 8), ready to be cleared. How long that takes is for those to say who have a clock.

use fairness::{
    curve::Knot,
    market::{ClearingOptions, Market, MarketWarmStart, Outcome, RefineOptions, Tenant as Bidder},
    profile::TenantUtility,
};
use units::limits::REFINEMENT_TENANTS_MAX;

use super::{host::Host, mixes, tenant::Tenant};

/// What is known of many tenants, and what there is for them.
#[derive(Clone, Debug)]
pub struct Crowd {
    host: Host,
    known: Vec<(Vec<Knot>, f64)>,
}

/// They, as they come to the market.
#[derive(Debug)]
pub struct Bidders {
    host: Host,
    tenants: Vec<Bidder<TenantUtility>>,
}

/// How much more or less than others one may wait.
const APART: f64 = 0.2;
/// The golden section: multiples of it, less what is whole, are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_895;

impl Crowd {
    /// So many, from one trace after the other, with so much memory for each; no two of one trace wait equally long. As in mixes, one of six reckons more
    /// than it waits.
    pub fn new(traces: &[Tenant], tenants: usize, memory: f64) -> Self {
        let tenant = |at: usize| {
            let wait = 1.0 + APART * (2.0 * (at as f64 * GOLDEN).fract() - 1.0);
            (traces[at % traces.len()].measured().knots(), mixes::gamma(at) * wait)
        };
        Self { host: Host { memory: memory * tenants as f64 }, known: (0..tenants).map(tenant).collect() }
    }

    /// What shares are worth to each, from its miss ratios.
    pub fn bidders(&self) -> Bidders {
        let bidder = |(knots, gamma): &(Vec<Knot>, f64)| {
            Bidder::new(1.0, self.host.supply(), self.host.worth(knots.clone(), *gamma, 1.0))
        };
        Bidders { host: self.host, tenants: self.known.iter().map(bidder).collect() }
    }

    /// The same, an epoch later: each waits a little longer than before.
    #[must_use]
    pub fn later(&self) -> Self {
        let later = |(at, (knots, gamma)): (usize, &(Vec<Knot>, f64))| {
            (knots.clone(), gamma * (1.0 + 0.01 * (at as f64 * GOLDEN).fract()))
        };
        Self { known: self.known.iter().enumerate().map(later).collect(), ..*self }
    }
}

impl Bidders {
    /// How many.
    pub fn count(&self) -> usize {
        self.tenants.len()
    }

    /// Whether a market of so many is refined at all.
    pub fn are_refined(&self) -> bool {
        self.tenants.len() <= REFINEMENT_TENANTS_MAX
    }

    /// What everybody gets, sought from where an earlier market ended.
    pub fn shares(&self, warm_start: MarketWarmStart) -> Outcome {
        self.market().clear(ClearingOptions { warm_start, turn: 0 })
    }

    /// The same, refined.
    pub fn refined(&self, warm_start: MarketWarmStart) -> Outcome {
        let mut outcome = self.shares(warm_start);
        self.market().refine(&mut outcome, RefineOptions { envy_free: false, margin: 0.0 });
        outcome
    }

    fn market(&self) -> Market<'_, TenantUtility> {
        Market::new(self.host.supply(), &self.tenants).expect("tenants with equal weights and without limits")
    }
}
