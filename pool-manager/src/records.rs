//! Encodes and decodes ledger records as entries of the store. Each kind of record has a table.
//! Keys are numbers, and values are encoded with postcard. New variants and fields are only added
//! at the end, with a new format version. [`forecast_rows`] and [`share_rows`] encode other
//! entries.

pub mod forecast_rows;
pub mod share_rows;

use pool::record::{Key, Meta, MigrationKey, MigrationKind, Record};

use crate::store::{Scan, StoreError, Table, Write, meta, number};

/// Key of the ledger's metadata in [`Table::Meta`].
const LEDGER_META_KEY: &[u8] = b"ledger";

/// Initial size of the encoding buffer, in bytes; large enough for most records.
const RECORD_BYTES_TYPICAL: usize = 256;

/// Ledger as read from the store.
#[derive(Debug)]
pub struct StoreContents {
    /// Metadata of the ledger; `None` in a store that was never used.
    pub meta: Option<Meta>,
    /// All records except the metadata and decisions.
    pub records: Vec<Record>,
    /// Whether the store was restored from a backup and not written since.
    pub restored: bool,
}

/// Error for an entry that cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[error("cannot decode entry {key:02x?} of table {table}")]
pub struct UnreadableEntry {
    table: Table,
    key: Vec<u8>,
    #[source]
    cause: postcard::Error,
}

/// Error from reading the ledger.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An entry of the store cannot be decoded.
    #[error("the store is corrupt: restore a backup with `pool-manager restore`")]
    Record(#[from] UnreadableEntry),
}

/// Returns the write of a record: a deletion for [`Record::Deleted`], otherwise an update.
pub fn write(record: &Record) -> Write {
    let (table, key) = table_and_key(record.key());
    match record {
        Record::Deleted(_) => Write::Delete { table, key },
        other => Write::Put { table, key, value: encode(other) },
    }
}

/// Returns the writes that remove the marks of a restored store. These writes are part of the first
/// batch after a restore.
pub fn clear_restored_marks() -> [Write; 2] {
    [meta::RESTORED_KEY, meta::GENERATION_KEY]
        .map(|key| Write::Delete { table: Table::Meta, key: key.to_vec() })
}

fn encode(record: &Record) -> Vec<u8> {
    let empty = Vec::with_capacity(RECORD_BYTES_TYPICAL);
    postcard::to_extend(record, empty).expect("postcard fails only for sequences of unknown length")
}

fn table_and_key(key: Key) -> (Table, Vec<u8>) {
    match key {
        Key::Meta => (Table::Meta, LEDGER_META_KEY.to_vec()),
        Key::Emc(id) => (Table::Emcs, compact_id_key(id.0)),
        Key::Host(id) => (Table::Hosts, compact_id_key(id.0)),
        Key::Slice(id) => (Table::Slices, id.0.to_be_bytes().to_vec()),
        Key::Reservation(id) => (Table::Reservations, (!id.0).to_be_bytes().to_vec()), // inverted, so that the newest come first
        Key::Migration(key) => (Table::Migrations, migration_key(key)),
        Key::Decision(seq) => (Table::Audit, seq.to_be_bytes().to_vec()),
    }
}

/// Returns the key of an ID that had 16 bits in earlier versions. IDs below 65,536 still have keys
/// of two bytes, so that stores of earlier versions remain readable.
fn compact_id_key(number: u32) -> Vec<u8> {
    match u16::try_from(number) {
        Ok(short) => short.to_be_bytes().to_vec(),
        Err(_) => number.to_be_bytes().to_vec(),
    }
}

/// Returns the key of a migration request. The key of a drain is the one of earlier versions, which
/// had no other requests.
fn migration_key(key: MigrationKey) -> Vec<u8> {
    let mut bytes = key.reservation.0.to_be_bytes().to_vec();
    match key.kind {
        MigrationKind::Drain => {}
        MigrationKind::Slowdown => bytes.push(1),
    }
    bytes
}

/// Decodes an entry of the store.
///
/// # Errors
/// [`UnreadableEntry`] if the entry is not a record of this version.
pub fn read(table: Table, key: &[u8], value: &[u8]) -> Result<Record, UnreadableEntry> {
    postcard::from_bytes(value).map_err(|cause| UnreadableEntry { table, key: key.to_vec(), cause })
}

/// Checks that an entry of any table can be decoded.
///
/// # Errors
/// [`UnreadableEntry`] if the entry has an unknown format.
pub fn check_entry(table: Table, key: &[u8], value: &[u8]) -> Result<(), UnreadableEntry> {
    let unreadable = |cause| UnreadableEntry { table, key: key.to_vec(), cause };
    match table {
        Table::Meta if key != LEDGER_META_KEY => Ok(()),
        Table::Outcomes | Table::Forecasts | Table::Models | Table::MeasuredMoves => {
            forecast_rows::check_row(table, key, value).map_err(unreadable)
        }
        Table::Weights => share_rows::check_row(key, value).map_err(unreadable),
        _ => read(table, key, value).map(drop),
    }
}

/// Calls `each` with all records of a table.
///
/// # Errors
/// [`LoadError`] if the store cannot be read or an entry cannot be decoded.
pub fn scan(store: &mut dyn Scan, table: Table, each: &mut dyn FnMut(Record)) -> Result<(), LoadError> {
    let mut first_error = None;
    store.scan(table, &mut |key, value| match read(table, key, value) {
        Ok(record) => each(record),
        Err(error) => drop(first_error.get_or_insert(error)),
    })?;
    first_error.map_or(Ok(()), |error| Err(error.into()))
}

/// Reads the whole ledger except decisions, which are read only on request.
///
/// # Errors
/// [`LoadError`] if the store cannot be read or an entry cannot be decoded.
pub fn load(store: &mut dyn Scan) -> Result<StoreContents, LoadError> {
    let mut loaded = load_metadata(store)?;
    for table in [Table::Emcs, Table::Hosts, Table::Slices, Table::Reservations, Table::Migrations] {
        scan(store, table, &mut |record| loaded.records.push(record))?;
    }
    Ok(loaded)
}

/// Reads the metadata of the ledger; `None` if the store contains no rack.
///
/// # Errors
/// [`LoadError`] if the store cannot be read or an entry cannot be decoded.
pub fn load_meta(store: &mut dyn Scan) -> Result<Option<Meta>, LoadError> {
    Ok(load_metadata(store)?.meta)
}

fn load_metadata(store: &mut dyn Scan) -> Result<StoreContents, LoadError> {
    let mut loaded = StoreContents { meta: None, records: Vec::new(), restored: false };
    let mut generation = 0;
    let mut error = None;
    store.scan(Table::Meta, &mut |key, value| match key {
        meta::RESTORED_KEY => loaded.restored = number(value) == Some(1),
        meta::GENERATION_KEY => generation = number(value).unwrap_or(0),
        LEDGER_META_KEY => match read(Table::Meta, key, value) {
            Ok(Record::Meta(meta)) => loaded.meta = Some(meta),
            Ok(_) => {}
            Err(unreadable) => error = Some(unreadable),
        },
        _ => {}
    })?;
    if let Some(error) = error {
        return Err(error.into());
    }
    if let Some(meta) = &mut loaded.meta {
        meta.generation = meta.generation.max(generation);
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pool::{
        ledger::Ledger,
        record::{
            Fence, Host, Migration, MigrationAnswer, Rehome, RequestKey, Reservation, Scheduling, Slowdown,
            SlowdownEstimate, Stage,
        },
        slice::{Quarantine, Slot, State},
    };
    use units::{
        Bytes, EmcId, Epoch, HostId, MigrationId, Name, Ns, RequestId, ReservationId, SliceId, UnixMs, UserId,
    };

    use super::*;
    use crate::store::{Store as _, faulty::FaultyDisk, redb::RedbStore};

    /// Records of earlier versions, in which IDs of EMCs and hosts had 16 bits: table, key, value.
    const RECORDS_WITH_16_BIT_IDS: [(Table, &str, &str); 5] = [
        (Table::Meta, "6c6564676572", "00047261636b0100000a0101ad02820206"),
        (Table::Emcs, "0101", "0181020165020408656d756c61746564022f650000"),
        (Table::Hosts, "012c", "02ac0201680880808080400181020000016200"),
        (Table::Slices, "00000005", "0305ac0203ac020900"),
        (Table::Reservations, "fffffffffffffff6", "04090176ac020105808080800401000163017280f092cbdd080101"),
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u32> = hex.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
    }

    fn ledger(store: &mut RedbStore<FaultyDisk>) -> Ledger {
        let loaded = load(store).unwrap();
        Ledger::load(loaded.meta.unwrap(), loaded.records)
    }

    #[test]
    fn store_with_16_bit_ids_is_read_and_updated_in_place() {
        let mut store = RedbStore::open(FaultyDisk::new(|_| 0)).unwrap();
        let old = RECORDS_WITH_16_BIT_IDS.map(|(table, key, value)| Write::Put {
            table,
            key: bytes(key),
            value: bytes(value),
        });
        store.commit(&old).unwrap();
        let before = ledger(&mut store);
        let host = before.host(HostId(300)).unwrap();
        assert_eq!((host.host.emcs.as_slice(), host.held().len()), ([EmcId(257)].as_slice(), 1));
        assert_eq!(before.emc_of(SliceId(5)), Some(EmcId(257)));
        assert_eq!(before.slot(SliceId(5)).unwrap().reservation(), Some(ReservationId(9)));
        let keys = [Key::Meta, Key::Emc(EmcId(257)), Key::Host(HostId(300)), Key::Slice(SliceId(5))];
        let mut rewritten = keys.map(|key| write(&before.record(key)));
        for index in [0, 2] {
            let Write::Put { value, .. } = &mut rewritten[index] else { panic!("not a Put") };
            assert_eq!(
                value.split_off(value.len() - 3),
                [0; 3],
                "must end with the empty fields that earlier versions did not write"
            );
        }
        assert_eq!(rewritten.as_slice(), &old[..4], "must have the same keys and bytes as before");
        store.commit(&[write(&Record::Deleted(Key::Host(HostId(300))))]).unwrap();
        assert_eq!(ledger(&mut store).hosts().count(), 0);
    }

    #[test]
    fn ids_beyond_16_bits_have_distinct_keys() {
        let mut store = RedbStore::open(FaultyDisk::new(|_| 0)).unwrap();
        let name = |number: u32| Name::new(&format!("h{number}")).unwrap();
        let numbers = [0, 1, 256, 65_535, 65_536, 65_537, u32::MAX - 1];
        let mut writes = vec![write(&Record::Meta(Meta::new("rack".into())))];
        writes.extend(numbers.map(|number| {
            let host = Host {
                name: name(number),
                cores: 1,
                local: Bytes::ZERO,
                emcs: vec![EmcId(number)],
                scheduling: Scheduling::Enabled,
                fence: Fence::None,
                boot_id: String::new(),
                must_report: false,
                unconfirmed_fences: BTreeSet::new(),
                unwired_fences: BTreeSet::new(),
                fenced_at: UnixMs::default(),
            };
            write(&Record::Host(HostId(number), host))
        }));
        store.commit(&writes).unwrap();
        let ledger = ledger(&mut store);
        let read: Vec<_> = ledger.hosts().map(|(id, entry)| (id.0, entry.host.name.clone())).collect();
        assert_eq!(read, numbers.map(|number| (number, name(number))));
    }

    #[test]
    fn host_record_without_fence_fields_is_read() {
        let host = Host {
            name: Name::new("h0").unwrap(),
            cores: 1,
            local: Bytes::gib(1),
            emcs: vec![EmcId(0)],
            scheduling: Scheduling::Enabled,
            fence: Fence::Fencing { powered_off: false },
            boot_id: "b1".into(),
            must_report: true,
            unconfirmed_fences: BTreeSet::new(),
            unwired_fences: BTreeSet::new(),
            fenced_at: UnixMs::default(),
        };
        let record = Record::Host(HostId(0), host);
        let mut encoded = postcard::to_stdvec(&record).unwrap();
        let missing = encoded.split_off(encoded.len() - 3);
        assert_eq!(missing, [0; 3], "must end with the empty fields that earlier versions did not write");
        assert_eq!(read(Table::Hosts, &[0, 0], &encoded).unwrap(), record);
    }

    fn reservation(stage: Stage, uid: Option<UserId>) -> Record {
        let reservation = Reservation {
            vm: Name::new("v").unwrap(),
            host: HostId(0),
            slices: vec![SliceId(3)],
            local: Bytes::gib(1),
            cores: 1,
            pinned: false,
            request: RequestKey { client: Name::new("c").unwrap(), id: RequestId::new("r").unwrap() },
            commit_within: Ns::secs(1),
            created: UnixMs(5),
            stage,
            uid,
            has_process: false,
            rehome: Rehome::None,
        };
        Record::Reservation(ReservationId(7), reservation)
    }

    fn decode(encoded: &[u8]) -> Record {
        read(Table::Reservations, &(!7_u64).to_be_bytes(), encoded).unwrap()
    }

    #[test]
    fn reservation_record_stores_the_user() {
        for uid in [None, UserId::new(0).ok(), UserId::new(2001).ok(), UserId::new(u32::MAX - 1).ok()] {
            let record = reservation(Stage::Committed, uid);
            assert_eq!(decode(&postcard::to_stdvec(&record).unwrap()), record);
        }
    }

    #[test]
    fn reservation_record_stores_whether_a_process_runs() {
        let Record::Reservation(id, idle) = reservation(Stage::Committed, None) else { unreachable!() };
        let record = Record::Reservation(id, Reservation { has_process: true, ..idle });
        assert_eq!(decode(&postcard::to_stdvec(&record).unwrap()), record);
    }

    /// The store contains variant numbers, so new variants must be added at the end.
    #[test]
    fn reservation_record_stores_the_move_to_local_memory() {
        let Record::Reservation(id, idle) = reservation(Stage::Committed, None) else { unreachable!() };
        let moves = [
            Rehome::None,
            Rehome::Moving { attempt: 1 },
            Rehome::Failed { attempt: 2, why: "busy".into(), at: Ns(3) },
            Rehome::Done { slices: vec![SliceId(3)] },
            Rehome::Cancelling { attempt: 4 },
        ];
        let before = postcard::to_stdvec(&Record::Reservation(id, idle.clone())).unwrap().len() - 1;
        for (number, rehome) in (0_u8..).zip(moves) {
            let record = Record::Reservation(id, Reservation { rehome, ..idle.clone() });
            let encoded = postcard::to_stdvec(&record).unwrap();
            assert_eq!(encoded[before], number, "{record:?}");
            assert_eq!(decode(&encoded), record);
        }
    }

    #[test]
    fn reservation_record_without_trailing_fields_is_read() {
        let committed = reservation(Stage::Committed, None);
        let mut encoded = postcard::to_stdvec(&committed).unwrap();
        for field in ["move", "process", "user"] {
            assert_eq!(encoded.pop(), Some(0), "the empty field must be encoded as 0: {field}");
            assert_eq!(decode(&encoded), committed);
        }
        let broken = reservation(Stage::Broken { why: "lost".into(), deadline: None, at: UnixMs(0) }, None);
        let mut encoded = postcard::to_stdvec(&broken).unwrap();
        for field in ["move", "process", "user", "time of the break", "deadline of a broken reservation"] {
            assert_eq!(encoded.pop(), Some(0), "the empty field must be encoded as 0: {field}");
            assert_eq!(decode(&encoded), broken);
        }
    }

    #[test]
    fn migration_record_of_earlier_version_is_read_as_drain() {
        let migration = Migration {
            vm: Name::new("v").unwrap(),
            host: HostId(3),
            why: "host h3 is draining".into(),
            requested_at: UnixMs(5),
            answer: MigrationAnswer::Open,
            explanation: String::new(),
            retry_at: None,
            id: MigrationId(0),
            slowdown: None,
        };
        let drain = Record::Migration(ReservationId(7), migration.clone());
        let mut encoded = postcard::to_stdvec(&drain).unwrap();
        let missing = encoded.split_off(encoded.len() - 2);
        assert_eq!(missing, [0; 2], "must end with the empty fields that earlier versions did not write");
        let key = 7_u64.to_be_bytes();
        assert_eq!(read(Table::Migrations, &key, &encoded).unwrap(), drain);
        let estimate = SlowdownEstimate { loss: Some(0.1), severity: 2.0, samples: 3 };
        let slowdown = Slowdown { estimate, expires_at: Ns::secs(9) };
        let migration = Migration { id: MigrationId(2), slowdown: Some(slowdown), ..migration };
        let slowdown = Record::Migration(ReservationId(7), migration);
        let mut store = RedbStore::open(FaultyDisk::new(|_| 0)).unwrap();
        let meta = Record::Meta(Meta::new("rack".into()));
        store.commit(&[write(&meta), write(&drain), write(&slowdown)]).unwrap();
        let requests = |ledger: &Ledger| ledger.requests_of(ReservationId(7)).count();
        assert_eq!(requests(&ledger(&mut store)), 2, "both requests have keys of their own");
        store.commit(&[write(&Record::Deleted(slowdown.key()))]).unwrap();
        assert_eq!(ledger(&mut store).record(drain.key()), drain);
        assert_eq!(requests(&ledger(&mut store)), 1);
    }

    /// The store contains variant numbers, so new variants must be added at the end.
    #[test]
    fn encoding_of_quarantine_reasons_is_stable() {
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
            let encoded = postcard::to_stdvec(&record).unwrap();
            assert_eq!(encoded[4], number, "{why:?} in {encoded:?}");
            assert_eq!(read(Table::Slices, &[0, 0, 0, 1], &encoded).unwrap(), record);
        }
    }
}
