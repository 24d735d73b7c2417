//! Request of a VM before it starts, and its outcome after it has ended.

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction, UnixMs};

/// Groups of similar VMs to which a VM belongs, narrowest first. The name of an unknown group is
/// empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// Name of the VM. A VM that is started again has the same name.
    pub vm: String,
    /// Name of the customer or application of the VM.
    pub key: String,
    /// Name of the instance type of the VM.
    pub kind: String,
    /// Location or operating system of the VM, or another coarse partition.
    pub place: String,
}

impl Groups {
    /// Number of groups of a VM.
    pub const COUNT: usize = 4;
    /// Names of the kinds of groups, narrowest first.
    pub const NAMES: [&str; Self::COUNT] = ["vm", "key", "kind", "place"];

    /// Returns the names of all groups of the VM, narrowest first.
    pub fn all(&self) -> [&str; Self::COUNT] {
        [&self.vm, &self.key, &self.kind, &self.place]
    }

    /// Returns the owner of the VM: its customer or application if known, or else the VM itself.
    /// Returns `None` if neither is known.
    pub fn owner(&self) -> Option<String> {
        let at = self.owner_index();
        let name = self.all()[at];
        (!name.is_empty()).then(|| format!("{} {name}", Self::NAMES[at]))
    }

    /// Returns the index in [`Self::NAMES`] of the group that is the owner of the VM.
    pub(super) fn owner_index(&self) -> usize {
        usize::from(!self.key.is_empty())
    }
}

/// Request of a VM that is about to start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmRequest {
    /// Groups of similar VMs to which the VM belongs.
    pub groups: Groups,
    /// Total requested memory, local and pool, above 0.
    pub requested: Bytes,
    /// Number of CPU cores of the VM, or `None` if it is unknown.
    pub cores: Option<f64>,
    /// Start time of the VM.
    pub begins: UnixMs,
}

/// Outcome of a VM that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// End time of the VM.
    pub ended: UnixMs,
    /// Fraction of the requested memory that the VM never touched.
    pub untouched: Fraction,
    /// Other measurements of the VM.
    pub usage: VmUsage,
}

/// Measurements of a VM during its run time. `None` means that a value was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmUsage {
    /// 99th percentile over time of the memory in use.
    pub p99: Option<Bytes>,
    /// Mean over time of the memory in use.
    pub mean: Option<Bytes>,
    /// CPU utilization, in percent.
    pub busy_percent: Option<f64>,
}

impl Outcome {
    /// Returns the peak memory that the VM touched, given its requested memory.
    pub fn peak(&self, requested: Bytes) -> Bytes {
        requested.saturating_sub(self.untouched.of(requested))
    }
}
