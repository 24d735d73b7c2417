//! An ensemble as data: its trees one by one, as they were pushed, so that whoever reads it checks every one again.

use serde::{Deserialize, Serialize};

use super::{Child, Ensemble, Kind, Node, NotATree, Step, Test, Tree};

/// What is written down of an ensemble.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Stored {
    features: usize,
    start: Vec<f64>,
    trees: Vec<Tree>,
}

impl From<Ensemble> for Stored {
    fn from(ensemble: Ensemble) -> Self {
        let trees = (0..ensemble.trees()).map(|tree| ensemble.tree(tree)).collect();
        Self { features: ensemble.features, start: ensemble.start, trees }
    }
}

impl TryFrom<Stored> for Ensemble {
    type Error = NotATree;

    fn try_from(stored: Stored) -> Result<Self, NotATree> {
        if stored.start.is_empty() {
            return Err(NotATree::NoOutput);
        }
        let is_number = |number: &f64| number.is_finite();
        let are_numbers = |tree: &Tree| {
            let tests = tree.nodes.iter().map(|node| &node.test);
            let limits =
                tests.filter_map(|test| if let Test::AtMost(limit) = test { Some(limit) } else { None });
            tree.leaves.iter().chain(limits).all(is_number)
        };
        if !stored.start.iter().all(is_number) || !stored.trees.iter().all(are_numbers) {
            return Err(NotATree::NotFinite);
        }
        let mut ensemble = Self::new(stored.features, stored.start);
        stored.trees.iter().try_for_each(|tree| ensemble.push(tree))?;
        Ok(ensemble)
    }
}

impl Ensemble {
    /// A tree as it could be pushed again.
    fn tree(&self, tree: usize) -> Tree {
        let first = self.roots[tree].step as usize;
        let end = self.roots.get(tree + 1).map_or(self.steps.len(), |next| next.step as usize);
        let outputs = self.outputs();
        // Nodes and leaves are numbered anew, in the order in which they lie.
        let (mut numbers, mut leaves, mut nodes) = (Vec::new(), Vec::new(), 0);
        for step in first..end {
            if self.steps[step].kind == Kind::Leaf {
                let leaf = self.leaf[step] as usize * outputs;
                numbers.push(Child::Leaf(leaves.len() / outputs));
                leaves.extend_from_slice(&self.leaves[leaf..leaf + outputs]);
            } else {
                numbers.push(Child::Node(nodes));
                nodes += 1;
            }
        }
        let mut sets = Vec::new();
        let is_node = |step: &&Step| step.kind != Kind::Leaf;
        let nodes = self.steps[first..end].iter().filter(is_node);
        let nodes = nodes.map(|step| {
            let below = step.below as usize - first;
            self.node(step, [numbers[below], numbers[below + 1]], &mut sets)
        });
        Tree { nodes: nodes.collect(), leaves, sets }
    }

    fn node(&self, step: &Step, children: [Child; 2], sets: &mut Vec<Vec<u32>>) -> Node {
        let test = if step.kind == Kind::OneOf {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a set's number")]
            sets.push(self.sets[step.at_most as usize].clone());
            Test::OneOf(sets.len() - 1)
        } else {
            Test::AtMost(step.at_most)
        };
        Node {
            feature: usize::from(step.feature),
            test,
            missing_first: step.missing_first,
            zero_is_missing: step.kind == Kind::AtMostZeroMissing,
            children,
        }
    }
}
