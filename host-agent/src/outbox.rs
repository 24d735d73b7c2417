//! What the manager is yet to be told. Reports that pile up while the network is slow become one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pool::protocol::Have;
use tokio::sync::Notify;

/// One place for a report, filled by the driver and emptied by the session.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: Mutex<Option<Have>>,
    filled: Notify,
}

impl Outbox {
    /// A poisoned place is still right: no call leaves it half filled.
    fn waiting(&self) -> MutexGuard<'_, Option<Have>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a report to what waits.
    pub fn put(&self, have: Have) {
        let mut waiting = self.waiting();
        *waiting = Some(match waiting.take() {
            Some(before) => before.followed_by(have),
            None => have,
        });
        self.filled.notify_one();
    }

    /// Takes what waits, as soon as something does. May be given up at any time: nothing is lost.
    pub async fn next(&self) -> Have {
        loop {
            if let Some(have) = self.waiting().take() {
                return have;
            }
            self.filled.notified().await;
        }
    }

    /// Forgets what waits: a new session is told everything anyway.
    pub fn clear(&self) {
        *self.waiting() = None;
    }
}
