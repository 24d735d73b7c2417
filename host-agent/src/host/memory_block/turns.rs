//! One slice at a time leaves its node, the emptiest of those that wait first: its pages go to the others, and so the fewest are
//! moved twice. One that could not leave comes after those that may.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Order in which memory may be taken offline.
#[derive(Debug, Default)]
pub(super) struct Turns {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Those that failed last; by pages in use; by name.
    waiting: BTreeSet<(bool, u64, Arc<str>)>,
    failed: BTreeSet<Arc<str>>,
    taken: bool,
}

/// The right to take a slice's memory offline; over when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    place: Arc<str>,
}

impl Turns {
    /// Waits until no other removal is in progress and no emptier slice waits.
    pub(super) fn take(&self, pages_in_use: u64, place: Arc<str>) -> Turn<'_> {
        let mut queue = self.queue();
        let ours = (queue.failed.contains(&place), pages_in_use, place);
        queue.waiting.insert(ours.clone());
        while queue.taken || queue.waiting.first() != Some(&ours) {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.waiting.remove(&ours);
        queue.taken = true;
        Turn { turns: self, place: ours.2 }
    }

    /// A poisoned queue is still right: nothing that can panic happens while it is locked.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn<'_> {
    /// Whether the slice has left.
    pub(super) fn ended(&mut self, well: bool) {
        let mut queue = self.turns.queue();
        match well {
            true => drop(queue.failed.remove(&self.place)),
            false => drop(queue.failed.insert(Arc::clone(&self.place))),
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.queue().taken = false;
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn removals_run_emptiest_first_and_failed_last() {
        let turns = Arc::new(Turns::default());
        turns.take(1, "busy".into()).ended(false);
        let first = turns.take(100, "first".into());
        let (sender, order) = mpsc::channel();
        let waiting: Vec<_> = [(1, "busy"), (30, "c"), (10, "a"), (20, "b")]
            .map(|(pages, place)| {
                let (turns, sender) = (Arc::clone(&turns), sender.clone());
                thread::spawn(move || {
                    let _turn = turns.take(pages, place.into());
                    sender.send(place).unwrap();
                })
            })
            .into();
        while turns.queue().waiting.len() < 4 {
            thread::yield_now();
        }
        drop(first);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        drop(sender);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["a", "b", "c", "busy"]);
        turns.take(1, "busy".into()).ended(true);
        assert!(turns.queue().failed.is_empty());
    }
}
