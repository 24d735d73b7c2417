//! Tests of weights with power failures: acknowledged weights survive, and weights whose write
//! failed are not visible.

use std::time::Duration;

use pool::{
    ledger::{HostSpec, RackSpec},
    manager::Settings,
    record::Meta,
};
use units::{Bytes, Ns};

use super::*;
use crate::{
    driver::{DriverEnd, InitialState},
    metrics::Metrics,
    records,
    store::{Store, Table, Write, backup, faulty::FaultyDisk, redb::RedbStore},
};

/// Timeout for all waits; long, because test machines can be slow.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn weights(text: &str) -> Weights {
    let weight =
        |word: &str| word.split_once('=').map(|(tenant, weight)| (name(tenant), weight.parse().unwrap()));
    text.split_whitespace().map(|word| weight(word).unwrap()).collect()
}

fn actor() -> Actor {
    Actor::Client(name("nova"))
}

/// Manager of hosts without EMCs. The disk of its store survives the manager.
struct TestManager {
    shares: Shares,
    handle: Handle,
    ended: DriverEnd,
}

impl TestManager {
    async fn start(disk: &FaultyDisk, hosts: &[&str]) -> Self {
        let mut store = RedbStore::open(disk.clone()).unwrap();
        let (loaded, stored_weights) = (records::load(&mut store).unwrap(), load(&mut store).unwrap());
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: None };
        let meta = loaded.meta.unwrap_or_else(|| Meta::new("11111111-2222-3333-4444-555555555555".into()));
        let (records, restored) = (loaded.records, loaded.restored);
        let initial = InitialState { settings, fence_command: None, meta, records, restored, leader: None };
        let (handle, ended) =
            crate::driver::start(initial, Box::new(store), Arc::new(Metrics::default())).unwrap();
        let host =
            |host: &&str| HostSpec { name: name(host), cores: 1, local: Bytes::gib(1), emcs: Vec::new() };
        let rack = RackSpec { emcs: Vec::new(), hosts: hosts.iter().map(host).collect() };
        handle.request(Request::Configure(rack)).await.unwrap();
        Self { shares: Shares::new(stored_weights, handle.clone()), handle, ended }
    }

    /// Stops the manager with a power failure.
    async fn fail_power(self, disk: &FaultyDisk) {
        disk.power_off();
        self.handle.close();
        tokio::time::timeout(WAIT_TIMEOUT, self.ended)
            .await
            .expect("timeout: the driver still runs")
            .unwrap();
        disk.power_on();
    }

    async fn set(&self, host: &str, changes: &str) -> Result<Weights, SetWeightsError> {
        let set = self.shares.set_weights(&name(host), weights(changes), actor()).await?;
        Ok(Weights::clone(&set))
    }

    fn now(&self, host: &str) -> Weights {
        Weights::clone(&self.shares.weights(&name(host)))
    }
}

fn disk() -> FaultyDisk {
    FaultyDisk::new(|_| 0)
}

async fn next(watcher: &mut WeightsWatcher) -> Weights {
    let next = tokio::time::timeout(WAIT_TIMEOUT, watcher.next())
        .await
        .expect("timeout: the watcher returned no weights");
    Weights::clone(&next)
}

#[tokio::test]
async fn acknowledged_weights_survive_a_power_failure() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0", "h1"]).await;
    assert_eq!(manager.set("h0", "web=2 db=1.5").await.unwrap(), weights("web=2 db=1.5"));
    assert_eq!(manager.set("h1", "web=7").await.unwrap(), weights("web=7"));
    assert_eq!(
        manager.set("h0", "web=3 new=1").await.unwrap(),
        weights("web=3 db=1.5 new=1"),
        "other weights must not change"
    );
    manager.fail_power(&disk).await;
    let manager = TestManager::start(&disk, &["h0", "h1"]).await;
    assert_eq!((manager.now("h0"), manager.now("h1")), (weights("web=3 db=1.5 new=1"), weights("web=7")));
    assert_eq!(
        manager.set("h0", "").await.unwrap(),
        weights("web=3 db=1.5 new=1"),
        "an empty request must not change weights"
    );
}

#[tokio::test]
async fn weight_of_zero_removes_the_entry_durably() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0"]).await;
    manager.set("h0", "web=2 db=1").await.unwrap();
    assert_eq!(manager.set("h0", "web=0 never=0").await.unwrap(), weights("db=1"));
    manager.fail_power(&disk).await;
    let manager = TestManager::start(&disk, &["h0"]).await;
    assert_eq!(manager.now("h0"), weights("db=1"));
    assert_eq!(manager.set("h0", "db=0").await.unwrap(), weights(""));
    manager.fail_power(&disk).await;
    assert_eq!(load(&mut RedbStore::open(disk).unwrap()).unwrap().0, WeightsByHost::new());
}

#[tokio::test]
async fn watcher_receives_current_weights_and_then_only_changes() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0", "h1"]).await;
    let mut watcher = manager.shares.watch(name("h0"));
    assert_eq!(next(&mut watcher).await, weights(""), "the first call must return empty weights");
    manager.set("h0", "web=2").await.unwrap();
    assert_eq!(next(&mut watcher).await, weights("web=2"));
    manager.set("h1", "web=9").await.unwrap();
    manager.set("h0", "web=2").await.unwrap();
    let unchanged = tokio::time::timeout(Duration::from_millis(50), watcher.next()).await;
    assert!(unchanged.is_err(), "the watcher returned unchanged weights: {unchanged:?}");
    manager.set("h0", "web=5").await.unwrap();
    manager.set("h0", "db=1 web=0").await.unwrap();
    assert_eq!(next(&mut watcher).await, weights("db=1"), "a slow watcher must receive the newest weights");
}

#[tokio::test]
async fn weights_whose_write_failed_are_not_visible() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0"]).await;
    manager.set("h0", "web=2").await.unwrap();
    let mut watcher = manager.shares.watch(name("h0"));
    next(&mut watcher).await;
    disk.power_off();
    let failed = manager.set("h0", "web=3").await;
    assert!(
        matches!(failed, Err(SetWeightsError::Driver(DriverError::Rejection(Rejection::StoreFailed)))),
        "{failed:?}"
    );
    assert_eq!(manager.now("h0"), weights("web=2"));
    disk.power_on();
    while manager.set("h0", "web=4").await.is_err() {
        tokio::task::yield_now().await; // wait until the store is reopened
    }
    assert_eq!(next(&mut watcher).await, weights("web=4"));
    manager.fail_power(&disk).await;
    assert_eq!(TestManager::start(&disk, &["h0"]).await.now("h0"), weights("web=4"));
}

#[tokio::test]
async fn too_many_weights_and_unknown_hosts_are_rejected() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0"]).await;
    let weights_at_limit: Vec<String> = (0..TENANTS_PER_HOST_MAX).map(|n| format!("t{n}=1")).collect();
    manager.set("h0", &weights_at_limit.join(" ")).await.unwrap();
    let error = manager.set("h0", "one-more=1").await.unwrap_err().to_string();
    assert_eq!(error, "weights: 257 weights for h0: must be at most 256; set a weight to 0 to remove it");
    assert_eq!(manager.set("h0", "t0=0 one-more=1").await.unwrap().len(), TENANTS_PER_HOST_MAX);
    let unknown_host = manager.set("h9", "web=1").await;
    assert!(
        matches!(
            unknown_host,
            Err(SetWeightsError::Driver(DriverError::Rejection(Rejection::NoSuchHost(_))))
        ),
        "{unknown_host:?}"
    );
}

#[tokio::test]
async fn new_host_does_not_inherit_weights_of_a_removed_host() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0", "h1"]).await;
    manager.set("h0", "web=2").await.unwrap();
    manager.set("h1", "web=3").await.unwrap();
    let report = proto::v1::Shares { epoch: 1, state: 3, ..Default::default() };
    for host in ["h0", "h1"] {
        manager.shares.reports.record(
            name(host),
            crate::convert::shares::parse_share_report(&name(host), report.clone()).unwrap(),
        );
    }
    manager.fail_power(&disk).await;
    let manager = TestManager::start(&disk, &["h1"]).await;
    manager.shares.remove_departed_hosts().await.unwrap();
    assert_eq!((manager.now("h0"), manager.now("h1")), (weights(""), weights("web=3")));
    manager.fail_power(&disk).await;
    let manager = TestManager::start(&disk, &["h0", "h1"]).await;
    assert_eq!((manager.now("h0"), manager.now("h1")), (weights(""), weights("web=3")));
    assert_eq!(manager.shares.reports.get(&name("h1")), None, "reports must not survive a restart");
}

#[tokio::test]
async fn weight_changes_are_recorded_with_their_actor() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0"]).await;
    manager.set("h0", "web=2 db=0.5").await.unwrap();
    manager.set("h0", "web=2").await.unwrap();
    manager.set("h0", "web=0 db=0").await.unwrap();
    let decisions = manager.handle.explain("host h0".into()).await.unwrap();
    let actual: Vec<_> = decisions.iter().map(|(_, d)| (d.actor.to_string(), d.what.describe())).collect();
    let actual: Vec<_> =
        actual.iter().map(|(actor, text)| (actor.as_str(), text.action, text.why.as_str())).collect();
    let expected = [("nova", "weigh", "weights: db=0.5 web=2"), ("nova", "weigh", "no tenant has a weight")];
    assert_eq!(actual, expected);
}

#[tokio::test]
async fn weights_are_backed_up_and_checked() {
    let disk = disk();
    let manager = TestManager::start(&disk, &["h0"]).await;
    manager.set("h0", "web=2").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (file, store) = (folder.path().join("copy"), folder.path().join("store"));
    let entries = backup::backup(manager.handle.snapshot().await.unwrap().as_mut(), &file).unwrap();
    assert_eq!(entries[&Table::Weights], 1);
    let generation = |_: &mut dyn Scan| Some(1);
    let restore = backup::Restore {
        from: &file,
        into: &store,
        force: false,
        unix_seconds: 1000,
        generation: &generation,
    };
    restore.run().unwrap();
    let mut restored = RedbStore::open_existing(&store).unwrap();
    let check_all = |store: &mut RedbStore| {
        let check_one = &mut |table, key: &[u8], value: &[u8]| {
            records::check_entry(table, key, value).map_err(|error| error.to_string())
        };
        backup::check(store, check_one).unwrap().errors
    };
    assert_eq!(check_all(&mut restored), []);
    assert_eq!(
        load(&mut restored).unwrap().0,
        WeightsByHost::from([(name("h0"), Arc::new(weights("web=2")))])
    );
    let invalid = Weights::from([(name("web"), f64::NAN)]);
    let invalid_host = Write::Put { table: Table::Weights, key: b"../h".to_vec(), value: Vec::new() };
    restored.commit(&[share_rows::write(&name("h1"), &invalid), invalid_host]).unwrap();
    assert_eq!(check_all(&mut restored).len(), 2);
    assert_eq!(load(&mut restored).unwrap().0.len(), 1, "invalid entries must be ignored");
}
