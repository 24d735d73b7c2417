//! Text format of LightGBM, versions 3 and 4: trees with numeric and categorical splits, and one
//! output. Models that this crate cannot evaluate exactly like LightGBM (linear trees, several
//! classes, ranking) are rejected. The error names the line that is not supported.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trees::{Child, Ensemble, InvalidTree, Node, SplitRule, Tree};

/// Function that converts the sum of leaf values to the output of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum LinkFunction {
    /// Identity: the output is the sum.
    Identity,
    /// Logistic function 1 / (1 + exp(-k x)) with this k: the output is a probability.
    Sigmoid(f64),
    /// Exponential function exp(x).
    Exp,
}

/// Model read from LightGBM's text format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Trees of the model, with one output.
    pub trees: Ensemble,
    /// Function from the sum of leaf values to the output.
    pub link: LinkFunction,
    /// Names of the features, in the order of a row.
    pub features: Vec<String>,
}

/// Error from reading a LightGBM model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The text does not start with the first line of a LightGBM model.
    #[error("not a LightGBM text model: the first line must be `tree`")]
    NotAModel,
    /// The text is truncated, for this reason.
    #[error("truncated: {0}")]
    Truncated(&'static str),
    /// A line is missing or has an invalid value.
    #[error("{section}: {key} = {value:?}: {rule}")]
    Value {
        /// Section of the file: `header`, or `tree` with its number.
        section: String,
        /// Key of the line.
        key: &'static str,
        /// Value of the line, truncated; empty if the line is missing.
        value: String,
        /// Rule that the value violates, such as "must be v3 or v4".
        rule: &'static str,
    },
    /// A tree is malformed.
    #[error("{section}: {reason}")]
    Tree {
        /// Section of the file: `tree` with its number.
        section: String,
        /// Reason why the tree is malformed.
        reason: InvalidTree,
    },
}

impl Model {
    /// Reads a model in LightGBM's text format.
    ///
    /// # Errors
    /// Returns [`ParseError`] if the text is not a model, is truncated, or uses a feature of
    /// LightGBM that is not supported.
    pub fn read(text: &str) -> Result<Self, ParseError> {
        let (head, rest) = text.split_once("\nTree=").unwrap_or((text, ""));
        let mut lines = head.lines();
        if lines.next().map(str::trim) != Some("tree") {
            return Err(ParseError::NotAModel);
        }
        let (trees, _) =
            rest.split_once("\nend of trees").ok_or(ParseError::Truncated("no line `end of trees`"))?;
        let head = Section::new("header", lines);
        head.require("version", |version| matches!(version, "v3" | "v4"), "must be v3 or v4")?;
        head.require("num_class", |classes| classes == "1", ONE_OUTPUT_RULE)?;
        head.require("num_tree_per_iteration", |trees| trees == "1", ONE_OUTPUT_RULE)?;
        let last: usize = head.number("max_feature_idx")?;
        let features: Vec<String> = head.list("feature_names")?;
        if last.checked_add(1) != Some(features.len()) {
            return Err(head.error("feature_names", "must list max_feature_idx + 1 features"));
        }
        let link = read_link(&head)?;
        let sections: Vec<&str> = trees.split("\nTree=").collect();
        if head.list::<u64>("tree_sizes")?.len() != sections.len() {
            return Err(ParseError::Truncated("tree_sizes must list as many trees as the text contains"));
        }
        // LightGBM sums boosted trees, but averages the trees of a random forest.
        let scale = if head.has_key("average_output") { 1.0 / sections.len() as f64 } else { 1.0 };
        let mut ensemble = Ensemble::new(features.len(), vec![0.0]);
        for section in sections {
            let section = Section::from_tree(section);
            let tree = read_tree(&section, scale)?;
            ensemble.push(&tree).map_err(|reason| ParseError::Tree { section: section.name, reason })?;
        }
        Ok(Self { trees: ensemble, link, features })
    }

    /// Predicts the output for a row of the model's features.
    pub fn predict(&self, row: &[f64]) -> f64 {
        self.link.apply(self.trees.predict_one(row))
    }
}

/// Rule for models with several outputs, which are not supported.
const ONE_OUTPUT_RULE: &str = "must be 1: models with several outputs are not supported";

impl LinkFunction {
    /// Applies the function to a sum of leaf values.
    fn apply(self, sum: f64) -> f64 {
        match self {
            Self::Identity => sum,
            Self::Sigmoid(k) => 1.0 / (1.0 + (-k * sum).exp()),
            Self::Exp => sum.exp(),
        }
    }
}

/// Reads the objective and returns its link function.
fn read_link(head: &Section<'_>) -> Result<LinkFunction, ParseError> {
    let objective = head.text("objective")?;
    let mut words = objective.split_whitespace();
    let name = words.next().unwrap_or_default();
    let option = |key: &str| {
        words.clone().find_map(|word| word.strip_prefix(key)?.strip_prefix(':')?.parse::<f64>().ok())
    };
    match name {
        _ if words.clone().any(|word| word == "sqrt") => {
            Err(head.error("objective", "must not have the option sqrt: it is not supported"))
        }
        "regression" | "regression_l1" | "huber" | "fair" | "quantile" | "mape" => Ok(LinkFunction::Identity),
        "binary" | "cross_entropy" => Ok(LinkFunction::Sigmoid(option("sigmoid").unwrap_or(1.0))),
        "poisson" | "gamma" | "tweedie" => Ok(LinkFunction::Exp),
        _ => Err(head.error("objective", "must be a regression or binary objective")),
    }
}

/// Reads a tree. Its leaf values are multiplied by `scale`.
fn read_tree(section: &Section<'_>, scale: f64) -> Result<Tree, ParseError> {
    if section.has_key("is_linear") {
        section.require("is_linear", |linear| linear == "0", "must be 0: linear trees are not supported")?;
    }
    let leaves: Vec<f64> = section.list("leaf_value")?;
    let count: usize = section.number("num_leaves")?;
    if leaves.len() != count {
        return Err(section.error("leaf_value", "must have num_leaves entries"));
    }
    let leaves = leaves.into_iter().map(|leaf| leaf * scale).collect();
    if count <= 1 {
        return Ok(Tree { leaves, ..Tree::default() });
    }
    let arrays = NodeArrays::read(section, count - 1)?;
    let nodes = (0..count - 1).map(|at| arrays.to_node(at)).collect();
    Ok(Tree { nodes, leaves, sets: read_category_sets(section)? })
}

/// Nodes of a tree as LightGBM stores them, one array for each field.
struct NodeArrays {
    features: Vec<usize>,
    thresholds: Vec<f64>,
    decisions: Vec<u8>,
    children: [Vec<i64>; 2],
}

impl NodeArrays {
    fn read(section: &Section<'_>, nodes: usize) -> Result<Self, ParseError> {
        let arrays = Self {
            features: section.list("split_feature")?,
            thresholds: section.list("threshold")?,
            decisions: section.list("decision_type")?,
            children: [section.list("left_child")?, section.list("right_child")?],
        };
        let [left, right] = [arrays.children[0].len(), arrays.children[1].len()];
        let wrong_length = [
            ("split_feature", arrays.features.len()),
            ("threshold", arrays.thresholds.len()),
            ("decision_type", arrays.decisions.len()),
            ("left_child", left),
            ("right_child", right),
        ]
        .into_iter()
        .find(|(_, len)| *len != nodes);
        match wrong_length {
            Some((key, _)) => Err(section.error(key, "must have num_leaves - 1 entries")),
            None => Ok(arrays),
        }
    }

    /// Converts the node at an index. In `decision_type`, bit 0 means categorical, and bit 1 that
    /// missing values lead to the left child. Bits 2 and 3 are the kind of missing values: 0 for
    /// none, 1 for zero, 2 for NaN. LightGBM treats NaN as 0 if the kind is none.
    fn to_node(&self, at: usize) -> Node {
        let (decision, threshold) = (self.decisions[at], self.thresholds[at]);
        let is_categorical = decision & 1 == 1;
        let (missing_left, missing) = (decision & 2 == 2, decision >> 2 & 3);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a set index")]
        let test =
            if is_categorical { SplitRule::OneOf(threshold as usize) } else { SplitRule::AtMost(threshold) };
        Node {
            feature: self.features[at],
            test,
            missing_first: match missing {
                _ if is_categorical => false,
                0 => 0.0 <= threshold,
                _ => missing_left,
            },
            zero_is_missing: missing == 1 && !is_categorical,
            children: [&self.children[0], &self.children[1]].map(|children| to_child(children[at])),
        }
    }
}

/// Converts a child of a node. LightGBM stores a leaf as the bitwise complement of its index.
fn to_child(number: i64) -> Child {
    match usize::try_from(number) {
        Ok(node) => Child::Node(node),
        Err(_) => Child::Leaf(
            usize::try_from(!number).expect("the complement of a negative number is not negative"),
        ),
    }
}

/// Reads the sets of categories of a tree. `cat_threshold` contains all bit sets, and
/// `cat_boundaries` the start of each set and the end of the last.
fn read_category_sets(section: &Section<'_>) -> Result<Vec<Vec<u32>>, ParseError> {
    if section.number::<usize>("num_cat")? == 0 {
        return Ok(Vec::new());
    }
    let bounds: Vec<usize> = section.list("cat_boundaries")?;
    let bits: Vec<u32> = section.list("cat_threshold")?;
    let set = |pair: &[usize]| bits.get(pair[0]..pair[1]).map(<[u32]>::to_vec);
    let sets: Option<Vec<_>> = bounds.windows(2).map(set).collect();
    sets.ok_or_else(|| section.error("cat_boundaries", "must be ascending indexes into cat_threshold"))
}

/// Section of the file, which consists of `key=value` lines.
struct Section<'a> {
    name: String,
    lines: BTreeMap<&'a str, &'a str>,
}

impl<'a> Section<'a> {
    /// Reads the lines of the section `name`.
    fn new(name: &str, lines: impl Iterator<Item = &'a str>) -> Self {
        let lines = lines.map(|line| line.trim().split_once('=').unwrap_or((line.trim(), "")));
        Self { name: name.to_owned(), lines: lines.collect() }
    }

    /// Reads the section of a tree, whose first line is the number of the tree.
    fn from_tree(text: &'a str) -> Self {
        let mut lines = text.lines();
        let number = lines.next().unwrap_or_default();
        Self::new(&format!("tree {}", number.trim()), lines)
    }

    fn has_key(&self, key: &str) -> bool {
        self.lines.contains_key(key)
    }

    fn text(&self, key: &'static str) -> Result<&'a str, ParseError> {
        self.lines.get(key).copied().ok_or_else(|| self.error(key, "must be present"))
    }

    fn require(
        &self,
        key: &'static str,
        is_valid: impl Fn(&str) -> bool,
        rule: &'static str,
    ) -> Result<(), ParseError> {
        if is_valid(self.text(key)?) { Ok(()) } else { Err(self.error(key, rule)) }
    }

    fn number<T: std::str::FromStr>(&self, key: &'static str) -> Result<T, ParseError> {
        self.text(key)?.parse().map_err(|_| self.error(key, "must be a number"))
    }

    fn list<T: std::str::FromStr>(&self, key: &'static str) -> Result<Vec<T>, ParseError> {
        let entries = self.text(key)?.split_whitespace().map(str::parse);
        entries.collect::<Result<_, _>>().map_err(|_| self.error(key, "must be a list of numbers or names"))
    }

    /// Returns the error for a line that violates a rule.
    fn error(&self, key: &'static str, rule: &'static str) -> ParseError {
        const SHOWN_CHARS_MAX: usize = 60;
        let value = self.lines.get(key).map_or("", |value| value);
        let value = value.chars().take(SHOWN_CHARS_MAX).collect();
        ParseError::Value { section: self.name.clone(), key, value, rule }
    }
}
