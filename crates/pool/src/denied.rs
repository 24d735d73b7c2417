//! Refusals: a word for the program, a sentence for the person.

use crate::audit::NotChosen;
use units::{Bytes, Name, RequestId, ReservationId, SliceId};

/// Why a request was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// rack.toml has no such host.
    #[error("host {0} is not in this rack")]
    NoSuchHost(Name),
    /// rack.toml has no such EMC.
    #[error("emc {0} is not in this rack")]
    NoSuchEmc(Name),
    /// The pool ends below.
    #[error("slice {0} is not in this pool")]
    NoSuchSlice(SliceId),
    /// No VM of that name has memory here.
    #[error("vm {0} has no reservation")]
    NoSuchVm(Name),
    /// Never made, or forgotten.
    #[error("reservation {0} is not known")]
    NoSuchReservation(ReservationId),
    /// No open request to move it.
    #[error("vm {0} has no migration request")]
    NoSuchMigration(Name),
    /// A value breaks its rule.
    #[error("{field}: {value} {rule}")]
    BadValue {
        /// Of the request.
        field: &'static str,
        /// As given.
        value: String,
        /// "must be ...".
        rule: &'static str,
    },
    /// One request id, two contents.
    #[error("request_id {id} was used for {reservation} with other content: {differs} differs")]
    RequestReused {
        /// The id.
        id: RequestId,
        /// What it made the first time.
        reservation: ReservationId,
        /// The first field that differs.
        differs: &'static str,
    },
    /// One VM, two reservations.
    #[error("vm {vm} has reservation {reservation} on host {host} already")]
    VmTaken {
        /// The VM.
        vm: Name,
        /// What it has.
        reservation: ReservationId,
        /// Where.
        host: Name,
    },
    /// The host takes nothing new.
    #[error("host {host} is {why}")]
    HostNotSchedulable {
        /// The host.
        host: Name,
        /// "cordoned", "draining", "fenced", "unknown: its lease is over", ...
        why: &'static str,
    },
    /// The host has not spoken since the manager started; try again soon.
    #[error("host {0} has not reported since the manager started")]
    HostExpected(Name),
    /// Too few free slices within the host's reach.
    #[error("host {host} can reach {free} free slices, {asked} needed{}", not_counted(.closed))]
    OutOfSlices {
        /// The host.
        host: Name,
        /// How many it wants.
        asked: u32,
        /// How many there are.
        free: u32,
        /// Wired EMCs that give none: their free slices, and why not.
        closed: Vec<(Name, u32, NotChosen)>,
    },
    /// Too little local memory.
    #[error("host {host} has {free} of local memory free, {asked} needed")]
    OutOfLocal {
        /// The host.
        host: Name,
        /// How much it wants.
        asked: Bytes,
        /// How much there is.
        free: Bytes,
    },
    /// Too few cores.
    #[error("host {host} has {free} cores free, {asked} needed")]
    OutOfCores {
        /// The host.
        host: Name,
        /// How many it wants.
        asked: u32,
        /// How many there are.
        free: u32,
    },
    /// The disk under the store is nearly full.
    #[error("the store's disk is nearly full: releases work, new reservations do not")]
    StoreFull,
    /// The reservation is past this.
    #[error("reservation {reservation} is {state}, which does not accept {what}")]
    WrongState {
        /// Which.
        reservation: ReservationId,
        /// What it is.
        state: String,
        /// What was asked.
        what: &'static str,
    },
    /// The slice is not where this would make sense.
    #[error("slice {slice} is {state}, which does not accept {what}")]
    SliceNotNow {
        /// Which.
        slice: SliceId,
        /// What it is.
        state: &'static str,
        /// What was asked.
        what: &'static str,
    },
    /// A running VM may have the slice.
    #[error("slice {slice} stays quarantined: {why}")]
    SliceInDoubt {
        /// Which.
        slice: SliceId,
        /// The VM that has it, or the host that has not reported.
        why: String,
    },
    /// Adding what the backup does not contain, which may be in use under numbers that the ledger does not know.
    #[error(
        "{what} is not in the restored ledger: it can be added when every host has reported, and {unreported} has not"
    )]
    RestorePending {
        /// "host h2" or "emc e2".
        what: String,
        /// A host that has not reported.
        unreported: Name,
    },
    /// Fencing a host that speaks to us.
    #[error("host {0} is connected: only a silent host is fenced")]
    HostConnected(Name),
    /// Removing what is in use.
    #[error("{what} cannot be removed: {why}; drain it first")]
    NotDrained {
        /// "host h1" or "emc e1".
        what: String,
        /// What is left.
        why: String,
    },
    /// A change that a running rack cannot make.
    #[error("{what} cannot change from {from} to {to} while the rack runs")]
    Fixed {
        /// Which field of which thing.
        what: String,
        /// As it is.
        from: String,
        /// As asked.
        to: String,
    },
    /// More than a limit allows.
    #[error("{what} would exceed the limit of {max}")]
    TooMany {
        /// What.
        what: &'static str,
        /// The limit.
        max: u64,
    },
    /// A durable write failed; whether the change happened is not known. The same request_id finds out.
    #[error("the store failed and is being read again: repeat the request")]
    StoreFailed,
    /// Not there yet.
    #[error("the manager is starting: {0}")]
    Starting(&'static str),
    /// Time is up; nothing was changed by waiting.
    #[error("reservation {reservation} has {online} of {slices} slices online after the time allowed")]
    NotReadyInTime {
        /// Which.
        reservation: ReservationId,
        /// How many are.
        online: u32,
        /// How many should be.
        slices: u32,
    },
}

/// "; not counted: 4 on e1 (cordoned)".
fn not_counted(closed: &[(Name, u32, NotChosen)]) -> String {
    let each = closed.iter().map(|(emc, free, why)| format!("{free} on {emc} ({why})"));
    let each = each.collect::<Vec<_>>().join(", ");
    if each.is_empty() { each } else { format!("; not counted: {each}") }
}

impl Denied {
    /// The machine-readable reason, in UPPER_SNAKE_CASE.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoSuchHost(_) => "HOST_NOT_FOUND",
            Self::NoSuchEmc(_) => "EMC_NOT_FOUND",
            Self::NoSuchSlice(_) => "SLICE_NOT_FOUND",
            Self::NoSuchVm(_) => "VM_NOT_FOUND",
            Self::NoSuchReservation(_) => "RESERVATION_NOT_FOUND",
            Self::NoSuchMigration(_) => "MIGRATION_NOT_FOUND",
            Self::BadValue { .. } => "BAD_VALUE",
            Self::RequestReused { .. } => "REQUEST_ID_REUSED",
            Self::VmTaken { .. } => "VM_ALREADY_RESERVED",
            Self::HostNotSchedulable { .. } => "HOST_NOT_SCHEDULABLE",
            Self::HostExpected(_) => "HOST_EXPECTED",
            Self::OutOfSlices { .. } => "OUT_OF_SLICES",
            Self::OutOfLocal { .. } => "OUT_OF_LOCAL_MEMORY",
            Self::OutOfCores { .. } => "OUT_OF_CORES",
            Self::StoreFull => "STORE_LOW_SPACE",
            Self::WrongState { .. } => "RESERVATION_WRONG_STATE",
            Self::SliceNotNow { .. } => "SLICE_WRONG_STATE",
            Self::SliceInDoubt { .. } => "SLICE_IN_DOUBT",
            Self::RestorePending { .. } => "RESTORE_PENDING",
            Self::HostConnected(_) => "HOST_CONNECTED",
            Self::NotDrained { .. } => "NOT_DRAINED",
            Self::Fixed { .. } => "CHANGE_NOT_ALLOWED",
            Self::TooMany { .. } => "LIMIT_EXCEEDED",
            Self::StoreFailed => "STORE_FAILED",
            Self::Starting(_) => "STARTING",
            Self::NotReadyInTime { .. } => "NOT_READY_BEFORE_TIMEOUT",
        }
    }
}
