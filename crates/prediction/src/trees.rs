//! Ensembles of decision trees as data, and what they say of one row of numbers. Nothing is trained here: [`boost`] and
//! [`bag`] make ensembles from rows, and `import` takes those trained elsewhere.

pub mod bag;
mod bins;
pub mod boost;
mod grow;
mod stored;

use std::collections::VecDeque;

use bins::Binned;
pub use bins::Columns;
pub use grow::Shape;
use serde::{Deserialize, Serialize};

/// The largest number that still counts as zero where zero means missing, as LightGBM has it.
const ZERO: f64 = 1e-35_f32 as f64;

/// A step down a tree: to its first or to its second child.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Which number of the row is looked at.
    pub feature: usize,
    /// Which numbers go to the first child.
    pub test: Test,
    /// Where a row goes that lacks the number (NaN): to the first child?
    pub missing_first: bool,
    /// Whether a zero counts as missing.
    pub zero_is_missing: bool,
    /// Both children.
    pub children: [Child; 2],
}

/// Which numbers go to the first child.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// Those that are at most this.
    AtMost(f64),
    /// Those that, cut down to a whole number, are in a set, by the set's number in its tree.
    OneOf(usize),
}

/// What is below a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Child {
    /// Another step, by its number in its tree.
    Node(usize),
    /// A leaf, by its number in its tree.
    Leaf(usize),
}

/// A tree, to be added to an ensemble. Its first node is its root; without nodes it is its only leaf.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// The steps.
    pub nodes: Vec<Node>,
    /// Of each leaf, a number for each output.
    pub leaves: Vec<f64>,
    /// Sets of whole numbers, as bits.
    pub sets: Vec<Vec<u32>>,
}

/// Why a tree is none of an ensemble.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotATree {
    /// Leaves do not have a number for each output, or there is none.
    #[error("{0} numbers in leaves: must be some for each leaf, one for each of {1} outputs")]
    Leaves(usize, usize),
    /// A node looks at a number that rows do not have.
    #[error("node {node} looks at number {feature} of {features}")]
    Feature {
        /// Which node.
        node: usize,
        /// What it looks at.
        feature: usize,
        /// How many there are.
        features: usize,
    },
    /// A node has a child that is not there.
    #[error("node {0} has a child that is not there")]
    Child(usize),
    /// A node is below two others, or below itself.
    #[error("node {0} is below two others")]
    Twice(usize),
    /// A node names a set that is not there.
    #[error("node {0} names a set that is not there")]
    Set(usize),
    /// More than can be numbered.
    #[error("too many nodes, leaves or sets")]
    TooLarge,
    /// Nothing would be answered.
    #[error("no output: must be at least one")]
    NoOutput,
    /// A node or a leaf has a number that is none.
    #[error("a node or leaf says NaN or an infinite number: must be numbers")]
    NotFinite,
}

/// Trees whose leaves are summed. As data it is its trees one by one, and is checked like any that are pushed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "stored::Stored", try_from = "stored::Stored")]
pub struct Ensemble {
    features: usize,
    start: Vec<f64>,
    roots: Vec<Root>,
    steps: Vec<Step>,
    /// Of each step that is one: which leaf.
    leaf: Vec<u32>,
    leaves: Vec<f64>,
    sets: Vec<Vec<u32>>,
    /// Whether every step only compares: then several trees are walked at once.
    is_plain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Root {
    step: u32,
    /// Steps down to its deepest leaf.
    depth: u32,
}

/// A node or a leaf as it is walked: small, so that many fit into a processor's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// The largest number that goes to the first child; of a test for membership, which set.
    at_most: f64,
    /// The first child; the second comes next. Of a leaf, the leaf itself: whoever is there stays.
    below: u32,
    feature: u16,
    missing_first: bool,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Leaf,
    AtMost,
    AtMostZeroMissing,
    OneOf,
}

/// Trees that are walked at once: while one waits for memory, the others go on.
const ABREAST: usize = 8;

impl Ensemble {
    /// No trees: every row gets `start`, one number for each output.
    ///
    /// # Panics
    /// There is no output.
    pub fn new(features: usize, start: Vec<f64>) -> Self {
        assert!(!start.is_empty(), "an ensemble answers something");
        let (roots, steps, leaf, leaves, sets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { features, start, roots, steps, leaf, leaves, sets, is_plain: true }
    }

    /// Numbers of a row.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Numbers of an answer.
    pub fn outputs(&self) -> usize {
        self.start.len()
    }

    /// How many trees there are.
    pub fn trees(&self) -> usize {
        self.roots.len()
    }

    /// Adds a tree.
    ///
    /// # Errors
    /// Something in it names what is not there, or a node is below another twice. Nothing is added.
    pub fn push(&mut self, tree: &Tree) -> Result<(), NotATree> {
        let laid = Layout::of(self, tree)?;
        self.is_plain &= laid.steps.iter().all(|step| matches!(step.kind, Kind::Leaf | Kind::AtMost));
        self.roots.push(Root { step: index(self.steps.len())?, depth: laid.depth });
        self.steps.extend(laid.steps);
        self.leaf.extend(laid.leaf);
        self.leaves.extend_from_slice(&tree.leaves);
        self.sets.extend_from_slice(&tree.sets);
        Ok(())
    }

    /// What the trees say of a row, into `answer`, one number for each output.
    ///
    /// # Panics
    /// The row or the answer has another length than those the ensemble was made for.
    pub fn predict(&self, row: &[f64], answer: &mut [f64]) {
        assert_eq!(row.len(), self.features, "a row has a number for each feature");
        answer.copy_from_slice(&self.start);
        for roots in self.roots.chunks(ABREAST) {
            let at = if self.is_plain { self.walk_abreast(roots, row) } else { self.walk(roots, row) };
            for step in &at[..roots.len()] {
                let leaf = self.leaf[*step as usize] as usize * answer.len();
                let said = &self.leaves[leaf..leaf + answer.len()];
                answer.iter_mut().zip(said).for_each(|(sum, add)| *sum += add);
            }
        }
    }

    /// What the trees say of a row in their only output.
    ///
    /// # Panics
    /// There are several outputs, or the row has another length than those the ensemble was made for.
    pub fn predict_one(&self, row: &[f64]) -> f64 {
        let mut answer = [0.0];
        self.predict(row, &mut answer);
        answer[0]
    }

    /// Where each of some trees ends, if all their steps only compare. Who has arrived stays until all have.
    fn walk_abreast(&self, roots: &[Root], row: &[f64]) -> [u32; ABREAST] {
        let mut at = [roots[0].step; ABREAST];
        at.iter_mut().zip(roots).for_each(|(at, root)| *at = root.step);
        for _ in 0..roots.iter().map(|root| root.depth).max().unwrap_or(0) {
            for at in &mut at {
                let step = &self.steps[*at as usize];
                let number = row[usize::from(step.feature)];
                let is_first = (number <= step.at_most) | (number.is_nan() & step.missing_first);
                *at = step.below + u32::from(!is_first);
            }
        }
        at
    }

    fn walk(&self, roots: &[Root], row: &[f64]) -> [u32; ABREAST] {
        let mut at = [0; ABREAST];
        for (at, root) in at.iter_mut().zip(roots) {
            *at = root.step;
            loop {
                let step = &self.steps[*at as usize];
                if step.kind == Kind::Leaf {
                    break;
                }
                *at = step.below + u32::from(!self.is_first(step, row[usize::from(step.feature)]));
            }
        }
        at
    }

    fn is_first(&self, step: &Step, number: f64) -> bool {
        match step.kind {
            _ if number.is_nan() => step.missing_first,
            Kind::AtMostZeroMissing if number.abs() <= ZERO => step.missing_first,
            Kind::AtMost | Kind::AtMostZeroMissing => number <= step.at_most,
            Kind::OneOf => self.is_one_of(step, number),
            Kind::Leaf => true,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a set's number, and a whole number"
    )]
    fn is_one_of(&self, step: &Step, number: f64) -> bool {
        let set = &self.sets[step.at_most as usize];
        let whole = number as i64;
        let Ok(bit) = usize::try_from(whole) else { return false };
        set.get(bit / 32).is_some_and(|bits| bits >> (bit % 32) & 1 == 1)
    }
}

/// A tree laid out after those that are there: level by level, so that the children of a node lie side by side.
struct Layout {
    steps: Vec<Step>,
    leaf: Vec<u32>,
    depth: u32,
}

impl Layout {
    fn of(ensemble: &Ensemble, tree: &Tree) -> Result<Self, NotATree> {
        let outputs = ensemble.outputs();
        let leaves = tree.leaves.len() / outputs;
        if leaves == 0 || leaves * outputs != tree.leaves.len() {
            return Err(NotATree::Leaves(tree.leaves.len(), outputs));
        }
        let root = if tree.nodes.is_empty() { Child::Leaf(0) } else { Child::Node(0) };
        let mut laid = Self { steps: Vec::new(), leaf: Vec::new(), depth: 0 };
        let (mut waiting, mut is_placed) = (VecDeque::from([(root, 0)]), vec![false; tree.nodes.len()]);
        let mut next = 1;
        while let Some((child, depth)) = waiting.pop_front() {
            laid.depth = depth;
            let here = index(ensemble.steps.len() + laid.steps.len())?;
            match child {
                Child::Leaf(leaf) => {
                    laid.steps.push(Step::leaf(here));
                    laid.leaf.push(index(ensemble.leaves.len() / outputs + leaf)?);
                }
                Child::Node(at) => {
                    let node = tree.checked(at, ensemble.features, leaves)?;
                    if std::mem::replace(&mut is_placed[at], true) {
                        return Err(NotATree::Twice(at));
                    }
                    laid.steps.push(node.step(index(ensemble.steps.len() + next)?, ensemble.sets.len())?);
                    laid.leaf.push(0);
                    next += 2;
                    waiting.extend(node.children.map(|child| (child, depth + 1)));
                }
            }
        }
        Ok(laid)
    }
}

impl Tree {
    /// A node that names only what is there.
    fn checked(&self, at: usize, features: usize, leaves: usize) -> Result<&Node, NotATree> {
        let node = &self.nodes[at];
        if node.feature >= features {
            return Err(NotATree::Feature { node: at, feature: node.feature, features });
        }
        let is_there = |child: Child| match child {
            Child::Node(node) => node < self.nodes.len(),
            Child::Leaf(leaf) => leaf < leaves,
        };
        if !node.children.into_iter().all(is_there) {
            return Err(NotATree::Child(at));
        }
        match node.test {
            Test::OneOf(set) if set >= self.sets.len() => Err(NotATree::Set(at)),
            Test::OneOf(_) | Test::AtMost(_) => Ok(node),
        }
    }
}

impl Node {
    fn step(&self, below: u32, sets: usize) -> Result<Step, NotATree> {
        let (at_most, kind) = match self.test {
            Test::AtMost(at_most) if self.zero_is_missing => (at_most, Kind::AtMostZeroMissing),
            Test::AtMost(at_most) => (at_most, Kind::AtMost),
            Test::OneOf(set) => (f64::from(index(sets + set)?), Kind::OneOf),
        };
        let feature = u16::try_from(self.feature).map_err(|_| NotATree::TooLarge)?;
        Ok(Step { at_most, below, feature, missing_first: self.missing_first, kind })
    }
}

impl Step {
    /// Every number, and none, leads back to it.
    fn leaf(here: u32) -> Self {
        Self { at_most: f64::INFINITY, below: here, feature: 0, missing_first: true, kind: Kind::Leaf }
    }
}

fn index(n: usize) -> Result<u32, NotATree> {
    u32::try_from(n).map_err(|_| NotATree::TooLarge)
}

#[cfg(test)]
mod tests;
