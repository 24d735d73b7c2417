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
    /// The entry of the elected process was deleted or replaced.
    #[error("the entry of the leader was deleted or replaced")]
    Deposed,
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

/// Returns whether the token of the last login is not accepted any more. A token also ends when the users or roles of
/// etcd are changed.
pub(crate) fn needs_login(status: &Status) -> bool {
    let message = status.message();
    status.code() == Code::Unauthenticated
        || message.contains("revision in header is old")
        || message.contains("revision of auth store is old")
}

/// Returns whether the call can be repeated, at another member or later.
pub(crate) fn is_temporary(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Internal | Code::Cancelled => true,
        Code::ResourceExhausted => status.message().contains("too many requests"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_etcd_are_classified() {
        let old = Status::unknown("auth: revision in header is old");
        assert!(needs_login(&old) && needs_login(&Status::unauthenticated("etcdserver: invalid auth token")));
        assert!(is_temporary(&Status::resource_exhausted("etcdserver: too many requests")));
        let full = Status::resource_exhausted("etcdserver: mvcc: database space exceeded");
        assert!(!is_temporary(&full) && matches!(Error::from_status(&full), Error::NoSpace));
        let login =
            Status::invalid_argument("etcdserver: authentication failed, invalid user ID or password");
        assert!(!needs_login(&login) && matches!(Error::from_status(&login), Error::AccessDenied(_)));
        let lease = Status::not_found("etcdserver: requested lease not found");
        assert!(matches!(Error::from_status(&lease), Error::LeaseNotFound));
        let compacted = Status::out_of_range("etcdserver: mvcc: required revision has been compacted");
        assert!(matches!(Error::from_status(&compacted), Error::Compacted));
    }
}
