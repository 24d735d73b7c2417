//! Models that were trained elsewhere, as bytes: LightGBM's text, and ONNX graphs that are one ensemble of trees. What they are
//! asked and what their answers mean is for others.

pub mod lightgbm;
pub mod onnx;

#[cfg(test)]
mod tests;
