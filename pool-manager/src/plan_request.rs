//! Validated request of a scheduler for a placement plan of a VM.

use prediction::frigid::Groups;
use units::{Bytes, Name};

use crate::records::forecast_rows::Counters;

/// Validated request for a placement plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the VM.
    pub vm: Name,
    /// Number of cores of the VM.
    pub cores: u32,
    /// Total memory of the VM.
    pub memory: Bytes,
    /// Whether the VM is pinned: its pages cannot be migrated.
    pub pinned: bool,
    /// Groups of similar VMs to which the VM belongs, for predictions.
    pub groups: Groups,
    /// Performance counters of the VM's workload, if they were measured.
    pub counters: Option<Counters>,
}
