//! The store on a disk with every fault of a disk.

use std::collections::BTreeMap;

use super::{
    disk::Directory,
    faulty::{Fault, FaultyDisk},
    redb::RedbStore,
    *,
};

mod damage;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Numbers from a seed (SplitMix64).
#[derive(Clone)]
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % n as u64).unwrap()
    }
}

type Facts = BTreeMap<(Table, Vec<u8>), Vec<u8>>;

fn facts(store: &mut dyn Scan) -> Result<Facts, StoreError> {
    let mut facts = Facts::new();
    for table in Table::ALL {
        store.scan(table, &mut |key, value| drop(facts.insert((table, key.to_vec()), value.to_vec())))?;
    }
    facts.remove(&(Table::Meta, meta::FORMAT.to_vec()));
    Ok(facts)
}

fn after(mut facts: Facts, batch: &[Write]) -> Facts {
    for write in batch.iter().cloned() {
        match write {
            Write::Put { table, key, value } => drop(facts.insert((table, key), value)),
            Write::Delete { table, key } => drop(facts.remove(&(table, key))),
        }
    }
    facts
}

fn batch(chance: &mut Chance) -> Vec<Write> {
    let writes = 1 + chance.below(40);
    let write = |_| {
        let table = Table::ALL[1 + chance.below(3)];
        let key = vec![u8::try_from(chance.below(60)).unwrap(); 4];
        match chance.below(4) {
            0 => Write::Delete { table, key },
            _ => Write::Put {
                table,
                key,
                value: vec![u8::try_from(chance.below(256)).unwrap(); chance.below(600)],
            },
        }
    };
    (0..writes).map(write).collect()
}

fn disk(seed: u64) -> FaultyDisk {
    let mut chance = Chance(!seed);
    FaultyDisk::new(move |n| chance.below(n))
}

fn put(table: Table, key: &[u8], value: &[u8]) -> Write {
    Write::Put { table, key: key.to_vec(), value: value.to_vec() }
}

/// Store with its known state.
struct Story {
    chance: Chance,
    disk: FaultyDisk,
    store: Option<RedbStore<FaultyDisk>>,
    acknowledged: Facts,
    in_flight: Vec<Write>,
}

impl Story {
    fn new(seed: u64) -> Self {
        let (chance, disk) = (Chance(seed), disk(seed));
        Self { chance, disk, store: None, acknowledged: Facts::new(), in_flight: vec![] }
    }

    /// Opens again, in the same process if it still lives. What is found is what was acknowledged, and perhaps the
    /// batch that was on its way; from then on it is a fact.
    fn open(&mut self) -> Result<(), StoreError> {
        match &mut self.store {
            Some(store) => store.reopen()?,
            None => self.store = Some(RedbStore::open(self.disk.clone())?),
        }
        let found = facts(self.store.as_mut().unwrap())?;
        let perhaps = after(self.acknowledged.clone(), &self.in_flight);
        assert!(found == self.acknowledged || found == perhaps, "half a batch, or a lost one");
        (self.acknowledged, self.in_flight) = (found, vec![]);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        let batch = batch(&mut self.chance);
        let store = self.store.as_mut().unwrap();
        let done = store.commit(&batch);
        if done.is_ok() {
            self.acknowledged = after(std::mem::take(&mut self.acknowledged), &batch);
        } else {
            assert!(
                matches!(store.commit(&batch), Err(StoreError::Poisoned { .. })),
                "wrote after a failure"
            );
            assert!(matches!(facts(store), Err(StoreError::Poisoned { .. })), "read after a failure");
            self.in_flight = batch;
        }
        done
    }

    /// Works until something goes wrong.
    fn work(&mut self) -> Result<(), StoreError> {
        self.open()?;
        for _ in 0..12 {
            self.commit()?;
        }
        Ok(())
    }

    fn lose_power(&mut self) {
        self.disk.power_off();
        self.store = None;
        self.disk.fail_no_more();
        self.disk.power_on();
    }
}

/// 600 stores lose their power 6 times each, at any write, sync or change of length: while a store is made, a batch is
/// written, the store is put right after the last time, or is closed.
#[test]
fn power_may_fail_anywhere() {
    let mut cuts = 0;
    for seed in 0..600 {
        let mut story = Story::new(seed);
        for _ in 0..6 {
            let at = story.disk.operations() + story.chance.below(50) as u64;
            story.disk.fail_at(at, Fault::PowerCut);
            cuts += u32::from(story.work().is_err());
            story.lose_power();
        }
        story.work().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(cuts > 2000, "the power failed only {cuts} times");
}

/// Some writes and syncs fail while the process lives on. What it reads when it has opened the store again must be on
/// the medium, and not in a cache that believes it is: the power may fail next.
#[test]
fn what_is_read_after_an_error_is_durable() {
    let mut failures = 0;
    for seed in 0..600 {
        let mut story = Story::new(seed);
        for errno in [EIO, ENOSPC, EIO, ENOSPC] {
            let at = story.disk.operations() + story.chance.below(40) as u64;
            story.disk.fail_at(at, Fault::Errno(errno));
            failures += u32::from(story.work().is_err());
            story.disk.fail_no_more();
            story.open().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            if story.chance.below(2) == 0 {
                story.lose_power();
            }
        }
        story.work().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(failures > 1000, "only {failures} failures");
}

/// Bytes rot anywhere. What is found is right, or is refused with a sentence; nothing panics and nothing is made up.
#[test]
fn rot_is_found_and_never_believed() {
    let disk = disk(0);
    let mut story = Story { disk: disk.clone(), ..Story::new(0) };
    story.work().unwrap();
    story.store = None;
    let image = disk.with_bytes(|bytes| bytes.clone());
    let mut chance = Chance(1);
    let mut found = 0;
    let used: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    for _ in 0..300 {
        let at = used[chance.below(used.len())];
        disk.with_bytes(|bytes| {
            bytes.clone_from(&image);
            let end = image.len().min(at + 1 + chance.below(5000));
            bytes[at..end].iter_mut().for_each(|byte| *byte = u8::try_from(chance.below(256)).unwrap());
        });
        let opened = RedbStore::open(disk.clone()).and_then(|mut store| facts(&mut store));
        match opened {
            Ok(facts) => assert!(facts == story.acknowledged, "made up facts, damaged at {at}"),
            Err(StoreError::Corrupt { .. }) => found += 1,
            Err(other) => panic!("damaged at {at}: {other}"),
        }
    }
    assert!(found > 100, "only {found} of 300 were found");
}

#[test]
fn a_full_disk_is_an_error_and_goes_away_with_space() {
    let disk = disk(0);
    let mut store = RedbStore::open(disk.clone()).unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"0")]).unwrap();
    disk.fail_at(disk.operations(), Fault::Errno(ENOSPC));
    let error = store.commit(&[put(Table::Hosts, b"h", b"1")]).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert_eq!(error.to_string(), "write store faulty disk");
    store.reopen().unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"2")]).unwrap();
    assert_eq!(facts(&mut store).unwrap()[&(Table::Hosts, b"h".to_vec())], b"2");
}

#[test]
fn of_two_changes_in_a_batch_the_later_counts() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    let delete = |key: &[u8]| Write::Delete { table: Table::Hosts, key: key.to_vec() };
    let put = |key: &[u8], value: &[u8]| put(Table::Hosts, key, value);
    store.commit(&[put(b"a", b"1"), put(b"a", b"2"), put(b"b", b"1"), delete(b"b"), delete(b"c")]).unwrap();
    let found: Vec<_> = facts(&mut store).unwrap().into_values().collect();
    assert_eq!(found, [b"2"]);
}

#[test]
fn entries_are_shown_in_the_order_of_their_keys() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    store.commit(&[3_u8, 1, 2].map(|key| put(Table::Slices, &[key], b""))).unwrap();
    let mut keys = vec![];
    store.scan(Table::Slices, &mut |key, _| keys.push(key[0])).unwrap();
    assert_eq!(keys, [1, 2, 3]);
}

#[test]
fn a_store_of_a_newer_version_is_left_alone() {
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
fn a_file_that_is_no_store_is_named_with_what_to_do() {
    for wrong in [&b"hello"[..], &[0; 5000][..4096], &[b'x'; 100_000]] {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(disk::FILE);
        std::fs::write(&file, wrong).unwrap();
        if wrong.iter().all(|byte| *byte == 0) {
            RedbStore::open_directory(directory.path()).expect("an interrupted making");
            continue;
        }
        let error = RedbStore::open_directory(directory.path()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("store {} is corrupt (", file.display())), "{error}");
        assert!(error.ends_with("restore it with `pool-manager restore` from a backup"), "{error}");
        assert_eq!(std::fs::read(&file).unwrap(), wrong, "the evidence was touched");
    }
}

#[test]
fn a_redb_file_of_something_else_is_not_taken_for_an_empty_store() {
    let directory = tempfile::tempdir().unwrap();
    let database = ::redb::Database::create(directory.path().join(disk::FILE)).unwrap();
    let transaction = database.begin_write().unwrap();
    let theirs = ::redb::TableDefinition::<&[u8], &[u8]>::new("meta");
    transaction.open_table(theirs).unwrap().insert(&b"format"[..], &b"1"[..]).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let error = RedbStore::open_directory(directory.path()).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("\"meta\""), "{error}");
}

#[test]
fn a_second_manager_is_told_that_the_store_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let first = RedbStore::open_directory(directory.path()).unwrap();
    let error = RedbStore::open_directory(directory.path()).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(first);
    RedbStore::open_directory(directory.path()).unwrap();
}

#[test]
fn the_store_knows_how_much_room_there_is_and_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let store = RedbStore::open(Directory::take(&directory.path().join("store")).unwrap()).unwrap();
    assert!(store.free_bytes().unwrap().unwrap() > 0);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(store.disk().path()), mode(&store.disk().path().join(disk::FILE))), (0o700, 0o600));
}

/// On a disk that others filled up a manager must still be able to open what it has.
#[test]
fn the_store_has_taken_the_space_it_needs() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut store = RedbStore::open_directory(directory.path()).unwrap();
    store.commit(&[put(Table::Audit, b"much", &vec![7; 3 << 20])]).unwrap();
    let file = std::fs::metadata(directory.path().join(disk::FILE)).unwrap();
    assert!(file.len() > 3 << 20 && file.blocks() * 512 >= file.len(), "{} blocks", file.blocks());
}

#[test]
fn a_snapshot_stays_as_it_was() {
    let mut store = RedbStore::open(disk(0)).unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"before")]).unwrap();
    let mut snapshot = store.snapshot().unwrap();
    store.commit(&[put(Table::Hosts, b"h", b"after")]).unwrap();
    let seen = std::thread::spawn(move || facts(snapshot.as_mut()).unwrap()).join().unwrap();
    assert_eq!(seen.into_values().next().unwrap(), b"before");
}
