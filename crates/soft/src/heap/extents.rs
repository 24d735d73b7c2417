//! Free chunks of an address range, as maximal extents of consecutive chunks.

use std::collections::BTreeMap;

/// Free extents: the length of each extent by its first chunk. No two extents are adjacent.
#[derive(Debug)]
pub(super) struct Extents(BTreeMap<u32, u32>);

impl Extents {
    /// Returns a range of free chunks.
    pub(super) fn new(chunks: u32) -> Self {
        Self(BTreeMap::from([(0, chunks)]))
    }

    /// Removes `count` consecutive chunks and returns the first one. Returns `None` if no extent is long
    /// enough. The time for one chunk grows logarithmically with the number of extents, and for more
    /// chunks linearly.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        let (&start, &length) = self.0.iter().find(|(_, length)| **length >= count)?;
        self.0.remove(&start);
        if length > count {
            self.0.insert(start + count, length - count);
        }
        Some(start)
    }

    /// Adds chunks, and merges them with adjacent extents.
    pub(super) fn give_back(&mut self, mut start: u32, mut count: u32) {
        if let Some((&before, &length)) = self.0.range(..start).next_back()
            && before + length == start
        {
            (start, count) = (before, count + length);
        }
        if let Some(length) = self.0.remove(&(start + count)) {
            count += length;
        }
        self.0.insert(start, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_taken_from_the_first_extent_that_is_long_enough() {
        let mut extents = Extents::new(10);
        assert_eq!((extents.take(3), extents.take(2), extents.take(5)), (Some(0), Some(3), Some(5)));
        assert_eq!(extents.take(1), None);
        extents.give_back(0, 3);
        extents.give_back(5, 5);
        assert_eq!((extents.take(4), extents.take(3), extents.take(2)), (Some(5), Some(0), None));
    }

    #[test]
    fn adjacent_extents_are_merged() {
        let mut extents = Extents::new(6);
        assert_eq!(extents.take(6), Some(0));
        for start in [0, 4, 2] {
            extents.give_back(start, 2);
        }
        assert_eq!(extents.0, BTreeMap::from([(0, 6)]));
    }
}
