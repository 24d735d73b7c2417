//! Model file format: JSON with the model, its provenance, its backtest results and the data needed
//! to continue calibration. Works on bytes; the caller stores the files and decides which model
//! serves.

use serde::{Deserialize, Serialize};
use units::{
    UnixMs,
    limits::{MODEL_BYTES_MAX, NAME_BYTES_MAX},
};

use crate::{
    frigid::{self, Calibration, backtest::BacktestResult, feature_names},
    sensitivity::{self, COUNTERS},
};

/// Format version that this version of Tarn writes and reads.
pub const FORMAT_VERSION: u64 = 1;

/// Upper bound on the number of backtest results in a file.
const METRICS_MAX: usize = 16;

/// Model with its provenance.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelFile {
    /// Format version: [`FORMAT_VERSION`].
    tarn_model: u64,
    /// Origin of the model.
    #[serde(rename = "about")]
    pub provenance: Provenance,
    /// The model.
    pub content: Content,
}

/// Origin of a model, for display.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of Tarn that wrote the file.
    pub made_by: String,
    /// Trainer of the model: "tarn", "lightgbm" or "onnx".
    pub trained_by: String,
    /// Time at which the file was made.
    pub made: UnixMs,
    /// Number of outcomes or labelled workloads that the model was trained on.
    pub rows: u64,
    /// Start of the first VM and end of the last VM in the training set. `None` for a model that
    /// was not trained on VMs.
    pub window: Option<(UnixMs, UnixMs)>,
    /// Backtest of models trained the same way; see [`BacktestResult`]. Empty for models of latency
    /// sensitivity, whose cutoffs carry their error rates.
    pub metrics: Vec<BacktestResult>,
    /// Whether the workloads and slowdowns were simulated rather than measured.
    pub modelled: bool,
}

/// Model, by kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Frigid memory.
    Frigid {
        /// Names of the features, in order.
        features: Vec<String>,
        /// Prediction model.
        model: frigid::Model,
        /// Recent outcomes with the predictions of models trained the same way.
        calibration: Calibration,
    },
    /// Latency sensitivity.
    Sensitivity {
        /// Names of the counters, in order.
        features: Vec<String>,
        /// Prediction model.
        model: sensitivity::Model,
    },
}

/// Kind of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Frigid memory: memory that a VM never touches.
    Frigid,
    /// Latency sensitivity: slowdown by pool memory beyond the margin.
    Sensitivity,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Frigid, Self::Sensitivity];

    /// Returns the name of the kind, as in the command line and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frigid => "frigid",
            Self::Sensitivity => "sensitivity",
        }
    }
}

/// Error decoding or encoding a model file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file is larger than [`MODEL_BYTES_MAX`].
    #[error("model file too large: {0} bytes, must be at most {MODEL_BYTES_MAX}")]
    TooLarge(usize),
    /// The file is truncated.
    #[error("truncated after {0} bytes")]
    CutShort(usize),
    /// The bytes are not a model file.
    #[error("not a Tarn model file: {0}")]
    NotAModel(String),
    /// The file has another format version.
    #[error("tarn_model = {0}: must be {FORMAT_VERSION}; train or import the model again with this version")]
    Layout(u64),
    /// The features or counters differ from those of this version, or a value is out of range.
    #[error(
        "features or values do not match this version: train or import the model again with this version"
    )]
    Features,
}

/// Field that every format version has; it is decoded first.
#[derive(Deserialize)]
struct Head {
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
        let features = COUNTERS.map(str::to_owned).to_vec();
        Self { tarn_model: FORMAT_VERSION, provenance, content: Content::Sensitivity { features, model } }
    }

    /// Returns the kind of the model.
    pub fn kind(&self) -> Kind {
        match self.content {
            Content::Frigid { .. } => Kind::Frigid,
            Content::Sensitivity { .. } => Kind::Sensitivity,
        }
    }

    /// Encodes the file.
    ///
    /// # Errors
    /// [`FileError::TooLarge`] when the file exceeds [`MODEL_BYTES_MAX`].
    pub fn write(&self) -> Result<Vec<u8>, FileError> {
        let bytes = serde_json::to_vec(self).expect("a model serializes to JSON: all map keys are strings");
        if bytes.len() <= MODEL_BYTES_MAX { Ok(bytes) } else { Err(FileError::TooLarge(bytes.len())) }
    }

    /// Decodes a file and checks every tree of its model.
    ///
    /// # Errors
    /// [`FileError`] when the bytes are too large, truncated, not a model file, of another format
    /// version, or of a model with other features.
    pub fn read(bytes: &[u8]) -> Result<Self, FileError> {
        if bytes.len() > MODEL_BYTES_MAX {
            return Err(FileError::TooLarge(bytes.len()));
        }
        let Head { tarn_model } =
            serde_json::from_slice(bytes).map_err(|error| decode_error(bytes, &error))?;
        if tarn_model != FORMAT_VERSION {
            return Err(FileError::Layout(tarn_model));
        }
        let file: Self = serde_json::from_slice(bytes).map_err(|error| decode_error(bytes, &error))?;
        let Provenance { made_by, trained_by, metrics, .. } = &file.provenance;
        let is_name = |text: &String| text.len() <= NAME_BYTES_MAX && !text.contains(char::is_control);
        if !is_name(made_by) || !is_name(trained_by) || metrics.len() > METRICS_MAX {
            return Err(FileError::NotAModel("invalid provenance".to_owned()));
        }
        if file.matches_this_version() { Ok(file) } else { Err(FileError::Features) }
    }

    fn matches_this_version(&self) -> bool {
        match &self.content {
            Content::Frigid { features, model, calibration } => {
                features.iter().eq(&feature_names().collect::<Vec<_>>())
                    && model.fits()
                    && calibration.is_valid()
            }
            Content::Sensitivity { features, model } => features == &COUNTERS && model.fits(),
        }
    }
}

/// Maps a JSON error. serde_json reports JSON that ends within a number as a syntax error, not as
/// EOF; it counts as truncated here.
fn decode_error(bytes: &[u8], error: &serde_json::Error) -> FileError {
    let is_open = bytes.starts_with(b"{") && !bytes.trim_ascii_end().ends_with(b"}");
    let is_open = is_open && !error.to_string().starts_with("trailing characters");
    if error.is_eof() || is_open {
        FileError::CutShort(bytes.len())
    } else {
        FileError::NotAModel(error.to_string())
    }
}

#[cfg(test)]
mod tests;
