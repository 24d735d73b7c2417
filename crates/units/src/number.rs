//! Numbers that must not mix: each kind of thing has a type of its own.

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
    /// One 1 GiB piece of the pool, numbered over the rack from 0 in the order the EMCs were added. Never reused.
    SliceId(u32), ""
);
number!(
    /// A host of this rack; a number is never reused. Not interchangeable with [`SliceId`], so `assign(host, slice)` cannot compile.
    HostId(u32), "host#"
);
number!(
    /// An external memory controller: one pool device. A number is never reused.
    EmcId(u32), "emc#"
);
number!(
    /// The memory of one VM.
    ReservationId(u64), "r-"
);
number!(
    /// Numbers the owners of one slice. Every change of hands raises it, a scrubber's included; it never repeats. The
    /// first owner has 1.
    Epoch(u64), ""
);
number!(
    /// Counts the changes of one ledger.
    Revision(u64), ""
);
number!(
    /// One start of an agent; later starts have higher numbers.
    InstanceId(u64), ""
);

impl Epoch {
    /// The next owner's.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Revision {
    /// The next change's.
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

/// The number of an order to a host: newer ones win. The generation rises when a store is restored from a backup, so
/// that orders of the forgotten future stay older.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DesiredVersion {
    /// Which life of the store.
    pub generation: u64,
    /// Which state of the ledger.
    pub revision: Revision,
}

impl fmt::Display for DesiredVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation, self.revision)
    }
}
