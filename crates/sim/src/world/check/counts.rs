//! Recomputes the derived counts and indexes of the manager from the records on disk, and compares
//! both.

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    ledger::Ledger,
    manager::EmcState,
    record::{Emc, Host, Key, Record, Rehome, Reservation, Stage},
    slice::{Quarantine, Scrub, Slot, State},
};
use units::limits::REQUEST_ID_RETENTION;
use units::{Bytes, EmcId, HostId, Name, Ns, ReservationId, SliceId};

use super::{GroundTruth, memory};
use crate::world::World;

/// Number of durable writes between two comparisons.
const COMPARISON_INTERVAL_WRITES: u64 = 8;

/// Slices of one EMC, grouped by state.
#[derive(Debug, Default, PartialEq, Eq)]
struct EmcSlices {
    free: u32,
    draining: u32,
    to_scrub: BTreeSet<SliceId>,
    quarantined: BTreeSet<SliceId>,
}

/// Slices, reservations, free cores and free local memory of one host.
#[derive(Debug, PartialEq, Eq)]
struct HostUsage {
    held: BTreeSet<SliceId>,
    scrubbing: usize,
    reservations: BTreeSet<ReservationId>,
    cores_free: u32,
    local_free: Bytes,
}

/// Counts and indexes that the manager derives from the records.
#[derive(Debug, Default, PartialEq, Eq)]
struct DerivedState {
    emcs: BTreeMap<EmcId, EmcSlices>,
    hosts: BTreeMap<HostId, HostUsage>,
    /// Active reservation and last ended reservation of each VM.
    vms: BTreeMap<Name, (Option<ReservationId>, Option<ReservationId>)>,
    /// Number of online slices of each reservation.
    online: BTreeMap<ReservationId, u32>,
    next_expiry: Option<Ns>,
    next_prune: Option<Ns>,
    next_migration_retry: Option<Ns>,
    next_slowdown_expiry: Option<Ns>,
}

/// Returns the reservation that owns a slice, if any.
pub(super) fn owner(slot: &Slot) -> Option<ReservationId> {
    match slot.state {
        State::Assigned(o) | State::Onlining(o) | State::Online(o) | State::Draining(o, _) => {
            Some(o.reservation)
        }
        State::Free | State::Scrubbing(_) | State::Quarantined(_) => None,
    }
}

/// Returns the host that may have access to a slice, if any.
pub(in crate::world) fn holder(slot: &Slot) -> Option<HostId> {
    match slot.state {
        State::Free | State::Scrubbing(Scrub::Waiting) => None,
        State::Assigned(o) | State::Onlining(o) | State::Online(o) | State::Draining(o, _) => Some(o.host),
        State::Scrubbing(Scrub::Granting(host) | Scrub::Working(host) | Scrub::Leaving(host)) => Some(host),
        State::Scrubbing(Scrub::Revoking { host, .. }) => host,
        State::Quarantined(why) => match why {
            Quarantine::Dirty { host, revoked } | Quarantine::ScrubFailed { host, revoked } => {
                (!revoked).then_some(host)
            }
            Quarantine::UnknownGrant { host } | Quarantine::LostRecord { host } => Some(host),
            Quarantine::Restored { host } | Quarantine::DeviceFailed { host, .. } => host,
            Quarantine::LostGrant => None,
        },
    }
}

impl GroundTruth {
    fn derived_state(&self) -> DerivedState {
        let mut derived = DerivedState {
            next_migration_retry: self.next_migration_retry(),
            next_slowdown_expiry: self.next_slowdown_expiry(),
            ..DerivedState::default()
        };
        for record in self.records.values() {
            match record {
                Record::Emc(id, emc) => drop(derived.emcs.insert(*id, self.group_emc_slices(emc))),
                Record::Host(id, host) => drop(derived.hosts.insert(*id, self.host_usage(*id, host))),
                Record::Reservation(id, reservation) => {
                    derived.add_reservation(*id, reservation);
                    derived.add_deadlines(
                        reservation,
                        self.is_released(*id, reservation),
                        self.has_reported(reservation.host),
                    );
                    derived.online.insert(*id, self.count_online_slices(*id, reservation));
                }
                Record::Meta(_)
                | Record::Slice(..)
                | Record::Migration(..)
                | Record::Decision(..)
                | Record::Deleted(_) => {}
            }
        }
        derived
    }

    fn group_emc_slices(&self, emc: &Emc) -> EmcSlices {
        let mut slices = EmcSlices::default();
        for slice in (emc.first.0..emc.first.0 + emc.slices).map(SliceId) {
            match self.slot(slice).state {
                State::Free => slices.free += 1,
                State::Assigned(_) | State::Onlining(_) | State::Online(_) => {}
                State::Draining(..) => slices.draining += 1,
                State::Scrubbing(scrub) => {
                    slices.draining += 1;
                    slices.to_scrub.extend((scrub == Scrub::Waiting).then_some(slice));
                }
                State::Quarantined(_) => drop(slices.quarantined.insert(slice)),
            }
        }
        slices
    }

    fn host_usage(&self, id: HostId, host: &Host) -> HostUsage {
        let slots = self.records.values().filter_map(|record| match record {
            Record::Slice(slice, slot) => (holder(slot) == Some(id)).then_some((*slice, slot.state)),
            _ => None,
        });
        let slots: Vec<_> = slots.collect();
        let scrubs =
            |state: &State| matches!(state, State::Scrubbing(Scrub::Granting(_) | Scrub::Working(_)));
        let own = self.reservations().filter(|(_, r)| r.host == id && (!is_ended(r) || r.has_process));
        let own: Vec<_> = own.collect();
        let cores = own.iter().map(|(_, r)| r.cores).sum();
        let is_moving = |rehome: &Rehome| matches!(rehome, Rehome::Moving { .. } | Rehome::Cancelling { .. });
        let moving = own.iter().filter(|(_, r)| is_moving(&r.rehome));
        let moved_slices = moving.flat_map(|(_, r)| &r.slices).map(|_| units::SLICE);
        let local: Bytes = own.iter().map(|(_, r)| r.local).chain(moved_slices).sum();
        HostUsage {
            held: slots.iter().map(|(slice, _)| *slice).collect(),
            scrubbing: slots.iter().filter(|(_, state)| scrubs(state)).count(),
            reservations: own.iter().filter(|(_, r)| !is_ended(r)).map(|(id, _)| *id).collect(),
            cores_free: host.cores.saturating_sub(cores),
            local_free: host.local.saturating_sub(local),
        }
    }

    /// Returns whether a host has sent a complete report since the last restore.
    fn has_reported(&self, host: HostId) -> bool {
        self.host(host).is_some_and(|host| !host.must_report)
    }

    /// Returns whether all slices of a reservation are released and its process has ended.
    pub(super) fn is_released(&self, id: ReservationId, reservation: &Reservation) -> bool {
        !reservation.has_process
            && memory(reservation).0.iter().all(|slice| owner(&self.slot(*slice)) != Some(id))
    }

    fn count_online_slices(&self, id: ReservationId, reservation: &Reservation) -> u32 {
        let own =
            |slice: &&SliceId| matches!(self.slot(**slice).state, State::Online(o) if o.reservation == id);
        u32::try_from(reservation.slices.iter().filter(own).count())
            .expect("the number of slices of a VM fits u32")
    }
}

fn is_ended(reservation: &Reservation) -> bool {
    matches!(reservation.stage, Stage::Ended { .. })
}

impl DerivedState {
    fn add_reservation(&mut self, id: ReservationId, reservation: &Reservation) {
        let vm = self.vms.entry(reservation.vm.clone()).or_default();
        match &reservation.stage {
            Stage::Ended { .. } => vm.1 = Some(id), // ids are ascending: the latest one is kept
            Stage::Reserved { .. } | Stage::Committed | Stage::Broken { .. } => vm.0 = Some(id),
        }
    }

    /// Adds the deadlines of a reservation. The retention of an ended reservation begins when all
    /// its slices are `released`. A commit deadline does not expire before the host has reported
    /// after a restore.
    fn add_deadlines(&mut self, reservation: &Reservation, released: bool, has_reported: bool) {
        let earliest = |known: Option<Ns>, at: Ns| Some(known.map_or(at, |known| known.min(at)));
        match &reservation.stage {
            Stage::Ended { at, .. } if released => {
                self.next_prune = earliest(self.next_prune, at.after(REQUEST_ID_RETENTION));
            }
            Stage::Reserved { deadline, .. } | Stage::Broken { deadline: Some(deadline), .. }
                if has_reported =>
            {
                self.next_expiry = earliest(self.next_expiry, *deadline);
            }
            _ => {}
        }
    }

    /// Reads the derived state from the ledger of the manager.
    fn from_ledger(
        ledger: &Ledger,
        vms: &BTreeMap<Name, (Option<ReservationId>, Option<ReservationId>)>,
    ) -> Self {
        let emcs = ledger.emcs().map(|(id, entry)| {
            let slices = EmcSlices {
                free: entry.free(),
                draining: entry.draining(),
                to_scrub: entry.slices_to_scrub().collect(),
                quarantined: entry.quarantined_slices().collect(),
            };
            (id, slices)
        });
        let hosts = ledger.hosts().map(|(id, entry)| {
            let used = HostUsage {
                held: entry.held().collect(),
                scrubbing: entry.scrubbing(),
                reservations: entry.reservations().collect(),
                cores_free: entry.cores_free(),
                local_free: entry.local_free(),
            };
            (id, used)
        });
        let of_vm = |vm: &Name| (ledger.reservation_of(vm), ledger.newest_ended_reservation_of(vm));
        let online = ledger.reservations_after(ReservationId(0)).map(|(id, _)| (id, ledger.online(id)));
        Self {
            emcs: emcs.collect(),
            hosts: hosts.collect(),
            vms: vms.keys().map(|vm| (vm.clone(), of_vm(vm))).collect(),
            online: online.collect(),
            next_expiry: ledger.next_expiry(),
            next_prune: ledger.next_prune(),
            next_migration_retry: ledger.next_migration_retry(),
            next_slowdown_expiry: ledger.next_slowdown_expiry(),
        }
    }
}

impl World {
    /// Compares the manager with the records on disk after every 8 durable writes.
    pub(in crate::world) fn compare_periodically(&mut self) {
        self.truth.writes += 1;
        if self.truth.writes.is_multiple_of(COMPARISON_INTERVAL_WRITES) {
            self.compare_with_disk();
        }
    }

    /// Compares the records and the derived state of the manager with the records on disk.
    pub(in crate::world) fn compare_with_disk(&mut self) {
        let Some(running) = &self.manager_process.running else { return };
        let ledger = running.manager.durable();
        let derived = self.truth.derived_state();
        let in_manager = DerivedState::from_ledger(ledger, &derived.vms);
        let differing = self.truth.records.iter().find(|(key, record)| ledger.record(**key) != **record);
        let differing = differing
            .map(|(key, record)| format!("{record:?} on disk, {:?} in the manager", ledger.record(*key)));
        let mismatch = differing.or_else(|| self.find_name_error(ledger)).or_else(|| {
            (derived != in_manager).then(|| format!("{derived:?} on disk, {in_manager:?} in the manager"))
        });
        if let Some(description) =
            mismatch.or_else(|| self.find_capacity_error()).or_else(|| self.truth.find_migration_error())
        {
            self.report_violation("the state of the manager equals the records on disk", description);
        }
    }

    /// Returns a description of a wrong lookup of a host or EMC by name, if any.
    fn find_name_error(&self, ledger: &Ledger) -> Option<String> {
        self.truth.records.iter().find_map(|(key, record)| {
            let found = match record {
                Record::Host(_, host) => ledger.find_host_by_name(&host.name).map(Key::Host),
                Record::Emc(_, emc) => ledger.find_emc_by_name(&emc.name).map(Key::Emc),
                _ => Some(*key),
            };
            (found != Some(*key)).then(|| format!("lookup by name of {record:?} returns {found:?}"))
        })
    }

    /// Returns a description if the alarm CAPACITY_ZERO is wrongly raised or wrongly absent. The
    /// alarm must be raised if and only if no slice is usable.
    fn find_capacity_error(&self) -> Option<String> {
        let manager = &self.manager_process.running.as_ref()?.manager;
        let up = self.truth.records.values().filter_map(|record| match record {
            Record::Emc(id, emc) if manager.emc_state(*id) == EmcState::Up => Some(emc),
            _ => None,
        });
        let usable: usize =
            up.map(|emc| emc.slices as usize - self.truth.group_emc_slices(emc).quarantined.len()).sum();
        let raised = manager.alarms().iter().any(|alarm| alarm.reason == "CAPACITY_ZERO");
        (raised != (usable == 0))
            .then(|| format!("{usable} slices are usable, CAPACITY_ZERO raised: {raised}"))
    }
}
