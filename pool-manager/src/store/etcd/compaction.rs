//! Compaction of the history, which etcd otherwise keeps until it is out of space.

use std::time::{Duration, Instant};

/// Interval between two compactions, unless much is written.
const INTERVAL: Duration = Duration::from_secs(300);
/// Size of the writes after which the history is compacted before the interval ends, in bytes.
const WRITTEN_BYTES_MAX: u64 = 64 << 20;

/// Decides when to compact the history, and up to which revision. A snapshot can be read at least until the second
/// compaction after it was taken.
#[derive(Debug)]
pub(super) struct Compaction {
    /// Revision up to which the history is removed next.
    revision: Option<i64>,
    /// Time at which the revision was recorded.
    at: Instant,
    /// Size of the writes since then, in bytes.
    written: u64,
}

impl Compaction {
    pub(super) fn new() -> Self {
        Self { revision: None, at: Instant::now(), written: 0 }
    }

    /// Counts the size of a transaction.
    pub(super) fn add_written(&mut self, bytes: usize) {
        self.written += bytes as u64;
    }

    /// Returns the revision up to which the history must be removed now. `current` is the newest revision.
    pub(super) fn take_due(&mut self, current: i64) -> Option<i64> {
        if self.at.elapsed() < INTERVAL && self.written < WRITTEN_BYTES_MAX {
            return None;
        }
        let due = self.revision.replace(current);
        (self.at, self.written) = (Instant::now(), 0);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_before_the_previous_revision_is_removed() {
        let mut compaction = Compaction::new();
        compaction.add_written(1);
        assert_eq!(compaction.take_due(5), None);
        compaction.add_written(64 << 20);
        assert_eq!(compaction.take_due(10), None); // records the revision
        assert_eq!(compaction.take_due(11), None);
        compaction.add_written(64 << 20);
        assert_eq!(compaction.take_due(20), Some(10));
        compaction.add_written(64 << 20);
        assert_eq!(compaction.take_due(30), Some(20));
    }
}
