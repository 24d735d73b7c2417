//! Budget of the cache, and its change by `CONFIG SET maxmemory`.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use soft::{PAGE_BYTES, Pool, PoolError, PoolStats, client::ConnectError};

use crate::error::CommandError;

/// Budget of the cache.
#[derive(Debug)]
pub struct Memory {
    pool: Arc<Pool>,
    /// Largest budget in pages: the address space suffices for it.
    maximum: usize,
    /// Whether the daemon determines the budget.
    has_daemon: bool,
    is_changing: AtomicBool,
}

impl Memory {
    /// Creates a pool with a constant budget in pages.
    ///
    /// # Errors
    /// The address space cannot be reserved.
    pub fn constant(pages: usize) -> Result<Self, PoolError> {
        Ok(Self::new(Pool::new(pages)?, pages, false))
    }

    /// Creates a pool whose budget comes from the daemon at a socket, up to `maximum` pages.
    ///
    /// # Errors
    /// The address space cannot be reserved, or the daemon cannot be used.
    pub fn from_daemon(socket: &Path, maximum: usize) -> Result<Self, ConnectError> {
        Ok(Self::new(soft::client::connect(socket, maximum)?, maximum, true))
    }

    fn new(pool: Arc<Pool>, maximum: usize, has_daemon: bool) -> Self {
        Self { pool, maximum, has_daemon, is_changing: AtomicBool::new(false) }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns the value of `maxmemory` in pages: the budget or, with the daemon, the largest budget.
    pub fn maxmemory(&self) -> usize {
        if self.has_daemon { self.maximum } else { self.stats().budget }
    }

    /// Returns the budget and its use.
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Changes the budget to a number of bytes, rounded down to pages. Evicts values on another thread if the new
    /// budget is smaller, because this may take long.
    ///
    /// # Errors
    /// [`CommandError::MaxMemory`], [`CommandError::MaxMemoryBusy`] or [`CommandError::MaxMemoryOfDaemon`].
    pub fn resize(self: &Arc<Self>, bytes: u64) -> Result<(), CommandError> {
        if self.has_daemon {
            return Err(CommandError::MaxMemoryOfDaemon);
        }
        let maximum = (self.maximum * PAGE_BYTES) as u64;
        let pages = usize::try_from(bytes).map_or(usize::MAX, |bytes| bytes / PAGE_BYTES);
        if pages == 0 || bytes > maximum {
            return Err(CommandError::MaxMemory { minimum: PAGE_BYTES as u64, maximum });
        }
        if self.is_changing.swap(true, Ordering::Acquire) {
            return Err(CommandError::MaxMemoryBusy);
        }
        let budget = self.pool.stats().budget;
        if pages >= budget {
            self.pool.grant(pages - budget);
            self.is_changing.store(false, Ordering::Release);
            return Ok(());
        }
        let memory = self.clone();
        tokio::task::spawn_blocking(move || {
            memory.pool.revoke(budget - pages);
            memory.is_changing.store(false, Ordering::Release);
        });
        Ok(())
    }
}
