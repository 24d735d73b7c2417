//! One epoch of a host, decided: from what shares are worth to its tenants to who has how much from now on.
//!
//! The market says what would be best; here is how much of that is done at once. Estimates are good near what tenants have, so nobody's share moves by more
//! than half a fair share in an epoch; only if the next epoch, with what it has measured there, wants to go on the same way, that is done whole. What
//! would change next to nothing is not done, so that noise moves nothing.

use std::{collections::BTreeMap, sync::Arc};

use crate::market::{
    Aim, Bundle, Certificate, How, Market, MarketError, Share, Supply, Tenant, Trail, Utility,
};

/// The most that a share of either good moves in the first epoch that wants it to, in fair shares. Spirit's five steps of 1/200, with six tenants, are 0.15,
/// every epoch.
const PACE: f64 = 0.5;
/// That, and what is handed out beyond what was bought or is rounded.
const REACH: f64 = 1.2 * PACE;
/// Of a fair share, what a tenant keeps at least, and a unit at least if its fair share is one: who is estimated to need nothing may be wrongly estimated,
/// and with nothing it stands still. Of bandwidth it is more: who is given memory fills it through the link, and to who has enough of it now the link is
/// worth nothing until it changes.
const KEPT: Bundle = Bundle { memory: 0.1, bandwidth: 0.5 };
/// Of a fair share, what a share must move by to be moved: sizes are not known better.
const MOVED: f64 = 0.05;
/// So much more than a unit is still one when it was multiplied and divided.
const UNIT_ROUNDING: f64 = 1e-9;
/// What the geometric mean of throughputs must rise by for shares to be moved (Spirit's allocator: 1.005).
const WORTH_IT: f64 = 0.005;
/// What somebody may lack of its throughput with an equal split until shares are moved whatever that brings: estimates are no better.
const LACK_MAX: f64 = 0.02;

/// What tenants have, and what it was dealt out of.
#[derive(Clone, Debug, PartialEq)]
pub struct Dealt {
    /// All there was.
    pub supply: Supply,
    /// What each has, by its name.
    pub tenants: BTreeMap<Arc<str>, Weighed>,
}

/// What one has, by which weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weighed {
    /// More than 0.
    pub weight: f64,
    /// What it has.
    pub share: Share,
}

/// A tenant of this epoch.
#[derive(Clone, Debug)]
pub struct Member<U> {
    /// Its own among all that are here.
    pub name: Arc<str>,
    /// How much of everything it may have relative to others; more than 0.
    pub weight: f64,
    /// The least it must have of both; not more than its fair share. Some of that it has in any case.
    pub least: Share,
    /// What a share is worth to it.
    pub utility: U,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Shares move so much of the way, more than 0 to 1, to where the market wants them.
    Set {
        /// 1 is all of it.
        way: f64,
    },
    /// They stay: new ones would be next to no better.
    Held,
}

/// What came of an epoch.
#[derive(Clone, Debug)]
pub struct Decision {
    /// What is done.
    pub change: Change,
    /// What each tenant has from now on, in the order in which they were told.
    pub shares: Vec<Share>,
    /// An equal split, by weight.
    pub fair: Vec<Share>,
    /// Throughput with that against an equal split, as estimated.
    pub gains: Vec<f64>,
    /// Of what is done; if nothing is, of what would have been.
    pub certificate: Certificate,
}

/// The epochs of one host.
#[derive(Clone, Debug, Default)]
pub struct Epochs {
    dealt: Option<Dealt>,
    /// Which way the last epoch wanted to go with each tenant's share; nowhere, if it wanted nothing.
    aimed: BTreeMap<Arc<str>, Bundle>,
    trail: Trail,
    turn: usize,
}

impl Epochs {
    /// Goes on from what tenants have, if that is known.
    pub fn from(dealt: Option<Dealt>) -> Self {
        Self { dealt, ..Self::default() }
    }

    /// What tenants have.
    pub fn dealt(&self) -> Option<&Dealt> {
        self.dealt.as_ref()
    }

    /// Decides for these tenants. What they have is thought to be so when this returns: see [`Epochs::undone`].
    ///
    /// # Errors
    /// There can be no such market; nothing changes.
    pub fn decide<U: Utility>(
        &mut self,
        supply: Supply,
        members: &[Member<U>],
    ) -> Result<Decision, MarketError> {
        let tenants = tenants(supply, members);
        let market = Market::new(supply, &tenants)?;
        let had = self.had(&market, members);
        let mut outcome = market.clear(How { trail: std::mem::take(&mut self.trail), turn: self.turn });
        market.refine(&mut outcome, Aim { without_envy: true, margin: 0.0 });
        self.trail = std::mem::take(&mut outcome.trail);
        self.turn = self.turn.wrapping_add(1);
        let same = self.dealt.as_ref().and_then(|dealt| dealt.of(supply, members));
        let is_idle = same.is_some() && !is_worth_it(&market, &had, &outcome.bought);
        let is_agreed = self.agrees(&market, members, &had, &outcome.bought);
        self.aim(members, &had, if is_idle { &had } else { &outcome.bought });
        let way = if is_idle || is_agreed { 1.0 } else { market.pace(&mut outcome, &had, PACE) };
        // Where throughputs leap there may be no stop on the way: then there is none before the next epoch agrees.
        let is_leap =
            !is_agreed && (0..had.len()).any(|at| !market.is_near(at, had[at], outcome.bought[at], REACH));
        let held = same.filter(|_| is_idle || is_leap);
        let change = if held.is_some() { Change::Held } else { Change::Set { way } };
        let certificate = market.certify(&outcome);
        let shares = held.unwrap_or(outcome.shares);
        let gains = (0..members.len()).map(|at| market.gain(at, shares[at].into())).collect();
        let fair = (0..members.len()).map(|at| market.fair(at).floor()).collect();
        let weighed = members.iter().zip(&shares).map(|(member, share)| {
            (Arc::clone(&member.name), Weighed { weight: member.weight, share: *share })
        });
        self.dealt = Some(Dealt { supply, tenants: weighed.collect() });
        Ok(Decision { change, shares, fair, gains, certificate })
    }

    /// What was decided last was not done: this is what tenants have.
    pub fn undone(&mut self, dealt: Option<Dealt>) {
        self.dealt = dealt;
        self.aimed.clear();
    }

    /// Whether the last epoch wanted to go the same way with every share that is not within reach anyway.
    fn agrees<U: Utility>(
        &self,
        market: &Market<'_, &U>,
        members: &[Member<U>],
        had: &[Bundle],
        wanted: &[Bundle],
    ) -> bool {
        members.iter().enumerate().all(|(at, member)| {
            let (fair, way) = (market.fair(at), wanted[at].minus(had[at]));
            let before = self.aimed.get(&member.name).copied().unwrap_or_default();
            let is_so = |way: f64, before: f64, fair: f64| way.abs() <= PACE * fair || way * before > 0.0;
            is_so(way.memory, before.memory, fair.memory)
                && is_so(way.bandwidth, before.bandwidth, fair.bandwidth)
        })
    }

    fn aim<U>(&mut self, members: &[Member<U>], had: &[Bundle], wanted: &[Bundle]) {
        let ways = had.iter().zip(wanted).map(|(had, wanted)| wanted.minus(*had));
        self.aimed = members.iter().map(|member| Arc::clone(&member.name)).zip(ways).collect();
    }

    /// What tenants had, as a split of what there is now among those that are here now: each keeps what it has of its fair share, and who has just come begins
    /// with a whole one.
    fn had<U: Utility>(&self, market: &Market<'_, &U>, members: &[Member<U>]) -> Vec<Bundle> {
        let ratios = self.dealt.as_ref().map_or_else(BTreeMap::new, Dealt::of_fair);
        let ratio = |name: &str| ratios.get(name).copied().unwrap_or(WHOLE);
        let one = |(at, member): (usize, &Member<U>)| market.fair(at).times(ratio(&member.name));
        let mut had: Vec<Bundle> = members.iter().enumerate().map(one).collect();
        let (sum, all): (Bundle, _) = (had.iter().copied().sum(), market.all());
        let less = |sum: f64, all: f64| (all / sum).min(1.0);
        let less =
            Bundle { memory: less(sum.memory, all.memory), bandwidth: less(sum.bandwidth, all.bandwidth) };
        for (at, one) in had.iter_mut().enumerate() {
            *one = market.within_limits(at, one.times(less));
        }
        market.cut_to_supply(&mut had);
        had
    }
}

/// A whole fair share.
const WHOLE: Bundle = Bundle { memory: 1.0, bandwidth: 1.0 };

impl Dealt {
    /// What each tenant has of its fair share.
    fn of_fair(&self) -> BTreeMap<&str, Bundle> {
        let parts = parts(self.supply, self.tenants.values().map(|one| one.weight).collect());
        let all = Bundle::from(self.supply.all());
        let ratio = |one: &Weighed, part: f64| {
            let Bundle { memory, bandwidth } = one.share.into();
            Bundle { memory: memory / (all.memory * part), bandwidth: bandwidth / (all.bandwidth * part) }
        };
        self.tenants.iter().zip(parts).map(|((name, one), part)| (&**name, ratio(one, part))).collect()
    }

    /// What these tenants have, if they are those that are here, with these weights, and there is as much for them as there was.
    fn of<U>(&self, supply: Supply, members: &[Member<U>]) -> Option<Vec<Share>> {
        let share = |member: &Member<U>| {
            let Weighed { weight, share } = *self.tenants.get(&member.name)?;
            let is_so = weight == member.weight
                && share.memory_mib >= member.least.memory_mib
                && share.bandwidth_mb_s >= member.least.bandwidth_mb_s;
            is_so.then_some(share)
        };
        if self.supply != supply || self.tenants.len() != members.len() {
            return None;
        }
        members.iter().map(share).collect()
    }
}

/// As the market knows them.
fn tenants<U>(supply: Supply, members: &[Member<U>]) -> Vec<Tenant<&U>> {
    let parts = parts(supply, members.iter().map(|member| member.weight).collect());
    let least = |member: &Member<U>, part: f64| {
        let fair = Bundle::from(supply.all()).times(Bundle { memory: part, bandwidth: part });
        let (kept, whole) = (fair.times(KEPT).floor(), fair.floor());
        let least = |asked: u64, kept: u64, whole: u64| asked.max(kept).max(whole.min(1));
        Share {
            memory_mib: least(member.least.memory_mib, kept.memory_mib, whole.memory_mib),
            bandwidth_mb_s: least(member.least.bandwidth_mb_s, kept.bandwidth_mb_s, whole.bandwidth_mb_s),
        }
    };
    let tenant =
        |(member, part)| Tenant { least: least(member, part), ..Tenant::new(part, supply, &member.utility) };
    members.iter().zip(parts).map(tenant).collect()
}

/// Weights as parts of all. Nobody's is so little that its fair share would be less than a unit of either good, as long as there is one for each.
fn parts(supply: Supply, weights: Vec<f64>) -> Vec<f64> {
    let units = supply.memory_mib.min(supply.bandwidth_mb_s) as f64;
    let least = (1.0 + UNIT_ROUNDING) / units;
    let can_be = least * weights.len() as f64 <= 1.0
        && weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
    if !can_be {
        // What is no weight the market says.
        let all: f64 = weights.iter().sum();
        return weights.into_iter().map(|weight| weight / all).collect();
    }
    let mut is_raised = vec![false; weights.len()];
    loop {
        let left = 1.0 - is_raised.iter().filter(|raised| **raised).count() as f64 * least;
        let others: f64 =
            weights.iter().zip(&is_raised).filter(|(_, raised)| !**raised).map(|(weight, _)| weight).sum();
        let part = |at: usize| if is_raised[at] { least } else { weights[at] / others * left };
        let parts: Vec<f64> = (0..weights.len()).map(part).collect();
        if parts.iter().all(|part| *part >= least) {
            return parts;
        }
        is_raised = parts.iter().zip(is_raised).map(|(part, raised)| raised || *part < least).collect();
    }
}

/// Whether somebody's share would be another, and tenants do enough better with `new` than with what they have, or somebody has less than it is due.
fn is_worth_it<U: Utility>(market: &Market<'_, U>, had: &[Bundle], new: &[Bundle]) -> bool {
    if (0..had.len()).all(|at| market.is_near(at, had[at], new[at], MOVED)) {
        return false;
    }
    let lacks = |(at, bundle): (usize, &Bundle)| market.gain(at, *bundle) < 1.0 - LACK_MAX;
    market.mean_gain(new) - market.mean_gain(had) > WORTH_IT || had.iter().enumerate().any(lacks)
}

#[cfg(test)]
mod tests;
