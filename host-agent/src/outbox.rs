//! Pending reports to the manager. Reports that queue up while the network is slow are merged.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pool::protocol::ObservedState;
use tokio::sync::Notify;

/// Slot for one report, filled by the driver and emptied by the session.
#[derive(Debug, Default)]
pub struct Outbox {
    pending: Mutex<Option<ObservedState>>,
    filled: Notify,
}

impl Outbox {
    /// A poisoned outbox is consistent: no call leaves it half filled.
    fn pending(&self) -> MutexGuard<'_, Option<ObservedState>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a report.
    pub fn put(&self, have: ObservedState) {
        let mut pending = self.pending();
        *pending = Some(match pending.take() {
            Some(earlier) => earlier.followed_by(have),
            None => have,
        });
        self.filled.notify_one();
    }

    /// Takes the pending report as soon as there is one. Cancel-safe.
    pub async fn next(&self) -> ObservedState {
        loop {
            if let Some(have) = self.pending().take() {
                return have;
            }
            self.filled.notified().await;
        }
    }

    /// Drops the pending report: a new session starts with a complete one.
    pub fn clear(&self) {
        *self.pending() = None;
    }
}

#[cfg(test)]
mod tests {
    use pool::protocol::Holding;
    use units::{Epoch, SliceId};

    use super::*;

    fn report(slice: u32) -> ObservedState {
        ObservedState {
            online: vec![Holding { slice: SliceId(slice), epoch: Epoch(1) }],
            ..ObservedState::default()
        }
    }

    #[tokio::test]
    async fn pending_reports_are_merged_without_loss() {
        let outbox = Outbox::default();
        (1..=3).for_each(|slice| outbox.put(report(slice)));
        let slices: Vec<u32> = outbox.next().await.online.iter().map(|holding| holding.slice.0).collect();
        assert_eq!(slices, [1, 2, 3]);
        outbox.put(report(4));
        assert_eq!(outbox.next().await, report(4), "a report was sent twice");
    }

    #[tokio::test]
    async fn cleared_outbox_waits_for_next_report() {
        let outbox = std::sync::Arc::new(Outbox::default());
        outbox.put(report(1));
        outbox.clear();
        let waiting = std::sync::Arc::clone(&outbox);
        let received = tokio::spawn(async move { waiting.next().await });
        tokio::task::yield_now().await;
        outbox.put(report(2));
        assert_eq!(received.await.unwrap(), report(2));
    }
}
