//! Doubly linked lists of the values of a heap. The links are in the values' records.

use crate::heap::{Block, Values};

/// Neighbours of a value in its chain.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Links {
    previous: Option<Block>,
    next: Option<Block>,
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
    pub(crate) fn push_back<T, M: Linked>(&mut self, values: &mut Values<T, M>, block: Block) {
        *values.record_mut(block).links_mut() = Links { previous: self.last, next: None };
        match self.last.replace(block) {
            Some(last) => values.record_mut(last).links_mut().next = Some(block),
            None => self.first = Some(block),
        }
    }

    /// Prepends a value.
    pub(crate) fn push_front<T, M: Linked>(&mut self, values: &mut Values<T, M>, block: Block) {
        *values.record_mut(block).links_mut() = Links { previous: None, next: self.first };
        match self.first.replace(block) {
            Some(first) => values.record_mut(first).links_mut().previous = Some(block),
            None => self.last = Some(block),
        }
    }

    /// Takes a value out of the list.
    pub(crate) fn unlink<T, M: Linked>(&mut self, values: &mut Values<T, M>, block: Block) {
        let links = values.record(block).links();
        self.set_neighbours(values, links, links.next, links.previous);
    }

    /// Updates the neighbours of a value that was moved to another block.
    pub(crate) fn relink<T, M: Linked>(&mut self, values: &mut Values<T, M>, to: Block) {
        let links = values.record(to).links();
        self.set_neighbours(values, links, Some(to), Some(to));
    }

    /// Sets the next value of the previous neighbour, and the previous value of the next neighbour.
    fn set_neighbours<T, M: Linked>(
        &mut self,
        values: &mut Values<T, M>,
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
    pub(crate) fn iter<T, M: Linked>(self, values: &Values<T, M>) -> impl Iterator<Item = Block> {
        std::iter::successors(self.first, |block| values.record(*block).links().next)
    }
}
