//! Users of a host's operating system.

use std::fmt;

use serde::{Deserialize, Serialize};

/// User ID (uid) of the host's operating system. `u32::MAX` is excluded, because chown(2)
/// interprets it as "do not change the owner".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct UserId(u32);

/// Error for a number that is not a valid user ID. The message contains the number and the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a user id: must be at most {max}", max = u32::MAX - 1)]
pub struct UserIdError(u32);

impl UserId {
    /// User ID of root.
    pub const ROOT: Self = Self(0);

    /// Creates a user ID from a number below `u32::MAX`.
    ///
    /// # Errors
    /// [`UserIdError`] if the number is `u32::MAX`.
    pub const fn new(uid: u32) -> Result<Self, UserIdError> {
        if uid == u32::MAX { Err(UserIdError(uid)) } else { Ok(Self(uid)) }
    }

    /// Returns the user ID as a number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for UserId {
    type Error = UserIdError;

    fn try_from(uid: u32) -> Result<Self, UserIdError> {
        Self::new(uid)
    }
}

impl From<UserId> for u32 {
    fn from(uid: UserId) -> Self {
        uid.0
    }
}

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_id_below_u32_max_is_accepted() {
        assert_eq!(UserId::new(u32::MAX - 1).map(UserId::get), Ok(u32::MAX - 1));
        let error = UserId::new(u32::MAX).unwrap_err().to_string();
        assert_eq!(error, "4294967295 is not a user id: must be at most 4294967294");
    }
}
