//! Effects that the driver performs in other threads or tasks: host calls, writing of records, and
//! watching of processes. Each returns its result as one event.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use pool::{
    agent::{Event, Process, SliceOutcome, VmRecord},
    protocol::{Handle, Holding, ScrubReport},
};
use units::{ReservationId, UnixMs};

use super::{Driver, PROCESS_WATCH_RETRY_DELAY, RecordOperation, worker_pool::CallKind};
use crate::{
    host::{Host, HostError, process::ProcessHandle},
    metrics::Call,
    readiness,
};

impl Driver {
    pub(super) fn online(&mut self, holding: Holding, handle: Handle, check_zero: bool) {
        self.start_call(Call::Online, holding, move |host| {
            host.online(holding, &handle, check_zero).map(|()| SliceOutcome::Onlined)
        });
    }

    pub(super) fn offline(&mut self, holding: Holding, handle: Handle, verify: bool) {
        self.start_call(Call::Offline, holding, move |host| {
            host.offline(holding, &handle, verify).map(|()| SliceOutcome::Offlined)
        });
    }

    pub(super) fn scrub(&mut self, holding: Holding, handle: Handle) {
        self.start_call(Call::Scrub, holding, move |host| {
            let started = now();
            let verified = host.scrub(holding, &handle)?;
            Ok(SliceOutcome::Scrubbed(ScrubReport { holding, started, ended: now(), verified }))
        });
    }

    pub(super) fn close_orphaned_slice(&mut self, place: Arc<str>) {
        let (host, metrics) = (Arc::clone(&self.host), Arc::clone(&self.metrics));
        self.workers.queue_call(CallKind::Closing, move || {
            let began = Instant::now();
            let closed = host.close_orphaned_slice(&place);
            metrics.record_call(Call::CloseOrphan, began.elapsed(), closed.is_ok());
            let result = closed.map_err(|error| {
                tracing::warn!(%place, error = units::chain(&error), "cannot close orphaned slice");
                error.to_failure()
            });
            Event::OrphanClosed { place, result }
        });
    }

    fn start_call(
        &mut self,
        call: Call,
        holding: Holding,
        work: impl FnOnce(&dyn Host) -> Result<SliceOutcome, HostError> + Send + 'static,
    ) {
        let (host, metrics) = (Arc::clone(&self.host), Arc::clone(&self.metrics));
        let failure_lines = Arc::clone(&self.failure_lines);
        let lane = match call {
            Call::Online => CallKind::Serving,
            Call::Offline | Call::CloseOrphan => CallKind::Closing,
            Call::Scrub => CallKind::Scrubbing,
        };
        self.workers.queue_call(lane, move || {
            let began = Instant::now();
            let result = work(&*host);
            metrics.record_call(call, began.elapsed(), result.is_ok());
            let (slice, epoch) = (holding.slice.0, holding.epoch.0);
            let result = result.map_err(|error| {
                if let Some(suppressed) = failure_lines.count_line() {
                    let error = units::chain(&error);
                    tracing::warn!(slice, epoch, ?call, error, suppressed, "host call failed");
                }
                error.to_failure()
            });
            if result.is_ok() {
                tracing::debug!(slice, epoch, ?call, "host call succeeded");
            }
            Event::Done { holding, result }
        });
    }

    /// Writes a record in another thread. Later operations on the same record wait until the write
    /// ends.
    pub(super) fn record(&mut self, record: VmRecord) {
        let reservation = record.reservation;
        if let Some(next) = self.record_writes.get_mut(&reservation) {
            *next = Some(RecordOperation::Write(record));
            return;
        }
        self.record_writes.insert(reservation, None);
        let records = self.records.clone();
        self.tasks.spawn(async move {
            let written = join(tokio::task::spawn_blocking(move || records.write(&record)).await);
            let result = written.map_err(|error| {
                let error = units::chain(&error);
                tracing::error!(%reservation, error, "cannot write the record of a VM");
                error
            });
            Event::Recorded { reservation, result }
        });
    }

    /// Deletes the record of a VM, after the write in progress, if any. Otherwise this write would
    /// create the file again.
    pub(super) fn delete_record(&mut self, reservation: ReservationId) {
        self.usage.remove(reservation);
        match self.record_writes.get_mut(&reservation) {
            Some(next) => *next = Some(RecordOperation::Delete),
            None => self.remove_record(reservation),
        }
    }

    /// Performs the operation that waited for the end of a write. Returns whether there was such an
    /// operation; if so, the result of the write is obsolete.
    pub(super) fn continue_after_write(&mut self, reservation: ReservationId) -> bool {
        match self.record_writes.remove(&reservation).flatten() {
            None => return false,
            Some(RecordOperation::Write(record)) => self.record(record),
            Some(RecordOperation::Delete) => self.remove_record(reservation),
        }
        true
    }

    /// Removes the file of a record, in the driver's task: in another task, the removal could
    /// overtake a later write of the same record.
    fn remove_record(&self, reservation: ReservationId) {
        if let Err(error) = self.records.remove(reservation) {
            // The next agent finds the record without a process, and reports the VM's end again.
            tracing::warn!(%reservation, error = units::chain(&error), "cannot delete the record of a VM");
        }
    }

    pub(super) fn watch(&mut self, reservation: ReservationId, process: Process) {
        self.watched_processes.insert(reservation, process.clone());
        self.tasks.spawn(async move {
            wait_for_process_end(&process).await;
            tracing::info!(%reservation, pid = process.pid, "process of VM ended");
            Event::ProcessGone { reservation }
        });
    }

    pub(super) fn kill(&mut self, reservation: ReservationId) {
        let Some(process) = self.watched_processes.get(&reservation) else { return };
        let killed = ProcessHandle::open(process).map(|handle| handle.map_or(Ok(()), |handle| handle.kill()));
        let pid = process.pid;
        match killed {
            Ok(Ok(())) => tracing::warn!(%reservation, pid, "killed VM because this host is fenced"),
            Ok(Err(error)) => tracing::error!(%reservation, pid, %error, "cannot kill VM"),
            Err(error) => tracing::error!(%reservation, pid, error = units::chain(&error), "cannot kill VM"),
        }
    }

    pub(super) fn free_local_memory(&mut self, reservation: ReservationId) {
        self.watched_processes.remove(&reservation);
        if let Err(error) = self.host.free_local_memory(reservation) {
            tracing::warn!(%reservation, error = units::chain(&error), "cannot release local memory of VM");
        }
    }
}

pub(super) fn join<T>(joined: Result<T, tokio::task::JoinError>) -> T {
    joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Waits until a process has ended. Retries if the process cannot be watched, because the process
/// may still run.
async fn wait_for_process_end(process: &Process) {
    loop {
        match ProcessHandle::open(process).map(|handle| handle.map(|handle| readiness::watch(handle.into())))
        {
            Ok(None) => return,
            Ok(Some(Ok(watched))) => match watched.readable().await {
                Ok(_) => return,
                Err(error) => tracing::warn!(pid = process.pid, %error, "cannot watch process of VM"),
            },
            Ok(Some(Err(error))) => tracing::warn!(pid = process.pid, %error, "cannot watch process of VM"),
            Err(error) => {
                tracing::warn!(pid = process.pid, error = units::chain(&error), "cannot watch process of VM");
            }
        }
        tokio::time::sleep(PROCESS_WATCH_RETRY_DELAY).await;
    }
}

/// Returns the wall-clock time, which is only reported and never used in decisions.
fn now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMs(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
