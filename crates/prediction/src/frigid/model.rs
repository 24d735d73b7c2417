//! What says how likely each share is to be too much: trees, and the margins below what VMs alike left.

use serde::{Deserialize, Serialize};

use super::{
    history::FEATURES,
    margins::{Margins, quantiles_of},
    risk::{Curve, LEVELS},
};
use crate::{
    import::Foreign,
    trees::{
        Columns, Ensemble, Shape,
        boost::{Boost, quantiles},
    },
};

/// Many small trees: outcomes are thousands, and the rarest level is three in a thousand. Chosen on public tables, among some dozens that
/// hardly differed.
const HOW: Boost = Boost {
    trees: 200,
    rate: 0.05,
    shape: Shape { leaves_max: 6, leaf_rows_min: 15, columns_tried: 0.3 },
    rows_tried: 0.5,
};
/// How much of what is said is said by the margins.
const MARGINS_SAY: f64 = 0.3;

/// What was learnt of frigid memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model(Says);

/// Who says it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Says {
    /// Trees that were trained here.
    Own {
        /// For each of the levels.
        trees: Ensemble,
        /// Below what VMs alike left.
        margins: Margins,
    },
    /// A model that was trained elsewhere, whose one answer is a share that is not touched.
    Foreign {
        /// The model.
        model: Foreign,
        /// What has to be added to its answer so that each level's part of outcomes stays below.
        off: [f64; LEVELS.len()],
    },
}

/// Who learns.
#[derive(Clone, Debug, PartialEq)]
pub enum Teacher {
    /// Trees of our own.
    Own,
    /// Nobody: a model that was trained elsewhere is only held against outcomes (split conformal prediction).
    Foreign(Box<Foreign>),
}

impl Teacher {
    /// A model made of outcomes: what was known of each VM before it began, and the share that it did not touch. The same rows and
    /// seed make the same model.
    ///
    /// # Panics
    /// There is no row, or not a share for each.
    pub fn teach(&self, known: &[[f64; FEATURES]], untouched: &[f64], seed: u64) -> Model {
        match self {
            Self::Own => Model::train(known, untouched, seed),
            Self::Foreign(model) => {
                let off = known.iter().zip(untouched).map(|(row, share)| share - model.predict(row));
                Model(Says::Foreign { model: (**model).clone(), off: quantiles_of(off.collect()) })
            }
        }
    }
}

impl Model {
    /// Trains on outcomes: what was known of each VM before it began, and the share that it did not touch. The same rows and seed
    /// make the same model.
    ///
    /// # Panics
    /// There is no row, or not a share for each.
    pub fn train(known: &[[f64; FEATURES]], untouched: &[f64], seed: u64) -> Self {
        let mut columns = Columns::new(FEATURES);
        known.iter().for_each(|row| columns.push(row));
        Self(Says::Own {
            trees: quantiles(&columns, untouched, &LEVELS, &HOW, seed),
            margins: Margins::learn(known.iter().zip(untouched.iter().copied())),
        })
    }

    /// How likely each share of a VM's memory is to be too much.
    pub fn curve(&self, known: &[f64; FEATURES]) -> Curve {
        match &self.0 {
            Says::Own { trees, margins } => {
                let mut shares = shares(trees, known);
                if let Some(others) = margins.shares(known) {
                    let both = |(share, other): (&mut f64, f64)| *share += MARGINS_SAY * (other - *share);
                    shares.iter_mut().zip(others).for_each(both);
                }
                Curve::new(shares)
            }
            Says::Foreign { model, off } => {
                let said = model.predict(known);
                Curve::new(off.map(|off| said + off))
            }
        }
    }

    /// The same as its trees alone have it.
    pub(super) fn curve_of_trees(&self, known: &[f64; FEATURES]) -> Curve {
        match &self.0 {
            Says::Own { trees, .. } => Curve::new(shares(trees, known)),
            Says::Foreign { .. } => self.curve(known),
        }
    }

    /// Whether it fits the rows and levels of this version.
    pub(crate) fn fits(&self) -> bool {
        match &self.0 {
            Says::Own { trees, .. } => trees.features() == FEATURES && trees.outputs() == LEVELS.len(),
            Says::Foreign { model, .. } => model.fits(FEATURES),
        }
    }
}

fn shares(trees: &Ensemble, known: &[f64; FEATURES]) -> [f64; LEVELS.len()] {
    let mut shares = [0.0; LEVELS.len()];
    trees.predict(known, &mut shares);
    shares
}
