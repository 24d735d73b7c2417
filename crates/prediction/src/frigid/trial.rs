//! How good forecasts would have been (Pond 6.4.2 and figure 10c): VMs in the order in which they began, each forecast from those
//! that had ended before, and only then held against what came of it. That order is kept here and nowhere else, so nothing of a VM can
//! leak into its own forecast. What it cannot show: VMs that outlast the table are not in it, and those that run long are learnt late.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use serde::Serialize;
use units::{Fraction, UnixMs, limits::OUTCOMES_TRAINED_MAX};

use super::{
    history::{FEATURES, History, gib},
    model::Model,
    outcome::{Ask, Outcome},
    price::{Calibration, Judged},
    risk::{Appetite, Curve},
};
use crate::trees::boost::rank;

/// A VM's stay, from its start to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Stay {
    /// What was known before it began.
    pub ask: Ask,
    /// What came of it; not before it began.
    pub outcome: Outcome,
    /// Whether that can be trusted. If not, nothing is learnt from it or tested by it.
    pub sound: bool,
}

/// What a rate of overpredictions bought. All but `vms` are shares, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Share of VMs whose forecast may exceed what they leave untouched.
    pub rate_asked: f64,
    /// Share of VMs whose forecast did.
    pub rate_actual: f64,
    /// Memory forecast over memory requested.
    pub frigid_share: f64,
    /// The same in whole slices of each VM.
    pub slice_share: f64,
    /// Share of VMs whose forecast exceeds what they leave untouched even in whole slices.
    pub slice_rate: f64,
    /// What a fixed share for all would have bought: the one that as many of the VMs learnt from left untouched, less.
    pub static_share: f64,
    /// Share of VMs that the fixed share was too much for.
    pub static_rate: f64,
    /// VMs that were tested.
    pub vms: u32,
}

/// There is nothing to hold a forecast against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no VM to test: must be at least one whose outcome can be trusted")]
pub struct NothingTested;

/// Outcomes before the first training.
const FIRST: usize = 50;
/// Outcomes before the next, over those at the last.
const GROWTH: f64 = 1.1;
/// Outcomes between one pricing of risk and the next.
const PRICED_EVERY: usize = 20;

/// What each rate would have bought of the tested VMs. Those of `train`, of which there may be none, are there to learn from once they had
/// ended, that is, before another began; tested ones that had ended are, too. VMs that begin at the same moment know nothing of each
/// other.
///
/// # Errors
/// [`NothingTested`].
pub fn run(train: &[Stay], test: &[Stay], rates: &[Fraction]) -> Result<Vec<Verdict>, NothingTested> {
    if !test.iter().any(|stay| stay.sound) {
        return Err(NothingTested);
    }
    let stays: Vec<&Stay> = train.iter().chain(test).collect();
    let mut order: Vec<usize> = (0..stays.len()).collect();
    order.sort_by_key(|stay| stays[*stay].ask.begins);
    let mut trial = Trial::new(rates);
    for at in order {
        let stay = stays[at];
        trial.end_before(stay.ask.begins, &stays);
        trial.learn();
        trial.begin(at, stay, at >= train.len());
    }
    Ok(trial.policies.iter().map(Policy::verdict).collect())
}

/// What was known and said of a VM that runs.
struct Said {
    features: [f64; FEATURES],
    forecast: Option<(Curve, f64)>,
}

/// The state of the world at one moment.
struct Trial {
    history: History,
    /// The latest outcomes: what was known when they began, and the share left untouched.
    learnt: VecDeque<([f64; FEATURES], f64)>,
    seen: usize,
    calibration: Calibration,
    model: Option<Model>,
    policies: Vec<Policy>,
    trained_at: usize,
    priced_at: usize,
    said: BTreeMap<usize, Said>,
    running: BinaryHeap<Reverse<(UnixMs, usize)>>,
}

impl Trial {
    fn new(rates: &[Fraction]) -> Self {
        Self {
            history: History::default(),
            learnt: VecDeque::new(),
            seen: 0,
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
    fn end_before(&mut self, now: UnixMs, stays: &[&Stay]) {
        while self.running.peek().is_some_and(|Reverse((ended, _))| *ended < now) {
            let Reverse((_, at)) = self.running.pop().expect("it was just seen");
            let said = self.said.remove(&at).expect("a VM begins before it ends");
            self.end(stays[at], &said);
        }
    }

    fn end(&mut self, stay: &Stay, said: &Said) {
        if !stay.sound {
            return;
        }
        self.history.add(&stay.ask, &stay.outcome);
        let untouched = stay.outcome.untouched;
        if self.learnt.len() == OUTCOMES_TRAINED_MAX {
            self.learnt.pop_front();
        }
        self.learnt.push_back((said.features, untouched.get()));
        self.seen += 1;
        if let Some((curve, caution)) = said.forecast {
            let judged = Judged { curve, caution, requested: stay.ask.requested, untouched };
            self.calibration.add(stay.ask.groups.owner(), judged);
        }
    }

    /// Trains and prices anew when enough has come in.
    fn learn(&mut self) {
        if self.seen >= FIRST && self.seen as f64 >= self.trained_at as f64 * GROWTH {
            self.trained_at = self.seen;
            self.train();
        }
        if self.seen >= self.priced_at + PRICED_EVERY {
            self.priced_at = self.seen;
            for policy in &mut self.policies {
                policy.appetite = self.calibration.appetite(policy.rate);
            }
        }
    }

    fn train(&mut self) {
        let (known, mut untouched): (Vec<_>, Vec<f64>) = self.learnt.iter().copied().unzip();
        self.model = Some(Model::train(&known, &untouched, self.seen as u64));
        untouched.sort_unstable_by(f64::total_cmp);
        for policy in &mut self.policies {
            let fixed = untouched[rank(untouched.len(), policy.rate.get())];
            policy.fixed = Fraction::new(fixed).expect("outcomes are shares");
        }
    }

    fn begin(&mut self, at: usize, stay: &Stay, is_tested: bool) {
        let features = self.history.features(&stay.ask);
        let caution = self.calibration.caution(stay.ask.groups.owner().as_ref());
        let forecast = self.model.as_ref().map(|model| (model.curve(&features), caution));
        if is_tested && stay.sound {
            self.policies.iter_mut().for_each(|policy| policy.test(stay, forecast));
        }
        self.said.insert(at, Said { features, forecast });
        self.running.push(Reverse((stay.outcome.ended.max(stay.ask.begins), at)));
    }
}

/// A rate asked for, how it is met, and what that bought so far.
struct Policy {
    rate: Fraction,
    /// Nothing is taken before outcomes tell what risk costs.
    appetite: Option<Appetite>,
    fixed: Fraction,
    ours: Sum,
    fixed_sum: Sum,
}

impl Policy {
    fn new(rate: Fraction) -> Self {
        Self {
            rate,
            appetite: None,
            fixed: Fraction::default(),
            ours: Sum::default(),
            fixed_sum: Sum::default(),
        }
    }

    fn test(&mut self, stay: &Stay, forecast: Option<(Curve, f64)>) {
        let stake = forecast
            .zip(self.appetite)
            .map(|((curve, caution), appetite)| curve.stake(stay.ask.requested, appetite, caution));
        let share = Fraction::new(stake.unwrap_or_default().share).expect("a stake is a share");
        self.ours.add(share, stay);
        self.fixed_sum.add(self.fixed, stay);
    }

    fn verdict(&self) -> Verdict {
        let (ours, fixed) = (self.ours, self.fixed_sum);
        Verdict {
            rate_asked: self.rate.get(),
            rate_actual: ours.of_vms(ours.over),
            frigid_share: ours.of_memory(ours.forecast),
            slice_share: ours.of_memory(ours.in_slices),
            slice_rate: ours.of_vms(ours.over_in_slices),
            static_share: fixed.of_memory(fixed.forecast),
            static_rate: fixed.of_vms(fixed.over),
            vms: ours.vms,
        }
    }
}

/// Forecasts held against outcomes: VMs, and memory in GiB.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    vms: u32,
    over: u32,
    over_in_slices: u32,
    forecast: f64,
    in_slices: f64,
    requested: f64,
}

impl Sum {
    fn add(&mut self, share: Fraction, stay: &Stay) {
        let requested = stay.ask.requested;
        let untouched = stay.outcome.untouched;
        let in_slices = share.of(requested).slices_floor();
        self.vms += 1;
        self.over += u32::from(share > untouched);
        self.over_in_slices += u32::from(in_slices > untouched.of(requested));
        self.forecast += share.get() * gib(requested);
        self.in_slices += gib(in_slices);
        self.requested += gib(requested);
    }

    fn of_vms(&self, vms: u32) -> f64 {
        f64::from(vms) / f64::from(self.vms)
    }

    fn of_memory(&self, gib: f64) -> f64 {
        gib / self.requested
    }
}
