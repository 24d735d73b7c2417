//! How good forecasts would have been (Pond 6.4.2 and figure 10c): VMs in the order in which they began, each forecast from those
//! that had ended before, and only then held against what came of it. That order is kept here and nowhere else, so nothing of a VM can
//! leak into its own forecast. What it cannot show: VMs that outlast the table are not in it, and those that run long are learnt late.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use serde::{Deserialize, Serialize};
use units::{
    Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, TRAINING_OUTCOMES_MAX},
};

use super::{
    history::FEATURES,
    live::{Known, Live, Said},
    model::{Model, Teacher},
    outcome::{Ask, Outcome},
    price::Calibration,
    risk::Appetite,
    rival::Rival,
    score::Sum,
};
pub use super::{
    rival::{Line, Way},
    score::Score,
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
    let trial = Trial::over(train, test, rates, Vec::new())?;
    Ok(trial.policies.iter().map(Policy::verdict).collect())
}

/// The same, and beside it what each other way to forecast bought of the same VMs, told the same at the same moment.
///
/// # Errors
/// [`NothingTested`].
pub fn compare(
    train: &[Stay],
    test: &[Stay],
    rates: &[Fraction],
) -> Result<(Vec<Verdict>, Vec<Line>), NothingTested> {
    let Trial { policies, rivals, .. } = Trial::over(train, test, rates, Rival::all(rates))?;
    let of = |way, sum: fn(&Policy) -> Sum| Line {
        way,
        scores: policies.iter().map(|policy| sum(policy).score()).collect(),
    };
    let lines = [of(Way::Ours, |policy| policy.ours), of(Way::Fixed, |policy| policy.fixed_sum)];
    let verdicts = policies.iter().map(Policy::verdict).collect();
    Ok((verdicts, lines.into_iter().chain(Rival::lines(&rivals)).collect()))
}

/// A model to serve, and how its like did before outcomes were known.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Made of all outcomes.
    pub model: Model,
    /// The latest outcomes, each held against what a model said that was made before it was known.
    pub calibration: Calibration,
    /// What each rate would have bought of the VMs that began after the first such model.
    pub verdicts: Vec<Verdict>,
    /// Outcomes that it was made of.
    pub outcomes: usize,
    /// When the first of its VMs began and the last ended.
    pub window: (UnixMs, UnixMs),
}

/// There is too little to learn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} outcomes that can be trusted: must be at least {FIRST}")]
pub struct TooFew(usize);

/// Makes a model of all outcomes, and holds models of earlier ones against later ones.
///
/// # Errors
/// [`TooFew`].
pub fn train(stays: &[Stay], teacher: &Teacher, rates: &[Fraction]) -> Result<Trained, TooFew> {
    let sound = stays.iter().filter(|stay| stay.sound);
    let outcomes = sound.clone().count();
    let begins = sound.clone().map(|stay| stay.ask.begins).min();
    let ends = sound.map(|stay| stay.outcome.ended).max();
    let Some(window) = begins.zip(ends).filter(|_| outcomes >= FIRST) else {
        return Err(TooFew(outcomes));
    };
    // Earlier ones would be forgotten by the calibration.
    let first = outcomes.saturating_sub(CALIBRATION_OUTCOMES_MAX).max(FIRST);
    let mut trial = Trial { tests_unsaid: false, ..Trial::new(teacher, first, rates) };
    let stays: Vec<&Stay> = stays.iter().collect();
    trial.live_through(&stays, 0);
    trial.end_before(UnixMs(u64::MAX), &stays);
    let (model, calibration) = (trial.teach(), trial.live.calibration().clone());
    let verdicts = trial.policies.iter().map(Policy::verdict).collect();
    Ok(Trained { model, calibration, verdicts, outcomes, window })
}

/// Holds a model that is there already against VMs that began after a moment, each when it had ended.
pub fn hold(model: &Model, stays: &[Stay], after: UnixMs) -> Calibration {
    let teacher = Teacher::Own;
    let mut trial = Trial { judges_after: Some(after), ..Trial::new(&teacher, usize::MAX, &[]) };
    trial.live.set_model(model.clone());
    let stays: Vec<&Stay> = stays.iter().collect();
    trial.live_through(&stays, 0);
    trial.end_before(UnixMs(u64::MAX), &stays);
    trial.live.calibration().clone()
}

/// What was known of each VM when it began, in the order in which they began, and the share that it left untouched.
pub fn known(stays: &[Stay]) -> Vec<([f64; FEATURES], Fraction)> {
    let stays: Vec<&Stay> = stays.iter().collect();
    let mut trial = Trial::new(&Teacher::Own, usize::MAX, &[]);
    let mut begin = |at: usize| {
        trial.end_before(stays[at].ask.begins, &stays);
        (trial.begin(at, stays[at], false), stays[at].outcome.untouched)
    };
    in_order(&stays).into_iter().map(&mut begin).collect()
}

/// Where they stand, as they began.
fn in_order(stays: &[&Stay]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..stays.len()).collect();
    order.sort_by_key(|stay| stays[*stay].ask.begins);
    order
}

/// The state of the world at one moment.
struct Trial<'a> {
    live: Live,
    teacher: &'a Teacher,
    /// The latest outcomes: what was known when they began, and the share left untouched.
    learnt: VecDeque<([f64; FEATURES], f64)>,
    seen: usize,
    policies: Vec<Policy>,
    rivals: Vec<Rival>,
    /// At how many outcomes the next training is due.
    train_at: usize,
    priced_at: usize,
    /// Whether VMs count that began before there was a model: then nothing was taken of them.
    tests_unsaid: bool,
    /// What was said of VMs that began up to then does not show how far the model can be trusted: it knew them.
    judges_after: Option<UnixMs>,
    running: BinaryHeap<Reverse<(UnixMs, usize)>>,
    /// What was known and said of those that run.
    known: BTreeMap<usize, Known>,
}

impl<'a> Trial<'a> {
    /// All VMs, in the order in which they began; those of `test` are tested.
    fn over(
        train: &[Stay],
        test: &[Stay],
        rates: &[Fraction],
        rivals: Vec<Rival>,
    ) -> Result<Self, NothingTested> {
        if !test.iter().any(|stay| stay.sound) {
            return Err(NothingTested);
        }
        let stays: Vec<&Stay> = train.iter().chain(test).collect();
        let mut trial = Self { rivals, ..Self::new(&Teacher::Own, FIRST, rates) };
        trial.live_through(&stays, train.len());
        Ok(trial)
    }

    /// With its first training at so many outcomes.
    fn new(teacher: &'a Teacher, first: usize, rates: &[Fraction]) -> Self {
        Self {
            live: Live::default(),
            teacher,
            learnt: VecDeque::new(),
            seen: 0,
            policies: rates.iter().map(|rate| Policy::new(*rate)).collect(),
            rivals: Vec::new(),
            train_at: first,
            priced_at: 0,
            tests_unsaid: true,
            judges_after: None,
            running: BinaryHeap::new(),
            known: BTreeMap::new(),
        }
    }

    /// All stays in the order in which they begin; those from `tested` on are tested.
    fn live_through(&mut self, stays: &[&Stay], tested: usize) {
        for at in in_order(stays) {
            let stay = stays[at];
            self.end_before(stay.ask.begins, stays);
            self.learn();
            self.begin(at, stay, at >= tested);
        }
    }

    /// Everything that ended before now is known.
    fn end_before(&mut self, now: UnixMs, stays: &[&Stay]) {
        while self.running.peek().is_some_and(|Reverse((ended, _))| *ended < now) {
            let Reverse((_, at)) = self.running.pop().expect("it was just seen");
            let known = self.known.remove(&at).expect("a VM begins before it ends");
            self.end(stays[at], &known);
        }
    }

    fn end(&mut self, stay: &Stay, known: &Known) {
        if !stay.sound {
            return;
        }
        let said = known.said.filter(|_| self.judges_after.is_none_or(|after| stay.ask.begins > after));
        self.live.end(&stay.ask, &stay.outcome, said);
        if self.learnt.len() == TRAINING_OUTCOMES_MAX {
            self.learnt.pop_front();
        }
        self.learnt.push_back((known.features, stay.outcome.untouched.get()));
        self.seen += 1;
    }

    /// Trains and prices anew when enough has come in.
    fn learn(&mut self) {
        if self.seen >= self.train_at {
            let model = self.teach();
            self.live.set_model(model);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a count of outcomes"
            )]
            let next = (self.seen as f64 * GROWTH).ceil() as usize;
            self.train_at = next;
        }
        if self.seen >= self.priced_at + PRICED_EVERY {
            self.priced_at = self.seen;
            for policy in &mut self.policies {
                policy.appetite = self.live.calibration().appetite(policy.rate);
            }
        }
    }

    fn teach(&mut self) -> Model {
        let (known, mut untouched): (Vec<_>, Vec<f64>) = self.learnt.iter().copied().unzip();
        let model = self.teacher.teach(&known, &untouched, self.seen as u64);
        untouched.sort_unstable_by(f64::total_cmp);
        for policy in &mut self.policies {
            let fixed = untouched[rank(untouched.len(), policy.rate.get())];
            policy.fixed = Fraction::new(fixed).expect("outcomes are shares");
        }
        model
    }

    /// What is known of it.
    fn begin(&mut self, at: usize, stay: &Stay, is_tested: bool) -> [f64; FEATURES] {
        let known = self.live.know(&stay.ask);
        let features = known.features;
        if is_tested && stay.sound && (self.tests_unsaid || known.said.is_some()) {
            self.policies.iter_mut().for_each(|policy| policy.test(stay, known.said));
            self.test_rivals(stay, &known.features);
        }
        self.known.insert(at, known);
        self.running.push(Reverse((stay.outcome.ended.max(stay.ask.begins), at)));
        features
    }

    fn test_rivals(&mut self, stay: &Stay, known: &[f64; FEATURES]) {
        if !self.rivals.is_empty() {
            let trees = self.live.model().map(|model| model.curve_of_trees(known));
            self.rivals.iter_mut().for_each(|rival| rival.test(stay, known, trees));
        }
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

    fn test(&mut self, stay: &Stay, said: Option<Said>) {
        let stake = said.zip(self.appetite).map(|(said, appetite)| said.stake(stay.ask.requested, appetite));
        let share = Fraction::new(stake.unwrap_or_default().share).expect("a stake is a share");
        self.ours.add(share, stay);
        self.fixed_sum.add(self.fixed, stay);
    }

    fn verdict(&self) -> Verdict {
        let (ours, fixed) = (self.ours.score(), self.fixed_sum.score());
        Verdict {
            rate_asked: self.rate.get(),
            rate_actual: ours.rate,
            frigid_share: ours.share,
            slice_share: ours.slice_share,
            slice_rate: ours.slice_rate,
            static_share: fixed.share,
            static_rate: fixed.rate,
            vms: self.ours.vms,
        }
    }
}
