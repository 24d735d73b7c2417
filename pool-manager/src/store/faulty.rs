//! Disk for tests that tears and loses writes: synced data is kept, of unsynced data a power
//! failure keeps any part, by sectors; a failed sync may have written some of it and marks the rest
//! clean; a failed write may be partial. A function of numbers chooses, so that a seed reproduces a
//! failure.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use redb::StorageBackend;

use super::disk::Disk;

/// A sector is written whole or not at all.
const SECTOR_BYTES: usize = 512;

/// Fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The power fails before the operation; nothing works until [`FaultyDisk::power_on`].
    PowerCut,
    /// The operation fails so, with this `errno`.
    Errno(i32),
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone)]
pub struct FaultyDisk(Arc<Mutex<State>>);

struct State {
    choose: Box<dyn FnMut(usize) -> usize + Send>,
    /// Contents visible to reads.
    seen: Vec<u8>,
    /// Contents of the medium.
    synced: Vec<u8>,
    /// Operations since the last sync, in order.
    unsynced: Vec<Change>,
    /// Writes, syncs and changes of length so far.
    operations: u64,
    faults: BTreeMap<u64, Fault>,
    /// Writes of which the medium got some sectors and not the others.
    torn: u64,
    /// Counts openings; writes through earlier ones are rejected.
    opening: u64,
    off: bool,
}

#[derive(Clone)]
enum Change {
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
    /// An empty disk. `choose(n)` gives a number below `n`.
    pub fn new(choose: impl FnMut(usize) -> usize + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(State {
            choose: Box::new(choose),
            seen: Vec::new(),
            synced: Vec::new(),
            unsynced: Vec::new(),
            operations: 0,
            faults: BTreeMap::new(),
            torn: 0,
            opening: 0,
            off: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nothing panics with the disk in its hands")
    }

    /// How many writes, syncs and changes of length there have been.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// How many writes were torn so far: old and new sectors are mixed, or only a prefix is new.
    pub fn torn_writes(&self) -> u64 {
        self.state().torn
    }

    /// Lets the operation after so many go wrong.
    pub fn fail_at(&self, operations: u64, fault: Fault) {
        self.state().faults.insert(operations, fault);
    }

    /// Takes back every fault that has not happened.
    pub fn fail_no_more(&self) {
        self.state().faults.clear();
    }

    /// Cuts the power now, if it is not off already.
    pub fn power_off(&self) {
        self.state().off = true;
    }

    /// Restarts the machine with the contents of the medium.
    pub fn power_on(&self) {
        let mut state = self.state();
        state.write_back();
        state.seen = state.synced.clone();
        state.off = false;
        state.opening += 1;
    }

    /// Returns the contents of the disk, to be damaged.
    pub fn with_bytes<T>(&self, damage: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut state = self.state();
        let done = damage(&mut state.seen);
        state.synced = state.seen.clone();
        state.unsynced.clear();
        done
    }
}

impl State {
    fn operate(&mut self, opening: u64) -> io::Result<()> {
        self.powered(opening)?;
        self.operations += 1;
        match self.faults.remove(&(self.operations - 1)) {
            None => Ok(()),
            Some(Fault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::PowerCut) => {
                self.off = true;
                self.powered(opening)
            }
        }
    }

    fn powered(&self, opening: u64) -> io::Result<()> {
        let on = !self.off && self.opening == opening;
        if on { Ok(()) } else { Err(io::Error::other("the power is off")) }
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.seen, &change);
        self.unsynced.push(change);
    }

    /// Whole, not at all, some of its sectors, or the first of them.
    fn torn(&mut self, change: Change) -> Vec<Change> {
        match ((self.choose)(4), change) {
            (0, _) => vec![],
            (1, Change::Write { at, bytes }) => self.sectors_of(at, &bytes, usize::MAX),
            (2, Change::Write { at, bytes }) => {
                let sectors = (self.choose)(bytes.len().div_ceil(SECTOR_BYTES).max(1));
                self.sectors_of(at, &bytes, sectors)
            }
            (_, change) => vec![change],
        }
    }

    /// The first so many sectors of a write; of an unlimited number, any.
    fn sectors_of(&mut self, at: usize, bytes: &[u8], first: usize) -> Vec<Change> {
        let sectors: Vec<_> = bytes.chunks(SECTOR_BYTES).enumerate().collect();
        let all = sectors.len();
        let kept = sectors.into_iter().take(first).filter(|_| first < usize::MAX || (self.choose)(2) == 0);
        let kept =
            kept.map(|(i, sector)| Change::Write { at: at + i * SECTOR_BYTES, bytes: sector.to_vec() });
        let kept: Vec<Change> = kept.collect();
        self.torn += u64::from(!kept.is_empty() && kept.len() < all);
        kept
    }

    /// Writes a part of the unsynced operations to the medium.
    fn write_back(&mut self) {
        for change in std::mem::take(&mut self.unsynced) {
            for part in self.torn(change) {
                apply(&mut self.synced, &part);
            }
        }
    }
}

fn apply(image: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Length(len) => image.resize(*len, 0),
        Change::Write { at, bytes } => {
            image.resize(image.len().max(at + bytes.len()), 0);
            image[*at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

impl Disk for FaultyDisk {
    type Backend = Opening;

    fn open(&self) -> io::Result<Opening> {
        let mut state = self.state();
        state.opening += 1;
        state.powered(state.opening)?;
        Ok(Opening { disk: self.clone(), number: state.opening })
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn place(&self) -> &Path {
        Path::new("faulty disk")
    }
}

/// One opening of the disk.
#[derive(Debug)]
pub struct Opening {
    disk: FaultyDisk,
    number: u64,
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("the disk is in memory")
}

impl StorageBackend for Opening {
    fn len(&self) -> io::Result<u64> {
        let state = self.disk.state();
        state.powered(self.number)?;
        Ok(state.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.disk.state();
        state.powered(self.number)?;
        let bytes = state.seen.get(index(offset)..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operate(self.number)?;
        state.change(Change::Length(index(len)));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        let synced = state.operate(self.number);
        if synced.is_ok() {
            for change in std::mem::take(&mut state.unsynced) {
                apply(&mut state.synced, &change);
            }
        } else if !state.off {
            state.write_back();
        }
        synced
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        let change = Change::Write { at: index(offset), bytes: data.to_vec() };
        let wrote = state.operate(self.number);
        let happened = match wrote {
            Ok(()) => vec![change],
            Err(_) if state.off => vec![],
            Err(_) => state.torn(change),
        };
        happened.into_iter().for_each(|change| state.change(change));
        wrote
    }
}
