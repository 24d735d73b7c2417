//! Durable writes as sent to watchers.

use std::{ops::Range, sync::Arc};

use pool::{ledger::When, manager::PublishedBatch, record::Record};
use units::{Revision, limits::WATCH_CHUNK_RECORDS_MAX};

/// At most [`WATCH_CHUNK_RECORDS_MAX`] records of one durable write, which bounds the memory of a
/// slow watcher.
#[derive(Clone, Debug)]
pub struct WriteChunk {
    published: Arc<PublishedBatch>,
    range: Range<usize>,
}

impl WriteChunk {
    /// Splits a write in its order.
    pub(crate) fn split(published: PublishedBatch) -> impl Iterator<Item = Self> {
        let records = published.records.len();
        let published = Arc::new(published);
        (0..records).step_by(WATCH_CHUNK_RECORDS_MAX).map(move |start| Self {
            published: Arc::clone(&published),
            range: start..records.min(start + WATCH_CHUNK_RECORDS_MAX),
        })
    }

    /// Returns the records as written.
    pub fn records(&self) -> &[Record] {
        &self.published.records[self.range.clone()]
    }

    /// Returns the ledger's revision after the whole write.
    pub fn revision(&self) -> Revision {
        self.published.revision
    }

    /// Returns the time of the write.
    pub fn when(&self) -> When {
        self.published.when
    }
}
