//! Ensembles of decision trees as data, and what they say of one row of numbers. Nothing is trained here: [`boost`] makes
//! ensembles from rows.

mod bins;
pub mod boost;
mod grow;

pub use bins::{Binned, Columns};
pub use grow::Shape;

/// The largest number that still counts as zero where zero means missing, as LightGBM has it.
const ZERO: f64 = 1e-35_f32 as f64;

/// A step down a tree: to its first or to its second child.
#[derive(Clone, Copy, Debug, PartialEq)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Test {
    /// Those that are at most this.
    AtMost(f64),
    /// Those that, cut down to a whole number, are in a set, by the set's number in its tree.
    OneOf(usize),
}

/// What is below a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    /// Another step, by its number in its tree; larger than that of the step above.
    Node(usize),
    /// A leaf, by its number in its tree.
    Leaf(usize),
}

/// A tree, to be added to an ensemble. Its first node is its root; without nodes it is its only leaf.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// A node has a child that is not there, or is above itself.
    #[error("node {0} has a child that is not below it")]
    Child(usize),
    /// A node names a set that is not there.
    #[error("node {0} names a set that is not there")]
    Set(usize),
    /// More than can be numbered.
    #[error("too many nodes, leaves or sets")]
    TooLarge,
}

/// Trees whose leaves are summed.
#[derive(Clone, Debug, PartialEq)]
pub struct Ensemble {
    features: usize,
    start: Vec<f64>,
    /// Of each tree: as a child of a step.
    roots: Vec<i32>,
    steps: Vec<Step>,
    leaves: Vec<f64>,
    sets: Vec<Vec<u32>>,
}

/// A node as it is walked: small, so that many fit into a processor's cache.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// The largest number that goes to the first child; of a test for membership, which set.
    at_most: f64,
    /// A step; or, below zero, the complement of a leaf.
    children: [i32; 2],
    feature: u16,
    missing_first: bool,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    AtMost,
    AtMostZeroMissing,
    OneOf,
}

impl Ensemble {
    /// No trees: every row gets `start`, one number for each output.
    pub fn new(features: usize, start: Vec<f64>) -> Self {
        let (roots, steps, leaves, sets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { features, start, roots, steps, leaves, sets }
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
    /// Something in it names what is not there, or a way down would not end. Nothing is added.
    pub fn push(&mut self, tree: &Tree) -> Result<(), NotATree> {
        let outputs = self.outputs();
        let leaves = tree.leaves.len() / outputs;
        if leaves == 0 || leaves * outputs != tree.leaves.len() {
            return Err(NotATree::Leaves(tree.leaves.len(), outputs));
        }
        let base = Base {
            step: index(self.steps.len())?,
            leaf: index(self.leaves.len() / outputs)?,
            set: index(self.sets.len())?,
        };
        index(self.steps.len() + tree.nodes.len())?;
        index(self.leaves.len() / outputs + leaves)?;
        let steps = tree.nodes.iter().enumerate();
        let steps = steps.map(|(at, node)| base.step(self.features, tree, leaves, at, node));
        let steps = steps.collect::<Result<Vec<Step>, NotATree>>()?;
        self.roots.push(if steps.is_empty() { !base.leaf } else { base.step });
        self.steps.extend(steps);
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
        let outputs = self.outputs();
        for root in &self.roots {
            let leaf = self.leaf(*root, row);
            let said = &self.leaves[leaf * outputs..(leaf + 1) * outputs];
            answer.iter_mut().zip(said).for_each(|(sum, add)| *sum += add);
        }
    }

    /// What the trees say of a row in their only output.
    pub fn predict_one(&self, row: &[f64]) -> f64 {
        let mut answer = [0.0];
        self.predict(row, &mut answer);
        answer[0]
    }

    fn leaf(&self, root: i32, row: &[f64]) -> usize {
        let mut at = root;
        while let Ok(step) = usize::try_from(at) {
            let step = &self.steps[step];
            at = step.children[usize::from(!self.is_first(step, row[usize::from(step.feature)]))];
        }
        usize::try_from(!at).expect("a complement of a negative number")
    }

    fn is_first(&self, step: &Step, number: f64) -> bool {
        match step.kind {
            _ if number.is_nan() => step.missing_first,
            Kind::AtMost => number <= step.at_most,
            Kind::AtMostZeroMissing if number.abs() <= ZERO => step.missing_first,
            Kind::AtMostZeroMissing => number <= step.at_most,
            Kind::OneOf => self.is_one_of(step, number),
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

/// Where a tree begins in an ensemble.
struct Base {
    step: i32,
    leaf: i32,
    set: i32,
}

impl Base {
    fn step(
        &self,
        features: usize,
        tree: &Tree,
        leaves: usize,
        at: usize,
        node: &Node,
    ) -> Result<Step, NotATree> {
        if node.feature >= features {
            return Err(NotATree::Feature { node: at, feature: node.feature, features });
        }
        let child = |child: Child| match child {
            Child::Node(n) if n > at && n < tree.nodes.len() => Ok(self.step + index(n)?),
            Child::Leaf(n) if n < leaves => Ok(!(self.leaf + index(n)?)),
            Child::Node(_) | Child::Leaf(_) => Err(NotATree::Child(at)),
        };
        let (at_most, kind) = match node.test {
            Test::AtMost(at_most) if node.zero_is_missing => (at_most, Kind::AtMostZeroMissing),
            Test::AtMost(at_most) => (at_most, Kind::AtMost),
            Test::OneOf(set) if set < tree.sets.len() => (f64::from(self.set + index(set)?), Kind::OneOf),
            Test::OneOf(_) => return Err(NotATree::Set(at)),
        };
        Ok(Step {
            at_most,
            children: [child(node.children[0])?, child(node.children[1])?],
            feature: u16::try_from(node.feature).map_err(|_| NotATree::TooLarge)?,
            missing_first: node.missing_first,
            kind,
        })
    }
}

fn index(n: usize) -> Result<i32, NotATree> {
    i32::try_from(n).map_err(|_| NotATree::TooLarge)
}

#[cfg(test)]
mod tests;
