//! Random forest: each tree is grown on a bootstrap sample of groups of rows, with a random subset
//! of the columns for each split. The prediction is the mean over all trees. Groups are sampled as
//! a whole: the trees that make the out-of-bag prediction of a row were grown without any row of
//! its group.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{BinnedColumns, Ensemble, FeatureColumns, TreeParams, grow::grow_tree};

/// Parameters for training a forest.
#[derive(Clone, Debug, PartialEq)]
pub struct ForestParams {
    /// Number of trees.
    pub trees: usize,
    /// Parameters of each tree.
    pub tree: TreeParams,
}

/// Trained forest of `N` outputs, with its out-of-bag predictions.
#[derive(Clone, Debug)]
pub struct FittedForest<const N: usize> {
    /// Ensemble that predicts the mean over all trees.
    pub forest: Ensemble,
    /// Mean prediction for each training row by the trees that were grown without the row. `None`
    /// if all trees were grown with the row.
    pub out_of_bag: Vec<Option<[f64; N]>>,
}

/// Trains a forest with one output per target. The values of a leaf are the mean targets of its
/// rows. Splits reduce the squared error of the first target. `groups` is the group index of each
/// row. The result is deterministic for the same arguments.
///
/// # Panics
/// Panics if there is no row or no column, or if the number of targets or groups is not the number
/// of rows.
pub fn fit_forest<const N: usize>(
    columns: &FeatureColumns,
    targets: &[[f64; N]],
    groups: &[usize],
    params: &ForestParams,
    seed: u64,
) -> FittedForest<N> {
    const { assert!(N > 0, "a forest has at least one output") };
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "there must be targets for each row");
    assert_eq!(groups.len(), targets.len(), "there must be one group per row");
    let first_targets: Vec<f64> = targets.iter().map(|targets| targets[0]).collect();
    let binned = BinnedColumns::new(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut forest = Ensemble::new(columns.columns(), vec![0.0; N]);
    let mut out_of_bag = vec![([0.0; N], 0_u32); targets.len()];
    for _ in 0..params.trees {
        let (mut rows, left_out) = sample_groups(&mut rng, groups);
        let grown = grow_tree(&binned, &mut rows, &first_targets, &params.tree, &mut rng);
        let mean = |rows: &[u32]| {
            let sum = |target: usize| rows.iter().map(|row| targets[*row as usize][target]).sum::<f64>();
            std::array::from_fn(|target| sum(target) / rows.len() as f64)
        };
        let means: Vec<[f64; N]> = grown.leaves.iter().map(|leaf| mean(&rows[leaf.clone()])).collect();
        for row in left_out {
            let (sums, trees) = &mut out_of_bag[row];
            sums.iter_mut().zip(means[grown.leaf_of_row(&binned, row)]).for_each(|(sum, mean)| *sum += mean);
            *trees += 1;
        }
        let leaf_values: Vec<f64> = means.iter().flatten().map(|mean| mean / params.trees as f64).collect();
        forest.push(&grown.into_tree(leaf_values)).expect("a grown tree is well-formed");
    }
    let means = |(sums, trees): ([f64; N], u32)| (trees > 0).then(|| sums.map(|sum| sum / f64::from(trees)));
    FittedForest { forest, out_of_bag: out_of_bag.into_iter().map(means).collect() }
}

/// Draws a bootstrap sample of groups: as many groups as there are, with replacement. Returns the
/// rows of the drawn groups, and the rows of the groups that were not drawn.
fn sample_groups(rng: &mut impl Rng, groups: &[usize]) -> (Vec<u32>, Vec<usize>) {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut times = vec![0_u32; count];
    (0..count).for_each(|_| times[rng.random_range(0..count)] += 1);
    let rows = || groups.iter().enumerate().map(|(row, group)| (row, times[*group]));
    let index = |row: usize| u32::try_from(row).expect("fewer rows than u32::MAX");
    let drawn: Vec<u32> = rows().flat_map(|(row, times)| (0..times).map(move |_| index(row))).collect();
    let left_out = rows().filter(|(_, times)| *times == 0).map(|(row, _)| row).collect();
    // If only group indexes without rows were drawn, use all rows.
    if drawn.is_empty() { ((0..groups.len()).map(index).collect(), Vec::new()) } else { (drawn, left_out) }
}
