//! Pending report to the manager. Reports that accumulate while the network is slow are merged.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pool::protocol::ObservedState;
use tokio::sync::Notify;

/// Slot for one report, which the driver fills and the session empties.
#[derive(Debug, Default)]
pub struct ReportOutbox {
    pending: Mutex<Option<ObservedState>>,
    filled: Notify,
}

impl ReportOutbox {
    /// Locks the slot. A poisoned slot is consistent, because each call changes it in one
    /// assignment.
    fn pending(&self) -> MutexGuard<'_, Option<ObservedState>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a report, merged with the pending report, if any.
    pub fn put(&self, report: ObservedState) {
        let mut pending = self.pending();
        *pending = Some(match pending.take() {
            Some(earlier) => earlier.merge_next(report),
            None => report,
        });
        self.filled.notify_one();
    }

    /// Waits for a pending report, and takes it. This is cancel-safe.
    pub async fn next(&self) -> ObservedState {
        loop {
            if let Some(report) = self.pending().take() {
                return report;
            }
            self.filled.notified().await;
        }
    }

    /// Drops the pending report, because a new session begins with a complete report.
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
        let outbox = ReportOutbox::default();
        (1..=3).for_each(|slice| outbox.put(report(slice)));
        let slices: Vec<u32> = outbox.next().await.online.iter().map(|holding| holding.slice.0).collect();
        assert_eq!(slices, [1, 2, 3]);
        outbox.put(report(4));
        assert_eq!(outbox.next().await, report(4), "a report was sent twice");
    }

    #[tokio::test]
    async fn cleared_outbox_waits_for_next_report() {
        let outbox = std::sync::Arc::new(ReportOutbox::default());
        outbox.put(report(1));
        outbox.clear();
        let waiting = std::sync::Arc::clone(&outbox);
        let received = tokio::spawn(async move { waiting.next().await });
        tokio::task::yield_now().await;
        outbox.put(report(2));
        assert_eq!(received.await.unwrap(), report(2));
    }
}
