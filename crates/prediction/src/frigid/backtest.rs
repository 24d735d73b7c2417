//! Backtest of the prediction of frigid memory (Pond, section 6.4.2 and figure 10c).
//!
//! VMs are replayed in the order of their start. Each VM is predicted from the VMs that ended
//! before its start, and the prediction is compared with its outcome. Only this module orders the
//! events, so that no outcome can leak into its own prediction.
//!
//! Limitations: a trace does not contain VMs that run beyond its end, and the outcomes of
//! long-running VMs become known late.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use units::{
    Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, TRAINING_OUTCOMES_MAX},
};

use super::{
    calibration::Calibration,
    evaluation::{ScoredVm, evaluate, score_method},
    history::{FEATURE_COUNT, OwnerHistory},
    model::{Model, ModelSource, conformal_rank},
    online::{OnlinePredictor, VmAssessment},
    outcome::VmRequest,
    risk::{QUANTILE_LEVELS, QuantileCurve, RiskLimit},
};
pub use super::{
    evaluation::{
        BacktestResult, Evaluation, Method, MethodScores, OwnerRate, OwnerResults, RuleResult,
        SizeClassResult,
    },
    sample::VmSample,
    score::Score,
};
use crate::trees::boost::quantile_index;

/// Error for a test set without a reliable outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the test set has no VM with a reliable outcome: must have at least one")]
pub struct EmptyTestSet;

/// Number of reliable outcomes before the first training of a model.
const FIRST_TRAINING_OUTCOMES: usize = 50;
/// Factor by which the number of outcomes grows from one training to the next.
const TRAINING_GROWTH: f64 = 1.1;
/// Number of outcomes between two updates of the risk limits.
const RISK_LIMIT_UPDATE_OUTCOMES: usize = 20;

/// Backtests each target rate on the VMs of `test`. A VM is predicted by models that are trained on
/// the VMs of `train` and `test` that ended before its start. `train` may be empty. VMs that start
/// at the same time are predicted without each other's outcomes.
///
/// # Errors
/// Returns [`EmptyTestSet`] if `test` has no reliable outcome.
pub fn run(
    train: &[VmSample],
    test: &[VmSample],
    rates: &[Fraction],
) -> Result<Vec<Evaluation>, EmptyTestSet> {
    let backtest = Backtest::replay_all(train, test, rates)?;
    Ok(backtest.rate_backtests.iter().map(RateBacktest::evaluate).collect())
}

/// Runs the same backtest as [`run`], and also scores all prediction methods with the same inputs on
/// all VMs of `test`. For a VM without a forecast, a method predicts 0.
///
/// # Errors
/// Returns [`EmptyTestSet`] if `test` has no reliable outcome.
pub fn compare(
    train: &[VmSample],
    test: &[VmSample],
    rates: &[Fraction],
) -> Result<(Vec<Evaluation>, Vec<MethodScores>), EmptyTestSet> {
    let Backtest { rate_backtests, .. } = Backtest::replay_all(train, test, rates)?;
    let scores = |method| {
        let of_rate = |rate_backtest: &RateBacktest<'_>| score_method(&rate_backtest.scored, method);
        MethodScores { method, scores: rate_backtests.iter().map(of_rate).collect() }
    };
    let evaluations = rate_backtests.iter().map(RateBacktest::evaluate).collect();
    Ok((evaluations, Method::ALL.map(scores).into()))
}

/// Cross-validates each target rate over the owners. The owners are divided into `folds` parts. The
/// VMs of each part are predicted by models that are trained and calibrated on the VMs of all other
/// owners. The features of a VM include the earlier VMs of its owner, as they do for a new owner in
/// production. A VM of an unknown owner is in the first part.
///
/// # Errors
/// Returns [`EmptyTestSet`] if `samples` has no reliable outcome.
///
/// # Panics
/// Panics if `folds` is 0.
pub fn cross_validate(
    samples: &[VmSample],
    folds: usize,
    rates: &[Fraction],
) -> Result<Vec<Evaluation>, EmptyTestSet> {
    if !samples.iter().any(|sample| sample.is_trusted) {
        return Err(EmptyTestSet);
    }
    let samples: Vec<&VmSample> = samples.iter().collect();
    let mut owners = BTreeMap::new();
    for at in indexes_by_start(&samples) {
        let next = owners.len();
        owners.entry(samples[at].request.groups.owner()).or_insert(next);
    }
    let fold_of = |sample: &VmSample| owners[&sample.request.groups.owner()] % folds;
    let mut scored = vec![Vec::new(); rates.len()];
    for fold in 0..folds {
        let mut backtest = Backtest::new(&ModelSource::Trained, FIRST_TRAINING_OUTCOMES, rates);
        backtest.replay_samples(&samples, |at| fold_of(samples[at]) == fold, Learning::OtherVms);
        for (all, rate_backtest) in scored.iter_mut().zip(backtest.rate_backtests) {
            all.extend(rate_backtest.scored);
        }
    }
    Ok(scored.iter().zip(rates).map(|(scored, rate)| evaluate(scored, *rate)).collect())
}

/// Trained model, with the backtest results of models that were trained in the same way.
#[derive(Clone, Debug)]
pub struct TrainedModel {
    /// Model trained on all outcomes.
    pub model: Model,
    /// Latest outcomes, each with the prediction of a model that was trained before the VM started.
    pub calibration: Calibration,
    /// Backtest results for the VMs that started after the first training.
    pub results: Vec<BacktestResult>,
    /// Number of reliable outcomes in the training set.
    pub outcomes: usize,
    /// Earliest start and latest end of a VM in the training set.
    pub window: (UnixMs, UnixMs),
}

/// Error for a training set with too few reliable outcomes. The field is their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the training set has {0} reliable outcomes: must be at least {FIRST_TRAINING_OUTCOMES}")]
pub struct TooFewOutcomes(usize);

/// Trains a model on all outcomes, and backtests models trained on earlier outcomes on later VMs.
///
/// # Errors
/// Returns [`TooFewOutcomes`] if there are fewer than 50 reliable outcomes.
pub fn train(
    samples: &[VmSample],
    source: &ModelSource,
    rates: &[Fraction],
) -> Result<TrainedModel, TooFewOutcomes> {
    let trusted = samples.iter().filter(|sample| sample.is_trusted);
    let outcomes = trusted.clone().count();
    let begins = trusted.clone().map(|sample| sample.request.begins).min();
    let ends = trusted.map(|sample| sample.outcome.ended).max();
    let Some(window) = begins.zip(ends).filter(|_| outcomes >= FIRST_TRAINING_OUTCOMES) else {
        return Err(TooFewOutcomes(outcomes));
    };
    // A calibration keeps only the latest outcomes. Predictions for earlier VMs are not needed.
    let first = outcomes.saturating_sub(CALIBRATION_OUTCOMES_MAX).max(FIRST_TRAINING_OUTCOMES);
    let mut backtest = Backtest::new(source, first, rates);
    let samples: Vec<&VmSample> = samples.iter().collect();
    backtest.replay_samples(&samples, |_| true, Learning::AllVms);
    backtest.end_vms_before(UnixMs(u64::MAX), &samples);
    let (model, calibration) = (backtest.fit(), backtest.online.calibration().clone());
    let results =
        backtest.rate_backtests.iter().map(|rate_backtest| rate_backtest.evaluate().result).collect();
    Ok(TrainedModel { model, calibration, results, outcomes, window })
}

/// Calibrates an existing model on the outcomes of VMs that started after `after`.
pub fn calibrate(model: &Model, samples: &[VmSample], after: UnixMs) -> Calibration {
    let source = ModelSource::Trained;
    let mut backtest = Backtest { calibrates_after: Some(after), ..Backtest::new(&source, usize::MAX, &[]) };
    backtest.online.set_model(model.clone());
    let samples: Vec<&VmSample> = samples.iter().collect();
    backtest.replay_samples(&samples, |_| true, Learning::AllVms);
    backtest.end_vms_before(UnixMs(u64::MAX), &samples);
    backtest.online.calibration().clone()
}

/// Returns the features of each VM at its start and the untouched fraction of its memory, ordered
/// by start time.
pub fn features_at_start(samples: &[VmSample]) -> Vec<([f64; FEATURE_COUNT], Fraction)> {
    let samples: Vec<&VmSample> = samples.iter().collect();
    let mut backtest = Backtest::new(&ModelSource::Trained, usize::MAX, &[]);
    let mut start = |at: usize| {
        backtest.end_vms_before(samples[at].request.begins, &samples);
        (backtest.start_vm(at, samples[at], false, true), samples[at].outcome.untouched)
    };
    indexes_by_start(&samples).into_iter().map(&mut start).collect()
}

/// Returns the indexes of the samples, ordered by start time.
fn indexes_by_start(samples: &[&VmSample]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|sample| samples[*sample].request.begins);
    order
}

/// VMs whose outcomes train and calibrate the models. The outcomes of all VMs are in the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Learning {
    /// All VMs.
    AllVms,
    /// VMs that are not tested.
    OtherVms,
}

/// State of a backtest at one point in the replayed time.
struct Backtest<'a> {
    online: OnlinePredictor,
    source: &'a ModelSource,
    /// Training set of the latest outcomes: features of each VM at its start, and the untouched
    /// fraction of its memory.
    training: VecDeque<([f64; FEATURE_COUNT], f64)>,
    /// Number of reliable outcomes so far.
    outcomes_seen: usize,
    rate_backtests: Vec<RateBacktest<'a>>,
    /// Lowest untouched fraction of the owner minus the untouched fraction of the VM, for the latest
    /// outcomes. The constants of the simple rule are learned from these differences.
    rule_differences: VecDeque<f64>,
    /// Number of outcomes at which the next training is due.
    train_at: usize,
    /// Number of outcomes at the last update of the risk limits.
    limits_set_at: usize,
    /// If set, only VMs that started after this time calibrate the model. Earlier VMs may be in the
    /// training set of the model.
    calibrates_after: Option<UnixMs>,
    /// End and sample index of each running VM.
    running: BinaryHeap<Reverse<(UnixMs, usize)>>,
    /// Features and prediction of each running VM, by sample index, and whether the models learn
    /// from its outcome.
    assessments: BTreeMap<usize, (VmAssessment, bool)>,
}

impl<'a> Backtest<'a> {
    /// Replays the VMs of `train` and `test`, and scores the VMs of `test`.
    fn replay_all(
        train: &'a [VmSample],
        test: &'a [VmSample],
        rates: &[Fraction],
    ) -> Result<Self, EmptyTestSet> {
        if !test.iter().any(|sample| sample.is_trusted) {
            return Err(EmptyTestSet);
        }
        let samples: Vec<&VmSample> = train.iter().chain(test).collect();
        let mut backtest = Self::new(&ModelSource::Trained, FIRST_TRAINING_OUTCOMES, rates);
        backtest.replay_samples(&samples, |at| at >= train.len(), Learning::AllVms);
        Ok(backtest)
    }

    /// Creates a backtest whose first training is due at `first` outcomes.
    fn new(source: &'a ModelSource, first: usize, rates: &[Fraction]) -> Self {
        Self {
            online: OnlinePredictor::default(),
            source,
            training: VecDeque::new(),
            outcomes_seen: 0,
            rate_backtests: rates.iter().map(|rate| RateBacktest::new(*rate)).collect(),
            rule_differences: VecDeque::new(),
            train_at: first,
            limits_set_at: 0,
            calibrates_after: None,
            running: BinaryHeap::new(),
            assessments: BTreeMap::new(),
        }
    }

    /// Replays all samples, ordered by start time. Scores the samples whose index is tested.
    fn replay_samples(
        &mut self,
        samples: &[&'a VmSample],
        is_tested: impl Fn(usize) -> bool,
        learning: Learning,
    ) {
        for at in indexes_by_start(samples) {
            let sample = samples[at];
            self.end_vms_before(sample.request.begins, samples);
            self.update();
            let is_tested = is_tested(at);
            self.start_vm(at, sample, is_tested, learning == Learning::AllVms || !is_tested);
        }
    }

    /// Records the outcomes of all VMs that ended before `now`.
    fn end_vms_before(&mut self, now: UnixMs, samples: &[&VmSample]) {
        while self.running.peek().is_some_and(|Reverse((ended, _))| *ended < now) {
            let Reverse((_, at)) = self.running.pop().expect("`peek` returned a VM");
            let (assessment, is_learned) =
                self.assessments.remove(&at).expect("a running VM has an assessment");
            let VmSample { request, outcome, is_trusted } = samples[at];
            if *is_trusted && is_learned {
                self.record_outcome(samples[at], &assessment);
            } else if *is_trusted {
                self.online.record_history(request, outcome);
            }
        }
    }

    /// Adds a reliable outcome to the history, the calibration and the training set.
    fn record_outcome(&mut self, sample: &VmSample, assessment: &VmAssessment) {
        let prediction = assessment
            .prediction
            .filter(|_| self.calibrates_after.is_none_or(|after| sample.request.begins > after));
        self.online.record_outcome(&sample.request, &sample.outcome, prediction);
        let untouched = sample.outcome.untouched.get();
        push_limited(&mut self.training, (assessment.features, untouched), TRAINING_OUTCOMES_MAX);
        if let Some(owner) = OwnerHistory::find(&sample.request.groups, &assessment.features) {
            push_limited(&mut self.rule_differences, owner.lowest - untouched, CALIBRATION_OUTCOMES_MAX);
        }
        self.outcomes_seen += 1;
    }

    /// Trains a model and updates the risk limits, if either is due.
    fn update(&mut self) {
        if self.outcomes_seen >= self.train_at {
            let model = self.fit();
            self.online.set_model(model);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a count of outcomes"
            )]
            let next = (self.outcomes_seen as f64 * TRAINING_GROWTH).ceil() as usize;
            self.train_at = next;
        }
        if self.outcomes_seen >= self.limits_set_at + RISK_LIMIT_UPDATE_OUTCOMES {
            self.limits_set_at = self.outcomes_seen;
            let mut differences: Vec<f64> = self.rule_differences.iter().copied().collect();
            differences.sort_unstable_by(|one, other| other.total_cmp(one));
            for rate_backtest in &mut self.rate_backtests {
                rate_backtest.risk_limit = self.online.calibration().risk_limit(rate_backtest.rate);
                let rank = conformal_rank(differences.len(), rate_backtest.rate.get());
                rate_backtest.rule_constant = rank.map(|rank| differences[rank - 1].max(0.0));
            }
        }
    }

    /// Trains a model on the latest outcomes, and updates the fixed shares.
    fn fit(&mut self) -> Model {
        let (features, mut untouched): (Vec<_>, Vec<f64>) = self.training.iter().copied().unzip();
        let model = self.source.fit(&features, &untouched, self.outcomes_seen as u64);
        untouched.sort_unstable_by(f64::total_cmp);
        for rate_backtest in &mut self.rate_backtests {
            let fixed_share = untouched[quantile_index(untouched.len(), rate_backtest.rate.get())];
            rate_backtest.fixed_share = Fraction::new(fixed_share).expect("an untouched share is a fraction");
        }
        model
    }

    /// Starts a VM: predicts it, scores the prediction if the VM is tested, and returns the row of
    /// features.
    fn start_vm(
        &mut self,
        at: usize,
        sample: &'a VmSample,
        is_tested: bool,
        is_learned: bool,
    ) -> [f64; FEATURE_COUNT] {
        let assessment = self.online.assess_vm(&sample.request);
        let features = assessment.features;
        if is_tested && sample.is_trusted {
            let trees = self.online.model().map(|model| model.curve(&features));
            let score =
                |rate_backtest: &mut RateBacktest<'a>| rate_backtest.score_vm(sample, &assessment, trees);
            self.rate_backtests.iter_mut().for_each(score);
        }
        self.assessments.insert(at, (assessment, is_learned));
        self.running.push(Reverse((sample.outcome.ended.max(sample.request.begins), at)));
        features
    }
}

/// Appends to a queue, and removes the oldest entry if the queue has more than `limit` entries.
fn push_limited<T>(queue: &mut VecDeque<T>, entry: T, limit: usize) {
    queue.push_back(entry);
    if queue.len() > limit {
        queue.pop_front();
    }
}

/// State for one target rate: the current risk limit and the scored VMs so far.
struct RateBacktest<'a> {
    /// Target fraction of overpredicted VMs.
    rate: Fraction,
    /// Current risk limit. `None` while there are too few outcomes.
    risk_limit: Option<RiskLimit>,
    /// Share that the baseline [`Method::FixedShare`] predicts for every VM.
    fixed_share: Fraction,
    /// Constant, at least 0, that the simple rule subtracts from the lowest untouched fraction of the
    /// owner.
    /// `None` while there are too few outcomes; the rule then predicts 0.
    rule_constant: Option<f64>,
    scored: Vec<ScoredVm<'a>>,
}

impl<'a> RateBacktest<'a> {
    fn new(rate: Fraction) -> Self {
        let fixed_share = Fraction::default();
        Self { rate, risk_limit: None, fixed_share, rule_constant: None, scored: Vec::new() }
    }

    /// Adds the predictions of all methods for one VM. `trees` are the quantiles that the model
    /// predicts, not limited by the history of the owner.
    fn score_vm(&mut self, sample: &'a VmSample, assessment: &VmAssessment, trees: Option<QuantileCurve>) {
        let VmRequest { groups, requested, .. } = &sample.request;
        let forecast = assessment.prediction.zip(self.risk_limit);
        let allocation = forecast.and_then(|(curve, risk_limit)| curve.allocation(*requested, &risk_limit));
        let level = QUANTILE_LEVELS.iter().rposition(|level| *level <= self.rate.get());
        let tree_quantile = trees.zip(level).map(|(curve, level)| curve.untouched_at_level(level));
        self.scored.push(ScoredVm {
            sample,
            forecast: allocation.map(|allocation| allocation.to_fraction()),
            tree_quantile: Fraction::new(tree_quantile.unwrap_or_default())
                .expect("a quantile is a fraction"),
            fixed_share: self.fixed_share,
            owner_lowest: OwnerHistory::find(groups, &assessment.features).map(|owner| owner.lowest),
            rule_constant: self.rule_constant,
        });
    }

    fn evaluate(&self) -> Evaluation {
        evaluate(&self.scored, self.rate)
    }
}
