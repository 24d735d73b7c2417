//! Handles of blocks, and the table that finds blocks by handles.

use std::{fmt, num::NonZeroU64};

use crate::heap::Block;

/// Generation of the first block of an entry. It is not 0, so that no handle is 0.
const FIRST_GENERATION: u32 = 1;
/// Maximum first generation of an emptied table. An entry is used at least 2^31 times.
const EMPTIED_GENERATION_MAX: u32 = 1 << 31;
/// End of the list of unused entries.
const END: u32 = u32::MAX;

/// Handle of a block: the index of an entry in the table of its structure, and the generation of the entry. The
/// handle of a block that was freed or evicted is never valid again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(NonZeroU64);

impl Handle {
    fn new(index: u32, generation: u32) -> Self {
        let raw = (u64::from(generation) << 32) | u64::from(index);
        Self(NonZeroU64::new(raw).expect("generations start with 1"))
    }

    /// Returns the handle as a number, which is not 0.
    pub fn to_raw(self) -> u64 {
        self.0.get()
    }

    /// Returns the handle of a number, or `None` for 0. The result is stale if the number is not of
    /// [`to_raw`](Self::to_raw).
    pub fn from_raw(raw: u64) -> Option<Self> {
        NonZeroU64::new(raw).map(Self)
    }

    /// Returns the index of the entry.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is the index")]
    pub(crate) fn index(self) -> u32 {
        self.0.get() as u32
    }

    fn generation(self) -> u32 {
        (self.0.get() >> 32) as u32
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({}, generation {})", self.index(), self.generation())
    }
}

#[derive(Clone, Copy, Debug)]
enum Content {
    Used(Block),
    /// Unused, with the next unused entry or [`END`].
    Unused(u32),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    generation: u32,
    content: Content,
}

/// Blocks by handle. The time of each operation is constant.
#[derive(Debug)]
pub(crate) struct HandleTable {
    entries: Vec<Entry>,
    /// First entry in the list of unused entries.
    unused: u32,
    /// Generation of new entries.
    first_generation: u32,
    /// Maximum generation of all entries.
    highest_generation: u32,
}

impl HandleTable {
    /// Creates an empty table.
    pub(crate) fn new() -> Self {
        let first_generation = FIRST_GENERATION;
        Self { entries: Vec::new(), unused: END, first_generation, highest_generation: first_generation }
    }

    /// Adds a block, and returns its handle.
    ///
    /// # Panics
    /// Panics if the table has 2^32 - 1 entries.
    pub(crate) fn insert(&mut self, block: Block) -> Handle {
        let content = Content::Used(block);
        if let Some(entry) = self.entries.get_mut(self.unused as usize) {
            let Content::Unused(next) = std::mem::replace(&mut entry.content, content) else {
                unreachable!("the list of unused entries contains only unused entries")
            };
            return Handle::new(std::mem::replace(&mut self.unused, next), entry.generation);
        }
        let index = u32::try_from(self.entries.len()).ok().filter(|index| *index != END);
        self.entries.push(Entry { generation: self.first_generation, content });
        Handle::new(index.expect("the number of blocks is limited"), self.first_generation)
    }

    /// Returns the block of a handle, or `None` if the handle is stale.
    pub(crate) fn get(&self, handle: Handle) -> Option<Block> {
        let entry = self.entries.get(handle.index() as usize)?;
        match entry.content {
            Content::Used(block) if entry.generation == handle.generation() => Some(block),
            Content::Used(_) | Content::Unused(_) => None,
        }
    }

    /// Replaces the block of an entry.
    pub(crate) fn set(&mut self, index: u32, block: Block) {
        self.entries[index as usize].content = Content::Used(block);
    }

    /// Removes the block of an entry, and returns its handle, which is stale from now on.
    pub(crate) fn remove(&mut self, index: u32) -> Handle {
        let entry = &mut self.entries[index as usize];
        let handle = Handle::new(index, entry.generation);
        entry.content = Content::Unused(self.unused);
        // An entry without another generation is not used again.
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.highest_generation = self.highest_generation.max(next);
            self.unused = index;
        }
        handle
    }

    /// Frees the memory of a table without blocks.
    pub(crate) fn clear(&mut self) {
        if self.highest_generation <= EMPTIED_GENERATION_MAX {
            // No handle has had a generation that high.
            let first_generation = self.highest_generation;
            *self = Self { first_generation, highest_generation: first_generation, ..Self::new() };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::heap::{PinnableValues, Pool};

    fn blocks() -> (PinnableValues<()>, [Block; 2]) {
        let mut values = PinnableValues::new(Arc::clone(&Pool::new(4).unwrap()));
        let blocks = [(); 2].map(|()| values.insert_zeros(1, ()).unwrap());
        (values, blocks)
    }

    #[test]
    fn handle_of_a_removed_block_is_stale_after_reuse_of_its_entry() {
        let (_values, [first, second]) = blocks();
        let mut table = HandleTable::new();
        let stale = table.insert(first);
        assert_eq!((stale.to_raw(), table.get(stale)), (1 << 32, Some(first)));
        assert_eq!(table.remove(stale.index()), stale);
        assert_eq!(table.get(stale), None);
        let handle = table.insert(second);
        assert_eq!((handle.to_raw(), table.get(handle), table.get(stale)), (2 << 32, Some(second), None));
    }

    #[test]
    fn handles_stay_stale_after_the_table_is_emptied() {
        let (_values, [first, second]) = blocks();
        let mut table = HandleTable::new();
        let stale = [table.insert(first), table.insert(second)];
        assert_eq!(stale.map(|handle| table.remove(handle.index())), stale);
        table.clear();
        assert_eq!(table.entries.capacity(), 0);
        let handles = [table.insert(first), table.insert(second)];
        assert_eq!(handles.map(Handle::to_raw), [2 << 32, (2 << 32) + 1]);
        assert_eq!(stale.map(|handle| table.get(handle)), [None, None]);
    }

    #[test]
    fn entry_is_not_used_again_after_its_last_generation() {
        let (_values, [first, second]) = blocks();
        let mut table = HandleTable::new();
        table.first_generation = u32::MAX;
        let last = table.insert(first);
        table.remove(last.index());
        assert_eq!((table.get(last), table.insert(second).index()), (None, 1));
        table.highest_generation = u32::MAX;
        table.clear();
        assert_eq!(table.entries.len(), 2, "an emptied table would issue the same handles again");
    }
}
