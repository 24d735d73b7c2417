//! Port of Spirit's published allocator (yale-nova/spirit): one epoch evaluates at most eleven
//! points near each tenant's last share, at up to twenty prices. Output, caps and the estimator are
//! omitted: miss ratios are inputs.

use fairness::market::{Bundle, Supply};

use crate::tenants::{GAMMA, PIECES, TenantModel};

/// Steps per supply in a market of six tenants, 1/ε; in larger ones a step is the same fraction of
/// a fair share.
const STEPS_OF_SIX: f64 = 200.0;
/// Maximum change of memory in an epoch, in steps, with a rounding tolerance.
const WINDOW: f64 = 5.0 + 1e-9;
/// Fraction of its budget that a tenant spends, so that rounding does not exceed the supply.
const BUDGET_FRACTION: f64 = 0.97;
/// Maximum number of prices per epoch.
const PRICES_MAX: u32 = 20;
/// Maximum total demand.
const DEMAND_MAX: f64 = 1.0 + 1e-5;

/// A share as fractions of the supply.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    memory: f64,
    bandwidth: f64,
}

/// Model of a tenant relative to the supply.
#[derive(Debug)]
struct TenantTable {
    misses: [f64; PIECES + 1],
    /// Memory between two knots.
    knot_distance: f64,
    bandwidth_demand: f64,
}

impl TenantTable {
    fn new(model: &TenantModel, all: Bundle) -> Self {
        let mut misses = [0.0; PIECES + 1];
        misses.iter_mut().zip(&model.knots).for_each(|(to, knot)| *to = knot.misses);
        Self {
            misses,
            knot_distance: model.knots[1].memory / all.memory,
            bandwidth_demand: model.bandwidth_demand / all.bandwidth,
        }
    }

    /// Interpolates linearly between two entries.
    fn misses(&self, memory: f64) -> f64 {
        let position = memory / self.knot_distance;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to the last piece"
        )]
        let below = (position as usize).min(PIECES - 1);
        let part = (position - below as f64).min(1.0);
        self.misses[below] + part * (self.misses[below + 1] - self.misses[below])
    }

    fn throughput(&self, of: Share) -> f64 {
        (1.0 + self.misses(of.memory) * GAMMA * (self.bandwidth_demand / of.bandwidth).max(1.0)).recip()
    }
}

/// State of the allocator between two epochs.
#[derive(Debug)]
pub struct SpiritPort {
    tenants: Vec<TenantTable>,
    all: Bundle,
    step: f64,
    last: Vec<Share>,
    /// Demand at the last price.
    demand: Vec<Share>,
}

impl SpiritPort {
    /// Creates an allocator with an equal split.
    pub fn new(models: &[TenantModel], supply: Supply) -> Self {
        let (all, fair) = (Bundle::from(supply.all()), 1.0 / models.len() as f64);
        Self {
            tenants: models.iter().map(|model| TenantTable::new(model, all)).collect(),
            all,
            step: 6.0 / STEPS_OF_SIX * fair,
            last: vec![Share { memory: fair, bandwidth: fair }; models.len()],
            demand: vec![Share::default(); models.len()],
        }
    }

    /// Moves shares to the demands at a feasible price; without one they stay.
    pub fn epoch(&mut self) {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..PRICES_MAX {
            let price = f64::midpoint(low, high);
            let sum = self.update_demand(price);
            if sum.memory > DEMAND_MAX {
                low = price;
            } else if sum.bandwidth > DEMAND_MAX {
                high = price;
            } else {
                std::mem::swap(&mut self.last, &mut self.demand);
                return;
            }
        }
    }

    /// Returns the current shares.
    pub fn bundles(&self) -> impl Iterator<Item = Bundle> {
        self.last.iter().map(|part| Bundle {
            memory: part.memory * self.all.memory,
            bandwidth: part.bandwidth * self.all.bandwidth,
        })
    }

    fn update_demand(&mut self, price: f64) -> Share {
        let mut sum = Share::default();
        for tenant in 0..self.tenants.len() {
            let best_share = self.best_share(tenant, price);
            sum.memory += best_share.memory;
            sum.bandwidth += best_share.bandwidth;
            self.demand[tenant] = best_share;
        }
        sum
    }

    /// Returns the point of the window with the highest throughput.
    fn best_share(&self, tenant: usize, price: f64) -> Share {
        let (table, last) = (&self.tenants[tenant], self.last[tenant]);
        let budget = BUDGET_FRACTION / self.tenants.len() as f64;
        let mut best_share = self.affordable_share(last, price, budget);
        let mut best_throughput = table.throughput(best_share);
        let nearest = last.memory / self.step;
        let mut at = (nearest - WINDOW).ceil().max(1.0);
        while at <= nearest + WINDOW && at * self.step * price <= budget {
            let part = self.share_with_memory(at * self.step, price, budget);
            let throughput = table.throughput(part);
            if throughput > best_throughput {
                (best_share, best_throughput) = (part, throughput);
            }
            at += 1.0;
        }
        best_share
    }

    /// Returns whole steps of memory, and the bandwidth for the remaining budget.
    fn share_with_memory(&self, memory: f64, price: f64, budget: f64) -> Share {
        let can_pay = (budget - memory * price) / (1.0 - price);
        Share { memory, bandwidth: (can_pay / self.step).floor().max(0.0) * self.step }
    }

    /// Returns the memory of the last share with the bandwidth that the remaining budget buys or,
    /// if the memory exceeds the budget, both scaled to the budget.
    fn affordable_share(&self, last: Share, price: f64, budget: f64) -> Share {
        if last.memory * price <= budget {
            return self.share_with_memory(last.memory, price, budget);
        }
        let part = budget / (last.memory * price + last.bandwidth * (1.0 - price));
        let whole = |of: f64| ((of * part / self.step).floor() * self.step).max(self.step);
        Share { memory: whole(last.memory), bandwidth: whole(last.bandwidth) }
    }
}
