//! User of the agent's process.

use units::UserId;

/// Returns the effective user of this process.
///
/// # Panics
/// Panics if the kernel returns an invalid user id, which never happens.
pub fn current_user() -> UserId {
    UserId::new(rustix::process::geteuid().as_raw()).expect("the kernel returns a valid user id")
}
