//! Size classes: the sizes of slots, and the division of spans into slots.
//!
//! Classes are 16 bytes apart up to 128 bytes. Above, each doubling of the size has eight classes, so
//! that a slot is at most an eighth larger than its value.

use std::alloc::Layout;

use super::mapping::PAGE_BYTES;
use crate::error::SoftError;

/// Number of size classes.
pub(super) const CLASSES: usize = 72;
/// Size of the largest class in bytes.
pub(super) const SLOT_BYTES_MAX: usize = 32 << 10;
/// Pages of a chunk, the unit that heaps take from the pool. A span is inside one chunk.
pub(super) const CHUNK_PAGES: u32 = 16;

/// Difference between small classes in bytes. Also the minimum size.
const STEP: usize = 16;
/// Number of classes that are [`STEP`] apart, and number of classes per doubling above.
const STEPS: usize = 8;

/// Size class, below [`CLASSES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u8);

/// Division of a span into slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpanShape {
    /// Size of a slot in bytes.
    pub slot_bytes: usize,
    /// Length of the span in pages, at most [`CHUNK_PAGES`].
    pub pages: u32,
    /// Number of slots, at most 256.
    pub slots: u16,
}

/// Kind of memory block for a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    /// A slot of a span.
    Slot(Class),
    /// A run of this number of pages.
    Run(u32),
}

impl BlockKind {
    /// Returns the smallest kind of block for values of a layout.
    ///
    /// # Errors
    /// Returns [`SoftError::AlignmentTooLarge`] or [`SoftError::TooLarge`].
    pub(super) fn for_layout(layout: Layout) -> Result<Self, SoftError> {
        if layout.align() > PAGE_BYTES {
            return Err(SoftError::AlignmentTooLarge { align: layout.align() });
        }
        let bytes = layout.size().next_multiple_of(layout.align());
        if bytes > SLOT_BYTES_MAX {
            let pages = bytes.div_ceil(PAGE_BYTES);
            let is_allowed = pages <= units::limits::SOFT_POOL_PAGES_MAX;
            return u32::try_from(pages)
                .ok()
                .filter(|_| is_allowed)
                .map(Self::Run)
                .ok_or(SoftError::TooLarge);
        }
        let mut class = Class::for_bytes(bytes);
        // Spans start at a page. Each power of two is a class, so the search ends.
        while !class.slot_bytes().is_multiple_of(layout.align()) {
            class.0 += 1;
        }
        Ok(Self::Slot(class))
    }

    /// Returns the size of a block.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Slot(class) => class.slot_bytes(),
            Self::Run(pages) => pages as usize * PAGE_BYTES,
        }
    }
}

impl Class {
    /// Returns the class with the smallest slots of at least `bytes` bytes, which are at most
    /// [`SLOT_BYTES_MAX`].
    fn for_bytes(bytes: usize) -> Self {
        let last = bytes.max(1) - 1;
        let index = if last < STEP * STEPS {
            last / STEP
        } else {
            let shift = last.ilog2() - STEPS.ilog2();
            (shift - STEP.ilog2()) as usize * STEPS + (last >> shift)
        };
        Self(u8::try_from(index).expect("there are 72 classes"))
    }

    /// Returns the index of the class, below [`CLASSES`].
    pub(super) fn index(self) -> usize {
        self.0.into()
    }

    /// Returns the size of a slot in bytes.
    pub(super) fn slot_bytes(self) -> usize {
        let index = self.index();
        if index < STEPS {
            return (index + 1) * STEP;
        }
        let doublings = index / STEPS - 1;
        (STEPS + index % STEPS + 1) * (STEP << doublings)
    }

    /// Returns the shortest span that wastes at most an eighth of its bytes after the last slot.
    pub(super) fn shape(self) -> SpanShape {
        let slot_bytes = self.slot_bytes();
        let mut pages = 1;
        loop {
            let bytes = pages as usize * PAGE_BYTES;
            if bytes % slot_bytes <= bytes / 8 || pages == CHUNK_PAGES {
                let slots = u16::try_from(bytes / slot_bytes).expect("a page has at most 256 slots");
                return SpanShape { slot_bytes, pages, slots };
            }
            pages += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(size: usize, align: usize) -> Result<BlockKind, SoftError> {
        BlockKind::for_layout(Layout::from_size_align(size, align).unwrap())
    }

    #[test]
    fn classes_have_the_documented_sizes() {
        let sizes: Vec<_> =
            (0..CLASSES).map(|index| Class(u8::try_from(index).unwrap()).slot_bytes()).collect();
        assert_eq!(sizes[..10], [16, 32, 48, 64, 80, 96, 112, 128, 144, 160]);
        assert_eq!(sizes[15..18], [256, 288, 320]);
        assert_eq!(sizes[CLASSES - 2..], [30 << 10, SLOT_BYTES_MAX]);
    }

    #[test]
    fn each_size_gets_the_smallest_class() {
        let mut smaller = 0;
        for index in 0..CLASSES {
            let class = Class(u8::try_from(index).unwrap());
            assert_eq!(Class::for_bytes(smaller + 1), class);
            assert_eq!(Class::for_bytes(class.slot_bytes()), class);
            smaller = class.slot_bytes();
        }
        assert_eq!(Class::for_bytes(0), Class(0));
    }

    #[test]
    fn spans_waste_at_most_an_eighth_and_fit_a_chunk() {
        for index in 0..CLASSES {
            let shape = Class(u8::try_from(index).unwrap()).shape();
            let bytes = shape.pages as usize * PAGE_BYTES;
            assert!((1..=256).contains(&shape.slots) && shape.pages <= CHUNK_PAGES, "{shape:?}");
            assert!(bytes - usize::from(shape.slots) * shape.slot_bytes <= bytes / 8, "{shape:?}");
        }
        assert_eq!(Class::for_bytes(2048).shape(), SpanShape { slot_bytes: 2048, pages: 1, slots: 2 });
    }

    #[test]
    fn alignment_selects_a_class_with_aligned_slots() {
        assert_eq!(kind(100, 64), kind(128, 1));
        assert_eq!(kind(129, 64), kind(192, 1));
        assert_eq!(kind(0, 4096), kind(4096, 1));
        assert_eq!(kind(1, 4096), kind(4096, 1));
        assert_eq!(kind(1, 8192), Err(SoftError::AlignmentTooLarge { align: 8192 }));
    }

    #[test]
    fn larger_sizes_are_runs_of_pages() {
        assert_eq!(kind(SLOT_BYTES_MAX + 1, 1), Ok(BlockKind::Run(9)));
        assert_eq!(kind(isize::MAX as usize, 1), Err(SoftError::TooLarge));
    }
}
