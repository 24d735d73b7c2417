//! Who owns each slice, and why: the one truth of a rack. A ledger is the fold of its [`Record`]s.
//!
//! Deciding changes nothing: every `decide_*` answers with a [`Change`] or a [`Denied`](crate::denied::Denied); [`Ledger::apply`] is the only
//! way anything changes. The ledger calls no device and sends nothing; the [manager](crate::manager) makes changes
//! durable and then acts on them.

pub(crate) mod ended;
mod index;
mod life;
mod migrations;
mod rack;
mod reserve;
mod slices;
mod slots;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    ops::Bound,
};

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use units::{Bytes, EmcId, Epoch, HostId, Name, Ns, ReservationId, SliceId, UnixMs};

use self::{ended::EndedRequests, index::Progress, slots::Slots};
pub use self::{
    life::Target,
    rack::{EmcSpec, HostSpec, Place, RackSpec},
    reserve::{Decided, Reserve},
};
use crate::{
    audit::{Actor, Decision, Subject, What},
    record::{Emc, Host, Key, Meta, Migration, Record, RequestKey, Reservation, Stage},
    slice::{STATE_NAMES, Scrub, Slot, State},
};

/// What a decision would change: records to make durable together.
#[must_use = "a change that is not applied did not happen"]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change(pub Vec<Record>);

/// When something is decided: on the clock of decisions, and as people read time.
#[derive(Clone, Copy, Debug, Default)]
pub struct When {
    /// Rack time.
    pub now: Ns,
    /// As people read time.
    pub wall: UnixMs,
}

/// Who owns each slice.
#[derive(Clone, Debug)]
pub struct Ledger {
    meta: Meta,
    slots: Slots,
    emcs: BTreeMap<EmcId, EmcEntry>,
    hosts: BTreeMap<HostId, HostEntry>,
    reservations: BTreeMap<ReservationId, Reservation>,
    migrations: BTreeMap<ReservationId, Migration>,
    by_emc_name: BTreeMap<Name, EmcId>,
    by_host_name: BTreeMap<Name, HostId>,
    by_vm: IndexMap<Name, ReservationId, FxBuildHasher>,
    /// Ended reservations of each VM, while they are remembered.
    ended_of_vm: BTreeMap<Name, BTreeSet<ReservationId>>,
    by_request: IndexMap<RequestKey, ReservationId, FxBuildHasher>,
    deadlines: BTreeSet<(Ns, ReservationId)>,
    broken: BTreeSet<ReservationId>,
    /// When requests to move a VM that were declined are made again.
    declined: BTreeSet<(Ns, ReservationId)>,
    /// Ended reservations whose slices are all back.
    ended: EndedRequests,
    /// The number of slices that serve a reservation or drain from it. A reservation without any has no entry.
    slices_out: IndexMap<ReservationId, u32, FxBuildHasher>,
    progress: IndexMap<ReservationId, Progress, FxBuildHasher>,
    /// Slices whose holders are not in the rack, by holder.
    held_outside: BTreeMap<HostId, BTreeSet<SliceId>>,
}

/// An EMC with what follows from its slots.
#[derive(Clone, Debug)]
pub struct EmcEntry {
    /// Its record.
    pub emc: Emc,
    /// Whether its driver works, as far as the manager knows.
    pub up: bool,
    free: BTreeSet<SliceId>,
    to_scrub: BTreeSet<SliceId>,
    draining: u32,
    /// The number of slices in each state, in the order of [`STATE_NAMES`].
    in_state: [u32; STATE_NAMES.len()],
    quarantined: BTreeSet<SliceId>,
    unclaimed: BTreeSet<SliceId>,
    /// Hosts that may scrub its slices, by how many they scrub.
    scrubbers: BTreeSet<(usize, HostId)>,
    /// Hosts wired to it that have yet to report after a restore.
    unreported: u32,
}

/// A host with what follows from its reservations and slots.
#[derive(Clone, Debug)]
pub struct HostEntry {
    /// Its record.
    pub host: Host,
    held: BTreeSet<SliceId>,
    scrubs: BTreeSet<SliceId>,
    /// Whether its agent is connected and its lease fresh, as far as the manager knows.
    live: bool,
    /// Whether a complete report of it has been heard since the ledger was loaded. Not durable.
    reported: bool,
    reservations: BTreeSet<ReservationId>,
    cores_used: u32,
    local_used: Bytes,
    unseen: BTreeMap<EmcId, String>,
}

impl EmcEntry {
    /// How many slices may be reserved.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// How many slices are on their way back: draining or being scrubbed.
    pub fn draining(&self) -> u32 {
        self.draining
    }

    /// How many slices are kept from everybody.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn quarantined(&self) -> u32 {
        self.quarantined.len() as u32
    }

    /// Slices kept from everybody, lowest first.
    pub fn quarantined_slices(&self) -> impl Iterator<Item = SliceId> {
        self.quarantined.iter().copied()
    }

    /// How many slices wait for a scrubber.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn to_scrub(&self) -> u32 {
        self.to_scrub.len() as u32
    }

    /// Slices that wait for a scrubber, lowest first.
    pub fn slices_to_scrub(&self) -> impl Iterator<Item = SliceId> {
        self.to_scrub.iter().copied()
    }
}

impl HostEntry {
    /// Slices it may still reach at a device.
    pub fn held(&self) -> impl ExactSizeIterator<Item = SliceId> {
        self.held.iter().copied()
    }

    /// Slices that the host may still reach, ascending, from one on.
    pub(crate) fn held_from(&self, from: SliceId) -> impl Iterator<Item = SliceId> {
        self.held.range(from..).copied()
    }

    /// Its active reservations, ascending, from one on.
    pub(crate) fn reservations_from(&self, from: ReservationId) -> impl Iterator<Item = ReservationId> {
        self.reservations.range(from..).copied()
    }

    /// The lowest slice of an EMC that the host may still reach there.
    pub fn held_on(&self, emc: &Emc) -> Option<SliceId> {
        self.held.range(emc.first..emc.end()).next().copied()
    }

    /// EMCs that it is wired to and cannot use, and why. Not durable: its agent says it anew.
    pub fn unseen(&self) -> &BTreeMap<EmcId, String> {
        &self.unseen
    }

    /// How many slices it is scrubbing or about to.
    pub fn scrubbing(&self) -> usize {
        self.scrubs.len()
    }

    /// Its active reservations.
    pub fn reservations(&self) -> impl ExactSizeIterator<Item = ReservationId> {
        self.reservations.iter().copied()
    }

    /// Cores that may still be reserved.
    pub fn cores_free(&self) -> u32 {
        self.host.cores.saturating_sub(self.cores_used)
    }

    /// Local memory that may still be reserved.
    pub fn local_free(&self) -> Bytes {
        self.host.local.saturating_sub(self.local_used)
    }
}

impl Ledger {
    /// Of a rack without hosts, EMCs or past.
    pub fn new(meta: Meta) -> Self {
        let mut ledger = Self {
            meta: Meta::new(String::new()),
            slots: Slots::default(),
            emcs: BTreeMap::new(),
            hosts: BTreeMap::new(),
            reservations: BTreeMap::new(),
            migrations: BTreeMap::new(),
            by_emc_name: BTreeMap::new(),
            by_host_name: BTreeMap::new(),
            by_vm: IndexMap::default(),
            ended_of_vm: BTreeMap::new(),
            by_request: IndexMap::default(),
            deadlines: BTreeSet::new(),
            broken: BTreeSet::new(),
            declined: BTreeSet::new(),
            ended: EndedRequests::default(),
            slices_out: IndexMap::default(),
            progress: IndexMap::default(),
            held_outside: BTreeMap::new(),
        };
        ledger.install(Record::Meta(meta));
        ledger
    }

    /// From all records of a store, in any order.
    pub fn load(meta: Meta, records: impl IntoIterator<Item = Record>) -> Self {
        let mut records: Vec<_> = records.into_iter().collect();
        records.sort_by_key(Record::key); // EMCs and hosts before slices, those before reservations
        for record in &mut records {
            if let Record::Host(_, host) = record
                && host.unconfirmed_fences.is_empty()
            {
                host.restart_fence();
            }
        }
        let mut ledger = Self::new(meta.clone());
        records.into_iter().for_each(|record| ledger.install(record));
        ledger.install(Record::Meta(meta));
        ledger
    }

    /// The only way anything changes. Answers with the records as they now are, decisions numbered: they must be made
    /// durable before anybody outside learns of them.
    pub fn apply(&mut self, change: Change) -> Vec<Record> {
        let mut records = change.0;
        for record in &mut records {
            if let Record::Decision(seq, _) = record {
                *seq = self.meta.next_decision;
            }
            self.install(record.clone());
        }
        records
    }

    /// Takes one fact in, and keeps what follows from it.
    pub fn install(&mut self, record: Record) {
        match record {
            Record::Meta(meta) => self.meta = meta,
            Record::Emc(id, emc) => self.install_emc(id, emc),
            Record::Host(id, host) => self.install_host(id, host),
            Record::Slice(id, slot) => self.install_slot(id, slot),
            Record::Reservation(id, reservation) => self.install_reservation(id, reservation),
            Record::Migration(id, migration) => self.install_migration(id, migration),
            Record::Decision(seq, _) => self.meta.next_decision = self.meta.next_decision.max(seq + 1),
            Record::Gone(key) => self.remove(key),
        }
    }

    fn install_emc(&mut self, id: EmcId, emc: Emc) {
        self.meta.next_emc.0 = self.meta.next_emc.0.max(id.0.saturating_add(1));
        self.meta.next_slice.0 = self.meta.next_slice.0.max(emc.end().0);
        self.by_emc_name.insert(emc.name.clone(), id);
        if let Some(entry) = self.emcs.get_mut(&id) {
            entry.emc = emc;
            return;
        }
        self.slots.add(id, emc.first, emc.slices);
        let free = emc.range().collect();
        let mut in_state = [0; STATE_NAMES.len()];
        in_state[Slot::default().state_index()] = emc.slices;
        let entry = EmcEntry {
            emc,
            up: true,
            free,
            to_scrub: BTreeSet::new(),
            draining: 0,
            in_state,
            quarantined: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            scrubbers: BTreeSet::new(),
            unreported: 0,
        };
        self.emcs.insert(id, entry); // no host is wired to it yet: EMCs come before hosts in a change
    }

    fn install_host(&mut self, id: HostId, host: Host) {
        self.meta.next_host.0 = self.meta.next_host.0.max(id.0.saturating_add(1));
        self.by_host_name.insert(host.name.clone(), id);
        if let Some(entry) = self.hosts.get(&id) {
            let reports = entry.host.must_report != host.must_report;
            self.change_host(id, |entry| entry.host = host);
            if reports {
                self.index_deadlines(id);
            }
            return;
        }
        // A device may have named a host before rack.toml did: what is kept from everybody for that is the host's own.
        let held = self.held_outside.remove(&id).unwrap_or_default();
        let slot = |slice: &SliceId| self.slot(*slice).unwrap_or_default();
        let scrubs = held.iter().filter(|slice| slot(slice).is_being_scrubbed()).copied().collect();
        let entry = HostEntry {
            host,
            held,
            scrubs,
            live: false,
            reported: false,
            reservations: BTreeSet::new(),
            cores_used: 0,
            local_used: Bytes::ZERO,
            unseen: BTreeMap::new(),
        };
        self.hosts.insert(id, entry);
        self.host_added(id);
    }

    fn install_slot(&mut self, id: SliceId, slot: Slot) {
        let Some((emc, old)) = self.slots.replace(id, slot) else { return }; // its EMC has been removed
        self.note_holder(id, old, slot);
        self.update_progress(id, old, slot);
        if old.reservation() != slot.reservation() {
            old.reservation().into_iter().for_each(|id| self.slice_returned(id));
            slot.reservation().into_iter().for_each(|id| self.slice_taken(id));
        }
        let Some(entry) = self.emcs.get_mut(&emc) else { return };
        entry.forget_slot(id, old);
        entry.count_slot(id, slot);
        if old.is_quarantined() || slot.is_quarantined() {
            self.list_unclaimed(id);
        }
    }

    fn slice_taken(&mut self, id: ReservationId) {
        *self.slices_out.entry(id).or_default() += 1;
        if let Some((client, at)) = self.ended_request(id) {
            self.ended.remove(&client, (at, id));
        }
    }

    fn slice_returned(&mut self, id: ReservationId) {
        let Some(out) = self.slices_out.get_mut(&id) else { return };
        *out -= 1;
        if *out > 0 {
            return;
        }
        self.slices_out.swap_remove(&id);
        if let Some((client, at)) = self.ended_request(id) {
            self.ended.insert(&client, (at, id));
        }
    }

    fn ended_request(&self, id: ReservationId) -> Option<(Name, Ns)> {
        let reservation = self.reservations.get(&id)?;
        let Stage::Ended { at, .. } = reservation.stage else { return None };
        Some((reservation.request.client.clone(), at))
    }

    fn install_reservation(&mut self, id: ReservationId, reservation: Reservation) {
        self.meta.next_reservation.0 = self.meta.next_reservation.0.max(id.0 + 1);
        if let Some(old) = self.reservations.remove(&id) {
            self.unindex_reservation(id, &old);
        }
        self.by_request.insert(reservation.request.clone(), id);
        if reservation.is_active() {
            self.by_vm.insert(reservation.vm.clone(), id);
            if let Some(entry) = self.hosts.get_mut(&reservation.host) {
                entry.reservations.insert(id);
                entry.cores_used += reservation.cores;
                entry.local_used = [entry.local_used, reservation.local].into_iter().sum();
            }
        }
        match reservation.stage {
            Stage::Ended { at, .. } => {
                if !self.slices_out.contains_key(&id) {
                    self.ended.insert(&reservation.request.client, (at, id));
                }
                self.ended_of_vm.entry(reservation.vm.clone()).or_default().insert(id);
            }
            Stage::Broken { .. } => drop(self.broken.insert(id)),
            Stage::Reserved { .. } | Stage::Committed => {}
        }
        if let Some(deadline) = reservation.stage.deadline()
            && self.has_deadlines(reservation.host)
        {
            self.deadlines.insert((deadline, id));
        }
        self.recompute_progress(id, &reservation);
        self.reservations.insert(id, reservation);
    }

    /// Whether reservations of a host end at their deadlines. Not before it has reported since a restore: a VM that the
    /// backup shows as reserved may have been committed since, and run.
    fn has_deadlines(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_none_or(|entry| !entry.host.must_report)
    }

    fn index_deadlines(&mut self, host: HostId) {
        let Some(entry) = self.hosts.get(&host) else { return };
        let due =
            entry.reservations().filter_map(|id| Some((self.reservations.get(&id)?.stage.deadline()?, id)));
        for due in due.collect::<Vec<_>>() {
            if self.has_deadlines(host) {
                self.deadlines.insert(due);
            } else {
                self.deadlines.remove(&due);
            }
        }
    }

    fn unindex_reservation(&mut self, id: ReservationId, old: &Reservation) {
        self.progress.swap_remove(&id);
        if old.is_active() {
            if self.by_vm.get(&old.vm) == Some(&id) {
                self.by_vm.swap_remove(&old.vm);
            }
            if let Some(entry) = self.hosts.get_mut(&old.host) {
                entry.reservations.remove(&id);
                entry.cores_used -= old.cores;
                entry.local_used = entry.local_used.saturating_sub(old.local);
            }
        }
        if let Some(deadline) = old.stage.deadline() {
            self.deadlines.remove(&(deadline, id));
        }
        match old.stage {
            Stage::Ended { at, .. } => {
                self.ended.remove(&old.request.client, (at, id));
                if let Entry::Occupied(mut ended) = self.ended_of_vm.entry(old.vm.clone()) {
                    ended.get_mut().remove(&id);
                    if ended.get().is_empty() {
                        ended.remove();
                    }
                }
            }
            Stage::Broken { .. } => drop(self.broken.remove(&id)),
            Stage::Reserved { .. } | Stage::Committed => {}
        }
    }

    fn install_migration(&mut self, id: ReservationId, migration: Migration) {
        self.remove_migration(id);
        self.declined.extend(migration.again.map(|at| (at, id)));
        self.migrations.insert(id, migration);
    }

    fn remove_migration(&mut self, id: ReservationId) {
        if let Some(at) = self.migrations.remove(&id).and_then(|old| old.again) {
            self.declined.remove(&(at, id));
        }
    }

    fn remove(&mut self, key: Key) {
        match key {
            Key::Reservation(id) => {
                if let Some(old) = self.reservations.remove(&id) {
                    self.unindex_reservation(id, &old);
                    if self.by_request.get(&old.request) == Some(&id) {
                        self.by_request.swap_remove(&old.request);
                    }
                }
            }
            Key::Emc(id) => {
                let slices: Vec<SliceId> =
                    self.emcs.get(&id).into_iter().flat_map(|entry| entry.emc.range()).collect();
                for slice in slices {
                    self.install_slot(slice, Slot::default()); // hosts and reservations have it no more
                }
                if let Some(old) = self.emcs.remove(&id) {
                    self.by_emc_name.remove(&old.emc.name);
                    self.slots.remove(id);
                }
            }
            Key::Host(id) => {
                if let Some(old) = self.hosts.remove(&id) {
                    self.by_host_name.remove(&old.host.name);
                    self.host_removed(id, &old);
                }
            }
            Key::Migration(id) => self.remove_migration(id),
            // Which decisions are kept is written in the meta record.
            Key::Decision(_) | Key::Slice(_) | Key::Meta => {}
        }
    }

    /// The record that a key names now, as it is to be written down.
    pub fn record(&self, key: Key) -> Record {
        let found = match key {
            Key::Meta => Some(Record::Meta(self.meta.clone())),
            Key::Emc(id) => self.emcs.get(&id).map(|e| Record::Emc(id, e.emc.clone())),
            Key::Host(id) => self.hosts.get(&id).map(|h| Record::Host(id, h.host.clone())),
            Key::Slice(id) => self.slot(id).map(|slot| Record::Slice(id, slot)),
            Key::Reservation(id) => self.reservations.get(&id).map(|r| Record::Reservation(id, r.clone())),
            Key::Migration(id) => self.migrations.get(&id).map(|m| Record::Migration(id, m.clone())),
            Key::Decision(_) => None,
        };
        found.unwrap_or(Record::Gone(key))
    }

    /// What concerns the whole ledger.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// What concerns the whole ledger; for the one who makes it durable.
    pub(crate) fn meta_mut(&mut self) -> &mut Meta {
        &mut self.meta
    }

    /// One slice, if the pool has it.
    pub fn slot(&self, slice: SliceId) -> Option<Slot> {
        self.slots.get(slice)
    }

    /// All slices of EMCs that are there, in order, from one on.
    pub fn slots_from(&self, from: SliceId) -> impl Iterator<Item = (SliceId, EmcId, Slot)> {
        self.slots.from(from)
    }

    /// The EMC whose slice this is.
    pub fn emc_of(&self, slice: SliceId) -> Option<EmcId> {
        self.slots.emc_of(slice)
    }

    /// All EMCs.
    pub fn emcs(&self) -> impl ExactSizeIterator<Item = (EmcId, &EmcEntry)> {
        self.emcs.iter().map(|(id, entry)| (*id, entry))
    }

    /// One EMC.
    pub fn emc(&self, id: EmcId) -> Option<&EmcEntry> {
        self.emcs.get(&id)
    }

    /// Notes whether an EMC's driver works. Not durable: it is found out anew after a restart.
    pub fn set_emc_up(&mut self, id: EmcId, up: bool) {
        if let Some(entry) = self.emcs.get_mut(&id) {
            entry.up = up;
        }
    }

    /// Notes which of its EMCs a host cannot use.
    pub fn set_unseen(&mut self, id: HostId, unseen: BTreeMap<EmcId, String>) {
        self.change_host(id, |entry| entry.unseen = unseen);
    }

    /// All hosts.
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = (HostId, &HostEntry)> {
        self.hosts.iter().map(|(id, entry)| (*id, entry))
    }

    /// All hosts, in order of their numbers, from one on.
    pub fn hosts_from(&self, from: HostId) -> impl Iterator<Item = (HostId, &HostEntry)> {
        self.hosts.range(from..).map(|(id, entry)| (*id, entry))
    }

    /// One host.
    pub fn host(&self, id: HostId) -> Option<&HostEntry> {
        self.hosts.get(&id)
    }

    /// A host by its name.
    pub fn host_named(&self, name: &Name) -> Option<HostId> {
        self.by_host_name.get(name).copied()
    }

    /// An EMC by its name.
    pub fn emc_named(&self, name: &Name) -> Option<EmcId> {
        self.by_emc_name.get(name).copied()
    }

    /// All remembered reservations after one, in order of their numbers.
    pub fn reservations_after(
        &self,
        after: ReservationId,
    ) -> impl Iterator<Item = (ReservationId, &Reservation)> {
        self.reservations.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, r)| (*id, r))
    }

    /// One reservation, ended ones too while they are remembered.
    pub fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        self.reservations.get(&id)
    }

    /// The newest reservation of a VM that ended and is still remembered.
    pub fn ended_of(&self, vm: &Name) -> Option<ReservationId> {
        self.ended_of_vm.get(vm)?.last().copied()
    }

    /// The active reservation of a VM.
    pub fn reservation_of(&self, vm: &Name) -> Option<ReservationId> {
        self.by_vm.get(vm).copied()
    }

    /// When the next reservation ends for want of a commit.
    pub fn next_expiry(&self) -> Option<Ns> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// When the next ended reservation is past its time.
    pub fn next_forgetting(&self) -> Option<Ns> {
        self.ended.next_expiry()
    }

    /// Whether a host may reach a slice under exactly this number. Cheap: reports name thousands.
    pub fn is_held(&self, host: HostId, slice: SliceId, epoch: Epoch) -> bool {
        let slot = self.slots.get(slice);
        slot.is_some_and(|slot| slot.epoch == epoch && slot.holder() == Some(host))
    }

    /// Whether a slice is known to be online under exactly this number. Cheap: reports name thousands.
    pub fn is_online(&self, slice: SliceId, epoch: Epoch) -> bool {
        let slot = self.slots.get(slice);
        slot.is_some_and(|slot| slot.epoch == epoch && matches!(slot.state, State::Online(_)))
    }
}

/// A decision; [`Ledger::apply`] numbers it.
fn decision(when: When, actor: Actor, subject: Subject, what: What) -> Record {
    Record::Decision(0, Decision { at: when.wall, actor, subject, what })
}

impl EmcEntry {
    fn forget_slot(&mut self, id: SliceId, old: Slot) {
        self.in_state[old.state_index()] -= 1;
        match old.state {
            State::Free => drop(self.free.remove(&id)),
            State::Scrubbing(scrub) => {
                self.draining -= 1;
                if scrub == Scrub::Waiting {
                    self.to_scrub.remove(&id);
                }
            }
            State::Draining(..) => self.draining -= 1,
            State::Quarantined(_) => drop(self.quarantined.remove(&id)),
            State::Assigned(_) | State::Onlining(_) | State::Online(_) => {}
        }
    }

    fn count_slot(&mut self, id: SliceId, new: Slot) {
        self.in_state[new.state_index()] += 1;
        match new.state {
            State::Free => drop(self.free.insert(id)),
            State::Scrubbing(scrub) => {
                self.draining += 1;
                if scrub == Scrub::Waiting {
                    self.to_scrub.insert(id);
                }
            }
            State::Draining(..) => self.draining += 1,
            State::Quarantined(_) => drop(self.quarantined.insert(id)),
            State::Assigned(_) | State::Onlining(_) | State::Online(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
