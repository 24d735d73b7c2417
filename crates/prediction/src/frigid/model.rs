//! Model of frigid memory: a weighted mean of quantile trees and margins, or an imported model with
//! an offset for each quantile level (conformal prediction).

use serde::{Deserialize, Serialize};

use super::{
    history::FEATURE_COUNT,
    margins::{Margins, quantiles_of},
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
/// Weight of the prediction by margins in the weighted mean with the prediction of the trees, 0 to 1.
const MARGINS_WEIGHT: f64 = 0.3;

/// Model that predicts the untouched fraction of a VM's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model(Predictor);

/// Source of the predicted quantiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// Trees and margins trained by Tarn.
    #[serde(rename = "own")]
    Trained {
        /// Trees with one output for each quantile level.
        trees: Ensemble,
        /// Margins below the lowest untouched fraction of similar VMs.
        margins: Margins,
    },
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
    /// Trees and margins trained on the outcomes.
    Trained,
    /// Model trained elsewhere. Training only fits its offsets to the outcomes (split conformal
    /// prediction).
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
                    offsets: quantiles_of(offsets.collect()),
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
        Self(Predictor::Trained {
            trees: fit_quantiles(&columns, untouched, &QUANTILE_LEVELS, &BOOST_PARAMS, seed),
            margins: Margins::learn_margins(features.iter().zip(untouched.iter().copied())),
        })
    }

    /// Predicts the untouched fraction of a VM's memory at each quantile level.
    pub fn curve(&self, features: &[f64; FEATURE_COUNT]) -> QuantileCurve {
        match &self.0 {
            Predictor::Trained { trees, margins } => {
                let mut shares = predict_shares(trees, features);
                if let Some(margin_shares) = margins.predict_shares(features) {
                    let blend = |(share, margin_share): (&mut f64, f64)| {
                        *share += MARGINS_WEIGHT * (margin_share - *share)
                    };
                    shares.iter_mut().zip(margin_shares).for_each(blend);
                }
                QuantileCurve::new(shares)
            }
            Predictor::Imported { model, offsets } => {
                let predicted = model.predict(features);
                QuantileCurve::new(offsets.map(|offset| predicted + offset))
            }
        }
    }

    /// Predicts the untouched fraction at each quantile level from the trees alone, without
    /// margins.
    pub(super) fn predict_tree_curve(&self, features: &[f64; FEATURE_COUNT]) -> QuantileCurve {
        match &self.0 {
            Predictor::Trained { trees, .. } => QuantileCurve::new(predict_shares(trees, features)),
            Predictor::Imported { .. } => self.curve(features),
        }
    }

    /// Returns whether the model has the features and quantile levels of this version of Tarn.
    pub(crate) fn is_compatible(&self) -> bool {
        match &self.0 {
            Predictor::Trained { trees, .. } => {
                trees.features() == FEATURE_COUNT && trees.outputs() == QUANTILE_LEVELS.len()
            }
            Predictor::Imported { model, .. } => model.is_compatible(FEATURE_COUNT),
        }
    }
}

/// Predicts the untouched fraction at each quantile level from trees.
fn predict_shares(trees: &Ensemble, features: &[f64; FEATURE_COUNT]) -> [f64; QUANTILE_LEVELS.len()] {
    let mut shares = [0.0; QUANTILE_LEVELS.len()];
    trees.predict(features, &mut shares);
    shares
}
