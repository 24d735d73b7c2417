//! Figure 6: gains of schemes over an equal split, for each kind of tenant, and for all tenants and
//! the worst-off of each mix. The paper's latencies have no counterpart in traces.

use serde::Serialize;
use sim::symbiosis::{Kind, Outcome, SMALL_HOST_TENANTS, Scheme};
use units::Fraction;

use super::{ComparedMix, FigureInputs};
use crate::{
    figure::{Figure, Panel, Point, Scale, Series, SeriesStyle},
    percent,
};

/// Schemes compared with an equal split, the simplest first.
const SCHEMES: [(Scheme, &str); 6] = [
    (Scheme::Harvest, "Harvest"),
    (Scheme::Trade, "Trade"),
    (Scheme::Market, "the market alone"),
    (Scheme::WithoutEnvy, "Symbiosis, refined without envy"),
    (Scheme::Symbiosis, "Symbiosis, refined"),
    (Scheme::Ideal, "ideal: known beforehand, on a grid of 1/200"),
];
const KINDS: [(Kind, &str); 3] =
    [(Kind::Bandwidth, "bandwidth"), (Kind::Memory, "memory too"), (Kind::Compute, "processor")];

/// Gain of a scheme for a kind of tenant.
#[derive(Serialize)]
pub(super) struct KindGain {
    memory: f64,
    mix: String,
    scheme: &'static str,
    kind: &'static str,
    tenants: usize,
    mean: f64,
    worst: f64,
    best: f64,
}

/// Gain of a scheme for a mix.
#[derive(Serialize)]
pub(super) struct MixGain {
    mix: String,
    scheme: &'static str,
    /// For all tenants: the geometric mean.
    gain: f64,
    worst_off: f64,
}

/// Results of the large mix, and of the same with twice the memory.
pub(super) fn by_kind(inputs: &FigureInputs) -> (Figure, Vec<KindGain>) {
    let large_mix = inputs.compared.iter().find(|one| one.mix.tenants.len() > SMALL_HOST_TENANTS);
    let ComparedMix { mix, outcomes } = large_mix.expect("there is a mix of all traces");
    let twice = Fraction::new((2.0 * inputs.memory.get()).min(1.0)).expect("no more than all");
    let with_twice = ComparedMix::new(mix.clone(), twice);
    let small = (inputs.memory, outcomes, "(a)");
    let rows = [small, (twice, &with_twice.outcomes, "(b)")].map(|(memory, outcomes, nth)| {
        let host = sim::symbiosis::Host { memory: memory.get() * mix.tenants.len() as f64 };
        let equal = host.equal(mix.tenants.len());
        let kinds: Vec<Kind> = mix.tenants.iter().map(|tenant| tenant.kind(equal)).collect();
        let rows = rows(memory, &mix.name, &kinds, outcomes);
        let title =
            format!("{nth} {} tenants, memory for {} of what they touch", kinds.len(), percent(memory.get()));
        (panel(title, &kinds, &rows), rows)
    });
    let [(one, mut numbers), (other, more)] = rows;
    numbers.extend(more);
    (Figure(vec![one, other]), numbers)
}

fn rows(memory: Fraction, mix: &str, kinds: &[Kind], outcomes: &[Outcome]) -> Vec<KindGain> {
    let mut rows = Vec::new();
    for (scheme, _) in SCHEMES {
        let Some(outcome) = outcomes.iter().find(|outcome| outcome.scheme == scheme) else { continue };
        for (kind, name) in KINDS {
            let of_kind = kinds.iter().zip(&outcome.against_equal).filter(|(other, _)| **other == kind);
            let gains: Vec<f64> = of_kind.map(|(_, times)| times - 1.0).collect();
            if gains.is_empty() {
                continue;
            }
            rows.push(KindGain {
                memory: memory.get(),
                mix: mix.to_owned(),
                scheme: scheme.name(),
                kind: name,
                tenants: gains.len(),
                mean: gains.iter().sum::<f64>() / gains.len() as f64,
                worst: gains.iter().copied().fold(f64::INFINITY, f64::min),
                best: gains.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            });
        }
    }
    rows
}

/// Returns bars of each existing kind.
fn panel(title: String, kinds: &[Kind], rows: &[KindGain]) -> Panel {
    let present: Vec<(&str, usize)> = KINDS
        .iter()
        .map(|(kind, name)| (*name, kinds.iter().filter(|other| *other == kind).count()))
        .filter(|(_, tenants)| *tenants > 0)
        .collect();
    let place = |kind: &str| present.iter().position(|(name, _)| *name == kind).unwrap_or_default() as f64;
    let series = SCHEMES.iter().enumerate().map(|(nth, (scheme, name))| Series {
        name: (*name).to_owned(),
        style: SeriesStyle::Bar(nth),
        points: rows
            .iter()
            .filter(|row| row.scheme == scheme.name())
            .map(|row| Point { x: place(row.kind), y: row.mean, bar: Some((row.worst, row.best)) })
            .collect(),
    });
    Panel {
        title,
        x_title: "Tenants bound by (bars: from the worst-off to the best)",
        y_title: "Throughput beyond an equal split (%)",
        x: Scale::Names(present.iter().map(|(name, tenants)| format!("{name} ({tenants})")).collect()),
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: series.collect(),
    }
}

/// Returns the gains of every mix.
pub(super) fn by_mix(inputs: &FigureInputs) -> (Figure, Vec<MixGain>) {
    let panel = |title: &str, y_title, value: fn(&Outcome) -> f64| Panel {
        title: title.to_owned(),
        x_title: "",
        y_title,
        x: Scale::Names(inputs.compared.iter().map(|one| one.mix.name.clone()).collect()),
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: SCHEMES
            .iter()
            .enumerate()
            .map(|(nth, (scheme, name))| Series {
                name: (*name).to_owned(),
                style: SeriesStyle::Mark(nth),
                points: of_scheme(inputs, *scheme).map(|(x, one)| Point::new(x, value(one))).collect(),
            })
            .collect(),
    };
    let figure = Figure(vec![
        panel("(a) All tenants of a mix", "Geometric mean beyond an equal split (%)", Outcome::gain),
        panel("(b) The worst-off of a mix", "Throughput beyond an equal split (%)", |one| one.worst() - 1.0),
    ]);
    let numbers = inputs.compared.iter().flat_map(|one| {
        one.outcomes.iter().map(|outcome| MixGain {
            mix: one.mix.name.clone(),
            scheme: outcome.scheme.name(),
            gain: outcome.gain(),
            worst_off: outcome.worst() - 1.0,
        })
    });
    (figure, numbers.collect())
}

/// Returns points with the number of each mix.
fn of_scheme(inputs: &FigureInputs, scheme: Scheme) -> impl Iterator<Item = (f64, &Outcome)> {
    inputs.compared.iter().enumerate().filter_map(move |(at, one)| {
        Some((at as f64, one.outcomes.iter().find(|outcome| outcome.scheme == scheme)?))
    })
}
