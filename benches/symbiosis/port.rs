//! Spirit's allocator as published (yale-nova/spirit), in plain form: one epoch evaluates at most
//! eleven points near each tenant's last share, twenty times. Printing, logging, caps and the
//! estimator are left out: miss ratios are given.

use fairness::market::{Bundle, Supply};

use crate::tenants::{GAMMA, Known, PIECES};

/// Steps into which a market of six is divided, 1/ε; of larger ones a step is the same part of a fair share.
const STEPS_OF_SIX: f64 = 200.0;
/// Steps by which memory may change in an epoch; and the tolerance of rounding.
const WINDOW: f64 = 5.0 + 1e-9;
/// Fraction of its budget that a tenant spends, so that rounding does not exceed the supply.
const SPENT: f64 = 0.97;
/// Prices that are tried in an epoch.
const ROUNDS: u32 = 20;
/// Maximum total demand.
const FITS: f64 = 1.0 + 1e-5;

/// A share, as parts of all that there is.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    memory: f64,
    bandwidth: f64,
}

/// Estimates of a tenant.
#[derive(Debug)]
struct Table {
    misses: [f64; PIECES + 1],
    /// Memory between two of them.
    piece: f64,
    wanted: f64,
}

impl Table {
    fn new(known: &Known, all: Bundle) -> Self {
        let mut misses = [0.0; PIECES + 1];
        misses.iter_mut().zip(&known.knots).for_each(|(to, knot)| *to = knot.misses);
        Self { misses, piece: known.knots[1].memory / all.memory, wanted: known.wanted / all.bandwidth }
    }

    /// Straight between two entries.
    fn misses(&self, memory: f64) -> f64 {
        let place = memory / self.piece;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "beyond the last is the last"
        )]
        let below = (place as usize).min(PIECES - 1);
        let part = (place - below as f64).min(1.0);
        self.misses[below] + part * (self.misses[below + 1] - self.misses[below])
    }

    fn throughput(&self, of: Part) -> f64 {
        (1.0 + self.misses(of.memory) * GAMMA * (self.wanted / of.bandwidth).max(1.0)).recip()
    }
}

/// The allocator between two epochs.
#[derive(Debug)]
pub struct Port {
    tenants: Vec<Table>,
    all: Bundle,
    step: f64,
    last: Vec<Part>,
    /// Returns the demand at a price.
    asked: Vec<Part>,
}

impl Port {
    /// With an equal split to begin with.
    pub fn new(known: &[Known], supply: Supply) -> Self {
        let (all, fair) = (Bundle::from(supply.all()), 1.0 / known.len() as f64);
        Self {
            tenants: known.iter().map(|known| Table::new(known, all)).collect(),
            all,
            step: 6.0 / STEPS_OF_SIX * fair,
            last: vec![Part { memory: fair, bandwidth: fair }; known.len()],
            asked: vec![Part::default(); known.len()],
        }
    }

    /// Moves shares to the demands at a feasible price; without one they stay.
    pub fn epoch(&mut self) {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..ROUNDS {
            let price = f64::midpoint(low, high);
            let sum = self.ask(price);
            if sum.memory > FITS {
                low = price;
            } else if sum.bandwidth > FITS {
                high = price;
            } else {
                std::mem::swap(&mut self.last, &mut self.asked);
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

    fn ask(&mut self, price: f64) -> Part {
        let mut sum = Part::default();
        for tenant in 0..self.tenants.len() {
            let best = self.best(tenant, price);
            sum.memory += best.memory;
            sum.bandwidth += best.bandwidth;
            self.asked[tenant] = best;
        }
        sum
    }

    /// The point of the window that is worth most.
    fn best(&self, tenant: usize, price: f64) -> Part {
        let (table, last) = (&self.tenants[tenant], self.last[tenant]);
        let budget = SPENT / self.tenants.len() as f64;
        let mut best = self.kept(last, price, budget);
        let mut most = table.throughput(best);
        let nearest = last.memory / self.step;
        let mut at = (nearest - WINDOW).ceil().max(1.0);
        while at <= nearest + WINDOW && at * self.step * price <= budget {
            let part = self.beside(at * self.step, price, budget);
            let throughput = table.throughput(part);
            if throughput > most {
                (best, most) = (part, throughput);
            }
            at += 1.0;
        }
        best
    }

    /// Returns whole steps of memory, and the bandwidth for the remaining budget.
    fn beside(&self, memory: f64, price: f64, budget: f64) -> Part {
        let can_pay = (budget - memory * price) / (1.0 - price);
        Part { memory, bandwidth: (can_pay / self.step).floor().max(0.0) * self.step }
    }

    /// The last share's memory, or, where that cannot be paid, as much of both as can.
    fn kept(&self, last: Part, price: f64, budget: f64) -> Part {
        if last.memory * price <= budget {
            return self.beside(last.memory, price, budget);
        }
        let part = budget / (last.memory * price + last.bandwidth * (1.0 - price));
        let whole = |of: f64| ((of * part / self.step).floor() * self.step).max(self.step);
        Part { memory: whole(last.memory), bandwidth: whole(last.bandwidth) }
    }
}
