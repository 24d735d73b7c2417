//! Beyond the market: of all shares with which nobody is worse off than with an equal split, some with a larger geometric mean of throughputs (Spirit has
//! no such step).
//!
//! A market knows what tenants prefer, not by how much: who gains twice as much by more memory pays the same for it. Here how much counts. Two tenants at
//! a time, or two groups of equals, some memory goes one way, and bandwidth either way or none, as long as the mean rises and the one that gives keeps what
//! it is due; and, if that is asked for, as long as nobody would rather have another's share.

use units::limits::{REFINEMENT_TENANTS_MAX, REFINEMENTS_MAX, TRADE_CANDIDATES_MAX};

use super::{
    Market, Outcome,
    goods::Bundle,
    split::{Table, best_split},
    units_of,
    utility::Utility,
};

/// How much changes hands at once, in 1/200 of all there is; of bandwidth also the other way.
const STEPS: [f64; 4] = [0.0, 0.25, 2.0, 16.0];
const STEP: f64 = 1.0 / 200.0;
/// What is moved: all of [`STEPS`] in both directions.
const MOVES: usize = 2 * STEPS.len() - 1;
/// What the logarithm of the geometric mean has to rise by.
const GAIN_MIN: f64 = 1e-5;
/// Steps of the coarse grid, about: with so many tenants that each has one of them, a fair share by equal weights is on it. With other weights there may be
/// nothing on it that harms nobody.
const COARSE_STEPS: usize = 96;
/// What a throughput may be below what is due by the last bits of its reckoning, relative.
const ROUNDING: f64 = 1e-12;
/// What envy of another's share is none, relative.
const ENVY_MAX: f64 = 1e-6;

/// What shares are refined for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aim {
    /// Nobody comes to envy another by a deal. Without it the mean may rise further: see the certificate's `envy`.
    pub without_envy: bool,
    /// Nobody gets less than an equal split and this more, relative, or what the market gave, whichever is less: how far throughputs may be off.
    pub margin: f64,
}

impl<U: Utility> Market<'_, U> {
    /// Changes an outcome of this market for a larger geometric mean of throughputs. Of a market with many tenants nothing changes.
    pub fn refine(&self, outcome: &mut Outcome, aim: Aim) {
        if self.tenants.len() > REFINEMENT_TENANTS_MAX {
            return;
        }
        let mut best = Refining::of(self, &outcome.bought, aim);
        best.run();
        if !aim.without_envy
            && let Some(coarse) = best.coarse()
        {
            let mut other = Refining::of(self, &coarse, aim);
            other.run();
            if other.mean() > best.mean() {
                other.deals += 1; // the leap there
                best = other;
            }
        }
        outcome.refinements = best.deals;
        outcome.bought = best.bundles();
        outcome.shares = units_of::shares(self, &outcome.bought);
    }
}

impl<U: Utility> Market<'_, U> {
    /// Whether two tenants have one weight and the same throughput wherever that is looked at.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        let all = Bundle::from(self.supply.all());
        let parts = || PROBES.into_iter().map(|part| part / self.tenants.len() as f64);
        let mut looked = parts().flat_map(|memory| parts().map(move |bandwidth| (memory, bandwidth)));
        let value = |tenant: usize, bundle| self.tenants[tenant].utility.value(bundle);
        self.tenants[one].weight == self.tenants[other].weight
            && looked.all(|(memory, bandwidth)| {
                let bundle = Bundle { memory: all.memory * memory, bandwidth: all.bandwidth * bandwidth };
                value(one, bundle) == value(other, bundle)
            })
    }
}

/// Where two tenants are compared, in equal shares.
const PROBES: [f64; 4] = [0.3, 0.9, 1.7, 3.1];

/// Tenants with one weight that bought the same and to whom everything is worth the same: they keep having the same.
struct Group {
    tenants: Vec<usize>,
    bundle: Bundle,
    /// The logarithms of their throughputs, weighted, by what is moved; nothing where somebody would have less than it is due.
    worth: [[f64; MOVES]; MOVES],
}

struct Refining<'a, 'b, U> {
    market: &'a Market<'b, U>,
    groups: Vec<Group>,
    aim: Aim,
    /// The least throughput of each tenant.
    due: Vec<f64>,
    /// Deals that were made.
    deals: u32,
    /// A step of all there is.
    step: Bundle,
}

/// Memory from one group to another, and bandwidth the other way: places in [`Group::worth`].
#[derive(Clone, Copy)]
struct Deal {
    from: usize,
    to: usize,
    memory: usize,
    bandwidth: usize,
    gain: f64,
}

/// Where nothing is moved.
const STAY: usize = STEPS.len() - 1;

/// How many steps a place stands for.
fn steps(place: usize) -> f64 {
    if place < STAY { -STEPS[STAY - place] } else { STEPS[place - STAY] }
}

const fn opposite(place: usize) -> usize {
    MOVES - 1 - place
}

impl<'a, 'b, U: Utility> Refining<'a, 'b, U> {
    fn of(market: &'a Market<'b, U>, bought: &[Bundle], aim: Aim) -> Self {
        let value = |tenant: usize, bundle| market.tenants[tenant].utility.value(bundle);
        let due = |tenant: usize| {
            value(tenant, bought[tenant])
                .min(value(tenant, market.fair(tenant)) * (1.0 + aim.margin.max(0.0)))
        };
        let due = (0..bought.len()).map(due).collect();
        let mut groups: Vec<Group> = Vec::new();
        for (tenant, bundle) in bought.iter().enumerate() {
            let is_like =
                |group: &&mut Group| group.bundle == *bundle && market.are_alike(group.tenants[0], tenant);
            match groups.iter_mut().find(is_like) {
                Some(group) => group.tenants.push(tenant),
                None => groups.push(Group {
                    tenants: vec![tenant],
                    bundle: *bundle,
                    worth: [[0.0; MOVES]; MOVES],
                }),
            }
        }
        let all = Bundle::from(market.supply.all());
        let step = Bundle { memory: all.memory * STEP, bandwidth: all.bandwidth * STEP };
        let mut refining = Self { market, groups, aim, due, deals: 0, step };
        (0..refining.groups.len()).for_each(|group| refining.weigh(group));
        refining
    }

    fn run(&mut self) {
        while self.deals < REFINEMENTS_MAX && self.step() {
            self.deals += 1;
        }
    }

    /// The logarithm of the geometric mean.
    fn mean(&self) -> f64 {
        self.groups.iter().map(|group| group.worth[STAY][STAY]).sum()
    }

    /// The best on a coarse grid, wherever it is: where throughputs leap, no small deals may lead there.
    fn coarse(&self) -> Option<Vec<Bundle>> {
        let tenants = self.due.len();
        let steps = (COARSE_STEPS / tenants).max(1) * tenants;
        let all = Bundle::from(self.market.supply.all());
        let part = |count: usize| count as f64 / steps as f64;
        let bundle = |(m, b): (usize, usize)| Bundle {
            memory: part(m) * all.memory,
            bandwidth: part(b) * all.bandwidth,
        };
        let table = |tenant: usize| -> Table {
            let cells = (0..=steps).flat_map(|m| (0..=steps).map(move |b| (m, b)));
            #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough to compare")]
            cells.map(|cell| self.worth_to(tenant, bundle(cell)) as f32).collect()
        };
        let tables: Vec<Table> = (0..tenants).map(table).collect();
        best_split(&tables, steps).map(|split| split.into_iter().map(bundle).collect())
    }

    /// What a group's bundle would be with some more, or less, for all of it.
    fn moved(&self, group: usize, memory: usize, bandwidth: usize) -> Bundle {
        let Group { tenants, bundle, .. } = &self.groups[group];
        let each = 1.0 / tenants.len() as f64;
        Bundle {
            memory: bundle.memory + steps(memory) * self.step.memory * each,
            bandwidth: bundle.bandwidth + steps(bandwidth) * self.step.bandwidth * each,
        }
    }

    fn weigh(&mut self, group: usize) {
        for memory in 0..MOVES {
            for bandwidth in 0..MOVES {
                self.groups[group].worth[memory][bandwidth] =
                    self.worth(group, self.moved(group, memory, bandwidth));
            }
        }
    }

    fn worth(&self, group: usize, bundle: Bundle) -> f64 {
        self.groups[group].tenants.iter().map(|tenant| self.worth_to(*tenant, bundle)).sum()
    }

    fn worth_to(&self, tenant: usize, bundle: Bundle) -> f64 {
        let limits = self.market.limits(tenant);
        let fits = bundle.memory >= limits.least.memory
            && bundle.memory <= limits.most.memory
            && bundle.bandwidth >= limits.least.bandwidth
            && bundle.bandwidth <= limits.most.bandwidth;
        let value = if fits { self.market.tenants[tenant].utility.value(bundle) } else { -1.0 };
        if value >= self.due[tenant] * (1.0 - ROUNDING) {
            self.market.weight(tenant) * value.ln()
        } else {
            f64::NEG_INFINITY
        }
    }

    /// The best deal that nobody has anything against; whether there was one.
    fn step(&mut self) -> bool {
        let mut deals = self.deals();
        deals.sort_by(|one, other| other.gain.total_cmp(&one.gain));
        let Some(deal) = deals
            .into_iter()
            .take(TRADE_CANDIDATES_MAX)
            .find(|deal| !self.aim.without_envy || self.is_envied_by_nobody(deal))
        else {
            return false;
        };
        self.groups[deal.from].bundle = self.moved(deal.from, opposite(deal.memory), deal.bandwidth);
        self.groups[deal.to].bundle = self.moved(deal.to, deal.memory, opposite(deal.bandwidth));
        self.weigh(deal.from);
        self.weigh(deal.to);
        true
    }

    /// All by which the mean rises.
    fn deals(&self) -> Vec<Deal> {
        let mut deals = Vec::new();
        for (from, giver) in self.groups.iter().enumerate() {
            for (to, taker) in self.groups.iter().enumerate().filter(|(to, _)| *to != from) {
                let now = giver.worth[STAY][STAY] + taker.worth[STAY][STAY];
                for memory in STAY..MOVES {
                    for bandwidth in 0..MOVES {
                        let then = giver.worth[opposite(memory)][bandwidth]
                            + taker.worth[memory][opposite(bandwidth)];
                        if then - now > GAIN_MIN {
                            deals.push(Deal { from, to, memory, bandwidth, gain: then - now });
                        }
                    }
                }
            }
        }
        deals
    }

    fn is_envied_by_nobody(&self, deal: &Deal) -> bool {
        let giver = self.moved(deal.from, opposite(deal.memory), deal.bandwidth);
        let taker = self.moved(deal.to, deal.memory, opposite(deal.bandwidth));
        let bundle = |group: usize| match group {
            group if group == deal.from => giver,
            group if group == deal.to => taker,
            group => self.groups[group].bundle,
        };
        let groups = 0..self.groups.len();
        let envies = |one: usize, other: usize| {
            one != other
                && self.groups[one].tenants.iter().any(|tenant| {
                    let value = |bundle| self.market.tenants[*tenant].utility.value(bundle);
                    let theirs = self.market.scaled(bundle(other), self.groups[other].tenants[0], *tenant);
                    value(theirs) > value(bundle(one)) * (1.0 + ENVY_MAX)
                })
        };
        // Others' shares are what they were: nobody else can have come to envy them.
        groups.clone().all(|group| !envies(group, deal.from) && !envies(group, deal.to))
            && groups.clone().all(|group| !envies(deal.from, group) && !envies(deal.to, group))
    }

    fn bundles(self) -> Vec<Bundle> {
        let mut bundles = vec![Bundle::default(); self.due.len()];
        for group in &self.groups {
            group.tenants.iter().for_each(|tenant| bundles[*tenant] = group.bundle);
        }
        bundles
    }
}
