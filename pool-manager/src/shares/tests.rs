//! Weights on a disk with power failures: acknowledged weights are kept, and no others become
//! visible.

use std::time::Duration;

use pool::{
    ledger::{HostSpec, RackSpec},
    manager::Settings,
};
use units::{Bytes, Ns};

use super::*;
use crate::{
    driver::{Ended, Start},
    metrics::Metrics,
    records,
    store::{Store, Table, Write, backup, faulty::FaultyDisk, redb::RedbStore},
};

/// Generous, because the machines are shared.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Weights in a store on a disk that outlives them, of hosts without memory.
struct Rig {
    shares: Shares,
    handle: Handle,
    ended: Ended,
}

impl Rig {
    async fn start(disk: &FaultyDisk, hosts: &[&str]) -> Self {
        let mut store = RedbStore::open(disk.clone()).unwrap();
        let (loaded, weighed) = (records::load(&mut store).unwrap(), load(&mut store).unwrap());
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: None };
        let start = Start { settings, stop: None, loaded, rack_uuid: "a rack".into() };
        let (handle, ended) =
            crate::driver::start(start, Box::new(store), Arc::new(Metrics::default())).unwrap();
        let host =
            |host: &&str| HostSpec { name: name(host), cores: 1, local: Bytes::gib(1), emcs: Vec::new() };
        let rack = RackSpec { emcs: Vec::new(), hosts: hosts.iter().map(host).collect() };
        handle.ask(Ask::Configure(rack)).await.unwrap();
        Self { shares: Shares::new(weighed, handle.clone()), handle, ended }
    }

    /// Fails the power.
    async fn cut(self, disk: &FaultyDisk) {
        disk.power_off();
        self.handle.close();
        tokio::time::timeout(PATIENCE, self.ended).await.expect("it comes to an end").unwrap();
        disk.power_on();
    }

    async fn set(&self, host: &str, changes: &str) -> Result<Weights, NotSet> {
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

async fn next(watched: &mut Watched) -> Weights {
    let next = tokio::time::timeout(PATIENCE, watched.next()).await.expect("it was told of nothing");
    Weights::clone(&next)
}

#[tokio::test]
async fn weights_that_were_answered_survive_a_cut_of_the_power() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0", "h1"]).await;
    assert_eq!(rig.set("h0", "web=2 db=1.5").await.unwrap(), weights("web=2 db=1.5"));
    assert_eq!(rig.set("h1", "web=7").await.unwrap(), weights("web=7"));
    assert_eq!(rig.set("h0", "web=3 new=1").await.unwrap(), weights("web=3 db=1.5 new=1"), "others stay");
    rig.cut(&disk).await;
    let rig = Rig::start(&disk, &["h0", "h1"]).await;
    assert_eq!((rig.now("h0"), rig.now("h1")), (weights("web=3 db=1.5 new=1"), weights("web=7")));
    assert_eq!(rig.set("h0", "").await.unwrap(), weights("web=3 db=1.5 new=1"), "asking changes nothing");
}

#[tokio::test]
async fn a_weight_of_nothing_takes_back_what_was_set_for_good() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0"]).await;
    rig.set("h0", "web=2 db=1").await.unwrap();
    assert_eq!(rig.set("h0", "web=0 never=0").await.unwrap(), weights("db=1"));
    rig.cut(&disk).await;
    let rig = Rig::start(&disk, &["h0"]).await;
    assert_eq!(rig.now("h0"), weights("db=1"));
    assert_eq!(rig.set("h0", "db=0").await.unwrap(), weights(""));
    rig.cut(&disk).await;
    assert_eq!(load(&mut RedbStore::open(disk).unwrap()).unwrap().0, Weighed::new());
}

#[tokio::test]
async fn a_watcher_hears_its_hosts_weights_at_once_and_again_only_when_they_change() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0", "h1"]).await;
    let mut watched = rig.shares.watch(name("h0"));
    assert_eq!(next(&mut watched).await, weights(""), "also that there are none");
    rig.set("h0", "web=2").await.unwrap();
    assert_eq!(next(&mut watched).await, weights("web=2"));
    rig.set("h1", "web=9").await.unwrap();
    rig.set("h0", "web=2").await.unwrap();
    let more = tokio::time::timeout(Duration::from_millis(50), watched.next()).await;
    assert!(more.is_err(), "told of what is as it was: {more:?}");
    rig.set("h0", "web=5").await.unwrap();
    rig.set("h0", "db=1 web=0").await.unwrap();
    assert_eq!(next(&mut watched).await, weights("db=1"), "who is slow hears the newest");
}

#[tokio::test]
async fn what_could_not_be_made_durable_is_told_to_nobody() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0"]).await;
    rig.set("h0", "web=2").await.unwrap();
    let mut watched = rig.shares.watch(name("h0"));
    next(&mut watched).await;
    disk.power_off();
    let failed = rig.set("h0", "web=3").await;
    assert!(matches!(failed, Err(NotSet::Asked(Asked::Denied(Denied::StoreFailed)))), "{failed:?}");
    assert_eq!(rig.now("h0"), weights("web=2"));
    disk.power_on();
    while rig.set("h0", "web=4").await.is_err() {
        tokio::task::yield_now().await; // until the store has been reopened
    }
    assert_eq!(next(&mut watched).await, weights("web=4"));
    rig.cut(&disk).await;
    assert_eq!(Rig::start(&disk, &["h0"]).await.now("h0"), weights("web=4"));
}

#[tokio::test]
async fn a_host_has_no_more_weights_than_tenants_and_is_one_of_the_rack() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0"]).await;
    let all: Vec<String> = (0..TENANTS_PER_HOST_MAX).map(|n| format!("t{n}=1")).collect();
    rig.set("h0", &all.join(" ")).await.unwrap();
    let more = rig.set("h0", "one-more=1").await.unwrap_err().to_string();
    assert_eq!(more, "weights: 257 would be set on h0: must be at most 256; 0 takes one back");
    assert_eq!(rig.set("h0", "t0=0 one-more=1").await.unwrap().len(), TENANTS_PER_HOST_MAX);
    let stranger = rig.set("h9", "web=1").await;
    assert!(matches!(stranger, Err(NotSet::Asked(Asked::Denied(Denied::NoSuchHost(_))))), "{stranger:?}");
}

#[tokio::test]
async fn a_host_that_left_the_rack_leaves_no_weights_to_its_namesake() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0", "h1"]).await;
    rig.set("h0", "web=2").await.unwrap();
    rig.set("h1", "web=3").await.unwrap();
    let told = proto::v1::Shares { epoch: 1, state: 3, ..Default::default() };
    for host in ["h0", "h1"] {
        rig.shares.tell(name(host), crate::convert::shares::told(&name(host), told.clone()).unwrap());
    }
    rig.cut(&disk).await;
    let rig = Rig::start(&disk, &["h1"]).await;
    rig.shares.forget_strangers().await.unwrap();
    assert_eq!((rig.now("h0"), rig.now("h1")), (weights(""), weights("web=3")));
    rig.cut(&disk).await;
    let rig = Rig::start(&disk, &["h0", "h1"]).await;
    assert_eq!((rig.now("h0"), rig.now("h1")), (weights(""), weights("web=3")));
    assert_eq!(rig.shares.told(&name("h1")), None, "what was told is of one start");
}

#[tokio::test]
async fn who_set_which_weights_is_on_record() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0"]).await;
    rig.set("h0", "web=2 db=0.5").await.unwrap();
    rig.set("h0", "web=2").await.unwrap();
    rig.set("h0", "web=0 db=0").await.unwrap();
    let decisions = rig.handle.explain("host h0".into()).await.unwrap();
    let said: Vec<_> = decisions.iter().map(|(_, d)| (d.actor.to_string(), d.what.words())).collect();
    let said: Vec<_> =
        said.iter().map(|(who, words)| (who.as_str(), words.action, words.why.as_str())).collect();
    let expected =
        [("nova", "weigh", "set now: db=0.5 web=2"), ("nova", "weigh", "no weight is set any more")];
    assert_eq!(said, expected);
}

#[tokio::test]
async fn weights_are_in_a_backup_and_sound_to_a_check() {
    let disk = disk();
    let rig = Rig::start(&disk, &["h0"]).await;
    rig.set("h0", "web=2").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (file, store) = (folder.path().join("copy"), folder.path().join("store"));
    let entries = backup::backup(rig.handle.snapshot().await.unwrap().as_mut(), &file).unwrap();
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
    let judge = |store: &mut RedbStore| {
        let judge = &mut |table, key: &[u8], value: &[u8]| {
            records::judge(table, key, value).map_err(|bad| bad.to_string())
        };
        backup::check(store, judge).unwrap().faults
    };
    assert_eq!(judge(&mut restored), []);
    assert_eq!(load(&mut restored).unwrap().0, Weighed::from([(name("h0"), Arc::new(weights("web=2")))]));
    let unsound = Weights::from([(name("web"), f64::NAN)]);
    let no_host = Write::Put { table: Table::Weights, key: b"../h".to_vec(), value: Vec::new() };
    restored.commit(&[rows::write(&name("h1"), &unsound), no_host]).unwrap();
    assert_eq!(judge(&mut restored).len(), 2);
    assert_eq!(load(&mut restored).unwrap().0.len(), 1, "what is unsound is left out");
}
