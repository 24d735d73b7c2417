//! Soft memory: revocable memory for caches and other state that a program can rebuild (M. Frisella
//! et al., *Towards Increased Datacenter Efficiency with Soft Memory*, HotOS 2023).
//!
//! A [`Pool`] reserves virtual address space and limits the pages that are backed by memory to a
//! budget. [`SoftVec`], [`SoftList`], [`SoftHashMap`] and [`SoftCache`] store values in these pages, and
//! [`SoftByteCache`] and [`SoftBlocks`] store byte strings of different lengths.
//! [`Pool::revoke`] takes pages back: it evicts values, moves the remaining values of sparse pages
//! together, and returns whole pages to the kernel. A callback receives each evicted value.
//!
//! | part | module | section of the paper |
//! |---|---|---|
//! | allocator | [`heap`] | 3.1, 4 |
//! | data structures | the other modules | 3.2 |
//! | daemon, without its sockets | [`budget`] | 3.3, 4 |
//! | connection to the daemon | [`client`], [`protocol`] | 3.3, 4 |
//!
//! # Access
//!
//! Values are only accessible through closures that run under the lock of their structure. A
//! revocation therefore never races with a reader, and no reference outlives the value. A closure must
//! not access another soft structure: see [`locks`](#locks). Blocks of [`SoftBlocks`] can also be pinned, and are
//! then accessible without the lock.
//!
//! ```
//! use soft::{Pool, Priority, SoftCache};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = Pool::new(256)?; // a budget of 256 pages of 4 KiB
//! let cache = SoftCache::new(&pool, Priority(1))?;
//! cache.insert("key", vec![1, 2, 3])?;
//! assert_eq!(cache.get("key", Vec::len), Some(3));
//!
//! let pages = pool.revoke(256); // gives the whole budget back
//! assert_eq!(pages, 256);
//! assert_eq!(cache.get("key", Vec::len), None);
//! # Ok(())
//! # }
//! ```
//!
//! # Locks
//!
//! A thread holds the lock of at most one structure. An access to a soft structure inside an access
//! closure panics, which makes deadlocks between structures impossible. No lock of a structure is held
//! while a callback runs, while an evicted value is dropped, or while a [`BudgetSource`] is asked for pages: a
//! callback may block, panic, and use any structure. An insertion in a callback fails if the budget does not
//! suffice, because a request for more could wait for the callback itself.
//!
//! The locks are taken in this order: the lock of the requests to the source, the lock of a structure, the lock
//! of the budget. The lock of the list of structures is held alone.
//!
//! # Panics of the program
//!
//! If a closure, a callback, a destructor, or `Hash` or `Eq` of a key panics, the structure stays consistent, and the
//! books of the pool stay exact:
//!
//! - A panic of an access closure, or of `Hash` or `Eq`, ends the operation, and is passed to the caller. The contents
//!   are unchanged; an insertion drops its entry. If the insertion has evicted entries before, the callback
//!   receives them.
//! - `Hash` runs without a lock, and `Eq` under the lock, as an access closure. If `Eq` panics during an insertion, the
//!   destructor of the entry also runs under the lock. If it then accesses a soft structure, it panics as well, which
//!   ends the process.
//! - If a destructor panics while a structure is cleared or dropped, the destructors of its other values may not
//!   run. All pages are freed.
//! - A reclamation calls neither `Hash` nor `Eq`. Panics of callbacks and of destructors of evicted values are caught
//!   and counted in [`Usage::callback_panics`].
//!
//! # Memory
//!
//! Only the values are in soft memory. For each value, a structure needs 12 to 20 bytes of ordinary memory,
//! plus about 6 bytes for each entry of a map or cache. This memory is freed with the pages of the values,
//! and memory that values own when they are dropped. A structure also needs 40 bytes for each page that it has
//! held at one time.
//!
//! Pages are only returned to the kernel if the process does not lock its memory (`mlockall`).
//!
//! # Fork
//!
//! A forked child has a private copy of all values, as of other memory. Revocations in the parent do
//! not affect this copy. Pages that the child or the parent writes are counted in no budget, so a
//! child should execute another program soon.

mod blocks;
pub mod budget;
mod byte_cache;
mod byte_entries;
mod cache;
mod chain;
pub mod client;
mod entries;
mod error;
mod handles;
pub mod heap;
mod index;
mod keyed;
mod list;
mod lock_mark;
mod map;
mod panics;
pub mod protocol;
#[cfg(all(test, not(miri)))]
mod resident;
mod structure;
mod sync;
mod vec;

pub use blocks::SoftBlocks;
pub use byte_cache::{ScanCursor, ScanDecision, SoftByteCache};
pub use cache::SoftCache;
pub use error::{HandleError, InsertError, PoolError, SoftError};
pub use handles::Handle;
pub use heap::{BudgetSource, PAGE_BYTES, Pinned, Pool, PoolStats};
pub use list::SoftList;
pub use map::SoftHashMap;
pub use structure::{EntryPriority, Priority, Usage};
pub use vec::SoftVec;
