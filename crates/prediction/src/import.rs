//! Import of models trained elsewhere, from bytes: LightGBM text models, and ONNX graphs that
//! consist of one tree ensemble. The callers define the features and the meaning of the outputs.

mod imported;
pub mod lightgbm;
pub mod onnx;

pub use imported::{Format, ImportError, ImportedModel};

#[cfg(test)]
mod tests;
