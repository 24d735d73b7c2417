//! Invariants, checked after every step against the truth of the world: the slices that processes can
//! reach, the contents of the store, and the reports of hosts and devices. The ledger is not consulted.

mod calls;
mod counts;
mod demands;
mod forgotten;
mod migrations;
mod orders;
mod progress;
mod rack;
mod returns;

pub(super) use self::{counts::holder, demands::Demand, orders::Orders, rack::ByName};

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    agent::VmRecord,
    manager::HostState,
    protocol::{FailedReason, Have, Holding},
    record::{Emc, Fence, Host, Key, Meta, Record, RequestKey, Reservation, Scheduling, Stage},
    slice::{Drain, Quarantine, Scrub, Slot, State},
};
use units::{EmcId, Epoch, HostId, Ns, ReservationId, SliceId};

use super::{World, device::Mark, machine::Guest};

/// Facts that an observer outside the manager knows.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// Contents of the store, without decisions.
    records: BTreeMap<Key, Record>,
    /// Replies that clients received.
    pub(super) acked: BTreeMap<RequestKey, Acked>,
    /// Latest grant of each slice.
    hands: BTreeMap<SliceId, Hand>,
    demands: demands::Demands,
    /// Reservations released by force.
    forced: BTreeSet<ReservationId>,
    /// Grants that ended with a power failure of their device or a fence of their host.
    lost: BTreeSet<Holding>,
    /// Grants on slices that could not be revoked during the fence of their host.
    unrevoked: BTreeSet<Holding>,
    /// Requests made at least once while the store's disk had space.
    pub(super) had_room: BTreeSet<RequestKey>,
    /// Devices that have revoked the access of each host since its latest fence began.
    cut: BTreeSet<(EmcId, HostId)>,
    named: orders::Named,
    returns: returns::Returns,
    unhindered: progress::Unhindered,
    /// Number of durable writes.
    writes: u64,
    /// Time of each host's last message to the running manager, and hosts whose silence allows a fence.
    heard: BTreeMap<HostId, Ns>,
    long_silent: BTreeSet<HostId>,
}

/// Reservation known to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acked {
    pub(super) id: ReservationId,
    pub(super) slices: Vec<SliceId>,
    pub(super) committed: bool,
    pub(super) ended: bool,
}

/// Latest owner granted by a device.
#[derive(Clone, Copy, Debug)]
struct Hand {
    epoch: Epoch,
    host: HostId,
    /// The host may have received the grant.
    told: bool,
    /// The host reported the slice online.
    online: bool,
    /// The host reported the release, or a device or an operator ended the access.
    let_go: bool,
}

impl Truth {
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

    fn let_go(&mut self, host: HostId, holding: Holding) {
        if let Some(hand) = self.hands.get_mut(&holding.slice)
            && (hand.host, hand.epoch) == (host, holding.epoch)
        {
            hand.let_go = true;
        }
    }

    fn put(&mut self, record: &Record) {
        match record {
            Record::Gone(key) => drop(self.records.remove(key)),
            Record::Decision(..) => {}
            kept => {
                if let Record::Slice(
                    _,
                    Slot { state: State::Draining(owner, Drain::Host { force: true }), .. },
                ) = kept
                {
                    self.forced.insert(owner.reservation);
                }
                self.records.insert(kept.key(), kept.clone());
            }
        }
    }
}

impl World {
    /// Checks the invariants of every step.
    pub(super) fn check(&mut self) {
        let mut owners: BTreeMap<SliceId, (Epoch, HostId)> = BTreeMap::new();
        let mut clash = None;
        for machine in &self.machines {
            for holding in machine.reachable() {
                let device = self.devices.iter().find(|device| device.has(holding.slice));
                if !device.is_some_and(|device| device.reaches(holding, machine.id)) {
                    continue;
                }
                let here = (holding.epoch, machine.id);
                let other = *owners.entry(holding.slice).or_insert(here);
                if other != here {
                    clash = Some((holding.slice, other, here));
                }
            }
        }
        if let Some((slice, (e1, h1), (e2, h2))) = clash {
            let what = format!("slice {slice}: {h1} reaches it by epoch {e1} and {h2} by epoch {e2}");
            self.blame("one owner", what);
        }
        self.check_shown();
        self.check_fences_advance();
    }

    /// Checks a batch before it is written.
    pub(super) fn check_batch(&mut self, records: &[Record]) {
        for record in records {
            self.check_rack_change(record, records);
            match record {
                Record::Slice(slice, slot) => self.check_slot(*slice, *slot, records),
                Record::Reservation(id, reservation) => self.check_reservation(*id, reservation, records),
                Record::Host(id, host) => self.check_fencing(*id, host, records),
                Record::Gone(Key::Reservation(id)) => self.check_forgotten(*id, records),
                Record::Migration(id, migration) => self.check_migration(*id, migration, records),
                Record::Gone(Key::Migration(id)) => self.check_migration_gone(*id, records),
                _ => {}
            }
        }
        self.check_answers_counted(records);
    }

    fn check_slot(&mut self, slice: SliceId, slot: Slot, batch: &[Record]) {
        let before = self.truth.slot(slice);
        self.check_unclaimed(slice, before, slot);
        if slot.epoch < before.epoch {
            self.blame("epochs only rise", format!("slice {slice}: from {} to {}", before.epoch, slot.epoch));
        }
        if let State::Draining(owner, Drain::Host { force: true }) = slot.state
            && !self.truth.forced.contains(&owner.reservation)
        {
            let reservations = self.truth.after(batch);
            let vms: Vec<_> =
                reservations.filter(|(id, _)| *id == owner.reservation).map(|(_, r)| r.vm.clone()).collect();
            if !vms.into_iter().any(|vm| self.truth.demands.justify(&Demand::Force(vm))) {
                self.blame(
                    "guests outlive us",
                    format!("slice {slice} is taken by force, which nobody asked"),
                );
            }
        }
        match slot.state {
            State::Free => self.check_free(slice, slot),
            State::Online(owner) => self.check_online(slice, slot.epoch, owner.host),
            _ => {}
        }
    }

    /// Checks that no slice is revoked after a restore while a process uses it. A fence of the host ends
    /// this protection, also for slices that could not be revoked by it.
    fn check_unclaimed(&mut self, slice: SliceId, before: Slot, after: Slot) {
        let State::Quarantined(Quarantine::Restored { .. }) = before.state else { return };
        if !matches!(after.state, State::Scrubbing(Scrub::Revoking { .. })) {
            return;
        }
        let device =
            self.devices.iter().find(|device| device.has(slice)).expect("every slice is on a device");
        let user = self.machines.iter().find_map(|machine| {
            let mut guests = machine.mappings().filter(|(holding, pid)| holding.slice == slice && *pid != 0);
            let keeps =
                |holding| device.reaches(holding, machine.id) && !self.truth.unrevoked.contains(&holding);
            guests.find(|(holding, _)| keeps(*holding)).map(|(_, pid)| (machine.id, pid))
        });
        if let Some((host, pid)) = user {
            let what = format!("slice {slice} returns to the cycle; process {pid} of {host} has it");
            self.blame("guests outlive us", what);
        }
    }

    /// Checks that slices online in the ledger were reported online by their hosts.
    fn check_online(&mut self, slice: SliceId, epoch: Epoch, host: HostId) {
        let hand = self.truth.hands.get(&slice);
        if !hand.is_some_and(|hand| (hand.epoch, hand.host) == (epoch, host) && hand.online) {
            self.blame(
                "ready means ready",
                format!("{host} never said that slice {slice} is online as {epoch}"),
            );
        }
    }

    fn check_free(&mut self, slice: SliceId, slot: Slot) {
        let receipt = slot.receipt.filter(|receipt| receipt.scrubbed.verified >= units::SLICE);
        let receipt = receipt.map(|receipt| receipt.scrubbed.holding);
        if slot.epoch > Epoch(0) && receipt != Some(Holding { slice, epoch: slot.epoch }) {
            let what = format!("slice {slice} is free after epoch {} with receipt {receipt:?}", slot.epoch);
            self.blame("clean hands", what);
        }
        if self.device(slice).is_shared() && self.device(slice).read(slice) != Mark::ZERO {
            self.blame("clean hands", format!("slice {slice} is free and not zero"));
        }
    }

    fn check_reservation(&mut self, id: ReservationId, new: &Reservation, batch: &[Record]) {
        let acked = self.truth.acked.values().find(|acked| acked.id == id).cloned();
        if let Some(old) = self.truth.reservation(id) {
            let kept = (&old.vm, old.host, &old.slices, &old.request)
                == (&new.vm, new.host, &new.slices, &new.request);
            let revived = has_ended(old) && !has_ended(new);
            if !kept || revived || acked.is_some_and(|acked| !is_kept(&acked, new)) {
                self.blame("durable before done", format!("{id} was {old:?} and becomes {new:?}"));
            }
        } else if !has_ended(new) && !is_adopted(new) {
            self.check_new(id, new, batch);
        }
    }

    fn check_new(&mut self, id: ReservationId, new: &Reservation, batch: &[Record]) {
        if self.is_closed(new, batch) {
            self.blame("a draining place takes nothing new", format!("{id}: {new:?}"));
        }
        let latest = self.when().now.after(new.commit_within);
        if let Stage::Reserved { deadline, .. } = new.stage
            && deadline > latest
        {
            self.blame("deadlines run on rack time", format!("{id} ends after {latest}: {new:?}"));
        }
        if !self.truth.had_room.contains(&new.request) {
            self.blame("a full disk takes no new reservations", format!("{id}: {new:?}"));
        }
    }

    /// Returns whether the host of a new reservation, or an EMC of it, was cordoned, draining or
    /// unreachable before this batch. Changes in the same batch may precede or follow the reservation.
    fn is_closed(&self, new: &Reservation, batch: &[Record]) -> bool {
        let changes = |key| batch.iter().any(|record| record.key() == key);
        if changes(Key::Host(new.host)) {
            return false;
        }
        let host = self.truth.host(new.host);
        let takes = |emc: EmcId| {
            let enabled = |emc: &Emc| emc.scheduling == Scheduling::Enabled;
            changes(Key::Emc(emc)) || self.truth.emc(emc).is_some_and(enabled)
        };
        let open = host.is_some_and(|host| {
            let reached = |slice: &SliceId| {
                let emc = self.truth.emc_of(*slice);
                emc.is_some_and(|emc| host.emcs.contains(&emc) && takes(emc))
            };
            host.scheduling == Scheduling::Enabled
                && host.fence == Fence::None
                && new.slices.iter().all(reached)
        });
        !open
    }

    /// Checks that a host is fenced only on request or after a long silence, and that each EMC is listed
    /// as fenced only after it has revoked the host's access.
    fn check_fencing(&mut self, id: HostId, host: &Host, batch: &[Record]) {
        let (was, unconfirmed_fences) = match self.truth.host(id) {
            Some(old) => (old.fence, old.unconfirmed_fences.clone()),
            None => (Fence::None, BTreeSet::new()),
        };
        let begins = was == Fence::None && host.fence != Fence::None;
        if begins {
            // An EMC that has not confirmed an earlier fence has granted the host nothing since.
            self.truth.cut.retain(|(emc, cut)| *cut != id || unconfirmed_fences.contains(emc));
        }
        let owed = host.emcs.iter().copied().filter(|_| begins || host.fence == Fence::Fenced);
        let must_answer: BTreeSet<EmcId> = owed.chain(unconfirmed_fences).collect();
        let gone = |emc: &EmcId| {
            batch.iter().any(|record| matches!(record, Record::Gone(Key::Emc(gone)) if gone == emc))
        };
        let skipped = must_answer.into_iter().find(|emc| {
            !host.unconfirmed_fences.contains(emc) && !self.truth.cut.contains(&(*emc, id)) && !gone(emc)
        });
        if let Some(emc) = skipped {
            self.blame("unknown is not free", format!("{emc} counts as having cut off {id}, and has not"));
        }
        let old = self.truth.host(id);
        let restarted = old.is_some_and(|old| !old.boot_id.is_empty() && old.boot_id != host.boot_id);
        if was != Fence::None && host.fence == Fence::None {
            self.check_return(id);
        } else if restarted {
            self.note_returned(id); // a fence that began and ended in this batch is invisible
        }
        if !begins {
            return;
        }
        let asked = self.truth.demands.justify(&Demand::Fence(host.name.clone()));
        if !asked && !self.is_long_silent(id) && !self.truth.long_silent.contains(&id) {
            self.blame("unknown is not free", format!("{id} is fenced without a long silence"));
        }
    }

    /// Checks that a fenced host returns only without mappings that a device cannot revoke.
    fn check_return(&mut self, id: HostId) {
        let shared = |holding: &Holding| {
            self.devices.iter().any(|device| device.is_shared() && device.has(holding.slice))
        };
        let left = self.machine_of(id).and_then(|machine| machine.reachable().find(shared));
        if let Some(holding) = left {
            self.blame("unknown is not free", format!("{id} returns and still has {holding:?}"));
        }
        self.note_returned(id);
    }

    fn note_returned(&mut self, id: HostId) {
        let devices = &self.devices;
        let shared = |slice| devices.iter().any(|device| device.is_shared() && device.has(slice));
        let theirs = self.truth.hands.iter_mut().filter(|(slice, hand)| hand.host == id && shared(**slice));
        theirs.for_each(|(_, hand)| hand.let_go = true);
    }

    /// Checks that a fenced host cannot reach its former slices: each EMC has revoked its access, or holds
    /// no slice of it. A slice that could not be revoked stays the host's.
    fn check_shown(&mut self) {
        let Some(running) = &self.program.running else { return };
        let shown = |host: &HostId| running.manager.host_state(*host) == HostState::Fenced;
        let fenced: Vec<HostId> = self.machines.iter().map(|m| m.id).filter(shown).collect();
        for host in fenced {
            let theirs = self.truth.hands.iter().filter(|(_, hand)| hand.host == host && !hand.let_go);
            let kept = theirs.filter(|(_, hand)| hand.told).map(|(slice, _)| *slice).find(|slice| {
                let device = self.devices.iter().zip(0..).find(|(device, _)| device.has(*slice));
                let cut = device.is_some_and(|(_, emc)| self.truth.cut.contains(&(EmcId(emc), host)));
                let known = self.truth.emc_of(*slice).is_some(); // a restored store may not contain the EMC
                known && (!cut || holder(&self.truth.slot(*slice)) != Some(host))
            });
            if let Some(slice) = kept {
                self.blame("unknown is not free", format!("{host} is shown as fenced and has slice {slice}"));
            }
        }
    }

    fn is_long_silent(&self, host: HostId) -> bool {
        let Some(fence_after) = self.weather.settings.fence_after else { return false };
        let heard = self.truth.heard.get(&host).copied().unwrap_or_default();
        self.now >= heard.after(self.weather.settings.lease_ttl).after(fence_after)
    }

    /// Returns whether the manager has received a message of the host within its lease.
    pub(super) fn is_lease_fresh(&self, host: HostId) -> bool {
        let heard = self.truth.heard.get(&host).copied().unwrap_or_default();
        self.now < heard.after(self.weather.settings.lease_ttl)
    }

    /// Gives every host a new lease, as a starting manager does.
    pub(super) fn fresh_leases(&mut self) {
        let hosts = self.hosts();
        self.truth.heard = hosts.into_iter().map(|host| (host, self.now)).collect();
        self.truth.long_silent.clear();
        self.truth.named = orders::Named::default();
        self.truth.named.load();
        self.truth.returns = returns::Returns::default();
    }

    /// Records a message of a host.
    pub(super) fn heard(&mut self, host: HostId) {
        if self.is_long_silent(host) {
            self.truth.long_silent.insert(host);
        }
        self.truth.heard.insert(host, self.now);
    }

    pub(super) fn truth_committed(&mut self, records: &[Record]) {
        records.iter().for_each(|record| self.truth.put(record));
    }

    /// Records that an older store was restored: acknowledged requests may be missing.
    pub(super) fn forget_lost_history(&mut self, records: &[Record]) {
        let known: BTreeMap<ReservationId, &Reservation> = records
            .iter()
            .filter_map(|record| match record {
                Record::Reservation(id, reservation) => Some((*id, reservation)),
                _ => None,
            })
            .collect();
        let is_known = |acked: &Acked| known.get(&acked.id).is_some_and(|r| is_kept(acked, r));
        self.truth.acked.retain(|_, acked| is_known(acked));
    }

    /// Drops commands, calls and fences of the time before a restore: none is repeated.
    pub(super) fn doubt_everything(&mut self) {
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

    /// Checks after a load that the store contains every acknowledged request. A batch may be durable
    /// although the manager crashed before it knew.
    pub(super) fn truth_loaded(&mut self, meta: Option<&Meta>, records: &[Record], restored: bool) {
        if !restored {
            self.note_let_back(records);
        }
        self.truth.forget_unknown_demands();
        self.truth.records.clear();
        self.truth.records.extend(meta.map(|meta| (Key::Meta, Record::Meta(meta.clone()))));
        self.truth_committed(records);
        self.truth.named.load();
        let lost = self.truth.acked.iter().find(|(_, acked)| {
            !self.truth.reservation(acked.id).is_some_and(|reservation| is_kept(acked, reservation))
        });
        if let Some((request, acked)) = lost {
            let what = format!("{request:?} was answered with {acked:?}, which the store does not have");
            self.blame("durable before done", what);
        }
    }

    /// Checks a report against the truth and records it.
    pub(super) fn note_have(&mut self, host: HostId, have: &Have) {
        for holding in had(have) {
            if let Some(hand) = self.truth.hands.get_mut(&holding.slice) {
                hand.online |= (hand.host, hand.epoch) == (host, holding.epoch);
            }
        }
        for holding in &have.released {
            self.check_released(host, *holding);
            self.truth.let_go(host, *holding);
        }
        have.scrubbed.iter().for_each(|scrubbed| self.truth.let_go(host, scrubbed.holding));
        self.note_unnamed(host, have);
        for failed in &have.failed {
            let scrubber = matches!(self.truth.slot(failed.holding.slice).state, State::Scrubbing(_));
            // A revocation ends access at devices that enforce it; at others the host must release the slice.
            let cut = !self.device(failed.holding.slice).is_shared();
            if cut && (failed.reason == FailedReason::NotZero || scrubber) {
                self.truth.let_go(host, failed.holding);
            }
        }
    }

    /// Checks that a complete report after a restore contains every slice that the host uses.
    fn note_unnamed(&mut self, host: HostId, have: &Have) {
        let asked = self.truth.host(host).is_some_and(|host| host.must_report);
        if !(asked && have.whole && Some(have.number.generation) == self.truth.generation()) {
            return;
        }
        let named: BTreeSet<SliceId> = had(have).map(|holding| holding.slice).collect();
        let unnamed = self.truth.hands.iter_mut().filter(|(slice, _)| !named.contains(slice));
        unnamed.filter(|(_, hand)| hand.host == host).for_each(|(_, hand)| hand.let_go = true);
    }

    fn check_released(&mut self, host: HostId, holding: Holding) {
        let shared = self.device(holding.slice).is_shared();
        let machine = self.machine(host);
        let users = machine.processes.values().filter(|guest| guest.mapped.contains_key(&holding));
        let users: Vec<_> = users.map(|guest| (guest.process.pid, guest.mapped[&holding])).collect();
        for (pid, reservation) in users {
            // An emulated device revokes access by itself where the host has only stopped using the slice.
            let forced = self.truth.forced.contains(&reservation);
            if shared || !forced {
                let what = format!("{host} says it released {holding:?}, which process {pid} has");
                self.blame("released means gone", what);
            }
        }
    }

    /// Checks that memory is handed to a process only after the agent has recorded the process.
    pub(super) fn check_hand_out(&mut self, host: HostId, record: &VmRecord) {
        let kept = self.machine(host).records.get(&record.reservation).cloned();
        let known = kept.is_some_and(|kept| {
            kept.process.is(&record.process) && record.slices.keys().all(|h| kept.slices.contains_key(h))
        });
        if !known {
            self.blame("on record before handed out", format!("{host} hands out {}", record.reservation));
        }
    }

    /// Checks that the loss of memory in use was requested.
    pub(super) fn check_loss(&mut self, host: HostId, guest: &Guest, holding: Holding, why: &str) {
        self.say(|| format!("process {} on {host} loses {holding:?}: {why}", guest.process.pid));
        let forced = guest.mapped.get(&holding).is_some_and(|id| self.truth.forced.contains(id));
        let emc = self.devices.iter().position(|device| device.has(holding.slice));
        let unconfirmed = |host: &Host| host.unconfirmed_fences.iter().any(|of| Some(of.0 as usize) == emc);
        let fenced = self.truth.host(host).is_some_and(|host| host.fence != Fence::None || unconfirmed(host));
        let lost = self.truth.lost.contains(&holding) || self.truth.unrevoked.contains(&holding);
        if !forced && !fenced && !lost {
            let what = format!("process {} of {host} lost {holding:?}: {why}", guest.process.pid);
            self.blame("guests outlive us", what);
        }
    }
}

/// Returns the slices of a host according to a report. After a restart of the agent, slices of VMs may
/// not be online yet.
fn had(have: &Have) -> impl Iterator<Item = &Holding> {
    have.vms.values().flat_map(|vm| &vm.slices).chain(&have.online)
}

/// Returns whether a reservation has ended.
pub(super) fn has_ended(reservation: &Reservation) -> bool {
    matches!(reservation.stage, Stage::Ended { .. })
}

/// Returns whether a reservation was created by the adoption of a running VM.
fn is_adopted(reservation: &Reservation) -> bool {
    reservation.request.client.as_str() == "restored"
}

/// Returns whether a reservation still equals the reply that a client received.
fn is_kept(acked: &Acked, reservation: &Reservation) -> bool {
    let stage = match reservation.stage {
        Stage::Ended { .. } => true,
        Stage::Reserved { .. } => !acked.ended && !acked.committed,
        Stage::Committed | Stage::Broken { .. } => !acked.ended,
    };
    stage && reservation.slices == acked.slices
}
