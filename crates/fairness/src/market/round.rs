//! One round of the auction: what everybody asks for at one price, and the dividend that spends what some do not want.

use units::limits::{DIVIDEND_ROUNDS_MAX, WEIGHT_FRACTION_MIN};

use super::{
    Market,
    goods::{Bundle, Prices},
    utility::{Asked, Limits, Mark, Purse, Utility},
};

/// Of a budget, what is as good as spent.
const KEPT: f64 = 1e-9;

/// So many tenants are told that they will be asked soon, and then are asked: what they look at is on its way from memory, for all of them at once.
const AHEAD: usize = 64;
/// Of memory, what two purchases with the same bandwidth may differ by that are the same in kind.
const NEAR: f64 = 1e-3;

/// What everybody asks for at one price.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    /// The price of all memory; that of all bandwidth is what it lacks to 1.
    pub price: f64,
    /// Times its weight is a tenant's budget.
    pub dividend: f64,
    /// All of it together, as parts of the supply.
    pub sum: Bundle,
    /// What each of those that were asked asks for.
    pub bundles: Vec<Bundle>,
}

/// Who is asked, and what the others ask for.
#[derive(Debug)]
pub(super) struct Crowd {
    /// Who, in order.
    pub asked: Vec<usize>,
    /// From which dividend on.
    from: f64,
    /// Of the others, those that spend all that they have and ask for so much memory, whatever the price; the rest is for bandwidth.
    of_memory: Fixed,
    /// The same where it is so much bandwidth.
    of_bandwidth: Fixed,
    /// What those ask for that keep some of their money, whatever the price.
    content: Bundle,
}

/// What tenants ask for of a good together, whatever it costs.
#[derive(Debug, Default)]
struct Fixed {
    amount: f64,
    /// Their weights, as parts of all.
    weight: f64,
}

impl Fixed {
    fn add(&mut self, amount: f64, weight: f64) {
        self.amount += amount;
        self.weight += weight;
    }

    /// What the rest of their money buys of the other good.
    fn rest(&self, dividend: f64, price: f64, other_price: f64) -> f64 {
        if self.weight > 0.0 { (dividend * self.weight - price * self.amount) / other_price } else { 0.0 }
    }
}

impl Crowd {
    /// All of so many are asked.
    pub fn all(tenants: usize) -> Self {
        Self {
            asked: (0..tenants).collect(),
            from: 1.0,
            of_memory: Fixed::default(),
            of_bandwidth: Fixed::default(),
            content: Bundle::default(),
        }
    }

    /// All are asked once more at a price whose dividend is known; not again in the memory that there is for it.
    pub fn ask_all_from(&mut self, tenants: usize, dividend: f64) {
        let mut asked = std::mem::take(&mut self.asked);
        asked.clear();
        asked.extend(0..tenants);
        *self = Self { asked, from: dividend, ..Self::all(0) };
    }

    /// Between two prices those are no longer asked that do the same at both; rounds at both forget them, too.
    pub fn settle<U: Utility>(&mut self, market: &Market<'_, U>, low: &mut Round, high: &mut Round) {
        self.from = low.dividend.min(high.dividend);
        let (cheap, dear) = (market.prices(low.price), market.prices(high.price));
        let mut kept = 0;
        for at in 0..self.asked.len() {
            let (tenant, one, other) = (self.asked[at], low.bundles[at], high.bundles[at]);
            let weight = market.weight(tenant);
            let contents = (low.is_content(one, cheap, weight), high.is_content(other, dear, weight));
            let is_left_out = market.tenants[tenant].utility.is_convex()
                && self.leaves_out((one, contents.0), (other, contents.1), weight);
            if !is_left_out {
                (self.asked[kept], low.bundles[kept], high.bundles[kept]) = (tenant, one, other);
                kept += 1;
            }
        }
        self.asked.truncate(kept);
        low.bundles.truncate(kept);
        high.bundles.truncate(kept);
    }

    /// Whether a tenant does the same with both purchases, content or not; then that is what it will do.
    fn leaves_out(&mut self, one: (Bundle, bool), other: (Bundle, bool), weight: f64) -> bool {
        // Further apart, bandwidth mostly is not the same between.
        let is_near = || (one.0.memory - other.0.memory).abs() <= NEAR * other.0.memory;
        match (one, other) {
            ((one, true), (other, true)) if one == other => self.content.add(one),
            ((one, false), (other, false)) if one.memory == other.memory => {
                self.of_memory.add(one.memory, weight);
            }
            ((one, false), (other, false)) if one.bandwidth == other.bandwidth && is_near() => {
                self.of_bandwidth.add(one.bandwidth, weight);
            }
            _ => return false,
        }
        true
    }

    /// What those do that are not asked.
    fn spending(&self, prices: Prices, dividend: f64) -> Spending {
        let Self { of_memory, of_bandwidth, content, .. } = self;
        let mut sum = *content;
        sum.add(Bundle {
            memory: of_memory.amount,
            bandwidth: of_memory.rest(dividend, prices.memory, prices.bandwidth),
        });
        sum.add(Bundle {
            memory: of_bandwidth.rest(dividend, prices.bandwidth, prices.memory),
            bandwidth: of_bandwidth.amount,
        });
        Spending { sum, by_content: prices.of(*content), eager: of_memory.weight + of_bandwidth.weight }
    }
}

/// Sums over tenants that were asked with one dividend.
#[derive(Clone, Copy, Debug, Default)]
struct Spending {
    sum: Bundle,
    /// Spent by those that keep some of their money.
    by_content: f64,
    /// Weight of those that do not.
    eager: f64,
}

impl Spending {
    /// The dividend that would spend all, as long as nobody thinks otherwise. If nobody keeps anything it is 1, whatever weights add up to in the last bits.
    fn due(&self) -> f64 {
        if 1.0 - self.eager < WEIGHT_FRACTION_MIN / 2.0 { 1.0 } else { (1.0 - self.by_content) / self.eager }
    }

    fn spent(&self, dividend: f64) -> f64 {
        self.by_content + self.eager * dividend
    }
}

impl Round {
    /// Asks everybody. The dividend is the smallest with which all money is spent, or nobody wants to spend more.
    ///
    /// Weights add up to 1, and so do budgets without a dividend: whoever is eager spends all that it has, so the dividend that would spend the rest
    /// is known at once; it may make more tenants content, and then there is a next.
    pub fn ask<U: Utility>(&mut self, market: &Market<'_, U>, crowd: &Crowd, price: f64, marks: &mut [Mark]) {
        self.price = price;
        self.dividend = crowd.from;
        let mut spending = self.ask_with(market, crowd, self.dividend, marks);
        let (mut more, mut asked) = (spending.due(), self.dividend);
        if more < self.dividend * (1.0 - 1e-12) && self.dividend > 1.0 {
            // More than there is: it is a smaller one.
            self.dividend = 1.0;
            (spending, asked) = (self.ask_with(market, crowd, 1.0, marks), 1.0);
            more = spending.due();
        }
        for _ in 0..DIVIDEND_ROUNDS_MAX {
            if !more.is_finite() || more <= self.dividend * (1.0 + 1e-12) {
                break;
            }
            let next = self.ask_with(market, crowd, more, marks);
            asked = more;
            if next.spent(more) <= 1.0 + 1e-12 {
                (spending, self.dividend) = (next, more);
                more = spending.due();
            } else {
                // Somebody who was content found use for more. If a smaller dividend does not suit either, it was all at once: with less, not all is
                // spent; with more, more than there is.
                more = if next.due() < more { next.due() } else { self.dividend };
            }
        }
        if asked != self.dividend {
            self.ask_with(market, crowd, self.dividend, marks);
        }
    }

    /// Those that were not asked, as they were at a price so near that it is the same to them.
    pub fn complete<U: Utility>(&mut self, market: &Market<'_, U>, asked: &[usize], near: &Self) {
        let bundles = self.bundles.clone();
        self.bundles.clone_from(&near.bundles);
        self.sum = near.sum;
        for (tenant, bundle) in asked.iter().copied().zip(bundles) {
            self.sum.add(market.part(bundle.minus(near.bundles[tenant])));
            self.bundles[tenant] = bundle;
        }
    }

    /// Whether who bought this at these prices keeps some of its money.
    fn is_content(&self, bundle: Bundle, prices: Prices, weight: f64) -> bool {
        let budget = self.dividend * weight;
        prices.of(bundle) < (1.0 - KEPT) * budget
    }

    fn ask_with<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        crowd: &Crowd,
        dividend: f64,
        marks: &mut [Mark],
    ) -> Spending {
        let prices = market.prices(self.price);
        let mut spending = crowd.spending(prices, dividend);
        self.bundles.clear();
        self.bundles.reserve_exact(crowd.asked.len());
        for tenants in crowd.asked.chunks(AHEAD) {
            if marks[tenants[0]].is_new() {
                tenants.iter().for_each(|tenant| market.tenants[*tenant].utility.look_ahead(&marks[*tenant]));
            }
            for tenant in tenants.iter().copied() {
                let Asked { bundle, content } = market.ask(tenant, prices, dividend, &mut marks[tenant]);
                if content {
                    spending.by_content += prices.of(bundle);
                } else {
                    spending.eager += market.weight(tenant);
                }
                spending.sum.add(bundle);
                self.bundles.push(bundle);
            }
        }
        self.sum = market.part(spending.sum);
        spending.by_content /= market.part;
        spending.eager /= market.part;
        spending
    }
}

impl<U: Utility> Market<'_, U> {
    /// What one tenant asks for.
    // Into the loop over all tenants, where what depends on prices alone is reckoned once.
    #[inline(always)]
    pub(super) fn ask(&self, tenant: usize, prices: Prices, dividend: f64, mark: &mut Mark) -> Asked {
        let purse = Purse { budget: dividend * self.weight(tenant), prices };
        self.tenants[tenant].utility.asks(&purse, &self.limits(tenant), mark)
    }
}

impl<U> Market<'_, U> {
    /// Prices of units, where all memory costs so much.
    pub(super) fn prices(&self, memory: f64) -> Prices {
        let all = Bundle::from(self.supply.all());
        Prices { memory: memory / all.memory, bandwidth: (1.0 - memory) / all.bandwidth }
    }

    pub(super) fn limits(&self, tenant: usize) -> Limits {
        let one = &self.tenants[tenant];
        Limits { least: one.least.into(), most: one.most.into() }
    }

    /// A bundle as parts of what there is for these tenants.
    pub(super) fn part(&self, of: Bundle) -> Bundle {
        let all = Bundle::from(self.supply.all());
        Bundle {
            memory: of.memory / (all.memory * self.part),
            bandwidth: of.bandwidth / (all.bandwidth * self.part),
        }
    }
}
