//! Serialized form of an ensemble: a list of trees. Each tree is checked when the ensemble is read.

use serde::{Deserialize, Serialize};

use super::{Child, Ensemble, InvalidTree, Node, NodeKind, PackedNode, SplitRule, Tree};

/// Serialized form of an [`Ensemble`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredEnsemble {
    features: usize,
    start: Vec<f64>,
    trees: Vec<Tree>,
}

impl From<Ensemble> for StoredEnsemble {
    fn from(ensemble: Ensemble) -> Self {
        let trees = (0..ensemble.trees()).map(|tree| ensemble.unpack_tree(tree)).collect();
        Self { features: ensemble.features, start: ensemble.start, trees }
    }
}

impl TryFrom<StoredEnsemble> for Ensemble {
    type Error = InvalidTree;

    fn try_from(stored: StoredEnsemble) -> Result<Self, InvalidTree> {
        if stored.start.is_empty() {
            return Err(InvalidTree::NoOutput);
        }
        let is_number = |number: &f64| number.is_finite();
        let are_numbers = |tree: &Tree| {
            let tests = tree.nodes.iter().map(|node| &node.test);
            let limits =
                tests.filter_map(|test| if let SplitRule::AtMost(limit) = test { Some(limit) } else { None });
            tree.leaves.iter().chain(limits).all(is_number)
        };
        if !stored.start.iter().all(is_number) || !stored.trees.iter().all(are_numbers) {
            return Err(InvalidTree::NotFinite);
        }
        let mut ensemble = Self::new(stored.features, stored.start);
        stored.trees.iter().try_for_each(|tree| ensemble.push(tree))?;
        Ok(ensemble)
    }
}

impl Ensemble {
    /// Converts the tree with this index back from the evaluation layout.
    fn unpack_tree(&self, tree: usize) -> Tree {
        let first = self.roots[tree].packed as usize;
        let end = self.roots.get(tree + 1).map_or(self.nodes.len(), |next| next.packed as usize);
        let outputs = self.outputs();
        // Number nodes and leaves in the order of the evaluation layout.
        let (mut children, mut leaves, mut nodes) = (Vec::new(), Vec::new(), 0);
        for packed in first..end {
            if self.nodes[packed].kind == NodeKind::Leaf {
                let leaf = self.leaf[packed] as usize * outputs;
                children.push(Child::Leaf(leaves.len() / outputs));
                leaves.extend_from_slice(&self.leaves[leaf..leaf + outputs]);
            } else {
                children.push(Child::Node(nodes));
                nodes += 1;
            }
        }
        let mut sets = Vec::new();
        let is_node = |packed: &&PackedNode| packed.kind != NodeKind::Leaf;
        let nodes = self.nodes[first..end].iter().filter(is_node);
        let nodes = nodes.map(|packed| {
            let left_child = packed.left_child as usize - first;
            self.unpack_node(packed, [children[left_child], children[left_child + 1]], &mut sets)
        });
        Tree { nodes: nodes.collect(), leaves, sets }
    }

    /// Converts an inner node back from the evaluation layout. Its set, if any, is added to `sets`.
    fn unpack_node(&self, packed: &PackedNode, children: [Child; 2], sets: &mut Vec<Vec<u32>>) -> Node {
        let test = if packed.kind == NodeKind::OneOf {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a set index")]
            sets.push(self.sets[packed.at_most as usize].clone());
            SplitRule::OneOf(sets.len() - 1)
        } else {
            SplitRule::AtMost(packed.at_most)
        };
        Node {
            feature: usize::from(packed.feature),
            test,
            missing_first: packed.missing_first,
            zero_is_missing: packed.kind == NodeKind::AtMostZeroMissing,
            children,
        }
    }
}
