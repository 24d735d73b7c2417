//! `tarn evaluate tiering`: compares schemes that share local memory among tenants. `sim::tiering`
//! implements the simulation, `figures` draws the figures.

mod figures;

use std::path::PathBuf;

use clap::Args;
use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, rows, wide},
};
use serde::Serialize;
use sim::tiering::{Scenario, ScenarioReport, ScenarioSpec, SchemeReport, scenarios, simulate};

use super::{figure, scenario_file};

/// Options of `tarn evaluate tiering`.
#[derive(Clone, Debug, Args)]
pub struct Tiering {
    /// Simulate the scenario in this JSON file instead of the scenarios of the paper
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw a figure of each scenario into this directory, as SVG with its data as JSON: local memory
    /// and promotions over time (Equilibria figures 5 and 6)
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Help on the scenario file and on the printed columns.
pub(super) const OUTPUT_HELP: &str = "\
Scenario file, with sizes in GB (10⁹ bytes); start_s, protection_gb, bound_gb and hot_fraction are optional:
  {\"name\": \"mine\", \"capacity_gb\": 240, \"seconds\": 600, \"tenants\": [
    {\"name\": \"A\", \"start_s\": 0, \"demand_gb\": 120, \"protection_gb\": 80, \"bound_gb\": null, \"hot_fraction\": 1}]}
  hot_fraction is the part of the memory that receives 90 % of the accesses; 1 for equal accesses
Columns, means of the last 60 s, with one number per tenant:
  LOCAL GB    local memory
  LOWEST GB   smallest local memory after it first reached the mean (with -o wide)
  ACCESSES/S  accessed pages per second, in thousands
  PROMOTED/S  promoted pages per second, in thousands
  DEMOTED/S   demoted pages per second, in thousands
Schemes:
  no_control                     demotion by the watermarks, without promotion
  tpp                            demotion by the watermarks, and promotion at the second access, as in Linux
  static_caps                    local memory of each tenant limited to its protection
  equilibria_without_mitigation  Equilibria without the limit for thrashing tenants
  equilibria                     Equilibria: protections, bounds, and a limit for thrashing tenants
The simulation moves units of 4 MiB. Accesses, their times and the costs of migrations are modelled.";

/// Results of all scenarios.
#[derive(Serialize)]
struct Results {
    scenarios: Vec<ScenarioReport>,
}

/// Row with the results of one scheme in one scenario.
#[derive(Serialize)]
struct SchemeRow {
    scenario: String,
    #[serde(flatten)]
    report: SchemeReport,
}

impl Row for SchemeRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("SCENARIO", |row| row.scenario.clone()),
        col("SCHEME", |row| row.report.scheme.name().to_owned()),
        col("LOCAL GB", |row| joined(&row.report.local_gb)),
        wide("LOWEST GB", |row| joined(&row.report.local_min_gb)),
        col("ACCESSES/S", |row| joined_thousands(&row.report.accessed_pages_per_s)),
        col("PROMOTED/S", |row| joined_thousands(&row.report.promoted_pages_per_s)),
        col("DEMOTED/S", |row| joined_thousands(&row.report.demoted_pages_per_s)),
    ];
}

/// Formats one number per tenant, such as `80.1/79.9`.
fn joined(values: &[f64]) -> String {
    values.iter().map(|value| format!("{value:.1}")).collect::<Vec<_>>().join("/")
}

fn joined_thousands(values: &[f64]) -> String {
    joined(&values.iter().map(|value| value / 1000.0).collect::<Vec<_>>())
}

/// Simulates the scenarios, writes JSON and figures if requested, and prints the results.
///
/// # Errors
/// [`Failure::File`] if the scenario is invalid, or if a file cannot be read or written.
pub(super) fn run(args: &Tiering, format: Format) -> Result<(), Failure> {
    let simulated = match &args.scenario {
        Some(path) => vec![scenario_file::read(path, |spec: ScenarioSpec| Ok(Scenario::from_spec(&spec)?))?],
        None => scenarios(),
    };
    args.figures.as_deref().map_or(Ok(()), figure::create_folder)?;
    args.json.as_deref().map_or(Ok(()), figure::check_writable)?;
    let results = Results { scenarios: simulated.iter().map(simulate).collect() };
    args.json.as_ref().map_or(Ok(()), |path| figure::write_json(path, &results))?;
    args.figures.as_deref().map_or(Ok(()), |folder| figures::write_all(folder, &results.scenarios))?;
    let table: Vec<SchemeRow> = results.scenarios.iter().flat_map(to_rows).collect();
    print::value(format, &table, |is_wide| rows(&table, is_wide))?;
    for report in &results.scenarios {
        print_thrashing(format, report);
        print_bound_excess(format, report);
    }
    Ok(())
}

fn to_rows(report: &ScenarioReport) -> impl Iterator<Item = SchemeRow> {
    let row = |scheme: &SchemeReport| SchemeRow {
        scenario: report.name.clone(),
        report: scheme.without_timeline(),
    };
    report.schemes.iter().map(row)
}

/// Prints how far bounds are exceeded. The limit is the memory that a tenant allocates and promotes between
/// two decisions, which are a second apart in the simulation.
fn print_bound_excess(format: Format, report: &ScenarioReport) {
    for (tenant, gb) in report.bound_excess_gb() {
        let text = format!("{}: tenant {tenant} exceeds its bound by at most {gb:.2} GB", report.name);
        print::note(format, &text);
    }
}

fn print_thrashing(format: Format, report: &ScenarioReport) {
    let Some(thrashing) = report.thrashing else { return };
    let text = format!(
        "{}: migrations of the thrashing tenant fall from {:.0} to {:.0} pages/s within four periods ({}), \
         accesses of its neighbours rise by {}",
        report.name,
        thrashing.migrated_before,
        thrashing.migrated_after,
        super::percent(-thrashing.decrease),
        super::percent(thrashing.neighbour_gain),
    );
    print::note(format, &text);
}
