//! Gradient boosting of several quantiles at once. All quantile levels share the trees. Each leaf
//! has a value for each level, which moves the prediction toward the quantile of the leaf's rows.

use rand::{Rng, SeedableRng, seq::SliceRandom as _};
use rand_pcg::Pcg64Mcg;

use super::{
    BinnedColumns, Ensemble, FeatureColumns, TreeParams,
    grow::{GrownTree, grow_tree},
};

/// Parameters of gradient boosting.
#[derive(Clone, Debug, PartialEq)]
pub struct BoostParams {
    /// Number of trees.
    pub trees: usize,
    /// Learning rate, above 0 and at most 1.
    pub learning_rate: f64,
    /// Parameters of each tree.
    pub tree: TreeParams,
    /// Fraction of the rows on which each tree is grown, above 0 and at most 1.
    pub row_fraction: f64,
}

/// Expected number of rows below a quantile at which the update of a leaf is halved. A leaf of 20
/// rows has little information about the 0.01 quantile.
const HALF_UPDATE_ROWS: f64 = 3.0;

/// Trains an ensemble with one output per quantile level. `levels` must be ascending. The result is
/// deterministic for the same arguments.
///
/// # Panics
/// Panics if there is no row, no column or no level, or if the number of targets is not the number
/// of rows.
pub fn fit_quantiles(
    columns: &FeatureColumns,
    targets: &[f64],
    levels: &[f64],
    params: &BoostParams,
    seed: u64,
) -> Ensemble {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "there must be one target per row");
    let binned = BinnedColumns::new(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut numbers = targets.to_vec();
    let start: Vec<f64> = levels.iter().map(|level| quantile(&mut numbers, *level)).collect();
    let mut ensemble = Ensemble::new(columns.columns(), start.clone());
    let mut predictions: Vec<f64> = start.repeat(targets.len());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of the rows")]
    let sampled = ((targets.len() as f64 * params.row_fraction).ceil() as usize).clamp(1, targets.len());
    for _ in 0..params.trees {
        let ranks = compute_ranks(targets, &predictions, levels);
        let mut rows = sample_rows(&mut rng, targets.len(), sampled);
        let grown = grow_tree(&binned, &mut rows, &ranks, &params.tree, &mut rng);
        let leaves = leaf_updates(&grown, &rows, targets, &predictions, levels, params.learning_rate);
        for row in 0..targets.len() {
            let leaf = grown.leaf_of_row(&binned, row) * levels.len();
            let updates = &leaves[leaf..leaf + levels.len()];
            let row_predictions = &mut predictions[row * levels.len()..(row + 1) * levels.len()];
            row_predictions.iter_mut().zip(updates).for_each(|(prediction, update)| *prediction += update);
        }
        ensemble.push(&grown.into_tree(leaves)).expect("a grown tree is well-formed");
    }
    ensemble
}

/// Computes the rank of each target among its predicted quantiles. Trees are grown on these ranks.
/// Up to a constant, a rank is the negative number of predicted quantiles above the target. It
/// equals the negative sum of the gradients of the quantile losses.
fn compute_ranks(targets: &[f64], predictions: &[f64], levels: &[f64]) -> Vec<f64> {
    let level_sum: f64 = levels.iter().sum();
    let above = |target: f64, quantiles: &[f64]| {
        quantiles.iter().filter(|quantile| target < **quantile).count() as f64
    };
    let rows = targets.iter().zip(predictions.chunks_exact(levels.len()));
    rows.map(|(target, quantiles)| level_sum - above(*target, quantiles)).collect()
}

/// Computes the value of each leaf for each level: the quantile of the residuals of its rows,
/// multiplied by the learning rate and reduced for leaves with few rows (shrinkage).
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
            let rows_below = residuals.len() as f64 * level;
            let shrunk_rate = rate * rows_below / (rows_below + HALF_UPDATE_ROWS);
            leaf_updates.push(shrunk_rate * quantile(&mut residuals, *level));
        }
    }
    leaf_updates
}

/// Returns the quantile of `numbers` at a level, without interpolation. Reorders `numbers`.
fn quantile(numbers: &mut [f64], level: f64) -> f64 {
    *numbers.select_nth_unstable_by(quantile_index(numbers.len(), level), f64::total_cmp).1
}

/// Returns the index of the quantile at a level (0 to 1) in a sorted array of `numbers` numbers.
///
/// # Panics
/// Panics if `numbers` is 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank among the numbers")]
pub(crate) fn quantile_index(numbers: usize, level: f64) -> usize {
    ((numbers as f64 * level) as usize).min(numbers - 1)
}

/// Draws `count` of `rows` row indexes without replacement, in ascending order.
fn sample_rows(rng: &mut impl Rng, rows: usize, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..u32::try_from(rows).expect("fewer rows than u32::MAX")).collect();
    let mut sampled = all.partial_shuffle(rng, count).0.to_vec();
    // Sorted rows are read faster, because memory is accessed sequentially.
    sampled.sort_unstable();
    sampled
}
