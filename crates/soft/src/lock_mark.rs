//! Detection of nested locks: a thread holds the lock of at most one structure.

use std::cell::Cell;

thread_local! {
    /// Whether this thread holds the lock of a structure.
    static HOLDS_LOCK: Cell<bool> = const { Cell::new(false) };
}

/// Mark of a thread that holds the lock of a structure.
pub(crate) struct LockMark(());

impl LockMark {
    /// Marks the thread until the result is dropped.
    ///
    /// # Panics
    /// Panics if the thread is marked.
    #[inline]
    pub(crate) fn set() -> Self {
        Self::assert_unset();
        HOLDS_LOCK.set(true);
        Self(())
    }

    /// Checks that the thread holds no lock of a structure.
    ///
    /// # Panics
    /// Panics if the thread is marked.
    #[inline]
    pub(crate) fn assert_unset() {
        assert!(!HOLDS_LOCK.get(), "a soft structure must not be accessed inside an access closure");
    }
}

impl Drop for LockMark {
    fn drop(&mut self) {
        HOLDS_LOCK.set(false);
    }
}
