//! Recording of a market run (Spirit, figure 3): the prices tried and the aggregate demand at each
//! of these prices.
//!
//! In a round, the market queries the demand of every tenant once. Queries to single tenants
//! between rounds are not part of a round.

use std::cell::RefCell;

use fairness::market::{
    BudgetConstraint, Bundle, Demand, DemandHint, Limits, Market, Status, Supply, Tenant as Bidder, Utility,
};

use super::{
    host::{Host, to_bundle},
    tenant::Tenant,
    utility::TraceUtility,
};

/// Aggregate demand of all tenants at one price.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// Price of all memory, from 0 to 1. The price of the whole link is 1 minus this price.
    pub price: f64,
    /// Budget of each tenant, relative to an equal share of all money.
    pub dividend: f64,
    /// Aggregate demand for memory and bandwidth, as fractions of the supply.
    pub sum: Bundle,
}

/// Record of one market run: its rounds and its result.
#[derive(Clone, Debug)]
pub struct Auction {
    /// Result status of the market clearing.
    pub status: Status,
    /// Clearing price of all memory, from 0 to 1.
    pub price: f64,
    /// Number of prices tried, as reported by the market.
    pub tried: u32,
    /// Rounds, in the order of the prices tried.
    pub rounds: Vec<Round>,
    /// Demand curve with equal budgets and no dividend, by ascending price.
    pub demand: Vec<Round>,
    /// Share of each tenant: memory in footprints, bandwidth as a fraction of the link.
    pub shares: Vec<Bundle>,
}

/// Number of price steps from 0 to 1 in the demand curve.
const PRICE_STEPS: u32 = 50;

/// Runs the market once and records its rounds. The tenants start with an equal split.
///
/// # Panics
/// Panics if `tenants` is empty or the host has less than 1 MiB of memory.
pub fn auction(tenants: &[Tenant], host: Host) -> Auction {
    let (supply, equal) = (host.supply(), host.equal(tenants.len()));
    let utilities: Vec<TraceUtility> =
        tenants.iter().map(|tenant| host.measured_utility(tenant, equal)).collect();
    let queries = RefCell::new(Vec::new());
    let bidder = |(tenant, utility)| {
        Bidder::new(1.0, supply, RecordingUtility { tenant, utility, supply, queries: &queries })
    };
    let bidders: Vec<_> = utilities.iter().enumerate().map(bidder).collect();
    let market = Market::new(supply, &bidders).expect("tenants with equal weights and without limits");
    let outcome = market.clear(0);
    let tried = usize::try_from(outcome.rounds).expect("the number of rounds fits usize");
    let mut rounds = group_into_rounds(&queries.borrow(), tenants.len());
    rounds.truncate(tried);
    let price = |step| f64::from(step) / f64::from(PRICE_STEPS);
    Auction {
        status: outcome.status,
        price: outcome.memory_price,
        tried: outcome.rounds,
        rounds,
        demand: (1..PRICE_STEPS).map(|step| demand_at_price(price(step), &utilities, supply)).collect(),
        shares: outcome.shares.iter().map(to_bundle).collect(),
    }
}

/// Returns the aggregate demand at a price if all tenants have equal budgets.
fn demand_at_price(price: f64, utilities: &[TraceUtility], supply: Supply) -> Round {
    let all = Bundle::from(supply.all());
    let prices =
        fairness::market::Prices { memory: price / all.memory, bandwidth: (1.0 - price) / all.bandwidth };
    let budget_constraint = BudgetConstraint { budget: 1.0 / utilities.len() as f64, prices };
    let limits = Limits { min: Bundle::default(), max: all };
    let bundles = utilities
        .iter()
        .map(|utility| utility.demand(&budget_constraint, &limits, &mut DemandHint::default()).bundle);
    Round { price, dividend: 1.0, sum: sum_as_fractions(bundles, supply) }
}

fn sum_as_fractions(bundles: impl Iterator<Item = Bundle>, supply: Supply) -> Bundle {
    let all = Bundle::from(supply.all());
    bundles.fold(Bundle::default(), |sum, bundle| Bundle {
        memory: sum.memory + bundle.memory / all.memory,
        bandwidth: sum.bandwidth + bundle.bandwidth / all.bandwidth,
    })
}

/// Query of the market to one tenant, and the demand that the tenant returned.
#[derive(Clone, Copy, Debug)]
struct DemandQuery {
    tenant: usize,
    /// Price of all memory in this query, from 0 to 1.
    price: f64,
    budget: f64,
    bundle: Bundle,
    supply: Supply,
}

/// Utility of a tenant that records each query of the market.
struct RecordingUtility<'a> {
    tenant: usize,
    utility: &'a TraceUtility,
    supply: Supply,
    queries: &'a RefCell<Vec<DemandQuery>>,
}

impl Utility for RecordingUtility<'_> {
    fn value(&self, bundle: Bundle) -> f64 {
        self.utility.value(bundle)
    }

    fn demand(&self, budget_constraint: &BudgetConstraint, limits: &Limits, hint: &mut DemandHint) -> Demand {
        let demand = self.utility.demand(budget_constraint, limits, hint);
        self.queries.borrow_mut().push(DemandQuery {
            tenant: self.tenant,
            price: budget_constraint.prices.memory * Bundle::from(self.supply.all()).memory,
            budget: budget_constraint.budget,
            bundle: demand.bundle,
            supply: self.supply,
        });
        demand
    }
}

/// Groups the queries into rounds. A round is a sequence of queries to all tenants at one price. Of
/// successive rounds with the same price and different dividends, only the last is kept.
fn group_into_rounds(queries: &[DemandQuery], tenants: usize) -> Vec<Round> {
    let mut rounds: Vec<Round> = Vec::new();
    let mut rest = queries;
    while rest.len() >= tenants {
        let (all, after) = rest.split_at(tenants);
        let is_round = all
            .iter()
            .enumerate()
            .all(|(tenant, query)| query.tenant == tenant && query.price == all[0].price);
        if !is_round {
            rest = &rest[1..];
            continue;
        }
        let round = Round {
            price: all[0].price,
            dividend: all[0].budget * tenants as f64,
            sum: sum_as_fractions(all.iter().map(|query| query.bundle), all[0].supply),
        };
        match rounds.last_mut() {
            Some(last) if last.price == round.price => *last = round,
            _ => rounds.push(round),
        }
        rest = after;
    }
    rounds
}
