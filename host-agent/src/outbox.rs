//! Pending messages to the manager. Messages that accumulate while the network is slow are merged.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pool::protocol::ObservedState;
use proto::v1 as wire;
use tokio::sync::Notify;

/// Slot for one message, which the session empties.
#[derive(Debug)]
pub struct Outbox<T> {
    pending: Mutex<Option<T>>,
    filled: Notify,
}

/// Slot for a report, which the driver fills.
pub type ReportOutbox = Outbox<ObservedState>;
/// Slot for the latest samples of running VMs, which the sampler fills.
pub type SampleOutbox = Outbox<wire::VmSamples>;

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        Self { pending: Mutex::new(None), filled: Notify::new() }
    }
}

impl<T> Outbox<T> {
    /// Locks the slot. A poisoned slot is consistent, because each call changes it in one
    /// assignment.
    fn pending(&self) -> MutexGuard<'_, Option<T>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, merge: impl FnOnce(Option<T>) -> T) {
        let mut pending = self.pending();
        *pending = Some(merge(pending.take()));
        self.filled.notify_one();
    }

    /// Waits for a pending message, and takes it. This is cancel-safe.
    pub async fn next(&self) -> T {
        loop {
            if let Some(message) = self.pending().take() {
                return message;
            }
            self.filled.notified().await;
        }
    }

    /// Drops the pending message, because a new session begins.
    pub fn clear(&self) {
        *self.pending() = None;
    }
}

impl ReportOutbox {
    /// Adds a report, merged with the pending report, if any.
    pub fn put(&self, report: ObservedState) {
        self.fill(|earlier| match earlier {
            Some(earlier) => earlier.merge_next(report),
            None => report,
        });
    }
}

impl SampleOutbox {
    /// Replaces the pending samples, which were not sent in time.
    pub fn put(&self, samples: wire::VmSamples) {
        self.fill(|_| samples);
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

    #[tokio::test]
    async fn outbox_keeps_only_the_latest_samples() {
        let outbox = SampleOutbox::default();
        let samples = |count| wire::VmSamples { samples: vec![wire::VmSample::default(); count] };
        outbox.put(samples(1));
        outbox.put(samples(2));
        assert_eq!(outbox.next().await, samples(2));
        outbox.put(samples(3));
        outbox.clear();
        outbox.put(samples(4));
        assert_eq!(outbox.next().await, samples(4));
    }
}
