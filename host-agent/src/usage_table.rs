//! Table of the memory that each VM has touched, for metrics and for the manager. VMs are measured
//! periodically, and when their process ends.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use units::{Bytes, ReservationId};

use crate::host::Usage;

/// Touched memory of a VM as reported to the manager: only if both parts are measured, because one
/// part alone would look like the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchedMemory {
    /// Touched part of the local memory.
    pub local: Bytes,
    /// Touched part of the pool memory.
    pub pool: Bytes,
}

/// Table of the latest measurement of each VM.
#[derive(Debug, Default)]
pub struct UsageTable(Mutex<BTreeMap<ReservationId, Entry>>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    usage: Usage,
    /// Whether the measurement was reported in this session.
    is_reported: bool,
}

impl UsageTable {
    /// Locks the table. A poisoned table is consistent, because no call can panic while it is
    /// locked.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the last measurement of a VM, at the end of its process. Memory that cannot be measured any
    /// more keeps its previous value.
    pub fn record_end(&self, id: ReservationId, usage: Usage) {
        let mut table = self.lock();
        let before = table.get(&id).map(|entry| entry.usage).unwrap_or_default();
        let (local, pool) = (usage.local.or(before.local), usage.pool.or(before.pool));
        table.insert(id, Entry { usage: Usage { local, pool, ..usage }, is_reported: false });
    }

    /// Stores the measurements of all running VMs. Reported measurements of other VMs are dropped.
    pub fn record_all(&self, measured: &BTreeMap<ReservationId, Usage>) {
        let mut table = self.lock();
        table.retain(|id, entry| !entry.is_reported || measured.contains_key(id));
        table.extend(measured.iter().map(|(id, usage)| (*id, Entry { usage: *usage, is_reported: false })));
    }

    /// Drops the measurement of a VM whose end has been reported.
    pub fn remove(&self, id: ReservationId) {
        self.lock().remove(&id);
    }

    /// Returns the measurements that were not reported yet, and marks them as reported.
    pub fn take_unreported(&self) -> Vec<(ReservationId, TouchedMemory)> {
        let mut table = self.lock();
        let unreported = table.iter_mut().filter(|(_, entry)| !entry.is_reported);
        unreported
            .filter_map(|(id, entry)| {
                entry.is_reported = true;
                Some((*id, TouchedMemory { local: entry.usage.local?, pool: entry.usage.pool? }))
            })
            .collect()
    }

    /// Marks all measurements as not reported, because a new session begins.
    pub fn mark_unreported(&self) {
        self.lock().values_mut().for_each(|entry| entry.is_reported = false);
    }

    /// Returns the latest measurement of each VM.
    pub fn all(&self) -> BTreeMap<ReservationId, Usage> {
        self.lock().iter().map(|(id, entry)| (*id, entry.usage)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ReservationId = ReservationId(1);

    fn usage(pool: Option<u64>) -> Usage {
        Usage { local: Some(Bytes::mib(1)), pool: pool.map(Bytes::mib), overflow: None }
    }

    fn touched(pool: u64) -> TouchedMemory {
        TouchedMemory { local: Bytes::mib(1), pool: Bytes::mib(pool) }
    }

    #[test]
    fn measurement_is_reported_once_per_session() {
        let table = UsageTable::default();
        table.record_end(ID, usage(Some(2)));
        assert_eq!(table.take_unreported(), [(ID, touched(2))]);
        assert_eq!(table.take_unreported(), []);
        table.record_end(ID, usage(Some(3)));
        table.mark_unreported();
        assert_eq!(table.take_unreported(), [(ID, touched(3))]);
        table.mark_unreported();
        table.remove(ID);
        assert_eq!((table.take_unreported().len(), table.all().len()), (0, 0));
    }

    #[test]
    fn ended_process_keeps_the_memory_that_its_kernel_counted() {
        let table = UsageTable::default();
        table.record_end(ID, usage(Some(2)));
        table.record_end(ID, Usage { local: None, ..usage(Some(3)) });
        assert_eq!(table.take_unreported(), [(ID, touched(3))]);
    }

    #[test]
    fn partly_measured_vm_is_stored_and_not_reported() {
        let table = UsageTable::default();
        table.record_end(ID, usage(None));
        assert_eq!(table.take_unreported(), []);
        assert_eq!(table.all(), [(ID, usage(None))].into());
    }

    #[test]
    fn measurement_of_ended_vm_is_kept_until_it_is_reported() {
        let table = UsageTable::default();
        table.record_end(ID, usage(Some(2)));
        table.record_all(&BTreeMap::new());
        assert_eq!(table.take_unreported(), [(ID, touched(2))]);
        table.record_all(&BTreeMap::new());
        assert_eq!(table.all().len(), 0);
    }
}
