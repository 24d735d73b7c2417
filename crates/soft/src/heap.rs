//! Allocator of soft memory (Soft Memory, section 3.1 and 4).
//!
//! A [`Pool`] reserves an address range once, and divides it into chunks of 64 KiB. Each structure has
//! its own heap, which takes chunks from the pool. A heap counts pages of a chunk against the budget
//! before it uses them, and returns them to the kernel with `MADV_DONTNEED`. It divides the pages of its chunks
//! into spans, and each span into slots of one size class. A value larger than the largest size class gets a
//! run of consecutive chunks, of which only the used pages count against the budget.
//!
//! As in zsmalloc of Linux, spans with free slots are grouped by their fullness. An allocation uses
//! the fullest spans, and compaction moves the values of the emptiest spans to the fullest spans, so that
//! whole spans become free. Moving is possible because no address leaves the heap: structures refer to
//! values by `Block`.
//!
//! | file | content |
//! |---|---|
//! | `mapping.rs` | the reserved address range: system calls |
//! | `extents.rs` | free chunks of the address range |
//! | `pool.rs` | budget, chunks, and registered structures of a process |
//! | `classes.rs` | size classes and the division of spans into slots |
//! | `arena.rs` | chunks and pages of one heap |
//! | `slots.rs` | spans and slots of one heap |
//! | `values.rs` | values of one type in the slots of a heap |
//! | `bytes.rs` | values of different lengths in the slots of a heap |
//! | `pinned.rs` | values of different lengths that can be pinned |
//! | `detached.rs` | bytes of removed values |
//! | `buffer.rs` | a growable array in one block |

mod arena;
mod buffer;
mod bytes;
mod classes;
mod detached;
mod extents;
mod mapping;
mod pinned;
mod pool;
mod slots;
mod values;

pub(crate) use buffer::Buffer;
pub(crate) use bytes::{ByteValues, WithLength};
pub(crate) use detached::DetachedBytes;
pub use mapping::PAGE_BYTES;
pub use pinned::Pinned;
pub(crate) use pinned::{PinRecord, PinnableValues};
pub(crate) use pool::Revocable;
pub use pool::{BudgetSource, Pool, PoolStats};
pub(crate) use slots::{Block, Compact, Records};
pub(crate) use values::Values;

#[cfg(test)]
mod tests;
