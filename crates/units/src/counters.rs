//! Measurements of processors that hosts and the manager exchange.

use std::ops::RangeInclusive;

/// Names of the core counters, after Intel's top-down method. All except the last five are fractions of
/// pipeline slots or cycles, 0 to 1.
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

/// Valid range of the idle latency of the pool divided by the idle latency of local memory.
pub const LATENCY_RATIO_RANGE: RangeInclusive<f64> = 0.01..=1000.0;
/// Description of [`LATENCY_RATIO_RANGE`] in error messages.
pub const LATENCY_RATIO_RULE: &str =
    "must be a number from 0.01 to 1000, the latency of the pool divided by the latency of local memory";
