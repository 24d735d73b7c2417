//! Tenants for the market's benchmark, generated from a seed: half of them are sensitive to memory,
//! half to bandwidth.

use std::ops::Range;

use fairness::{
    curve::{Knot, MissCurve},
    market::{Slowdown, Supply, Tenant},
};
use rand::Rng;

/// How much longer a miss takes than a hit (Spirit 4.2).
pub const GAMMA: f64 = 100.0;
/// Straight pieces of a curve, all as long; knots are one more.
pub const PIECES: usize = 64;
/// Equal split.
const FAIR_MEMORY_MIB: u64 = 4096;
const FAIR_BANDWIDTH_MB_S: u64 = 1000;
/// Relative change of a curve and of the demand per epoch.
const CHANGE: f64 = 0.01;

/// Returns the supply for a number of tenants.
pub fn supply(tenants: usize) -> Supply {
    let tenants = tenants as u64;
    Supply { memory_mib: tenants * FAIR_MEMORY_MIB, bandwidth_mb_s: tenants * FAIR_BANDWIDTH_MB_S }
}

/// Inputs of a market for one tenant.
#[derive(Clone, Debug)]
pub struct Known {
    /// How often it misses.
    pub knots: Vec<Knot>,
    /// Bandwidth that it could use, in MB/s.
    pub wanted: f64,
}

/// Ranges of parameters of a kind of tenants.
struct Kind {
    /// To which power of memory hits grow: far below 1 for a few hot pages, near 1 for pages that are all alike.
    skew: Range<f64>,
    /// All its pages, in fair shares.
    footprint: Range<f64>,
    /// Bandwidth that it could use, in fair shares.
    wanted: Range<f64>,
}

const OF_MEMORY: Kind = Kind { skew: 0.15..0.4, footprint: 3.0..8.0, wanted: 0.5..2.5 };
const OF_BANDWIDTH: Kind = Kind { skew: 0.9..0.99, footprint: 6.0..12.0, wanted: 4.0..8.0 };
/// Misses however much memory there is.
const FLOOR: Range<f64> = 0.001..0.01;

/// So many tenants, every other one sensitive to memory.
pub fn drawn(tenants: usize, random: &mut impl Rng) -> Vec<Known> {
    let one = |at: usize| {
        let Kind { skew, footprint, wanted } = if at.is_multiple_of(2) { OF_MEMORY } else { OF_BANDWIDTH };
        let mut within = |range: Range<f64>| random.random_range(range);
        Known::new(within(skew), within(footprint), within(FLOOR), within(wanted))
    };
    (0..tenants).map(one).collect()
}

/// Returns six tenants with known slowdowns, used in earlier comparisons: three sensitive to
/// memory, three to bandwidth.
pub fn six() -> Vec<Known> {
    let of_memory = [(0.2, 0.83), (0.25, 0.79), (0.3, 0.74)].map(|(skew, part)| (skew, part, 0.3));
    let of_bandwidth = [0.95, 0.97, 0.99].map(|skew| (skew, 1.6, 1.0));
    let one = |(skew, footprint, wanted)| Known::new(skew, 6.0 * footprint, 0.0, 6.0 * wanted);
    of_memory.into_iter().chain(of_bandwidth).map(one).collect()
}

impl Known {
    /// Footprint and wanted bandwidth are in fair shares.
    fn new(skew: f64, footprint: f64, floor: f64, wanted: f64) -> Self {
        let knot = |at: usize| {
            let part = at as f64 / PIECES as f64;
            let misses = floor + (1.0 - floor) * (1.0 - part.powf(skew));
            Knot { memory: part * footprint * FAIR_MEMORY_MIB as f64, misses }
        };
        Self { knots: (0..=PIECES).map(knot).collect(), wanted: wanted * FAIR_BANDWIDTH_MB_S as f64 }
    }

    /// Returns the tenant one epoch later: the ends of its curve are slightly changed, with the
    /// points between.
    pub fn later(&self, random: &mut impl Rng) -> Self {
        let mut off = || 1.0 + random.random_range(-CHANGE..CHANGE);
        let (first, last) = (off(), off());
        let moved = |(at, knot): (usize, &Knot)| {
            let times = first + (last - first) * at as f64 / PIECES as f64;
            Knot { misses: (knot.misses * times).min(1.0), ..*knot }
        };
        Self { knots: self.knots.iter().enumerate().map(moved).collect(), wanted: self.wanted * off() }
    }

    /// Returns the utility of its shares.
    pub fn slowdown(self) -> Slowdown {
        let curve = MissCurve::new(self.knots).expect("misses are parts of 1, and memory rises");
        Slowdown::new(curve, GAMMA, self.wanted).expect("numbers of MB/s")
    }

    /// It, in a market with others of the same weight.
    pub fn tenant(self, supply: Supply) -> Tenant<Slowdown> {
        Tenant::new(1.0, supply, self.slowdown())
    }
}
