//! Serving model of latency sensitivity: predicts the probability that a workload is slowed down
//! beyond the margin. A workload is placed on the pool if the probability is at most a cutoff. The
//! model lists cutoffs with their shares of placed workloads and of false positives, from
//! out-of-bag predictions.

use serde::{Deserialize, Serialize};
use units::Fraction;

use super::{COUNTER_NAMES, Workload, evaluation_error::EvaluationError, train_forest};
use crate::{combination::InsensitivityPoint, import::ImportedModel, trees::Ensemble};

/// Model of latency sensitivity, with its cutoffs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    #[serde(rename = "says")]
    predictor: Predictor,
    /// Performance degradation margin (PDM). A workload that is slowed down by more than this
    /// fraction is sensitive.
    pub pdm: Fraction,
    #[serde(rename = "cuts")]
    cutoffs: Vec<Cutoff>,
}

/// Source of the predicted probability.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// Random forest trained by Tarn.
    #[serde(rename = "own")]
    Trained(Ensemble),
    /// Model trained elsewhere.
    #[serde(rename = "foreign")]
    Imported(ImportedModel),
}

/// Operating point of a model: the workloads with a predicted probability of at most `at_most` are
/// placed on the pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cutoff {
    /// Highest predicted probability of a placed workload.
    pub at_most: f64,
    /// Fraction of all workloads that are placed although they are slowed down beyond the margin
    /// (false positives), 0 to 1.
    pub fp: f64,
    /// Fraction of all workloads that are placed, 0 to 1.
    pub placed: f64,
}

impl Cutoff {
    /// Returns the operating point for [`choose_combination`](crate::combination::choose_combination).
    pub fn operating_point(&self) -> InsensitivityPoint {
        let share = |share: f64| Fraction::new(share).expect("shares of cutoffs are from 0 to 1");
        InsensitivityPoint { fp: share(self.fp), placed: share(self.placed) }
    }
}

/// Largest number of cutoffs of a model.
const CUTOFFS_MAX: usize = 200;

impl Model {
    /// Trains a model on labelled workloads. The result is deterministic for the same arguments.
    ///
    /// # Errors
    /// Returns [`EvaluationError`] if there are too few programs, or if all or none of the
    /// workloads are slowed down beyond the margin.
    pub fn train(workloads: &[Workload], pdm: Fraction, seed: u64) -> Result<Self, EvaluationError> {
        EvaluationError::check(workloads.iter(), pdm)?;
        let fitted = train_forest(&workloads.iter().collect::<Vec<_>>(), pdm.get(), seed);
        let scored = workloads.iter().zip(fitted.out_of_bag);
        let scored =
            scored.filter_map(|(workload, scored)| Some((scored?[0], workload.slowdown > pdm.get())));
        Ok(Self {
            predictor: Predictor::Trained(fitted.forest),
            pdm,
            cutoffs: compute_cutoffs(scored.collect()),
        })
    }

    /// Creates a model from an imported model. Cutoffs are computed from `workloads`, which should
    /// not be in the training set of the imported model.
    ///
    /// # Errors
    /// Returns [`EvaluationError`] if there are too few programs, or if all or none of the
    /// workloads are slowed down beyond the margin.
    pub fn imported(
        model: ImportedModel,
        workloads: &[Workload],
        pdm: Fraction,
    ) -> Result<Self, EvaluationError> {
        EvaluationError::check(workloads.iter(), pdm)?;
        let scored = |workload: &Workload| (model.predict(&workload.counters), workload.slowdown > pdm.get());
        let scored = workloads.iter().map(scored).filter(|(scored, _)| !scored.is_nan()).collect();
        Ok(Self { predictor: Predictor::Imported(model), pdm, cutoffs: compute_cutoffs(scored) })
    }

    /// Predicts the probability that a workload is slowed down beyond the margin. Counters that
    /// were not measured must be NaN.
    pub fn probability(&self, counters: &[f64; COUNTER_NAMES.len()]) -> f64 {
        match &self.predictor {
            Predictor::Trained(forest) => forest.predict_one(counters),
            Predictor::Imported(model) => model.predict(counters),
        }
    }

    /// Returns the cutoffs in ascending order of false positives. Each cutoff places the largest
    /// possible fraction of workloads for its false positives.
    pub fn cutoffs(&self) -> &[Cutoff] {
        &self.cutoffs
    }

    /// Returns whether the model has the counters of this version of Tarn and the shares of its
    /// cutoffs are in range.
    pub(crate) fn is_compatible(&self) -> bool {
        let fits = match &self.predictor {
            Predictor::Trained(forest) => forest.features() == COUNTER_NAMES.len() && forest.outputs() == 1,
            Predictor::Imported(model) => model.is_compatible(COUNTER_NAMES.len()),
        };
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        fits && self.cutoffs.len() <= CUTOFFS_MAX
            && self.cutoffs.iter().all(|cutoff| is_share(cutoff.fp) && is_share(cutoff.placed))
    }
}

/// Computes the cutoff that places the most workloads for each number of false positives. `scored`
/// is the predicted probability of each workload, and whether it is slowed down beyond the margin.
/// Workloads with equal probability are placed together.
fn compute_cutoffs(mut scored: Vec<(f64, bool)>) -> Vec<Cutoff> {
    scored.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
    let all = scored.len() as f64;
    let (mut slowed, mut accepted, mut cutoffs) = (0_u32, 0_u32, Vec::<Cutoff>::new());
    for ties in scored.chunk_by(|(one, _), (other, _)| one == other) {
        slowed += ties.iter().map(|(_, is_slowed)| u32::from(*is_slowed)).sum::<u32>();
        accepted += u32::try_from(ties.len()).expect("fewer workloads than u32::MAX");
        let (fp, placed) = (f64::from(slowed) / all, f64::from(accepted) / all);
        let cutoff = Cutoff { at_most: ties[0].0, fp, placed };
        match cutoffs.last_mut() {
            Some(last) if last.fp == fp => *last = cutoff,
            _ => cutoffs.push(cutoff),
        }
    }
    let stride = cutoffs.len().div_ceil(CUTOFFS_MAX).max(1);
    cutoffs.into_iter().step_by(stride).collect()
}
