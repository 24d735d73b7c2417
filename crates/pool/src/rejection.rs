//! Rejections of requests. Each has a machine-readable reason and a message for operators.

use crate::audit::ExclusionReason;
use units::{Bytes, MigrationId, Name, RequestId, ReservationId, SliceId};

/// Reason why a request was rejected. A rejected request changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// rack.toml does not contain the host.
    #[error("host {0} is not in this rack")]
    NoSuchHost(Name),
    /// rack.toml does not contain the EMC.
    #[error("emc {0} is not in this rack")]
    NoSuchEmc(Name),
    /// The pool does not contain the slice.
    #[error("slice {0} is not in this pool")]
    NoSuchSlice(SliceId),
    /// No VM of this name has a reservation.
    #[error("vm {0} has no reservation")]
    NoSuchVm(Name),
    /// The reservation does not exist or was deleted.
    #[error("reservation {0} does not exist or was deleted")]
    NoSuchReservation(ReservationId),
    /// The VM has no migration request, or none with this ID.
    #[error("vm {vm} has no migration request{}", format_id(*.id))]
    NoSuchMigration {
        /// Name of the VM.
        vm: Name,
        /// Requested ID, if any.
        id: Option<MigrationId>,
    },
    /// The VM has several migration requests, and the answer names none.
    #[error("vm {vm} has the migration requests {} and {}: id must name one", .ids[0], .ids[1])]
    AmbiguousMigration {
        /// Name of the VM.
        vm: Name,
        /// IDs of the VM's requests.
        ids: [MigrationId; 2],
    },
    /// Too many migration requests because of slowdowns were made in the last hour.
    #[error(
        "{recent} migrations because of slowdowns were requested in the last hour, at most {max} are allowed"
    )]
    SlowdownBudgetExhausted {
        /// Number of requests in the last hour.
        recent: u32,
        /// Maximum number of requests per hour.
        max: u32,
    },
    /// The pool memory of the VM cannot be moved to local memory.
    #[error("pool memory of vm {vm} cannot be moved to local memory: {why}")]
    CannotRehome {
        /// Name of the VM.
        vm: Name,
        /// Reason.
        why: &'static str,
    },
    /// A field of the request violates its rule.
    #[error("{field}: {value} {rule}")]
    InvalidValue {
        /// Name of the field.
        field: &'static str,
        /// Rejected value.
        value: String,
        /// Rule that the value violates, in the form "must be ...".
        rule: &'static str,
    },
    /// A request ID was reused with other content.
    #[error("request_id {id} was used for {reservation} with other content: {differs} differs")]
    RequestReused {
        /// Reused request ID.
        id: RequestId,
        /// Reservation that the first request created.
        reservation: ReservationId,
        /// Name of the first field whose value differs.
        differs: &'static str,
    },
    /// The VM already has another reservation.
    #[error("vm {vm} already has reservation {reservation} on host {host}")]
    VmAlreadyReserved {
        /// Name of the VM.
        vm: Name,
        /// Existing reservation of the VM.
        reservation: ReservationId,
        /// Host of the existing reservation.
        host: Name,
    },
    /// The host accepts no reservations.
    #[error("host {host} is {why}")]
    HostNotSchedulable {
        /// Name of the host.
        host: Name,
        /// State of the host: "cordoned", "draining", "fenced", "unknown: its lease has expired",
        /// ...
        why: &'static str,
    },
    /// The host's agent has not connected since the manager started; the client can retry soon.
    #[error("host {0} has not reported since the manager started")]
    HostExpected(Name),
    /// The reachable EMCs have too few free slices.
    #[error("host {host} can reach {free} free slices, {requested} needed{}", format_excluded_emcs(.closed))]
    OutOfSlices {
        /// Name of the host.
        host: Name,
        /// Number of slices requested.
        requested: u32,
        /// Number of free slices on usable EMCs.
        free: u32,
        /// Attached EMCs that cannot be used, each with its number of free slices and the reason.
        closed: Vec<(Name, u32, ExclusionReason)>,
    },
    /// The host has too little free local memory.
    #[error("host {host} has {free} of local memory free, {requested} needed")]
    OutOfLocal {
        /// Name of the host.
        host: Name,
        /// Local memory requested.
        requested: Bytes,
        /// Local memory free.
        free: Bytes,
    },
    /// The host has too few free cores.
    #[error("host {host} has {free} cores free, {requested} needed")]
    OutOfCores {
        /// Name of the host.
        host: Name,
        /// Number of cores requested.
        requested: u32,
        /// Number of cores free.
        free: u32,
    },
    /// The store's disk is nearly full.
    #[error("the store's disk is nearly full: releases are accepted, new reservations are not")]
    StoreFull,
    /// The reservation's state does not permit the request.
    #[error("reservation {reservation} is {state}: cannot {what}")]
    WrongState {
        /// ID of the reservation.
        reservation: ReservationId,
        /// State of the reservation.
        state: String,
        /// Rejected action, which completes the sentence "cannot ...".
        what: &'static str,
    },
    /// The slice's state does not permit the request.
    #[error("slice {slice} is {state}: cannot {what}")]
    SliceWrongState {
        /// ID of the slice.
        slice: SliceId,
        /// State of the slice.
        state: &'static str,
        /// Rejected action, which completes the sentence "cannot ...".
        what: &'static str,
    },
    /// The slice cannot be requalified because a running VM may use it.
    #[error("slice {slice} remains quarantined: {why}")]
    SliceInDoubt {
        /// ID of the slice.
        slice: SliceId,
        /// Description of the VM that may use the slice, or of the host that has not reported.
        why: String,
    },
    /// The host or EMC is not in the restored backup. A device or another host may still use an ID
    /// that the ledger does not contain.
    #[error(
        "{what} is not in the restored ledger: it can be added when every host has reported, and host {unreported} has not reported"
    )]
    RestorePending {
        /// Object to add: "host h2" or "emc e2".
        what: String,
        /// Name of a host that has not reported since the restore.
        unreported: Name,
    },
    /// The host to be fenced has a connected agent.
    #[error("host {0} is connected: only a disconnected host can be fenced")]
    HostConnected(Name),
    /// The host or EMC to be removed is in use.
    #[error("{what} cannot be removed: {why}; drain it first")]
    NotDrained {
        /// Object to remove: "host h1" or "emc e1".
        what: String,
        /// Description of the remaining use of the object.
        why: String,
    },
    /// The field cannot change while the rack runs.
    #[error("{what} cannot change from {from} to {to} while the rack runs")]
    ImmutableField {
        /// Name of the object and the field.
        what: String,
        /// Current value of the field.
        from: String,
        /// Requested value of the field.
        to: String,
    },
    /// The request would exceed a limit.
    #[error("{what} would exceed the limit of {max}")]
    LimitExceeded {
        /// Name of the limited quantity.
        what: &'static str,
        /// Value of the limit.
        max: u64,
    },
    /// A durable write failed with an unknown outcome. The client can repeat the request with the
    /// same request_id to get the outcome.
    #[error("a write to the store failed with unknown outcome: repeat the request unchanged")]
    StoreFailed,
    /// The manager is starting and does not accept this request yet.
    #[error("the manager is starting: {0}")]
    Starting(&'static str),
    /// The slices did not come online within the time limit. The reservation is unchanged.
    #[error("reservation {reservation} has {online} of {slices} slices online at the end of the time limit")]
    NotReadyBeforeTimeout {
        /// ID of the reservation.
        reservation: ReservationId,
        /// Number of slices online.
        online: u32,
        /// Number of slices of the reservation.
        slices: u32,
    },
}

fn format_id(id: Option<MigrationId>) -> String {
    id.map_or_else(String::new, |id| format!(" {id}"))
}

/// Formats the EMCs that cannot be used, for example "; not counted: 4 on e1 (cordoned)".
fn format_excluded_emcs(closed: &[(Name, u32, ExclusionReason)]) -> String {
    let each = closed.iter().map(|(emc, free, why)| format!("{free} on {emc} ({why})"));
    let each = each.collect::<Vec<_>>().join(", ");
    if each.is_empty() { each } else { format!("; not counted: {each}") }
}

impl Rejection {
    /// Returns the machine-readable reason, in UPPER_SNAKE_CASE.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoSuchHost(_) => "HOST_NOT_FOUND",
            Self::NoSuchEmc(_) => "EMC_NOT_FOUND",
            Self::NoSuchSlice(_) => "SLICE_NOT_FOUND",
            Self::NoSuchVm(_) => "VM_NOT_FOUND",
            Self::NoSuchReservation(_) => "RESERVATION_NOT_FOUND",
            Self::NoSuchMigration { .. } => "MIGRATION_NOT_FOUND",
            Self::AmbiguousMigration { .. } => "MIGRATION_AMBIGUOUS",
            Self::SlowdownBudgetExhausted { .. } => "SLOWDOWN_BUDGET_EXHAUSTED",
            Self::CannotRehome { .. } => "REHOME_NOT_POSSIBLE",
            Self::InvalidValue { .. } => "BAD_VALUE",
            Self::RequestReused { .. } => "REQUEST_ID_REUSED",
            Self::VmAlreadyReserved { .. } => "VM_ALREADY_RESERVED",
            Self::HostNotSchedulable { .. } => "HOST_NOT_SCHEDULABLE",
            Self::HostExpected(_) => "HOST_EXPECTED",
            Self::OutOfSlices { .. } => "OUT_OF_SLICES",
            Self::OutOfLocal { .. } => "OUT_OF_LOCAL_MEMORY",
            Self::OutOfCores { .. } => "OUT_OF_CORES",
            Self::StoreFull => "STORE_LOW_SPACE",
            Self::WrongState { .. } => "RESERVATION_WRONG_STATE",
            Self::SliceWrongState { .. } => "SLICE_WRONG_STATE",
            Self::SliceInDoubt { .. } => "SLICE_IN_DOUBT",
            Self::RestorePending { .. } => "RESTORE_PENDING",
            Self::HostConnected(_) => "HOST_CONNECTED",
            Self::NotDrained { .. } => "NOT_DRAINED",
            Self::ImmutableField { .. } => "CHANGE_NOT_ALLOWED",
            Self::LimitExceeded { .. } => "LIMIT_EXCEEDED",
            Self::StoreFailed => "STORE_FAILED",
            Self::Starting(_) => "STARTING",
            Self::NotReadyBeforeTimeout { .. } => "NOT_READY_BEFORE_TIMEOUT",
        }
    }
}
