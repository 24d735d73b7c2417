//! Pools and contexts of a process.
//!
//! A forked child has its own, empty registry: its parent may have held any lock of the inherited registry at the
//! time of the fork.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use soft::Pool;
use units::limits::{SOFT_C_FORKS_MAX, SOFT_C_POOLS_MAX, SOFT_STRUCTURES_MAX};

use crate::{
    callback::Callback,
    context::Context,
    error::{self, Error},
    fork,
    objects::{Objects, next_id},
};

/// Registry of each process in a chain of forks.
static REGISTRIES: [OnceLock<Box<Registry>>; SOFT_C_FORKS_MAX] =
    [const { OnceLock::new() }; SOFT_C_FORKS_MAX];

/// Pools and contexts of a process.
#[derive(Debug)]
struct Registry {
    pools: Objects<Pool>,
    contexts: Objects<Context>,
}

/// Returns the registry of this process.
///
/// # Errors
/// Returns [`Error::Forked`] in a chain of more than [`SOFT_C_FORKS_MAX`] forks, or [`Error::System`] if forks cannot
/// be detected.
fn registry() -> Result<&'static Registry, Error> {
    let registry = REGISTRIES.get(fork::depth()?).ok_or(Error::Forked)?;
    Ok(registry.get_or_init(|| {
        let first_id = next_id();
        Box::new(Registry {
            pools: Objects::new(first_id, SOFT_C_POOLS_MAX, Error::InvalidPool),
            contexts: Objects::new(first_id, SOFT_STRUCTURES_MAX, Error::InvalidContext),
        })
    }))
}

/// Creates a pool with a budget in pages, and returns its identifier.
///
/// # Errors
/// Returns [`Error::TooLarge`], [`Error::System`], [`Error::TooMany`] or [`Error::Forked`].
pub fn create_pool(budget_pages: usize) -> Result<usize, Error> {
    registry()?.pools.insert(Pool::new(budget_pages)?)
}

/// Creates a pool with a budget of the daemon at a socket, and returns its identifier.
///
/// # Errors
/// Returns [`Error::Daemon`], [`Error::AlreadyConnected`], or an error as [`create_pool`].
pub fn connect_pool(path: &Path, budget_pages_max: usize) -> Result<usize, Error> {
    registry()?.pools.insert(soft::client::connect(path, budget_pages_max).map_err(error::connect_failed)?)
}

/// Returns a pool.
///
/// # Errors
/// Returns [`Error::InvalidArgument`], [`Error::InvalidPool`] or [`Error::Forked`].
pub fn pool(id: usize) -> Result<Arc<Pool>, Error> {
    registry()?.pools.get(id)
}

/// Removes a pool. Its contexts keep its memory. Waits for the end of the thread of a connected pool without contexts.
///
/// # Errors
/// As [`pool`].
pub fn destroy_pool(id: usize) -> Result<(), Error> {
    registry()?.pools.remove(id).map(Pool::release)
}

/// Creates a context, and returns its identifier.
///
/// # Errors
/// Returns [`Error::TooMany`], or an error as [`pool`].
pub fn create_context(pool_id: usize, priority: u8, callback: Option<Callback>) -> Result<usize, Error> {
    let context = Context::new(&pool(pool_id)?, priority, callback)?;
    registry()?.contexts.insert(Arc::new(context))
}

/// Returns a context.
///
/// # Errors
/// Returns [`Error::InvalidArgument`], [`Error::InvalidContext`] or [`Error::Forked`].
pub fn context(id: usize) -> Result<Arc<Context>, Error> {
    registry()?.contexts.get(id)
}

/// Destroys a context with all its blocks. The callback does not run after it. Waits for running callbacks, except
/// inside a callback.
///
/// # Errors
/// Returns [`Error::Pinned`] if a block is pinned, or an error as [`context`]. The context is unchanged then.
pub fn destroy_context(id: usize) -> Result<(), Error> {
    let contexts = &registry()?.contexts;
    let context = contexts.get(id)?;
    context.close_pins()?;
    let removed = contexts.remove(id);
    context.close_callback();
    let pool = context.pool().clone();
    drop((context, removed?));
    Pool::release(pool);
    Ok(())
}
