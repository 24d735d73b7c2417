//! How far below the lowest share of VMs alike the next one may end, told apart by how many there were: a rule that people use
//! ("the lowest so far, less ten points"), with margins that are learnt. Alone it is nearly as good as trees where a VM has a past,
//! and where the world changes it is steadier.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    history::{FEATURES, alike},
    risk::LEVELS,
};
use crate::trees::boost::rank;

/// Outcomes from which margins are learnt.
const ENOUGH: usize = 50;
/// From how many VMs alike on it is another case.
const CASES: [f64; 5] = [2.0, 3.0, 5.0, 9.0, 30.0];

/// For each group and case, what has to be added to the lowest share so that each level's part of outcomes stays below.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<Row>", from = "Vec<Row>")]
pub(super) struct Margins(BTreeMap<(usize, usize), [f64; LEVELS.len()]>);

/// As it is written down: a group, a case, and what has to be added.
type Row = (usize, usize, [f64; LEVELS.len()]);

impl From<Margins> for Vec<Row> {
    fn from(Margins(margins): Margins) -> Self {
        margins.into_iter().map(|((group, case), margins)| (group, case, margins)).collect()
    }
}

impl From<Vec<Row>> for Margins {
    fn from(rows: Vec<Row>) -> Self {
        Self(rows.into_iter().map(|(group, case, margins)| ((group, case), margins)).collect())
    }
}

impl Margins {
    /// Learnt from what was known of VMs and the shares that they did not touch.
    pub(super) fn learn<'a>(outcomes: impl Iterator<Item = (&'a [f64; FEATURES], f64)>) -> Self {
        let mut off: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for (known, untouched) in outcomes {
            if let Some((case, lowest)) = case(known) {
                off.entry(case).or_default().push(untouched - lowest);
            }
        }
        let enough = off.into_iter().filter(|(_, off)| off.len() >= ENOUGH);
        Self(enough.map(|(case, off)| (case, quantiles_of(off))).collect())
    }

    /// The share that is too much at each level; none for a VM unlike any.
    pub(super) fn shares(&self, known: &[f64; FEATURES]) -> Option<[f64; LEVELS.len()]> {
        let (case, lowest) = case(known)?;
        self.0.get(&case).map(|margins| margins.map(|margin| lowest + margin))
    }
}

/// The narrowest group that is known and how much is known of it; and the lowest share in it.
fn case(known: &[f64; FEATURES]) -> Option<((usize, usize), f64)> {
    let (group, count, lowest) = alike(known)?;
    Some(((group, CASES.partition_point(|from| *from <= count)), lowest))
}

/// Of some numbers, those that each level's part is below.
///
/// # Panics
/// There are none.
pub(super) fn quantiles_of(mut numbers: Vec<f64>) -> [f64; LEVELS.len()] {
    numbers.sort_unstable_by(f64::total_cmp);
    LEVELS.map(|level| numbers[rank(numbers.len(), level)])
}
