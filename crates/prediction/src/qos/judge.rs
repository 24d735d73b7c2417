//! Judge of one running VM: collects evidence from samples and derives a verdict with hysteresis.

use std::collections::VecDeque;

use serde::Serialize;
use units::{
    Fraction, Ns,
    limits::{QOS_RECOVERY_TIME, QOS_SAMPLE_GAP_MAX},
};

use super::{Placement, Sample, SampleError};
use crate::sensitivity::{DRAM_BOUND_INDEX, Model};

/// Fraction of the pool node that a VM with a correct prediction accesses at most. The guest's
/// kernel accesses some pages of the node even if the workload does not.
const IDLE_POOL_SHARE_MAX: f64 = 0.02;
/// Number of samples with counters that a verdict requires.
const COUNTER_SAMPLES: usize = 3;
/// Number of samples that a verdict without counters requires.
const ACCESS_SAMPLES: usize = 6;
/// Fraction of the pool node that a VM must access in each interval so that it is harmed without
/// evidence from counters.
const ACCESSED_SHARE_WITHOUT_COUNTERS: f64 = 0.5;
/// Fraction of the harmed workloads of the training set that the judge may miss.
const MISSED_SHARE: f64 = 0.01;

/// Verdict about a running VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There is no evidence that pool memory slows the VM down beyond the margin.
    #[default]
    Fine,
    /// There is some evidence, but not enough to request a migration.
    Watch,
    /// The VM is slowed down beyond the margin.
    Migrate,
}

/// Probabilities at which the verdict changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// The VM is harmed if the median probability is above this value.
    migrate: f64,
    /// The VM is fine if the median probability is at most this value.
    clear: f64,
}

impl Thresholds {
    /// Chooses the thresholds so that the model misses at most 1 % of the harmed workloads in its
    /// cutoffs. The migration threshold is halfway to the next cutoff, which misses more.
    pub fn from_model(model: &Model) -> Self {
        let harmed = model.cutoffs().last().map_or(0.0, |cutoff| cutoff.fp);
        let allowed = model.cutoffs().partition_point(|cutoff| cutoff.fp <= MISSED_SHARE * harmed);
        let at_most = |index: usize| model.cutoffs().get(index).map(|cutoff| cutoff.at_most);
        let last_allowed = allowed.checked_sub(1).and_then(at_most).unwrap_or(0.0);
        let migrate = f64::midpoint(last_allowed, at_most(allowed).unwrap_or(1.0));
        Self { migrate, clear: migrate / 2.0 }
    }
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { migrate: 0.5, clear: 0.25 }
    }
}

/// Evidence of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The VM does not access its pool node, apart from its kernel.
    IdlePool,
    /// Probability of a slowdown beyond the margin, from counters.
    Probability {
        /// Probability, 0 to 1.
        probability: f64,
        /// DRAM-bound fraction of cycles, 0 to 1; 0 if it was not measured.
        dram_bound: f64,
    },
    /// Lower end of the accessed share of the pool node, without counters.
    Accessed {
        /// Fraction of the pool node, 0 to 1.
        share: f64,
    },
}

/// Reason of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// No sample with evidence arrived yet, or the host can observe neither counters nor accesses.
    NoEvidence,
    /// The VM does not access its pool node.
    IdlePool,
    /// The counters do not indicate a slowdown beyond the margin.
    Insensitive,
    /// Some samples indicate a slowdown beyond the margin.
    Suspected,
    /// Enough samples indicate a slowdown beyond the margin.
    Sensitive,
    /// The VM accesses much of its pool node, and its host has no counters.
    AccessedPool,
    /// The VM was harmed less than [`QOS_RECOVERY_TIME`] ago.
    Recovering,
}

/// Verdict, its reason and the evidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// Verdict.
    pub verdict: Verdict,
    /// Reason of the verdict.
    pub reason: Reason,
    /// Number of samples in the window.
    pub samples: usize,
    /// Median probability of a slowdown beyond the margin over the window, 0 to 1. The median is
    /// robust against a single sample in which the VM accessed its pool node.
    pub probability: f64,
    /// Expected benefit of a migration: the median of the probability times the DRAM-bound fraction
    /// of cycles, or times the accessed share without counters. 0 to 1.
    pub harm: f64,
}

/// State of the judge for one VM. Its size is constant.
#[derive(Clone, Debug)]
pub struct Judge {
    placement: Placement,
    window: VecDeque<Evidence>,
    last_sample: Option<Ns>,
    /// Time of the last sample at which the VM was harmed. `None` after the recovery.
    harmed_at: Option<Ns>,
}

impl Judge {
    /// Creates the judge of a VM that has just started.
    pub const fn new(placement: Placement) -> Self {
        Self { placement, window: VecDeque::new(), last_sample: None, harmed_at: None }
    }

    /// Adds a sample. `model` is trained on workloads whose counters were measured with pool
    /// memory. Without a model, counters are ignored. A gap of more than [`QOS_SAMPLE_GAP_MAX`]
    /// discards the earlier samples.
    ///
    /// # Errors
    /// [`SampleError`] if the sample is invalid. The state does not change.
    pub fn observe(
        &mut self,
        sample: &Sample,
        model: Option<&Model>,
        thresholds: Thresholds,
        now: Ns,
    ) -> Result<Judgement, SampleError> {
        sample.check(self.last_sample, now)?;
        if self.last_sample.is_some_and(|last| sample.at.since(last) > QOS_SAMPLE_GAP_MAX) {
            self.window.clear();
        }
        self.last_sample = Some(sample.at);
        if let Some(evidence) = self.evidence(sample, model) {
            self.window.truncate(ACCESS_SAMPLES - 1);
            self.window.push_front(evidence);
        }
        let judgement = self.judge(thresholds);
        match (judgement.reason, self.harmed_at) {
            (Reason::Sensitive | Reason::AccessedPool, _) => self.harmed_at = Some(sample.at),
            (_, Some(_)) if judgement.probability > thresholds.clear => self.harmed_at = Some(sample.at),
            (_, Some(harmed_at)) if sample.at.since(harmed_at) >= QOS_RECOVERY_TIME => self.harmed_at = None,
            _ => {}
        }
        Ok(self.judge(thresholds))
    }

    /// Derives the verdict from the samples so far.
    pub fn judge(&self, thresholds: Thresholds) -> Judgement {
        let judged = self.judge_window(thresholds);
        let is_recovering = self.harmed_at.is_some() && judged.verdict != Verdict::Migrate;
        if is_recovering {
            return Judgement { verdict: Verdict::Migrate, reason: Reason::Recovering, ..judged };
        }
        judged
    }

    /// Derives the verdict from the window, without hysteresis.
    fn judge_window(&self, thresholds: Thresholds) -> Judgement {
        let has_counters = !self.window.iter().any(|evidence| matches!(evidence, Evidence::Accessed { .. }));
        let required = if has_counters { COUNTER_SAMPLES } else { ACCESS_SAMPLES };
        let samples = self.window.len().min(required);
        let window = || self.window.iter().take(required);
        let probability = median(window().map(|evidence| evidence.probability(thresholds)));
        let harm = median(window().map(|evidence| evidence.harm(thresholds)));
        let is_suspected = window().any(|evidence| evidence.probability(thresholds) > thresholds.clear);
        let (verdict, reason) = match self.window.front() {
            None => (Verdict::Fine, Reason::NoEvidence),
            Some(_) if samples == required && probability > thresholds.migrate => {
                (Verdict::Migrate, if has_counters { Reason::Sensitive } else { Reason::AccessedPool })
            }
            Some(_) if is_suspected => (Verdict::Watch, Reason::Suspected),
            Some(Evidence::IdlePool) => (Verdict::Fine, Reason::IdlePool),
            Some(_) => (Verdict::Fine, Reason::Insensitive),
        };
        Judgement { verdict, reason, samples, probability, harm }
    }

    /// Derives the evidence of a sample, `None` if the sample contains none.
    fn evidence(&self, sample: &Sample, model: Option<&Model>) -> Option<Evidence> {
        let accessed = sample.accessed.map(|accessed| accessed.low.get());
        let touched = sample.touched.map(Fraction::get);
        if self.placement == Placement::Split
            && [accessed, touched].into_iter().flatten().any(|share| share <= IDLE_POOL_SHARE_MAX)
        {
            return Some(Evidence::IdlePool);
        }
        if let (Some(model), Some(counters)) = (model, &sample.counters) {
            let dram_bound = counters[DRAM_BOUND_INDEX];
            return Some(Evidence::Probability {
                probability: model.probability(counters),
                dram_bound: if dram_bound.is_nan() { 0.0 } else { dram_bound.min(1.0) },
            });
        }
        match self.placement {
            Placement::Split => accessed.map(|share| Evidence::Accessed { share }),
            Placement::EntirelyOnPool => None,
        }
    }
}

/// Returns the median, the smaller of the two middle values for an even number of values, or 0
/// without values.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

impl Evidence {
    /// Returns the probability of a slowdown beyond the margin. Without counters, it reaches the
    /// migration threshold at [`ACCESSED_SHARE_WITHOUT_COUNTERS`].
    fn probability(&self, thresholds: Thresholds) -> f64 {
        match *self {
            Self::IdlePool => 0.0,
            Self::Probability { probability, .. } => probability,
            Self::Accessed { share } => {
                (share / ACCESSED_SHARE_WITHOUT_COUNTERS * thresholds.migrate).min(1.0)
            }
        }
    }

    /// Returns the expected benefit of a migration, 0 to 1.
    fn harm(&self, thresholds: Thresholds) -> f64 {
        match *self {
            Self::IdlePool => 0.0,
            Self::Probability { probability, dram_bound } => probability * dram_bound,
            Self::Accessed { share } => self.probability(thresholds) * share,
        }
    }
}
