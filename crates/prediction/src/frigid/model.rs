//! Model of frigid memory: quantile trees, or an imported model with an offset for each quantile
//! level.

use serde::{Deserialize, Serialize};

use super::{
    history::FEATURE_COUNT,
    risk::{QUANTILE_LEVELS, QuantileCurve},
};
use crate::{
    import::ImportedModel,
    trees::{
        Ensemble, FeatureColumns, TreeParams,
        boost::{BoostParams, fit_quantiles},
    },
};

/// Parameters of the quantile trees. Trees are small, because training sets have only thousands of
/// outcomes and the lowest quantile level is 0.003. The values were chosen on public traces from a
/// few dozen settings with similar results.
const BOOST_PARAMS: BoostParams = BoostParams {
    trees: 200,
    learning_rate: 0.05,
    tree: TreeParams { leaves_max: 6, leaf_rows_min: 15, column_fraction: 0.3 },
    row_fraction: 0.5,
};
/// Offset for a quantile level that has too few outcomes. It lowers every prediction to 0.
const NO_PREDICTION_OFFSET: f64 = f64::MIN;

/// Model that predicts the untouched fraction of a VM's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model(Predictor);

/// Source of the predicted quantiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// Trees trained by Tarn, with one output for each quantile level.
    #[serde(rename = "own")]
    Trained(Ensemble),
    /// Model trained elsewhere, whose output is the untouched fraction.
    #[serde(rename = "foreign")]
    Imported {
        model: ImportedModel,
        /// Offset that is added to the output for each quantile level.
        #[serde(rename = "off")]
        offsets: [f64; QUANTILE_LEVELS.len()],
    },
}

/// Kind of model that training creates.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// Trees trained on the outcomes.
    Trained,
    /// Model trained elsewhere. Training only fits its offsets to the outcomes. This is split
    /// conformal prediction if the model was not trained on these outcomes.
    Imported(Box<ImportedModel>),
}

impl ModelSource {
    /// Trains a model, or fits the offsets of the imported model, on outcomes. `features` is the
    /// row of features of each VM before its start, and `untouched` the untouched fraction of each
    /// VM. The result is deterministic for the same arguments.
    ///
    /// # Panics
    /// Panics if there is no row, or if the lengths of `features` and `untouched` differ.
    pub fn fit(&self, features: &[[f64; FEATURE_COUNT]], untouched: &[f64], seed: u64) -> Model {
        match self {
            Self::Trained => Model::train(features, untouched, seed),
            Self::Imported(model) => {
                let offsets = features.iter().zip(untouched).map(|(row, share)| share - model.predict(row));
                Model(Predictor::Imported {
                    model: (**model).clone(),
                    offsets: conformal_offsets(offsets.collect()),
                })
            }
        }
    }
}

impl Model {
    /// Trains a model on outcomes. `features` is the row of features of each VM before its start,
    /// and `untouched` the untouched fraction of each VM. The result is deterministic for the same
    /// arguments.
    ///
    /// # Panics
    /// Panics if there is no row, or if the lengths of `features` and `untouched` differ.
    pub fn train(features: &[[f64; FEATURE_COUNT]], untouched: &[f64], seed: u64) -> Self {
        let mut columns = FeatureColumns::new(FEATURE_COUNT);
        features.iter().for_each(|row| columns.push(row));
        Self(Predictor::Trained(fit_quantiles(&columns, untouched, &QUANTILE_LEVELS, &BOOST_PARAMS, seed)))
    }

    /// Predicts the untouched fraction of a VM's memory at each quantile level.
    pub fn curve(&self, features: &[f64; FEATURE_COUNT]) -> QuantileCurve {
        match &self.0 {
            Predictor::Trained(trees) => {
                let mut shares = [0.0; QUANTILE_LEVELS.len()];
                trees.predict(features, &mut shares);
                QuantileCurve::new(shares)
            }
            Predictor::Imported { model, offsets } => {
                let predicted = model.predict(features);
                QuantileCurve::new(offsets.map(|offset| predicted + offset))
            }
        }
    }

    /// Returns whether the model has the features and quantile levels of this version of Tarn.
    pub(crate) fn is_compatible(&self) -> bool {
        match &self.0 {
            Predictor::Trained(trees) => {
                trees.features() == FEATURE_COUNT && trees.outputs() == QUANTILE_LEVELS.len()
            }
            Predictor::Imported { model, .. } => model.is_compatible(FEATURE_COUNT),
        }
    }
}

/// Returns the offset for each quantile level by split conformal prediction, from the differences of
/// actual and predicted untouched fractions. The offset of a level is the difference of rank
/// ⌊level · (n + 1)⌋, counted from the lowest. If the differences of the next VM and of these n VMs
/// are exchangeable, the probability of an overprediction is at most the level.
fn conformal_offsets(mut differences: Vec<f64>) -> [f64; QUANTILE_LEVELS.len()] {
    differences.sort_unstable_by(f64::total_cmp);
    QUANTILE_LEVELS.map(|level| {
        conformal_rank(differences.len(), level).map_or(NO_PREDICTION_OFFSET, |rank| differences[rank - 1])
    })
}

/// Returns the rank ⌊level · (n + 1)⌋ of `n` exchangeable numbers, from 1. The next number is below
/// the number of this rank with a probability of at most `level`. Returns `None` if the rank is 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank among the numbers")]
pub(super) fn conformal_rank(n: usize, level: f64) -> Option<usize> {
    let rank = (level * (n as f64 + 1.0)) as usize;
    (rank > 0).then_some(rank.min(n))
}
