//! Frigid memory: what a VM will not touch in all its life (Pond 4.6). Trees say how likely each share of its memory is to be
//! too much, outcomes of late say what that risk costs, and risk is spent where it buys most memory.

mod history;
mod live;
mod margins;
mod model;
mod outcome;
mod price;
mod risk;
mod rival;
mod score;
pub mod trial;

pub use history::{FEATURES, History, feature_names};
pub use live::{Known, Live, Said};
pub use model::{Model, Teacher};
pub use outcome::{Ask, Groups, Outcome, Usage};
pub use price::{Calibration, Judged};
pub use risk::{Appetite, Curve, LEVELS, Stake};

#[cfg(test)]
mod tests;
