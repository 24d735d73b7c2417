//! Models that were trained elsewhere, as bytes: LightGBM's text, and ONNX graphs that are one ensemble of trees. What they are
//! asked and what their answers mean is for others.

mod foreign;
pub mod lightgbm;
pub mod onnx;

pub use foreign::{Foreign, Format, Refused};

#[cfg(test)]
mod tests;
