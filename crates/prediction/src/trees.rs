//! Decision-tree ensembles as data, and their evaluation. [`boost`] and [`forest`] train ensembles;
//! `import` reads those trained elsewhere.

mod bins;
pub mod boost;
pub mod forest;
mod grow;
mod stored;

use std::collections::VecDeque;

use bins::BinnedColumns;
pub use bins::Columns;
pub use grow::TreeParams;
use serde::{Deserialize, Serialize};

/// Largest magnitude that counts as zero where zero means missing (LightGBM's kZeroThreshold).
const ZERO_THRESHOLD: f64 = 1e-35_f32 as f64;

/// Inner node of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Index of the feature to test.
    pub feature: usize,
    /// Condition for taking the first child.
    pub test: SplitRule,
    /// Whether a missing value (NaN) takes the first child.
    pub missing_first: bool,
    /// Whether zero counts as missing.
    pub zero_is_missing: bool,
    /// First and second child.
    pub children: [Child; 2],
}

/// Condition for taking the first child of a node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitRule {
    /// The value is at most this limit.
    AtMost(f64),
    /// The value, truncated to an integer, is in the tree's set with this index.
    OneOf(usize),
}

/// Child of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Child {
    /// Inner node, by its index in the tree.
    Node(usize),
    /// Leaf, by its index in the tree.
    Leaf(usize),
}

/// Tree, to be added to an ensemble. Node 0 is the root; without nodes the tree is a single leaf.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// Inner nodes.
    pub nodes: Vec<Node>,
    /// Values of the leaves: for each leaf one value per output.
    pub leaves: Vec<f64>,
    /// Sets of integers, as bit sets.
    pub sets: Vec<Vec<u32>>,
}

/// Error: a tree is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTree {
    /// The number of leaf values is not a positive multiple of the outputs.
    #[error("{0} leaf values: must be a positive multiple of {1} outputs")]
    Leaves(usize, usize),
    /// A node tests a feature that does not exist.
    #[error("node {node} tests feature {feature} of {features}")]
    Feature {
        /// Index of the node.
        node: usize,
        /// Index of the feature.
        feature: usize,
        /// Number of features.
        features: usize,
    },
    /// A node has a child that does not exist.
    #[error("node {0} has a child that does not exist")]
    Child(usize),
    /// A node has several parents, or is its own ancestor.
    #[error("node {0} has several parents")]
    MultipleParents(usize),
    /// A node refers to a set that does not exist.
    #[error("node {0} refers to a set that does not exist")]
    Set(usize),
    /// There are too many nodes, leaves or sets for 32-bit indexes.
    #[error("too many nodes, leaves or sets")]
    TooLarge,
    /// The ensemble has no output.
    #[error("no output: must be at least one")]
    NoOutput,
    /// A limit or a leaf value is not finite.
    #[error("a node or leaf has a NaN or infinite value: must be finite")]
    NotFinite,
}

/// Ensemble of trees whose leaf values are summed. Serialized as its trees, which are checked again
/// when read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "stored::StoredEnsemble", try_from = "stored::StoredEnsemble")]
pub struct Ensemble {
    features: usize,
    start: Vec<f64>,
    roots: Vec<PackedRoot>,
    nodes: Vec<PackedNode>,
    /// For each packed leaf, its leaf index.
    leaf: Vec<u32>,
    leaves: Vec<f64>,
    sets: Vec<Vec<u32>>,
    /// Whether all nodes compare numerically; then several trees are walked at once.
    is_numeric: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedRoot {
    packed: u32,
    /// Number of nodes down to the deepest leaf.
    depth: u32,
}

/// Inner node or leaf in the evaluation layout: small, for cache efficiency.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PackedNode {
    /// Limit of a numeric node; set index of a categorical node.
    at_most: f64,
    /// Index of the first child, which the second follows. A leaf points to itself, so that a
    /// finished walk stays there.
    first_child: u32,
    feature: u16,
    missing_first: bool,
    kind: NodeKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeKind {
    Leaf,
    AtMost,
    AtMostZeroMissing,
    OneOf,
}

/// Number of trees walked at once, to overlap their memory accesses.
const INTERLEAVED_TREES: usize = 8;

impl Ensemble {
    /// Creates an ensemble without trees: every row evaluates to `start`, one value per output.
    ///
    /// # Panics
    /// Panics if `start` is empty.
    pub fn new(features: usize, start: Vec<f64>) -> Self {
        assert!(!start.is_empty(), "an ensemble has an output");
        let (roots, nodes, leaf, leaves, sets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { features, start, roots, nodes, leaf, leaves, sets, is_numeric: true }
    }

    /// Returns the number of features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Returns the number of outputs.
    pub fn outputs(&self) -> usize {
        self.start.len()
    }

    /// Returns the number of trees.
    pub fn trees(&self) -> usize {
        self.roots.len()
    }

    /// Adds a tree.
    ///
    /// # Errors
    /// [`InvalidTree`] when the tree refers to something that does not exist, or a node has several
    /// parents. The ensemble is unchanged then.
    pub fn push(&mut self, tree: &Tree) -> Result<(), InvalidTree> {
        let packed = PackedTree::of(self, tree)?;
        self.is_numeric &=
            packed.nodes.iter().all(|packed| matches!(packed.kind, NodeKind::Leaf | NodeKind::AtMost));
        self.roots.push(PackedRoot { packed: index(self.nodes.len())?, depth: packed.depth });
        self.nodes.extend(packed.nodes);
        self.leaf.extend(packed.leaf);
        self.leaves.extend_from_slice(&tree.leaves);
        self.sets.extend_from_slice(&tree.sets);
        Ok(())
    }

    /// Evaluates a row into `answer`, one value per output.
    ///
    /// # Panics
    /// Panics if the row or the answer has the wrong length.
    pub fn predict(&self, row: &[f64], answer: &mut [f64]) {
        assert_eq!(row.len(), self.features, "row length equals the number of features");
        answer.copy_from_slice(&self.start);
        for roots in self.roots.chunks(INTERLEAVED_TREES) {
            let at = if self.is_numeric { self.walk_interleaved(roots, row) } else { self.walk(roots, row) };
            for packed in &at[..roots.len()] {
                let leaf = self.leaf[*packed as usize] as usize * answer.len();
                let leaf_values = &self.leaves[leaf..leaf + answer.len()];
                answer.iter_mut().zip(leaf_values).for_each(|(sum, add)| *sum += add);
            }
        }
    }

    /// Evaluates a row for an ensemble with one output.
    ///
    /// # Panics
    /// Panics if there are several outputs or the row has the wrong length.
    pub fn predict_one(&self, row: &[f64]) -> f64 {
        let mut answer = [0.0];
        self.predict(row, &mut answer);
        answer[0]
    }

    /// Returns the leaf of each tree, for ensembles with numeric nodes only. A finished walk stays
    /// in its leaf until all are finished.
    fn walk_interleaved(&self, roots: &[PackedRoot], row: &[f64]) -> [u32; INTERLEAVED_TREES] {
        let mut at = [roots[0].packed; INTERLEAVED_TREES];
        at.iter_mut().zip(roots).for_each(|(at, root)| *at = root.packed);
        for _ in 0..roots.iter().map(|root| root.depth).max().unwrap_or(0) {
            for at in &mut at {
                let packed = &self.nodes[*at as usize];
                let number = row[usize::from(packed.feature)];
                let is_first = (number <= packed.at_most) | (number.is_nan() & packed.missing_first);
                *at = packed.first_child + u32::from(!is_first);
            }
        }
        at
    }

    fn walk(&self, roots: &[PackedRoot], row: &[f64]) -> [u32; INTERLEAVED_TREES] {
        let mut at = [0; INTERLEAVED_TREES];
        for (at, root) in at.iter_mut().zip(roots) {
            *at = root.packed;
            loop {
                let packed = &self.nodes[*at as usize];
                if packed.kind == NodeKind::Leaf {
                    break;
                }
                *at =
                    packed.first_child + u32::from(!self.is_first(packed, row[usize::from(packed.feature)]));
            }
        }
        at
    }

    fn is_first(&self, packed: &PackedNode, number: f64) -> bool {
        match packed.kind {
            _ if number.is_nan() => packed.missing_first,
            NodeKind::AtMostZeroMissing if number.abs() <= ZERO_THRESHOLD => packed.missing_first,
            NodeKind::AtMost | NodeKind::AtMostZeroMissing => number <= packed.at_most,
            NodeKind::OneOf => self.is_one_of(packed, number),
            NodeKind::Leaf => true,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a set index and a truncated integer"
    )]
    fn is_one_of(&self, packed: &PackedNode, number: f64) -> bool {
        let set = &self.sets[packed.at_most as usize];
        let whole = number as i64;
        let Ok(bit) = usize::try_from(whole) else { return false };
        set.get(bit / 32).is_some_and(|bits| bits >> (bit % 32) & 1 == 1)
    }
}

/// Tree in the evaluation layout, placed after the trees already added: breadth-first, so that
/// siblings are adjacent.
struct PackedTree {
    nodes: Vec<PackedNode>,
    leaf: Vec<u32>,
    depth: u32,
}

impl PackedTree {
    fn of(ensemble: &Ensemble, tree: &Tree) -> Result<Self, InvalidTree> {
        let outputs = ensemble.outputs();
        let leaves = tree.leaves.len() / outputs;
        if leaves == 0 || leaves * outputs != tree.leaves.len() {
            return Err(InvalidTree::Leaves(tree.leaves.len(), outputs));
        }
        let root = if tree.nodes.is_empty() { Child::Leaf(0) } else { Child::Node(0) };
        let mut packed = Self { nodes: Vec::new(), leaf: Vec::new(), depth: 0 };
        let (mut pending, mut is_placed) = (VecDeque::from([(root, 0)]), vec![false; tree.nodes.len()]);
        let mut next = 1;
        while let Some((child, depth)) = pending.pop_front() {
            packed.depth = depth;
            let here = index(ensemble.nodes.len() + packed.nodes.len())?;
            match child {
                Child::Leaf(leaf) => {
                    packed.nodes.push(PackedNode::leaf(here));
                    packed.leaf.push(index(ensemble.leaves.len() / outputs + leaf)?);
                }
                Child::Node(at) => {
                    let node = tree.checked_node(at, ensemble.features, leaves)?;
                    if std::mem::replace(&mut is_placed[at], true) {
                        return Err(InvalidTree::MultipleParents(at));
                    }
                    packed.nodes.push(node.packed(index(ensemble.nodes.len() + next)?, ensemble.sets.len())?);
                    packed.leaf.push(0);
                    next += 2;
                    pending.extend(node.children.map(|child| (child, depth + 1)));
                }
            }
        }
        Ok(packed)
    }
}

impl Tree {
    /// Returns a node after checking its feature, children and set.
    fn checked_node(&self, at: usize, features: usize, leaves: usize) -> Result<&Node, InvalidTree> {
        let node = &self.nodes[at];
        if node.feature >= features {
            return Err(InvalidTree::Feature { node: at, feature: node.feature, features });
        }
        let is_there = |child: Child| match child {
            Child::Node(node) => node < self.nodes.len(),
            Child::Leaf(leaf) => leaf < leaves,
        };
        if !node.children.into_iter().all(is_there) {
            return Err(InvalidTree::Child(at));
        }
        match node.test {
            SplitRule::OneOf(set) if set >= self.sets.len() => Err(InvalidTree::Set(at)),
            SplitRule::OneOf(_) | SplitRule::AtMost(_) => Ok(node),
        }
    }
}

impl Node {
    fn packed(&self, first_child: u32, sets: usize) -> Result<PackedNode, InvalidTree> {
        let (at_most, kind) = match self.test {
            SplitRule::AtMost(at_most) if self.zero_is_missing => (at_most, NodeKind::AtMostZeroMissing),
            SplitRule::AtMost(at_most) => (at_most, NodeKind::AtMost),
            SplitRule::OneOf(set) => (f64::from(index(sets + set)?), NodeKind::OneOf),
        };
        let feature = u16::try_from(self.feature).map_err(|_| InvalidTree::TooLarge)?;
        Ok(PackedNode { at_most, first_child, feature, missing_first: self.missing_first, kind })
    }
}

impl PackedNode {
    /// A leaf leads to itself for every value.
    fn leaf(here: u32) -> Self {
        Self {
            at_most: f64::INFINITY,
            first_child: here,
            feature: 0,
            missing_first: true,
            kind: NodeKind::Leaf,
        }
    }
}

fn index(n: usize) -> Result<u32, InvalidTree> {
    u32::try_from(n).map_err(|_| InvalidTree::TooLarge)
}

#[cfg(test)]
mod tests;
