//! One round of the auction: what everybody asks for at one price, and the dividend that spends what some do not want.

use units::limits::DIVIDENDS_TRIED_MAX;

use super::{
    Market,
    goods::{Bundle, Prices},
    utility::{Asked, Limits, Mark, Purse, Utility},
};

/// What everybody asks for at one price.
#[derive(Clone, Debug, Default)]
pub(super) struct Round {
    /// The price of all memory; that of all bandwidth is what it lacks to 1.
    pub price: f64,
    /// Times its weight is a tenant's budget.
    pub dividend: f64,
    /// All of it together, as parts of the supply.
    pub sum: Bundle,
    /// What each asks for.
    pub bundles: Vec<Bundle>,
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
    /// The dividend that would spend all, as long as nobody thinks otherwise.
    fn due(&self) -> f64 {
        (1.0 - self.by_content) / self.eager
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
    pub fn ask<U: Utility>(&mut self, market: &Market<'_, U>, price: f64, marks: &mut [Mark]) {
        self.price = price;
        self.dividend = 1.0;
        let mut spending = self.ask_with(market, 1.0, marks);
        let (mut more, mut asked) = (spending.due(), 1.0);
        for _ in 0..DIVIDENDS_TRIED_MAX {
            if !more.is_finite() || more <= self.dividend * (1.0 + 1e-12) {
                break;
            }
            let next = self.ask_with(market, more, marks);
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
            self.ask_with(market, self.dividend, marks);
        }
    }

    fn ask_with<U: Utility>(
        &mut self,
        market: &Market<'_, U>,
        dividend: f64,
        marks: &mut [Mark],
    ) -> Spending {
        let prices = market.prices(self.price);
        let mut spending = Spending::default();
        self.bundles.clear();
        for (tenant, mark) in marks.iter_mut().enumerate() {
            let Asked { bundle, content } = market.ask(tenant, prices, dividend, mark);
            if content {
                spending.by_content += prices.of(bundle);
            } else {
                spending.eager += market.weight(tenant);
            }
            spending.sum.add(bundle);
            self.bundles.push(bundle);
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
