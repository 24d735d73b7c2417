//! Limits of all crates and services. Relations between limits are checked at compile time.

use crate::{Bytes, Ns};

/// Hosts in a rack.
pub const HOSTS_MAX: usize = 1024;
/// EMCs in a rack.
pub const EMCS_MAX: usize = 256;
/// EMCs that a host can be attached to.
pub const EMCS_PER_HOST_MAX: usize = 16;
/// Slices on an EMC: 16 TiB.
pub const SLICES_PER_EMC_MAX: u32 = 16 * 1024;
/// Slices in a rack at a time: 256 TiB.
pub const SLICES_MAX: u32 = 256 * 1024;
/// Slices that a rack may ever have, including removed ones, because their numbers are never
/// reused.
pub const SLICES_EVER_MAX: u32 = u32::MAX;
/// EMCs that a rack may ever have, including removed ones, because their numbers are never reused.
pub const EMCS_EVER_MAX: u32 = u32::MAX;
/// Hosts that a rack may ever have, including removed ones, because their numbers are never reused.
pub const HOSTS_EVER_MAX: u32 = u32::MAX;
/// Slices of a VM.
pub const SLICES_PER_VM_MAX: u32 = 4096;
/// Slices of a host. The desired state of a host lists all of them in one message.
pub const SLICES_PER_HOST_MAX: u32 = 32 * 1024;
/// Active reservations of a host, as many as it may have cores. The desired state of a host lists
/// all of them in one message.
pub const RESERVATIONS_PER_HOST_MAX: usize = CORES_PER_HOST_MAX as usize;
/// Changes of a host's desired state that are tracked individually since the last message. Above
/// this, the next message is complete.
pub const DELTA_CHANGES_PER_HOST_MAX: usize = 8192;
/// vCPUs of a guest.
pub const VCPUS_MAX: u32 = 64;
/// NUMA nodes with vCPUs of a guest. Every APIC ID then fits into a byte.
pub const LOCAL_NODES_PER_VM_MAX: usize = 4;
/// Disks and network cards of a guest. Each has an interrupt line.
pub const DEVICES_PER_VM_MAX: usize = 15;
/// Memory devices of a guest under QEMU: its number of memory slots.
pub const QEMU_MEMORY_DEVICES_MAX: u32 = 256;
/// Errors of a guest driver that a virtio device logs.
pub const DRIVER_ERRORS_LOGGED_PER_DEVICE_MAX: u32 = 8;
/// Segments of an ELF kernel. Linux has five.
pub const KERNEL_SEGMENTS_MAX: u16 = 64;
/// Timeout for a guest to shut down after a request.
pub const GUEST_SHUTDOWN_TIMEOUT: Ns = Ns::secs(30);
/// Timeout for the vCPUs of a stopped guest to leave KVM.
pub const VCPUS_STOP_TIMEOUT: Ns = Ns::secs(2);
/// Machine checks of a guest that its VMM logs. A guest can repeat them at will.
pub const MACHINE_CHECKS_LOGGED_MAX: u32 = 16;
/// Interval at which a VMM checks that all slices of its guest are present. Accesses to a lost
/// slice are detected in addition.
pub const LOST_SLICE_CHECK_INTERVAL: Ns = Ns::secs(1);
/// Concurrent connections to the control socket of a guest; further ones wait.
pub const CONTROL_CONNECTIONS_MAX: usize = 16;
/// Concurrent requests on such a connection; further ones wait.
pub const CONTROL_REQUESTS_IN_FLIGHT_MAX: usize = 4;
/// Size of a request to a control socket.
pub const CONTROL_REQUEST_BYTES_MAX: usize = 4 << 10;
/// Timeout for the response of a guest's control socket.
pub const CONTROL_RESPONSE_TIMEOUT: Ns = Ns::secs(10);
/// Default time that a command waits for a guest to stop.
pub const GUEST_STOP_WAIT_DEFAULT: Ns = Ns::secs(40);
/// Longest configurable wait for a guest to stop.
pub const GUEST_STOP_WAIT_MAX: Ns = Ns::secs(24 * 3600);
/// Interval at which an agent samples the touched memory of each guest.
pub const TOUCHED_MEMORY_SAMPLE_INTERVAL: Ns = Ns::secs(10);
/// Cores of a host.
pub const CORES_PER_HOST_MAX: u32 = 4096;
/// Local memory of a host, in MiB: 64 TiB.
pub const LOCAL_MIB_PER_HOST_MAX: u64 = 64 << 20;

/// Length of the name of a host, an EMC, a VM or a client.
pub const NAME_BYTES_MAX: usize = 63;
/// Length of a request id.
pub const REQUEST_ID_BYTES_MAX: usize = 128;
/// Length of a reason given by a person or a program.
pub const REASON_BYTES_MAX: usize = 512;

/// Size of a gRPC message, in either direction.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Size of a `HostMemory` datagram.
pub const DATAGRAM_BYTES_MAX: usize = 64 << 10;
/// Descriptors in a `HostMemory` datagram. Linux allows 253.
pub const DESCRIPTORS_PER_DATAGRAM_MAX: usize = 64;
/// Connections to an agent's host memory socket per user that may attach VMs.
pub const HOST_MEMORY_CONNECTIONS_PER_UID_MAX: usize = 1024;
/// Connections of all other users together.
pub const HOST_MEMORY_UNAUTHORIZED_CONNECTIONS_MAX: usize = 16;
/// Time that a connection may be idle before its first request.
pub const HOST_MEMORY_IDLE_MAX: Ns = Ns::secs(30);
/// Time that a connection of a user that may not attach VMs may be idle.
pub const HOST_MEMORY_UNAUTHORIZED_IDLE_MAX: Ns = Ns::secs(1);
/// Requests of VMMs queued for the task that owns the agent; further ones wait in the socket.
pub const HOST_MEMORY_REQUESTS_QUEUED_MAX: usize = 256;
/// Timeout for sending a response to a VMM.
pub const HOST_MEMORY_SEND_TIMEOUT: Ns = Ns::secs(10);
/// Memory on a node of slices that processes other than VMs may use before it is reported as an
/// error.
pub const FOREIGN_MEMORY_ON_POOL_NODE_MAX: Bytes = Bytes::mib(64);
/// Concurrent host calls. Each runs on a thread of its own.
pub const HOST_CALLS_IN_FLIGHT_MAX: usize = 8;
/// Host calls that may close or scrub slices at a time. The others are reserved for VMs that start.
pub const HOST_RECLAIM_CALLS_IN_FLIGHT_MAX: usize = 6;
/// Entries in a page of a list.
pub const LIST_PAGE_MAX: u32 = 8 * 1024;
/// Pages of a list that a client fetches before it reports an error of the manager.
pub const LIST_PAGES_MAX: u32 = 4096;

/// Reservations in a page of a list. A reservation may name thousands of slices.
pub const RESERVATIONS_PAGE_MAX: usize = 256;

/// Hosts that a list copies from the ledger per hold of its lock.
pub const HOSTS_PIECE_MAX: usize = 64;
/// Slices that a list copies from the ledger per hold of its lock.
pub const SLICES_PIECE_MAX: usize = 512;
/// Slices and reservations, in sum, that a list of reservations copies per hold of the lock.
pub const RESERVATIONS_PIECE_MAX: usize = 4096;
/// Reservations, ended ones included, that a list examines per hold of the lock.
pub const RESERVATIONS_SCANNED_MAX: usize = 1024;

/// Concurrent connections to the manager: one per agent, others for schedulers and operators.
pub const CONNECTIONS_MAX: usize = 4096;
/// Concurrent connections to the manager without an admitted request.
pub const UNADMITTED_CONNECTIONS_MAX: usize = 512;
/// Connections to the manager per source: a network address, or a local user other than root and
/// the manager's own.
pub const CONNECTIONS_PER_SOURCE_MAX: usize = 1024;
/// Connections per source without an admitted request.
pub const UNADMITTED_CONNECTIONS_PER_SOURCE_MAX: usize = 128;
const _: () = assert!(CONNECTIONS_PER_SOURCE_MAX < CONNECTIONS_MAX);
const _: () = assert!(UNADMITTED_CONNECTIONS_PER_SOURCE_MAX < UNADMITTED_CONNECTIONS_MAX);
/// Time that a connection without an admitted request may stay open. It also bounds the TLS
/// handshake.
pub const CONNECTION_ADMISSION_TIMEOUT: Ns = Ns::secs(10);
/// Time that a connection without an open call may stay open.
pub const CONNECTION_IDLE_MAX: Ns = Ns::secs(300);
/// Established connections that wait for the server.
pub const CONNECTIONS_ACCEPTED_QUEUED_MAX: usize = 64;
/// Concurrent calls on a connection.
pub const CALLS_PER_CONNECTION_MAX: u32 = 1024;

/// Requests to the ledger that wait for the disk. Further ones are rejected as UNAVAILABLE.
pub const REQUESTS_QUEUED_MAX: usize = 4096;
/// Shortest interval between checks of the free space on the store's disk.
pub const STORE_SPACE_CHECK_INTERVAL: Ns = Ns::ms(100);
/// Interval between checks of a nearly full disk while nothing is written.
pub const STORE_LOW_SPACE_CHECK_INTERVAL: Ns = Ns::secs(1);
/// Concurrent Explain calls, each of which scans all decisions. Further ones are rejected as
/// UNAVAILABLE.
pub const EXPLAIN_CALLS_IN_FLIGHT_MAX: usize = 8;
/// Calls waiting in WaitReady, or in Reserve with `wait_ready`.
pub const WAITERS_MAX: usize = 16 * 1024;
/// Longest time that a call may wait for slices to come online.
pub const WAIT_READY_MAX: Ns = Ns::secs(300);
/// Default time that a command waits for a response.
pub const RESPONSE_TIMEOUT_DEFAULT: Ns = Ns::secs(30);
/// Time by which a command outlasts the manager's own deadline.
pub const RESPONSE_TIMEOUT_SLACK: Ns = Ns::secs(1);
/// Interval at which the live view of a rack is redrawn.
pub const TOP_REFRESH_INTERVAL: Ns = Ns::secs(1);
/// Key presses and rack events queued for the live view.
pub const TOP_EVENTS_QUEUED_MAX: usize = 64;
/// Clock difference between machines above which their logs are considered misleading.
pub const CLOCK_SKEW_MAX: Ns = Ns::secs(5);
/// Changes in a durable write; requests beyond it wait for the next. Reports of hosts and devices
/// do not wait, and are bounded by their slices.
pub const BATCH_CHANGES_MAX: usize = 8192;
/// Time that a change without a waiting caller may wait to share a durable write.
pub const BATCH_LINGER: Ns = Ns::ms(10);
/// Chunks of durable writes queued for a watcher. Above this, the oldest are dropped and the
/// watcher is notified.
pub const WATCH_CHUNKS_QUEUED_MAX: usize = 4096;
/// Records in a chunk of a durable write.
pub const WATCH_CHUNK_RECORDS_MAX: usize = 64;
/// Open streams of Watch, WatchCapacity and WatchMigrations together.
pub const WATCHERS_MAX: usize = 256;
/// Interval between attempts of a watcher to reconnect to its manager.
pub const WATCH_RETRY_INTERVAL: Ns = Ns::ms(200);
/// Time by which a watch outlasts its `--timeout`, so that an unresponsive manager is reported as
/// such.
pub const WATCH_TIMEOUT_SLACK: Ns = Ns::ms(50);

/// Rows of a VM trace.
pub const TRACE_ROWS_MAX: usize = 4 << 20;
/// Largest time in a trace, in seconds from its start: a century.
pub const TRACE_SECONDS_MAX: u64 = 100 * 366 * 24 * 3600;
/// Recent outcomes of similar VMs that are kept individually. Older ones only count in totals and
/// extremes.
pub const OUTCOMES_PER_GROUP_MAX: usize = 64;
/// Splits of workloads into two halves in cross-validation.
pub const CROSS_VALIDATION_SPLITS_MAX: u32 = 10_000;
/// Most recent outcomes that a model is trained on. Training takes about half a millisecond per
/// outcome.
pub const TRAINING_OUTCOMES_MAX: usize = 64 << 10;
/// VM owners for whom a safety margin of forecasts is kept.
pub const OWNER_MARGINS_MAX: usize = 8 << 10;
/// Most recent outcomes that a manager keeps. Training reads all of them.
pub const OUTCOMES_RETAINED_MAX: usize = TRAINING_OUTCOMES_MAX;
/// Default retention time of outcomes.
pub const OUTCOME_RETENTION_DEFAULT: Ns = Ns::secs(366 * 24 * 3600);
/// Longest configurable retention time of outcomes.
pub const OUTCOME_RETENTION_MAX: Ns = Ns::secs(3660 * 24 * 3600);
/// Length of a VM attribute known before its start: customer, type or location.
pub const PROFILE_BYTES_MAX: usize = 256;
/// Outcomes added by one request.
pub const OUTCOMES_PER_REQUEST_MAX: usize = 2048;
/// Labelled workloads that a model is trained on.
pub const LABELS_MAX: usize = 4096;
/// Most recent models of a kind that a manager keeps, in addition to the serving model and those it
/// can roll back to.
pub const MODELS_RETAINED_MAX: usize = 16;
/// Models that can be restored by repeated rollback.
pub const ROLLBACK_MODELS_MAX: usize = 8;
/// Plans that wait for the reservation of their VM. The oldest are dropped first.
pub const PENDING_PLANS_MAX: usize = 64 << 10;
/// Most recent VMs started by plan. The fraction of them with known counters is computed from these.
pub const PLAN_STATISTICS_WINDOW: usize = 1000;
/// Outcomes between two selections of the operating point.
pub const OUTCOMES_PER_OPERATING_POINT: usize = 20;
/// Most recent outcomes from which the accuracy of forecasts is computed.
pub const CALIBRATION_OUTCOMES_MAX: usize = 2000;
/// Size of a model file.
pub const MODEL_BYTES_MAX: usize = 3 << 20;
/// Default number of concurrent calls of a replay.
pub const REPLAY_CLIENTS_DEFAULT: usize = 64;
/// Largest configurable number of concurrent calls of a replay.
pub const REPLAY_CLIENTS_MAX: usize = 1024;
/// Concurrent stand-in processes of a replay; further VMs have none.
pub const REPLAY_STAND_INS_MAX: usize = 1024;
/// Hosts that a replay tries for a VM before it counts as rejected.
pub const REPLAY_ATTEMPTS_MAX: usize = 6;
/// Timeout for the slices of a VM in a replay before another host is tried.
pub const REPLAY_READY_TIMEOUT: Ns = Ns::secs(10);
/// Timeout for a stand-in to check its slices, or to exit.
pub const REPLAY_STAND_IN_TIMEOUT: Ns = Ns::secs(30);
/// Default time that a replay waits for slices of the last owner before a VM counts as rejected.
pub const REPLAY_SETTLE_DEFAULT: Ns = Ns::secs(2);
/// Longest configurable time that a replay waits for such slices.
pub const REPLAY_SETTLE_MAX: Ns = Ns::secs(60);
/// Time that a manager may be unavailable before a replay gives up.
pub const REPLAY_UNAVAILABLE_MAX: Ns = Ns::secs(60);
/// First delay between attempts to reach an unavailable manager. It doubles up to
/// [`REPLAY_BACKOFF_MAX`].
pub const REPLAY_BACKOFF_FIRST: Ns = Ns::ms(20);
/// Longest delay between attempts to reach an unavailable manager.
pub const REPLAY_BACKOFF_MAX: Ns = Ns::secs(1);
/// Interval at which a replay checks which hosts can access each slice.
pub const REPLAY_CHECK_INTERVAL: Ns = Ns::ms(200);
/// Consecutive comparisons with the ledger that must agree before an acknowledged fact counts as
/// lost.
pub const REPLAY_COMPARISONS: usize = 3;
/// Memory of each slice that a stand-in writes, in MiB.
pub const STAND_IN_TOUCH_MIB_MAX: u64 = 1024;

/// Decisions kept for Explain. The oldest are dropped first.
pub const AUDIT_ENTRIES_MAX: u64 = 200_000;
/// Decisions dropped at once, so that only one durable write in this many carries the cost.
pub const AUDIT_ENTRIES_PRUNED_PER_BATCH: u64 = 256;
/// Decisions in a response of Explain.
pub const EXPLAIN_ENTRIES_MAX: usize = 500;
/// Request ids kept per client after their reservation has ended. The oldest are dropped first.
pub const ENDED_REQUESTS_PER_CLIENT_MAX: usize = 10_000;
/// Request ids kept for all clients after their reservation has ended. Without mTLS a client
/// chooses its name, so that only this limit bounds memory and the store: about 2 KiB each, with
/// few slices.
pub const ENDED_REQUESTS_MAX: usize = 64 << 10;
/// Age of a client's oldest such request from which requests under other names can no longer evict
/// its ids.
pub const CLIENT_ESTABLISHED_AFTER: Ns = Ns::secs(600);
/// Time that a request id is kept after its reservation has ended.
pub const REQUEST_ID_RETENTION: Ns = Ns::secs(24 * 3600);
/// Interval at which the manager prunes ended reservations.
pub const RESERVATION_PRUNE_INTERVAL: Ns = Ns::secs(1);
/// Reservations that may have been made after the backup from which a store is restored.
pub const RESERVATIONS_LOST_MAX: u64 = 1 << 32;
/// Largest epoch of a slice that is accepted: not reachable in operation, and far from the end of
/// the range.
pub const OWNER_EPOCH_MAX: u64 = 1 << 62;
/// Epochs by which a slice may have advanced since the backup from which a store is restored.
pub const EPOCHS_LOST_MAX: u64 = 1 << 32;
/// Slices that may have been added after the backup from which a store is restored.
pub const SLICES_LOST_MAX: u32 = SLICES_MAX;
/// Restores, each of the backup made after the previous one, that may follow a backup. Each of them
/// moves the numbers of new slices by [`SLICES_LOST_MAX`].
pub const RESTORES_LOST_MAX: u32 = 64;
/// Hosts that may have been added after the backup from which a store is restored.
pub const HOSTS_LOST_MAX: u32 = 1 << 16;
/// Default deadline to commit a reservation.
pub const COMMIT_WITHIN_DEFAULT: Ns = Ns::secs(300);
/// Longest configurable deadline to commit a reservation.
pub const COMMIT_WITHIN_MAX: Ns = Ns::secs(24 * 3600);
/// Delay before a declined migration is requested again.
pub const MIGRATION_REQUEST_RETRY_AFTER: Ns = Ns::secs(600);

/// Heartbeats per lease of an agent without other messages.
pub const HEARTBEATS_PER_LEASE: u64 = 4;
/// Slices that one event examines while an EMC is compared with the ledger or a complete desired state
/// is built.
pub const LEDGER_PIECE_MAX: usize = 512;
/// Entries of a report that the manager applies per event. Longer reports are applied in parts, so that
/// other requests do not wait for them.
pub const REPORT_PART_FACTS_MAX: usize = 128;
/// Results of a device that are processed together.
pub const DEVICE_RESULTS_PER_BATCH_MAX: usize = 64;
/// Shortest interval between desired states sent to a host while a caller waits for the next one.
pub const DESIRED_STATE_INTERVAL_MIN: Ns = Ns::ms(1);
/// Time that a desired state without a waiting caller is delayed, so that further changes share its
/// message.
pub const DESIRED_STATE_LINGER: Ns = Ns::ms(10);
/// Time that an agent delays reporting finished calls while others are in flight.
pub const OBSERVED_STATE_LINGER: Ns = Ns::ms(1);
/// Time after which the manager resends a desired state that was not acknowledged.
pub const DESIRED_STATE_RESEND_AFTER: Ns = Ns::secs(2);
/// Shortest delay before an agent reconnects.
pub const RECONNECT_BACKOFF_MIN: Ns = Ns::ms(100);
/// Longest delay before an agent reconnects.
pub const RECONNECT_BACKOFF_MAX: Ns = Ns::secs(1);
/// Time without messages after which an agent probes its connection, and timeout of the probe.
pub const SESSION_SILENCE_MAX: Ns = Ns::secs(5);
/// Delay between attempts of a failed device call.
pub const DEVICE_RETRY: Ns = Ns::secs(1);
/// Interval at which an idle device is checked to be still in place.
pub const DEVICE_PROBE_INTERVAL: Ns = Ns::secs(2);
/// First delay before a failed device call of a slice is repeated. It doubles with each failure.
pub const SLICE_RETRY_MIN: Ns = Ns::ms(200);
/// Longest such delay.
pub const SLICE_RETRY_MAX: Ns = Ns::secs(2);
/// Quarantined slices with an alarm of their own; further ones share one.
pub const SLICE_ALARMS_MAX: usize = 256;
/// Failed reservations with an alarm of their own; further ones share one.
pub const RESERVATION_ALARMS_MAX: usize = 256;
/// Running VMs that could not be adopted with an alarm of their own; further ones share one.
pub const UNADOPTED_ALARMS_MAX: usize = 256;
/// Pairs of host and invisible device with an alarm of their own; further ones share one.
pub const SIGHT_ALARMS_MAX: usize = 256;
/// Consecutive failures of a slice's device calls after which it is quarantined.
pub const SLICE_ATTEMPTS_MAX: u32 = 6;
/// Delay between attempts to fence a silent host by its fence command.
pub const FENCE_RETRY: Ns = Ns::secs(60);
/// Default timeout of the operator's fence command.
pub const FENCE_WITHIN_DEFAULT: Ns = Ns::secs(60);
/// Shortest configurable timeout of the fence command.
pub const FENCE_WITHIN_MIN: Ns = Ns::ms(100);
/// Longest configurable timeout of the fence command.
pub const FENCE_WITHIN_MAX: Ns = Ns::secs(3600);
/// Arguments of the fence command, including its name.
pub const FENCE_ARGUMENTS_MAX: usize = 64;
/// Output of the fence command that is kept.
pub const FENCE_OUTPUT_BYTES_MAX: usize = 4 << 10;
/// Pages of a VM of which one is sampled to determine its node: 4,096 samples per slice.
pub const PAGES_PER_SAMPLE: usize = 64;
/// Sampled pages of one VM. Above it, fewer than one page in [`PAGES_PER_SAMPLE`] are sampled.
pub const PLACEMENT_PAGES_MAX: usize = 1 << 20;
/// Mappings of one VM whose pages are sampled; a mapping is usually 1 GiB.
pub const PLACEMENT_MAPPINGS_MAX: usize = 16_384;
/// Time after which a step of a slice's device is abandoned.
pub const SLICE_STEP_TIMEOUT: Ns = Ns::secs(20);
/// Slices of a region that may hang in the kernel at a time, with a thread each. Above this, no
/// other slice of the region changes.
pub const SLICES_STUCK_MAX: usize = 64;
/// Delay between attempts of a failed host call.
pub const HOST_RETRY: Ns = Ns::ms(500);
/// Failed attempts of a host call after which the manager is notified. The agent continues to
/// retry.
pub const HOST_FAILURES_REPORTED_AFTER: u32 = 3;
/// Time that an agent reports an ended VM that its desired state does not contain. A manager that
/// has just started may not have sent it yet.
pub const ENDED_VM_REPORTED_FOR: Ns = Ns::secs(3600);
/// Ended VMs outside the desired state that an agent reports. Above this, the one that has been
/// outside longest is dropped.
pub const ENDED_VMS_REPORTED_MAX: usize = 4096;
/// Concurrent scrubs of a host.
pub const SCRUBS_PER_HOST_MAX: usize = 64;
/// Default bandwidth of all scrubs of a host, in MiB per second.
pub const SCRUB_MIB_PER_S_DEFAULT: u32 = 2048;
/// Bytes that a scrub processes between two checks of the throttle and of its memory.
pub const SCRUB_STEP_BYTES: usize = 2 << 20;
/// Time without activity that scrubs may catch up on in a burst.
pub const SCRUB_BURST: Ns = Ns::ms(10);
/// Pages of a VM that are queried or moved to another node by one system call.
pub const PAGES_PER_MOVE_CALL_MAX: usize = 4096;
/// Certificate names of a role.
pub const ROLE_NAMES_MAX: usize = 256;
/// Shortest configurable lease.
pub const LEASE_TTL_MIN: Ns = Ns::ms(200);
/// Longest configurable lease.
pub const LEASE_TTL_MAX: Ns = Ns::secs(3600);
/// Longest configurable silence before a host is fenced. The only larger setting is *never*.
pub const FENCE_AFTER_MAX: Ns = Ns::secs(30 * 24 * 3600);
/// Delay between attempts to open a store.
pub const STORE_RETRY: Ns = Ns::secs(1);
/// Interval at which rack time is saved if nothing else is written.
pub const RACK_TIME_SAVE_INTERVAL: Ns = Ns::secs(60);

/// Free space, in bytes, below which reservations are rejected while releases still work.
pub const STORE_FREE_BYTES_MIN: u64 = 64 << 20;
/// Page cache of the store, in bytes.
pub const STORE_CACHE_BYTES: usize = 256 << 20;
/// Corrupt entries of a store that a check describes; further ones are only counted.
pub const CHECK_FAULTS_MAX: usize = 20;
/// Free space, in bytes, on the file system of an emulated device below which no slice is granted.
/// Slices are sparse files, so that the file system is overcommitted.
pub const DEVICE_FREE_BYTES_MIN: u64 = 64 << 20;

/// Tenants of a market.
pub const TENANTS_MAX: usize = 1 << 20;
/// Supply of a market, in MiB or MB/s. Doubles represent whole numbers up to this exactly.
pub const SUPPLY_MAX: u64 = 1 << 50;
/// Prices that a search evaluates. Bisection from 1 to 1e-10 takes 35. A search that restarts with
/// all tenants may evaluate as many again.
pub const PRICE_ROUNDS_MAX: u32 = 60;
/// Dividends evaluated at one price. Each one satiates more tenants.
pub const DIVIDEND_ROUNDS_MAX: u32 = 32;
/// Tenants evaluated as the one that gets the remainder.
pub const MARGINAL_CANDIDATES_MAX: usize = 64;
/// Tenants evaluated as the one with fixed demand at either end, while the others share the rest in
/// a market.
pub const FIXED_CANDIDATES_MAX: usize = 3;
/// Tenants of a market up to which its outcome is refined.
pub const REFINEMENT_TENANTS_MAX: usize = 64;
/// Trades of a refinement.
pub const REFINEMENTS_MAX: u32 = 1000;
/// Trades checked for envy in one step of a refinement.
pub const TRADE_CANDIDATES_MAX: usize = 64;
/// Tenants up to which envy is computed for each pair.
pub const ENVY_CHECK_TENANTS_MAX: usize = 1024;
/// Tenants of a host whose shares an agent decides.
pub const TENANTS_PER_HOST_MAX: usize = 256;
/// Bandwidth of a host's link, in MB/s.
pub const LINK_MB_S_MAX: u64 = 1_000_000_000;
/// Processes of a tenant that are inspected.
pub const TENANT_PROCESSES_MAX: usize = 64;
/// Tenants of a host whose page accesses are monitored. Accesses of further tenants are unknown.
pub const MONITORED_TENANTS_MAX: usize = 32;
/// CPUs of a host on which page accesses are sampled in hardware.
pub const SAMPLED_CPUS_MAX: usize = 1024;
/// Buffer for samples of one CPU, in bytes.
pub const SAMPLE_BUFFER_BYTES_PER_CPU: usize = 256 << 10;
/// Regions of a tenant's memory whose access frequency is monitored separately.
pub const MONITOR_REGIONS_MAX: usize = 1000;
/// Smallest weight in a market, as a fraction of all weights. A smaller budget buys nothing.
pub const WEIGHT_FRACTION_MIN: f64 = 1e-9;
/// Smallest weight of a tenant. The range is a hundred times that of cgroup weights.
pub const WEIGHT_MIN: f64 = 0.01;
/// Largest weight of a tenant.
pub const WEIGHT_MAX: f64 = 10_000.0;
// No weight of a tenant may be negligible in the market of a host.
const _: () = assert!(WEIGHT_MIN / (TENANTS_PER_HOST_MAX as f64 * WEIGHT_MAX) > WEIGHT_FRACTION_MIN);

/// Returns whether `weight` is in the range from [`WEIGHT_MIN`] to [`WEIGHT_MAX`].
pub fn is_weight(weight: f64) -> bool {
    (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight)
}

/// Longest text in a report on shares, in bytes.
pub const SHARES_TEXT_BYTES_MAX: usize = 400;
/// Largest number in a report on shares, regardless of its unit.
pub const SHARES_NUMBER_MAX: f64 = 1e12;
// The report on a host's tenants is one message: a name, at most two texts and some numbers each.
const _: () = assert!(
    TENANTS_PER_HOST_MAX * (NAME_BYTES_MAX + 2 * SHARES_TEXT_BYTES_MAX + 256) <= MESSAGE_BYTES_MAX / 2,
    "a report on shares must fit into a message"
);
/// Shortest configurable epoch of shares.
pub const EPOCH_MIN: Ns = Ns::secs(1);
/// Longest configurable epoch of shares.
pub const EPOCH_MAX: Ns = Ns::secs(3600);
/// Default epoch of shares (Spirit, section 5).
pub const EPOCH_DEFAULT: Ns = Ns::secs(30);
/// Memory sizes at which the stall ratio of a tenant is recorded.
pub const STALL_POINTS_MAX: usize = 16;
/// Epochs after which such a record expires.
pub const STALL_POINT_EPOCHS_MAX: u32 = 40;
/// Knots of a miss-ratio curve.
pub const CURVE_KNOTS_MAX: usize = 4096;

const _: () = assert!(SLICES_MAX as usize >= SLICES_PER_EMC_MAX as usize, "an EMC must fit into a rack");
const _: () = assert!(SLICES_PER_VM_MAX <= SLICES_PER_EMC_MAX, "a VM must fit on an EMC");
const _: () =
    assert!(ENDED_REQUESTS_PER_CLIENT_MAX * 4 <= ENDED_REQUESTS_MAX, "several busy clients must fit");
const _: () = assert!(
    CLIENT_ESTABLISHED_AFTER.0 < REQUEST_ID_RETENTION.0,
    "a client must be able to become established"
);
const _: () = assert!(
    OUTCOMES_PER_REQUEST_MAX * (4 * PROFILE_BYTES_MAX + 1000) <= MESSAGE_BYTES_MAX,
    "outcomes with all attributes must fit into a message"
);
const _: () = assert!(MODEL_BYTES_MAX < MESSAGE_BYTES_MAX, "a model must fit into a message");
const _: () = assert!(
    VCPUS_STOP_TIMEOUT.0 < CONTROL_RESPONSE_TIMEOUT.0,
    "a pause must complete before the response times out"
);
const _: () = assert!(
    GUEST_SHUTDOWN_TIMEOUT.0 + VCPUS_STOP_TIMEOUT.0 < GUEST_STOP_WAIT_DEFAULT.0,
    "a command must outwait a guest that ignores the shutdown request"
);
// The desired state of a host is one message: 96 bytes per slice with its handle, 128 per VM with
// its name.
const _: () = assert!(
    SLICES_PER_HOST_MAX as usize * 96 + RESERVATIONS_PER_HOST_MAX * 128 <= MESSAGE_BYTES_MAX,
    "a desired state must fit into a message"
);
const _: () = assert!(LIST_PAGE_MAX as usize * 384 <= MESSAGE_BYTES_MAX, "a page must fit into a message");
const _: () = assert!(
    SLICES_PER_VM_MAX as usize * 2 <= BATCH_CHANGES_MAX,
    "a reservation must fit into a durable write"
);
