//! How much risk goes to which of the two forecasts (Pond 4.6, Eq. 1): VMs with a history that are told to be insensitive are placed on
//! the pool whole, and of all others what is told to be frigid. Given what each forecast buys at what risk, the two operating points that
//! put most memory on the pool. How such points are measured is `frigid::trial`'s and `sensitivity::trial`'s.
//!
//! Erratum. Eq. 1 is printed as: maximise LI + FM subject to FP + OP <= X. That adds a share of VMs to a share of memory, counts frigid
//! memory again on VMs that are on the pool already, and takes every overprediction for a miss; it forbids the paper's own operating point
//! (40 % of memory at X = 2 %, section 6.4.3). What is solved here, with h the share of VMs with a history and r the probability that an
//! overpredicted VM is slowed down beyond the margin:
//!
//! - maximise `pool = h LI + (1 - h LI) FM`
//! - subject to `miss = h FP + (1 - h LI) OP r <= X`
//!
//! It takes VMs with a history to be as large as others, and those left to be overpredicted as often as all.

use serde::{Deserialize, Serialize};
use units::Fraction;

/// One operating point of the forecast of sensitivity. The default places nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Insensitive {
    /// FP: workloads wrongly placed, over all workloads; at most `placed`.
    pub fp: Fraction,
    /// LI: workloads placed on the pool whole, over all workloads.
    pub placed: Fraction,
}

/// One operating point of the forecast of frigid memory. The default takes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Frigid {
    /// OP: VMs of whose memory too much is placed, over all VMs that it is forecast for.
    pub op: Fraction,
    /// FM: memory placed on the pool, over all memory of those VMs.
    pub share: Fraction,
}

/// Which VMs there are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// h: VMs with enough of a history to tell whether they are insensitive, over all VMs. The others are never placed whole. 0.8 in
    /// section 6.1.
    pub history: Fraction,
    /// r: how likely a VM is slowed down beyond the margin if too much of its memory is on the pool. About 0.25 for a margin of 5 % in
    /// section 6.5.
    pub exceeds: Fraction,
}

/// Two operating points and what comes of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Where the forecast of sensitivity is operated.
    pub insensitive: Insensitive,
    /// Where the forecast of frigid memory is operated, for all VMs that are not placed whole.
    pub frigid: Frigid,
    /// Memory on the pool over all memory, 0 to 1.
    pub pool: f64,
    /// VMs expected to be slowed down beyond the margin over all VMs, 0 to 1: scheduling mispredictions.
    pub miss: f64,
}

impl Choice {
    /// What comes of two points.
    pub fn new(insensitive: Insensitive, frigid: Frigid, mix: Mix) -> Self {
        let (history, exceeds) = (mix.history.get(), mix.exceeds.get());
        let whole = history * insensitive.placed.get();
        Self {
            insensitive,
            frigid,
            pool: whole + (1.0 - whole) * frigid.share.get(),
            miss: history * insensitive.fp.get() + (1.0 - whole) * frigid.op.get() * exceeds,
        }
    }

    /// By which of two choices with the same pool and the same misses one is taken, so that the order of points does not matter.
    fn settings(&self) -> [f64; 4] {
        let Self { insensitive, frigid, .. } = self;
        [insensitive.fp, insensitive.placed, frigid.op, frigid.share].map(Fraction::get)
    }
}

/// The two points with the most memory on the pool at which at most `x` of all VMs are expected to be slowed down beyond the margin; of
/// several, the one with the fewest misses. Only points that were measured are chosen, and nothing between them; to place nothing is always
/// allowed, so there is always a choice. Points may come in any order and twice.
pub fn solve(insensitive: &[Insensitive], frigid: &[Frigid], mix: Mix, x: Fraction) -> Choice {
    let mut choices = frontier(insensitive, frigid, mix);
    let within = choices.partition_point(|choice| choice.miss <= x.get());
    choices.swap_remove(within.checked_sub(1).expect("to place nothing misses nothing"))
}

/// What [`solve`] chooses for each `x` there can be, fewest misses first: each next one places more and misses more. The first places
/// nothing, unless something may be placed without a miss. Looks at each pair of points.
pub fn frontier(insensitive: &[Insensitive], frigid: &[Frigid], mix: Mix) -> Vec<Choice> {
    let or_nobody = [Insensitive::default()].into_iter().chain(insensitive.iter().copied());
    let or_nothing = [Frigid::default()].into_iter().chain(frigid.iter().copied());
    let pairs = or_nobody.flat_map(|one| or_nothing.clone().map(move |other| (one, other)));
    let mut choices: Vec<Choice> = pairs.map(|(one, other)| Choice::new(one, other, mix)).collect();
    choices.sort_unstable_by(|one, other| {
        let by_settings = || one.settings().partial_cmp(&other.settings()).expect("shares are numbers");
        one.miss.total_cmp(&other.miss).then(other.pool.total_cmp(&one.pool)).then_with(by_settings)
    });
    let mut most = f64::NEG_INFINITY;
    choices.retain(|choice| {
        let is_more = choice.pool > most;
        most = most.max(choice.pool);
        is_more
    });
    choices
}

#[cfg(test)]
mod tests;
