//! How good forecasts would have been: VMs in the order in which they began, each forecast from those that had ended before, and
//! only then held against what came of it. That order is kept here and nowhere else, so nothing of a VM can leak into its own
//! forecast.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
};

use units::{Bytes, UnixMs};

use super::{
    history::{FEATURES, History, gib},
    model::Model,
    outcome::{Ask, Outcome},
    price::{Calibration, Judged},
    risk::{Appetite, Curve},
};

/// A VM that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What was known before it began.
    pub ask: Ask,
    /// What came of it.
    pub outcome: Outcome,
    /// Whether that can be trusted. If not it is remembered of its groups, and nothing is learnt from it or tested by it.
    pub sound: bool,
}

/// What a rate of overpredictions bought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Share of VMs whose forecast may exceed what they leave untouched.
    pub rate_asked: f64,
    /// Share of VMs whose forecast did.
    pub rate_actual: f64,
    /// Memory forecast over memory requested.
    pub frigid_share: f64,
    /// The same in whole slices of each VM.
    pub slice_share: f64,
    /// What a fixed share for all would have bought: the one that as many of the VMs that had ended would have exceeded.
    pub static_share: f64,
    /// Share of VMs that the fixed share was too much for.
    pub static_rate: f64,
}

/// Outcomes before the first training.
const FIRST: usize = 50;
/// Outcomes before the next, over those at the last.
const GROWTH: f64 = 1.1;
/// Outcomes between one pricing of risk and the next.
const PRICED_EVERY: usize = 20;

/// What each rate would have bought of the tested VMs. Those of `train` are there to learn from, once they had ended; tested ones that had
/// ended are, too.
pub fn run(train: &[Row], test: &[Row], rates: &[f64]) -> Vec<Verdict> {
    let rows: Vec<&Row> = train.iter().chain(test).collect();
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|row| rows[*row].ask.begins);
    let mut trial = Trial::new(rates);
    for at in order {
        let row = rows[at];
        trial.end_before(row.ask.begins, &rows);
        trial.learn();
        trial.begin(at, row, at >= train.len());
    }
    trial.policies.iter().map(Policy::verdict).collect()
}

/// What was known and said of a VM that runs.
struct Said {
    features: [f64; FEATURES],
    forecast: Option<(Curve, f64)>,
}

/// The state of the world at one moment.
struct Trial {
    history: History,
    known: Vec<[f64; FEATURES]>,
    untouched: Vec<f64>,
    /// The same, in order.
    sorted: Vec<f64>,
    calibration: Calibration,
    model: Option<Model>,
    policies: Vec<Policy>,
    trained_at: usize,
    priced_at: usize,
    said: BTreeMap<usize, Said>,
    running: BinaryHeap<Reverse<(UnixMs, usize)>>,
}

impl Trial {
    fn new(rates: &[f64]) -> Self {
        Self {
            history: History::default(),
            known: Vec::new(),
            untouched: Vec::new(),
            sorted: Vec::new(),
            calibration: Calibration::default(),
            model: None,
            policies: rates.iter().map(|rate| Policy::new(*rate)).collect(),
            trained_at: 0,
            priced_at: 0,
            said: BTreeMap::new(),
            running: BinaryHeap::new(),
        }
    }

    /// Everything that ended before now is known.
    fn end_before(&mut self, now: UnixMs, rows: &[&Row]) {
        while self.running.peek().is_some_and(|Reverse((ended, _))| *ended < now) {
            let Reverse((_, at)) = self.running.pop().expect("it was just seen");
            let said = self.said.remove(&at).expect("a VM begins before it ends");
            self.end(rows[at], &said);
        }
    }

    fn end(&mut self, row: &Row, said: &Said) {
        self.history.add(&row.ask, &row.outcome);
        if !row.sound {
            return;
        }
        let untouched = row.outcome.untouched;
        self.known.push(said.features);
        self.untouched.push(untouched.get());
        self.sorted.insert(self.sorted.partition_point(|other| *other < untouched.get()), untouched.get());
        if let Some((curve, caution)) = said.forecast {
            let judged = Judged { curve, caution, requested: row.ask.requested, untouched };
            self.calibration.add(row.ask.groups.owner(), judged);
        }
    }

    /// Trains and prices anew when enough has come in.
    fn learn(&mut self) {
        let seen = self.untouched.len();
        if seen >= FIRST && seen as f64 >= self.trained_at as f64 * GROWTH {
            self.trained_at = seen;
            self.model = Some(Model::train(&self.known, &self.untouched, seen as u64));
        }
        if seen >= self.priced_at + PRICED_EVERY {
            self.priced_at = seen;
            for policy in &mut self.policies {
                policy.appetite = self.calibration.appetite(policy.rate);
                policy.fixed = quantile(&self.sorted, policy.rate);
            }
        }
    }

    fn begin(&mut self, at: usize, row: &Row, is_tested: bool) {
        let features = self.history.features(&row.ask);
        let caution = self.calibration.caution(row.ask.groups.owner());
        let forecast = self.model.as_ref().map(|model| (model.curve(&features), caution));
        if is_tested && row.sound {
            self.policies.iter_mut().for_each(|policy| policy.test(row, forecast));
        }
        self.said.insert(at, Said { features, forecast });
        self.running.push(Reverse((row.outcome.ended, at)));
    }
}

/// A rate asked for, how it is met, and what that bought so far.
struct Policy {
    rate: f64,
    /// Nothing is taken before outcomes tell what risk costs.
    appetite: Option<Appetite>,
    fixed: f64,
    ours: Sum,
    fixed_sum: Sum,
}

impl Policy {
    fn new(rate: f64) -> Self {
        Self { rate, appetite: None, fixed: 0.0, ours: Sum::default(), fixed_sum: Sum::default() }
    }

    fn test(&mut self, row: &Row, forecast: Option<(Curve, f64)>) {
        let stake = forecast
            .zip(self.appetite)
            .map(|((curve, caution), appetite)| curve.stake(row.ask.requested, appetite, caution));
        self.ours.add(stake.unwrap_or_default().share, row);
        self.fixed_sum.add(self.fixed, row);
    }

    fn verdict(&self) -> Verdict {
        Verdict {
            rate_asked: self.rate,
            rate_actual: self.ours.rate(),
            frigid_share: self.ours.share(),
            slice_share: self.ours.slices / self.ours.requested,
            static_share: self.fixed_sum.share(),
            static_rate: self.fixed_sum.rate(),
        }
    }
}

/// Forecasts held against outcomes. Memory in GiB.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    vms: u32,
    over: u32,
    forecast: f64,
    slices: f64,
    requested: f64,
}

impl Sum {
    fn add(&mut self, share: f64, row: &Row) {
        let requested = gib(row.ask.requested);
        let forecast = share * requested;
        self.vms += 1;
        self.over += u32::from(share > row.outcome.untouched.get());
        self.forecast += forecast;
        self.slices += forecast.floor() * gib(Bytes::slices(1));
        self.requested += requested;
    }

    fn rate(&self) -> f64 {
        f64::from(self.over) / f64::from(self.vms)
    }

    fn share(&self) -> f64 {
        self.forecast / self.requested
    }
}

/// What the level's share of sorted numbers is below.
fn quantile(sorted: &[f64], level: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank among them")]
    let rank = (sorted.len() as f64 * level) as usize;
    sorted.get(rank).copied().unwrap_or(0.0)
}
