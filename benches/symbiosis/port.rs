//! Port of Spirit's published allocator (yale-nova/spirit) to Rust.
//!
//! One epoch evaluates at most eleven points near the last share of each tenant, at up to twenty
//! prices. The port omits output, caps and the estimator: miss ratios are inputs.

use fairness::market::{Bundle, Supply};

use crate::tenants::{CURVE_SEGMENTS, GAMMA, TenantModel};

/// Number of steps into which the supply is divided in a market of six tenants (1/ε in Spirit). In
/// larger markets, a step is the same fraction of a fair share.
const STEPS_FOR_SIX_TENANTS: f64 = 200.0;
/// Maximum change of a tenant's memory per epoch, in steps, plus a tolerance for rounding.
const WINDOW_STEPS: f64 = 5.0 + 1e-9;
/// Fraction of the budget that a tenant spends. The rest is a margin for rounding errors.
const BUDGET_FRACTION: f64 = 0.97;
/// Maximum number of prices that one epoch evaluates.
const EVALUATED_PRICES_MAX: u32 = 20;
/// Maximum total demand at a feasible price, as a fraction of the supply, plus a tolerance for
/// rounding.
const DEMAND_FRACTION_MAX: f64 = 1.0 + 1e-5;

/// Memory and bandwidth of a tenant, as fractions of the supply.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    memory: f64,
    bandwidth: f64,
}

/// Miss-ratio curve and bandwidth demand of a tenant, relative to the supply.
#[derive(Debug)]
struct TenantTable {
    misses: [f64; CURVE_SEGMENTS + 1],
    /// Memory between two neighbouring knots of the curve, as a fraction of the supply.
    knot_distance: f64,
    bandwidth_demand: f64,
}

impl TenantTable {
    fn new(model: &TenantModel, all: Bundle) -> Self {
        let mut misses = [0.0; CURVE_SEGMENTS + 1];
        misses.iter_mut().zip(&model.knots).for_each(|(to, knot)| *to = knot.misses);
        Self {
            misses,
            knot_distance: model.knots[1].memory / all.memory,
            bandwidth_demand: model.bandwidth_demand / all.bandwidth,
        }
    }

    /// Returns the miss ratio at this memory, by linear interpolation between two knots.
    fn miss_ratio(&self, memory: f64) -> f64 {
        let position = memory / self.knot_distance;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to the last segment"
        )]
        let below = (position as usize).min(CURVE_SEGMENTS - 1);
        let part = (position - below as f64).min(1.0);
        self.misses[below] + part * (self.misses[below + 1] - self.misses[below])
    }

    fn throughput(&self, of: Share) -> f64 {
        (1.0 + self.miss_ratio(of.memory) * GAMMA * (self.bandwidth_demand / of.bandwidth).max(1.0)).recip()
    }
}

/// Spirit's allocator, with its state between two epochs.
#[derive(Debug)]
pub struct SpiritPort {
    tenants: Vec<TenantTable>,
    all: Bundle,
    step: f64,
    last_shares: Vec<Share>,
    /// Demand of each tenant at the last evaluated price.
    demands: Vec<Share>,
}

impl SpiritPort {
    /// Creates an allocator that starts with an equal split.
    pub fn new(models: &[TenantModel], supply: Supply) -> Self {
        let (all, fair) = (Bundle::from(supply.all()), 1.0 / models.len() as f64);
        Self {
            tenants: models.iter().map(|model| TenantTable::new(model, all)).collect(),
            all,
            step: 6.0 / STEPS_FOR_SIX_TENANTS * fair,
            last_shares: vec![Share { memory: fair, bandwidth: fair }; models.len()],
            demands: vec![Share::default(); models.len()],
        }
    }

    /// Runs one epoch: sets the shares to the demands at a feasible price. Leaves the shares
    /// unchanged if no evaluated price is feasible.
    pub fn run_epoch(&mut self) {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..EVALUATED_PRICES_MAX {
            let price = f64::midpoint(low, high);
            let sum = self.update_demands(price);
            if sum.memory > DEMAND_FRACTION_MAX {
                low = price;
            } else if sum.bandwidth > DEMAND_FRACTION_MAX {
                high = price;
            } else {
                std::mem::swap(&mut self.last_shares, &mut self.demands);
                return;
            }
        }
    }

    /// Returns the current shares.
    pub fn bundles(&self) -> impl Iterator<Item = Bundle> {
        self.last_shares.iter().map(|part| Bundle {
            memory: part.memory * self.all.memory,
            bandwidth: part.bandwidth * self.all.bandwidth,
        })
    }

    fn update_demands(&mut self, price: f64) -> Share {
        let mut sum = Share::default();
        for tenant in 0..self.tenants.len() {
            let best_share = self.best_share(tenant, price);
            sum.memory += best_share.memory;
            sum.bandwidth += best_share.bandwidth;
            self.demands[tenant] = best_share;
        }
        sum
    }

    /// Returns the affordable share with the highest throughput near the tenant's last share.
    fn best_share(&self, tenant: usize, price: f64) -> Share {
        let (table, last) = (&self.tenants[tenant], self.last_shares[tenant]);
        let budget = BUDGET_FRACTION / self.tenants.len() as f64;
        let mut best_share = self.affordable_share(last, price, budget);
        let mut best_throughput = table.throughput(best_share);
        let nearest = last.memory / self.step;
        let mut at = (nearest - WINDOW_STEPS).ceil().max(1.0);
        while at <= nearest + WINDOW_STEPS && at * self.step * price <= budget {
            let part = self.share_with_memory(at * self.step, price, budget);
            let throughput = table.throughput(part);
            if throughput > best_throughput {
                (best_share, best_throughput) = (part, throughput);
            }
            at += 1.0;
        }
        best_share
    }

    /// Returns the share with this memory, and the bandwidth that the remaining budget buys, in
    /// whole steps.
    fn share_with_memory(&self, memory: f64, price: f64, budget: f64) -> Share {
        let affordable = (budget - memory * price) / (1.0 - price);
        Share { memory, bandwidth: (affordable / self.step).floor().max(0.0) * self.step }
    }

    /// Returns a share with the memory of the last share, and the bandwidth that the remaining
    /// budget buys. If the memory alone exceeds the budget, scales the last share down to the
    /// budget.
    fn affordable_share(&self, last: Share, price: f64, budget: f64) -> Share {
        if last.memory * price <= budget {
            return self.share_with_memory(last.memory, price, budget);
        }
        let part = budget / (last.memory * price + last.bandwidth * (1.0 - price));
        let whole = |of: f64| ((of * part / self.step).floor() * self.step).max(self.step);
        Share { memory: whole(last.memory), bandwidth: whole(last.bandwidth) }
    }
}
