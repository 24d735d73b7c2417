//! Roles that authorize clients of the gRPC services.

use std::fmt;

/// Role of a client. Agents have no role: each agent may act only for its own host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Permits the service Scheduler.
    Scheduler,
    /// Permits all services for clients: Admin, Models and Scheduler.
    Admin,
}

impl Role {
    /// All roles, with the fewest permissions first.
    pub const ALL: [Self; 2] = [Self::Scheduler, Self::Admin];

    /// Returns whether this role has all permissions of `needed`.
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
