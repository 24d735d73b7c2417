//! Rejections as gRPC statuses, in one function without `_`. Each has google.rpc.ErrorInfo (domain
//! "tarn", reason), and for an invalid value google.rpc.BadRequest with its field.

use std::collections::HashMap;

use pool::{manager::CloseReason, rejection::Rejection};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{convert::Invalid, driver::DriverError};

/// Domain of all reasons.
pub const DOMAIN: &str = "tarn";

fn status(code: Code, reason: &str, message: String) -> Status {
    let details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    Status::with_error_details(code, message, details)
}

/// Status of an invalid request.
pub fn invalid(error: Invalid) -> Status {
    let message = error.to_string();
    let mut details = ErrorDetails::with_error_info("BAD_VALUE", DOMAIN, HashMap::new());
    details.add_bad_request_violation(error.field, error.problem);
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// Status of a missing permission.
pub fn forbidden(reason: &str, message: String) -> Status {
    status(Code::PermissionDenied, reason, message)
}

/// Returns a `FAILED_PRECONDITION` status with the reason.
pub fn precondition(reason: &str, message: String) -> Status {
    status(Code::FailedPrecondition, reason, message)
}

/// Status with the reason and code of its service.
pub fn coded(code: Code, reason: &str, message: String) -> Status {
    status(code, reason, message)
}

/// Status of an exceeded limit.
pub fn exhausted(reason: &str, message: String) -> Status {
    status(Code::ResourceExhausted, reason, message)
}

/// Status while the manager is stopping.
pub fn stopping() -> Status {
    status(Code::Unavailable, "STOPPING", "the manager is stopping".into())
}

/// Status of an error of the driver.
pub fn driver_error(error: DriverError) -> Status {
    let message = error.to_string();
    match error {
        DriverError::Rejection(denied) => status(code(&denied), denied.reason(), message),
        DriverError::Overloaded => status(Code::Unavailable, "OVERLOADED", message),
        DriverError::Stopping => stopping(),
        DriverError::Unreadable(cause) => {
            status(Code::Internal, "STORE_UNREADABLE", format!("{message}: {cause}"))
        }
    }
}

fn code(denied: &Rejection) -> Code {
    match denied {
        Rejection::NoSuchHost(_)
        | Rejection::NoSuchEmc(_)
        | Rejection::NoSuchSlice(_)
        | Rejection::NoSuchVm(_)
        | Rejection::NoSuchReservation(_)
        | Rejection::NoSuchMigration(_) => Code::NotFound,
        Rejection::InvalidValue { .. } => Code::InvalidArgument,
        Rejection::RequestReused { .. } | Rejection::VmAlreadyReserved { .. } => Code::AlreadyExists,
        Rejection::HostNotSchedulable { .. }
        | Rejection::WrongState { .. }
        | Rejection::SliceWrongState { .. }
        | Rejection::SliceInDoubt { .. }
        | Rejection::RestorePending { .. }
        | Rejection::HostConnected(_)
        | Rejection::NotDrained { .. }
        | Rejection::ImmutableField { .. } => Code::FailedPrecondition,
        Rejection::OutOfSlices { .. }
        | Rejection::OutOfLocal { .. }
        | Rejection::OutOfCores { .. }
        | Rejection::StoreFull
        | Rejection::LimitExceeded { .. } => Code::ResourceExhausted,
        Rejection::HostExpected(_) | Rejection::StoreFailed | Rejection::Starting(_) => Code::Unavailable,
        Rejection::NotReadyBeforeTimeout { .. } => Code::DeadlineExceeded,
    }
}

/// Status of an agent's connection that the manager closes.
pub fn closed(why: CloseReason) -> Status {
    match why {
        CloseReason::Superseded => {
            status(Code::Aborted, "SUPERSEDED", "a newer agent represents this host".into())
        }
        CloseReason::FalseClaim(slice, epoch) => forbidden(
            "INVALID_REPORT",
            format!("online: slice {slice} epoch {epoch} was never assigned to this host"),
        ),
        CloseReason::LeaseExpired => {
            status(Code::Aborted, "LEASE_EXPIRED", "no message for longer than the lease: reconnect".into())
        }
        CloseReason::HostRemoved => forbidden("HOST_NOT_FOUND", "this host is no longer in the rack".into()),
    }
}
