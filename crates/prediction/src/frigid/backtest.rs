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

use serde::{Deserialize, Serialize};
use units::{
    Fraction, UnixMs,
    limits::{CALIBRATION_OUTCOMES_MAX, TRAINING_OUTCOMES_MAX},
};

use super::{
    baseline::Baseline,
    calibration::Calibration,
    history::FEATURE_COUNT,
    model::{Model, ModelSource},
    online::{OnlinePredictor, RiskPrediction, VmAssessment},
    risk::RiskLimit,
    score::ScoreSum,
};
pub use super::{
    baseline::{Method, MethodScores},
    sample::VmSample,
    score::Score,
};
use crate::trees::boost::quantile_index;

/// Result of a backtest at one target rate of overpredictions. All values except `vms` are
/// fractions, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BacktestResult {
    /// Target fraction of overpredicted VMs.
    #[serde(rename = "rate_asked")]
    pub rate_target: f64,
    /// Observed fraction of overpredicted VMs.
    pub rate_actual: f64,
    /// Sum of predicted frigid memory divided by the sum of requested memory.
    pub frigid_share: f64,
    /// Sum of predicted frigid memory, rounded down to whole slices for each VM, divided by the sum
    /// of requested memory.
    pub slice_share: f64,
    /// Fraction of VMs that are overpredicted after the prediction is rounded down to whole slices.
    pub slice_rate: f64,
    /// Predicted fraction of requested memory if the same fixed share is predicted for all VMs. The
    /// fixed share is the quantile of the training VMs' untouched fractions at the target rate.
    pub static_share: f64,
    /// Fraction of VMs that are overpredicted with the fixed share.
    pub static_rate: f64,
    /// Number of tested VMs.
    pub vms: u32,
}

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
) -> Result<Vec<BacktestResult>, EmptyTestSet> {
    let backtest = Backtest::replay_all(train, test, rates, Vec::new())?;
    Ok(backtest.rate_backtests.iter().map(RateBacktest::backtest_result).collect())
}

/// Runs the same backtest as [`run`], and also scores all other prediction methods on the same VMs
/// with the same inputs.
///
/// # Errors
/// Returns [`EmptyTestSet`] if `test` has no reliable outcome.
pub fn compare(
    train: &[VmSample],
    test: &[VmSample],
    rates: &[Fraction],
) -> Result<(Vec<BacktestResult>, Vec<MethodScores>), EmptyTestSet> {
    let Backtest { rate_backtests, baselines, .. } =
        Backtest::replay_all(train, test, rates, Baseline::all(rates))?;
    let of = |method, sum: fn(&RateBacktest) -> ScoreSum| MethodScores {
        method,
        scores: rate_backtests.iter().map(|rate_backtest| sum(rate_backtest).score()).collect(),
    };
    let method_scores = [
        of(Method::Calibrated, |rate_backtest| rate_backtest.calibrated),
        of(Method::FixedShare, |rate_backtest| rate_backtest.fixed),
    ];
    let results = rate_backtests.iter().map(RateBacktest::backtest_result).collect();
    Ok((results, method_scores.into_iter().chain(Baseline::method_scores(&baselines)).collect()))
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
    let mut backtest = Backtest { tests_unpredicted: false, ..Backtest::new(source, first, rates) };
    let samples: Vec<&VmSample> = samples.iter().collect();
    backtest.replay_samples(&samples, 0);
    backtest.end_vms_before(UnixMs(u64::MAX), &samples);
    let (model, calibration) = (backtest.fit(), backtest.online.calibration().clone());
    let results = backtest.rate_backtests.iter().map(RateBacktest::backtest_result).collect();
    Ok(TrainedModel { model, calibration, results, outcomes, window })
}

/// Calibrates an existing model on the outcomes of VMs that started after `after`.
pub fn calibrate(model: &Model, samples: &[VmSample], after: UnixMs) -> Calibration {
    let source = ModelSource::Trained;
    let mut backtest = Backtest { calibrates_after: Some(after), ..Backtest::new(&source, usize::MAX, &[]) };
    backtest.online.set_model(model.clone());
    let samples: Vec<&VmSample> = samples.iter().collect();
    backtest.replay_samples(&samples, 0);
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
        (backtest.start_vm(at, samples[at], false), samples[at].outcome.untouched)
    };
    indexes_by_start(&samples).into_iter().map(&mut start).collect()
}

/// Returns the indexes of the samples, ordered by start time.
fn indexes_by_start(samples: &[&VmSample]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|sample| samples[*sample].request.begins);
    order
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
    rate_backtests: Vec<RateBacktest>,
    baselines: Vec<Baseline>,
    /// Number of outcomes at which the next training is due.
    train_at: usize,
    /// Number of outcomes at the last update of the risk limits.
    limits_set_at: usize,
    /// Whether VMs that started before the first training are scored. Their prediction is 0.
    tests_unpredicted: bool,
    /// If set, only VMs that started after this time calibrate the model. Earlier VMs may be in the
    /// training set of the model.
    calibrates_after: Option<UnixMs>,
    /// End and sample index of each running VM.
    running: BinaryHeap<Reverse<(UnixMs, usize)>>,
    /// Features and prediction of each running VM, by sample index.
    assessments: BTreeMap<usize, VmAssessment>,
}

impl<'a> Backtest<'a> {
    /// Replays the VMs of `train` and `test`, and scores the VMs of `test`.
    fn replay_all(
        train: &[VmSample],
        test: &[VmSample],
        rates: &[Fraction],
        baselines: Vec<Baseline>,
    ) -> Result<Self, EmptyTestSet> {
        if !test.iter().any(|sample| sample.is_trusted) {
            return Err(EmptyTestSet);
        }
        let samples: Vec<&VmSample> = train.iter().chain(test).collect();
        let mut backtest =
            Self { baselines, ..Self::new(&ModelSource::Trained, FIRST_TRAINING_OUTCOMES, rates) };
        backtest.replay_samples(&samples, train.len());
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
            baselines: Vec::new(),
            train_at: first,
            limits_set_at: 0,
            tests_unpredicted: true,
            calibrates_after: None,
            running: BinaryHeap::new(),
            assessments: BTreeMap::new(),
        }
    }

    /// Replays all samples, ordered by start time. Scores the samples with an index of at least
    /// `tested`.
    fn replay_samples(&mut self, samples: &[&VmSample], tested: usize) {
        for at in indexes_by_start(samples) {
            let sample = samples[at];
            self.end_vms_before(sample.request.begins, samples);
            self.update();
            self.start_vm(at, sample, at >= tested);
        }
    }

    /// Records the outcomes of all VMs that ended before `now`.
    fn end_vms_before(&mut self, now: UnixMs, samples: &[&VmSample]) {
        while self.running.peek().is_some_and(|Reverse((ended, _))| *ended < now) {
            let Reverse((_, at)) = self.running.pop().expect("`peek` returned a VM");
            let assessment = self.assessments.remove(&at).expect("a running VM has an assessment");
            self.record_outcome(samples[at], &assessment);
        }
    }

    /// Adds a reliable outcome to the history, the calibration and the training set.
    fn record_outcome(&mut self, sample: &VmSample, assessment: &VmAssessment) {
        if !sample.is_trusted {
            return;
        }
        let prediction = assessment
            .prediction
            .filter(|_| self.calibrates_after.is_none_or(|after| sample.request.begins > after));
        self.online.record_outcome(&sample.request, &sample.outcome, prediction);
        if self.training.len() == TRAINING_OUTCOMES_MAX {
            self.training.pop_front();
        }
        self.training.push_back((assessment.features, sample.outcome.untouched.get()));
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
            for rate_backtest in &mut self.rate_backtests {
                rate_backtest.risk_limit = self.online.calibration().risk_limit(rate_backtest.rate);
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
    fn start_vm(&mut self, at: usize, sample: &VmSample, is_tested: bool) -> [f64; FEATURE_COUNT] {
        let assessment = self.online.assess_vm(&sample.request);
        let features = assessment.features;
        if is_tested && sample.is_trusted && (self.tests_unpredicted || assessment.prediction.is_some()) {
            self.rate_backtests
                .iter_mut()
                .for_each(|rate_backtest| rate_backtest.score_vm(sample, assessment.prediction));
            self.score_baselines(sample, &assessment.features);
        }
        self.assessments.insert(at, assessment);
        self.running.push(Reverse((sample.outcome.ended.max(sample.request.begins), at)));
        features
    }

    fn score_baselines(&mut self, sample: &VmSample, features: &[f64; FEATURE_COUNT]) {
        if !self.baselines.is_empty() {
            let trees = self.online.model().map(|model| model.predict_tree_curve(features));
            self.baselines.iter_mut().for_each(|baseline| baseline.add(sample, features, trees));
        }
    }
}

/// State for one target rate: the current risk limit and the scores so far.
struct RateBacktest {
    /// Target fraction of overpredicted VMs.
    rate: Fraction,
    /// Current risk limit. `None` while there are too few outcomes; the prediction is then 0.
    risk_limit: Option<RiskLimit>,
    /// Share that the baseline [`Method::FixedShare`] predicts for every VM.
    fixed_share: Fraction,
    /// Scores of [`Method::Calibrated`].
    calibrated: ScoreSum,
    /// Scores of [`Method::FixedShare`].
    fixed: ScoreSum,
}

impl RateBacktest {
    fn new(rate: Fraction) -> Self {
        Self {
            rate,
            risk_limit: None,
            fixed_share: Fraction::default(),
            calibrated: ScoreSum::default(),
            fixed: ScoreSum::default(),
        }
    }

    /// Scores the calibrated prediction and the fixed share for one VM.
    fn score_vm(&mut self, sample: &VmSample, prediction: Option<RiskPrediction>) {
        let allocation = prediction
            .zip(self.risk_limit)
            .map(|(prediction, risk_limit)| prediction.allocation(sample.request.requested, risk_limit));
        let share =
            Fraction::new(allocation.unwrap_or_default().share).expect("an allocated share is a fraction");
        self.calibrated.add(share, sample);
        self.fixed.add(self.fixed_share, sample);
    }

    fn backtest_result(&self) -> BacktestResult {
        let (calibrated, fixed) = (self.calibrated.score(), self.fixed.score());
        BacktestResult {
            rate_target: self.rate.get(),
            rate_actual: calibrated.rate,
            frigid_share: calibrated.share,
            slice_share: calibrated.slice_share,
            slice_rate: calibrated.slice_rate,
            static_share: fixed.share,
            static_rate: fixed.rate,
            vms: self.calibrated.vms,
        }
    }
}
