//! Driver for CXL memory that several hosts share and that cannot revoke access. The manager cannot
//! access the memory itself. This driver only records durably which host owns each slice. A host
//! with a grant can access the slice until the host releases it or is powered off. Callers must
//! ensure that the host has released the slice or is powered off before they revoke the slice or
//! fence the host.
//!
//! The record is a small database in the EMC's directory, or in etcd with the ledger. For each slice it contains the highest
//! epoch, and the host that owns the slice with this epoch. Lower epochs are always rejected.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use units::{Epoch, HostId, Name};

use super::{Contents, Device, DeviceError, DeviceLeader, Grant, Handle};
use crate::store::{Store, StoreError, Table, Write, disk::Directory, etcd::EtcdStore, redb::RedbStore};

/// File name of the record in the EMC's directory.
pub(super) const GRANTS_FILE: &str = "grants.redb";
/// Key of the device's serial number in the record.
const SERIAL_KEY: &[u8] = b"serial";

/// Driver of one EMC that hosts share.
pub struct SharedDax {
    path: PathBuf,
    serial: String,
    slices: Vec<SliceRecord>,
    /// Slices with changes that the next commit writes to disk.
    changed: BTreeSet<u32>,
    store: Box<dyn Store>,
}

/// Highest epoch of a slice, and its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SliceRecord {
    /// Highest epoch; 0 if the slice has never been granted.
    highest: Epoch,
    /// Owner with this epoch; `None` if the epoch was revoked.
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
    /// Opens the record of a device in a directory, or creates an empty record.
    ///
    /// # Errors
    /// [`DeviceError::InUse`], [`DeviceError::Mismatch`] if the record belongs to another serial
    /// number or has more slices, or [`DeviceError::Record`].
    pub fn open(path: &Path, slices: u32, serial: &str) -> Result<Self, DeviceError> {
        let store = Directory::lock_with_file(path, GRANTS_FILE).and_then(RedbStore::open);
        Self::open_in_store(Box::new(store.map_err(record_error(path))?), path, slices, serial)
    }

    /// Opens the record of the EMC with this name in etcd, as the elected manager.
    ///
    /// # Errors
    /// [`DeviceError::Mismatch`] if the record belongs to another serial number or has more slices,
    /// or [`DeviceError::Record`].
    pub fn open_in_etcd(
        leader: &DeviceLeader,
        emc: &Name,
        slices: u32,
        serial: &str,
    ) -> Result<Self, DeviceError> {
        let cluster = leader.cluster.for_emc(emc);
        let location = cluster.location();
        let store = EtcdStore::open(cluster, &leader.leadership).map_err(record_error(&location))?;
        Self::open_in_store(Box::new(store), &location, slices, serial)
    }

    /// Opens the record in `store`. Tests pass other stores.
    fn open_in_store(
        store: Box<dyn Store>,
        path: &Path,
        slices: u32,
        serial: &str,
    ) -> Result<Self, DeviceError> {
        let (path, serial) = (path.to_owned(), serial.to_owned());
        let slices = vec![SliceRecord::default(); slices as usize];
        let mut device = Self { path, serial, slices, changed: BTreeSet::new(), store };
        device.claim_record()?;
        device.load()?;
        Ok(device)
    }

    /// Writes the serial number to a new record, and rejects the record of another device.
    fn claim_record(&mut self) -> Result<(), DeviceError> {
        let mut recorded = None;
        let scanned = self.store.scan(Table::Meta, &mut |key, value| {
            if key == SERIAL_KEY {
                recorded = Some(String::from_utf8_lossy(value).into_owned());
            }
        });
        scanned.map_err(record_error(&self.path))?;
        match recorded {
            Some(recorded) if recorded == self.serial => Ok(()),
            Some(other) => Err(self.mismatch_error(format!(
                "its record belongs to serial number {other}: must be {}",
                self.serial
            ))),
            None => {
                let (key, value) = (SERIAL_KEY.to_vec(), self.serial.clone().into_bytes());
                let written = self.store.commit(&[Write::Put { table: Table::Meta, key, value }]);
                written.map_err(record_error(&self.path))
            }
        }
    }

    fn load(&mut self) -> Result<(), DeviceError> {
        let (slices, mut unexpected) = (&mut self.slices, None);
        let scanned = self.store.scan(Table::Slices, &mut |key, value| match decode_entry(key, value) {
            Some((slice, slice_record)) if slice < slices.len() => slices[slice] = slice_record,
            Some((slice, _)) => {
                unexpected = Some(format!("its record has slice {slice}: must be below {}", slices.len()));
            }
            None => unexpected = Some(format!("entry {key:02x?} of its record has an unknown format")),
        });
        scanned.map_err(record_error(&self.path))?;
        unexpected.map_or(Ok(()), |what| Err(self.mismatch_error(what)))
    }

    fn mismatch_error(&self, what: String) -> DeviceError {
        DeviceError::Mismatch { path: self.path.clone(), what }
    }

    fn slice_record(&self, slice: u32) -> Result<SliceRecord, DeviceError> {
        let slices = u32::try_from(self.slices.len()).expect("the number of slices fits into a u32");
        self.slices.get(slice as usize).copied().ok_or(DeviceError::NoSuchSlice { slice, slices })
    }

    fn set_slice_record(&mut self, slice: u32, slice_record: SliceRecord) {
        if self.slices[slice as usize] != slice_record {
            self.slices[slice as usize] = slice_record;
            self.changed.insert(slice);
        }
    }

    fn handle_of(&self, slice: u32) -> Handle {
        Arc::from(format!("cxl:{}:{slice}", self.serial))
    }

    fn grants(&self) -> impl Iterator<Item = Grant> {
        (0..).zip(&self.slices).filter_map(|(slice, SliceRecord { highest, host })| {
            Some(Grant { slice, epoch: *highest, host: (*host)?, handle: self.handle_of(slice) })
        })
    }
}

impl Device for SharedDax {
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError> {
        let slice_record = self.slice_record(slice)?;
        match slice_record.host {
            Some(owner) if (slice_record.highest, owner) != (epoch, host) => {
                Err(DeviceError::Held { slice, epoch: slice_record.highest, host: owner })
            }
            None if epoch <= slice_record.highest => {
                Err(DeviceError::StaleEpoch { slice, epoch, highest: slice_record.highest })
            }
            _ => {
                self.set_slice_record(slice, SliceRecord { highest: epoch, host: Some(host) });
                Ok(self.handle_of(slice))
            }
        }
    }

    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError> {
        let slice_record = self.slice_record(slice)?;
        if epoch >= slice_record.highest {
            self.set_slice_record(slice, SliceRecord { highest: epoch, host: None });
        }
        Ok(())
    }

    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError> {
        let grants: Vec<Grant> = self.grants().filter(|grant| grant.host == host).collect();
        for grant in &grants {
            self.set_slice_record(grant.slice, SliceRecord { highest: grant.epoch, host: None });
        }
        Ok(grants)
    }

    fn contents(&mut self) -> Result<Contents, DeviceError> {
        let highest = self.slices.iter().map(|slice_record| slice_record.highest).collect();
        let handles = (0..).zip(&self.slices).map(|(slice, _)| self.handle_of(slice)).collect();
        Ok(Contents { grants: self.grants().collect(), highest, handles })
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        let changed = std::mem::take(&mut self.changed);
        if changed.is_empty() {
            return Ok(());
        }
        let batch: Vec<Write> =
            changed.into_iter().map(|slice| encode_entry(slice, self.slices[slice as usize])).collect();
        self.store.commit(&batch).map_err(record_error(&self.path))
    }
}

fn encode_entry(slice: u32, slice_record: SliceRecord) -> Write {
    let value =
        postcard::to_stdvec(&slice_record).expect("postcard fails only for sequences of unknown length");
    Write::Put { table: Table::Slices, key: slice.to_be_bytes().to_vec(), value }
}

fn decode_entry(key: &[u8], value: &[u8]) -> Option<(usize, SliceRecord)> {
    let slice = u32::from_be_bytes(key.try_into().ok()?);
    Some((slice as usize, postcard::from_bytes(value).ok()?))
}

fn record_error(path: &Path) -> impl FnOnce(StoreError) -> DeviceError {
    let path = path.to_owned();
    move |cause| match cause {
        StoreError::InUse { .. } => DeviceError::InUse { path },
        StoreError::Corrupt { what, .. } => {
            DeviceError::Mismatch { path, what: format!("its record is corrupt: {what}") }
        }
        cause => DeviceError::Record { path, cause },
    }
}

#[cfg(test)]
mod tests;
