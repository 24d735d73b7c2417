//! Who gets how much, by several schemes (Spirit 6): an equal split, Harvest, Trade, Symbiosis, and the ideal.

use fairness::market::{Bundle, Certificate, ClearingOptions, Market, RefineOptions};

use super::{
    host::{Host, part},
    ideal::ideal,
    tenant::{Curve, Tenant},
};

/// How it is decided who gets how much.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheme {
    /// Everybody the same: DRF where everybody asks for everything.
    EqualSplit,
    /// From who is best off to who is worst off, a step of either in turn.
    Harvest,
    /// Who is worst off trades a step of one for a step of the other with whoever gains most by it.
    Trade,
    /// The market alone, with miss ratios from reuse distances.
    Market,
    /// The market, refined as far as nobody comes to envy another.
    WithoutEnvy,
    /// The market, refined.
    Symbiosis,
    /// The largest geometric mean of throughputs with which nobody is worse off than with an equal split, known beforehand.
    Ideal,
}

impl Scheme {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EqualSplit => "equal split",
            Self::Harvest => "harvest",
            Self::Trade => "trade",
            Self::Market => "market",
            Self::WithoutEnvy => "symbiosis without envy",
            Self::Symbiosis => "symbiosis",
            Self::Ideal => "ideal",
        }
    }
}

/// What came of one scheme.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Which.
    pub scheme: Scheme,
    /// Parts of a footprint and of the link, for each tenant.
    pub shares: Vec<Bundle>,
    /// True throughput of each tenant against that with an equal split.
    pub against_equal: Vec<f64>,
    /// The market's, as it was told what tenants are like.
    pub certificate: Option<Certificate>,
}

impl Outcome {
    /// The geometric mean of what tenants have against an equal split, less 1.
    pub fn gain(&self) -> f64 {
        let logs: f64 = self.against_equal.iter().map(|times| times.ln()).sum();
        (logs / self.against_equal.len() as f64).exp() - 1.0
    }

    /// What the worst-off has against an equal split.
    pub fn worst(&self) -> f64 {
        self.against_equal.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Epochs of a scheme: what is learnt of the bandwidth that tenants want hangs on what they have.
const EPOCHS: u32 = 10;
/// Steps of all there is by which Harvest and Trade move: Spirit's 1/ε; and how many of them at most.
const STEPS: f64 = 200.0;
const MOVES_MAX: u32 = 400;

/// What all schemes come to.
///
/// # Panics
/// There is no tenant, or less than a MiB for them.
pub fn compare(tenants: &[Tenant], host: Host) -> Vec<Outcome> {
    let equal = host.equal(tenants.len());
    let curves: Vec<Curve> = tenants.iter().map(|tenant| tenant.measured().clone()).collect();
    let market = |scheme, aim| {
        let (shares, certificate) = symbiosis(tenants, host, aim);
        result(scheme, tenants, equal, shares, Some(certificate))
    };
    let told = Told {
        tenants,
        curves: &curves,
        equal,
        step: Bundle { memory: host.memory / STEPS, bandwidth: 1.0 / STEPS },
    };
    vec![
        result(Scheme::EqualSplit, tenants, equal, vec![equal; tenants.len()], None),
        result(Scheme::Harvest, tenants, equal, told.harvest(), None),
        result(Scheme::Trade, tenants, equal, told.trade(), None),
        market(Scheme::Market, None),
        market(Scheme::WithoutEnvy, Some(RefineOptions { envy_free: true, margin: 0.0 })),
        market(Scheme::Symbiosis, Some(RefineOptions { envy_free: false, margin: 0.0 })),
        result(Scheme::Ideal, tenants, equal, ideal(tenants, host.memory), None),
    ]
}

fn result(
    scheme: Scheme,
    tenants: &[Tenant],
    equal: Bundle,
    shares: Vec<Bundle>,
    certificate: Option<Certificate>,
) -> Outcome {
    let times = |(tenant, share): (&Tenant, &Bundle)| tenant.throughput(*share) / tenant.throughput(equal);
    let against_equal = tenants.iter().zip(&shares).map(times).collect();
    Outcome { scheme, shares, against_equal, certificate }
}

/// Shares by the market, epoch after epoch, each with what the one before showed.
fn symbiosis(tenants: &[Tenant], host: Host, aim: Option<RefineOptions>) -> (Vec<Bundle>, Certificate) {
    let mut shares = vec![host.equal(tenants.len()); tenants.len()];
    let mut how = ClearingOptions::default();
    let mut certificate = None;
    for _ in 0..EPOCHS {
        let worth = tenants.iter().zip(&shares).map(|(tenant, share)| host.learnt(tenant, *share));
        let supply = host.supply();
        let market: Vec<_> = worth.map(|worth| fairness::market::Tenant::new(1.0, supply, worth)).collect();
        let market = Market::new(supply, &market).expect("tenants with equal weights and without limits");
        let mut outcome = market.clear(how);
        if let Some(aim) = aim {
            market.refine(&mut outcome, aim);
        }
        certificate = Some(market.certify(&outcome));
        shares = outcome.shares.iter().map(part).collect();
        how = ClearingOptions { warm_start: outcome.warm_start, turn: 0 };
    }
    (shares, certificate.expect("there are epochs"))
}

/// What Harvest and Trade are told.
struct Told<'a> {
    tenants: &'a [Tenant],
    curves: &'a [Curve],
    equal: Bundle,
    step: Bundle,
}

impl Told<'_> {
    /// Throughput as it is estimated, against that with an equal split.
    fn value(&self, at: usize, share: Bundle) -> f64 {
        let tenant = &self.tenants[at];
        let estimated = |share: Bundle| {
            super::tenant::throughput(
                self.curves[at].misses(share.memory),
                tenant.gamma,
                tenant.wanted,
                share.bandwidth,
            )
        };
        estimated(share) / estimated(self.equal)
    }

    fn ends(&self, shares: &[Bundle]) -> (usize, usize) {
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|one, other| {
            self.value(*one, shares[*one]).total_cmp(&self.value(*other, shares[*other]))
        });
        (order[0], order[order.len() - 1])
    }

    /// After PARTIES, as Spirit adapts it: it looks at how well tenants do, not at what a step would do for them.
    fn harvest(&self) -> Vec<Bundle> {
        let mut shares = vec![self.equal; self.tenants.len()];
        for turn in 0..MOVES_MAX {
            let (worst, best) = self.ends(&shares);
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

    /// Step for step, without prices, as long as both gain.
    fn trade(&self) -> Vec<Bundle> {
        let mut shares = vec![self.equal; self.tenants.len()];
        for _ in 0..MOVES_MAX {
            let Some((one, other, sign)) = self.best_trade(&shares) else { break };
            shares[one] = self.traded(shares[one], sign);
            shares[other] = self.traded(shares[other], -sign);
        }
        shares
    }

    fn traded(&self, share: Bundle, sign: f64) -> Bundle {
        Bundle {
            memory: share.memory + sign * self.step.memory,
            bandwidth: share.bandwidth - sign * self.step.bandwidth,
        }
    }

    /// The worst-off that can trade, with whom, and whether it gets memory (1) or bandwidth (-1).
    fn best_trade(&self, shares: &[Bundle]) -> Option<(usize, usize, f64)> {
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|one, other| {
            self.value(*one, shares[*one]).total_cmp(&self.value(*other, shares[*other]))
        });
        let gain = |at: usize, sign: f64| {
            let traded = self.traded(shares[at], sign);
            let is_possible = traded.memory >= 0.0 && traded.bandwidth > 0.0;
            let gain =
                if is_possible { self.value(at, traded) / self.value(at, shares[at]) - 1.0 } else { -1.0 };
            Some(gain).filter(|gain| *gain > 1e-9)
        };
        order.iter().find_map(|one| {
            let with = order.iter().filter(|other| *other != one).flat_map(|other| {
                [1.0, -1.0]
                    .into_iter()
                    .filter_map(|sign| Some((*other, sign, gain(*one, sign)? + gain(*other, -sign)?)))
            });
            let best = with.reduce(|best, next| if next.2 > best.2 { next } else { best })?;
            Some((*one, best.0, best.1))
        })
    }
}
