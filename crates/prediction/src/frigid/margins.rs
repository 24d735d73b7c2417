//! Margins below the lowest untouched share of similar VMs, by group and number of outcomes. The
//! rule "lowest so far, less ten points" is common in operation; here its margins are learnt. On
//! its own it is nearly as accurate as trees for VMs with a history, and more stable under drift.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    history::{FEATURES, narrowest_group},
    risk::QUANTILE_LEVELS,
};
use crate::trees::boost::rank;

/// Minimum number of outcomes to learn the margins of a case.
const OUTCOMES_MIN: usize = 50;
/// Lower bounds of the outcome-count buckets.
const COUNT_STEPS: [f64; 5] = [2.0, 3.0, 5.0, 9.0, 30.0];

/// For each group and outcome-count bucket: offset to add to the lowest untouched share, by
/// quantile level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<MarginRow>", from = "Vec<MarginRow>")]
pub(super) struct Margins(BTreeMap<(usize, usize), [f64; QUANTILE_LEVELS.len()]>);

/// Serialized row: group, bucket, offsets.
type MarginRow = (usize, usize, [f64; QUANTILE_LEVELS.len()]);

impl From<Margins> for Vec<MarginRow> {
    fn from(Margins(margins): Margins) -> Self {
        margins.into_iter().map(|((group, case), margins)| (group, case, margins)).collect()
    }
}

impl From<Vec<MarginRow>> for Margins {
    fn from(rows: Vec<MarginRow>) -> Self {
        Self(rows.into_iter().map(|(group, case, margins)| ((group, case), margins)).collect())
    }
}

impl Margins {
    /// Learns the margins from features and untouched shares of ended VMs.
    pub(super) fn learn<'a>(outcomes: impl Iterator<Item = (&'a [f64; FEATURES], f64)>) -> Self {
        let mut differences: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for (features, untouched) in outcomes {
            if let Some((case, lowest)) = case(features) {
                differences.entry(case).or_default().push(untouched - lowest);
            }
        }
        let sufficient = differences.into_iter().filter(|(_, differences)| differences.len() >= OUTCOMES_MIN);
        Self(sufficient.map(|(case, differences)| (case, quantiles_of(differences))).collect())
    }

    /// Returns the untouched share at each quantile level; `None` for a VM without a learnt case.
    pub(super) fn shares(&self, features: &[f64; FEATURES]) -> Option<[f64; QUANTILE_LEVELS.len()]> {
        let (case, lowest) = case(features)?;
        self.0.get(&case).map(|margins| margins.map(|margin| lowest + margin))
    }
}

/// Returns the case (narrowest group and outcome-count bucket) and the lowest untouched share of
/// the group.
fn case(features: &[f64; FEATURES]) -> Option<((usize, usize), f64)> {
    let (group, count, lowest) = narrowest_group(features)?;
    Some(((group, COUNT_STEPS.partition_point(|from| *from <= count)), lowest))
}

/// Returns the quantile of the numbers at each level.
///
/// # Panics
/// Panics if `numbers` is empty.
pub(super) fn quantiles_of(mut numbers: Vec<f64>) -> [f64; QUANTILE_LEVELS.len()] {
    numbers.sort_unstable_by(f64::total_cmp);
    QUANTILE_LEVELS.map(|level| numbers[rank(numbers.len(), level)])
}
