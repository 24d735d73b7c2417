//! Splits durable changes of the ledger into chunks for watchers.

use std::{ops::Range, sync::Arc};

use pool::{ledger::When, manager::PublishedBatch, record::Record};
use units::{Revision, limits::RECORDS_PER_WATCH_CHUNK_MAX};

/// Part of a durable batch, with at most [`RECORDS_PER_WATCH_CHUNK_MAX`] records. The limit bounds the
/// memory that is queued for a slow watcher.
#[derive(Clone, Debug)]
pub struct WriteChunk {
    published: Arc<PublishedBatch>,
    range: Range<usize>,
}

impl WriteChunk {
    /// Splits a batch into chunks, in the order of its records.
    pub(crate) fn split_batch(published: PublishedBatch) -> impl Iterator<Item = Self> {
        let records = published.records.len();
        let published = Arc::new(published);
        (0..records).step_by(RECORDS_PER_WATCH_CHUNK_MAX).map(move |start| Self {
            published: Arc::clone(&published),
            range: start..records.min(start + RECORDS_PER_WATCH_CHUNK_MAX),
        })
    }

    /// Returns the records of this chunk.
    pub fn records(&self) -> &[Record] {
        &self.published.records[self.range.clone()]
    }

    /// Returns the revision of the ledger after the whole batch.
    pub fn revision(&self) -> Revision {
        self.published.revision
    }

    /// Returns the time at which the batch became durable.
    pub fn when(&self) -> When {
        self.published.when
    }
}
