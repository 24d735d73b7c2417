//! Measures the loss of a VM whose pool memory was moved to local memory: the increase of its
//! instructions per cycle. The result is a label for the training of models. Pond labels workloads in
//! the same way, by a run with local memory and a run with pool memory (sections 4.5 A and 5).

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use units::{
    Ns,
    limits::{QOS_SAMPLE_GAP_MAX, QOS_SAMPLE_INTERVAL_MIN},
};

use super::{Evidence, Judge, LabelledRun, Placement, judge::median_counters};
use crate::sensitivity::{COUNTER_NAMES, IPC_INDEX, SLOWDOWN_RANGE, Workload};

/// Number of samples before the move that a measurement requires.
const SAMPLES_BEFORE_MIN: usize = 6;
/// Longest time between the last sample before the move and the first sample after it. The workload
/// may change in a longer time.
const MOVE_GAP_MAX: Ns = Ns::secs(900);
/// Number of samples after the move that do not count, because the VM has only just been moved.
const SETTLING_SAMPLES: usize = 2;
/// Number of samples after the move from which the loss is computed.
const SAMPLES_AFTER: usize = 10;
/// Largest standard error of a loss that is used as a label. A workload with larger variations has no
/// label.
const LOSS_ERROR_MAX: f64 = 0.02;
/// Losses that are used as labels. A larger change of the instructions per cycle has other reasons than the
/// memory, such as a change of the workload. Below zero, it must be explained by the standard error.
const LOSS_LABEL_RANGE: RangeInclusive<f64> = -2.0 * LOSS_ERROR_MAX..=3.0;

/// Counters of a sample.
type Counters = [f64; COUNTER_NAMES.len()];

/// Measurement of the loss of one VM. It begins with the end of a move. Its size is bounded.
#[derive(Clone, Debug)]
pub struct MoveMeasurement {
    placement: Placement,
    before: Evidence,
    /// Logarithms of the instructions per cycle before the move, the newest first.
    log_ipc_before: Vec<f64>,
    /// Counters after the move, the oldest first, including those that do not count.
    after: Vec<Counters>,
    /// Time of the last sample before the move.
    last_before: Ns,
    /// Time of the last sample.
    last_sample: Ns,
}

/// Progress of a measurement after a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum MoveProgress {
    /// More samples are required.
    Measuring,
    /// The loss was measured.
    Measured(Box<MeasuredLoss>),
    /// The samples after the move, or after a gap in them, began too late for a comparison.
    TooLate,
}

/// Measured loss of a VM that was moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredLoss {
    /// Placement of the memory before the move.
    pub placement: Placement,
    /// Evidence before the move, the medians of the samples.
    pub before: Evidence,
    /// Counters after the move, the medians of the samples.
    pub after: Counters,
    /// Slowdown before the move relative to local memory, in [`SLOWDOWN_RANGE`].
    pub loss: f64,
    /// Standard error of the loss: from the variation of the samples, or from a trend within the samples
    /// before or after the move, if it is larger.
    pub standard_error: f64,
}

impl MeasuredLoss {
    /// Returns whether the loss is exact enough and plausible enough for a label.
    pub fn is_label(&self) -> bool {
        self.standard_error <= LOSS_ERROR_MAX && LOSS_LABEL_RANGE.contains(&self.loss)
    }

    /// Returns the run before the move, a label for a model of the loss. VMs are moved because of their
    /// estimates, so the run is selected.
    pub fn labelled_run(&self, program: String) -> LabelledRun {
        let workload = Workload { program, counters: self.before.counters, slowdown: self.loss };
        let Evidence { pool_loads, latency_ratio, .. } = self.before;
        let placement = self.placement;
        LabelledRun { workload, placement, pool_loads, latency_ratio, is_selected: true }
    }

    /// Returns the workload with local memory, a label for a model of latency sensitivity. `None` if only
    /// a part of the memory was on the pool, because the slowdown with pool memory alone is unknown.
    pub fn workload(&self, program: String) -> Option<Workload> {
        let workload = Workload { program, counters: self.after, slowdown: self.loss };
        (self.placement == Placement::EntirelyOnPool).then_some(workload)
    }
}

impl MoveMeasurement {
    /// Begins a measurement with the samples of a VM before its move. Returns `None` if they contain too
    /// few instruction counts, or if the VM accessed its pool memory in only some of them: the samples
    /// after the move do not show which of them to compare.
    pub fn after_move(judge: &Judge) -> Option<Self> {
        let (before, counters) = judge.evidence_of_all_samples()?;
        let log_ipc_before: Vec<f64> = counters.filter_map(log_ipc).collect();
        (log_ipc_before.len() >= SAMPLES_BEFORE_MIN).then(|| Self {
            placement: judge.placement(),
            before,
            log_ipc_before,
            after: Vec::new(),
            last_before: judge.last_sample(),
            last_sample: judge.last_sample(),
        })
    }

    /// Adds a sample after the move, which ends at `at`. Ignores samples without instruction counts, and
    /// samples less than [`QOS_SAMPLE_INTERVAL_MIN`] after the previous one. A gap of more than
    /// [`QOS_SAMPLE_GAP_MAX`] between samples after the move discards the earlier ones.
    pub fn observe(&mut self, counters: &Counters, at: Ns) -> MoveProgress {
        let gap = at.since(self.last_sample);
        if log_ipc(counters).is_none() || gap < QOS_SAMPLE_INTERVAL_MIN {
            return MoveProgress::Measuring;
        }
        if gap > QOS_SAMPLE_GAP_MAX {
            self.after.clear();
        }
        if self.after.is_empty() && at.since(self.last_before) > MOVE_GAP_MAX {
            return MoveProgress::TooLate;
        }
        self.last_sample = at;
        self.after.push(*counters);
        match self.after.get(SETTLING_SAMPLES..) {
            Some(settled) if settled.len() >= SAMPLES_AFTER => {
                MoveProgress::Measured(Box::new(self.loss(settled)))
            }
            _ => MoveProgress::Measuring,
        }
    }

    fn loss(&self, settled: &[Counters]) -> MeasuredLoss {
        let log_ipc_after: Vec<f64> = settled.iter().filter_map(log_ipc).collect();
        let ((before, before_error), (after, after_error)) =
            (mean_and_error(&self.log_ipc_before), mean_and_error(&log_ipc_after));
        let ratio = (after - before).exp();
        MeasuredLoss {
            placement: self.placement,
            before: self.before,
            after: median_counters(settled.iter()),
            loss: (ratio - 1.0).clamp(*SLOWDOWN_RANGE.start(), *SLOWDOWN_RANGE.end()),
            standard_error: ratio * before_error.hypot(after_error),
        }
    }
}

/// Returns the logarithm of the instructions per cycle; `None` if they were not measured.
fn log_ipc(counters: &Counters) -> Option<f64> {
    Some(counters[IPC_INDEX].ln()).filter(|log| log.is_finite())
}

/// Returns the mean of at least four values and its standard error. The variance of few samples is
/// uncertain, so the error is that of Student's t distribution. If the means of the first and the second
/// half differ by more, half of the difference is the error: the workload was changing.
fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (count, center) = (values.len() as f64, mean(values));
    let squares: f64 = values.iter().map(|value| (value - center).powi(2)).sum();
    let variance_of_mean = squares / (count - 1.0) / count;
    let student = (count - 1.0) / (count - 3.0);
    let (first, second) = values.split_at(values.len() / 2);
    let trend = (mean(first) - mean(second)).abs() / 2.0;
    (center, (variance_of_mean * student).sqrt().max(trend))
}
