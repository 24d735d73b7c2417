//! Figure 8: run time of a market on this machine, for increasing numbers of tenants. The figure
//! also shows the upper bounds from the paper, for the authors' machine.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use serde::Serialize;
use sim::symbiosis::ScalingTenants;
use units::limits::REFINEMENT_TENANTS_MAX;

use super::{FigureInputs, line_series};
use crate::figure::{Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Number of tenants of the first market. Each next market has twice as many tenants.
const FIRST_MARKET_TENANTS: usize = 6;
/// Maximum number of measured markets.
const MARKETS_MAX: u32 = 9;
/// Duration for which a measured call is repeated.
const MEASUREMENT_DURATION: Duration = Duration::from_millis(300);
/// Run time of a market, in milliseconds, above which no larger market is measured.
const SLOW_MARKET_MS: f64 = 2_000.0;
/// Upper bounds from Spirit, section 6.2: number of tenants, and run time in milliseconds.
const SPIRIT_BOUNDS: [(f64, f64); 2] = [(24.0, 1_000.0), (1_000.0, 20_000.0)];

/// Median run times for one number of tenants, in milliseconds.
#[derive(Serialize)]
pub(super) struct Row {
    tenants: usize,
    /// Market, from miss ratios to shares.
    market_ms: f64,
    /// Market with refinement; `None` above the maximum number of tenants.
    refined_ms: Option<f64>,
    /// Number of prices evaluated.
    rounds: u32,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, Vec<Row>) {
    let mut rows: Vec<Row> = Vec::new();
    for double in 0..MARKETS_MAX {
        if rows
            .last()
            .is_some_and(|row| row.market_ms.max(row.refined_ms.unwrap_or_default()) > SLOW_MARKET_MS)
        {
            break;
        }
        rows.push(Row::measure(&ScalingTenants::new(
            &inputs.tenants,
            FIRST_MARKET_TENANTS << double,
            inputs.memory.get(),
        )));
    }
    let of = |time: fn(&Row) -> Option<f64>| {
        rows.iter().filter_map(move |row| Some((row.tenants as f64, time(row)?)))
    };
    let series = vec![
        line_series(0, "market, from miss ratios to shares", of(|row| Some(row.market_ms))),
        line_series(
            1,
            format!("market with refinement, up to {REFINEMENT_TENANTS_MAX} tenants"),
            of(|row| row.refined_ms),
        ),
        Series {
            name: "Spirit's allocator, upper bounds from the paper".to_owned(),
            style: SeriesStyle::Ring,
            points: SPIRIT_BOUNDS.map(|(tenants, ms)| Point::new(tenants, ms)).to_vec(),
        },
    ];
    let panel = Panel {
        title: "Run time of a market".to_owned(),
        x_title: "Tenants",
        y_title: "Time (ms)",
        x: Scale::Logarithmic,
        y: Scale::Logarithmic,
        x_max: f64::INFINITY,
        series,
    };
    (Figure(vec![panel]), rows)
}

impl Row {
    fn measure(tenants: &ScalingTenants) -> Self {
        let bidders = tenants.bidders();
        let refined = || tenants.bidders().refined();
        Self {
            tenants: bidders.count(),
            market_ms: median_ms(|| tenants.bidders().shares()),
            refined_ms: bidders.is_refinement_possible().then(|| median_ms(refined)),
            rounds: bidders.shares().rounds,
        }
    }
}

/// Calls a function for [`MEASUREMENT_DURATION`], but at least once. Returns the median run time in
/// milliseconds.
fn median_ms<T>(call: impl Fn() -> T) -> f64 {
    let (mut times, started) = (Vec::new(), Instant::now());
    while times.is_empty() || started.elapsed() < MEASUREMENT_DURATION {
        let start = Instant::now();
        let result = black_box(call());
        times.push(start.elapsed().as_secs_f64() * 1e3);
        drop(result);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
