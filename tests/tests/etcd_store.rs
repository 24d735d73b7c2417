//! Tests of the store in etcd, with real clusters of Debian's etcd.

use std::time::{Duration, Instant};

use etcd::{
    election::{Campaign, Candidate},
    messages::{RangeRequest, TxnRequest, prefix_end, put as put_entry},
};
use pool_manager::store::{
    Store as _, StoreError, Table,
    etcd::{Cluster, EtcdStore},
};
use rand::SeedableRng as _;
use rand_pcg::Pcg64;
use tests::{
    environment::seed,
    etcd_cluster::EtcdCluster,
    store_in_etcd::{
        Entries, TIMEOUT, apply, candidate, connect, elect, elect_candidate, entries, open, put,
        random_batch, reopen,
    },
};

/// Time to live of the lease of a manager that another one replaces.
const SHORT_TTL: Duration = Duration::from_secs(2);
/// Time to live of the lease of other managers. It is longer than the election of a member by the others.
const TTL: Duration = Duration::from_secs(10);
fn cluster(etcd: &EtcdCluster) -> Cluster {
    connect(etcd.endpoints(), "/tarn/rack")
}

/// Opens the store as the leader, and renews the lease until the test ends.
fn open_permanently(cluster: &Cluster) -> EtcdStore {
    let (store, leadership) = open(cluster, TTL);
    let cluster = cluster.clone();
    std::thread::spawn(move || cluster.block_on(async move { leadership.hold().await }));
    store
}

/// Waits until the log has no batches.
fn wait_until_applied(cluster: &Cluster) {
    let key = b"/tarn/rack/log/".to_vec();
    let request = RangeRequest { range_end: prefix_end(&key), key, ..RangeRequest::default() };
    let started = Instant::now();
    loop {
        let (client, request) = (cluster.client().clone(), request.clone());
        let page = cluster.block_on(async move { client.range(request).await }).expect("etcd answers");
        if page.kvs.is_empty() {
            return;
        }
        assert!(started.elapsed() < TIMEOUT, "the log is not applied");
    }
}

#[test]
fn entries_are_those_of_all_batches_after_each_reopening() {
    let etcd = EtcdCluster::start(1, &[]);
    let cluster = cluster(&etcd);
    let mut store = open_permanently(&cluster);
    let mut random = Pcg64::seed_from_u64(seed());
    let mut expected = Entries::new();
    for round in 0..100 {
        let batch = random_batch(&mut random);
        store.commit(&batch).unwrap();
        apply(&mut expected, &batch);
        match round % 10 {
            3 => assert!(entries(&mut store) == expected, "round {round}"),
            6 => {
                store.reopen().unwrap();
                assert!(entries(&mut store) == expected, "round {round}, reopened");
            }
            _ => {}
        }
    }
}

#[test]
fn snapshot_does_not_change_while_the_store_is_written() {
    let etcd = EtcdCluster::start(1, &[]);
    let cluster = cluster(&etcd);
    let mut store = open_permanently(&cluster);
    let mut random = Pcg64::seed_from_u64(seed());
    (0..20).for_each(|_| store.commit(&random_batch(&mut random)).unwrap());
    let expected = entries(&mut store);
    let mut snapshot = store.snapshot().unwrap();
    for _ in 0..20 {
        store.commit(&random_batch(&mut random)).unwrap();
    }
    assert!(entries(snapshot.as_mut()) == expected);
    assert!(entries(&mut store) != expected);
}

#[test]
fn manager_whose_lease_has_ended_cannot_write() {
    let etcd = EtcdCluster::start(1, &[]);
    let first = cluster(&etcd);
    let (mut paused, leadership) = open(&first, SHORT_TTL);
    paused.commit(&[put(Table::Hosts, b"a", vec![1])]).unwrap();

    let second = cluster(&etcd); // is elected when the lease of the first one, which is not renewed, has ended
    let (mut store, newer) = open(&second, TTL);
    assert!(newer.token() > leadership.token());
    store.commit(&[put(Table::Hosts, b"a", vec![2])]).unwrap();
    for _ in 0..2 {
        let error = paused.commit(&[put(Table::Hosts, b"a", vec![3])]).unwrap_err();
        assert!(matches!(error, StoreError::NotLeader { .. } | StoreError::Poisoned { .. }), "{error}");
    }
    assert!(matches!(paused.reopen(), Err(StoreError::NotLeader { .. })));
    assert_eq!(entries(&mut store), Entries::from([((Table::Hosts, b"a".to_vec()), vec![2])]));
}

#[test]
fn store_continues_while_members_are_killed_and_paused() {
    let mut etcd = EtcdCluster::start(3, &[]);
    let cluster = cluster(&etcd);
    let mut store = open_permanently(&cluster);
    let mut random = Pcg64::seed_from_u64(seed());
    let mut expected = Entries::new();
    for round in 0..9_usize {
        let member = round % 3;
        match round / 3 {
            0 => etcd.kill(member),
            1 => etcd.restart(member),
            _ => etcd.pause(member),
        }
        for _ in 0..10 {
            let batch = random_batch(&mut random);
            match store.commit(&batch) {
                Ok(()) => apply(&mut expected, &batch),
                Err(error) => {
                    // It is unknown whether the batch was written.
                    println!("round {round}: {error}");
                    let found = reopen(&mut store);
                    let mut written = expected.clone();
                    apply(&mut written, &batch);
                    assert!(found == expected || found == written, "round {round}");
                    expected = found;
                }
            }
        }
        match round / 3 {
            0 | 1 => etcd.restart(member),
            _ => etcd.resume(member),
        }
    }
    assert!(reopen(&mut store) == expected);
}

#[test]
fn cluster_without_majority_rejects_writes_and_loses_nothing() {
    let mut etcd = EtcdCluster::start(3, &[]);
    let cluster = cluster(&etcd);
    let mut store = open_permanently(&cluster);
    store.commit(&[put(Table::Hosts, b"a", vec![1])]).unwrap();
    etcd.kill(0);
    etcd.kill(1);
    let error = store.commit(&[put(Table::Hosts, b"a", vec![2])]).unwrap_err();
    assert!(matches!(error, StoreError::Etcd { .. }), "{error}");
    assert!(matches!(store.snapshot(), Err(StoreError::Poisoned { .. })));
    etcd.restart(0);
    etcd.restart(1);
    let found = reopen(&mut store);
    let with_value = |value| Entries::from([((Table::Hosts, b"a".to_vec()), vec![value])]);
    assert!(found == with_value(1) || found == with_value(2), "{found:?}"); // the second write is uncertain
}

#[test]
fn full_etcd_is_reported_as_full() {
    let etcd = EtcdCluster::start(1, &["--quota-backend-bytes", "16777216"]);
    let cluster = cluster(&etcd);
    let mut store = open_permanently(&cluster);
    store.commit(&[put(Table::Hosts, b"a", vec![1])]).unwrap();
    let value = vec![7; 1 << 20];
    let error =
        (0..40).find_map(|number: u8| store.commit(&[put(Table::Audit, &[number], value.clone())]).err());
    let error = error.expect("40 MiB do not fit into 16 MiB");
    assert!(error.is_full(), "{error}");
    assert_eq!(store.free_bytes().unwrap(), Some(0), "the quota of the configuration is larger");
}

/// A manager that ends between two parts leaves such a batch.
#[test]
fn incomplete_batch_of_the_log_is_ignored() {
    let etcd = EtcdCluster::start(1, &[]);
    let cluster = cluster(&etcd);
    let (store, leadership) = open(&cluster, TTL);
    wait_until_applied(&cluster);
    drop(store);
    for part in 0..3_u32 {
        let number = [1_u64.to_be_bytes().as_slice(), &part.to_be_bytes()].concat();
        let key = [b"/tarn/rack/log/".as_slice(), &number].concat();
        let success = vec![put_entry(key, vec![0; 1000])];
        let (client, request) = (cluster.client().clone(), TxnRequest { success, ..TxnRequest::default() });
        cluster.block_on(async move { client.txn(request).await }).unwrap();
    }
    let mut store = EtcdStore::open(cluster, &leadership).unwrap();
    // The batch is so large that it is still in the log when the entries are read.
    let batch: Vec<_> = (0..5000_u32).map(|key| put(Table::Audit, &key.to_be_bytes(), vec![1])).collect();
    let mut expected = Entries::new();
    apply(&mut expected, &batch);
    store.commit(&batch).unwrap();
    assert!(entries(&mut store) == expected);
    store.reopen().unwrap();
    assert!(entries(&mut store) == expected);
}

#[test]
fn prefixes_are_separate_stores() {
    let etcd = EtcdCluster::start(1, &[]);
    let (one, other) = (connect(etcd.endpoints(), "/tarn/a"), connect(etcd.endpoints(), "/tarn/ab"));
    let (mut store, mut other_store) = (open_permanently(&one), open_permanently(&other));
    store.commit(&[put(Table::Hosts, b"a", vec![1])]).unwrap();
    assert_eq!(entries(&mut other_store), Entries::new());
    assert_eq!(entries(&mut store).len(), 1);
}

/// Creates the entry that requests a hand-over to a process.
fn request_hand_over(cluster: &Cluster, next: &[u8]) {
    let success = vec![put_entry(cluster.hand_over_key(), next.to_vec())];
    let (client, request) = (cluster.client().clone(), TxnRequest { success, ..TxnRequest::default() });
    cluster.block_on(async move { client.txn(request).await }).expect("etcd accepts the entry");
}

#[test]
fn only_the_running_process_that_must_take_over_is_elected() {
    let etcd = EtcdCluster::start(1, &[]);
    let cluster = cluster(&etcd);
    let first = elect(&cluster, TTL);
    let token = first.token();
    request_hand_over(&cluster, b"ended");
    cluster.block_on(async move { first.resign().await }).unwrap();
    let second = elect_candidate(&cluster, candidate(&cluster, "second", TTL));
    assert!(second.token() > token, "the process that must take over does not run");
    request_hand_over(&cluster, b"ended");
    let held = async move { tokio::time::timeout(SHORT_TTL, second.hold()).await.is_err() };
    assert!(cluster.block_on(held), "the leader stopped for a process that does not run");
    request_hand_over(&cluster, b"second");
    let leader_key = b"/tarn/rack/other-leader".to_vec();
    let other = Candidate { leader_key, ..candidate(&cluster, "other", SHORT_TTL) };
    let campaign =
        async move { tokio::time::timeout(SHORT_TTL, Campaign::new(other).win(|_| ())).await.is_ok() };
    assert!(!cluster.block_on(campaign), "another process was elected");
}
