//! Budget of migration requests (Pond, section 4.6), and the choice of the VMs to migrate first.

use units::{Fraction, limits::QOS_REQUESTS_PER_HOUR_MAX};

/// Returns the number of migration requests per hour for a rack with this number of VMs: the
/// fraction X of the VMs, rounded up, and at most [`QOS_REQUESTS_PER_HOUR_MAX`]. X is the fraction
/// of VMs that the predictions may misplace.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the product is not negative, and casts from floats saturate"
)]
pub fn hourly_budget(x: Fraction, vms: usize) -> u32 {
    ((x.get() * vms as f64).ceil() as u32).min(QOS_REQUESTS_PER_HOUR_MAX)
}

/// Returns the ids of the `count` VMs with the largest harm, the most harmed first. VMs with equal
/// harm are ordered by id. `candidates` are pairs of id and harm.
pub fn select_most_harmed<Id: Ord + Copy>(
    candidates: impl IntoIterator<Item = (Id, f64)>,
    count: usize,
) -> Vec<Id> {
    let mut candidates: Vec<(Id, f64)> = candidates.into_iter().collect();
    candidates.sort_unstable_by(|(id, harm), (other_id, other_harm)| {
        other_harm.total_cmp(harm).then_with(|| id.cmp(other_id))
    });
    candidates.into_iter().take(count).map(|(id, _)| id).collect()
}
