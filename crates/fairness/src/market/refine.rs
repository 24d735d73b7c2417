//! Refinement: trades between tenants after clearing that raise the geometric mean of throughputs
//! and preserve sharing incentive. Spirit has no such step.
//!
//! A market takes account of preferences, but not of their intensity: a tenant that doubles its
//! throughput by more memory pays the same price as a tenant that gains little. A trade moves
//! memory from one tenant, or group of equal tenants, to another. It may also move bandwidth in
//! either direction. A trade must raise the geometric mean, each tenant must keep its guaranteed
//! throughput, and the trade must cause no envy.

use units::limits::{REFINEMENT_TENANTS_MAX, REFINEMENT_TRADES_MAX, TRADE_CANDIDATES_MAX};

use super::{
    Market, Outcome,
    goods::{Bundle, Share},
    rounding,
    utility::Utility,
};

/// Numbers of steps by which one trade may move a good.
const MOVE_STEPS: [f64; 4] = [0.0, 0.25, 2.0, 16.0];
/// Size of one step, as a fraction of the supply of a good.
const STEP_FRACTION: f64 = 1.0 / 200.0;
/// Number of possible moves of a good: each of `MOVE_STEPS` in both directions, with 0 counted
/// once.
const MOVE_COUNT: usize = 2 * MOVE_STEPS.len() - 1;
/// A trade is made only if it increases the logarithm of the geometric mean of throughputs by more
/// than this value.
const LOG_MEAN_GAIN_MIN: f64 = 1e-5;
/// Relative tolerance for rounding errors of throughputs.
const VALUE_ROUNDING_TOLERANCE: f64 = 1e-12;

impl<U: Utility> Market<'_, U> {
    /// Raises the geometric mean of throughputs of an outcome of this market by trades. Does
    /// nothing if there are more than [`REFINEMENT_TENANTS_MAX`] tenants, or if the result would
    /// violate sharing incentive or lower the mean after rounding to whole units.
    pub fn refine(&self, outcome: &mut Outcome) {
        if self.tenants.len() > REFINEMENT_TENANTS_MAX {
            return;
        }
        let mut refinement = Refinement::new(self, &outcome.shares);
        refinement.run();
        let (trades, bundles) = (refinement.trades, refinement.into_bundles());
        let shares = rounding::round_to_units(self, &bundles);
        let log_mean_gain = |shares: &[Share]| self.log_mean_gain(shares.iter().copied());
        let is_better = || log_mean_gain(&shares) >= log_mean_gain(&outcome.shares);
        if trades > 0 && self.are_shares_fair(&shares) && is_better() {
            (outcome.refinements, outcome.bought, outcome.shares) = (trades, bundles, shares);
        }
    }
}

impl<U: Utility> Market<'_, U> {
    /// Returns whether two tenants have equal weights and value all probed bundles equally.
    fn are_tenants_equivalent(&self, one: usize, other: usize) -> bool {
        let all = self.all();
        let parts = || PROBE_AMOUNTS.into_iter().map(|part| part / self.tenants.len() as f64);
        let mut probes = parts().flat_map(|memory| parts().map(move |bandwidth| (memory, bandwidth)));
        let value = |tenant: usize, bundle| self.value(tenant, bundle);
        self.tenants[one].weight == self.tenants[other].weight
            && probes.all(|(memory, bandwidth)| {
                let bundle = Bundle { memory: all.memory * memory, bandwidth: all.bandwidth * bandwidth };
                value(one, bundle) == value(other, bundle)
            })
    }
}

/// Amounts of each good at which the values of two tenants are compared, as multiples of an equal
/// share.
const PROBE_AMOUNTS: [f64; 4] = [0.3, 0.9, 1.7, 3.1];

/// Group of tenants with equal weights and utilities, and with shares that differ by at most one unit
/// of each good, because of rounding. A trade changes all their bundles equally.
struct Group {
    /// Indices of the tenants.
    tenants: Vec<usize>,
    /// Bundle of each of these tenants.
    bundle: Bundle,
    /// Sum of the weighted logarithms of throughput after each move of memory and of bandwidth.
    /// `-∞` if a tenant would have less than its guaranteed throughput.
    log_values: [[f64; MOVE_COUNT]; MOVE_COUNT],
}

/// State of a refinement.
struct Refinement<'a, 'b, U> {
    market: &'a Market<'b, U>,
    groups: Vec<Group>,
    /// Guaranteed throughput of each tenant.
    value_min: Vec<f64>,
    /// Number of trades made so far.
    trades: u32,
    /// Size of one step of both goods, in MiB and MB/s.
    step: Bundle,
}

/// Trade between two groups. `memory` and `bandwidth` are move indices (see [`move_steps`]).
#[derive(Clone, Copy)]
struct Trade {
    /// Index of the group that gives memory.
    from: usize,
    /// Index of the group that receives memory.
    to: usize,
    /// Move of memory of the group `to`.
    memory: usize,
    /// Move of bandwidth of the group `from`.
    bandwidth: usize,
    /// Increase of the logarithm of the weighted geometric mean of throughputs.
    gain: f64,
}

/// Index of the move that moves nothing.
const NO_MOVE_INDEX: usize = MOVE_STEPS.len() - 1;

/// Returns the number of steps by which a move changes the amount of a good, negative or positive.
/// `move_index` is an index into [`Group::log_values`].
fn move_steps(move_index: usize) -> f64 {
    if move_index < NO_MOVE_INDEX {
        -MOVE_STEPS[NO_MOVE_INDEX - move_index]
    } else {
        MOVE_STEPS[move_index - NO_MOVE_INDEX]
    }
}

/// Returns the index of the move by the same amount in the other direction.
const fn opposite_move(move_index: usize) -> usize {
    MOVE_COUNT - 1 - move_index
}

impl<'a, 'b, U: Utility> Refinement<'a, 'b, U> {
    fn new(market: &'a Market<'b, U>, shares: &[Share]) -> Self {
        let value_min =
            |tenant: usize| market.value(tenant, shares[tenant].into()).min(market.fair_value(tenant));
        let value_min = (0..shares.len()).map(value_min).collect();
        let mut groups: Vec<Group> = Vec::new();
        for (tenant, share) in shares.iter().enumerate() {
            let is_equivalent = |group: &&mut Group| {
                let other = group.tenants[0];
                share.is_near(shares[other]) && market.are_tenants_equivalent(other, tenant)
            };
            match groups.iter_mut().find(is_equivalent) {
                Some(group) => group.tenants.push(tenant),
                None => groups.push(Group {
                    tenants: vec![tenant],
                    bundle: (*share).into(),
                    log_values: [[0.0; MOVE_COUNT]; MOVE_COUNT],
                }),
            }
        }
        let all = market.all();
        let step = Bundle { memory: all.memory * STEP_FRACTION, bandwidth: all.bandwidth * STEP_FRACTION };
        let mut refinement = Self { market, groups, value_min, trades: 0, step };
        (0..refinement.groups.len()).for_each(|group| refinement.update_log_values(group));
        refinement
    }

    /// Makes trades until no acceptable trade is left, at most [`REFINEMENT_TRADES_MAX`] trades.
    fn run(&mut self) {
        while self.trades < REFINEMENT_TRADES_MAX && self.make_best_trade() {
            self.trades += 1;
        }
    }

    /// Returns the bundle of each tenant of a group after moves of memory and bandwidth that the
    /// tenants of the group share equally.
    fn bundle_after_trade(&self, group: usize, memory: usize, bandwidth: usize) -> Bundle {
        let Group { tenants, bundle, .. } = &self.groups[group];
        let each = 1.0 / tenants.len() as f64;
        Bundle {
            memory: bundle.memory + move_steps(memory) * self.step.memory * each,
            bandwidth: bundle.bandwidth + move_steps(bandwidth) * self.step.bandwidth * each,
        }
    }

    /// Recomputes the table of log values of a group.
    fn update_log_values(&mut self, group: usize) {
        for memory in 0..MOVE_COUNT {
            for bandwidth in 0..MOVE_COUNT {
                self.groups[group].log_values[memory][bandwidth] =
                    self.log_value_of_group(group, self.bundle_after_trade(group, memory, bandwidth));
            }
        }
    }

    fn log_value_of_group(&self, group: usize, bundle: Bundle) -> f64 {
        self.groups[group].tenants.iter().map(|tenant| self.log_value(*tenant, bundle)).sum()
    }

    /// Returns the weighted logarithm of the throughput of a tenant. Returns `-∞` if the bundle
    /// violates its limits or its guaranteed throughput.
    fn log_value(&self, tenant: usize, bundle: Bundle) -> f64 {
        let limits = self.market.limits(tenant);
        let fits = bundle.memory >= limits.min.memory
            && bundle.memory <= limits.max.memory
            && bundle.bandwidth >= limits.min.bandwidth
            && bundle.bandwidth <= limits.max.bandwidth;
        let value = if fits { self.market.value(tenant, bundle) } else { -1.0 };
        if value >= self.value_min[tenant] * (1.0 - VALUE_ROUNDING_TOLERANCE) {
            self.market.weight(tenant) * value.ln()
        } else {
            f64::NEG_INFINITY
        }
    }

    /// Makes the acceptable trade with the largest gain. Returns whether a trade was made.
    fn make_best_trade(&mut self) -> bool {
        let mut trades = self.profitable_trades();
        trades.sort_by(|one, other| other.gain.total_cmp(&one.gain));
        let Some(trade) =
            trades.into_iter().take(TRADE_CANDIDATES_MAX).find(|trade| self.is_envy_free_after_trade(trade))
        else {
            return false;
        };
        self.groups[trade.from].bundle =
            self.bundle_after_trade(trade.from, opposite_move(trade.memory), trade.bandwidth);
        self.groups[trade.to].bundle =
            self.bundle_after_trade(trade.to, trade.memory, opposite_move(trade.bandwidth));
        self.update_log_values(trade.from);
        self.update_log_values(trade.to);
        true
    }

    /// Returns all trades that raise the mean by more than [`LOG_MEAN_GAIN_MIN`].
    fn profitable_trades(&self) -> Vec<Trade> {
        let mut trades = Vec::new();
        for (from, giver) in self.groups.iter().enumerate() {
            for (to, receiver) in self.groups.iter().enumerate().filter(|(to, _)| *to != from) {
                let now = giver.log_values[NO_MOVE_INDEX][NO_MOVE_INDEX]
                    + receiver.log_values[NO_MOVE_INDEX][NO_MOVE_INDEX];
                for memory in NO_MOVE_INDEX..MOVE_COUNT {
                    for bandwidth in 0..MOVE_COUNT {
                        let then = giver.log_values[opposite_move(memory)][bandwidth]
                            + receiver.log_values[memory][opposite_move(bandwidth)];
                        if then - now > LOG_MEAN_GAIN_MIN {
                            trades.push(Trade { from, to, memory, bandwidth, gain: then - now });
                        }
                    }
                }
            }
        }
        trades
    }

    /// Returns whether no tenant of the two groups of a trade envies, or is envied by, another
    /// tenant after the trade.
    fn is_envy_free_after_trade(&self, trade: &Trade) -> bool {
        let giver = self.bundle_after_trade(trade.from, opposite_move(trade.memory), trade.bandwidth);
        let receiver = self.bundle_after_trade(trade.to, trade.memory, opposite_move(trade.bandwidth));
        let bundle = |group: usize| match group {
            group if group == trade.from => giver,
            group if group == trade.to => receiver,
            group => self.groups[group].bundle,
        };
        let groups = 0..self.groups.len();
        let envies = |one: usize, other: usize| {
            let theirs = (self.groups[other].tenants[0], bundle(other));
            let mut tenants = self.groups[one].tenants.iter();
            one != other && tenants.any(|tenant| self.market.envies((*tenant, bundle(one)), theirs))
        };
        // A trade changes the bundles of two groups only. Envy can arise only from or toward these
        // groups.
        groups.clone().all(|group| !envies(group, trade.from) && !envies(group, trade.to))
            && groups.clone().all(|group| !envies(trade.from, group) && !envies(trade.to, group))
    }

    fn into_bundles(self) -> Vec<Bundle> {
        let mut bundles = vec![Bundle::default(); self.value_min.len()];
        for group in &self.groups {
            group.tenants.iter().for_each(|tenant| bundles[*tenant] = group.bundle);
        }
        bundles
    }
}
