//! Worker threads for host calls, which may take long. A VM's start never waits for slices being
//! emptied: calls that close or scrub slices wait in queues of their own and never occupy all
//! threads. A thread that takes a call and sees more wakes the next, so that a burst of short calls
//! ends before all of them are awake.

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

/// Call that returns its result.
type Call = Box<dyn FnOnce() -> Event + Send>;

/// Result of a call; one that panicked leaves a slice in an unknown state.
pub(super) type Made = Result<Event, Box<dyn Any + Send>>;

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

/// Purpose of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// A VM's start waits for it.
    Serving,
    /// Slices that leave. They may have to wait for each other.
    Closing,
    /// Slices without an owner.
    Scrubbing,
}

#[derive(Default)]
struct Waiting {
    serving: VecDeque<Call>,
    closing: VecDeque<Call>,
    scrubbing: VecDeque<Call>,
    emptying_under_way: usize,
    over: bool,
}

impl Waiting {
    /// Returns the next call that may be made now.
    fn take(&mut self) -> Option<(Lane, Call)> {
        if let Some(call) = self.serving.pop_front() {
            return Some((Lane::Serving, call));
        }
        if !self.may_empty() {
            return None;
        }
        self.emptying_under_way += 1;
        let closing = self.closing.pop_front().map(|call| (Lane::Closing, call));
        closing.or_else(|| Some((Lane::Scrubbing, self.scrubbing.pop_front()?)))
    }

    fn may_empty(&self) -> bool {
        let waits = !self.closing.is_empty() || !self.scrubbing.is_empty();
        waits && self.emptying_under_way < HOST_RECLAIM_CALLS_IN_FLIGHT_MAX
    }

    fn has_more(&self) -> bool {
        !self.serving.is_empty() || self.may_empty()
    }
}

impl Queue {
    /// A poisoned queue is consistent: no call runs while it is locked.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next call; `None` when there will be no more. `made` is the thread's previous
    /// call.
    fn next(&self, made: Option<Lane>) -> Option<(Lane, Call)> {
        let mut waiting = self.waiting();
        waiting.emptying_under_way -= usize::from(made.is_some_and(|lane| lane != Lane::Serving));
        loop {
            if let Some(call) = waiting.take() {
                let more = waiting.has_more();
                drop(waiting);
                if more {
                    self.more.notify_one();
                }
                return Some(call);
            }
            if waiting.over {
                return None;
            }
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Worker threads. When dropped, they end after their current calls.
pub(super) struct Crew(Arc<Queue>);

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Crew")
    }
}

impl Crew {
    /// Starts the threads, and returns the receiver of their results. There is at most one call per
    /// slice, because the agent's state machine never requests two at once.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub(super) fn start() -> std::io::Result<(Self, mpsc::UnboundedReceiver<Made>)> {
        let queue = Arc::new(Queue::default());
        let (made, receiver) = mpsc::unbounded_channel();
        for n in 0..HOST_CALLS_IN_FLIGHT_MAX {
            let (queue, made) = (Arc::clone(&queue), made.clone());
            thread::Builder::new().name(format!("host-call-{n}")).spawn(move || {
                let mut last = None;
                while let Some((lane, call)) = queue.next(last) {
                    drop(made.send(catch_unwind(AssertUnwindSafe(call)))); // the driver may have ended
                    last = Some(lane);
                }
            })?;
        }
        Ok((Self(queue), receiver))
    }

    /// Queues a call for the next free thread.
    pub(super) fn call(&self, lane: Lane, call: impl FnOnce() -> Event + Send + 'static) {
        let mut waiting = self.0.waiting();
        let first = !waiting.has_more();
        match lane {
            Lane::Serving => waiting.serving.push_back(Box::new(call)),
            Lane::Closing => waiting.closing.push_back(Box::new(call)),
            Lane::Scrubbing => waiting.scrubbing.push_back(Box::new(call)),
        }
        drop(waiting);
        if first {
            self.0.more.notify_one();
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        waiting.over = true;
        waiting.serving.clear();
        waiting.closing.clear();
        waiting.scrubbing.clear();
        drop(waiting);
        self.0.more.notify_all();
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
        let (crew, mut made) = Crew::start().unwrap();
        let together = Arc::new(Barrier::new(HOST_CALLS_IN_FLIGHT_MAX));
        for id in 0..3 * HOST_CALLS_IN_FLIGHT_MAX as u64 {
            let together = Arc::clone(&together);
            crew.call(Lane::Serving, move || {
                together.wait(); // passes only when all threads are in a call
                event(id)
            });
        }
        let mut told = Vec::new();
        while told.len() < 3 * HOST_CALLS_IN_FLIGHT_MAX {
            let Ok(Event::ProcessGone { reservation }) = made.recv().await.unwrap() else {
                panic!("another event")
            };
            told.push(reservation.0);
        }
        told.sort_unstable();
        assert_eq!(told, (0..3 * HOST_CALLS_IN_FLIGHT_MAX as u64).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn panicking_call_is_reported_and_workers_continue() {
        let (crew, mut made) = Crew::start().unwrap();
        for lane in [Lane::Serving, Lane::Scrubbing].repeat(HOST_CALLS_IN_FLIGHT_MAX) {
            crew.call(lane, || panic!("a host call gone wrong"));
            assert!(made.recv().await.unwrap().is_err());
        }
        for lane in [Lane::Serving, Lane::Scrubbing] {
            crew.call(lane, || event(1));
            assert!(made.recv().await.unwrap().is_ok());
        }
    }

    #[tokio::test]
    async fn vm_start_never_waits_for_scrubs() {
        let (crew, mut made) = Crew::start().unwrap();
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for id in 0..4 * HOST_CALLS_IN_FLIGHT_MAX as u64 {
            let held = Arc::clone(&held);
            crew.call(Lane::Scrubbing, move || {
                let _ = held.lock().unwrap().recv(); // until it is released
                event(id)
            });
        }
        for _ in 0..100 {
            crew.call(Lane::Serving, || event(1000));
            let first = made.recv().await.unwrap().unwrap();
            assert!(matches!(first, Event::ProcessGone { reservation: ReservationId(1000) }));
        }
        drop(hold);
        for _ in 0..4 * HOST_CALLS_IN_FLIGHT_MAX {
            assert!(made.recv().await.unwrap().is_ok());
        }
    }
}
