//! Model trained elsewhere that predicts from Tarn's rows of features. The features of the model
//! are matched by name if the model has feature names, or else by position.

use serde::{Deserialize, Serialize};

use super::{lightgbm, onnx};

/// Format of a model trained elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text format of LightGBM.
    LightGbm,
    /// ONNX graph that consists of one tree ensemble.
    Onnx,
}

/// Model trained elsewhere. One of its outputs is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImportedModel {
    model: Model,
    /// For each feature of the model, its index in Tarn's row of features.
    columns: Vec<usize>,
    /// Index of the output that is used.
    #[serde(rename = "answer")]
    output: usize,
}

/// Imported model, by its file format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Model {
    Lightgbm(lightgbm::Model),
    Onnx(onnx::Model),
}

/// Error from importing a model.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The LightGBM model is invalid or unsupported.
    #[error(transparent)]
    LightGbm(#[from] lightgbm::ParseError),
    /// The ONNX model is invalid or unsupported.
    #[error(transparent)]
    Onnx(#[from] onnx::ParseError),
    /// The LightGBM model is not UTF-8 text.
    #[error("not a LightGBM text model: must be UTF-8")]
    NotText,
    /// The model uses a feature that Tarn does not have.
    #[error(
        "unknown feature {0:?}: must be one of the columns that `tarn telemetry export --features` writes"
    )]
    Feature(String),
    /// The features of the model have no names, and their number differs from the number of Tarn's
    /// features.
    #[error(
        "the model has {found} features without names: must have {expected}, in the order of the columns that \
         `tarn telemetry export --features` writes"
    )]
    FeatureCount {
        /// Number of features of the model.
        found: usize,
        /// Number of Tarn's features.
        expected: usize,
    },
    /// The model has several outputs that are not the probabilities of two classes.
    #[error("the model has {0} outputs: must have one output, or the probabilities of two classes")]
    OutputCount(usize),
}

impl ImportedModel {
    /// Reads a model for rows with the features `names`. If the model has two classes, the
    /// probability of the second class is used.
    ///
    /// # Errors
    /// Returns [`ImportError`] if the model is invalid, unsupported, or does not match `names`.
    pub fn read(format: Format, bytes: &[u8], names: &[String]) -> Result<Self, ImportError> {
        match format {
            Format::LightGbm => {
                let text = std::str::from_utf8(bytes).map_err(|_| ImportError::NotText)?;
                let model = lightgbm::Model::read(text)?;
                let columns = match_by_name(&model.features, names)?;
                Ok(Self { model: Model::Lightgbm(model), columns, output: 0 })
            }
            Format::Onnx => {
                let model = onnx::Model::read(bytes)?;
                let columns = match_by_position(model.features(), names)?;
                let output = match model.outputs() {
                    1 => 0,
                    2 if model.classes().len() == 2 => 1,
                    several => return Err(ImportError::OutputCount(several)),
                };
                Ok(Self { model: Model::Onnx(model), columns, output })
            }
        }
    }

    /// Predicts the output for a row of Tarn's features.
    ///
    /// # Panics
    /// Panics if the row is shorter than the list of names that was passed to [`Self::read`].
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

    /// Returns whether the model can predict from rows of `row_features` features.
    pub(crate) fn is_compatible(&self, row_features: usize) -> bool {
        let (features, outputs) = match &self.model {
            Model::Lightgbm(model) => (model.trees.features(), model.trees.outputs()),
            Model::Onnx(model) => (model.features(), model.outputs()),
        };
        features == self.columns.len()
            && self.output < outputs
            && self.columns.iter().all(|column| *column < row_features)
    }
}

/// Returns the index in `names` of each feature of a LightGBM model. LightGBM names features
/// without a name `Column_0`, `Column_1`, and so on; these are matched by position.
fn match_by_name(model_features: &[String], names: &[String]) -> Result<Vec<usize>, ImportError> {
    if model_features.iter().enumerate().all(|(at, name)| *name == format!("Column_{at}")) {
        return match_by_position(model_features.len(), names);
    }
    let position_of = |feature: &String| names.iter().position(|name| name == feature);
    let columns = model_features
        .iter()
        .map(|feature| position_of(feature).ok_or_else(|| ImportError::Feature(feature.clone())));
    columns.collect()
}

/// Returns the indexes of all `names`, for a model with `found` features without names.
fn match_by_position(found: usize, names: &[String]) -> Result<Vec<usize>, ImportError> {
    let expected = names.len();
    if found == expected {
        Ok((0..expected).collect())
    } else {
        Err(ImportError::FeatureCount { found, expected })
    }
}
