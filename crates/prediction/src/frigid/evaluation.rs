//! Results of a backtest at one target rate: overall, by size class and by owner, and in comparison
//! with the simple rule. VMs without a forecast are counted, but are not part of any rate or share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use units::{Bytes, Fraction};

use super::{
    calibration::total_and_clustered_deviation,
    history::to_gib,
    risk::{SIZE_CLASSES, SizeBounds, is_overprediction},
    sample::VmSample,
    score::{Score, ScoreSum},
};

/// Result of a backtest at one target rate of overpredictions. All values except numbers of VMs are
/// fractions, 0 to 1. Rates and shares are of the VMs with a forecast.
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
    /// Number of tested VMs with a forecast.
    pub vms: u32,
    /// Number of tested VMs without a forecast: no model was trained yet, too few VMs of the owner had
    /// ended, or the size class had too few outcomes.
    pub vms_without_forecast: u32,
}

/// Result of a backtest at one target rate, with its parts and the simple rule for comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Result for all VMs.
    #[serde(flatten)]
    pub result: BacktestResult,
    /// Half-width of the 95 % confidence interval of the observed rate. The VMs of one owner are one
    /// cluster.
    pub rate_margin: f64,
    /// Memory of the tested VMs without a forecast, as a fraction of the memory of all tested VMs.
    pub memory_without_forecast: f64,
    /// Result of the simple rule for the same VMs.
    pub rule: RuleResult,
    /// Results by size class, smallest VMs first. The classes are thirds of the VMs; VMs of equal
    /// size are in the same class.
    pub by_size: Vec<SizeClassResult>,
    /// Results by owner.
    pub by_owner: OwnerResults,
}

/// Result of the simple rule: the lowest untouched fraction of the owner's ended VMs, minus a
/// constant. All values are fractions, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RuleResult {
    /// Fraction of overpredicted VMs with the constant that split conformal prediction learns from
    /// the latest outcomes.
    pub rate: f64,
    /// Predicted fraction of memory with this constant.
    pub share: f64,
    /// Predicted fraction of memory with the smallest constant, known only in hindsight, with at most
    /// as many overpredictions as the predictions of Tarn.
    pub share_in_hindsight: f64,
}

/// Result for the VMs of one size class.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizeClassResult {
    /// Requested memory of the smallest VM of the class.
    pub smallest: Bytes,
    /// Requested memory of the largest VM of the class.
    pub largest: Bytes,
    /// Number of VMs.
    pub vms: u32,
    /// Observed fraction of overpredicted VMs.
    pub rate: f64,
    /// Predicted fraction of the memory of these VMs.
    pub share: f64,
}

/// Results by owner.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OwnerResults {
    /// Number of owners.
    pub owners: u32,
    /// Number of owners with a fraction of overpredicted VMs above the target rate.
    pub above_target: u32,
    /// Owners with the most overpredicted VMs, at most [`WORST_OWNERS_MAX`], most first.
    pub worst: Vec<OwnerRate>,
}

/// Number of overpredicted VMs of one owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OwnerRate {
    /// Kind of group and name of the owner.
    pub owner: String,
    /// Number of overpredicted VMs.
    pub overpredicted: u32,
    /// Number of VMs.
    pub vms: u32,
}

/// Largest number of owners in [`OwnerResults::worst`].
const WORST_OWNERS_MAX: usize = 5;
/// Quantile of the standard normal distribution for a two-sided confidence level of 95 %.
const INTERVAL_SIGMAS: f64 = 1.96;

/// Method that predicts the untouched fraction of a VM. Except for the first, the methods are
/// baselines (Pond, section 6.4.2 and figure 10c). All have the same inputs at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Trees, limited by the history of the owner. One risk multiplier for each size class is
    /// calibrated on recent outcomes. Tarn serves the predictions of this method.
    Calibrated,
    /// Quantile of the trees at the target rate, for each VM. This is the paper's method.
    TreeQuantile,
    /// Simple rule that operators use: lowest untouched fraction of the owner's ended VMs, minus a
    /// constant that is learned from the latest outcomes.
    OwnerMinimum,
    /// Fixed share for all VMs: the quantile of the training VMs' untouched fractions at the target
    /// rate.
    FixedShare,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 4] = [Self::Calibrated, Self::TreeQuantile, Self::OwnerMinimum, Self::FixedShare];
}

/// Scores of a method at several target rates.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodScores {
    /// Method that made the scored predictions.
    pub method: Method,
    /// Score for each target rate.
    pub scores: Vec<Score>,
}

/// Tested VM with the predictions of all methods at one target rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoredVm<'a> {
    pub sample: &'a VmSample,
    /// Prediction of [`Method::Calibrated`]. `None` if the VM has no forecast.
    pub forecast: Option<Fraction>,
    /// Prediction of [`Method::TreeQuantile`].
    pub tree_quantile: Fraction,
    /// Prediction of [`Method::FixedShare`].
    pub fixed_share: Fraction,
    /// Lowest untouched fraction of the owner's ended VMs. `None` if no VM of the owner has ended.
    pub owner_lowest: Option<f64>,
    /// Constant of the simple rule. `None` if it has too few outcomes.
    pub rule_constant: Option<f64>,
}

impl ScoredVm<'_> {
    /// Returns the prediction of a method. A method without a prediction predicts 0.
    fn share(&self, method: Method) -> Fraction {
        match method {
            Method::Calibrated => self.forecast.unwrap_or_default(),
            Method::TreeQuantile => self.tree_quantile,
            Method::OwnerMinimum => self.rule_constant.map(|c| self.rule_share(c)).unwrap_or_default(),
            Method::FixedShare => self.fixed_share,
        }
    }

    /// Returns the prediction of the simple rule with this constant.
    fn rule_share(&self, constant: f64) -> Fraction {
        let share = self.owner_lowest.map_or(0.0, |lowest| lowest - constant);
        Fraction::new(share.clamp(0.0, 1.0)).expect("clamped to a fraction")
    }

    fn is_overpredicted(&self) -> bool {
        let VmSample { request, outcome, .. } = self.sample;
        is_overprediction(self.share(Method::Calibrated), request.requested, outcome.untouched)
    }
}

/// Evaluates the forecasts of VMs at a target rate.
pub(super) fn evaluate(scored: &[ScoredVm<'_>], rate: Fraction) -> Evaluation {
    let (vms, without_forecast): (Vec<_>, Vec<_>) = scored.iter().partition(|vm| vm.forecast.is_some());
    let (calibrated, fixed) =
        (score_method(&vms, Method::Calibrated), score_method(&vms, Method::FixedShare));
    let owners = owner_rates(&vms);
    let counts = owners.iter().map(|owner| (owner.overpredicted, owner.vms));
    let (_, deviation) = total_and_clustered_deviation(counts);
    // A float sum of no numbers is -0.
    let gib =
        |vms: &[ScoredVm<'_>]| vms.iter().fold(0.0, |sum, vm| sum + to_gib(vm.sample.request.requested));
    let (gib_without_forecast, all_gib) = (gib(&without_forecast), gib(scored));
    let count = |vms: usize| u32::try_from(vms).expect("fewer VMs than u32::MAX");
    let result = BacktestResult {
        rate_target: rate.get(),
        rate_actual: calibrated.rate,
        frigid_share: calibrated.share,
        slice_share: calibrated.slice_share,
        slice_rate: calibrated.slice_rate,
        static_share: fixed.share,
        static_rate: fixed.rate,
        vms: count(vms.len()),
        vms_without_forecast: count(without_forecast.len()),
    };
    Evaluation {
        result,
        rate_margin: INTERVAL_SIGMAS * deviation / f64::from(result.vms.max(1)),
        memory_without_forecast: if all_gib > 0.0 { gib_without_forecast / all_gib } else { 0.0 },
        rule: rule_result(&vms),
        by_size: size_results(&vms),
        by_owner: OwnerResults::new(owners, rate),
    }
}

/// Scores the simple rule on VMs with a forecast.
fn rule_result(vms: &[ScoredVm<'_>]) -> RuleResult {
    let learned = score_method(vms, Method::OwnerMinimum);
    let overpredicted = vms.iter().filter(|vm| vm.is_overpredicted()).count();
    let mut constants: Vec<f64> =
        vms.iter().filter_map(|vm| Some(vm.owner_lowest? - vm.sample.outcome.untouched.get())).collect();
    constants.sort_unstable_by(|one, other| other.total_cmp(one));
    // With this constant, the rule overpredicts only VMs with a larger difference.
    let constant = constants.get(overpredicted).map_or(0.0, |constant| constant.max(0.0));
    RuleResult {
        rate: learned.rate,
        share: learned.share,
        share_in_hindsight: score(vms, |vm| vm.rule_share(constant)).share,
    }
}

/// Returns the results of the thirds of VMs with a forecast.
fn size_results(vms: &[ScoredVm<'_>]) -> Vec<SizeClassResult> {
    let sizes: Vec<Bytes> = vms.iter().map(|vm| vm.sample.request.requested).collect();
    let Some(bounds) = SizeBounds::thirds(sizes) else { return Vec::new() };
    let mut classes: [Vec<ScoredVm<'_>>; SIZE_CLASSES] = std::array::from_fn(|_| Vec::new());
    vms.iter().for_each(|vm| classes[bounds.class(vm.sample.request.requested)].push(*vm));
    classes.iter().filter_map(|vms| SizeClassResult::new(vms)).collect()
}

/// Returns the overpredictions of each owner. VMs of unknown owners are one owner.
fn owner_rates(vms: &[ScoredVm<'_>]) -> Vec<OwnerRate> {
    let mut counts: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    for vm in vms {
        let owner = vm.sample.request.groups.owner().unwrap_or_default();
        let (overpredicted, vms) = counts.entry(owner).or_default();
        *overpredicted += u32::from(vm.is_overpredicted());
        *vms += 1;
    }
    counts.into_iter().map(|(owner, (overpredicted, vms))| OwnerRate { owner, overpredicted, vms }).collect()
}

impl SizeClassResult {
    /// Returns `None` if there is no VM.
    fn new(vms: &[ScoredVm<'_>]) -> Option<Self> {
        let sizes = || vms.iter().map(|vm| vm.sample.request.requested);
        let Score { rate, share, .. } = score_method(vms, Method::Calibrated);
        let vms = u32::try_from(vms.len()).expect("fewer VMs than u32::MAX");
        Some(Self { smallest: sizes().min()?, largest: sizes().max()?, vms, rate, share })
    }
}

impl OwnerResults {
    fn new(mut rates: Vec<OwnerRate>, rate: Fraction) -> Self {
        let is_above =
            |owner: &&OwnerRate| f64::from(owner.overpredicted) > rate.get() * f64::from(owner.vms);
        let count = |owners: usize| u32::try_from(owners).expect("fewer owners than u32::MAX");
        let (owners, above_target) = (count(rates.len()), count(rates.iter().filter(is_above).count()));
        rates.sort_by_key(|owner| std::cmp::Reverse(owner.overpredicted));
        rates.truncate(WORST_OWNERS_MAX);
        rates.retain(|owner| owner.overpredicted > 0);
        Self { owners, above_target, worst: rates }
    }
}

/// Scores a method on VMs.
pub(super) fn score_method(vms: &[ScoredVm<'_>], method: Method) -> Score {
    score(vms, |vm| vm.share(method))
}

/// Scores predicted fractions of VMs.
fn score<'a>(vms: &[ScoredVm<'a>], share: impl Fn(&ScoredVm<'a>) -> Fraction) -> Score {
    let mut sum = ScoreSum::default();
    vms.iter().for_each(|vm| sum.add(share(vm), vm.sample));
    sum.score()
}
