//! ONNX graphs that are one ensemble of trees, as skl2onnx makes them of scikit-learn's forests and boosted trees: a
//! TreeEnsembleClassifier or TreeEnsembleRegressor that takes the graph's input, and after it only what renames its answer. Every
//! other graph is refused: it would be answered otherwise than by ONNX's runtimes.

mod forest;
mod graph;

use prost::Message as _;
use serde::{Deserialize, Serialize};

use self::{
    forest::{Forest, OF_CLASSES, OF_TARGETS, Settings, wrong},
    graph::{ModelProto, NodeProto, ValueInfoProto},
};
use crate::trees::{Ensemble, NotATree};

/// A model as ONNX's runtimes would answer it, up to how they round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    trees: Ensemble,
    classes: Vec<String>,
}

/// Why bytes are not taken for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// They are no ONNX model, or cut short.
    #[error("it is no ONNX model, or cut short: {0}")]
    NotAModel(String),
    /// The graph is not one ensemble of trees.
    #[error("the graph is not one ensemble of trees: {0}")]
    Graph(String),
    /// A setting of the ensemble says what it may not.
    #[error("{attribute} = {value:?}: {rule}")]
    Attribute {
        /// Which.
        attribute: &'static str,
        /// What it says.
        value: String,
        /// "must be ...".
        rule: &'static str,
    },
    /// A tree is none.
    #[error("tree {tree}: {why}")]
    Tree {
        /// Its id.
        tree: i64,
        /// Why.
        why: NotATree,
    },
}

/// What may stand after the ensemble: it changes names and types of the answer, and not what is answered.
const HARMLESS: [&str; 3] = ["Cast", "ZipMap", "Identity"];
/// ONNX's number for 32-bit floats.
const FLOAT: i32 = 1;
/// And for 64-bit ones.
const DOUBLE: i64 = 11;

impl Model {
    /// Reads a model.
    ///
    /// # Errors
    /// It is not one, is cut short, or is not one ensemble of trees.
    pub fn read(bytes: &[u8]) -> Result<Self, Refused> {
        let model = ModelProto::decode(bytes).map_err(|error| Refused::NotAModel(error.to_string()))?;
        let graph = model.graph.ok_or_else(|| Refused::NotAModel("it has no graph".to_owned()))?;
        let node = only_ensemble(&graph.node)?;
        see_casts(&graph.node, node)?;
        let [input] = &graph.input[..] else {
            return Err(Refused::Graph(format!("{} inputs: must be one", graph.input.len())));
        };
        if node.input != [input.name.clone()] {
            return Err(Refused::Graph("it does not take the graph's input as it is".to_owned()));
        }
        let settings = Settings(node);
        settings.lacks("nodes_values_as_tensor")?;
        settings.lacks("base_values_as_tensor")?;
        settings.one_of("post_transform", &["NONE"], "must be NONE")?;
        match node.op_type.as_str() {
            "TreeEnsembleClassifier" => classifier(&settings, width(input)?),
            "TreeEnsembleRegressor" => regressor(&settings, width(input)?),
            other => Err(Refused::Graph(format!(
                "{other}: must be a TreeEnsembleClassifier or TreeEnsembleRegressor"
            ))),
        }
    }

    /// Numbers of a row.
    pub fn features(&self) -> usize {
        self.trees.features()
    }

    /// Names of the classes, an output each; none of a regressor.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Numbers of an answer.
    pub fn outputs(&self) -> usize {
        self.trees.outputs()
    }

    /// What it says of a row, into `answer`: a number for each class or target. ONNX's trees look at 32-bit numbers.
    ///
    /// # Panics
    /// The row or the answer has another length than the model's.
    pub fn predict(&self, row: &[f64], answer: &mut [f64]) {
        #[expect(clippy::cast_possible_truncation, reason = "rounded as ONNX's runtimes are given it")]
        let row: Vec<f64> = row.iter().map(|number| f64::from(*number as f32)).collect();
        self.trees.predict(&row, answer);
    }
}

fn only_ensemble(nodes: &[NodeProto]) -> Result<&NodeProto, Refused> {
    let is_ensemble = |node: &&NodeProto| node.op_type.starts_with("TreeEnsemble");
    let other = nodes.iter().find(|node| !is_ensemble(node) && !HARMLESS.contains(&node.op_type.as_str()));
    if let Some(other) = other {
        return Err(Refused::Graph(format!("there is a {} in it", other.op_type)));
    }
    let mut ensembles = nodes.iter().filter(is_ensemble);
    match (ensembles.next(), ensembles.next()) {
        (Some(ensemble), None) => Ok(ensemble),
        (None, _) => Err(Refused::Graph("there is none in it".to_owned())),
        (Some(_), Some(_)) => Err(Refused::Graph("there are several in it".to_owned())),
    }
}

/// What is said may become another kind of number that holds it, and no whole number.
fn see_casts(nodes: &[NodeProto], ensemble: &NodeProto) -> Result<(), Refused> {
    let said = ensemble.output.last(); // a classifier's first is the name of the class
    let is_of_it = |node: &&NodeProto| node.op_type == "Cast" && node.input.first() == said;
    let to = |node: &NodeProto| Settings(node).int("to").unwrap_or_default();
    match nodes.iter().filter(is_of_it).map(to).find(|to| ![i64::from(FLOAT), DOUBLE].contains(to)) {
        Some(to) => Err(wrong("to", to, "must be 1 (float) or 11 (double) where what trees say is cast")),
        None => Ok(()),
    }
}

/// Numbers of a row, as far as the graph says it.
fn width(input: &ValueInfoProto) -> Result<usize, Refused> {
    let tensor = input.r#type.as_ref().and_then(|of| of.tensor_type.as_ref());
    let kind = tensor.map(|tensor| tensor.elem_type);
    if kind != Some(FLOAT) {
        return Err(Refused::Graph("its input must be of 32-bit numbers".to_owned()));
    }
    let dims = tensor.and_then(|tensor| tensor.shape.as_ref()).map_or(&[][..], |shape| &shape.dim);
    Ok(dims.get(1).and_then(|dim| usize::try_from(dim.dim_value).ok()).unwrap_or(0))
}

/// Of two classes, leaves may speak of the first alone, as skl2onnx writes it: what they say is of the second, and the first has the
/// rest.
fn classifier(settings: &Settings<'_>, width: usize) -> Result<Model, Refused> {
    let mut classes = settings.texts("classlabels_strings");
    classes.extend(settings.ints("classlabels_int64s").iter().map(ToString::to_string));
    if classes.is_empty() {
        return Err(wrong("classlabels_strings", "", "must name the classes"));
    }
    settings.lacks("base_values")?;
    let forest = Forest::of(settings, &OF_CLASSES, classes.len())?;
    let only = forest.only_output().filter(|_| classes.len() == 2);
    if only == Some(1) {
        return Err(wrong("class_ids", 1, "must be of the first of two classes, or of each"));
    }
    let is_rest = only.is_some();
    if is_rest && !forest.is_positive() {
        return Err(wrong(
            "class_weights",
            "a number below 0",
            "must not be below 0 where leaves speak of one of two classes",
        ));
    }
    let start = if is_rest { vec![1.0, 0.0] } else { vec![0.0; classes.len()] };
    let mut trees = Ensemble::new(width.max(forest.features()), start);
    forest.plant(&mut trees, |leaf, outputs, _| {
        let mut says = vec![0.0; outputs];
        for (output, weight) in leaf {
            if is_rest {
                says[0] -= weight;
                says[1] += weight;
            } else {
                says[*output] += weight;
            }
        }
        says
    })?;
    Ok(Model { trees, classes })
}

fn regressor(settings: &Settings<'_>, width: usize) -> Result<Model, Refused> {
    let targets = settings.int("n_targets").unwrap_or(1);
    let outputs = usize::try_from(targets).ok().filter(|n| (1..=TARGETS_MAX).contains(n));
    let outputs = outputs.ok_or_else(|| wrong("n_targets", targets, "must be from 1 to 1024"))?;
    let rule = "must be SUM or AVERAGE";
    let is_mean = settings.one_of("aggregate_function", &["SUM", "AVERAGE"], rule)? == "AVERAGE";
    let base = settings.floats("base_values");
    if !base.is_empty() && base.len() != outputs {
        return Err(wrong("base_values", base.len(), "must be none or one for each target"));
    }
    let mut start = vec![0.0; outputs];
    start.iter_mut().zip(base).for_each(|(start, base)| *start = f64::from(*base));
    let forest = Forest::of(settings, &OF_TARGETS, outputs)?;
    let mut trees = Ensemble::new(width.max(forest.features()), start);
    forest.plant(&mut trees, |leaf, outputs, trees| {
        let mut says = vec![0.0; outputs];
        let share = if is_mean { 1.0 / trees as f64 } else { 1.0 };
        leaf.iter().for_each(|(output, weight)| says[*output] += weight * share);
        says
    })?;
    Ok(Model { trees, classes: Vec::new() })
}

/// Numbers that a regressor may answer.
const TARGETS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::{graph::AttributeProto, *};

    fn with_cast(to: i64) -> Result<Model, Refused> {
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
    fn what_trees_say_may_be_cast_to_what_holds_it_and_to_no_whole_number() {
        assert!(with_cast(1).is_ok() && with_cast(11).is_ok());
        let whole = with_cast(7).unwrap_err().to_string();
        assert_eq!(whole, "to = \"7\": must be 1 (float) or 11 (double) where what trees say is cast");
    }
}
