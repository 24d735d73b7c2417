//! Refinement: trades between tenants after clearing that raise the geometric mean of throughputs
//! while sharing incentive holds. Spirit has no such step.
//!
//! A market compares preferences but not their intensity: a tenant that doubles its throughput by
//! more memory pays the same price as one that gains little. A trade moves memory from one tenant,
//! or group of equal tenants, to another, and bandwidth in either direction or not at all. It is
//! made if the geometric mean rises and each tenant keeps its guaranteed throughput; with
//! `envy_free`, also only if no tenant comes to envy another.

use units::limits::{REFINEMENT_TENANTS_MAX, REFINEMENTS_MAX, TRADE_CANDIDATES_MAX};

use super::{
    Market, Outcome,
    goods::Bundle,
    rounding,
    split::{Table, best_split},
    utility::Utility,
};

/// Amounts moved by one trade, in units of `STEP`. Bandwidth also moves in the other direction.
const STEPS: [f64; 4] = [0.0, 0.25, 2.0, 16.0];
/// Unit of a trade, as a fraction of the supply.
const STEP: f64 = 1.0 / 200.0;
/// Number of moves: each step in both directions; the step of 0 counts once.
const MOVE_COUNT: usize = 2 * STEPS.len() - 1;
/// Smallest gain of the logarithm of the geometric mean for which a trade is made.
const LOG_MEAN_GAIN_MIN: f64 = 1e-5;
/// Approximate number of steps of the coarse grid. It is rounded to a multiple of the number of
/// tenants, so that the fair share of equal weights is on the grid. For other weights the grid may
/// contain no split that satisfies sharing incentive.
const COARSE_STEPS: usize = 96;
/// Relative rounding error of throughputs.
const VALUE_ROUNDING: f64 = 1e-12;
/// Largest relative envy that counts as none.
const ENVY_MAX: f64 = 1e-6;

/// Options of [`Market::refine`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RefineOptions {
    /// Whether trades must keep the allocation free of envy. Without it the mean may rise further;
    /// the certificate reports the resulting envy.
    pub envy_free: bool,
    /// Safety margin for errors of estimated throughputs: each tenant keeps the throughput of the
    /// market outcome or, if that is less, of its fair share plus this relative margin.
    pub margin: f64,
}

impl<U: Utility> Market<'_, U> {
    /// Raises the geometric mean of throughputs of an outcome of this market by trades. Does
    /// nothing above [`REFINEMENT_TENANTS_MAX`] tenants.
    pub fn refine(&self, outcome: &mut Outcome, options: RefineOptions) {
        if self.tenants.len() > REFINEMENT_TENANTS_MAX {
            return;
        }
        let mut best = Refinement::of(self, &outcome.bought, options);
        best.run();
        if !options.envy_free
            && let Some(coarse) = best.coarse()
        {
            let mut other = Refinement::of(self, &coarse, options);
            other.run();
            if other.mean() > best.mean() {
                other.trades += 1; // the move to the coarse split
                best = other;
            }
        }
        outcome.refinements = best.trades;
        outcome.bought = best.bundles();
        outcome.shares = rounding::round_to_units(self, &outcome.bought);
    }
}

impl<U: Utility> Market<'_, U> {
    /// Returns whether two tenants have equal weights and equal values at all probed bundles.
    fn are_equivalent(&self, one: usize, other: usize) -> bool {
        let all = Bundle::from(self.supply.all());
        let parts = || PROBES.into_iter().map(|part| part / self.tenants.len() as f64);
        let mut probes = parts().flat_map(|memory| parts().map(move |bandwidth| (memory, bandwidth)));
        let value = |tenant: usize, bundle| self.tenants[tenant].utility.value(bundle);
        self.tenants[one].weight == self.tenants[other].weight
            && probes.all(|(memory, bandwidth)| {
                let bundle = Bundle { memory: all.memory * memory, bandwidth: all.bandwidth * bandwidth };
                value(one, bundle) == value(other, bundle)
            })
    }
}

/// Amounts of each good at which two tenants are compared, in equal shares.
const PROBES: [f64; 4] = [0.3, 0.9, 1.7, 3.1];

/// Tenants of equal weight, utility and bundle. Trades keep their bundles equal.
struct Group {
    tenants: Vec<usize>,
    bundle: Bundle,
    /// Weighted logarithms of throughput for each move of memory and bandwidth; `-∞` if a tenant
    /// would fall below its guaranteed throughput.
    log_values: [[f64; MOVE_COUNT]; MOVE_COUNT],
}

struct Refinement<'a, 'b, U> {
    market: &'a Market<'b, U>,
    groups: Vec<Group>,
    options: RefineOptions,
    /// Guaranteed throughput of each tenant.
    value_min: Vec<f64>,
    /// Number of trades made.
    trades: u32,
    /// Unit of a trade in both goods.
    step: Bundle,
}

/// Move of memory from one group to another and of bandwidth in the other direction. `memory` and
/// `bandwidth` are indices into [`Group::log_values`].
#[derive(Clone, Copy)]
struct Trade {
    from: usize,
    to: usize,
    memory: usize,
    bandwidth: usize,
    gain: f64,
}

/// Index of the move of nothing.
const NO_MOVE: usize = STEPS.len() - 1;

/// Returns the number of steps of a move.
fn steps_of(move_index: usize) -> f64 {
    if move_index < NO_MOVE { -STEPS[NO_MOVE - move_index] } else { STEPS[move_index - NO_MOVE] }
}

const fn opposite(move_index: usize) -> usize {
    MOVE_COUNT - 1 - move_index
}

impl<'a, 'b, U: Utility> Refinement<'a, 'b, U> {
    fn of(market: &'a Market<'b, U>, bought: &[Bundle], options: RefineOptions) -> Self {
        let value = |tenant: usize, bundle| market.tenants[tenant].utility.value(bundle);
        let value_min = |tenant: usize| {
            value(tenant, bought[tenant])
                .min(value(tenant, market.fair_share(tenant)) * (1.0 + options.margin.max(0.0)))
        };
        let value_min = (0..bought.len()).map(value_min).collect();
        let mut groups: Vec<Group> = Vec::new();
        for (tenant, bundle) in bought.iter().enumerate() {
            let is_equivalent = |group: &&mut Group| {
                group.bundle == *bundle && market.are_equivalent(group.tenants[0], tenant)
            };
            match groups.iter_mut().find(is_equivalent) {
                Some(group) => group.tenants.push(tenant),
                None => groups.push(Group {
                    tenants: vec![tenant],
                    bundle: *bundle,
                    log_values: [[0.0; MOVE_COUNT]; MOVE_COUNT],
                }),
            }
        }
        let all = Bundle::from(market.supply.all());
        let step = Bundle { memory: all.memory * STEP, bandwidth: all.bandwidth * STEP };
        let mut refinement = Self { market, groups, options, value_min, trades: 0, step };
        (0..refinement.groups.len()).for_each(|group| refinement.update_log_values(group));
        refinement
    }

    fn run(&mut self) {
        while self.trades < REFINEMENTS_MAX && self.step() {
            self.trades += 1;
        }
    }

    /// Returns the logarithm of the geometric mean.
    fn mean(&self) -> f64 {
        self.groups.iter().map(|group| group.log_values[NO_MOVE][NO_MOVE]).sum()
    }

    /// Returns the best split on a coarse grid. Small trades may not reach it if utilities jump.
    fn coarse(&self) -> Option<Vec<Bundle>> {
        let tenants = self.value_min.len();
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
            cells.map(|cell| self.log_value(tenant, bundle(cell)) as f32).collect()
        };
        let tables: Vec<Table> = (0..tenants).map(table).collect();
        best_split(&tables, steps).map(|split| split.into_iter().map(bundle).collect())
    }

    /// Returns the bundle of each tenant of a group after a move shared by the group.
    fn bundle_after(&self, group: usize, memory: usize, bandwidth: usize) -> Bundle {
        let Group { tenants, bundle, .. } = &self.groups[group];
        let each = 1.0 / tenants.len() as f64;
        Bundle {
            memory: bundle.memory + steps_of(memory) * self.step.memory * each,
            bandwidth: bundle.bandwidth + steps_of(bandwidth) * self.step.bandwidth * each,
        }
    }

    fn update_log_values(&mut self, group: usize) {
        for memory in 0..MOVE_COUNT {
            for bandwidth in 0..MOVE_COUNT {
                self.groups[group].log_values[memory][bandwidth] =
                    self.log_value_of_group(group, self.bundle_after(group, memory, bandwidth));
            }
        }
    }

    fn log_value_of_group(&self, group: usize, bundle: Bundle) -> f64 {
        self.groups[group].tenants.iter().map(|tenant| self.log_value(*tenant, bundle)).sum()
    }

    fn log_value(&self, tenant: usize, bundle: Bundle) -> f64 {
        let limits = self.market.limits(tenant);
        let fits = bundle.memory >= limits.min.memory
            && bundle.memory <= limits.max.memory
            && bundle.bandwidth >= limits.min.bandwidth
            && bundle.bandwidth <= limits.max.bandwidth;
        let value = if fits { self.market.tenants[tenant].utility.value(bundle) } else { -1.0 };
        if value >= self.value_min[tenant] * (1.0 - VALUE_ROUNDING) {
            self.market.weight(tenant) * value.ln()
        } else {
            f64::NEG_INFINITY
        }
    }

    /// Makes the best acceptable trade. Returns whether there was one.
    fn step(&mut self) -> bool {
        let mut trades = self.trades();
        trades.sort_by(|one, other| other.gain.total_cmp(&one.gain));
        let Some(trade) = trades
            .into_iter()
            .take(TRADE_CANDIDATES_MAX)
            .find(|trade| !self.options.envy_free || self.keeps_envy_free(trade))
        else {
            return false;
        };
        self.groups[trade.from].bundle =
            self.bundle_after(trade.from, opposite(trade.memory), trade.bandwidth);
        self.groups[trade.to].bundle = self.bundle_after(trade.to, trade.memory, opposite(trade.bandwidth));
        self.update_log_values(trade.from);
        self.update_log_values(trade.to);
        true
    }

    /// Returns all trades that raise the mean.
    fn trades(&self) -> Vec<Trade> {
        let mut trades = Vec::new();
        for (from, giver) in self.groups.iter().enumerate() {
            for (to, receiver) in self.groups.iter().enumerate().filter(|(to, _)| *to != from) {
                let now = giver.log_values[NO_MOVE][NO_MOVE] + receiver.log_values[NO_MOVE][NO_MOVE];
                for memory in NO_MOVE..MOVE_COUNT {
                    for bandwidth in 0..MOVE_COUNT {
                        let then = giver.log_values[opposite(memory)][bandwidth]
                            + receiver.log_values[memory][opposite(bandwidth)];
                        if then - now > LOG_MEAN_GAIN_MIN {
                            trades.push(Trade { from, to, memory, bandwidth, gain: then - now });
                        }
                    }
                }
            }
        }
        trades
    }

    fn keeps_envy_free(&self, trade: &Trade) -> bool {
        let giver = self.bundle_after(trade.from, opposite(trade.memory), trade.bandwidth);
        let receiver = self.bundle_after(trade.to, trade.memory, opposite(trade.bandwidth));
        let bundle = |group: usize| match group {
            group if group == trade.from => giver,
            group if group == trade.to => receiver,
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
        // Only the two groups of the trade change, so that envy can only arise from or toward them.
        groups.clone().all(|group| !envies(group, trade.from) && !envies(group, trade.to))
            && groups.clone().all(|group| !envies(trade.from, group) && !envies(trade.to, group))
    }

    fn bundles(self) -> Vec<Bundle> {
        let mut bundles = vec![Bundle::default(); self.value_min.len()];
        for group in &self.groups {
            group.tenants.iter().for_each(|tenant| bundles[*tenant] = group.bundle);
        }
        bundles
    }
}
