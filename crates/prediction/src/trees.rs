//! Ensembles of decision trees, and their evaluation. [`boost`] and [`forest`] train ensembles.
//! `import` reads ensembles trained elsewhere.

mod bins;
pub mod boost;
pub mod forest;
mod grow;
mod stored;

use std::collections::VecDeque;

use bins::BinnedColumns;
pub use bins::FeatureColumns;
pub use grow::TreeParams;
use serde::{Deserialize, Serialize};

/// Largest magnitude that counts as 0 for nodes at which 0 is a missing value (LightGBM's
/// `kZeroThreshold`).
const ZERO_THRESHOLD: f64 = 1e-35_f32 as f64;

/// Inner node of a tree. It tests one feature of a row and leads to one of two children.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Index of the tested feature in the row.
    pub feature: usize,
    /// Condition on the feature value for the left child.
    pub test: SplitRule,
    /// Whether a missing value (NaN) leads to the left child.
    pub missing_first: bool,
    /// Whether 0 counts as a missing value.
    pub zero_is_missing: bool,
    /// Left and right child.
    pub children: [Child; 2],
}

/// Condition on a feature value under which a node leads to its left child.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitRule {
    /// The value is at most this split threshold.
    AtMost(f64),
    /// The value, truncated to an integer, is in the set with this index in [`Tree::sets`].
    OneOf(usize),
}

/// Child of an inner node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Child {
    /// Inner node, by its index in [`Tree::nodes`].
    Node(usize),
    /// Leaf, by its index among the leaves of the tree.
    Leaf(usize),
}

/// Decision tree that can be added to an ensemble. Node 0 is the root. A tree without nodes
/// consists of a single leaf.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// Inner nodes of the tree.
    pub nodes: Vec<Node>,
    /// Values of all leaves, leaf by leaf, with one value per output.
    pub leaves: Vec<f64>,
    /// Sets of integers for [`SplitRule::OneOf`]. Each set is a bit set of 32-bit words.
    pub sets: Vec<Vec<u32>>,
}

/// Error for a malformed tree or ensemble.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTree {
    /// The number of leaf values (first) is not a positive multiple of the number of outputs
    /// (second).
    #[error("{0} leaf values: must be a positive multiple of the number of outputs, {1}")]
    Leaves(usize, usize),
    /// The feature index of a node is out of range.
    #[error("node {node}: feature index {feature} is out of range, must be below {features}")]
    Feature {
        /// Index of the invalid node in the tree.
        node: usize,
        /// Rejected index of the feature.
        feature: usize,
        /// Number of features of the ensemble.
        features: usize,
    },
    /// The index of a child of this node is out of range.
    #[error("node {0}: index of a child is out of range, must be the index of a node or leaf of the tree")]
    Child(usize),
    /// This node has several parents, or is its own ancestor.
    #[error("node {0}: has several parents or is its own ancestor, nodes must form a tree")]
    MultipleParents(usize),
    /// The set index of this node is out of range.
    #[error("node {0}: set index is out of range, must be the index of a set of the tree")]
    Set(usize),
    /// The number of nodes, leaves or sets exceeds 32 bits, or a feature index exceeds 16 bits.
    #[error("the ensemble is too large: nodes, leaves and sets must fit in 32 bits, features in 16 bits")]
    TooLarge,
    /// The ensemble has no output.
    #[error("the ensemble has no output: must have at least one")]
    NoOutput,
    /// A start value, a split threshold or a leaf value is not finite.
    #[error("a start value, split threshold or leaf value is NaN or infinite: must be finite")]
    NotFinite,
}

/// Ensemble of trees. The prediction for a row is the sum of a start value and of one leaf value of
/// each tree. An ensemble is serialized as a list of trees, which are checked when it is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "stored::StoredEnsemble", try_from = "stored::StoredEnsemble")]
pub struct Ensemble {
    /// Number of features of a row.
    features: usize,
    /// Prediction without trees, one value per output.
    start: Vec<f64>,
    /// Root of each tree.
    roots: Vec<PackedRoot>,
    /// Inner nodes and leaves of all trees.
    nodes: Vec<PackedNode>,
    /// Leaf index of each entry of `nodes`; 0 for inner nodes. The values of leaf `i` start in
    /// `leaves` at `i` multiplied by the number of outputs.
    leaf: Vec<u32>,
    /// Leaf values of all trees.
    leaves: Vec<f64>,
    /// Sets of all trees.
    sets: Vec<Vec<u32>>,
    /// Whether all nodes compare numbers. If so, several trees are evaluated at once.
    is_numeric: bool,
}

/// Root of a tree in the evaluation layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedRoot {
    /// Index of the root in [`Ensemble::nodes`].
    packed: u32,
    /// Number of nodes from the root to the deepest leaf.
    depth: u32,
}

/// Inner node or leaf in the evaluation layout. It is small, so that many fit into the CPU cache.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PackedNode {
    /// Split threshold of a numeric node, or set index of a categorical node.
    at_most: f64,
    /// Index of the left child. The second child follows the first. The first child of a leaf is
    /// the leaf itself, so that further steps do not leave it.
    left_child: u32,
    feature: u16,
    missing_first: bool,
    kind: NodeKind,
}

/// Kind of a packed node: a leaf, or the test of an inner node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeKind {
    Leaf,
    AtMost,
    AtMostZeroMissing,
    OneOf,
}

/// Number of trees that are evaluated at once, so that their memory accesses overlap.
const INTERLEAVED_TREES: usize = 8;

impl Ensemble {
    /// Creates an ensemble without trees for rows of `features` features. `start` is the prediction
    /// without trees, one value per output.
    ///
    /// # Panics
    /// Panics if `start` is empty.
    pub fn new(features: usize, start: Vec<f64>) -> Self {
        assert!(!start.is_empty(), "an ensemble must have at least one output");
        let (roots, nodes, leaf, leaves, sets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { features, start, roots, nodes, leaf, leaves, sets, is_numeric: true }
    }

    /// Returns the number of features of a row.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Returns the number of outputs of a prediction.
    pub fn outputs(&self) -> usize {
        self.start.len()
    }

    /// Returns the number of trees.
    pub fn trees(&self) -> usize {
        self.roots.len()
    }

    /// Adds a tree to the ensemble.
    ///
    /// # Errors
    /// Returns [`InvalidTree`] if an index in the tree is out of range, or a node has several
    /// parents. The ensemble is then unchanged.
    pub fn push(&mut self, tree: &Tree) -> Result<(), InvalidTree> {
        let packed = PackedTree::new(self, tree)?;
        self.is_numeric &=
            packed.nodes.iter().all(|packed| matches!(packed.kind, NodeKind::Leaf | NodeKind::AtMost));
        self.roots.push(PackedRoot { packed: to_u32_index(self.nodes.len())?, depth: packed.depth });
        self.nodes.extend(packed.nodes);
        self.leaf.extend(packed.leaf);
        self.leaves.extend_from_slice(&tree.leaves);
        self.sets.extend_from_slice(&tree.sets);
        Ok(())
    }

    /// Predicts the outputs for a row and writes them to `outputs`.
    ///
    /// # Panics
    /// Panics if the length of `row` differs from the number of features, or the length of
    /// `outputs` from the number of outputs.
    pub fn predict(&self, row: &[f64], outputs: &mut [f64]) {
        assert_eq!(row.len(), self.features, "the row must have as many values as the ensemble has features");
        outputs.copy_from_slice(&self.start);
        for roots in self.roots.chunks(INTERLEAVED_TREES) {
            let at = if self.is_numeric {
                self.find_leaves_interleaved(roots, row)
            } else {
                self.find_leaves(roots, row)
            };
            for packed in &at[..roots.len()] {
                let leaf = self.leaf[*packed as usize] as usize * outputs.len();
                let leaf_values = &self.leaves[leaf..leaf + outputs.len()];
                outputs.iter_mut().zip(leaf_values).for_each(|(output, leaf_value)| *output += leaf_value);
            }
        }
    }

    /// Predicts the output for a row with an ensemble of one output.
    ///
    /// # Panics
    /// Panics if the ensemble has several outputs, or the length of `row` is not the number of
    /// features.
    pub fn predict_one(&self, row: &[f64]) -> f64 {
        let mut outputs = [0.0];
        self.predict(row, &mut outputs);
        outputs[0]
    }

    /// Returns the packed index of the leaf that a row reaches in each tree. All nodes must be
    /// numeric. All trees take as many steps as the deepest tree, so that the loop has no branches.
    fn find_leaves_interleaved(&self, roots: &[PackedRoot], row: &[f64]) -> [u32; INTERLEAVED_TREES] {
        let mut at = [roots[0].packed; INTERLEAVED_TREES];
        at.iter_mut().zip(roots).for_each(|(at, root)| *at = root.packed);
        for _ in 0..roots.iter().map(|root| root.depth).max().unwrap_or(0) {
            for at in &mut at {
                let packed = &self.nodes[*at as usize];
                let number = row[usize::from(packed.feature)];
                let goes_to_left_child =
                    (number <= packed.at_most) | (number.is_nan() & packed.missing_first);
                *at = packed.left_child + u32::from(!goes_to_left_child);
            }
        }
        at
    }

    /// Returns the packed index of the leaf that a row reaches in each tree.
    fn find_leaves(&self, roots: &[PackedRoot], row: &[f64]) -> [u32; INTERLEAVED_TREES] {
        let mut at = [0; INTERLEAVED_TREES];
        for (at, root) in at.iter_mut().zip(roots) {
            *at = root.packed;
            loop {
                let packed = &self.nodes[*at as usize];
                if packed.kind == NodeKind::Leaf {
                    break;
                }
                *at = packed.left_child
                    + u32::from(!self.goes_to_left_child(packed, row[usize::from(packed.feature)]));
            }
        }
        at
    }

    /// Returns whether a feature value leads to the left child of a node.
    fn goes_to_left_child(&self, packed: &PackedNode, number: f64) -> bool {
        match packed.kind {
            _ if number.is_nan() => packed.missing_first,
            NodeKind::AtMostZeroMissing if number.abs() <= ZERO_THRESHOLD => packed.missing_first,
            NodeKind::AtMost | NodeKind::AtMostZeroMissing => number <= packed.at_most,
            NodeKind::OneOf => self.is_in_category_set(packed, number),
            NodeKind::Leaf => true,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a set index and a truncated integer"
    )]
    fn is_in_category_set(&self, packed: &PackedNode, number: f64) -> bool {
        let set = &self.sets[packed.at_most as usize];
        let integer = number as i64;
        let Ok(bit) = usize::try_from(integer) else { return false };
        set.get(bit / 32).is_some_and(|bits| bits >> (bit % 32) & 1 == 1)
    }
}

/// Tree in the evaluation layout, to be added after the existing trees of an ensemble. The order is
/// breadth-first, so that siblings are adjacent.
struct PackedTree {
    nodes: Vec<PackedNode>,
    /// Leaf index of each entry of `nodes`; see [`Ensemble::leaf`].
    leaf: Vec<u32>,
    /// Number of nodes from the root to the deepest leaf.
    depth: u32,
}

impl PackedTree {
    /// Checks a tree and converts it to the evaluation layout.
    fn new(ensemble: &Ensemble, tree: &Tree) -> Result<Self, InvalidTree> {
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
            let here = to_u32_index(ensemble.nodes.len() + packed.nodes.len())?;
            match child {
                Child::Leaf(leaf) => {
                    packed.nodes.push(PackedNode::new_leaf(here));
                    packed.leaf.push(to_u32_index(ensemble.leaves.len() / outputs + leaf)?);
                }
                Child::Node(at) => {
                    let node = tree.checked_node(at, ensemble.features, leaves)?;
                    if std::mem::replace(&mut is_placed[at], true) {
                        return Err(InvalidTree::MultipleParents(at));
                    }
                    packed.nodes.push(
                        node.to_packed(to_u32_index(ensemble.nodes.len() + next)?, ensemble.sets.len())?,
                    );
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
    /// Returns the node at an index. Checks that the indexes of its feature, children and set are
    /// in range.
    fn checked_node(&self, at: usize, features: usize, leaves: usize) -> Result<&Node, InvalidTree> {
        let node = &self.nodes[at];
        if node.feature >= features {
            return Err(InvalidTree::Feature { node: at, feature: node.feature, features });
        }
        let is_in_range = |child: Child| match child {
            Child::Node(node) => node < self.nodes.len(),
            Child::Leaf(leaf) => leaf < leaves,
        };
        if !node.children.into_iter().all(is_in_range) {
            return Err(InvalidTree::Child(at));
        }
        match node.test {
            SplitRule::OneOf(set) if set >= self.sets.len() => Err(InvalidTree::Set(at)),
            SplitRule::OneOf(_) | SplitRule::AtMost(_) => Ok(node),
        }
    }
}

impl Node {
    /// Converts the node to the evaluation layout. `sets` is the number of sets of earlier trees.
    fn to_packed(self, left_child: u32, sets: usize) -> Result<PackedNode, InvalidTree> {
        let (at_most, kind) = match self.test {
            SplitRule::AtMost(at_most) if self.zero_is_missing => (at_most, NodeKind::AtMostZeroMissing),
            SplitRule::AtMost(at_most) => (at_most, NodeKind::AtMost),
            SplitRule::OneOf(set) => (f64::from(to_u32_index(sets + set)?), NodeKind::OneOf),
        };
        let feature = u16::try_from(self.feature).map_err(|_| InvalidTree::TooLarge)?;
        Ok(PackedNode { at_most, left_child, feature, missing_first: self.missing_first, kind })
    }
}

impl PackedNode {
    /// Creates a leaf at the packed index `index`. Every feature value leads to the leaf itself.
    fn new_leaf(index: u32) -> Self {
        Self {
            at_most: f64::INFINITY,
            left_child: index,
            feature: 0,
            missing_first: true,
            kind: NodeKind::Leaf,
        }
    }
}

/// Converts an index to 32 bits.
fn to_u32_index(n: usize) -> Result<u32, InvalidTree> {
    u32::try_from(n).map_err(|_| InvalidTree::TooLarge)
}

#[cfg(test)]
mod tests;
