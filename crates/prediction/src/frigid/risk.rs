//! How likely each share of a VM's memory is to be too much, and which share to take. Pond asks for the same quantile of
//! every VM; that takes as much risk for one GiB as for a hundred. What the operator limits is how many VMs may be hit (OP, and
//! with it X, of Eq. 1), so that risk buys most where GiB gained are weighed against VMs risked, at one price for all.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction};

use super::history::gib;

/// Shares of outcomes that stay below: what trees are asked for.
pub const LEVELS: [f64; 15] =
    [0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5];
/// How much likelier than VMs on average one VM may be hit, as the model has it: what is asked of all is not all taken of a few.
const RISK_OVER_RATE_MAX: f64 = 5.0;

/// Of one VM, the share of its memory that is too much with the probability of each of the [`LEVELS`]; ascending.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; LEVELS.len()]")]
pub struct Curve([f64; LEVELS.len()]);

/// How much risk is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Appetite {
    /// GiB that one VM more hit must bring.
    pub price: f64,
    /// The most that one VM is risked, 0 to 1.
    pub risk_max: f64,
}

/// What is taken of a VM: a share of its memory, and how likely that is to be too much; both 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stake {
    /// Share of its memory.
    pub share: f64,
    /// Probability that it is too much, as the model has it, times the caution that its owner is due.
    pub risk: f64,
}

impl Appetite {
    /// At this price, where the rate asked for is this.
    pub fn new(price: f64, rate: Fraction) -> Self {
        Self { price, risk_max: rate.get() * RISK_OVER_RATE_MAX }
    }
}

impl From<[f64; LEVELS.len()]> for Curve {
    fn from(shares: [f64; LEVELS.len()]) -> Self {
        Self::new(shares)
    }
}

impl Curve {
    /// As a model says it, put in order: quantiles may not cross. Where it says no number there is nothing to take.
    pub fn new(mut shares: [f64; LEVELS.len()]) -> Self {
        let share = |said: f64| if said.is_nan() { 0.0 } else { said.clamp(0.0, 1.0) };
        shares.iter_mut().for_each(|said| *said = share(*said));
        shares.sort_unstable_by(f64::total_cmp);
        Self(shares)
    }

    /// The share at which GiB gained less the price of the risk are most; nothing if no share is worth its risk. Where outcomes
    /// were `caution` times as often below a share as the trees had it, risks are that much larger.
    pub fn stake(&self, requested: Bytes, appetite: Appetite, caution: f64) -> Stake {
        let worth = |stake: &Stake| gib(requested) * stake.share - appetite.price * stake.risk;
        let stakes =
            self.0.iter().zip(LEVELS).map(|(share, level)| Stake { share: *share, risk: level * caution });
        let allowed = stakes.take_while(|stake| stake.risk <= appetite.risk_max);
        allowed.fold(Stake::default(), |best, stake| if worth(&stake) > worth(&best) { stake } else { best })
    }

    /// The share at one of the levels, by its index.
    ///
    /// # Panics
    /// There is no such level.
    pub fn at_level(&self, level: usize) -> f64 {
        self.0[level]
    }
}
