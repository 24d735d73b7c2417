//! A model that was trained elsewhere, asked about rows of ours: its numbers are found by their names where the format has names, and
//! else stand in our order.

use serde::{Deserialize, Serialize};

use super::{lightgbm, onnx};

/// How a model that was trained elsewhere is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// LightGBM's text.
    LightGbm,
    /// An ONNX graph that is one ensemble of trees.
    Onnx,
}

/// A model that was trained elsewhere, with one answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Foreign {
    model: Model,
    /// Which number of our row is each of its own.
    columns: Vec<usize>,
    /// Which of its answers counts.
    answer: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Model {
    Lightgbm(lightgbm::Model),
    Onnx(onnx::Model),
}

/// Why a model is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It is none of LightGBM's.
    #[error(transparent)]
    LightGbm(#[from] lightgbm::Refused),
    /// It is no ONNX graph that can be answered.
    #[error(transparent)]
    Onnx(#[from] onnx::Refused),
    /// A text that is none.
    #[error("it is not UTF-8, as LightGBM's text models are")]
    NotText,
    /// It asks for a number that no row has.
    #[error("it asks for {0:?}: must be one of the columns that `tarn telemetry export --features` writes")]
    Feature(String),
    /// Its numbers have no names, and are not as many as ours.
    #[error("it asks for {found} numbers without names: must be {ours}, in the order of our columns")]
    Width {
        /// Its own.
        found: usize,
        /// Of our rows.
        ours: usize,
    },
    /// It has several answers.
    #[error("it has {0} answers: must be one, or the probabilities of two classes")]
    Answers(usize),
}

impl Foreign {
    /// Reads a model for rows whose numbers have these names. Of two classes, the second's probability is the answer.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn read(format: Format, bytes: &[u8], names: &[String]) -> Result<Self, Refused> {
        match format {
            Format::LightGbm => {
                let text = std::str::from_utf8(bytes).map_err(|_| Refused::NotText)?;
                let model = lightgbm::Model::read(text)?;
                let columns = by_name(&model.features, names)?;
                Ok(Self { model: Model::Lightgbm(model), columns, answer: 0 })
            }
            Format::Onnx => {
                let model = onnx::Model::read(bytes)?;
                let columns = in_order(model.features(), names)?;
                let answer = match model.outputs() {
                    1 => 0,
                    2 if model.classes().len() == 2 => 1,
                    several => return Err(Refused::Answers(several)),
                };
                Ok(Self { model: Model::Onnx(model), columns, answer })
            }
        }
    }

    /// What it says of a row of ours.
    ///
    /// # Panics
    /// The row is shorter than the names that it was read with.
    pub fn predict(&self, row: &[f64]) -> f64 {
        let row: Vec<f64> = self.columns.iter().map(|column| row[*column]).collect();
        match &self.model {
            Model::Lightgbm(model) => model.predict(&row),
            Model::Onnx(model) => {
                let mut answers = vec![0.0; model.outputs()];
                model.predict(&row, &mut answers);
                answers[self.answer]
            }
        }
    }

    /// Whether it can be asked about rows of so many numbers.
    pub(crate) fn fits(&self, numbers: usize) -> bool {
        let (features, outputs) = match &self.model {
            Model::Lightgbm(model) => (model.trees.features(), model.trees.outputs()),
            Model::Onnx(model) => (model.features(), model.outputs()),
        };
        features == self.columns.len()
            && self.answer < outputs
            && self.columns.iter().all(|column| *column < numbers)
    }
}

/// LightGBM calls numbers without names `Column_0` and so on.
fn by_name(asked: &[String], names: &[String]) -> Result<Vec<usize>, Refused> {
    if asked.iter().enumerate().all(|(at, name)| *name == format!("Column_{at}")) {
        return in_order(asked.len(), names);
    }
    let find = |asked: &String| names.iter().position(|name| name == asked);
    asked.iter().map(|name| find(name).ok_or_else(|| Refused::Feature(name.clone()))).collect()
}

fn in_order(found: usize, names: &[String]) -> Result<Vec<usize>, Refused> {
    let ours = names.len();
    if found == ours { Ok((0..ours).collect()) } else { Err(Refused::Width { found, ours }) }
}
