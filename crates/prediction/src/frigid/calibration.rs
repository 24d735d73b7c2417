//! Calibration of the risk multipliers on recent outcomes. Each outcome is compared with the
//! prediction made before the VM started, so that model errors and drift are detected.
//!
//! Each size class has its own risk multiplier (Mondrian calibration, Vovk et al., 2003): it is the
//! lowest multiplier at which an upper confidence bound on the overprediction rate of the class does
//! not exceed the target rate. Outcomes of one owner are not independent. The bound therefore treats
//! the VMs of one owner as one cluster.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction, UnixMs, limits::CALIBRATION_OUTCOMES_MAX};

use super::{
    history::to_gib,
    outcome::{Outcome, VmRequest},
    risk::{QuantileCurve, RiskLimit, SIZE_CLASSES, SizeBounds, is_overprediction, vm_risk_max},
};

/// Prediction for a VM before its start, with the outcome of the VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationSample {
    /// Start time of the VM.
    pub begins: UnixMs,
    /// Owner of the VM; empty if it is unknown.
    pub owner: String,
    /// Predicted quantiles of the untouched fraction.
    pub curve: QuantileCurve,
    /// Requested memory, above 0.
    pub requested: Bytes,
    /// Fraction of the requested memory that the VM never touched.
    pub untouched: Fraction,
}

impl CalibrationSample {
    /// Combines the prediction for a VM with its outcome.
    pub fn new(request: &VmRequest, outcome: &Outcome, curve: QuantileCurve) -> Self {
        Self {
            begins: request.begins,
            owner: request.groups.owner().unwrap_or_default(),
            curve,
            requested: request.requested,
            untouched: outcome.untouched,
        }
    }
}

/// Recent calibration samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Latest samples, oldest first, at most [`CALIBRATION_OUTCOMES_MAX`].
    recent: VecDeque<CalibrationSample>,
}

/// Range in which the risk multiplier is searched, in GiB per overpredicted VM.
const RISK_MULTIPLIER_RANGE: (f64, f64) = (0.01, 1e6);
/// Number of bisections of the logarithm of the risk multiplier. They reach a precision of 0.01 %.
const BISECTION_STEPS: usize = 18;
/// Quantile of the standard normal distribution for a one-sided confidence level of 95 %.
const CONFIDENCE_SIGMAS: f64 = 1.645;

impl Calibration {
    /// Adds a sample.
    pub fn add(&mut self, sample: CalibrationSample) {
        if self.recent.len() >= CALIBRATION_OUTCOMES_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
    }

    /// Returns a copy with the samples of VMs that started after `after`.
    pub fn after(&self, after: UnixMs) -> Self {
        Self { recent: self.recent.iter().filter(|sample| sample.begins > after).cloned().collect() }
    }

    /// Returns the risk limit with the lowest risk multiplier of each size class at which the upper
    /// confidence bound on the overprediction rate of the class is at most `rate`. Size classes are
    /// thirds of the recent VMs.
    ///
    /// Returns `None` if no class has enough outcomes: a target rate of 1 % requires hundreds of
    /// outcomes of a class.
    pub fn risk_limit(&self, rate: Fraction) -> Option<RiskLimit> {
        let size_bounds = SizeBounds::thirds(self.recent.iter().map(|sample| sample.requested).collect())?;
        let multiplier = |class| {
            let is_in_class = |sample: &&CalibrationSample| size_bounds.class(sample.requested) == class;
            ClassSamples::new(self.recent.iter().filter(is_in_class)).lowest_multiplier(rate)
        };
        let risk_multipliers: [Option<f64>; SIZE_CLASSES] = std::array::from_fn(multiplier);
        let risk_limit = RiskLimit { size_bounds, risk_multipliers, risk_max: vm_risk_max(rate) };
        risk_multipliers.iter().any(Option::is_some).then_some(risk_limit)
    }

    /// Returns the fraction of the memory of recent VMs that would have been allocated from the
    /// pool under a risk limit, in whole slices for each VM. Returns 0 without outcomes.
    pub fn slice_share(&self, risk_limit: &RiskLimit) -> f64 {
        let (mut slice_share, mut requested) = (0.0, 0.0);
        for sample in &self.recent {
            let allocation = sample.curve.allocation(sample.requested, risk_limit).unwrap_or_default();
            slice_share += to_gib(allocation.to_fraction().of(sample.requested).slices_floor());
            requested += to_gib(sample.requested);
        }
        if self.recent.is_empty() { 0.0 } else { slice_share / requested }
    }

    /// Returns whether all values are in range and the number of samples is within its limit.
    pub(crate) fn is_valid(&self) -> bool {
        self.recent.len() <= CALIBRATION_OUTCOMES_MAX
            && self.recent.iter().all(|sample| sample.requested > Bytes::ZERO)
    }

    /// Returns the number of recent samples.
    pub fn outcomes(&self) -> usize {
        self.recent.len()
    }
}

/// Samples of one size class, each with the index of its owner.
struct ClassSamples<'a> {
    samples: Vec<(&'a CalibrationSample, usize)>,
    /// Number of samples of each owner.
    owner_samples: Vec<u32>,
}

impl<'a> ClassSamples<'a> {
    fn new(samples: impl Iterator<Item = &'a CalibrationSample>) -> Self {
        let (mut owners, mut owner_samples) = (BTreeMap::new(), Vec::new());
        let mut index = |sample: &'a CalibrationSample| {
            let at = *owners.entry(sample.owner.as_str()).or_insert(owner_samples.len());
            if at == owner_samples.len() {
                owner_samples.push(0);
            }
            owner_samples[at] += 1;
            (sample, at)
        };
        Self { samples: samples.map(&mut index).collect(), owner_samples }
    }

    /// Returns the lowest risk multiplier that is within the target rate, or `None` if the highest
    /// multiplier of the range is not.
    fn lowest_multiplier(&self, rate: Fraction) -> Option<f64> {
        let (mut low, mut high) = RISK_MULTIPLIER_RANGE;
        if !self.is_within_rate(high, rate) {
            return None;
        }
        for _ in 0..BISECTION_STEPS {
            let middle = (low * high).sqrt();
            if self.is_within_rate(middle, rate) { high = middle } else { low = middle }
        }
        Some(high)
    }

    /// Returns whether the upper confidence bound on the overprediction rate with this risk
    /// multiplier is at most the target rate.
    fn is_within_rate(&self, risk_multiplier: f64, rate: Fraction) -> bool {
        let mut overpredictions = vec![0_u32; self.owner_samples.len()];
        for (sample, owner) in &self.samples {
            let allocation =
                sample.curve.maximize_net_gain(sample.requested, risk_multiplier, vm_risk_max(rate));
            overpredictions[*owner] +=
                u32::from(is_overprediction(allocation.to_fraction(), sample.requested, sample.untouched));
        }
        let counts = overpredictions.into_iter().zip(self.owner_samples.iter().copied());
        let (total, deviation) = total_and_clustered_deviation(counts);
        // The next outcome may be an overprediction even if no outcome was one so far.
        total.max(1.0) + CONFIDENCE_SIGMAS * deviation.max(1.0) <= rate.get() * self.samples.len() as f64
    }
}

/// Computes the number of overpredictions, and the standard deviation of this number if the VMs of
/// one owner are a cluster (the cluster-robust variance of a mean). `counts` is the number of
/// overpredictions and of VMs of each owner.
pub(super) fn total_and_clustered_deviation(counts: impl Iterator<Item = (u32, u32)> + Clone) -> (f64, f64) {
    let (total, vms) = counts.clone().fold((0.0, 0.0), |(total, vms), (overpredicted, of)| {
        (total + f64::from(overpredicted), vms + f64::from(of))
    });
    let rate = if vms > 0.0 { total / vms } else { 0.0 };
    let variance: f64 =
        counts.map(|(overpredicted, of)| (f64::from(overpredicted) - rate * f64::from(of)).powi(2)).sum();
    (total, variance.sqrt())
}
