//! Random forest: each tree is grown on a bootstrap sample of groups, with a random subset of the
//! columns per split, and predictions are averaged. Groups are sampled as a whole, so that
//! out-of-bag predictions of a row use trees that saw no row of its group.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{BinnedColumns, Columns, Ensemble, TreeParams, grow::grow};

/// Parameters of a forest.
#[derive(Clone, Debug, PartialEq)]
pub struct ForestParams {
    /// Number of trees.
    pub trees: usize,
    /// Parameters of each tree.
    pub tree: TreeParams,
}

/// Forest with its out-of-bag predictions.
#[derive(Clone, Debug)]
pub struct FittedForest {
    /// Mean of the trees.
    pub forest: Ensemble,
    /// Mean prediction for each training row by the trees that did not see it; `None` if all saw
    /// it.
    pub out_of_bag: Vec<Option<f64>>,
}

/// Trains a forest whose leaves predict the mean target. `groups` holds the group index of each
/// row.
///
/// # Panics
/// Panics if there is no row or column, or not one target and group per row.
pub fn fit_forest(
    columns: &Columns,
    targets: &[f64],
    groups: &[usize],
    params: &ForestParams,
    seed: u64,
) -> FittedForest {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "one target per row");
    assert_eq!(groups.len(), targets.len(), "one group per row");
    let binned = BinnedColumns::of(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut forest = Ensemble::new(columns.columns(), vec![0.0]);
    let mut out_of_bag = vec![(0.0, 0_u32); targets.len()];
    for _ in 0..params.trees {
        let (mut rows, left_out) = draw_groups(&mut rng, groups);
        let grown = grow(&binned, &mut rows, targets, &params.tree, &mut rng);
        let mean =
            |rows: &[u32]| rows.iter().map(|row| targets[*row as usize]).sum::<f64>() / rows.len() as f64;
        let means: Vec<f64> = grown.leaves.iter().map(|leaf| mean(&rows[leaf.clone()])).collect();
        for row in left_out {
            let (sum, trees) = &mut out_of_bag[row];
            *sum += means[grown.leaf(&binned, row)];
            *trees += 1;
        }
        let shares: Vec<f64> = means.iter().map(|mean| mean / params.trees as f64).collect();
        forest.push(&grown.tree(shares)).expect("a grown tree is well-formed");
    }
    let out_of_bag = out_of_bag.into_iter().map(|(sum, trees)| (trees > 0).then(|| sum / f64::from(trees)));
    FittedForest { forest, out_of_bag: out_of_bag.collect() }
}

/// Draws as many groups as there are, with replacement. Returns the rows of the drawn groups and
/// those of the groups left out.
fn draw_groups(rng: &mut impl Rng, groups: &[usize]) -> (Vec<u32>, Vec<usize>) {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut times = vec![0_u32; count];
    (0..count).for_each(|_| times[rng.random_range(0..count)] += 1);
    let rows = || groups.iter().enumerate().map(|(row, group)| (row, times[*group]));
    let index = |row: usize| u32::try_from(row).expect("fewer rows than u32::MAX");
    let drawn: Vec<u32> = rows().flat_map(|(row, times)| (0..times).map(move |_| index(row))).collect();
    let left_out = rows().filter(|(_, times)| *times == 0).map(|(row, _)| row).collect();
    // Group indexes without rows may be all that was drawn.
    if drawn.is_empty() { ((0..groups.len()).map(index).collect(), Vec::new()) } else { (drawn, left_out) }
}
