//! Address range of a pool: reserves it once, and backs and releases single pages.
//!
//! Under Miri, which does not support the system calls, the range is an ordinary allocation.

use std::ptr::NonNull;

use crate::error::PoolError;

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Reserved address range. All pages are readable and writable. The kernel backs a page when it is
/// first written.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    pages: u32,
}

// SAFETY: the mapping owns its address range and has no state that is bound to a thread. All access to
// the contents is by raw pointers of users that own disjoint pages.
unsafe impl Send for Mapping {}
// SAFETY: see `Send`; `&Mapping` permits system calls, which the kernel synchronizes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves an address range.
    ///
    /// # Errors
    /// Returns an error if the page size is not [`PAGE_BYTES`], or if the kernel refuses the range.
    pub(super) fn reserve(pages: u32) -> Result<Self, PoolError> {
        let bytes = pages as usize * PAGE_BYTES;
        let base = kernel::reserve(bytes)?;
        Ok(Self { base, pages })
    }

    /// Returns the length in pages.
    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the address of a page.
    ///
    /// # Panics
    /// Panics if the range does not contain the page.
    #[inline]
    pub(super) fn page(&self, page: u32) -> NonNull<u8> {
        assert!(page < self.pages, "page {page} is outside of the pool");
        // SAFETY: the page is in the range, as checked above, so the result is in the same mapping.
        unsafe { self.base.add(page as usize * PAGE_BYTES) }
    }

    /// Backs pages with memory ahead of their first use, which saves page faults. Failures are
    /// ignored, because the first use of a page backs it as well.
    pub(super) fn populate(&self, first: u32, count: u32) {
        let _ = self.checked_range(first, count).map(|(start, bytes)| kernel::populate(start, bytes));
    }

    /// Returns pages to the kernel. Their contents are lost: the next access reads zeros.
    ///
    /// # Safety
    /// The caller owns the pages, and none of them contains a value that is used later.
    pub(super) unsafe fn release(&self, first: u32, count: u32) {
        if let Some((start, bytes)) = self.checked_range(first, count) {
            // SAFETY: the range is in this mapping, and the caller guarantees that its contents are not used.
            unsafe { kernel::release(start, bytes) };
        }
    }

    /// Returns address and size of a range of pages, or `None` if it is empty.
    fn checked_range(&self, first: u32, count: u32) -> Option<(NonNull<u8>, usize)> {
        assert!(count <= self.pages - first, "pages {first}+{count} are outside of the pool");
        (count > 0).then(|| (self.page(first), count as usize * PAGE_BYTES))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and size are those of `reserve`, and users of the mapping keep it alive.
        unsafe { kernel::unmap(self.base, self.pages as usize * PAGE_BYTES) };
    }
}

#[cfg(not(miri))]
mod kernel {
    //! System calls of the mapping.

    use std::ptr::{NonNull, null_mut};

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::PAGE_BYTES;
    use crate::error::PoolError;

    pub(super) fn reserve(bytes: usize) -> Result<NonNull<u8>, PoolError> {
        if rustix::param::page_size() != PAGE_BYTES {
            return Err(PoolError::PageSize(rustix::param::page_size()));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without an address hint, the kernel chooses a range that no other mapping uses.
        let mapped = unsafe { mmap_anonymous(null_mut(), bytes, protection, flags) };
        let mapped = mapped.map_err(|error| PoolError::Reserve { bytes, source: error.into() })?;
        // A huge page would keep memory of released pages until the kernel splits it.
        // SAFETY: the advice changes no contents of the new mapping.
        let _ = unsafe { madvise(mapped, bytes, Advice::LinuxNoHugepage) };
        Ok(NonNull::new(mapped.cast()).expect("the kernel never maps the null page without a hint"))
    }

    pub(super) fn populate(start: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller passes a range of its mapping; the advice keeps the contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) };
    }

    /// # Safety
    /// The range is in a mapping of `reserve`, and its contents are not used later.
    pub(super) unsafe fn release(start: NonNull<u8>, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        let released = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxDontNeed) };
        // The kernel refuses only locked pages, which stay resident (see the section "Memory" of the crate), and
        // ranges without a mapping, which this crate never creates.
        debug_assert!(
            released.is_ok() || released == Err(rustix::io::Errno::INVAL),
            "cannot release pages: {released:?}"
        );
    }

    /// # Safety
    /// The range is a mapping of `reserve`, and is not used later.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        let unmapped = unsafe { munmap(start.as_ptr().cast(), bytes) };
        debug_assert!(unmapped.is_ok(), "cannot unmap the pool: {unmapped:?}");
    }
}

#[cfg(miri)]
mod kernel {
    //! Substitutes of the system calls for Miri. Released pages become uninitialized, so that Miri
    //! reports each later read.

    use std::{alloc::Layout, mem::MaybeUninit, ptr::NonNull};

    use super::PAGE_BYTES;
    use crate::error::PoolError;

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, PAGE_BYTES).expect("pools of tests are small")
    }

    pub(super) fn reserve(bytes: usize) -> Result<NonNull<u8>, PoolError> {
        // SAFETY: a pool has at least one page.
        let start = unsafe { std::alloc::alloc(layout(bytes)) };
        Ok(NonNull::new(start).expect("Miri has memory for the pool of a test"))
    }

    pub(super) fn populate(_: NonNull<u8>, _: usize) {}

    /// # Safety
    /// The range is in a mapping of `reserve`, and its contents are not used later.
    pub(super) unsafe fn release(start: NonNull<u8>, bytes: usize) {
        let first = start.cast::<MaybeUninit<[u8; PAGE_BYTES]>>();
        for page in 0..bytes / PAGE_BYTES {
            // SAFETY: the page is in the range.
            let page = unsafe { first.add(page) };
            // SAFETY: the caller guarantees that the contents of the page are not used.
            unsafe { page.write(MaybeUninit::uninit()) };
        }
    }

    /// # Safety
    /// The range is a mapping of `reserve`, and is not used later.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { std::alloc::dealloc(start.as_ptr(), layout(bytes)) };
    }
}
