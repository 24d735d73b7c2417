//! `tarn evaluate eviction`: compares schemes that evict memory to other hosts. `sim::eviction` implements
//! the simulation, `figures` draws the figures.

mod figures;
mod flows;
mod study;

use std::path::{Path, PathBuf};

use clap::Args;
use cli_runtime::{
    Failure, Format, print,
    table::{Column, Row, col, percent, rows},
};
use sim::eviction::Parameters;

use super::{figure, scenario_file};
use study::{ClusterRow, Headline, Study};

/// Options of `tarn evaluate eviction`.
#[derive(Clone, Debug, Args)]
pub struct Eviction {
    /// Change the parameters in this JSON file, for example {"intensive_servers": 16}
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Instead, simulate the list of flows over a network in this JSON file, with one queue for all flows
    /// and with classes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scenario", "sensitivity", "figures"])]
    topology: Option<PathBuf>,
    /// Also change each rate by 20 %, and show how this changes the results
    #[arg(long)]
    sensitivity: bool,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw figures into this directory, as SVG with their data as JSON (Glitter figures 8 to 14)
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Help on the parameters and on the printed columns.
pub(super) const OUTPUT_HELP: &str = "\
With the default parameters, 136 simulations run, with --sensitivity 296. Each one takes about 8 s of processor time (release
build; a debug build takes about twice as long). They run on all processors, so that all together take about 10 minutes on two
idle ones, with --sensitivity 20. A terminal shows the progress.

The results in the JSON file contain all parameters with their values.
Columns:
  LOCAL        limit of the local memory, in percent of the working set
  SCHEME       fixed: fixed thresholds, one queue for all flows (Fastswap); thresholds: adaptive thresholds (A-ETAM);
               classes: queues by the urgency of the flows (EFSM); both
  TIME         time of a task of the workload, divided by its time if it never waits
  OTHERS       the same for the tasks of the other servers
  URGENT MS    mean completion time of eviction flows of blocked tasks
  URGENT P99   99th percentile of these times
  URGENT GB    memory that blocked tasks evicted
The model is fluid: flows reach their fair rates at once. Fetches of evicted memory use no capacity of the network.

With --topology, one row per scheme:
  FLOWS      number of flows
  MEAN MS    mean completion time
  P99 MS     99th percentile of these times
  URGENT MS  mean completion time of the flows in queue 7
The file has links, flows and, if not as by default, the weights of the 8 queues of each port. A flow takes the shortest
route, or lists the nodes between both ends as \"via\":
  {\"links\": [{\"between\": [\"a\", \"switch\"], \"gbit_per_s\": 10, \"delay_us\": 3},
             {\"between\": [\"switch\", \"b\"], \"gbit_per_s\": 25, \"delay_us\": 3}],
   \"queue_weights\": [64, 1, 2, 4, 8, 16, 32, 64],
   \"flows\": [{\"from\": \"a\", \"to\": \"b\", \"start_us\": 0, \"size_kib\": 128, \"queue\": 7}]}
The JSON results contain the completion time of each flow.";

impl Row for ClusterRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("WORKLOAD", |row| row.workload.clone()),
        col("LOCAL", |row| percent(row.local_ratio)),
        col("SCHEME", |row| row.scheme.name().to_owned()),
        col("TIME", |row| format!("{:.3}", row.report.normalized_time)),
        col("OTHERS", |row| format!("{:.3}", row.report.others_normalized_time)),
        col("URGENT MS", |row| milliseconds(row.report.urgent_mean_s)),
        col("URGENT P99", |row| milliseconds(row.report.urgent_p99_s)),
        col("URGENT GB", |row| format!("{:.0}", row.report.urgent_gb)),
    ];
}

fn milliseconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{:.3}", seconds * 1e3))
}

/// Simulates all workloads, writes JSON and figures if requested, and prints the results.
///
/// # Errors
/// [`Failure::File`] if the parameters or the topology are invalid, or if a file cannot be read or written.
pub(super) fn run(args: &Eviction, format: Format) -> Result<(), Failure> {
    if let Some(topology) = &args.topology {
        return flows::run(topology, args.json.as_deref(), format);
    }
    let parameters = args.scenario.as_deref().map_or_else(|| Ok(Parameters::default()), read)?;
    args.figures.as_deref().map_or(Ok(()), figure::create_folder)?;
    args.json.as_deref().map_or(Ok(()), figure::check_writable)?;
    let study = Study::run(parameters, args.sensitivity);
    args.json.as_ref().map_or(Ok(()), |path| figure::write_json(path, &study))?;
    args.figures.as_deref().map_or(Ok(()), |folder| figures::write_all(folder, &study))?;
    print::value(format, &study.cluster, |_| rows(&study.cluster, false))?;
    print::note(format, &headline_text(&study.headline));
    for row in &study.sensitivity {
        print::note(format, &format!("{} x {}: {}", row.parameter, row.factor, headline_text(&row.headline)));
    }
    Ok(())
}

fn headline_text(headline: &Headline) -> String {
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
    format!(
        "throughput of both and fixed at 20 % local memory {}, of the other tasks {}; completion time of urgent \
         flows with classes and fixed at 40 % {}, 99th percentile {}",
        ratio(Some(headline.throughput_vs_fixed)),
        ratio(Some(headline.others_throughput)),
        ratio(headline.urgent_fct_mean_vs_fixed),
        ratio(headline.urgent_fct_p99_vs_fixed),
    )
}

/// Reads and checks changes of the parameters.
fn read(path: &Path) -> Result<Parameters, Failure> {
    scenario_file::read(path, |changes| {
        let parameters = Parameters::with(changes)?;
        parameters.check()?;
        Ok(parameters)
    })
}
