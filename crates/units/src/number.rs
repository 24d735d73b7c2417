//! Identifiers and counters. Each has a type of its own, so that they cannot be confused.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
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

number!(
    /// Slice of 1 GiB of the pool. Slices of a rack are numbered from 0 in the order in which EMCs
    /// were added. Numbers are never reused.
    SliceId(u32), ""
);
number!(
    /// Host of a rack. Numbers are never reused. The type differs from [`SliceId`], so that swapped
    /// arguments do not compile.
    HostId(u32), "host#"
);
number!(
    /// External memory controller (Pond's term): one pool device. Numbers are never reused.
    EmcId(u32), "emc#"
);
number!(
    /// Reservation: the memory of one VM.
    ReservationId(u64), "r-"
);
number!(
    /// Counts the owners of one slice, from 1. Each change of owner increments it, scrubbers
    /// included, and it never repeats.
    Epoch(u64), ""
);
number!(
    /// Counts the changes of one ledger.
    Revision(u64), ""
);
number!(
    /// Identifies one start of an agent. Later starts have higher numbers.
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
        text.strip_prefix("r-")
            .and_then(|n| n.parse().ok())
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a reservation: must be r- and a number, such as r-7"))
    }
}

/// Version of the desired state of a host; the highest version wins. The generation increases when
/// a store is restored from a backup, so that versions sent after that backup remain lower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DesiredVersion {
    /// Generation of the store.
    pub generation: u64,
    /// Revision of the ledger.
    pub revision: Revision,
}

impl fmt::Display for DesiredVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation, self.revision)
    }
}
