//! User of the agent's process.

use units::UserId;

/// Returns the user that this process runs as.
///
/// # Panics
/// The kernel returns no user.
pub fn current_user() -> UserId {
    UserId::new(rustix::process::geteuid().as_raw()).expect("a process has a user")
}
