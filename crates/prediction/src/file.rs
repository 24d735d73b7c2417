//! A model as a file: JSON with what it was made of, how its like did, and what is needed to go on from there. Bytes in and out; where
//! they lie, and which model serves, is the caller's business.

use serde::{Deserialize, Serialize};
use units::{
    UnixMs,
    limits::{MODEL_BYTES_MAX, NAME_BYTES_MAX},
};

use crate::{
    frigid::{self, Calibration, feature_names, trial::Verdict},
    sensitivity::{self, COUNTERS},
};

/// The layout that this version writes and reads.
pub const LAYOUT: u64 = 1;

/// Rates at which a model's like is told, at most.
const METRICS_MAX: usize = 16;

/// A model with everything that is known of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelFile {
    /// The layout of the file: [`LAYOUT`].
    tarn_model: u64,
    /// Where it comes from.
    pub about: About,
    /// What it says.
    pub content: Content,
}

/// Where a model comes from, for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Version of Tarn that made the file.
    pub made_by: String,
    /// Who trained it: "tarn", "lightgbm" or "onnx".
    pub trained_by: String,
    /// When the file was made.
    pub made: UnixMs,
    /// Outcomes, or labelled workloads, that it was made of.
    pub rows: u64,
    /// When the first of its VMs began and the last ended; none of a model that was not made of VMs.
    pub window: Option<(UnixMs, UnixMs)>,
    /// How its like did before outcomes were known; see [`Verdict`]. Empty for models of latency sensitivity: their cuts say it.
    pub metrics: Vec<Verdict>,
    /// Whether workloads and their slowdowns were modelled, and not measured.
    pub modelled: bool,
}

/// What a model says, by kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// What VMs never touch.
    Frigid {
        /// Names of the numbers that it is asked about, in order.
        features: Vec<String>,
        /// The model.
        model: frigid::Model,
        /// Outcomes that its like was held against.
        calibration: Calibration,
    },
    /// Whom pool memory slows down.
    Sensitivity {
        /// Names of the counters that it is asked about, in order.
        features: Vec<String>,
        /// The model.
        model: sensitivity::Model,
    },
}

/// Kinds of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// What VMs never touch.
    Frigid,
    /// Whom pool memory slows down.
    Sensitivity,
}

impl Kind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Frigid, Self::Sensitivity];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frigid => "frigid",
            Self::Sensitivity => "sensitivity",
        }
    }
}

/// Why bytes are not taken for a model.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// There are more than a model has.
    #[error("{0} bytes: must be at most {MODEL_BYTES_MAX}")]
    TooLarge(usize),
    /// They end before their end.
    #[error("it is cut short: its {0} bytes end before the model's end")]
    CutShort(usize),
    /// They are something else.
    #[error("it is no model of Tarn: {0}")]
    NotAModel(String),
    /// Another version wrote it.
    #[error("tarn_model = {0}: must be {LAYOUT}; train or import the model anew with this version")]
    Layout(u64),
    /// It is asked about other numbers than those of this version, or something in it is out of its range.
    #[error(
        "its features or numbers are none of this version's: train or import the model anew with this version"
    )]
    Features,
}

/// The first that is read: all layouts have it.
#[derive(Deserialize)]
struct Head {
    tarn_model: u64,
}

impl ModelFile {
    /// What VMs never touch.
    pub fn frigid(about: About, model: frigid::Model, calibration: Calibration) -> Self {
        let features = feature_names().collect();
        Self { tarn_model: LAYOUT, about, content: Content::Frigid { features, model, calibration } }
    }

    /// Whom pool memory slows down.
    pub fn sensitivity(about: About, model: sensitivity::Model) -> Self {
        let features = COUNTERS.map(str::to_owned).to_vec();
        Self { tarn_model: LAYOUT, about, content: Content::Sensitivity { features, model } }
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self.content {
            Content::Frigid { .. } => Kind::Frigid,
            Content::Sensitivity { .. } => Kind::Sensitivity,
        }
    }

    /// Its bytes.
    ///
    /// # Errors
    /// [`FileError::TooLarge`].
    pub fn write(&self) -> Result<Vec<u8>, FileError> {
        let bytes = serde_json::to_vec(self).expect("a model is JSON: its keys are texts");
        if bytes.len() <= MODEL_BYTES_MAX { Ok(bytes) } else { Err(FileError::TooLarge(bytes.len())) }
    }

    /// Reads one, every tree of it checked.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read(bytes: &[u8]) -> Result<Self, FileError> {
        if bytes.len() > MODEL_BYTES_MAX {
            return Err(FileError::TooLarge(bytes.len()));
        }
        let Head { tarn_model } = serde_json::from_slice(bytes).map_err(|error| unread(bytes, &error))?;
        if tarn_model != LAYOUT {
            return Err(FileError::Layout(tarn_model));
        }
        let file: Self = serde_json::from_slice(bytes).map_err(|error| unread(bytes, &error))?;
        let About { made_by, trained_by, metrics, .. } = &file.about;
        let is_name = |text: &String| text.len() <= NAME_BYTES_MAX && !text.contains(char::is_control);
        if !is_name(made_by) || !is_name(trained_by) || metrics.len() > METRICS_MAX {
            return Err(FileError::NotAModel("it says more of itself than models do".to_owned()));
        }
        if file.is_of_this_version() { Ok(file) } else { Err(FileError::Features) }
    }

    fn is_of_this_version(&self) -> bool {
        match &self.content {
            Content::Frigid { features, model, calibration } => {
                features.iter().eq(&feature_names().collect::<Vec<_>>())
                    && model.fits()
                    && calibration.is_sound()
            }
            Content::Sensitivity { features, model } => features == &COUNTERS && model.fits(),
        }
    }
}

/// JSON that ends within a number is wrong to its reader, and not short.
fn unread(bytes: &[u8], error: &serde_json::Error) -> FileError {
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
