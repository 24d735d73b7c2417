//! Contexts: blocks of one heap, with their pins and callback.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use soft::{Handle, Pinned, Pool, Priority, SoftBlocks, Usage};

use crate::{callback::Callback, error::Error};

/// Blocks of one heap.
#[derive(Debug)]
pub struct Context {
    blocks: SoftBlocks,
    pool: Arc<Pool>,
    callback: Option<Arc<Callback>>,
    pins: Mutex<Pins>,
}

/// Pins by block.
#[derive(Debug, Default)]
struct Pins {
    /// A pin of each pinned block, with the number of times that the block is pinned. The number of pins of a
    /// structure is limited.
    by_handle: FxHashMap<Handle, (Pinned, u32)>,
    /// Whether the context was destroyed.
    is_closed: bool,
}

/// Translates a handle.
fn handle(raw: u64) -> Result<Handle, Error> {
    Handle::from_raw(raw).ok_or(Error::InvalidArgument)
}

impl Context {
    /// Creates a context without blocks.
    ///
    /// # Errors
    /// Returns [`Error::TooMany`].
    pub fn new(pool: &Arc<Pool>, priority: u8, callback: Option<Callback>) -> Result<Self, Error> {
        let (priority, callback) = (Priority(priority), callback.map(Arc::new));
        let blocks = match callback.clone() {
            Some(callback) => {
                SoftBlocks::with_callback(pool, priority, move |handle, bytes| callback.call(handle, bytes))?
            }
            None => SoftBlocks::new(pool, priority)?,
        };
        Ok(Self { blocks, pool: pool.clone(), callback, pins: Mutex::default() })
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prevents further pins.
    ///
    /// # Errors
    /// Returns [`Error::Pinned`] if a block is pinned, or [`Error::InvalidContext`] if another thread was faster.
    pub fn close_pins(&self) -> Result<(), Error> {
        let mut pins = self.pins();
        if pins.is_closed {
            return Err(Error::InvalidContext);
        }
        if !pins.by_handle.is_empty() {
            return Err(Error::Pinned);
        }
        pins.is_closed = true;
        Ok(())
    }

    /// Prevents further calls of the callback. See [`Callback::close`].
    pub fn close_callback(&self) {
        if let Some(callback) = &self.callback {
            callback.close();
        }
    }

    /// Allocates a block of zeros.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`], [`Error::OutOfBudget`], [`Error::OutOfAddressSpace`] or [`Error::TooMany`].
    pub fn allocate(&self, bytes: usize) -> Result<u64, Error> {
        Ok(self.blocks.allocate(bytes)?.to_raw())
    }

    /// Frees a block.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`], [`Error::StaleHandle`] or [`Error::Pinned`].
    pub fn free(&self, raw: u64) -> Result<(), Error> {
        Ok(self.blocks.free(handle(raw)?)?)
    }

    /// Pins a block, and returns its address.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`], [`Error::StaleHandle`], [`Error::TooManyPins`], or
    /// [`Error::InvalidContext`] if another thread destroyed the context.
    pub fn pin(&self, raw: u64) -> Result<*mut u8, Error> {
        let handle = handle(raw)?;
        let mut pins = self.pins();
        if pins.is_closed {
            return Err(Error::InvalidContext);
        }
        // Also makes the block the youngest one if it is pinned already.
        let pinned = self.blocks.pin(handle)?;
        let address = pinned.as_ptr();
        let (_, count) = pins.by_handle.entry(handle).or_insert((pinned, 0));
        *count = count.checked_add(1).ok_or(Error::TooManyPins)?;
        Ok(address)
    }

    /// Removes a pin.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`], [`Error::NotPinned`], or [`Error::StaleHandle`] if the block does not
    /// exist.
    pub fn unpin(&self, raw: u64) -> Result<(), Error> {
        let handle = handle(raw)?;
        let mut pins = self.pins();
        let Some((_, count)) = pins.by_handle.get_mut(&handle) else {
            self.blocks.size(handle)?;
            return Err(Error::NotPinned);
        };
        *count -= 1;
        if *count == 0 {
            pins.by_handle.remove(&handle);
        }
        Ok(())
    }

    /// Returns the size of a block in bytes.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] or [`Error::StaleHandle`].
    pub fn size(&self, raw: u64) -> Result<usize, Error> {
        Ok(self.blocks.size(handle(raw)?)?)
    }

    /// Frees pages, and returns their number.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.blocks.reclaim(pages)
    }

    /// Changes the priority among the contexts of the pool.
    pub fn set_priority(&self, priority: u8) {
        self.blocks.set_priority(Priority(priority));
    }

    /// Returns the number of blocks, and the use of soft memory.
    pub fn usage(&self) -> (usize, Usage) {
        (self.blocks.len(), self.blocks.usage())
    }
}
