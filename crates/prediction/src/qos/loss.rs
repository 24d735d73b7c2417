//! Model of the loss of a running VM: a random forest estimates the slowdown from the counters, the
//! fraction of loads that the pool serves, and the latency of the pool. The estimated loss above which
//! a VM is harmed depends on the evidence. The forest also predicts the standard deviation of the
//! estimate. Errors on programs that a tree did not see (out of bag), divided by their standard
//! deviation, calibrate it (Johansson et al., Regression conformal prediction with random forests,
//! 2014).

use serde::{Deserialize, Serialize};
use units::Fraction;

use super::Placement;
use crate::{
    sensitivity::{
        COUNTER_NAMES, DRAM_BOUND_INDEX, DRAM_LATENCY_BOUND_INDEX, IPC_INDEX, L3_MPKI_INDEX, MLP_INDEX,
        SLOWDOWN_RANGE, STORE_BOUND_INDEX, Workload, backtest::EvaluationError, program_groups,
    },
    trees::{
        Ensemble, FeatureColumns, TreeParams,
        boost::quantile_index,
        forest::{ForestParams, fit_forest},
    },
};

/// Evidence from which the loss of a running VM is estimated. Values that were not measured are NaN.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
/// Weight of the stalls on a full store buffer. The pool adds more to them than to other stalls: it has
/// less bandwidth than local memory, not only a higher latency. The forest corrects it.
const STORE_STALL_WEIGHT: f64 = 2.5;
/// Upper bound on the fraction of cycles that the pool adds.
const LOST_CYCLES_MAX: f64 = 0.9;
/// Offset of the loss before the logarithm. Losses far below it are equal for the model.
pub(super) const LOSS_OFFSET: f64 = 0.01;
/// Name of the measurement [`Evidence::pool_loads`].
pub const POOL_LOADS_NAME: &str = "pool_load_share";
/// Name of the measurement [`Evidence::latency_ratio`].
pub const LATENCY_RATIO_NAME: &str = "latency_ratio";
/// Number of inputs of the forest.
const INPUTS: usize = COUNTER_NAMES.len() + 8;
/// Fraction of cycles that is added to the stalls on memory before their parts are divided by them. Without
/// it, the parts of programs with few stalls would be noise.
const STALLS_OFFSET: f64 = 1e-4;

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
        let stalls = self.counters[DRAM_BOUND_INDEX] + STORE_STALL_WEIGHT * self.counters[STORE_BOUND_INDEX];
        if stalls.is_nan() { 0.0 } else { self.loss_of_stalls(stalls) }
    }

    /// Computes the inputs of the forest: the counters, the fraction of pool loads, the added
    /// latency, estimates of the loss from parts of the stalls and from the misses that do not
    /// overlap, parts of the stalls that depend on latency and on stores, and the product of the
    /// misses and the memory-level parallelism.
    fn inputs(&self) -> [f64; INPUTS] {
        let counter = |index: usize| self.counters[index];
        let misses_per_1000_cycles = counter(L3_MPKI_INDEX) * counter(IPC_INDEX);
        let serial_misses = misses_per_1000_cycles / counter(MLP_INDEX).max(0.5);
        let stalls = counter(DRAM_BOUND_INDEX) + counter(STORE_BOUND_INDEX) + STALLS_OFFSET;
        let derived = [
            self.pool_loads,
            self.added_latency_fraction(),
            self.loss_of_stalls(counter(DRAM_LATENCY_BOUND_INDEX)),
            self.loss_of_stalls(counter(DRAM_BOUND_INDEX)),
            serial_misses * self.pool_loads * (self.latency_ratio - 1.0),
            counter(DRAM_LATENCY_BOUND_INDEX) / stalls,
            counter(STORE_BOUND_INDEX) / stalls,
            misses_per_1000_cycles * counter(MLP_INDEX),
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
    /// Fraction of the loads from memory that the pool served, 0 to 1; NaN if unknown.
    pub pool_loads: f64,
    /// Idle latency of the pool divided by the idle latency of local memory; NaN if unknown.
    pub latency_ratio: f64,
    /// Whether the run was measured because of its estimated loss. The errors of such runs are biased, so
    /// they do not calibrate the thresholds.
    pub is_selected: bool,
}

impl LabelledRun {
    /// Creates a run. If the pool serves all loads, all memory is on the pool. Values that were not
    /// measured are NaN.
    pub fn new(workload: Workload, pool_loads: f64, latency_ratio: f64) -> Self {
        let placement = if pool_loads >= 1.0 { Placement::EntirelyOnPool } else { Placement::Split };
        Self { workload, placement, pool_loads, latency_ratio, is_selected: false }
    }

    /// Returns whether the pool loads and the latency are known.
    fn has_pool_evidence(&self) -> bool {
        !self.pool_loads.is_nan() && !self.latency_ratio.is_nan()
    }

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

/// Quality of the evidence about the pool. Each placement and quality has an error quantile. `Sampled`
/// uses the errors of `Measured`, with a higher probability of harm.
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
            Self::Sampled | Self::Unknown => 0.4,
        }
    }
}

/// Estimated loss of a running VM, and its threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossEstimate {
    /// Estimated slowdown relative to local memory.
    pub loss: f64,
    /// Estimated loss above which the VM is harmed. It is lower for a less certain estimate.
    pub threshold: f64,
}

impl LossEstimate {
    /// Returns the loss divided by the threshold.
    pub fn severity(&self) -> f64 {
        self.loss / self.threshold
    }
}

/// Model of the loss of running VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossModel {
    /// Performance degradation margin (PDM). A VM with a larger loss is harmed.
    pub pdm: Fraction,
    /// Accuracy on the training set.
    pub accuracy: LossAccuracy,
    forest: Ensemble,
    /// Error, in standard deviations, that true losses exceed with [`Quality::harm_probability`], by
    /// placement and quality.
    error_quantiles: [[f64; Quality::ALL.len()]; 2],
}

/// Accuracy of a model on the runs of its training set, without runs that were selected by their estimates. The loss of each run is estimated by trees that
/// were grown without the run's program (out of bag). Runs with a part of their memory on the pool are
/// estimated without pool loads and latency, because hosts cannot measure pool loads on most processors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossAccuracy {
    /// Number of runs.
    pub runs: u32,
    /// Fraction of the harmed runs whose estimated loss is above the threshold, 0 to 1.
    pub flagged_harmed: f64,
    /// Fraction of the unharmed runs whose estimated loss is above the threshold, 0 to 1.
    pub flagged_unharmed: f64,
}

impl LossAccuracy {
    /// Computes the accuracy from pairs of harm and flag of each run.
    fn new(runs: impl Iterator<Item = (bool, bool)> + Clone) -> Self {
        let share = |harmed: bool| {
            let of_class = runs.clone().filter(|(is_harmed, _)| *is_harmed == harmed);
            let flagged = of_class.clone().filter(|(_, is_flagged)| *is_flagged).count();
            flagged as f64 / of_class.count().max(1) as f64
        };
        let count = u32::try_from(runs.clone().count()).unwrap_or(u32::MAX);
        Self { runs: count, flagged_harmed: share(true), flagged_unharmed: share(false) }
    }

    fn is_valid(&self) -> bool {
        self.runs > 0
            && [self.flagged_harmed, self.flagged_unharmed].iter().all(|share| (0.0..=1.0).contains(share))
    }
}

/// Parameters of the random forest.
const FOREST_PARAMS: ForestParams =
    ForestParams { trees: 50, tree: TreeParams { leaves_max: 256, leaf_rows_min: 4, column_fraction: 0.4 } };
/// Probability of harm above which a VM with exact evidence is harmed.
const HARM_PROBABILITY: f64 = 0.18;
/// Largest ratio of an estimate to the margin, and of the margin to an estimate, at which the error
/// of the estimate counts for an error quantile.
const NEAR_RATIO: f64 = 2.0;
/// Largest ratio of a threshold to the margin, and of the margin to a threshold.
const THRESHOLD_RATIO_MAX: f64 = 3.0;
/// Largest magnitude of an error quantile, in standard deviations.
const ERROR_QUANTILE_MAX: f64 = 4.0;
/// Smallest standard deviation of the logarithm of a loss.
const DEVIATION_MIN: f64 = 0.01;
/// Number of estimates near the margin that an error quantile requires.
const NEAR_RUNS_MIN: usize = 20;

impl LossModel {
    /// Trains a model on labelled runs. The result is deterministic for the same arguments.
    ///
    /// # Errors
    /// Returns [`EvaluationError`] if there are too few programs, or if all or none of the
    /// workloads are slowed down beyond the margin.
    pub fn train(runs: &[LabelledRun], pdm: Fraction, seed: u64) -> Result<Self, EvaluationError> {
        EvaluationError::check(runs.iter().map(|run| &run.workload), pdm)?;
        // Each run counts once for the accuracy. Selected runs count only if there are no others.
        let is_calibrating = |run: &LabelledRun| !run.is_selected || runs.iter().all(|run| run.is_selected);
        let with_unknown = runs.iter().flat_map(|run| {
            let without = run.has_pool_evidence().then(|| run.without_pool_evidence());
            let counts_without = without.is_some() && run.placement == Placement::Split;
            let without = without.map(|without| (without, counts_without && is_calibrating(run)));
            [(run.clone(), !counts_without && is_calibrating(run))].into_iter().chain(without)
        });
        let (runs, counts): (Vec<LabelledRun>, Vec<bool>) = with_unknown.unzip();
        let mut columns = FeatureColumns::new(INPUTS);
        runs.iter().for_each(|run| columns.push(&run.evidence().inputs()));
        let log_ratio = |run: &LabelledRun| run.evidence().log_ratio(run.workload.slowdown);
        let targets: Vec<[f64; 2]> = runs.iter().map(log_ratio).map(|ratio| [ratio, ratio * ratio]).collect();
        let groups = program_groups(runs.iter().map(|run| &run.workload));
        let fitted = fit_forest(&columns, &targets, &groups, &FOREST_PARAMS, seed);
        let scored = |placement: Placement, is_known: bool| {
            let all = runs.iter().zip(&fitted.out_of_bag);
            let matching = all.filter(move |(run, _)| {
                run.placement == placement && run.has_pool_evidence() == is_known && is_calibrating(run)
            });
            matching.filter_map(|(run, moments)| {
                Some((LossDistribution::new(&run.evidence(), (*moments)?), run.workload.slowdown))
            })
        };
        let error_quantiles = [Placement::EntirelyOnPool, Placement::Split].map(|placement| {
            Quality::ALL.map(|quality| {
                let scored = scored(placement, quality != Quality::Unknown);
                choose_error_quantile(scored, pdm.get(), quality.harm_probability())
            })
        });
        let counted = runs.iter().zip(&fitted.out_of_bag).zip(&counts).filter(|(_, counts)| **counts);
        let flagged = counted.filter_map(|((run, moments), _)| {
            let quality = if run.has_pool_evidence() { Quality::Measured } else { Quality::Unknown };
            let quantile = error_quantiles[run.placement as usize][quality as usize];
            let estimate = LossDistribution::new(&run.evidence(), (*moments)?);
            Some((run.workload.slowdown > pdm.get(), estimate.loss > estimate.threshold(pdm.get(), quantile)))
        });
        Ok(Self { pdm, accuracy: LossAccuracy::new(flagged), forest: fitted.forest, error_quantiles })
    }

    /// Estimates the slowdown relative to local memory, and the estimate above which a VM is harmed. The
    /// estimate is in [`SLOWDOWN_RANGE`], also with an imported model whose leaves have extreme values.
    pub fn estimate(&self, evidence: &Evidence, placement: Placement, quality: Quality) -> LossEstimate {
        let mut moments = [0.0; 2];
        self.forest.predict(&evidence.inputs(), &mut moments);
        let distribution = LossDistribution::new(evidence, moments);
        let quantile = self.error_quantiles[placement as usize][quality as usize];
        LossEstimate {
            // Unlike `clamp`, these functions also replace NaN.
            loss: distribution.loss.max(*SLOWDOWN_RANGE.start()).min(*SLOWDOWN_RANGE.end()),
            threshold: distribution.threshold(self.pdm.get(), quantile),
        }
    }

    /// Returns whether the model has the inputs of this version of Tarn and its values are in range.
    pub(crate) fn is_compatible(&self) -> bool {
        let fits = self.forest.features() == INPUTS && self.forest.outputs() == 2;
        let range = -ERROR_QUANTILE_MAX..=ERROR_QUANTILE_MAX;
        fits && self.pdm.get() > 0.0
            && self.error_quantiles.iter().flatten().all(|quantile| range.contains(quantile))
            && self.accuracy.is_valid()
    }
}

/// Distribution of the loss that a forest predicts: the logarithm of the loss plus [`LOSS_OFFSET`]
/// has this mean and standard deviation.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossDistribution {
    /// Loss at the mean of the logarithm.
    pub(super) loss: f64,
    /// Standard deviation of the logarithm.
    pub(super) deviation: f64,
}

impl LossDistribution {
    /// Derives the distribution from the mean of [`Evidence::log_ratio`] and the mean of its square,
    /// both over the leaves of all trees. Their variance is the sum of the variance within the leaves
    /// and the variance between the trees.
    fn new(evidence: &Evidence, [mean, mean_square]: [f64; 2]) -> Self {
        let variance = mean_square - mean * mean;
        let deviation = variance.max(0.0).sqrt().max(DEVIATION_MIN);
        Self { loss: evidence.loss_for(mean), deviation }
    }

    /// Returns the number of standard deviations by which a loss is above the estimate.
    pub(super) fn error(&self, loss: f64) -> f64 {
        ((loss.max(0.0) + LOSS_OFFSET) / (self.loss + LOSS_OFFSET)).ln() / self.deviation
    }

    /// Returns the estimated loss at which a loss that is higher by `quantile` standard deviations
    /// equals the margin.
    pub(super) fn threshold(&self, pdm: f64, quantile: f64) -> f64 {
        let threshold = (pdm + LOSS_OFFSET) * (-quantile * self.deviation).exp() - LOSS_OFFSET;
        // Unlike `clamp`, these functions also replace NaN.
        threshold.max(pdm / THRESHOLD_RATIO_MAX).min(pdm * THRESHOLD_RATIO_MAX)
    }
}

/// Chooses the error, in standard deviations, that losses exceed with this probability. `scored` are
/// pairs of the estimated distribution and the true loss. Only the errors of the estimates near the
/// margin count. Returns 0 if there are too few of them.
pub(super) fn choose_error_quantile(
    scored: impl Iterator<Item = (LossDistribution, f64)>,
    pdm: f64,
    probability: f64,
) -> f64 {
    let near = scored.filter(|(estimate, _)| (pdm / NEAR_RATIO..=pdm * NEAR_RATIO).contains(&estimate.loss));
    let mut errors: Vec<f64> = near.map(|(estimate, loss)| estimate.error(loss)).collect();
    if errors.len() < NEAR_RUNS_MIN {
        return 0.0;
    }
    let index = quantile_index(errors.len(), 1.0 - probability);
    let quantile = *errors.select_nth_unstable_by(index, f64::total_cmp).1;
    quantile.clamp(-ERROR_QUANTILE_MAX, ERROR_QUANTILE_MAX)
}
