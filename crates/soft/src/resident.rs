//! Counts the pages of a pool that are backed by memory, for tests.

#![expect(clippy::disallowed_types, reason = "the kernel reports resident pages in a file")]

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    ops::Range,
};

use crate::{PAGE_BYTES, Pool};

/// Bytes of an entry of `/proc/self/pagemap`.
const ENTRY_BYTES: usize = 8;
/// Bit of an entry that is set if the page is in memory.
const PRESENT: u64 = 1 << 63;

/// Returns the number of pages of the pool that are in memory.
pub(crate) fn resident_pages(pool: &Pool) -> usize {
    let Range { start, end } = pool.address_range();
    let mut file = File::open("/proc/self/pagemap").expect("pagemap is readable");
    let offset = start / PAGE_BYTES * ENTRY_BYTES;
    file.seek(SeekFrom::Start(offset as u64)).expect("pagemap has an entry per page");
    let mut entries = vec![0; (end - start) / PAGE_BYTES * ENTRY_BYTES];
    file.read_exact(&mut entries).expect("the range is mapped");
    let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
    entries.iter().filter(|entry| u64::from_ne_bytes(**entry) & PRESENT != 0).count()
}
