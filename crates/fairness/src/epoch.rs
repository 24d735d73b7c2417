//! Epoch allocator: decides the shares of a host's tenants at the end of each epoch.
//!
//! The market computes target shares. This module decides how much of the change toward the target
//! is applied at once. Estimates are accurate near the current shares only. A share therefore
//! changes by at most half a fair share in the first epoch. If the measurements of the next epoch
//! confirm the direction, the remaining change is applied at once. Changes of negligible benefit
//! are skipped, so that noise does not change shares (hysteresis).

use std::{collections::BTreeMap, sync::Arc};

use crate::market::{Bundle, Certificate, Market, MarketError, Share, Supply, Tenant, Utility};

/// Largest change of a share in one epoch without confirmation by the previous epoch, as a fraction
/// of the fair share. Spirit allows five steps of 1/200 of the supply per epoch, which is 0.15 with
/// six tenants.
const SHARE_STEP_MAX: f64 = 0.5;
/// Upper bound of a limited step, as a fraction of the fair share: `SHARE_STEP_MAX` plus a margin for
/// rounding and for distributed unsold supply.
const ROUNDED_SHARE_STEP_MAX: f64 = 1.2 * SHARE_STEP_MAX;
/// Fraction of the fair share that each tenant always keeps, because estimates may be wrong and a
/// tenant without memory or bandwidth would stop. The fraction is larger for bandwidth, because a
/// tenant needs bandwidth to fill memory that it receives.
const RESERVED_SHARE_FRACTION: Bundle = Bundle { memory: 0.1, bandwidth: 0.5 };
/// Smallest change of a share that is applied, as a fraction of the fair share. It is the accuracy
/// of measured memory sizes.
const SHARE_CHANGE_MIN: f64 = 0.05;
/// Relative margin that keeps a fair share of one unit from being rounded down to 0 units.
const UNIT_ROUNDING_MARGIN: f64 = 1e-9;
/// Shares change only if the logarithm of the geometric mean of throughputs increases by more than
/// this value. Spirit's allocator requires a factor of 1.005.
const LOG_MEAN_GAIN_MIN: f64 = 0.005;
/// Shares may stay unchanged only if no tenant's throughput is below its throughput with an equal
/// split by more than this fraction. It is the accuracy of estimated throughputs.
const GAIN_SHORTFALL_MAX: f64 = 0.02;

/// Shares that are in force, and the supply and weights from which they were computed.
#[derive(Clone, Debug, PartialEq)]
pub struct AppliedShares {
    /// Supply from which the shares were computed.
    pub supply: Supply,
    /// Weight and share of each tenant, by name.
    pub tenants: BTreeMap<Arc<str>, WeightedShare>,
}

/// Share of a tenant, and the weight from which it was computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedShare {
    /// Weight of the tenant relative to the other tenants, more than 0.
    pub weight: f64,
    /// Share of the tenant in whole units.
    pub share: Share,
}

/// Tenant that takes part in an epoch.
#[derive(Clone, Debug)]
pub struct MarketMember<U> {
    /// Name, unique among the tenants of the epoch.
    pub name: Arc<str>,
    /// Weight relative to the other tenants, more than 0.
    pub weight: f64,
    /// Minimum share of both goods, at most the fair share. The allocator raises a smaller minimum
    /// to a fixed fraction of the fair share.
    pub min: Share,
    /// Utility of the tenant, which values bundles of memory and bandwidth.
    pub utility: U,
}

/// Change of shares decided in an epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Shares change toward the market outcome.
    Set {
        /// Fraction of the change that is applied, more than 0 and at most 1.
        step_fraction: f64,
    },
    /// Shares do not change. Either the gain is negligible, or the change cannot be applied in part
    /// and must be confirmed by the next epoch.
    Unchanged,
}

/// Result of an epoch. All lists are in the order of the tenants in the input.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Whether and how far shares change.
    pub change: Change,
    /// Share of each tenant until the next epoch.
    pub shares: Vec<Share>,
    /// Fair share of each tenant: the fraction of the supply that corresponds to its weight.
    pub fair: Vec<Share>,
    /// Estimated throughput of each tenant relative to its throughput with the fair share.
    pub gains: Vec<f64>,
    /// Certificate of the market outcome. If shares do not change, the outcome is not applied.
    pub certificate: Certificate,
}

/// Allocator of one host. It keeps the applied shares and other state from epoch to epoch.
#[derive(Clone, Debug, Default)]
pub struct EpochAllocator {
    /// Shares in force. `None` before the first epoch.
    applied: Option<AppliedShares>,
    /// Target minus current share of each tenant in the last epoch; 0 if no change was worthwhile.
    directions: BTreeMap<Arc<str>, Bundle>,
    /// Number of epochs, for [`Market::clear`].
    turn: usize,
}

impl EpochAllocator {
    /// Creates an allocator with the shares in force before a restart, or `None` for a first start.
    pub fn resume(applied: Option<AppliedShares>) -> Self {
        Self { applied, ..Self::default() }
    }

    /// Returns the shares in force, or `None` before the first epoch.
    pub fn applied(&self) -> Option<&AppliedShares> {
        self.applied.as_ref()
    }

    /// Decides the shares of `members` and records them as applied. A caller that fails to apply
    /// the shares must call [`EpochAllocator::rollback`].
    ///
    /// # Errors
    /// Returns a [`MarketError`] if the supply, a weight or a minimum share is invalid. The shares
    /// in force are then unchanged.
    pub fn decide<U: Utility>(
        &mut self,
        supply: Supply,
        members: &[MarketMember<U>],
    ) -> Result<Decision, MarketError> {
        let tenants = market_tenants(supply, members);
        let market = Market::new(supply, &tenants)?;
        let current = self.current_bundles(&market, members);
        let mut outcome = market.clear(self.turn);
        market.refine(&mut outcome);
        self.turn = self.turn.wrapping_add(1);
        let matching = self.applied.as_ref().and_then(|applied| applied.matching_shares(supply, members));
        let is_unchanged = matching.is_some() && !is_worthwhile(&market, &current, &outcome.bought);
        let is_confirmed = self.is_direction_confirmed(&market, members, &current, &outcome.bought);
        self.record_directions(members, &current, if is_unchanged { &current } else { &outcome.bought });
        let step_fraction = if is_unchanged || is_confirmed {
            1.0
        } else {
            market.limit_step(&mut outcome, &current, SHARE_STEP_MAX)
        };
        // If utilities are discontinuous, a partial step may be impossible. Shares then do not
        // change until the next epoch confirms the change.
        let is_jump = !is_confirmed
            && (0..current.len()).any(|at| {
                !market.is_bundle_near(at, current[at], outcome.bought[at], ROUNDED_SHARE_STEP_MAX)
            });
        let unchanged = matching.filter(|applied| is_unchanged || is_jump || *applied == outcome.shares);
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

    /// Restores the shares in force to `applied` after a decision that could not be applied.
    pub fn rollback(&mut self, applied: Option<AppliedShares>) {
        self.applied = applied;
        self.directions.clear();
    }

    /// Returns whether each share that would change by more than `SHARE_STEP_MAX` changes in the same
    /// direction as in the last epoch.
    fn is_direction_confirmed<U: Utility>(
        &self,
        market: &Market<'_, &U>,
        members: &[MarketMember<U>],
        current: &[Bundle],
        target: &[Bundle],
    ) -> bool {
        members.iter().enumerate().all(|(at, member)| {
            let (fair, delta) = (market.fair_share(at), target[at].minus(current[at]));
            let before = self.directions.get(&member.name).copied().unwrap_or_default();
            let is_confirmed = |delta: f64, before: f64, fair: f64| {
                delta.abs() <= SHARE_STEP_MAX * fair || delta * before > 0.0
            };
            is_confirmed(delta.memory, before.memory, fair.memory)
                && is_confirmed(delta.bandwidth, before.bandwidth, fair.bandwidth)
        })
    }

    fn record_directions<U>(&mut self, members: &[MarketMember<U>], current: &[Bundle], target: &[Bundle]) {
        let directions = current.iter().zip(target).map(|(current, target)| target.minus(*current));
        self.directions = members.iter().map(|member| Arc::clone(&member.name)).zip(directions).collect();
    }

    /// Returns the shares in force, converted to the present supply and the present tenants. The
    /// ratio of a tenant's share to its fair share is preserved. A new tenant gets its fair share.
    fn current_bundles<U: Utility>(
        &self,
        market: &Market<'_, &U>,
        members: &[MarketMember<U>],
    ) -> Vec<Bundle> {
        let ratios = self.applied.as_ref().map_or_else(BTreeMap::new, AppliedShares::fractions_of_fair_share);
        let ratio = |name: &str| ratios.get(name).copied().unwrap_or(FULL_FAIR_SHARE);
        let bundle =
            |(at, member): (usize, &MarketMember<U>)| market.fair_share(at).scale(ratio(&member.name));
        let mut current: Vec<Bundle> = members.iter().enumerate().map(bundle).collect();
        let (sum, all): (Bundle, _) = (current.iter().copied().sum(), market.all());
        let scale = |sum: f64, all: f64| (all / sum).min(1.0);
        let scale =
            Bundle { memory: scale(sum.memory, all.memory), bandwidth: scale(sum.bandwidth, all.bandwidth) };
        for (at, bundle) in current.iter_mut().enumerate() {
            *bundle = market.clamp_to_limits(at, bundle.scale(scale));
        }
        market.reduce_to_supply(&mut current);
        current
    }
}

/// Initial share of a new tenant, as a fraction of its fair share.
const FULL_FAIR_SHARE: Bundle = Bundle { memory: 1.0, bandwidth: 1.0 };

impl AppliedShares {
    /// Returns the ratio of each tenant's share to its fair share, by tenant name.
    fn fractions_of_fair_share(&self) -> BTreeMap<&str, Bundle> {
        let weights =
            normalized_weights(self.supply, self.tenants.values().map(|tenant| tenant.weight).collect());
        let all = Bundle::from(self.supply.all());
        let ratio = |tenant: &WeightedShare, weight: f64| {
            let Bundle { memory, bandwidth } = tenant.share.into();
            Bundle { memory: memory / (all.memory * weight), bandwidth: bandwidth / (all.bandwidth * weight) }
        };
        let tenants = self.tenants.iter().zip(weights);
        tenants.map(|((name, tenant), weight)| (&**name, ratio(tenant, weight))).collect()
    }

    /// Returns the shares in force in the order of `members`. Returns `None` if the supply, the
    /// tenants or a weight has changed, or if a share is below its minimum.
    fn matching_shares<U>(&self, supply: Supply, members: &[MarketMember<U>]) -> Option<Vec<Share>> {
        let share = |member: &MarketMember<U>| {
            let WeightedShare { weight, share } = *self.tenants.get(&member.name)?;
            let is_valid = weight == member.weight && member.min.is_within(share);
            is_valid.then_some(share)
        };
        if self.supply != supply || self.tenants.len() != members.len() {
            return None;
        }
        members.iter().map(share).collect()
    }
}

/// Converts members to tenants of a market. Raises each minimum share to [`RESERVED_SHARE_FRACTION`] of
/// the fair share, and to one unit if the fair share is at least one unit.
fn market_tenants<U>(supply: Supply, members: &[MarketMember<U>]) -> Vec<Tenant<&U>> {
    let weights = normalized_weights(supply, members.iter().map(|member| member.weight).collect());
    let min_share = |member: &MarketMember<U>, weight: f64| {
        let fair = Bundle::from(supply.all()).scale(Bundle { memory: weight, bandwidth: weight });
        let (reserved, fair) = (fair.scale(RESERVED_SHARE_FRACTION).floor(), fair.floor());
        let min = |requested: u64, reserved: u64, fair: u64| requested.max(reserved).max(fair.min(1));
        Share {
            memory_pages: min(member.min.memory_pages, reserved.memory_pages, fair.memory_pages),
            bandwidth_kb_s: min(member.min.bandwidth_kb_s, reserved.bandwidth_kb_s, fair.bandwidth_kb_s),
        }
    };
    let tenant = |(member, weight)| Tenant {
        min: min_share(member, weight),
        ..Tenant::new(weight, supply, &member.utility)
    };
    members.iter().zip(weights).map(tenant).collect()
}

/// Returns weights as fractions of their sum. Raises small weights so that each fair share is at
/// least one unit of both goods, if the supply suffices.
fn normalized_weights(supply: Supply, weights: Vec<f64>) -> Vec<f64> {
    let units = supply.memory_pages.min(supply.bandwidth_kb_s) as f64;
    let min = (1.0 + UNIT_ROUNDING_MARGIN) / units;
    let is_feasible =
        min * weights.len() as f64 <= 1.0 && weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
    if !is_feasible {
        // `Market::new` reports invalid weights.
        let all: f64 = weights.iter().sum();
        return weights.into_iter().map(|weight| weight / all).collect();
    }
    let mut raised = vec![false; weights.len()];
    loop {
        let left = 1.0 - raised.iter().filter(|raised| **raised).count() as f64 * min;
        let unraised_sum: f64 =
            weights.iter().zip(&raised).filter(|(_, raised)| !**raised).map(|(weight, _)| weight).sum();
        let normalized = |at: usize| if raised[at] { min } else { weights[at] / unraised_sum * left };
        let normalized: Vec<f64> = (0..weights.len()).map(normalized).collect();
        if normalized.iter().all(|weight| *weight >= min) {
            return normalized;
        }
        raised = normalized.iter().zip(raised).map(|(weight, raised)| raised || *weight < min).collect();
    }
}

/// Returns whether the bundles `new` are worth a change of shares. A bundle must differ by more
/// than [`SHARE_CHANGE_MIN`]. In addition, the mean throughput must rise by [`LOG_MEAN_GAIN_MIN`], or a
/// current bundle must be worse than an equal split by more than [`GAIN_SHORTFALL_MAX`].
fn is_worthwhile<U: Utility>(market: &Market<'_, U>, current: &[Bundle], new: &[Bundle]) -> bool {
    if (0..current.len()).all(|at| market.is_bundle_near(at, current[at], new[at], SHARE_CHANGE_MIN)) {
        return false;
    }
    let is_short = |(at, bundle): (usize, &Bundle)| market.gain(at, *bundle) < 1.0 - GAIN_SHORTFALL_MAX;
    market.log_mean_gain(new.iter().copied()) - market.log_mean_gain(current.iter().copied())
        > LOG_MEAN_GAIN_MIN
        || current.iter().enumerate().any(is_short)
}

#[cfg(test)]
mod tests;
