//! What happens to slices outside requests: devices and hosts report, scrubbers are chosen, something is not right.

use units::{Epoch, HostId, ReservationId, SliceId};

use super::{Change, EmcEntry, Ledger, When, decision};
use crate::{
    audit::{Actor, Subject, What},
    denied::Denied,
    record::{Host, Record, RequestKey, Reservation, Stage},
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

    /// An operator, or the last report after a restore, lets a quarantined slice back into the cycle.
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
        let next = slot.step(Event::Requalify).map_err(|_| refused)?;
        let said = What::Requalified { reason: reason.to_owned() };
        Ok(Change(vec![Record::Slice(slice, next), decision(when, actor, Subject::Slice(slice), said)]))
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
    /// confirms. It keeps them.
    pub fn decide_adopt(
        &self,
        when: When,
        host: HostId,
        id: ReservationId,
        vm: &units::Name,
        slices: &[(SliceId, Epoch)],
    ) -> Option<Change> {
        let owner = Owner { host, reservation: id };
        let mut records = Vec::with_capacity(slices.len() + 2);
        for (slice, epoch) in slices {
            let next = self.slot(*slice)?.step(Event::Adopt(owner, *epoch)).ok()?;
            records.push(Record::Slice(*slice, next));
        }
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
        let adopted = Reservation { host, slices: ids.clone(), stage: Stage::Committed, ..known };
        records.push(Record::Reservation(id, adopted));
        records.push(decision(when, Actor::Manager, Subject::Vm(vm.clone()), What::Adopted { slices: ids }));
        Some(Change(records))
    }

    /// The store is a backup's: whatever it says of a slice may be old news, until the hosts have reported.
    pub fn decide_restored(&self) -> Change {
        let slices = self.slots_from(SliceId(0)).map(|(slice, _, slot)| {
            let why = Quarantine::Restored { host: slot.holder() };
            Record::Slice(slice, Slot { state: State::Quarantined(why), ..slot })
        });
        let hosts = self
            .hosts
            .iter()
            .map(|(id, entry)| Record::Host(*id, Host { must_report: true, ..entry.host.clone() }));
        Change(slices.chain(hosts).collect())
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
