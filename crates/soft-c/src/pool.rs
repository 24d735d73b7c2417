//! Pools.

use std::sync::Arc;

use soft::{Pool, PoolStats};

use crate::{error::Error, registry::registry};

/// Registered pool. Its contexts keep the memory alive when it is destroyed.
#[derive(Debug)]
pub struct PoolEntry(pub Arc<Pool>);

/// Creates a pool with a budget in pages, and returns its identifier.
///
/// # Errors
/// Returns [`Error::TooLarge`], [`Error::System`], [`Error::TooMany`] or [`Error::Forked`].
pub fn create(budget_pages: usize) -> Result<usize, Error> {
    let pools = &registry()?.pools;
    pools.insert(PoolEntry(Pool::new(budget_pages)?))
}

/// Removes a pool.
///
/// # Errors
/// Returns [`Error::InvalidArgument`], [`Error::InvalidPool`] or [`Error::Forked`], as all functions with a pool do.
pub fn destroy(id: usize) -> Result<(), Error> {
    registry()?.pools.remove(id).map(drop)
}

/// Returns a pool.
///
/// # Errors
/// As [`destroy`].
pub fn get(id: usize) -> Result<Arc<Pool>, Error> {
    registry()?.pools.get(id).map(|entry| entry.0.clone())
}

/// Returns the budget and its use.
///
/// # Errors
/// As [`destroy`].
pub fn stats(id: usize) -> Result<PoolStats, Error> {
    get(id).map(|pool| pool.stats())
}
