//! Clients that reserve and release slices while managers are killed and paused, and a checker of the history of their
//! calls. The checker uses only the calls: their times, results and the reservations that they returned.
//!
//! Each VM is reserved and released once. A history is linearizable only if each list of reservations contains every
//! VM whose reservation was acknowledged before the list was requested and whose release was requested after it was
//! returned, and no VM whose release was acknowledged before, or whose reservation was requested after. No slice may
//! belong to two VMs of a list.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use proto::v1 as wire;
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use tonic::{Code, Status, transport::Channel};

use crate::{
    elected_rack::ElectedRack,
    rack::{reserve_request, vm_ref},
};

/// Time limit of one call, so that a call to a paused manager ends.
const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
/// Time limit of a wait for the clients. It is high because test machines are shared.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay before a call is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Number of VMs with a slice that a client holds at most.
const VMS_PER_CLIENT_MAX: usize = 3;

/// Time of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Time before the first attempt.
    pub requested: Instant,
    /// Time after the acknowledgement.
    pub acknowledged: Instant,
}

/// Call that may not be acknowledged yet.
#[derive(Clone, Copy, Debug)]
struct Call {
    requested: Instant,
    acknowledged: Option<Instant>,
}

impl Call {
    fn start() -> Self {
        Self { requested: Instant::now(), acknowledged: None }
    }

    fn is_acknowledged_before(self, at: Instant) -> bool {
        self.acknowledged.is_some_and(|acknowledged| acknowledged < at)
    }
}

/// Calls about one VM.
#[derive(Clone, Debug)]
struct VmCalls {
    reserve: Call,
    release: Option<Call>,
}

/// List of reservations: time of the call, and slices by VM.
#[derive(Clone, Debug)]
struct List {
    span: Span,
    vms: BTreeMap<String, Vec<u32>>,
}

/// Acknowledged reservation, for the measurement of fail-overs.
#[derive(Clone, Copy, Debug)]
pub struct Acknowledgement {
    /// Time of the acknowledgement.
    pub at: Instant,
    /// Manager that acknowledged the reservation.
    pub manager: usize,
}

/// All calls of all clients.
#[derive(Debug, Default)]
pub struct History {
    vms: Mutex<BTreeMap<String, VmCalls>>,
    lists: Mutex<Vec<List>>,
    acknowledgements: Mutex<Vec<Acknowledgement>>,
    /// Replies that prove that a reservation was lost.
    lost: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl History {
    /// Returns the first reservation after `since` that another manager than `earlier` acknowledged.
    pub fn first_acknowledgement(&self, since: Instant, earlier: usize) -> Option<Acknowledgement> {
        let acknowledgements = lock(&self.acknowledgements);
        let mut recent = acknowledgements.iter().rev().take_while(|acknowledged| acknowledged.at > since);
        let mut first = None;
        recent
            .by_ref()
            .filter(|acknowledged| acknowledged.manager != earlier)
            .for_each(|found| first = Some(*found));
        first
    }

    /// Returns the number of acknowledged reservations and of lists.
    pub fn counts(&self) -> (usize, usize) {
        (lock(&self.acknowledgements).len(), lock(&self.lists).len())
    }

    fn change(&self, vm: &str, change: impl FnOnce(&mut VmCalls)) {
        change(lock(&self.vms).get_mut(vm).expect("the VM was reserved"));
    }

    /// Checks the history. Returns a description of each violation.
    pub fn check(&self) -> Vec<String> {
        let (vms, lists) = (lock(&self.vms), lock(&self.lists));
        let mut violations = lock(&self.lost).clone();
        for (number, list) in lists.iter().enumerate() {
            let Span { requested, acknowledged } = list.span;
            for (vm, calls) in vms.iter() {
                let is_listed = list.vms.contains_key(vm);
                let is_reserved = calls.reserve.is_acknowledged_before(requested);
                let may_be_released = calls.release.is_some_and(|call| call.requested < acknowledged);
                if is_reserved && !may_be_released && !is_listed {
                    violations.push(format!("list {number}: acknowledged reservation of {vm} is missing"));
                }
                let is_released = calls.release.is_some_and(|call| call.is_acknowledged_before(requested));
                let may_be_reserved = calls.reserve.requested < acknowledged;
                if is_listed && (is_released || !may_be_reserved) {
                    violations
                        .push(format!("list {number}: {vm} is listed, but is released or not yet reserved"));
                }
            }
            let mut owners = BTreeMap::new();
            for (vm, slices) in &list.vms {
                for slice in slices {
                    if let Some(other) = owners.insert(slice, vm) {
                        violations.push(format!("list {number}: slice {slice} belongs to {other} and {vm}"));
                    }
                }
            }
        }
        violations
    }
}

/// Clients that run until they are stopped.
#[derive(Debug)]
pub struct Load {
    /// Calls of the clients.
    pub history: Arc<History>,
    stopping: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts `clients` clients of a rack with `managers` managers.
    pub fn start(rack: &ElectedRack, managers: usize, clients: usize, seed: u64) -> Self {
        let (history, stopping) = (Arc::<History>::default(), Arc::<AtomicBool>::default());
        let endpoints: Arc<Vec<String>> = Arc::new((0..managers).map(|manager| rack.uri(manager)).collect());
        let leader = Arc::new(AtomicUsize::new(0));
        let threads = (0..clients).map(|name| {
            let client = Client {
                name,
                endpoints: Arc::clone(&endpoints),
                channels: vec![None; managers],
                leader: Arc::clone(&leader),
                history: Arc::clone(&history),
                stopping: Arc::clone(&stopping),
            };
            let random = Pcg64::seed_from_u64(seed + name as u64);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime is created");
            std::thread::spawn(move || runtime.block_on(client.run(random)))
        });
        let threads = threads.collect();
        Self { history, stopping, threads }
    }

    /// Waits until the clients have made this number of further reservations.
    pub fn wait_for_calls(&self, reservations: usize) {
        let (before, started) = (self.history.counts().0, Instant::now());
        while self.history.counts().0 < before + reservations {
            assert!(started.elapsed() < WAIT_TIMEOUT, "the clients make no progress");
            std::thread::sleep(RETRY_DELAY);
        }
    }

    /// Lets the clients complete their calls, and returns the history.
    pub fn stop(self) -> Arc<History> {
        self.stopping.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a client does not panic");
        }
        self.history
    }
}

struct Client {
    name: usize,
    endpoints: Arc<Vec<String>>,
    channels: Vec<Option<Channel>>,
    /// Manager that answered last, shared by all clients.
    leader: Arc<AtomicUsize>,
    history: Arc<History>,
    stopping: Arc<AtomicBool>,
}

impl Client {
    async fn run(mut self, mut random: Pcg64) {
        let (mut held, mut number) = (VecDeque::new(), 0);
        while !self.stopping.load(Ordering::Relaxed) {
            if held.len() < VMS_PER_CLIENT_MAX && random.random_ratio(1, 2) {
                number += 1;
                let vm = format!("c{}-{number}", self.name);
                self.reserve(&vm).await;
                held.push_back(vm);
            } else if random.random_ratio(1, 3) {
                self.list().await;
            } else if let Some(vm) = held.pop_front() {
                self.release(&vm).await;
            }
        }
        self.list().await;
    }

    async fn reserve(&mut self, vm: &str) {
        let (history, request) =
            (Arc::clone(&self.history), reserve_request("h0", vm, 1, &format!("r-{vm}")));
        lock(&history.vms).insert(vm.to_owned(), VmCalls { reserve: Call::start(), release: None });
        let called = self.call(async |channel| {
            let mut client = wire::scheduler_client::SchedulerClient::new(channel);
            client.reserve(request.clone()).await.map(|reply| reply.into_inner().vm)
        });
        let (span, manager, _) = called.await;
        history.change(vm, |calls| calls.reserve.acknowledged = Some(span.acknowledged));
        lock(&history.acknowledgements).push(Acknowledgement { at: span.acknowledged, manager });
    }

    async fn release(&mut self, vm: &str) {
        let history = Arc::clone(&self.history);
        let call = Call::start();
        history.change(vm, |calls| calls.release = Some(call));
        let is_first = AtomicBool::new(true);
        let called = self.call(async |channel| {
            let request = wire::ReleaseRequest { target: vm_ref(vm), ..Default::default() };
            let is_first = is_first.swap(false, Ordering::Relaxed);
            match wire::scheduler_client::SchedulerClient::new(channel).release(request).await {
                // An earlier attempt, whose reply was lost, can have been successful.
                Err(status) if status.code() == Code::NotFound => Ok(is_first),
                released => released.map(|_| false),
            }
        });
        let (span, _, is_lost) = called.await;
        if is_lost {
            lock(&history.lost).push(format!("acknowledged reservation of {vm} is not found"));
        }
        let acknowledged = Some(span.acknowledged);
        history.change(vm, |calls| calls.release = Some(Call { acknowledged, ..call }));
    }

    async fn list(&mut self) {
        let called = self.call(async |channel| {
            let mut client = wire::admin_client::AdminClient::new(channel);
            client.list_reservations(wire::ListReservationsRequest::default()).await
        });
        let (span, _, list) = called.await;
        let reservations = list.into_inner().reservations.into_iter();
        let vms = reservations.map(|reservation| (reservation.vm, reservation.slices)).collect();
        lock(&self.history.lists).push(List { span, vms });
    }

    /// Repeats a call until a manager acknowledges it. Returns the time of the call, the manager and the result.
    async fn call<T>(&mut self, call: impl AsyncFn(Channel) -> Result<T, Status>) -> (Span, usize, T) {
        let requested = Instant::now();
        loop {
            let manager = self.leader.load(Ordering::Relaxed);
            let attempt = async {
                let channel = self.channel(manager).await?;
                call(channel).await
            };
            match tokio::time::timeout(CALL_TIMEOUT, attempt).await {
                Ok(Ok(result)) => {
                    return (Span { requested, acknowledged: Instant::now() }, manager, result);
                }
                // The host has not yet reported to the new leader, or slices of released VMs are not yet free.
                Ok(Err(status)) if is_temporary_at_leader(&status) => {}
                Ok(Err(_)) | Err(_) => {
                    self.channels[manager] = None;
                    let next = (manager + 1) % self.endpoints.len();
                    let _ = self.leader.compare_exchange(manager, next, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn channel(&mut self, manager: usize) -> Result<Channel, Status> {
        if let Some(channel) = &self.channels[manager] {
            return Ok(channel.clone());
        }
        let endpoint = tonic::transport::Endpoint::from_shared(self.endpoints[manager].clone());
        let connected = endpoint.expect("the address is valid").connect().await;
        let channel = connected.map_err(|error| Status::unavailable(error.to_string()))?;
        self.channels[manager] = Some(channel.clone());
        Ok(channel)
    }
}

fn is_temporary_at_leader(status: &Status) -> bool {
    use tonic_types::StatusExt as _;
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    ["HOST_EXPECTED", "OUT_OF_SLICES"].contains(&reason.as_str())
}

/// Returns the violations of the device's files: a slice with files of two owners, or a file of an owner that is not in
/// `owned`, given as slices.
pub fn check_device(rack: &ElectedRack, owned: &BTreeSet<u32>) -> Vec<String> {
    let mut owners = BTreeMap::<u32, Vec<String>>::new();
    for name in rack.slice_files() {
        let slice = name.split('.').next().and_then(|slice| slice.parse().ok());
        owners.entry(slice.expect("the name begins with a slice")).or_default().push(name);
    }
    let several =
        owners.values().filter(|files| files.len() > 1).map(|files| format!("files of one slice: {files:?}"));
    let unowned = owners.iter().filter(|(slice, _)| !owned.contains(slice));
    several.chain(unowned.map(|(slice, files)| format!("slice {slice} is free, but has {files:?}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a history with one VM, whose calls have these times in milliseconds, and one list.
    fn history(
        reserve: [u64; 2],
        release: Option<[u64; 2]>,
        list: [u64; 2],
        listed: &[(&str, u32)],
    ) -> History {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let span = |[requested, acknowledged]: [u64; 2]| Span {
            requested: at(requested),
            acknowledged: at(acknowledged),
        };
        let history = History::default();
        let call = |times: [u64; 2]| Call { requested: at(times[0]), acknowledged: Some(at(times[1])) };
        let calls = VmCalls { reserve: call(reserve), release: release.map(call) };
        lock(&history.vms).insert("a".to_owned(), calls);
        let mut vms = BTreeMap::<String, Vec<u32>>::new();
        listed.iter().for_each(|(vm, slice)| vms.entry((*vm).to_owned()).or_default().push(*slice));
        lock(&history.lists).push(List { span: span(list), vms });
        history
    }

    #[test]
    fn checker_finds_lost_stale_and_early_reservations() {
        let is_valid =
            |reserve, release, list, listed: &[_]| history(reserve, release, list, listed).check().is_empty();
        let a = [("a", 1)];
        assert!(is_valid([0, 10], None, [20, 30], &a));
        assert!(!is_valid([0, 10], None, [20, 30], &[]), "the reservation is lost");
        assert!(is_valid([0, 10], None, [5, 30], &[]) && is_valid([0, 10], None, [5, 30], &a));
        assert!(is_valid([0, 10], Some([40, 50]), [20, 45], &[]), "the release may have had an effect");
        assert!(!is_valid([0, 10], Some([40, 50]), [60, 70], &a), "the list is stale");
        assert!(!is_valid([40, 50], None, [20, 30], &a), "the list contains a future reservation");
    }

    #[test]
    fn checker_finds_slices_with_two_owners() {
        let found = history([0, 10], None, [20, 30], &[("a", 1), ("b", 1)]).check();
        assert!(found.iter().any(|violation| violation.contains("slice 1 belongs to a and b")), "{found:?}");
    }
}
