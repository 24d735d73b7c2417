//! Chunks and pages of one heap.
//!
//! Each page of a chunk is in use by a span or a run, *idle* (held and backed, but not in use), or
//! *absent* (not held). Idle pages are reused first. The heap numbers the pages of its chunks
//! itself: a run of several chunks uses the number of its first page.

use std::{ptr::NonNull, sync::Arc};

use units::limits::SOFT_IDLE_PAGES_MAX;

use super::{classes::CHUNK_PAGES, detached::DetachedRun, pool::Pool};
use crate::error::SoftError;

/// Maximum number of chunks that are searched for consecutive free pages.
const CHUNKS_SEARCHED_MAX: usize = 16;
/// Maximum number of chunks that are searched if the address space has no free chunk.
const CHUNKS_SEARCHED_LAST_MAX: usize = 4096;
/// A heap takes a new chunk with this fraction of its held pages at once, at most a whole chunk.
const GROWTH_DIVISOR: usize = 8;
/// Maximum number of chunks of a heap, so that page numbers have 24 bits.
const CHUNKS_MAX: usize = 1 << 20;

/// Number of a page within its heap, below 2^24.
pub(super) type PageNumber = u32;

/// Chunk, or run of consecutive chunks.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// First page in the pool.
    first: u32,
    /// Idle pages, one bit per page.
    idle: u16,
    /// Absent pages, one bit per page. A returned chunk has none.
    absent: u16,
    /// Length of a run in pages, 0 for chunks with spans and for returned chunks.
    run_pages: u32,
    /// Whether the entry has a chunk. False for returned chunks.
    is_taken: bool,
    is_in_idle: bool,
    is_in_absent: bool,
}

/// Chunks of one heap.
#[derive(Debug)]
pub(super) struct Arena {
    pool: Arc<Pool>,
    chunks: Vec<Chunk>,
    /// Indexes of returned chunks.
    vacant: Vec<u32>,
    /// Chunks with idle pages. An entry is removed when it is on top and has no idle pages.
    with_idle: Vec<u32>,
    /// Chunks with absent pages. An entry is removed when it is on top and has no absent pages.
    with_absent: Vec<u32>,
    idle_pages: usize,
    held_pages: usize,
}

impl Arena {
    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            chunks: Vec::new(),
            vacant: Vec::new(),
            with_idle: Vec::new(),
            with_absent: Vec::new(),
            idle_pages: 0,
            held_pages: 0,
        }
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns the number of pages that count against the budget.
    pub(super) fn held_pages(&self) -> usize {
        self.held_pages
    }

    /// Returns the number of held pages without a span or run.
    pub(super) fn idle_pages(&self) -> usize {
        self.idle_pages
    }

    /// Returns the address of a page.
    #[inline]
    pub(super) fn address(&self, page: PageNumber) -> NonNull<u8> {
        let chunk = &self.chunks[(page / CHUNK_PAGES) as usize];
        self.pool.mapping().page(chunk.first + page % CHUNK_PAGES)
    }

    /// Takes consecutive pages of one chunk, at most [`CHUNK_PAGES`].
    ///
    /// # Errors
    /// Returns [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`].
    pub(super) fn take(&mut self, count: u32) -> Result<PageNumber, SoftError> {
        if let Some(page) = self.take_idle(count) {
            return Ok(page);
        }
        match self.take_absent(count, CHUNKS_SEARCHED_MAX) {
            // Scattered idle pages count against the budget, too.
            Err(SoftError::OutOfBudget { .. }) if self.idle_pages > 0 => {
                self.release_idle(usize::MAX);
                self.take_absent(count, CHUNKS_SEARCHED_MAX)
            }
            Err(SoftError::OutOfAddressSpace { .. }) => self.take_absent(count, CHUNKS_SEARCHED_LAST_MAX),
            result => result,
        }
    }

    /// Makes pages idle. Releases idle pages if there are more than [`SOFT_IDLE_PAGES_MAX`].
    pub(super) fn give_back(&mut self, page: PageNumber, count: u32) {
        let index = page / CHUNK_PAGES;
        self.chunks[index as usize].idle |= mask(page % CHUNK_PAGES, count);
        self.idle_pages += count as usize;
        self.list_idle(index);
        if self.idle_pages > SOFT_IDLE_PAGES_MAX {
            self.release_idle(self.idle_pages - SOFT_IDLE_PAGES_MAX / 2);
        }
    }

    /// Takes a run of consecutive pages.
    ///
    /// # Errors
    /// Returns [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`].
    pub(super) fn take_run(&mut self, pages: u32) -> Result<PageNumber, SoftError> {
        if let Err(error) = self.pool.hold(pages, pages) {
            if self.idle_pages == 0 {
                return Err(error);
            }
            self.release_idle(usize::MAX);
            self.pool.hold(pages, pages)?;
        }
        let index = self.new_chunk(pages.div_ceil(CHUNK_PAGES), pages)?;
        let chunk = &mut self.chunks[index as usize];
        chunk.run_pages = pages;
        self.pool.mapping().populate(chunk.first, pages);
        Ok(index * CHUNK_PAGES)
    }

    /// Releases a run.
    pub(super) fn give_back_run(&mut self, page: PageNumber) {
        self.vacate(page / CHUNK_PAGES);
    }

    /// Removes a run without releasing it.
    pub(super) fn detach_run(&mut self, page: PageNumber) -> DetachedRun {
        let Chunk { first, run_pages, .. } = self.forget(page / CHUNK_PAGES);
        self.held_pages -= run_pages as usize;
        DetachedRun::new(self.pool.clone(), first, run_pages)
    }

    /// Returns up to `maximum` idle pages to the kernel and to the budget. Returns their number.
    pub(super) fn release_idle(&mut self, maximum: usize) -> usize {
        let mut missing = u32::try_from(maximum).unwrap_or(u32::MAX);
        let mut ranges = Vec::new();
        let mut touched = Vec::new();
        while missing > 0
            && let Some(&index) = self.with_idle.last()
        {
            let chunk = &mut self.chunks[index as usize];
            while chunk.idle != 0 && missing > 0 {
                let first = chunk.idle.trailing_zeros();
                let count = (!(chunk.idle >> first)).trailing_zeros().min(missing);
                ranges.push((chunk.first + first, count));
                chunk.idle &= !mask(first, count);
                chunk.absent |= mask(first, count);
                missing -= count;
            }
            touched.push(index);
            if chunk.idle == 0 {
                chunk.is_in_idle = false;
                self.with_idle.pop();
            }
        }
        let released = self.release_ranges(ranges);
        self.idle_pages -= released as usize;
        self.held_pages -= released as usize;
        touched.into_iter().for_each(|index| self.settle_absent(index));
        released as usize
    }

    /// Returns pages that are no longer idle to the kernel and to the budget. Returns their number.
    fn release_ranges(&self, mut ranges: Vec<(u32, u32)>) -> u32 {
        // Chunks are often adjacent. Fewer and longer ranges need fewer system calls.
        ranges.sort_unstable();
        let released = ranges.iter().map(|(_, count)| count).sum();
        for range in ranges.chunk_by(|(first, count), (next, _)| first + count == *next) {
            let (first, count) = (range[0].0, range.iter().map(|(_, count)| count).sum());
            // SAFETY: the pages were idle, so they are held by this arena and in no span or run.
            unsafe { self.pool.mapping().release(first, count) };
        }
        self.pool.unhold(released);
        released
    }

    fn take_idle(&mut self, count: u32) -> Option<PageNumber> {
        while let Some(&index) = self.with_idle.last()
            && self.chunks[index as usize].idle == 0
        {
            self.chunks[index as usize].is_in_idle = false;
            self.with_idle.pop();
        }
        let searched = self.with_idle.iter().rev().take(CHUNKS_SEARCHED_MAX);
        let (index, first) = searched.copied().find_map(|index| {
            let first = find_consecutive(self.chunks[index as usize].idle, count)?;
            Some((index, first))
        })?;
        self.chunks[index as usize].idle &= !mask(first, count);
        self.idle_pages -= count as usize;
        Some(index * CHUNK_PAGES + first)
    }

    /// Takes pages of which at least one is absent, from an existing chunk or a new one. Searches a limited number of
    /// existing chunks.
    fn take_absent(&mut self, count: u32, searched_max: usize) -> Result<PageNumber, SoftError> {
        while let Some(&index) = self.with_absent.last()
            && self.chunks[index as usize].absent == 0
        {
            self.chunks[index as usize].is_in_absent = false;
            self.with_absent.pop();
        }
        let searched = self.with_absent.iter().rev().take(searched_max);
        let suitable = searched.copied().find_map(|index| {
            let chunk = &self.chunks[index as usize];
            // A returned chunk has no absent pages.
            let first =
                find_consecutive(if chunk.absent == 0 { 0 } else { chunk.absent | chunk.idle }, count)?;
            Some((index, first))
        });
        let (index, first) = match suitable {
            Some(found) => found,
            None => return self.take_new_chunk(count),
        };
        let chunk = &mut self.chunks[index as usize];
        let missing = (chunk.absent & mask(first, count)).count_ones();
        self.pool.hold(missing, missing)?;
        chunk.absent &= !mask(first, count);
        chunk.idle &= !mask(first, count);
        self.held_pages += missing as usize;
        self.idle_pages -= (count - missing) as usize;
        self.pool.mapping().populate(chunk.first + first, count);
        Ok(index * CHUNK_PAGES + first)
    }

    fn take_new_chunk(&mut self, count: u32) -> Result<PageNumber, SoftError> {
        let growth = u32::try_from(self.held_pages / GROWTH_DIVISOR).unwrap_or(u32::MAX);
        let held = self.pool.hold(count, growth.clamp(count, CHUNK_PAGES))?;
        let index = self.new_chunk(1, held)?;
        let chunk = &mut self.chunks[index as usize];
        chunk.idle = mask(0, held) & !mask(0, count);
        chunk.absent = !mask(0, held);
        self.idle_pages += (held - count) as usize;
        self.pool.mapping().populate(chunk.first, held);
        self.list_idle(index);
        self.settle_absent(index);
        Ok(index * CHUNK_PAGES)
    }

    /// Takes chunks for `held` pages that the pool counts as held. Returns the index of the new entry.
    fn new_chunk(&mut self, count: u32, held: u32) -> Result<u32, SoftError> {
        let has_index = !self.vacant.is_empty() || self.chunks.len() < CHUNKS_MAX - 1;
        let error = SoftError::OutOfAddressSpace { pages: held as usize };
        let first = if has_index { self.pool.take_chunks(count) } else { Err(error) };
        let first = first.inspect_err(|_| self.pool.unhold(held))?;
        self.held_pages += held as usize;
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.chunks.push(Chunk::default());
            u32::try_from(self.chunks.len() - 1).expect("there are at most 2^20 chunks")
        });
        let chunk = &mut self.chunks[index as usize];
        (chunk.first, chunk.is_taken) = (first, true);
        Ok(index)
    }

    fn list_idle(&mut self, index: u32) {
        let chunk = &mut self.chunks[index as usize];
        if chunk.idle != 0 && !chunk.is_in_idle {
            chunk.is_in_idle = true;
            self.with_idle.push(index);
        }
    }

    /// Adds a chunk to the list of chunks with absent pages, or returns it to the pool if it holds no
    /// pages.
    fn settle_absent(&mut self, index: u32) {
        let chunk = &mut self.chunks[index as usize];
        if chunk.absent == u16::MAX {
            self.vacate(index);
        } else if chunk.absent != 0 && !chunk.is_in_absent {
            chunk.is_in_absent = true;
            self.with_absent.push(index);
        }
    }

    /// Returns a chunk or run to the pool, with all pages that it holds.
    fn vacate(&mut self, index: u32) {
        let chunk = self.forget(index);
        self.held_pages -= self.release_chunk(&chunk) as usize;
        self.idle_pages -= chunk.idle.count_ones() as usize;
    }

    /// Removes the entry of a chunk or run, and returns it.
    fn forget(&mut self, index: u32) -> Chunk {
        let Chunk { is_in_idle, is_in_absent, .. } = self.chunks[index as usize];
        let empty = Chunk { is_in_idle, is_in_absent, ..Chunk::default() };
        self.vacant.push(index);
        std::mem::replace(&mut self.chunks[index as usize], empty)
    }

    /// Releases all pages of a chunk or run. Returns the number of held pages.
    fn release_chunk(&self, chunk: &Chunk) -> u32 {
        let (held, pages) = match chunk.run_pages {
            0 => (CHUNK_PAGES - chunk.absent.count_ones(), CHUNK_PAGES),
            pages => (pages, pages),
        };
        if held > 0 {
            // SAFETY: the chunk belongs to this arena. Its callers return a chunk only if no span uses its
            // pages, or when the heap is dropped after all values.
            unsafe { self.pool.mapping().release(chunk.first, pages) };
            self.pool.unhold(held);
        }
        self.pool.give_chunks(chunk.first, pages.div_ceil(CHUNK_PAGES));
        held
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for chunk in self.chunks.iter().filter(|chunk| chunk.is_taken) {
            self.release_chunk(chunk);
        }
    }
}

/// Returns `count` bits from bit `first` on. The bits are within the chunk.
fn mask(first: u32, count: u32) -> u16 {
    debug_assert!(first + count <= CHUNK_PAGES);
    let bits = u16::MAX.checked_shr(CHUNK_PAGES - count).unwrap_or(0);
    bits.checked_shl(first).unwrap_or(0)
}

/// Returns the first bit of the first `count` consecutive bits that are set.
fn find_consecutive(bits: u16, count: u32) -> Option<u32> {
    let starts = (1..count).fold(bits, |starts, _| starts & (starts >> 1));
    (starts != 0).then(|| starts.trailing_zeros())
}
