//! Latency sensitivity (Pond, sections 4.6 and 6.4.1). A workload is sensitive if pool memory slows
//! it down by more than the performance degradation margin (PDM). A random forest predicts the
//! probability that a workload is sensitive from core counters measured with local memory. Three
//! baselines use a threshold on a single counter.

pub mod backtest;
mod evaluation_error;
mod model;

pub use model::{Cutoff, Model};

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

pub use units::COUNTER_NAMES;

use crate::trees::{
    FeatureColumns, TreeParams,
    forest::{FittedForest, ForestParams, fit_forest},
};

/// Valid range of slowdowns, as relative increases of the run time.
pub const SLOWDOWN_RANGE: RangeInclusive<f64> = -0.9..=100.0;
/// Description of [`SLOWDOWN_RANGE`] in error messages.
pub const SLOWDOWN_RULE: &str =
    "must be a number from -0.9 to 100, the relative increase of the run time (0.1 is 10 % longer)";
/// Smallest performance degradation margin (PDM).
pub const PDM_MIN: f64 = 0.001;
/// Number of leading entries of [`COUNTER_NAMES`] that are fractions of pipeline slots or cycles.
const FRACTION_COUNTERS: usize = 12;
/// Index in [`COUNTER_NAMES`] of the core-bound fraction of pipeline slots.
pub const CORE_BOUND_INDEX: usize = 3;
/// Index in [`COUNTER_NAMES`] of the memory-bound fraction of pipeline slots.
pub const MEMORY_BOUND_INDEX: usize = 4;
/// Index in [`COUNTER_NAMES`] of the fraction of cycles that wait for the latency of DRAM.
pub const DRAM_LATENCY_BOUND_INDEX: usize = 8;
/// Index in [`COUNTER_NAMES`] of the fraction of cycles that wait for the store buffer.
pub const STORE_BOUND_INDEX: usize = 10;
/// Index in [`COUNTER_NAMES`] of the DRAM-bound fraction of cycles.
pub const DRAM_BOUND_INDEX: usize = 11;
/// Index in [`COUNTER_NAMES`] of the instructions per cycle.
pub const IPC_INDEX: usize = 12;
/// Index in [`COUNTER_NAMES`] of the misses of the last-level cache per 1000 instructions.
pub const L3_MPKI_INDEX: usize = 15;
/// Index in [`COUNTER_NAMES`] of the memory-level parallelism.
pub const MLP_INDEX: usize = 16;

/// Returns the valid values of the counter with this index in [`COUNTER_NAMES`]. Measured fractions can
/// be slightly above 1.
pub const fn counter_range(index: usize) -> RangeInclusive<f64> {
    if index < FRACTION_COUNTERS { 0.0..=1.2 } else { 0.0..=1e6 }
}

/// Returns a value; `None` if it is NaN, which means that it was not measured.
pub fn measured_value(value: f64) -> Option<f64> {
    (!value.is_nan()).then_some(value)
}

/// Returns the names and values of all measured counters. Counters that are NaN were not measured.
pub fn measured_counters(counters: &[f64; COUNTER_NAMES.len()]) -> impl Iterator<Item = (&'static str, f64)> {
    COUNTER_NAMES
        .into_iter()
        .zip(counters)
        .filter_map(|(name, counter)| Some((name, measured_value(*counter)?)))
}

/// Workload: core counters measured with local memory, and slowdown with pool memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Name of the program. Several workloads have the same name if they run the same program with
    /// different inputs.
    pub program: String,
    /// Values of [`COUNTER_NAMES`], in the same order; NaN if a counter was not measured.
    pub counters: [f64; COUNTER_NAMES.len()],
    /// Relative increase of the run time with pool memory: 0.1 is 10 % longer.
    pub slowdown: f64,
}

impl Workload {
    /// Returns the kind of the program: its name up to the first `-`. Programs of one kind have
    /// similar access patterns.
    pub fn kind(&self) -> &str {
        self.program.split('-').next().expect("a split has at least one part")
    }
}

/// Parameters of the random forest. Leaves are small, and each split tries a quarter of the
/// counters.
const FOREST_PARAMS: ForestParams =
    ForestParams { trees: 200, tree: TreeParams { leaves_max: 64, leaf_rows_min: 2, column_fraction: 0.25 } };

/// Trains a forest that predicts the probability of a slowdown above `pdm`. The bootstrap draws
/// programs, each with all its workloads.
fn train_forest(workloads: &[&Workload], pdm: f64, seed: u64) -> FittedForest<1> {
    let mut columns = FeatureColumns::new(COUNTER_NAMES.len());
    workloads.iter().for_each(|workload| columns.push(&workload.counters));
    let labels: Vec<[f64; 1]> =
        workloads.iter().map(|workload| [f64::from(u8::from(workload.slowdown > pdm))]).collect();
    let groups = program_groups(workloads.iter().copied());
    fit_forest(&columns, &labels, &groups, &FOREST_PARAMS, seed)
}

/// Returns the index of each workload's program among all programs.
pub(crate) fn program_groups<'a>(workloads: impl Iterator<Item = &'a Workload> + Clone) -> Vec<usize> {
    let programs: BTreeSet<&str> = workloads.clone().map(|workload| workload.program.as_str()).collect();
    let indexes: BTreeMap<&str, usize> = programs.into_iter().zip(0..).collect();
    workloads.map(|workload| indexes[workload.program.as_str()]).collect()
}

#[cfg(test)]
mod tests;
