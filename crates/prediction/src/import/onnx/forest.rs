//! An ensemble as ONNX has it, an array for each thing, as trees.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Refused,
    graph::{AttributeProto, NodeProto},
};
use crate::trees::{Child, Ensemble, Node, Test, Tree};

/// A node by the ids of its tree and of itself.
type Id = (i64, i64);

/// What a leaf says: of which output, and how much.
type Says = Vec<(usize, f64)>;

/// Settings of the step, by name.
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

    /// A setting that would make the answers others.
    pub(super) fn lacks(&self, name: &'static str) -> Result<(), Refused> {
        match self.find(name) {
            None => Ok(()),
            Some(_) => Err(wrong(name, "something", "must not be there")),
        }
    }

    pub(super) fn one_of(
        &self,
        name: &'static str,
        may: &[&str],
        rule: &'static str,
    ) -> Result<String, Refused> {
        let text = self.text(name);
        if text.is_empty() || may.contains(&text.as_str()) { Ok(text) } else { Err(wrong(name, text, rule)) }
    }
}

pub(super) fn wrong(attribute: &'static str, value: impl ToString, rule: &'static str) -> Refused {
    Refused::Attribute { attribute, value: value.to_string(), rule }
}

/// Names of the arrays of leaves.
pub(super) struct Leaves {
    trees: &'static str,
    nodes: &'static str,
    outputs: &'static str,
    weights: &'static str,
}

/// Those of a classifier.
pub(super) const OF_CLASSES: Leaves =
    Leaves { trees: "class_treeids", nodes: "class_nodeids", outputs: "class_ids", weights: "class_weights" };
/// Those of a regressor.
pub(super) const OF_TARGETS: Leaves = Leaves {
    trees: "target_treeids",
    nodes: "target_nodeids",
    outputs: "target_ids",
    weights: "target_weights",
};

/// A whole ensemble's nodes and leaves.
pub(super) struct Forest {
    /// How many numbers a leaf says.
    outputs: usize,
    nodes: BTreeMap<Id, Branch>,
    says: BTreeMap<Id, Says>,
}

/// A node as ONNX has it.
struct Branch {
    mode: String,
    feature: usize,
    value: f32,
    missing_true: bool,
    children: [Id; 2],
}

impl Forest {
    pub(super) fn of(settings: &Settings<'_>, leaves: &Leaves, outputs: usize) -> Result<Self, Refused> {
        let mut says: BTreeMap<Id, Says> = BTreeMap::new();
        let weights = settings.floats(leaves.weights);
        let [trees, nodes, to] = [leaves.trees, leaves.nodes, leaves.outputs]
            .map(|name| same_length(name, settings.ints(name), weights.len()));
        let (trees, nodes, to) = (trees?, nodes?, to?);
        for (at, weight) in weights.iter().enumerate() {
            let output = usize::try_from(to[at]).ok().filter(|output| *output < outputs);
            let output = output.ok_or_else(|| wrong(leaves.outputs, to[at], "must be one of the outputs"))?;
            says.entry((trees[at], nodes[at])).or_default().push((output, f64::from(*weight)));
        }
        Ok(Self { outputs, nodes: branches(settings)?, says })
    }

    /// Numbers that rows must have.
    pub(super) fn features(&self) -> usize {
        self.nodes
            .values()
            .filter(|branch| branch.mode != "LEAF")
            .map(|branch| branch.feature + 1)
            .max()
            .unwrap_or(0)
    }

    /// Whether no leaf says anything below zero.
    pub(super) fn is_positive(&self) -> bool {
        self.says.values().flatten().all(|(_, weight)| *weight >= 0.0)
    }

    /// Of which output leaves speak, if it is one only.
    pub(super) fn only_output(&self) -> Option<usize> {
        let mut outputs = self.says.values().flatten().map(|(output, _)| *output);
        let first = outputs.next()?;
        outputs.all(|output| output == first).then_some(first)
    }

    /// Adds every tree. `says` is told what a leaf says, of how many outputs, and of how many trees it is one.
    pub(super) fn plant(
        &self,
        ensemble: &mut Ensemble,
        says: impl Fn(&Says, usize, usize) -> Vec<f64>,
    ) -> Result<(), Refused> {
        let mut ids: Vec<i64> = self.nodes.keys().map(|(tree, _)| *tree).collect();
        ids.dedup();
        for id in &ids {
            let tree = self.tree(*id, |leaf| says(leaf, self.outputs, ids.len()))?;
            ensemble.push(&tree).map_err(|why| Refused::Tree { tree: *id, why })?;
        }
        Ok(())
    }

    /// A tree, its nodes numbered anew so that children come after their parents.
    fn tree(&self, id: i64, says: impl Fn(&Says) -> Vec<f64>) -> Result<Tree, Refused> {
        let not_a_tree = || Refused::Graph(format!("tree {id} is none: its nodes do not hang together"));
        let nodes = self.nodes.range((id, i64::MIN)..=(id, i64::MAX));
        let branches = || nodes.clone().filter(|(_, branch)| branch.mode != "LEAF");
        let below: BTreeSet<Id> = branches().flat_map(|(_, branch)| branch.children).collect();
        let mut roots = nodes.clone().map(|(id, _)| *id).filter(|id| !below.contains(id));
        let (Some(root), None) = (roots.next(), roots.next()) else { return Err(not_a_tree()) };
        let mut tree = Tree::default();
        let mut waiting = vec![(root, None)];
        let mut left = nodes.count();
        while let Some((at, above)) = waiting.pop() {
            left = left.checked_sub(1).ok_or_else(not_a_tree)?;
            let branch = self.nodes.get(&at).ok_or_else(not_a_tree)?;
            let child = if branch.mode == "LEAF" {
                let leaf = says(self.says.get(&at).unwrap_or(&Says::new()));
                tree.leaves.extend(leaf);
                Child::Leaf(tree.leaves.len() / self.outputs - 1)
            } else {
                let (node, children) = branch.node()?;
                tree.nodes.push(node);
                let node = tree.nodes.len() - 1;
                waiting.extend([(children[1], Some((node, 1))), (children[0], Some((node, 0)))]);
                Child::Node(node)
            };
            if let Some((node, side)) = above {
                let node: &mut Node = &mut tree.nodes[node];
                node.children[side] = child;
            }
        }
        if left == 0 { Ok(tree) } else { Err(not_a_tree()) }
    }
}

impl Branch {
    /// ONNX goes to the true child if the mode holds, and a missing number nowhere but to the false one, unless it is said to. We go to the
    /// first if a number is at most another.
    fn node(&self) -> Result<(Node, [Id; 2]), Refused> {
        let [yes, no] = self.children;
        let (at_most, children, missing_first) = match self.mode.as_str() {
            "BRANCH_LEQ" => (self.value, [yes, no], self.missing_true),
            "BRANCH_LT" => (self.value.next_down(), [yes, no], self.missing_true),
            "BRANCH_GT" => (self.value, [no, yes], !self.missing_true),
            "BRANCH_GTE" => (self.value.next_down(), [no, yes], !self.missing_true),
            other => return Err(wrong("nodes_modes", other, "must be LEAF or BRANCH_LEQ, _LT, _GT or _GTE")),
        };
        let node = Node {
            feature: self.feature,
            test: Test::AtMost(f64::from(at_most)),
            missing_first,
            zero_is_missing: false,
            children: [Child::Leaf(usize::MAX); 2], // each is hung when it is known
        };
        Ok((node, children))
    }
}

fn branches(settings: &Settings<'_>) -> Result<BTreeMap<Id, Branch>, Refused> {
    let modes = settings.texts("nodes_modes");
    let ints = |name| same_length(name, settings.ints(name), modes.len());
    let [trees, nodes, features, yes, no] =
        ["nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_truenodeids", "nodes_falsenodeids"]
            .map(ints);
    let (trees, nodes, features, yes, no) = (trees?, nodes?, features?, yes?, no?);
    let values = same_length("nodes_values", settings.floats("nodes_values"), modes.len())?;
    let missing = settings.ints("nodes_missing_value_tracks_true");
    let mut branches = BTreeMap::new();
    for (at, mode) in modes.into_iter().enumerate() {
        let (id, feature) = ((trees[at], nodes[at]), features[at]);
        let is_leaf = mode == "LEAF";
        let feature = if is_leaf { 0 } else { usize::try_from(feature).unwrap_or(usize::MAX) };
        if feature >= FEATURES_MAX {
            return Err(wrong("nodes_featureids", features[at], "must be one of the row's numbers"));
        }
        let missing_true = missing.get(at) == Some(&1);
        let children = [(id.0, yes[at]), (id.0, no[at])];
        let branch = Branch { mode, feature, value: values[at], missing_true, children };
        if branches.insert(id, branch).is_some() {
            return Err(wrong("nodes_nodeids", id.1, "must be another for each node of a tree"));
        }
    }
    Ok(branches)
}

/// Numbers of a row, at most.
const FEATURES_MAX: usize = 1 << 16;

fn same_length<'a, T>(name: &'static str, array: &'a [T], nodes: usize) -> Result<&'a [T], Refused> {
    if array.len() == nodes {
        Ok(array)
    } else {
        Err(wrong(name, array.len(), "must be as many as there are"))
    }
}
