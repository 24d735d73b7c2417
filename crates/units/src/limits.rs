//! Limits of all crates and services. Relations between limits are checked at compile time.

mod plan;
mod soft_memory;

pub use plan::*;
pub use soft_memory::*;

use crate::{Bytes, COUNTER_NAMES, Ns};

/// Maximum number of hosts in a rack.
pub const HOSTS_MAX: usize = 1024;
/// Maximum number of EMCs (pool devices) in a rack.
pub const EMCS_MAX: usize = 256;
/// Maximum number of EMCs that one host can be attached to.
pub const EMCS_PER_HOST_MAX: usize = 16;
/// Maximum number of slices of one EMC (16 TiB).
pub const SLICES_PER_EMC_MAX: u32 = 16 * 1024;
/// Maximum number of slices in a rack at one time (256 TiB).
pub const SLICES_MAX: u32 = 256 * 1024;
/// Maximum number of slices over the lifetime of a rack. Includes removed slices, because slice
/// numbers are never reused.
pub const SLICE_IDS_MAX: u32 = u32::MAX;
/// Maximum number of EMCs over the lifetime of a rack. Includes removed EMCs, because EMC numbers
/// are never reused.
pub const EMC_IDS_MAX: u32 = u32::MAX;
/// Maximum number of hosts over the lifetime of a rack. Includes removed hosts, because host
/// numbers are never reused.
pub const HOST_IDS_MAX: u32 = u32::MAX;
/// Maximum number of slices of one VM.
pub const SLICES_PER_VM_MAX: u32 = 4096;
/// Maximum number of slices of one host. All of them must fit into one desired-state message.
pub const SLICES_PER_HOST_MAX: u32 = 32 * 1024;
/// Maximum number of active reservations of one host: one per core. All of them must fit into one
/// desired-state message.
pub const RESERVATIONS_PER_HOST_MAX: usize = CORES_PER_HOST_MAX as usize;
/// Maximum number of changes in an incremental desired-state message. For more changes, the manager
/// sends the complete state.
pub const DELTA_CHANGES_PER_HOST_MAX: usize = 8192;
/// Maximum number of vCPUs of a guest.
pub const VCPUS_PER_VM_MAX: u32 = 64;
/// Maximum number of NUMA nodes with vCPUs in a guest. With this limit, every APIC ID fits into a
/// byte.
pub const LOCAL_NODES_PER_VM_MAX: usize = 4;
/// Maximum number of disks and network cards of a guest. Each device has its own interrupt line.
pub const DEVICES_PER_VM_MAX: usize = 15;
/// Maximum number of memory devices of a QEMU guest. QEMU has this many memory slots.
pub const QEMU_MEMORY_DEVICES_MAX: u32 = 256;
/// Maximum number of guest driver errors that one virtio device logs.
pub const DRIVER_ERRORS_LOGGED_PER_DEVICE_MAX: u32 = 8;
/// Maximum number of program headers of an ELF kernel. A Linux kernel has five.
pub const KERNEL_SEGMENTS_MAX: u16 = 64;
/// Timeout for a guest to power off after a shutdown request.
pub const GUEST_SHUTDOWN_TIMEOUT: Ns = Ns::secs(30);
/// Timeout for all vCPU threads to return from KVM_RUN when the guest is stopped or paused.
pub const VCPUS_STOP_TIMEOUT: Ns = Ns::secs(2);
/// Maximum number of guest machine checks that a VMM logs. Without this limit, a guest could fill
/// the log.
pub const MACHINE_CHECKS_LOGGED_MAX: u32 = 16;
/// Interval at which a VMM checks that all slices of its guest are present. A guest access to a
/// lost slice is detected at once.
pub const LOST_SLICE_CHECK_INTERVAL: Ns = Ns::secs(1);
/// Maximum number of concurrent connections to a guest's control socket. Further connections wait.
pub const CONTROL_CONNECTIONS_MAX: usize = 16;
/// Maximum number of concurrent requests on one connection to a guest's control socket. Further
/// requests wait.
pub const CONTROL_REQUESTS_IN_FLIGHT_MAX: usize = 4;
/// Maximum size of a request to a guest's control socket, in bytes.
pub const CONTROL_REQUEST_BYTES_MAX: usize = 4 << 10;
/// Timeout for a response from a guest's control socket.
pub const CONTROL_RESPONSE_TIMEOUT: Ns = Ns::secs(10);
/// Default time that a command waits for a guest to stop.
pub const GUEST_STOP_WAIT_DEFAULT: Ns = Ns::secs(40);
/// Longest configurable time that a command waits for a guest to stop.
pub const GUEST_STOP_WAIT_MAX: Ns = Ns::secs(24 * 3600);
/// Interval at which an agent measures the touched memory of each guest.
pub const TOUCHED_MEMORY_SAMPLE_INTERVAL: Ns = Ns::secs(10);
/// Number of pages of each pool node that a VMM selects for an interval of access sampling. The
/// standard error of the measured fraction is at most 3.6 percentage points.
pub const ACCESS_SAMPLE_PAGES: u32 = 200;
/// Minimum length of an interval of access sampling. The limit bounds the page faults that sampling
/// causes.
pub const ACCESS_SAMPLE_INTERVAL_MIN: Ns = Ns::secs(1);
/// Maximum size of the pages that access sampling selects. The kernel does not report the page table
/// entries of larger device pages; it splits them instead.
pub const ACCESS_SAMPLE_PAGE_MAX: Bytes = Bytes::mib(2);
/// Maximum estimated time to copy the remaining pages while a guest is paused, when its pool memory
/// is moved to local memory.
pub const REHOME_PAUSE_MAX: Ns = Ns::ms(20);
/// Maximum speed of copying pages that is assumed, in bytes per second. The measured speed is
/// unreliable before many pages were copied.
pub const REHOME_COPY_BYTES_PER_S_MAX: u64 = 4 << 30;
/// Longest delay between two checks whether a VM still uses slices that its VMM claims to have left.
pub const REHOME_USE_CHECK_DELAY_MAX: Ns = Ns::secs(60);
/// Maximum number of rounds in which the pool memory of a guest is copied to local memory.
pub const REHOME_ROUNDS_MAX: u32 = 40;
/// Number of rounds before the vCPUs of a guest are throttled.
pub const REHOME_ROUNDS_BEFORE_THROTTLE: u32 = 4;
/// Period in which throttled vCPUs are stopped once.
pub const REHOME_THROTTLE_PERIOD: Ns = Ns::ms(20);
/// Increase of the throttle per round that does not converge, in percent of the period.
pub const REHOME_THROTTLE_STEP_PERCENT: u32 = 10;
/// Maximum throttle, in percent of the period.
pub const REHOME_THROTTLE_PERCENT_MAX: u32 = 99;
/// Maximum number of pages that are copied to local memory at a time.
pub const REHOME_CHUNK_PAGES: usize = 64;
/// Timeout for all devices of a paused guest to become idle.
pub const REHOME_DEVICES_STOP_TIMEOUT: Ns = Ns::ms(500);
/// Interval at which a device that is not idle is checked again.
pub const REHOME_DEVICES_CHECK_INTERVAL: Ns = Ns::ms(1);
/// Maximum number of cores of a host.
pub const CORES_PER_HOST_MAX: u32 = 4096;
/// Maximum local memory of a host, in MiB (64 TiB).
pub const LOCAL_MEMORY_MIB_PER_HOST_MAX: u64 = 64 << 20;

/// Maximum length of the name of a host, EMC, VM or client, in bytes.
pub const NAME_BYTES_MAX: usize = 63;
/// Maximum length of a request ID, in bytes.
pub const REQUEST_ID_BYTES_MAX: usize = 128;
/// Maximum length of the reason that an operator gives for an operation, in bytes.
pub const REASON_BYTES_MAX: usize = 512;

/// Maximum length of a value in an error message, in characters. Longer values are shortened. Valid
/// names and request IDs are never shortened.
pub const ERROR_VALUE_CHARS_MAX: usize = 256;
const _: () =
    assert!(NAME_BYTES_MAX <= ERROR_VALUE_CHARS_MAX && REQUEST_ID_BYTES_MAX <= ERROR_VALUE_CHARS_MAX);

/// Maximum size of a file with a token, in bytes.
pub const TOKEN_FILE_BYTES_MAX: usize = 4 << 10;
/// Maximum length of the file with the UUID of a rack. A UUID has 36 characters.
pub const RACK_UUID_FILE_BYTES_MAX: usize = 4 << 10;
/// Maximum length of the file that injects a fault into an emulated EMC.
pub const FAULT_FILE_BYTES_MAX: usize = 4 << 10;
/// Maximum size of a file with certificates or a private key, in bytes.
pub const PEM_FILE_BYTES_MAX: usize = 1 << 20;
/// Maximum size of `rack.toml` and `host.toml`, in bytes.
pub const SERVICE_CONFIG_BYTES_MAX: usize = 4 << 20;
/// Maximum size of a file in the runtime directory of an agent, in bytes. The largest file is the
/// record of a VM with all its slices.
pub const STATE_FILE_BYTES_MAX: usize = 32 << 20;
/// Maximum number of errors of a configuration file that are shown.
pub const CONFIG_VIOLATIONS_MAX: usize = 100;
/// Maximum size of a configuration file that `tarn` reads, in bytes.
pub const CONFIG_FILE_BYTES_MAX: usize = 1 << 20;
/// Maximum size of a table that `tarn` reads, in bytes after decompression.
pub const TABLE_BYTES_MAX: u64 = 4 << 30;
/// Maximum length of a line of a table that `tarn` reads, in bytes.
pub const TABLE_LINE_BYTES_MAX: u64 = 1 << 20;

/// Maximum length of the path of a unix socket on Linux, in bytes. `sun_path` has 108 bytes, of
/// which the last is NUL (unix(7)).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Maximum length of a component of a path on Linux, in bytes (`NAME_MAX`).
pub const PATH_COMPONENT_BYTES_MAX: usize = 255;
/// Maximum size of a gRPC message in either direction, in bytes.
pub const RPC_MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Maximum size of a `HostMemory` datagram, in bytes.
pub const DATAGRAM_BYTES_MAX: usize = 64 << 10;
/// Maximum number of file descriptors in a `HostMemory` datagram. Linux allows 253.
pub const DESCRIPTORS_PER_DATAGRAM_MAX: usize = 64;
/// Maximum number of connections to an agent's host memory socket from one user with permission to
/// attach VMs.
pub const HOST_MEMORY_CONNECTIONS_PER_UID_MAX: usize = 1024;
/// Maximum number of connections to an agent's host memory socket from all users without permission
/// to attach VMs.
pub const HOST_MEMORY_UNAUTHORIZED_CONNECTIONS_MAX: usize = 16;
/// Time without a request after which the agent closes a host memory connection.
pub const HOST_MEMORY_IDLE_TIMEOUT: Ns = Ns::secs(30);
/// Time without a request after which the agent closes a host memory connection of a user without
/// permission to attach VMs.
pub const HOST_MEMORY_UNAUTHORIZED_IDLE_TIMEOUT: Ns = Ns::secs(1);
/// Maximum number of VMM requests in the queue of the agent's main task. Further requests wait in
/// the socket buffer.
pub const HOST_MEMORY_REQUESTS_QUEUED_MAX: usize = 256;
/// Timeout for sending a response to a VMM.
pub const HOST_MEMORY_SEND_TIMEOUT: Ns = Ns::secs(10);
/// Maximum memory of a pool's NUMA node that processes other than VMs may use. Above this limit,
/// `host-agent doctor` reports a problem.
pub const FOREIGN_MEMORY_ON_POOL_NODE_MAX: Bytes = Bytes::mib(64);
/// Maximum number of concurrent host calls of an agent, such as opening a slice. Each call runs on
/// its own thread.
pub const HOST_CALLS_IN_FLIGHT_MAX: usize = 8;
/// Maximum number of concurrent host calls that close or scrub slices. The remaining threads are
/// reserved for starting VMs.
pub const HOST_RECLAIM_CALLS_IN_FLIGHT_MAX: usize = 6;
/// Maximum number of entries in one page of a list.
pub const LIST_PAGE_ENTRIES_MAX: u32 = 8 * 1024;
/// Maximum number of pages that a client requests for one list. If the manager announces more
/// pages, the client reports a protocol error.
pub const LIST_PAGES_MAX: u32 = 4096;

/// Maximum number of reservations in one page of a list. One reservation may contain thousands of
/// slices.
pub const RESERVATIONS_PER_PAGE_MAX: usize = 256;

/// Maximum number of hosts that a list request copies from the ledger before it releases the lock.
pub const HOSTS_PER_CHUNK_MAX: usize = 64;
/// Maximum number of slices that a list request copies from the ledger before it releases the lock.
pub const SLICES_PER_CHUNK_MAX: usize = 512;
/// Maximum number of reservations plus their slices that a list request copies before it releases
/// the ledger's lock.
pub const RESERVATIONS_CHUNK_ENTRIES_MAX: usize = 4096;
/// Maximum number of active and ended reservations that a list request examines before it releases
/// the ledger's lock.
pub const RESERVATIONS_SCANNED_PER_CALL_MAX: usize = 1024;

/// Maximum number of concurrent connections to the manager, from agents, schedulers and operators.
pub const CONNECTIONS_MAX: usize = 4096;
/// Maximum number of concurrent connections to the manager on which no request was admitted yet.
/// A further connection closes one of them.
pub const UNADMITTED_CONNECTIONS_MAX: usize = 512;
/// Maximum number of connections to the manager per source. A source is a network address, or a
/// local user other than root and the manager's own user.
pub const CONNECTIONS_PER_SOURCE_MAX: usize = 1024;
/// Maximum number of connections per source on which no request was admitted yet. A further
/// connection from a network address closes the oldest of them. A further connection of a local
/// user is rejected.
pub const UNADMITTED_CONNECTIONS_PER_SOURCE_MAX: usize = 128;
/// Number of connections, of [`CONNECTIONS_MAX`], that only root and the manager's own user can open
/// on the unix socket.
pub const TRUSTED_CONNECTIONS_RESERVED: usize = 64;
const _: () = assert!(CONNECTIONS_PER_SOURCE_MAX < CONNECTIONS_MAX - TRUSTED_CONNECTIONS_RESERVED);
/// Number of connections that the kernel queues before the manager, or the agent on its unix sockets, accepts them. This
/// is the default of `net.core.somaxconn`, which limits it.
pub const ACCEPT_BACKLOG: u32 = 4096;
const _: () = assert!(UNADMITTED_CONNECTIONS_PER_SOURCE_MAX < UNADMITTED_CONNECTIONS_MAX);
/// Time after which the manager closes a connection without an admitted request. The time includes
/// the TLS handshake.
pub const CONNECTION_ADMISSION_TIMEOUT: Ns = Ns::secs(10);
/// Time after which the manager closes a connection without an open call.
pub const CONNECTION_IDLE_TIMEOUT: Ns = Ns::secs(300);
/// Maximum number of accepted connections in the queue of the manager's server.
pub const ACCEPTED_CONNECTIONS_QUEUED_MAX: usize = 64;
/// Maximum number of concurrent calls on one connection to the manager.
pub const CALLS_PER_CONNECTION_MAX: u32 = 1024;

/// Maximum number of ledger requests that wait for a durable write. Further requests are rejected
/// with UNAVAILABLE.
pub const LEDGER_REQUESTS_QUEUED_MAX: usize = 4096;
/// Shortest interval between two checks of the free space on the store's disk.
pub const STORE_SPACE_CHECK_INTERVAL: Ns = Ns::ms(100);
/// Interval between two checks of the free space on a nearly full disk while the store writes
/// nothing.
pub const STORE_LOW_SPACE_CHECK_INTERVAL: Ns = Ns::secs(1);
/// Maximum number of concurrent Explain calls, each of which scans all decisions. Further calls are
/// rejected with UNAVAILABLE.
pub const EXPLAIN_CALLS_IN_FLIGHT_MAX: usize = 8;
/// Maximum number of calls that wait in WaitReady, or in Reserve with `wait_ready`.
pub const SLICE_WAITERS_MAX: usize = 16 * 1024;
/// Longest time that a call may wait for slices to come online.
pub const WAIT_READY_TIMEOUT_MAX: Ns = Ns::secs(300);
/// Default timeout of a command for a response from the manager.
pub const RESPONSE_TIMEOUT_DEFAULT: Ns = Ns::secs(30);
/// Additional time that a client waits after the deadline of its request, so that it receives the
/// server's timeout error.
pub const RESPONSE_TIMEOUT_SLACK: Ns = Ns::secs(1);
/// Interval at which `tarn top` polls the rack.
pub const TOP_REFRESH_INTERVAL: Ns = Ns::secs(1);
/// Maximum number of key presses and rack updates in the queue of `tarn top`.
pub const TOP_EVENTS_QUEUED_MAX: usize = 64;
/// Largest accepted difference between the clocks of two machines. With a larger difference, their
/// logs cannot be compared.
pub const CLOCK_SKEW_MAX: Ns = Ns::secs(5);
/// Maximum number of changes in one durable write. Further requests are part of the next write.
/// Reports of hosts and devices may exceed this limit; their size is bounded by the number of
/// slices.
pub const CHANGES_PER_BATCH_MAX: usize = 8192;
/// Delay before the store writes a change that no caller waits for, so that several changes share
/// one durable write.
pub const BATCH_DELAY: Ns = Ns::ms(10);
/// Maximum number of chunks queued for one watcher. When the queue is full, the oldest chunks are
/// dropped and the watcher is notified.
pub const WATCH_CHUNKS_QUEUED_MAX: usize = 4096;
/// Maximum number of records in one chunk that is sent to watchers.
pub const RECORDS_PER_WATCH_CHUNK_MAX: usize = 64;
/// Maximum number of open Watch streams, and of open WatchCapacity and WatchMigrations streams.
pub const WATCH_STREAMS_MAX: usize = 256;
/// Interval between two attempts of `tarn watch` to reconnect to the manager.
pub const WATCH_RETRY_INTERVAL: Ns = Ns::ms(200);
/// Additional time that `tarn watch` waits after its `--timeout`, so that an error of the
/// connection is reported instead of the timeout.
pub const WATCH_TIMEOUT_SLACK: Ns = Ns::ms(50);

/// Maximum number of rows of a VM trace.
pub const TRACE_ROWS_MAX: usize = 4 << 20;
/// Largest time in a VM trace, in seconds from its start: 100 years.
pub const TRACE_SECONDS_MAX: u64 = 100 * 366 * 24 * 3600;
/// Maximum number of recent outcomes stored individually per group of similar VMs. Older outcomes
/// are aggregated into the group's sums, minimum and maximum.
pub const OUTCOMES_PER_GROUP_MAX: usize = 64;
/// Maximum number of random splits of the workloads into training and test halves in
/// cross-validation.
pub const CROSS_VALIDATION_SPLITS_MAX: u32 = 10_000;
/// Maximum number of outcomes in a training set; the most recent outcomes are used. Training takes
/// about half a millisecond per outcome.
pub const TRAINING_OUTCOMES_MAX: usize = 64 << 10;
/// Maximum number of outcomes that a manager stores; the oldest are dropped. Training reads all of
/// them.
pub const OUTCOMES_RETAINED_MAX: usize = TRAINING_OUTCOMES_MAX;
/// Default time for which the manager stores outcomes.
pub const OUTCOME_RETENTION_DEFAULT: Ns = Ns::secs(366 * 24 * 3600);
/// Longest configurable time for which the manager stores outcomes.
pub const OUTCOME_RETENTION_MAX: Ns = Ns::secs(3660 * 24 * 3600);
/// Maximum length of a VM attribute (customer, type or location), in bytes.
pub const VM_ATTRIBUTE_BYTES_MAX: usize = 256;
/// Maximum number of outcomes in one AddOutcomes request.
pub const OUTCOMES_PER_REQUEST_MAX: usize = 2048;
/// Maximum number of labelled workloads in a training set.
pub const WORKLOAD_LABELS_MAX: usize = 5120;
/// Maximum number of recent models of one kind that a manager stores. The serving model and the
/// models available for rollback are stored in addition.
pub const MODELS_RETAINED_MAX: usize = 16;
/// Maximum number of earlier models that repeated rollbacks can restore.
pub const ROLLBACK_MODELS_MAX: usize = 8;
/// Maximum number of plans without a reservation that the manager stores. The oldest plans are
/// dropped first.
pub const PENDING_PLANS_MAX: usize = 64 << 10;
/// Number of most recently planned VMs over which the manager computes the fraction of VMs with
/// measured performance counters.
pub const PLAN_STATISTICS_WINDOW: usize = 1000;
/// Number of outcomes between two selections of the operating point.
pub const OUTCOMES_PER_OPERATING_POINT: usize = 20;
/// Maximum number of recent outcomes from which the accuracy of predictions is computed.
pub const CALIBRATION_OUTCOMES_MAX: usize = 2000;
/// Maximum size of a model file, in bytes.
pub const MODEL_BYTES_MAX: usize = 3 << 20;
/// Default number of concurrent calls of a replay.
pub const REPLAY_CLIENTS_DEFAULT: usize = 64;
/// Largest configurable number of concurrent calls of a replay.
pub const REPLAY_CLIENTS_MAX: usize = 1024;
/// Maximum number of concurrent test VMMs of a replay, each a process. Further VMs are replayed
/// without a test VMM.
pub const REPLAY_TEST_VMMS_MAX: usize = 1024;
/// Number of hosts that a replay tries before it counts a VM as rejected.
pub const REPLAY_ATTEMPTS_MAX: usize = 6;
/// Time that a replay waits for the slices of a VM before it tries another host.
pub const REPLAY_READY_TIMEOUT: Ns = Ns::secs(10);
/// Timeout for a test VMM to check its slices, and to exit.
pub const REPLAY_TEST_VMM_TIMEOUT: Ns = Ns::secs(30);
/// Default time that a replay waits for draining slices before it counts a VM as rejected.
pub const REPLAY_SETTLE_TIME_DEFAULT: Ns = Ns::secs(2);
/// Longest configurable time that a replay waits for draining slices.
pub const REPLAY_SETTLE_TIME_MAX: Ns = Ns::secs(60);
/// Time for which the manager may be unavailable before a replay fails.
pub const REPLAY_UNAVAILABLE_TIME_MAX: Ns = Ns::secs(60);
/// First delay between two attempts of a replay to reach an unavailable manager. The delay doubles
/// up to [`REPLAY_BACKOFF_MAX`].
pub const REPLAY_BACKOFF_MIN: Ns = Ns::ms(20);
/// Longest delay between two attempts of a replay to reach an unavailable manager.
pub const REPLAY_BACKOFF_MAX: Ns = Ns::secs(1);
/// Interval at which a replay checks which processes can access each slice.
pub const REPLAY_CHECK_INTERVAL: Ns = Ns::ms(200);
/// Number of consecutive comparisons with the ledger in which a reservation must be missing before
/// a replay counts it as lost.
pub const REPLAY_LOSS_COMPARISONS: usize = 3;
/// Maximum memory that a test VMM writes in each slice, in MiB. Equal to the size of a slice.
pub const TEST_VMM_TOUCHED_MIB_MAX: u64 = 1024;

/// Maximum number of decisions stored for Explain. The oldest decisions are dropped first.
pub const AUDIT_ENTRIES_MAX: u64 = 200_000;
/// Number of the oldest decisions that are dropped at a time, so that only one in this many durable
/// writes also deletes decisions.
pub const AUDIT_ENTRIES_PRUNED_PER_BATCH: u64 = 256;
/// Maximum number of decisions in an Explain response.
pub const EXPLAIN_ENTRIES_MAX: usize = 500;
/// Maximum number of request IDs of ended reservations stored per client. The oldest request IDs
/// are dropped first.
pub const ENDED_REQUESTS_PER_CLIENT_MAX: usize = 10_000;
/// Maximum number of request IDs of ended reservations stored for all clients, at about 2 KiB each.
/// A limit per client alone does not bound memory: without mTLS, a client can use many names.
pub const ENDED_REQUESTS_MAX: usize = 64 << 10;
/// A client is established if its oldest stored request ID is at least this old. New clients cannot
/// displace the request IDs of an established client.
pub const CLIENT_ESTABLISHMENT_TIME: Ns = Ns::secs(600);
/// Time for which a request ID is stored after its reservation has ended.
pub const REQUEST_ID_RETENTION: Ns = Ns::secs(24 * 3600);
/// Interval at which the manager deletes expired records of ended reservations.
pub const RESERVATION_PRUNE_INTERVAL: Ns = Ns::secs(1);
/// Upper bound on the number of reservations made between a backup and its restore.
pub const RESERVATIONS_SINCE_BACKUP_MAX: u64 = 1 << 32;
/// Largest valid epoch of a slice. No slice reaches it in operation, so a higher epoch indicates a
/// damaged record.
pub const OWNER_EPOCH_MAX: u64 = 1 << 62;
/// Upper bound on the number of epochs that a slice advances between a backup and its restore.
pub const EPOCHS_SINCE_BACKUP_MAX: u64 = 1 << 32;
/// Upper bound on the number of slices added between a backup and its restore.
pub const SLICES_ADDED_SINCE_BACKUP_MAX: u32 = SLICES_MAX;
/// Upper bound on the number of successive restores, each from a backup made after the previous
/// restore. Each restore increases the numbers of new slices by [`SLICES_ADDED_SINCE_BACKUP_MAX`].
pub const SUCCESSIVE_RESTORES_MAX: u32 = 64;
/// Upper bound on the number of hosts added between a backup and its restore.
pub const HOSTS_ADDED_SINCE_BACKUP_MAX: u32 = 1 << 16;
/// Default time within which a reservation must be committed.
pub const COMMIT_TIMEOUT_DEFAULT: Ns = Ns::secs(300);
/// Longest configurable time within which a reservation must be committed.
pub const COMMIT_TIMEOUT_MAX: Ns = Ns::secs(24 * 3600);
/// Delay before the manager repeats an accepted or completed request because of a slowdown, if the
/// request has not ended.
pub const SLOWDOWN_REQUEST_REPEAT_AFTER: Ns = Ns::secs(3600);
/// Delay before the manager repeats a declined migration request.
pub const MIGRATION_REQUEST_RETRY_AFTER: Ns = Ns::secs(600);
/// Number of attempts to move the pool memory of a VM to local memory after which the manager starts
/// no further attempt without a request.
pub const REHOME_ATTEMPTS_MAX: u32 = 3;
/// Delay after a failed attempt before the manager moves the pool memory of the VM again without a
/// request.
pub const REHOME_RETRY_AFTER: Ns = Ns::secs(600);
/// Delay after a failed attempt before a client can request the next one. Each attempt is stored in the
/// ledger and in the audit log.
pub const REHOME_CLIENT_RETRY_AFTER: Ns = Ns::secs(5);
/// Time after which an agent cancels a move to local memory.
pub const REHOME_DURATION_MAX: Ns = Ns::secs(3600);
/// Maximum number of VMs per owner whose pool memory the manager tries to move to local memory without
/// a request, per day.
pub const REHOMES_PER_OWNER_PER_DAY_MAX: usize = 4;
/// Maximum number of measured moves that a manager stores; the oldest are dropped. Training reads all of
/// them.
pub const MEASURED_MOVES_MAX: usize = 4096;
/// Maximum number of stored measured moves per program, so that no owner dominates the training data.
pub const MEASURED_MOVES_PER_PROGRAM_MAX: usize = 16;
/// Maximum number of measured losses that wait because the store cannot be written.
pub const UNRECORDED_LOSSES_MAX: usize = 256;
/// Maximum number of samples of a VM after the move of its pool memory to local memory. The manager needs
/// fewer to measure the effect of the move.
pub const SAMPLES_AFTER_MOVE_MAX: u32 = 64;
/// Interval at which an agent reads the status of a VMM that moves pool memory, and at which `tarn`
/// reads the state of a move.
pub const REHOME_POLL_INTERVAL: Ns = Ns::ms(500);
/// Maximum number of failed connections to a VMM before the first request of a move. The move then
/// counts as failed. Later calls are repeated while the VMM runs.
pub const REHOME_CALL_FAILURES_MAX: u32 = 120;

/// Number of heartbeats that an agent sends per lease duration if it sends no other messages.
pub const HEARTBEATS_PER_LEASE: u64 = 4;
/// Maximum number of slices that the manager examines per event when it compares an EMC with the
/// ledger or builds a complete desired state.
pub const LEDGER_CHUNK_SLICES_MAX: usize = 512;
/// Maximum number of report entries that the manager applies per event. Longer reports are applied
/// in parts, so that they do not delay other requests.
pub const REPORT_PART_ENTRIES_MAX: usize = 128;
/// Maximum number of results of one device that the manager processes together.
pub const DEVICE_RESULTS_PER_BATCH_MAX: usize = 64;
/// Shortest interval between two desired-state messages to a host while a caller waits.
pub const DESIRED_STATE_INTERVAL_MIN: Ns = Ns::ms(1);
/// Delay before the manager sends a desired-state message that no caller waits for, so that several
/// changes share a message.
pub const DESIRED_STATE_BATCH_DELAY: Ns = Ns::ms(10);
/// Delay before an agent reports finished host calls while other host calls are in flight.
pub const OBSERVED_STATE_BATCH_DELAY: Ns = Ns::ms(1);
/// Time after which the manager resends a desired state that the agent has not acknowledged.
pub const DESIRED_STATE_RESEND_AFTER: Ns = Ns::secs(2);
/// Shortest delay before an agent reconnects to the manager.
pub const RECONNECT_BACKOFF_MIN: Ns = Ns::ms(100);
/// Longest delay before an agent reconnects to the manager.
pub const RECONNECT_BACKOFF_MAX: Ns = Ns::secs(1);
/// Maximum number of managers of a rack: the leader and its standbys.
pub const MANAGERS_MAX: usize = 16;
/// Shortest interval between two log lines of an agent about failed sessions with the manager.
pub const SESSION_LOG_INTERVAL_MIN: Ns = Ns::secs(10);
/// Longest interval between two log lines of an agent about sessions that fail for the same reason.
pub const SESSION_LOG_INTERVAL_MAX: Ns = Ns::secs(600);
/// Time without messages after which an agent probes its connection to the manager. It is also the
/// timeout of the probe.
pub const SESSION_SILENCE_TIMEOUT: Ns = Ns::secs(5);
/// Delay between two attempts of a failed device call.
pub const DEVICE_RETRY_DELAY: Ns = Ns::secs(1);
/// Interval at which the manager checks that an idle device is still present.
pub const DEVICE_PROBE_INTERVAL: Ns = Ns::secs(2);
/// Delay before the first retry of a failed device call of a slice. The delay doubles with each
/// failure.
pub const SLICE_RETRY_DELAY_MIN: Ns = Ns::ms(200);
/// Longest delay before a retry of a failed device call of a slice.
pub const SLICE_RETRY_DELAY_MAX: Ns = Ns::secs(2);
/// Maximum number of separate alarms about quarantined slices. All further slices share one alarm.
pub const SLICE_ALARMS_MAX: usize = 256;
/// Maximum number of separate alarms about failed reservations. All further reservations share one
/// alarm.
pub const RESERVATION_ALARMS_MAX: usize = 256;
/// Maximum number of separate alarms about VMs that could not be adopted. All further VMs share one
/// alarm.
pub const UNADOPTED_VM_ALARMS_MAX: usize = 256;
/// Maximum number of separate alarms about a host that does not detect a configured device. All
/// further cases share one alarm.
pub const DEVICE_NOT_FOUND_ALARMS_MAX: usize = 256;
/// Number of consecutive failed device calls after which a slice is quarantined.
pub const SLICE_ATTEMPTS_MAX: u32 = 6;
/// Delay between two attempts to fence a silent host with the fence command.
pub const FENCE_RETRY_DELAY: Ns = Ns::secs(60);
/// Default timeout of the operator's fence command.
pub const FENCE_TIMEOUT_DEFAULT: Ns = Ns::secs(60);
/// Shortest configurable timeout of the fence command.
pub const FENCE_TIMEOUT_MIN: Ns = Ns::ms(100);
/// Longest configurable timeout of the fence command.
pub const FENCE_TIMEOUT_MAX: Ns = Ns::secs(3600);
/// Maximum number of arguments of the fence command, including the program.
pub const FENCE_ARGUMENTS_MAX: usize = 64;
/// Maximum output of the fence command that is stored, in bytes.
pub const FENCE_OUTPUT_BYTES_MAX: usize = 4 << 10;
/// Sampling interval, in pages, for determining the NUMA nodes of a VM's memory: one page in 64, or
/// 4,096 samples per slice.
pub const SAMPLING_INTERVAL_PAGES: usize = 64;
/// Maximum number of users that may use the socket of a host agent.
pub const ALLOWED_UIDS_MAX: usize = 4096;
/// Maximum number of sampled pages of one VM. Larger VMs are sampled at longer intervals than
/// [`SAMPLING_INTERVAL_PAGES`].
pub const SAMPLED_PAGES_PER_VM_MAX: usize = 1 << 20;
/// Maximum number of memory mappings of one VM whose pages are sampled. A mapping is usually 1 GiB.
pub const SAMPLED_MAPPINGS_PER_VM_MAX: usize = 16_384;
/// Timeout of the agent for a kernel operation on the device of a slice.
pub const SLICE_STEP_TIMEOUT: Ns = Ns::secs(20);
/// Maximum number of slices of a region with operations that hang in the kernel. Each of them
/// blocks a thread. At the limit, operations on other slices of the region are refused.
pub const HUNG_SLICES_PER_REGION_MAX: usize = 64;
/// Delay between two attempts of a failed host call.
pub const HOST_CALL_RETRY_DELAY: Ns = Ns::ms(500);
/// Number of failed attempts of a host call after which the agent notifies the manager. The agent
/// then continues to retry.
pub const HOST_FAILURES_BEFORE_REPORT: u32 = 3;
/// Time for which an agent continues to report an ended VM that is absent from its desired state. A
/// restarted manager may not have sent that VM yet.
pub const ENDED_VM_REPORT_DURATION: Ns = Ns::secs(3600);
/// Maximum number of reported ended VMs that are absent from the desired state. Above the limit,
/// the VM that left the desired state first is dropped.
pub const ENDED_VMS_REPORTED_MAX: usize = 4096;
/// Maximum number of concurrent scrubs of a host.
pub const SCRUBS_PER_HOST_MAX: usize = 64;
/// Default total bandwidth of all scrubs of a host, in MiB per second.
pub const SCRUB_MIB_PER_S_DEFAULT: u32 = 2048;
/// Number of bytes that a scrub processes between two checks of the rate limit and of its memory.
pub const SCRUB_STEP_BYTES: usize = 2 << 20;
/// Maximum burst of scrubs, as the idle time whose unused bandwidth may be used later (token
/// bucket).
pub const SCRUB_BURST_DURATION: Ns = Ns::ms(10);
/// Maximum number of pages of a VM that one system call queries or moves to another NUMA node.
pub const PAGES_PER_MOVE_CALL_MAX: usize = 4096;
/// Maximum number of certificate names that can be assigned to a role.
pub const ROLE_NAMES_MAX: usize = 256;
/// Shortest configurable lease duration.
pub const LEASE_TTL_MIN: Ns = Ns::ms(200);
/// Longest configurable lease duration.
pub const LEASE_TTL_MAX: Ns = Ns::secs(3600);
/// Longest configurable time without messages after which a host is fenced. The setting `never` is
/// also allowed.
pub const FENCE_AFTER_MAX: Ns = Ns::secs(30 * 24 * 3600);
/// Delay between two attempts to open a store.
pub const STORE_OPEN_RETRY_DELAY: Ns = Ns::secs(1);
/// Interval at which the manager saves rack time while it writes nothing else.
pub const RACK_TIME_SAVE_INTERVAL: Ns = Ns::secs(60);

/// Free space, in bytes, below which reservations are rejected. Releases still work.
pub const STORE_FREE_BYTES_MIN: u64 = 64 << 20;
/// Size of the store's page cache, in bytes.
pub const STORE_CACHE_BYTES: usize = 256 << 20;
/// Maximum number of corrupt entries that a check of the store describes. Further corrupt entries
/// are only counted.
pub const CORRUPT_ENTRIES_DESCRIBED_MAX: usize = 20;
/// Free space, in bytes, on the file system of an emulated device below which the device grants no
/// slices. Slices are sparse files and may overcommit the file system.
pub const DEVICE_FREE_BYTES_MIN: u64 = 64 << 20;

/// Maximum number of tenants of a market.
pub const TENANTS_MAX: usize = 1 << 20;
/// Maximum supply of a market, in pages or KB/s. An `f64` represents whole numbers up to this value
/// exactly, with four binary digits left for fractions.
pub const MARKET_SUPPLY_MAX: u64 = 1 << 48;
/// Maximum number of prices that one price search evaluates. The search takes at most three steps to
/// halve the bracket, and fewer than 40 halvings down to the smallest bracket.
pub const PRICE_ROUNDS_MAX: u32 = 128;
/// Maximum number of dividends evaluated at one price. Each larger dividend satiates more tenants.
pub const DIVIDEND_ROUNDS_MAX: u32 = 32;
/// Maximum number of tenants that a market evaluates as the recipient of the remaining supply.
pub const REMAINDER_RECIPIENTS_MAX: usize = 64;
/// Maximum number of pairs of tenants whose shares one joint search divides anew.
pub const SEARCHED_PAIRS_MAX: u32 = 8192;
/// Maximum number of times that a joint search tries all pairs of tenants.
pub const SEARCH_SWEEPS_MAX: u32 = 8;
/// Maximum number of tenants in a market that is refined by trades.
pub const REFINEMENT_TENANTS_MAX: usize = 64;
/// Maximum number of trades in one refinement.
pub const REFINEMENT_TRADES_MAX: u32 = 1000;
/// Maximum number of trades that are checked for envy in one step of a refinement.
pub const TRADE_CANDIDATES_MAX: usize = 64;
/// Maximum number of tenants in a market for which envy is computed. Envy is computed for every
/// pair of tenants.
pub const ENVY_CHECK_TENANTS_MAX: usize = 1024;
/// Maximum number of tenants for which an agent computes shares.
pub const TENANTS_PER_HOST_MAX: usize = 256;
/// Maximum bandwidth of a host's link to remote memory, in MB/s.
pub const LINK_BANDWIDTH_MB_S_MAX: u64 = 1_000_000_000;
// The supply of every host is within the limit of a market, in pages of 4 KiB and in KB/s.
const _: () = assert!(LOCAL_MEMORY_MIB_PER_HOST_MAX * 256 <= MARKET_SUPPLY_MAX);
const _: () = assert!(LINK_BANDWIDTH_MB_S_MAX * 1000 <= MARKET_SUPPLY_MAX);
/// Maximum number of processes, and of child cgroups, in the cgroup of a tenant.
pub const CGROUP_PROCESSES_MAX: usize = 65_536;
/// Maximum number of processes of a tenant that the agent inspects.
pub const TENANT_PROCESSES_MAX: usize = 64;
/// Maximum number of tenants of a host whose page accesses are monitored. The page accesses of
/// other tenants are unknown.
pub const MONITORED_TENANTS_MAX: usize = 32;
/// Maximum number of CPUs of a host on which page accesses are sampled in hardware.
pub const SAMPLED_CPUS_MAX: usize = 1024;
/// Size of the sample buffer of one CPU, in bytes.
pub const SAMPLE_BUFFER_BYTES_PER_CPU: usize = 256 << 10;
/// Maximum number of memory regions of a tenant whose access frequency is monitored separately.
pub const DAMON_REGIONS_MAX: usize = 1000;
const _: () = assert!(ACCESS_SAMPLE_PAGES as usize <= DAMON_REGIONS_MAX, "each sampled page is a region");
/// Smallest weight of a tenant as a fraction of the sum of all weights in a market. A
/// smaller budget cannot buy any supply.
pub const WEIGHT_FRACTION_MIN: f64 = 1e-9;
/// Smallest weight of a tenant. Cgroup weights range from 1 to 10000.
pub const WEIGHT_MIN: f64 = 0.01;
/// Largest weight of a tenant.
pub const WEIGHT_MAX: f64 = 10_000.0;
// The smallest weight must remain above the market's minimum if all other tenants of a host have
// the largest weight.
const _: () = assert!(WEIGHT_MIN / (TENANTS_PER_HOST_MAX as f64 * WEIGHT_MAX) > WEIGHT_FRACTION_MIN);

/// Returns whether `weight` is in the range from [`WEIGHT_MIN`] to [`WEIGHT_MAX`].
pub fn is_weight(weight: f64) -> bool {
    (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight)
}

/// Maximum length of a text in a report on shares, in bytes.
pub const SHARES_TEXT_BYTES_MAX: usize = 400;
/// Largest number in a report on shares, in any unit.
pub const SHARE_VALUE_MAX: f64 = 1e12;
// A report on shares is one message. Per tenant it contains a name, at most two texts and some
// numbers.
const _: () = assert!(
    TENANTS_PER_HOST_MAX * (NAME_BYTES_MAX + 2 * SHARES_TEXT_BYTES_MAX + 256) <= RPC_MESSAGE_BYTES_MAX / 2,
    "a report on shares must fit into a message"
);
/// Shortest configurable epoch, the time between two computations of shares.
pub const SHARES_EPOCH_MIN: Ns = Ns::secs(1);
/// Longest configurable epoch, the time between two computations of shares.
pub const SHARES_EPOCH_MAX: Ns = Ns::secs(3600);
/// Default epoch, the time between two computations of shares (Spirit, section 5).
pub const SHARES_EPOCH_DEFAULT: Ns = Ns::secs(30);
/// Shortest configurable interval between two decisions of fair tiering.
pub const TIERING_STEP_MIN: Ns = Ns::secs(1);
/// Longest configurable interval between two decisions of fair tiering.
pub const TIERING_STEP_MAX: Ns = Ns::secs(60);
/// Default interval between two decisions of fair tiering.
pub const TIERING_STEP_DEFAULT: Ns = Ns::secs(2);
/// Largest configurable rate limit of page moves between tiers, in MiB per second.
pub const PAGE_MOVES_MIB_PER_S_MAX: u64 = 1 << 20;
/// Default rate limit of page moves between tiers in each direction, in MiB per second.
pub const PAGE_MOVES_MIB_PER_S_DEFAULT: u64 = 1024;
/// Maximum number of bytes that one write to `memory.reclaim` requests. The agent does not stop before
/// the kernel has completed a request.
pub const RECLAIM_BYTES_PER_CALL_MAX: u64 = 64 << 20;
/// Shortest configurable cycle of early eviction, after which a threshold may change.
pub const EVICTION_CYCLE_MIN: Ns = Ns::ms(100);
/// Longest configurable cycle of early eviction.
pub const EVICTION_CYCLE_MAX: Ns = Ns::secs(10);
/// Default cycle of early eviction.
pub const EVICTION_CYCLE_DEFAULT: Ns = Ns::ms(500);
/// Shortest time between two reports of early eviction to the manager. Cycles may be shorter.
pub const EVICTION_REPORT_INTERVAL: Ns = TIERING_STEP_DEFAULT;
/// Largest number of a class of evictions; the smallest is 1.
pub const EVICTION_CLASS_MAX: u32 = 7;
/// Maximum number of processes whose access profiles fair tiering stores for Symbiosis.
pub const PROFILED_PROCESSES_MAX: usize = 128;
/// Maximum number of pages per second that fair tiering examines for promotion, for all tenants (1 GiB/s).
pub const PROMOTION_PAGES_EXAMINED_PER_S_MAX: usize = 1 << 18;
/// Maximum number of processes of all tenants that are monitored for promotion at the same time. The
/// processes of all tenants are monitored in turn.
pub const PROMOTION_PROCESSES_MAX: usize = 32;
/// Maximum number of sampled promoted pages per tenant whose demotion the agent detects. If there are more,
/// the agent samples half as many pages of the tenant.
pub const PROMOTED_PAGES_TRACKED_MAX: usize = 4096;
/// Longest time without further demotions of a tenant whose pages the kernel does not demote.
pub const DEMOTION_RETRY_DELAY_MAX: Ns = Ns::secs(64);
/// Maximum size of a text in a report of fair tiering or early eviction, in bytes.
pub const TIERING_TEXT_BYTES_MAX: usize = 1024;
// A report of early eviction is one message. Per tenant it contains a name, a text and some numbers.
const _: () = assert!(
    TENANTS_PER_HOST_MAX * (NAME_BYTES_MAX + TIERING_TEXT_BYTES_MAX + 256) <= RPC_MESSAGE_BYTES_MAX / 2,
    "a report of early eviction must fit into a message"
);
/// Maximum number of problems in a report of fair tiering.
pub const TIERING_PROBLEMS_MAX: usize = 8;
/// Maximum number of memory sizes for which the stall ratio of a tenant is recorded.
pub const STALL_POINTS_MAX: usize = 16;
/// Number of epochs after which a recorded stall ratio expires.
pub const STALL_POINT_EPOCHS_MAX: u32 = 40;
/// Maximum number of memory tiers of a host.
pub const TIERS_MAX: usize = 4;
/// Maximum number of tenants of a host whose memory tiers are shared fairly. More tenants are not
/// demoted or throttled.
pub const TIERING_TENANTS_MAX: usize = 16 << 10;
/// Maximum number of recently promoted pages that are recorded to detect thrashing.
pub const THRASH_TABLE_ENTRIES_MAX: usize = 1 << 20;
/// Longest time between the promotion and the demotion of a page that can count as thrashing.
pub const THRASH_RESIDENCE_MAX: Ns = Ns::secs(3600);
/// Largest unthrottled promotion rate of a tenant, in bytes per second.
pub const PROMOTION_BYTES_PER_S_MAX: u64 = 1 << 40;
/// Maximum size of a file with a scenario of memory tiers, in bytes.
pub const TIERING_SCENARIO_BYTES_MAX: usize = 1 << 20;
/// Maximum number of tenants in a simulation of memory tiers.
pub const TIERING_SIMULATED_TENANTS_MAX: usize = 64;
/// Maximum size of local memory, and maximum sum of the demands, in a simulation of memory tiers, in
/// GB.
pub const TIERING_SIMULATED_GB_MAX: f64 = 4096.0;
/// Maximum duration of a simulation of memory tiers, in seconds.
pub const TIERING_SIMULATED_SECONDS_MAX: f64 = 7200.0;
/// Maximum number of knots of a miss-ratio curve.
pub const CURVE_KNOTS_MAX: usize = 4096;
/// Maximum number of pages of a VM's pool node that one sample of accesses contains.
pub const QOS_PAGES_PER_SAMPLE_MAX: u32 = 4096;
/// Maximum number of VMs in a simulation of the QoS monitor.
pub const QOS_SIMULATED_VMS_MAX: u32 = 1_000_000;
/// Default interval between two samples of a VM.
pub const QOS_SAMPLE_INTERVAL_DEFAULT: Ns = Ns::secs(30);
/// Maximum number of VMMs that an agent calls at the same time.
pub const VMM_CALLS_IN_FLIGHT_MAX: usize = 16;
/// Maximum time for a connection to a VMM, and for the VMM's response.
pub const VMM_RESPONSE_TIMEOUT: Ns = Ns::secs(2);
/// Maximum size of a VMM's response to the agent, in bytes.
pub const VMM_RESPONSE_BYTES_MAX: usize = 64 << 10;
/// Time in which DAMON observes the accesses of one VM. DAMON observes one VM at a time.
pub const DAMON_WINDOW: Ns = Ns::secs(5);
/// Maximum number of vCPU threads of a VM whose processor counters are measured.
pub const VM_COUNTER_THREADS_MAX: usize = 256;
/// Maximum number of processor events that are counted per thread of a VM. Each event needs a file
/// descriptor.
pub const VM_COUNTER_EVENTS_PER_THREAD_MAX: usize = 24;
/// Maximum number of file descriptors of the processor counters of all VMs of a host.
pub const VM_COUNTER_DESCRIPTORS_MAX: usize = 32 << 10;
const _: () = assert!(
    VM_COUNTER_THREADS_MAX * VM_COUNTER_EVENTS_PER_THREAD_MAX <= VM_COUNTER_DESCRIPTORS_MAX,
    "the counters of the largest VM must fit"
);
/// Maximum number of threads of a VMM that the agent inspects to find the vCPU threads.
pub const VM_THREADS_INSPECTED_MAX: usize = 1024;
/// Shortest time between two samples of a VM. Samples that follow sooner are dropped.
pub const QOS_SAMPLE_INTERVAL_MIN: Ns = Ns::secs(1);
/// Maximum length of an agent's explanation why it cannot sample a VM, in bytes.
pub const QOS_PROBLEM_BYTES_MAX: usize = 256;
/// Maximum number of hosts that a migration request names as targets.
pub const MIGRATION_HOSTS_MAX: usize = 16;
/// Longest time between two samples of a VM. After a longer gap, earlier samples do not count.
pub const QOS_SAMPLE_GAP_MAX: Ns = Ns::secs(300);
/// Time without harm after which a harmed VM counts as fine again.
pub const QOS_RECOVERY_TIME: Ns = Ns::secs(3600);
/// Maximum number of migration requests per hour because of slowdowns.
pub const QOS_REQUESTS_PER_HOUR_MAX: u32 = 4096;
/// Time after which a migration request because of a slowdown expires if the slowdown was not
/// observed again.
pub const SLOWDOWN_REQUEST_TTL: Ns = QOS_RECOVERY_TIME;

const _: () = assert!(SLICES_MAX as usize >= SLICES_PER_EMC_MAX as usize, "an EMC must fit into a rack");
const _: () = assert!(SLICES_PER_VM_MAX <= SLICES_PER_EMC_MAX, "a VM must fit on an EMC");
// A slice in a record has the path of its file, of up to 4096 bytes.
const _: () = assert!(SLICES_PER_VM_MAX as usize * (4096 + 512) <= STATE_FILE_BYTES_MAX);
const _: () = assert!(
    ENDED_REQUESTS_PER_CLIENT_MAX * 4 <= ENDED_REQUESTS_MAX,
    "the request IDs of four clients at their limit must fit"
);
const _: () = assert!(
    CLIENT_ESTABLISHMENT_TIME.0 < REQUEST_ID_RETENTION.0,
    "CLIENT_ESTABLISHMENT_TIME must be shorter than REQUEST_ID_RETENTION"
);
const _: () = assert!(
    OUTCOMES_PER_REQUEST_MAX * (4 * VM_ATTRIBUTE_BYTES_MAX + 1000) <= RPC_MESSAGE_BYTES_MAX,
    "outcomes with all attributes must fit into a message"
);
const _: () = assert!(
    OUTCOMES_PER_REQUEST_MAX * (VM_ATTRIBUTE_BYTES_MAX + NAME_BYTES_MAX + 2 * COUNTER_NAMES.len() * 40 + 100)
        <= RPC_MESSAGE_BYTES_MAX,
    "measured moves with all counters must fit into a message"
);
const _: () = assert!(
    WORKLOAD_LABELS_MAX * (VM_ATTRIBUTE_BYTES_MAX + 512) <= RPC_MESSAGE_BYTES_MAX,
    "labels with a program and all counters must fit into a message"
);
const _: () = assert!(MODEL_BYTES_MAX < RPC_MESSAGE_BYTES_MAX, "a model must fit into a message");
const _: () = assert!(
    VCPUS_STOP_TIMEOUT.0 < CONTROL_RESPONSE_TIMEOUT.0,
    "a pause must complete before the response times out"
);
const _: () = assert!(
    GUEST_SHUTDOWN_TIMEOUT.0 + VCPUS_STOP_TIMEOUT.0 < GUEST_STOP_WAIT_DEFAULT.0,
    "a command must wait long enough for a forced stop after GUEST_SHUTDOWN_TIMEOUT"
);
// The desired state of a host is one message. A slice with its handle has at most 96 bytes, a VM
// with its name 128.
const _: () = assert!(
    SLICES_PER_HOST_MAX as usize * 96 + RESERVATIONS_PER_HOST_MAX * 128 <= RPC_MESSAGE_BYTES_MAX,
    "a desired state must fit into a message"
);
const _: () =
    assert!(LIST_PAGE_ENTRIES_MAX as usize * 384 <= RPC_MESSAGE_BYTES_MAX, "a page must fit into a message");
const _: () = assert!(
    SLICES_PER_VM_MAX as usize * 2 <= CHANGES_PER_BATCH_MAX,
    "a reservation must fit into a durable write"
);
