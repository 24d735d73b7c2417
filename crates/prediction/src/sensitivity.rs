//! Latency sensitivity (Pond, sections 4.6 and 6.4.1). A workload is sensitive if pool memory slows
//! it down by more than the performance degradation margin (PDM). A random forest predicts the
//! probability that a workload is sensitive from core counters measured with local memory. Three
//! baselines use a threshold on a single counter.

pub mod backtest;
mod evaluation_error;
mod labels;
mod model;

pub use labels::{COUNTER_VALUE_MAX, LabelError, SLOWDOWN_RANGE, SLOWDOWN_RULE, read_labels};
pub use model::{Cutoff, Model};

use std::collections::{BTreeMap, BTreeSet};

use crate::trees::{
    FeatureColumns, TreeParams,
    forest::{FittedForest, ForestParams, fit_forest},
};

/// Names of the core counters, after Intel's top-down method. All except the last five are
/// fractions of pipeline slots or cycles, 0 to 1.
pub const COUNTER_NAMES: [&str; 17] = [
    "retiring",
    "frontend_bound",
    "bad_speculation",
    "core_bound",
    "memory_bound",
    "l1_bound",
    "l2_bound",
    "l3_bound",
    "dram_latency_bound",
    "dram_bandwidth_bound",
    "store_bound",
    "dram_bound",
    "ipc",
    "l1_mpki",
    "l2_mpki",
    "l3_mpki",
    "memory_level_parallelism",
];
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

/// Returns the names and values of all measured counters. Counters that are NaN were not measured.
pub fn measured_counters(counters: &[f64; COUNTER_NAMES.len()]) -> impl Iterator<Item = (&'static str, f64)> {
    COUNTER_NAMES.into_iter().zip(counters.iter().copied()).filter(|(_, counter)| !counter.is_nan())
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
fn train_forest(workloads: &[&Workload], pdm: f64, seed: u64) -> FittedForest {
    let mut columns = FeatureColumns::new(COUNTER_NAMES.len());
    workloads.iter().for_each(|workload| columns.push(&workload.counters));
    let labels: Vec<f64> =
        workloads.iter().map(|workload| f64::from(u8::from(workload.slowdown > pdm))).collect();
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
