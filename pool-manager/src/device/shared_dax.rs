//! EMC that several hosts see on their own buses as one memory range, without a fence. The manager
//! cannot access it: this driver only records durably the owner of each slice. A host with a grant
//! can reach the slice until it releases it or is powered off; the caller ensures that before a
//! slice is revoked or a host fenced.
//!
//! The record is a small database in the EMC's folder: for each slice its highest epoch, and the
//! host that owns it under that epoch. Lower epochs are rejected for ever.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use units::{Epoch, HostId};

use super::{Contents, Device, DeviceError, Grant, Handle};
use crate::store::{Store, StoreError, Table, Write, disk::Directory, redb::RedbStore};

/// File name of the record in the EMC's folder.
pub(super) const FILE: &str = "grants.redb";
/// Key of the device's serial number.
const SERIAL: &[u8] = b"serial";

/// Driver of one such EMC.
pub struct SharedDax {
    path: PathBuf,
    serial: String,
    cells: Vec<Cell>,
    /// Cells that differ from the disk.
    changed: BTreeSet<u32>,
    store: Box<dyn Store>,
}

/// Record of a slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cell {
    /// Highest epoch; 0 for none.
    highest: Epoch,
    /// Owner under that epoch; without one, the epoch has ended.
    host: Option<HostId>,
}

impl std::fmt::Debug for SharedDax {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDax")
            .field("path", &self.path)
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

impl SharedDax {
    /// Opens the record in a folder, or creates it, for a device with this serial number and number
    /// of slices.
    ///
    /// # Errors
    /// [`DeviceError::InUse`], [`DeviceError::Unfit`] if the record is of another device or has
    /// more slices, or [`DeviceError::Record`].
    pub fn open(path: &Path, slices: u32, serial: &str) -> Result<Self, DeviceError> {
        let store = Directory::take_for(path, FILE).and_then(RedbStore::open);
        Self::on(Box::new(store.map_err(record_error(path))?), path, slices, serial)
    }

    /// The same on any store.
    fn on(store: Box<dyn Store>, path: &Path, slices: u32, serial: &str) -> Result<Self, DeviceError> {
        let (path, serial) = (path.to_owned(), serial.to_owned());
        let cells = vec![Cell::default(); slices as usize];
        let mut device = Self { path, serial, cells, changed: BTreeSet::new(), store };
        device.claim()?;
        device.load()?;
        Ok(device)
    }

    /// A record belongs to one device: the slices of another one are different slices.
    fn claim(&mut self) -> Result<(), DeviceError> {
        let mut recorded = None;
        let read = self.store.scan(Table::Meta, &mut |key, value| {
            if key == SERIAL {
                recorded = Some(String::from_utf8_lossy(value).into_owned());
            }
        });
        read.map_err(record_error(&self.path))?;
        match recorded {
            Some(recorded) if recorded == self.serial => Ok(()),
            Some(other) => {
                Err(self.unfit(format!("its record is of serial {other}: must be {}", self.serial)))
            }
            None => {
                let (key, value) = (SERIAL.to_vec(), self.serial.clone().into_bytes());
                let wrote = self.store.commit(&[Write::Put { table: Table::Meta, key, value }]);
                wrote.map_err(record_error(&self.path))
            }
        }
    }

    fn load(&mut self) -> Result<(), DeviceError> {
        let (cells, mut strange) = (&mut self.cells, None);
        let read = self.store.scan(Table::Slices, &mut |key, value| match entry(key, value) {
            Some((slice, cell)) if slice < cells.len() => cells[slice] = cell,
            Some((slice, _)) => {
                strange = Some(format!("its record has slice {slice}: must be below {}", cells.len()));
            }
            None => strange = Some(format!("entry {key:02x?} of its record is of another version")),
        });
        read.map_err(record_error(&self.path))?;
        strange.map_or(Ok(()), |what| Err(self.unfit(what)))
    }

    fn unfit(&self, what: String) -> DeviceError {
        DeviceError::Unfit { path: self.path.clone(), what }
    }

    fn cell(&self, slice: u32) -> Result<Cell, DeviceError> {
        let slices = u32::try_from(self.cells.len()).expect("made from a u32");
        self.cells.get(slice as usize).copied().ok_or(DeviceError::NoSuchSlice { slice, slices })
    }

    fn note(&mut self, slice: u32, cell: Cell) {
        if self.cells[slice as usize] != cell {
            self.cells[slice as usize] = cell;
            self.changed.insert(slice);
        }
    }

    fn handle(&self, slice: u32) -> Handle {
        Arc::from(format!("cxl:{}:{slice}", self.serial))
    }

    fn grants(&self) -> impl Iterator<Item = Grant> {
        (0..).zip(&self.cells).filter_map(|(slice, Cell { highest, host })| {
            Some(Grant { slice, epoch: *highest, host: (*host)?, handle: self.handle(slice) })
        })
    }
}

impl Device for SharedDax {
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError> {
        let cell = self.cell(slice)?;
        match cell.host {
            Some(held) if (cell.highest, held) != (epoch, host) => {
                Err(DeviceError::Held { slice, epoch: cell.highest, host: held })
            }
            None if epoch <= cell.highest => {
                Err(DeviceError::StaleEpoch { slice, epoch, highest: cell.highest })
            }
            _ => {
                self.note(slice, Cell { highest: epoch, host: Some(host) });
                Ok(self.handle(slice))
            }
        }
    }

    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError> {
        let cell = self.cell(slice)?;
        if epoch >= cell.highest {
            self.note(slice, Cell { highest: epoch, host: None });
        }
        Ok(())
    }

    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError> {
        let theirs: Vec<Grant> = self.grants().filter(|grant| grant.host == host).collect();
        for grant in &theirs {
            self.note(grant.slice, Cell { highest: grant.epoch, host: None });
        }
        Ok(theirs)
    }

    fn contents(&mut self) -> Result<Contents, DeviceError> {
        let highest = self.cells.iter().map(|cell| cell.highest).collect();
        let places = (0..).zip(&self.cells).map(|(slice, _)| self.handle(slice)).collect();
        Ok(Contents { grants: self.grants().collect(), highest, places })
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        let changed = std::mem::take(&mut self.changed);
        if changed.is_empty() {
            return Ok(());
        }
        let batch: Vec<Write> =
            changed.into_iter().map(|slice| put(slice, self.cells[slice as usize])).collect();
        self.store.commit(&batch).map_err(record_error(&self.path))
    }
}

fn put(slice: u32, cell: Cell) -> Write {
    let value = postcard::to_stdvec(&cell).expect("a cell has a known length");
    Write::Put { table: Table::Slices, key: slice.to_be_bytes().to_vec(), value }
}

fn entry(key: &[u8], value: &[u8]) -> Option<(usize, Cell)> {
    let slice = u32::from_be_bytes(key.try_into().ok()?);
    Some((slice as usize, postcard::from_bytes(value).ok()?))
}

fn record_error(path: &Path) -> impl FnOnce(StoreError) -> DeviceError {
    let path = path.to_owned();
    move |cause| match cause {
        StoreError::InUse { .. } => DeviceError::InUse { path },
        StoreError::Corrupt { what, .. } => {
            DeviceError::Unfit { path, what: format!("its record is corrupt: {what}") }
        }
        cause => DeviceError::Record { path, cause },
    }
}

#[cfg(test)]
mod tests;
