//! Markets with many tenants, created from a few traces (Spirit, figure 8). Callers clear the
//! markets and measure the time.

use std::sync::Arc;

use fairness::market::{Market, Outcome, Tenant as Bidder};
use units::limits::REFINEMENT_TENANTS_MAX;

use super::{
    host::Host,
    mixes,
    tenant::{MissRatioCurve, Tenant},
    utility::TraceUtility,
};

/// Miss-ratio curves and miss penalties of many tenants, and their host.
#[derive(Clone, Debug)]
pub struct ScalingTenants {
    host: Host,
    profiles: Vec<(Arc<MissRatioCurve>, f64)>,
}

/// Tenants of a market with their utilities.
#[derive(Debug)]
pub struct Bidders {
    host: Host,
    tenants: Vec<Bidder<TraceUtility>>,
}

/// Relative spread of the miss penalties: the factor ranges from 0.8 to 1.2.
const MISS_COST_SPREAD: f64 = 0.2;
/// Conjugate of the golden ratio. The fractional parts of its multiples are evenly distributed.
const GOLDEN_RATIO_CONJUGATE: f64 = 0.618_033_988_749_895;

impl ScalingTenants {
    /// Creates the given number of tenants from the traces in turn, with different miss penalties.
    /// The host has `memory` footprints per tenant. Every sixth tenant is compute-bound, as in the
    /// mixes.
    pub fn new(traces: &[Tenant], tenants: usize, memory: f64) -> Self {
        let tenant = |at: usize| {
            let factor = 1.0 + MISS_COST_SPREAD * (2.0 * (at as f64 * GOLDEN_RATIO_CONJUGATE).fract() - 1.0);
            (Arc::clone(traces[at % traces.len()].measured()), mixes::gamma(at) * factor)
        };
        Self { host: Host { memory: memory * tenants as f64 }, profiles: (0..tenants).map(tenant).collect() }
    }

    /// Creates the tenants of the market with utilities from the miss-ratio curves.
    pub fn bidders(&self) -> Bidders {
        let bidder = |(curve, gamma): &(Arc<MissRatioCurve>, f64)| {
            Bidder::new(1.0, self.host.supply(), self.host.utility(curve, *gamma, 1.0))
        };
        Bidders { host: self.host, tenants: self.profiles.iter().map(bidder).collect() }
    }
}

impl Bidders {
    /// Returns the number of tenants.
    pub fn count(&self) -> usize {
        self.tenants.len()
    }

    /// Returns whether the market is small enough for refinement.
    pub fn is_refinement_possible(&self) -> bool {
        self.tenants.len() <= REFINEMENT_TENANTS_MAX
    }

    /// Clears the market.
    pub fn shares(&self) -> Outcome {
        self.market().clear(0)
    }

    /// Clears the market and refines the result.
    pub fn refined(&self) -> Outcome {
        let mut outcome = self.shares();
        self.market().refine(&mut outcome);
        outcome
    }

    fn market(&self) -> Market<'_, TraceUtility> {
        Market::new(self.host.supply(), &self.tenants).expect("tenants with equal weights and without limits")
    }
}
