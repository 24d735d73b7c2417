//! The driver with a slow or failing disk and many callers: waiting callers do not exclude others,
//! every wait ends, and the stop completes.

use std::{collections::BTreeSet, time::Duration};

use pool::{
    audit::Actor,
    ledger::{EmcSpec, HostSpec, RackSpec, Reserve, Target},
    protocol::{Hello, Holding, Scrubbed},
    record::{Record, RequestKey},
    slice::{Scrub, Slot, State},
};
use units::{Bytes, Epoch, InstanceId, Name, RequestId, SliceId, limits::WATCH_CHUNK_RECORDS_MAX};

use super::*;
use crate::store::{Scan, StoreError, Table, Write, redb::RedbStore};

/// Generous: the machines are shared.
const PATIENCE: Duration = Duration::from_secs(60);

/// A real store behind a gate.
struct Gated {
    store: RedbStore,
    gate: Arc<Gate>,
    reading: Arc<Mutex<()>>,
    free: Arc<AtomicU64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Open,
    Shut,
    /// Closed gate, with a waiting caller.
    Held,
    /// Open, but nothing comes through.
    Fails,
    /// Open: calls take effect and report an error.
    Lies,
}

struct Gate(Mutex<Way>, Condvar);

impl Gate {
    fn set(&self, way: Way) {
        *self.0.lock().unwrap() = way;
        self.1.notify_all();
    }

    async fn until_held(&self) {
        while *self.0.lock().unwrap() != Way::Held {
            tokio::task::yield_now().await;
        }
    }

    /// Waits while it is shut; then it is open. How the first comes through.
    fn pass(&self) -> Way {
        let mut way = self.0.lock().unwrap();
        if *way == Way::Shut {
            *way = Way::Held;
        }
        way = self.1.wait_while(way, |way| *way == Way::Held).unwrap();
        std::mem::replace(&mut *way, Way::Open)
    }
}

impl Scan for Gated {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.store.scan(table, each)
    }
}

impl Store for Gated {
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        let way = self.gate.pass();
        if way != Way::Fails {
            self.store.commit(batch)?;
        }
        match way {
            Way::Fails | Way::Lies => Err(StoreError::Poisoned { place: "a gate".into() }),
            Way::Open | Way::Shut | Way::Held => Ok(()),
        }
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        self.store.reopen()
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        Ok(Box::new(Slow(self.store.snapshot()?, Arc::clone(&self.reading))))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        Ok(Some(self.free.load(Ordering::Relaxed)))
    }
}

/// Reads when a lock is free.
struct Slow(Box<dyn Scan>, Arc<Mutex<()>>);

impl Scan for Slow {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let _reading = self.1.lock().unwrap();
        self.0.scan(table, each)
    }
}

/// A driver of one host and one EMC, whose agent is connected and does nothing.
struct Rig {
    handle: Handle,
    ended: Ended,
    gate: Arc<Gate>,
    reading: Arc<Mutex<()>>,
    /// Free bytes of the store's disk.
    free: Arc<AtomicU64>,
    session: SessionId,
    _orders: mpsc::Receiver<ToSession>,
    directory: tempfile::TempDir,
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

impl Rig {
    async fn start(slices: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let gate = Arc::new(Gate(Mutex::new(Way::Open), Condvar::new()));
        let reading = Arc::new(Mutex::new(()));
        let free = Arc::new(AtomicU64::new(u64::MAX));
        let mut store = RedbStore::open_directory(&directory.path().join("store")).unwrap();
        let loaded = crate::records::load(&mut store).unwrap();
        let store = Box::new(Gated {
            store,
            gate: Arc::clone(&gate),
            reading: Arc::clone(&reading),
            free: Arc::clone(&free),
        });
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: None };
        let start = Start { settings, stop: None, loaded, rack_uuid: "a rack".into() };
        let (handle, ended) = super::start(start, store, Arc::new(Metrics::default())).unwrap();
        handle.ask(Ask::Configure(rack(directory.path(), "e", slices))).await.unwrap();
        let (outbox, orders) = mpsc::channel(64);
        let hello = Hello {
            instance: InstanceId(1),
            boot_id: "b".into(),
            host_memory_socket: String::new(),
            devices: Vec::new(),
        };
        let session = handle.agent_up(HostId(0), hello, outbox).unwrap();
        let rig = Self { handle, ended, gate, reading, session, _orders: orders, free, directory };
        rig.until(|manager| manager.durable().emcs().all(|(_, emc)| emc.up) && !manager.is_writing()).await;
        rig
    }

    async fn until(&self, holds: impl Fn(&Manager) -> bool) {
        let mut changed = self.handle.changed();
        let waiting = async {
            while !self.handle.look(|manager, _| holds(manager)).unwrap() {
                let _ = tokio::time::timeout(Duration::from_millis(50), changed.changed()).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.expect("it takes too long");
    }

    fn reserve(&self, vm: &str, slices: u32, wait: bool) -> tokio::task::JoinHandle<Result<Answer, Asked>> {
        let request = RequestKey { client: name("test"), id: RequestId::new(vm).unwrap() };
        let reserve = Reserve {
            request,
            host: name("h"),
            vm: name(vm),
            slices,
            local: Bytes::ZERO,
            cores: 1,
            pinned: false,
            commit_within: Ns::secs(3600),
            uid: None,
        };
        let (handle, wait) = (self.handle.clone(), wait.then_some(Ns::secs(3600)));
        tokio::spawn(async move { handle.ask(Ask::Reserve { reserve, wait }).await })
    }
}

/// One host and one EMC, which is always in the same directory.
fn rack(directory: &std::path::Path, emc: &str, slices: u32) -> RackSpec {
    let path = directory.join("emc").display().to_string();
    let spec = EmcSpec { name: name(emc), slices, driver: "emulated".into(), path, serial: None };
    let host = HostSpec { name: name("h"), cores: 4096, local: Bytes::gib(64), emcs: vec![name(emc)] };
    RackSpec { emcs: vec![spec], hosts: vec![host] }
}

fn slot(manager: &Manager, slice: u32) -> Option<Slot> {
    manager.durable().slot(SliceId(slice))
}

impl Rig {
    async fn until_slot(&self, slice: u32, holds: impl Fn(Slot) -> bool) {
        self.until(|manager| slot(manager, slice).is_some_and(&holds)).await;
    }

    async fn report(&self, have: Have) {
        self.handle.agent_have(self.session, have).await.unwrap();
    }

    async fn until_scrubbed(&self, slice: u32, epoch: u64) {
        let (holding, at) = (Holding { slice: SliceId(slice), epoch: Epoch(epoch) }, UnixMs(0));
        self.until_slot(slice, |slot| {
            slot.epoch == holding.epoch && matches!(slot.state, State::Scrubbing(Scrub::Working(_)))
        })
        .await;
        let scrubbed = Scrubbed { holding, started: at, ended: at, verified: units::SLICE };
        self.report(Have { scrubbed: vec![scrubbed], ..Have::default() }).await;
        self.until_slot(slice, |slot| slot.state == State::Free).await;
    }
}

/// The device's directory is let go of with its EMC. It remembers the epochs of each slice by its index, so that owners under
/// the new numbers get higher ones.
#[tokio::test(flavor = "multi_thread")]
async fn readded_device_continues_its_epochs() {
    let rig = Rig::start(3).await;
    rig.reserve("v", 1, false).await.unwrap().unwrap();
    rig.until_slot(0, |slot| matches!(slot.state, State::Onlining(_))).await;
    rig.handle.ask(release("v")).await.unwrap();
    let released = vec![Holding { slice: SliceId(0), epoch: Epoch(1) }];
    rig.report(Have { released, ..Have::default() }).await;
    rig.until_scrubbed(0, 2).await;
    rig.handle.ask(Ask::Configure(rack(rig.directory.path(), "f", 3))).await.unwrap();
    rig.until_scrubbed(3, 3).await;
    rig.until(|manager| {
        let slots = [0, 3, 4, 5].map(|slice| slot(manager, slice).map(|slot| (slot.epoch.0, slot.state)));
        slots == [None, Some((3, State::Free)), Some((0, State::Free)), Some((0, State::Free))]
    })
    .await;
    rig.reserve("w", 3, false).await.unwrap().unwrap();
    for (slice, epoch) in [(3, 4), (4, 1), (5, 1)] {
        rig.until_slot(slice, |slot| slot.epoch.0 == epoch && matches!(slot.state, State::Onlining(_))).await;
    }
}

/// The write that removes the EMC reports an error and is on disk all the same.
#[tokio::test(flavor = "multi_thread")]
async fn device_of_an_emc_whose_removal_is_found_on_disk_is_let_go_of() {
    let rig = Rig::start(3).await;
    let other = tempfile::tempdir().unwrap();
    rig.gate.set(Way::Lies);
    let removed = rig.handle.ask(Ask::Configure(rack(other.path(), "f", 3))).await;
    assert!(matches!(removed, Err(Asked::Denied(Denied::StoreFailed))), "{removed:?}");
    rig.until(|manager| manager.durable().emc_named(&name("e")).is_none()).await;
    rig.handle.ask(Ask::Configure(rack(rig.directory.path(), "e", 3))).await.unwrap();
    rig.until(|manager| {
        let added = manager.durable().emc_named(&name("e")).and_then(|id| manager.durable().emc(id));
        added.is_some_and(|entry| entry.up)
    })
    .await;
}

fn release(vm: &str) -> Ask {
    let actor = Actor::Client(name("test"));
    Ask::Release { target: Target::Vm(name(vm)), force: false, reason: String::new(), actor }
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_for_slices_keep_nobody_out() {
    let rig = Rig::start(8).await;
    let first = rig.reserve("v", 1, true);
    rig.until(|manager| manager.durable().reservation_of(&name("v")).is_some()).await;
    let waiters: Vec<_> = (0..REQUESTS_QUEUED_MAX)
        .map(|_| {
            let handle = rig.handle.clone();
            let wait = Ask::WaitReady { target: Target::Vm(name("v")), within: Ns::secs(3600) };
            tokio::spawn(async move { handle.ask(wait).await })
        })
        .collect();
    while rig.handle.0.lock().replies.len() <= REQUESTS_QUEUED_MAX {
        tokio::task::yield_now().await;
    }
    rig.handle.ask(release("v")).await.unwrap();
    for waiter in waiters.into_iter().chain([first]) {
        let heard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert!(matches!(heard, Err(Asked::Denied(Denied::WrongState { .. }))), "{heard:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waited_for_room_in_a_batch_that_was_given_up_goes_on() {
    let rig = Rig::start(12 * 1024).await;
    rig.gate.set(Way::Shut);
    let under_way = rig.reserve("a", 1, false);
    rig.gate.until_held().await;
    let full = [rig.reserve("b", 4096, false), rig.reserve("c", 4096, false)];
    rig.until(Manager::is_full).await;
    let parked = rig.reserve("d", 1, false);
    while rig.handle.0.places.available_permits() > REQUESTS_QUEUED_MAX - 4 {
        tokio::task::yield_now().await;
    }
    rig.gate.set(Way::Fails);
    for asked in full.into_iter().chain([under_way]) {
        let heard = tokio::time::timeout(PATIENCE, asked).await.unwrap().unwrap();
        assert!(matches!(heard, Err(Asked::Denied(Denied::StoreFailed))), "{heard:?}");
    }
    tokio::time::timeout(PATIENCE, parked).await.expect("it sleeps for ever").unwrap().unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_so_many_search_the_decisions_at_a_time() {
    let rig = Rig::start(8).await;
    let search = || {
        let handle = rig.handle.clone();
        tokio::spawn(async move { handle.explain("rack".into()).await })
    };
    let held = Arc::clone(&rig.reading);
    let slow = tokio::task::spawn_blocking(move || {
        let _reading = held.lock().unwrap();
        std::thread::sleep(Duration::from_millis(200));
    });
    let searches: Vec<_> = (0..EXPLAIN_CALLS_IN_FLIGHT_MAX).map(|_| search()).collect();
    while rig.handle.0.searches.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(rig.handle.explain("rack".into()).await, Err(Asked::Overloaded)));
    slow.await.unwrap();
    for search in searches {
        assert_eq!(search.await.unwrap().unwrap().len(), 1, "that the rack was configured");
    }
    rig.handle.explain("rack".into()).await.expect("the places are free again");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_write_reaches_watchers_in_chunks() {
    let rig = Rig::start(4096).await;
    let mut chunks = rig.handle.changes();
    rig.reserve("v", 4096, false).await.unwrap().unwrap();
    let mut slices = BTreeSet::new();
    while slices.len() < 4096 {
        let chunk = tokio::time::timeout(PATIENCE, chunks.recv()).await.unwrap().unwrap();
        assert!((1..=WATCH_CHUNK_RECORDS_MAX).contains(&chunk.records().len()));
        slices.extend(chunk.records().iter().filter_map(|record| match record {
            Record::Slice(id, _) => Some(*id),
            _ => None,
        }));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_watchers_is_limited() {
    let rig = Rig::start(8).await;
    let mut permits: Vec<_> = (0..WATCHERS_MAX).map(|_| rig.handle.try_watch_permit().unwrap()).collect();
    assert!(rig.handle.try_watch_permit().is_none());
    permits.pop();
    assert!(rig.handle.try_watch_permit().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_a_write_holds_up_makes_no_turns() {
    let rig = Rig::start(8).await;
    let turns = || async {
        let before = rig.handle.turns();
        tokio::time::sleep(Duration::from_millis(100)).await;
        rig.handle.turns() - before
    };
    assert!(turns().await > 0, "a look at it wakes it");
    rig.gate.set(Way::Shut);
    let held_up = rig.reserve("a", 1, false);
    rig.gate.until_held().await;
    assert_eq!(turns().await, 0);
    rig.gate.set(Way::Open);
    held_up.await.unwrap().unwrap();
    assert!(turns().await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_decided_before_the_end_is_written_and_nothing_after_it() {
    let rig = Rig::start(8).await;
    rig.gate.set(Way::Shut);
    let under_way = rig.reserve("a", 1, false);
    rig.gate.until_held().await;
    rig.handle.close();
    assert!(matches!(rig.handle.ask(release("a")).await, Err(Asked::Stopping)));
    rig.gate.set(Way::Open);
    under_way.await.unwrap().unwrap();
    tokio::time::timeout(PATIENCE, rig.ended).await.unwrap().unwrap();
}

fn is_space_low(rig: &Rig) -> bool {
    let alarms = rig.handle.look(|manager, _| manager.alarms()).unwrap();
    alarms.iter().any(|alarm| alarm.reason == "STORE_LOW_SPACE")
}

/// While the disk is full reservations are refused, so that nothing is written after which the space would be looked at.
#[tokio::test(flavor = "multi_thread")]
async fn alarm_of_a_full_disk_lifts_without_a_write() {
    let rig = Rig::start(1).await;
    rig.free.store(0, Ordering::Relaxed);
    while !is_space_low(&rig) {
        rig.handle.keep(Vec::new()).await.unwrap();
    }
    let mut changed = rig.handle.changed();
    rig.free.store(u64::MAX, Ordering::Relaxed);
    while is_space_low(&rig) {
        tokio::time::timeout(PATIENCE, changed.changed()).await.expect("a look at the disk").unwrap();
    }
}
