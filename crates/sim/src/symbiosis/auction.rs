//! A market, watched (Spirit's figure 3): what all ask for together at which price, and the prices that were tried.
//!
//! Rounds are what tenants are asked: each is one that remembers. What one of them is asked alone, between rounds, is none.

use std::cell::RefCell;

use fairness::{
    market::{
        BudgetConstraint, Bundle, ClearingOptions, Demand, Limits, Market, Status, Supply, Tenant as Bidder,
        Utility, WarmStart,
    },
    profile::TenantUtility,
};

use super::{
    host::{Host, part},
    tenant::Tenant,
};

/// What everybody asks for at one price.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// The price of all memory; that of the link is what it lacks to 1.
    pub price: f64,
    /// Times an equal part of all money is a tenant's budget.
    pub dividend: f64,
    /// All of it together, as parts of what there is.
    pub sum: Bundle,
}

/// A market that was cleared once.
#[derive(Clone, Debug)]
pub struct Auction {
    /// How it came about.
    pub status: Status,
    /// What memory cost in the end.
    pub price: f64,
    /// Prices that were tried, as the market counts them.
    pub tried: u32,
    /// In the order in which prices were tried.
    pub rounds: Vec<Round>,
    /// What is asked for with equal budgets and no dividend, at prices from low to high.
    pub demand: Vec<Round>,
    /// Parts of a footprint and of the link, for each tenant.
    pub shares: Vec<Bundle>,
}

/// Steps of the price at which demand is looked at.
const PRICES: u32 = 50;

/// What tenants ask for that have an equal split so far.
///
/// # Panics
/// There is no tenant, or less than a MiB for them.
pub fn auction(tenants: &[Tenant], host: Host) -> Auction {
    let (supply, equal) = (host.supply(), host.equal(tenants.len()));
    let worth: Vec<TenantUtility> = tenants.iter().map(|tenant| host.learnt(tenant, equal)).collect();
    let heard = RefCell::new(Vec::new());
    let bidder = |(who, worth)| Bidder::new(1.0, supply, Remembers { who, worth, supply, heard: &heard });
    let bidders: Vec<_> = worth.iter().enumerate().map(bidder).collect();
    let market = Market::new(supply, &bidders).expect("tenants with equal weights and without limits");
    let outcome = market.clear(ClearingOptions::default());
    let tried = usize::try_from(outcome.rounds).expect("a number of prices");
    let mut rounds = rounds(&heard.borrow(), tenants.len());
    rounds.truncate(tried);
    let price = |step| f64::from(step) / f64::from(PRICES);
    Auction {
        status: outcome.status,
        price: outcome.memory_price,
        tried: outcome.rounds,
        rounds,
        demand: (1..PRICES).map(|step| asked_at(price(step), &worth, supply)).collect(),
        shares: outcome.shares.iter().map(part).collect(),
    }
}

/// What all ask for at a price, each with its equal part of the money.
fn asked_at(price: f64, worth: &[TenantUtility], supply: Supply) -> Round {
    let all = Bundle::from(supply.all());
    let prices =
        fairness::market::Prices { memory: price / all.memory, bandwidth: (1.0 - price) / all.bandwidth };
    let purse = BudgetConstraint { budget: 1.0 / worth.len() as f64, prices };
    let within = Limits { min: Bundle::default(), max: all };
    let bundles = worth.iter().map(|worth| worth.demand(&purse, &within, &mut WarmStart::default()).bundle);
    Round { price, dividend: 1.0, sum: sum(bundles, supply) }
}

fn sum(bundles: impl Iterator<Item = Bundle>, supply: Supply) -> Bundle {
    let all = Bundle::from(supply.all());
    bundles.fold(Bundle::default(), |sum, bundle| Bundle {
        memory: sum.memory + bundle.memory / all.memory,
        bandwidth: sum.bandwidth + bundle.bandwidth / all.bandwidth,
    })
}

/// What one was asked, and what it asked for.
#[derive(Clone, Copy, Debug)]
struct Heard {
    who: usize,
    /// Of all memory.
    price: f64,
    budget: f64,
    bundle: Bundle,
    supply: Supply,
}

/// A tenant that remembers what it was asked.
struct Remembers<'a> {
    who: usize,
    worth: &'a TenantUtility,
    supply: Supply,
    heard: &'a RefCell<Vec<Heard>>,
}

impl Utility for Remembers<'_> {
    fn value(&self, bundle: Bundle) -> f64 {
        self.worth.value(bundle)
    }

    fn demand(&self, purse: &BudgetConstraint, within: &Limits, mark: &mut WarmStart) -> Demand {
        let asked = self.worth.demand(purse, within, mark);
        self.heard.borrow_mut().push(Heard {
            who: self.who,
            price: purse.prices.memory * self.supply.memory_mib as f64,
            budget: purse.budget,
            bundle: asked.bundle,
            supply: self.supply,
        });
        asked
    }
}

/// Those questions that went to all, one after the other. Where a price was asked for with several dividends in a row, the last is that of the round.
fn rounds(heard: &[Heard], tenants: usize) -> Vec<Round> {
    let mut rounds: Vec<Round> = Vec::new();
    let mut rest = heard;
    while rest.len() >= tenants {
        let (all, after) = rest.split_at(tenants);
        let is_round = all.iter().enumerate().all(|(who, one)| one.who == who && one.price == all[0].price);
        if !is_round {
            rest = &rest[1..];
            continue;
        }
        let round = Round {
            price: all[0].price,
            dividend: all[0].budget * tenants as f64,
            sum: sum(all.iter().map(|one| one.bundle), all[0].supply),
        };
        match rounds.last_mut() {
            Some(last) if last.price == round.price => *last = round,
            _ => rounds.push(round),
        }
        rest = after;
    }
    rounds
}
