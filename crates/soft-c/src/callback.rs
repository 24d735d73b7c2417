//! Callbacks of C code for revoked blocks.

use std::{
    cell::Cell,
    ffi::c_void,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use soft::Handle;

/// Function of the type `soft_revoke_callback_t`. An exception of C++ that leaves it ends the process.
pub type CallbackFunction = unsafe extern "C-unwind" fn(u64, *const c_void, usize, *mut c_void);

thread_local! {
    /// Number of callbacks that this thread runs.
    static NESTING: Cell<usize> = const { Cell::new(0) };
}

/// Callback with its argument.
#[derive(Debug)]
pub struct Callback {
    function: CallbackFunction,
    user_data: *mut c_void,
    state: Mutex<State>,
    is_idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of threads that run the callback.
    running: usize,
    is_closed: bool,
}

// SAFETY: the header requires that the callback can run in any thread, also in several at the same time.
unsafe impl Send for Callback {}
// SAFETY: as for `Send`.
unsafe impl Sync for Callback {}

/// Counts a running callback until it is dropped.
struct Running<'a>(&'a Callback);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        NESTING.set(NESTING.get() - 1);
        self.0.state().running -= 1;
        self.0.is_idle.notify_all();
    }
}

impl Callback {
    /// Creates a callback.
    pub fn new(function: CallbackFunction, user_data: *mut c_void) -> Self {
        Self { function, user_data, state: Mutex::default(), is_idle: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call, unless the callback is closed.
    fn start(&self) -> Option<Running<'_>> {
        let mut state = self.state();
        if state.is_closed {
            return None;
        }
        state.running += 1;
        NESTING.set(NESTING.get() + 1);
        Some(Running(self))
    }

    /// Calls the function, unless the callback is closed.
    pub fn call(&self, handle: Handle, bytes: &[u8]) {
        if let Some(_running) = self.start() {
            // SAFETY: the creator of the context guarantees a function of this type that accepts `user_data`. The
            // bytes are valid during the call.
            unsafe { (self.function)(handle.to_raw(), bytes.as_ptr().cast(), bytes.len(), self.user_data) };
        }
    }

    /// Prevents further calls, and waits until no call runs. Does not wait in a thread that runs a callback, which
    /// could be this one or wait for it.
    pub fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        while state.running > 0 && NESTING.get() == 0 {
            state = self.is_idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
