//! Roles of clients.

use std::fmt;

/// Role of a client. Agents are no clients: each represents its own host only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// May use the service Scheduler.
    Scheduler,
    /// May use every service for clients: Admin, Models and Scheduler.
    Admin,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 2] = [Self::Scheduler, Self::Admin];

    /// Returns whether a client of this role may do what `needed` permits.
    pub fn includes(self, needed: Self) -> bool {
        self >= needed
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheduler => "scheduler",
            Self::Admin => "admin",
        })
    }
}
