//! What goes on by itself: leases, deadlines, scrubbing, forgetting, retries.

use units::limits::{BATCH_CHANGES_MAX, FORGET_EVERY, RACK_TIME_SAVED_EVERY};
use units::{EmcId, HostId, Ns, SliceId};

use super::{Effect, Manager, buffer::Supply};
use crate::{
    audit::Actor,
    denied::Denied,
    ledger::{Change, When},
    record::{EndedBy, Fence, Key},
    slice::{Event, Quarantine, State},
};

/// Changes of one kind that upkeep makes in one go; the rest follows in the next batch.
const UPKEEP_CHANGES_MAX: usize = BATCH_CHANGES_MAX / 8;

impl Manager {
    /// Everything that is due by now.
    pub(super) fn keep_up(&mut self, when: When) {
        self.watch_leases(when);
        self.retry_devices(when);
        self.retry_slices(when);
        self.retry_fences(when);
        self.repeat_orders(when);
        self.time_out_waiters(when);
        self.buffer.roll(when.now);
        if self.is_full() {
            return;
        }
        self.end_overdue(when);
        self.release_restored(when);
        self.choose_scrubbers(when);
        self.ask_again(when);
        self.forget(when);
        self.save_rack_time(when);
    }

    /// Forgets ended requests past their time, now and then; as often as needed while there are many. Requests beyond the
    /// limits go with the change that made them too many; here go those of a store written under other limits.
    fn forget(&mut self, when: When) {
        if when.now < self.forget_at {
            return;
        }
        let expired = self.head.decide_forget(when, UPKEEP_CHANGES_MAX);
        let mut forgotten = expired.0.len();
        self.apply(when, expired);
        forgotten += self.evict(when, UPKEEP_CHANGES_MAX - forgotten);
        if forgotten < UPKEEP_CHANGES_MAX {
            self.forget_at = when.now.after(FORGET_EVERY);
        }
    }

    /// Forgets at most so many ended requests beyond the limits, and returns how many.
    pub(super) fn evict(&mut self, when: When, most: usize) -> usize {
        let durable_until = self.durable.meta().rack_time;
        for evicted in 0..most {
            let Some(change) = self.head.decide_evict(when, durable_until) else { return evicted };
            self.apply(when, change);
        }
        most
    }

    fn ask_again(&mut self, when: When) {
        let asked = self.head.decide_ask_again(when, UPKEEP_CHANGES_MAX);
        self.change(when, asked);
    }

    fn end_overdue(&mut self, when: When) {
        for id in self.head.overdue(when, UPKEEP_CHANGES_MAX) {
            let ended = self.head.decide_end(when, id, EndedBy::Deadline, Actor::Manager);
            ended.into_iter().for_each(|change| self.change(when, change));
        }
    }

    fn time_out_waiters(&mut self, when: When) {
        while let Some((deadline, token, id)) = self.waiter_deadlines.first().copied() {
            if deadline > when.now {
                return;
            }
            self.forget_waiter(token);
            let view = self.durable.view(id);
            let (online, slices) = view.map_or((0, 0), |view| (view.online, view.reservation.slices.len()));
            let slices = u32::try_from(slices).unwrap_or(u32::MAX);
            self.effects.push_back(Effect::Reply(
                token,
                Box::new(Err(Denied::NotReadyInTime { reservation: id, online, slices })),
            ));
        }
    }

    /// Gives slices that wait for it to hosts that can scrub them, the least busy first.
    fn choose_scrubbers(&mut self, when: When) {
        let waiting = self.head.emcs().filter(|(_, e)| e.up && e.to_scrub() > 0);
        let emcs: Vec<EmcId> = waiting.map(|(id, _)| id).collect();
        if emcs.is_empty() {
            return;
        }
        let pace = self.buffer.pace(self.supply());
        for emc in emcs {
            let mut hosts = self.scrubbers(emc);
            let places = hosts.iter().map(|(busy, _)| pace.saturating_sub(*busy)).sum::<usize>();
            for slice in self.waiting_to_be_scrubbed(emc, places.min(UPKEEP_CHANGES_MAX)) {
                let Some(least) = hosts.iter_mut().min() else { break };
                least.0 += 1;
                let host = least.1;
                self.slice_event(when, slice, Event::ScrubBy(host));
            }
        }
    }

    fn waiting_to_be_scrubbed(&self, emc: EmcId, most: usize) -> Vec<SliceId> {
        self.head.emc(emc).map(|entry| entry.slices_to_scrub().take(most).collect()).unwrap_or_default()
    }

    /// What the pool has, as far as scrubbing minds.
    fn supply(&self) -> Supply {
        self.head.emcs().fold(Supply::default(), |sum, (_, entry)| Supply {
            pool: sum.pool + entry.emc.slices,
            free: sum.free + entry.free(),
            to_scrub: sum.to_scrub + entry.to_scrub(),
        })
    }

    /// Live hosts wired to an EMC, with how many slices each scrubs already.
    fn scrubbers(&self, emc: EmcId) -> Vec<(usize, HostId)> {
        let live = self.links.iter().filter(|(_, link)| link.is_connected() && !link.is_unknown());
        let fit = live.filter_map(|(id, _)| {
            let entry = self.head.host(*id)?;
            let sees = entry.host.emcs.contains(&emc) && !entry.unseen().contains_key(&emc);
            let cut = entry.host.fence != Fence::None || entry.host.uncut.contains(&emc);
            let fit = !cut && !entry.host.must_report && sees;
            fit.then(|| (entry.scrubbing(), *id))
        });
        fit.collect()
    }

    /// After a restore, slices that no report claimed go back into the cycle when every host that could has reported.
    fn release_restored(&mut self, when: When) {
        let mut ready: Vec<EmcId> = Vec::new();
        for (emc, _) in self.head.emcs().filter(|(_, entry)| entry.up && entry.quarantined() > 0) {
            let mut wired = self.head.hosts().filter(|(_, h)| h.host.emcs.contains(&emc));
            if !wired.any(|(_, h)| h.host.must_report_on(emc)) {
                ready.push(emc);
            }
        }
        for emc in ready {
            let unclaimed = self.unclaimed(emc, UPKEEP_CHANGES_MAX);
            let change = self.head.decide_unclaimed(&unclaimed);
            self.change(when, change);
        }
    }

    /// Slices that wait for a claim. One that a host outside the rack may reach waits for an operator.
    fn unclaimed(&self, emc: EmcId, most: usize) -> Vec<SliceId> {
        let Some(entry) = self.head.emc(emc) else { return Vec::new() };
        let restored = |slice: &SliceId| {
            let state = self.head.slot(*slice).map(|slot| slot.state);
            matches!(state, Some(State::Quarantined(Quarantine::Restored { .. })))
                && self.head.has_way_back(*slice)
        };
        entry.quarantined_slices().filter(restored).take(most).collect()
    }

    /// Deadlines run on rack time: it is written down now and then, so that a crash does not prolong them for long.
    fn save_rack_time(&mut self, when: When) {
        if self.rack_time_due().is_some_and(|due| when.now >= due) {
            let meta = self.head.record(Key::Meta);
            self.change(when, Change(vec![meta]));
        }
    }

    /// When rack time is to be written down, if no batch does it anyway and something runs on it.
    pub(super) fn rack_time_due(&self) -> Option<Ns> {
        let runs = self.head.next_expiry().or(self.head.next_forgetting()).or(self.head.next_asking_again());
        (!self.is_writing()).then_some(())?;
        runs.map(|_| self.durable.meta().rack_time.after(RACK_TIME_SAVED_EVERY))
    }

    /// When something ends by itself, or may be forgotten.
    pub(super) fn next_upkeep(&self) -> Option<Ns> {
        if self.is_full() {
            return None; // the write under way comes first
        }
        let expiry = self.head.next_forgetting().map(|at| at.max(self.forget_at));
        let forgetting = if self.head.has_excess_requests() { Some(self.forget_at) } else { expiry };
        let due = [self.head.next_expiry(), self.head.next_asking_again(), forgetting, self.rack_time_due()];
        due.into_iter().flatten().min()
    }
}
