//! Epoch allocator: decides the shares of a host's tenants at the end of each epoch.
//!
//! The market computes the target; this module decides how much of the change is applied at once.
//! Estimates are accurate near the current shares only. A share therefore moves by at most half a
//! fair share per epoch, unless the next epoch, with its new measurements, confirms the direction:
//! then the rest is applied whole. Changes of negligible benefit are skipped, so that noise does
//! not move shares (hysteresis).

use std::{collections::BTreeMap, sync::Arc};

use crate::market::{
    Bundle, Certificate, ClearingOptions, Market, MarketError, MarketWarmStart, RefineOptions, Share, Supply,
    Tenant, Utility,
};

/// Largest change of a share in the first epoch of a change, in fair shares. Spirit's five steps of
/// 1/200, with six tenants, correspond to 0.15 in every epoch.
const STEP_MAX: f64 = 0.5;
/// `STEP_MAX` plus a margin for rounding and for distributed unsold supply.
const STEP_MAX_ROUNDED: f64 = 1.2 * STEP_MAX;
/// Part of its fair share that each tenant keeps, and at least one unit if its fair share is at
/// least one. A tenant estimated to need nothing may be misestimated, and stops without any. The
/// part is larger for bandwidth: a tenant that receives memory fills it over the link, and a tenant
/// with sufficient bandwidth assigns none to the link until its behavior changes.
const RESERVED_FRACTION: Bundle = Bundle { memory: 0.1, bandwidth: 0.5 };
/// Smallest change of a share that is applied, in fair shares. Sizes are not measured more
/// accurately.
const MOVE_MIN: f64 = 0.05;
/// Relative margin that keeps one unit from becoming less by rounding.
const UNIT_ROUNDING: f64 = 1e-9;
/// Smallest gain of the logarithm of the geometric mean of throughputs for which shares are moved.
/// Spirit's allocator uses a factor of 1.005.
const LOG_MEAN_GAIN_MIN: f64 = 0.005;
/// Relative shortfall of throughput against an equal split from which shares are moved regardless
/// of the gain. Estimates are not more accurate.
const SHORTFALL_MAX: f64 = 0.02;

/// Shares that are in force, and the supply they were computed from.
#[derive(Clone, Debug, PartialEq)]
pub struct AppliedShares {
    /// Supply at that time.
    pub supply: Supply,
    /// Weight and share of each tenant, by name.
    pub tenants: BTreeMap<Arc<str>, WeightedShare>,
}

/// Share of a tenant with the weight it was computed for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedShare {
    /// Weight, more than 0.
    pub weight: f64,
    /// Share in whole units.
    pub share: Share,
}

/// Tenant of an epoch.
#[derive(Clone, Debug)]
pub struct Member<U> {
    /// Name, unique among the tenants of the epoch.
    pub name: Arc<str>,
    /// Weight relative to the other tenants, more than 0.
    pub weight: f64,
    /// Minimum share of both goods, at most the fair share. A small part of the fair share is
    /// reserved in any case.
    pub min: Share,
    /// Value of a bundle to the tenant.
    pub utility: U,
}

/// Change of shares decided by an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Shares move toward the market outcome.
    Set {
        /// Fraction of the change that is applied, more than 0 and at most 1.
        step_fraction: f64,
    },
    /// Shares stay: the gain is negligible, or the change cannot be applied in part and awaits
    /// confirmation.
    Unchanged,
}

/// Result of an epoch.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Decided change.
    pub change: Change,
    /// Share of each tenant until the next epoch, in the order of the input.
    pub shares: Vec<Share>,
    /// Fair share of each tenant: an equal split by weight.
    pub fair: Vec<Share>,
    /// Estimated ratio of throughput to the throughput of the fair share, for each tenant.
    pub gains: Vec<f64>,
    /// Certificate of the applied outcome, or of the rejected one if shares stay.
    pub certificate: Certificate,
}

/// Allocator of one host: keeps the applied shares and the state that carries over between epochs.
#[derive(Clone, Debug, Default)]
pub struct EpochAllocator {
    applied: Option<AppliedShares>,
    /// Change that the last epoch wanted for each tenant; zero if it wanted none.
    directions: BTreeMap<Arc<str>, Bundle>,
    warm_start: MarketWarmStart,
    turn: usize,
}

impl EpochAllocator {
    /// Resumes from applied shares, if there are any.
    pub fn resume(applied: Option<AppliedShares>) -> Self {
        Self { applied, ..Self::default() }
    }

    /// Returns the shares in force.
    pub fn applied(&self) -> Option<&AppliedShares> {
        self.applied.as_ref()
    }

    /// Decides the shares of these tenants and assumes that the caller applies them. A caller that
    /// fails to apply them calls [`EpochAllocator::rollback`].
    ///
    /// # Errors
    /// A [`MarketError`] if the input does not define a market; the state is unchanged.
    pub fn decide<U: Utility>(
        &mut self,
        supply: Supply,
        members: &[Member<U>],
    ) -> Result<Decision, MarketError> {
        let tenants = tenants(supply, members);
        let market = Market::new(supply, &tenants)?;
        let current = self.current_bundles(&market, members);
        let mut outcome = market
            .clear(ClearingOptions { warm_start: std::mem::take(&mut self.warm_start), turn: self.turn });
        market.refine(&mut outcome, RefineOptions { envy_free: true, margin: 0.0 });
        self.warm_start = std::mem::take(&mut outcome.warm_start);
        self.turn = self.turn.wrapping_add(1);
        let matching = self.applied.as_ref().and_then(|applied| applied.matching_shares(supply, members));
        let is_unchanged = matching.is_some() && !is_worthwhile(&market, &current, &outcome.bought);
        let is_confirmed = self.confirms_direction(&market, members, &current, &outcome.bought);
        self.record_directions(members, &current, if is_unchanged { &current } else { &outcome.bought });
        let step_fraction = if is_unchanged || is_confirmed {
            1.0
        } else {
            market.limit_step(&mut outcome, &current, STEP_MAX)
        };
        // If utilities jump, a partial step may not be possible. Shares then stay until the next
        // epoch confirms the change.
        let is_jump = !is_confirmed
            && (0..current.len())
                .any(|at| !market.is_near(at, current[at], outcome.bought[at], STEP_MAX_ROUNDED));
        let unchanged = matching.filter(|_| is_unchanged || is_jump);
        let change = if unchanged.is_some() { Change::Unchanged } else { Change::Set { step_fraction } };
        let certificate = market.certify(&outcome);
        let shares = unchanged.unwrap_or(outcome.shares);
        let gains = (0..members.len()).map(|at| market.gain(at, shares[at].into())).collect();
        let fair = (0..members.len()).map(|at| market.fair_share(at).floor()).collect();
        let weighted = members.iter().zip(&shares).map(|(member, share)| {
            (Arc::clone(&member.name), WeightedShare { weight: member.weight, share: *share })
        });
        self.applied = Some(AppliedShares { supply, tenants: weighted.collect() });
        Ok(Decision { change, shares, fair, gains, certificate })
    }

    /// Restores the shares in force after a decision that was not applied.
    pub fn rollback(&mut self, applied: Option<AppliedShares>) {
        self.applied = applied;
        self.directions.clear();
    }

    /// Returns whether each share that moves by more than `STEP_MAX` moves in the direction that
    /// the last epoch wanted.
    fn confirms_direction<U: Utility>(
        &self,
        market: &Market<'_, &U>,
        members: &[Member<U>],
        current: &[Bundle],
        wanted: &[Bundle],
    ) -> bool {
        members.iter().enumerate().all(|(at, member)| {
            let (fair, delta) = (market.fair_share(at), wanted[at].minus(current[at]));
            let before = self.directions.get(&member.name).copied().unwrap_or_default();
            let is_confirmed =
                |delta: f64, before: f64, fair: f64| delta.abs() <= STEP_MAX * fair || delta * before > 0.0;
            is_confirmed(delta.memory, before.memory, fair.memory)
                && is_confirmed(delta.bandwidth, before.bandwidth, fair.bandwidth)
        })
    }

    fn record_directions<U>(&mut self, members: &[Member<U>], current: &[Bundle], wanted: &[Bundle]) {
        let directions = current.iter().zip(wanted).map(|(current, wanted)| wanted.minus(*current));
        self.directions = members.iter().map(|member| Arc::clone(&member.name)).zip(directions).collect();
    }

    /// Returns the current shares as a split of the present supply among the present tenants. Each
    /// tenant keeps its fraction of the fair share; a new tenant starts with its whole fair share.
    fn current_bundles<U: Utility>(&self, market: &Market<'_, &U>, members: &[Member<U>]) -> Vec<Bundle> {
        let ratios = self.applied.as_ref().map_or_else(BTreeMap::new, AppliedShares::fractions_of_fair_share);
        let ratio = |name: &str| ratios.get(name).copied().unwrap_or(FULL_FAIR_SHARE);
        let one = |(at, member): (usize, &Member<U>)| market.fair_share(at).scale(ratio(&member.name));
        let mut current: Vec<Bundle> = members.iter().enumerate().map(one).collect();
        let (sum, all): (Bundle, _) = (current.iter().copied().sum(), market.all());
        let scale = |sum: f64, all: f64| (all / sum).min(1.0);
        let scale =
            Bundle { memory: scale(sum.memory, all.memory), bandwidth: scale(sum.bandwidth, all.bandwidth) };
        for (at, one) in current.iter_mut().enumerate() {
            *one = market.within_limits(at, one.scale(scale));
        }
        market.cut_to_supply(&mut current);
        current
    }
}

/// Fraction of the fair share with which a new tenant starts.
const FULL_FAIR_SHARE: Bundle = Bundle { memory: 1.0, bandwidth: 1.0 };

impl AppliedShares {
    /// Returns the share of each tenant as a fraction of its fair share.
    fn fractions_of_fair_share(&self) -> BTreeMap<&str, Bundle> {
        let weights = normalized_weights(self.supply, self.tenants.values().map(|one| one.weight).collect());
        let all = Bundle::from(self.supply.all());
        let ratio = |one: &WeightedShare, part: f64| {
            let Bundle { memory, bandwidth } = one.share.into();
            Bundle { memory: memory / (all.memory * part), bandwidth: bandwidth / (all.bandwidth * part) }
        };
        self.tenants.iter().zip(weights).map(|((name, one), part)| (&**name, ratio(one, part))).collect()
    }

    /// Returns the shares in force if supply, tenants and weights are unchanged and the minimum
    /// shares hold.
    fn matching_shares<U>(&self, supply: Supply, members: &[Member<U>]) -> Option<Vec<Share>> {
        let share = |member: &Member<U>| {
            let WeightedShare { weight, share } = *self.tenants.get(&member.name)?;
            let still_applies = weight == member.weight
                && share.memory_mib >= member.min.memory_mib
                && share.bandwidth_mb_s >= member.min.bandwidth_mb_s;
            still_applies.then_some(share)
        };
        if self.supply != supply || self.tenants.len() != members.len() {
            return None;
        }
        members.iter().map(share).collect()
    }
}

/// Converts members to tenants of a market.
fn tenants<U>(supply: Supply, members: &[Member<U>]) -> Vec<Tenant<&U>> {
    let weights = normalized_weights(supply, members.iter().map(|member| member.weight).collect());
    let min = |member: &Member<U>, part: f64| {
        let fair = Bundle::from(supply.all()).scale(Bundle { memory: part, bandwidth: part });
        let (kept, whole) = (fair.scale(RESERVED_FRACTION).floor(), fair.floor());
        let min = |requested: u64, kept: u64, whole: u64| requested.max(kept).max(whole.min(1));
        Share {
            memory_mib: min(member.min.memory_mib, kept.memory_mib, whole.memory_mib),
            bandwidth_mb_s: min(member.min.bandwidth_mb_s, kept.bandwidth_mb_s, whole.bandwidth_mb_s),
        }
    };
    let tenant =
        |(member, part)| Tenant { min: min(member, part), ..Tenant::new(part, supply, &member.utility) };
    members.iter().zip(weights).map(tenant).collect()
}

/// Returns weights as fractions of their sum. Small weights are raised so that each fair share is
/// at least one unit of both goods, if the supply suffices.
fn normalized_weights(supply: Supply, weights: Vec<f64>) -> Vec<f64> {
    let units = supply.memory_mib.min(supply.bandwidth_mb_s) as f64;
    let min = (1.0 + UNIT_ROUNDING) / units;
    let is_feasible =
        min * weights.len() as f64 <= 1.0 && weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
    if !is_feasible {
        // Invalid weights are reported by the market.
        let all: f64 = weights.iter().sum();
        return weights.into_iter().map(|weight| weight / all).collect();
    }
    let mut raised = vec![false; weights.len()];
    loop {
        let left = 1.0 - raised.iter().filter(|raised| **raised).count() as f64 * min;
        let others: f64 =
            weights.iter().zip(&raised).filter(|(_, raised)| !**raised).map(|(weight, _)| weight).sum();
        let part = |at: usize| if raised[at] { min } else { weights[at] / others * left };
        let parts: Vec<f64> = (0..weights.len()).map(part).collect();
        if parts.iter().all(|part| *part >= min) {
            return parts;
        }
        raised = parts.iter().zip(raised).map(|(part, raised)| raised || *part < min).collect();
    }
}

/// Returns whether `new` differs enough to be applied, and either raises the mean throughput enough
/// or ends a tenant's shortfall against an equal split.
fn is_worthwhile<U: Utility>(market: &Market<'_, U>, current: &[Bundle], new: &[Bundle]) -> bool {
    if (0..current.len()).all(|at| market.is_near(at, current[at], new[at], MOVE_MIN)) {
        return false;
    }
    let is_short = |(at, bundle): (usize, &Bundle)| market.gain(at, *bundle) < 1.0 - SHORTFALL_MAX;
    market.mean_gain(new) - market.mean_gain(current) > LOG_MEAN_GAIN_MIN
        || current.iter().enumerate().any(is_short)
}

#[cfg(test)]
mod tests;
