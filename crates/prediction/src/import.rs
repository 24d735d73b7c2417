//! Import of models trained elsewhere: LightGBM text models, and ONNX graphs that consist of one
//! tree ensemble. Models are read from bytes. Callers define the features and the meaning of the
//! output.

mod imported;
pub mod lightgbm;
pub mod onnx;

pub use imported::{Format, ImportError, ImportedModel};

#[cfg(test)]
mod tests;
