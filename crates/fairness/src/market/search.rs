//! Joint search: improves shares by repeatedly dividing the shares of two tenants anew. It is used
//! if no price clears the market with sharing incentive, because demand is discontinuous.
//!
//! A pair of tenants pools its shares. Of all divisions of the pool on a coarse grid, the search
//! chooses the division with the largest sum of weighted logarithms of throughput that keeps the
//! guarantee of both tenants. All divisions are in whole units, so that the result needs no
//! rounding.

use units::limits::{SEARCH_SWEEPS_MAX, SEARCHED_PAIRS_MAX};

use super::{
    Market, Status,
    allocation::{Clearing, SHARING_INCENTIVE_TOLERANCE},
    goods::Share,
    rounding::round_to_units,
    utility::Utility,
};

/// Number of steps into which the pool of two tenants is divided, for each good.
const POOL_STEPS: u64 = 24;
/// A division is changed only if the sum of weighted logarithms of throughput increases by more
/// than this value.
const LOG_GAIN_MIN: f64 = 1e-6;

/// Improves the shares of `start`, or fair shares without a `start`. Returns them unchanged if no
/// improvement is found. Divisions after which one tenant of the pair envies the other are made only
/// if no other division is an improvement.
pub(super) fn improve<U: Utility>(market: &Market<'_, U>, start: Option<Clearing>) -> Clearing {
    let start = start.unwrap_or_else(|| fair_shares(market));
    let without_envy = improve_pairs(market, start, true);
    if without_envy.status == Status::Searched {
        without_envy
    } else {
        improve_pairs(market, without_envy, false)
    }
}

/// Divides the shares of all pairs of tenants anew until no division is an improvement.
fn improve_pairs<U: Utility>(market: &Market<'_, U>, start: Clearing, is_envy_free: bool) -> Clearing {
    let mut clearing = start;
    let mut pairs_left = SEARCHED_PAIRS_MAX;
    for _ in 0..SEARCH_SWEEPS_MAX {
        let mut is_improved = false;
        for one in 0..clearing.shares.len() {
            for other in one + 1..clearing.shares.len() {
                if pairs_left == 0 {
                    return clearing;
                }
                pairs_left -= 1;
                let pair = (clearing.shares[one], clearing.shares[other]);
                if let Some(divided) = best_division(market, (one, other), pair, is_envy_free) {
                    (clearing.shares[one], clearing.shares[other]) = divided;
                    clearing.bundles[one] = divided.0.into();
                    clearing.bundles[other] = divided.1.into();
                    (clearing.status, is_improved) = (Status::Searched, true);
                }
            }
        }
        if !is_improved {
            break;
        }
    }
    clearing
}

/// Returns fair shares in whole units.
fn fair_shares<U: Utility>(market: &Market<'_, U>) -> Clearing {
    let bundles: Vec<_> = (0..market.tenants.len()).map(|tenant| market.fair_share(tenant)).collect();
    let shares = round_to_units(market, &bundles);
    Clearing { status: Status::FallbackFair, bundles, shares }
}

/// Returns the best division of the shares of two tenants, or `None` if no division is better than
/// the present one.
fn best_division<U: Utility>(
    market: &Market<'_, U>,
    tenants: (usize, usize),
    now: (Share, Share),
    is_envy_free: bool,
) -> Option<(Share, Share)> {
    let pool = now.0.plus(now.1);
    // Without a tolerance for the present value, which could add up over many divisions.
    let value_min = |tenant: usize, now: Share| {
        let fair_value = market.fair_value(tenant) * (1.0 - SHARING_INCENTIVE_TOLERANCE);
        fair_value.min(market.value(tenant, now.into()))
    };
    let values_min = (value_min(tenants.0, now.0), value_min(tenants.1, now.1));
    let log_gain = |tenant: usize, share: Share, value_min: f64| {
        let limits = &market.tenants[tenant];
        let is_within_limits = limits.min.is_within(share) && share.is_within(limits.max);
        let value = if is_within_limits { market.value(tenant, share.into()) } else { f64::NEG_INFINITY };
        if value >= value_min { market.log_gain(tenant, value) } else { f64::NEG_INFINITY }
    };
    let total = |one: Share| {
        log_gain(tenants.0, one, values_min.0) + log_gain(tenants.1, pool.saturating_minus(one), values_min.1)
    };
    let has_envy = |(one, other): (Share, Share)| {
        let (one, other) = ((tenants.0, one.into()), (tenants.1, other.into()));
        market.envies(one, other) || market.envies(other, one)
    };
    // Equals `all * step / POOL_STEPS` without overflow.
    let part = |all: u64, step: u64| all / POOL_STEPS * step + all % POOL_STEPS * step / POOL_STEPS;
    let mut best = (total(now.0) + LOG_GAIN_MIN, None);
    for memory in 0..=POOL_STEPS {
        for bandwidth in 0..=POOL_STEPS {
            let one = Share {
                memory_pages: part(pool.memory_pages, memory),
                bandwidth_kb_s: part(pool.bandwidth_kb_s, bandwidth),
            };
            let (gain, other) = (total(one), pool.saturating_minus(one));
            if gain > best.0 && !(is_envy_free && has_envy((one, other))) {
                best = (gain, Some((one, other)));
            }
        }
    }
    best.1
}
