//! What goes on by itself: leases, deadlines, scrubbing, forgetting, retries.

use units::limits::{BATCH_CHANGES_MAX, RACK_TIME_SAVED_EVERY};
use units::{EmcId, HostId, SliceId};

use super::{Effect, Manager};
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
        self.repeat_orders(when);
        self.time_out_waiters(when);
        self.buffer.roll(when.now);
        if self.is_full() {
            return;
        }
        self.end_overdue(when);
        self.release_restored(when);
        self.choose_scrubbers(when);
        let forgotten = self.head.decide_forget(when, UPKEEP_CHANGES_MAX);
        self.change(when, forgotten);
        self.save_rack_time(when);
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
        let emcs: Vec<EmcId> = self
            .head
            .emcs()
            .filter(|(_, e)| e.up && e.to_scrub().next().is_some())
            .map(|(id, _)| id)
            .collect();
        if emcs.is_empty() {
            return;
        }
        let (free, pool) =
            self.head.emcs().fold((0, 0), |(free, all), (_, e)| (free + e.free(), all + e.emc.slices));
        let pace = self.buffer.pace(free, pool);
        for emc in emcs {
            let mut hosts = self.scrubbers(emc);
            let waiting: Vec<SliceId> = self
                .head
                .emc(emc)
                .map(|e| e.to_scrub().take(UPKEEP_CHANGES_MAX).collect())
                .unwrap_or_default();
            for slice in waiting {
                let Some(least) = hosts.iter_mut().filter(|(busy, _)| *busy < pace).min() else { break };
                least.0 += 1;
                let host = least.1;
                self.slice_event(when, slice, Event::ScrubBy(host));
            }
        }
    }

    /// Live hosts wired to an EMC, with how many slices each scrubs already.
    fn scrubbers(&self, emc: EmcId) -> Vec<(usize, HostId)> {
        let live = self.links.iter().filter(|(_, link)| link.is_connected() && !link.is_unknown());
        let fit = live.filter_map(|(id, _)| {
            let entry = self.head.host(*id)?;
            let fit =
                entry.host.fence == Fence::None && !entry.host.must_report && entry.host.emcs.contains(&emc);
            fit.then(|| (entry.scrubbing(), *id))
        });
        fit.collect()
    }

    /// After a restore, slices that no report claimed go back into the cycle when every host that could has reported.
    fn release_restored(&mut self, when: When) {
        let waiting = |host: &crate::record::Host| host.must_report;
        let mut ready: Vec<EmcId> = Vec::new();
        for (emc, entry) in self.head.emcs().filter(|(_, entry)| entry.up && entry.quarantined() > 0) {
            let wired = self.head.hosts().filter(|(_, h)| h.host.emcs.contains(&emc));
            if !wired.into_iter().any(|(_, h)| waiting(&h.host)) && entry.quarantined() > 0 {
                ready.push(emc);
            }
        }
        for emc in ready {
            let slices: Vec<SliceId> =
                self.head.emc(emc).map(|e| e.emc.range().collect()).unwrap_or_default();
            let unclaimed = slices.into_iter().filter(|slice| {
                let state = self.head.slot(*slice).map(|slot| slot.state);
                matches!(state, Some(State::Quarantined(Quarantine::Restored { .. })))
            });
            for slice in unclaimed.take(UPKEEP_CHANGES_MAX).collect::<Vec<_>>() {
                self.slice_event(when, slice, Event::Requalify);
            }
        }
    }

    /// Deadlines run on rack time: it is written down now and then, so that a crash does not prolong them for long.
    fn save_rack_time(&mut self, when: When) {
        let due = self.durable.meta().rack_time.after(RACK_TIME_SAVED_EVERY);
        if self.head.next_deadline().is_some()
            && when.now >= due
            && self.open.records.is_empty()
            && self.writing.is_none()
        {
            let meta = self.head.record(Key::Meta);
            self.change(when, Change(vec![meta]));
        }
    }
}
