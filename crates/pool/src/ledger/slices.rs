//! Changes of slices that do not come from reservations: reports of devices and hosts, quarantine,
//! and restore.

use std::collections::BTreeSet;

use units::limits::{
    HOSTS_ADDED_SINCE_BACKUP_MAX, RESERVATIONS_SINCE_BACKUP_MAX, SLICES_ADDED_SINCE_BACKUP_MAX,
};
use units::{EmcId, Epoch, HostId, MigrationId, Name, Ns, RequestId, ReservationId, SliceId};

use super::{Change, EmcEntry, HostEntry, Ledger, When, decision};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    protocol::{Holding, ObservedVm},
    record::{EndReason, Fence, Host, Meta, Record, Rehome, RequestKey, Reservation, Stage},
    rejection::Rejection,
    slice::{Event, Owner, Quarantine, Slot, State},
};

impl Ledger {
    /// Applies an event to a slice. Returns `None` if the slice's state does not accept the event:
    /// reports may be late or repeated.
    pub fn decide_slice_change(&self, slice: SliceId, event: Event) -> Option<Change> {
        let next = self.slot(slice)?.step(event).ok()?;
        Some(Change(vec![Record::Slice(slice, next)]))
    }

    /// Quarantines a slice and breaks the reservation that it serves. Returns `None` if the slice's
    /// state does not accept the event.
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
        let what = DecisionKind::Quarantined { why: why.clone() };
        let mut records =
            vec![Record::Slice(slice, next), decision(when, Actor::Manager, Subject::Slice(slice), what)];
        records.extend(self.require_fence_confirmation(slice, next));
        // A slice that drains after a move to local memory no longer serves the reservation.
        if let Some(id) = slot.reservation().filter(|id| self.has_slice(*id, slice)) {
            records.extend(
                self.decide_reservation_break(when, id, format!("slice {slice} is quarantined: {why}")).0,
            );
        }
        Some(Change(records))
    }

    /// Returns whether a slice is part of a reservation's memory.
    pub(super) fn has_slice(&self, id: ReservationId, slice: SliceId) -> bool {
        self.reservations.get(&id).is_some_and(|r| r.slices.binary_search(&slice).is_ok())
    }

    /// If the holder of the slice is fenced without confirmation by the slice's EMC, requires the
    /// EMC to confirm the fence. A restored ledger may lack the connection between the host and the
    /// EMC.
    fn require_fence_confirmation(&self, slice: SliceId, slot: Slot) -> Option<Record> {
        let (id, emc) = (slot.holder()?, self.emc_of(slice)?);
        let host = &self.hosts.get(&id)?.host;
        let confirms = host.unconfirmed_fences.contains(&emc) || host.is_fenced_at(emc);
        (host.fence != Fence::None && !confirms).then(|| {
            let mut host = host.clone();
            host.unconfirmed_fences.insert(emc);
            if host.fence == Fence::Fenced {
                host.fence = Fence::Fencing { powered_off: false };
            }
            Record::Host(id, host)
        })
    }

    /// Requalifies a quarantined slice on an operator's request. If the slice's holder is outside
    /// the rack, it cannot report a release; the request then counts as confirmation that it has
    /// released the slice.
    ///
    /// # Errors
    /// Returns an error if the slice does not exist or is not quarantined.
    pub fn decide_requalification(
        &self,
        when: When,
        slice: SliceId,
        actor: Actor,
        reason: &str,
    ) -> Result<Change, Rejection> {
        let slot = self.slot(slice).ok_or(Rejection::NoSuchSlice(slice))?;
        let what = "uncordon it";
        let rejection = Rejection::SliceWrongState { slice, state: slot.state_name(), what };
        let is_released = self.is_revocation_sufficient(slice, slot) || !self.can_holder_report(slot);
        let next = slot.step(Event::Requalify { is_released }).map_err(|_| rejection)?;
        let decision_kind = DecisionKind::Requalified { reason: reason.to_owned() };
        Ok(Change(vec![
            Record::Slice(slice, next),
            decision(when, actor, Subject::Slice(slice), decision_kind),
        ]))
    }

    /// Returns whether a revocation by the device suffices, so that the slice's holder need not
    /// release the slice.
    fn is_revocation_sufficient(&self, slice: SliceId, slot: Slot) -> bool {
        self.can_revoke(slice) || self.is_unreachable(slice, slot)
    }

    /// Returns whether no host can reach a slice: the slice has no holder, or its EMC has fenced
    /// the holder.
    fn is_unreachable(&self, slice: SliceId, slot: Slot) -> bool {
        let emc = self.emc_of(slice);
        let stopped = |host: &HostEntry| emc.is_some_and(|emc| host.host.is_fenced_at(emc));
        slot.holder().is_none_or(|host| self.hosts.get(&host).is_some_and(stopped))
    }

    /// Returns whether the slice has no holder, or the holder is in the rack and can report.
    pub(super) fn can_holder_report(&self, slot: Slot) -> bool {
        slot.holder().is_none_or(|host| self.hosts.contains_key(&host))
    }

    /// Returns whether a host that may reach slices of an EMC has not reported since a restore.
    /// Such a host is attached to the EMC or holds a slice of it.
    pub fn awaits_reports(&self, emc: EmcId) -> bool {
        let Some(entry) = self.emcs.get(&emc) else { return false };
        entry.has_unreported_host() || self.unreported_hosts_on(emc).next().is_some()
    }

    /// Returns the hosts that may reach slices of an EMC and have not reported since a restore.
    pub(crate) fn unreported_hosts_on(&self, emc: EmcId) -> impl Iterator<Item = &Host> {
        let entry = self.emcs.get(&emc);
        let unreported = self.hosts.values().filter(move |entry| entry.host.must_report_on(emc));
        let may_reach = move |host: &&HostEntry| {
            host.host.emcs.contains(&emc)
                || entry.is_some_and(|entry| host.lowest_held_slice_on(&entry.emc).is_some())
        };
        unreported.filter(may_reach).map(|entry| &entry.host)
    }

    /// Returns the epoch under which the slice is granted to a VM, if any. A device that has no
    /// record of this epoch was replaced or emptied. Draining slices are excluded, so that an EMC
    /// with a lost record becomes usable again after the VMs with its slices have ended.
    pub fn granted_epoch(&self, slice: SliceId) -> Option<Epoch> {
        let slot = self.slot(slice)?;
        matches!(slot.state, State::Onlining(_) | State::Online(_)).then_some(slot.epoch)
    }

    /// Returns whether the device of a slice can revoke access.
    pub fn can_revoke(&self, slice: SliceId) -> bool {
        self.emc_of(slice).is_some_and(|emc| self.emcs[&emc].emc.can_revoke())
    }

    /// Requalifies unclaimed slices after a restore, once every host has reported. Even if the
    /// device can revoke access, the holder of a slice must release it first, because a process
    /// that outlived its VM may still use the memory.
    pub fn decide_unclaimed_requalification(&self, slices: &[SliceId]) -> Change {
        let requalified = slices.iter().filter_map(|slice| {
            let slot = self.slot(*slice)?;
            let is_released = self.is_unreachable(*slice, slot);
            let next =
                slot.step(Event::Requalify { is_released }).ok().filter(|_| self.can_holder_report(slot))?;
            Some(Record::Slice(*slice, next))
        });
        Change(requalified.collect())
    }

    /// Adopts a running VM on slices that the ledger does not assign to it.
    ///
    /// Reservation IDs increase, and a VM has at most one active reservation. If two reservations
    /// have the same VM name, the reservation with the lower ID is therefore the earlier one and
    /// was released. The slices of the earlier reservation drain until its process ends.
    ///
    /// Returns `None` if the device does not confirm a slice. Also returns `None` if another active
    /// reservation of this VM name has slices and `id` is at or above the next reservation ID,
    /// because the order of the two reservations is then unknown.
    pub fn decide_adoption(
        &self,
        when: When,
        host: HostId,
        id: ReservationId,
        vm: &ObservedVm,
    ) -> Option<Change> {
        let other = self.reservation_of(&vm.vm).filter(|other| *other != id);
        let known = self.reservations.get(&id);
        let ended = match known.map(|known| &known.stage) {
            Some(ended @ Stage::Ended { .. }) => Some(ended.clone()),
            _ if other > Some(id) => Some(Stage::Ended { at: when.now, why: ended_by_later_vm() }),
            _ => None,
        };
        let owner = Owner { host, reservation: id };
        let mut records = Vec::with_capacity(vm.slices.len() + 2);
        for holding in &vm.slices {
            let online = self.adopted_slot(*holding, owner)?;
            let next = match ended {
                Some(_) => online.step(Event::Release { force: false }).ok()?,
                None => online,
            };
            records.push(Record::Slice(holding.slice, next));
        }
        if let Some(earlier) = other.filter(|_| ended.is_none()) {
            if self.is_in_use(earlier) && id >= self.meta.next_reservation {
                // This ledger never assigned `id`, so the order of the two reservations is unknown.
                return None;
            }
            records.extend(
                self.decide_reservation_end(when, earlier, ended_by_later_vm(), Actor::Manager).ok()?.0,
            );
        }
        let mut ids: Vec<_> = vm.slices.iter().map(|holding| holding.slice).collect();
        ids.sort_unstable();
        let known = known.cloned().unwrap_or_else(|| self.lost_reservation(when, id, host, vm));
        let stage = ended.unwrap_or(Stage::Committed);
        let adopted = Reservation { slices: ids.clone(), stage, ..known };
        if adopted.is_active() {
            records.extend(self.migration_if_draining(when, id, &adopted).into_iter().flatten());
        }
        records.push(Record::Reservation(id, adopted));
        records.push(decision(
            when,
            Actor::Manager,
            Subject::Vm(vm.vm.clone()),
            DecisionKind::RecoveredVm { slices: ids },
        ));
        Some(Change(records))
    }

    /// Returns whether at least one slice serves the reservation.
    fn is_in_use(&self, id: ReservationId) -> bool {
        let own = |slice: &SliceId| self.slot(*slice).is_some_and(|slot| slot.reservation() == Some(id));
        self.reservations[&id].slices.iter().any(own)
    }

    /// Returns the online slot of a slice that the running VM uses. Returns `None` unless the
    /// ledger assigned the slice to the VM or the device confirms the VM's epoch.
    fn adopted_slot(&self, holding: Holding, owner: Owner) -> Option<Slot> {
        let slot = self.slot(holding.slice)?;
        let own = slot.epoch == holding.epoch && slot.state == State::Online(owner);
        if own { Some(slot) } else { slot.step(Event::Adopt(owner, holding.epoch)).ok() }
    }

    /// Reserves slice IDs that a host reports and the ledger does not contain, so that a new EMC
    /// does not get them. The IDs may belong to an EMC that was added after an earlier restore of
    /// the same backup. Ignores IDs at or above `end`, because no EMC ever had them.
    pub fn decide_reserve_slice_ids(
        &self,
        slices: impl IntoIterator<Item = SliceId>,
        end: SliceId,
    ) -> Change {
        let lost = self.meta.next_slice..end;
        let highest = slices.into_iter().filter(|slice| lost.contains(slice)).max();
        let Some(highest) = highest else { return Change::default() };
        Change(vec![Record::Meta(Meta { next_slice: SliceId(highest.0 + 1), ..self.meta.clone() })])
    }

    /// Creates a reservation for a reported VM that the restored ledger does not contain. The
    /// report does not contain cores, so the reservation has 0 cores.
    fn lost_reservation(&self, when: When, id: ReservationId, host: HostId, vm: &ObservedVm) -> Reservation {
        let request = format!("restored:{}:{}", self.meta.generation, id.0);
        Reservation {
            vm: vm.vm.clone(),
            host,
            slices: Vec::new(),
            local: vm.local,
            cores: 0,
            pinned: vm.pinned,
            request: RequestKey {
                client: Name::new("restored").expect("the client name is valid"),
                id: RequestId::new(&request).expect("the generated request id is valid"),
            },
            commit_within: Ns::ZERO,
            created: when.wall,
            stage: Stage::Committed,
            uid: vm.uid,
            has_process: false,
            rehome: Rehome::None,
        }
    }

    /// Quarantines every slice after a restore. The backup is older than the state of the rack, so
    /// the following holds until the hosts have reported:
    ///
    /// - Fences are outdated: a fenced host may run VMs again.
    /// - Boot IDs are outdated: a different boot ID does not prove that the host has released
    ///   memory that it received after the backup.
    /// - Reservation IDs continue above all IDs used after the backup and after other restores of
    ///   the same backup.
    /// - The 32-bit IDs of hosts and slices continue above all IDs used after the backup.
    pub fn decide_restore(&self) -> Change {
        let slices = self.slots_from(SliceId(0)).map(|(slice, _, slot)| {
            let why = Quarantine::Restored { host: slot.holder() };
            Record::Slice(slice, Slot { state: State::Quarantined(why), ..slot })
        });
        let hosts = self.hosts.iter().map(|(id, entry)| {
            let old = entry.host.clone();
            let (fence, unconfirmed_fences, unwired_fences) = (Fence::None, BTreeSet::new(), BTreeSet::new());
            let boot_id = String::new();
            let host = Host { must_report: true, fence, unconfirmed_fences, unwired_fences, boot_id, ..old };
            Record::Host(*id, host)
        });
        let Meta { generation, next_reservation, next_host, next_slice, next_migration, .. } = self.meta;
        // The generation gives each restore its own range of reservation IDs. The `min` avoids an
        // overflow; the limit is reached in the year 2106.
        let of_generation =
            generation.min(u64::MAX / RESERVATIONS_SINCE_BACKUP_MAX - 1) * RESERVATIONS_SINCE_BACKUP_MAX;
        let unused = next_reservation.0.saturating_add(RESERVATIONS_SINCE_BACKUP_MAX).max(of_generation);
        let meta = Meta {
            next_reservation: ReservationId(unused),
            next_host: HostId(next_host.0.saturating_add(HOSTS_ADDED_SINCE_BACKUP_MAX)),
            next_migration: MigrationId(next_migration.0.saturating_add(RESERVATIONS_SINCE_BACKUP_MAX)),
            next_slice: SliceId(next_slice.0.saturating_add(SLICES_ADDED_SINCE_BACKUP_MAX)),
            ..self.meta.clone()
        };
        Change(std::iter::once(Record::Meta(meta)).chain(slices).chain(hosts).collect())
    }

    /// Returns the quarantined slices that wait for an operator's decision, each with the reason.
    pub fn quarantined(&self) -> impl Iterator<Item = (SliceId, Quarantine)> {
        let slices = self.emcs.values().flat_map(EmcEntry::slices_quarantined_for_operator);
        slices.filter_map(|slice| match self.slot(slice)?.state {
            State::Quarantined(why) => Some((slice, why)),
            _ => None,
        })
    }
}

/// Returns the cause of end of a reservation whose VM was later reserved again. Such a reservation
/// was released after the backup, or its host was lost.
fn ended_by_later_vm() -> EndReason {
    EndReason::Released { force: false, reason: "a later VM of this name was found running".into() }
}
