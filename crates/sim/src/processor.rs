//! Interval-analysis model of a CPU core. It computes the performance counters of a program with
//! local memory and the slowdown of this program with pool memory. No public data set contains both
//! values, so rows computed with this model are labelled MODELLED.
//!
//! Caches are simulated line by line. The pipeline model covers the limits of memory access: the
//! instruction window, outstanding misses, prefetching, and the memory channel.

mod cache;
mod counters;
mod kernels;
mod latency;
mod stalls;
mod stream;
mod timing;
mod traces;

pub use counters::Counters;
pub use kernels::{Kernel, kernel_family};
pub use latency::{LatencyError, read as read_latency};
pub use stream::{Access, Dependency, Program};
pub use traces::{TraceError, read as read_trace};

use rand::Rng;

use cache::CacheHierarchy;
use timing::Run;

/// CPU core with its share of the shared resources. Times are in cycles; fields whose names end in
/// `_ns` are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CoreModel {
    /// Clock rate in GHz (cycles per nanosecond).
    pub ghz: f64,
    /// Maximum number of instructions issued per cycle.
    pub width: f64,
    /// Size of the instruction window, in instructions.
    pub window: u64,
    /// Upper bound on outstanding demand misses.
    pub misses_max: usize,
    /// Upper bound on outstanding prefetches.
    pub prefetches_max: usize,
    /// Size of the store buffer, in stores.
    pub stores_max: usize,
    /// Each cache level, from the first: (capacity in lines, latency in cycles).
    pub levels: [(usize, f64); 3],
}

/// Parameters of a typical server core with its share of the last-level cache.
pub const SERVER_CORE: CoreModel = CoreModel {
    ghz: 3.0,
    width: 4.0,
    window: 512,
    misses_max: 16,
    prefetches_max: 48,
    stores_max: 72,
    levels: [(768, 5.0), (32 * 1024, 15.0), (32 * 1024, 70.0)],
};

/// Memory from the view of one core: latency as a function of bandwidth utilization.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// Bandwidth available to the core, in GB/s.
    pub gb_per_s: f64,
    /// Loaded-latency curve: points of (bandwidth utilization from 0 to 1, latency in ns), in
    /// ascending order of utilization.
    pub curve: Vec<(f64, f64)>,
}

impl Memory {
    /// Creates a memory with a synthetic curve, which rises from the idle latency to three times
    /// the idle latency at full utilization.
    pub fn synthetic(idle_ns: f64, gb_per_s: f64) -> Self {
        const RELATIVE_LATENCY_CURVE: [(f64, f64); 5] =
            [(0.0, 1.0), (0.5, 1.15), (0.8, 1.5), (0.95, 2.2), (1.0, 3.0)];
        Self {
            gb_per_s,
            curve: RELATIVE_LATENCY_CURVE.map(|(utilization, times)| (utilization, times * idle_ns)).to_vec(),
        }
    }

    /// Returns the latency in ns at a utilization, interpolated linearly between the points of the
    /// curve.
    pub fn latency_ns(&self, utilization: f64) -> f64 {
        let after = self.curve.partition_point(|(point, _)| *point < utilization);
        match (self.curve.get(after.wrapping_sub(1)), self.curve.get(after)) {
            (Some(&(a, low)), Some(&(b, high))) => low + (high - low) * (utilization - a) / (b - a),
            (None, Some(&(_, only))) | (Some(&(_, only)), None) => only,
            (None, None) => 0.0,
        }
    }
}

impl Memory {
    /// Returns the memory of a program whose accesses are spread over local and pool memory.
    /// `pool_share` is the fraction of accesses to the pool, 0 to 1. The latency is the weighted
    /// mean of both latencies. Each channel serves its part of the accesses, so the channel that
    /// saturates first limits the bandwidth.
    pub fn split(local: &Self, pool: &Self, pool_share: f64) -> Self {
        let local_share = 1.0 - pool_share;
        let mut utilizations: Vec<f64> =
            [local, pool].iter().flat_map(|memory| memory.curve.iter().map(|(point, _)| *point)).collect();
        utilizations.sort_unstable_by(f64::total_cmp);
        utilizations.dedup();
        let latency = |used: f64| local_share * local.latency_ns(used) + pool_share * pool.latency_ns(used);
        Self {
            gb_per_s: (local.gb_per_s / local_share).min(pool.gb_per_s / pool_share),
            curve: utilizations.into_iter().map(|used| (used, latency(used))).collect(),
        }
    }
}

/// Performance counters of one run of a program, and its slowdown.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Performance counters of the run.
    pub counters: Counters,
    /// Relative increase of the run time compared with local memory: 0.1 is 10 % longer.
    pub slowdown: f64,
}

/// Adds measurement noise to the counters: about 5 % of each value, plus a small positive offset.
/// Derived counters are recomputed from the noisy counters.
pub fn add_noise(counters: &Counters, rng: &mut impl Rng) -> Counters {
    const RELATIVE_NOISE: f64 = 0.05;
    const NOISE_OFFSET_SCALE: f64 = 0.003;
    // Approximates a normal distribution: the sum of twelve uniform numbers from 0 to 1 has mean 6
    // and standard deviation 1.
    let mut normal = || (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    counters::add_derived_counters(counters.map(|counter| {
        (counter * (1.0 + RELATIVE_NOISE * normal())).max(0.0) + NOISE_OFFSET_SCALE * normal().abs()
    }))
}

/// Runs a program with local memory and with pool memory, and compares the run times. The counters
/// are those of the run with local memory.
pub fn measure(core: &CoreModel, program: &Program, local: &Memory, pool: &Memory) -> Measurement {
    let (counters, runs) = measure_each(core, program, local, std::slice::from_ref(pool));
    Measurement { counters, slowdown: runs[0].slowdown }
}

/// Runs a program with local memory and with each other memory. Returns the counters with local
/// memory, and for each other memory the counters of its run and the slowdown.
pub fn measure_each(
    core: &CoreModel,
    program: &Program,
    local: &Memory,
    others: &[Memory],
) -> (Counters, Vec<Measurement>) {
    let levels = CacheHierarchy::new(core).simulate(program);
    let with_local = Run::simulate(core, program, &levels, local);
    let measure = |memory: &Memory| {
        let run = Run::simulate(core, program, &levels, memory);
        Measurement {
            counters: run.counters(core, program, &levels),
            slowdown: run.cycles / with_local.cycles - 1.0,
        }
    };
    (with_local.counters(core, program, &levels), others.iter().map(measure).collect())
}

#[cfg(test)]
mod tests;
