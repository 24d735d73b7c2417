//! Judge of one running VM: collects evidence from samples and derives a verdict with hysteresis.

use std::{collections::VecDeque, ops::Range};

use serde::Serialize;
use units::{
    Fraction, Ns,
    limits::{QOS_RECOVERY_TIME, QOS_SAMPLE_GAP_MAX},
};

use super::{
    Evidence, LoadSource, LossModel, Placement, PoolLoads, Quality, Sample, SampleError, loss::LOSS_OFFSET,
};
use crate::sensitivity::COUNTER_NAMES;

/// Fraction of the pool node that a VM with a correct prediction accesses at most. The guest's
/// kernel accesses some pages of the node even if the workload does not.
const IDLE_POOL_SHARE_MAX: f64 = 0.02;
/// Largest number of samples from which the loss of a VM is estimated.
const WINDOW: usize = 40;
/// Number of the latest samples that reveal a change of the workload. The verdict `Migrate` requires
/// as many samples.
const RECENT_WINDOW: usize = 3;
/// Number of samples with counters that the verdict `Migrate` requires. It is smaller than
/// [`RECENT_WINDOW`], so that a sample without counters does not delay the verdict.
const COUNTER_SAMPLES_MIN: usize = 2;
/// Smallest ratio of the losses in the recent and in the whole window that is a change of the
/// workload.
const CHANGE_RATIO: f64 = 1.35;
/// Range of severities in which the whole window is used.
const NEAR_SEVERITY: Range<f64> = 0.25..2.0;
/// Number of samples that the verdict `Migrate` requires without counters.
const ACCESS_WINDOW: usize = 3;
/// Median fraction of the pool node in [`ACCESS_WINDOW`] intervals above which a VM without counters
/// is harmed.
const ACCESSED_SHARE_WITHOUT_COUNTERS: f64 = 0.5;
/// Severity above which a VM is watched, and up to which a harmed VM recovers.
const WATCHED_SEVERITY: f64 = 0.5;

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
    /// The VM accesses a small part of its pool node, and its host has no counters.
    FewAccesses,
    /// Some samples indicate a slowdown beyond the margin.
    Suspected,
    /// Enough samples indicate a slowdown beyond the margin.
    Sensitive,
    /// The VM accesses much of its pool node, and its host has no counters.
    AccessedPool,
    /// The VM was harmed, and its severity has not been low for [`QOS_RECOVERY_TIME`].
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
    /// Estimated slowdown relative to local memory. `None` without counters.
    pub loss: Option<f64>,
    /// Estimated slowdown divided by the slowdown above which the VM is harmed; without counters, the
    /// accessed share divided by the share above which the VM is harmed. The most harmed VMs have the
    /// highest severity.
    pub severity: f64,
}

impl Judgement {
    /// Judgement without any evidence of harm.
    const fn fine(reason: Reason) -> Self {
        Self { verdict: Verdict::Fine, reason, samples: 0, loss: None, severity: 0.0 }
    }

    /// Derives the verdict from a severity. `harmed` is the reason of the verdict `Migrate`, which
    /// requires enough samples.
    fn from_severity(severity: f64, loss: Option<f64>, samples: usize, harmed: Option<Reason>) -> Self {
        let (verdict, reason) = match harmed {
            Some(harmed) if severity > 1.0 => (Verdict::Migrate, harmed),
            _ if severity > WATCHED_SEVERITY => (Verdict::Watch, Reason::Suspected),
            _ => (Verdict::Fine, Reason::Insensitive),
        };
        Self { verdict, reason, samples, loss, severity }
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
    pool_loads: Option<PoolLoads>,
}

/// State of the judge for one VM. Its size is bounded.
#[derive(Clone, Debug)]
pub struct Judge {
    placement: Placement,
    /// Idle latency of the pool divided by the idle latency of local memory; NaN if unknown.
    latency_ratio: f64,
    /// Latest observations, the newest first.
    window: VecDeque<Observation>,
    last_sample: Option<Ns>,
    /// Time of the last sample that harmed the VM or delayed its recovery. `None` after the recovery.
    harmed_at: Option<Ns>,
    judgement: Judgement,
}

impl Judge {
    /// Creates the judge of a VM that has just started. The latency of the pool is unknown.
    pub fn new(placement: Placement) -> Self {
        Self {
            placement,
            latency_ratio: f64::NAN,
            window: VecDeque::new(),
            last_sample: None,
            harmed_at: None,
            judgement: Judgement::fine(Reason::NoEvidence),
        }
    }

    /// Sets the idle latency of the pool divided by the idle latency of local memory, as the host
    /// reports it (HMAT, CDAT) or its operator measured it. A ratio that is not positive and finite
    /// counts as unknown.
    pub fn set_latency_ratio(&mut self, ratio: f64) {
        self.latency_ratio = if ratio.is_normal() && ratio > 0.0 { ratio } else { f64::NAN };
    }

    /// Forgets that the VM was harmed, so that its recovery is not awaited: another model judges it from now
    /// on.
    pub fn forget_harm(&mut self) {
        self.harmed_at = None;
    }

    /// Returns the verdict from the samples so far.
    pub const fn judgement(&self) -> Judgement {
        self.judgement
    }

    /// Returns the placement of the VM's memory.
    pub(super) const fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns the end of the last sample; zero without samples.
    pub(super) fn last_sample(&self) -> Ns {
        self.last_sample.unwrap_or_default()
    }

    /// Returns the evidence from the samples that the verdict is based on, and their counters. `None` without
    /// counters, or if the VM did not access its pool node in one of the samples.
    pub(super) fn evidence_of_all_samples(
        &self,
    ) -> Option<(Evidence, impl Iterator<Item = &[f64; COUNTER_NAMES.len()]>)> {
        let (evidence, _) = self.evidence(WINDOW)?;
        let is_always_monitored = self.window.iter().all(|observation| observation.is_monitored);
        let counters = self.window.iter().filter_map(|observation| observation.counters.as_ref());
        is_always_monitored.then_some((evidence, counters))
    }

    /// Adds a sample and returns the new verdict. Without a model, counters are ignored. A gap of
    /// more than [`QOS_SAMPLE_GAP_MAX`] discards the earlier samples.
    ///
    /// # Errors
    /// [`SampleError`] if the sample is invalid. The state does not change.
    pub fn observe(
        &mut self,
        sample: &Sample,
        model: Option<&LossModel>,
        now: Ns,
    ) -> Result<Judgement, SampleError> {
        sample.check(self.last_sample, now)?;
        if self.last_sample.is_some_and(|last| sample.at.since(last) > QOS_SAMPLE_GAP_MAX) {
            self.window.clear();
        }
        self.last_sample = Some(sample.at);
        self.window.truncate(WINDOW - 1);
        self.window.push_front(self.observation(sample));
        let judged = self.judge_window(model);
        self.harmed_at = match self.harmed_at {
            _ if judged.verdict == Verdict::Migrate => Some(sample.at),
            Some(_) if judged.severity > WATCHED_SEVERITY => Some(sample.at),
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
            pool_loads: sample.pool_loads,
        }
    }

    /// Derives the verdict from the window, without hysteresis.
    fn judge_window(&mut self, model: Option<&LossModel>) -> Judgement {
        let recent = self.window.len().min(RECENT_WINDOW);
        // A single access to the pool node is no evidence.
        if 2 * self.monitored(RECENT_WINDOW).count() <= recent {
            return Judgement::fine(Reason::IdlePool);
        }
        if let Some(model) = model
            && let Some(judged) = self.judge_counters(model)
        {
            return judged;
        }
        let shares = self.monitored(ACCESS_WINDOW).filter_map(|observation| observation.accessed);
        match self.placement {
            Placement::Split => judge_accesses(shares.collect()),
            Placement::EntirelyOnPool => Judgement::fine(Reason::NoEvidence),
        }
    }

    /// Returns the monitored observations among the latest `count`.
    fn monitored(&self, count: usize) -> impl Iterator<Item = &Observation> + Clone {
        self.window.iter().take(count).filter(|observation| observation.is_monitored)
    }

    /// Judges a VM by the loss that the model estimates. Returns `None` without recent counters. A
    /// change of the workload discards the samples before the change.
    fn judge_counters(&mut self, model: &LossModel) -> Option<Judgement> {
        let (recent, quality) = self.evidence(RECENT_WINDOW)?;
        let mut estimate = model.estimate(&recent, self.placement, quality);
        // Far from the threshold, the noise of a few samples does not matter.
        if self.window.len() > RECENT_WINDOW && NEAR_SEVERITY.contains(&estimate.severity()) {
            let long_term = model.estimate(&self.evidence(WINDOW)?.0, self.placement, quality);
            let losses = [estimate.loss.min(long_term.loss), estimate.loss.max(long_term.loss)];
            let [low, high] = losses.map(|loss| loss + LOSS_OFFSET);
            if high > CHANGE_RATIO * low {
                // A change is visible in the medians as soon as two samples follow it.
                self.window.truncate(RECENT_WINDOW - 1);
            } else {
                estimate = long_term;
            }
        }
        let samples = self.monitored(WINDOW).filter(|observation| observation.counters.is_some()).count();
        let has_enough =
            samples >= COUNTER_SAMPLES_MIN && self.monitored(RECENT_WINDOW).count() >= RECENT_WINDOW;
        let harmed = has_enough.then_some(Reason::Sensitive);
        Some(Judgement::from_severity(estimate.severity(), Some(estimate.loss), samples, harmed))
    }

    /// Returns the medians of the monitored observations among the latest `count`, and the quality
    /// of the pool evidence. The median is robust against a single outlier. Returns `None` without
    /// counters.
    fn evidence(&self, count: usize) -> Option<(Evidence, Quality)> {
        let measured = || self.monitored(count).filter_map(|observation| observation.counters.as_ref());
        measured().next()?;
        let counters = median_counters(measured());
        let loads = || self.monitored(count).filter_map(|observation| observation.pool_loads);
        let is_sampled = loads().any(|loads| loads.source == LoadSource::AccessSampling);
        let (pool_loads, is_sampled) = match self.placement {
            Placement::EntirelyOnPool => (1.0, false),
            Placement::Split => (median(loads().map(|loads| loads.share.get())), is_sampled),
        };
        let quality = match is_sampled {
            _ if pool_loads.is_nan() || self.latency_ratio.is_nan() => Quality::Unknown,
            true => Quality::Sampled,
            false => Quality::Measured,
        };
        Some((Evidence { counters, pool_loads, latency_ratio: self.latency_ratio }, quality))
    }
}

/// Returns the median of each counter. Counters that were never measured are NaN.
pub(super) fn median_counters<'a>(
    measured: impl Iterator<Item = &'a [f64; COUNTER_NAMES.len()]> + Clone,
) -> [f64; COUNTER_NAMES.len()] {
    std::array::from_fn(|index| median(measured.clone().map(|counters| counters[index])))
}

/// Judges a VM by the accessed shares of its pool node alone.
fn judge_accesses(shares: Vec<f64>) -> Judgement {
    let samples = shares.len();
    if samples == 0 {
        return Judgement::fine(Reason::NoEvidence);
    }
    let severity = median(shares) / ACCESSED_SHARE_WITHOUT_COUNTERS;
    let harmed = (samples == ACCESS_WINDOW).then_some(Reason::AccessedPool);
    match Judgement::from_severity(severity, None, samples, harmed) {
        fine @ Judgement { verdict: Verdict::Fine, .. } => Judgement { reason: Reason::FewAccesses, ..fine },
        judged => judged,
    }
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
