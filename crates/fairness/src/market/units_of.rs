//! From bundles to whole units.

use super::{
    Market,
    goods::{Bundle, Share},
    utility::Utility,
};

/// What of a good counts as nothing left over.
const NOTHING: f64 = 1e-9;

/// Whole units: each tenant's is what it bought, rounded up or down, and together they are no more than there is. What nobody bought is handed out in
/// the ratio of weights, as far as tenants may have more.
pub(super) fn shares<U: Utility>(market: &Market<'_, U>, bought: &[Bundle]) -> Vec<Share> {
    let all = market.supply.all();
    // Sold out is what is sold out but for rounding: nobody's least is to pay for that.
    let mut bundles = bought.to_vec();
    market.cut_to_supply(&mut bundles);
    hand_out(market, &mut bundles, |bundle| &mut bundle.memory);
    hand_out(market, &mut bundles, |bundle| &mut bundle.bandwidth);
    let memory = whole(bundles.iter().map(|bundle| bundle.memory), all.memory_mib);
    let bandwidth = whole(bundles.iter().map(|bundle| bundle.bandwidth), all.bandwidth_mb_s);
    memory.zip(bandwidth).map(|(memory_mib, bandwidth_mb_s)| Share { memory_mib, bandwidth_mb_s }).collect()
}

/// Adds what is left of a good, in the ratio of weights.
fn hand_out<U: Utility>(
    market: &Market<'_, U>,
    bundles: &mut [Bundle],
    good: impl Fn(&mut Bundle) -> &mut f64,
) {
    let of = |mut bundle: Bundle| *good(&mut bundle);
    let there_is = of(market.all());
    let most = |tenant: usize| of(market.limits(tenant).most);
    // Each time somebody has all that it may have; the others get what it could not take the next time. What is left after that stays.
    for _ in 0..HANDED_OUT_TIMES {
        let left = there_is - bundles.iter().copied().map(of).sum::<f64>();
        if left <= NOTHING * there_is {
            break;
        }
        let is_open = |tenant: &usize| of(bundles[*tenant]) < most(*tenant);
        let open: f64 = (0..bundles.len()).filter(is_open).map(|tenant| market.weight(tenant)).sum();
        if open <= 0.0 {
            break;
        }
        for (tenant, bundle) in bundles.iter_mut().enumerate() {
            let part = good(bundle);
            *part = (*part + left * market.weight(tenant) / open).min(most(tenant)).max(*part);
        }
    }
}

/// How often what is left of a good is handed out: each time less, as some have all that they may have.
const HANDED_OUT_TIMES: u32 = 8;

/// Rounded so that sums are: what is lost by rounding one down is added to the next.
fn whole(parts: impl Iterator<Item = f64>, there_is: u64) -> impl Iterator<Item = u64> {
    parts.scan((0.0, 0), move |(exact, given), part| {
        *exact += part;
        // A sum that is a whole number but for the last bits of its parts is that number.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of units")]
        let upto = ((*exact * (1.0 + f64::EPSILON)) as u64).min(there_is);
        let units = upto.saturating_sub(*given);
        *given = upto.max(*given);
        Some(units)
    })
}
