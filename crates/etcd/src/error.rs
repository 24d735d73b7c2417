//! Errors of calls.

use tonic::{Code, Status};

/// Error of a call to etcd.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address is invalid, or its TLS settings cannot be used.
    #[error("cannot use the etcd member {endpoint}")]
    Endpoint {
        /// Address of the member.
        endpoint: String,
        /// Error of the transport.
        #[source]
        cause: tonic::transport::Error,
    },
    /// No member answered in time. It is unknown whether the call had an effect, or will have one.
    #[error("no etcd member answered: {}", attempts.join("; "))]
    Unavailable {
        /// Address of each member that was tried, and the reason of its failure.
        attempts: Vec<String>,
    },
    /// etcd has reached its quota, and rejects writes.
    #[error(
        "etcd is out of space: compact and defragment it, or raise --quota-backend-bytes, and then run `etcdctl alarm disarm`"
    )]
    NoSpace,
    /// The revision was compacted.
    #[error("the requested revision of etcd was compacted")]
    Compacted,
    /// The lease has ended.
    #[error("the lease has ended")]
    LeaseNotFound,
    /// etcd rejects the user, the password, or access to the keys.
    #[error("etcd denies access: {0}")]
    AccessDenied(String),
    /// etcd rejects the call for another reason.
    #[error("etcd rejects a call: {0}")]
    Rejected(String),
}

impl Error {
    /// Converts the status of a call that a member rejected.
    pub(crate) fn from_status(status: &Status) -> Self {
        let message = status.message();
        match status.code() {
            Code::ResourceExhausted if message.contains("database space exceeded") => Self::NoSpace,
            Code::OutOfRange if message.contains("compacted") => Self::Compacted,
            Code::NotFound if message.contains("lease not found") => Self::LeaseNotFound,
            Code::Unauthenticated | Code::PermissionDenied => Self::AccessDenied(message.to_owned()),
            Code::InvalidArgument if is_login_error(message) => Self::AccessDenied(message.to_owned()),
            _ => Self::Rejected(message.to_owned()),
        }
    }
}

/// Returns whether etcd reports a missing or wrong user with the code for invalid arguments.
fn is_login_error(message: &str) -> bool {
    message.contains("authentication failed") || message.contains("user name is empty")
}

/// Returns whether another member may be able to answer the call.
pub(crate) fn is_member_failure(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Internal | Code::Cancelled
    )
}
