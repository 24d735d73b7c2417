//! Prediction of frigid memory: memory that a VM never touches (Pond, section 4.6). Quantile
//! regression trees predict the untouched fraction of a VM's memory, limited by the ended VMs of the
//! same owner. Recent outcomes determine the risk multiplier of each size class, which weighs the
//! risk of each VM against the pool memory that it gains.

pub mod backtest;
mod calibration;
mod evaluation;
mod history;
mod model;
mod online;
mod outcome;
mod risk;
mod sample;
mod score;

pub use calibration::{Calibration, CalibrationSample};
pub use history::{FEATURE_COUNT, OutcomeHistory, feature_names};
pub use model::{Model, ModelSource};
pub use online::{OnlinePredictor, VmAssessment};
pub use outcome::{Groups, Outcome, VmRequest, VmUsage};
pub use risk::{QUANTILE_LEVELS, QuantileCurve, RiskAllocation, RiskLimit, SIZE_CLASSES, SizeBounds};

#[cfg(test)]
mod tests;
