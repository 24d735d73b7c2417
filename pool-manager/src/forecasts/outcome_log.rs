//! Follows the durable changes of the ledger, and records the starts, ends and outcomes of VMs.
//! Entries are written in delayed batches, because no caller waits for them. A crash of the manager
//! loses the entries that were not written yet.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pool::{
    manager::Manager,
    record::{EndReason, Record, Reservation, Stage},
};
use prediction::frigid::OutcomeHistory;
use tokio::{sync::broadcast::error::RecvError, time::MissedTickBehavior};
use units::{
    Bytes, ReservationId, UnixMs,
    limits::{CHANGES_PER_BATCH_MAX, RESERVATIONS_PER_PAGE_MAX},
};

use super::{DriverError, Forecasts};
use crate::{records::forecast_rows, store::Write, write_chunk::WriteChunk};

/// Interval at which queued entries are written in one batch.
const FLUSH_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which expired outcomes are deleted and the operating point is updated.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// Entries for the store that wait for the next batch.
#[derive(Debug, Default)]
pub(super) struct WriteQueue(Mutex<Vec<Write>>);

impl WriteQueue {
    pub fn push(&self, writes: impl IntoIterator<Item = Write>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(writes);
    }

    fn drain_writes(&self) -> Vec<Write> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Forecasts {
    /// Follows the ledger and writes entries until the manager stops.
    pub async fn run_outcome_log(self: Arc<Self>) {
        let mut changes = self.driver.subscribe_to_changes();
        self.reconcile();
        let mut flush_timer = tokio::time::interval(FLUSH_INTERVAL);
        let mut cleanup_timer = tokio::time::interval(CLEANUP_INTERVAL);
        flush_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        cleanup_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut settings = self.settings.clone();
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(chunk) => self.apply_chunk(&chunk),
                    Err(RecvError::Lagged(missed)) => {
                        tracing::info!(missed, "outcome log missed changes, reading the ledger again");
                        self.reconcile();
                    }
                    Err(RecvError::Closed) => return,
                },
                _ = flush_timer.tick() => self.flush().await,
                _ = cleanup_timer.tick() => self.clean_up_outcomes().await,
                changed = settings.changed() => match changed {
                    Ok(()) => self.choose_operating_point().await,
                    Err(_) => return, // the manager is stopping
                },
            }
            if self.read_state().is_operating_point_due() {
                self.choose_operating_point().await;
            }
        }
    }

    fn apply_chunk(&self, chunk: &WriteChunk) {
        for record in chunk.records() {
            if let Record::Reservation(id, reservation) = record {
                self.apply_reservation(*id, reservation, chunk.when().wall);
            }
        }
    }

    fn apply_reservation(&self, id: ReservationId, r: &Reservation, now: UnixMs) {
        if let Stage::Ended { why, .. } = &r.stage {
            let (vm, writes) = self.write_state().record_end(id, now, has_ended_normally(why));
            self.write_queue.push(writes);
            if let Some(vm) = vm {
                self.metrics.count_outcome(&vm, requested_pool_of(r));
            }
        } else {
            let requested = [r.local, r.pool()].into_iter().sum();
            self.write_queue.push(self.write_state().record_start(id, &r.vm, requested, r.cores, r.created));
        }
    }

    /// Reads all running VMs from the ledger, after a start or after missed changes. VMs that ended
    /// in the meantime get no outcome.
    fn reconcile(&self) {
        let (mut active, mut after) = (Vec::new(), Some(ReservationId(0)));
        let mut now = UnixMs(0);
        while let Some(from) = after {
            let read = self.driver.read(|manager, when| (when.wall, page_of_reservations(manager, from)));
            let Ok((wall, page)) = read else { return }; // the manager is stopping
            (now, after) = (wall, page.last().map(|(id, _)| *id));
            for (id, reservation) in page.into_iter().filter(|(_, reservation)| reservation.is_active()) {
                self.apply_reservation(id, &reservation, now);
                active.push(id);
            }
        }
        let mut state = self.write_state();
        let ended: Vec<ReservationId> =
            state.running_reservations().filter(|id| active.binary_search(id).is_err()).collect();
        for id in ended {
            self.write_queue.push(state.record_end(id, now, false).1);
        }
    }

    /// Writes queued entries. Entries whose write fails are dropped. The state in memory contains
    /// them until the next restart.
    pub async fn flush(&self) {
        let writes = self.write_queue.drain_writes();
        for batch in writes.chunks(CHANGES_PER_BATCH_MAX) {
            match self.driver.write_entries(batch.to_vec()).await {
                Ok(()) => {}
                Err(DriverError::Stopping) => return,
                Err(error) => {
                    let error = units::chain(&error);
                    tracing::warn!(entries = batch.len(), error, "cannot write outcomes");
                }
            }
        }
    }

    async fn clean_up_outcomes(&self) {
        let Ok(before) = self.retention_start() else { return };
        self.write_queue.push(self.write_state().expire(before));
        self.choose_operating_point().await;
        if self.read_state().is_history_rebuild_due() {
            self.rebuild_history().await;
        }
    }

    /// Chooses a new operating point on another thread, so that predictions are not delayed.
    async fn choose_operating_point(&self) {
        let inputs = self.read_state().operating_point_inputs(self.limits());
        let serving = inputs.serving;
        if let Ok(point) = tokio::task::spawn_blocking(move || inputs.choose()).await {
            self.write_state().set_operating_point(serving, point);
            self.update_metrics();
        }
    }

    /// Rebuilds the history of all groups from the stored outcomes. The rebuilt history excludes
    /// expired outcomes, which cannot be removed one by one from a history.
    async fn rebuild_history(&self) {
        self.flush().await;
        let built_from = self.read_state().next_outcome_number();
        let Ok(mut snapshot) = self.driver.snapshot().await else { return };
        let read = tokio::task::spawn_blocking(move || {
            let outcomes = forecast_rows::load_outcomes(snapshot.as_mut())?;
            let mut history = OutcomeHistory::default();
            let included = outcomes.into_iter().filter(|(number, _)| *number < built_from);
            included.for_each(|(_, vm)| history.add(&vm.start.request, &vm.outcome));
            Ok::<_, crate::store::StoreError>(history)
        });
        match read.await {
            Ok(Ok(history)) => self.write_state().set_history(history, built_from),
            Ok(Err(error)) => tracing::warn!(error = units::chain(&error), "cannot rebuild history"),
            Err(_) => {} // the manager is stopping
        }
    }
}

/// Copies the first reservations with IDs above `above`. Copies at most [`RESERVATIONS_PER_PAGE_MAX`],
/// because the ledger is locked during the copy.
fn page_of_reservations(manager: &Manager, above: ReservationId) -> Vec<(ReservationId, Reservation)> {
    let above = manager.durable().reservations_after(above).take(RESERVATIONS_PER_PAGE_MAX);
    above.map(|(id, reservation)| (id, reservation.clone())).collect()
}

/// Returns whether a VM ended normally, so that its memory was measured until the end.
fn has_ended_normally(why: &EndReason) -> bool {
    match why {
        EndReason::ProcessGone | EndReason::Released { force: false, .. } => true,
        EndReason::Released { force: true, .. }
        | EndReason::Deadline
        | EndReason::HostFenced
        | EndReason::HostRestarted => false,
    }
}

/// Returns the pool memory that a VM was started with, also if it was moved to local memory since.
fn requested_pool_of(r: &Reservation) -> Bytes {
    let (slices, _) = r.requested_memory();
    Bytes::slices(u32::try_from(slices).expect("the number of slices of a VM is limited"))
}
