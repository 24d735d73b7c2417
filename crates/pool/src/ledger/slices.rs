//! What happens to slices outside requests: devices and hosts report, scrubbers are chosen, something is not right.

use std::collections::BTreeSet;

use units::limits::RESERVATIONS_LOST_MAX;
use units::{Bytes, Epoch, HostId, Name, Ns, RequestId, ReservationId, SliceId};

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
        self.cuts_off(slice) || self.is_unreachable(slice, slot)
    }

    /// Whether no host can reach a slice: none holds it, or its EMC has fenced the holder.
    fn is_unreachable(&self, slice: SliceId, slot: Slot) -> bool {
        let emc = self.emc_of(slice);
        let stopped = |host: &HostEntry| emc.is_some_and(|emc| host.host.is_cut_off(emc));
        slot.holder().is_none_or(|host| self.hosts.get(&host).is_some_and(stopped))
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

    /// After a restore every host has reported, and no VM was found to use these slices: they return to the cycle. A host
    /// that was granted one is asked to release it first, even where the device could revoke: a process that outlives its
    /// VM may still have the memory.
    pub fn decide_unclaimed(&self, slices: &[SliceId]) -> Change {
        let requalified = slices.iter().filter_map(|slice| {
            let slot = self.slot(*slice)?;
            let in_rack = slot.holder().is_some_and(|host| self.hosts.contains_key(&host));
            let let_go = !in_rack || self.is_unreachable(*slice, slot);
            let next = slot.step(Event::Requalify { let_go }).ok()?;
            Some(Record::Slice(*slice, next))
        });
        Change(requalified.collect())
    }

    /// Adopts a running VM on slices that the ledger does not assign to it.
    ///
    /// Reservation numbers rise and a VM has one active reservation, so of two reservations of one VM name the lower
    /// number is the earlier, released one: its slices drain until its process ends.
    ///
    /// Returns `None` if the device does not confirm a slice, or if an earlier reservation of this name still has slices
    /// and `id` is not of the lost history, so that the order is unknown.
    pub fn decide_adopt(
        &self,
        when: When,
        host: HostId,
        id: ReservationId,
        vm: &Name,
        slices: &[(SliceId, Epoch)],
    ) -> Option<Change> {
        let other = self.reservation_of(vm).filter(|other| *other != id);
        let known = self.reservations.get(&id);
        let ended = match known.map(|known| &known.stage) {
            Some(ended @ Stage::Ended { .. }) => Some(ended.clone()),
            _ if other > Some(id) => Some(Stage::Ended { at: when.now, why: earlier_life() }),
            _ => None,
        };
        let owner = Owner { host, reservation: id };
        let mut records = Vec::with_capacity(slices.len() + 2);
        for (slice, epoch) in slices {
            let online = self.adopted(*slice, *epoch, owner)?;
            let next = match ended {
                Some(_) => online.step(Event::Release { force: false }).ok()?,
                None => online,
            };
            records.push(Record::Slice(*slice, next));
        }
        if let Some(earlier) = other.filter(|_| ended.is_none()) {
            if self.is_in_use(earlier) && id >= self.meta.next_reservation {
                return None; // not a number of the lost history, so it does not prove which life is later
            }
            records.extend(self.decide_end(when, earlier, earlier_life(), Actor::Manager).ok()?.0);
        }
        let ids: Vec<_> = slices.iter().map(|(slice, _)| *slice).collect();
        let known = known.cloned().unwrap_or_else(|| self.lost_reservation(when, id, host, vm));
        let stage = ended.unwrap_or(Stage::Committed);
        let adopted = Reservation { slices: ids.clone(), stage, ..known };
        records.push(Record::Reservation(id, adopted));
        records.push(decision(when, Actor::Manager, Subject::Vm(vm.clone()), What::Adopted { slices: ids }));
        Some(Change(records))
    }

    /// Whether a reservation has at least one of its slices.
    fn is_in_use(&self, id: ReservationId) -> bool {
        let own = |slice: &SliceId| self.slot(*slice).is_some_and(|slot| slot.reservation() == Some(id));
        self.reservations[&id].slices.iter().any(own)
    }

    /// A slice as its running VM has it: already, or because its device confirms the grant.
    fn adopted(&self, slice: SliceId, epoch: Epoch, owner: Owner) -> Option<Slot> {
        let slot = self.slot(slice)?;
        let own = slot.epoch == epoch && slot.state == State::Online(owner);
        if own { Some(slot) } else { slot.step(Event::Adopt(owner, epoch)).ok() }
    }

    /// A reservation of the lost history, as far as a report describes it.
    fn lost_reservation(&self, when: When, id: ReservationId, host: HostId, vm: &Name) -> Reservation {
        let request = format!("restored:{}:{}", self.meta.generation, id.0);
        Reservation {
            vm: vm.clone(),
            host,
            slices: Vec::new(),
            local: Bytes::ZERO,
            cores: 0,
            pinned: false,
            request: RequestKey {
                client: Name::new("restored").expect("a valid name"),
                id: RequestId::new(&request).expect("a valid request id"),
            },
            commit_within: Ns::ZERO,
            created: when.wall,
            stage: Stage::Committed,
        }
    }

    /// Quarantines everything after a restore: the store is older than the rack, so it is right about nothing until the
    /// hosts have reported. Whether a host was fenced is old as well: it may run VMs by now, and a fence would end them. So
    /// is its boot: one that differs does not prove that the host has released the memory of the lost history.
    /// Reservation numbers continue above any that the lost history, or another restore of the same backup, can have used.
    pub fn decide_restored(&self) -> Change {
        let slices = self.slots_from(SliceId(0)).map(|(slice, _, slot)| {
            let why = Quarantine::Restored { host: slot.holder() };
            Record::Slice(slice, Slot { state: State::Quarantined(why), ..slot })
        });
        let hosts = self.hosts.iter().map(|(id, entry)| {
            let old = entry.host.clone();
            let (fence, unconfirmed_fences, boot_id) = (Fence::None, BTreeSet::new(), String::new());
            Record::Host(*id, Host { must_report: true, fence, unconfirmed_fences, boot_id, ..old })
        });
        let Meta { generation, next_reservation, .. } = self.meta;
        // Each restore gets its own range of numbers by its generation; the bound avoids an overflow.
        let of_generation = generation.min(RESERVATIONS_LOST_MAX / 2) * RESERVATIONS_LOST_MAX;
        let unused = next_reservation.0.saturating_add(RESERVATIONS_LOST_MAX).max(of_generation);
        let meta = Meta { next_reservation: ReservationId(unused), ..self.meta.clone() };
        Change(std::iter::once(Record::Meta(meta)).chain(slices).chain(hosts).collect())
    }

    /// Slices kept from everybody, with the reason.
    pub fn quarantined(&self) -> impl Iterator<Item = (SliceId, Quarantine)> {
        let slices = self.emcs.values().flat_map(EmcEntry::quarantined_slices);
        slices.filter_map(|slice| match self.slot(slice)?.state {
            State::Quarantined(why) => Some((slice, why)),
            _ => None,
        })
    }
}

/// The end of a reservation whose VM has a later life. Only a release, or its host's loss, made the name free again.
fn earlier_life() -> EndedBy {
    EndedBy::Released { force: false, reason: "a later life of this VM was found running".into() }
}
