//! Rounding of bundles to shares in whole units.

use super::{
    Market, Tenant,
    goods::{Bundle, Share},
    utility::Utility,
};

/// Fraction of a good up to which unsold supply counts as rounding error and is not distributed.
const UNSOLD_TOLERANCE: f64 = 1e-9;
/// Largest relative loss of throughput by rounding down to whole units that is not a cliff.
const ROUNDING_LOSS_MAX: f64 = 1e-6;
/// Largest number of rounds in which the unsold supply of a good is distributed. Supply that is
/// unsold after the last round is not allocated.
const DISTRIBUTION_ROUNDS_MAX: u32 = 8;

/// One unit of each good.
const UNIT: Share = Share { memory_pages: 1, bandwidth_kb_s: 1 };
/// One unit of memory.
const PAGE: Share = Share { memory_pages: 1, bandwidth_kb_s: 0 };
/// One unit of bandwidth.
const KB_S: Share = Share { memory_pages: 0, bandwidth_kb_s: 1 };

/// Rounds each bundle to whole units such that the sum does not exceed the supply. Distributes
/// unsold supply by weight, up to the maximum shares.
///
/// All bundles are rounded down first. The units that remain go to the tenants that lose most by
/// rounding, so that a tenant whose throughput falls steeply below its bundle (a cliff) gets the
/// next whole unit, if the supply has enough. The other units go to the tenants with the largest
/// remainders.
pub(super) fn round_to_units<U: Utility>(market: &Market<'_, U>, bought: &[Bundle]) -> Vec<Share> {
    let mut bundles = bought.to_vec();
    // The sum of bundles may exceed the supply by rounding error.
    market.reduce_to_supply(&mut bundles);
    distribute_unsold(market, &mut bundles, |bundle| &mut bundle.memory);
    distribute_unsold(market, &mut bundles, |bundle| &mut bundle.bandwidth);
    let mut rounding = Rounding::down(market, &bundles);
    rounding.fill_cliffs(&bundles);
    rounding.assign_by_remainder(&bundles, |share| &mut share.memory_pages, |bundle| bundle.memory);
    rounding.assign_by_remainder(&bundles, |share| &mut share.bandwidth_kb_s, |bundle| bundle.bandwidth);
    rounding.shares
}

/// Shares during rounding, and the units that are not assigned yet.
struct Rounding<'a, 'b, U> {
    market: &'a Market<'b, U>,
    shares: Vec<Share>,
    left: Share,
}

impl<'a, 'b, U: Utility> Rounding<'a, 'b, U> {
    /// Rounds all bundles down, but not below the minimum shares, from which bundles may differ by
    /// rounding error.
    fn down(market: &'a Market<'b, U>, bundles: &[Bundle]) -> Self {
        let round = |(bundle, tenant): (&Bundle, &Tenant<U>)| bundle.floor().at_least(tenant.min);
        let shares: Vec<Share> = bundles.iter().zip(market.tenants).map(round).collect();
        let left = market.supply.all().saturating_minus(shares.iter().copied().sum());
        Self { market, shares, left }
    }

    /// Assigns remaining units to the tenants that lose by rounding down. A tenant gets the good
    /// that restores its throughput, or one unit of both goods. Tenants that fall below their
    /// throughput with an equal split come first, then those with the largest loss.
    fn fill_cliffs(&mut self, bundles: &[Bundle]) {
        let value = |tenant: usize, bundle| self.market.value(tenant, bundle);
        let loss = |tenant: usize| {
            let (own, rounded) = (value(tenant, bundles[tenant]), value(tenant, self.shares[tenant].into()));
            let is_short = rounded < self.market.fair_value(tenant) * (1.0 - ROUNDING_LOSS_MAX);
            (rounded < own * (1.0 - ROUNDING_LOSS_MAX)).then(|| (tenant, is_short, rounded / own, own))
        };
        let mut losses: Vec<_> = (0..bundles.len()).filter_map(loss).collect();
        losses.sort_by(|one, other| other.1.cmp(&one.1).then(one.2.total_cmp(&other.2)));
        for (tenant, _, _, own) in losses {
            let more = |units: Share| self.value_with(tenant, units);
            let restores = |units: &Share| more(*units) >= own * (1.0 - ROUNDING_LOSS_MAX);
            let best = [PAGE, KB_S, UNIT]
                .into_iter()
                .find(restores)
                .or_else(|| [UNIT, PAGE, KB_S].into_iter().find(|units| more(*units) > f64::NEG_INFINITY));
            if let Some(units) = best {
                self.assign(tenant, units);
            }
        }
    }

    /// Returns the throughput of a tenant with additional units, or `-∞` if these units are not
    /// left or exceed its maximum share.
    fn value_with(&self, tenant: usize, units: Share) -> f64 {
        let (share, max) = (self.shares[tenant].plus(units), self.market.tenants[tenant].max);
        let fits = units.is_within(self.left) && share.is_within(max);
        if fits { self.market.value(tenant, share.into()) } else { f64::NEG_INFINITY }
    }

    fn assign(&mut self, tenant: usize, units: Share) {
        self.shares[tenant] = self.shares[tenant].plus(units);
        self.left = self.left.saturating_minus(units);
    }

    /// Assigns the remaining units of one good, one unit per tenant, to the tenants with the largest
    /// remainders.
    fn assign_by_remainder(
        &mut self,
        bundles: &[Bundle],
        units: impl Fn(&mut Share) -> &mut u64,
        amount: impl Fn(Bundle) -> f64,
    ) {
        let left = *units(&mut self.left);
        let mut remainders: Vec<(f64, usize)> = (0..bundles.len())
            .map(|tenant| {
                let share = *units(&mut self.shares[tenant]);
                (amount(bundles[tenant].in_units()) - share as f64, tenant)
            })
            .filter(|(remainder, _)| *remainder > 0.0)
            .collect();
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(remainders.len());
        if count > 0 {
            let by_remainder = |one: &(f64, usize), other: &(f64, usize)| {
                other.0.total_cmp(&one.0).then(one.1.cmp(&other.1))
            };
            remainders.select_nth_unstable_by(count - 1, by_remainder);
            remainders[..count].iter().for_each(|(_, tenant)| *units(&mut self.shares[*tenant]) += 1);
            *units(&mut self.left) -= count as u64;
        }
    }
}

/// Distributes the unsold supply of one good among tenants in proportion to their weights.
fn distribute_unsold<U: Utility>(
    market: &Market<'_, U>,
    bundles: &mut [Bundle],
    good: impl Fn(&mut Bundle) -> &mut f64,
) {
    let of = |mut bundle: Bundle| *good(&mut bundle);
    let total = of(market.all());
    let max = |tenant: usize| of(market.limits(tenant).max);
    // Tenants may reach their maximum share in a round. The next round distributes the excess among
    // the other tenants.
    for _ in 0..DISTRIBUTION_ROUNDS_MAX {
        let unsold = total - bundles.iter().copied().map(of).sum::<f64>();
        if unsold <= UNSOLD_TOLERANCE * total {
            break;
        }
        let is_below_max = |tenant: &usize| of(bundles[*tenant]) < max(*tenant);
        let weights: f64 = (0..bundles.len()).filter(is_below_max).map(|tenant| market.weight(tenant)).sum();
        if weights <= 0.0 {
            break;
        }
        for (tenant, bundle) in bundles.iter_mut().enumerate() {
            let amount = good(bundle);
            *amount = (*amount + unsold * market.weight(tenant) / weights).min(max(tenant)).max(*amount);
        }
    }
}
