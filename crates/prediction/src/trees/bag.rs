//! A random forest: trees grown apart, each on rows drawn with replacement and each split on some of the columns; what they say
//! is averaged. Rows that belong together are drawn together, so that who has not seen one has not seen its like.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{Binned, Columns, Ensemble, Shape, grow::grow};

/// How to grow a forest.
#[derive(Clone, Debug, PartialEq)]
pub struct Bag {
    /// How many trees.
    pub trees: usize,
    /// Each tree.
    pub shape: Shape,
}

/// A forest, and what it says of the rows it was grown on.
#[derive(Clone, Debug)]
pub struct Bagged {
    /// The mean of what the trees say.
    pub forest: Ensemble,
    /// Of each row, the mean of the trees that did not see it; `None` if all did.
    pub unseen: Vec<Option<f64>>,
}

/// A forest whose leaves say the mean target of their rows. `groups` says of each row to which group it belongs, by number.
///
/// # Panics
/// There is no row or no column, or not a target and a group for each row.
pub fn means(columns: &Columns, targets: &[f64], groups: &[usize], how: &Bag, seed: u64) -> Bagged {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "a target for each row");
    assert_eq!(groups.len(), targets.len(), "a group for each row");
    let binned = Binned::of(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut forest = Ensemble::new(columns.columns(), vec![0.0]);
    let mut unseen = vec![(0.0, 0_u32); targets.len()];
    for _ in 0..how.trees {
        let (mut rows, left_out) = draw(&mut rng, groups);
        let grown = grow(&binned, &mut rows, targets, &how.shape, &mut rng);
        let mean =
            |rows: &[u32]| rows.iter().map(|row| targets[*row as usize]).sum::<f64>() / rows.len() as f64;
        let says: Vec<f64> = grown.leaves.iter().map(|leaf| mean(&rows[leaf.clone()])).collect();
        for row in left_out {
            let (sum, trees) = &mut unseen[row];
            *sum += says[grown.leaf(&binned, row)];
            *trees += 1;
        }
        let shares: Vec<f64> = says.iter().map(|mean| mean / how.trees as f64).collect();
        forest.push(&grown.tree(shares)).expect("a tree that was grown is one");
    }
    let unseen = unseen.into_iter().map(|(sum, trees)| (trees > 0).then(|| sum / f64::from(trees)));
    Bagged { forest, unseen: unseen.collect() }
}

/// As many groups as there are, some of them twice and more: their rows, and those of groups that are not among them.
fn draw(rng: &mut impl Rng, groups: &[usize]) -> (Vec<u32>, Vec<usize>) {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut times = vec![0_u32; count];
    (0..count).for_each(|_| times[rng.random_range(0..count)] += 1);
    let rows = || groups.iter().enumerate().map(|(row, group)| (row, times[*group]));
    let index = |row: usize| u32::try_from(row).expect("few rows");
    let drawn: Vec<u32> = rows().flat_map(|(row, times)| (0..times).map(move |_| index(row))).collect();
    let left_out = rows().filter(|(_, times)| *times == 0).map(|(row, _)| row).collect();
    // Groups without a row may be all that was drawn.
    if drawn.is_empty() { ((0..groups.len()).map(index).collect(), Vec::new()) } else { (drawn, left_out) }
}
