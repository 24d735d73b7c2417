//! LightGBM's text format, versions 3 and 4: trees with numeric and categorical splits, one output. What would be answered
//! otherwise than by LightGBM (linear trees, several classes, ranking) is refused by name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trees::{Child, Ensemble, Node, NotATree, Test, Tree};

/// What the sum of the leaves becomes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Link {
    /// Itself.
    Identity,
    /// 1 / (1 + exp(-k x)): a probability.
    Sigmoid(f64),
    /// exp(x).
    Exp,
}

/// A model as LightGBM wrote it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Its trees.
    pub trees: Ensemble,
    /// What their sum becomes.
    pub link: Link,
    /// Names of the numbers of a row.
    pub features: Vec<String>,
}

/// Why a text is not taken for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It does not begin as one.
    #[error("it does not begin with `tree` as LightGBM's text models do")]
    NotAModel,
    /// It ends before its end.
    #[error("it is cut short: {0}")]
    CutShort(&'static str),
    /// A line is missing or says what it may not.
    #[error("{section}: {key} = {value:?}: {rule}")]
    Value {
        /// Which part of the file.
        section: String,
        /// Which line of it.
        key: &'static str,
        /// What it says; its beginning if it is long.
        value: String,
        /// "must be ...".
        rule: &'static str,
    },
    /// A tree is none.
    #[error("{section}: {why}")]
    Tree {
        /// Which.
        section: String,
        /// Why.
        why: NotATree,
    },
}

impl Model {
    /// Reads a model.
    ///
    /// # Errors
    /// It is not one, is cut short, or would be answered otherwise than by LightGBM.
    pub fn read(text: &str) -> Result<Self, Refused> {
        let (head, rest) = text.split_once("\nTree=").unwrap_or((text, ""));
        let mut lines = head.lines();
        if lines.next().map(str::trim) != Some("tree") {
            return Err(Refused::NotAModel);
        }
        let (trees, _) =
            rest.split_once("\nend of trees").ok_or(Refused::CutShort("there is no line `end of trees`"))?;
        let head = Section::of("head", lines);
        head.must("version", |version| matches!(version, "v3" | "v4"), "must be v3 or v4")?;
        head.must("num_class", |classes| classes == "1", "must be 1: one output")?;
        head.must("num_tree_per_iteration", |trees| trees == "1", "must be 1: one output")?;
        let last: usize = head.number("max_feature_idx")?;
        let features: Vec<String> = head.list("feature_names")?;
        if last.checked_add(1) != Some(features.len()) {
            return Err(head.wrong("feature_names", "must name max_feature_idx + 1 numbers of a row"));
        }
        let link = link(&head)?;
        let sections: Vec<&str> = trees.split("\nTree=").collect();
        if head.list::<u64>("tree_sizes")?.len() != sections.len() {
            return Err(Refused::CutShort("there are fewer trees than tree_sizes names"));
        }
        // A random forest's answer is the mean of its trees'.
        let share = if head.has("average_output") { 1.0 / sections.len() as f64 } else { 1.0 };
        let mut ensemble = Ensemble::new(features.len(), vec![0.0]);
        for section in sections {
            let section = Section::of_tree(section);
            let tree = tree(&section, share)?;
            ensemble.push(&tree).map_err(|why| Refused::Tree { section: section.name, why })?;
        }
        Ok(Self { trees: ensemble, link, features })
    }

    /// What it says of a row, as LightGBM would.
    pub fn predict(&self, row: &[f64]) -> f64 {
        self.link.of(self.trees.predict_one(row))
    }
}

impl Link {
    fn of(self, sum: f64) -> f64 {
        match self {
            Self::Identity => sum,
            Self::Sigmoid(k) => 1.0 / (1.0 + (-k * sum).exp()),
            Self::Exp => sum.exp(),
        }
    }
}

fn link(head: &Section<'_>) -> Result<Link, Refused> {
    let objective = head.text("objective")?;
    let mut words = objective.split_whitespace();
    let name = words.next().unwrap_or_default();
    let option = |key: &str| {
        words.clone().find_map(|word| word.strip_prefix(key)?.strip_prefix(':')?.parse::<f64>().ok())
    };
    match name {
        _ if words.clone().any(|word| word == "sqrt") => Err(head.wrong("objective", "must not take roots")),
        "regression" | "regression_l1" | "huber" | "fair" | "quantile" | "mape" => Ok(Link::Identity),
        "binary" | "cross_entropy" => Ok(Link::Sigmoid(option("sigmoid").unwrap_or(1.0))),
        "poisson" | "gamma" | "tweedie" => Ok(Link::Exp),
        _ => Err(head.wrong("objective", "must be of regression or of two classes")),
    }
}

fn tree(section: &Section<'_>, share: f64) -> Result<Tree, Refused> {
    if section.has("is_linear") {
        section.must("is_linear", |linear| linear == "0", "must be 0: leaves say one number")?;
    }
    let leaves: Vec<f64> = section.list("leaf_value")?;
    let count: usize = section.number("num_leaves")?;
    if leaves.len() != count {
        return Err(section.wrong("leaf_value", "must be num_leaves numbers"));
    }
    let leaves = leaves.into_iter().map(|leaf| leaf * share).collect();
    if count <= 1 {
        return Ok(Tree { leaves, ..Tree::default() });
    }
    let parts = Parts::of(section, count - 1)?;
    let nodes = (0..count - 1).map(|at| parts.node(at)).collect();
    Ok(Tree { nodes, leaves, sets: sets(section)? })
}

/// A tree's nodes, as LightGBM has them: an array for each thing.
struct Parts {
    features: Vec<usize>,
    thresholds: Vec<f64>,
    decisions: Vec<u8>,
    children: [Vec<i64>; 2],
}

impl Parts {
    fn of(section: &Section<'_>, nodes: usize) -> Result<Self, Refused> {
        let parts = Self {
            features: section.list("split_feature")?,
            thresholds: section.list("threshold")?,
            decisions: section.list("decision_type")?,
            children: [section.list("left_child")?, section.list("right_child")?],
        };
        let [left, right] = [parts.children[0].len(), parts.children[1].len()];
        let short = [
            ("split_feature", parts.features.len()),
            ("threshold", parts.thresholds.len()),
            ("decision_type", parts.decisions.len()),
            ("left_child", left),
            ("right_child", right),
        ]
        .into_iter()
        .find(|(_, len)| *len != nodes);
        match short {
            Some((key, _)) => Err(section.wrong(key, "must be num_leaves - 1 numbers")),
            None => Ok(parts),
        }
    }

    /// Bits of a decision: categorical; missing goes left; and two that say what is missing (0 nothing, 1 zero, 2 NaN). Where
    /// nothing is, LightGBM takes NaN for 0.
    fn node(&self, at: usize) -> Node {
        let (decision, threshold) = (self.decisions[at], self.thresholds[at]);
        let is_categorical = decision & 1 == 1;
        let (missing_left, missing) = (decision & 2 == 2, decision >> 2 & 3);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "of a set: its number")]
        let test = if is_categorical { Test::OneOf(threshold as usize) } else { Test::AtMost(threshold) };
        Node {
            feature: self.features[at],
            test,
            missing_first: match missing {
                _ if is_categorical => false,
                0 => 0.0 <= threshold,
                _ => missing_left,
            },
            zero_is_missing: missing == 1 && !is_categorical,
            children: [&self.children[0], &self.children[1]].map(|children| child(children[at])),
        }
    }
}

/// A leaf is the complement of its number.
fn child(number: i64) -> Child {
    match usize::try_from(number) {
        Ok(node) => Child::Node(node),
        Err(_) => Child::Leaf(usize::try_from(!number).expect("the complement of a negative number")),
    }
}

/// Sets of categories, as bits; where each begins is in `cat_boundaries`.
fn sets(section: &Section<'_>) -> Result<Vec<Vec<u32>>, Refused> {
    if section.number::<usize>("num_cat")? == 0 {
        return Ok(Vec::new());
    }
    let bounds: Vec<usize> = section.list("cat_boundaries")?;
    let bits: Vec<u32> = section.list("cat_threshold")?;
    let set = |pair: &[usize]| bits.get(pair[0]..pair[1]).map(<[u32]>::to_vec);
    let sets: Option<Vec<_>> = bounds.windows(2).map(set).collect();
    sets.ok_or_else(|| section.wrong("cat_boundaries", "must rise, and end within cat_threshold"))
}

/// Lines `key=value` of a part of the file.
struct Section<'a> {
    name: String,
    lines: BTreeMap<&'a str, &'a str>,
}

impl<'a> Section<'a> {
    fn of(name: &str, lines: impl Iterator<Item = &'a str>) -> Self {
        let lines = lines.map(|line| line.trim().split_once('=').unwrap_or((line.trim(), "")));
        Self { name: name.to_owned(), lines: lines.collect() }
    }

    fn of_tree(text: &'a str) -> Self {
        let mut lines = text.lines();
        let number = lines.next().unwrap_or_default();
        Self::of(&format!("tree {}", number.trim()), lines)
    }

    fn has(&self, key: &str) -> bool {
        self.lines.contains_key(key)
    }

    fn text(&self, key: &'static str) -> Result<&'a str, Refused> {
        self.lines.get(key).copied().ok_or_else(|| self.wrong(key, "must be there"))
    }

    fn must(&self, key: &'static str, is: impl Fn(&str) -> bool, rule: &'static str) -> Result<(), Refused> {
        if is(self.text(key)?) { Ok(()) } else { Err(self.wrong(key, rule)) }
    }

    fn number<T: std::str::FromStr>(&self, key: &'static str) -> Result<T, Refused> {
        self.text(key)?.parse().map_err(|_| self.wrong(key, "must be a number"))
    }

    fn list<T: std::str::FromStr>(&self, key: &'static str) -> Result<Vec<T>, Refused> {
        let words = self.text(key)?.split_whitespace().map(str::parse);
        words.collect::<Result<_, _>>().map_err(|_| self.wrong(key, "must be words of its kind"))
    }

    fn wrong(&self, key: &'static str, rule: &'static str) -> Refused {
        const SHOWN: usize = 60;
        let value = self.lines.get(key).map_or("", |value| value);
        let value = value.chars().take(SHOWN).collect();
        Refused::Value { section: self.name.clone(), key, value, rule }
    }
}
