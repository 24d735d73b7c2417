//! Rounding of bundles to shares in whole units.

use super::{
    Market,
    goods::{Bundle, Share},
    utility::Utility,
};

/// Fraction of a good below which the rest counts as 0.
const REST_TOLERANCE: f64 = 1e-9;

/// Rounds each bundle up or down to whole units such that the sum does not exceed the supply.
/// Distributes unsold supply by weight, up to the maximum shares.
pub(super) fn round_to_units<U: Utility>(market: &Market<'_, U>, bought: &[Bundle]) -> Vec<Share> {
    let all = market.supply.all();
    // Bundles may exceed the supply by rounding error. The correction must not reduce a share below
    // its minimum.
    let mut bundles = bought.to_vec();
    market.cut_to_supply(&mut bundles);
    distribute_rest(market, &mut bundles, |bundle| &mut bundle.memory);
    distribute_rest(market, &mut bundles, |bundle| &mut bundle.bandwidth);
    let memory = round_cumulatively(bundles.iter().map(|bundle| bundle.memory), all.memory_mib);
    let bandwidth = round_cumulatively(bundles.iter().map(|bundle| bundle.bandwidth), all.bandwidth_mb_s);
    memory.zip(bandwidth).map(|(memory_mib, bandwidth_mb_s)| Share { memory_mib, bandwidth_mb_s }).collect()
}

/// Distributes the rest of a good by weight.
fn distribute_rest<U: Utility>(
    market: &Market<'_, U>,
    bundles: &mut [Bundle],
    good: impl Fn(&mut Bundle) -> &mut f64,
) {
    let of = |mut bundle: Bundle| *good(&mut bundle);
    let total = of(market.all());
    let max = |tenant: usize| of(market.limits(tenant).max);
    // In each round some tenants may reach their maximum; the next round distributes the part they
    // could not take.
    for _ in 0..DISTRIBUTION_ROUNDS_MAX {
        let left = total - bundles.iter().copied().map(of).sum::<f64>();
        if left <= REST_TOLERANCE * total {
            break;
        }
        let is_open = |tenant: &usize| of(bundles[*tenant]) < max(*tenant);
        let open_weight: f64 = (0..bundles.len()).filter(is_open).map(|tenant| market.weight(tenant)).sum();
        if open_weight <= 0.0 {
            break;
        }
        for (tenant, bundle) in bundles.iter_mut().enumerate() {
            let amount = good(bundle);
            *amount = (*amount + left * market.weight(tenant) / open_weight).min(max(tenant)).max(*amount);
        }
    }
}

/// Rounds in which the rest of a good is distributed. A remainder after the last round stays
/// unallocated.
const DISTRIBUTION_ROUNDS_MAX: u32 = 8;

/// Rounds cumulative sums, so that the part lost by rounding one share down is added to the next.
fn round_cumulatively(parts: impl Iterator<Item = f64>, total: u64) -> impl Iterator<Item = u64> {
    parts.scan((0.0, 0), move |(exact, given), part| {
        *exact += part;
        // The factor corrects sums that miss a whole number by the last bits only.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of units")]
        let rounded = ((*exact * (1.0 + f64::EPSILON)) as u64).min(total);
        let units = rounded.saturating_sub(*given);
        *given = rounded.max(*given);
        Some(units)
    })
}
