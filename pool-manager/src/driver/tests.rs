//! Tests of the driver with a slow or failing disk and many callers: no caller blocks others, every
//! wait ends, and the driver stops.

use std::{collections::BTreeSet, time::Duration};

use pool::{
    audit::Actor,
    ledger::{EmcSpec, HostSpec, RackSpec, Reserve, Target},
    protocol::{Hello, Holding, ScrubReport},
    record::{Record, RequestKey},
    slice::{Scrub, Slot, State},
};
use units::{Bytes, Epoch, InstanceId, Name, RequestId, SliceId, limits::RECORDS_PER_WATCH_CHUNK_MAX};

use super::*;
use crate::store::{Scan, StoreError, Table, Write, redb::RedbStore};

/// Timeout for all waits; long, because test machines can be slow.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Store whose writes a test can block or fail with a [`Gate`].
struct GatedStore {
    store: RedbStore,
    gate: Arc<Gate>,
    reading: Arc<Mutex<()>>,
    free: Arc<AtomicU64>,
}

#[derive(Clone, Copy, PartialEq)]
enum GateMode {
    Open,
    Closed,
    /// The gate is closed, and a writer waits at it.
    Blocked,
    /// The next write fails without an effect.
    Fails,
    /// The next write takes effect but reports an error.
    FailsAfterWrite,
}

struct Gate(Mutex<GateMode>, Condvar);

impl Gate {
    fn set(&self, mode: GateMode) {
        *self.0.lock().unwrap() = mode;
        self.1.notify_all();
    }

    async fn wait_until_blocked(&self) {
        while *self.0.lock().unwrap() != GateMode::Blocked {
            tokio::task::yield_now().await;
        }
    }

    /// Waits while the gate is closed. Then opens the gate, and returns the mode for this write.
    fn pass(&self) -> GateMode {
        let mut mode = self.0.lock().unwrap();
        if *mode == GateMode::Closed {
            *mode = GateMode::Blocked;
        }
        mode = self.1.wait_while(mode, |mode| *mode == GateMode::Blocked).unwrap();
        std::mem::replace(&mut *mode, GateMode::Open)
    }
}

impl Scan for GatedStore {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.store.scan(table, each)
    }
}

impl Store for GatedStore {
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError> {
        let mode = self.gate.pass();
        if mode != GateMode::Fails {
            self.store.commit(batch)?;
        }
        match mode {
            GateMode::Fails | GateMode::FailsAfterWrite => {
                Err(StoreError::Poisoned { path: "a gate".into() })
            }
            GateMode::Open | GateMode::Closed | GateMode::Blocked => Ok(()),
        }
    }

    fn reopen(&mut self) -> Result<(), StoreError> {
        self.store.reopen()
    }

    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError> {
        Ok(Box::new(SlowSnapshot(self.store.snapshot()?, Arc::clone(&self.reading))))
    }

    fn free_bytes(&self) -> Result<Option<u64>, StoreError> {
        Ok(Some(self.free.load(Ordering::Relaxed)))
    }
}

/// Snapshot whose reads wait for a lock that a test can hold.
struct SlowSnapshot(Box<dyn Scan>, Arc<Mutex<()>>);

impl Scan for SlowSnapshot {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let _reading = self.1.lock().unwrap();
        self.0.scan(table, each)
    }
}

/// Driver of a rack with one host and one EMC. The host's agent is connected but sends no reports.
struct TestDriver {
    handle: Handle,
    ended: DriverEnd,
    gate: Arc<Gate>,
    reading: Arc<Mutex<()>>,
    /// Free space on the store's disk, in bytes.
    free: Arc<AtomicU64>,
    session: SessionId,
    _messages: mpsc::Receiver<SessionMessage>,
    directory: tempfile::TempDir,
}

fn parse_name(text: &str) -> Name {
    Name::new(text).unwrap()
}

impl TestDriver {
    async fn start(slices: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let gate = Arc::new(Gate(Mutex::new(GateMode::Open), Condvar::new()));
        let reading = Arc::new(Mutex::new(()));
        let free = Arc::new(AtomicU64::new(u64::MAX));
        let mut store = RedbStore::open_directory(&directory.path().join("store")).unwrap();
        let loaded = crate::records::load(&mut store).unwrap();
        let store = Box::new(GatedStore {
            store,
            gate: Arc::clone(&gate),
            reading: Arc::clone(&reading),
            free: Arc::clone(&free),
        });
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: None };
        let meta = loaded.meta.unwrap_or_else(|| Meta::new("11111111-2222-3333-4444-555555555555".into()));
        let (records, restored) = (loaded.records, loaded.restored);
        let initial = InitialState { settings, fence_command: None, meta, records, restored, leader: None };
        let (handle, ended) = super::start(initial, store, Arc::new(Metrics::default())).unwrap();
        handle.request(Request::Configure(rack(directory.path(), "e", slices))).await.unwrap();
        let (outbox, messages) = mpsc::channel(64);
        let hello = Hello {
            instance: InstanceId(1),
            boot_id: "b".into(),
            host_memory_socket: String::new(),
            devices: Vec::new(),
            can_rehome: true,
        };
        let (session, is_accepted) = handle.connect_agent(HostId(0), hello, outbox).unwrap();
        assert!(is_accepted);
        let driver = Self { handle, ended, gate, reading, session, _messages: messages, free, directory };
        driver
            .wait_until(|manager| manager.durable().emcs().all(|(_, emc)| emc.up) && !manager.is_writing())
            .await;
        driver
    }

    async fn wait_until(&self, holds: impl Fn(&Manager) -> bool) {
        let mut changed = self.handle.subscribe_to_notifications();
        let waiting = async {
            while !self.handle.read(|manager, _| holds(manager)).unwrap() {
                let _ = tokio::time::timeout(Duration::from_millis(50), changed.changed()).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.expect("timeout: the condition does not hold");
    }

    fn reserve(
        &self,
        vm: &str,
        slices: u32,
        wait: bool,
    ) -> tokio::task::JoinHandle<Result<RequestReply, DriverError>> {
        let request = RequestKey { client: parse_name("test"), id: RequestId::new(vm).unwrap() };
        let reserve = Reserve {
            request,
            host: parse_name("h"),
            vm: parse_name(vm),
            slices,
            local: Bytes::ZERO,
            cores: 1,
            pinned: false,
            commit_within: Ns::secs(3600),
            uid: None,
        };
        let (handle, wait) = (self.handle.clone(), wait.then_some(Ns::secs(3600)));
        tokio::spawn(async move { handle.request(Request::Reserve { reserve, wait }).await })
    }
}

/// Returns a rack with one host and one EMC. The EMC's directory is the same for all names.
fn rack(directory: &std::path::Path, emc: &str, slices: u32) -> RackSpec {
    let path = directory.join("emc").display().to_string();
    let spec = EmcSpec { name: parse_name(emc), slices, driver: "emulated".into(), path, serial: None };
    let host =
        HostSpec { name: parse_name("h"), cores: 4096, local: Bytes::gib(64), emcs: vec![parse_name(emc)] };
    RackSpec { emcs: vec![spec], hosts: vec![host] }
}

fn slot(manager: &Manager, slice: u32) -> Option<Slot> {
    manager.durable().slot(SliceId(slice))
}

impl TestDriver {
    async fn wait_until_slot(&self, slice: u32, holds: impl Fn(Slot) -> bool) {
        self.wait_until(|manager| slot(manager, slice).is_some_and(&holds)).await;
    }

    async fn report(&self, report: ObservedState) {
        self.handle.handle_report(self.session, report).await.unwrap();
    }

    async fn report_until_scrubbed(&self, slice: u32, epoch: u64) {
        let (holding, at) = (Holding { slice: SliceId(slice), epoch: Epoch(epoch) }, UnixMs(0));
        self.wait_until_slot(slice, |slot| {
            slot.epoch == holding.epoch && matches!(slot.state, State::Scrubbing(Scrub::Working(_)))
        })
        .await;
        let scrubbed = ScrubReport { holding, started: at, ended: at, verified: units::SLICE };
        self.report(ObservedState { scrubbed: vec![scrubbed], ..ObservedState::default() }).await;
        self.wait_until_slot(slice, |slot| slot.state == State::Free).await;
    }
}

/// Removes EMC "e" and adds EMC "f" with the same directory. The device stores the epochs by slice
/// index, so that slices of the new EMC start with higher epochs.
#[tokio::test(flavor = "multi_thread")]
async fn device_added_again_continues_with_higher_epochs() {
    let driver = TestDriver::start(3).await;
    driver.reserve("v", 1, false).await.unwrap().unwrap();
    driver.wait_until_slot(0, |slot| matches!(slot.state, State::Onlining(_))).await;
    driver.handle.request(release("v")).await.unwrap();
    let released = vec![Holding { slice: SliceId(0), epoch: Epoch(1) }];
    driver.report(ObservedState { released, ..ObservedState::default() }).await;
    driver.report_until_scrubbed(0, 2).await;
    driver.handle.request(Request::Configure(rack(driver.directory.path(), "f", 3))).await.unwrap();
    driver.report_until_scrubbed(3, 3).await;
    driver
        .wait_until(|manager| {
            let slots = [0, 3, 4, 5].map(|slice| slot(manager, slice).map(|slot| (slot.epoch.0, slot.state)));
            slots == [None, Some((3, State::Free)), Some((0, State::Free)), Some((0, State::Free))]
        })
        .await;
    driver.reserve("w", 3, false).await.unwrap().unwrap();
    for (slice, epoch) in [(3, 4), (4, 1), (5, 1)] {
        driver
            .wait_until_slot(slice, |slot| slot.epoch.0 == epoch && matches!(slot.state, State::Onlining(_)))
            .await;
    }
}

/// The write that removes the EMC takes effect on disk, but reports an error.
#[tokio::test(flavor = "multi_thread")]
async fn device_is_closed_if_its_removal_is_durable_despite_an_error() {
    let driver = TestDriver::start(3).await;
    let other = tempfile::tempdir().unwrap();
    driver.gate.set(GateMode::FailsAfterWrite);
    let removed = driver.handle.request(Request::Configure(rack(other.path(), "f", 3))).await;
    assert!(matches!(removed, Err(DriverError::Rejection(Rejection::StoreFailed))), "{removed:?}");
    driver.wait_until(|manager| manager.durable().find_emc_by_name(&parse_name("e")).is_none()).await;
    driver.handle.request(Request::Configure(rack(driver.directory.path(), "e", 3))).await.unwrap();
    driver
        .wait_until(|manager| {
            let added =
                manager.durable().find_emc_by_name(&parse_name("e")).and_then(|id| manager.durable().emc(id));
            added.is_some_and(|entry| entry.up)
        })
        .await;
}

fn release(vm: &str) -> Request {
    let actor = Actor::Client(parse_name("test"));
    Request::Release { target: Target::Vm(parse_name(vm)), force: false, reason: String::new(), actor }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_for_slices_do_not_block_other_requests() {
    let driver = TestDriver::start(8).await;
    let first = driver.reserve("v", 1, true);
    driver.wait_until(|manager| manager.durable().reservation_of(&parse_name("v")).is_some()).await;
    let waiters: Vec<_> = (0..LEDGER_REQUESTS_QUEUED_MAX)
        .map(|_| {
            let handle = driver.handle.clone();
            let wait = Request::WaitReady { target: Target::Vm(parse_name("v")), within: Ns::secs(3600) };
            tokio::spawn(async move { handle.request(wait).await })
        })
        .collect();
    while driver.handle.0.lock().replies.len() <= LEDGER_REQUESTS_QUEUED_MAX {
        tokio::task::yield_now().await;
    }
    driver.handle.request(release("v")).await.unwrap();
    for waiter in waiters.into_iter().chain([first]) {
        let result = tokio::time::timeout(TIMEOUT, waiter).await.unwrap().unwrap();
        assert!(matches!(result, Err(DriverError::Rejection(Rejection::WrongState { .. }))), "{result:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn caller_waiting_for_space_continues_after_a_failed_write() {
    let driver = TestDriver::start(12 * 1024).await;
    driver.gate.set(GateMode::Closed);
    let in_flight = driver.reserve("a", 1, false);
    driver.gate.wait_until_blocked().await;
    let full = [driver.reserve("b", 4096, false), driver.reserve("c", 4096, false)];
    driver.wait_until(Manager::is_full).await;
    let waiting = driver.reserve("d", 1, false);
    while driver.handle.0.request_permits.available_permits() > LEDGER_REQUESTS_QUEUED_MAX - 4 {
        tokio::task::yield_now().await;
    }
    driver.gate.set(GateMode::Fails);
    for reservation in full.into_iter().chain([in_flight]) {
        let result = tokio::time::timeout(TIMEOUT, reservation).await.unwrap().unwrap();
        assert!(matches!(result, Err(DriverError::Rejection(Rejection::StoreFailed))), "{result:?}");
    }
    tokio::time::timeout(TIMEOUT, waiting)
        .await
        .expect("timeout: the request still waits")
        .unwrap()
        .unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_concurrent_decision_searches_is_limited() {
    let driver = TestDriver::start(8).await;
    let search = || {
        let handle = driver.handle.clone();
        tokio::spawn(async move { handle.explain("rack".into()).await })
    };
    let lock = Arc::clone(&driver.reading);
    let slow = tokio::task::spawn_blocking(move || {
        let _reading = lock.lock().unwrap();
        std::thread::sleep(Duration::from_millis(200));
    });
    let searches: Vec<_> = (0..EXPLAIN_CALLS_IN_FLIGHT_MAX).map(|_| search()).collect();
    while driver.handle.0.explain_permits.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(driver.handle.explain("rack".into()).await, Err(DriverError::Overloaded)));
    slow.await.unwrap();
    for search in searches {
        assert_eq!(
            search.await.unwrap().unwrap().len(),
            1,
            "must return the decision about the configuration"
        );
    }
    driver.handle.explain("rack".into()).await.expect("permits were not returned");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_write_is_published_in_chunks() {
    let driver = TestDriver::start(4096).await;
    let mut chunks = driver.handle.subscribe_to_changes();
    driver.reserve("v", 4096, false).await.unwrap().unwrap();
    let mut slices = BTreeSet::new();
    while slices.len() < 4096 {
        let chunk = tokio::time::timeout(TIMEOUT, chunks.recv()).await.unwrap().unwrap();
        assert!((1..=RECORDS_PER_WATCH_CHUNK_MAX).contains(&chunk.records().len()));
        slices.extend(chunk.records().iter().filter_map(|record| match record {
            Record::Slice(id, _) => Some(*id),
            _ => None,
        }));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn number_of_watchers_is_limited() {
    let driver = TestDriver::start(8).await;
    let permit = |service| driver.handle.try_watch_permit(service);
    let mut permits: Vec<_> =
        (0..WATCH_STREAMS_MAX).map(|_| permit(WatchService::Scheduler).unwrap()).collect();
    assert!(permit(WatchService::Scheduler).is_none());
    assert!(permit(WatchService::Admin).is_some(), "schedulers do not prevent streams of administrators");
    permits.pop();
    assert!(permit(WatchService::Scheduler).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn iteration_count_is_constant_while_the_thread_is_blocked() {
    let driver = TestDriver::start(8).await;
    let iterations = || async {
        let before = driver.handle.wake_and_count_iterations();
        tokio::time::sleep(Duration::from_millis(100)).await;
        driver.handle.wake_and_count_iterations() - before
    };
    assert!(iterations().await > 0, "wake_and_count_iterations() must wake the thread");
    driver.gate.set(GateMode::Closed);
    let blocked = driver.reserve("a", 1, false);
    driver.gate.wait_until_blocked().await;
    assert_eq!(iterations().await, 0);
    driver.gate.set(GateMode::Open);
    blocked.await.unwrap().unwrap();
    assert!(iterations().await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn close_writes_pending_decisions_and_rejects_new_ones() {
    let driver = TestDriver::start(8).await;
    driver.gate.set(GateMode::Closed);
    let in_flight = driver.reserve("a", 1, false);
    driver.gate.wait_until_blocked().await;
    driver.handle.close();
    assert!(matches!(driver.handle.request(release("a")).await, Err(DriverError::Stopping)));
    driver.gate.set(GateMode::Open);
    in_flight.await.unwrap().unwrap();
    tokio::time::timeout(TIMEOUT, driver.ended).await.unwrap().unwrap();
}

fn is_space_low(driver: &TestDriver) -> bool {
    let alarms = driver.handle.read(|manager, _| manager.alarms()).unwrap();
    alarms.iter().any(|alarm| alarm.reason == "STORE_LOW_SPACE")
}

/// While the disk is full, the manager rejects reservations, so that no write triggers a check of
/// the free space. The driver must check the space without a write.
#[tokio::test(flavor = "multi_thread")]
async fn low_space_alarm_clears_without_a_write() {
    let driver = TestDriver::start(1).await;
    driver.free.store(0, Ordering::Relaxed);
    while !is_space_low(&driver) {
        driver.handle.write_entries(Vec::new()).await.unwrap();
    }
    let mut changed = driver.handle.subscribe_to_notifications();
    driver.free.store(u64::MAX, Ordering::Relaxed);
    while is_space_low(&driver) {
        tokio::time::timeout(TIMEOUT, changed.changed())
            .await
            .expect("timeout: the free space was not checked")
            .unwrap();
    }
}
