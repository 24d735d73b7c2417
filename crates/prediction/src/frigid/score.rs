//! Forecasts held against what came of VMs: how many were too much, and how much memory they were. Which forecasts, is the trial's.

use serde::Serialize;
use units::Fraction;

use super::{history::gib, trial::Stay};

/// Forecasts held against outcomes: VMs, and memory in GiB.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    pub vms: u32,
    over: u32,
    over_in_slices: u32,
    forecast: f64,
    in_slices: f64,
    requested: f64,
}

/// What one way to forecast bought at one setting. All are shares, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Share of VMs whose forecast exceeded what they left untouched.
    pub rate: f64,
    /// Memory forecast over memory requested.
    pub share: f64,
    /// Share of VMs whose forecast exceeded what they left untouched even in whole slices.
    pub slice_rate: f64,
    /// Memory forecast, in whole slices of each VM, over memory requested.
    pub slice_share: f64,
}

impl Sum {
    /// Takes in one forecast and what came of its VM.
    pub fn add(&mut self, share: Fraction, stay: &Stay) {
        let requested = stay.ask.requested;
        let untouched = stay.outcome.untouched;
        let in_slices = share.of(requested).slices_floor();
        self.vms += 1;
        self.over += u32::from(share > untouched);
        self.over_in_slices += u32::from(in_slices > untouched.of(requested));
        self.forecast += share.get() * gib(requested);
        self.in_slices += gib(in_slices);
        self.requested += gib(requested);
    }

    /// What they come to; nothing if there is none.
    pub fn score(&self) -> Score {
        let of_vms = |vms: u32| f64::from(vms) / f64::from(self.vms.max(1));
        let of_memory = |gib: f64| if self.vms == 0 { 0.0 } else { gib / self.requested };
        Score {
            rate: of_vms(self.over),
            share: of_memory(self.forecast),
            slice_rate: of_vms(self.over_in_slices),
            slice_share: of_memory(self.in_slices),
        }
    }
}
