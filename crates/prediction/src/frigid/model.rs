//! What says how likely each share is to be too much: trees, and the margins below what VMs alike left.

use super::{
    history::FEATURES,
    margins::Margins,
    risk::{Curve, LEVELS},
};
use crate::trees::{
    Columns, Ensemble, Shape,
    boost::{Boost, quantiles},
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
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    trees: Ensemble,
    margins: Margins,
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
        Self {
            trees: quantiles(&columns, untouched, &LEVELS, &HOW, seed),
            margins: Margins::learn(known.iter().zip(untouched.iter().copied())),
        }
    }

    /// How likely each share of a VM's memory is to be too much.
    pub fn curve(&self, known: &[f64; FEATURES]) -> Curve {
        let mut shares = [0.0; LEVELS.len()];
        self.trees.predict(known, &mut shares);
        if let Some(others) = self.margins.shares(known) {
            let both = |(share, other): (&mut f64, f64)| *share += MARGINS_SAY * (other - *share);
            shares.iter_mut().zip(others).for_each(both);
        }
        Curve::new(shares)
    }
}
