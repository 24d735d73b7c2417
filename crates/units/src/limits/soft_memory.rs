//! Limits of soft memory.

use super::RPC_MESSAGE_BYTES_MAX;
use crate::{Bytes, Ns};

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
/// Maximum number of values that are evicted under one lock if they need no callback.
pub const SOFT_DISCARD_BATCH: usize = 1024;
/// Minimum number of evictions that an insertion into a full cache attempts, also if the cache has fewer entries: other
/// threads may use the freed memory first.
pub const SOFT_INSERT_EVICTIONS_MIN: usize = 1024;
/// Maximum size of the values that are evicted under one lock, in bytes. A larger value is evicted alone.
pub const SOFT_EVICTION_BATCH_BYTES: usize = 64 << 10;
/// Maximum length of the key of a byte string in soft memory, in bytes. The length has two bytes.
pub const SOFT_KEY_BYTES_MAX: usize = u16::MAX as usize;
/// Number of values that compaction moves under one lock, after which it begins no further span.
pub const SOFT_MOVED_VALUES_MAX: usize = 4096;
/// Maximum number of times that a reclamation yields the processor to threads that wait for its lock.
pub const SOFT_LOCK_YIELDS_MAX: u32 = 1000;
/// Maximum number of times that an insertion requests more budget.
pub const SOFT_GRANT_ATTEMPTS_MAX: usize = 3;
/// Number of pages that a pool of soft memory requests at least from its source (1 MiB).
pub const SOFT_REQUEST_PAGES_MIN: usize = 256;
/// Number of pages that a pool of soft memory requests at most from its source in advance (16 MiB).
pub const SOFT_REQUEST_PAGES_MAX: usize = 4096;
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
/// Time in which a client of soft memory must answer a demand.
pub const SOFT_ANSWER_TIMEOUT: Ns = Ns::ms(500);
/// Maximum number of decisions, and thus of rounds of demands, for a request for soft memory.
pub const SOFT_DECISIONS_MAX: u32 = 3;
/// Time after a denial in which further requests of the client are denied without a decision.
pub const SOFT_DENIAL_INTERVAL: Ns = Ns::ms(50);
/// Time in which a client that answered late, or gave up less than was demanded, receives no demands for the requests
/// of other clients.
pub const SOFT_PASS_OVER_TIME: Ns = Ns::secs(5);
/// Time after the start of the daemon of soft memory in which it grants no pages, because clients of an earlier daemon
/// connect again.
pub const SOFT_RECONNECT_TIME: Ns = Ns::secs(2);
/// Maximum time for which a process waits for the answer to a request for soft memory. It exceeds the time of all
/// decisions of the daemon.
pub const SOFT_REQUEST_TIMEOUT: Ns = Ns::secs(3);
/// Maximum time for which a process waits until the daemon of soft memory accepts its connection.
pub const SOFT_WELCOME_TIMEOUT: Ns = Ns::secs(1);
/// Time after which a process connects again to the daemon of soft memory.
pub const SOFT_RECONNECT_INTERVAL: Ns = Ns::ms(500);
/// Time in which a process tries to connect again if the daemon of soft memory still has its earlier connection, or has
/// too many unaccepted connections.
pub const SOFT_CONNECT_RETRY_TIME: Ns = Ns::secs(2);
/// Interval between the first two of these attempts. It doubles with each attempt.
pub const SOFT_CONNECT_RETRY_INTERVAL: Ns = Ns::ms(10);
/// Maximum time for which the drop of a connected pool waits for the end of its thread.
pub const SOFT_CLIENT_END_TIMEOUT: Ns = Ns::secs(1);
/// Time after which a process gives up its budget if the daemon of soft memory refuses it all the time. The daemon does
/// not count this budget.
pub const SOFT_REFUSED_TIME: Ns = Ns::secs(5);
/// Interval at which a process reports its use of soft memory, if it has changed.
pub const SOFT_USAGE_INTERVAL: Ns = Ns::ms(250);
/// Maximum number of pages that a process revokes before it reports them to the daemon (8 MiB).
pub const SOFT_REVOKED_PAGES_MAX: usize = 2048;
/// Maximum number of clients of soft memory in a report.
pub const SOFT_REPORTED_CLIENTS_MAX: usize = 256;
/// Maximum size of the name of a program in a report of soft memory, in bytes. The kernel limits names to 15 bytes;
/// each byte that is not UTF-8 becomes a character of 3 bytes.
pub const SOFT_PROGRAM_BYTES_MAX: usize = 45;
// A report of soft memory is one message. Per client it contains a name and some numbers.
const _: () = assert!(
    SOFT_REPORTED_CLIENTS_MAX * (SOFT_PROGRAM_BYTES_MAX + 256) <= RPC_MESSAGE_BYTES_MAX / 2,
    "a report of soft memory must fit into a message"
);
/// Interval between two reports of soft memory.
pub const SOFT_REPORT_INTERVAL: Ns = Ns::secs(2);
/// Interval at which the daemon of soft memory checks for late answers.
pub const SOFT_TICK_INTERVAL: Ns = Ns::ms(50);
/// Interval at which the daemon of soft memory adapts to the memory of the host.
pub const SOFT_ADAPT_INTERVAL: Ns = Ns::ms(250);
/// Interval at which the daemon of soft memory measures the memory of its clients.
pub const SOFT_MEASURE_INTERVAL: Ns = Ns::secs(1);
/// Maximum number of connections of a user to the daemon of soft memory.
pub const SOFT_CONNECTIONS_PER_UID_MAX: usize = 1024;
/// Maximum number of connections to the daemon of soft memory of users that may not use it, together.
pub const SOFT_UNAUTHORIZED_CONNECTIONS_MAX: usize = 16;
/// Time in which a client of soft memory must send its first message.
pub const SOFT_HELLO_TIMEOUT: Ns = Ns::secs(1);
/// Maximum number of messages of all clients that wait for the daemon of soft memory.
pub const SOFT_MESSAGES_QUEUED_MAX: usize = 256;

/// Default budget of the cache server.
pub const SOFT_CACHE_MEMORY_DEFAULT: Bytes = Bytes::mib(64);
/// Smallest budget of the cache server at its start.
pub const SOFT_CACHE_MEMORY_MIN: Bytes = Bytes::mib(1);
/// Largest budget of the cache server.
pub const SOFT_CACHE_MEMORY_MAX: Bytes = Bytes::gib(64);
/// Default number of clients of the cache server.
pub const SOFT_CACHE_CLIENTS_DEFAULT: u32 = 10_000;
/// Largest number of clients of the cache server that can be configured.
pub const SOFT_CACHE_CLIENTS_MAX: u32 = 60_000;
/// Maximum number of connections that the kernel queues until the cache server accepts them.
pub const SOFT_CACHE_BACKLOG: u32 = 511;
/// Time after which the cache server accepts connections again when it has no free file descriptor.
pub const SOFT_CACHE_ACCEPT_RETRY: Ns = Ns::ms(100);
/// Maximum number of answers of the daemon of soft memory for which a command of the cache server waits. Each request
/// is twice as large as the one before.
pub const SOFT_CACHE_BUDGET_WAITS_MAX: u32 = 6;
/// Maximum number of arguments of a command, including its name.
pub const SOFT_CACHE_ARGUMENTS_MAX: usize = 1 << 16;
/// Maximum size of a command with all its arguments, in bytes.
pub const SOFT_CACHE_COMMAND_BYTES_MAX: usize = 32 << 20;
/// Maximum length of a value in the cache server, in bytes. Also the maximum length of an argument.
pub const SOFT_CACHE_VALUE_BYTES_MAX: usize = 16 << 20;
/// Maximum length of a command that is one line, in bytes.
pub const SOFT_CACHE_INLINE_BYTES_MAX: usize = 64 << 10;
/// Maximum length of a line with the number of arguments or the length of an argument, in bytes.
pub const SOFT_CACHE_HEADER_BYTES_MAX: usize = 32;
/// Maximum number of arguments of a command of a client that has not authenticated.
pub const SOFT_CACHE_NEW_CLIENT_ARGUMENTS_MAX: usize = 10;
/// Maximum length of an argument of a client that has not authenticated, in bytes.
pub const SOFT_CACHE_NEW_CLIENT_ARGUMENT_BYTES_MAX: usize = 16 << 10;
/// Time within which a client must authenticate if the cache server has a password.
pub const SOFT_CACHE_AUTHENTICATION_TIMEOUT: Ns = Ns::secs(10);
/// Number of bytes that the cache server reads from a connection at once.
pub const SOFT_CACHE_READ_BYTES: usize = 64 << 10;
/// Size of replies in bytes from which on the cache server sends them before it executes further commands of a client.
pub const SOFT_CACHE_FLUSH_BYTES: usize = 64 << 10;
/// Maximum size of the replies that a connection has not received yet, in bytes.
pub const SOFT_CACHE_REPLY_BYTES_MAX: usize = 32 << 20;
/// Maximum size of the buffers of all connections, in bytes.
pub const SOFT_CACHE_BUFFER_BYTES_MAX: usize = 256 << 20;
/// Size of a buffer that a connection without commands retains, in bytes.
pub const SOFT_CACHE_RETAINED_BYTES_MAX: usize = 4 << 10;
/// Time after which a connection is closed if its client accepts no byte of its replies.
pub const SOFT_CACHE_WRITE_TIMEOUT: Ns = Ns::secs(10);
/// Time for the last replies after SIGTERM.
pub const SOFT_CACHE_SHUTDOWN_TIMEOUT: Ns = Ns::secs(5);
/// Maximum number of bytes that are read and discarded after the reply to a violation of the protocol, so that the
/// client receives the reply.
pub const SOFT_CACHE_DISCARDED_BYTES_MAX: usize = 64 << 20;
/// Maximum time for which these bytes are read.
pub const SOFT_CACHE_DISCARD_TIMEOUT: Ns = Ns::secs(2);
/// Maximum length of the name of a client, in bytes.
pub const SOFT_CACHE_CLIENT_NAME_BYTES_MAX: usize = 256;
/// Maximum length of the arguments in an error reply, in bytes.
pub const SOFT_CACHE_ERROR_BYTES_MAX: usize = 128;
/// Maximum length of the password of the cache server, in bytes.
pub const SOFT_CACHE_PASSWORD_BYTES_MAX: usize = 1024;
/// Interval between two steps of the search for expired entries.
pub const SOFT_CACHE_EXPIRY_INTERVAL: Ns = Ns::ms(50);
/// Number of pages that a step of the search for expired entries examines.
pub const SOFT_CACHE_EXPIRY_PAGES: u32 = 128;

// The last request of a command is as large as the largest command.
const _: () = assert!(
    (SOFT_REQUEST_PAGES_MIN << (SOFT_CACHE_BUDGET_WAITS_MAX - 1)) * 4096 >= SOFT_CACHE_COMMAND_BYTES_MAX
);
// The block of a value also contains its key and at most 11 bytes.
const _: () = assert!(SOFT_CACHE_COMMAND_BYTES_MAX >= SOFT_CACHE_VALUE_BYTES_MAX + SOFT_KEY_BYTES_MAX);
const _: () = assert!(SOFT_CACHE_REPLY_BYTES_MAX >= SOFT_CACHE_FLUSH_BYTES + SOFT_CACHE_VALUE_BYTES_MAX);
const _: () = assert!(SOFT_CACHE_MEMORY_MAX.get() <= SOFT_POOL_PAGES_MAX as u64 * 4096);
