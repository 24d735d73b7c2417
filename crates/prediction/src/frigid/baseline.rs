//! Baselines for the prediction of frigid memory (Pond, section 6.4.2 and figure 10c): the paper's
//! quantile, a fixed share, and rules used in operation. The backtest gives every method the same
//! inputs at the same time.

use units::Fraction;

use super::{
    history::{FEATURES, lowest, narrowest_group},
    outcome::Groups,
    risk::{Curve, QUANTILE_LEVELS},
    sample::VmSample,
    score::{Score, ScoreSum},
};

/// Prediction method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Trees and margins with one risk multiplier for all VMs, calibrated on recent outcomes.
    Calibrated,
    /// Quantile of the trees at the target rate, for each VM (the paper's method).
    TreeQuantile,
    /// Fixed share for all VMs: the quantile of the training VMs' untouched shares at the target
    /// rate.
    FixedShare,
    /// Lowest untouched share in the narrowest group with an outcome, less some points.
    GroupMinimum,
    /// Lowest untouched share of the VM's owner, less some points.
    OwnerMinimum,
}

/// Scores of a method at each of its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodScores {
    /// Prediction method.
    pub method: Method,
    /// Scores, in the order of the settings.
    pub scores: Vec<Score>,
}

/// Settings of the minimum rules: points to subtract from the lowest share.
const POINTS_OFF: [f64; 12] = [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4];

/// Baseline at one setting: a target rate, or points to subtract.
#[derive(Clone, Copy, Debug)]
pub(super) struct Baseline {
    method: Method,
    setting: f64,
    sum: ScoreSum,
}

impl Baseline {
    /// Returns all baselines except the fixed share, which the backtest computes itself.
    pub fn all(rates: &[Fraction]) -> Vec<Self> {
        let baseline = |method, setting| Self { method, setting, sum: ScoreSum::default() };
        let trees = rates.iter().map(|rate| baseline(Method::TreeQuantile, rate.get()));
        let rules = [Method::GroupMinimum, Method::OwnerMinimum];
        trees
            .chain(rules.into_iter().flat_map(|method| POINTS_OFF.map(|points| baseline(method, points))))
            .collect()
    }

    /// Predicts a VM from its features and the tree quantiles at its start, and scores the
    /// prediction. Without a history or model nothing is predicted.
    pub fn add(&mut self, sample: &VmSample, features: &[f64; FEATURES], trees: Option<Curve>) {
        let reduced = |lowest: f64| lowest - self.setting;
        let share = match self.method {
            Method::TreeQuantile => QUANTILE_LEVELS
                .iter()
                .rposition(|level| *level <= self.setting)
                .and_then(|level| Some(trees?.at_level(level))),
            Method::GroupMinimum => narrowest_group(features).map(|(_, _, lowest)| reduced(lowest)),
            Method::OwnerMinimum => lowest(features, owner_group(&sample.request.groups)).map(reduced),
            Method::Calibrated | Method::FixedShare => None,
        };
        let share =
            Fraction::new(share.unwrap_or_default().max(0.0)).expect("a share less some points, at least 0");
        self.sum.add(share, sample);
    }

    /// Returns the scores by method.
    pub fn method_scores(baselines: &[Self]) -> impl Iterator<Item = MethodScores> {
        let methods = baselines.chunk_by(|one, next| one.method == next.method);
        methods.map(|settings| MethodScores {
            method: settings[0].method,
            scores: settings.iter().map(|baseline| baseline.sum.score()).collect(),
        })
    }
}

/// Returns the index of the owner's group; see [`Groups::owner`].
fn owner_group(groups: &Groups) -> usize {
    usize::from(!groups.key.is_empty())
}
