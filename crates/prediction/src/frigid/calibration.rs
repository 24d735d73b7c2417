//! Calibration of the risk multiplier and of per-owner margins on recent outcomes, each compared
//! with the prediction made before the VM started. Model errors and drift show here first. The risk
//! multiplier is chosen as in risk-controlling prediction sets: the lowest one at which the
//! observed overprediction rate, with a margin for chance, stays within the target rate.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use units::{
    Bytes, Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, OWNER_MARGINS_MAX},
};

use super::{
    history::as_gib,
    risk::{Curve, QUANTILE_LEVELS, RiskLimit},
};

/// Prediction for a VM before it started, with the outcome of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationSample {
    /// Start time of the VM.
    pub begins: UnixMs,
    /// Untouched share of its memory as predicted.
    pub curve: Curve,
    /// Owner margin that applied to the prediction; at least 1.
    #[serde(rename = "caution")]
    pub owner_margin: f64,
    /// Requested memory; above 0.
    pub requested: Bytes,
    /// Share of the requested memory that was never touched.
    pub untouched: Fraction,
}

/// Recent calibration samples, and the overprediction counts of each owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    recent: VecDeque<CalibrationSample>,
    owners: BTreeMap<String, Tally>,
}

/// Outcomes and overpredictions of one owner's VMs, with exponential decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Tally {
    outcomes: f64,
    #[serde(rename = "hits")]
    overpredictions: f64,
}

/// Index of the quantile level at which owners' overpredictions are counted: level 0.1.
const OWNER_LEVEL: usize = 9;
/// Minimum number of outcomes before an owner gets a margin, and the approximate window of the
/// decayed counts.
const OWNER_OUTCOMES_MIN: f64 = 100.0;
const OWNER_OUTCOMES_WINDOW: f64 = 200.0;
/// Standard deviations by which an owner's overpredictions must exceed their expectation to be
/// significant.
const SIGNIFICANCE_SIGMAS: f64 = 2.0;
/// Upper bound on an owner margin.
const OWNER_MARGIN_MAX: f64 = 10.0;

/// Search range of the risk multiplier, in GiB per overpredicted VM.
const RISK_MULTIPLIER_RANGE: (f64, f64) = (0.01, 1e6);
/// Geometric bisection steps over the range, to a precision of 0.01 %.
const BISECTION_STEPS: usize = 18;
/// Standard deviations by which the observed rate must stay below the target rate. The rate is a
/// sample, and the risk multiplier is selected on it.
const RATE_MARGIN_SIGMAS: f64 = 1.0;
/// Sizes of the windows of latest outcomes that must not exceed the target rate significantly. A
/// change in the VM mix shows in these long before it shows in all outcomes.
const RECENT_WINDOWS: [usize; 4] = [50, 150, 450, 1350];

impl Calibration {
    /// Adds the outcome of a VM with its prediction, and the owner of the VM if there is one.
    pub fn add(&mut self, owner: Option<String>, sample: CalibrationSample) {
        if let Some(owner) = owner {
            self.evict_owners_for(&owner);
            let is_overpredicted = sample.curve.at_level(OWNER_LEVEL) > sample.untouched.get();
            let tally = self.owners.entry(owner).or_default();
            let decay =
                if tally.outcomes < OWNER_OUTCOMES_WINDOW { 1.0 } else { 1.0 - 1.0 / OWNER_OUTCOMES_WINDOW };
            tally.outcomes = tally.outcomes * decay + 1.0;
            tally.overpredictions = tally.overpredictions * decay + f64::from(u8::from(is_overpredicted));
        }
        if self.recent.len() >= CALIBRATION_OUTCOMES_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
    }

    /// Evicts the half of the owners with the fewest outcomes if there is no space for a new one.
    fn evict_owners_for(&mut self, owner: &str) {
        if self.owners.len() >= OWNER_MARGINS_MAX && !self.owners.contains_key(owner) {
            let mut outcomes: Vec<f64> = self.owners.values().map(|tally| tally.outcomes).collect();
            let median = *outcomes.select_nth_unstable_by(OWNER_MARGINS_MAX / 2, f64::total_cmp).1;
            self.owners.retain(|_, tally| tally.outcomes > median);
        }
    }

    /// Returns the calibration restricted to VMs that started after `after`, without owners.
    pub fn after(&self, after: UnixMs) -> Self {
        let recent = self.recent.iter().filter(|sample| sample.begins > after).copied().collect();
        Self { recent, owners: BTreeMap::new() }
    }

    /// Returns the ratio of the observed to the expected overprediction rate of an owner; 1 if the
    /// excess is not significant or the owner is unknown.
    pub fn owner_margin(&self, owner: Option<&String>) -> f64 {
        let tally = owner.and_then(|owner| self.owners.get(owner)).copied().unwrap_or_default();
        let expected = QUANTILE_LEVELS[OWNER_LEVEL] * tally.outcomes;
        let significant = expected + SIGNIFICANCE_SIGMAS * expected.sqrt();
        if tally.outcomes < OWNER_OUTCOMES_MIN || tally.overpredictions <= significant {
            1.0
        } else {
            (tally.overpredictions / expected).min(OWNER_MARGIN_MAX)
        }
    }

    /// Returns the risk limit with the lowest risk multiplier at which, with a margin for chance,
    /// at most `rate` of the recent outcomes would have been overpredicted, and of the latest
    /// windows not significantly more. `None` while there are too few outcomes: a rate of 1 % takes
    /// hundreds.
    pub fn risk_limit(&self, rate: Fraction) -> Option<RiskLimit> {
        let (mut low, mut high) = RISK_MULTIPLIER_RANGE;
        if !self.is_within_rate(high, rate) {
            return None;
        }
        for _ in 0..BISECTION_STEPS {
            let middle = (low * high).sqrt();
            if self.is_within_rate(middle, rate) { high = middle } else { low = middle }
        }
        Some(RiskLimit::new(high, rate))
    }

    /// Returns the share of the memory of recent VMs that would have been taken under a risk limit,
    /// in whole slices of each VM; 0 without outcomes.
    pub fn slice_share(&self, risk_limit: RiskLimit) -> f64 {
        let (mut slice_share, mut requested) = (0.0, 0.0);
        for sample in &self.recent {
            let allocation = sample.curve.allocation(sample.requested, risk_limit, sample.owner_margin);
            let share = Fraction::new(allocation.share).expect("an allocation is a share");
            slice_share += as_gib(share.of(sample.requested).slices_floor());
            requested += as_gib(sample.requested);
        }
        if self.recent.is_empty() { 0.0 } else { slice_share / requested }
    }

    /// Returns whether all values are in their ranges.
    pub(crate) fn is_valid(&self) -> bool {
        let is_valid =
            |sample: &CalibrationSample| sample.requested > Bytes::ZERO && sample.owner_margin >= 1.0;
        let tallies =
            self.owners.values().all(|tally| tally.outcomes.is_finite() && tally.overpredictions.is_finite());
        self.recent.len() <= CALIBRATION_OUTCOMES_MAX
            && self.owners.len() <= OWNER_MARGINS_MAX
            && self.recent.iter().all(is_valid)
            && tallies
    }

    /// Returns the number of recent outcomes.
    pub fn outcomes(&self) -> usize {
        self.recent.len()
    }

    fn is_within_rate(&self, risk_multiplier: f64, rate: Fraction) -> bool {
        let risk_limit = RiskLimit::new(risk_multiplier, rate);
        let (mut allowed, mut overpredictions) = (0.0, 0.0);
        for (at, sample) in self.recent.iter().rev().enumerate() {
            let allocation = sample.curve.allocation(sample.requested, risk_limit, sample.owner_margin);
            allowed += rate.get();
            overpredictions += f64::from(u8::from(allocation.share > sample.untouched.get()));
            if RECENT_WINDOWS.contains(&(at + 1)) && overpredictions > allowed + f64::sqrt(allowed) {
                return false;
            }
        }
        let next: f64 = f64::max(overpredictions, 1.0); // without an overprediction, the next outcome may be one
        next + RATE_MARGIN_SIGMAS * next.sqrt() <= allowed
    }
}
