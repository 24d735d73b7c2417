//! Frigid memory: memory that a VM never touches (Pond, section 4.6). Quantile regression trees
//! predict the untouched share of a VM's memory, recent outcomes set the risk multiplier, and risk
//! is allocated where it gains the most memory.

mod history;
mod online;
mod margins;
mod model;
mod outcome;
mod calibration;
mod risk;
mod baseline;
mod score;
pub mod backtest;

pub use history::{FEATURES, History, feature_names};
pub use online::{VmAssessment, OnlinePredictor, RiskPrediction};
pub use model::{Model, ModelSource};
pub use outcome::{VmRequest, Groups, Outcome, Usage};
pub use calibration::{Calibration, CalibrationSample};
pub use risk::{RiskLimit, Curve, QUANTILE_LEVELS, RiskAllocation};

#[cfg(test)]
mod tests;
