//! Stores in etcd, and random batches with the entries that they cause.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use etcd::{
    client::Settings,
    election::{Campaign, Candidate, Leadership},
};
use pool_manager::store::{
    Scan, Store as _, StoreError, Table, Write,
    etcd::{Cluster, EtcdStore},
    meta,
};
use rand::Rng as _;
use rand_pcg::Pcg64;

/// Time in which a cluster must accept writes.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Quota that etcd has by default.
const QUOTA_BYTES: u64 = 2 << 30;

/// Number of managers that were created, for their names.
static MANAGERS: AtomicU64 = AtomicU64::new(0);

/// Entries by table and key, without the format version of the store.
pub type Entries = BTreeMap<(Table, Vec<u8>), Vec<u8>>;

/// Prepares a connection to a rack whose keys have a prefix.
///
/// # Panics
/// Panics if an endpoint is no URI.
pub fn connect(endpoints: Vec<String>, prefix: &str) -> Cluster {
    let settings = Settings { endpoints, tls: None, credentials: None, call_timeout: Duration::from_secs(1) };
    Cluster::new(settings, prefix.to_owned(), QUOTA_BYTES).expect("the addresses are valid")
}

/// Returns a manager that wants to be elected.
pub fn candidate(cluster: &Cluster, name: &str, ttl: Duration) -> Candidate {
    Candidate {
        client: cluster.client().clone(),
        leader_key: cluster.leader_key(),
        keys_prefix: cluster.managers_prefix(),
        hand_over_key: cluster.hand_over_key(),
        name: name.as_bytes().to_vec(),
        value: b"manager".to_vec(),
        ttl,
    }
}

/// Elects a manager with a new name, and returns its leadership, which is not renewed.
///
/// # Panics
/// Panics if etcd rejects the manager.
pub fn elect(cluster: &Cluster, ttl: Duration) -> Leadership {
    let name = format!("m{}", MANAGERS.fetch_add(1, Ordering::Relaxed));
    elect_candidate(cluster, candidate(cluster, &name, ttl))
}

/// Waits until a manager is elected.
///
/// # Panics
/// Panics if etcd rejects the manager.
pub fn elect_candidate(cluster: &Cluster, candidate: Candidate) -> Leadership {
    cluster
        .block_on(async move { Campaign::new(candidate).win(|_| ()).await })
        .expect("etcd accepts the manager")
}

/// Opens the store as the leader, and returns the store and the leadership, which is not renewed.
///
/// # Panics
/// Panics if the store cannot be opened.
pub fn open(cluster: &Cluster, ttl: Duration) -> (EtcdStore, Leadership) {
    let leadership = elect(cluster, ttl);
    (EtcdStore::open(cluster.clone(), &leadership).expect("the store is readable"), leadership)
}

/// Returns all entries of a store.
///
/// # Panics
/// Panics if the store cannot be read.
pub fn entries(store: &mut dyn Scan) -> Entries {
    try_entries(store).expect("the store is readable")
}

/// Returns all entries of a store.
///
/// # Errors
/// [`StoreError`].
///
/// # Panics
/// Panics if the keys of a table are not ascending.
pub fn try_entries(store: &mut dyn Scan) -> Result<Entries, StoreError> {
    let mut entries = Entries::new();
    for table in Table::ALL {
        let mut last = None;
        store.scan(table, &mut |key, value| {
            assert!(last.as_deref().is_none_or(|last: &[u8]| last < key), "keys of {table} are ascending");
            last = Some(key.to_vec());
            entries.insert((table, key.to_vec()), value.to_vec());
        })?;
    }
    entries.remove(&(Table::Meta, meta::FORMAT.to_vec()));
    Ok(entries)
}

/// Applies a batch to entries.
pub fn apply(entries: &mut Entries, batch: &[Write]) {
    for write in batch.iter().cloned() {
        match write {
            Write::Put { table, key, value } => drop(entries.insert((table, key), value)),
            Write::Delete { table, key } => drop(entries.remove(&(table, key))),
        }
    }
}

/// Returns the write of an entry.
pub fn put(table: Table, key: &[u8], value: Vec<u8>) -> Write {
    Write::Put { table, key: key.to_vec(), value }
}

/// Returns up to 400 writes of small values, and rarely one of up to 3 MB. Some keys begin with others.
pub fn random_batch(random: &mut Pcg64) -> Vec<Write> {
    let len = if random.random_ratio(1, 5) { 400 } else { 1 + random.random_range(0..40) };
    let mut batch: Vec<_> = (0..len)
        .map(|_| {
            let table = Table::ALL[random.random_range(0..Table::ALL.len())];
            let key = vec![random.random_range(0..20_u8); random.random_range(1..10)];
            match random.random_range(0..4) {
                0 => Write::Delete { table, key },
                _ => Write::Put { table, key, value: vec![random.random(); random.random_range(0..600)] },
            }
        })
        .collect();
    if random.random_ratio(1, 10) {
        let value = vec![random.random(); random.random_range(0..3 << 20)];
        batch.push(Write::Put { table: Table::Models, key: vec![random.random_range(0..3_u8); 2], value });
    }
    batch
}

/// Reopens the store and reads all entries, until this is possible.
///
/// # Panics
/// Panics if this is not possible within [`TIMEOUT`].
pub fn reopen(store: &mut EtcdStore) -> Entries {
    let started = Instant::now();
    loop {
        match store.reopen().and_then(|()| try_entries(store)) {
            Ok(entries) => return entries,
            Err(error) => assert!(started.elapsed() < TIMEOUT, "{error}"),
        }
    }
}
