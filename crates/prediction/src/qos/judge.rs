//! Judge of one running VM: collects evidence from samples and derives a verdict with hysteresis.

use std::collections::VecDeque;

use serde::Serialize;
use units::{
    Fraction, Ns,
    limits::{QOS_RECOVERY_TIME, QOS_SAMPLE_GAP_MAX},
};

use super::{Placement, Sample, SampleError};
use crate::sensitivity::{COUNTER_NAMES, DRAM_BOUND_INDEX, Model};

/// Fraction of the pool node that a VM with a correct prediction accesses at most. The guest's
/// kernel accesses some pages of the node even if the workload does not.
const IDLE_POOL_SHARE_MAX: f64 = 0.02;
/// Number of samples from which the counters of a VM are computed.
const COUNTER_WINDOW: usize = 3;
/// Number of samples with counters that the verdict `Migrate` requires. It is smaller than the
/// window, so that a sample without counters does not delay the verdict.
const COUNTER_SAMPLES_MIN: usize = 2;
/// Number of samples that the verdict `Migrate` requires without counters.
const ACCESS_WINDOW: usize = 6;
/// Fraction of the pool node that a VM must access in each interval so that it is harmed without
/// evidence from counters.
const ACCESSED_SHARE_WITHOUT_COUNTERS: f64 = 0.5;
/// Fraction of the harmed workloads of the training set that the judge may miss.
const MISSED_SHARE: f64 = 0.02;

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
    /// The VM is harmed if the probability is above this value.
    migrate: f64,
    /// The VM is fine if the probability is at most this value.
    clear: f64,
}

impl Thresholds {
    /// Chooses the thresholds so that the model misses at most 2 % of the harmed workloads in its
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
    /// Number of samples that the verdict is based on.
    pub samples: usize,
    /// Probability of a slowdown beyond the margin, 0 to 1.
    pub probability: f64,
    /// Expected benefit of a migration: the probability times the DRAM-bound fraction of cycles, or
    /// times the accessed share without counters. 0 to 1.
    pub harm: f64,
}

impl Judgement {
    /// Judgement without any evidence of harm.
    const fn fine(reason: Reason) -> Self {
        Self { verdict: Verdict::Fine, reason, samples: 0, probability: 0.0, harm: 0.0 }
    }
}

/// Facts of one sample that the judge keeps.
#[derive(Clone, Copy, Debug)]
struct Observation {
    /// Whether the VM must be monitored: it is entirely on the pool, or its workload accessed the
    /// pool node.
    is_monitored: bool,
    /// Lower end of the confidence interval of the accessed share.
    accessed: Option<f64>,
    counters: Option<[f64; COUNTER_NAMES.len()]>,
}

/// State of the judge for one VM. Its size is bounded.
#[derive(Clone, Debug)]
pub struct Judge {
    placement: Placement,
    /// Latest observations, the newest first.
    window: VecDeque<Observation>,
    last_sample: Option<Ns>,
    /// Time of the last sample at which the VM was harmed. `None` after the recovery.
    harmed_at: Option<Ns>,
    judgement: Judgement,
}

impl Judge {
    /// Creates the judge of a VM that has just started.
    pub const fn new(placement: Placement) -> Self {
        Self {
            placement,
            window: VecDeque::new(),
            last_sample: None,
            harmed_at: None,
            judgement: Judgement::fine(Reason::NoEvidence),
        }
    }

    /// Returns the verdict from the samples so far.
    pub const fn judgement(&self) -> Judgement {
        self.judgement
    }

    /// Adds a sample and returns the new verdict. `model` is trained on workloads whose counters
    /// were measured with pool memory. Without a model, counters are ignored. A gap of more than
    /// [`QOS_SAMPLE_GAP_MAX`] discards the earlier samples.
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
        self.window.truncate(ACCESS_WINDOW - 1);
        self.window.push_front(self.observation(sample));
        let judged = self.judge_window(model, thresholds);
        self.harmed_at = match self.harmed_at {
            _ if judged.verdict == Verdict::Migrate => Some(sample.at),
            Some(_) if judged.probability > thresholds.clear => Some(sample.at),
            Some(harmed_at) if sample.at.since(harmed_at) >= QOS_RECOVERY_TIME => None,
            harmed_at => harmed_at,
        };
        self.judgement = if self.harmed_at.is_some() && judged.verdict != Verdict::Migrate {
            Judgement { verdict: Verdict::Migrate, reason: Reason::Recovering, ..judged }
        } else {
            judged
        };
        Ok(self.judgement)
    }

    fn observation(&self, sample: &Sample) -> Observation {
        let accessed = sample.accessed.map(|accessed| accessed.estimate.get());
        let touched = sample.touched.map(Fraction::get);
        let is_idle = [accessed, touched].into_iter().flatten().any(|share| share <= IDLE_POOL_SHARE_MAX);
        Observation {
            is_monitored: self.placement == Placement::EntirelyOnPool || !is_idle,
            accessed: sample.accessed.map(|accessed| accessed.low.get()),
            counters: sample.counters,
        }
    }

    /// Derives the verdict from the window, without hysteresis.
    fn judge_window(&self, model: Option<&Model>, thresholds: Thresholds) -> Judgement {
        let monitored = |window: usize| {
            let recent = self.window.iter().take(window);
            recent.filter(|observation| observation.is_monitored).collect::<Vec<_>>()
        };
        let recent = monitored(COUNTER_WINDOW);
        // A single access to the pool node is no evidence.
        if 2 * recent.len() <= self.window.len().min(COUNTER_WINDOW) {
            return Judgement::fine(Reason::IdlePool);
        }
        let counters: Vec<&[f64; COUNTER_NAMES.len()]> =
            recent.iter().filter_map(|observation| observation.counters.as_ref()).collect();
        if let Some(model) = model
            && !counters.is_empty()
        {
            return judge_counters(model, &counters, thresholds);
        }
        let shares = monitored(ACCESS_WINDOW).into_iter().filter_map(|observation| observation.accessed);
        match self.placement {
            Placement::Split => judge_accesses(shares.collect(), thresholds),
            Placement::EntirelyOnPool => Judgement::fine(Reason::NoEvidence),
        }
    }
}

/// Judges a VM by the medians of its counters. The median is robust against a single outlier.
fn judge_counters(
    model: &Model,
    counters: &[&[f64; COUNTER_NAMES.len()]],
    thresholds: Thresholds,
) -> Judgement {
    let medians = std::array::from_fn(|index| median(counters.iter().map(|counters| counters[index])));
    let probability = model.probability(&medians);
    let dram_bound = medians[DRAM_BOUND_INDEX];
    let harm = if dram_bound.is_nan() { 0.0 } else { probability * dram_bound.min(1.0) };
    let has_enough = counters.len() >= COUNTER_SAMPLES_MIN;
    let (verdict, reason) = if probability > thresholds.migrate && has_enough {
        (Verdict::Migrate, Reason::Sensitive)
    } else if probability > thresholds.clear {
        (Verdict::Watch, Reason::Suspected)
    } else {
        (Verdict::Fine, Reason::Insensitive)
    };
    Judgement { verdict, reason, samples: counters.len(), probability, harm }
}

/// Judges a VM by the accessed shares of its pool node alone. The probability reaches the migration
/// threshold at [`ACCESSED_SHARE_WITHOUT_COUNTERS`].
fn judge_accesses(shares: Vec<f64>, thresholds: Thresholds) -> Judgement {
    let samples = shares.len();
    if samples == 0 {
        return Judgement::fine(Reason::NoEvidence);
    }
    let share = median(shares);
    let probability = (share / ACCESSED_SHARE_WITHOUT_COUNTERS * thresholds.migrate).min(1.0);
    let (verdict, reason) = if probability > thresholds.migrate && samples == ACCESS_WINDOW {
        (Verdict::Migrate, Reason::AccessedPool)
    } else if probability > thresholds.clear {
        (Verdict::Watch, Reason::Suspected)
    } else {
        (Verdict::Fine, Reason::Insensitive)
    };
    Judgement { verdict, reason, samples, probability, harm: probability * share }
}

/// Returns the median of the values that are not NaN, the mean of the two middle values for an even
/// number of values, or NaN without values.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    values.sort_unstable_by(f64::total_cmp);
    match values.as_slice() {
        [] => f64::NAN,
        values => f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]),
    }
}
