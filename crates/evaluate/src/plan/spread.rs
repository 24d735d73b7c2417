//! Spread of the results of a plan over the seeds of the modelled customers.

use std::fmt;

use cli_runtime::table::{Column, Row, col};
use serde::Serialize;

use super::options::Policy;

/// Spread of a value over the seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub mean: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Returns the spread of some values, at least one.
    pub(super) fn new(values: &[f64]) -> Self {
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// Spread of the results of a policy with a pool size over the seeds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PolicySpread {
    pub policy: Policy,
    pub pool_sockets: u32,
    pub dram_saved: Spread,
    pub mispredicted: Option<Spread>,
}

impl Row for PolicySpread {
    const COLUMNS: &'static [Column<Self>] = &[
        col("POLICY", |r| r.policy.to_string()),
        col("POOL SOCKETS", |r| r.pool_sockets.to_string()),
        col("SAVED", |r| r.dram_saved.to_string()),
        col("MISPREDICTED", |r| r.mispredicted.map_or("-".to_owned(), |spread| spread.to_string())),
    ];
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [mean, min, max] = [self.mean, self.min, self.max].map(|value| 100.0 * value);
        write!(f, "{mean:.2} % ({min:.2} to {max:.2} %)")
    }
}
