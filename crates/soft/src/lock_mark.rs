//! Detection of nested calls: a thread holds the lock of at most one structure, and callbacks do not wait for a
//! source of budget.

use std::cell::Cell;

use crate::sync::thread_local;

thread_local! {
    /// Whether this thread holds the lock of a structure.
    static HOLDS_LOCK: Cell<bool> = const { Cell::new(false) };
    /// Number of callbacks that this thread runs.
    static CALLBACKS: Cell<u32> = const { Cell::new(0) };
}

/// Mark of a thread that runs a callback.
pub(crate) struct CallbackMark(());

impl CallbackMark {
    /// Marks the thread until the result is dropped.
    pub(crate) fn set() -> Self {
        CALLBACKS.with(|callbacks| callbacks.set(callbacks.get() + 1));
        Self(())
    }

    /// Returns whether the thread runs a callback. It may run because a source of budget revokes pages, so that a
    /// request to a source would wait for itself.
    pub(crate) fn is_set() -> bool {
        CALLBACKS.with(Cell::get) > 0
    }
}

impl Drop for CallbackMark {
    fn drop(&mut self) {
        CALLBACKS.with(|callbacks| callbacks.set(callbacks.get() - 1));
    }
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
        HOLDS_LOCK.with(|holds| holds.set(true));
        Self(())
    }

    /// Checks that the thread holds no lock of a structure.
    ///
    /// # Panics
    /// Panics if the thread is marked.
    #[inline]
    pub(crate) fn assert_unset() {
        assert!(
            !HOLDS_LOCK.with(Cell::get),
            "a soft structure must not be accessed inside an access closure"
        );
    }
}

impl Drop for LockMark {
    fn drop(&mut self) {
        HOLDS_LOCK.with(|holds| holds.set(false));
    }
}
