//! Model of the loss of a running VM: a random forest estimates the slowdown from the counters, the
//! fraction of loads that the pool serves, and the latency of the pool. The error of the estimate
//! on programs that a tree did not see (out of bag) determines the loss at which a VM is harmed.

use units::Fraction;

use super::Placement;
use crate::{
    sensitivity::{
        COUNTER_NAMES, DRAM_BOUND_INDEX, DRAM_LATENCY_BOUND_INDEX, IPC_INDEX, L3_MPKI_INDEX, MLP_INDEX,
        STORE_BOUND_INDEX, Workload, backtest::EvaluationError, program_groups,
    },
    trees::{
        Ensemble, FeatureColumns, TreeParams,
        boost::quantile_index,
        forest::{ForestParams, fit_forest},
    },
};

/// Evidence from which the loss of a running VM is estimated. Values that were not measured are NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evidence {
    /// Core counters with the memory of the placement, in the order of [`COUNTER_NAMES`].
    pub counters: [f64; COUNTER_NAMES.len()],
    /// Fraction of the loads from memory that the pool serves, 0 to 1.
    pub pool_loads: f64,
    /// Idle latency of the pool divided by the idle latency of local memory.
    pub latency_ratio: f64,
}

/// Added fraction of the latency that is assumed for the first estimate if it is unknown. The forest
/// corrects it.
const UNKNOWN_ADDED_FRACTION: f64 = 0.5;
/// Upper bound on the fraction of cycles that the pool adds.
const LOST_CYCLES_MAX: f64 = 0.9;
/// Offset of the loss before the logarithm. Losses far below it are equal for the model.
pub(super) const LOSS_OFFSET: f64 = 0.01;
/// Number of inputs of the forest.
const INPUTS: usize = COUNTER_NAMES.len() + 5;

impl Evidence {
    /// Returns the fraction that the pool adds to the latency of the average load, relative to the
    /// latency with the pool.
    fn added_latency_fraction(&self) -> f64 {
        let added = self.pool_loads * (self.latency_ratio - 1.0);
        added / (1.0 + added)
    }

    /// Estimates the loss if the pool adds a fraction to these stalls, given as a fraction of the
    /// cycles.
    fn loss_of_stalls(&self, stalls: f64) -> f64 {
        let added = self.added_latency_fraction();
        let added = if added.is_nan() { UNKNOWN_ADDED_FRACTION } else { added };
        let lost = (stalls * added).clamp(0.0, LOST_CYCLES_MAX);
        lost / (1.0 - lost)
    }

    /// Estimates the loss from all stalls on memory. The forest predicts the ratio of the loss to
    /// this estimate, which varies much less than the loss.
    fn first_estimate(&self) -> f64 {
        let stalls = self.counters[DRAM_BOUND_INDEX] + self.counters[STORE_BOUND_INDEX];
        if stalls.is_nan() { 0.0 } else { self.loss_of_stalls(stalls) }
    }

    /// Computes the inputs of the forest: the counters, the fraction of pool loads, the added
    /// latency, and estimates of the loss from parts of the stalls and from the misses that do not
    /// overlap.
    fn inputs(&self) -> [f64; INPUTS] {
        let counter = |index: usize| self.counters[index];
        let serial_misses = counter(L3_MPKI_INDEX) * counter(IPC_INDEX) / counter(MLP_INDEX).max(0.5);
        let derived = [
            self.pool_loads,
            self.added_latency_fraction(),
            self.loss_of_stalls(counter(DRAM_LATENCY_BOUND_INDEX)),
            self.loss_of_stalls(counter(DRAM_BOUND_INDEX)),
            serial_misses * self.pool_loads * (self.latency_ratio - 1.0),
        ];
        let mut inputs = [f64::NAN; INPUTS];
        inputs[..COUNTER_NAMES.len()].copy_from_slice(&self.counters);
        inputs[COUNTER_NAMES.len()..].copy_from_slice(&derived);
        inputs
    }

    /// Returns the logarithm of the ratio of a loss to the first estimate.
    fn log_ratio(&self, loss: f64) -> f64 {
        ((loss.max(0.0) + LOSS_OFFSET) / (self.first_estimate() + LOSS_OFFSET)).ln()
    }

    /// Returns the loss for a predicted [`Self::log_ratio`].
    fn loss_for(&self, log_ratio: f64) -> f64 {
        log_ratio.exp() * (self.first_estimate() + LOSS_OFFSET) - LOSS_OFFSET
    }
}

/// Labelled run of a workload with a part of its memory on the pool.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelledRun {
    /// Program, counters with the memory of the placement, and slowdown relative to local memory.
    pub workload: Workload,
    /// Placement of the memory.
    pub placement: Placement,
    /// Fraction of the loads from memory that the pool served, 0 to 1.
    pub pool_loads: f64,
    /// Idle latency of the pool divided by the idle latency of local memory.
    pub latency_ratio: f64,
}

impl LabelledRun {
    /// Returns the run as a host sees it that does not know its latencies or the pool loads.
    fn without_pool_evidence(&self) -> Self {
        let pool_loads = match self.placement {
            Placement::EntirelyOnPool => self.pool_loads,
            Placement::Split => f64::NAN,
        };
        Self { pool_loads, latency_ratio: f64::NAN, ..self.clone() }
    }

    fn evidence(&self) -> Evidence {
        Evidence {
            counters: self.workload.counters,
            pool_loads: self.pool_loads,
            latency_ratio: self.latency_ratio,
        }
    }
}

/// Quality of the evidence about the pool. Each placement and quality has a threshold. `Sampled` uses
/// the errors of `Measured`, with a higher probability of harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quality {
    /// The pool loads are measured, or all memory is on the pool. The latencies are known.
    Measured,
    /// The pool loads are sampled. The latencies are known.
    Sampled,
    /// The pool loads or the latencies are unknown.
    Unknown,
}

impl Quality {
    const ALL: [Self; 3] = [Self::Measured, Self::Sampled, Self::Unknown];

    /// Returns the probability of harm above which a VM is harmed. A missed VM is a larger part of
    /// the few harmed VMs than a false alarm is of the many others, so this probability is low.
    /// With less exact evidence, a low probability would cause too many false alarms.
    const fn harm_probability(self) -> f64 {
        match self {
            Self::Measured => HARM_PROBABILITY,
            Self::Sampled | Self::Unknown => 0.5,
        }
    }
}

/// Model of the loss of running VMs.
#[derive(Clone, Debug, PartialEq)]
pub struct LossModel {
    forest: Ensemble,
    /// Estimated loss above which a VM is harmed, by placement and quality.
    thresholds: [[f64; Quality::ALL.len()]; 2],
}

/// Parameters of the random forest.
const FOREST_PARAMS: ForestParams =
    ForestParams { trees: 100, tree: TreeParams { leaves_max: 512, leaf_rows_min: 4, column_fraction: 0.4 } };
/// Probability of harm above which a VM with exact evidence is harmed.
const HARM_PROBABILITY: f64 = 0.2;
/// Largest ratio of an estimate to the margin, and of the margin to an estimate, at which the error
/// of the estimate counts for the threshold.
const NEAR_RATIO: f64 = 2.0;
/// Number of estimates near the margin that a threshold requires.
const NEAR_RUNS_MIN: usize = 20;

impl LossModel {
    /// Trains a model on labelled runs. The result is deterministic for the same arguments.
    ///
    /// # Errors
    /// Returns [`EvaluationError`] if there are too few programs, or if all or none of the
    /// workloads are slowed down beyond the margin.
    pub fn train(runs: &[LabelledRun], pdm: Fraction, seed: u64) -> Result<Self, EvaluationError> {
        EvaluationError::check(runs.iter().map(|run| &run.workload), pdm)?;
        let with_unknown = runs.iter().flat_map(|run| [run.clone(), run.without_pool_evidence()]);
        let runs: Vec<LabelledRun> = with_unknown.collect();
        let mut columns = FeatureColumns::new(INPUTS);
        runs.iter().for_each(|run| columns.push(&run.evidence().inputs()));
        let targets: Vec<f64> =
            runs.iter().map(|run| run.evidence().log_ratio(run.workload.slowdown)).collect();
        let groups = program_groups(runs.iter().map(|run| &run.workload));
        let fitted = fit_forest(&columns, &targets, &groups, &FOREST_PARAMS, seed);
        let scored = |placement: Placement, is_known: bool| {
            let all = runs.iter().zip(&fitted.out_of_bag);
            let matching = all
                .filter(move |(run, _)| run.placement == placement && run.latency_ratio.is_nan() != is_known);
            matching.filter_map(|(run, scored)| {
                Some((run.evidence().loss_for((*scored)?), run.workload.slowdown))
            })
        };
        let thresholds = [Placement::EntirelyOnPool, Placement::Split].map(|placement| {
            Quality::ALL.map(|quality| {
                let scored = scored(placement, quality != Quality::Unknown);
                choose_threshold(scored, pdm.get(), quality.harm_probability())
            })
        });
        Ok(Self { forest: fitted.forest, thresholds })
    }

    /// Estimates the slowdown relative to local memory.
    pub fn loss(&self, evidence: &Evidence) -> f64 {
        evidence.loss_for(self.forest.predict_one(&evidence.inputs()))
    }

    /// Returns the estimated loss above which a VM is harmed.
    pub const fn threshold(&self, placement: Placement, quality: Quality) -> f64 {
        self.thresholds[placement as usize][quality as usize]
    }
}

/// Chooses the estimated loss at which the true loss exceeds the margin with this probability.
/// `scored` are pairs of estimated and true loss. The distribution of their ratio is that of the
/// estimates near the margin. Returns the margin if there are too few of them.
pub(super) fn choose_threshold(scored: impl Iterator<Item = (f64, f64)>, pdm: f64, probability: f64) -> f64 {
    let near = scored.filter(|(estimate, _)| (pdm / NEAR_RATIO..=pdm * NEAR_RATIO).contains(estimate));
    let mut ratios: Vec<f64> = near.map(|(estimate, loss)| loss / estimate).collect();
    if ratios.len() < NEAR_RUNS_MIN {
        return pdm;
    }
    let index = quantile_index(ratios.len(), 1.0 - probability);
    let ratio = *ratios.select_nth_unstable_by(index, f64::total_cmp).1;
    pdm / ratio.clamp(1.0 / NEAR_RATIO, NEAR_RATIO)
}
