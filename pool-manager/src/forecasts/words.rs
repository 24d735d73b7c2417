//! A forecast in words: what was known, what was said of it by which model, and where it is operated; for those who ask why.

use prediction::frigid::{FEATURES, Groups, LEVELS, Stake, feature_names};
use units::Fraction;

use super::state::Foreseen;

/// Levels of the curve that are shown.
const SHOWN: [usize; 6] = [2, 4, 7, 9, 11, 14];

/// By name: what was known, what was said, and where it is operated. `stake` is what was taken of frigid memory, if a model said how
/// much.
pub fn facts(foreseen: &Foreseen, stake: Option<Stake>) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut say = |name: &str, value: String| facts.push((name.to_owned(), value));
    for (group, name) in Groups::NAMES.into_iter().zip(foreseen.begun.ask.groups.all()) {
        if !name.is_empty() {
            say(group, name.to_owned());
        }
    }
    if let Some(said) = foreseen.known.said {
        for (part, known) in features(&foreseen.known.features) {
            say(&format!("features of {part}"), known);
        }
        let level =
            |level: usize| format!("{} with {}", percent(said.curve.at_level(level)), percent(LEVELS[level]));
        let levels: Vec<String> = SHOWN.into_iter().map(level).collect();
        say("forecast: too much of the memory, with which probability", levels.join(", "));
        say("forecast: caution for its owner", format!("{:.2}", said.caution));
    }
    if let Some(stake) = stake {
        say(
            "forecast: untouched",
            format!("{}, too much with {}", percent(stake.share), percent(stake.risk)),
        );
    }
    if let Some((_, probability, pdm)) = foreseen.sensitivity {
        let said = format!("{} to be slowed down by more than {}", percent(probability), percent(pdm.get()));
        say("forecast: sensitivity", said);
    }
    facts.extend(point(foreseen));
    facts
}

fn point(foreseen: &Foreseen) -> Vec<(String, String)> {
    let point = &foreseen.point;
    let say = |name: &str, value: String| (format!("operated at: {name}"), value);
    let share = |share: Fraction| percent(share.get());
    let mut facts = vec![
        say("X, VMs that may be slowed down too much", share(point.rules.exceed_max)),
        say("expected to be", percent(point.choice.miss)),
    ];
    if let Some(appetite) = point.appetite {
        let price = format!("{:.3} GiB for one VM more", appetite.price);
        facts.push(say("OP, VMs of which too much may be taken", share(point.choice.frigid.op)));
        facts.push(say("price of risk", price));
        facts.push(say("most risk of one VM", percent(appetite.risk_max)));
    }
    if let Some(cut) = point.cut {
        facts.push(say("FP, workloads that may be placed whole wrongly", percent(cut.fp)));
        facts.push(say("placed whole up to", percent(cut.at_most)));
    }
    facts
}

/// What is known, of the VM itself and group by group; nothing is said of what is not known.
fn features(row: &[f64; FEATURES]) -> Vec<(String, String)> {
    let mut parts: Vec<(String, Vec<String>)> = Vec::new();
    let known = feature_names().zip(row).filter(|(_, number)| !number.is_nan());
    for (name, number) in known {
        let (part, name) = name.split_once('.').unwrap_or(("itself", &name));
        let said = format!("{name} {}", short(*number));
        match parts.last_mut() {
            Some((last, known)) if last == part => known.push(said),
            _ => parts.push((part.to_owned(), vec![said])),
        }
    }
    parts.into_iter().map(|(part, known)| (part, known.join(", "))).collect()
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
