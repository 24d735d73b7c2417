//! Periodic work of the manager: leases, deadlines, scrubbing, deletion, retries.

use units::limits::{CHANGES_PER_BATCH_MAX, RACK_TIME_SAVE_INTERVAL, RESERVATION_PRUNE_INTERVAL};
use units::{EmcId, Ns, SliceId};

use super::{Effect, Manager, buffer::SliceSupply};
use crate::{
    audit::Actor,
    ledger::{Change, When},
    record::{EndReason, Key},
    rejection::Rejection,
    slice::Event,
};

/// Maximum number of changes of each kind per round of upkeep; the remaining changes follow in
/// later rounds.
const UPKEEP_CHANGES_PER_ROUND_MAX: usize = CHANGES_PER_BATCH_MAX / 32;
/// Maximum number of scrubs started per round of upkeep.
const SCRUBS_STARTED_PER_ROUND_MAX: usize = UPKEEP_CHANGES_PER_ROUND_MAX / 2;

impl Manager {
    /// Performs all periodic work that is due.
    pub(super) fn run_upkeep(&mut self, when: When) {
        self.expire_leases(when);
        self.retry_devices(when);
        self.continue_comparisons(when);
        self.retry_slices(when);
        self.stop_due_machines(when);
        self.resend_desired_states(when);
        self.expire_waiters(when);
        self.buffer.drop_expired_windows(when.now);
        if self.is_full() {
            return;
        }
        self.end_overdue_reservations(when);
        self.requalify_unclaimed_slices(when);
        self.choose_scrubbers(when);
        self.repeat_answered_migrations(when);
        self.expire_slowdowns(when);
        self.prune(when);
        self.save_rack_time(when);
    }

    /// Deletes expired requests: periodically, or in every round while many requests have expired.
    /// A change that exceeds a limit of ended requests already deletes the excess, so the eviction
    /// here only affects stores that were written under other limits.
    fn prune(&mut self, when: When) {
        if when.now < self.prune_at {
            return;
        }
        let expired = self.head.decide_pruning(when, UPKEEP_CHANGES_PER_ROUND_MAX);
        let mut pruned = expired.0.len();
        self.apply(when, expired);
        pruned += self.evict_requests(when, UPKEEP_CHANGES_PER_ROUND_MAX - pruned);
        if pruned < UPKEEP_CHANGES_PER_ROUND_MAX {
            self.prune_at = when.now.after(RESERVATION_PRUNE_INTERVAL);
        }
    }

    /// Deletes at most `limit` ended requests that exceed the limits. Returns the number of deleted
    /// requests.
    pub(super) fn evict_requests(&mut self, when: When, limit: usize) -> usize {
        let durable_until = self.durable.meta().rack_time;
        for evicted in 0..limit {
            let Some(change) = self.head.decide_eviction(when, durable_until) else { return evicted };
            self.apply(when, change);
        }
        limit
    }

    fn repeat_answered_migrations(&mut self, when: When) {
        let changes = self.head.decide_migration_retry(when, UPKEEP_CHANGES_PER_ROUND_MAX);
        self.change(when, changes);
    }

    fn expire_slowdowns(&mut self, when: When) {
        let changes = self.head.decide_slowdown_expiry(when, UPKEEP_CHANGES_PER_ROUND_MAX);
        self.change(when, changes);
    }

    /// Ends reservations with an expired deadline, up to [`UPKEEP_CHANGES_PER_ROUND_MAX`] changes.
    fn end_overdue_reservations(&mut self, when: When) {
        let mut changes = 0;
        for id in self.head.overdue_reservations(when, UPKEEP_CHANGES_PER_ROUND_MAX) {
            if changes >= UPKEEP_CHANGES_PER_ROUND_MAX {
                return;
            }
            if let Ok(ended) = self.head.decide_reservation_end(when, id, EndReason::Deadline, Actor::Manager)
            {
                changes += ended.0.len();
                self.change(when, ended);
            }
        }
    }

    fn expire_waiters(&mut self, when: When) {
        while let Some((deadline, token, id)) = self.waiter_deadlines.first().copied() {
            if deadline > when.now {
                return;
            }
            self.remove_waiter(token);
            let slices = self.durable.reservation(id).map_or(0, |reservation| reservation.slices.len());
            let (online, slices) = (self.durable.online(id), u32::try_from(slices).unwrap_or(u32::MAX));
            self.effects.push_back(Effect::Reply(
                token,
                Box::new(Err(Rejection::NotReadyBeforeTimeout { reservation: id, online, slices })),
            ));
        }
    }

    /// Assigns slices that wait for a scrub to hosts, starting with the host that scrubs the fewest
    /// slices. The scrubs of a round are divided evenly among the EMCs; an EMC's unused share goes
    /// to the other EMCs.
    fn choose_scrubbers(&mut self, when: When) {
        let waiting = self.head.emcs().filter(|(_, e)| e.up && e.to_scrub() > 0);
        let mut emcs: Vec<(u32, EmcId)> = waiting.map(|(id, e)| (e.to_scrub(), id)).collect();
        if emcs.is_empty() {
            return;
        }
        emcs.sort_unstable();
        let scrubs_per_host = self.buffer.scrubs_per_host(self.supply());
        let mut remaining = SCRUBS_STARTED_PER_ROUND_MAX;
        for (n, (_, emc)) in emcs.iter().enumerate() {
            let share = remaining.div_ceil(emcs.len() - n);
            remaining -= self.choose_scrubbers_on(when, *emc, scrubs_per_host, share);
        }
    }

    /// Starts at most `limit` scrubs on an EMC. Returns the number of started scrubs.
    fn choose_scrubbers_on(&mut self, when: When, emc: EmcId, scrubs_per_host: usize, limit: usize) -> usize {
        for chosen in 0..limit {
            let Some((slice, host)) = self.head.emc(emc).and_then(|entry| entry.next_scrub(scrubs_per_host))
            else {
                return chosen;
            };
            self.apply_slice_event(when, slice, Event::ScrubBy(host));
        }
        limit
    }

    /// Returns the number of slices of the pool, of free slices, and of slices that wait for a
    /// scrubber.
    fn supply(&self) -> SliceSupply {
        self.head.emcs().fold(SliceSupply::default(), |sum, (_, entry)| SliceSupply {
            pool: sum.pool + entry.emc.slices,
            free: sum.free + entry.free(),
            to_scrub: sum.to_scrub + entry.to_scrub(),
        })
    }

    /// Requalifies unclaimed slices after a restore, once every host that may use slices of their
    /// EMC has reported.
    fn requalify_unclaimed_slices(&mut self, when: When) {
        let waiting = self.head.emcs().filter(|(_, entry)| entry.up && entry.unclaimed().next().is_some());
        let ready = waiting.filter(|(id, _)| !self.head.awaits_reports(*id));
        let unclaimed = ready.flat_map(|(_, entry)| entry.unclaimed()).take(UPKEEP_CHANGES_PER_ROUND_MAX);
        let unclaimed: Vec<SliceId> = unclaimed.collect();
        if !unclaimed.is_empty() {
            let change = self.head.decide_unclaimed_requalification(&unclaimed);
            self.change(when, change);
        }
    }

    /// Stores the rack time periodically, because deadlines depend on it: a crash then extends
    /// deadlines by at most one period.
    fn save_rack_time(&mut self, when: When) {
        if self.rack_time_due().is_some_and(|due| when.now >= due) {
            let meta = self.head.record(Key::Meta);
            self.change(when, Change(vec![meta]));
        }
    }

    /// Returns the time at which the rack time must be stored. Returns `None` if decisions are
    /// already waiting for a write, or if no deadline is pending.
    pub(super) fn rack_time_due(&self) -> Option<Ns> {
        let next_deadline = self
            .head
            .next_expiry()
            .or(self.head.next_prune())
            .or(self.head.next_migration_retry())
            .or(self.head.next_slowdown_expiry());
        (!self.is_writing()).then_some(())?;
        next_deadline.map(|_| self.durable.meta().rack_time.after(RACK_TIME_SAVE_INTERVAL))
    }

    /// Returns the rack time of the next expiry or deletion.
    pub(super) fn next_upkeep(&self) -> Option<Ns> {
        if self.is_full() {
            // Upkeep continues after the batch is written.
            return None;
        }
        let expiry = self.head.next_prune().map(|at| at.max(self.prune_at));
        let prune = if self.head.has_excess_requests() { Some(self.prune_at) } else { expiry };
        let due = [
            self.head.next_expiry(),
            self.head.next_migration_retry(),
            self.head.next_slowdown_expiry(),
            prune,
            self.rack_time_due(),
        ];
        due.into_iter().flatten().min()
    }
}
