//! Budget of the cache, and its change by `CONFIG SET maxmemory`.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use soft::{PAGE_BYTES, Pool, PoolStats};

use crate::error::CommandError;

/// Budget of the cache.
#[derive(Debug)]
pub struct Memory {
    pool: Arc<Pool>,
    /// Largest budget in pages: the address space suffices for it.
    maximum: usize,
    is_changing: AtomicBool,
}

impl Memory {
    /// Uses the budget of a pool, which may be changed up to `maximum` pages.
    pub fn new(pool: Arc<Pool>, maximum: usize) -> Self {
        Self { pool, maximum, is_changing: AtomicBool::new(false) }
    }

    /// Returns the budget and its use.
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Changes the budget to a number of bytes, rounded down to pages. Evicts values on another thread if the new
    /// budget is smaller, because this may take long.
    ///
    /// # Errors
    /// [`CommandError::MaxMemory`] or [`CommandError::MaxMemoryBusy`].
    pub fn resize(self: &Arc<Self>, bytes: u64) -> Result<(), CommandError> {
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
