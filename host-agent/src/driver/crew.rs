//! A few threads that make calls of the host, which may take long. Calls wait in one queue; a thread that takes one and
//! sees more wakes the next, so that a burst of short calls is over before all of them are awake.

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use pool::agent::Event;
use tokio::sync::mpsc;
use units::limits::HOST_CALLS_AT_ONCE_MAX;

/// A call, which says what came of it.
type Call = Box<dyn FnOnce() -> Event + Send>;

/// What came of a call; one that panicked leaves a slice in a state nobody knows.
pub(super) type Made = Result<Event, Box<dyn Any + Send>>;

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

#[derive(Default)]
struct Waiting {
    calls: VecDeque<Call>,
    over: bool,
}

impl Queue {
    /// A poisoned queue is still right: no call runs while it is locked.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next call; `None` when there will be no more.
    fn next(&self) -> Option<Call> {
        let mut waiting = self.waiting();
        loop {
            if let Some(call) = waiting.calls.pop_front() {
                let more = !waiting.calls.is_empty();
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

/// The threads. Dropped, they end after the calls they are making.
pub(super) struct Crew(Arc<Queue>);

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Crew")
    }
}

impl Crew {
    /// Starts the threads, and tells where they report. There is at most one call per slice, for the agent's machine
    /// never asks twice at once.
    ///
    /// # Errors
    /// The operating system has no more threads.
    pub(super) fn start() -> std::io::Result<(Self, mpsc::UnboundedReceiver<Made>)> {
        let queue = Arc::new(Queue::default());
        let (made, receiver) = mpsc::unbounded_channel();
        for n in 0..HOST_CALLS_AT_ONCE_MAX {
            let (queue, made) = (Arc::clone(&queue), made.clone());
            thread::Builder::new().name(format!("host-call-{n}")).spawn(move || {
                while let Some(call) = queue.next() {
                    drop(made.send(catch_unwind(AssertUnwindSafe(call)))); // the driver may have ended
                }
            })?;
        }
        Ok((Self(queue), receiver))
    }

    /// Has a call made as soon as a thread is free.
    pub(super) fn call(&self, call: impl FnOnce() -> Event + Send + 'static) {
        let mut waiting = self.0.waiting();
        let first = waiting.calls.is_empty();
        waiting.calls.push_back(Box::new(call));
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
        waiting.calls.clear();
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
    async fn as_many_calls_are_made_at_once_as_there_are_threads_and_each_is_told() {
        let (crew, mut made) = Crew::start().unwrap();
        let together = Arc::new(Barrier::new(HOST_CALLS_AT_ONCE_MAX));
        for id in 0..3 * HOST_CALLS_AT_ONCE_MAX as u64 {
            let together = Arc::clone(&together);
            crew.call(move || {
                together.wait(); // passes only when all threads are in a call
                event(id)
            });
        }
        let mut told = Vec::new();
        while told.len() < 3 * HOST_CALLS_AT_ONCE_MAX {
            let Ok(Event::ProcessGone { reservation }) = made.recv().await.unwrap() else {
                panic!("another event")
            };
            told.push(reservation.0);
        }
        told.sort_unstable();
        assert_eq!(told, (0..3 * HOST_CALLS_AT_ONCE_MAX as u64).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_call_that_panics_is_told_and_the_crew_goes_on() {
        let (crew, mut made) = Crew::start().unwrap();
        crew.call(|| panic!("a host call gone wrong"));
        assert!(made.recv().await.unwrap().is_err());
        crew.call(|| event(1));
        assert!(made.recv().await.unwrap().is_ok());
    }
}
