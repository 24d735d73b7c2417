//! Fake host for tests, which stores slices in a table and can inject failures.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding, ObservedVm, SeenDevice},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use units::{Bytes, ReservationId, SLICE};

use super::{Counters, Host, HostError, MemoryForm, MemoryRegion, RegionBacking, Usage, process::FileId};

/// Calls of [`Host`] for which failures can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// [`Host::online`].
    Online,
    /// [`Host::offline`].
    Offline,
    /// [`Host::scrub`].
    Scrub,
    /// [`Host::close_orphaned_slice`].
    CloseOrphan,
    /// [`Host::memory`].
    Memory,
}

/// Fake host without real memory devices.
#[derive(Debug, Default)]
pub struct Fake(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    are_slices_in_use: bool,
    slice_use_checks: usize,
    open: BTreeSet<Holding>,
    dirty: BTreeSet<Holding>,
    failing: BTreeMap<Call, usize>,
    calls: Vec<(Call, Holding)>,
    freed_local_memory: Vec<ReservationId>,
    orphans: BTreeSet<Arc<str>>,
    usage: BTreeMap<ReservationId, Usage>,
}

impl Fake {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next `times` calls of this kind fail.
    pub fn fail_next(&self, call: Call, times: usize) {
        self.table().failing.insert(call, times);
    }

    /// Adds a slice that an earlier agent left open, by its location.
    pub fn add_orphaned_slice(&self, place: &str) {
        self.table().orphans.insert(place.into());
    }

    /// Marks a slice as not zero, so that opening it with a check fails.
    pub fn make_slice_nonzero(&self, holding: Holding) {
        self.table().dirty.insert(holding);
    }

    /// Sets whether a process uses the slices of all VMs.
    pub fn set_slices_in_use(&self, are_in_use: bool) {
        self.table().are_slices_in_use = are_in_use;
    }

    /// Returns how often the use of slices was checked.
    pub fn slice_use_checks(&self) -> usize {
        self.table().slice_use_checks
    }

    /// Sets the memory usage that is reported for a VM.
    pub fn set_usage(&self, reservation: ReservationId, usage: Usage) {
        self.table().usage.insert(reservation, usage);
    }

    /// Returns the open slices.
    pub fn open_slices(&self) -> Vec<Holding> {
        self.table().open.iter().copied().collect()
    }

    /// Returns all successful calls for slices, oldest first.
    pub fn calls(&self) -> Vec<(Call, Holding)> {
        self.table().calls.clone()
    }

    /// Returns the reservations whose local memory was released.
    pub fn freed_local_memory(&self) -> Vec<ReservationId> {
        self.table().freed_local_memory.clone()
    }

    fn call(&self, call: Call, handle: &str) -> Result<MutexGuard<'_, Table>, HostError> {
        let mut table = self.table();
        match table.failing.get_mut(&call).filter(|times| **times > 0) {
            None => Ok(table),
            Some(times) => {
                *times -= 1;
                Err(HostError::io("use", handle, std::io::ErrorKind::Other))
            }
        }
    }
}

impl Host for Fake {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        let mut table = self.call(Call::Online, &handle.place)?;
        if check_zero && table.dirty.contains(&holding) {
            return Err(HostError::NotZero { path: (*handle.place).into(), at: 0 });
        }
        table.open.insert(holding);
        table.calls.push((Call::Online, holding));
        Ok(())
    }

    fn offline(&self, holding: Holding, handle: &Handle, _: bool) -> Result<(), HostError> {
        let mut table = self.call(Call::Offline, &handle.place)?;
        table.open.remove(&holding);
        table.calls.push((Call::Offline, holding));
        Ok(())
    }

    fn check_slices_unused(&self, _: &VmRecord) -> Result<(), HostError> {
        let mut table = self.table();
        table.slice_use_checks += 1;
        if table.are_slices_in_use {
            return Err(HostError::InUse { path: "slice".into(), pids: vec![std::process::id()] });
        }
        Ok(())
    }

    fn usage(&self, reservation: ReservationId, _: &ObservedVm) -> Usage {
        self.table().usage.get(&reservation).copied().unwrap_or_default()
    }

    fn observable_files(&self, _: &[Holding]) -> Result<BTreeSet<FileId>, &'static str> {
        Err("the fake host has no files")
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn devices(&self) -> Vec<SeenDevice> {
        Vec::new()
    }

    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError> {
        Ok(self.table().orphans.iter().cloned().collect())
    }

    fn close_orphaned_slice(&self, place: &str) -> Result<(), HostError> {
        self.call(Call::CloseOrphan, place)?.orphans.remove(place);
        Ok(())
    }

    fn scrub(&self, holding: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        let mut table = self.call(Call::Scrub, &handle.place)?;
        table.dirty.remove(&holding);
        table.calls.push((Call::Scrub, holding));
        Ok(SLICE)
    }

    fn memory(&self, record: &VmRecord, _: MemoryForm) -> Result<Vec<MemoryRegion>, HostError> {
        let table = self.call(Call::Memory, record.vm.as_str())?;
        let part = |slice: Option<Holding>, emc: Arc<str>, bytes: Bytes| {
            let name = record.vm.as_str();
            let memfd =
                memfd_create(name, MemfdFlags::CLOEXEC).map_err(|e| HostError::io("create", name, e))?;
            ftruncate(&memfd, bytes.get()).map_err(|e| HostError::io("set the size of", name, e))?;
            Ok(MemoryRegion {
                slice,
                emc,
                bytes,
                offset: 0,
                spare: Bytes::ZERO,
                backing: RegionBacking::Descriptor(Arc::new(memfd)),
            })
        };
        let local = (record.local > Bytes::ZERO).then(|| part(None, "".into(), record.local));
        let slices = record.slices.iter().map(|(holding, handle)| {
            table.open.get(holding).ok_or(HostError::NotOpen(*holding))?;
            part(Some(*holding), Arc::clone(&handle.emc), SLICE)
        });
        local.into_iter().chain(slices).collect()
    }

    fn free_local_memory(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.table().freed_local_memory.push(reservation);
        Ok(())
    }
}
