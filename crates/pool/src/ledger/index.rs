//! Indexes of the ledger, derived from its records. Each applied record updates them, so that no
//! decision scans all slices, hosts or reservations.

use std::collections::{BTreeMap, BTreeSet};

use units::{EmcId, HostId, ReservationId, SliceId};

use super::{EmcEntry, HostEntry, Ledger};
use crate::{
    record::{Fence, Reservation},
    slice::{Quarantine, STATE_NAMES, Slot, State},
};

/// Numbers of a reservation's slices that are granted and online.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReservationProgress {
    /// Slices that the device granted to the host.
    granted: u32,
    /// Slices that the host reported online; included in `granted`.
    online: u32,
}

impl ReservationProgress {
    fn of(slot: Slot, id: ReservationId) -> Self {
        let online = matches!(slot.state, State::Online(owner) if owner.reservation == id);
        let granted = online || matches!(slot.state, State::Onlining(owner) if owner.reservation == id);
        Self { granted: u32::from(granted), online: u32::from(online) }
    }

    fn add(&mut self, other: Self) {
        self.granted += other.granted;
        self.online += other.online;
    }

    fn subtract(&mut self, other: Self) {
        self.granted -= other.granted;
        self.online -= other.online;
    }
}

impl EmcEntry {
    /// Returns the lowest slice that waits for a scrubber, and the host that scrubs the fewest
    /// slices. Returns `None` if no slice waits, or if every host scrubs at least `scrubs_per_host`
    /// slices.
    pub fn next_scrub(&self, scrubs_per_host: usize) -> Option<(SliceId, HostId)> {
        let (_, host) = self.scrubbers.first().filter(|(busy, _)| *busy < scrubs_per_host)?;
        Some((*self.to_scrub.first()?, *host))
    }

    /// Returns the name of each slice state with the number of slices in this state.
    pub fn states(&self) -> impl Iterator<Item = (&'static str, u32)> {
        STATE_NAMES.into_iter().zip(self.slices_by_state)
    }

    /// Returns the slices that no reported VM has claimed since a restore, lowest first. Excludes
    /// slices that a host outside the rack may reach: they wait for an operator, because this host
    /// cannot report whether a VM uses them.
    pub fn unclaimed(&self) -> impl Iterator<Item = SliceId> {
        self.unclaimed.iter().copied()
    }

    /// Returns the quarantined slices that wait for an operator's decision, lowest first.
    pub fn slices_quarantined_for_operator(&self) -> impl Iterator<Item = SliceId> {
        let some = self.quarantined.len() > self.unclaimed.len();
        let quarantined = some.then(|| self.quarantined_slices()).into_iter().flatten();
        quarantined.filter(|slice| !self.unclaimed.contains(slice))
    }

    /// Returns the number of quarantined slices that wait for an operator's decision.
    pub fn operator_quarantine_count(&self) -> usize {
        self.quarantined.len() - self.unclaimed.len()
    }

    /// Returns whether an attached host has not reported since a restore.
    pub(super) fn has_unreported_host(&self) -> bool {
        self.unreported_hosts > 0
    }
}

impl HostEntry {
    /// Returns the slices that the host scrubs or was chosen to scrub, lowest first.
    pub fn scrubs(&self) -> impl ExactSizeIterator<Item = SliceId> {
        self.scrubs.iter().copied()
    }

    /// Returns whether the host's agent is connected with a valid lease, as last set by the
    /// manager.
    #[cfg(test)]
    pub(crate) fn is_live(&self) -> bool {
        self.is_live
    }

    /// Returns the EMCs whose slices the host may scrub.
    fn scrubbable_emcs(&self) -> impl Iterator<Item = EmcId> {
        let can_scrub = self.is_live && self.host.fence == Fence::None && !self.host.must_report;
        let attached = self.host.emcs.iter().filter(move |_| can_scrub);
        let is_usable = |emc: &&EmcId| {
            !self.unusable_emcs.contains_key(*emc) && !self.host.unconfirmed_fences.contains(*emc)
        };
        attached.filter(is_usable).copied()
    }
}

impl Ledger {
    /// Sets whether a host's agent is connected with a valid lease. Only hosts with a valid lease
    /// scrub slices. Not durable.
    pub fn set_host_live(&mut self, id: HostId, live: bool) {
        if self.hosts.get(&id).is_some_and(|entry| entry.is_live != live) {
            self.update_host(id, |entry| entry.is_live = live);
        }
    }

    /// Records that a host sent a complete report after the ledger was loaded. Not durable.
    pub fn set_host_reported(&mut self, id: HostId) {
        if let Some(entry) = self.hosts.get_mut(&id) {
            entry.has_reported = true;
        }
    }

    /// Changes the entry of a host and updates the host's entries in the indexes of its EMCs.
    pub(super) fn update_host(&mut self, id: HostId, change: impl FnOnce(&mut HostEntry)) {
        let Some(entry) = self.hosts.get(&id) else { return };
        unindex_host(&mut self.emcs, id, entry);
        if let Some(entry) = self.hosts.get_mut(&id) {
            change(entry);
            index_host(&mut self.emcs, id, entry);
        }
    }

    /// Adds a new host to the indexes of EMCs and unclaimed slices.
    pub(super) fn index_added_host(&mut self, id: HostId) {
        let Some(entry) = self.hosts.get(&id) else { return };
        index_host(&mut self.emcs, id, entry);
        let held: Vec<SliceId> = entry.held().collect();
        held.into_iter().for_each(|slice| self.update_unclaimed(slice));
    }

    /// Removes a host from the indexes of EMCs and unclaimed slices.
    pub(super) fn unindex_removed_host(&mut self, id: HostId, old: &HostEntry) {
        unindex_host(&mut self.emcs, id, old);
        if !old.held.is_empty() {
            self.held_outside_rack.insert(id, old.held.clone());
        }
        old.held().for_each(|slice| self.update_unclaimed(slice));
    }

    /// Updates the holder and the scrubber of a slice after a change of its slot.
    pub(super) fn update_holder(&mut self, id: SliceId, old: Slot, new: Slot) {
        let scrubber = |slot: Slot| slot.holder().filter(|_| slot.is_being_scrubbed());
        if scrubber(old) != scrubber(new) {
            if let Some(host) = scrubber(old) {
                self.update_host(host, |entry| _ = entry.scrubs.remove(&id));
            }
            if let Some(host) = scrubber(new) {
                self.update_host(host, |entry| _ = entry.scrubs.insert(id));
            }
        }
        if old.holder() == new.holder() {
            return;
        }
        if let Some(host) = old.holder() {
            self.update_held_slices(host, |held| _ = held.remove(&id));
        }
        if let Some(host) = new.holder() {
            self.update_held_slices(host, |held| _ = held.insert(id));
        }
    }

    /// Changes the set of slices that a host holds. The host may be outside the rack.
    fn update_held_slices(&mut self, host: HostId, change: impl FnOnce(&mut BTreeSet<SliceId>)) {
        if let Some(entry) = self.hosts.get_mut(&host) {
            return change(&mut entry.held);
        }
        let held = self.held_outside_rack.entry(host).or_default();
        change(held);
        if held.is_empty() {
            self.held_outside_rack.remove(&host);
        }
    }

    /// Updates whether a slice is in the index of unclaimed slices.
    pub(super) fn update_unclaimed(&mut self, slice: SliceId) {
        let is_unclaimed =
            self.slot(slice).is_some_and(|slot| is_restored(slot) && self.can_holder_report(slot));
        let Some(entry) = self.emc_of(slice).and_then(|emc| self.emcs.get_mut(&emc)) else { return };
        if is_unclaimed {
            entry.unclaimed.insert(slice);
        } else {
            entry.unclaimed.remove(&slice);
        }
    }

    /// Updates the progress of the reservations that the slice served before and serves after a
    /// change of its slot.
    pub(super) fn update_progress(&mut self, slice: SliceId, old: Slot, new: Slot) {
        if let Some((id, progress)) = self.progress_of(slice, old) {
            progress.subtract(ReservationProgress::of(old, id));
        }
        if let Some((id, progress)) = self.progress_of(slice, new) {
            progress.add(ReservationProgress::of(new, id));
        }
    }

    /// Returns the progress of the slot's reservation, if the reservation contains the slice.
    fn progress_of(
        &mut self,
        slice: SliceId,
        slot: Slot,
    ) -> Option<(ReservationId, &mut ReservationProgress)> {
        let id = slot.reservation()?;
        self.reservations.get(&id)?.slices.binary_search(&slice).ok()?;
        Some((id, self.progress.entry(id).or_default()))
    }

    /// Recomputes the progress of a reservation from the slots of its slices.
    pub(super) fn recompute_progress(&mut self, id: ReservationId, reservation: &Reservation) {
        let mut progress = ReservationProgress::default();
        for slice in &reservation.slices {
            let slot = self.slot(*slice).unwrap_or_default();
            progress.add(ReservationProgress::of(slot, id));
        }
        self.progress.insert(id, progress);
    }

    /// Returns the number of the reservation's slices that are online.
    pub fn online(&self, id: ReservationId) -> u32 {
        self.progress.get(&id).map_or(0, |progress| progress.online)
    }

    /// Returns whether all slices of a reservation are online.
    pub fn is_all_online(&self, id: ReservationId, reservation: &Reservation) -> bool {
        self.online(id) as usize == reservation.slices.len()
    }

    /// Returns whether the device has granted all slices of a reservation to its host.
    pub fn is_granted(&self, id: ReservationId, reservation: &Reservation) -> bool {
        let granted = self.progress.get(&id).map_or(0, |progress| progress.granted);
        granted as usize == reservation.slices.len()
    }
}

fn index_host(emcs: &mut BTreeMap<EmcId, EmcEntry>, id: HostId, host: &HostEntry) {
    for emc in host.host.emcs.iter().filter(|emc| host.host.must_report_on(**emc)) {
        emcs.entry(*emc).and_modify(|entry| entry.unreported_hosts += 1);
    }
    for emc in host.scrubbable_emcs() {
        emcs.entry(emc).and_modify(|entry| _ = entry.scrubbers.insert((host.scrubs.len(), id)));
    }
}

fn unindex_host(emcs: &mut BTreeMap<EmcId, EmcEntry>, id: HostId, host: &HostEntry) {
    for emc in host.host.emcs.iter().filter(|emc| host.host.must_report_on(**emc)) {
        emcs.entry(*emc).and_modify(|entry| entry.unreported_hosts -= 1);
    }
    for emc in host.scrubbable_emcs() {
        emcs.entry(emc).and_modify(|entry| _ = entry.scrubbers.remove(&(host.scrubs.len(), id)));
    }
}

fn is_restored(slot: Slot) -> bool {
    matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }))
}
