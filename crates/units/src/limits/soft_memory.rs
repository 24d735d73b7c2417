//! Limits of soft memory.

/// Maximum address space of a pool of soft memory, in pages of 4 KiB (64 GiB).
pub const SOFT_POOL_PAGES_MAX: usize = 1 << 24;
/// Maximum number of soft structures of a pool.
pub const SOFT_STRUCTURES_MAX: usize = 1 << 16;
/// Maximum number of blocks of a structure that are addressed by handles.
pub const SOFT_BLOCKS_MAX: usize = 1 << 30;
/// Maximum number of pins of a structure. A reclamation skips each pinned block once.
pub const SOFT_PINS_MAX: usize = 1 << 16;
/// Maximum number of pools of a process that uses the C interface.
pub const SOFT_C_POOLS_MAX: usize = 1024;
/// Maximum number of processes in a chain of forks that use the C interface.
pub const SOFT_C_FORKS_MAX: usize = 1024;
/// Maximum number of pages that a heap of soft memory retains without values.
pub const SOFT_IDLE_PAGES_MAX: usize = 256;
/// Maximum number of values that are evicted under one lock, before their callbacks run.
pub const SOFT_EVICTION_BATCH: usize = 64;
/// Maximum size of the values that are evicted under one lock, in bytes. A larger value is evicted alone.
pub const SOFT_EVICTION_BATCH_BYTES: usize = 64 << 10;
/// Number of values that compaction moves under one lock, after which it begins no further span.
pub const SOFT_MOVED_VALUES_MAX: usize = 4096;
/// Maximum number of times that an insertion requests more budget.
pub const SOFT_GRANT_ATTEMPTS_MAX: usize = 3;
/// Number of pages that a pool of soft memory requests at least from its source (1 MiB).
pub const SOFT_REQUEST_PAGES_MIN: usize = 256;
/// Number of insertions into a full cache in soft memory for each request for more budget.
pub const SOFT_CACHE_REQUEST_INTERVAL: u32 = 256;
/// Maximum number of pages that the weight of a client of soft memory takes into account (4 PiB).
pub const SOFT_CLIENT_PAGES_MAX: u64 = 1 << 40;
/// Maximum number of clients of soft memory on a host.
pub const SOFT_CLIENTS_MAX: usize = 4096;
/// Maximum number of clients that give soft memory up for one request.
pub const SOFT_TARGETS_MAX: usize = 64;
/// Largest additional demand of soft memory, as a percentage of the missing pages.
pub const SOFT_OVER_RECLAIM_PERCENT_MAX: u32 = 100;
