//! Scores of predictions against outcomes: overpredicted VMs and predicted memory.

use serde::Serialize;
use units::Fraction;

use super::{history::to_gib, risk::is_overprediction, sample::VmSample};

/// Sums over all scored predictions of a method.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScoreSum {
    /// Number of scored VMs.
    pub vms: u32,
    /// Number of overpredicted VMs.
    overpredicted: u32,
    /// Number of VMs that are overpredicted after rounding down to whole slices.
    overpredicted_in_slices: u32,
    /// Predicted memory, in GiB.
    predicted_gib: f64,
    /// Predicted memory rounded down to whole slices for each VM, in GiB.
    slices_gib: f64,
    /// Requested memory, in GiB.
    requested_gib: f64,
}

/// Score of a prediction method at one setting. All values are fractions, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Fraction of VMs whose prediction exceeded their untouched memory.
    pub rate: f64,
    /// Sum of predicted memory divided by the sum of requested memory.
    pub share: f64,
    /// Fraction of VMs whose prediction exceeded their untouched memory after rounding down to
    /// whole slices.
    pub slice_rate: f64,
    /// Sum of predicted memory, rounded down to whole slices for each VM, divided by the sum of
    /// requested memory.
    pub slice_share: f64,
}

impl ScoreSum {
    /// Adds the predicted untouched fraction of a VM, and compares it with the outcome of the VM, in
    /// whole bytes.
    pub fn add(&mut self, share: Fraction, sample: &VmSample) {
        let requested = sample.request.requested;
        let untouched = sample.outcome.untouched;
        let in_slices = share.of(requested).slices_floor();
        self.vms += 1;
        self.overpredicted += u32::from(is_overprediction(share, requested, untouched));
        self.overpredicted_in_slices += u32::from(in_slices > untouched.of(requested));
        self.predicted_gib += share.get() * to_gib(requested);
        self.slices_gib += to_gib(in_slices);
        self.requested_gib += to_gib(requested);
    }

    /// Returns the score of all added predictions. All values are 0 if no prediction was added.
    pub fn score(&self) -> Score {
        let share_of_vms = |vms: u32| f64::from(vms) / f64::from(self.vms.max(1));
        let share_of_memory = |gib: f64| if self.vms == 0 { 0.0 } else { gib / self.requested_gib };
        Score {
            rate: share_of_vms(self.overpredicted),
            share: share_of_memory(self.predicted_gib),
            slice_rate: share_of_vms(self.overpredicted_in_slices),
            slice_share: share_of_memory(self.slices_gib),
        }
    }
}
