//! Tests of the store on a simulated disk with injected faults.

use std::collections::BTreeMap;

use super::{
    disk::Directory,
    faulty::{Fault, FaultyDisk},
    redb::RedbStore,
    *,
};
use crate::test_files::write_private_file;

mod damage;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Generator of pseudo-random numbers with a seed, for reproducible tests.
#[derive(Clone)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % n as u64).unwrap()
    }
}

type Entries = BTreeMap<(Table, Vec<u8>), Vec<u8>>;

fn entries(store: &mut dyn Scan) -> Result<Entries, StoreError> {
    let mut entries = Entries::new();
    for table in Table::ALL {
        store.scan(table, &mut |key, value| drop(entries.insert((table, key.to_vec()), value.to_vec())))?;
    }
    entries.remove(&(Table::Meta, meta::FORMAT.to_vec()));
    Ok(entries)
}

fn after(mut entries: Entries, batch: &[Write]) -> Entries {
    for write in batch.iter().cloned() {
        match write {
            Write::Put { table, key, value } => drop(entries.insert((table, key), value)),
            Write::Delete { table, key } => drop(entries.remove(&(table, key))),
        }
    }
    entries
}

fn batch(rng: &mut SplitMix64) -> Vec<Write> {
    let writes = 1 + rng.below(40);
    let write = |_| {
        let table = Table::ALL[1 + rng.below(3)];
        let key = vec![u8::try_from(rng.below(60)).unwrap(); 4];
        match rng.below(4) {
            0 => Write::Delete { table, key },
            _ => {
                Write::Put { table, key, value: vec![u8::try_from(rng.below(256)).unwrap(); rng.below(600)] }
            }
        }
    };
    (0..writes).map(write).collect()
}

fn disk(seed: u64) -> FaultyDisk {
    let mut rng = SplitMix64(!seed);
    FaultyDisk::new(move |n| rng.below(n))
}

fn put(table: Table, key: &[u8], value: &[u8]) -> Write {
    Write::Put { table, key: key.to_vec(), value: value.to_vec() }
}

/// Store under test, with its expected entries.
struct CrashTest {
    rng: SplitMix64,
    disk: FaultyDisk,
    store: Option<RedbStore<FaultyDisk>>,
    /// Entries that the store must contain.
    acknowledged: Entries,
    /// Batch whose write failed, which may or may not be in the store.
    in_flight: Vec<Write>,
}

impl CrashTest {
    fn new(seed: u64) -> Self {
        let (rng, disk) = (SplitMix64(seed), disk(seed));
        Self { rng, disk, store: None, acknowledged: Entries::new(), in_flight: vec![] }
    }

    /// Opens or reopens the store. Checks that the entries are the acknowledged entries, with or
    /// without the batch in flight. These entries are expected from then on.
    fn open(&mut self) -> Result<(), StoreError> {
        match &mut self.store {
            Some(store) => store.reopen()?,
            None => self.store = Some(RedbStore::open(self.disk.clone())?),
        }
        let detected = entries(self.store.as_mut().unwrap())?;
        let with_in_flight = after(self.acknowledged.clone(), &self.in_flight);
        assert!(
            detected == self.acknowledged || detected == with_in_flight,
            "a batch is partially written or lost"
        );
        (self.acknowledged, self.in_flight) = (detected, vec![]);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        let batch = batch(&mut self.rng);
        let store = self.store.as_mut().unwrap();
        let result = store.commit(&batch);
        if result.is_ok() {
            self.acknowledged = after(std::mem::take(&mut self.acknowledged), &batch);
        } else {
            assert!(
                matches!(store.commit(&batch), Err(StoreError::Poisoned { .. })),
                "a write after a failure must be rejected"
            );
            assert!(
                matches!(entries(store), Err(StoreError::Poisoned { .. })),
                "a read after a failure must be rejected"
            );
            self.in_flight = batch;
        }
        result
    }

    /// Opens the store and writes 12 batches, or fewer if a write fails.
    fn run(&mut self) -> Result<(), StoreError> {
        self.open()?;
        for _ in 0..12 {
            self.commit()?;
        }
        Ok(())
    }

    fn lose_power(&mut self) {
        self.disk.power_off();
        self.store = None;
        self.disk.clear_faults();
        self.disk.power_on();
    }
}

/// Cuts the power 6 times at a random operation, for each of 600 seeds. The operation can belong to
/// the creation of the store, a batch, a repair after the previous failure, or closing.
#[test]
fn batches_are_atomic_across_power_failures() {
    let mut cuts = 0;
    for seed in 0..600 {
        let mut test = CrashTest::new(seed);
        for _ in 0..6 {
            let at = test.disk.operations() + test.rng.below(50) as u64;
            test.disk.fail_at(at, Fault::PowerCut);
            cuts += u32::from(test.run().is_err());
            test.lose_power();
        }
        test.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(cuts > 2000, "only {cuts} power failures interrupted an operation");
}

/// Lets writes and syncs fail, and reopens the store. Entries in the reopened store must survive a
/// power failure, and therefore must be on disk and not only in a cache.
#[test]
fn state_after_a_failed_write_is_durable() {
    let mut failures = 0;
    for seed in 0..600 {
        let mut test = CrashTest::new(seed);
        for errno in [EIO, ENOSPC, EIO, ENOSPC] {
            let at = test.disk.operations() + test.rng.below(40) as u64;
            test.disk.fail_at(at, Fault::Errno(errno));
            failures += u32::from(test.run().is_err());
            test.disk.clear_faults();
            test.open().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            if test.rng.below(2) == 0 {
                test.lose_power();
            }
        }
        test.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(failures > 1000, "only {failures} injected failures interrupted an operation");
}

/// Overwrites random bytes of the store. The entries must be correct, or the store must be rejected
/// as corrupt.
#[test]
fn corrupt_bytes_are_detected() {
    let disk = disk(0);
    let mut test = CrashTest { disk: disk.clone(), ..CrashTest::new(0) };
    test.run().unwrap();
    test.store = None;
    let image = disk.with_bytes(|bytes| bytes.clone());
    let mut rng = SplitMix64(1);
    let mut detected = 0;
    let nonzero: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    for _ in 0..300 {
        let at = nonzero[rng.below(nonzero.len())];
        disk.with_bytes(|bytes| {
            bytes.clone_from(&image);
            let end = image.len().min(at + 1 + rng.below(5000));
            bytes[at..end].iter_mut().for_each(|byte| *byte = u8::try_from(rng.below(256)).unwrap());
        });
        let opened = RedbStore::open(disk.clone()).and_then(|mut store| entries(&mut store));
        match opened {
            Ok(entries) => assert!(entries == test.acknowledged, "wrong entries after damage at offset {at}"),
            Err(StoreError::Corrupt { .. }) => detected += 1,
            Err(other) => panic!("unexpected error after damage at offset {at}: {other}"),
        }
    }
    assert!(detected > 100, "only {detected} of 300 damages were detected");
}

#[test]
fn write_to_a_full_disk_fails_and_succeeds_after_reopening() {
    let disk = disk(0);
    let mut store = RedbStore::open(disk.clone()).unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"0")]).unwrap();
    disk.fail_at(disk.operations(), Fault::Errno(ENOSPC));
    let error = store.commit(&[put(Table::Hosts, b"h", b"1")]).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert_eq!(error.to_string(), "cannot write store faulty disk");
    store.reopen().unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"2")]).unwrap();
    assert_eq!(entries(&mut store).unwrap()[&(Table::Hosts, b"h".to_vec())], b"2");
}

#[test]
fn last_change_of_an_entry_in_a_batch_applies() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    let delete = |key: &[u8]| Write::Delete { table: Table::Hosts, key: key.to_vec() };
    let put = |key: &[u8], value: &[u8]| put(Table::Hosts, key, value);
    store.commit(&[put(b"a", b"1"), put(b"a", b"2"), put(b"b", b"1"), delete(b"b"), delete(b"c")]).unwrap();
    let values: Vec<_> = entries(&mut store).unwrap().into_values().collect();
    assert_eq!(values, [b"2"]);
}

#[test]
fn scan_returns_entries_in_key_order() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    store.commit(&[3_u8, 1, 2].map(|key| put(Table::Slices, &[key], b""))).unwrap();
    let mut keys = vec![];
    store.scan(Table::Slices, &mut |key, _| keys.push(key[0])).unwrap();
    assert_eq!(keys, [1, 2, 3]);
}

#[test]
fn store_of_a_newer_version_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = RedbStore::open_directory(directory.path()).unwrap();
    store.commit(&[Write::number(Table::Meta, meta::FORMAT, FORMAT + 1)]).unwrap();
    drop(store);
    let error = RedbStore::open_directory(directory.path()).unwrap_err().to_string();
    assert!(
        error.ends_with("has format 2: must be at most 1; use the newer pool-manager that wrote it"),
        "{error}"
    );
}

#[test]
fn file_that_is_not_a_store_is_rejected_with_a_remedy() {
    for content in [&b"hello"[..], &[0; 5000][..4096], &[b'x'; 100_000]] {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(disk::DATABASE_FILE);
        write_private_file(&file, content);
        if content.iter().all(|byte| *byte == 0) {
            RedbStore::open_directory(directory.path()).expect("a file of zeros is an interrupted creation");
            continue;
        }
        let error = RedbStore::open_directory(directory.path()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("store {} is corrupt (", file.display())), "{error}");
        assert!(error.ends_with("restore a backup with `pool-manager restore`"), "{error}");
        assert_eq!(std::fs::read(&file).unwrap(), content, "the file was changed");
    }
}

#[test]
fn redb_file_with_other_tables_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let database = ::redb::Database::create(directory.path().join(disk::DATABASE_FILE)).unwrap();
    let transaction = database.begin_write().unwrap();
    let table = ::redb::TableDefinition::<&[u8], &[u8]>::new("meta");
    transaction.open_table(table).unwrap().insert(&b"format"[..], &b"1"[..]).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let file = directory.path().join(disk::DATABASE_FILE);
    write_private_file(&file, std::fs::read(&file).unwrap());
    let error = RedbStore::open_directory(directory.path()).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("\"meta\""), "{error}");
}

#[test]
fn store_that_cannot_be_found_is_not_reported_as_missing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(disk::DATABASE_FILE);
    let open = || RedbStore::open_existing(directory.path()).unwrap_err();
    assert!(matches!(open(), StoreError::Missing { .. }));
    std::os::unix::fs::symlink(&file, &file).unwrap(); // ELOOP stands for EACCES and EIO, which tests cannot cause as root
    assert_eq!(open().to_string(), format!("cannot find store {}", file.display()));
}

#[test]
fn store_in_use_is_not_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let first = RedbStore::open_directory(directory.path()).unwrap();
    let error = RedbStore::open_directory(directory.path()).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(first);
    RedbStore::open_directory(directory.path()).unwrap();
}

#[test]
fn store_reports_free_space_and_has_private_files() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let store = RedbStore::open(Directory::lock(&directory.path().join("store")).unwrap()).unwrap();
    assert!(store.free_bytes().unwrap().unwrap() > 0);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode(store.disk().path()), mode(&store.disk().path().join(disk::DATABASE_FILE))),
        (0o700, 0o600)
    );
}

#[test]
fn symbolic_link_in_place_of_a_file_is_not_followed() {
    for name in [disk::LOCK_FILE, disk::DATABASE_FILE] {
        let directory = tempfile::tempdir().unwrap();
        let (link, target) = (directory.path().join(name), directory.path().join("target"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let error = units::chain(&RedbStore::open_directory(directory.path()).unwrap_err());
        assert!(error.ends_with(": must be a regular file"), "{name}: {error}");
        assert!(!target.exists(), "{name}: the target of the link was created");
    }
}

#[test]
fn store_accessible_to_other_users_is_rejected() {
    use std::os::unix::fs::PermissionsExt as _;
    for name in [disk::LOCK_FILE, disk::DATABASE_FILE] {
        let directory = tempfile::tempdir().unwrap();
        drop(RedbStore::open_directory(directory.path()).unwrap());
        let file = directory.path().join(name);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = units::chain(&RedbStore::open_directory(directory.path()).unwrap_err());
        let rule = format!(
            "has mode 0666: must be accessible to its owner only; run `chmod 600 {}`",
            file.display()
        );
        assert!(error.starts_with("cannot open ") && error.ends_with(&rule), "{error}");
        RedbStore::open(disk::UnlockedFile(file)).expect("a backup can be on a file system without modes");
    }
}

/// Checks that the file has no holes, so that the store can be opened on a full disk.
#[test]
fn disk_space_of_the_store_file_is_allocated() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut store = RedbStore::open_directory(directory.path()).unwrap();
    store.commit(&[put(Table::Audit, b"much", &vec![7; 3 << 20])]).unwrap();
    let file = std::fs::metadata(directory.path().join(disk::DATABASE_FILE)).unwrap();
    assert!(file.len() > 3 << 20 && file.blocks() * 512 >= file.len(), "{} blocks", file.blocks());
}

#[test]
fn snapshot_is_unaffected_by_later_writes() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"before")]).unwrap();
    let mut snapshot = store.snapshot().unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"after")]).unwrap();
    let seen = std::thread::spawn(move || entries(snapshot.as_mut()).unwrap()).join().unwrap();
    assert_eq!(seen.into_values().next().unwrap(), b"before");
}
