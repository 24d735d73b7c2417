//! Order in which slices are removed from their nodes: one at a time, first the waiting slice with
//! the fewest pages in use. Pages migrate to the other slices, so this order migrates the fewest
//! pages twice. Slices whose last removal failed come last.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Queue of slices whose memory blocks are to be offlined.
#[derive(Debug, Default)]
pub(super) struct RemovalQueue {
    state: Mutex<RemovalQueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct RemovalQueueState {
    /// Waiting slices: whether the last removal failed, pages in use, and location.
    waiting: BTreeSet<(bool, u64, Arc<str>)>,
    /// Locations of slices whose last removal failed.
    failed: BTreeSet<Arc<str>>,
    /// Whether a removal is in progress.
    is_busy: bool,
}

/// Permit to offline the memory blocks of a slice. Dropping it lets the next slice proceed.
#[derive(Debug)]
pub(super) struct RemovalPermit<'a> {
    removals: &'a RemovalQueue,
    place: Arc<str>,
}

impl RemovalQueue {
    /// Waits until no other removal is in progress and this slice is the first of the queue.
    pub(super) fn acquire(&self, pages_in_use: u64, place: Arc<str>) -> RemovalPermit<'_> {
        let mut state = self.state();
        let request = (state.failed.contains(&place), pages_in_use, place);
        state.waiting.insert(request.clone());
        while state.is_busy || state.waiting.first() != Some(&request) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.remove(&request);
        state.is_busy = true;
        RemovalPermit { removals: self, place: request.2 }
    }

    /// Locks the queue. A poisoned queue is consistent, because no call can panic while it is
    /// locked.
    fn state(&self) -> MutexGuard<'_, RemovalQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RemovalPermit<'_> {
    /// Records whether the removal succeeded.
    pub(super) fn finish(&mut self, succeeded: bool) {
        let mut state = self.removals.state();
        match succeeded {
            true => drop(state.failed.remove(&self.place)),
            false => drop(state.failed.insert(Arc::clone(&self.place))),
        }
    }
}

impl Drop for RemovalPermit<'_> {
    fn drop(&mut self) {
        self.removals.state().is_busy = false;
        self.removals.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn removals_run_emptiest_first_and_failed_last() {
        let removals = Arc::new(RemovalQueue::default());
        removals.acquire(1, "busy".into()).finish(false);
        let first = removals.acquire(100, "first".into());
        let (sender, order) = mpsc::channel();
        let waiting: Vec<_> = [(1, "busy"), (30, "c"), (10, "a"), (20, "b")]
            .map(|(pages, place)| {
                let (removals, sender) = (Arc::clone(&removals), sender.clone());
                thread::spawn(move || {
                    let _permit = removals.acquire(pages, place.into());
                    sender.send(place).unwrap();
                })
            })
            .into();
        while removals.state().waiting.len() < 4 {
            thread::yield_now();
        }
        drop(first);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        drop(sender);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["a", "b", "c", "busy"]);
        removals.acquire(1, "busy".into()).finish(true);
        assert!(removals.state().failed.is_empty());
    }
}
