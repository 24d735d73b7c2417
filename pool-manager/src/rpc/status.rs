//! Converts errors into gRPC statuses. Each status has a google.rpc.ErrorInfo with domain "tarn"
//! and a reason. A status for an invalid value also has a google.rpc.BadRequest with the field.

use std::collections::HashMap;

use pool::{manager::CloseReason, rejection::Rejection};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{convert::InvalidField, driver::DriverError};

/// Domain of all reasons in google.rpc.ErrorInfo.
pub const ERROR_DOMAIN: &str = "tarn";
/// Key of the leader's address in the metadata of google.rpc.ErrorInfo.
const LEADER_METADATA: &str = "leader";

fn new_status(code: Code, reason: &str, message: String) -> Status {
    let details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(code, message, details)
}

/// Returns INVALID_ARGUMENT (BAD_VALUE) with the invalid field.
pub fn invalid_argument(error: InvalidField) -> Status {
    let message = error.to_string();
    let mut details = ErrorDetails::with_error_info("BAD_VALUE", ERROR_DOMAIN, HashMap::new());
    details.add_bad_request_violation(error.field, error.problem);
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// Returns PERMISSION_DENIED with a reason.
pub fn permission_denied(reason: &str, message: String) -> Status {
    new_status(Code::PermissionDenied, reason, message)
}

/// Returns FAILED_PRECONDITION with a reason.
pub fn failed_precondition(reason: &str, message: String) -> Status {
    new_status(Code::FailedPrecondition, reason, message)
}

/// Returns a status with this code and reason.
pub fn error_status(code: Code, reason: &str, message: String) -> Status {
    new_status(code, reason, message)
}

/// Returns RESOURCE_EXHAUSTED with a reason.
pub fn resource_exhausted(reason: &str, message: String) -> Status {
    new_status(Code::ResourceExhausted, reason, message)
}

/// Returns UNAVAILABLE (STOPPING), the status of calls while the manager stops.
pub fn stopping_status() -> Status {
    new_status(Code::Unavailable, "STOPPING", "the manager is stopping".into())
}

/// Returns FAILED_PRECONDITION (NOT_LEADER), with the address of the leader in the metadata `leader` if it is known. The
/// call had no effect, and clients may repeat it at the leader.
pub fn not_leader_status(leader: Option<&str>, message: String) -> Status {
    let metadata = leader.map(|address| (LEADER_METADATA.to_owned(), address.to_owned()));
    let metadata = metadata.into_iter().collect::<HashMap<_, _>>();
    let details = ErrorDetails::with_error_info("NOT_LEADER", ERROR_DOMAIN, metadata);
    Status::with_error_details(Code::FailedPrecondition, message, details)
}

/// Converts an error of the driver into a status.
pub fn driver_error_status(error: DriverError) -> Status {
    let message = error.to_string();
    match error {
        DriverError::Rejection(rejection) => {
            new_status(rejection_code(&rejection), rejection.reason(), message)
        }
        DriverError::Overloaded => new_status(Code::Unavailable, "OVERLOADED", message),
        DriverError::Stopping => stopping_status(),
        DriverError::NotLeader => not_leader_status(None, message),
        DriverError::LeaseEnded => new_status(Code::Unavailable, "LEASE_ENDED", message),
        DriverError::Unreadable(cause) => {
            new_status(Code::Internal, "STORE_UNREADABLE", format!("{message}: {cause}"))
        }
    }
}

fn rejection_code(rejection: &Rejection) -> Code {
    match rejection {
        Rejection::NoSuchHost(_)
        | Rejection::NoSuchEmc(_)
        | Rejection::NoSuchSlice(_)
        | Rejection::NoSuchVm(_)
        | Rejection::NoSuchReservation(_)
        | Rejection::NoSuchMigration { .. } => Code::NotFound,
        Rejection::InvalidValue { .. } => Code::InvalidArgument,
        Rejection::RequestReused { .. } | Rejection::VmAlreadyReserved { .. } => Code::AlreadyExists,
        Rejection::HostNotSchedulable { .. }
        | Rejection::WrongState { .. }
        | Rejection::SliceWrongState { .. }
        | Rejection::SliceInDoubt { .. }
        | Rejection::RestorePending { .. }
        | Rejection::HostConnected(_)
        | Rejection::NotDrained { .. }
        | Rejection::AmbiguousMigration { .. }
        | Rejection::CannotRehome { .. }
        | Rejection::ImmutableField { .. } => Code::FailedPrecondition,
        Rejection::OutOfSlices { .. }
        | Rejection::OutOfLocal { .. }
        | Rejection::OutOfCores { .. }
        | Rejection::StoreFull
        | Rejection::SlowdownBudgetExhausted { .. }
        | Rejection::LimitExceeded { .. } => Code::ResourceExhausted,
        Rejection::HostExpected(_) | Rejection::StoreFailed | Rejection::Starting(_) => Code::Unavailable,
        Rejection::NotReadyBeforeTimeout { .. } => Code::DeadlineExceeded,
    }
}

/// Returns the status for a request to move pool memory to local memory, if rack.toml forbids it.
pub fn rehome_forbidden_status() -> Status {
    let message = "rack.toml forbids moves to local memory: qos.rehome is \"never\"";
    new_status(Code::FailedPrecondition, "REHOME_FORBIDDEN", message.into())
}

/// Returns the status that an agent receives when the manager closes its session.
pub fn session_closed_status(why: CloseReason) -> Status {
    match why {
        CloseReason::OtherBootLeased => new_status(
            Code::Aborted,
            "OTHER_BOOT_LEASED",
            "the lease from before the restart of this host is still valid: retry after it expires".into(),
        ),
        CloseReason::Superseded => {
            new_status(Code::Aborted, "SUPERSEDED", "another agent represents this host".into())
        }
        CloseReason::FalseClaim(slice, epoch) => permission_denied(
            "INVALID_REPORT",
            format!("online: slice {slice} epoch {epoch} was never assigned to this host"),
        ),
        CloseReason::LeaseExpired => new_status(
            Code::Aborted,
            "LEASE_EXPIRED",
            "the lease expired without a message: reconnect".into(),
        ),
        CloseReason::HostRemoved => {
            permission_denied("HOST_NOT_FOUND", "this host was removed from the rack".into())
        }
    }
}
