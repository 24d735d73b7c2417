//! Model file format: JSON with a model, its origin, its backtest results, and the recent outcomes
//! from which calibration continues. Files are encoded to and decoded from bytes. The caller stores
//! the files and decides which model serves.

use serde::{Deserialize, Serialize};
use units::{
    UnixMs,
    limits::{MODEL_BYTES_MAX, NAME_BYTES_MAX},
};

use crate::{
    frigid::{self, Calibration, backtest::BacktestResult, feature_names},
    qos::{LATENCY_RATIO_NAME, LossModel, POOL_LOADS_NAME},
    sensitivity::{self, COUNTER_NAMES},
};

/// Version of the file format that this version of Tarn writes and reads.
pub const FORMAT_VERSION: u64 = 2;

/// Largest number of backtest results in a file.
const BACKTEST_RESULTS_MAX: usize = 16;

/// Content of a model file: a model and its origin.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelFile {
    /// Version of the file format, [`FORMAT_VERSION`].
    tarn_model: u64,
    /// Origin of the model, and its backtest results.
    #[serde(rename = "about")]
    pub provenance: Provenance,
    /// Model with its features, by kind.
    pub content: Content,
}

/// Origin of a model and its backtest results. They are displayed, but do not affect predictions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of Tarn that wrote the file.
    pub made_by: String,
    /// Library that trained the model: `tarn`, `lightgbm` or `onnx`.
    pub trained_by: String,
    /// Time at which the file was created.
    pub made: UnixMs,
    /// Number of outcomes or labelled workloads in the training set.
    pub rows: u64,
    /// Start of the first VM and end of the last VM in the training set. `None` for a model that
    /// was not trained on VMs.
    pub window: Option<(UnixMs, UnixMs)>,
    /// Backtest results of models that were trained in the same way. Empty for models of latency
    /// sensitivity, whose cutoffs include error rates, and for models of the loss of running VMs, which
    /// contain their accuracy.
    pub metrics: Vec<BacktestResult>,
    /// Whether the workloads and slowdowns of the training set were simulated, not measured.
    pub modelled: bool,
    /// Number of measured moves in the training set, see [`crate::qos::MeasuredLoss`].
    #[serde(default)]
    pub measured_moves: u64,
}

/// Model with the names of its features, by kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Model of frigid memory.
    Frigid {
        /// Names of the features, in the order of a row.
        features: Vec<String>,
        /// Model that predicts the untouched fraction.
        model: frigid::Model,
        /// Recent outcomes, each with the prediction of a model that was trained in the same way.
        calibration: Calibration,
    },
    /// Model of latency sensitivity.
    Sensitivity {
        /// Names of the core counters, in the order of a row.
        features: Vec<String>,
        /// Model that predicts the probability of a slowdown beyond the margin.
        model: sensitivity::Model,
    },
    /// Model of the loss of running VMs.
    Loss {
        /// Names of the measurements: the core counters, then the fraction of pool loads and the latency
        /// ratio.
        features: Vec<String>,
        /// Model that estimates the slowdown relative to local memory.
        model: LossModel,
    },
}

/// Kind of a prediction model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Frigid memory: memory that a VM never touches.
    Frigid,
    /// Latency sensitivity: whether pool memory slows a workload down beyond the margin (PDM).
    Sensitivity,
    /// Loss: how much pool memory slows a running VM down.
    Loss,
}

impl Kind {
    /// All kinds of models.
    pub const ALL: [Self; 3] = [Self::Frigid, Self::Sensitivity, Self::Loss];

    /// Returns the name of the kind on the command line and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frigid => "frigid",
            Self::Sensitivity => "sensitivity",
            Self::Loss => "loss",
        }
    }
}

/// Error from decoding or encoding a model file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The size of the file, in bytes, exceeds [`MODEL_BYTES_MAX`].
    #[error("model file too large: {0} bytes, must be at most {MODEL_BYTES_MAX}")]
    TooLarge(usize),
    /// The file ends after this number of bytes, within the JSON document.
    #[error("truncated after {0} bytes: the JSON document is incomplete")]
    Truncated(usize),
    /// The bytes are not a model file, for this reason.
    #[error("not a Tarn model file: {0}")]
    NotAModel(String),
    /// The file has this format version, which is not [`FORMAT_VERSION`].
    #[error("tarn_model = {0}: must be {FORMAT_VERSION}; train or import the model again with this version")]
    Layout(u64),
    /// The features or counters are not those of this version of Tarn.
    #[error("the features do not match this version: train or import the model again with this version")]
    Features,
    /// A number of the model is out of range, or its trees are inconsistent.
    #[error("a value of the model is out of range, or its trees are inconsistent: train the model again")]
    Values,
}

/// Part of a model file that is decoded first, because it is the same in every format version.
#[derive(Deserialize)]
struct VersionHeader {
    tarn_model: u64,
}

impl ModelFile {
    /// Creates a file for a model of frigid memory.
    pub fn frigid(provenance: Provenance, model: frigid::Model, calibration: Calibration) -> Self {
        let features = feature_names().collect();
        Self {
            tarn_model: FORMAT_VERSION,
            provenance,
            content: Content::Frigid { features, model, calibration },
        }
    }

    /// Creates a file for a model of latency sensitivity.
    pub fn sensitivity(provenance: Provenance, model: sensitivity::Model) -> Self {
        let features = COUNTER_NAMES.map(str::to_owned).to_vec();
        Self { tarn_model: FORMAT_VERSION, provenance, content: Content::Sensitivity { features, model } }
    }

    /// Creates a file for a model of the loss of running VMs.
    pub fn loss(provenance: Provenance, model: LossModel) -> Self {
        let features = loss_features().map(str::to_owned).collect();
        Self { tarn_model: FORMAT_VERSION, provenance, content: Content::Loss { features, model } }
    }

    /// Returns the kind of the model.
    pub fn kind(&self) -> Kind {
        match self.content {
            Content::Frigid { .. } => Kind::Frigid,
            Content::Sensitivity { .. } => Kind::Sensitivity,
            Content::Loss { .. } => Kind::Loss,
        }
    }

    /// Encodes the file as JSON.
    ///
    /// # Errors
    /// Returns [`FileError::TooLarge`] if the JSON exceeds [`MODEL_BYTES_MAX`].
    pub fn write(&self) -> Result<Vec<u8>, FileError> {
        let bytes = serde_json::to_vec(self).expect("a model serializes to JSON: all map keys are strings");
        if bytes.len() <= MODEL_BYTES_MAX { Ok(bytes) } else { Err(FileError::TooLarge(bytes.len())) }
    }

    /// Decodes a file and checks its model.
    ///
    /// # Errors
    /// Returns [`FileError`] if the file is too large, truncated, not a model file, or of another
    /// format version, or if its model has other features or a value out of range.
    pub fn read(bytes: &[u8]) -> Result<Self, FileError> {
        if bytes.len() > MODEL_BYTES_MAX {
            return Err(FileError::TooLarge(bytes.len()));
        }
        let VersionHeader { tarn_model } =
            serde_json::from_slice(bytes).map_err(|error| decode_error(bytes, &error))?;
        if tarn_model != FORMAT_VERSION {
            return Err(FileError::Layout(tarn_model));
        }
        let file: Self = serde_json::from_slice(bytes).map_err(|error| decode_error(bytes, &error))?;
        let Provenance { made_by, trained_by, metrics, .. } = &file.provenance;
        let is_name = |text: &String| text.len() <= NAME_BYTES_MAX && !text.contains(char::is_control);
        if !is_name(made_by) || !is_name(trained_by) || metrics.len() > BACKTEST_RESULTS_MAX {
            return Err(FileError::NotAModel(format!(
                "invalid provenance: made_by and trained_by must be at most {NAME_BYTES_MAX} bytes without control \
                 characters, metrics must have at most {BACKTEST_RESULTS_MAX} entries"
            )));
        }
        file.check_content()?;
        Ok(file)
    }

    /// Checks that the features are those of this version of Tarn, and that all values are in range.
    fn check_content(&self) -> Result<(), FileError> {
        let (has_features, has_valid_values) = match &self.content {
            Content::Frigid { features, model, calibration } => (
                features.iter().eq(&feature_names().collect::<Vec<_>>()),
                model.is_compatible() && calibration.is_valid(),
            ),
            Content::Sensitivity { features, model } => (features == &COUNTER_NAMES, model.is_compatible()),
            Content::Loss { features, model } => (features.iter().eq(loss_features()), model.is_compatible()),
        };
        match (has_features, has_valid_values) {
            (true, true) => Ok(()),
            (true, false) => Err(FileError::Values),
            (false, _) => Err(FileError::Features),
        }
    }
}

/// Returns the names of the measurements from which a loss is estimated.
fn loss_features() -> impl Iterator<Item = &'static str> {
    COUNTER_NAMES.into_iter().chain([POOL_LOADS_NAME, LATENCY_RATIO_NAME])
}

/// Converts a JSON error. JSON that ends within a number counts as truncated, although serde_json
/// reports a syntax error.
fn decode_error(bytes: &[u8], error: &serde_json::Error) -> FileError {
    let is_unclosed = bytes.starts_with(b"{") && !bytes.trim_ascii_end().ends_with(b"}");
    let is_unclosed = is_unclosed && !error.to_string().starts_with("trailing characters");
    if error.is_eof() || is_unclosed {
        FileError::Truncated(bytes.len())
    } else {
        FileError::NotAModel(error.to_string())
    }
}

#[cfg(test)]
mod tests;
