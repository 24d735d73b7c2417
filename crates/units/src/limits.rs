//! Every limit of Tarn, by name. Relations between them are checked by the compiler.

use crate::{Bytes, Ns};

/// Hosts in one rack.
pub const HOSTS_MAX: usize = 1024;
/// EMCs in one rack.
pub const EMCS_MAX: usize = 256;
/// EMCs one host may be wired to.
pub const EMCS_PER_HOST_MAX: usize = 16;
/// Slices on one EMC: 16 TiB.
pub const SLICES_PER_EMC_MAX: u32 = 16 * 1024;
/// Slices in one rack at a time: 256 TiB.
pub const SLICES_MAX: u32 = 256 * 1024;
/// Slices that a rack may be given in its life, removed ones included, as their numbers are never reused.
pub const SLICES_EVER_MAX: u32 = u32::MAX;
/// EMCs that a rack may be given in its life, removed ones included, as their numbers are never reused.
pub const EMCS_EVER_MAX: u32 = u32::MAX;
/// Hosts that a rack may be given in its life, removed ones included, as their numbers are never reused.
pub const HOSTS_EVER_MAX: u32 = u32::MAX;
/// Slices one VM may have.
pub const SLICES_PER_VM_MAX: u32 = 4096;
/// Slices one host may hold; an order to a host names them all in one message.
pub const SLICES_PER_HOST_MAX: u32 = 32 * 1024;
/// Active reservations of one host, as many as it may have cores; an order to a host names them all in one message.
pub const RESERVATIONS_PER_HOST_MAX: usize = CORES_PER_HOST_MAX as usize;
/// Changes since the last order to a host that are kept one by one; beyond it the next order is a complete one.
pub const NEWS_PER_HOST_MAX: usize = 8192;
/// Processors of one guest.
pub const VCPUS_MAX: u32 = 64;
/// Nodes with processors of one guest: then every processor's number fits into a byte.
pub const LOCAL_NODES_PER_VM_MAX: usize = 4;
/// Disks and network cards of one guest: each has an interrupt line.
pub const DEVICES_PER_VM_MAX: usize = 15;
/// Memory devices of one guest under QEMU: its slots for them.
pub const QEMU_MEMORY_DEVICES_MAX: u32 = 256;
/// How often a virtio device says on standard error that its driver broke it.
pub const COMPLAINTS_PER_DEVICE_MAX: u32 = 8;
/// Segments of a kernel that is an ELF; Linux has five.
pub const KERNEL_SEGMENTS_MAX: u16 = 64;
/// How long a guest that was asked to switch itself off may take.
pub const GUEST_STOPS_WITHIN: Ns = Ns::secs(30);
/// How long processors of a guest that is over may take to leave KVM.
pub const VCPUS_STOP_WITHIN: Ns = Ns::secs(2);
/// Machine checks of a guest that its VMM logs; a guest can repeat one as often as it likes.
pub const MACHINE_CHECKS_LOGGED_MAX: u32 = 16;
/// How often a VMM looks whether all slices of its guest are still there, beside seeing it where they are touched.
pub const LOST_SLICES_LOOKED_FOR_EVERY: Ns = Ns::secs(1);
/// Callers at the control socket of one guest at a time; more wait.
pub const CONTROL_CONNECTIONS_MAX: usize = 16;
/// Requests of one such caller under way at a time; more wait.
pub const CONTROL_REQUESTS_AT_ONCE_MAX: usize = 4;
/// What is asked at a control socket.
pub const CONTROL_REQUEST_BYTES_MAX: usize = 4 << 10;
/// How long a guest's control socket may take for an answer.
pub const CONTROL_ANSWER_WITHIN: Ns = Ns::secs(10);
/// How long a command waits, unless told otherwise, until a guest that it stops is gone.
pub const GUEST_GONE_WITHIN_DEFAULT: Ns = Ns::secs(40);
/// The longest that a command may be told to wait for that.
pub const GUEST_GONE_WITHIN_MAX: Ns = Ns::secs(24 * 3600);
/// How often an agent measures how much of its memory each guest has touched.
pub const TOUCHED_MEASURED_EVERY: Ns = Ns::secs(10);
/// Cores of one host.
pub const CORES_PER_HOST_MAX: u32 = 4096;
/// Local memory of one host, in MiB: 64 TiB.
pub const LOCAL_MIB_PER_HOST_MAX: u64 = 64 << 20;

/// Length of the name of a host, an EMC, a VM or a client.
pub const NAME_BYTES_MAX: usize = 63;
/// Length of a request id.
pub const REQUEST_ID_BYTES_MAX: usize = 128;
/// Length of a reason given by a person or a program.
pub const REASON_BYTES_MAX: usize = 512;

/// One gRPC message, in either direction.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// One datagram of `HostMemory`.
pub const DATAGRAM_BYTES_MAX: usize = 64 << 10;
/// Descriptors in one datagram of `HostMemory`; Linux takes 253.
pub const DESCRIPTORS_PER_DATAGRAM_MAX: usize = 64;
/// Connections of one user to an agent's host memory socket, where the user may attach VMs.
pub const HOST_MEMORY_CONNECTIONS_PER_UID_MAX: usize = 1024;
/// Connections of all other users together.
pub const HOST_MEMORY_OTHERS_MAX: usize = 16;
/// How long a connection may be silent before its first request.
pub const HOST_MEMORY_IDLE_MAX: Ns = Ns::secs(30);
/// How long a connection of a user who may not attach VMs may be silent.
pub const HOST_MEMORY_OTHERS_IDLE_MAX: Ns = Ns::secs(1);
/// Requests of VMMs waiting for the one task that owns the agent; more wait at the socket.
pub const HOST_MEMORY_REQUESTS_QUEUED_MAX: usize = 256;
/// How long a VMM may take to take its answer.
pub const HOST_MEMORY_ANSWER_WITHIN: Ns = Ns::secs(10);
/// What processes that are no VMs may have of a node of slices before it is told as wrong.
pub const STRANGERS_ON_POOL_NODE_MAX: Bytes = Bytes::mib(64);
/// Host calls under way at a time; each has a thread of its own.
pub const HOST_CALLS_AT_ONCE_MAX: usize = 8;
/// How many of them may close or scrub slices: the others are for VMs that start.
pub const HOST_EMPTYING_AT_ONCE_MAX: usize = 6;
/// Entries in one page of a list.
pub const LIST_PAGE_MAX: u32 = 8 * 1024;
/// Pages of one list that a client follows before it doubts the manager.
pub const LIST_PAGES_MAX: u32 = 4096;

/// Reservations in one page of a list: one may name thousands of slices.
pub const RESERVATIONS_PAGE_MAX: usize = 256;

/// Hosts that a list copies from the ledger at once, under its lock.
pub const HOSTS_PIECE_MAX: usize = 64;
/// Slices that a list copies from the ledger at once.
pub const SLICES_PIECE_MAX: usize = 512;
/// Slices and reservations together that a list of reservations copies from the ledger at once.
pub const RESERVATIONS_PIECE_MAX: usize = 4096;
/// Reservations, ended ones included, that a list looks through at once.
pub const RESERVATIONS_SCANNED_MAX: usize = 1024;

/// Connections to the manager at a time: one for each agent, others for schedulers and operators.
pub const CONNECTIONS_MAX: usize = 4096;
/// Connections to the manager of which no request has been admitted yet, at a time.
pub const UNADMITTED_CONNECTIONS_MAX: usize = 512;
/// Connections to the manager of one source: a network address, or a local user other than root and the manager's own.
pub const CONNECTIONS_PER_SOURCE_MAX: usize = 1024;
/// Connections of one source of which no request has been admitted yet.
pub const UNADMITTED_CONNECTIONS_PER_SOURCE_MAX: usize = 128;
const _: () = assert!(CONNECTIONS_PER_SOURCE_MAX < CONNECTIONS_MAX);
const _: () = assert!(UNADMITTED_CONNECTIONS_PER_SOURCE_MAX < UNADMITTED_CONNECTIONS_MAX);
/// How long such a connection may stay open; also the longest TLS handshake.
pub const CONNECTION_ADMITTED_WITHIN: Ns = Ns::secs(10);
/// How long a connection without an open call may stay open.
pub const CONNECTION_IDLE_MAX: Ns = Ns::secs(300);
/// Connections that are ready for requests and wait for the server.
pub const CONNECTIONS_ACCEPTED_QUEUED_MAX: usize = 64;
/// Calls on one connection at a time.
pub const CALLS_PER_CONNECTION_MAX: u32 = 1024;

/// Requests to the ledger that wait for the disk; the next is refused as UNAVAILABLE.
pub const REQUESTS_QUEUED_MAX: usize = 4096;
/// How often the free space of the store's disk is looked at, at most.
pub const STORE_SPACE_CHECKED_EVERY: Ns = Ns::ms(100);
/// Between two looks at the space of a store's disk that is nearly full and to which nothing is written.
pub const STORE_LOW_CHECKED_EVERY: Ns = Ns::secs(1);
/// Searches of the decisions at a time, each of which reads all there are; the next is refused as UNAVAILABLE.
pub const EXPLAINS_AT_ONCE_MAX: usize = 8;
/// Calls waiting in WaitReady or in Reserve with `wait_ready`.
pub const WAITERS_MAX: usize = 16 * 1024;
/// The longest a call may wait for slices to come online.
pub const WAIT_READY_MAX: Ns = Ns::secs(300);
/// How long a command waits for an answer unless told otherwise.
pub const ANSWER_WITHIN_DEFAULT: Ns = Ns::secs(30);
/// How much longer than the manager's own deadline a command waits for its word.
pub const ANSWER_SLACK: Ns = Ns::secs(1);
/// How often the live view of a rack is drawn anew.
pub const TOP_EVERY: Ns = Ns::secs(1);
/// Keys and news of the rack that the live view has not drawn yet.
pub const TOP_NEWS_AHEAD_MAX: usize = 64;
/// How far two machines' clocks may differ before people reading their logs are misled.
pub const CLOCK_SKEW_MAX: Ns = Ns::secs(5);
/// Changes in one durable write, after which requests wait for the next. What hosts and devices report does not wait, and
/// is bounded by their slices.
pub const BATCH_CHANGES_MAX: usize = 8192;
/// How long a change that nobody waits for may wait for company before it is written.
pub const BATCH_LINGER: Ns = Ns::ms(10);
/// Chunks of durable writes that wait for one watcher; beyond, the oldest are dropped and it is notified.
pub const WATCH_CHUNKS_QUEUED_MAX: usize = 4096;
/// Records in one chunk of a durable write.
pub const WATCH_CHUNK_RECORDS_MAX: usize = 64;
/// Open streams of Watch, WatchCapacity and WatchMigrations together.
pub const WATCHERS_MAX: usize = 256;
/// How often a watcher that lost its manager tries again.
pub const WATCH_AGAIN_EVERY: Ns = Ns::ms(200);
/// By how much a watch outlasts its --timeout, so that a manager that does not answer within it is reported as that.
pub const WATCH_OPEN_SLACK: Ns = Ns::ms(50);

/// Rows of one trace of VMs.
pub const TRACE_ROWS_MAX: usize = 4 << 20;
/// Moments of a trace, in seconds from its start: a century.
pub const TRACE_SECONDS_MAX: u64 = 100 * 366 * 24 * 3600;
/// Outcomes of VMs alike that are remembered one by one, the latest; of earlier ones only counts and extremes.
pub const OUTCOMES_PER_GROUP_MAX: usize = 64;
/// Times that programs are parted into two halves to see how well slowdowns are told.
pub const SPLITS_MAX: u32 = 10_000;
/// Outcomes that a model is trained on, the latest: at about half a millisecond each in all.
pub const OUTCOMES_TRAINED_MAX: usize = 64 << 10;
/// Owners of VMs of which it is remembered how far forecasts of theirs could be trusted.
pub const OWNERS_JUDGED_MAX: usize = 8 << 10;
/// Outcomes that a manager keeps, the latest; a training reads them all.
pub const OUTCOMES_KEPT_MAX: usize = OUTCOMES_TRAINED_MAX;
/// How long a manager keeps outcomes unless told otherwise.
pub const OUTCOMES_KEPT_DEFAULT: Ns = Ns::secs(366 * 24 * 3600);
/// The longest that a manager may be told to keep outcomes.
pub const OUTCOMES_KEPT_FOR_MAX: Ns = Ns::secs(3660 * 24 * 3600);
/// What is said of a VM before it starts: its customer, type or place.
pub const PROFILE_BYTES_MAX: usize = 256;
/// Outcomes that are added by one request.
pub const OUTCOMES_ADDED_MAX: usize = 2048;
/// Labelled workloads that one model learns from.
pub const LABELS_MAX: usize = 4096;
/// Models of one kind that a manager keeps, the latest; one that serves or may serve again is kept beyond them.
pub const MODELS_KEPT_MAX: usize = 16;
/// Models that may serve again, one after the other, by rolling back.
pub const MODELS_TO_ROLL_BACK_MAX: usize = 8;
/// Plans that wait for their VM's reservation; the oldest are forgotten first.
pub const PLANS_REMEMBERED_MAX: usize = 64 << 10;
/// The latest VMs that began by plan, by which it is told how much is known of VMs.
pub const PLANS_COUNTED_MAX: usize = 1000;
/// Outcomes between one choice of the operating point and the next.
pub const OUTCOMES_PER_OPERATING_POINT: usize = 20;
/// Outcomes by which it is judged how far forecasts can be trusted, the latest.
pub const OUTCOMES_JUDGED_MAX: usize = 2000;
/// A model as a file.
pub const MODEL_BYTES_MAX: usize = 3 << 20;
/// Calls that a replay keeps under way unless told otherwise.
pub const REPLAY_CLIENTS_DEFAULT: usize = 64;
/// Calls that a replay may be told to keep under way.
pub const REPLAY_CLIENTS_MAX: usize = 1024;
/// Stand-in processes of a replay at one time; further VMs have none.
pub const REPLAY_STAND_INS_MAX: usize = 1024;
/// Hosts that are asked to take one VM of a replay before it is turned away.
pub const REPLAY_ATTEMPTS_MAX: usize = 6;
/// How long a replay waits for a VM's slices before it tries another host.
pub const REPLAY_READY_WITHIN: Ns = Ns::secs(10);
/// How long a stand-in may take to look through its slices, or to end.
pub const REPLAY_STAND_IN_WITHIN: Ns = Ns::secs(30);
/// How long slices may take to come back from their last owner, unless told otherwise, before a VM is turned away.
pub const REPLAY_SETTLE_DEFAULT: Ns = Ns::secs(2);
/// How long a replay may be told to wait for them.
pub const REPLAY_SETTLE_MAX: Ns = Ns::secs(60);
/// How long a manager may be away before a replay gives up.
pub const REPLAY_UNAVAILABLE_FOR: Ns = Ns::secs(60);
/// Between the first two attempts to reach a manager that is away; doubled up to [`REPLAY_BACKOFF_MAX`].
pub const REPLAY_BACKOFF_FIRST: Ns = Ns::ms(20);
/// Between two attempts to reach a manager that is away.
pub const REPLAY_BACKOFF_MAX: Ns = Ns::secs(1);
/// How often a replay looks who can reach each slice.
pub const REPLAY_LOOK_EVERY: Ns = Ns::ms(200);
/// Comparisons with the ledger that must agree before an acknowledged fact counts as lost.
pub const REPLAY_COMPARISONS: usize = 3;
/// Memory of each slice that a stand-in writes, in MiB.
pub const STAND_IN_TOUCH_MIB_MAX: u64 = 1024;

/// Remembered decisions; the oldest are forgotten first.
pub const AUDIT_ENTRIES_MAX: u64 = 200_000;
/// How many are forgotten at once: one durable write in so many bears it, and not every one.
pub const AUDIT_ENTRIES_FORGOTTEN: u64 = 256;
/// Decisions in one answer of Explain.
pub const EXPLAIN_ENTRIES_MAX: usize = 500;
/// Remembered request ids of one client whose reservation has ended; the oldest are forgotten first.
pub const ENDED_REQUESTS_PER_CLIENT_MAX: usize = 10_000;
/// Remembered request ids of all clients whose reservation has ended. Without mTLS the client's name is the caller's choice,
/// so only this bounds memory and the store: about 2 KiB each, with few slices.
pub const ENDED_REQUESTS_MAX: usize = 64 << 10;
/// Age of a client's oldest remembered ended request after which floods under other names no longer displace its ids.
pub const CLIENT_ESTABLISHED_AFTER: Ns = Ns::secs(600);
/// How long a request id outlives its reservation.
pub const REQUEST_ID_KEPT: Ns = Ns::secs(24 * 3600);
/// How often the manager looks for ended reservations that it may forget.
pub const FORGET_EVERY: Ns = Ns::secs(1);
/// Reservations that may have been made since the backup that a store is restored from.
pub const RESERVATIONS_LOST_MAX: u64 = 1 << 32;
/// The highest epoch of a slice that is believed: far beyond any that can be reached, and far from the end of its range.
pub const OWNER_EPOCH_MAX: u64 = 1 << 62;
/// Epochs of one slice that may have passed since the backup that a store is restored from.
pub const EPOCHS_LOST_MAX: u64 = 1 << 32;
/// Slices that may have been added since the backup that a store is restored from.
pub const SLICES_LOST_MAX: u32 = SLICES_MAX;
/// Hosts that may have been added since the backup that a store is restored from.
pub const HOSTS_LOST_MAX: u32 = 1 << 16;
/// The default time in which a reservation must be committed.
pub const COMMIT_WITHIN_DEFAULT: Ns = Ns::secs(300);
/// The longest time in which a reservation may be committed.
pub const COMMIT_WITHIN_MAX: Ns = Ns::secs(24 * 3600);
/// How long after a scheduler declined to move a VM it is asked again.
pub const MIGRATION_ASKED_AGAIN_AFTER: Ns = Ns::secs(600);

/// Parts of a lease after which an agent speaks again if it had nothing to say.
pub const HEARTBEATS_PER_LEASE: u64 = 4;
/// Slices that one event passes through when an EMC is compared with the ledger or a complete order is made.
pub const LEDGER_PIECE_MAX: usize = 512;
/// Facts of a report that the manager applies at once: more come in parts, so that no other request waits for long.
pub const REPORT_PART_FACTS_MAX: usize = 128;
/// Answers of a device that are taken in together.
pub const DEVICE_ANSWERS_AT_ONCE_MAX: usize = 64;
/// The least time between two orders to one host while somebody waits for what the next one will bring.
pub const WANT_GAP: Ns = Ns::ms(1);
/// The least time between two orders to one host that nobody waits for: what changes meanwhile shares one.
pub const WANT_LINGER: Ns = Ns::ms(10);
/// How long an agent with calls under way waits for their end before it tells of those that are over.
pub const HAVE_LINGER: Ns = Ns::ms(1);
/// How long the manager waits for an answer before it repeats an order.
pub const HOST_UNANSWERED_ORDERS_FOR: Ns = Ns::secs(2);
/// The shortest pause before an agent connects again.
pub const RECONNECT_AFTER_MIN: Ns = Ns::ms(100);
/// The longest pause before an agent connects again.
pub const RECONNECT_AFTER_MAX: Ns = Ns::secs(1);
/// After so much silence of its connection an agent asks whether the manager is there, and as long waits for the answer.
pub const SESSION_SILENCE_MAX: Ns = Ns::secs(5);
/// Between two attempts of a device call that failed.
pub const DEVICE_RETRY: Ns = Ns::secs(1);
/// Between two checks that an idle device is still where it was opened.
pub const DEVICE_PROBE_EVERY: Ns = Ns::secs(2);
/// The first pause before a device call that failed for one slice is made again; it doubles with every failure.
pub const SLICE_RETRY_MIN: Ns = Ns::ms(200);
/// The longest such pause.
pub const SLICE_RETRY_MAX: Ns = Ns::secs(2);
/// Quarantined slices with an alarm of their own; the others share one.
pub const SLICE_ALARMS_MAX: usize = 256;
/// Broken reservations with an alarm of their own; the others share one.
pub const RESERVATION_ALARMS_MAX: usize = 256;
/// Running VMs that could not be adopted with an alarm of their own; the others share one.
pub const UNADOPTED_ALARMS_MAX: usize = 256;
/// Hosts and devices that they cannot use with an alarm of their own; the others share one.
pub const SIGHT_ALARMS_MAX: usize = 256;
/// Device calls of one slice that may fail in a row; the last one quarantines it.
pub const SLICE_ATTEMPTS_MAX: u32 = 6;
/// Between two attempts to have a machine stopped whose agent is silent and that no device cuts off.
pub const FENCE_RETRY: Ns = Ns::secs(60);
/// How long the operator's command to stop a machine may take unless told otherwise.
pub const FENCE_WITHIN_DEFAULT: Ns = Ns::secs(60);
/// The shortest that an operator may allow that command.
pub const FENCE_WITHIN_MIN: Ns = Ns::ms(100);
/// The longest that an operator may allow that command.
pub const FENCE_WITHIN_MAX: Ns = Ns::secs(3600);
/// Words of that command.
pub const FENCE_WORDS_MAX: usize = 64;
/// What is kept of what that command says.
pub const FENCE_OUTPUT_BYTES_MAX: usize = 4 << 10;
/// Of so many pages of a VM one is looked at to see on which node they are: 4,096 of a slice.
pub const PAGES_PER_SAMPLE: usize = 64;
/// How long a slice's device may take to change before its step is left behind.
pub const SLICE_STEP_WITHIN: Ns = Ns::secs(20);
/// Slices of one region that may be stuck in the kernel at a time, with a thread each; no other changes then.
pub const SLICES_STUCK_MAX: usize = 64;
/// Between two attempts of a host call that failed.
pub const HOST_RETRY: Ns = Ns::ms(500);
/// Failed attempts of a host call after which the manager is told; the agent goes on trying.
pub const HOST_ATTEMPTS_TOLD_AFTER: u32 = 3;
/// How long an agent tells of an ended VM that its orders do not name: a manager that has just started may not yet.
pub const ENDED_VM_TOLD_FOR: Ns = Ns::secs(3600);
/// Ended VMs without an order that an agent reports; beyond, the one that was in no order longest is forgotten.
pub const ENDED_VMS_REPORTED_MAX: usize = 4096;
/// Slices one host scrubs at the same time.
pub const SCRUBS_PER_HOST_MAX: usize = 64;
/// What all scrubs of a host take together per second, in MiB, unless its operator says otherwise.
pub const SCRUB_MIB_PER_S_DEFAULT: u32 = 2048;
/// What a scrub does between two looks at its memory and at the throttle, in bytes.
pub const SCRUB_STEP_BYTES: usize = 2 << 20;
/// What scrubs that did nothing for a while may make up for at once.
pub const SCRUB_SAVED_UP: Ns = Ns::ms(10);
/// Pages of a VM that are asked for, or moved to another node, by one call.
pub const PAGES_MOVED_AT_ONCE_MAX: usize = 4096;
/// Names of certificates in one role.
pub const ROLE_NAMES_MAX: usize = 256;
/// The shortest lease an operator may configure.
pub const LEASE_TTL_MIN: Ns = Ns::ms(200);
/// The longest lease an operator may configure.
pub const LEASE_TTL_MAX: Ns = Ns::secs(3600);
/// The longest silence after which an operator may have a host fenced; beyond it there is *never*.
pub const FENCE_AFTER_MAX: Ns = Ns::secs(30 * 24 * 3600);
/// Between two attempts to open a store that failed.
pub const STORE_RETRY: Ns = Ns::secs(1);
/// How often rack time is written down when nothing else is.
pub const RACK_TIME_SAVED_EVERY: Ns = Ns::secs(60);

/// Free space below which new grants are refused while releases still work, in bytes.
pub const STORE_FREE_BYTES_MIN: u64 = 64 << 20;
/// Memory the store may use to remember pages of its file, in bytes.
pub const STORE_CACHE_BYTES: usize = 256 << 20;
/// Wrong entries of a store that a check describes; the rest is counted.
pub const CHECK_FAULTS_MAX: usize = 20;
/// Free space of an emulated device's file system below which it grants nothing, in bytes: its slices are sparse, so the
/// file system promises more than it has.
pub const DEVICE_FREE_BYTES_MIN: u64 = 64 << 20;

/// Tenants of one market.
pub const TENANTS_MAX: usize = 1 << 20;
/// MiB, or MB/s, that one market shares: whole numbers up to here are told apart by what reckons with them.
pub const SUPPLY_MAX: u64 = 1 << 50;
/// Prices that are tried until a market's bracket of them is narrow enough; halving from 1 to 1e-10 takes 35. As many once more, if somebody who was left
/// out asks for something else in the end.
pub const PRICES_TRIED_MAX: u32 = 60;
/// Dividends that are tried at one price: each makes more tenants content.
pub const DIVIDENDS_TRIED_MAX: u32 = 32;
/// Tenants that are tried as the one that gets what remains.
pub const MARGINALS_TRIED_MAX: usize = 64;
/// Tenants that are tried as the one that gets what it asks for, on either side, while the others have a market for the rest.
pub const FIXED_TRIED_MAX: usize = 3;
/// Tenants up to which shares are refined beyond the market.
pub const REFINED_TENANTS_MAX: usize = 64;
/// Deals by which shares are refined.
pub const REFINEMENTS_MAX: u32 = 1000;
/// Deals that are tried for one that nobody envies.
pub const REFINEMENTS_TRIED_MAX: usize = 64;
/// Tenants up to which each is compared with each.
pub const ENVIERS_COMPARED_MAX: usize = 1024;
/// Tenants of one host whose shares an agent decides.
pub const TENANTS_PER_HOST_MAX: usize = 256;
/// The fastest link that tenants of a host may share, in MB/s.
pub const LINK_MB_S_MAX: u64 = 1_000_000_000;
/// Processes of a tenant that are looked at.
pub const TENANT_PROCESSES_MAX: usize = 64;
/// Tenants of a host whose pages are looked at; of others nobody knows which they touch.
pub const TENANTS_WATCHED_MAX: usize = 32;
/// Processors of a host that sample which pages tenants touch, where they can.
pub const PROCESSORS_SAMPLED_MAX: usize = 1024;
/// Room for samples of one of them.
pub const SAMPLES_BYTES_PER_PROCESSOR: usize = 256 << 10;
/// Regions of a tenant's memory that are told apart by which is touched how often.
pub const WATCHED_REGIONS_MAX: usize = 1000;
/// What a weight is of all weights of a market, at least: a budget of less buys nothing.
pub const WEIGHT_PART_MIN: f64 = 1e-9;
/// The least and the most that a tenant may have relative to others: its weight. As far apart as cgroups' own weights are, and a hundred times.
pub const WEIGHT_MIN: f64 = 0.01;
/// See [`WEIGHT_MIN`].
pub const WEIGHT_MAX: f64 = 10_000.0;
// Whatever the weights of a host's tenants: none is as nothing beside the others.
const _: () = assert!(WEIGHT_MIN / (TENANTS_PER_HOST_MAX as f64 * WEIGHT_MAX) > WEIGHT_PART_MIN);

/// Whether it may be a tenant's weight: a number from [`WEIGHT_MIN`] to [`WEIGHT_MAX`].
pub fn is_weight(weight: f64) -> bool {
    (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight)
}

/// The longest text in what an agent tells of shares, in bytes.
pub const SHARES_TEXT_BYTES_MAX: usize = 400;
/// The largest number in it, whatever it counts.
pub const SHARES_NUMBER_MAX: f64 = 1e12;
// All that is told of one host's tenants is one message: a name, at most two texts and some numbers of each.
const _: () = assert!(
    TENANTS_PER_HOST_MAX * (NAME_BYTES_MAX + 2 * SHARES_TEXT_BYTES_MAX + 256) <= MESSAGE_BYTES_MAX / 2,
    "shares are too large for a message"
);
/// The shortest epoch an operator may configure.
pub const EPOCH_MIN: Ns = Ns::secs(1);
/// The longest epoch an operator may configure.
pub const EPOCH_MAX: Ns = Ns::secs(3600);
/// After how long shares are decided anew, unless the operator says otherwise (Spirit 5).
pub const EPOCH_DEFAULT: Ns = Ns::secs(30);
/// Sizes of memory at which it is kept how long a tenant waited.
pub const WAITS_MEASURED_MAX: usize = 16;
/// Epochs after which what was measured once is forgotten.
pub const WAITS_EPOCHS_MAX: u32 = 40;
/// Knots of a miss-ratio curve.
pub const CURVE_KNOTS_MAX: usize = 4096;

const _: () = assert!(SLICES_MAX as usize >= SLICES_PER_EMC_MAX as usize, "one EMC must fit into a rack");
const _: () = assert!(SLICES_PER_VM_MAX <= SLICES_PER_EMC_MAX, "a VM fits on one EMC");
const _: () = assert!(
    ENDED_REQUESTS_PER_CLIENT_MAX * 4 <= ENDED_REQUESTS_MAX,
    "a few busy clients have room beside each other"
);
const _: () = assert!(CLIENT_ESTABLISHED_AFTER.0 < REQUEST_ID_KEPT.0, "a client can become established");
const _: () = assert!(
    OUTCOMES_ADDED_MAX * (4 * PROFILE_BYTES_MAX + 1000) <= MESSAGE_BYTES_MAX,
    "outcomes with all that may be known of them fit into a message"
);
const _: () = assert!(MODEL_BYTES_MAX < MESSAGE_BYTES_MAX, "a model fits into a message");
const _: () = assert!(VCPUS_STOP_WITHIN.0 < CONTROL_ANSWER_WITHIN.0, "a pause is answered in time");
const _: () = assert!(
    GUEST_STOPS_WITHIN.0 + VCPUS_STOP_WITHIN.0 < GUEST_GONE_WITHIN_DEFAULT.0,
    "who stops a guest sees that it is gone, also when it does not listen"
);
// An order to a host is one message: 96 bytes a slice with its handle, 128 a VM with its name.
const _: () = assert!(
    SLICES_PER_HOST_MAX as usize * 96 + RESERVATIONS_PER_HOST_MAX * 128 <= MESSAGE_BYTES_MAX,
    "an order would not fit into a message"
);
const _: () =
    assert!(LIST_PAGE_MAX as usize * 384 <= MESSAGE_BYTES_MAX, "a page would not fit into a message");
const _: () =
    assert!(SLICES_PER_VM_MAX as usize * 2 <= BATCH_CHANGES_MAX, "a reservation fits into one durable write");
