//! Conversion of an ONNX tree ensemble into trees. ONNX stores one array for each field of a node.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ParseError,
    graph::{AttributeProto, NodeProto},
};
use crate::trees::{Child, Ensemble, Node, SplitRule, Tree};

/// Identifier of a node in an ensemble: the id of the tree, and the id of the node in the tree.
type NodeId = (i64, i64);

/// Weights of a leaf: pairs of an output index and the weight for this output.
type LeafWeights = Vec<(usize, f64)>;

/// Attributes of an ONNX operator, by name.
pub(super) struct Attributes<'a>(pub(super) &'a NodeProto);

impl<'a> Attributes<'a> {
    /// Returns the attribute of this name.
    fn find(&self, name: &str) -> Option<&'a AttributeProto> {
        self.0.attribute.iter().find(|attribute| attribute.name == name)
    }

    pub(super) fn ints(&self, name: &str) -> &'a [i64] {
        self.find(name).map_or(&[], |attribute| &attribute.ints)
    }

    pub(super) fn floats(&self, name: &str) -> &'a [f32] {
        self.find(name).map_or(&[], |attribute| &attribute.floats)
    }

    pub(super) fn texts(&self, name: &str) -> Vec<String> {
        let texts = self.find(name).map_or(&[][..], |attribute| &attribute.strings);
        texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect()
    }

    pub(super) fn text(&self, name: &str) -> String {
        self.find(name)
            .map(|attribute| String::from_utf8_lossy(&attribute.s).into_owned())
            .unwrap_or_default()
    }

    pub(super) fn int(&self, name: &str) -> Option<i64> {
        self.find(name).map(|attribute| attribute.i)
    }

    /// Checks that an unsupported attribute, which would change the output, is absent.
    pub(super) fn require_attribute_absent(&self, name: &'static str) -> Result<(), ParseError> {
        match self.find(name) {
            None => Ok(()),
            Some(_) => Err(invalid_attribute(name, "present", "must be absent: it is not supported")),
        }
    }

    /// Returns the text of an attribute, which must be one of `allowed` or absent.
    pub(super) fn optional_choice(
        &self,
        name: &'static str,
        allowed: &[&str],
        rule: &'static str,
    ) -> Result<String, ParseError> {
        let text = self.text(name);
        if text.is_empty() || allowed.contains(&text.as_str()) {
            Ok(text)
        } else {
            Err(invalid_attribute(name, text, rule))
        }
    }
}

/// Returns the error for an attribute that violates a rule.
pub(super) fn invalid_attribute(
    attribute: &'static str,
    value: impl ToString,
    rule: &'static str,
) -> ParseError {
    ParseError::Attribute { attribute, value: value.to_string(), rule }
}

/// Names of the attributes that contain the leaf weights of an ensemble.
pub(super) struct LeafAttributes {
    /// Tree id of each weight.
    trees: &'static str,
    /// Node id of each weight.
    nodes: &'static str,
    /// Output index of each weight.
    outputs: &'static str,
    weights: &'static str,
}

/// Names of the leaf attributes of a classifier.
pub(super) const CLASS_LEAF_ATTRIBUTES: LeafAttributes = LeafAttributes {
    trees: "class_treeids",
    nodes: "class_nodeids",
    outputs: "class_ids",
    weights: "class_weights",
};
/// Names of the leaf attributes of a regressor.
pub(super) const TARGET_LEAF_ATTRIBUTES: LeafAttributes = LeafAttributes {
    trees: "target_treeids",
    nodes: "target_nodeids",
    outputs: "target_ids",
    weights: "target_weights",
};

/// Nodes and leaf weights of all trees of an ensemble.
pub(super) struct Forest {
    /// Number of outputs of the ensemble.
    outputs: usize,
    nodes: BTreeMap<NodeId, OnnxNode>,
    leaf_weights: BTreeMap<NodeId, LeafWeights>,
}

/// Node of an ONNX tree: an inner node or a leaf.
struct OnnxNode {
    /// Mode in ONNX: `LEAF`, or the comparison of the feature with `value`.
    mode: String,
    feature: usize,
    value: f32,
    /// Whether NaN leads to the child for a true comparison.
    missing_true: bool,
    /// Children for a true and for a false comparison.
    children: [NodeId; 2],
}

impl Forest {
    /// Reads the nodes and leaf weights of an ensemble with `outputs` outputs.
    pub(super) fn read(
        attributes: &Attributes<'_>,
        leaves: &LeafAttributes,
        outputs: usize,
    ) -> Result<Self, ParseError> {
        let mut leaf_weights: BTreeMap<NodeId, LeafWeights> = BTreeMap::new();
        let weights = attributes.floats(leaves.weights);
        let [trees, nodes, output_ids] = [leaves.trees, leaves.nodes, leaves.outputs].map(|name| {
            let rule = "must have one entry for each leaf weight";
            check_length(name, attributes.ints(name), weights.len(), rule)
        });
        let (trees, nodes, output_ids) = (trees?, nodes?, output_ids?);
        for (at, weight) in weights.iter().enumerate() {
            let output = usize::try_from(output_ids[at]).ok().filter(|output| *output < outputs);
            let output = output.ok_or_else(|| {
                invalid_attribute(leaves.outputs, output_ids[at], "must be the index of a class or target")
            })?;
            leaf_weights.entry((trees[at], nodes[at])).or_default().push((output, f64::from(*weight)));
        }
        Ok(Self { outputs, nodes: read_nodes(attributes)?, leaf_weights })
    }

    /// Returns the number of features that the nodes require: the highest feature index plus 1.
    pub(super) fn features(&self) -> usize {
        self.nodes.values().filter(|node| node.mode != "LEAF").map(|node| node.feature + 1).max().unwrap_or(0)
    }

    /// Returns whether all leaf weights are at least 0.
    pub(super) fn has_nonnegative_weights(&self) -> bool {
        self.leaf_weights.values().flatten().all(|(_, weight)| *weight >= 0.0)
    }

    /// Returns the output index if it is the same for all leaf weights, or else `None`.
    pub(super) fn single_output(&self) -> Option<usize> {
        let mut outputs = self.leaf_weights.values().flatten().map(|(output, _)| *output);
        let first = outputs.next()?;
        outputs.all(|output| output == first).then_some(first)
    }

    /// Converts all trees and adds them to `ensemble`. `leaf_values` returns the values of a leaf,
    /// given its weights, the number of outputs and the number of trees.
    pub(super) fn push_trees(
        &self,
        ensemble: &mut Ensemble,
        leaf_values: impl Fn(&LeafWeights, usize, usize) -> Vec<f64>,
    ) -> Result<(), ParseError> {
        let mut ids: Vec<i64> = self.nodes.keys().map(|(tree, _)| *tree).collect();
        ids.dedup();
        for id in &ids {
            let tree = self.tree(*id, |leaf| leaf_values(leaf, self.outputs, ids.len()))?;
            ensemble.push(&tree).map_err(|reason| ParseError::Tree { tree: *id, reason })?;
        }
        Ok(())
    }

    /// Converts the tree with this id. Its nodes are renumbered, so that children follow their
    /// parents.
    fn tree(&self, id: i64, leaf_values: impl Fn(&LeafWeights) -> Vec<f64>) -> Result<Tree, ParseError> {
        let disconnected =
            || ParseError::Graph(format!("the nodes of tree {id} do not form one connected tree"));
        let nodes = self.nodes.range((id, i64::MIN)..=(id, i64::MAX));
        let branches = || nodes.clone().filter(|(_, node)| node.mode != "LEAF");
        let children: BTreeSet<NodeId> = branches().flat_map(|(_, node)| node.children).collect();
        let mut roots = nodes.clone().map(|(id, _)| *id).filter(|id| !children.contains(id));
        let (Some(root), None) = (roots.next(), roots.next()) else { return Err(disconnected()) };
        let mut tree = Tree::default();
        let mut pending = vec![(root, None)];
        let mut remaining = nodes.count();
        while let Some((at, parent)) = pending.pop() {
            remaining = remaining.checked_sub(1).ok_or_else(disconnected)?;
            let node = self.nodes.get(&at).ok_or_else(disconnected)?;
            let child = if node.mode == "LEAF" {
                let leaf = leaf_values(self.leaf_weights.get(&at).unwrap_or(&LeafWeights::new()));
                tree.leaves.extend(leaf);
                Child::Leaf(tree.leaves.len() / self.outputs - 1)
            } else {
                let (node, children) = node.to_split()?;
                tree.nodes.push(node);
                let node = tree.nodes.len() - 1;
                pending.extend([(children[1], Some((node, 1))), (children[0], Some((node, 0)))]);
                Child::Node(node)
            };
            if let Some((node, side)) = parent {
                let node: &mut Node = &mut tree.nodes[node];
                node.children[side] = child;
            }
        }
        if remaining == 0 { Ok(tree) } else { Err(disconnected()) }
    }
}

impl OnnxNode {
    /// Converts an inner node, and returns it with its left and right child. In ONNX, a true
    /// comparison leads to the true child, and NaN to the false child unless `missing_true` is set.
    /// In the result, values up to the split threshold lead to the left child.
    fn to_split(&self) -> Result<(Node, [NodeId; 2]), ParseError> {
        let [if_true, if_false] = self.children;
        let (at_most, children, missing_first) = match self.mode.as_str() {
            "BRANCH_LEQ" => (self.value, [if_true, if_false], self.missing_true),
            "BRANCH_LT" => (self.value.next_down(), [if_true, if_false], self.missing_true),
            "BRANCH_GT" => (self.value, [if_false, if_true], !self.missing_true),
            "BRANCH_GTE" => (self.value.next_down(), [if_false, if_true], !self.missing_true),
            other => {
                return Err(invalid_attribute(
                    "nodes_modes",
                    other,
                    "must be LEAF, BRANCH_LEQ, BRANCH_LT, BRANCH_GT or BRANCH_GTE",
                ));
            }
        };
        let node = Node {
            feature: self.feature,
            test: SplitRule::AtMost(f64::from(at_most)),
            missing_first,
            zero_is_missing: false,
            // `Forest::tree` replaces these placeholders.
            children: [Child::Leaf(usize::MAX); 2],
        };
        Ok((node, children))
    }
}

/// Reads the nodes of all trees.
fn read_nodes(attributes: &Attributes<'_>) -> Result<BTreeMap<NodeId, OnnxNode>, ParseError> {
    let rule = "must have as many entries as nodes_modes";
    let modes = attributes.texts("nodes_modes");
    let ints = |name| check_length(name, attributes.ints(name), modes.len(), rule);
    let [trees, nodes, features, if_true, if_false] =
        ["nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_truenodeids", "nodes_falsenodeids"]
            .map(ints);
    let (trees, nodes, features, if_true, if_false) = (trees?, nodes?, features?, if_true?, if_false?);
    let values = check_length("nodes_values", attributes.floats("nodes_values"), modes.len(), rule)?;
    let missing = attributes.ints("nodes_missing_value_tracks_true");
    let mut nodes_by_id = BTreeMap::new();
    for (at, mode) in modes.into_iter().enumerate() {
        let (id, feature) = ((trees[at], nodes[at]), features[at]);
        let is_leaf = mode == "LEAF";
        let feature = if is_leaf { 0 } else { usize::try_from(feature).unwrap_or(usize::MAX) };
        if feature >= MODEL_FEATURES_MAX {
            return Err(invalid_attribute("nodes_featureids", features[at], "must be from 0 to 65535"));
        }
        let missing_true = missing.get(at) == Some(&1);
        let children = [(id.0, if_true[at]), (id.0, if_false[at])];
        let node = OnnxNode { mode, feature, value: values[at], missing_true, children };
        if nodes_by_id.insert(id, node).is_some() {
            return Err(invalid_attribute("nodes_nodeids", id.1, "must be unique within the tree"));
        }
    }
    Ok(nodes_by_id)
}

/// Largest number of features: [`Ensemble`] stores feature indexes in 16 bits.
const MODEL_FEATURES_MAX: usize = 1 << 16;

/// Returns the array of an attribute if it has `expected` entries.
fn check_length<'a, T>(
    name: &'static str,
    array: &'a [T],
    expected: usize,
    rule: &'static str,
) -> Result<&'a [T], ParseError> {
    if array.len() == expected {
        Ok(array)
    } else {
        Err(invalid_attribute(name, format!("{} entries", array.len()), rule))
    }
}
