//! Model trained elsewhere, applied to this crate's feature rows. Features are matched by name if
//! the format has names, and by position otherwise.

use serde::{Deserialize, Serialize};

use super::{lightgbm, onnx};

/// Format of a model trained elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// LightGBM's text format.
    LightGbm,
    /// ONNX graph that consists of one tree ensemble.
    Onnx,
}

/// Model trained elsewhere, with one output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImportedModel {
    model: Model,
    /// For each feature of the model, the index of our feature.
    columns: Vec<usize>,
    /// Index of the output to use.
    #[serde(rename = "answer")]
    output: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Model {
    Lightgbm(lightgbm::Model),
    Onnx(onnx::Model),
}

/// Error importing a model.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The LightGBM model is invalid or unsupported.
    #[error(transparent)]
    LightGbm(#[from] lightgbm::ParseError),
    /// The ONNX model is invalid or unsupported.
    #[error(transparent)]
    Onnx(#[from] onnx::ParseError),
    /// The LightGBM model is not text.
    #[error("not a LightGBM text model: not UTF-8")]
    NotText,
    /// The model needs a feature that does not exist.
    #[error(
        "unknown feature {0:?}: must be one of the columns that `tarn telemetry export --features` writes"
    )]
    Feature(String),
    /// The model's features have no names, and their number differs from ours.
    #[error("{found} unnamed features: must be {ours}, in the order of our columns")]
    Width {
        /// Number of the model's features.
        found: usize,
        /// Number of our features.
        ours: usize,
    },
    /// The model has several outputs.
    #[error("{0} outputs: must be one, or the probabilities of two classes")]
    Answers(usize),
}

impl ImportedModel {
    /// Reads a model for rows with the features `names`. Of a model with two classes, the
    /// probability of the second class is used.
    ///
    /// # Errors
    /// [`ImportError`] when the model is invalid, unsupported, or does not match `names`.
    pub fn read(format: Format, bytes: &[u8], names: &[String]) -> Result<Self, ImportError> {
        match format {
            Format::LightGbm => {
                let text = std::str::from_utf8(bytes).map_err(|_| ImportError::NotText)?;
                let model = lightgbm::Model::read(text)?;
                let columns = by_name(&model.features, names)?;
                Ok(Self { model: Model::Lightgbm(model), columns, output: 0 })
            }
            Format::Onnx => {
                let model = onnx::Model::read(bytes)?;
                let columns = in_order(model.features(), names)?;
                let output = match model.outputs() {
                    1 => 0,
                    2 if model.classes().len() == 2 => 1,
                    several => return Err(ImportError::Answers(several)),
                };
                Ok(Self { model: Model::Onnx(model), columns, output })
            }
        }
    }

    /// Predicts the output for a row.
    ///
    /// # Panics
    /// Panics if the row is shorter than the `names` that the model was read with.
    pub fn predict(&self, row: &[f64]) -> f64 {
        let row: Vec<f64> = self.columns.iter().map(|column| row[*column]).collect();
        match &self.model {
            Model::Lightgbm(model) => model.predict(&row),
            Model::Onnx(model) => {
                let mut outputs = vec![0.0; model.outputs()];
                model.predict(&row, &mut outputs);
                outputs[self.output]
            }
        }
    }

    /// Returns whether the model applies to rows of `numbers` features.
    pub(crate) fn fits(&self, numbers: usize) -> bool {
        let (features, outputs) = match &self.model {
            Model::Lightgbm(model) => (model.trees.features(), model.trees.outputs()),
            Model::Onnx(model) => (model.features(), model.outputs()),
        };
        features == self.columns.len()
            && self.output < outputs
            && self.columns.iter().all(|column| *column < numbers)
    }
}

/// LightGBM names unnamed features `Column_0`, `Column_1`, and so on.
fn by_name(expected: &[String], names: &[String]) -> Result<Vec<usize>, ImportError> {
    if expected.iter().enumerate().all(|(at, name)| *name == format!("Column_{at}")) {
        return in_order(expected.len(), names);
    }
    let position_of = |expected: &String| names.iter().position(|name| name == expected);
    expected.iter().map(|name| position_of(name).ok_or_else(|| ImportError::Feature(name.clone()))).collect()
}

fn in_order(found: usize, names: &[String]) -> Result<Vec<usize>, ImportError> {
    let ours = names.len();
    if found == ours { Ok((0..ours).collect()) } else { Err(ImportError::Width { found, ours }) }
}
