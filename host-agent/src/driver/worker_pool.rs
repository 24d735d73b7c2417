//! Worker threads for host calls, which may take long.
//!
//! Calls that close or scrub slices have separate queues and never occupy all threads, so that the
//! start of a VM never waits for them. A thread that takes a call while more are pending wakes the
//! next thread. A burst of short calls is therefore done before all threads are awake.

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use pool::agent::Event;
use tokio::sync::mpsc;
use units::limits::{HOST_CALLS_IN_FLIGHT_MAX, HOST_RECLAIM_CALLS_IN_FLIGHT_MAX};

/// Host call, which returns its result as an event.
type Call = Box<dyn FnOnce() -> Event + Send>;

/// Result of a call, or the payload of a panic. A panic leaves a slice in an unknown state.
pub(super) type CallResult = Result<Event, Box<dyn Any + Send>>;

#[derive(Default)]
struct Queue {
    pending: Mutex<PendingCalls>,
    available: Condvar,
}

/// Queue to which a call belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// Calls that must end before a VM can start.
    Serving,
    /// Calls that close slices. These calls may wait for each other.
    Closing,
    /// Calls that scrub slices without an owner.
    Scrubbing,
}

#[derive(Default)]
struct PendingCalls {
    serving: VecDeque<Call>,
    closing: VecDeque<Call>,
    scrubbing: VecDeque<Call>,
    running_reclaims: usize,
    is_closed: bool,
}

impl PendingCalls {
    /// Removes and returns the next call that may run now, if any.
    fn take(&mut self) -> Option<(CallKind, Call)> {
        if let Some(call) = self.serving.pop_front() {
            return Some((CallKind::Serving, call));
        }
        if !self.can_start_reclaim() {
            return None;
        }
        self.running_reclaims += 1;
        let closing = self.closing.pop_front().map(|call| (CallKind::Closing, call));
        closing.or_else(|| Some((CallKind::Scrubbing, self.scrubbing.pop_front()?)))
    }

    fn can_start_reclaim(&self) -> bool {
        let has_reclaims = !self.closing.is_empty() || !self.scrubbing.is_empty();
        has_reclaims && self.running_reclaims < HOST_RECLAIM_CALLS_IN_FLIGHT_MAX
    }

    fn has_runnable_call(&self) -> bool {
        !self.serving.is_empty() || self.can_start_reclaim()
    }
}

impl Queue {
    /// Locks the queue. A poisoned queue is consistent, because no call runs while it is locked.
    fn pending(&self) -> MutexGuard<'_, PendingCalls> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next call; returns `None` after the pool was dropped. `last` is the lane of
    /// the thread's previous call.
    fn wait_for_next_call(&self, last: Option<CallKind>) -> Option<(CallKind, Call)> {
        let mut pending = self.pending();
        pending.running_reclaims -= usize::from(last.is_some_and(|lane| lane != CallKind::Serving));
        loop {
            if let Some(call) = pending.take() {
                let has_runnable_call = pending.has_runnable_call();
                drop(pending);
                if has_runnable_call {
                    self.available.notify_one();
                }
                return Some(call);
            }
            if pending.is_closed {
                return None;
            }
            pending = self.available.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Pool of worker threads. After the pool is dropped, each thread ends after its current call.
pub(super) struct WorkerPool(Arc<Queue>);

impl std::fmt::Debug for WorkerPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WorkerPool")
    }
}

impl WorkerPool {
    /// Starts the threads, and returns the receiver of the calls' results. The channel is
    /// unbounded, but the state machine requests at most one call per slice at a time.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub(super) fn start() -> std::io::Result<(Self, mpsc::UnboundedReceiver<CallResult>)> {
        let queue = Arc::new(Queue::default());
        let (results, receiver) = mpsc::unbounded_channel();
        for n in 0..HOST_CALLS_IN_FLIGHT_MAX {
            let (queue, results) = (Arc::clone(&queue), results.clone());
            thread::Builder::new().name(format!("host-call-{n}")).spawn(move || {
                let mut last = None;
                while let Some((lane, call)) = queue.wait_for_next_call(last) {
                    drop(results.send(catch_unwind(AssertUnwindSafe(call)))); // the driver may have ended
                    last = Some(lane);
                }
            })?;
        }
        Ok((Self(queue), receiver))
    }

    /// Queues a call for the next free thread.
    pub(super) fn queue_call(&self, lane: CallKind, call: impl FnOnce() -> Event + Send + 'static) {
        let mut pending = self.0.pending();
        let was_idle = !pending.has_runnable_call();
        match lane {
            CallKind::Serving => pending.serving.push_back(Box::new(call)),
            CallKind::Closing => pending.closing.push_back(Box::new(call)),
            CallKind::Scrubbing => pending.scrubbing.push_back(Box::new(call)),
        }
        drop(pending);
        if was_idle {
            self.0.available.notify_one();
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        let mut pending = self.0.pending();
        pending.is_closed = true;
        pending.serving.clear();
        pending.closing.clear();
        pending.scrubbing.clear();
        drop(pending);
        self.0.available.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use units::ReservationId;

    use super::*;

    fn event(id: u64) -> Event {
        Event::ProcessGone { reservation: ReservationId(id) }
    }

    #[tokio::test]
    async fn all_workers_run_calls_concurrently() {
        let (workers, mut results) = WorkerPool::start().unwrap();
        let barrier = Arc::new(Barrier::new(HOST_CALLS_IN_FLIGHT_MAX));
        for id in 0..3 * HOST_CALLS_IN_FLIGHT_MAX as u64 {
            let barrier = Arc::clone(&barrier);
            workers.queue_call(CallKind::Serving, move || {
                barrier.wait(); // blocks until all threads are in a call
                event(id)
            });
        }
        let mut reported = Vec::new();
        while reported.len() < 3 * HOST_CALLS_IN_FLIGHT_MAX {
            let Ok(Event::ProcessGone { reservation }) = results.recv().await.unwrap() else {
                panic!("another event")
            };
            reported.push(reservation.0);
        }
        reported.sort_unstable();
        assert_eq!(reported, (0..3 * HOST_CALLS_IN_FLIGHT_MAX as u64).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn panicking_call_is_reported_and_workers_continue() {
        let (workers, mut results) = WorkerPool::start().unwrap();
        for lane in [CallKind::Serving, CallKind::Scrubbing].repeat(HOST_CALLS_IN_FLIGHT_MAX) {
            workers.queue_call(lane, || panic!("failed host call"));
            assert!(results.recv().await.unwrap().is_err());
        }
        for lane in [CallKind::Serving, CallKind::Scrubbing] {
            workers.queue_call(lane, || event(1));
            assert!(results.recv().await.unwrap().is_ok());
        }
    }

    #[tokio::test]
    async fn vm_start_never_waits_for_scrubs() {
        let (workers, mut results) = WorkerPool::start().unwrap();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for id in 0..4 * HOST_CALLS_IN_FLIGHT_MAX as u64 {
            let released = Arc::clone(&released);
            workers.queue_call(CallKind::Scrubbing, move || {
                let _ = released.lock().unwrap().recv();
                event(id)
            });
        }
        for _ in 0..100 {
            workers.queue_call(CallKind::Serving, || event(1000));
            let first = results.recv().await.unwrap().unwrap();
            assert!(matches!(first, Event::ProcessGone { reservation: ReservationId(1000) }));
        }
        drop(release);
        for _ in 0..4 * HOST_CALLS_IN_FLIGHT_MAX {
            assert!(results.recv().await.unwrap().is_ok());
        }
    }
}
