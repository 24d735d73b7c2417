//! Allocation of the supply to tenants, and the check of its guarantees: the supply suffices, and no
//! tenant is worse off than with an equal split.

use super::{
    Market, Status,
    goods::{Bundle, Share},
    rounding::round_to_units,
    utility::Utility,
};

/// Largest relative loss of throughput, compared with an equal split, that counts as rounding
/// error.
pub(super) const SHARING_INCENTIVE_TOLERANCE: f64 = 1e-6;
/// Lower bound of a gain before its logarithm is taken. Its reciprocal is the upper bound, because a
/// fair share without value makes any gain infinite.
const GAIN_FLOOR: f64 = 1e-9;
/// Largest difference between the supply of a good and its allocated amount, as a fraction of the
/// supply, that counts as an error of the price. Both ends of the bracket have slightly different
/// prices, so that a mixture that buys all memory does not buy all bandwidth exactly.
pub(super) const UNALLOCATED_TOLERANCE: f64 = 1e-7;

/// Allocation, and the method by which it was computed.
#[derive(Debug)]
pub(super) struct Clearing {
    pub status: Status,
    pub bundles: Vec<Bundle>,
    pub shares: Vec<Share>,
}

impl<U: Utility> Market<'_, U> {
    /// Rounds bundles to shares. Returns `None` if they exceed the supply, or if the shares violate
    /// sharing incentive.
    pub(super) fn round_and_check(&self, status: Status, bundles: Vec<Bundle>) -> Option<Clearing> {
        let sum = self.fraction_of_supply(bundles.iter().copied().sum());
        let fits = sum.memory <= 1.0 + UNALLOCATED_TOLERANCE && sum.bandwidth <= 1.0 + UNALLOCATED_TOLERANCE;
        let shares = fits.then(|| round_to_units(self, &bundles))?;
        self.are_shares_fair(&shares).then_some(Clearing { status, bundles, shares })
    }

    /// Returns whether shares fit the supply and satisfy sharing incentive: each tenant is as well
    /// off as with its fair share rounded down to whole units, and no tenant loses its whole
    /// throughput.
    pub(super) fn are_shares_fair(&self, shares: &[Share]) -> bool {
        let sum: Share = shares.iter().copied().sum();
        let is_fair = |(tenant, share): (usize, &Share)| self.is_guarantee_kept(tenant, *share);
        sum.is_within(self.supply.all()) && shares.iter().enumerate().all(is_fair)
    }

    /// Returns whether a tenant is as well off with `share` as with its fair share, or at least as
    /// with its fair share rounded down to whole units.
    pub(super) fn is_guarantee_kept(&self, tenant: usize, share: Share) -> bool {
        let value = self.value(tenant, share.into());
        let is_at_least = |least: f64| value >= least * (1.0 - SHARING_INCENTIVE_TOLERANCE);
        let fair_value = self.fair_value(tenant);
        // The usual case needs no evaluation of the rounded fair share.
        is_at_least(fair_value)
            || (value > 0.0 || fair_value == 0.0)
                && is_at_least(self.value(tenant, self.fair_share(tenant).floor().into()))
    }

    /// Returns the value of a bundle to a tenant relative to the value of its fair share. Returns 1
    /// if both values are 0.
    pub(crate) fn gain(&self, tenant: usize, bundle: Bundle) -> f64 {
        self.gain_of_value(tenant, self.value(tenant, bundle))
    }

    fn gain_of_value(&self, tenant: usize, value: f64) -> f64 {
        let fair_value = self.fair_value(tenant);
        if value == fair_value { 1.0 } else { value / fair_value }
    }

    /// Returns the logarithm of the geometric mean of all gains, weighted by the tenants' weights.
    pub(crate) fn log_mean_gain(&self, bundles: impl IntoIterator<Item = impl Into<Bundle>>) -> f64 {
        let values = bundles
            .into_iter()
            .enumerate()
            .map(|(tenant, bundle)| (tenant, self.value(tenant, bundle.into())));
        values.map(|(tenant, value)| self.log_gain(tenant, value)).sum()
    }

    /// Returns the logarithm of the gain of a tenant whose bundle has this value, multiplied by the
    /// tenant's weight.
    pub(super) fn log_gain(&self, tenant: usize, value: f64) -> f64 {
        let gain = self.gain_of_value(tenant, value);
        self.weight(tenant) * gain.clamp(GAIN_FLOOR, GAIN_FLOOR.recip()).ln()
    }
}
