//! Calibration of the risk multiplier and of owner margins on recent outcomes. Each outcome is
//! compared with the prediction made before the VM started, so that model errors and drift are
//! detected early. The risk multiplier is chosen as in risk-controlling prediction sets: it is the
//! lowest multiplier at which the observed overprediction rate, plus a margin for chance, does not
//! exceed the target rate.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use units::{
    Bytes, Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, CALIBRATION_OWNERS_MAX},
};

use super::{
    history::to_gib,
    risk::{QUANTILE_LEVELS, QuantileCurve, RiskLimit},
};

/// Prediction for a VM before its start, with the outcome of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationSample {
    /// Start time of the VM.
    pub begins: UnixMs,
    /// Predicted quantiles of the untouched fraction.
    pub curve: QuantileCurve,
    /// Owner margin of the prediction, at least 1.
    #[serde(rename = "caution")]
    pub owner_margin: f64,
    /// Requested memory, above 0.
    pub requested: Bytes,
    /// Fraction of the requested memory that the VM never touched.
    pub untouched: Fraction,
}

/// Recent calibration samples, and the overprediction counts of each owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Latest samples, oldest first, at most [`CALIBRATION_OUTCOMES_MAX`].
    recent: VecDeque<CalibrationSample>,
    /// Overprediction counts by owner, at most [`CALIBRATION_OWNERS_MAX`] owners.
    owners: BTreeMap<String, OwnerCounts>,
}

/// Number of outcomes and of overpredictions of one owner's VMs, with exponential decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct OwnerCounts {
    outcomes: f64,
    #[serde(rename = "hits")]
    overpredictions: f64,
}

/// Index in [`QUANTILE_LEVELS`] of the level 0.1, at which the overpredictions of an owner are
/// counted.
const OWNER_LEVEL_INDEX: usize = 9;
/// Smallest number of outcomes with which an owner can get a margin above 1.
const OWNER_OUTCOMES_MIN: f64 = 100.0;
/// Number of outcomes of an owner above which older outcomes decay.
const OWNER_OUTCOMES_WINDOW: f64 = 200.0;
/// Number of standard deviations by which an owner's overpredictions must exceed their expected
/// number to be significant.
const SIGNIFICANCE_SIGMAS: f64 = 2.0;
/// Largest owner margin, as a factor of the risk.
const OWNER_MARGIN_MAX: f64 = 10.0;

/// Range in which the risk multiplier is searched, in GiB per overpredicted VM.
const RISK_MULTIPLIER_RANGE: (f64, f64) = (0.01, 1e6);
/// Number of bisections of the logarithm of the risk multiplier. They reach a precision of 0.01 %.
const BISECTION_STEPS: usize = 18;
/// Number of standard deviations by which the observed overprediction rate must be below the target
/// rate. The margin is needed because the risk multiplier is chosen by the same observed rate.
const RATE_MARGIN_SIGMAS: f64 = 1.0;
/// Sizes of the windows of latest outcomes. In none of them may the overprediction rate
/// significantly exceed the target rate. The windows show a change of the VM mix earlier than the
/// rate of all outcomes.
const RECENT_WINDOW_OUTCOMES: [usize; 4] = [50, 150, 450, 1350];

impl Calibration {
    /// Adds a sample, and updates the counts of the VM's owner if it is known.
    pub fn add(&mut self, owner: Option<String>, sample: CalibrationSample) {
        if let Some(owner) = owner {
            self.evict_owners_for(&owner);
            let is_overpredicted =
                sample.curve.untouched_at_level(OWNER_LEVEL_INDEX) > sample.untouched.get();
            let counts = self.owners.entry(owner).or_default();
            let decay =
                if counts.outcomes < OWNER_OUTCOMES_WINDOW { 1.0 } else { 1.0 - 1.0 / OWNER_OUTCOMES_WINDOW };
            counts.outcomes = counts.outcomes * decay + 1.0;
            counts.overpredictions = counts.overpredictions * decay + f64::from(u8::from(is_overpredicted));
        }
        if self.recent.len() >= CALIBRATION_OUTCOMES_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
    }

    /// Removes half of the owners, those with the fewest outcomes, if `owner` is new and the number
    /// of owners is at its limit.
    fn evict_owners_for(&mut self, owner: &str) {
        if self.owners.len() >= CALIBRATION_OWNERS_MAX && !self.owners.contains_key(owner) {
            let mut outcomes: Vec<f64> = self.owners.values().map(|counts| counts.outcomes).collect();
            let median = *outcomes.select_nth_unstable_by(CALIBRATION_OWNERS_MAX / 2, f64::total_cmp).1;
            self.owners.retain(|_, counts| counts.outcomes > median);
        }
    }

    /// Returns a copy with the samples of VMs that started after `after`, without owners.
    pub fn after(&self, after: UnixMs) -> Self {
        let recent = self.recent.iter().filter(|sample| sample.begins > after).copied().collect();
        Self { recent, owners: BTreeMap::new() }
    }

    /// Returns the ratio of the observed to the expected overprediction rate of an owner. Returns 1
    /// if the observed rate is not significantly higher, or if the owner is unknown.
    pub fn owner_margin(&self, owner: Option<&String>) -> f64 {
        let counts = owner.and_then(|owner| self.owners.get(owner)).copied().unwrap_or_default();
        let expected = QUANTILE_LEVELS[OWNER_LEVEL_INDEX] * counts.outcomes;
        let significant = expected + SIGNIFICANCE_SIGMAS * expected.sqrt();
        if counts.outcomes < OWNER_OUTCOMES_MIN || counts.overpredictions <= significant {
            1.0
        } else {
            (counts.overpredictions / expected).min(OWNER_MARGIN_MAX)
        }
    }

    /// Returns the risk limit with the lowest risk multiplier that meets two conditions:
    /// - The overprediction rate of the recent outcomes, plus [`RATE_MARGIN_SIGMAS`] standard
    ///   deviations, is at most the target rate `rate`.
    /// - In no window of [`RECENT_WINDOW_OUTCOMES`] is the overprediction rate significantly above
    ///   `rate`.
    ///
    /// Returns `None` if the highest multiplier does not meet these conditions, in particular if
    /// there are too few outcomes: a target rate of 1 % requires hundreds of outcomes.
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

    /// Returns the fraction of the memory of recent VMs that would have been allocated from the
    /// pool under a risk limit, in whole slices for each VM. Returns 0 without outcomes.
    pub fn slice_share(&self, risk_limit: RiskLimit) -> f64 {
        let (mut slice_share, mut requested) = (0.0, 0.0);
        for sample in &self.recent {
            let allocation = sample.curve.allocation(sample.requested, risk_limit, sample.owner_margin);
            let share = Fraction::new(allocation.share).expect("an allocated share is a fraction");
            slice_share += to_gib(share.of(sample.requested).slices_floor());
            requested += to_gib(sample.requested);
        }
        if self.recent.is_empty() { 0.0 } else { slice_share / requested }
    }

    /// Returns whether all values are in range and the numbers of samples and owners are within
    /// their limits.
    pub(crate) fn is_valid(&self) -> bool {
        let is_valid =
            |sample: &CalibrationSample| sample.requested > Bytes::ZERO && sample.owner_margin >= 1.0;
        let are_counts_finite = self
            .owners
            .values()
            .all(|counts| counts.outcomes.is_finite() && counts.overpredictions.is_finite());
        self.recent.len() <= CALIBRATION_OUTCOMES_MAX
            && self.owners.len() <= CALIBRATION_OWNERS_MAX
            && self.recent.iter().all(is_valid)
            && are_counts_finite
    }

    /// Returns the number of recent samples.
    pub fn outcomes(&self) -> usize {
        self.recent.len()
    }

    /// Returns whether the overprediction rate would have been within the target rate with this
    /// risk multiplier; see [`Self::risk_limit`].
    fn is_within_rate(&self, risk_multiplier: f64, rate: Fraction) -> bool {
        let risk_limit = RiskLimit::new(risk_multiplier, rate);
        let (mut allowed, mut overpredictions) = (0.0, 0.0);
        for (at, sample) in self.recent.iter().rev().enumerate() {
            let allocation = sample.curve.allocation(sample.requested, risk_limit, sample.owner_margin);
            allowed += rate.get();
            overpredictions += f64::from(u8::from(allocation.share > sample.untouched.get()));
            if RECENT_WINDOW_OUTCOMES.contains(&(at + 1)) && overpredictions > allowed + f64::sqrt(allowed) {
                return false;
            }
        }
        // The next outcome may be an overprediction even if no outcome was one so far.
        let count: f64 = f64::max(overpredictions, 1.0);
        count + RATE_MARGIN_SIGMAS * count.sqrt() <= allowed
    }
}
