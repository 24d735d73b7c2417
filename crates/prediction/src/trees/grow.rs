//! One tree: its leaves are split where that explains most of a target, the best split of all leaves first. What a leaf
//! says is its owner's business.

use std::{cmp::Ordering, collections::BinaryHeap, ops::Range};

use rand::{Rng, seq::SliceRandom as _};

use super::{
    Child, Node, Test, Tree,
    bins::{Binned, MISSING},
};

/// What a tree may become.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Leaves of a tree, at most.
    pub leaves_max: usize,
    /// Rows of a leaf, at least.
    pub leaf_rows_min: usize,
    /// Share of the columns that each split looks at, above 0 and at most 1.
    pub columns_tried: f64,
}

/// A tree without anything in its leaves.
#[derive(Debug)]
pub(super) struct Grown {
    pub(super) nodes: Vec<Node>,
    /// Of the rows as they lie after growth: those of each leaf.
    pub(super) leaves: Vec<Range<usize>>,
    /// As nodes, for rows in bins: the last bin that goes to the first child.
    last_bins: Vec<u8>,
}

/// A leaf that could be split.
#[derive(Debug)]
struct Open {
    gain: f64,
    rows: Range<usize>,
    cut: Cut,
    /// The node above and which of its children this is.
    above: Option<(usize, usize)>,
}

/// Where a leaf could be split.
#[derive(Clone, Copy, Debug)]
struct Cut {
    column: usize,
    last_bin: u8,
    missing_first: bool,
}

/// Grows a tree over `rows` of the binned columns, which come to lie leaf by leaf. `target` has a number for each row of the
/// columns.
pub(super) fn grow(
    binned: &Binned,
    rows: &mut [u32],
    target: &[f64],
    shape: &Shape,
    rng: &mut impl Rng,
) -> Grown {
    let columns = (0..binned.columns()).collect();
    let mut grower = Grower { binned, target, shape, columns, sums: Histogram::default() };
    let mut grown = Grown { nodes: Vec::new(), leaves: Vec::new(), last_bins: Vec::new() };
    let mut open = BinaryHeap::new();
    let mut leaves = 1;
    grower.consider(rows, 0..rows.len(), None, &mut open, &mut grown, rng);
    while let Some(best) = open.pop() {
        if leaves >= shape.leaves_max {
            grown.close(best.rows, best.above);
            continue;
        }
        let middle = best.rows.start + grower.part(&mut rows[best.rows.clone()], best.cut);
        let node = grown.split(binned, best.cut, best.above);
        leaves += 1;
        for (side, part) in [best.rows.start..middle, middle..best.rows.end].into_iter().enumerate() {
            grower.consider(rows, part, Some((node, side)), &mut open, &mut grown, rng);
        }
    }
    grown
}

impl Grown {
    /// Which leaf a row of the columns belongs to.
    pub(super) fn leaf(&self, binned: &Binned, row: usize) -> usize {
        let mut at = if self.nodes.is_empty() { Child::Leaf(0) } else { Child::Node(0) };
        loop {
            match at {
                Child::Leaf(leaf) => return leaf,
                Child::Node(node) => {
                    let Node { feature, missing_first, children, .. } = self.nodes[node];
                    let bin = binned.bins(feature)[row];
                    let first = if bin == MISSING { missing_first } else { bin <= self.last_bins[node] };
                    at = children[usize::from(!first)];
                }
            }
        }
    }

    /// The tree, with what its leaves say: a number for each output.
    pub(super) fn tree(self, leaves: Vec<f64>) -> Tree {
        Tree { nodes: self.nodes, leaves, sets: Vec::new() }
    }

    fn split(&mut self, binned: &Binned, cut: Cut, above: Option<(usize, usize)>) -> usize {
        let node = self.nodes.len();
        let border = binned.borders(cut.column).get(usize::from(cut.last_bin));
        self.nodes.push(Node {
            feature: cut.column,
            test: Test::AtMost(border.copied().unwrap_or(f64::MAX)), // past the last bin are only missing ones
            missing_first: cut.missing_first,
            zero_is_missing: false,
            children: [Child::Leaf(usize::MAX); 2], // each is hung when it is known
        });
        self.last_bins.push(cut.last_bin);
        self.hang(above, Child::Node(node));
        node
    }

    fn close(&mut self, rows: Range<usize>, above: Option<(usize, usize)>) {
        self.leaves.push(rows);
        self.hang(above, Child::Leaf(self.leaves.len() - 1));
    }

    fn hang(&mut self, above: Option<(usize, usize)>, child: Child) {
        if let Some((node, side)) = above {
            self.nodes[node].children[side] = child;
        }
    }
}

/// Sums of the target and counts of rows by bin.
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

struct Grower<'a> {
    binned: &'a Binned,
    target: &'a [f64],
    shape: &'a Shape,
    /// All columns, in the order in which they were last drawn.
    columns: Vec<usize>,
    sums: Histogram,
}

impl Grower<'_> {
    /// A leaf is open if a split of it would explain something; else it stays a leaf.
    fn consider(
        &mut self,
        all: &[u32],
        rows: Range<usize>,
        above: Option<(usize, usize)>,
        open: &mut BinaryHeap<Open>,
        grown: &mut Grown,
        rng: &mut impl Rng,
    ) {
        match self.best(&all[rows.clone()], rng) {
            Some((gain, cut)) => open.push(Open { gain, rows, cut, above }),
            None => grown.close(rows, above),
        }
    }

    /// The split that explains most, of some columns.
    fn best(&mut self, rows: &[u32], rng: &mut impl Rng) -> Option<(f64, Cut)> {
        if rows.len() < 2 * self.shape.leaf_rows_min {
            return None;
        }
        let columns = self.binned.columns();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of the columns")]
        let tried = ((columns as f64 * self.shape.columns_tried).ceil() as usize).clamp(1, columns);
        let mut best: Option<(f64, Cut)> = None;
        self.columns.partial_shuffle(rng, tried);
        for at in 0..tried {
            let found = self.best_of(rows, self.columns[columns - 1 - at]); // what was drawn lies at the end
            best = found.filter(|(gain, _)| best.is_none_or(|(other, _)| *gain > other)).or(best);
        }
        best
    }

    /// The split of a column that explains most: the fall of the target's squared deviations from its mean.
    fn best_of(&mut self, rows: &[u32], column: usize) -> Option<(f64, Cut)> {
        let bins = self.binned.bins(column);
        let last = self.binned.borders(column).len();
        self.sums.sums[..=last].fill(0.0);
        self.sums.rows[..=last].fill(0);
        self.sums.sums[usize::from(MISSING)] = 0.0;
        self.sums.rows[usize::from(MISSING)] = 0;
        for row in rows {
            let bin = usize::from(bins[*row as usize]);
            self.sums.sums[bin] += self.target[*row as usize];
            self.sums.rows[bin] += 1;
        }
        self.scan(rows.len(), column, last)
    }

    fn scan(&self, rows: usize, column: usize, last: usize) -> Option<(f64, Cut)> {
        let missing = usize::from(MISSING);
        let (gone, gone_rows) = (self.sums.sums[missing], self.sums.rows[missing] as usize);
        let total: f64 = self.sums.sums[..=last].iter().sum::<f64>() + gone;
        let unsplit = total * total / rows as f64;
        let enough = self.shape.leaf_rows_min.max(1);
        let (mut sum, mut count, mut best) = (0.0, 0, None);
        let mut best_gain = 1e-9 * rows as f64;
        for bin in 0..=last {
            sum += self.sums.sums[bin];
            count += self.sums.rows[bin] as usize;
            for missing_first in [false, true] {
                let (first, first_rows) =
                    if missing_first { (sum + gone, count + gone_rows) } else { (sum, count) };
                if first_rows < enough || rows - first_rows < enough {
                    continue;
                }
                let (rest, rest_rows) = (total - first, rows - first_rows);
                let gain = first * first / first_rows as f64 + rest * rest / rest_rows as f64 - unsplit;
                if gain > best_gain {
                    best_gain = gain;
                    let last_bin = u8::try_from(bin).expect("a column has few bins");
                    // Where none is missing yet, one that will be goes with most.
                    let missing_first = if gone_rows == 0 { 2 * count > rows } else { missing_first };
                    best = Some((gain, Cut { column, last_bin, missing_first }));
                }
                if gone_rows == 0 {
                    break;
                }
            }
        }
        best
    }

    /// Rows that go to the first child come to lie before the others; how many they are.
    fn part(&self, rows: &mut [u32], cut: Cut) -> usize {
        let bins = self.binned.bins(cut.column);
        let is_first = |row: u32| match bins[row as usize] {
            MISSING => cut.missing_first,
            bin => bin <= cut.last_bin,
        };
        let mut middle = 0;
        for at in 0..rows.len() {
            if is_first(rows[at]) {
                rows.swap(middle, at);
                middle += 1;
            }
        }
        middle
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open {}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain.total_cmp(&other.gain).then_with(|| other.rows.start.cmp(&self.rows.start))
    }
}
