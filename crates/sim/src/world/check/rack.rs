//! Checks of changes of rack.toml. The records on disk must correspond to one accepted file, and a
//! change must not remove a resource in use.

use std::collections::BTreeMap;

use pool::{
    ledger::{EmcSpec, HostSpec, RackSpec},
    record::{Emc, Host, Key, Meta, Record},
    slice::{Scrub, Slot, State},
};
use units::{EmcId, HostId, Name, SliceId};

use super::{GroundTruth, counts::holder, has_ended};
use crate::world::World;

/// EMCs and hosts of a rack, by name.
pub(in crate::world) type ByName = (BTreeMap<Name, EmcSpec>, BTreeMap<Name, HostSpec>);

fn group_by_name(rack: &RackSpec) -> ByName {
    let emcs = rack.emcs.iter().map(|emc| (emc.name.clone(), emc.clone()));
    let hosts = rack.hosts.iter().map(|host| (host.name.clone(), host.clone()));
    (emcs.collect(), hosts.collect())
}

fn is_rack_record(key: Key) -> bool {
    matches!(key, Key::Emc(_) | Key::Host(_))
}

impl GroundTruth {
    pub(in crate::world) fn rack(&self) -> ByName {
        let spec = |emc: &Emc| EmcSpec {
            name: emc.name.clone(),
            slices: emc.slices,
            driver: emc.driver.clone(),
            path: emc.path.clone(),
            serial: emc.serial.clone(),
        };
        let emc_name = |emc: &EmcId| Some(self.emc(*emc)?.name.clone());
        let mut rack = ByName::default();
        for record in self.records.values() {
            match record {
                Record::Emc(_, emc) => drop(rack.0.insert(emc.name.clone(), spec(emc))),
                Record::Host(_, host) => {
                    let Host { name, cores, local, .. } = host.clone();
                    let emcs = host.emcs.iter().filter_map(emc_name).collect();
                    rack.1.insert(name.clone(), HostSpec { name, cores, local, emcs });
                }
                _ => {}
            }
        }
        rack
    }

    /// Returns all slices after `batch` is applied. A slice revoked after a complete scrub counts
    /// as free, because one batch may free and remove the slice.
    fn slots_after(&self, batch: &[Record]) -> BTreeMap<SliceId, Slot> {
        let slots = self.records.values().chain(batch).filter_map(|record| match record {
            Record::Slice(slice, slot) => Some((*slice, *slot)),
            _ => None,
        });
        let freed = |(slice, slot): (SliceId, Slot)| {
            let scrubbed = matches!(slot.state, State::Scrubbing(Scrub::Revoking { verified: true, .. }));
            let state = if scrubbed && self.handles.is_revoked(slice) { State::Free } else { slot.state };
            (slice, Slot { state, ..slot })
        };
        slots.map(freed).collect()
    }

    /// Returns a description of the first slice or reservation that a rack change removes although it
    /// is in use, if any.
    fn describe_removed_in_use(&self, record: &Record, batch: &[Record]) -> Option<String> {
        let slots = self.slots_after(batch);
        let mut held = slots.iter().filter_map(|(slice, slot)| Some((*slice, holder(slot)?)));
        match record {
            Record::Host(id, new) => {
                let is_detached = |emc: EmcId| {
                    self.host(*id).is_some_and(|old| old.emcs.contains(&emc)) && !new.emcs.contains(&emc)
                };
                let slice =
                    held.find(|(slice, host)| host == id && self.emc_of(*slice).is_some_and(is_detached));
                slice.map(|(slice, _)| {
                    format!("{id} is detached from the EMC of slice {slice}, which it holds")
                })
            }
            Record::Deleted(Key::Host(id)) => {
                let active = self.reservations().find(|(_, r)| r.host == *id && !has_ended(r));
                let ended = |gone: &units::ReservationId| {
                    batch.iter().any(
                        |record| matches!(record, Record::Reservation(id, r) if id == gone && has_ended(r)),
                    )
                };
                let active = active.map(|(id, _)| id).filter(|active| !ended(active));
                let slice = held.find(|(_, host)| host == id).map(|(slice, _)| slice);
                (active.is_some() || slice.is_some()).then(|| {
                    format!("{id} is removed while it has reservation {active:?} and slice {slice:?}")
                })
            }
            Record::Deleted(Key::Emc(id)) => {
                let used = slots
                    .iter()
                    .find(|(slice, slot)| self.emc_of(**slice) == Some(*id) && slot.state != State::Free);
                used.map(|(slice, slot)| format!("{id} is removed while slice {slice} is in use: {slot:?}"))
            }
            _ => None,
        }
    }

    fn meta(&self) -> Option<&Meta> {
        match self.records.get(&Key::Meta) {
            Some(Record::Meta(meta)) => Some(meta),
            _ => None,
        }
    }

    /// Returns the generation of the store, which increases with each restore.
    pub(super) fn generation(&self) -> Option<u64> {
        self.meta().map(|meta| meta.generation)
    }

    /// Returns the id that the next added host receives.
    pub(in crate::world) fn next_host(&self) -> Option<HostId> {
        self.meta().map(|meta| meta.next_host)
    }

    /// Returns all hosts in the records on disk.
    pub(in crate::world) fn hosts(&self) -> impl Iterator<Item = (HostId, &Host)> {
        self.records.values().filter_map(|record| match record {
            Record::Host(id, host) => Some((*id, host)),
            _ => None,
        })
    }

    /// Returns the number that the next added EMC receives.
    pub(in crate::world) fn next_emc(&self) -> Option<usize> {
        self.meta().map(|meta| meta.next_emc.0 as usize)
    }

    /// Returns whether the records on disk contain a host.
    pub(in crate::world) fn has_host(&self, host: HostId) -> bool {
        self.records.contains_key(&Key::Host(host))
    }
}

impl World {
    /// Checks that a record of a batch does not remove a resource in use.
    pub(super) fn check_rack_change(&mut self, record: &Record, batch: &[Record]) {
        if is_rack_record(record.key())
            && let Some(description) = self.truth.describe_removed_in_use(record, batch)
        {
            self.report_violation("a change of rack.toml removes nothing in use", description);
        }
    }

    /// Applies the changes of hosts and EMCs in a durable batch.
    pub(super) fn apply_rack_changes(&mut self, batch: &[Record]) {
        if batch.iter().any(|record| is_rack_record(record.key())) {
            self.apply_rack();
        }
    }

    /// Checks that the records on disk match the accepted rack.toml, or a rack.toml whose reply is
    /// outstanding.
    pub(in crate::world) fn check_rack(&mut self) {
        let disk = self.truth.rack();
        if !self.rack.possible_rack_specs().any(|rack| group_by_name(rack) == disk) {
            let description = format!(
                "{disk:?} on disk, {:?} requested",
                self.rack.possible_rack_specs().collect::<Vec<_>>()
            );
            self.report_violation("a change of rack.toml is accepted or refused as a whole", description);
        }
    }
}
