//! Figures of simulated scenarios: local memory and promotions of each tenant over time.

use std::path::Path;

use cli_runtime::Failure;
use serde::Serialize;
use sim::tiering::{ScenarioReport, Scheme, SchemeReport, TenantPoint, TimePoint};

use crate::figure::{self, Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Seconds per point of a figure. Each point is a mean.
const SECONDS_PER_POINT: usize = 15;
/// Number of pages in a thousand.
const THOUSAND: f64 = 1000.0;

/// Values of a tenant over time, in one panel of a figure.
#[derive(Serialize)]
struct TimeSeries<'a> {
    scheme: Scheme,
    value: &'static str,
    tenant: &'a str,
    /// Seconds and values.
    points: Vec<(f64, f64)>,
}

/// Draws a figure of each scenario and writes it into a directory, with its numbers.
///
/// # Errors
/// [`Failure::File`] if a file cannot be written.
pub(super) fn write_all(folder: &Path, scenarios: &[ScenarioReport]) -> Result<(), Failure> {
    for (number, scenario) in (1..).zip(scenarios) {
        let name = format!("tiering-{number}-{}", file_name(&scenario.name));
        let panels = [
            (Scheme::Tpp, "local memory (GB)", TenantPoint::local_gb as fn(&TenantPoint) -> f64),
            (Scheme::Equilibria, "local memory (GB)", TenantPoint::local_gb),
            (Scheme::Equilibria, "promotions (1000 pages/s)", promotions),
        ];
        let series = panels.map(|(scheme, value, of)| time_series(scenario, scheme, value, of));
        let numbers: Vec<&TimeSeries<'_>> = series.iter().flatten().collect();
        figure::write_json(&folder.join(format!("{name}.json")), &numbers)?;
        let panels = series.iter().map(|series| panel(&scenario.name, series)).collect();
        figure::write(&folder.join(format!("{name}.svg")), &Figure(panels))?;
    }
    Ok(())
}

fn promotions(point: &TenantPoint) -> f64 {
    point.promoted_pages as f64 / THOUSAND
}

/// Returns the values of each tenant with a scheme.
fn time_series<'a>(
    scenario: &'a ScenarioReport,
    scheme: Scheme,
    value: &'static str,
    of: fn(&TenantPoint) -> f64,
) -> Vec<TimeSeries<'a>> {
    let Some(report) = scenario.scheme(scheme) else { return Vec::new() };
    let tenants = scenario.tenants.iter().enumerate();
    let series = tenants.map(|(index, tenant)| TimeSeries {
        scheme,
        value,
        tenant: &tenant.name,
        points: means(report, index, of),
    });
    series.collect()
}

fn means(report: &SchemeReport, index: usize, of: fn(&TenantPoint) -> f64) -> Vec<(f64, f64)> {
    let chunks = report.timeline.chunks(SECONDS_PER_POINT);
    let point = |chunk: &[TimePoint]| {
        let sum: f64 = chunk.iter().map(|point| of(&point.tenants[index])).sum();
        Some((f64::from(chunk.first()?.second), sum / chunk.len() as f64))
    };
    chunks.filter_map(point).collect()
}

fn panel(scenario: &str, series: &[TimeSeries<'_>]) -> Panel {
    let line = |(index, series): (usize, &TimeSeries<'_>)| Series {
        name: series.tenant.to_owned(),
        style: SeriesStyle::Line(index),
        points: series.points.iter().map(|(x, y)| Point::new(*x, *y)).collect(),
    };
    let value = series.first().map_or("", |series| series.value);
    let scheme = series.first().map_or("", |series| series.scheme.name());
    Panel {
        title: format!("{scenario}: {scheme}, {value}"),
        x_title: "Time (s)",
        y_title: value,
        x: Scale::Number,
        y: Scale::Number,
        x_max: f64::INFINITY,
        series: series.iter().enumerate().map(line).collect(),
    }
}

/// Converts the name of a scenario to a part of a file name: letters, digits and dashes.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    name.chars().map(plain).collect()
}
