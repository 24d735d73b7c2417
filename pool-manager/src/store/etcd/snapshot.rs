//! Consistent snapshot of a store: all entries in one revision of etcd, changed by the batches of the log in this
//! revision.

use std::{collections::BTreeMap, fmt, sync::Arc};

use ::etcd::{client::RESPONSE_BYTES_MAX, messages::KeyValue};

use super::{
    Scan, StoreError, Table,
    apply::{CHUNKS, VALUE, VALUE_BYTES_MAX},
    keys::{KeyRange, Keys},
    log::{self, EntryKey},
    worker::Worker,
};

/// Number of entries that one call reads.
const PAGE_ENTRIES: i64 = 256;
const _: () = assert!(
    256 * (VALUE_BYTES_MAX + (1 << 10)) <= RESPONSE_BYTES_MAX,
    "a page of the largest entries must fit into a response"
);

/// Snapshot of a store. It can be read until its revision is compacted.
pub(super) struct Snapshot {
    worker: Arc<Worker>,
    keys: Arc<Keys>,
    revision: i64,
    /// Entries that the log changes; `None` deletes the entry.
    changes: BTreeMap<EntryKey, Option<Vec<u8>>>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).finish_non_exhaustive()
    }
}

impl Snapshot {
    pub(super) fn take(worker: Arc<Worker>, keys: Arc<Keys>) -> Result<Self, StoreError> {
        let reader = Arc::clone(&keys);
        let contents = worker.block_on(async move { log::read(&reader).await })?;
        let changes = contents.batches.into_iter().flat_map(|batch| batch.writes).collect();
        Ok(Self { worker, keys, revision: contents.revision, changes })
    }

    fn next_page(&self, mut range: KeyRange) -> Result<(Vec<KeyValue>, KeyRange), StoreError> {
        let keys = Arc::clone(&self.keys);
        self.worker.block_on(async move { Ok((keys.next_page(&mut range).await?, range)) })
    }

    /// Returns the value of an entry, which may consist of chunks.
    fn value_of(&self, tag: u8, key: &[u8], stored: &[u8]) -> Result<Vec<u8>, StoreError> {
        match stored.split_first() {
            Some((&VALUE, value)) => Ok(value.to_vec()),
            Some((&CHUNKS, count)) => {
                let end =
                    count.try_into().map(u32::from_be_bytes).map_err(|_| self.corrupt_error(tag, key))?;
                let range = KeyRange::new(
                    self.keys.chunk_key(tag, key, 0),
                    self.keys.chunk_key(tag, key, end),
                    self.revision,
                    PAGE_ENTRIES,
                );
                let keys = Arc::clone(&self.keys);
                let (chunks, value) = self.worker.block_on(async move {
                    let (mut chunks, mut value) = (0, Vec::new());
                    let read = keys.read_range(range, |chunk| {
                        chunks += 1;
                        value.extend_from_slice(&chunk.value);
                    });
                    read.await.map(|_| (chunks, value))
                })?;
                if chunks == end { Ok(value) } else { Err(self.corrupt_error(tag, key)) }
            }
            _ => Err(self.corrupt_error(tag, key)),
        }
    }

    fn corrupt_error(&self, tag: u8, key: &[u8]) -> StoreError {
        let what = format!("entry {key:02x?} of table {tag} has an unknown format, or chunks are missing");
        StoreError::Corrupt { path: self.keys.location(), what }
    }
}

impl Scan for Snapshot {
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let tag = table.tag();
        let prefix = self.keys.table_prefix(table);
        let mut range = KeyRange::of_prefix(prefix.clone(), self.revision, PAGE_ENTRIES);
        let mut changes = self.changes.range((tag, Vec::new())..(tag + 1, Vec::new())).peekable();
        let call_changed = |key: &[u8], value: &Option<Vec<u8>>, each: &mut dyn FnMut(&[u8], &[u8])| {
            if let Some(value) = value {
                each(key, value);
            }
        };
        loop {
            let (page, rest) = self.next_page(range)?;
            if page.is_empty() {
                changes.for_each(|((_, key), value)| call_changed(key, value, each));
                return Ok(());
            }
            range = rest;
            for entry in page {
                let key = &entry.key[prefix.len()..];
                while let Some(((_, changed), value)) =
                    changes.next_if(|((_, changed), _)| changed.as_slice() < key)
                {
                    call_changed(changed, value, each);
                }
                match changes.next_if(|((_, changed), _)| changed == key) {
                    Some(((_, changed), value)) => call_changed(changed, value, each),
                    None => each(key, &self.value_of(tag, key, &entry.value)?),
                }
            }
        }
    }
}
