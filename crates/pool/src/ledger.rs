//! Ledger of slice ownership, computed from its [`Record`]s.
//!
//! A decision changes nothing: every `decide_*` returns a [`Change`] or a
//! [`Rejection`](crate::rejection::Rejection), and only [`Ledger::apply`] changes the ledger. The
//! ledger calls no device and sends no message. The [manager](crate::manager) makes changes
//! durable, and only then performs their effects.

pub(crate) mod ended;
mod index;
mod lifecycle;
mod migrations;
mod rack;
mod rehome;
mod reserve;
mod slices;
mod slots;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    ops::Bound,
};

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use units::{Bytes, EmcId, Epoch, HostId, MigrationId, Name, Ns, ReservationId, SliceId, UnixMs};

use self::{ended::EndedRequests, index::ReservationProgress, slots::Slots};
pub use self::{
    lifecycle::Target,
    rack::{EmcSpec, HostSpec, RackSpec, SchedulingTarget},
    reserve::{Reserve, ReserveOutcome},
};
use crate::{
    audit::{Actor, Decision, DecisionKind, Subject},
    record::{Emc, Host, Key, Meta, Migration, MigrationKey, Record, RequestKey, Reservation, Stage},
    slice::{STATE_NAMES, Scrub, Slot, State},
};

/// Result of a decision: records that must become durable together.
#[must_use = "a change has no effect until it is applied"]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change(pub Vec<Record>);

/// Time of a decision, on both clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct When {
    /// Rack time: total running time of the manager.
    pub now: Ns,
    /// Wall-clock time of the decision.
    pub wall: UnixMs,
}

/// Ledger of slices, EMCs, hosts and reservations, with indexes derived from its records.
#[derive(Clone, Debug)]
pub struct Ledger {
    meta: Meta,
    slots: Slots,
    emcs: BTreeMap<EmcId, EmcEntry>,
    hosts: BTreeMap<HostId, HostEntry>,
    reservations: BTreeMap<ReservationId, Reservation>,
    migrations: BTreeMap<MigrationKey, Migration>,
    by_emc_name: BTreeMap<Name, EmcId>,
    by_host_name: BTreeMap<Name, HostId>,
    by_vm: IndexMap<Name, ReservationId, FxBuildHasher>,
    /// Ended reservations that are not yet deleted, by VM.
    ended_of_vm: BTreeMap<Name, BTreeSet<ReservationId>>,
    by_request: IndexMap<RequestKey, ReservationId, FxBuildHasher>,
    deadlines: BTreeSet<(Ns, ReservationId)>,
    broken: BTreeSet<ReservationId>,
    /// Times at which answered migration requests are repeated.
    answered: BTreeSet<(Ns, MigrationKey)>,
    /// Times at which migration requests because of slowdowns expire.
    expiring: BTreeSet<(Ns, MigrationKey)>,
    /// Ended reservations that can expire: they have no outstanding slices and no running process.
    ended: EndedRequests,
    /// Number of outstanding slices of each reservation: slices that serve the reservation or are
    /// still draining. Reservations without outstanding slices have no entry.
    outstanding_slices: IndexMap<ReservationId, u32, FxBuildHasher>,
    progress: IndexMap<ReservationId, ReservationProgress, FxBuildHasher>,
    /// Slices that hosts outside the rack may still reach, by host.
    held_outside_rack: BTreeMap<HostId, BTreeSet<SliceId>>,
}

/// An EMC with values derived from its slots.
#[derive(Clone, Debug)]
pub struct EmcEntry {
    /// Durable record of the EMC.
    pub emc: Emc,
    /// Whether the EMC's driver works, as last set by the manager. Not durable.
    pub up: bool,
    free: BTreeSet<SliceId>,
    to_scrub: BTreeSet<SliceId>,
    draining: u32,
    /// Number of slices in each state, in the order of [`STATE_NAMES`].
    slices_by_state: [u32; STATE_NAMES.len()],
    quarantined: BTreeSet<SliceId>,
    unclaimed: BTreeSet<SliceId>,
    /// Hosts that may scrub slices of this EMC, each with the number of slices that it scrubs, in
    /// ascending order of this number.
    scrubbers: BTreeSet<(usize, HostId)>,
    /// Number of attached hosts that have not reported since a restore.
    unreported_hosts: u32,
}

/// A host with values derived from its reservations and slots.
#[derive(Clone, Debug)]
pub struct HostEntry {
    /// Durable record of the host.
    pub host: Host,
    held: BTreeSet<SliceId>,
    scrubs: BTreeSet<SliceId>,
    /// Whether the host's agent is connected with a valid lease, as last set by the manager.
    is_live: bool,
    /// Whether the host sent a complete report since the ledger was loaded. Not durable.
    has_reported: bool,
    reservations: BTreeSet<ReservationId>,
    /// Ended reservations whose VM's process still runs on the host.
    ended_reservations_with_process: BTreeSet<ReservationId>,
    cores_used: u32,
    local_used: Bytes,
    unusable_emcs: BTreeMap<EmcId, String>,
}

impl EmcEntry {
    /// Returns the number of free slices.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Returns the number of slices that are draining or being scrubbed.
    pub fn draining(&self) -> u32 {
        self.draining
    }

    /// Returns the number of quarantined slices.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn quarantined(&self) -> u32 {
        self.quarantined.len() as u32
    }

    /// Returns the quarantined slices, lowest first.
    pub fn quarantined_slices(&self) -> impl Iterator<Item = SliceId> {
        self.quarantined.iter().copied()
    }

    /// Returns the number of slices that wait for a scrubber.
    #[expect(clippy::cast_possible_truncation, reason = "an EMC has at most SLICES_PER_EMC_MAX slices")]
    pub fn to_scrub(&self) -> u32 {
        self.to_scrub.len() as u32
    }

    /// Returns the slices that wait for a scrubber, lowest first.
    pub fn slices_to_scrub(&self) -> impl Iterator<Item = SliceId> {
        self.to_scrub.iter().copied()
    }
}

impl HostEntry {
    /// Returns the slices that the host may still reach at a device.
    pub fn held(&self) -> impl ExactSizeIterator<Item = SliceId> {
        self.held.iter().copied()
    }

    /// Returns the slices that the host may still reach, in ascending order from `from`.
    pub(crate) fn held_slices_from(&self, from: SliceId) -> impl Iterator<Item = SliceId> {
        self.held.range(from..).copied()
    }

    /// Returns the host's active reservations, in ascending order from `from`.
    pub(crate) fn reservations_from(&self, from: ReservationId) -> impl Iterator<Item = ReservationId> {
        self.reservations.range(from..).copied()
    }

    /// Returns the lowest slice of the EMC that the host may still reach, if any.
    pub fn lowest_held_slice_on(&self, emc: &Emc) -> Option<SliceId> {
        self.held.range(emc.first..emc.end()).next().copied()
    }

    /// Returns the attached EMCs that the host cannot use, each with the reason. Not durable,
    /// because the agent reports its devices again after a restart of the manager.
    pub fn unusable_emcs(&self) -> &BTreeMap<EmcId, String> {
        &self.unusable_emcs
    }

    /// Returns the number of slices that the host scrubs or was chosen to scrub.
    pub fn scrubbing(&self) -> usize {
        self.scrubs.len()
    }

    /// Returns the active reservations of the host.
    pub fn reservations(&self) -> impl ExactSizeIterator<Item = ReservationId> {
        self.reservations.iter().copied()
    }

    /// Returns the ended reservations whose VM's process still runs on the host. These processes
    /// still use cores and local memory.
    pub fn ended_reservations_with_process(&self) -> impl ExactSizeIterator<Item = ReservationId> {
        self.ended_reservations_with_process.iter().copied()
    }

    /// Adds the reservation's cores and local memory to the used resources, if the reservation is
    /// active or its VM's process runs.
    fn add_reservation(&mut self, id: ReservationId, reservation: &Reservation) {
        if reservation.is_active() {
            self.reservations.insert(id);
        } else if reservation.has_process {
            self.ended_reservations_with_process.insert(id);
        } else {
            return;
        }
        self.cores_used = self.cores_used.saturating_add(reservation.cores);
        self.local_used = [self.local_used, reservation.booked_local()].into_iter().sum();
    }

    /// Reverts [`HostEntry::add_reservation`] for a reservation.
    fn remove_reservation(&mut self, id: ReservationId, reservation: &Reservation) {
        if self.reservations.remove(&id) || self.ended_reservations_with_process.remove(&id) {
            self.cores_used = self.cores_used.saturating_sub(reservation.cores);
            self.local_used = self.local_used.saturating_sub(reservation.booked_local());
        }
    }

    /// Returns the number of cores that are free for reservations.
    pub fn cores_free(&self) -> u32 {
        self.host.cores.saturating_sub(self.cores_used)
    }

    /// Returns the local memory that VMs use or that is booked for them.
    pub const fn local_used(&self) -> Bytes {
        self.local_used
    }

    /// Returns the local memory that is free for reservations.
    pub fn local_free(&self) -> Bytes {
        self.host.local.saturating_sub(self.local_used)
    }
}

impl Ledger {
    /// Creates a ledger without hosts and EMCs.
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
            answered: BTreeSet::new(),
            expiring: BTreeSet::new(),
            ended: EndedRequests::default(),
            outstanding_slices: IndexMap::default(),
            progress: IndexMap::default(),
            held_outside_rack: BTreeMap::new(),
        };
        ledger.install(Record::Meta(meta));
        ledger
    }

    /// Builds a ledger from all records of a store, in any order.
    pub fn load(meta: Meta, records: impl IntoIterator<Item = Record>) -> Self {
        let mut records: Vec<_> = records.into_iter().collect();
        // EMCs and hosts must precede slices, and slices must precede reservations.
        records.sort_by_key(Record::key);
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

    /// Applies a change and returns its records, in which decisions and new migration requests have
    /// their final numbers. The records must be durable before any effect leaves the process.
    pub fn apply(&mut self, change: Change) -> Vec<Record> {
        let mut records = change.0;
        for record in &mut records {
            match record {
                Record::Decision(seq, _) => *seq = self.meta.next_decision,
                Record::Migration(_, migration) if migration.id == MigrationId(0) => {
                    migration.id.0 = self.meta.next_migration.0.max(1);
                }
                _ => {}
            }
            self.install(record.clone());
        }
        records
    }

    /// Applies one record and updates the derived indexes.
    pub fn install(&mut self, record: Record) {
        match record {
            Record::Meta(meta) => self.meta = meta,
            Record::Emc(id, emc) => self.install_emc(id, emc),
            Record::Host(id, host) => self.install_host(id, host),
            Record::Slice(id, slot) => self.install_slot(id, slot),
            Record::Reservation(id, reservation) => self.install_reservation(id, reservation),
            Record::Migration(id, migration) => self.install_migration(id, migration),
            Record::Decision(seq, _) => self.meta.next_decision = self.meta.next_decision.max(seq + 1),
            Record::Deleted(key) => self.remove(key),
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
        let mut slices_by_state = [0; STATE_NAMES.len()];
        slices_by_state[Slot::default().state_index()] = emc.slices;
        let entry = EmcEntry {
            emc,
            up: true,
            free,
            to_scrub: BTreeSet::new(),
            draining: 0,
            slices_by_state,
            quarantined: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            scrubbers: BTreeSet::new(),
            unreported_hosts: 0,
        };
        // No host is attached yet, because EMCs precede hosts in every change.
        self.emcs.insert(id, entry);
    }

    fn install_host(&mut self, id: HostId, host: Host) {
        self.meta.next_host.0 = self.meta.next_host.0.max(id.0.saturating_add(1));
        self.by_host_name.insert(host.name.clone(), id);
        if let Some(entry) = self.hosts.get(&id) {
            let reports = entry.host.must_report != host.must_report;
            self.update_host(id, |entry| entry.host = host);
            if reports {
                self.index_deadlines(id);
            }
            return;
        }
        // A device may have reported grants to this host before the host was in rack.toml. The
        // slices of these grants are quarantined, and the new host becomes their holder.
        let held = self.held_outside_rack.remove(&id).unwrap_or_default();
        let slot = |slice: &SliceId| self.slot(*slice).unwrap_or_default();
        let scrubs = held.iter().filter(|slice| slot(slice).is_being_scrubbed()).copied().collect();
        let entry = HostEntry {
            host,
            held,
            scrubs,
            is_live: false,
            has_reported: false,
            reservations: BTreeSet::new(),
            ended_reservations_with_process: BTreeSet::new(),
            cores_used: 0,
            local_used: Bytes::ZERO,
            unusable_emcs: BTreeMap::new(),
        };
        self.hosts.insert(id, entry);
        self.index_added_host(id);
    }

    fn install_slot(&mut self, id: SliceId, slot: Slot) {
        // The slot does not exist if the slice's EMC was removed.
        let Some((emc, old)) = self.slots.replace(id, slot) else { return };
        self.update_holder(id, old, slot);
        self.update_progress(id, old, slot);
        if old.reservation() != slot.reservation() {
            old.reservation().into_iter().for_each(|id| self.remove_outstanding_slice(id));
            slot.reservation().into_iter().for_each(|id| self.add_outstanding_slice(id));
        }
        let Some(entry) = self.emcs.get_mut(&emc) else { return };
        entry.unindex_slot(id, old);
        entry.index_slot(id, slot);
        if old.is_quarantined() || slot.is_quarantined() {
            self.update_unclaimed(id);
        }
    }

    fn add_outstanding_slice(&mut self, id: ReservationId) {
        *self.outstanding_slices.entry(id).or_default() += 1;
        if let Some((client, at)) = self.ended_request(id) {
            self.ended.remove(&client, (at, id));
        }
    }

    fn remove_outstanding_slice(&mut self, id: ReservationId) {
        let Some(out) = self.outstanding_slices.get_mut(&id) else { return };
        *out -= 1;
        if *out > 0 {
            return;
        }
        self.outstanding_slices.swap_remove(&id);
        if let Some((client, at)) = self.ended_request(id) {
            self.ended.insert(&client, (at, id));
        }
    }

    fn ended_request(&self, id: ReservationId) -> Option<(Name, Ns)> {
        let reservation = self.reservations.get(&id)?;
        let Stage::Ended { at, .. } = reservation.stage else { return None };
        (!reservation.has_process).then(|| (reservation.request.client.clone(), at))
    }

    fn install_reservation(&mut self, id: ReservationId, reservation: Reservation) {
        self.meta.next_reservation.0 = self.meta.next_reservation.0.max(id.0 + 1);
        if let Some(old) = self.reservations.remove(&id) {
            self.unindex_reservation(id, &old);
        }
        self.by_request.insert(reservation.request.clone(), id);
        if reservation.is_active() {
            self.by_vm.insert(reservation.vm.clone(), id);
        }
        if let Some(entry) = self.hosts.get_mut(&reservation.host) {
            entry.add_reservation(id, &reservation);
        }
        match reservation.stage {
            Stage::Ended { at, .. } => {
                if !self.outstanding_slices.contains_key(&id) && !reservation.has_process {
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

    /// Returns whether reservations of a host expire. They do not expire between a restore and the
    /// host's first report, because a reservation that is uncommitted in the backup may have been
    /// committed later.
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
        if self.by_vm.get(&old.vm) == Some(&id) {
            self.by_vm.swap_remove(&old.vm);
        }
        if let Some(entry) = self.hosts.get_mut(&old.host) {
            entry.remove_reservation(id, old);
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
        let key = migration.kind().of(id);
        self.remove_migration(key);
        self.meta.next_migration.0 = self.meta.next_migration.0.max(migration.id.0.saturating_add(1));
        self.answered.extend(migration.retry_at.map(|at| (at, key)));
        self.expiring.extend(migration.slowdown.map(|slowdown| (slowdown.expires_at, key)));
        self.migrations.insert(key, migration);
    }

    fn remove_migration(&mut self, key: MigrationKey) {
        let Some(old) = self.migrations.remove(&key) else { return };
        if let Some(at) = old.retry_at {
            self.answered.remove(&(at, key));
        }
        if let Some(slowdown) = old.slowdown {
            self.expiring.remove(&(slowdown.expires_at, key));
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
                    // Removes the slice from the indexes of hosts and reservations.
                    self.install_slot(slice, Slot::default());
                }
                if let Some(old) = self.emcs.remove(&id) {
                    self.by_emc_name.remove(&old.emc.name);
                    self.slots.remove(id);
                }
            }
            Key::Host(id) => {
                if let Some(old) = self.hosts.remove(&id) {
                    self.by_host_name.remove(&old.host.name);
                    self.unindex_removed_host(id, &old);
                }
            }
            Key::Migration(key) => self.remove_migration(key),
            // The meta record contains the range of stored decisions.
            Key::Decision(_) | Key::Slice(_) | Key::Meta => {}
        }
    }

    /// Returns the current record of a key, or [`Record::Deleted`] if the ledger has none.
    pub fn record(&self, key: Key) -> Record {
        let found = match key {
            Key::Meta => Some(Record::Meta(self.meta.clone())),
            Key::Emc(id) => self.emcs.get(&id).map(|e| Record::Emc(id, e.emc.clone())),
            Key::Host(id) => self.hosts.get(&id).map(|h| Record::Host(id, h.host.clone())),
            Key::Slice(id) => self.slot(id).map(|slot| Record::Slice(id, slot)),
            Key::Reservation(id) => self.reservations.get(&id).map(|r| Record::Reservation(id, r.clone())),
            Key::Migration(key) => {
                self.migrations.get(&key).map(|m| Record::Migration(key.reservation, m.clone()))
            }
            Key::Decision(_) => None,
        };
        found.unwrap_or(Record::Deleted(key))
    }

    /// Returns the ledger's identity, revision and counters.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns mutable access to the ledger's identity, revision and counters, for the manager's
    /// durable writes.
    pub(crate) fn meta_mut(&mut self) -> &mut Meta {
        &mut self.meta
    }

    /// Returns the slot of a slice, or `None` if the pool does not contain the slice.
    pub fn slot(&self, slice: SliceId) -> Option<Slot> {
        self.slots.get(slice)
    }

    /// Returns the slots of all existing slices, in ascending order from `from`.
    pub fn slots_from(&self, from: SliceId) -> impl Iterator<Item = (SliceId, EmcId, Slot)> {
        self.slots.iter_from(from)
    }

    /// Returns the EMC that contains a slice.
    pub fn emc_of(&self, slice: SliceId) -> Option<EmcId> {
        self.slots.emc_of(slice)
    }

    /// Returns all EMCs, in ascending order of their IDs.
    pub fn emcs(&self) -> impl ExactSizeIterator<Item = (EmcId, &EmcEntry)> {
        self.emcs.iter().map(|(id, entry)| (*id, entry))
    }

    /// Returns the EMC with this ID.
    pub fn emc(&self, id: EmcId) -> Option<&EmcEntry> {
        self.emcs.get(&id)
    }

    /// Sets whether an EMC's driver works. Not durable, because the manager tests the driver again
    /// after a restart.
    pub fn set_emc_up(&mut self, id: EmcId, up: bool) {
        if let Some(entry) = self.emcs.get_mut(&id) {
            entry.up = up;
        }
    }

    /// Sets the attached EMCs that a host cannot use, each with the reason. Not durable.
    pub fn set_unusable_emcs(&mut self, id: HostId, unusable_emcs: BTreeMap<EmcId, String>) {
        self.update_host(id, |entry| entry.unusable_emcs = unusable_emcs);
    }

    /// Returns all hosts, in ascending order of their IDs.
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = (HostId, &HostEntry)> {
        self.hosts.iter().map(|(id, entry)| (*id, entry))
    }

    /// Returns all hosts with IDs of at least `from`, in ascending order.
    pub fn hosts_from(&self, from: HostId) -> impl Iterator<Item = (HostId, &HostEntry)> {
        self.hosts.range(from..).map(|(id, entry)| (*id, entry))
    }

    /// Returns the host with this ID.
    pub fn host(&self, id: HostId) -> Option<&HostEntry> {
        self.hosts.get(&id)
    }

    /// Returns the ID of the host with this name.
    pub fn find_host_by_name(&self, name: &Name) -> Option<HostId> {
        self.by_host_name.get(name).copied()
    }

    /// Returns the ID of the EMC with this name.
    pub fn find_emc_by_name(&self, name: &Name) -> Option<EmcId> {
        self.by_emc_name.get(name).copied()
    }

    /// Returns all recorded reservations with IDs above `after`, in ascending order.
    pub fn reservations_after(
        &self,
        after: ReservationId,
    ) -> impl Iterator<Item = (ReservationId, &Reservation)> {
        self.reservations.range((Bound::Excluded(after), Bound::Unbounded)).map(|(id, r)| (*id, r))
    }

    /// Returns the reservation with this ID. Ended reservations are included until they are
    /// deleted.
    pub fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        self.reservations.get(&id)
    }

    /// Returns the newest ended reservation of a VM that is not yet deleted.
    pub fn newest_ended_reservation_of(&self, vm: &Name) -> Option<ReservationId> {
        self.ended_of_vm.get(vm)?.last().copied()
    }

    /// Returns the active reservation of a VM.
    pub fn reservation_of(&self, vm: &Name) -> Option<ReservationId> {
        self.by_vm.get(vm).copied()
    }

    /// Returns the rack time of the earliest commit deadline.
    pub fn next_expiry(&self) -> Option<Ns> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Returns the rack time at which the next ended reservation is deleted.
    pub fn next_prune(&self) -> Option<Ns> {
        self.ended.next_expiry()
    }

    /// Returns whether the host may reach the slice under exactly this epoch. Takes constant time,
    /// because a report may contain thousands of slices.
    pub fn is_held(&self, host: HostId, slice: SliceId, epoch: Epoch) -> bool {
        let slot = self.slots.get(slice);
        slot.is_some_and(|slot| slot.epoch == epoch && slot.holder() == Some(host))
    }

    /// Returns whether the slice is online under exactly this epoch. Takes constant time, because a
    /// report may contain thousands of slices.
    pub fn is_online(&self, slice: SliceId, epoch: Epoch) -> bool {
        let slot = self.slots.get(slice);
        slot.is_some_and(|slot| slot.epoch == epoch && matches!(slot.state, State::Online(_)))
    }
}

/// Creates the record of a decision; [`Ledger::apply`] sets its sequence number.
fn decision(when: When, actor: Actor, subject: Subject, what: DecisionKind) -> Record {
    Record::Decision(0, Decision { at: when.wall, actor, subject, what })
}

impl EmcEntry {
    fn unindex_slot(&mut self, id: SliceId, old: Slot) {
        self.slices_by_state[old.state_index()] -= 1;
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

    fn index_slot(&mut self, id: SliceId, new: Slot) {
        self.slices_by_state[new.state_index()] += 1;
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
