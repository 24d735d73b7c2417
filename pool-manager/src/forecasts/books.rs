//! Outcome log: follows durable records of the ledger and records VMs with memory, their end and
//! their outcome. Entries are written in batches with a delay, since no caller waits; a crash loses
//! a short period.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pool::{
    manager::Manager,
    record::{EndedBy, Record, Reservation, Stage},
};
use prediction::frigid::History;
use tokio::{sync::broadcast::error::RecvError, time::MissedTickBehavior};
use units::{
    Bytes, ReservationId, UnixMs,
    limits::{BATCH_CHANGES_MAX, RESERVATIONS_PAGE_MAX},
};

use super::{Asked, Forecasts, rows};
use crate::{driver::WriteChunk, store::Write};

/// Delay of a write, so that entries share it.
const WRITTEN_EVERY: Duration = Duration::from_millis(500);
/// Interval of the expiry of outcomes and of the update of the mix of VMs.
const TIDIED_EVERY: Duration = Duration::from_secs(60);

/// Entries to be written.
#[derive(Debug, Default)]
pub(super) struct Pen(Mutex<Vec<Write>>);

impl Pen {
    pub fn note(&self, writes: impl IntoIterator<Item = Write>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(writes);
    }

    fn take(&self) -> Vec<Write> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Forecasts {
    /// Runs the log until the manager stops.
    pub async fn keep_books(self: Arc<Self>) {
        let mut changes = self.driver.changes();
        self.reconcile();
        let mut written = tokio::time::interval(WRITTEN_EVERY);
        let mut tidied = tokio::time::interval(TIDIED_EVERY);
        written.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tidied.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut settings = self.settings.clone();
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(chunk) => self.note(&chunk),
                    Err(RecvError::Lagged(missed)) => {
                        tracing::info!(missed, "books compared with the ledger");
                        self.reconcile();
                    }
                    Err(RecvError::Closed) => return,
                },
                _ = written.tick() => self.write_down().await,
                _ = tidied.tick() => self.tidy().await,
                changed = settings.changed() => match changed {
                    Ok(()) => self.choose_point().await,
                    Err(_) => return, // the manager is stopping
                },
            }
            if self.read().is_point_due() {
                self.choose_point().await;
            }
        }
    }

    fn note(&self, chunk: &WriteChunk) {
        for record in chunk.records() {
            if let Record::Reservation(id, reservation) = record {
                self.note_reservation(*id, reservation, chunk.when().wall);
            }
        }
    }

    fn note_reservation(&self, id: ReservationId, r: &Reservation, now: UnixMs) {
        if let Stage::Ended { why, .. } = &r.stage {
            let (past, writes) = self.write().ended(id, now, is_of_itself(why));
            self.pen.note(writes);
            if let Some(past) = past {
                self.metrics.outcome(&past, memory_of_pool(r));
            }
        } else {
            let requested = [r.local, memory_of_pool(r)].into_iter().sum();
            self.pen.note(self.write().began(id, &r.vm, requested, r.cores, r.created));
        }
    }

    /// Reads VMs with memory from the ledger, after a restart or an overflow of events. VMs that
    /// ended meanwhile have no outcome.
    fn reconcile(&self) {
        let (mut active, mut after) = (Vec::new(), Some(ReservationId(0)));
        let mut now = UnixMs(0);
        while let Some(from) = after {
            let looked = self.driver.look(|manager, when| (when.wall, page_of_reservations(manager, from)));
            let Ok((wall, page)) = looked else { return }; // the manager is stopping
            (now, after) = (wall, page.last().map(|(id, _)| *id));
            for (id, reservation) in page.into_iter().filter(|(_, reservation)| reservation.is_active()) {
                self.note_reservation(id, &reservation, now);
                active.push(id);
            }
        }
        let mut state = self.write();
        let gone: Vec<ReservationId> =
            state.running().filter(|id| active.binary_search(id).is_err()).collect();
        for id in gone {
            self.pen.note(state.ended(id, now, false).1);
        }
    }

    /// Writes pending entries. Entries that cannot be written are dropped; the state in memory is
    /// used until the next start.
    pub async fn write_down(&self) {
        let writes = self.pen.take();
        for batch in writes.chunks(BATCH_CHANGES_MAX) {
            match self.driver.keep(batch.to_vec()).await {
                Ok(()) => {}
                Err(Asked::Stopping) => return,
                Err(error) => {
                    let error = units::chain(&error);
                    tracing::warn!(entries = batch.len(), error, "outcomes not kept");
                }
            }
        }
    }

    async fn tidy(&self) {
        let Ok(oldest) = self.oldest() else { return };
        self.pen.note(self.write().forget(oldest));
        self.choose_point().await;
        if self.read().is_history_due() {
            self.rebuild_history().await;
        }
    }

    /// Chooses the operating point without delaying predictions.
    async fn choose_point(&self) {
        let basis = self.read().basis(self.rules());
        let serving = basis.serving;
        if let Ok(point) = tokio::task::spawn_blocking(move || basis.choose()).await {
            self.write().set_point(serving, point);
            self.show();
        }
    }

    /// Builds a history from stored outcomes: groups keep the smallest fraction of VMs that expired
    /// long ago.
    async fn rebuild_history(&self) {
        self.write_down().await;
        let made_of = self.read().next_outcome();
        let Ok(mut snapshot) = self.driver.snapshot().await else { return };
        let read = tokio::task::spawn_blocking(move || {
            let pasts = rows::pasts(snapshot.as_mut())?;
            let mut history = History::default();
            let kept = pasts.into_iter().filter(|(number, _)| *number < made_of);
            kept.for_each(|(_, past)| history.add(&past.begun.ask, &past.outcome));
            Ok::<_, crate::store::StoreError>(history)
        });
        match read.await {
            Ok(Ok(history)) => self.write().set_history(history, made_of),
            Ok(Err(error)) => tracing::warn!(error = units::chain(&error), "history not made anew"),
            Err(_) => {} // the manager is stopping
        }
    }
}

/// Copies the next reservations above a number, up to the limit per hold of the ledger's lock.
fn page_of_reservations(manager: &Manager, above: ReservationId) -> Vec<(ReservationId, Reservation)> {
    let above = manager.durable().reservations_after(above).take(RESERVATIONS_PAGE_MAX);
    above.map(|(id, reservation)| (id, reservation.clone())).collect()
}

/// Returns whether a VM ended by itself with its memory measured completely.
fn is_of_itself(why: &EndedBy) -> bool {
    match why {
        EndedBy::ProcessGone | EndedBy::Released { force: false, .. } => true,
        EndedBy::Released { force: true, .. }
        | EndedBy::Deadline
        | EndedBy::HostFenced
        | EndedBy::HostRestarted => false,
    }
}

fn memory_of_pool(r: &Reservation) -> Bytes {
    Bytes::slices(u32::try_from(r.slices.len()).expect("a VM has few slices"))
}
