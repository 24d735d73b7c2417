//! Locks, atomics and threads: those of the standard library, or, with `--cfg shuttle`, those of Shuttle, which runs
//! the threads of a model (`tests/model.rs`) in many orders. Code that models do not run uses the standard library.

#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{Mutex, MutexGuard, atomic},
    thread, thread_local,
};

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Mutex, MutexGuard, atomic},
    thread, thread_local,
};
