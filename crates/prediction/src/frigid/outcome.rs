//! What is known of a VM before it starts, and what came of it.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction, UnixMs};

/// Whom a VM may resemble, the narrowest group first. Empty where it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// VMs of this name: the same one, started again.
    pub vm: String,
    /// VMs of this customer or application.
    pub key: String,
    /// VMs of this type.
    pub kind: String,
    /// VMs of this place: location, operating system, or what else divides them coarsely.
    pub place: String,
}

impl Groups {
    /// How many there are.
    pub const COUNT: usize = 4;
    /// Their names.
    pub const NAMES: [&str; Self::COUNT] = ["vm", "key", "kind", "place"];

    /// The narrowest first.
    pub fn all(&self) -> [&str; Self::COUNT] {
        [&self.vm, &self.key, &self.kind, &self.place]
    }

    /// Whose VMs these are, as far as it is known: a customer's, or else a VM's own.
    pub fn owner(&self) -> Option<String> {
        let named = [("key", &self.key), ("vm", &self.vm)].into_iter().find(|(_, name)| !name.is_empty());
        named.map(|(of, name)| format!("{of} {name}"))
    }
}

/// A VM that is to start, as far as it is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// Whom it may resemble.
    pub groups: Groups,
    /// All memory that is asked for; more than nothing.
    pub requested: Bytes,
    /// Its cores, if known.
    pub cores: Option<f64>,
    /// When it starts.
    pub begins: UnixMs,
}

/// What came of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// When it ended.
    pub ended: UnixMs,
    /// Share of what it asked for that it never touched.
    pub untouched: Fraction,
    /// What else was measured.
    pub usage: Usage,
}

/// What may have been measured of a VM while it ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Memory in use for all but 1 % of the time.
    pub p99: Option<Bytes>,
    /// Memory in use on average.
    pub mean: Option<Bytes>,
    /// Time that its processors were in use, in percent.
    pub busy_percent: Option<f64>,
}

impl Outcome {
    /// The most that a VM touched that had asked for so much.
    pub fn peak(&self, requested: Bytes) -> Bytes {
        requested.saturating_sub(self.untouched.of(requested))
    }
}
