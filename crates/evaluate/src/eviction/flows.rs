//! Completion times of a list of flows over a network. `sim::eviction` implements the simulation.

use std::path::Path;

use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, rows},
};
use serde::Serialize;
use sim::eviction::{FlowReport, FlowScheme, Topology};

use super::milliseconds;
use crate::{figure, scenario_file};

/// Results of all schemes.
#[derive(Debug, Serialize)]
struct FlowStudy {
    schemes: Vec<SchemeRow>,
}

/// Results of one scheme.
#[derive(Debug, Serialize)]
struct SchemeRow(FlowReport);

impl Row for SchemeRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("SCHEME", |row| row.0.scheme.name().to_owned()),
        col("FLOWS", |row| row.0.flows.to_string()),
        col("MEAN MS", |row| milliseconds(Some(row.0.mean_s))),
        col("P99 MS", |row| milliseconds(Some(row.0.p99_s))),
        col("URGENT MS", |row| milliseconds(row.0.urgent_mean_s)),
    ];
}

/// Simulates the flows of a topology with all schemes, writes JSON if requested, and prints the results.
///
/// # Errors
/// [`Failure::File`] if the topology is invalid, or if a file cannot be read or written.
pub(super) fn run(topology: &Path, json: Option<&Path>, format: Format) -> Result<(), Failure> {
    let network = scenario_file::read(topology, |topology: Topology| Ok(topology.resolve()?))?;
    json.map_or(Ok(()), figure::check_writable)?;
    let report = |scheme| SchemeRow(network.report(scheme, network.completion_times(scheme)));
    let study = FlowStudy { schemes: FlowScheme::ALL.map(report).into() };
    json.map_or(Ok(()), |path| figure::write_json(path, &study))?;
    print::value(format, &study.schemes, |_| rows(&study.schemes, false))
}
