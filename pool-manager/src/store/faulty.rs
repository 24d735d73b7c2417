//! Simulated disk that injects faults, for tests. Synced data survives a power failure, and an
//! arbitrary subset of unsynced sectors survives. A failed sync may write some data and marks the
//! other data as clean. A failed write may be partial. A function chooses the outcomes, so that a
//! seed reproduces a failure.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use redb::StorageBackend;

use super::disk::Disk;

/// Size of a sector in bytes. The disk writes each sector atomically.
const SECTOR_BYTES: usize = 512;

/// Injected fault of one disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The power fails before the operation. All operations fail until [`FaultyDisk::power_on`].
    PowerCut,
    /// The operation fails with this error number.
    Errno(i32),
}

/// Simulated disk in memory, shared by all clones.
#[derive(Clone)]
pub struct FaultyDisk(Arc<Mutex<DiskState>>);

struct DiskState {
    choose: Box<dyn FnMut(usize) -> usize + Send>,
    /// Contents that reads return, including unsynced writes.
    cached: Vec<u8>,
    /// Contents that survive a power failure.
    synced: Vec<u8>,
    /// Writes and changes of length since the last sync, in order.
    unsynced: Vec<DiskChange>,
    /// Number of writes, syncs and changes of length so far.
    operations: u64,
    /// Faults to inject, by number of the operation.
    faults: BTreeMap<u64, Fault>,
    /// Number of torn writes: only some of their sectors were written.
    torn: u64,
    /// Number of times that the disk was opened. Operations through earlier handles are rejected.
    opening: u64,
    off: bool,
}

#[derive(Clone)]
enum DiskChange {
    Write { at: usize, bytes: Vec<u8> },
    Length(usize),
}

impl fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let (operations, off) = (state.operations, state.off);
        f.debug_struct("FaultyDisk")
            .field("operations", &operations)
            .field("off", &off)
            .finish_non_exhaustive()
    }
}

impl FaultyDisk {
    /// Creates an empty disk. `choose(n)` selects the outcome of a fault and must return a number
    /// below `n`.
    pub fn new(choose: impl FnMut(usize) -> usize + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            choose: Box::new(choose),
            cached: Vec::new(),
            synced: Vec::new(),
            unsynced: Vec::new(),
            operations: 0,
            faults: BTreeMap::new(),
            torn: 0,
            opening: 0,
            off: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().expect("no thread panics under this lock")
    }

    /// Returns the number of writes, syncs and changes of length so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Returns the number of torn writes so far.
    pub fn torn_writes(&self) -> u64 {
        self.state().torn
    }

    /// Injects a fault into an operation, which is identified by its number, counted from 0.
    pub fn fail_at(&self, operations: u64, fault: Fault) {
        self.state().faults.insert(operations, fault);
    }

    /// Removes all faults that have not occurred yet.
    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// Switches the power off. All operations fail until [`FaultyDisk::power_on`].
    pub fn power_off(&self) {
        self.state().off = true;
    }

    /// Switches the power on again. The disk contains all synced data and a part of the unsynced
    /// data.
    pub fn power_on(&self) {
        let mut state = self.state();
        state.write_back();
        state.cached = state.synced.clone();
        state.off = false;
        state.opening += 1;
    }

    /// Passes the contents of the disk to `damage`. The function can change them.
    pub fn with_bytes<T>(&self, damage: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut state = self.state();
        let result = damage(&mut state.cached);
        state.synced = state.cached.clone();
        state.unsynced.clear();
        result
    }
}

impl DiskState {
    fn begin_operation(&mut self, opening: u64) -> io::Result<()> {
        self.check_power(opening)?;
        self.operations += 1;
        match self.faults.remove(&(self.operations - 1)) {
            None => Ok(()),
            Some(Fault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::PowerCut) => {
                self.off = true;
                self.check_power(opening)
            }
        }
    }

    fn check_power(&self, opening: u64) -> io::Result<()> {
        let is_on = !self.off && self.opening == opening;
        if is_on { Ok(()) } else { Err(io::Error::other("the power is off")) }
    }

    fn change(&mut self, change: DiskChange) {
        apply_disk_change(&mut self.cached, &change);
        self.unsynced.push(change);
    }

    /// Returns the part of a change that is written: everything, nothing, some sectors, or the
    /// first sectors.
    fn tear_change(&mut self, change: DiskChange) -> Vec<DiskChange> {
        match ((self.choose)(4), change) {
            (0, _) => vec![],
            (1, DiskChange::Write { at, bytes }) => self.split_into_sectors(at, &bytes, usize::MAX),
            (2, DiskChange::Write { at, bytes }) => {
                let sectors = (self.choose)(bytes.len().div_ceil(SECTOR_BYTES).max(1));
                self.split_into_sectors(at, &bytes, sectors)
            }
            (_, change) => vec![change],
        }
    }

    /// Returns the first `first` sectors of a write, or a random selection if `first` is
    /// `usize::MAX`.
    fn split_into_sectors(&mut self, at: usize, bytes: &[u8], first: usize) -> Vec<DiskChange> {
        let sectors: Vec<_> = bytes.chunks(SECTOR_BYTES).enumerate().collect();
        let all = sectors.len();
        let written = sectors.into_iter().take(first).filter(|_| first < usize::MAX || (self.choose)(2) == 0);
        let written = written
            .map(|(i, sector)| DiskChange::Write { at: at + i * SECTOR_BYTES, bytes: sector.to_vec() });
        let written: Vec<DiskChange> = written.collect();
        self.torn += u64::from(!written.is_empty() && written.len() < all);
        written
    }

    /// Writes a part of each unsynced change, in order, to the contents that survive a power
    /// failure.
    fn write_back(&mut self) {
        for change in std::mem::take(&mut self.unsynced) {
            for part in self.tear_change(change) {
                apply_disk_change(&mut self.synced, &part);
            }
        }
    }
}

fn apply_disk_change(image: &mut Vec<u8>, change: &DiskChange) {
    match change {
        DiskChange::Length(len) => image.resize(*len, 0),
        DiskChange::Write { at, bytes } => {
            image.resize(image.len().max(at + bytes.len()), 0);
            image[*at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

impl Disk for FaultyDisk {
    type Backend = OpenedDisk;

    fn open(&self) -> io::Result<OpenedDisk> {
        let mut state = self.state();
        state.opening += 1;
        state.check_power(state.opening)?;
        Ok(OpenedDisk { disk: self.clone(), number: state.opening })
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn file_path(&self) -> &Path {
        Path::new("faulty disk")
    }
}

/// Handle of an open disk. Operations fail after the disk was opened again.
#[derive(Debug)]
pub struct OpenedDisk {
    disk: FaultyDisk,
    number: u64,
}

fn to_index(offset: u64) -> usize {
    usize::try_from(offset).expect("the simulated disk fits into memory")
}

impl StorageBackend for OpenedDisk {
    fn len(&self) -> io::Result<u64> {
        let state = self.disk.state();
        state.check_power(self.number)?;
        Ok(state.cached.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.disk.state();
        state.check_power(self.number)?;
        let bytes = state.cached.get(to_index(offset)..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.begin_operation(self.number)?;
        state.change(DiskChange::Length(to_index(len)));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        let synced = state.begin_operation(self.number);
        if synced.is_ok() {
            for change in std::mem::take(&mut state.unsynced) {
                apply_disk_change(&mut state.synced, &change);
            }
        } else if !state.off {
            state.write_back();
        }
        synced
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        let change = DiskChange::Write { at: to_index(offset), bytes: data.to_vec() };
        let wrote = state.begin_operation(self.number);
        let changes = match wrote {
            Ok(()) => vec![change],
            Err(_) if state.off => vec![],
            Err(_) => state.tear_change(change),
        };
        changes.into_iter().for_each(|change| state.change(change));
        wrote
    }
}
