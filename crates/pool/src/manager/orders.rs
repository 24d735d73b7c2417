//! Desired states: changes since the last version, or complete state. At most one is unanswered per
//! host.
//!
//! A complete desired state is built in pieces of bounded size, so that other requests do not wait.
//! Each slice and reservation of the host is added in its state at that moment. Changes meanwhile
//! are recorded and added at the end: then the result matches the durable ledger.

use std::collections::{BTreeMap, BTreeSet};

use units::{DesiredVersion, HostId, ReservationId, SliceId};

use super::{
    Effect, Manager,
    hosts::{News, SentOrder},
};
use crate::{
    ledger::{HostEntry, Ledger, When},
    protocol::{Handle, Holding, NoMore, Want, WantRelease, WantVm, take_slice},
    record::{Fence, Reservation, Stage},
    slice::{Drain, Scrub, State},
};

/// Complete desired state in preparation.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    want: Option<Want>,
    next_slice: SliceId,
    next_reservation: ReservationId,
}

impl Manager {
    /// Adds the next piece to the complete desired state of a host, or begins one. Returns it when
    /// it is complete.
    fn continue_draft(&mut self, host: HostId) -> Option<Want> {
        let empty = self.empty_want(host)?;
        let mut draft = self.links.get_mut(&host)?.draft.take().unwrap_or_default();
        let mut want = draft.want.take().unwrap_or_else(|| empty.clone());
        (want.number, want.instance, want.fenced) = (empty.number, empty.instance, empty.fenced);
        if !want.fenced && !self.add_piece(host, &mut draft, &mut want) {
            draft.want = Some(want);
            return self.keep_draft(host, draft);
        }
        let news = std::mem::take(&mut self.links.get_mut(&host)?.news);
        if want.fenced {
            return Some(empty);
        }
        if news.all {
            return self.keep_draft(host, Draft::default()); // more changes than are listed: begin again
        }
        self.add_news(host, &news, &mut want);
        Some(want)
    }

    fn keep_draft(&mut self, host: HostId, draft: Draft) -> Option<Want> {
        self.links.get_mut(&host)?.keep_draft(draft);
        None
    }

    /// Returns whether it was the last piece.
    fn add_piece(&self, host: HostId, draft: &mut Draft, want: &mut Want) -> bool {
        let Some(entry) = self.durable.host(host) else { return true };
        let mut room = self.piece;
        for slice in entry.held_from(draft.next_slice) {
            if room == 0 {
                return false;
            }
            self.want_slice(host, slice, want);
            (room, draft.next_slice) = (room - 1, SliceId(slice.0.saturating_add(1)));
        }
        for id in entry.reservations_from(draft.next_reservation) {
            if room == 0 {
                return false;
            }
            self.want_vm(host, id, want);
            let slices = want.vms.get(&id).map_or(0, |vm| vm.slices.len());
            (room, draft.next_reservation) =
                (room.saturating_sub(1 + slices), ReservationId(id.0.saturating_add(1)));
        }
        true
    }

    fn add_news(&self, host: HostId, news: &News, want: &mut Want) {
        for id in &news.reservations {
            want.vms.remove(id);
            self.want_vm(host, *id, want);
        }
        for slice in &news.slices {
            take_slice(&mut want.release, *slice).for_each(drop);
            take_slice(&mut want.scrub, *slice).for_each(drop);
            self.want_slice(host, *slice, want);
        }
    }

    /// Sends the next desired state to a reservation's host without delay, because a caller waits
    /// for its slices.
    pub(super) fn hurry_order(&mut self, id: ReservationId) {
        let host = self.durable.reservation(id).map(|reservation| reservation.host);
        if let Some(mut link) = host.and_then(|host| self.links.get_mut(&host)) {
            link.news.awaited = true;
        }
    }

    /// Schedules a message to a host about a slice, and about reservations that have or had it.
    pub(super) fn tell_slice(&mut self, host: HostId, slice: SliceId, of: [Option<ReservationId>; 2]) {
        if let Some(mut link) = self.links.get_mut(&host).filter(|link| link.is_connected()) {
            link.news.note(Some(slice), of.into_iter().flatten());
            link.order_due = true;
        }
    }

    /// Schedules a message to a reservation's host; before its slices are granted, the host does
    /// not know it.
    pub(super) fn tell_reservation(&mut self, id: ReservationId, reservation: &Reservation) {
        let waits = matches!(reservation.stage, Stage::Reserved { .. }) && !self.is_usable(id, reservation);
        if waits {
            return;
        }
        if let Some(mut link) = self.links.get_mut(&reservation.host).filter(|link| link.is_connected()) {
            link.news.note(None, [id]);
            link.order_due = true;
        }
    }

    /// Schedules complete state for a host.
    pub(super) fn tell_host(&mut self, host: HostId) {
        if let Some(mut link) = self.links.get_mut(&host) {
            link.news.all = true;
            link.order_due = true;
        }
    }

    /// Sends due desired states, at most one unanswered per host.
    pub(super) fn send_orders(&mut self, when: When) {
        for host in self.links.orders_due(when.now) {
            if let Some(mut link) = self.links.get_mut(&host) {
                link.order_due = false;
            }
            // When that becomes durable, or is lost, there are changes for the host.
            if self.decides_against(host) {
                self.put_off_repeating(when, host);
            } else {
                self.send_order(when, host);
            }
        }
    }

    /// Returns whether the durable state must no longer be sent to a host.
    fn decides_against(&self, host: HostId) -> bool {
        self.decides_a_fence_of(host) || self.decides_a_scrub_of(host) || self.decides_an_end_at(host)
    }

    /// Returns whether a restart of a host is decided and not durable yet. The durable state would
    /// open slices for VMs that have ended, with their data.
    fn decides_an_end_at(&self, host: HostId) -> bool {
        let (Some(before), Some(after)) = (self.durable.host(host), self.head.host(host)) else {
            return false;
        };
        let (before, after) = (&before.host, &after.host);
        before.fence == Fence::None && !before.boot_id.is_empty() && after.boot_id != before.boot_id
    }

    /// Returns whether a fence of a host is decided and not durable yet. The host was not connected
    /// then: after an operator's confirmation of its power-off it would use what it is sent now.
    fn decides_a_fence_of(&self, host: HostId) -> bool {
        let fence = |ledger: &Ledger| ledger.host(host).map(|entry| entry.host.fence).unwrap_or_default();
        fence(&self.durable) == Fence::None && fence(&self.head) != Fence::None
    }

    /// Returns whether the end of a host's scrub is decided and not durable yet. The durable state
    /// contains the scrub: an agent that has not received it in this session would scrub a slice
    /// that belongs to another owner by then.
    fn decides_a_scrub_of(&self, host: HostId) -> bool {
        let told = self.links.get(&host).map(|link| &link.told_to_scrub);
        let mut scrubs = self.durable.host(host).into_iter().flat_map(HostEntry::scrubs);
        scrubs.any(|slice| {
            let slot = self.durable.slot(slice).unwrap_or_default();
            let told = told.is_some_and(|told| told.contains(&Holding { slice, epoch: slot.epoch }));
            slot.state == State::Scrubbing(Scrub::Working(host)) && !told && self.is_overtaken(slice)
        })
    }

    fn put_off_repeating(&mut self, when: When, host: HostId) {
        if let Some(mut link) = self.links.get_mut(&host)
            && let Some(sent) = &mut link.order
        {
            sent.at = when.now;
        }
    }

    /// Sends unanswered desired states again.
    pub(super) fn repeat_orders(&mut self, when: When) {
        for host in self.links.repeats_due(when.now) {
            self.tell_host(host);
        }
    }

    fn send_order(&mut self, when: When, host: HostId) {
        let Some(mut link) = self.links.get_mut(&host) else { return };
        let Some(session) = link.session else { return };
        let news = link.draft.is_none().then(|| std::mem::take(&mut link.news));
        let last = link.order.map(|sent| sent.number).filter(|number| *number == link.reflected);
        drop(link);
        let changed = news.zip(last).and_then(|(news, last)| self.changed_want(host, last, &news));
        let Some(want) = changed.or_else(|| self.continue_draft(host)) else { return };
        let held = |told: &Holding| self.durable.is_held(host, told.slice, told.epoch);
        let Some(mut link) = self.links.get_mut(&host) else { return };
        link.told_to_scrub.retain(held);
        link.told_to_scrub.extend(want.scrub.keys());
        link.order = Some(SentOrder { number: want.number, at: when.now });
        if want.fenced && link.told_fenced.is_none() {
            link.told_fenced = Some(want.number);
        }
        drop(link);
        self.effects.push_back(Effect::Send(session, want));
    }

    /// Returns the changes since a version, if they are known.
    fn changed_want(&self, host: HostId, base: DesiredVersion, news: &News) -> Option<Want> {
        let mut want = self.empty_want(host)?;
        if news.all || want.fenced || want.number <= base {
            return None;
        }
        want.base = Some(base);
        for id in &news.reservations {
            if !self.want_vm(host, *id, &mut want) {
                want.no_more.vms.insert(*id);
            }
        }
        let named: BTreeSet<SliceId> = want.slices().collect();
        for slice in news.slices.difference(&named) {
            if !self.want_slice(host, *slice, &mut want) {
                want.no_more.slices.insert(*slice);
            }
        }
        Some(want)
    }

    /// Returns the complete desired state of a host, from the durable ledger.
    pub fn want(&self, host: HostId) -> Option<Want> {
        let mut want = self.empty_want(host)?;
        if want.fenced {
            return Some(want);
        }
        let entry = self.durable.host(host)?;
        for slice in entry.held() {
            self.want_slice(host, slice, &mut want);
        }
        for id in entry.reservations() {
            self.want_vm(host, id, &mut want);
        }
        Some(want)
    }

    fn empty_want(&self, host: HostId) -> Option<Want> {
        let meta = self.durable.meta();
        Some(Want {
            number: DesiredVersion { generation: meta.generation, revision: meta.revision },
            base: None,
            instance: self.links.get(&host)?.instance()?,
            vms: BTreeMap::new(),
            release: BTreeMap::new(),
            scrub: BTreeMap::new(),
            no_more: NoMore::default(),
            fenced: self.durable.host(host)?.host.fence != Fence::None,
        })
    }

    /// Adds the task of a host for a slice without a VM, if any.
    fn want_slice(&self, host: HostId, slice: SliceId, want: &mut Want) -> bool {
        let Some(slot) = self.durable.slot(slice).filter(|slot| slot.holder() == Some(host)) else {
            return false;
        };
        let release = match slot.state {
            State::Draining(_, Drain::Host { force }) => Some(force),
            State::Scrubbing(Scrub::Leaving(_)) => Some(false),
            State::Scrubbing(Scrub::Working(_)) => None,
            _ => return false,
        };
        let holding = Holding { slice, epoch: slot.epoch };
        let Some(handle) = self.handle_of(holding) else { return false }; // it is known once its device is compared
        match release {
            Some(force) => drop(want.release.insert(holding, WantRelease { force, handle })),
            None => drop(want.scrub.insert(holding, handle)),
        }
        true
    }

    /// Adds a VM that its host has to provide with memory.
    fn want_vm(&self, host: HostId, id: ReservationId, want: &mut Want) -> bool {
        let Some(reservation) = self.durable.reservation(id).filter(|r| r.host == host) else { return false };
        let Some(slices) = self.usable(id, reservation) else { return false };
        let Reservation { vm, local, pinned, uid, .. } = reservation;
        want.vms.insert(id, WantVm { vm: vm.clone(), local: *local, pinned: *pinned, uid: *uid, slices });
        true
    }

    /// Returns whether all slices of a VM are granted and their handles stored.
    fn is_usable(&self, id: ReservationId, reservation: &Reservation) -> bool {
        let holdings = |slice: &SliceId| {
            self.durable.slot(*slice).map(|slot| Holding { slice: *slice, epoch: slot.epoch })
        };
        let has_handle = |slice| holdings(slice).is_some_and(|holding| self.handle_of(holding).is_some());
        self.durable.is_granted(id, reservation) && reservation.slices.iter().all(has_handle)
    }

    /// Returns a VM's slices once all of them are granted to it: a desired state never contains a
    /// part of a VM's memory, nor a slice with another VM adopted after a restore.
    fn usable(&self, id: ReservationId, reservation: &Reservation) -> Option<BTreeMap<Holding, Handle>> {
        let ended = matches!(reservation.stage, Stage::Broken { .. } | Stage::Ended { .. });
        if ended || !self.durable.is_granted(id, reservation) {
            return None;
        }
        let handle = |slice: &SliceId| {
            let slot = self.durable.slot(*slice)?;
            let holding = Holding { slice: *slice, epoch: slot.epoch };
            Some((holding, self.handle_of(holding)?))
        };
        reservation.slices.iter().map(handle).collect()
    }

    fn handle_of(&self, holding: Holding) -> Option<Handle> {
        let granted = self.handles.get(&holding.slice).filter(|(epoch, _)| *epoch == holding.epoch);
        granted.map(|(_, handle)| handle).or_else(|| self.places.get(&holding.slice)).cloned()
    }
}
