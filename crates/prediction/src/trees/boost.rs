//! Gradient boosting of several quantiles at once: all levels share the trees, and each leaf moves
//! each level towards the quantile of its rows.

use rand::{Rng, SeedableRng, seq::SliceRandom as _};
use rand_pcg::Pcg64Mcg;

use super::{
    BinnedColumns, Columns, Ensemble, TreeParams,
    grow::{GrownTree, grow},
};

/// Parameters of the boosting.
#[derive(Clone, Debug, PartialEq)]
pub struct BoostParams {
    /// Number of trees.
    pub trees: usize,
    /// Learning rate, above 0 and at most 1.
    pub rate: f64,
    /// Parameters of each tree.
    pub tree: TreeParams,
    /// Share of the rows that each tree is grown on, above 0 and at most 1.
    pub rows_tried: f64,
}

/// Rows below a level at which a leaf's update is halved. A leaf of twenty rows has little
/// information about the 0.01 quantile.
const SHRINKAGE_ROWS: f64 = 3.0;

/// Trains an ensemble with one output per quantile level. `levels` ascend.
///
/// # Panics
/// Panics if there is no row, column or level, or not one target per row.
pub fn fit_quantiles(
    columns: &Columns,
    targets: &[f64],
    levels: &[f64],
    params: &BoostParams,
    seed: u64,
) -> Ensemble {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "one target per row");
    let binned = BinnedColumns::of(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut numbers = targets.to_vec();
    let start: Vec<f64> = levels.iter().map(|level| quantile(&mut numbers, *level)).collect();
    let mut ensemble = Ensemble::new(columns.columns(), start.clone());
    let mut predictions: Vec<f64> = start.repeat(targets.len());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of the rows")]
    let sampled = ((targets.len() as f64 * params.rows_tried).ceil() as usize).clamp(1, targets.len());
    for _ in 0..params.trees {
        let ranks = ranks(targets, &predictions, levels);
        let mut rows = sample(&mut rng, targets.len(), sampled);
        let grown = grow(&binned, &mut rows, &ranks, &params.tree, &mut rng);
        let leaves = leaf_updates(&grown, &rows, targets, &predictions, levels, params.rate);
        for row in 0..targets.len() {
            let leaf = grown.leaf(&binned, row) * levels.len();
            let updates = &leaves[leaf..leaf + levels.len()];
            let levels = &mut predictions[row * levels.len()..(row + 1) * levels.len()];
            levels.iter_mut().zip(updates).for_each(|(level, by)| *level += by);
        }
        ensemble.push(&grown.tree(leaves)).expect("a grown tree is well-formed");
    }
    ensemble
}

/// Computes the rank of each target among its predicted levels: the sum of the gradients of the
/// quantile losses. The trees split on it.
fn ranks(targets: &[f64], predictions: &[f64], levels: &[f64]) -> Vec<f64> {
    let all: f64 = levels.iter().sum();
    let above = |target: f64, levels: &[f64]| levels.iter().filter(|level| target < **level).count() as f64;
    let rows = targets.iter().zip(predictions.chunks_exact(levels.len()));
    rows.map(|(target, levels)| all - above(*target, levels)).collect()
}

/// Computes the update of each level in each leaf, with shrinkage.
fn leaf_updates(
    grown: &GrownTree,
    rows: &[u32],
    targets: &[f64],
    predictions: &[f64],
    levels: &[f64],
    rate: f64,
) -> Vec<f64> {
    let mut leaf_updates = Vec::with_capacity(grown.leaves.len() * levels.len());
    let mut residuals = Vec::new();
    for leaf in &grown.leaves {
        for (at, level) in levels.iter().enumerate() {
            residuals.clear();
            let rows = rows[leaf.clone()].iter().map(|row| *row as usize);
            residuals.extend(rows.map(|row| targets[row] - predictions[row * levels.len() + at]));
            let below = residuals.len() as f64 * level;
            leaf_updates.push(rate * below / (below + SHRINKAGE_ROWS) * quantile(&mut residuals, *level));
        }
    }
    leaf_updates
}

/// Returns the quantile by rank, without interpolation.
fn quantile(numbers: &mut [f64], level: f64) -> f64 {
    *numbers.select_nth_unstable_by(rank(numbers.len(), level), f64::total_cmp).1
}

/// Returns the index of the quantile in a sorted array of length `numbers`.
///
/// # Panics
/// Panics if `numbers` is 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank among the numbers")]
pub(crate) fn rank(numbers: usize, level: f64) -> usize {
    ((numbers as f64 * level) as usize).min(numbers - 1)
}

fn sample(rng: &mut impl Rng, rows: usize, amount: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..u32::try_from(rows).expect("fewer rows than u32::MAX")).collect();
    let mut sampled = all.partial_shuffle(rng, amount).0.to_vec();
    sampled.sort_unstable(); // sequential memory access
    sampled
}
