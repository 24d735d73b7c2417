//! Blocks of bytes that are addressed by handles, whose oldest blocks are evicted first.

use std::sync::Arc;

use units::limits::SOFT_BLOCKS_MAX;

use crate::{
    chain::{Chain, Linked, Links},
    error::{HandleError, InsertError, SoftError},
    handles::{Handle, HandleTable},
    heap::{Block, DetachedBytes, PinnableValues, Pinned, Pool, Records as _},
    panics::count_panics,
    structure::{Deliver, Priority, State, Structure, Usage},
};

/// Memory blocks of any size, as of `malloc`, that a reclamation can take away (Soft Memory, section 3 and 3.1). The
/// block that was not used for the longest time is evicted first. An allocation, a pin and an access are uses.
///
/// A block is addressed by a [`Handle`]. The handle of a freed or evicted block is detected as stale, so that a
/// program may keep handles for any time. A handle must be used only with its own structure: another structure can
/// have a block with the same handle.
///
/// [`pin`](Self::pin) gives access without the lock. While a block is pinned, it is not evicted, and no block of the
/// structure is moved to another address. A reclamation then frees only pages whose blocks are all freed or evicted,
/// and may evict more blocks for the same number of pages.
///
/// Blocks need 40 bytes of ordinary memory each. The callback receives a copy of a block up to 32 KiB. A larger
/// block is passed in place, and its pages are freed after the callback.
///
/// All methods panic inside an access closure; see [`locks`](crate#locks). A pin can be dropped anywhere.
///
/// ```
/// use soft::{HandleError, Pool, Priority, SoftBlocks};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::new(256)?;
/// let blocks = SoftBlocks::new(&pool, Priority(1))?;
/// let handle = blocks.allocate(1000)?;
/// blocks.get_mut(handle, |bytes| bytes[0] = 7)?;
///
/// let pinned = blocks.pin(handle)?;
/// pool.revoke(255);
/// assert_eq!(pinned[0], 7);
/// drop(pinned);
///
/// pool.revoke(256);
/// assert_eq!(blocks.pin(handle).err(), Some(HandleError::Stale));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SoftBlocks {
    structure: Structure<BlocksState>,
}

/// Record of a block.
#[derive(Debug)]
struct BlockRecord {
    links: Links,
    /// Entry in the table of handles.
    index: u32,
}

impl Linked for BlockRecord {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

/// Evicted block.
#[derive(Debug)]
struct EvictedBlock {
    handle: Handle,
    /// `None` without a callback.
    bytes: Option<DetachedBytes>,
}

#[derive(Debug)]
struct BlocksState {
    values: PinnableValues<BlockRecord>,
    /// All blocks, the oldest first.
    chain: Chain,
    handles: HandleTable,
    has_callback: bool,
}

impl SoftBlocks {
    /// Creates a structure without blocks.
    ///
    /// # Errors
    /// Returns [`SoftError::TooManyStructures`].
    pub fn new(pool: &Arc<Pool>, priority: Priority) -> Result<Self, SoftError> {
        Self::with_delivery(pool, priority, None)
    }

    /// Creates a structure without blocks. The callback receives the handle, which is stale, and the bytes of each
    /// evicted block. It runs without a lock.
    ///
    /// # Errors
    /// Returns [`SoftError::TooManyStructures`].
    pub fn with_callback(
        pool: &Arc<Pool>,
        priority: Priority,
        callback: impl Fn(Handle, &[u8]) + Send + Sync + 'static,
    ) -> Result<Self, SoftError> {
        let deliver = move |EvictedBlock { handle, bytes }: EvictedBlock| {
            bytes.map_or(0, |bytes| count_panics(|| callback(handle, &bytes)))
        };
        Self::with_delivery(pool, priority, Some(Box::new(deliver)))
    }

    fn with_delivery(
        pool: &Arc<Pool>,
        priority: Priority,
        deliver: Option<Deliver<EvictedBlock>>,
    ) -> Result<Self, SoftError> {
        let state = BlocksState {
            values: PinnableValues::new(pool.clone()),
            chain: Chain::default(),
            handles: HandleTable::new(),
            has_callback: deliver.is_some(),
        };
        Structure::new(pool, priority, state, deliver).map(|structure| Self { structure })
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.structure.lock().values.len()
    }

    /// Returns whether the structure has no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocates a block of `bytes` zeros, which may be 0 to 4 GiB - 1. Its address is a multiple of 16.
    ///
    /// # Errors
    /// Returns [`SoftError::TooLarge`] for larger blocks, [`SoftError::OutOfBudget`],
    /// [`SoftError::OutOfAddressSpace`] or [`SoftError::TooManyBlocks`].
    pub fn allocate(&self, bytes: usize) -> Result<Handle, SoftError> {
        let allocate = |state: &mut BlocksState, ()| {
            state.allocate(bytes).map_err(|reason| InsertError { value: (), reason })
        };
        self.structure.insert((), allocate).map_err(SoftError::from)
    }

    /// Frees a block without the callback.
    ///
    /// # Errors
    /// Returns [`HandleError::Stale`] or [`HandleError::Pinned`]. Nothing is changed then.
    pub fn free(&self, handle: Handle) -> Result<(), HandleError> {
        let mut state = self.structure.lock();
        let block = state.handles.get(handle).ok_or(HandleError::Stale)?;
        state.free(block)
    }

    /// Pins a block, and makes it the one to be evicted last.
    ///
    /// # Errors
    /// Returns [`HandleError::Stale`] or [`HandleError::TooManyPins`].
    pub fn pin(&self, handle: Handle) -> Result<Pinned, HandleError> {
        let mut state = self.structure.lock();
        let block = state.use_block(handle)?;
        state.values.pin(block)
    }

    /// Passes the bytes of a block to a closure, and makes it the block to be evicted last.
    ///
    /// # Errors
    /// Returns [`HandleError::Stale`].
    pub fn get<R>(&self, handle: Handle, access: impl FnOnce(&[u8]) -> R) -> Result<R, HandleError> {
        let mut state = self.structure.lock();
        let block = state.use_block(handle)?;
        Ok(access(state.values.get(block)))
    }

    /// Passes the bytes of a block to a closure that can change them, and makes it the block to be evicted last.
    ///
    /// # Errors
    /// Returns [`HandleError::Stale`], or [`HandleError::Pinned`], because a pin gives access without the lock.
    pub fn get_mut<R>(&self, handle: Handle, access: impl FnOnce(&mut [u8]) -> R) -> Result<R, HandleError> {
        let mut state = self.structure.lock();
        let block = state.use_block(handle)?;
        state.values.get_mut(block).map(access)
    }

    /// Returns the size of a block in bytes.
    ///
    /// # Errors
    /// Returns [`HandleError::Stale`].
    pub fn size(&self, handle: Handle) -> Result<usize, HandleError> {
        let state = self.structure.lock();
        let block = state.handles.get(handle).ok_or(HandleError::Stale)?;
        Ok(state.values.len_of(block))
    }

    /// Changes the priority of the structure. A running [`Pool::revoke`] uses the old one.
    pub fn set_priority(&self, priority: Priority) {
        self.structure.set_priority(priority);
    }

    /// Evicts blocks until `pages` pages are free, and returns the number of freed pages. Frees unused pages first.
    pub fn reclaim(&self, pages: usize) -> usize {
        self.structure.reclaim(pages)
    }

    /// Returns the use of soft memory.
    pub fn usage(&self) -> Usage {
        self.structure.usage()
    }
}

impl BlocksState {
    fn allocate(&mut self, bytes: usize) -> Result<Handle, SoftError> {
        if self.values.len() >= SOFT_BLOCKS_MAX {
            return Err(SoftError::TooManyBlocks(SOFT_BLOCKS_MAX));
        }
        let block = self.values.insert_zeros(bytes, BlockRecord { links: Links::default(), index: 0 })?;
        let handle = self.handles.insert(block);
        self.values.record_mut(block).index = handle.index();
        self.chain.push_back(&mut self.values, block);
        Ok(handle)
    }

    fn free(&mut self, block: Block) -> Result<(), HandleError> {
        if self.values.is_pinned(block) {
            return Err(HandleError::Pinned);
        }
        self.chain.unlink(&mut self.values, block);
        let BlockRecord { index, .. } = self.values.remove(block);
        self.handles.remove(index);
        Ok(())
    }

    /// Returns the block of a handle, and makes it the last one to be evicted.
    fn use_block(&mut self, handle: Handle) -> Result<Block, HandleError> {
        let block = self.handles.get(handle).ok_or(HandleError::Stale)?;
        self.move_to_end(block);
        Ok(block)
    }

    fn move_to_end(&mut self, block: Block) {
        self.chain.unlink(&mut self.values, block);
        self.chain.push_back(&mut self.values, block);
    }

    /// Returns the oldest block that is not pinned. Moves older, pinned blocks to the end, so that they are not
    /// examined again soon.
    fn next_evicted(&mut self) -> Option<Block> {
        for _ in 0..self.values.len() {
            let block = self.chain.first()?;
            if !self.values.is_pinned(block) {
                return Some(block);
            }
            self.move_to_end(block);
        }
        None
    }
}

impl State for BlocksState {
    type Evicted = EvictedBlock;

    fn evict(&mut self) -> Option<EvictedBlock> {
        let block = self.next_evicted()?;
        self.chain.unlink(&mut self.values, block);
        let (index, bytes) = if self.has_callback {
            let (record, bytes) = self.values.detach(block);
            (record.index, Some(bytes))
        } else {
            (self.values.remove(block).index, None)
        };
        Some(EvictedBlock { handle: self.handles.remove(index), bytes })
    }

    fn discard(&mut self) -> Option<()> {
        let block = self.next_evicted()?;
        self.free(block).ok()
    }

    fn evictable(&self) -> usize {
        self.values.len()
    }

    fn held_pages(&self) -> usize {
        self.values.held_pages()
    }

    fn unused_pages(&self) -> usize {
        self.values.unused_pages()
    }

    fn free_unused(&mut self, pages: usize) {
        let Self { values, chain, handles, .. } = self;
        values.free_unused(pages, |records, _, to| {
            chain.relink(records, to);
            handles.set(records.record(to).as_ref().as_ref().index, to);
        });
        if values.len() == 0 {
            handles.clear();
        }
    }
}

#[cfg(test)]
mod tests;
