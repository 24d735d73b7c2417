//! Margins below the lowest untouched fraction of similar VMs, by group and number of outcomes.
//!
//! Operators commonly predict the lowest untouched fraction so far minus a constant, such as 0.1.
//! Here the constants are learned from outcomes. For VMs with a history, this rule alone is nearly
//! as accurate as trees, and less sensitive to drift.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    history::{FEATURE_COUNT, narrowest_group},
    risk::QUANTILE_LEVELS,
};
use crate::trees::boost::quantile_index;

/// Smallest number of outcomes from which the margins of a group and bucket are learned.
const MARGIN_OUTCOMES_MIN: usize = 50;
/// Buckets of the number of outcomes of a group: lower bound of each bucket except the first, which
/// starts at one outcome.
const OUTCOME_BUCKET_STARTS: [f64; 5] = [2.0, 3.0, 5.0, 9.0, 30.0];

/// Kind of group (by its index in `Groups::NAMES`), and bucket of its number of outcomes.
type MarginKey = (usize, usize);

/// Learned margins: values to add to the lowest untouched fraction of a group, for each quantile
/// level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<MarginRow>", from = "Vec<MarginRow>")]
pub(super) struct Margins(BTreeMap<MarginKey, [f64; QUANTILE_LEVELS.len()]>);

/// Serialized form of one entry of [`Margins`]: kind of group, bucket, margins.
type MarginRow = (usize, usize, [f64; QUANTILE_LEVELS.len()]);

impl From<Margins> for Vec<MarginRow> {
    fn from(Margins(margins): Margins) -> Self {
        margins.into_iter().map(|((group, bucket), margins)| (group, bucket, margins)).collect()
    }
}

impl From<Vec<MarginRow>> for Margins {
    fn from(rows: Vec<MarginRow>) -> Self {
        Self(rows.into_iter().map(|(group, bucket, margins)| ((group, bucket), margins)).collect())
    }
}

impl Margins {
    /// Learns margins from the features and untouched fractions of ended VMs.
    pub(super) fn learn_margins<'a>(outcomes: impl Iterator<Item = (&'a [f64; FEATURE_COUNT], f64)>) -> Self {
        let mut differences: BTreeMap<MarginKey, Vec<f64>> = BTreeMap::new();
        for (features, untouched) in outcomes {
            if let Some((key, lowest)) = margin_key_and_lowest(features) {
                differences.entry(key).or_default().push(untouched - lowest);
            }
        }
        let sufficient =
            differences.into_iter().filter(|(_, differences)| differences.len() >= MARGIN_OUTCOMES_MIN);
        Self(sufficient.map(|(key, differences)| (key, quantiles_of(differences))).collect())
    }

    /// Returns the predicted untouched fraction at each quantile level. Returns `None` if no
    /// margins were learned for the VM's narrowest group with an outcome.
    pub(super) fn predict_shares(
        &self,
        features: &[f64; FEATURE_COUNT],
    ) -> Option<[f64; QUANTILE_LEVELS.len()]> {
        let (key, lowest) = margin_key_and_lowest(features)?;
        self.0.get(&key).map(|margins| margins.map(|margin| lowest + margin))
    }
}

/// Returns the key and the lowest untouched fraction of the narrowest group with an outcome.
fn margin_key_and_lowest(features: &[f64; FEATURE_COUNT]) -> Option<(MarginKey, f64)> {
    let (group, count, lowest) = narrowest_group(features)?;
    Some(((group, OUTCOME_BUCKET_STARTS.partition_point(|start| *start <= count)), lowest))
}

/// Returns the quantiles of `numbers` at all [`QUANTILE_LEVELS`].
///
/// # Panics
/// Panics if `numbers` is empty.
pub(super) fn quantiles_of(mut numbers: Vec<f64>) -> [f64; QUANTILE_LEVELS.len()] {
    numbers.sort_unstable_by(f64::total_cmp);
    QUANTILE_LEVELS.map(|level| numbers[quantile_index(numbers.len(), level)])
}
