//! Latency sensitivity (Pond 4.6 and 6.4.1): would a workload be slowed down by pool memory beyond the performance degradation margin
//! (PDM)? A random forest says how likely that is, from what a core's counters tell of it with local memory; two thresholds on
//! single counters are what it has to beat.

mod labels;
mod model;
pub mod trial;

pub use labels::{COUNTER_MAX, LabelError, SLOWDOWN_RULE, SLOWDOWNS, read};
pub use model::{Cut, Model};

use crate::trees::{
    Columns, Shape,
    bag::{Bag, Bagged, means},
};

/// What counters tell, after Intel's top-down method; shares of slots or cycles, 0 to 1, but for the last five.
pub const COUNTERS: [&str; 17] = [
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
/// Where the share of slots that wait for a core's own units stands among [`COUNTERS`].
pub const CORE_BOUND: usize = 3;
/// Where the share of slots that wait for memory or a cache stands.
pub const MEMORY_BOUND: usize = 4;
/// Where the share of cycles that wait for memory behind the caches stands.
pub const DRAM_BOUND: usize = 11;

/// Counters by name; those that were not measured (NaN) are left out.
pub fn measured(counters: &[f64; COUNTERS.len()]) -> impl Iterator<Item = (&'static str, f64)> {
    COUNTERS.into_iter().zip(counters.iter().copied()).filter(|(_, counter)| !counter.is_nan())
}

/// A workload with local memory, and how much slower it is with pool memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Which program; runs of one program with several inputs share it.
    pub program: String,
    /// One number for each of [`COUNTERS`]; NaN where it was not measured.
    pub counters: [f64; COUNTERS.len()],
    /// How much longer it takes with pool memory: 0.1 is a tenth.
    pub slowdown: f64,
}

/// Trees that see some of the counters at each split, with leaves of a few workloads.
const HOW: Bag = Bag { trees: 200, shape: Shape { leaves_max: 64, leaf_rows_min: 2, columns_tried: 0.25 } };

/// A forest over workloads: how likely each is slowed down by more than the margin.
fn forest(workloads: &[&Workload], pdm: f64, seed: u64) -> Bagged {
    let mut columns = Columns::new(COUNTERS.len());
    workloads.iter().for_each(|workload| columns.push(&workload.counters));
    let slowed: Vec<f64> =
        workloads.iter().map(|workload| f64::from(u8::from(workload.slowdown > pdm))).collect();
    let mut programs: Vec<&str> = workloads.iter().map(|workload| workload.program.as_str()).collect();
    programs.sort_unstable();
    programs.dedup();
    let program =
        |workload: &&Workload| programs.binary_search(&workload.program.as_str()).expect("it is one of them");
    let groups: Vec<usize> = workloads.iter().map(program).collect();
    means(&columns, &slowed, &groups, &HOW, seed)
}

#[cfg(test)]
mod tests;
