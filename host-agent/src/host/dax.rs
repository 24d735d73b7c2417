//! Backend `dax`: each slice is a dax device of CXL memory, which VMMs map. The kernel does not use
//! this memory itself, so access can be revoked while a VM runs. The device of a slice exists while
//! the slice is assigned to this host. The manager coordinates the hosts that share a device.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding, ObservedVm, SeenDevice},
};
use units::{Bytes, ReservationId};

use super::{
    Counters, Host, HostError, MemoryForm, MemoryRegion, Usage, local_memory::LocalMemory,
    open_slices::OpenSlices, process::FileId, ranges::CxlSlices,
};

/// Implementation of [`Host`] for the backend `dax`.
#[derive(Debug)]
pub struct Dax {
    ranges: CxlSlices,
    local: LocalMemory,
    open: OpenSlices,
}

impl Dax {
    /// Creates a host without open slices. If `local_dir` is set, local memory can be passed by
    /// path.
    pub fn new(ranges: CxlSlices, local_dir: Option<PathBuf>) -> Self {
        Self { ranges, local: LocalMemory::new(local_dir), open: OpenSlices::default() }
    }
}

impl Host for Dax {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        if self.open.has(holding) {
            return Ok(());
        }
        let place = &handle.place;
        let (file, path) =
            if check_zero { self.ranges.open_verified_slice(place)? } else { self.ranges.open(place)? };
        self.open.insert(holding, file, path);
        Ok(())
    }

    fn check_slices_unused(&self, record: &VmRecord) -> Result<(), HostError> {
        record.slices.values().try_for_each(|handle| self.ranges.check_slice_unused(&handle.place))
    }

    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError> {
        if verify {
            self.ranges.check_slice_unused(&handle.place)?;
        }
        self.ranges.close(&handle.place)?;
        self.open.remove(holding);
        Ok(())
    }

    fn devices(&self) -> Vec<SeenDevice> {
        self.ranges.devices()
    }

    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError> {
        self.ranges.present_slices()
    }

    fn close_orphaned_slice(&self, place: &str) -> Result<(), HostError> {
        self.ranges.check_slice_unused(place)?;
        self.ranges.close(place)
    }

    fn scrub(&self, _: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        self.ranges.scrub(&handle.place)
    }

    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<Vec<MemoryRegion>, HostError> {
        let local = self.local.region(record, form)?;
        local.into_iter().map(Ok).chain(self.open.regions(record, form)).collect()
    }

    fn free_local_memory(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.local.free(reservation)
    }

    fn usage(&self, reservation: ReservationId, vm: &ObservedVm) -> Usage {
        let pool = self.open.allocated_bytes(&vm.slices);
        let local = self.local.allocated_bytes(reservation, vm, self.open.shared_bytes(&vm.slices));
        Usage { local, pool, overflow: None }
    }

    fn observable_files(&self, _: &[Holding]) -> Result<BTreeSet<FileId>, &'static str> {
        Err("slices of the backend dax are device memory")
    }

    fn counters(&self) -> Counters {
        Counters {
            scrubbed: self.ranges.scrubbed_bytes(),
            slices_changing: self.ranges.changing_slice_count(),
            ..Counters::default()
        }
    }
}

#[cfg(test)]
mod tests;
