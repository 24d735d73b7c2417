//! Boosted trees for several quantiles at once: all levels share the trees, and every leaf moves each level to where that share
//! of its rows lies below.

use rand::{Rng, SeedableRng, seq::SliceRandom as _};
use rand_pcg::Pcg64Mcg;

use super::{
    Binned, Columns, Ensemble, Shape,
    grow::{Grown, grow},
};

/// How to boost.
#[derive(Clone, Debug, PartialEq)]
pub struct Boost {
    /// How many trees.
    pub trees: usize,
    /// How far each tree moves, above 0 and at most 1.
    pub rate: f64,
    /// Each tree.
    pub shape: Shape,
    /// Share of the rows that each tree is grown on, above 0 and at most 1.
    pub rows_tried: f64,
}

/// Rows that lie below a level when a leaf is half believed: of twenty rows, the lowest says little of the level that one in a
/// hundred is below.
const BELIEVED_HALF: f64 = 3.0;

/// Trees that say, for each of the levels (shares of outcomes, ascending), what that share of rows alike stays below.
///
/// # Panics
/// There is no row, no column or no level, or not a target for each row.
pub fn quantiles(columns: &Columns, targets: &[f64], levels: &[f64], how: &Boost, seed: u64) -> Ensemble {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "a target for each row");
    let binned = Binned::of(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut numbers = targets.to_vec();
    let start: Vec<f64> = levels.iter().map(|level| quantile(&mut numbers, *level)).collect();
    let mut ensemble = Ensemble::new(columns.columns(), start.clone());
    let mut now: Vec<f64> = start.repeat(targets.len());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of the rows")]
    let sampled = ((targets.len() as f64 * how.rows_tried).ceil() as usize).clamp(1, targets.len());
    for _ in 0..how.trees {
        let ranks = ranks(targets, &now, levels);
        let mut rows = sample(&mut rng, targets.len(), sampled);
        let grown = grow(&binned, &mut rows, &ranks, &how.shape, &mut rng);
        let leaves = moves(&grown, &rows, targets, &now, levels, how.rate);
        for row in 0..targets.len() {
            let leaf = grown.leaf(&binned, row) * levels.len();
            let moved = &leaves[leaf..leaf + levels.len()];
            let levels = &mut now[row * levels.len()..(row + 1) * levels.len()];
            levels.iter_mut().zip(moved).for_each(|(level, by)| *level += by);
        }
        ensemble.push(&grown.tree(leaves)).expect("a tree that was grown is one");
    }
    ensemble
}

/// Where each target lies among its levels: the sum of the quantile losses' slopes. Rows whose targets lie alike belong together.
fn ranks(targets: &[f64], now: &[f64], levels: &[f64]) -> Vec<f64> {
    let all: f64 = levels.iter().sum();
    let above = |target: f64, levels: &[f64]| levels.iter().filter(|level| target < **level).count() as f64;
    let rows = targets.iter().zip(now.chunks_exact(levels.len()));
    rows.map(|(target, levels)| all - above(*target, levels)).collect()
}

/// How far each leaf moves each level.
fn moves(grown: &Grown, rows: &[u32], targets: &[f64], now: &[f64], levels: &[f64], rate: f64) -> Vec<f64> {
    let mut moves = Vec::with_capacity(grown.leaves.len() * levels.len());
    let mut off = Vec::new();
    for leaf in &grown.leaves {
        for (at, level) in levels.iter().enumerate() {
            off.clear();
            let rows = rows[leaf.clone()].iter().map(|row| *row as usize);
            off.extend(rows.map(|row| targets[row] - now[row * levels.len() + at]));
            let below = off.len() as f64 * level;
            moves.push(rate * below / (below + BELIEVED_HALF) * quantile(&mut off, *level));
        }
    }
    moves
}

/// The number that the level's share of all is at most, by rank and not between two.
fn quantile(numbers: &mut [f64], level: f64) -> f64 {
    *numbers.select_nth_unstable_by(rank(numbers.len(), level), f64::total_cmp).1
}

/// Where the number stands, among so many in order, that the level's share of them is below.
///
/// # Panics
/// There are none.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank among the numbers")]
pub(crate) fn rank(numbers: usize, level: f64) -> usize {
    ((numbers as f64 * level) as usize).min(numbers - 1)
}

fn sample(rng: &mut impl Rng, rows: usize, amount: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..u32::try_from(rows).expect("few rows")).collect();
    let mut sampled = all.partial_shuffle(rng, amount).0.to_vec();
    sampled.sort_unstable(); // neighbours in memory are looked at together
    sampled
}
