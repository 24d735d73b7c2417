//! Exported functions. `include/tarnsoft.h` documents them.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    ptr::{null_mut, without_provenance_mut},
};

use units::limits::SOFT_POOL_PAGES_MAX;

use crate::{
    callback::{Callback, CallbackFunction},
    error::{self, Error},
    registry,
};

/// Value of `SOFT_SIZE_ERROR`.
const SIZE_ERROR: usize = usize::MAX;
/// Version of the library, with a zero byte.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Identifier of a pool (`soft_pool_t *`). C code sees a pointer to an incomplete type, which is never followed.
pub type PoolId = *mut c_void;
/// Identifier of a context (`soft_context_t *`), as [`PoolId`].
pub type ContextId = *mut c_void;

/// Structure `soft_pool_stats`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolStats {
    budget_pages: usize,
    held_pages: usize,
}

/// Structure `soft_context_stats`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ContextStats {
    blocks: usize,
    held_pages: usize,
    revoked_blocks: u64,
}

/// Runs a function, and records its error. No panic leaves the library.
fn run<T>(function: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    // Locks ignore poisoning, and the crate `soft` panics only before it changes something.
    let result = catch_unwind(AssertUnwindSafe(function)).unwrap_or_else(|payload| {
        std::mem::forget(payload); // its destructor could panic again
        Err(Error::Internal)
    });
    result.inspect_err(|error| error::set_last(*error))
}

/// Returns 0, or the number of the error.
fn status(result: Result<(), Error>) -> c_int {
    result.map_or_else(|error| error as c_int, |()| 0)
}

/// Stores a result in memory of the caller.
///
/// # Safety
/// `to` is null, or points to writable memory of the type.
unsafe fn store<T>(to: *mut T, value: Result<T, Error>) -> Result<(), Error> {
    if to.is_null() {
        return Err(Error::InvalidArgument);
    }
    let value = value?;
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn soft_version() -> *const c_char {
    VERSION.as_ptr().cast()
}

#[unsafe(no_mangle)]
extern "C" fn soft_last_error() -> c_int {
    error::last()
}

#[unsafe(no_mangle)]
extern "C" fn soft_error_string(number: c_int) -> *const c_char {
    error::message(number).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn soft_last_error_message() -> *const c_char {
    error::last_message()
}

/// # Safety
/// `path` is null, or points to a string with a zero byte at its end.
#[unsafe(no_mangle)]
unsafe extern "C" fn soft_pool_connect(path: *const c_char, budget_pages_max: usize) -> PoolId {
    let connect = || {
        if path.is_null() {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: guaranteed by the caller.
        let path = unsafe { CStr::from_ptr(path) };
        registry::connect_pool(Path::new(OsStr::from_bytes(path.to_bytes())), budget_pages_max)
    };
    run(connect).map_or(null_mut(), without_provenance_mut)
}

#[unsafe(no_mangle)]
extern "C" fn soft_pool_create(budget_pages: usize) -> PoolId {
    run(|| registry::create_pool(budget_pages)).map_or(null_mut(), without_provenance_mut)
}

#[unsafe(no_mangle)]
extern "C" fn soft_pool_destroy(pool: PoolId) -> c_int {
    status(run(|| registry::destroy_pool(pool.addr())))
}

/// # Safety
/// `stats` is null, or points to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn soft_pool_get_stats(pool: PoolId, stats: *mut PoolStats) -> c_int {
    status(run(|| {
        let result = registry::pool(pool.addr()).map(|pool| pool.stats());
        let result = result.map(|stats| PoolStats { budget_pages: stats.budget, held_pages: stats.held });
        // SAFETY: guaranteed by the caller.
        unsafe { store(stats, result) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn soft_grant(pool: PoolId, pages: usize) -> c_int {
    status(run(|| {
        let pool = registry::pool(pool.addr())?;
        if pool.stats().budget.saturating_add(pages) > SOFT_POOL_PAGES_MAX {
            return Err(Error::TooLarge);
        }
        pool.grant(pages);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn soft_revoke(pool: PoolId, pages: usize) -> usize {
    // A result of all ones would be an error.
    let pages = pages.min(SIZE_ERROR - 1);
    run(|| Ok(registry::pool(pool.addr())?.give_back(pages))).unwrap_or(SIZE_ERROR)
}

/// # Safety
/// `callback` is null, or a function that can be called with `user_data` in any thread until the context is
/// destroyed.
#[unsafe(no_mangle)]
unsafe extern "C" fn soft_context_create(
    pool: PoolId,
    priority: u8,
    callback: Option<CallbackFunction>,
    user_data: *mut c_void,
) -> ContextId {
    let callback = callback.map(|function| Callback::new(function, user_data));
    run(|| registry::create_context(pool.addr(), priority, callback))
        .map_or(null_mut(), without_provenance_mut)
}

#[unsafe(no_mangle)]
extern "C" fn soft_context_destroy(context: ContextId) -> c_int {
    status(run(|| registry::destroy_context(context.addr())))
}

#[unsafe(no_mangle)]
extern "C" fn soft_context_set_priority(context: ContextId, priority: u8) -> c_int {
    status(run(|| {
        registry::context(context.addr())?.set_priority(priority);
        Ok(())
    }))
}

/// # Safety
/// `stats` is null, or points to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn soft_context_get_stats(context: ContextId, stats: *mut ContextStats) -> c_int {
    status(run(|| {
        let result = registry::context(context.addr()).map(|context| {
            let (blocks, usage) = context.usage();
            ContextStats { blocks, held_pages: usage.held_pages, revoked_blocks: usage.evicted }
        });
        // SAFETY: guaranteed by the caller.
        unsafe { store(stats, result) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn soft_malloc(context: ContextId, size: usize) -> u64 {
    run(|| registry::context(context.addr())?.allocate(size)).unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn soft_calloc(context: ContextId, count: usize, size: usize) -> u64 {
    run(|| {
        let context = registry::context(context.addr())?;
        context.allocate(count.checked_mul(size).ok_or(Error::TooLarge)?)
    })
    .unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn soft_free(context: ContextId, handle: u64) -> c_int {
    status(run(|| registry::context(context.addr())?.free(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn soft_pin(context: ContextId, handle: u64) -> *mut c_void {
    run(|| registry::context(context.addr())?.pin(handle)).map_or(null_mut(), <*mut u8>::cast)
}

#[unsafe(no_mangle)]
extern "C" fn soft_unpin(context: ContextId, handle: u64) -> c_int {
    status(run(|| registry::context(context.addr())?.unpin(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn soft_size(context: ContextId, handle: u64) -> usize {
    run(|| registry::context(context.addr())?.size(handle)).unwrap_or(SIZE_ERROR)
}

#[unsafe(no_mangle)]
extern "C" fn soft_reclaim(context: ContextId, pages: usize) -> usize {
    run(|| Ok(registry::context(context.addr())?.reclaim(pages))).unwrap_or(SIZE_ERROR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_internal_error() {
        assert_eq!(run(|| -> Result<(), Error> { panic!("tested") }), Err(Error::Internal));
        assert_eq!(soft_last_error(), 14);
    }
}
