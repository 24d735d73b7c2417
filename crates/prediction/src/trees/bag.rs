//! A random forest: trees grown apart, each on rows drawn with replacement and each split on some of the columns; what they say
//! is averaged.

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

/// A forest whose leaves say the mean target of their rows.
///
/// # Panics
/// There is no row or no column, or not a target for each row.
pub fn means(columns: &Columns, targets: &[f64], how: &Bag, seed: u64) -> Bagged {
    assert!(!targets.is_empty() && targets.len() == columns.rows(), "a target for each row");
    let binned = Binned::of(columns);
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut forest = Ensemble::new(columns.columns(), vec![0.0]);
    let mut unseen = vec![(0.0, 0_u32); targets.len()];
    for _ in 0..how.trees {
        let (mut rows, left_out) = draw(&mut rng, targets.len());
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

/// As many rows as there are, some of them twice and more, and those that are not among them.
fn draw(rng: &mut impl Rng, rows: usize) -> (Vec<u32>, Vec<usize>) {
    let mut times = vec![0_u32; rows];
    (0..rows).for_each(|_| times[rng.random_range(0..rows)] += 1);
    let index = |row: usize| u32::try_from(row).expect("few rows");
    let drawn = times.iter().enumerate().flat_map(|(row, times)| (0..*times).map(move |_| index(row)));
    let left_out = times.iter().enumerate().filter(|(_, times)| **times == 0).map(|(row, _)| row);
    (drawn.collect(), left_out.collect())
}
