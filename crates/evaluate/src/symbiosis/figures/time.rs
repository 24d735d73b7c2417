//! Figure 8: time of a market for growing numbers of tenants, on this machine; the paper states
//! upper bounds for its own.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use serde::Serialize;
use sim::symbiosis::ScalingTenants;
use units::limits::REFINEMENT_TENANTS_MAX;

use super::{FigureInputs, line};
use crate::figure::{Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Tenants of the first market; each has twice as many as the previous one.
const FIRST: usize = 6;
const MARKETS: u32 = 9;
/// Time for which a call is repeated.
const MEASURED_DURATION: Duration = Duration::from_millis(300);
/// No market larger than the first that takes this long.
const SLOW_MS: f64 = 2_000.0;
/// Tenants, and maximum milliseconds, of Spirit (6.2).
const SPIRIT_BOUNDS: [(f64, f64); 2] = [(24.0, 1_000.0), (1_000.0, 20_000.0)];

/// Medians, in milliseconds.
#[derive(Serialize)]
pub(super) struct Row {
    tenants: usize,
    /// From miss ratios to shares, cold.
    cold_ms: f64,
    /// One epoch later, after small changes.
    warm_ms: f64,
    /// Cold, and refined regardless of envy; `None` for too many tenants.
    refined_ms: Option<f64>,
    /// Prices evaluated, cold and warm.
    cold_rounds: u32,
    warm_rounds: u32,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, Vec<Row>) {
    let mut rows: Vec<Row> = Vec::new();
    for double in 0..MARKETS {
        if rows.last().is_some_and(|row| row.cold_ms.max(row.refined_ms.unwrap_or_default()) > SLOW_MS) {
            break;
        }
        rows.push(Row::measure(&ScalingTenants::new(&inputs.tenants, FIRST << double, inputs.memory.get())));
    }
    let of = |time: fn(&Row) -> Option<f64>| {
        rows.iter().filter_map(move |row| Some((row.tenants as f64, time(row)?)))
    };
    let series = vec![
        line(0, "a market, from miss ratios to shares", of(|row| Some(row.cold_ms))),
        line(1, "a market an epoch later, sought near the last", of(|row| Some(row.warm_ms))),
        line(
            2,
            format!("a market, refined: with {REFINEMENT_TENANTS_MAX} tenants at most"),
            of(|row| row.refined_ms),
        ),
        Series {
            name: "Spirit's allocator by its paper, on its machine: at most".to_owned(),
            style: SeriesStyle::Ring,
            points: SPIRIT_BOUNDS.map(|(tenants, ms)| Point::new(tenants, ms)).to_vec(),
        },
    ];
    let panel = Panel {
        title: "How long a market takes".to_owned(),
        x_title: "Tenants",
        y_title: "Time (ms)",
        x: Scale::Powers,
        y: Scale::Powers,
        x_max: f64::INFINITY,
        series,
    };
    (Figure(vec![panel]), rows)
}

impl Row {
    fn measure(tenants: &ScalingTenants) -> Self {
        let bidders = tenants.bidders();
        let first = bidders.shares(Default::default());
        let later = tenants.later().bidders();
        let refined = || tenants.bidders().refined(Default::default());
        Self {
            tenants: bidders.count(),
            cold_ms: median_ms(|| tenants.bidders().shares(Default::default())),
            warm_ms: median_ms(|| later.shares(first.warm_start.clone())),
            refined_ms: bidders.are_refined().then(|| median_ms(refined)),
            cold_rounds: first.rounds,
            warm_rounds: later.shares(first.warm_start.clone()).rounds,
        }
    }
}

/// Returns the median of as many calls as there is time for, at least one.
fn median_ms<T>(call: impl Fn() -> T) -> f64 {
    let (mut times, started) = (Vec::new(), Instant::now());
    while times.is_empty() || started.elapsed() < MEASURED_DURATION {
        let start = Instant::now();
        let result = black_box(call());
        times.push(start.elapsed().as_secs_f64() * 1e3);
        drop(result);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
