//! Growth of one tree, best split first: the next leaf to split is the one whose split reduces the
//! sum of squared errors most. Callers set the leaf values.

use std::{cmp::Ordering, collections::BinaryHeap, ops::Range};

use rand::{Rng, seq::SliceRandom as _};

use super::{
    Child, Node, SplitRule, Tree,
    bins::{BinnedColumns, MISSING_BIN},
};

/// Parameters for growing a tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeParams {
    /// Largest number of leaves of a tree.
    pub leaves_max: usize,
    /// Smallest number of training rows in a leaf.
    pub leaf_rows_min: usize,
    /// Fraction of the columns that are tried for each split, above 0 and at most 1.
    pub column_fraction: f64,
}

/// Grown tree without leaf values.
#[derive(Debug)]
pub(super) struct GrownTree {
    pub(super) nodes: Vec<Node>,
    /// Range of each leaf in the training rows, which are reordered by leaf.
    pub(super) leaves: Vec<Range<usize>>,
    /// Split threshold of each node: rows with a bin index up to this go to the left child.
    split_bins: Vec<u8>,
}

/// Leaf that may be split, with the best split.
#[derive(Debug)]
struct SplitCandidate {
    /// Reduction of the sum of squared errors by the split.
    gain: f64,
    /// Range of the leaf's training rows.
    rows: Range<usize>,
    split_point: SplitPoint,
    /// Index of the parent node, and position of the leaf among its children. `None` for the root.
    parent: Option<(usize, usize)>,
}

/// Split of a leaf at a border between two bins of a column.
#[derive(Clone, Copy, Debug)]
struct SplitPoint {
    column: usize,
    /// Split threshold: rows with a bin index up to this go to the left child.
    split_bin: u8,
    /// Whether missing values lead to the left child.
    missing_first: bool,
}

/// Grows a tree on the training rows `rows` of the binned columns, and reorders `rows` by leaf.
/// `target` has one value per row of the columns.
pub(super) fn grow_tree(
    binned: &BinnedColumns,
    rows: &mut [u32],
    target: &[f64],
    params: &TreeParams,
    rng: &mut impl Rng,
) -> GrownTree {
    let columns = (0..binned.columns()).collect();
    let mut grower = TreeGrower { binned, target, params, columns, sums: Histogram::default() };
    let mut grown = GrownTree { nodes: Vec::new(), leaves: Vec::new(), split_bins: Vec::new() };
    let mut candidates = BinaryHeap::new();
    let mut leaves = 1;
    grower.add_candidate(rows, 0..rows.len(), None, &mut candidates, &mut grown, rng);
    while let Some(best_split) = candidates.pop() {
        if leaves >= params.leaves_max {
            grown.finish_leaf(best_split.rows, best_split.parent);
            continue;
        }
        let middle = best_split.rows.start
            + grower.partition_rows(&mut rows[best_split.rows.clone()], best_split.split_point);
        let node = grown.add_split_node(binned, best_split.split_point, best_split.parent);
        leaves += 1;
        for (side, child_rows) in
            [best_split.rows.start..middle, middle..best_split.rows.end].into_iter().enumerate()
        {
            grower.add_candidate(rows, child_rows, Some((node, side)), &mut candidates, &mut grown, rng);
        }
    }
    grown
}

impl GrownTree {
    /// Returns the index of the leaf that a training row reaches.
    pub(super) fn leaf_of_row(&self, binned: &BinnedColumns, row: usize) -> usize {
        let mut at = if self.nodes.is_empty() { Child::Leaf(0) } else { Child::Node(0) };
        loop {
            match at {
                Child::Leaf(leaf) => return leaf,
                Child::Node(node) => {
                    let Node { feature, missing_first, children, .. } = self.nodes[node];
                    let bin = binned.bins(feature)[row];
                    let is_left =
                        if bin == MISSING_BIN { missing_first } else { bin <= self.split_bins[node] };
                    at = children[usize::from(!is_left)];
                }
            }
        }
    }

    /// Creates a tree with these leaf values, leaf by leaf with one value per output.
    pub(super) fn into_tree(self, leaves: Vec<f64>) -> Tree {
        Tree { nodes: self.nodes, leaves, sets: Vec::new() }
    }

    /// Adds a node with this split below `parent`, and returns its index. Its children must be
    /// attached later.
    fn add_split_node(
        &mut self,
        binned: &BinnedColumns,
        split_point: SplitPoint,
        parent: Option<(usize, usize)>,
    ) -> usize {
        let node = self.nodes.len();
        let border = binned.borders(split_point.column).get(usize::from(split_point.split_bin));
        self.nodes.push(Node {
            feature: split_point.column,
            // The last bin has no upper border: only missing values lead to the right child.
            test: SplitRule::AtMost(border.copied().unwrap_or(f64::MAX)),
            missing_first: split_point.missing_first,
            zero_is_missing: false,
            // `attach_child` replaces these placeholders.
            children: [Child::Leaf(usize::MAX); 2],
        });
        self.split_bins.push(split_point.split_bin);
        self.attach_child(parent, Child::Node(node));
        node
    }

    /// Adds a leaf that is not split further.
    fn finish_leaf(&mut self, rows: Range<usize>, parent: Option<(usize, usize)>) {
        self.leaves.push(rows);
        self.attach_child(parent, Child::Leaf(self.leaves.len() - 1));
    }

    /// Sets a child of its parent node. Does nothing for the root.
    fn attach_child(&mut self, parent: Option<(usize, usize)>, child: Child) {
        if let Some((node, side)) = parent {
            self.nodes[node].children[side] = child;
        }
    }
}

/// Sum of the targets and number of rows in each bin of a column.
#[derive(Debug)]
struct Histogram {
    sums: [f64; 256],
    rows: [u32; 256],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { sums: [0.0; 256], rows: [0; 256] }
    }
}

/// State of the growth of one tree.
struct TreeGrower<'a> {
    binned: &'a BinnedColumns,
    /// Target of each training row.
    target: &'a [f64],
    params: &'a TreeParams,
    /// Indexes of all columns, in the order of the last shuffle.
    columns: Vec<usize>,
    /// Buffer for the histogram of one column.
    sums: Histogram,
}

impl TreeGrower<'_> {
    /// Adds a leaf to the candidates if a split reduces its error, or else closes the leaf.
    fn add_candidate(
        &mut self,
        all: &[u32],
        rows: Range<usize>,
        parent: Option<(usize, usize)>,
        candidates: &mut BinaryHeap<SplitCandidate>,
        grown: &mut GrownTree,
        rng: &mut impl Rng,
    ) {
        match self.best_split(&all[rows.clone()], rng) {
            Some((gain, split_point)) => candidates.push(SplitCandidate { gain, rows, split_point, parent }),
            None => grown.finish_leaf(rows, parent),
        }
    }

    /// Returns the best split of a leaf among a random subset of the columns, and its gain. Returns
    /// `None` if no split has a gain.
    fn best_split(&mut self, rows: &[u32], rng: &mut impl Rng) -> Option<(f64, SplitPoint)> {
        if rows.len() < 2 * self.params.leaf_rows_min {
            return None;
        }
        let columns = self.binned.columns();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of the columns"
        )]
        let tried = ((columns as f64 * self.params.column_fraction).ceil() as usize).clamp(1, columns);
        let mut best_split: Option<(f64, SplitPoint)> = None;
        self.columns.partial_shuffle(rng, tried);
        for at in 0..tried {
            // `partial_shuffle` moves the drawn elements to the end of the slice.
            let split = self.best_split_of_column(rows, self.columns[columns - 1 - at]);
            best_split =
                split.filter(|(gain, _)| best_split.is_none_or(|(best, _)| *gain > best)).or(best_split);
        }
        best_split
    }

    /// Returns the best split of a leaf at a border of one column, and its gain.
    fn best_split_of_column(&mut self, rows: &[u32], column: usize) -> Option<(f64, SplitPoint)> {
        let bins = self.binned.bins(column);
        let last = self.binned.borders(column).len();
        self.sums.sums[..=last].fill(0.0);
        self.sums.rows[..=last].fill(0);
        self.sums.sums[usize::from(MISSING_BIN)] = 0.0;
        self.sums.rows[usize::from(MISSING_BIN)] = 0;
        for row in rows {
            let bin = usize::from(bins[*row as usize]);
            self.sums.sums[bin] += self.target[*row as usize];
            self.sums.rows[bin] += 1;
        }
        self.best_split_in_histogram(rows.len(), column, last)
    }

    /// Finds the best split in the histogram of a column with the last bin `last`.
    fn best_split_in_histogram(&self, rows: usize, column: usize, last: usize) -> Option<(f64, SplitPoint)> {
        let missing = usize::from(MISSING_BIN);
        let (missing_sum, missing_rows) = (self.sums.sums[missing], self.sums.rows[missing] as usize);
        let total: f64 = self.sums.sums[..=last].iter().sum::<f64>() + missing_sum;
        let unsplit = total * total / rows as f64;
        let leaf_rows_min = self.params.leaf_rows_min.max(1);
        let (mut sum, mut count, mut best_split) = (0.0, 0, None);
        let mut best_gain = 1e-9 * rows as f64;
        for bin in 0..=last {
            sum += self.sums.sums[bin];
            count += self.sums.rows[bin] as usize;
            for missing_first in [false, true] {
                let (left, left_rows) =
                    if missing_first { (sum + missing_sum, count + missing_rows) } else { (sum, count) };
                if left_rows < leaf_rows_min || rows - left_rows < leaf_rows_min {
                    continue;
                }
                let (right, right_rows) = (total - left, rows - left_rows);
                let gain = left * left / left_rows as f64 + right * right / right_rows as f64 - unsplit;
                if gain > best_gain {
                    best_gain = gain;
                    let split_bin = u8::try_from(bin).expect("a column has at most 255 bins");
                    // If no training row has a missing value, missing values of later rows lead to
                    // the child with more training rows.
                    let missing_first = if missing_rows == 0 { 2 * count > rows } else { missing_first };
                    best_split = Some((gain, SplitPoint { column, split_bin, missing_first }));
                }
                if missing_rows == 0 {
                    break;
                }
            }
        }
        best_split
    }

    /// Moves the rows of the left child to the front, and returns the number of these rows.
    fn partition_rows(&self, rows: &mut [u32], split_point: SplitPoint) -> usize {
        let bins = self.binned.bins(split_point.column);
        let is_left = |row: u32| match bins[row as usize] {
            MISSING_BIN => split_point.missing_first,
            bin => bin <= split_point.split_bin,
        };
        let mut middle = 0;
        for at in 0..rows.len() {
            if is_left(rows[at]) {
                rows.swap(middle, at);
                middle += 1;
            }
        }
        middle
    }
}

impl PartialEq for SplitCandidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for SplitCandidate {}

impl PartialOrd for SplitCandidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for SplitCandidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain.total_cmp(&other.gain).then_with(|| other.rows.start.cmp(&self.rows.start))
    }
}
