//! Sample of an ended VM for the backtest, its baselines and its scores.

use super::outcome::{Outcome, VmRequest};

/// Request and outcome of an ended VM, for training and testing.
#[derive(Clone, Debug, PartialEq)]
pub struct VmSample {
    /// Request of the VM before its start.
    pub request: VmRequest,
    /// Outcome of the VM. Its end must not be before its start.
    pub outcome: Outcome,
    /// Whether the outcome is reliable. Unreliable outcomes are used neither for training nor for
    /// testing.
    pub is_trusted: bool,
}
