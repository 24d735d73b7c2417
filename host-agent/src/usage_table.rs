//! Table of the memory touched by each VM, for metrics and for the manager. It is filled every ten
//! seconds, and at the end of a VM's process.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use units::{Bytes, ReservationId};

use crate::host::Usage;

/// Touched memory of a VM for the manager: none unless both parts are measured, because a partial
/// sum is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchedMemory {
    /// Bytes of local memory.
    pub local: Bytes,
    /// Bytes of pool memory.
    pub pool: Bytes,
}

/// The latest measurement of each VM.
#[derive(Debug, Default)]
pub struct UsageTable(Mutex<BTreeMap<ReservationId, Entry>>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    usage: Usage,
    is_reported: bool,
}

impl UsageTable {
    /// A poisoned table is consistent: no call leaves it half written.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReservationId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the measurement of one VM.
    pub fn record(&self, id: ReservationId, usage: Usage) {
        self.lock().insert(id, Entry { usage, is_reported: false });
    }

    /// Stores the measurements of all running VMs. Others are dropped once they have been reported.
    pub fn record_all(&self, measured: &BTreeMap<ReservationId, Usage>) {
        let mut table = self.lock();
        table.retain(|id, entry| !entry.is_reported || measured.contains_key(id));
        table.extend(measured.iter().map(|(id, usage)| (*id, Entry { usage: *usage, is_reported: false })));
    }

    /// Drops a VM whose end has been reported.
    pub fn remove(&self, id: ReservationId) {
        self.lock().remove(&id);
    }

    /// Returns the measurements that were not sent yet, and marks them as sent.
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

    /// Marks everything as not reported: another session begins.
    pub fn mark_unreported(&self) {
        self.lock().values_mut().for_each(|entry| entry.is_reported = false);
    }

    /// Returns the latest measurements.
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
        table.record(ID, usage(Some(2)));
        assert_eq!(table.take_unreported(), [(ID, touched(2))]);
        assert_eq!(table.take_unreported(), []);
        table.record(ID, usage(Some(3)));
        table.mark_unreported();
        assert_eq!(table.take_unreported(), [(ID, touched(3))]);
        table.mark_unreported();
        table.remove(ID);
        assert_eq!((table.take_unreported().len(), table.all().len()), (0, 0));
    }

    #[test]
    fn partly_measured_vm_is_stored_and_not_reported() {
        let table = UsageTable::default();
        table.record(ID, usage(None));
        assert_eq!(table.take_unreported(), []);
        assert_eq!(table.all(), [(ID, usage(None))].into());
    }

    #[test]
    fn last_measurement_of_ended_vm_stays_until_reported() {
        let table = UsageTable::default();
        table.record(ID, usage(Some(2)));
        table.record_all(&BTreeMap::new());
        assert_eq!(table.take_unreported(), [(ID, touched(2))]);
        table.record_all(&BTreeMap::new());
        assert_eq!(table.all().len(), 0);
    }
}
