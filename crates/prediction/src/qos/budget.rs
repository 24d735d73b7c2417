//! Budget of migration requests (Pond, section 4.6).

use std::collections::VecDeque;

use units::{Fraction, Ns, limits::QOS_REQUESTS_PER_HOUR_MAX};

/// Period of the budget.
const BUDGET_PERIOD: Ns = Ns::secs(3600);

/// Budget of migration requests. Each period of one hour permits requests for the fraction X of the
/// running VMs, rounded up, and at most [`QOS_REQUESTS_PER_HOUR_MAX`] requests. X is the fraction of
/// VMs that the predictions may misplace.
#[derive(Clone, Debug, Default)]
pub struct MigrationBudget {
    /// Times of the requests in the last hour, in ascending order.
    sent: VecDeque<Ns>,
}

impl MigrationBudget {
    /// Returns the number of requests that may be sent now. `vms` is the number of running VMs.
    pub fn available(&mut self, x: Fraction, vms: usize, now: Ns) -> usize {
        while self.sent.front().is_some_and(|sent| now.since(*sent) >= BUDGET_PERIOD) {
            self.sent.pop_front();
        }
        hourly_budget(x, vms).saturating_sub(self.sent.len())
    }

    /// Records a request.
    pub fn record(&mut self, now: Ns) {
        self.sent.push_back(now);
        self.sent.truncate(QOS_REQUESTS_PER_HOUR_MAX);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the product is at most the number of VMs"
)]
fn hourly_budget(x: Fraction, vms: usize) -> usize {
    ((x.get() * vms as f64).ceil() as usize).min(QOS_REQUESTS_PER_HOUR_MAX)
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
