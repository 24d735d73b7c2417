//! Explanation of a prediction: inputs, model, prediction and operating point. Facts are shown in
//! the order of their names.

use std::{collections::BTreeMap, fmt::Write as _, sync::LazyLock};

use prediction::{
    frigid::{FEATURES, Groups, QUANTILE_LEVELS, RiskAllocation, feature_names},
    sensitivity::measured_counters,
};
use units::Fraction;

use super::state::{Foreseen, Told};

/// Names of the model's inputs.
static NAMES: LazyLock<Vec<String>> = LazyLock::new(|| feature_names().collect());
/// Levels of the curve that are shown.
const SHOWN: [usize; 6] = [2, 4, 7, 9, 11, 14];

/// By name: what was known, what was said, and where it is operated. `stake` is what was taken of frigid memory, if a model said how
/// much.
pub fn facts(foreseen: &Foreseen, stake: Option<RiskAllocation>) -> Vec<(String, String)> {
    let mut facts = told(foreseen);
    facts.extend(models(foreseen));
    if foreseen.known.prediction.is_some() {
        facts.extend(known(foreseen));
        facts.extend(features(&foreseen.known.features));
    }
    facts.extend(forecast(foreseen, stake));
    facts.extend(point(foreseen));
    facts
}

fn fact(name: impl Into<String>, value: impl Into<String>) -> (String, String) {
    (name.into(), value.into())
}

/// Properties given by the caller beside the size.
fn told(foreseen: &Foreseen) -> Vec<(String, String)> {
    let of_groups = Groups::NAMES.into_iter().zip(foreseen.begun.ask.groups.all());
    let of_groups = of_groups.filter(|(_, name)| !name.is_empty());
    let mut told: Vec<_> = of_groups.map(|(group, name)| fact(format!("told: {group}"), name)).collect();
    if let Some(counters) = &foreseen.begun.counters {
        let said = |(name, number)| format!("{name} {}", short(number));
        let measured: Vec<String> = measured_counters(counters).map(said).collect();
        told.push(fact("told: counters", measured.join(", ")));
    }
    told
}

/// Model.
fn models(foreseen: &Foreseen) -> [(String, String); 2] {
    let [frigid, sensitivity] = foreseen.serving;
    let frigid = frigid.map_or("none serves".to_owned(), |version| format!("frigid/{version}"));
    let sensitivity = match (sensitivity, foreseen.sensitivity) {
        (None, _) => "none serves".to_owned(),
        (Some(version), None) => format!("sensitivity/{version}, not asked: no counters were told"),
        (Some(version), Some(told)) => {
            let modelled = if told.modelled { ", made of MODELLED workloads" } else { "" };
            format!("sensitivity/{version}{modelled}")
        }
    };
    [fact("model of untouched memory", frigid), fact("model of sensitivity", sensitivity)]
}

/// Formats the outcomes of similar VMs, one sentence each. Fractions refer to this VM's size.
fn known(foreseen: &Foreseen) -> Vec<(String, String)> {
    let groups = Groups::NAMES.into_iter().zip(foreseen.begun.ask.groups.all());
    let groups = groups.filter(|(_, name)| !name.is_empty());
    let say = |(group, name): (&str, &str)| {
        let is_of = |of: &str, name: &str| name.split_once('.') == Some((group, of));
        let at =
            |of: &str| NAMES.iter().position(|name| is_of(of, name)).expect("it is a number of each group");
        let number = |of: &str| foreseen.known.features[at(of)];
        let said = if number("count").is_nan() {
            "no such VM has ended yet".to_owned()
        } else {
            format!(
                "{} VMs ended, the last {} h ago; as much as they touched would leave untouched of this one \
                 {} at least, {} in nine of ten late ones, {} in the middle",
                short(number("count")),
                short(number("hours_ago")),
                percent(number("lowest")),
                percent(number("tenth")),
                percent(number("median")),
            )
        };
        fact(format!("known of {group} {name}"), said)
    };
    groups.map(say).collect()
}

fn forecast(foreseen: &Foreseen, stake: Option<RiskAllocation>) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    if let Some(said) = foreseen.known.prediction {
        let level = |level: usize| {
            format!(
                "{} with a chance of {}",
                percent(said.curve.at_level(level)),
                percent(QUANTILE_LEVELS[level])
            )
        };
        let levels: Vec<String> = SHOWN.into_iter().map(level).collect();
        facts.push(fact("forecast: so much of its memory is too much", levels.join(", ")));
        facts.push(fact(
            "forecast: chances for its customer against others",
            format!("{:.2} times", said.owner_margin),
        ));
    }
    if let Some(stake) = stake {
        let taken = format!(
            "{} of its memory before rounding to slices, too much with a chance of {}",
            percent(stake.share),
            percent(stake.risk)
        );
        facts.push(fact("forecast: taken as untouched", taken));
    }
    if let Some(Told { probability, pdm, .. }) = foreseen.sensitivity {
        let said = format!("by more than {} with a chance of {}", percent(pdm.get()), percent(probability));
        facts.push(fact("forecast: slowed down by pool memory", said));
    }
    facts
}

fn point(foreseen: &Foreseen) -> Vec<(String, String)> {
    let point = &foreseen.point;
    let share = |share: Fraction| percent(share.get());
    let mut facts = vec![
        fact(
            "operated at: VMs that may be slowed down too much (X, exceed_max)",
            share(point.rules.exceed_max),
        ),
        fact("operated at: VMs that are expected to be slowed down too much", percent(point.choice.miss)),
    ];
    if let Some(appetite) = point.appetite.filter(|appetite| appetite.risk_max > 0.0) {
        facts.push(fact(
            "operated at: VMs of which too much may be taken (OP)",
            share(point.choice.frigid.op),
        ));
        facts.push(fact("operated at: risk of one VM at most", percent(appetite.risk_max)));
        let price = format!(
            "{:.1} GiB of pool memory for each VM more of which too much is taken",
            appetite.risk_multiplier
        );
        facts.push(fact("operated at: risk must bring", price));
    }
    if let Some(cut) = point.cut {
        facts.push(fact("operated at: workloads that may be placed whole wrongly (FP)", percent(cut.fp)));
        let up_to = format!("if the chance of being slowed down is at most {}", percent(cut.at_most));
        facts.push(fact("operated at: VMs are placed whole", up_to));
    }
    facts
}

/// Formats the model's features, of the VM and by group; unknown ones are left out.
fn features(row: &[f64; FEATURES]) -> impl Iterator<Item = (String, String)> {
    let mut parts: BTreeMap<&str, String> = BTreeMap::new();
    for (name, number) in NAMES.iter().zip(row).filter(|(_, number)| !number.is_nan()) {
        let (part, name) = name.split_once('.').unwrap_or(("itself", name));
        let said = parts.entry(part).or_default();
        let comma = if said.is_empty() { "" } else { ", " };
        let _ = write!(said, "{comma}{name} {}", short(*number)); // a text takes all
    }
    parts.into_iter().map(|(part, known)| fact(format!("numbers of {part}"), known))
}

/// Three digits are enough for people.
fn short(number: f64) -> String {
    if number.abs() >= 100.0 || number == number.trunc() {
        format!("{number:.0}")
    } else {
        format!("{number:.3}")
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
