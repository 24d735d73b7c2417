//! Allocation schemes of the comparison (Spirit, section 6): equal split, Harvest, Trade, Symbiosis
//! and the ideal allocation.

use fairness::market::{Bundle, Certificate, Market};

use super::{
    host::{Host, to_bundle},
    ideal::ideal_shares,
    tenant::Tenant,
};

/// Scheme that allocates memory and bandwidth to tenants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheme {
    /// Equal shares. DRF gives the same result if every tenant demands all resources.
    EqualSplit,
    /// Moves one step of memory or of bandwidth, in turn, from the tenant with the highest relative
    /// throughput to the tenant with the lowest.
    Harvest,
    /// Exchanges a step of memory for a step of bandwidth between two tenants. One has the lowest
    /// relative throughput; the other is the partner with the largest total gain.
    Trade,
    /// Market without refinement, with miss ratios from sampled reuse distances.
    Market,
    /// Market with refinement, as the agent computes shares.
    Symbiosis,
    /// Allocation with the largest geometric mean of the true throughputs. No tenant has a lower
    /// throughput than with an equal split.
    Ideal,
}

impl Scheme {
    /// Returns the name of the scheme for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EqualSplit => "equal split",
            Self::Harvest => "harvest",
            Self::Trade => "trade",
            Self::Market => "market",
            Self::Symbiosis => "symbiosis",
            Self::Ideal => "ideal",
        }
    }
}

/// Result of one allocation scheme for a mix of tenants.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Scheme that computed the shares.
    pub scheme: Scheme,
    /// Share of each tenant: memory in footprints, bandwidth as a fraction of the link.
    pub shares: Vec<Bundle>,
    /// True throughput of each tenant, relative to its throughput with an equal split.
    pub relative_throughputs: Vec<f64>,
    /// Certificate of the market, computed from the utilities that the tenants report. `None` for
    /// schemes without a market.
    pub certificate: Option<Certificate>,
}

impl Outcome {
    /// Returns the geometric mean of the relative throughputs minus 1: 0.1 is a gain of 10 %.
    pub fn gain(&self) -> f64 {
        let logs: f64 = self.relative_throughputs.iter().map(|times| times.ln()).sum();
        (logs / self.relative_throughputs.len() as f64).exp() - 1.0
    }

    /// Returns the lowest relative throughput of all tenants.
    pub fn worst(&self) -> f64 {
        self.relative_throughputs.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Number of market epochs. Several epochs are needed because the measured bandwidth demand depends
/// on the shares of the previous epoch.
const MARKET_EPOCHS: u32 = 10;
/// Number of steps into which Harvest and Trade divide each resource (1/ε in Spirit).
const STEPS_PER_RESOURCE: f64 = 200.0;
/// Maximum number of moves in Harvest and of exchanges in Trade.
const SCHEME_MOVES_MAX: u32 = 400;

/// Runs all allocation schemes for the same tenants and host.
///
/// # Panics
/// Panics if `tenants` is empty or the host has less than 1 MiB of memory.
pub fn compare_schemes(tenants: &[Tenant], host: Host) -> Vec<Outcome> {
    let equal = host.equal(tenants.len());
    let market = |scheme, is_refined| {
        let (shares, certificate) = run_market(tenants, host, is_refined);
        to_outcome(scheme, tenants, equal, shares, Some(certificate))
    };
    let estimates = Estimates {
        tenants,
        equal,
        step: Bundle { memory: host.memory / STEPS_PER_RESOURCE, bandwidth: 1.0 / STEPS_PER_RESOURCE },
    };
    vec![
        to_outcome(Scheme::EqualSplit, tenants, equal, vec![equal; tenants.len()], None),
        to_outcome(Scheme::Harvest, tenants, equal, estimates.harvest_shares(), None),
        to_outcome(Scheme::Trade, tenants, equal, estimates.trade_shares(), None),
        market(Scheme::Market, false),
        market(Scheme::Symbiosis, true),
        to_outcome(Scheme::Ideal, tenants, equal, ideal_shares(tenants, host.memory), None),
    ]
}

fn to_outcome(
    scheme: Scheme,
    tenants: &[Tenant],
    equal: Bundle,
    shares: Vec<Bundle>,
    certificate: Option<Certificate>,
) -> Outcome {
    let times = |(tenant, share): (&Tenant, &Bundle)| tenant.throughput(*share) / tenant.throughput(equal);
    let relative_throughputs = tenants.iter().zip(&shares).map(times).collect();
    Outcome { scheme, shares, relative_throughputs, certificate }
}

/// Runs the market for several epochs. Each epoch uses the values measured in the previous epoch.
fn run_market(tenants: &[Tenant], host: Host, is_refined: bool) -> (Vec<Bundle>, Certificate) {
    let mut shares = vec![host.equal(tenants.len()); tenants.len()];
    let mut certificate = None;
    for _ in 0..MARKET_EPOCHS {
        let utilities =
            tenants.iter().zip(&shares).map(|(tenant, share)| host.measured_utility(tenant, *share));
        let supply = host.supply();
        let market: Vec<_> =
            utilities.map(|utility| fairness::market::Tenant::new(1.0, supply, utility)).collect();
        let market = Market::new(supply, &market).expect("tenants with equal weights and without limits");
        let mut outcome = market.clear(0);
        if is_refined {
            market.refine(&mut outcome);
        }
        certificate = Some(market.certify(&outcome));
        shares = outcome.shares.iter().map(to_bundle).collect();
    }
    (shares, certificate.expect("MARKET_EPOCHS is above 0"))
}

/// Inputs of the Harvest and Trade schemes: tenants, their measured curves, and the step size.
struct Estimates<'a> {
    tenants: &'a [Tenant],
    equal: Bundle,
    step: Bundle,
}

impl Estimates<'_> {
    /// Estimates the throughput of a tenant relative to an equal split, from its measured curve.
    fn relative_throughput(&self, at: usize, share: Bundle) -> f64 {
        let tenant = &self.tenants[at];
        let estimated = |share: Bundle| {
            super::tenant::throughput(
                tenant.measured().misses(share.memory),
                tenant.gamma,
                tenant.wanted,
                share.bandwidth,
            )
        };
        estimated(share) / estimated(self.equal)
    }

    fn worst_and_best(&self, shares: &[Bundle]) -> (usize, usize) {
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|a, b| {
            self.relative_throughput(*a, shares[*a]).total_cmp(&self.relative_throughput(*b, shares[*b]))
        });
        (order[0], order[order.len() - 1])
    }

    /// Computes the shares of the Harvest scheme (PARTIES as adapted by Spirit). Each move compares
    /// the current throughputs only, not the effect of the move.
    fn harvest_shares(&self) -> Vec<Bundle> {
        let mut shares = vec![self.equal; self.tenants.len()];
        for turn in 0..SCHEME_MOVES_MAX {
            let (worst, best) = self.worst_and_best(&shares);
            let step = if turn % 2 == 0 {
                Bundle { bandwidth: 0.0, ..self.step }
            } else {
                Bundle { memory: 0.0, ..self.step }
            };
            let less = Bundle {
                memory: shares[best].memory - step.memory,
                bandwidth: shares[best].bandwidth - step.bandwidth,
            };
            if worst == best || less.memory < 0.0 || less.bandwidth <= 0.0 {
                break;
            }
            shares[best] = less;
            shares[worst].memory += step.memory;
            shares[worst].bandwidth += step.bandwidth;
        }
        shares
    }

    /// Computes the shares of the Trade scheme: tenants exchange steps as long as both gain.
    fn trade_shares(&self) -> Vec<Bundle> {
        let mut shares = vec![self.equal; self.tenants.len()];
        for _ in 0..SCHEME_MOVES_MAX {
            let Some((one, other, sign)) = self.best_trade(&shares) else { break };
            shares[one] = self.share_after_trade(shares[one], sign);
            shares[other] = self.share_after_trade(shares[other], -sign);
        }
        shares
    }

    fn share_after_trade(&self, share: Bundle, sign: f64) -> Bundle {
        Bundle {
            memory: share.memory + sign * self.step.memory,
            bandwidth: share.bandwidth - sign * self.step.bandwidth,
        }
    }

    /// Returns the next trade: a tenant, its partner, and a sign. The tenant has the lowest
    /// relative throughput of all tenants that can trade. The sign is 1.0 if the tenant receives
    /// memory and -1.0 if the tenant receives bandwidth.
    fn best_trade(&self, shares: &[Bundle]) -> Option<(usize, usize, f64)> {
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|a, b| {
            self.relative_throughput(*a, shares[*a]).total_cmp(&self.relative_throughput(*b, shares[*b]))
        });
        let gain = |at: usize, sign: f64| {
            let after_trade = self.share_after_trade(shares[at], sign);
            let is_possible = after_trade.memory >= 0.0 && after_trade.bandwidth > 0.0;
            let gain = if is_possible {
                self.relative_throughput(at, after_trade) / self.relative_throughput(at, shares[at]) - 1.0
            } else {
                -1.0
            };
            Some(gain).filter(|gain| *gain > 1e-9)
        };
        order.iter().find_map(|one| {
            let trades = order.iter().filter(|other| *other != one).flat_map(|other| {
                [1.0, -1.0]
                    .into_iter()
                    .filter_map(|sign| Some((*other, sign, gain(*one, sign)? + gain(*other, -sign)?)))
            });
            let best = trades.reduce(|best, next| if next.2 > best.2 { next } else { best })?;
            Some((*one, best.0, best.1))
        })
    }
}
