//! Rejections, each with a reason for programs and a message for people.

use crate::audit::ExclusionReason;
use units::{Bytes, Name, RequestId, ReservationId, SliceId};

/// Reason why a request was rejected. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// rack.toml does not contain the host.
    #[error("host {0} is not in this rack")]
    NoSuchHost(Name),
    /// rack.toml does not contain the EMC.
    #[error("emc {0} is not in this rack")]
    NoSuchEmc(Name),
    /// The slice does not exist.
    #[error("slice {0} is not in this pool")]
    NoSuchSlice(SliceId),
    /// No VM of this name has memory here.
    #[error("vm {0} has no reservation")]
    NoSuchVm(Name),
    /// The reservation does not exist, or was deleted.
    #[error("reservation {0} is not known")]
    NoSuchReservation(ReservationId),
    /// The VM has no open migration request.
    #[error("vm {0} has no migration request")]
    NoSuchMigration(Name),
    /// A value violates its rule.
    #[error("{field}: {value} {rule}")]
    InvalidValue {
        /// Field of the request.
        field: &'static str,
        /// Value.
        value: String,
        /// Rule, as "must be ...".
        rule: &'static str,
    },
    /// A request id was reused with other contents.
    #[error("request_id {id} was used for {reservation} with other content: {differs} differs")]
    RequestReused {
        /// Request id.
        id: RequestId,
        /// Reservation of the first request.
        reservation: ReservationId,
        /// First field that differs.
        differs: &'static str,
    },
    /// The VM has another reservation.
    #[error("vm {vm} has reservation {reservation} on host {host} already")]
    VmAlreadyReserved {
        /// VM.
        vm: Name,
        /// Its reservation.
        reservation: ReservationId,
        /// Its host.
        host: Name,
    },
    /// The host accepts no reservations.
    #[error("host {host} is {why}")]
    HostNotSchedulable {
        /// Host.
        host: Name,
        /// State: "cordoned", "draining", "fenced", "unknown: its lease has expired", ...
        why: &'static str,
    },
    /// The host's agent has not connected since the manager started; retry soon.
    #[error("host {0} has not reported since the manager started")]
    HostExpected(Name),
    /// Too few free slices on reachable EMCs.
    #[error("host {host} can reach {free} free slices, {requested} needed{}", not_counted(.closed))]
    OutOfSlices {
        /// Host.
        host: Name,
        /// Slices requested.
        requested: u32,
        /// Slices free.
        free: u32,
        /// Attached EMCs that cannot be used: free slices and reason.
        closed: Vec<(Name, u32, ExclusionReason)>,
    },
    /// Too little local memory.
    #[error("host {host} has {free} of local memory free, {requested} needed")]
    OutOfLocal {
        /// Host.
        host: Name,
        /// Memory requested.
        requested: Bytes,
        /// Memory free.
        free: Bytes,
    },
    /// Too few cores.
    #[error("host {host} has {free} cores free, {requested} needed")]
    OutOfCores {
        /// Host.
        host: Name,
        /// Cores requested.
        requested: u32,
        /// Cores free.
        free: u32,
    },
    /// The store's disk is nearly full.
    #[error("the store's disk is nearly full: releases work, new reservations do not")]
    StoreFull,
    /// The reservation's state does not permit the request.
    #[error("reservation {reservation} is {state}, which does not accept {what}")]
    WrongState {
        /// Reservation.
        reservation: ReservationId,
        /// State.
        state: String,
        /// Request.
        what: &'static str,
    },
    /// The slice's state does not permit the request.
    #[error("slice {slice} is {state}, which does not accept {what}")]
    SliceWrongState {
        /// Slice.
        slice: SliceId,
        /// State.
        state: &'static str,
        /// Request.
        what: &'static str,
    },
    /// A running VM may use the slice.
    #[error("slice {slice} stays quarantined: {why}")]
    SliceInDoubt {
        /// Slice.
        slice: SliceId,
        /// The VM, or the host that has not reported.
        why: String,
    },
    /// The object is not in the restored backup and may be in use under numbers that the ledger
    /// does not contain.
    #[error(
        "{what} is not in the restored ledger: it can be added when every host has reported, and {unreported} has not"
    )]
    RestorePending {
        /// "host h2" or "emc e2".
        what: String,
        /// A host that has not reported.
        unreported: Name,
    },
    /// The host to be fenced is connected.
    #[error("host {0} is connected: only a silent host is fenced")]
    HostConnected(Name),
    /// The object to be removed is in use.
    #[error("{what} cannot be removed: {why}; drain it first")]
    NotDrained {
        /// "host h1" or "emc e1".
        what: String,
        /// Remaining users.
        why: String,
    },
    /// A running rack cannot make this change.
    #[error("{what} cannot change from {from} to {to} while the rack runs")]
    ImmutableField {
        /// Object and field.
        what: String,
        /// Current value.
        from: String,
        /// Requested value.
        to: String,
    },
    /// A limit is exceeded.
    #[error("{what} would exceed the limit of {max}")]
    LimitExceeded {
        /// Quantity.
        what: &'static str,
        /// Limit.
        max: u64,
    },
    /// A durable write failed, and its outcome is unknown. Repeating the request with the same
    /// request_id determines it.
    #[error("the store failed and is being read again: repeat the request")]
    StoreFailed,
    /// The manager is starting.
    #[error("the manager is starting: {0}")]
    Starting(&'static str),
    /// The time limit expired; waiting changed nothing.
    #[error("reservation {reservation} has {online} of {slices} slices online after the time allowed")]
    NotReadyBeforeTimeout {
        /// Reservation.
        reservation: ReservationId,
        /// Slices online.
        online: u32,
        /// Slices expected.
        slices: u32,
    },
}

/// Formats "; not counted: 4 on e1 (cordoned)".
fn not_counted(closed: &[(Name, u32, ExclusionReason)]) -> String {
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
            Self::NoSuchMigration(_) => "MIGRATION_NOT_FOUND",
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
