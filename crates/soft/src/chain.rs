//! Doubly linked lists of the values of a heap. The links are in the values' records.

use crate::heap::{Block, PinRecord, Records, WithLength};

/// Neighbours of a value in its chain.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Links {
    previous: Option<Block>,
    next: Option<Block>,
}

impl Links {
    /// Returns the next value.
    pub(crate) fn next(self) -> Option<Block> {
        self.next
    }
}

/// Record with links.
pub(crate) trait Linked {
    /// Returns the links of the value.
    fn links(&self) -> Links;
    /// Returns the links of the value.
    fn links_mut(&mut self) -> &mut Links;
}

impl Linked for Links {
    fn links(&self) -> Links {
        *self
    }

    fn links_mut(&mut self) -> &mut Links {
        self
    }
}

impl<M: Linked> Linked for WithLength<M> {
    fn links(&self) -> Links {
        self.as_ref().links()
    }

    fn links_mut(&mut self) -> &mut Links {
        self.as_mut().links_mut()
    }
}

impl<M: Linked> Linked for PinRecord<M> {
    fn links(&self) -> Links {
        self.as_ref().links()
    }

    fn links_mut(&mut self) -> &mut Links {
        self.as_mut().links_mut()
    }
}

/// Linked list of values.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chain {
    first: Option<Block>,
    last: Option<Block>,
}

impl Chain {
    /// Returns the first value.
    pub(crate) fn first(&self) -> Option<Block> {
        self.first
    }

    /// Returns the last value.
    pub(crate) fn last(&self) -> Option<Block> {
        self.last
    }

    /// Appends a value.
    pub(crate) fn push_back<R: Records<Record: Linked>>(&mut self, values: &mut R, block: Block) {
        *values.record_mut(block).links_mut() = Links { previous: self.last, next: None };
        match self.last.replace(block) {
            Some(last) => values.record_mut(last).links_mut().next = Some(block),
            None => self.first = Some(block),
        }
    }

    /// Prepends a value.
    pub(crate) fn push_front<R: Records<Record: Linked>>(&mut self, values: &mut R, block: Block) {
        *values.record_mut(block).links_mut() = Links { previous: None, next: self.first };
        match self.first.replace(block) {
            Some(first) => values.record_mut(first).links_mut().previous = Some(block),
            None => self.last = Some(block),
        }
    }

    /// Takes a value out of the list.
    pub(crate) fn unlink<R: Records<Record: Linked>>(&mut self, values: &mut R, block: Block) {
        let links = values.record(block).links();
        self.set_neighbours(values, links, links.next, links.previous);
    }

    /// Updates the neighbours of a value that was moved to another block.
    pub(crate) fn relink<R: Records<Record: Linked>>(&mut self, values: &mut R, to: Block) {
        let links = values.record(to).links();
        self.set_neighbours(values, links, Some(to), Some(to));
    }

    /// Sets the next value of the previous neighbour, and the previous value of the next neighbour.
    fn set_neighbours<R: Records<Record: Linked>>(
        &mut self,
        values: &mut R,
        links: Links,
        next: Option<Block>,
        previous: Option<Block>,
    ) {
        match links.previous {
            Some(block) => values.record_mut(block).links_mut().next = next,
            None => self.first = next,
        }
        match links.next {
            Some(block) => values.record_mut(block).links_mut().previous = previous,
            None => self.last = previous,
        }
    }

    /// Returns all values, from the first to the last.
    pub(crate) fn iter<R: Records<Record: Linked>>(self, values: &R) -> impl Iterator<Item = Block> {
        std::iter::successors(self.first, |block| values.record(*block).links().next())
    }
}
