//! Limit of open file descriptors of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open file descriptors (`RLIMIT_NOFILE`) to the hard limit, because each
/// connection and each slice needs a descriptor. A failure is only logged.
pub fn raise_limit() {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => {
            let (before, limit) = (before.current, before.maximum);
            tracing::debug!(?before, ?limit, "raised the limit of open file descriptors");
        }
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open file descriptors"),
    }
}
