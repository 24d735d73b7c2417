//! Log of the pages that this process writes in a memory region. KVM logs only the writes of vCPUs.
//! The log is disabled unless the region's memory is being moved. A disabled log costs a memory
//! barrier and a load per write, and uses no memory for pages.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};

use super::PAGE_BYTES;

/// Write log of one memory region. Clones share the log.
#[derive(Clone, Debug, Default)]
pub struct WriteLog(Arc<Log>);

#[derive(Debug, Default)]
struct Log {
    is_enabled: AtomicBool,
    /// One bit per page. Allocated when the log is enabled for the first time.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl WriteLog {
    /// Enables the log of a region of `bytes` bytes, without logged pages. All writes that complete
    /// after this call are logged.
    pub fn enable(&self, bytes: usize) {
        let words = bytes.div_ceil(PAGE_BYTES).div_ceil(u64::BITS as usize);
        let words = self.0.words.get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
        words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        self.0.is_enabled.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Disables the log.
    pub fn disable(&self) {
        self.0.is_enabled.store(false, Ordering::SeqCst);
    }

    /// Adds the logged pages to a bitmap and clears the log.
    pub fn move_to(&self, bitmap: &mut [u64]) {
        let words = self.0.words.get().map_or(&[][..], |words| words);
        for (to, word) in bitmap.iter_mut().zip(words) {
            *to |= word.swap(0, Ordering::SeqCst);
        }
    }
}

/// Part of a write log that starts at an offset in the region.
#[derive(Clone, Debug)]
pub struct WriteLogSlice<'a> {
    log: &'a WriteLog,
    offset: usize,
}

impl<'a> WithBitmapSlice<'a> for WriteLog {
    type S = WriteLogSlice<'a>;
}

impl Bitmap for WriteLog {
    /// Logs a write. vm-memory calls this function after the write. The barrier orders the write
    /// before the check whether the log is enabled: either the write is logged, or it was complete
    /// before the log was enabled.
    fn mark_dirty(&self, offset: usize, bytes: usize) {
        fence(Ordering::SeqCst);
        if !self.0.is_enabled.load(Ordering::SeqCst) || bytes == 0 {
            return;
        }
        let words = self.0.words.get().map_or(&[][..], |words| words);
        for page in offset / PAGE_BYTES..=(offset + bytes - 1) / PAGE_BYTES {
            if let Some(word) = words.get(page / u64::BITS as usize) {
                word.fetch_or(1 << (page % u64::BITS as usize), Ordering::SeqCst);
            }
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset / PAGE_BYTES;
        let word = self.0.words.get().and_then(|words| words.get(page / u64::BITS as usize));
        word.is_some_and(|word| word.load(Ordering::SeqCst) >> (page % u64::BITS as usize) & 1 != 0)
    }

    fn slice_at(&self, offset: usize) -> WriteLogSlice<'_> {
        WriteLogSlice { log: self, offset }
    }
}

impl NewBitmap for WriteLog {
    fn with_len(_: usize) -> Self {
        Self::default()
    }
}

impl<'a> WithBitmapSlice<'a> for WriteLogSlice<'_> {
    type S = Self;
}

impl BitmapSlice for WriteLogSlice<'_> {}

impl Bitmap for WriteLogSlice<'_> {
    fn mark_dirty(&self, offset: usize, bytes: usize) {
        self.log.mark_dirty(self.offset + offset, bytes);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.dirty_at(self.offset + offset)
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { log: self.log, offset: self.offset + offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION_BYTES: usize = 130 * PAGE_BYTES;

    fn taken(log: &WriteLog) -> Vec<usize> {
        let mut words = [0; 3];
        log.move_to(&mut words);
        (0..130).filter(|page| words[page / 64] >> (page % 64) & 1 != 0).collect()
    }

    #[test]
    fn log_contains_all_pages_of_a_write_only_while_enabled() {
        let log = WriteLog::default();
        log.mark_dirty(0, PAGE_BYTES);
        log.enable(REGION_BYTES);
        log.slice_at(PAGE_BYTES).slice_at(PAGE_BYTES - 1).mark_dirty(0, PAGE_BYTES + 2);
        log.mark_dirty(129 * PAGE_BYTES, 1);
        log.mark_dirty(REGION_BYTES, 1); // outside the region
        assert!(log.dirty_at(2 * PAGE_BYTES) && !log.dirty_at(0));
        assert_eq!(taken(&log), [1, 2, 3, 129]);
        assert_eq!(taken(&log), [0; 0]);
        log.disable();
        log.mark_dirty(0, 1);
        assert_eq!(taken(&log), [0; 0]);
    }

    #[test]
    fn enabling_again_discards_logged_pages() {
        let log = WriteLog::default();
        log.enable(REGION_BYTES);
        log.mark_dirty(0, 1);
        log.disable();
        log.enable(REGION_BYTES);
        assert_eq!(taken(&log), [0; 0]);
    }
}
