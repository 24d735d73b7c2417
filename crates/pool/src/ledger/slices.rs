//! What happens to slices outside requests: devices and hosts report, scrubbers are chosen, something is not right.

use std::collections::BTreeSet;

use units::limits::RESERVATIONS_LOST_MAX;
use units::{Epoch, HostId, ReservationId, SliceId};

use super::{Change, EmcEntry, HostEntry, Ledger, When, decision};
use crate::{
    audit::{Actor, Subject, What},
    denied::Denied,
    record::{EndedBy, Fence, Host, Meta, Record, RequestKey, Reservation, Stage},
    slice::{Event, Owner, Quarantine, Slot, State},
};

impl Ledger {
    /// What an event makes of a slice, or `None` where the slice has moved on: reports may be late or repeated.
    pub fn decide_slice(&self, slice: SliceId, event: Event) -> Option<Change> {
        let next = self.slot(slice)?.step(event).ok()?;
        Some(Change(vec![Record::Slice(slice, next)]))
    }

    /// A slice is kept from everybody, and the reservation that had it is broken.
    pub fn decide_quarantine(
        &self,
        when: When,
        slice: SliceId,
        event: Event,
        detail: &str,
    ) -> Option<Change> {
        let slot = self.slot(slice)?;
        let next = slot.step(event).ok()?;
        let State::Quarantined(why) = next.state else { return None };
        let why = if detail.is_empty() { why.to_string() } else { format!("{why}: {detail}") };
        let what = What::Quarantined { why: why.clone() };
        let mut records =
            vec![Record::Slice(slice, next), decision(when, Actor::Manager, Subject::Slice(slice), what)];
        if let Some(id) = slot.reservation() {
            records.extend(self.decide_break(when, id, format!("slice {slice} is quarantined: {why}")).0);
        }
        Some(Change(records))
    }

    /// An operator lets a quarantined slice back into the cycle. For a host that is not in the rack, which nobody can
    /// ask, the operator's word counts.
    ///
    /// # Errors
    /// The slice is not there or not quarantined.
    pub fn decide_requalify(
        &self,
        when: When,
        slice: SliceId,
        actor: Actor,
        reason: &str,
    ) -> Result<Change, Denied> {
        let slot = self.slot(slice).ok_or(Denied::NoSuchSlice(slice))?;
        let what = "uncordon";
        let refused = Denied::SliceNotNow { slice, state: slot.state_name(), what };
        let let_go = self.needs_no_word(slice, slot) || !self.has_way_back(slice);
        let next = slot.step(Event::Requalify { let_go }).map_err(|_| refused)?;
        let said = What::Requalified { reason: reason.to_owned() };
        Ok(Change(vec![Record::Slice(slice, next), decision(when, actor, Subject::Slice(slice), said)]))
    }

    /// Whether it is certain without asking its host that it reaches a slice no more, once the device has revoked.
    fn needs_no_word(&self, slice: SliceId, slot: Slot) -> bool {
        let stopped = |host: &HostEntry| host.host.fence == Fence::Fenced;
        self.cuts_off(slice) || slot.holder().is_none_or(|host| self.hosts.get(&host).is_some_and(stopped))
    }

    /// Whether a slice can go on without an operator: nobody need let go of it, or somebody can be asked to.
    pub(crate) fn has_way_back(&self, slice: SliceId) -> bool {
        let slot = self.slot(slice).unwrap_or_default();
        let in_rack = slot.holder().is_some_and(|host| self.hosts.contains_key(&host));
        in_rack || self.needs_no_word(slice, slot)
    }

    /// Whether the device of a slice can cut a host off.
    pub fn cuts_off(&self, slice: SliceId) -> bool {
        self.emc_of(slice).is_some_and(|emc| self.emcs[&emc].emc.cuts_off())
    }

    /// After a restore every host has reported, and nobody was found to use these slices (in ascending order): they go
    /// back into the cycle, and what the ledger thought had them is broken.
    pub fn decide_unclaimed(&self, when: When, slices: &[SliceId]) -> Change {
        let requalified = slices.iter().filter_map(|slice| {
            let slot = self.slot(*slice)?;
            let next = slot.step(Event::Requalify { let_go: self.needs_no_word(*slice, slot) }).ok()?;
            Some(Record::Slice(*slice, next))
        });
        let mut records: Vec<Record> = requalified.collect();
        let mut broken = BTreeSet::new();
        for slice in slices {
            for id in self.reservations_without(*slice).filter(|id| broken.insert(*id)) {
                let why = format!("slice {slice} was not in use when the hosts reported after a restore");
                records.extend(self.decide_break(when, id, why).0);
            }
        }
        Change(records)
    }

    /// Slices that a host's loss sends back: one of its devices has cut it off.
    pub fn decide_cut_off(&self, host: HostId, on: units::EmcId) -> Change {
        let Some(entry) = self.hosts.get(&host) else { return Change::default() };
        let held = entry.held.iter().filter(|s| self.emc_of(**s) == Some(on));
        let cut = held.filter_map(|s| {
            let slot = self.slots[s.0 as usize];
            let next = slot.step(Event::OwnerFenced(host)).ok().filter(|next| *next != slot)?;
            Some(Record::Slice(*s, next))
        });
        Change(cut.collect())
    }

    /// A VM that a restored ledger does not know, or knows otherwise, is found running on slices that the device
    /// confirms. It keeps them; until its process ends, if its reservation had ended before.
    pub fn decide_adopt(
        &self,
        when: When,
        host: HostId,
        id: ReservationId,
        vm: &units::Name,
        slices: &[(SliceId, Epoch)],
    ) -> Option<Change> {
        let owner = Owner { host, reservation: id };
        let ended = self.reservations.get(&id).filter(|known| !known.is_active());
        let mut records = Vec::with_capacity(slices.len() + 2);
        for (slice, epoch) in slices {
            let online = self.slot(*slice)?.step(Event::Adopt(owner, *epoch)).ok()?;
            let next = match ended {
                Some(_) => online.step(Event::Release { force: false }).ok()?,
                None => online,
            };
            records.push(Record::Slice(*slice, next));
        }
        records.extend(self.replaced(when, id, vm)?.0);
        let ids: Vec<_> = slices.iter().map(|(slice, _)| *slice).collect();
        let request = RequestKey {
            client: units::Name::new("restored").expect("a name"),
            id: units::RequestId::new(&format!("restored:{}:{}", self.meta.generation, id.0))
                .expect("a request id"),
        };
        let known = self.reservations.get(&id).cloned().unwrap_or(Reservation {
            vm: vm.clone(),
            host,
            slices: Vec::new(),
            local: units::Bytes::ZERO,
            cores: 0,
            pinned: false,
            request,
            commit_within: units::Ns::ZERO,
            created: when.wall,
            stage: Stage::Committed,
        });
        let stage = ended.map_or(Stage::Committed, |known| known.stage.clone());
        let adopted = Reservation { host, slices: ids.clone(), stage, ..known };
        records.push(Record::Reservation(id, adopted));
        records.push(decision(when, Actor::Manager, Subject::Vm(vm.clone()), What::Adopted { slices: ids }));
        Some(Change(records))
    }

    /// What the ledger thought the VM had before it was found elsewhere: nothing of that is left, or else nothing may be
    /// replaced.
    fn replaced(&self, when: When, id: ReservationId, vm: &units::Name) -> Option<Change> {
        let Some(other) = self.reservation_of(vm).filter(|other| *other != id) else {
            return Some(Change::default());
        };
        let own = |slice: &SliceId| self.slot(*slice).is_some_and(|slot| slot.reservation() == Some(other));
        let in_use = self.reservations[&other].slices.iter().any(own);
        (!in_use).then(|| self.decide_end(when, other, EndedBy::ProcessGone, Actor::Manager).ok())?
    }

    /// The store is a backup's: whatever it says of a slice may be old news, until the hosts have reported. Numbers that
    /// reservations had since the backup are not used again: hosts still know them.
    pub fn decide_restored(&self) -> Change {
        let slices = self.slots_from(SliceId(0)).map(|(slice, _, slot)| {
            let why = Quarantine::Restored { host: slot.holder() };
            Record::Slice(slice, Slot { state: State::Quarantined(why), ..slot })
        });
        let hosts = self
            .hosts
            .iter()
            .map(|(id, entry)| Record::Host(*id, Host { must_report: true, ..entry.host.clone() }));
        let unused = self.meta.next_reservation.0.saturating_add(RESERVATIONS_LOST_MAX);
        let meta = Meta { next_reservation: ReservationId(unused), ..self.meta.clone() };
        Change(std::iter::once(Record::Meta(meta)).chain(slices).chain(hosts).collect())
    }

    /// Slices kept from everybody, with the reason.
    pub fn quarantined(&self) -> impl Iterator<Item = (SliceId, Quarantine)> {
        let slices = self.emcs.values().flat_map(EmcEntry::quarantined_slices);
        slices.filter_map(|slice| match self.slots[slice.0 as usize].state {
            State::Quarantined(why) => Some((slice, why)),
            _ => None,
        })
    }
}
