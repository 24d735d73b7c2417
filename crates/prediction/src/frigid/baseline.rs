//! Baselines for the prediction of frigid memory (Pond, section 6.4.2 and figure 10c): the paper's
//! quantile, a fixed share, and the rule that operators use. In the backtest, every method has the
//! same inputs at the same time.

use units::Fraction;

use super::{
    history::{FEATURE_COUNT, OwnerHistory},
    risk::{QUANTILE_LEVELS, QuantileCurve},
    sample::VmSample,
    score::{Score, ScoreSum},
};

/// Method that predicts the untouched fraction of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Trees, limited by the history of the owner. One risk multiplier for each size class is
    /// calibrated on recent outcomes. Tarn serves the predictions of this method.
    Calibrated,
    /// Quantile of the trees at the target rate, for each VM. This is the paper's method.
    TreeQuantile,
    /// Fixed share for all VMs: the quantile of the training VMs' untouched fractions at the target
    /// rate.
    FixedShare,
    /// Lowest untouched fraction of the VMs of the same owner, minus a constant.
    OwnerMinimum,
}

/// Scores of a method at several settings.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodScores {
    /// Method that made the scored predictions.
    pub method: Method,
    /// Score for each setting: a target rate, or a constant to subtract.
    pub scores: Vec<Score>,
}

/// Constants that [`Method::OwnerMinimum`] subtracts from the lowest untouched fraction.
const SHARE_REDUCTIONS: [f64; 12] = [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4];

/// Baseline at one setting, with the sum of its scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Baseline {
    method: Method,
    /// Target rate, or constant to subtract from the lowest untouched fraction.
    setting: f64,
    sum: ScoreSum,
}

impl Baseline {
    /// Returns all baselines except the fixed share, which `backtest` computes.
    pub fn all(rates: &[Fraction]) -> Vec<Self> {
        let baseline = |method, setting| Self { method, setting, sum: ScoreSum::default() };
        let trees = rates.iter().map(|rate| baseline(Method::TreeQuantile, rate.get()));
        trees.chain(SHARE_REDUCTIONS.map(|reduction| baseline(Method::OwnerMinimum, reduction))).collect()
    }

    /// Predicts the untouched fraction of a VM from its features and the tree quantiles at its
    /// start, and adds the score of the prediction. Predicts 0 without a model or without an ended VM
    /// of the owner.
    pub fn add(&mut self, sample: &VmSample, features: &[f64; FEATURE_COUNT], trees: Option<QuantileCurve>) {
        let share = match self.method {
            Method::TreeQuantile => QUANTILE_LEVELS
                .iter()
                .rposition(|level| *level <= self.setting)
                .and_then(|level| Some(trees?.untouched_at_level(level))),
            Method::OwnerMinimum => {
                let owner = OwnerHistory::find(&sample.request.groups, features);
                owner.map(|owner| owner.lowest - self.setting)
            }
            Method::Calibrated | Method::FixedShare => None,
        };
        let share = Fraction::new(share.unwrap_or_default().max(0.0))
            .expect("a share reduced by a constant and clamped to 0 is a fraction");
        self.sum.add(share, sample);
    }

    /// Returns the scores of all baselines, grouped by method.
    pub fn method_scores(baselines: &[Self]) -> impl Iterator<Item = MethodScores> {
        let methods = baselines.chunk_by(|one, next| one.method == next.method);
        methods.map(|settings| MethodScores {
            method: settings[0].method,
            scores: settings.iter().map(|baseline| baseline.sum.score()).collect(),
        })
    }
}
