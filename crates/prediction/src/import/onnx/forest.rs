//! Conversion of an ONNX tree ensemble (one array for each field) into trees.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ParseError,
    graph::{AttributeProto, NodeProto},
};
use crate::trees::{Child, Ensemble, Node, SplitRule, Tree};

/// Node id: the ids of the tree and of the node in it.
type Id = (i64, i64);

/// Weights of a leaf: output index and weight.
type LeafWeights = Vec<(usize, f64)>;

/// Attributes of an ONNX operator, by name.
pub(super) struct Settings<'a>(pub(super) &'a NodeProto);

impl<'a> Settings<'a> {
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

    /// Rejects an attribute that would change the output.
    pub(super) fn require_absent(&self, name: &'static str) -> Result<(), ParseError> {
        match self.find(name) {
            None => Ok(()),
            Some(_) => Err(invalid_attribute(name, "something", "must be absent")),
        }
    }

    pub(super) fn one_of(
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

pub(super) fn invalid_attribute(
    attribute: &'static str,
    value: impl ToString,
    rule: &'static str,
) -> ParseError {
    ParseError::Attribute { attribute, value: value.to_string(), rule }
}

/// Names of the attributes that describe the leaves.
pub(super) struct LeafAttributes {
    trees: &'static str,
    nodes: &'static str,
    outputs: &'static str,
    weights: &'static str,
}

/// Leaf attributes of a classifier.
pub(super) const CLASS_LEAVES: LeafAttributes = LeafAttributes {
    trees: "class_treeids",
    nodes: "class_nodeids",
    outputs: "class_ids",
    weights: "class_weights",
};
/// Leaf attributes of a regressor.
pub(super) const TARGET_LEAVES: LeafAttributes = LeafAttributes {
    trees: "target_treeids",
    nodes: "target_nodeids",
    outputs: "target_ids",
    weights: "target_weights",
};

/// Nodes and leaves of a whole ensemble.
pub(super) struct Forest {
    /// Number of outputs.
    outputs: usize,
    nodes: BTreeMap<Id, OnnxNode>,
    leaf_weights: BTreeMap<Id, LeafWeights>,
}

/// Node as ONNX stores it.
struct OnnxNode {
    mode: String,
    feature: usize,
    value: f32,
    missing_true: bool,
    children: [Id; 2],
}

impl Forest {
    pub(super) fn of(
        settings: &Settings<'_>,
        leaves: &LeafAttributes,
        outputs: usize,
    ) -> Result<Self, ParseError> {
        let mut leaf_weights: BTreeMap<Id, LeafWeights> = BTreeMap::new();
        let weights = settings.floats(leaves.weights);
        let [trees, nodes, to] = [leaves.trees, leaves.nodes, leaves.outputs]
            .map(|name| same_length(name, settings.ints(name), weights.len()));
        let (trees, nodes, to) = (trees?, nodes?, to?);
        for (at, weight) in weights.iter().enumerate() {
            let output = usize::try_from(to[at]).ok().filter(|output| *output < outputs);
            let output = output
                .ok_or_else(|| invalid_attribute(leaves.outputs, to[at], "must be one of the outputs"))?;
            leaf_weights.entry((trees[at], nodes[at])).or_default().push((output, f64::from(*weight)));
        }
        Ok(Self { outputs, nodes: read_nodes(settings)?, leaf_weights })
    }

    /// Returns the number of features that the nodes test.
    pub(super) fn features(&self) -> usize {
        self.nodes.values().filter(|node| node.mode != "LEAF").map(|node| node.feature + 1).max().unwrap_or(0)
    }

    /// Returns whether all leaf weights are at least 0.
    pub(super) fn is_positive(&self) -> bool {
        self.leaf_weights.values().flatten().all(|(_, weight)| *weight >= 0.0)
    }

    /// Returns the output index of all leaf weights, if they share one.
    pub(super) fn only_output(&self) -> Option<usize> {
        let mut outputs = self.leaf_weights.values().flatten().map(|(output, _)| *output);
        let first = outputs.next()?;
        outputs.all(|output| output == first).then_some(first)
    }

    /// Adds every tree to the ensemble. `leaf_values` maps the weights of a leaf, the number of
    /// outputs and the number of trees to the leaf values.
    pub(super) fn push_trees(
        &self,
        ensemble: &mut Ensemble,
        leaf_values: impl Fn(&LeafWeights, usize, usize) -> Vec<f64>,
    ) -> Result<(), ParseError> {
        let mut ids: Vec<i64> = self.nodes.keys().map(|(tree, _)| *tree).collect();
        ids.dedup();
        for id in &ids {
            let tree = self.tree(*id, |leaf| leaf_values(leaf, self.outputs, ids.len()))?;
            ensemble.push(&tree).map_err(|why| ParseError::Tree { tree: *id, why })?;
        }
        Ok(())
    }

    /// Builds a tree with its nodes renumbered so that children follow their parents.
    fn tree(&self, id: i64, leaf_values: impl Fn(&LeafWeights) -> Vec<f64>) -> Result<Tree, ParseError> {
        let disconnected =
            || ParseError::Graph(format!("tree {id} is malformed: its nodes are not connected"));
        let nodes = self.nodes.range((id, i64::MIN)..=(id, i64::MAX));
        let branches = || nodes.clone().filter(|(_, node)| node.mode != "LEAF");
        let children: BTreeSet<Id> = branches().flat_map(|(_, node)| node.children).collect();
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
    /// Converts the node. ONNX takes the true child if the comparison holds and the false child for
    /// NaN, unless `missing_true` is set. Our first child takes values that are at most the limit.
    fn to_split(&self) -> Result<(Node, [Id; 2]), ParseError> {
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
                    "must be LEAF or BRANCH_LEQ, _LT, _GT or _GTE",
                ));
            }
        };
        let node = Node {
            feature: self.feature,
            test: SplitRule::AtMost(f64::from(at_most)),
            missing_first,
            zero_is_missing: false,
            children: [Child::Leaf(usize::MAX); 2], // linked when the child is built
        };
        Ok((node, children))
    }
}

fn read_nodes(settings: &Settings<'_>) -> Result<BTreeMap<Id, OnnxNode>, ParseError> {
    let modes = settings.texts("nodes_modes");
    let ints = |name| same_length(name, settings.ints(name), modes.len());
    let [trees, nodes, features, if_true, if_false] =
        ["nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_truenodeids", "nodes_falsenodeids"]
            .map(ints);
    let (trees, nodes, features, if_true, if_false) = (trees?, nodes?, features?, if_true?, if_false?);
    let values = same_length("nodes_values", settings.floats("nodes_values"), modes.len())?;
    let missing = settings.ints("nodes_missing_value_tracks_true");
    let mut nodes_by_id = BTreeMap::new();
    for (at, mode) in modes.into_iter().enumerate() {
        let (id, feature) = ((trees[at], nodes[at]), features[at]);
        let is_leaf = mode == "LEAF";
        let feature = if is_leaf { 0 } else { usize::try_from(feature).unwrap_or(usize::MAX) };
        if feature >= FEATURES_MAX {
            return Err(invalid_attribute(
                "nodes_featureids",
                features[at],
                "must be the index of a feature",
            ));
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

/// Upper bound on the number of features.
const FEATURES_MAX: usize = 1 << 16;

fn same_length<'a, T>(name: &'static str, array: &'a [T], nodes: usize) -> Result<&'a [T], ParseError> {
    if array.len() == nodes {
        Ok(array)
    } else {
        Err(invalid_attribute(
            name,
            array.len(),
            "must have as many entries as the ensemble has nodes or weights",
        ))
    }
}
