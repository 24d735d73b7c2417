//! Log of batches that are not yet applied.

use std::{collections::BTreeMap, mem};

use ::etcd::{
    client::RESPONSE_BYTES_MAX,
    messages::{KeyValue, RequestOp, put},
};

use super::{
    StoreError, Table, Write,
    keys::{KeyRange, Keys},
};

/// Maximum size of the data of a part, in bytes. etcd accepts requests of 1.5 MiB.
const PART_BYTES_MAX: usize = 1 << 20;
/// Number of parts that one call reads.
const PAGE_PARTS: i64 = 32;
const _: () = assert!(
    32 * (PART_BYTES_MAX + (1 << 10)) <= RESPONSE_BYTES_MAX,
    "a page of the largest parts must fit into a response"
);
/// First byte of a part that is not the last one of its batch.
const IS_CONTINUED: u8 = 0;
/// First byte of the last part of a batch.
const IS_LAST: u8 = 1;

/// Table tag and key of an entry.
pub(super) type EntryKey = (u8, Vec<u8>);

/// Batch of the log.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    /// Number of the batch; each batch has a larger one than the batches before it.
    pub(super) number: u64,
    /// Last write of each entry; `None` deletes the entry.
    pub(super) writes: BTreeMap<EntryKey, Option<Vec<u8>>>,
    encoded: Vec<u8>,
}

impl Batch {
    pub(super) fn new(number: u64, writes: Vec<Write>) -> Self {
        let writes: BTreeMap<_, _> = writes
            .into_iter()
            .map(|write| match write {
                Write::Put { table, key, value } => ((table.tag(), key), Some(value)),
                Write::Delete { table, key } => ((table.tag(), key), None),
            })
            .collect();
        let encoded =
            postcard::to_stdvec(&writes).expect("postcard fails only for sequences of unknown length");
        Self { number, writes, encoded }
    }

    /// Returns the size of the batch in the log, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.encoded.len()
    }

    /// Returns the operations that append the batch, each in a transaction of its own, in this order.
    pub(super) fn parts<'a>(&'a self, keys: &'a Keys) -> impl Iterator<Item = RequestOp> + 'a {
        let count = self.encoded.len().div_ceil(PART_BYTES_MAX).max(1);
        (0..).zip(self.encoded.chunks(PART_BYTES_MAX)).map(move |(part, data)| {
            let is_last = part as usize + 1 == count;
            let mut value = vec![if is_last { IS_LAST } else { IS_CONTINUED }];
            value.extend_from_slice(data);
            put(keys.log_key(self.number, part), value)
        })
    }

    fn decode(number: u64, encoded: Vec<u8>) -> Option<Self> {
        let writes: BTreeMap<EntryKey, Option<Vec<u8>>> = postcard::from_bytes(&encoded).ok()?;
        let is_known = |tag| Table::ALL.iter().any(|table| table.tag() == tag);
        writes.keys().all(|(tag, _)| is_known(*tag)).then_some(Self { number, writes, encoded })
    }
}

/// Log as read in one revision of etcd.
#[derive(Debug)]
pub(super) struct LogContents {
    /// Complete batches, in ascending order of their numbers.
    pub(super) batches: Vec<Batch>,
    /// Number of the last batch, which may be incomplete; 0 without batches.
    pub(super) last_number: u64,
    pub(super) revision: i64,
}

/// Reads all complete batches of the log in the newest revision. A manager that ended between two parts
/// leaves an incomplete batch, which is not durable and is ignored.
pub(super) async fn read(keys: &Keys) -> Result<LogContents, StoreError> {
    let prefix = keys.log_prefix();
    let (mut batches, mut parts, mut damaged) = (Vec::new(), Parts::default(), None);
    let range = KeyRange::of_prefix(prefix.clone(), 0, PAGE_PARTS);
    let read = keys.read_range(range, |entry| match parts.add(&prefix, &entry) {
        Ok(batch) => batches.extend(batch),
        Err(()) => damaged = Some(entry.key),
    });
    let revision = read.await?;
    match damaged {
        None => Ok(LogContents { batches, last_number: parts.batch, revision }),
        Some(key) => {
            let what = format!("entry {:?} of its log cannot be decoded", String::from_utf8_lossy(&key));
            Err(StoreError::Corrupt { path: keys.location(), what })
        }
    }
}

/// Parts of the batch that is being read.
#[derive(Default)]
struct Parts {
    /// Number of the batch; 0 before the first one.
    batch: u64,
    encoded: Vec<u8>,
    count: u32,
    /// Whether the last part was read.
    is_complete: bool,
}

impl Parts {
    /// Adds a part, and returns its batch if it is the last one.
    fn add(&mut self, prefix: &[u8], entry: &KeyValue) -> Result<Option<Batch>, ()> {
        let suffix: &[u8; 12] = entry.key[prefix.len()..].try_into().map_err(drop)?;
        let (batch, part) = suffix.split_at(8);
        let batch = u64::from_be_bytes(batch.try_into().map_err(drop)?);
        let part = u32::from_be_bytes(part.try_into().map_err(drop)?);
        let (kind, data) = entry.value.split_first().ok_or(())?;
        if batch != self.batch {
            *self = Self { batch, ..Self::default() };
        }
        if part != self.count || self.is_complete {
            return Err(());
        }
        self.count += 1;
        self.encoded.extend_from_slice(data);
        match *kind {
            IS_CONTINUED => Ok(None),
            IS_LAST => {
                self.is_complete = true;
                let encoded = mem::take(&mut self.encoded);
                Batch::decode(batch, encoded).map(Some).ok_or(())
            }
            _ => Err(()),
        }
    }
}
