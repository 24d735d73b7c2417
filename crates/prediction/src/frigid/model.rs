//! Model of frigid memory: quantile trees blended with margins, or an imported model with conformal
//! offsets.

use serde::{Deserialize, Serialize};

use super::{
    history::FEATURES,
    margins::{Margins, quantiles_of},
    risk::{Curve, QUANTILE_LEVELS},
};
use crate::{
    import::ImportedModel,
    trees::{
        Columns, Ensemble, TreeParams,
        boost::{BoostParams, fit_quantiles},
    },
};

/// Many small trees: there are thousands of outcomes, and the lowest quantile level is 0.003.
/// Chosen on public traces among some dozens of settings that differed little.
const BOOST_PARAMS: BoostParams = BoostParams {
    trees: 200,
    rate: 0.05,
    tree: TreeParams { leaves_max: 6, leaf_rows_min: 15, columns_tried: 0.3 },
    rows_tried: 0.5,
};
/// Weight of the margins in the blend with the trees.
const MARGINS_WEIGHT: f64 = 0.3;

/// Model that predicts the untouched share of a VM's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model(Predictor);

/// Implementation of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// Trees that were trained here.
    #[serde(rename = "own")]
    Trained {
        /// Trees with one output for each quantile level.
        trees: Ensemble,
        /// Margins below the lowest untouched share of similar VMs.
        margins: Margins,
    },
    /// Model trained elsewhere, with one output: the untouched share.
    #[serde(rename = "foreign")]
    Imported {
        model: ImportedModel,
        /// Offset to add to the output at each quantile level.
        #[serde(rename = "off")]
        offsets: [f64; QUANTILE_LEVELS.len()],
    },
}

/// Source of the models that a training produces.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// Trees trained on the outcomes.
    Trained,
    /// Model trained elsewhere. Training only fits its offsets to the outcomes (split conformal
    /// prediction).
    Imported(Box<ImportedModel>),
}

impl ModelSource {
    /// Fits a model to outcomes. `features` are those of each VM before it started, `untouched` the
    /// untouched share of each. Deterministic for the same rows and seed.
    ///
    /// # Panics
    /// Panics if there is no row or the lengths differ.
    pub fn fit(&self, features: &[[f64; FEATURES]], untouched: &[f64], seed: u64) -> Model {
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
    /// Trains a model on outcomes. `features` are those of each VM before it started, `untouched`
    /// the untouched share of each. Deterministic for the same rows and seed.
    ///
    /// # Panics
    /// Panics if there is no row or the lengths differ.
    pub fn train(features: &[[f64; FEATURES]], untouched: &[f64], seed: u64) -> Self {
        let mut columns = Columns::new(FEATURES);
        features.iter().for_each(|row| columns.push(row));
        Self(Predictor::Trained {
            trees: fit_quantiles(&columns, untouched, &QUANTILE_LEVELS, &BOOST_PARAMS, seed),
            margins: Margins::learn(features.iter().zip(untouched.iter().copied())),
        })
    }

    /// Predicts the untouched share of a VM's memory at each quantile level.
    pub fn curve(&self, features: &[f64; FEATURES]) -> Curve {
        match &self.0 {
            Predictor::Trained { trees, margins } => {
                let mut shares = shares(trees, features);
                if let Some(margin_shares) = margins.shares(features) {
                    let blend = |(share, margin_share): (&mut f64, f64)| {
                        *share += MARGINS_WEIGHT * (margin_share - *share)
                    };
                    shares.iter_mut().zip(margin_shares).for_each(blend);
                }
                Curve::new(shares)
            }
            Predictor::Imported { model, offsets } => {
                let predicted = model.predict(features);
                Curve::new(offsets.map(|offsets| predicted + offsets))
            }
        }
    }

    /// Like [`Self::curve`], but without the margins.
    pub(super) fn curve_of_trees(&self, features: &[f64; FEATURES]) -> Curve {
        match &self.0 {
            Predictor::Trained { trees, .. } => Curve::new(shares(trees, features)),
            Predictor::Imported { .. } => self.curve(features),
        }
    }

    /// Returns whether the model has the features and quantile levels of this version.
    pub(crate) fn fits(&self) -> bool {
        match &self.0 {
            Predictor::Trained { trees, .. } => {
                trees.features() == FEATURES && trees.outputs() == QUANTILE_LEVELS.len()
            }
            Predictor::Imported { model, .. } => model.fits(FEATURES),
        }
    }
}

fn shares(trees: &Ensemble, features: &[f64; FEATURES]) -> [f64; QUANTILE_LEVELS.len()] {
    let mut shares = [0.0; QUANTILE_LEVELS.len()];
    trees.predict(features, &mut shares);
    shares
}
