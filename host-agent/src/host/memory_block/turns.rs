//! One slice at a time leaves its node, the emptiest of those that wait first: its pages go to the others, and so the fewest are
//! moved twice.

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// Who may take memory offline now.
#[derive(Debug, Default)]
pub(super) struct Turns {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// By pages in use, then by name.
    waiting: BTreeSet<(u64, Arc<str>)>,
    taken: bool,
}

/// The right to take a slice's memory offline; over when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits until nobody else is at it and no emptier slice waits.
    pub(super) fn take(&self, pages_in_use: u64, place: Arc<str>) -> Turn<'_> {
        let ours = (pages_in_use, place);
        let mut queue = self.queue();
        queue.waiting.insert(ours.clone());
        while queue.taken || queue.waiting.first() != Some(&ours) {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.waiting.remove(&ours);
        queue.taken = true;
        Turn(self)
    }

    /// A poisoned queue is still right: nothing that can panic happens while it is locked.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.queue().taken = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn the_emptiest_of_those_that_wait_is_next() {
        let turns = Arc::new(Turns::default());
        let first = turns.take(100, "first".into());
        let (sender, order) = mpsc::channel();
        let waiting: Vec<_> = [(30, "c"), (10, "a"), (20, "b")]
            .map(|(pages, place)| {
                let (turns, sender) = (Arc::clone(&turns), sender.clone());
                thread::spawn(move || {
                    let _turn = turns.take(pages, place.into());
                    sender.send(place).unwrap();
                })
            })
            .into();
        while turns.queue().waiting.len() < 3 {
            thread::yield_now();
        }
        drop(first);
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
        drop(sender);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}
