//! Replays the events of a trace in order, with many concurrent calls. A VM that does not fit is
//! placed again after all earlier calls are complete, and again while slices drain. Rejections
//! therefore result from the packing of the trace and not from the speed of the replay.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use cli_runtime::{Failure, lists};
use indicatif::{ProgressBar, ProgressStyle};
use sim::{
    packing::{VmShape, median},
    trace::{Arrival, Event, EventKind, events},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::{JoinError, JoinSet},
    time::{Instant, timeout_at},
};
use units::{Bytes, Name, Ns};

use super::{
    ReplayState,
    calls::retry_while_unavailable,
    capacity::{PlacedVm, parse_name},
    lost_reservations,
    vm_lifecycle::{self, Vm},
    watcher,
};

/// Template of the progress bar, in the syntax of indicatif.
const PROGRESS_TEMPLATE: &str = "{elapsed_precise} [{wide_bar}] {pos}/{len} events, {per_sec}  {msg}";

/// State of a replay in progress.
#[derive(Debug)]
pub(super) struct TracePlayer {
    rack: Arc<ReplayState>,
    permits: Arc<Semaphore>,
    clients: u32,
    vm_tasks: JoinSet<Result<(), Failure>>,
    running: BTreeMap<usize, oneshot::Sender<OwnedSemaphorePermit>>,
    comparisons: JoinSet<Result<BTreeSet<String>, Failure>>,
    /// Acknowledged reservations that were missing in the ledger.
    lost: BTreeSet<String>,
    reconnect_count: u64,
    /// Number of draining slices that did not become free within the settle time.
    stuck_slices: u32,
    /// Whether no request was sent since the last exact snapshot.
    is_snapshot_exact: bool,
    stranded: StrandedMemory,
    bar: ProgressBar,
}

/// Stranded local memory, integrated over the time of the trace to compute its mean.
#[derive(Clone, Copy, Debug)]
struct StrandedMemory {
    shape: VmShape,
    since: Ns,
    now: Bytes,
    byte_seconds: f64,
    seconds: f64,
}

impl TracePlayer {
    /// Creates a replay that has not started yet. `clients` is the number of concurrent calls.
    pub(super) fn new(rack: Arc<ReplayState>, arrivals: &[Arrival], clients: u32) -> Self {
        let shape =
            median(arrivals.iter().map(vm_shape)).unwrap_or(VmShape { cores: 1, memory: Bytes::gib(1) });
        let stranded =
            StrandedMemory { shape, since: Ns::ZERO, now: Bytes::ZERO, byte_seconds: 0.0, seconds: 0.0 };
        let bar = ProgressBar::new(0);
        bar.set_style(ProgressStyle::with_template(PROGRESS_TEMPLATE).expect("the template is valid"));
        Self {
            rack,
            permits: Arc::new(Semaphore::new(clients as usize)),
            clients,
            vm_tasks: JoinSet::new(),
            running: BTreeMap::new(),
            comparisons: JoinSet::new(),
            lost: BTreeSet::new(),
            reconnect_count: 0,
            stuck_slices: 0,
            is_snapshot_exact: false,
            stranded,
            bar,
        }
    }

    /// Replays all events of the trace. VMs without a departure still run afterwards.
    pub(super) async fn play_all(&mut self, arrivals: &[Arrival]) -> Result<(), Failure> {
        let events = events(arrivals);
        self.bar.set_length(events.len() as u64);
        for event in events {
            self.collect_finished_calls()?;
            self.play_event(event, arrivals).await?;
            self.bar.inc(1);
        }
        self.wait_for_calls().await?;
        self.bar.finish_and_clear();
        Ok(())
    }

    async fn play_event(&mut self, event: Event, arrivals: &[Arrival]) -> Result<(), Failure> {
        let now = self.rack.free_capacity().current().stranded(self.stranded.shape);
        self.stranded.advance_to(event.at, now);
        match event.kind {
            EventKind::Arrive => self.arrive(event.index, &arrivals[event.index]).await,
            EventKind::Depart => self.depart(event.index).await,
        }
    }

    async fn arrive(&mut self, index: usize, arrival: &Arrival) -> Result<(), Failure> {
        let shape = vm_shape(arrival);
        let permit = self.acquire_call_permit().await?;
        let placed = self.rack.free_capacity().place(shape, &BTreeSet::new());
        let place = match placed {
            Some(place) => Some((place, permit)),
            None => {
                drop(permit);
                self.place_after_wait(shape).await?
            }
        };
        let Some((place, permit)) = place else {
            self.rack.tally().rejected += 1;
            return Ok(());
        };
        self.is_snapshot_exact = false;
        let vm = Vm { name: format!("vm{}.{}", arrival.line, self.rack.run_name), shape };
        let (depart, running) = oneshot::channel();
        self.running.insert(index, depart);
        self.vm_tasks.spawn(vm_lifecycle::run(Arc::clone(&self.rack), vm, place, permit, running));
        Ok(())
    }

    /// Ends a VM: its test VMM exits and its memory is released. Does nothing if the VM was
    /// rejected or its test VMM has died.
    async fn depart(&mut self, index: usize) -> Result<(), Failure> {
        if let Some(depart) = self.running.remove(&index).filter(|depart| !depart.is_closed()) {
            self.is_snapshot_exact = false;
            let permit = self.acquire_call_permit().await?;
            // Sending fails if the test VMM has just died. The task of the VM then releases the
            // memory.
            drop(depart.send(permit));
        }
        Ok(())
    }

    async fn acquire_call_permit(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Ok(Arc::clone(&self.permits).acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// Waits until no call is in progress.
    async fn wait_for_calls(&mut self) -> Result<(), Failure> {
        drop(self.permits.acquire_many(self.clients).await.expect("the semaphore is never closed"));
        self.collect_finished_calls()
    }

    /// Places a VM with an exact snapshot. If the VM does not fit but draining slices could help,
    /// waits for newer snapshots within the settle time.
    async fn place_after_wait(
        &mut self,
        shape: VmShape,
    ) -> Result<Option<(PlacedVm, OwnedSemaphorePermit)>, Failure> {
        self.wait_for_calls().await?;
        if !self.is_snapshot_exact {
            watcher::apply_exact_snapshot(&self.rack.manager, &self.rack.free).await?;
            self.is_snapshot_exact = true;
        }
        let mut place = self.rack.free_capacity().place(shape, &BTreeSet::new());
        if place.is_none() {
            place = self.wait_for_slices(shape).await?;
        }
        match place {
            Some(place) => Ok(Some((place, self.acquire_call_permit().await?))),
            None => Ok(None),
        }
    }

    async fn wait_for_slices(&mut self, shape: VmShape) -> Result<Option<PlacedVm>, Failure> {
        if self.rack.settle == Duration::ZERO {
            return Ok(None);
        }
        let mut snapshots = self.rack.snapshots.clone();
        snapshots.mark_snapshot_seen();
        let draining = self.draining_slices().await?;
        let slices = draining.values().sum();
        self.stuck_slices = self.stuck_slices.min(slices);
        if slices == self.stuck_slices || !self.rack.free_capacity().would_fit(shape, &draining) {
            return Ok(None);
        }
        let deadline = Instant::now() + self.rack.settle;
        loop {
            let place = self.rack.free_capacity().place(shape, &BTreeSet::new());
            if place.is_some() {
                return Ok(place);
            }
            if timeout_at(deadline, snapshots.wait_for_newer_snapshot()).await.is_err() {
                self.stuck_slices = self.draining_slices().await?.values().sum();
                return Ok(None);
            }
        }
    }

    async fn draining_slices(&self) -> Result<BTreeMap<Name, u32>, Failure> {
        let emcs = retry_while_unavailable(|| lists::emcs(&self.rack.manager)).await?;
        emcs.into_iter().map(|emc| Ok((parse_name(emc.emc)?, emc.draining))).collect()
    }

    /// Collects the results of finished tasks. After each restart of the manager, starts a
    /// comparison with the ledger.
    fn collect_finished_calls(&mut self) -> Result<(), Failure> {
        while let Some(ended) = self.vm_tasks.try_join_next() {
            flatten_join_result(ended)?;
        }
        while let Some(comparison) = self.comparisons.try_join_next() {
            self.lost.extend(flatten_join_result(comparison)?);
        }
        let reconnect_count = self.rack.snapshots.reconnect_count();
        if reconnect_count != self.reconnect_count {
            self.reconnect_count = reconnect_count;
            self.comparisons.spawn(lost_reservations::find(Arc::clone(&self.rack)));
        }
        let tally = self.rack.tally();
        self.bar.set_message(format!("{} placed, {} rejected", tally.placed, tally.rejected));
        Ok(())
    }

    /// Compares the journal with the ledger a last time. Returns the number of reservations that
    /// were missing in any comparison.
    pub(super) async fn find_lost_reservations(&mut self) -> Result<usize, Failure> {
        while let Some(comparison) = self.comparisons.join_next().await {
            self.lost.extend(flatten_join_result(comparison)?);
        }
        self.lost.extend(lost_reservations::find(Arc::clone(&self.rack)).await?);
        Ok(self.lost.len())
    }

    /// Releases all VMs that still run.
    pub(super) async fn release_all(&mut self) -> Result<(), Failure> {
        while let Some((index, _)) = self.running.first_key_value() {
            let index = *index;
            self.depart(index).await?;
        }
        while let Some(ended) = self.vm_tasks.join_next().await {
            flatten_join_result(ended)?;
        }
        Ok(())
    }

    /// Returns the mean stranded memory over the time of the trace, in bytes.
    pub(super) fn stranded_mean(&self) -> f64 {
        self.stranded.mean()
    }
}

fn vm_shape(arrival: &Arrival) -> VmShape {
    VmShape { cores: arrival.cores, memory: arrival.memory }
}

fn flatten_join_result<T>(ended: Result<Result<T, Failure>, JoinError>) -> Result<T, Failure> {
    ended.unwrap_or_else(|error| Err(Failure::Problem(format!("a task of the replay panicked: {error}"))))
}

#[expect(clippy::cast_precision_loss, reason = "means of sizes and times need no more than 52 bits")]
impl StrandedMemory {
    /// Accumulates the stranded memory of the time since the last event. From `at` on, the stranded
    /// memory is `now`.
    fn advance_to(&mut self, at: Ns, now: Bytes) {
        let seconds = at.since(self.since).0 as f64 / 1e9;
        self.byte_seconds += self.now.get() as f64 * seconds;
        self.seconds += seconds;
        (self.since, self.now) = (at, now);
    }

    fn mean(&self) -> f64 {
        if self.seconds > 0.0 { self.byte_seconds / self.seconds } else { self.now.get() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stranded_memory_is_weighted_by_duration() {
        let shape = VmShape { cores: 1, memory: Bytes::gib(1) };
        let mut stranded =
            StrandedMemory { shape, since: Ns::ZERO, now: Bytes::ZERO, byte_seconds: 0.0, seconds: 0.0 };
        stranded.advance_to(Ns::ZERO, Bytes::new(10));
        assert!((stranded.mean() - 10.0).abs() < 1e-9, "without elapsed time the mean is the current value");
        stranded.advance_to(Ns::secs(30), Bytes::new(50));
        stranded.advance_to(Ns::secs(40), Bytes::ZERO);
        assert!((stranded.mean() - 20.0).abs() < 1e-9);
    }
}
