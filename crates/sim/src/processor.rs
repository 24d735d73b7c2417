//! A processor core by interval analysis: what a program does to it, as the counters of its performance unit would tell, and how much
//! slower it would run if its memory were the pool's. No public table of counters with slowdowns exists; rows made here are
//! MODELLED and say so wherever they are used. Caches are simulated line by line; of the pipeline only what limits memory: the
//! window, the misses that may be under way, prefetching, and the channel.

mod cache;
mod counters;
mod kernels;
mod latency;
mod stream;
mod timing;
mod traces;

pub use counters::Counters;
pub use kernels::{Kernel, family};
pub use latency::{NoCurve, read as read_latency};
pub use stream::{Access, Program, Waits};
pub use traces::{NoTrace, read as read_trace};

use rand::Rng;

use cache::Hierarchy;
use timing::Run;

/// A core and its share of what it shares with others. Times in cycles unless they are said to be in ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Core {
    /// Cycles of a nanosecond.
    pub ghz: f64,
    /// Instructions that may start in a cycle.
    pub width: f64,
    /// Instructions that may be under way.
    pub window: u64,
    /// Lines of memory that a program may wait for at a time, and that may be asked for ahead.
    pub misses_max: usize,
    /// See above.
    pub ahead_max: usize,
    /// Stores that may wait to be written.
    pub stores_max: usize,
    /// Lines of each level, and cycles to answer from it.
    pub levels: [(usize, f64); 3],
}

/// A server core of these years, with its share of the last level.
pub const SERVER: Core = Core {
    ghz: 3.0,
    width: 4.0,
    window: 512,
    misses_max: 16,
    ahead_max: 48,
    stores_max: 72,
    levels: [(768, 5.0), (32 * 1024, 15.0), (32 * 1024, 70.0)],
};

/// Memory behind the caches, as one core sees it: how long a line takes at each share of its bandwidth in use.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// Bandwidth that this core may take, in GB/s.
    pub gb_per_s: f64,
    /// Shares of it in use, rising from 0, and the latency there in ns.
    pub curve: Vec<(f64, f64)>,
}

impl Memory {
    /// A memory with a curve that is made: flat for long, and three times the idle latency when all of it is in use.
    pub fn made(idle_ns: f64, gb_per_s: f64) -> Self {
        const RISE: [(f64, f64); 5] = [(0.0, 1.0), (0.5, 1.15), (0.8, 1.5), (0.95, 2.2), (1.0, 3.0)];
        Self { gb_per_s, curve: RISE.map(|(used, times)| (used, times * idle_ns)).to_vec() }
    }

    /// Latency at a share of the bandwidth, in ns; between two points of the curve by a straight line.
    pub fn latency_ns(&self, used: f64) -> f64 {
        let after = self.curve.partition_point(|(share, _)| *share < used);
        match (self.curve.get(after.wrapping_sub(1)), self.curve.get(after)) {
            (Some(&(a, low)), Some(&(b, high))) => low + (high - low) * (used - a) / (b - a),
            (None, Some(&(_, only))) | (Some(&(_, only)), None) => only,
            (None, None) => 0.0,
        }
    }
}

/// What a program did, and would have done.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// What the counters say of it with local memory.
    pub counters: Counters,
    /// How much longer it takes with pool memory: 0.1 is a tenth.
    pub slowdown: f64,
}

/// A program's run as counters tell it: what is counted is off by a twentieth or so, and never quite zero; what is reckoned from it
/// is off alike.
pub fn noisy(counters: &Counters, rng: &mut impl Rng) -> Counters {
    const OFF: f64 = 0.05;
    const FLOOR: f64 = 0.003;
    // Nearly normal: the sum of twelve numbers from 0 to 1 has a mean of six and a deviation of one.
    let mut normal = || (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    counters::reckoned(
        counters.map(|counter| (counter * (1.0 + OFF * normal())).max(0.0) + FLOOR * normal().abs()),
    )
}

/// Runs a program with local memory and with pool memory.
pub fn measure(core: &Core, program: &Program, local: &Memory, pool: &Memory) -> Measured {
    let seen = Hierarchy::new(core).look(program);
    let [with_local, with_pool] = [local, pool].map(|memory| Run::of(core, program, &seen, memory));
    Measured {
        counters: with_local.counters(core, program, &seen),
        slowdown: with_pool.cycles / with_local.cycles - 1.0,
    }
}

#[cfg(test)]
mod tests;
