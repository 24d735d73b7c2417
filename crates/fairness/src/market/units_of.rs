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
    let mut bought = bought.to_vec();
    market.cut_to_supply(&mut bought);
    let good = |of: fn(Bundle) -> f64, there_is: u64| {
        let most = |tenant: usize| of(market.limits(tenant).most);
        let with_rest =
            handed_out(bought.iter().copied().map(of).collect(), there_is as f64, most, |tenant| {
                market.weight(tenant)
            });
        whole(with_rest, there_is)
    };
    let memory = good(|bundle| bundle.memory, all.memory_mib);
    let bandwidth = good(|bundle| bundle.bandwidth, all.bandwidth_mb_s);
    memory.zip(bandwidth).map(|(memory_mib, bandwidth_mb_s)| Share { memory_mib, bandwidth_mb_s }).collect()
}

/// With what is left of a good, in the ratio of weights.
fn handed_out(
    mut parts: Vec<f64>,
    there_is: f64,
    most: impl Fn(usize) -> f64,
    weight: impl Fn(usize) -> f64,
) -> Vec<f64> {
    // Each time somebody has all that it may have; the others get what it could not take the next time. What is left after that stays.
    for _ in 0..HANDED_OUT_TIMES {
        let left = there_is - parts.iter().sum::<f64>();
        let open: f64 = (0..parts.len()).filter(|tenant| parts[*tenant] < most(*tenant)).map(&weight).sum();
        if left <= NOTHING * there_is || open <= 0.0 {
            break;
        }
        for (tenant, part) in parts.iter_mut().enumerate() {
            *part = (*part + left * weight(tenant) / open).min(most(tenant)).max(*part);
        }
    }
    parts
}

/// How often what is left of a good is handed out: each time less, as some have all that they may have.
const HANDED_OUT_TIMES: u32 = 8;

/// Rounded so that sums are: what is lost by rounding one down is added to the next.
fn whole(parts: Vec<f64>, there_is: u64) -> impl Iterator<Item = u64> {
    parts.into_iter().scan((0.0, 0), move |(exact, given), part| {
        *exact += part;
        // A sum that is a whole number but for the last bits of its parts is that number.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of units")]
        let upto = ((*exact * (1.0 + f64::EPSILON)).floor() as u64).min(there_is);
        let units = upto.saturating_sub(*given);
        *given = upto.max(*given);
        Some(units)
    })
}
