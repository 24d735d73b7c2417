//! Scores of predictions against outcomes: overpredicted VMs and predicted memory.

use serde::Serialize;
use units::Fraction;

use super::{history::as_gib, sample::VmSample};

/// Sums over scored predictions; memory in GiB.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScoreSum {
    pub vms: u32,
    overpredicted: u32,
    overpredicted_in_slices: u32,
    forecast: f64,
    in_slices: f64,
    requested: f64,
}

/// Score of a prediction method at one setting. All values are shares, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Share of VMs whose prediction exceeded their untouched memory.
    pub rate: f64,
    /// Predicted over requested memory.
    pub share: f64,
    /// Share of VMs whose prediction, rounded down to whole slices, exceeded their untouched
    /// memory.
    pub slice_rate: f64,
    /// Predicted memory, rounded down to whole slices of each VM, over requested memory.
    pub slice_share: f64,
}

impl ScoreSum {
    /// Adds one prediction with the outcome of its VM.
    pub fn add(&mut self, share: Fraction, sample: &VmSample) {
        let requested = sample.request.requested;
        let untouched = sample.outcome.untouched;
        let in_slices = share.of(requested).slices_floor();
        self.vms += 1;
        self.overpredicted += u32::from(share > untouched);
        self.overpredicted_in_slices += u32::from(in_slices > untouched.of(requested));
        self.forecast += share.get() * as_gib(requested);
        self.in_slices += as_gib(in_slices);
        self.requested += as_gib(requested);
    }

    /// Returns the score; zeros if nothing was added.
    pub fn score(&self) -> Score {
        let of_vms = |vms: u32| f64::from(vms) / f64::from(self.vms.max(1));
        let of_memory = |as_gib: f64| if self.vms == 0 { 0.0 } else { as_gib / self.requested };
        Score {
            rate: of_vms(self.overpredicted),
            share: of_memory(self.forecast),
            slice_rate: of_vms(self.overpredicted_in_slices),
            slice_share: of_memory(self.in_slices),
        }
    }
}
