//! Byte strings that were removed from their heap and are still readable.

use std::{fmt, ops::Deref, ptr::NonNull, slice, sync::Arc};

use super::{classes::CHUNK_PAGES, pool::Pool};

/// Alignment of values in bytes, as of the result of `malloc`.
pub(super) const ALIGN: usize = 16;

/// Run of pages that belongs to no heap. The pages count against the budget until the value is dropped.
pub(super) struct DetachedRun {
    pool: Arc<Pool>,
    first_page: u32,
    pages: u32,
}

impl DetachedRun {
    /// Takes a run over from its heap, which has no reference to it any more. `first_page` is the number in the
    /// pool.
    pub(super) fn new(pool: Arc<Pool>, first_page: u32, pages: u32) -> Self {
        Self { pool, first_page, pages }
    }

    /// Returns the address of the first page.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.pool.mapping().page(self.first_page)
    }
}

impl Drop for DetachedRun {
    fn drop(&mut self) {
        // SAFETY: the run belongs to this value alone, and is not used later.
        unsafe { self.pool.mapping().release(self.first_page, self.pages) };
        self.pool.unhold(self.pages);
        self.pool.give_chunks(self.first_page, self.pages.div_ceil(CHUNK_PAGES));
    }
}

/// Bytes of a removed value, aligned to 16 bytes: a copy in ordinary memory, or the pages of a large value, which are
/// freed when this value is dropped.
pub(crate) enum DetachedBytes {
    /// Copy of a small value.
    Copy(AlignedCopy),
    /// Large value in its own pages.
    Run(LargeBytes),
}

/// Copy of bytes with the alignment of a value in a heap.
pub(crate) struct AlignedCopy {
    units: Box<[Unit]>,
    len: usize,
}

/// Part of a copy.
#[derive(Clone, Copy)]
#[repr(align(16))]
struct Unit([u8; ALIGN]);

impl AlignedCopy {
    /// Copies bytes.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let units = bytes.chunks(ALIGN).map(|chunk| {
            let mut unit = Unit([0; ALIGN]);
            unit.0[..chunk.len()].copy_from_slice(chunk);
            unit
        });
        Self { units: units.collect(), len: bytes.len() }
    }
}

/// Initialized bytes at the start of a run.
pub(crate) struct LargeBytes {
    run: DetachedRun,
    len: usize,
}

impl LargeBytes {
    /// Creates a value.
    ///
    /// # Safety
    /// The first `len` bytes of the run are within its pages and initialized.
    pub(super) unsafe fn new(run: DetachedRun, len: usize) -> Self {
        Self { run, len }
    }
}

impl Deref for DetachedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            // SAFETY: the units contain at least `len` initialized bytes without padding between them.
            Self::Copy(copy) => unsafe { slice::from_raw_parts(copy.units.as_ptr().cast(), copy.len) },
            // SAFETY: `new` guarantees that the bytes are initialized. The run belongs to `self`, and no method
            // changes it.
            Self::Run(large) => unsafe { slice::from_raw_parts(large.run.address().as_ptr(), large.len) },
        }
    }
}

impl fmt::Debug for DetachedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedBytes").field("len", &self.len()).finish_non_exhaustive()
    }
}
