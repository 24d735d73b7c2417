//! Pending samples of running VMs for the manager.

use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::v1 as wire;
use tokio::sync::Notify;

/// Slot for the latest samples, which the sampler fills and the session empties. Samples that were
/// not sent in time are replaced.
#[derive(Debug, Default)]
pub struct SampleOutbox {
    pending: Mutex<Option<wire::VmSamples>>,
    filled: Notify,
}

impl SampleOutbox {
    /// Locks the slot. A poisoned slot is consistent, because each call changes it in one
    /// assignment.
    fn pending(&self) -> MutexGuard<'_, Option<wire::VmSamples>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the pending samples.
    pub fn put(&self, samples: wire::VmSamples) {
        *self.pending() = Some(samples);
        self.filled.notify_one();
    }

    /// Waits for pending samples, and takes them. This is cancel-safe.
    pub async fn next(&self) -> wire::VmSamples {
        loop {
            if let Some(samples) = self.pending().take() {
                return samples;
            }
            self.filled.notified().await;
        }
    }

    /// Drops the pending samples: they may be old when a new session begins.
    pub fn clear(&self) {
        *self.pending() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
