//! Records of the ledger as entries of the store: one table per kind, keys by number, values encoded with
//! postcard. A kind of record only ever gains variants and fields at the end of a new format version.

use pool::record::{Key, Meta, Record};

use crate::{
    forecasts::rows,
    shares,
    store::{Scan, StoreError, Table, Write, meta, number},
};

/// Under which key of [`Table::Meta`] the ledger keeps its own.
const LEDGER: &[u8] = b"ledger";

/// Most records fit into so many bytes.
const RECORD_BYTES_USUAL: usize = 256;

/// Everything a store has.
#[derive(Debug)]
pub struct Loaded {
    /// What concerns the whole ledger; `None` in a store that was never used.
    pub meta: Option<Meta>,
    /// The rest, but for decisions.
    pub records: Vec<Record>,
    /// The store was restored from a backup and has not been used since.
    pub restored: bool,
}

/// A record that cannot be read: its table, its key, and what is wrong.
#[derive(Debug, thiserror::Error)]
#[error("entry {key:02x?} of table {table} is not a record of this version")]
pub struct Unreadable {
    table: Table,
    key: Vec<u8>,
    #[source]
    cause: postcard::Error,
}

/// Why a store could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The store itself.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What is in it.
    #[error("the store is corrupt: restore it with `pool-manager restore` from a backup")]
    Record(#[from] Unreadable),
}

/// A record as a change of the store.
pub fn write(record: &Record) -> Write {
    let (table, key) = place(record.key());
    match record {
        Record::Gone(_) => Write::Delete { table, key },
        other => Write::Put { table, key, value: encode(other) },
    }
}

/// Forgets that the store was restored: goes with the first batch after a restore.
pub fn restored_noted() -> [Write; 2] {
    [meta::RESTORED, meta::GENERATION].map(|key| Write::Delete { table: Table::Meta, key: key.to_vec() })
}

fn encode(record: &Record) -> Vec<u8> {
    let empty = Vec::with_capacity(RECORD_BYTES_USUAL);
    postcard::to_extend(record, empty).expect("a record has a known length everywhere")
}

fn place(key: Key) -> (Table, Vec<u8>) {
    match key {
        Key::Meta => (Table::Meta, LEDGER.to_vec()),
        Key::Emc(id) => (Table::Emcs, id.0.to_be_bytes().to_vec()),
        Key::Host(id) => (Table::Hosts, id.0.to_be_bytes().to_vec()),
        Key::Slice(id) => (Table::Slices, id.0.to_be_bytes().to_vec()),
        Key::Reservation(id) => (Table::Reservations, (!id.0).to_be_bytes().to_vec()), // the newest first
        Key::Migration(id) => (Table::Migrations, id.0.to_be_bytes().to_vec()),
        Key::Decision(seq) => (Table::Audit, seq.to_be_bytes().to_vec()),
    }
}

/// Reads one entry.
///
/// # Errors
/// It is not a record of this version.
pub fn read(table: Table, key: &[u8], value: &[u8]) -> Result<Record, Unreadable> {
    postcard::from_bytes(value).map_err(|cause| Unreadable { table, key: key.to_vec(), cause })
}

/// Whether an entry is sound: a record of this version, a row of what forecasts are made of, a host's weights, or one of
/// the store's own.
///
/// # Errors
/// It is none of them.
pub fn judge(table: Table, key: &[u8], value: &[u8]) -> Result<(), Unreadable> {
    let unreadable = |cause| Unreadable { table, key: key.to_vec(), cause };
    match table {
        Table::Meta if key != LEDGER => Ok(()),
        Table::Outcomes | Table::Forecasts | Table::Models => {
            rows::judge(table, key, value).map_err(unreadable)
        }
        Table::Weights => shares::judge(key, value).map_err(unreadable),
        _ => read(table, key, value).map(drop),
    }
}

/// Reads all records of a table.
///
/// # Errors
/// The store cannot be read, or something in it is not a record of this version.
pub fn scan(store: &mut dyn Scan, table: Table, each: &mut dyn FnMut(Record)) -> Result<(), LoadError> {
    let mut first_bad = None;
    store.scan(table, &mut |key, value| match read(table, key, value) {
        Ok(record) => each(record),
        Err(bad) => drop(first_bad.get_or_insert(bad)),
    })?;
    first_bad.map_or(Ok(()), |bad| Err(bad.into()))
}

/// Reads everything but the decisions, which are read when somebody asks.
///
/// # Errors
/// The store cannot be read, or something in it is not a record of this version.
pub fn load(store: &mut dyn Scan) -> Result<Loaded, LoadError> {
    let mut loaded = Loaded { meta: None, records: Vec::new(), restored: false };
    let mut generation = 0;
    let mut bad = None;
    store.scan(Table::Meta, &mut |key, value| match key {
        meta::RESTORED => loaded.restored = number(value) == Some(1),
        meta::GENERATION => generation = number(value).unwrap_or(0),
        LEDGER => match read(Table::Meta, key, value) {
            Ok(Record::Meta(meta)) => loaded.meta = Some(meta),
            Ok(_) => {}
            Err(unreadable) => bad = Some(unreadable),
        },
        _ => {}
    })?;
    if let Some(bad) = bad {
        return Err(bad.into());
    }
    if let Some(meta) = &mut loaded.meta {
        meta.generation = meta.generation.max(generation);
    }
    for table in [Table::Emcs, Table::Hosts, Table::Slices, Table::Reservations, Table::Migrations] {
        scan(store, table, &mut |record| loaded.records.push(record))?;
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pool::{
        record::{Fence, Host, Scheduling},
        slice::{Quarantine, Slot, State},
    };
    use units::{Bytes, EmcId, Epoch, HostId, Name, SliceId};

    use super::*;

    #[test]
    fn host_without_the_list_of_emcs_that_are_to_cut_it_off_is_read() {
        let host = Host {
            name: Name::new("h0").unwrap(),
            cores: 1,
            local: Bytes::gib(1),
            emcs: vec![EmcId(0)],
            scheduling: Scheduling::Enabled,
            fence: Fence::Fencing { powered_off: false },
            boot_id: "b1".into(),
            must_report: true,
            uncut: BTreeSet::new(),
        };
        let record = Record::Host(HostId(0), host);
        let mut written = postcard::to_stdvec(&record).unwrap();
        assert_eq!(written.pop(), Some(0), "the empty list, which earlier versions did not write");
        assert_eq!(read(Table::Hosts, &[0, 0], &written).unwrap(), record);
    }

    /// Variants are numbered in the store: a new one goes to the end.
    #[test]
    fn reasons_of_quarantine_keep_their_numbers() {
        let host = HostId(3);
        let reasons = [
            Quarantine::Dirty { host, revoked: true },
            Quarantine::ScrubFailed { host, revoked: true },
            Quarantine::UnknownGrant { host },
            Quarantine::LostGrant,
            Quarantine::Restored { host: Some(host) },
            Quarantine::LostRecord { host },
            Quarantine::DeviceFailed { host: Some(host), errno: Some(5) },
        ];
        for (number, why) in (0_u8..).zip(reasons) {
            let slot = Slot { epoch: Epoch(1), state: State::Quarantined(why), receipt: None };
            let record = Record::Slice(SliceId(1), slot);
            let written = postcard::to_stdvec(&record).unwrap();
            assert_eq!(written[4], number, "{why:?} in {written:?}");
            assert_eq!(read(Table::Slices, &[0, 0, 0, 1], &written).unwrap(), record);
        }
    }
}
