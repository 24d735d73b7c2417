//! ONNX graphs that consist of one tree ensemble, as skl2onnx writes scikit-learn's forests and
//! boosted trees. The graph must apply a TreeEnsembleClassifier or TreeEnsembleRegressor to its
//! input. Only operators that rename or convert the output may follow. Every other graph is
//! rejected, because this crate could not evaluate it like an ONNX runtime.

mod forest;
mod graph;

use prost::Message as _;
use serde::{Deserialize, Serialize};

use self::{
    forest::{Attributes, CLASS_LEAF_ATTRIBUTES, Forest, TARGET_LEAF_ATTRIBUTES, invalid_attribute},
    graph::{ModelProto, NodeProto, ValueInfoProto},
};
use crate::trees::{Ensemble, InvalidTree};

/// Model read from an ONNX graph. Its outputs are those of an ONNX runtime, except for rounding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    trees: Ensemble,
    /// Names of the classes, one for each output; empty for a regressor.
    classes: Vec<String>,
}

/// Error from reading an ONNX model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The bytes are not an ONNX model, or are truncated.
    #[error("not an ONNX model, or truncated: {0}")]
    NotAModel(String),
    /// The graph does not consist of one tree ensemble.
    #[error("the graph does not consist of one tree ensemble: {0}")]
    Graph(String),
    /// An attribute of an operator has an invalid value.
    #[error("{attribute} = {value:?}: {rule}")]
    Attribute {
        /// Name of the invalid attribute.
        attribute: &'static str,
        /// Invalid value or number of entries of the attribute.
        value: String,
        /// Rule that the value violates, such as "must be SUM or AVERAGE".
        rule: &'static str,
    },
    /// A tree is malformed.
    #[error("tree {tree}: {reason}")]
    Tree {
        /// Id of the tree in the graph.
        tree: i64,
        /// Reason why the tree is malformed.
        reason: InvalidTree,
    },
}

/// Operators allowed after the ensemble. They change the name or type of the output, but not its
/// value.
const PASS_THROUGH_OPS: [&str; 3] = ["Cast", "ZipMap", "Identity"];
/// Value of `TensorProto.DataType` for 32-bit floats.
const TENSOR_FLOAT: i32 = 1;
/// Value of `TensorProto.DataType` for 64-bit floats.
const TENSOR_DOUBLE: i64 = 11;

impl Model {
    /// Reads an ONNX model.
    ///
    /// # Errors
    /// Returns [`ParseError`] if the bytes are not an ONNX model, are truncated, or the graph does
    /// not consist of one supported tree ensemble.
    pub fn read(bytes: &[u8]) -> Result<Self, ParseError> {
        let model = ModelProto::decode(bytes).map_err(|error| ParseError::NotAModel(error.to_string()))?;
        let graph = model.graph.ok_or_else(|| ParseError::NotAModel("no graph".to_owned()))?;
        let node = find_ensemble(&graph.node)?;
        check_casts(&graph.node, node)?;
        let [input] = &graph.input[..] else {
            return Err(ParseError::Graph(format!(
                "the graph has {} inputs, must have one",
                graph.input.len()
            )));
        };
        if node.input != [input.name.clone()] {
            return Err(ParseError::Graph(
                "the input of the ensemble must be the input of the graph".to_owned(),
            ));
        }
        let attributes = Attributes(node);
        attributes.require_attribute_absent("nodes_values_as_tensor")?;
        attributes.require_attribute_absent("base_values_as_tensor")?;
        attributes.optional_choice("post_transform", &["NONE"], "must be NONE")?;
        match node.op_type.as_str() {
            "TreeEnsembleClassifier" => read_classifier(&attributes, input_width(input)?),
            "TreeEnsembleRegressor" => read_regressor(&attributes, input_width(input)?),
            other => Err(ParseError::Graph(format!(
                "unsupported operator {other}: must be TreeEnsembleClassifier or TreeEnsembleRegressor"
            ))),
        }
    }

    /// Returns the number of features of a row.
    pub fn features(&self) -> usize {
        self.trees.features()
    }

    /// Returns the names of the classes, one for each output; empty for a regressor.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the number of outputs.
    pub fn outputs(&self) -> usize {
        self.trees.outputs()
    }

    /// Predicts the outputs for a row and writes them to `outputs`, one number for each class or
    /// target. The row is rounded to 32-bit floats, because ONNX trees compare these.
    ///
    /// # Panics
    /// Panics if the length of `row` differs from the number of features, or the length of
    /// `outputs` from the number of outputs.
    pub fn predict(&self, row: &[f64], outputs: &mut [f64]) {
        #[expect(clippy::cast_possible_truncation, reason = "ONNX runtimes take 32-bit floats")]
        let row: Vec<f64> = row.iter().map(|number| f64::from(*number as f32)).collect();
        self.trees.predict(&row, outputs);
    }
}

/// Returns the only tree ensemble among the operators of a graph. Rejects other operators except
/// [`PASS_THROUGH_OPS`].
fn find_ensemble(nodes: &[NodeProto]) -> Result<&NodeProto, ParseError> {
    let is_ensemble = |node: &&NodeProto| node.op_type.starts_with("TreeEnsemble");
    let other =
        nodes.iter().find(|node| !is_ensemble(node) && !PASS_THROUGH_OPS.contains(&node.op_type.as_str()));
    if let Some(other) = other {
        return Err(ParseError::Graph(format!("unsupported operator {}", other.op_type)));
    }
    let mut ensembles = nodes.iter().filter(is_ensemble);
    match (ensembles.next(), ensembles.next()) {
        (Some(ensemble), None) => Ok(ensemble),
        (None, _) => Err(ParseError::Graph("the graph has no tree ensemble".to_owned())),
        (Some(_), Some(_)) => Err(ParseError::Graph("the graph has several tree ensembles".to_owned())),
    }
}

/// Checks that the output of the ensemble is cast to floating-point types only. A cast to integers
/// would truncate it.
fn check_casts(nodes: &[NodeProto], ensemble: &NodeProto) -> Result<(), ParseError> {
    // The first of two outputs of a classifier is the class label.
    let scores = ensemble.output.last();
    let is_cast_of_scores = |node: &&NodeProto| node.op_type == "Cast" && node.input.first() == scores;
    let to = |node: &NodeProto| Attributes(node).int("to").unwrap_or_default();
    match nodes
        .iter()
        .filter(is_cast_of_scores)
        .map(to)
        .find(|to| ![i64::from(TENSOR_FLOAT), TENSOR_DOUBLE].contains(to))
    {
        Some(to) => Err(invalid_attribute(
            "to",
            to,
            "must be 1 (float) or 11 (double) for a cast of the ensemble's output",
        )),
        None => Ok(()),
    }
}

/// Returns the number of features that the graph declares for its input; 0 if it declares none.
fn input_width(input: &ValueInfoProto) -> Result<usize, ParseError> {
    let tensor = input.r#type.as_ref().and_then(|of| of.tensor_type.as_ref());
    let kind = tensor.map(|tensor| tensor.elem_type);
    if kind != Some(TENSOR_FLOAT) {
        return Err(ParseError::Graph("the input of the graph must be a tensor of 32-bit floats".to_owned()));
    }
    let dims = tensor.and_then(|tensor| tensor.shape.as_ref()).map_or(&[][..], |shape| &shape.dim);
    Ok(dims.get(1).and_then(|dim| usize::try_from(dim.dim_value).ok()).unwrap_or(0))
}

/// Reads the ensemble of a TreeEnsembleClassifier. For two classes, skl2onnx writes leaf weights
/// only with the first class id. They are the scores of the second class. The score of the first
/// class is the complement.
fn read_classifier(attributes: &Attributes<'_>, width: usize) -> Result<Model, ParseError> {
    let mut classes = attributes.texts("classlabels_strings");
    classes.extend(attributes.ints("classlabels_int64s").iter().map(ToString::to_string));
    if classes.is_empty() {
        return Err(invalid_attribute(
            "classlabels_strings",
            "",
            "must list the names of the classes if classlabels_int64s does not",
        ));
    }
    attributes.require_attribute_absent("base_values")?;
    let forest = Forest::read(attributes, &CLASS_LEAF_ATTRIBUTES, classes.len())?;
    let single_output = forest.single_output().filter(|_| classes.len() == 2);
    if single_output == Some(1) {
        return Err(invalid_attribute(
            "class_ids",
            1,
            "must be 0 for all leaf weights of a model with two classes, or contain both classes",
        ));
    }
    let is_complement = single_output.is_some();
    if is_complement && !forest.has_nonnegative_weights() {
        return Err(invalid_attribute(
            "class_weights",
            "a negative number",
            "must be at least 0 if all leaf weights belong to the first of two classes",
        ));
    }
    let start = if is_complement { vec![1.0, 0.0] } else { vec![0.0; classes.len()] };
    let mut trees = Ensemble::new(width.max(forest.features()), start);
    forest.push_trees(&mut trees, |leaf, outputs, _| {
        let mut weights = vec![0.0; outputs];
        for (output, weight) in leaf {
            if is_complement {
                weights[0] -= weight;
                weights[1] += weight;
            } else {
                weights[*output] += weight;
            }
        }
        weights
    })?;
    Ok(Model { trees, classes })
}

/// Reads the ensemble of a TreeEnsembleRegressor.
fn read_regressor(attributes: &Attributes<'_>, width: usize) -> Result<Model, ParseError> {
    let targets = attributes.int("n_targets").unwrap_or(1);
    let outputs = usize::try_from(targets).ok().filter(|n| (1..=REGRESSION_TARGETS_MAX).contains(n));
    let outputs = outputs.ok_or_else(|| invalid_attribute("n_targets", targets, "must be from 1 to 1024"))?;
    let rule = "must be SUM or AVERAGE";
    let is_mean = attributes.optional_choice("aggregate_function", &["SUM", "AVERAGE"], rule)? == "AVERAGE";
    let base = attributes.floats("base_values");
    if !base.is_empty() && base.len() != outputs {
        return Err(invalid_attribute(
            "base_values",
            format!("{} entries", base.len()),
            "must have no entries, or one entry for each of n_targets",
        ));
    }
    let mut start = vec![0.0; outputs];
    start.iter_mut().zip(base).for_each(|(start, base)| *start = f64::from(*base));
    let forest = Forest::read(attributes, &TARGET_LEAF_ATTRIBUTES, outputs)?;
    let mut trees = Ensemble::new(width.max(forest.features()), start);
    forest.push_trees(&mut trees, |leaf, outputs, trees| {
        let mut weights = vec![0.0; outputs];
        let scale = if is_mean { 1.0 / trees as f64 } else { 1.0 };
        leaf.iter().for_each(|(output, weight)| weights[*output] += weight * scale);
        weights
    })?;
    Ok(Model { trees, classes: Vec::new() })
}

/// Largest number of targets of a regressor.
const REGRESSION_TARGETS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::{graph::AttributeProto, *};

    /// Reads a model whose output is cast to the data type `to`.
    fn with_cast(to: i64) -> Result<Model, ParseError> {
        let mut model = ModelProto::decode(&include_bytes!("../../fixtures/numbers.onnx")[..]).unwrap();
        let graph = model.graph.as_mut().unwrap();
        let setting = AttributeProto { name: "to".to_owned(), i: to, ..AttributeProto::default() };
        graph.node.push(NodeProto {
            input: graph.node[0].output.clone(),
            output: vec!["cast".to_owned()],
            op_type: "Cast".to_owned(),
            attribute: vec![setting],
        });
        Model::read(&model.encode_to_vec())
    }

    #[test]
    fn tree_output_casts_only_to_float() {
        assert!(with_cast(1).is_ok() && with_cast(11).is_ok());
        let error = with_cast(7).unwrap_err().to_string();
        assert_eq!(error, "to = \"7\": must be 1 (float) or 11 (double) for a cast of the ensemble's output");
    }
}
