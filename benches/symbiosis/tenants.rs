//! Generates random tenants for the market benchmark: half are sensitive to memory, half are
//! sensitive to bandwidth.

use std::ops::Range;

use fairness::{
    curve::{Knot, MissCurve},
    market::{Slowdown, Supply, Tenant},
};
use rand::Rng;

/// Ratio of the duration of a miss to the duration of a hit (Spirit, section 4.2).
pub const GAMMA: f64 = 100.0;
/// Number of linear segments of a miss-ratio curve, all of the same width.
pub const CURVE_SEGMENTS: usize = 64;
/// Memory of each tenant in an equal split, in MiB.
const FAIR_MEMORY_MIB: u64 = 4096;
/// Bandwidth of each tenant in an equal split, in MB/s.
const FAIR_BANDWIDTH_MB_S: u64 = 1000;
/// Returns the total supply for this number of tenants.
pub fn supply(tenants: usize) -> Supply {
    let tenants = tenants as u64;
    Supply::new(tenants * FAIR_MEMORY_MIB, tenants * FAIR_BANDWIDTH_MB_S)
}

/// Miss-ratio curve and bandwidth demand of a tenant, the inputs of the market.
#[derive(Clone, Debug)]
pub struct TenantModel {
    /// Knots of the miss-ratio curve, in ascending order of memory.
    pub knots: Vec<Knot>,
    /// Bandwidth demand in MB/s.
    pub bandwidth_demand: f64,
}

/// Parameter ranges of one kind of tenant.
struct TenantKind {
    /// Exponent of the hit ratio as a function of memory: far below 1 for few hot pages, near 1 for
    /// uniform access.
    skew: Range<f64>,
    /// Memory footprint, in fair shares.
    footprint: Range<f64>,
    /// Bandwidth demand, in fair shares.
    bandwidth_demand: Range<f64>,
}

const MEMORY_SENSITIVE: TenantKind =
    TenantKind { skew: 0.15..0.4, footprint: 3.0..8.0, bandwidth_demand: 0.5..2.5 };
const BANDWIDTH_SENSITIVE: TenantKind =
    TenantKind { skew: 0.9..0.99, footprint: 6.0..12.0, bandwidth_demand: 4.0..8.0 };
/// Range of the miss ratio with unlimited memory.
const MISS_RATIO_FLOOR_RANGE: Range<f64> = 0.001..0.01;

/// Returns random tenants, which are alternately sensitive to memory and to bandwidth.
pub fn random_tenants(tenants: usize, random: &mut impl Rng) -> Vec<TenantModel> {
    let model = |at: usize| {
        let TenantKind { skew, footprint, bandwidth_demand } =
            if at.is_multiple_of(2) { MEMORY_SENSITIVE } else { BANDWIDTH_SENSITIVE };
        let mut sample = |range: Range<f64>| random.random_range(range);
        TenantModel::new(
            sample(skew),
            sample(footprint),
            sample(MISS_RATIO_FLOOR_RANGE),
            sample(bandwidth_demand),
        )
    };
    (0..tenants).map(model).collect()
}

/// Returns six fixed tenants: three are sensitive to memory, three are sensitive to bandwidth.
pub fn six_tenants() -> Vec<TenantModel> {
    let of_memory = [(0.2, 0.83), (0.25, 0.79), (0.3, 0.74)].map(|(skew, part)| (skew, part, 0.3));
    let of_bandwidth = [0.95, 0.97, 0.99].map(|skew| (skew, 1.6, 1.0));
    let model = |(skew, footprint, bandwidth_demand)| {
        TenantModel::new(skew, 6.0 * footprint, 0.0, 6.0 * bandwidth_demand)
    };
    of_memory.into_iter().chain(of_bandwidth).map(model).collect()
}

impl TenantModel {
    /// Creates a tenant. `footprint` and `bandwidth_demand` are in fair shares. `floor` is the miss
    /// ratio with unlimited memory.
    fn new(skew: f64, footprint: f64, floor: f64, bandwidth_demand: f64) -> Self {
        let knot = |at: usize| {
            let part = at as f64 / CURVE_SEGMENTS as f64;
            let misses = floor + (1.0 - floor) * (1.0 - part.powf(skew));
            Knot { memory: part * footprint * FAIR_MEMORY_MIB as f64, misses }
        };
        Self {
            knots: (0..=CURVE_SEGMENTS).map(knot).collect(),
            bandwidth_demand: bandwidth_demand * FAIR_BANDWIDTH_MB_S as f64,
        }
    }

    /// Returns the utility function of the tenant.
    pub fn into_slowdown(self) -> Slowdown {
        let curve = MissCurve::new(self.knots).expect("miss ratios are at most 1, and memory increases");
        Slowdown::new(curve, GAMMA, self.bandwidth_demand).expect("the demand is finite")
    }

    /// Returns the tenant for a market in which all tenants have equal weights.
    pub fn into_tenant(self, supply: Supply) -> Tenant<Slowdown> {
        Tenant::new(1.0, supply, self.into_slowdown())
    }
}
