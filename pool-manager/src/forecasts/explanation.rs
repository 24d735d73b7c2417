//! Explains a prediction as facts for `tarn explain`: inputs, models, predictions and operating
//! point.

use std::{collections::BTreeMap, fmt::Write as _, sync::LazyLock};

use prediction::{
    frigid::{FEATURE_COUNT, Groups, QUANTILE_LEVELS, RiskAllocation, feature_names},
    sensitivity::measured_counters,
};
use units::Fraction;

use super::state::{SensitivityPrediction, VmForecast};

/// Names of the features of the model for frigid memory, in the order of its input row.
static FEATURE_NAMES: LazyLock<Vec<String>> = LazyLock::new(|| feature_names().collect());
/// Indices in [`QUANTILE_LEVELS`] of the risk curve points that an explanation shows.
const EXPLAINED_LEVEL_INDICES: [usize; 6] = [2, 4, 7, 9, 11, 14];

/// Returns the facts of a prediction as pairs of name and value. `allocation` is the predicted
/// frigid memory that was placed on the pool, if a model predicted any.
pub fn explain_prediction(
    forecast: &VmForecast,
    allocation: Option<RiskAllocation>,
) -> Vec<(String, String)> {
    let mut facts = request_details(forecast);
    facts.extend(model_details(forecast));
    if forecast.assessment.prediction.is_some() {
        facts.extend(history_details(forecast));
        facts.extend(feature_details(&forecast.assessment.features));
    }
    facts.extend(prediction_details(forecast, allocation));
    facts.extend(operating_point_details(forecast));
    facts
}

fn to_detail(name: impl Into<String>, value: impl Into<String>) -> (String, String) {
    (name.into(), value.into())
}

/// Returns the VM's groups and performance counters from the request.
fn request_details(forecast: &VmForecast) -> Vec<(String, String)> {
    let of_groups = Groups::NAMES.into_iter().zip(forecast.start.request.groups.all());
    let of_groups = of_groups.filter(|(_, name)| !name.is_empty());
    let mut facts: Vec<_> =
        of_groups.map(|(group, name)| to_detail(format!("request: {group}"), name)).collect();
    if let Some(counters) = &forecast.start.counters {
        let text = |(name, number)| format!("{name} {}", format_number(number));
        let measured: Vec<String> = measured_counters(counters).map(text).collect();
        facts.push(to_detail("request: counters", measured.join(", ")));
    }
    facts
}

/// Returns the versions of the serving models.
fn model_details(forecast: &VmForecast) -> [(String, String); 2] {
    let [frigid, sensitivity] = forecast.serving;
    let frigid = frigid.map_or("no serving model".to_owned(), |version| format!("frigid/{version}"));
    let sensitivity = match (sensitivity, forecast.sensitivity) {
        (None, _) => "no serving model".to_owned(),
        (Some(version), None) => format!("sensitivity/{version}, unused: the request has no counters"),
        (Some(version), Some(prediction)) => {
            let modelled = if prediction.modelled { ", trained on MODELLED workloads" } else { "" };
            format!("sensitivity/{version}{modelled}")
        }
    };
    [to_detail("model: frigid memory", frigid), to_detail("model: latency sensitivity", sensitivity)]
}

/// Returns one sentence about the ended VMs of each group to which the VM belongs. Fractions are
/// relative to the size of the new VM.
fn history_details(forecast: &VmForecast) -> Vec<(String, String)> {
    let groups = Groups::NAMES.into_iter().zip(forecast.start.request.groups.all());
    let groups = groups.filter(|(_, name)| !name.is_empty());
    let history = |(group, name): (&str, &str)| {
        let is_of = |of: &str, name: &str| name.split_once('.') == Some((group, of));
        let at = |of: &str| {
            FEATURE_NAMES
                .iter()
                .position(|name| is_of(of, name))
                .expect("the model has these features for each group")
        };
        let number = |of: &str| forecast.assessment.features[at(of)];
        let text = if number("count").is_nan() {
            "no VM of this group has ended".to_owned()
        } else {
            format!(
                "{} VMs ended, the last {} h ago; untouched memory of this VM if it behaves like them: \
                 minimum {}, 10th percentile of recent VMs {}, median {}",
                format_number(number("count")),
                format_number(number("hours_ago")),
                format_percent(number("lowest")),
                format_percent(number("tenth")),
                format_percent(number("median")),
            )
        };
        to_detail(format!("history: {group} {name}"), text)
    };
    groups.map(history).collect()
}

fn prediction_details(forecast: &VmForecast, allocation: Option<RiskAllocation>) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    if let Some(curve) = forecast.assessment.prediction {
        let level = |level: usize| {
            format!(
                "{} with probability {}",
                format_percent(curve.untouched_at_level(level)),
                format_percent(QUANTILE_LEVELS[level])
            )
        };
        let levels: Vec<String> = EXPLAINED_LEVEL_INDICES.into_iter().map(level).collect();
        facts.push(to_detail(
            "prediction: fractions of memory that would be overpredicted",
            levels.join(", "),
        ));
    }
    if let Some(allocation) = allocation {
        let text = format!(
            "{} of the VM's memory before rounding to slices, overpredicted with probability {}",
            format_percent(allocation.share),
            format_percent(allocation.risk)
        );
        facts.push(to_detail("prediction: frigid memory taken", text));
    }
    if let Some(SensitivityPrediction { probability, pdm, .. }) = forecast.sensitivity {
        let text = format!(
            "more than {} with probability {}",
            format_percent(pdm.get()),
            format_percent(probability)
        );
        facts.push(to_detail("prediction: slowdown on pool memory", text));
    }
    facts
}

fn operating_point_details(forecast: &VmForecast) -> Vec<(String, String)> {
    let point = &forecast.point;
    let share = |share: Fraction| format_percent(share.get());
    let mut facts = vec![
        to_detail(
            "operating point: allowed fraction of VMs beyond the PDM (X, exceed_max)",
            share(point.limits.exceed_max),
        ),
        to_detail(
            "operating point: expected fraction of VMs beyond the PDM",
            format_percent(point.choice.miss),
        ),
    ];
    if let Some(risk_limit) = point.risk_limit.filter(|risk_limit| risk_limit.risk_max > 0.0) {
        facts.push(to_detail("operating point: rate of overpredictions (OP)", share(point.choice.frigid.op)));
        facts.push(to_detail("operating point: maximum risk per VM", format_percent(risk_limit.risk_max)));
        let requested = forecast.start.request.requested;
        if let Some(risk_multiplier) = risk_limit.risk_multiplier(requested) {
            let text = format!(
                "{risk_multiplier:.1} GiB of pool memory per additional overpredicted VM of this size"
            );
            facts.push(to_detail("operating point: risk multiplier", text));
        }
    }
    if let Some(cutoff) = point.cutoff {
        facts.push(to_detail("operating point: rate of false positives (FP)", format_percent(cutoff.fp)));
        let up_to = format!("if the probability of a slowdown is at most {}", format_percent(cutoff.at_most));
        facts.push(to_detail("operating point: placement on pool memory only", up_to));
    }
    facts
}

/// Returns the model's features of the VM and of each group, without unknown features.
fn feature_details(row: &[f64; FEATURE_COUNT]) -> impl Iterator<Item = (String, String)> {
    let mut parts: BTreeMap<&str, String> = BTreeMap::new();
    for (name, number) in FEATURE_NAMES.iter().zip(row).filter(|(_, number)| !number.is_nan()) {
        let (part, name) = name.split_once('.').unwrap_or(("this VM", name));
        let text = parts.entry(part).or_default();
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}{name} {}", format_number(*number)); // writing to a string cannot fail
    }
    parts.into_iter().map(|(part, features)| to_detail(format!("features: {part}"), features))
}

/// Formats whole numbers and numbers of at least 100 without decimals, and other numbers with three
/// decimals.
fn format_number(number: f64) -> String {
    if number.abs() >= 100.0 || number == number.trunc() {
        format!("{number:.0}")
    } else {
        format!("{number:.3}")
    }
}

fn format_percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
