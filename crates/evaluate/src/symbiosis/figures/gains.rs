//! Figure 6: gains of schemes over an equal split, for each kind of tenant. A second figure shows
//! the gains of all tenants and of the worst-off tenant for each mix. The latencies in the paper's
//! figure are omitted, because traces contain no requests with a latency.

use serde::Serialize;
use sim::symbiosis::{Kind, Outcome, SMALL_HOST_TENANTS, Scheme};
use units::Fraction;

use super::{ComparedMix, FigureInputs};
use crate::{
    figure::{Figure, Panel, Point, Scale, Series, SeriesStyle},
    percent,
};

/// Schemes that are compared with an equal split, with their names in the legend.
const SCHEMES: [(Scheme, &str); 5] = [
    (Scheme::Harvest, "Harvest"),
    (Scheme::Trade, "Trade"),
    (Scheme::Market, "market alone"),
    (Scheme::Symbiosis, "Symbiosis"),
    (Scheme::Ideal, "ideal: exact miss ratios, grid of 1/200"),
];
/// Kinds of tenants, named by the resource that bounds their throughput.
const KINDS: [(Kind, &str); 3] =
    [(Kind::Bandwidth, "bandwidth"), (Kind::Memory, "bandwidth and memory"), (Kind::Compute, "processor")];

/// Gains of a scheme for the tenants of one kind. Gains are throughputs relative to an equal split,
/// minus 1.
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

/// Gains of a scheme for a mix of tenants.
#[derive(Serialize)]
pub(super) struct MixGain {
    mix: String,
    scheme: &'static str,
    /// Geometric mean of all tenants' throughputs relative to an equal split, minus 1.
    gain: f64,
    /// Throughput of the worst-off tenant relative to an equal split, minus 1.
    worst_off: f64,
}

/// Draws the gains by kind of tenant for the large mix, with the given memory and with twice as
/// much.
pub(super) fn draw_by_kind(inputs: &FigureInputs) -> (Figure, Vec<KindGain>) {
    let large_mix = inputs.compared.iter().find(|compared| compared.mix.tenants.len() > SMALL_HOST_TENANTS);
    let ComparedMix { mix, outcomes } = large_mix.expect("there is a mix of all traces");
    let twice = Fraction::new((2.0 * inputs.memory.get()).min(1.0)).expect("the fraction is at most 1");
    let with_twice = ComparedMix::new(mix.clone(), twice);
    let small = (inputs.memory, outcomes, "(a)");
    let rows = [small, (twice, &with_twice.outcomes, "(b)")].map(|(memory, outcomes, label)| {
        let host = sim::symbiosis::Host { memory: memory.get() * mix.tenants.len() as f64 };
        let equal = host.equal(mix.tenants.len());
        let kinds: Vec<Kind> = mix.tenants.iter().map(|tenant| tenant.kind(equal)).collect();
        let rows = compute_gains(memory, &mix.name, &kinds, outcomes);
        let title =
            format!("{label} {} tenants, memory for {} of footprints", kinds.len(), percent(memory.get()));
        (panel(title, &kinds, &rows), rows)
    });
    let [(panel_a, mut numbers), (panel_b, numbers_b)] = rows;
    numbers.extend(numbers_b);
    (Figure(vec![panel_a, panel_b]), numbers)
}

fn compute_gains(memory: Fraction, mix: &str, kinds: &[Kind], outcomes: &[Outcome]) -> Vec<KindGain> {
    let mut rows = Vec::new();
    for (scheme, _) in SCHEMES {
        let Some(outcome) = outcomes.iter().find(|outcome| outcome.scheme == scheme) else { continue };
        for (kind, name) in KINDS {
            let of_kind =
                kinds.iter().zip(&outcome.relative_throughputs).filter(|(other, _)| **other == kind);
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

/// Draws one bar per scheme for each kind of tenant in the mix.
fn panel(title: String, kinds: &[Kind], rows: &[KindGain]) -> Panel {
    let present: Vec<(&str, usize)> = KINDS
        .iter()
        .map(|(kind, name)| (*name, kinds.iter().filter(|other| *other == kind).count()))
        .filter(|(_, tenants)| *tenants > 0)
        .collect();
    let place = |kind: &str| present.iter().position(|(name, _)| *name == kind).unwrap_or_default() as f64;
    let series = SCHEMES.iter().enumerate().map(|(index, (scheme, name))| Series {
        name: (*name).to_owned(),
        style: SeriesStyle::Bar(index),
        points: rows
            .iter()
            .filter(|row| row.scheme == scheme.name())
            .map(|row| Point { x: place(row.kind), y: row.mean, error_bar: Some((row.worst, row.best)) })
            .collect(),
    });
    Panel {
        title,
        x_title: "Tenants bound by (error bars: worst-off to best-off tenant)",
        y_title: "Gain in throughput over an equal split (%)",
        x: Scale::Names(present.iter().map(|(name, tenants)| format!("{name} ({tenants})")).collect()),
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: series.collect(),
    }
}

/// Draws the gains of all schemes for each mix.
pub(super) fn draw_by_mix(inputs: &FigureInputs) -> (Figure, Vec<MixGain>) {
    let panel = |title: &str, y_title, value: fn(&Outcome) -> f64| Panel {
        title: title.to_owned(),
        x_title: "",
        y_title,
        x: Scale::Names(inputs.compared.iter().map(|compared| compared.mix.name.clone()).collect()),
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: SCHEMES
            .iter()
            .enumerate()
            .map(|(index, (scheme, name))| Series {
                name: (*name).to_owned(),
                style: SeriesStyle::Mark(index),
                points: outcomes_of_scheme(inputs, *scheme)
                    .map(|(x, outcome)| Point::new(x, value(outcome)))
                    .collect(),
            })
            .collect(),
    };
    let figure = Figure(vec![
        panel(
            "(a) All tenants of a mix",
            "Gain of the geometric mean over an equal split (%)",
            Outcome::gain,
        ),
        panel("(b) Worst-off tenant of a mix", "Gain in throughput over an equal split (%)", |outcome| {
            outcome.worst() - 1.0
        }),
    ]);
    let numbers = inputs.compared.iter().flat_map(|compared| {
        compared.outcomes.iter().map(|outcome| MixGain {
            mix: compared.mix.name.clone(),
            scheme: outcome.scheme.name(),
            gain: outcome.gain(),
            worst_off: outcome.worst() - 1.0,
        })
    });
    (figure, numbers.collect())
}

/// Returns the outcomes of a scheme, each with the index of its mix.
fn outcomes_of_scheme(inputs: &FigureInputs, scheme: Scheme) -> impl Iterator<Item = (f64, &Outcome)> {
    inputs.compared.iter().enumerate().filter_map(move |(index, compared)| {
        Some((index as f64, compared.outcomes.iter().find(|outcome| outcome.scheme == scheme)?))
    })
}
