//! Request of a VM before it starts, and its outcome after it has ended.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction, UnixMs};

/// Groups of similar VMs that a VM belongs to, narrowest first. Empty where unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// VMs of this name: the same VM, started again.
    pub vm: String,
    /// VMs of this customer or application.
    pub key: String,
    /// VMs of this instance type.
    pub kind: String,
    /// VMs of this place: location, operating system, or another coarse partition.
    pub place: String,
}

impl Groups {
    /// Number of groups.
    pub const COUNT: usize = 4;
    /// Names of the groups, narrowest first.
    pub const NAMES: [&str; Self::COUNT] = ["vm", "key", "kind", "place"];

    /// Returns the group keys, narrowest first.
    pub fn all(&self) -> [&str; Self::COUNT] {
        [&self.vm, &self.key, &self.kind, &self.place]
    }

    /// Returns the owner of the VM: its customer or application if set, or else the VM itself.
    pub fn owner(&self) -> Option<String> {
        let named = [("key", &self.key), ("vm", &self.vm)].into_iter().find(|(_, name)| !name.is_empty());
        named.map(|(of, name)| format!("{of} {name}"))
    }
}

/// Request of a VM that is about to start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmRequest {
    /// Groups of similar VMs.
    pub groups: Groups,
    /// Total requested memory; above 0.
    pub requested: Bytes,
    /// Number of cores, if known.
    pub cores: Option<f64>,
    /// Start time.
    pub begins: UnixMs,
}

/// Outcome of a VM that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// End time.
    pub ended: UnixMs,
    /// Share of the requested memory that was never touched.
    pub untouched: Fraction,
    /// Further measurements.
    pub usage: Usage,
}

/// Measurements of a VM while it ran, where available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// 99th percentile over time of the memory in use.
    pub p99: Option<Bytes>,
    /// Mean memory in use.
    pub mean: Option<Bytes>,
    /// CPU utilization in percent.
    pub busy_percent: Option<f64>,
}

impl Outcome {
    /// Returns the peak memory touched, for a VM that requested `requested`.
    pub fn peak(&self, requested: Bytes) -> Bytes {
        requested.saturating_sub(self.untouched.of(requested))
    }
}
