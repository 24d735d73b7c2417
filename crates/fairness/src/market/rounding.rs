//! Rounding of bundles to shares in whole units.

use super::{
    Market,
    goods::{Bundle, Share},
    utility::Utility,
};

/// Fraction of a good up to which unsold supply counts as rounding error and is not distributed.
const UNSOLD_TOLERANCE: f64 = 1e-9;

/// Rounds each bundle up or down to whole units such that the sum does not exceed the supply.
/// Distributes unsold supply by weight, up to the maximum shares.
pub(super) fn round_to_units<U: Utility>(market: &Market<'_, U>, bought: &[Bundle]) -> Vec<Share> {
    let all = market.supply.all();
    // The sum of bundles may exceed the supply by rounding error.
    let mut bundles = bought.to_vec();
    market.reduce_to_supply(&mut bundles);
    distribute_unsold_units(market, &mut bundles, |bundle| &mut bundle.memory);
    distribute_unsold_units(market, &mut bundles, |bundle| &mut bundle.bandwidth);
    let memory = round_cumulatively(bundles.iter().map(|bundle| bundle.memory), all.memory_mib);
    let bandwidth = round_cumulatively(bundles.iter().map(|bundle| bundle.bandwidth), all.bandwidth_mb_s);
    memory.zip(bandwidth).map(|(memory_mib, bandwidth_mb_s)| Share { memory_mib, bandwidth_mb_s }).collect()
}

/// Distributes the unsold supply of one good among tenants in proportion to their weights.
fn distribute_unsold_units<U: Utility>(
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

/// Largest number of rounds in which the unsold supply of a good is distributed. Supply that is
/// unsold after the last round is not allocated.
const DISTRIBUTION_ROUNDS_MAX: u32 = 8;

/// Rounds amounts to whole units by rounding their cumulative sums down. Fractions lost by one
/// amount are thereby added to the next amount.
fn round_cumulatively(amounts: impl Iterator<Item = f64>, total: u64) -> impl Iterator<Item = u64> {
    amounts.scan((0.0, 0), move |(exact, assigned), amount| {
        *exact += amount;
        // The factor corrects a sum that is below a whole number by rounding error.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of units")]
        let rounded = ((*exact * (1.0 + f64::EPSILON)) as u64).min(total);
        let units = rounded.saturating_sub(*assigned);
        *assigned = rounded.max(*assigned);
        Some(units)
    })
}
