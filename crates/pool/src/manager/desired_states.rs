//! Sends desired states to hosts: either the changes since the last version or the complete state.
//! Each host has at most one unanswered desired state.
//!
//! A complete desired state is built in chunks of bounded size, so that requests do not wait. Each
//! slice and reservation of the host is added in its current state. Changes that become durable
//! meanwhile are recorded and applied at the end, so that the result matches the durable ledger.

use std::collections::{BTreeMap, BTreeSet};

use units::{DesiredVersion, HostId, ReservationId, SliceId};

use super::{
    Effect, Manager,
    link::{Draft, PendingChanges, SentState},
};
use crate::{
    ledger::{HostEntry, Ledger, When},
    protocol::{
        DesiredRehome, DesiredRelease, DesiredState, DesiredVm, Handle, Holding, Removals,
        take_entries_of_slice,
    },
    record::{Fence, Rehome, Reservation, Stage},
    slice::{DrainStage, Scrub, State},
};

impl Manager {
    /// Adds the next chunk to the draft of a host's complete desired state, or starts a draft.
    /// Returns the desired state after the last chunk.
    fn continue_draft(&mut self, host: HostId) -> Option<DesiredState> {
        let empty = self.empty_desired_state(host)?;
        let mut draft = self.links.get_mut(&host)?.draft.take().unwrap_or_default();
        let mut desired = draft.desired.take().unwrap_or_else(|| empty.clone());
        (desired.number, desired.instance, desired.fenced) = (empty.number, empty.instance, empty.fenced);
        if !desired.fenced && !self.add_chunk(host, &mut draft, &mut desired) {
            draft.desired = Some(desired);
            return self.store_draft(host, draft);
        }
        let changes = std::mem::take(&mut self.links.get_mut(&host)?.pending_changes);
        if desired.fenced {
            return Some(empty);
        }
        if changes.all {
            // There were too many changes to list, so the draft is started again.
            return self.store_draft(host, Draft::default());
        }
        self.add_pending_changes(host, &changes, &mut desired);
        Some(desired)
    }

    fn store_draft(&mut self, host: HostId, draft: Draft) -> Option<DesiredState> {
        self.links.get_mut(&host)?.store_draft(draft);
        None
    }

    /// Adds the next chunk of slices and reservations to a complete desired state. Returns whether
    /// all slices and reservations were added.
    fn add_chunk(&self, host: HostId, draft: &mut Draft, desired: &mut DesiredState) -> bool {
        let Some(entry) = self.durable.host(host) else { return true };
        let mut remaining = self.chunk_size;
        for slice in entry.held_slices_from(draft.next_slice) {
            if remaining == 0 {
                return false;
            }
            self.add_slice(host, slice, desired);
            (remaining, draft.next_slice) = (remaining - 1, SliceId(slice.0.saturating_add(1)));
        }
        for id in entry.reservations_from(draft.next_reservation) {
            if remaining == 0 {
                return false;
            }
            self.add_vm(host, id, desired);
            let slices = desired.vms.get(&id).map_or(0, |vm| vm.slices.len());
            (remaining, draft.next_reservation) =
                (remaining.saturating_sub(1 + slices), ReservationId(id.0.saturating_add(1)));
        }
        true
    }

    fn add_pending_changes(&self, host: HostId, changes: &PendingChanges, desired: &mut DesiredState) {
        for id in &changes.reservations {
            desired.vms.remove(id);
            self.add_vm(host, *id, desired);
        }
        for slice in &changes.slices {
            take_entries_of_slice(&mut desired.release, *slice).for_each(drop);
            take_entries_of_slice(&mut desired.scrub, *slice).for_each(drop);
            self.add_slice(host, *slice, desired);
        }
    }

    /// Expedites the next desired state of a reservation's host, because a caller waits for the
    /// reservation's slices.
    pub(super) fn expedite_desired_state(&mut self, id: ReservationId) {
        let host = self.durable.reservation(id).map(|reservation| reservation.host);
        if let Some(mut link) = host.and_then(|host| self.links.get_mut(&host)) {
            link.pending_changes.awaited = true;
        }
    }

    /// Schedules a desired state for a host after a change of a slice and the reservations that
    /// have or had the slice.
    pub(super) fn notify_slice(&mut self, host: HostId, slice: SliceId, of: [Option<ReservationId>; 2]) {
        if let Some(mut link) = self.links.get_mut(&host).filter(|link| link.is_connected()) {
            link.pending_changes.add(Some(slice), of.into_iter().flatten());
            link.desired_state_due = true;
        }
    }

    /// Schedules a desired state for the host of a reservation. Does nothing before the slices are
    /// granted, because the host receives a VM only with all its slices.
    pub(super) fn notify_reservation(&mut self, id: ReservationId, reservation: &Reservation) {
        let is_waiting =
            matches!(reservation.stage, Stage::Reserved { .. }) && !self.is_vm_usable(id, reservation);
        if is_waiting {
            return;
        }
        if let Some(mut link) = self.links.get_mut(&reservation.host).filter(|link| link.is_connected()) {
            link.pending_changes.add(None, [id]);
            link.desired_state_due = true;
        }
    }

    /// Schedules a complete desired state for a host.
    pub(super) fn notify_host(&mut self, host: HostId) {
        if let Some(mut link) = self.links.get_mut(&host) {
            link.pending_changes.all = true;
            link.desired_state_due = true;
        }
    }

    /// Sends the desired states that are due. A host gets no new desired state while the previous
    /// one is unanswered.
    pub(super) fn send_desired_states(&mut self, when: When) {
        for host in self.links.hosts_with_due_state(when.now) {
            if let Some(mut link) = self.links.get_mut(&host) {
                link.desired_state_due = false;
            }
            // Another desired state becomes due when the pending decision becomes durable or is
            // lost.
            if self.is_state_superseded(host) {
                self.postpone_resend(when, host);
            } else {
                self.send_desired_state(when, host);
            }
        }
    }

    /// Returns whether a pending decision makes the desired state of the durable ledger wrong for
    /// this host.
    fn is_state_superseded(&self, host: HostId) -> bool {
        self.has_pending_fence(host) || self.has_pending_scrub_end(host) || self.has_pending_restart(host)
    }

    /// Returns whether the restart or removal of a host is decided but not durable yet. The desired
    /// state of the durable ledger would open slices with old data for VMs that have ended.
    fn has_pending_restart(&self, host: HostId) -> bool {
        let Some(before) = self.durable.host(host) else { return false };
        let Some(after) = self.head.host(host) else { return true };
        let (before, after) = (&before.host, &after.host);
        before.fence == Fence::None && !before.boot_id.is_empty() && after.boot_id != before.boot_id
    }

    /// Returns whether the fence of a host is decided but not durable yet. If an operator confirmed
    /// that the host is powered off and it then connects, it must not receive slices of the state
    /// before the fence.
    fn has_pending_fence(&self, host: HostId) -> bool {
        let fence = |ledger: &Ledger| ledger.host(host).map(|entry| entry.host.fence).unwrap_or_default();
        fence(&self.durable) == Fence::None && fence(&self.head) != Fence::None
    }

    /// Returns whether the end of a host's scrub is decided but not durable yet, and the scrub was
    /// never sent to the host. The desired state of the durable ledger still contains the scrub, so
    /// the agent would zero a slice that may already have another owner.
    fn has_pending_scrub_end(&self, host: HostId) -> bool {
        let sent = self.links.get(&host).map(|link| &link.scrubs_sent);
        let mut scrubs = self.durable.host(host).into_iter().flat_map(HostEntry::scrubs);
        scrubs.any(|slice| {
            let slot = self.durable.slot(slice).unwrap_or_default();
            let sent = sent.is_some_and(|sent| sent.contains_key(&Holding { slice, epoch: slot.epoch }));
            slot.state == State::Scrubbing(Scrub::Working(host)) && !sent && self.has_pending_decision(slice)
        })
    }

    fn postpone_resend(&mut self, when: When, host: HostId) {
        if let Some(mut link) = self.links.get_mut(&host)
            && let Some(sent) = &mut link.last_sent
        {
            sent.at = when.now;
        }
    }

    /// Schedules complete desired states for hosts that have not answered in time.
    pub(super) fn resend_desired_states(&mut self, when: When) {
        for host in self.links.hosts_with_due_resend(when.now) {
            self.notify_host(host);
        }
    }

    fn send_desired_state(&mut self, when: When, host: HostId) {
        let Some(mut link) = self.links.get_mut(&host) else { return };
        let Some(session) = link.session else { return };
        let changes = link.draft.is_none().then(|| std::mem::take(&mut link.pending_changes));
        let last = link.last_sent.map(|sent| sent.number).filter(|number| *number == link.reflected);
        drop(link);
        let changed =
            changes.zip(last).and_then(|(changes, last)| self.desired_changes(host, last, &changes));
        let Some(desired) = changed.or_else(|| self.continue_draft(host)) else { return };
        let held = |sent: &Holding| self.durable.is_held(host, sent.slice, sent.epoch);
        let Some(mut link) = self.links.get_mut(&host) else { return };
        let is_complete = desired.base.is_none();
        link.scrubs_sent
            .retain(|scrub, _| held(scrub) && (!is_complete || desired.scrub.contains_key(scrub)));
        for scrub in desired.scrub.keys() {
            link.scrubs_sent.entry(*scrub).or_insert(desired.number);
        }
        link.last_sent = Some(SentState { number: desired.number, at: when.now });
        if desired.fenced && link.fence_sent.is_none() {
            link.fence_sent = Some(desired.number);
        }
        drop(link);
        self.effects.push_back(Effect::Send(session, desired));
    }

    /// Returns the changes since version `base`, or `None` if the host needs a complete state.
    fn desired_changes(
        &self,
        host: HostId,
        base: DesiredVersion,
        changes: &PendingChanges,
    ) -> Option<DesiredState> {
        let mut desired = self.empty_desired_state(host)?;
        if changes.all || desired.fenced || desired.number <= base {
            return None;
        }
        desired.base = Some(base);
        for id in &changes.reservations {
            if !self.add_vm(host, *id, &mut desired) {
                desired.removals.vms.insert(*id);
            }
        }
        let mentioned: BTreeSet<SliceId> = desired.slices().collect();
        for slice in changes.slices.difference(&mentioned) {
            if !self.add_slice(host, *slice, &mut desired) {
                desired.removals.slices.insert(*slice);
            }
        }
        Some(desired)
    }

    /// Returns the complete desired state of a host, derived from the durable ledger.
    pub fn desired_state(&self, host: HostId) -> Option<DesiredState> {
        let mut desired = self.empty_desired_state(host)?;
        if desired.fenced {
            return Some(desired);
        }
        let entry = self.durable.host(host)?;
        for slice in entry.held() {
            self.add_slice(host, slice, &mut desired);
        }
        for id in entry.reservations() {
            self.add_vm(host, id, &mut desired);
        }
        Some(desired)
    }

    fn empty_desired_state(&self, host: HostId) -> Option<DesiredState> {
        let meta = self.durable.meta();
        Some(DesiredState {
            number: DesiredVersion { generation: meta.generation, revision: meta.revision },
            base: None,
            instance: self.links.get(&host)?.instance()?,
            vms: BTreeMap::new(),
            release: BTreeMap::new(),
            scrub: BTreeMap::new(),
            removals: Removals::default(),
            fenced: self.durable.host(host)?.host.fence != Fence::None,
        })
    }

    /// Adds the slice if the host must release or scrub it. Returns whether the slice was added.
    fn add_slice(&self, host: HostId, slice: SliceId, desired: &mut DesiredState) -> bool {
        let Some(slot) = self.durable.slot(slice).filter(|slot| slot.holder() == Some(host)) else {
            return false;
        };
        let release = match slot.state {
            State::Draining(_, DrainStage::Host { force }) => Some(force),
            State::Scrubbing(Scrub::Leaving(_)) => Some(false),
            State::Scrubbing(Scrub::Working(_)) => None,
            _ => return false,
        };
        let holding = Holding { slice, epoch: slot.epoch };
        // The handle is not available before the slice's EMC is compared with the ledger.
        let Some(handle) = self.handle_of(holding) else { return false };
        match release {
            Some(force) => drop(desired.release.insert(holding, DesiredRelease { force, handle })),
            None => drop(desired.scrub.insert(holding, handle)),
        }
        true
    }

    /// Adds the VM of a reservation if its memory is complete and it may run. Returns whether the
    /// VM was added.
    fn add_vm(&self, host: HostId, id: ReservationId, desired: &mut DesiredState) -> bool {
        let Some(reservation) = self.durable.reservation(id).filter(|r| r.host == host) else { return false };
        let Some(slices) = self.usable_slices(id, reservation) else { return false };
        let Reservation { vm, local, pinned, uid, rehome, .. } = reservation;
        let is_cancelled = matches!(rehome, Rehome::Cancelling { .. });
        let rehome = rehome.attempt_in_progress().map(|attempt| DesiredRehome { attempt, is_cancelled });
        let vm = DesiredVm { vm: vm.clone(), local: *local, pinned: *pinned, uid: *uid, slices, rehome };
        desired.vms.insert(id, vm);
        true
    }

    /// Returns whether all slices of a VM are granted and their handles are available.
    fn is_vm_usable(&self, id: ReservationId, reservation: &Reservation) -> bool {
        let holdings = |slice: &SliceId| {
            self.durable.slot(*slice).map(|slot| Holding { slice: *slice, epoch: slot.epoch })
        };
        let has_handle = |slice| holdings(slice).is_some_and(|holding| self.handle_of(holding).is_some());
        self.durable.is_granted(id, reservation) && reservation.slices.iter().all(has_handle)
    }

    /// Returns the slices of a VM, or `None` unless all of them are granted to it. A desired state
    /// therefore never contains a part of a VM's memory, or a slice on which another VM was adopted
    /// after a restore.
    fn usable_slices(
        &self,
        id: ReservationId,
        reservation: &Reservation,
    ) -> Option<BTreeMap<Holding, Handle>> {
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
