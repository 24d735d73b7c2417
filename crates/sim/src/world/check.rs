//! Checks of the invariants after every step. The checks compare the actions of the manager with
//! the state of the simulated world. This state consists of the slices that processes can reach,
//! the store, and the reports of hosts and devices. The checks do not use the ledger of the
//! manager.

mod counts;
mod desired_state;
mod device_calls;
mod expiry;
mod fence_progress;
mod justifications;
mod migrations;
mod rack;
mod return_times;

pub(super) use self::{
    counts::holder, desired_state::SentStates, justifications::Justification, migrations::SLOWDOWNS_PER_HOUR,
    rack::ByName,
};

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    agent::VmRecord,
    manager::HostState,
    protocol::{FailureReason, Holding, ObservedState},
    record::{Emc, Fence, Host, Key, Meta, Record, Rehome, RequestKey, Reservation, Scheduling, Stage},
    slice::{DrainStage, Quarantine, Scrub, Slot, State},
};
use units::{EmcId, Epoch, HostId, Ns, ReservationId, SliceId};

use super::{World, device::DataPattern, machine::Guest};

/// State of the world, recorded independently of the manager.
#[derive(Debug, Default)]
pub(super) struct GroundTruth {
    /// Durable records in the store, except decisions.
    records: BTreeMap<Key, Record>,
    /// Reservations that the manager acknowledged to clients.
    pub(super) acknowledged: BTreeMap<RequestKey, AcknowledgedReservation>,
    /// Latest grant of each slice, as confirmed by the device of the slice.
    last_grants: BTreeMap<SliceId, LastGrant>,
    justifications: justifications::Justifications,
    /// Reservations that a client released by force.
    force_released: BTreeSet<ReservationId>,
    /// Grants that ended through a power failure of their device or a fence of their host.
    ended_grants: BTreeSet<Holding>,
    /// Grants that a device could not revoke during the fence of their host.
    unrevoked_grants: BTreeSet<Holding>,
    /// Requests that were sent at least once while the disk of the store had enough space.
    pub(super) requested_with_space: BTreeSet<RequestKey>,
    /// Pairs of a device and a host. The device has revoked all access of the host since the start
    /// of the latest fence of the host.
    fences_confirmed: BTreeSet<(EmcId, HostId)>,
    handles: desired_state::KnownHandles,
    returns: return_times::SliceReturns,
    fence_progress: fence_progress::FenceProgress,
    /// Times of the durable migration requests because of slowdowns since the last restore.
    slowdown_requests: Vec<Ns>,
    /// Reservations whose process has moved its pool memory to local memory.
    pub(super) rehomed: BTreeSet<ReservationId>,
    /// Number of durable writes so far.
    writes: u64,
    /// Time of the last message of each host to the running manager.
    last_contact: BTreeMap<HostId, Ns>,
    /// Hosts that were silent long enough for the manager to fence them.
    silent_hosts: BTreeSet<HostId>,
}

/// Reservation as acknowledged to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AcknowledgedReservation {
    pub(super) id: ReservationId,
    pub(super) slices: Vec<SliceId>,
    pub(super) committed: bool,
    pub(super) ended: bool,
}

/// Latest grant of a slice by its device.
#[derive(Clone, Copy, Debug)]
struct LastGrant {
    epoch: Epoch,
    host: HostId,
    /// Whether the manager has sent the grant to the host.
    sent: bool,
    /// Whether the host has reported the slice online.
    reported_online: bool,
    /// Whether the host has reported the release, or a device or an operator has ended the access.
    access_ended: bool,
}

impl GroundTruth {
    pub(super) fn slot(&self, slice: SliceId) -> Slot {
        match self.records.get(&Key::Slice(slice)) {
            Some(Record::Slice(_, slot)) => *slot,
            _ => Slot::default(),
        }
    }

    pub(super) fn host(&self, host: HostId) -> Option<&Host> {
        match self.records.get(&Key::Host(host)) {
            Some(Record::Host(_, host)) => Some(host),
            _ => None,
        }
    }

    pub(super) fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        match self.records.get(&Key::Reservation(id)) {
            Some(Record::Reservation(_, reservation)) => Some(reservation),
            _ => None,
        }
    }

    pub(super) fn reservations(&self) -> impl Iterator<Item = (ReservationId, &Reservation)> {
        self.records.values().filter_map(|record| match record {
            Record::Reservation(id, reservation) => Some((*id, reservation)),
            _ => None,
        })
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }

    fn end_access(&mut self, host: HostId, holding: Holding) {
        if let Some(grant) = self.last_grants.get_mut(&holding.slice)
            && (grant.host, grant.epoch) == (host, holding.epoch)
        {
            grant.access_ended = true;
        }
    }

    fn apply_record(&mut self, record: &Record) {
        match record {
            Record::Deleted(key) => drop(self.records.remove(key)),
            Record::Decision(..) => {}
            record => {
                if let Record::Slice(
                    _,
                    Slot { state: State::Draining(owner, DrainStage::Host { force: true }), .. },
                ) = record
                {
                    self.force_released.insert(owner.reservation);
                }
                self.records.insert(record.key(), record.clone());
            }
        }
    }
}

impl World {
    /// Checks the invariants that must hold after every step.
    pub(super) fn check_invariants(&mut self) {
        let mut owners: BTreeMap<SliceId, (Epoch, HostId)> = BTreeMap::new();
        let mut conflict = None;
        for machine in &self.machines {
            for holding in machine.reachable() {
                let device = self.devices.iter().find(|device| device.contains(holding.slice));
                if !device.is_some_and(|device| device.is_mapping_valid(holding, machine.id)) {
                    continue;
                }
                let here = (holding.epoch, machine.id);
                let other = *owners.entry(holding.slice).or_insert(here);
                if other != here {
                    conflict = Some((holding.slice, other, here));
                }
            }
        }
        if let Some((slice, (e1, h1), (e2, h2))) = conflict {
            let description =
                format!("slice {slice} is reachable by {h1} under epoch {e1} and by {h2} under epoch {e2}");
            self.report_violation("a slice has at most one owner", description);
        }
        self.check_fenced_hosts();
        self.check_fence_progress();
    }

    /// Checks a batch of records before the store writes the batch.
    pub(super) fn check_batch(&mut self, records: &[Record]) {
        for record in records {
            self.check_rack_change(record, records);
            match record {
                Record::Slice(slice, slot) => self.check_slot(*slice, *slot, records),
                Record::Reservation(id, reservation) => self.check_reservation(*id, reservation, records),
                Record::Host(id, host) => self.check_fencing(*id, host, records),
                Record::Deleted(Key::Reservation(id)) => self.check_expiry(*id, records),
                Record::Migration(id, migration) => self.check_migration(*id, migration, records),
                Record::Deleted(Key::Migration(key)) => self.check_migration_deleted(*key, records),
                _ => {}
            }
        }
        self.check_answer_count(records);
        self.check_slowdown_budget(records);
    }

    fn check_slot(&mut self, slice: SliceId, slot: Slot, batch: &[Record]) {
        let before = self.truth.slot(slice);
        self.check_restored_slice(slice, before, slot);
        if slot.epoch < before.epoch {
            self.report_violation(
                "epochs never decrease",
                format!("slice {slice}: epoch {} is followed by {}", before.epoch, slot.epoch),
            );
        }
        if let State::Draining(owner, DrainStage::Host { force: true }) = slot.state
            && !self.truth.force_released.contains(&owner.reservation)
        {
            let reservations = self.truth.reservations_after(batch);
            let vms: Vec<_> =
                reservations.filter(|(id, _)| *id == owner.reservation).map(|(_, r)| r.vm.clone()).collect();
            if !vms.into_iter().any(|vm| self.truth.justifications.contains(&Justification::Force(vm))) {
                self.report_violation(
                    "a VM loses memory only by a release, a fence or a device failure",
                    format!("slice {slice} is released by force without a request"),
                );
            }
        }
        match slot.state {
            State::Free => self.check_free(slice, slot),
            State::Online(owner) => self.check_online(slice, slot.epoch, owner.host),
            _ => {}
        }
    }

    /// Checks that no slice is revoked after a restore while a process maps the slice. If the host
    /// of the process was fenced, the revocation is allowed.
    fn check_restored_slice(&mut self, slice: SliceId, before: Slot, after: Slot) {
        let State::Quarantined(Quarantine::Restored { .. }) = before.state else { return };
        if !matches!(after.state, State::Scrubbing(Scrub::Revoking { .. })) {
            return;
        }
        let device =
            self.devices.iter().find(|device| device.contains(slice)).expect("every slice is on a device");
        let user = self.machines.iter().find_map(|machine| {
            let mut guests = machine.mappings().filter(|(holding, pid)| holding.slice == slice && *pid != 0);
            let is_mapped = |holding| {
                device.is_mapping_valid(holding, machine.id)
                    && !self.truth.unrevoked_grants.contains(&holding)
            };
            guests.find(|(holding, _)| is_mapped(*holding)).map(|(_, pid)| (machine.id, pid))
        });
        if let Some((host, pid)) = user {
            let description =
                format!("slice {slice} is revoked after a restore, but process {pid} of {host} maps it");
            self.report_violation(
                "a VM loses memory only by a release, a fence or a device failure",
                description,
            );
        }
    }

    /// Checks that a slice recorded as online was reported online by its host.
    fn check_online(&mut self, slice: SliceId, epoch: Epoch, host: HostId) {
        let grant = self.truth.last_grants.get(&slice);
        if !grant.is_some_and(|grant| (grant.epoch, grant.host) == (epoch, host) && grant.reported_online) {
            self.report_violation(
                "an online slice was reported online by its host",
                format!("{host} never reported slice {slice} online under epoch {epoch}"),
            );
        }
    }

    fn check_free(&mut self, slice: SliceId, slot: Slot) {
        let receipt = slot.receipt.filter(|receipt| receipt.scrubbed.verified >= units::SLICE);
        let receipt = receipt.map(|receipt| receipt.scrubbed.holding);
        if slot.epoch > Epoch(0) && receipt != Some(Holding { slice, epoch: slot.epoch }) {
            let receipt = receipt.map_or("found no complete scrub".into(), |receipt| {
                format!("found a scrub of {}", describe_holding(receipt))
            });
            let description = format!(
                "slice {slice} is free after epoch {}: expected a complete scrub of this epoch, {receipt}",
                slot.epoch
            );
            self.report_violation("a slice is zeroed before its next owner uses it", description);
        }
        if self.device(slice).is_shared() && self.device(slice).read(slice) != DataPattern::ZERO {
            self.report_violation(
                "a slice is zeroed before its next owner uses it",
                format!("slice {slice} is free but not zeroed"),
            );
        }
    }

    fn check_reservation(&mut self, id: ReservationId, new: &Reservation, batch: &[Record]) {
        let acked = self.truth.acknowledged.values().find(|acked| acked.id == id).cloned();
        if let Some(old) = self.truth.reservation(id).cloned() {
            let is_unchanged = (&old.vm, old.host, memory(&old), &old.request)
                == (&new.vm, new.host, memory(new), &new.request);
            self.check_rehome(id, &old, new);
            let reactivated = has_ended(&old) && !has_ended(new);
            if !is_unchanged || reactivated || acked.is_some_and(|acked| !matches_reply(&acked, new)) {
                self.report_violation(
                    "a change is durable before it is acknowledged",
                    format!("reservation {id} changes from {old:?} to {new:?}"),
                );
            }
        } else if !has_ended(new) && !is_adopted(new) {
            self.check_new_reservation(id, new, batch);
        }
    }

    /// Checks that a move to local memory starts and is cancelled only on request, and that slices are
    /// freed only if the VM's process has moved its memory.
    fn check_rehome(&mut self, id: ReservationId, old: &Reservation, new: &Reservation) {
        let is_started = matches!(new.rehome, Rehome::Moving { .. }) && old.rehome != new.rehome;
        if is_started && !self.truth.justifications.contains(&Justification::Rehome(id)) {
            self.report_violation(
                "a VM's memory is moved only on request",
                format!("reservation {id} changes from {old:?} to {new:?}"),
            );
        }
        let is_cancelled = matches!(new.rehome, Rehome::Cancelling { .. }) && old.rehome != new.rehome;
        self.run_log.counts.rehomes_cancelled += u64::from(is_cancelled);
        let is_in_progress = |attempt| old.rehome == Rehome::Moving { attempt };
        if is_cancelled
            && !(is_in_progress(new.rehome.attempts())
                && self.truth.justifications.contains(&Justification::CancelRehome(id)))
        {
            self.report_violation(
                "only a move in progress is cancelled, and only on request",
                format!("reservation {id} changes from {old:?} to {new:?}"),
            );
        }
        let is_freed = matches!(new.rehome, Rehome::Done { .. }) && old.rehome != new.rehome;
        if is_freed && !self.truth.rehomed.contains(&id) {
            self.report_violation(
                "a VM's slices are freed only after its process has moved its memory",
                format!("reservation {id} changes from {old:?} to {new:?}"),
            );
        }
    }

    fn check_new_reservation(&mut self, id: ReservationId, new: &Reservation, batch: &[Record]) {
        if self.is_reservation_forbidden(new, batch) {
            self.report_violation(
                "a cordoned or draining host or EMC receives no new reservation",
                format!("{id}: {new:?}"),
            );
        }
        let latest = self.current_time().now.after(new.commit_within);
        if let Stage::Reserved { deadline, .. } = new.stage
            && deadline > latest
        {
            self.report_violation(
                "deadlines are measured in rack time",
                format!("the deadline of reservation {id} must be at most {latest}: {new:?}"),
            );
        }
        if !self.truth.requested_with_space.contains(&new.request) {
            self.report_violation(
                "a full disk blocks new reservations",
                format!("reservation {id} was never requested with enough disk space: {new:?}"),
            );
        }
    }

    /// Returns whether a new reservation is forbidden: before this batch, its host or an EMC of its
    /// slices was cordoned, draining or unreachable. Hosts and EMCs that the batch changes are
    /// ignored, because the change may precede or follow the reservation.
    fn is_reservation_forbidden(&self, new: &Reservation, batch: &[Record]) -> bool {
        let changes = |key| batch.iter().any(|record| record.key() == key);
        if changes(Key::Host(new.host)) {
            return false;
        }
        let host = self.truth.host(new.host);
        let is_enabled = |emc: EmcId| {
            let enabled = |emc: &Emc| emc.scheduling == Scheduling::Enabled;
            changes(Key::Emc(emc)) || self.truth.emc(emc).is_some_and(enabled)
        };
        let open = host.is_some_and(|host| {
            let is_available = |slice: &SliceId| {
                let emc = self.truth.emc_of(*slice);
                emc.is_some_and(|emc| host.emcs.contains(&emc) && is_enabled(emc))
            };
            host.scheduling == Scheduling::Enabled
                && host.fence == Fence::None
                && new.slices.iter().all(is_available)
        });
        !open
    }

    /// Checks that a host is fenced only on request or after a long silence. Also checks that a
    /// fence is recorded as confirmed by an EMC only after this EMC has revoked all access of the
    /// host.
    fn check_fencing(&mut self, id: HostId, host: &Host, batch: &[Record]) {
        let (old_fence, unconfirmed_fences) = match self.truth.host(id) {
            Some(old) => (old.fence, old.unconfirmed_fences.clone()),
            None => (Fence::None, BTreeSet::new()),
        };
        let begins = old_fence == Fence::None && host.fence != Fence::None;
        if begins {
            // An EMC with an unconfirmed earlier fence has not granted slices to the host since, so
            // its confirmation remains valid.
            self.truth.fences_confirmed.retain(|(emc, host)| *host != id || unconfirmed_fences.contains(emc));
        }
        let unconfirmed = host.emcs.iter().copied().filter(|_| begins || host.fence == Fence::Fenced);
        let must_be_confirmed: BTreeSet<EmcId> = unconfirmed.chain(unconfirmed_fences).collect();
        let is_removed = |emc: &EmcId| {
            batch.iter().any(|record| matches!(record, Record::Deleted(Key::Emc(removed)) if removed == emc))
        };
        let missing = must_be_confirmed.into_iter().find(|emc| {
            !host.unconfirmed_fences.contains(emc)
                && !self.truth.fences_confirmed.contains(&(*emc, id))
                && !is_removed(emc)
        });
        if let Some(emc) = missing {
            self.report_violation(
                "a fence is recorded only after the EMC has confirmed it",
                format!("the fence of {id} is recorded as confirmed by {emc}, which has not confirmed it"),
            );
        }
        let old = self.truth.host(id);
        let restarted = old.is_some_and(|old| !old.boot_id.is_empty() && old.boot_id != host.boot_id);
        if old_fence != Fence::None && host.fence == Fence::None {
            self.check_fence_end(id);
        } else if restarted {
            // The fence may have begun and ended within this batch, so that no record shows it.
            self.end_shared_access(id);
        }
        if !begins {
            return;
        }
        let is_requested = self.truth.justifications.contains(&Justification::Fence(host.name.clone()));
        if !is_requested && !self.has_exceeded_silence_limit(id) && !self.truth.silent_hosts.contains(&id) {
            self.report_violation(
                "a host is fenced only on request or after a long silence",
                format!("{id} is fenced without a long silence"),
            );
        }
    }

    /// Checks that the fence of a host ends only if the host has no mapping on a device that cannot
    /// revoke access.
    fn check_fence_end(&mut self, id: HostId) {
        let shared = |holding: &Holding| {
            self.devices.iter().any(|device| device.is_shared() && device.contains(holding.slice))
        };
        let reachable_holding = self.find_machine(id).and_then(|machine| machine.reachable().find(shared));
        if let Some(holding) = reachable_holding {
            self.report_violation(
                "a fenced host cannot reach its former slices",
                format!("the fence of {id} ends, but {id} can still reach {}", describe_holding(holding)),
            );
        }
        self.end_shared_access(id);
    }

    fn end_shared_access(&mut self, id: HostId) {
        let devices = &self.devices;
        let shared = |slice| devices.iter().any(|device| device.is_shared() && device.contains(slice));
        let of_host =
            self.truth.last_grants.iter_mut().filter(|(slice, grant)| grant.host == id && shared(**slice));
        of_host.for_each(|(_, grant)| grant.access_ended = true);
    }

    /// Checks that a fenced host cannot reach its former slices. Each EMC must have revoked the
    /// access of the host or have no slice of the host. A slice that could not be revoked must
    /// still be recorded as held by the host.
    fn check_fenced_hosts(&mut self) {
        let Some(running) = &self.manager_process.running else { return };
        let is_fenced = |host: &HostId| running.manager.host_state(*host) == HostState::Fenced;
        let fenced: Vec<HostId> = self.machines.iter().map(|m| m.id).filter(is_fenced).collect();
        for host in fenced {
            let of_host =
                self.truth.last_grants.iter().filter(|(_, grant)| grant.host == host && !grant.access_ended);
            let reachable = of_host.filter(|(_, grant)| grant.sent).map(|(slice, _)| *slice).find(|slice| {
                let device = self.devices.iter().zip(0..).find(|(device, _)| device.contains(*slice));
                let is_confirmed =
                    device.is_some_and(|(_, emc)| self.truth.fences_confirmed.contains(&(EmcId(emc), host)));
                // A restored store may lack the EMC of the slice.
                let has_emc = self.truth.emc_of(*slice).is_some();
                has_emc && (!is_confirmed || holder(&self.truth.slot(*slice)) != Some(host))
            });
            if let Some(slice) = reachable {
                self.report_violation(
                    "a fenced host cannot reach its former slices",
                    format!("{host} is reported as fenced but can still reach slice {slice}"),
                );
            }
        }
    }

    fn has_exceeded_silence_limit(&self, host: HostId) -> bool {
        let Some(fence_after) = self.fault_model.settings.fence_after else { return false };
        let last_contact = self.truth.last_contact.get(&host).copied().unwrap_or_default();
        self.now >= last_contact.after(self.fault_model.settings.lease_ttl).after(fence_after)
    }

    /// Returns whether the lease of a host is valid: the manager has received a message from the
    /// host within the lease time.
    pub(super) fn is_lease_valid(&self, host: HostId) -> bool {
        let last_contact = self.truth.last_contact.get(&host).copied().unwrap_or_default();
        self.now < last_contact.after(self.fault_model.settings.lease_ttl)
    }

    /// Gives every host a new lease, in the same way as a manager that starts.
    pub(super) fn renew_leases(&mut self) {
        let hosts = self.hosts();
        self.truth.last_contact = hosts.into_iter().map(|host| (host, self.now)).collect();
        self.truth.silent_hosts.clear();
        self.truth.handles = desired_state::KnownHandles::default();
        self.truth.handles.reset();
        self.truth.returns = return_times::SliceReturns::default();
    }

    /// Records that the manager has received a message from a host.
    pub(super) fn record_contact(&mut self, host: HostId) {
        if self.has_exceeded_silence_limit(host) {
            self.truth.silent_hosts.insert(host);
        }
        self.truth.last_contact.insert(host, self.now);
    }

    pub(super) fn apply_records(&mut self, records: &[Record]) {
        records.iter().for_each(|record| self.truth.apply_record(record));
    }

    /// Removes acknowledged reservations that are missing from a restored store.
    pub(super) fn drop_lost_reservations(&mut self, records: &[Record]) {
        let known: BTreeMap<ReservationId, &Reservation> = records
            .iter()
            .filter_map(|record| match record {
                Record::Reservation(id, reservation) => Some((*id, reservation)),
                _ => None,
            })
            .collect();
        let is_known =
            |acked: &AcknowledgedReservation| known.get(&acked.id).is_some_and(|r| matches_reply(acked, r));
        self.truth.acknowledged.retain(|_, acked| is_known(acked));
    }

    /// Applies the effects of a restore to the records: all slices are quarantined, all fences end,
    /// and every host must report its slices.
    pub(super) fn apply_restore(&mut self) {
        self.truth.slowdown_requests.clear();
        for record in self.truth.records.values_mut() {
            match record {
                Record::Slice(_, slot) => {
                    slot.state = State::Quarantined(Quarantine::Restored { host: holder(slot) });
                }
                Record::Host(_, host) => {
                    (host.fence, host.must_report) = (Fence::None, true);
                    host.unconfirmed_fences.clear();
                    host.boot_id.clear();
                }
                _ => {}
            }
        }
    }

    /// Replaces the records after a load of the store, and checks that the store contains every
    /// acknowledged request. The last batch before a crash may be durable or not.
    pub(super) fn handle_load(&mut self, meta: Option<&Meta>, records: &[Record], restored: bool) {
        if !restored {
            self.end_uncordoned_ownership(records);
        }
        self.truth.drop_unknown_justifications();
        self.truth.records.clear();
        self.truth.records.extend(meta.map(|meta| (Key::Meta, Record::Meta(meta.clone()))));
        self.apply_records(records);
        self.truth.handles.reset();
        let lost = self.truth.acknowledged.iter().find(|(_, acked)| {
            !self.truth.reservation(acked.id).is_some_and(|reservation| matches_reply(acked, reservation))
        });
        if let Some((request, acked)) = lost {
            let description =
                format!("{request:?} was acknowledged as {acked:?}, which the store does not contain");
            self.report_violation("a change is durable before it is acknowledged", description);
        }
    }

    /// Checks the report of an agent against the state of its host, and records the report.
    pub(super) fn check_sent_report(&mut self, host: HostId, report: &ObservedState) {
        for holding in reported_slices(report) {
            if let Some(grant) = self.truth.last_grants.get_mut(&holding.slice) {
                grant.reported_online |= (grant.host, grant.epoch) == (host, holding.epoch);
            }
        }
        for holding in &report.released {
            self.check_released(host, *holding);
            self.truth.end_access(host, *holding);
        }
        report.scrubbed.iter().for_each(|scrubbed| self.truth.end_access(host, scrubbed.holding));
        self.end_unreported_access(host, report);
        for failed in &report.failed {
            let is_scrub = matches!(self.truth.slot(failed.holding.slice).state, State::Scrubbing(_));
            // A revocation ends the access only at devices that can revoke access. At other devices
            // the host must release the slice.
            let can_revoke = !self.device(failed.holding.slice).is_shared();
            if can_revoke && (failed.reason == FailureReason::NotZero || is_scrub) {
                self.truth.end_access(host, failed.holding);
            }
        }
    }

    /// Ends the access to slices that the first complete report after a restore does not contain.
    fn end_unreported_access(&mut self, host: HostId, report: &ObservedState) {
        let must_report = self.truth.host(host).is_some_and(|host| host.must_report);
        if !(must_report && report.whole && Some(report.number.generation) == self.truth.generation()) {
            return;
        }
        let reported: BTreeSet<SliceId> = reported_slices(report).map(|holding| holding.slice).collect();
        let unreported = self.truth.last_grants.iter_mut().filter(|(slice, _)| !reported.contains(slice));
        unreported.filter(|(_, grant)| grant.host == host).for_each(|(_, grant)| grant.access_ended = true);
    }

    fn check_released(&mut self, host: HostId, holding: Holding) {
        let shared = self.device(holding.slice).is_shared();
        let machine = self.machine(host);
        let users = machine.processes.values().filter(|guest| guest.mapped.contains_key(&holding));
        let users: Vec<_> = users.map(|guest| (guest.process.pid, guest.mapped[&holding])).collect();
        for (pid, reservation) in users {
            // After a forced release, the process may still map the slice: an emulated device
            // revokes its access later.
            let forced = self.truth.force_released.contains(&reservation);
            if shared || !forced {
                let description = format!(
                    "{host} reports the release of {}, but process {pid} maps it",
                    describe_holding(holding)
                );
                self.report_violation("a released slice is mapped by no process", description);
            }
        }
    }

    /// Checks that the agent records a process before it passes memory to the process.
    pub(super) fn check_attach(&mut self, host: HostId, record: &VmRecord) {
        let stored = self.machine(host).records.get(&record.reservation).cloned();
        let is_recorded = stored.is_some_and(|stored| {
            stored.process.is(&record.process) && record.slices.keys().all(|h| stored.slices.contains_key(h))
        });
        if !is_recorded {
            self.report_violation(
                "an agent records a process before it attaches memory",
                format!("{host} attaches memory of {} without a record", record.reservation),
            );
        }
    }

    /// Checks that a process loses memory only through a forced release, a fence or a device
    /// failure.
    pub(super) fn check_memory_loss(&mut self, host: HostId, guest: &Guest, holding: Holding, why: &str) {
        self.log(|| {
            format!("process {} on {host} loses {}: {why}", guest.process.pid, describe_holding(holding))
        });
        let forced = guest.mapped.get(&holding).is_some_and(|id| self.truth.force_released.contains(id));
        let emc = self.devices.iter().position(|device| device.contains(holding.slice));
        let unconfirmed = |host: &Host| host.unconfirmed_fences.iter().any(|of| Some(of.0 as usize) == emc);
        let fenced = self.truth.host(host).is_some_and(|host| host.fence != Fence::None || unconfirmed(host));
        let lost =
            self.truth.ended_grants.contains(&holding) || self.truth.unrevoked_grants.contains(&holding);
        if !forced && !fenced && !lost {
            let (pid, vm, lost) = (guest.process.pid, &guest.vm, describe_holding(holding));
            let description = format!("process {pid} of VM {vm} on {host} loses {lost}: {why}");
            self.report_violation(
                "a VM loses memory only by a release, a fence or a device failure",
                description,
            );
        }
    }
}

/// Formats the slice and epoch of a holding for a message.
pub(super) fn describe_holding(holding: Holding) -> String {
    format!("slice {} of epoch {}", holding.slice, holding.epoch)
}

/// Returns the slices in a report: slices of VMs and online slices. After a restart of the agent,
/// slices of VMs may not be online yet.
fn reported_slices(report: &ObservedState) -> impl Iterator<Item = &Holding> {
    report.vms.values().flat_map(|vm| &vm.slices).chain(&report.online)
}

pub(super) fn has_ended(reservation: &Reservation) -> bool {
    matches!(reservation.stage, Stage::Ended { .. })
}

/// Returns whether the manager created a reservation when it adopted a running VM after a restore.
fn is_adopted(reservation: &Reservation) -> bool {
    reservation.request.client.as_str() == "restored"
}

/// Returns the slices for which a reservation was made, and its memory in bytes.
pub(super) fn memory(reservation: &Reservation) -> (&[SliceId], u64) {
    let slices = match &reservation.rehome {
        Rehome::Done { slices } => slices,
        _ => &reservation.slices,
    };
    (slices, reservation.local.get() + reservation.slices.len() as u64 * units::SLICE.get())
}

/// Returns whether a reservation still equals the reply that a client received.
fn matches_reply(acked: &AcknowledgedReservation, reservation: &Reservation) -> bool {
    let stage = match reservation.stage {
        Stage::Ended { .. } => true,
        Stage::Reserved { .. } => !acked.ended && !acked.committed,
        Stage::Committed | Stage::Broken { .. } => !acked.ended,
    };
    stage && memory(reservation).0 == acked.slices
}
