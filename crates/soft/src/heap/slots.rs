//! Spans and slots of one heap: allocation, compaction, and the record `M` that a structure keeps for
//! each block. The records are in ordinary memory, beside the spans.

use std::{num::NonZeroU32, ptr::NonNull, sync::Arc};

use units::limits::SOFT_MOVED_VALUES_MAX;

use super::{
    arena::{Arena, PageNumber},
    classes::{BlockKind, CLASSES, Class, SpanShape},
    detached::DetachedRun,
    pool::Pool,
};
use crate::error::SoftError;

/// Number of groups of spans by fullness.
const GROUPS: usize = 4;
/// Value of [`Span::group`] for spans in no group: full, active, evacuated, or without slots.
const NO_GROUP: u8 = u8::MAX;
/// Value of [`Span::class`] for pages that do not start a span.
const NO_CLASS: u8 = u8::MAX;
/// Value of [`Span::class`] for runs.
const RUN: u8 = u8::MAX - 1;
/// End of a list of spans or slots.
const END: u32 = u32::MAX;

/// Number of an allocated block in its heap: the first page of the span, and the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block(NonZeroU32);

impl Block {
    fn new(page: PageNumber, slot: u16) -> Self {
        // The arena has fewer than 2^20 chunks, so the complement is not 0.
        Self(NonZeroU32::new(!((page << 8) | u32::from(slot))).expect("the last page number is unused"))
    }

    fn page(self) -> PageNumber {
        !self.0.get() >> 8
    }

    fn slot(self) -> u16 {
        (!self.0.get() & 0xff) as u16
    }
}

/// Records of the blocks of a heap.
pub(crate) trait Records {
    /// Record of a block.
    type Record;

    /// Returns the record of a block.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    fn record(&self, block: Block) -> &Self::Record;
    /// Returns the record of a block.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    fn record_mut(&mut self, block: Block) -> &mut Self::Record;
}

/// Heap that can move its values together.
pub(crate) trait Compact: Records {
    /// Frees up to about `pages` pages without removing a value. Calls `moved` for each moved value with its old
    /// and new block. Returns the number of freed pages. See [`Slots::free_unused`].
    fn free_unused(
        &mut self,
        pages: usize,
        moved: impl FnMut(&mut RecordsMut<'_, Self::Record>, Block, Block),
    ) -> usize;
}

/// Access to the records during a compaction. The blocks cannot be freed or exchanged.
pub(crate) struct RecordsMut<'a, M>(&'a mut Slots<M>);

impl<M> Records for RecordsMut<'_, M> {
    type Record = M;

    fn record(&self, block: Block) -> &M {
        self.0.record(block)
    }

    fn record_mut(&mut self, block: Block) -> &mut M {
        self.0.record_mut(block)
    }
}

#[derive(Debug)]
enum Slot<M> {
    /// Free, with the next free slot or [`NO_SLOT`].
    Free(u16),
    Used(M),
}

/// End of the list of free slots.
const NO_SLOT: u16 = u16::MAX;

/// Consecutive pages that are divided into slots of one class.
#[derive(Debug)]
struct Span<M> {
    /// Index in [`Slots::classes`], or [`RUN`], or [`NO_CLASS`].
    class: u8,
    group: u8,
    live: u16,
    /// First slot in the list of free slots. Slots from `slots.len()` on are free, too.
    free: u16,
    previous: PageNumber,
    next: PageNumber,
    slots: Vec<Slot<M>>,
}

impl<M> Span<M> {
    const NONE: Self = Self {
        class: NO_CLASS,
        group: NO_GROUP,
        live: 0,
        free: NO_SLOT,
        previous: END,
        next: END,
        slots: Vec::new(),
    };

    /// Returns the first slot that was never taken.
    #[inline]
    fn untaken(&self) -> u16 {
        u16::try_from(self.slots.len()).expect("a span has at most 256 slots")
    }

    /// Takes a free slot, which exists.
    #[inline]
    fn take(&mut self, record: M) -> u16 {
        self.live += 1;
        match self.slots.get_mut(usize::from(self.free)) {
            Some(slot) => {
                let Slot::Free(next) = std::mem::replace(slot, Slot::Used(record)) else {
                    unreachable!("the list of free slots contains only free slots")
                };
                std::mem::replace(&mut self.free, next)
            }
            None => {
                let slot = self.untaken();
                self.slots.push(Slot::Used(record));
                slot
            }
        }
    }

    /// Adds the slot of a block to the free slots, and returns its record.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    fn give_back(&mut self, block: Block) -> M {
        let slot = &mut self.slots[usize::from(block.slot())];
        let Slot::Used(record) = std::mem::replace(slot, Slot::Free(self.free)) else {
            panic!("block {block:?} is not allocated")
        };
        self.free = block.slot();
        self.live -= 1;
        record
    }
}

/// Spans of one class.
#[derive(Debug)]
struct ClassSpans {
    class: Class,
    shape: SpanShape,
    /// Span from which the next slot is taken. It has a free slot and is in no group.
    active: PageNumber,
    /// First span of each group, by ascending fullness.
    groups: [PageNumber; GROUPS],
    spans: usize,
    live: usize,
}

impl ClassSpans {
    /// Returns the number of spans that compaction would free.
    fn compactable(&self) -> usize {
        self.spans - self.live.div_ceil(usize::from(self.shape.slots))
    }
}

/// Spans and slots of one heap.
#[derive(Debug)]
pub(super) struct Slots<M> {
    arena: Arena,
    /// Span that starts at each page.
    spans: Vec<Span<M>>,
    classes: Vec<ClassSpans>,
    /// Index in `classes` of each class, or [`NO_CLASS`].
    class_indexes: [u8; CLASSES],
    live: usize,
}

impl<M> Slots<M> {
    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self {
            arena: Arena::new(pool),
            spans: Vec::new(),
            classes: Vec::new(),
            class_indexes: [NO_CLASS; CLASSES],
            live: 0,
        }
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns idle pages to the kernel. See [`Arena::release_idle`].
    pub(super) fn release_idle(&mut self, maximum: usize) -> usize {
        self.arena.release_idle(maximum)
    }

    /// Returns the number of allocated blocks.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Allocates a block. Its contents are undefined.
    ///
    /// # Errors
    /// Returns the record, and [`SoftError::OutOfBudget`] or [`SoftError::OutOfAddressSpace`].
    #[inline]
    pub(super) fn allocate(&mut self, kind: BlockKind, record: M) -> Result<Block, (M, SoftError)> {
        let class = match kind {
            BlockKind::Slot(class) => self.class_index(class),
            BlockKind::Run(pages) => return self.allocate_run(pages, record),
        };
        let active = match self.classes[usize::from(class)].active {
            END => match self.activate(class) {
                Ok(page) => page,
                Err(error) => return Err((record, error)),
            },
            page => page,
        };
        let spans = &mut self.classes[usize::from(class)];
        let span = &mut self.spans[active as usize];
        let slot = span.take(record);
        spans.live += 1;
        self.live += 1;
        if span.live == spans.shape.slots {
            spans.active = END;
        }
        Ok(Block::new(active, slot))
    }

    /// Returns whether a block of this kind can be allocated without further pages.
    pub(super) fn has_free_slot(&self, kind: BlockKind) -> bool {
        let BlockKind::Slot(class) = kind else { return false };
        let spans = self.classes.get(usize::from(self.class_indexes[class.index()]));
        spans.is_some_and(|spans| spans.active != END || spans.groups.iter().any(|page| *page != END))
    }

    /// Frees a block, and returns its record.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    pub(super) fn free(&mut self, block: Block) -> M {
        let page = block.page();
        let span = &mut self.spans[page as usize];
        let record = span.give_back(block);
        self.live -= 1;
        if span.class == RUN {
            *span = Span::NONE;
            self.arena.give_back_run(page);
            return record;
        }
        let spans = &mut self.classes[usize::from(span.class)];
        spans.live -= 1;
        if span.live == 0 {
            self.release_span(page);
        } else if spans.active != page {
            self.regroup(page);
        }
        record
    }

    /// Returns whether a block is a run of pages.
    pub(super) fn is_run(&self, block: Block) -> bool {
        self.spans[block.page() as usize].class == RUN
    }

    /// Removes a block that is a run without freeing its pages. Returns its record and the run.
    ///
    /// # Panics
    /// Panics if the block is not an allocated run.
    pub(super) fn detach_run(&mut self, block: Block) -> (M, DetachedRun) {
        assert!(self.is_run(block), "block {block:?} is not a run");
        let span = &mut self.spans[block.page() as usize];
        let record = span.give_back(block);
        *span = Span::NONE;
        self.live -= 1;
        (record, self.arena.detach_run(block.page()))
    }

    /// Returns the record of a block.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    #[inline]
    pub(super) fn record(&self, block: Block) -> &M {
        match &self.spans[block.page() as usize].slots[usize::from(block.slot())] {
            Slot::Used(record) => record,
            Slot::Free(_) => panic!("block {block:?} is not allocated"),
        }
    }

    /// Returns the record of a block.
    ///
    /// # Panics
    /// Panics if the block is not allocated.
    #[inline]
    pub(super) fn record_mut(&mut self, block: Block) -> &mut M {
        match &mut self.spans[block.page() as usize].slots[usize::from(block.slot())] {
            Slot::Used(record) => record,
            Slot::Free(_) => panic!("block {block:?} is not allocated"),
        }
    }

    /// Returns the address of an allocated block. The address is valid until the block is freed or
    /// moved.
    #[inline]
    pub(super) fn address(&self, block: Block) -> NonNull<u8> {
        let (page, slot) = (block.page(), usize::from(block.slot()));
        let class = self.spans[page as usize].class;
        let slot_bytes = self.classes.get(usize::from(class)).map_or(0, |spans| spans.shape.slot_bytes);
        // SAFETY: the slot is in its span, whose pages are consecutive pages of one chunk of the mapping.
        unsafe { self.arena.address(page).add(slot * slot_bytes) }
    }

    /// Returns all allocated blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Block> {
        (0..self.page_numbers()).flat_map(|page| self.blocks_at(page))
    }

    /// Returns the allocated blocks of the span or run that starts at a page, which exists.
    pub(super) fn blocks_at(&self, page: PageNumber) -> impl Iterator<Item = Block> {
        let slots = self.spans[page as usize].slots.iter().zip(0..);
        slots.filter(|(slot, _)| matches!(slot, Slot::Used(_))).map(move |(_, slot)| Block::new(page, slot))
    }

    /// Returns one more than the largest page number that a span or run had.
    pub(super) fn page_numbers(&self) -> PageNumber {
        PageNumber::try_from(self.spans.len()).expect("page numbers have 24 bits")
    }

    /// Returns the number of pages that compaction would make idle.
    fn compactable_pages(&self) -> usize {
        self.classes.iter().map(|spans| spans.compactable() * spans.shape.pages as usize).sum()
    }

    /// Returns the number of pages that [`free_unused`](Self::free_unused) can free.
    pub(super) fn unused_pages(&self) -> usize {
        self.arena.idle_pages() + self.compactable_pages()
    }

    /// Frees up to `pages` pages (or a few more, as a span may have several pages), without freeing a
    /// block. Calls `moved` for each moved block with its old and new number. Stops after about
    /// [`SOFT_MOVED_VALUES_MAX`] moved blocks. Returns the number of freed pages.
    pub(super) fn free_unused(
        &mut self,
        pages: usize,
        mut moved: impl FnMut(&mut RecordsMut<'_, M>, Block, Block),
    ) -> usize {
        let held = self.arena.held_pages();
        let target = held.saturating_sub(pages);
        self.release_idle(pages);
        let mut count = 0;
        while self.arena.held_pages() - self.arena.idle_pages() > target
            && count < SOFT_MOVED_VALUES_MAX
            && let Some(span) = self.start_evacuation()
        {
            while let Some((from, to)) = self.relocate_next(span) {
                moved(&mut RecordsMut(self), from, to);
                count += 1;
            }
        }
        // Many pages at once need fewer system calls.
        self.release_idle(self.arena.held_pages().saturating_sub(target));
        held - self.arena.held_pages()
    }

    /// Starts to evacuate one of the emptiest spans of a class with compactable spans. The caller calls
    /// [`relocate_next`](Self::relocate_next) until it returns `None`, and nothing else meanwhile.
    fn start_evacuation(&mut self) -> Option<PageNumber> {
        let class = self.classes.iter().position(|spans| spans.compactable() > 0)?;
        let active = std::mem::replace(&mut self.classes[class].active, END);
        if active != END {
            self.regroup(active);
        }
        let source = *self.classes[class].groups.iter().find(|page| **page != END)?;
        self.unlink(source);
        Some(source)
    }

    /// Moves the next value of an evacuated span to another span. Returns the old and the new block.
    /// Returns `None` when the span is empty; its pages are idle then.
    fn relocate_next(&mut self, source: PageNumber) -> Option<(Block, Block)> {
        let span = &mut self.spans[source as usize];
        let (slot, record) = loop {
            match span.slots.pop() {
                Some(Slot::Used(record)) => break (span.untaken(), record),
                Some(Slot::Free(_)) => {}
                None => {
                    self.release_span(source);
                    return None;
                }
            }
        };
        span.live -= 1;
        let class = usize::from(span.class);
        let slot_bytes = self.classes[class].shape.slot_bytes;
        // SAFETY: the slot was in use, so it is in the span.
        let from = unsafe { self.arena.address(source).add(usize::from(slot) * slot_bytes) };
        let to = self.allocate_moved(class, record);
        // SAFETY: both slots have this size. They are in different spans, because the source is in no group
        // and not active.
        unsafe { self.address(to).copy_from_nonoverlapping(from, slot_bytes) };
        Some((Block::new(source, slot), to))
    }

    /// Allocates a slot for a moved value from the other spans of its class.
    fn allocate_moved(&mut self, class: usize, record: M) -> Block {
        // The slot of the source is not live any more.
        self.classes[class].live -= 1;
        self.live -= 1;
        match self.allocate(BlockKind::Slot(self.classes[class].class), record) {
            Ok(block) => block,
            Err(_) => unreachable!("the other spans of a compactable class have enough free slots"),
        }
    }

    fn class_index(&mut self, class: Class) -> u8 {
        let index = &mut self.class_indexes[class.index()];
        if *index == NO_CLASS {
            *index = u8::try_from(self.classes.len()).expect("there are 72 classes");
            self.classes.push(ClassSpans {
                class,
                shape: class.shape(),
                active: END,
                groups: [END; GROUPS],
                spans: 0,
                live: 0,
            });
        }
        *index
    }

    /// Activates one of the fullest spans with free slots, or a new span.
    fn activate(&mut self, class: u8) -> Result<PageNumber, SoftError> {
        let spans = &self.classes[usize::from(class)];
        let fullest = spans.groups.iter().rev().find(|page| **page != END).copied();
        let page = match fullest {
            Some(page) => {
                self.unlink(page);
                page
            }
            None => self.new_span(class)?,
        };
        self.classes[usize::from(class)].active = page;
        Ok(page)
    }

    fn new_span(&mut self, class: u8) -> Result<PageNumber, SoftError> {
        let spans = &mut self.classes[usize::from(class)];
        let page = self.arena.take(spans.shape.pages)?;
        spans.spans += 1;
        let slots = Vec::with_capacity(usize::from(spans.shape.slots));
        self.set_span(page, Span { class, slots, ..Span::NONE });
        Ok(page)
    }

    fn set_span(&mut self, page: PageNumber, span: Span<M>) {
        let index = page as usize;
        if index >= self.spans.len() {
            self.spans.resize_with(index + 1, || Span::NONE);
        }
        self.spans[index] = span;
    }

    fn allocate_run(&mut self, pages: u32, record: M) -> Result<Block, (M, SoftError)> {
        let page = match self.arena.take_run(pages) {
            Ok(page) => page,
            Err(error) => return Err((record, error)),
        };
        self.set_span(page, Span { class: RUN, live: 1, slots: vec![Slot::Used(record)], ..Span::NONE });
        self.live += 1;
        Ok(Block::new(page, 0))
    }

    /// Makes the pages of an empty span idle.
    fn release_span(&mut self, page: PageNumber) {
        self.unlink(page);
        let span = std::mem::replace(&mut self.spans[page as usize], Span::NONE);
        let spans = &mut self.classes[usize::from(span.class)];
        if spans.active == page {
            spans.active = END;
        }
        spans.spans -= 1;
        self.arena.give_back(page, spans.shape.pages);
    }

    /// Moves a span to the group of its fullness.
    fn regroup(&mut self, page: PageNumber) {
        let span = &self.spans[page as usize];
        let slots = self.classes[usize::from(span.class)].shape.slots;
        // A span in a group has free slots, so the result is below GROUPS.
        let group = usize::from(span.live) * GROUPS / usize::from(slots);
        let number = u8::try_from(group).expect("there are four groups");
        if span.group == number {
            return;
        }
        self.unlink(page);
        let span = &mut self.spans[page as usize];
        let first = &mut self.classes[usize::from(span.class)].groups[group];
        (span.group, span.previous, span.next) = (number, END, *first);
        let second = std::mem::replace(first, page);
        if second != END {
            self.spans[second as usize].previous = page;
        }
    }

    /// Removes a span from its group, if it is in one.
    fn unlink(&mut self, page: PageNumber) {
        let span = &mut self.spans[page as usize];
        let (class, previous, next) = (span.class, span.previous, span.next);
        let group = std::mem::replace(&mut span.group, NO_GROUP);
        if group == NO_GROUP {
            return;
        }
        if previous == END {
            self.classes[usize::from(class)].groups[usize::from(group)] = next;
        } else {
            self.spans[previous as usize].next = next;
        }
        if next != END {
            self.spans[next as usize].previous = previous;
        }
    }
}
