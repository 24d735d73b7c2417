//! Plan request of a scheduler, validated.

use prediction::frigid::Groups;
use units::{Bytes, Name};

use crate::records::forecast_rows::Counters;

/// Validated plan request.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// VM.
    pub vm: Name,
    /// Cores.
    pub cores: u32,
    /// Total memory.
    pub memory: Bytes,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// Properties for predictions.
    pub groups: Groups,
    /// Counters of its workload, if measured.
    pub counters: Option<Counters>,
}
