//! Errors of soft memory.

use std::fmt;

/// Reason why an allocation of soft memory failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SoftError {
    /// The budget of the pool does not suffice, and its source granted no more pages.
    #[error("cannot allocate soft memory: the budget lacks {pages} pages")]
    OutOfBudget {
        /// Number of pages that the allocation needs at least.
        pages: usize,
    },
    /// The reserved address space has no free range of sufficient length.
    #[error("cannot allocate soft memory: no free address range of {pages} pages")]
    OutOfAddressSpace {
        /// Length of the range in pages.
        pages: usize,
    },
    /// The size in bytes overflows, or is larger than the address space of a pool.
    #[error("cannot allocate soft memory: the size exceeds the largest pool")]
    TooLarge,
    /// The key of a byte string is too long.
    #[error("cannot store a key of {bytes} bytes in soft memory: must have at most {maximum} bytes")]
    KeyTooLong {
        /// Length of the key in bytes.
        bytes: usize,
        /// Maximum length in bytes.
        maximum: usize,
    },
    /// The type has a larger alignment than a page.
    #[error("cannot allocate soft memory: an alignment of {align} bytes exceeds a page")]
    AlignmentTooLarge {
        /// Alignment of the type in bytes.
        align: usize,
    },
    /// The pool has `units::limits::SOFT_STRUCTURES_MAX` structures.
    #[error("cannot create a soft structure: the pool has {0} structures, which is the maximum")]
    TooManyStructures(usize),
    /// The structure has `units::limits::SOFT_BLOCKS_MAX` blocks.
    #[error("cannot allocate soft memory: the structure has {0} blocks, which is the maximum")]
    TooManyBlocks(usize),
}

/// Reason why a block of [`SoftBlocks`](crate::SoftBlocks) is not accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// The block was freed or evicted, or the handle is not from this structure.
    #[error("cannot access the block: it was freed or evicted")]
    Stale,
    /// The block is pinned.
    #[error("cannot free or change the block: it is pinned")]
    Pinned,
    /// The structure has `units::limits::SOFT_PINS_MAX` pins.
    #[error("cannot pin the block: the structure has the maximum number of pins")]
    TooManyPins,
}

/// Error of an insertion. Contains the value that was not inserted.
#[derive(Clone, PartialEq, Eq)]
pub struct InsertError<T> {
    /// The value that was not inserted.
    pub value: T,
    /// Reason of the failure.
    pub reason: SoftError,
}

impl<T> InsertError<T> {
    /// Returns the value that was not inserted.
    pub fn into_value(self) -> T {
        self.value
    }
}

impl<T> From<InsertError<T>> for SoftError {
    fn from(error: InsertError<T>) -> Self {
        error.reason
    }
}

impl<T> fmt::Debug for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InsertError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<T> std::error::Error for InsertError<T> {}

/// Error of the creation of a [`Pool`](crate::Pool).
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The kernel did not reserve the address space.
    #[error("cannot reserve {bytes} bytes of address space: {source}")]
    Reserve {
        /// Size of the address space.
        bytes: usize,
        /// Error of `mmap`.
        source: std::io::Error,
    },
    /// The kernel uses another page size.
    #[error("cannot create a pool: the page size is {0} bytes: must be 4096")]
    PageSize(usize),
    /// The address space is empty or too large.
    #[error("cannot create a pool with {pages} pages of address space: must be 1 to {maximum}")]
    AddressSpace {
        /// Requested size in pages.
        pages: usize,
        /// Largest size in pages.
        maximum: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn insert_error_contains_value_and_reason() {
        /// Value without `Debug` and `Display`.
        struct Opaque(u8);

        let reason = SoftError::OutOfBudget { pages: 3 };
        let error = || InsertError { value: Opaque(7), reason };
        let boxed: Box<dyn std::error::Error + Send + Sync> = error().into();
        assert_eq!(boxed.to_string(), "cannot allocate soft memory: the budget lacks 3 pages");
        assert!(boxed.source().is_none());
        assert_eq!(format!("{:?}", error()), "InsertError { reason: OutOfBudget { pages: 3 }, .. }");
        assert_eq!((SoftError::from(error()), error().into_value().0), (reason, 7));
    }
}
