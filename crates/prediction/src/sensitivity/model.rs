//! Sensitivity model to serve: the probability that a workload is slowed down beyond the margin,
//! and the cutoffs with the share that each places and its false positives. Cutoffs are learnt from
//! out-of-bag predictions.

use serde::{Deserialize, Serialize};
use units::Fraction;

use super::{COUNTERS, Workload, evaluation_error::EvaluationError, train_forest};
use crate::{import::ImportedModel, trees::Ensemble};

/// Model of latency sensitivity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    #[serde(rename = "says")]
    predictor: Predictor,
    /// Performance degradation margin (PDM): a workload that is slowed down by more is sensitive.
    pub pdm: Fraction,
    #[serde(rename = "cuts")]
    cutoffs: Vec<Cutoff>,
}

/// Implementation of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// Forest that was trained here.
    #[serde(rename = "own")]
    Trained(Ensemble),
    /// Model trained elsewhere.
    #[serde(rename = "foreign")]
    Imported(ImportedModel),
}

/// Operating point: workloads with a predicted probability of at most `at_most` are placed. Shares
/// are of all workloads, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cutoff {
    /// Highest probability that is placed.
    pub at_most: f64,
    /// Share placed although slowed down beyond the margin (false positives).
    pub fp: f64,
    /// Share placed.
    pub placed: f64,
}

/// Upper bound on the number of cutoffs.
const CUTOFFS_MAX: usize = 200;

impl Model {
    /// Trains on labelled workloads. Deterministic for the same rows and seed.
    ///
    /// # Errors
    /// [`EvaluationError`] when there are too few programs or only one class.
    pub fn train(workloads: &[Workload], pdm: Fraction, seed: u64) -> Result<Self, EvaluationError> {
        EvaluationError::check(workloads, pdm)?;
        let fitted = train_forest(&workloads.iter().collect::<Vec<_>>(), pdm.get(), seed);
        let scored = workloads.iter().zip(fitted.out_of_bag);
        let scored = scored.filter_map(|(workload, scored)| Some((scored?, workload.slowdown > pdm.get())));
        Ok(Self { predictor: Predictor::Trained(fitted.forest), pdm, cutoffs: cutoffs(scored.collect()) })
    }

    /// Wraps a model trained elsewhere, with cutoffs learnt from `workloads`, which should not be
    /// in its training set.
    ///
    /// # Errors
    /// [`EvaluationError`] when there are too few programs or only one class.
    pub fn imported(
        model: ImportedModel,
        workloads: &[Workload],
        pdm: Fraction,
    ) -> Result<Self, EvaluationError> {
        EvaluationError::check(workloads, pdm)?;
        let scored = |workload: &Workload| (model.predict(&workload.counters), workload.slowdown > pdm.get());
        let scored = workloads.iter().map(scored).filter(|(scored, _)| !scored.is_nan()).collect();
        Ok(Self { predictor: Predictor::Imported(model), pdm, cutoffs: cutoffs(scored) })
    }

    /// Predicts the probability of a slowdown beyond the margin. Counters not measured are NaN.
    pub fn probability(&self, counters: &[f64; COUNTERS.len()]) -> f64 {
        match &self.predictor {
            Predictor::Trained(train_forest) => train_forest.predict_one(counters),
            Predictor::Imported(model) => model.predict(counters),
        }
    }

    /// Returns the operating points, fewest false positives first, each with the largest share
    /// placed for its false positives.
    pub fn cutoffs(&self) -> &[Cutoff] {
        &self.cutoffs
    }

    /// Returns whether the model has the counters of this version and its cutoffs are shares.
    pub(crate) fn fits(&self) -> bool {
        let fits = match &self.predictor {
            Predictor::Trained(train_forest) => {
                train_forest.features() == COUNTERS.len() && train_forest.outputs() == 1
            }
            Predictor::Imported(model) => model.fits(COUNTERS.len()),
        };
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        fits && self.cutoffs.len() <= CUTOFFS_MAX
            && self.cutoffs.iter().all(|cutoff| is_share(cutoff.fp) && is_share(cutoff.placed))
    }
}

/// Computes the best cutoff for each number of false positives. Ties are placed together or not at
/// all.
fn cutoffs(mut scored: Vec<(f64, bool)>) -> Vec<Cutoff> {
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
