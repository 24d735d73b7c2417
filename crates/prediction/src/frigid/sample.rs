//! Ended VMs as samples, shared by the backtest, its baselines and its scores.

use super::outcome::{Outcome, VmRequest};

/// Ended VM as a sample for training and testing.
#[derive(Clone, Debug, PartialEq)]
pub struct VmSample {
    /// Request, as known before the start.
    pub request: VmRequest,
    /// Outcome; its end is not before the start.
    pub outcome: Outcome,
    /// Whether the outcome is reliable. Unreliable outcomes are neither trained on nor tested.
    pub is_trusted: bool,
}
