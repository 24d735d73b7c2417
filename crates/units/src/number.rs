//! Identifiers and counters. Each kind has its own type, so that the compiler detects swapped
//! arguments.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::QuotedText;

macro_rules! number_type {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number_type!(
    /// Number of a slice (1 GiB of the pool). Slices are numbered from 0 across all EMCs of a rack,
    /// in the order in which the EMCs were added. Numbers are never reused.
    SliceId(u32), ""
);
number_type!(
    /// Number of a host of a rack. Numbers are never reused.
    HostId(u32), "host#"
);
number_type!(
    /// Number of an external memory controller (Pond's term for a pool device). Numbers are never
    /// reused.
    EmcId(u32), "emc#"
);
number_type!(
    /// Number of a reservation, the memory and cores assigned to one VM. Displayed as r-N.
    ReservationId(u64), "r-"
);
number_type!(
    /// Number of a migration request. Numbers are never reused. Displayed as m-N.
    MigrationId(u64), "m-"
);
number_type!(
    /// Counter of ownership changes of one slice, from 1. Each new owner gets the next epoch, even
    /// a host that only scrubs the slice. Epochs of a slice never repeat.
    Epoch(u64), ""
);
number_type!(
    /// Number of changes that a ledger has recorded.
    Revision(u64), ""
);
number_type!(
    /// Number of an agent instance. Each restart of an agent gets a higher number.
    InstanceId(u64), ""
);

impl Epoch {
    /// Returns the epoch of the next owner.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Revision {
    /// Returns the revision after the next change.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl std::str::FromStr for ReservationId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.strip_prefix("r-").and_then(|n| n.parse().ok()).map(Self).ok_or_else(|| {
            let text = QuotedText(text);
            format!("{text} is not a reservation: must be r- and a number, such as r-7")
        })
    }
}

impl std::str::FromStr for MigrationId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.strip_prefix("m-").and_then(|n| n.parse().ok()).map(Self).ok_or_else(|| {
            let text = QuotedText(text);
            format!("{text} is not a migration request: must be m- and a number, such as m-7")
        })
    }
}

/// Version of the desired state of a host. Higher versions replace lower ones. A version consists
/// of a generation and a revision, compared in this order. Restoring a store from a backup starts a
/// new generation, which replaces all versions that were sent after the backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DesiredVersion {
    /// Generation of the store, incremented when the store is restored from a backup.
    pub generation: u64,
    /// Revision of the ledger from which the desired state was computed.
    pub revision: Revision,
}

/// Token of an elected manager. Devices and agents accept no orders with a lower token than the
/// highest one that they know. A token consists of a generation and an election, compared in this
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FencingToken {
    /// Generation of the store, which a restore from a backup increases.
    pub generation: u64,
    /// Number of the election, which increases with each election in the same cluster of etcd; 0
    /// for a manager that no other one can replace.
    pub election: u64,
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation, self.election)
    }
}

impl std::str::FromStr for FencingToken {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let token = text.split_once('.').and_then(|(generation, election)| {
            Some(Self { generation: generation.parse().ok()?, election: election.parse().ok()? })
        });
        let rule =
            || format!("{} is not a fencing token: must be two numbers, such as 1.7", QuotedText(text));
        token.filter(|token| token.to_string() == text).ok_or_else(rule)
    }
}

impl fmt::Display for DesiredVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation, self.revision)
    }
}
