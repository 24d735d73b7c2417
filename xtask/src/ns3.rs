//! `cargo xtask sim eviction --topology`: compares the completion times of flows in the model of `sim::eviction`
//! with those in ns-3, which simulates each packet. `tests/ns3/flows.cc` is the driver for ns-3.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    process::Command,
};

use serde::Serialize;
use sim::eviction::{FlowNetwork, FlowReport, FlowScheme, Topology};
use units::limits::TIERING_SCENARIO_BYTES_MAX;

use crate::{
    apt::Apt,
    debian,
    failure::Failure,
    repository::root,
    step::{run_step, run_step_with_output},
};

/// Source of the driver, relative to the root of the repository.
const DRIVER_SOURCE: &str = "tests/ns3/flows.cc";
const SUITE: &str = "bookworm";
/// Debian packages with the headers and libraries of ns-3, and with the libraries that these need.
const PACKAGES: [&str; 4] = ["libns3-dev", "libns3.37", "libgsl27", "libgslcblas0"];
/// Folder of the libraries in the packages.
const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";
/// Parts of ns-3 that the driver uses.
const NS3_LIBRARIES: [&str; 5] =
    ["-lns3-core", "-lns3-network", "-lns3-internet", "-lns3-point-to-point", "-lns3-traffic-control"];

/// Results of all schemes.
#[derive(Debug, Serialize)]
struct Comparison {
    schemes: Vec<SchemeRow>,
}

/// Completion times with one scheme in both simulations, in seconds.
#[derive(Debug, Serialize)]
struct SchemeRow {
    scheme: FlowScheme,
    flows: usize,
    mean_s: f64,
    p99_s: f64,
    /// Mean of the flows in queue 7. `None` without such flows.
    urgent_mean_s: Option<f64>,
    ns3_mean_s: f64,
    ns3_p99_s: f64,
    ns3_urgent_mean_s: Option<f64>,
    /// Mean of the model, divided by that of ns-3.
    mean_ratio: f64,
    p99_ratio: f64,
}

impl SchemeRow {
    fn new(model: &FlowReport, ns3: &FlowReport) -> Self {
        Self {
            scheme: model.scheme,
            flows: model.flows,
            mean_s: model.mean_s,
            p99_s: model.p99_s,
            urgent_mean_s: model.urgent_mean_s,
            ns3_mean_s: ns3.mean_s,
            ns3_p99_s: ns3.p99_s,
            ns3_urgent_mean_s: ns3.urgent_mean_s,
            mean_ratio: model.mean_s / ns3.mean_s,
            p99_ratio: model.p99_s / ns3.p99_s,
        }
    }

    fn print(&self) {
        println!("{} ({} flows)", self.scheme.name(), self.flows);
        let urgent = self.urgent_mean_s.zip(self.ns3_urgent_mean_s);
        for (name, model, ns3) in
            [("mean", self.mean_s, self.ns3_mean_s), ("p99", self.p99_s, self.ns3_p99_s)]
                .into_iter()
                .chain(urgent.map(|(model, ns3)| ("urgent mean", model, ns3)))
        {
            let (model_ms, ns3_ms) = (model * 1e3, ns3 * 1e3);
            println!("  {name:12} model {model_ms:9.3} ms, ns-3 {ns3_ms:9.3} ms, ratio {:.3}", model / ns3);
        }
    }
}

/// Simulates the flows of a topology with the model and with ns-3, prints the results, and writes them as JSON if
/// requested.
///
/// # Errors
/// Returns an error if the topology is invalid, if ns-3 cannot be downloaded, or if a simulation fails.
pub fn compare(topology: &Path, json: Option<&Path>) -> Result<(), Failure> {
    let network = read(topology)?;
    let driver = ensure_driver()?;
    let mut schemes = Vec::new();
    for scheme in FlowScheme::ALL {
        let model = network.report(scheme, network.completion_times(scheme));
        let ns3 = network.report(scheme, run_driver(&driver, &network, scheme)?);
        schemes.push(SchemeRow::new(&model, &ns3));
    }
    schemes.iter().for_each(SchemeRow::print);
    let Some(path) = json else { return Ok(()) };
    let text =
        serde_json::to_string_pretty(&Comparison { schemes }).expect("all values are numbers or names");
    fs::write(path, text + "\n").map_err(Failure::file_error("write", path))
}

/// Compiles the driver for ns-3 if it is missing or older than its source, and returns its path. Downloads ns-3 into
/// `target/ns3` and installs the compiler if they are missing.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or installed, or if the driver cannot be compiled.
pub fn ensure_driver() -> Result<PathBuf, Failure> {
    let (source, folder) = (root().join(DRIVER_SOURCE), root().join("target/ns3"));
    let driver = folder.join("flows");
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    if modified(&driver) > modified(&source) {
        return Ok(driver);
    }
    debian::ensure_installed(debian::CXX)?;
    let packages = folder.join("packages");
    ensure_downloaded(&packages)?;
    let libraries = packages.join(LIBRARY_FOLDER);
    // The driver is renamed when it is complete, because its existence marks it as compiled.
    let partial = folder.join(format!("flows.{}", std::process::id()));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-isystem"]).arg(packages.join("usr/include"));
    compiler.arg("-o").arg(&partial).arg(&source).arg("-L").arg(&libraries);
    // With a RPATH instead of a RUNPATH, the libraries also find each other.
    compiler.arg(format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display()));
    run_step("compile the driver for ns-3", compiler.args(NS3_LIBRARIES))?;
    fs::rename(&partial, &driver).map_err(Failure::file_error("rename", &partial))?;
    Ok(driver)
}

/// Downloads ns-3 into a folder if it is missing. No package is installed on this machine.
fn ensure_downloaded(folder: &Path) -> Result<(), Failure> {
    let marker = folder.join("complete");
    if marker.exists() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(folder); // an existing folder is incomplete
    let apt_dir = folder.join("apt");
    Apt::prepare(&apt_dir, &[SUITE])?.unpack_packages(SUITE, &PACKAGES, folder)?;
    fs::remove_dir_all(&apt_dir).map_err(Failure::file_error("remove", &apt_dir))?;
    fs::write(&marker, "").map_err(Failure::file_error("write", &marker))
}

fn read(path: &Path) -> Result<FlowNetwork, Failure> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(Failure::file_error("open", path))?;
    // One more byte than permitted shows that the file is too large.
    let bytes_max = TIERING_SCENARIO_BYTES_MAX as u64 + 1;
    file.take(bytes_max).read_to_end(&mut bytes).map_err(Failure::file_error("read", path))?;
    let invalid = |reason: String| Failure::BadResult(format!("cannot read {}: {reason}", path.display()));
    if bytes.len() > TIERING_SCENARIO_BYTES_MAX {
        return Err(invalid(format!("the file has more than {TIERING_SCENARIO_BYTES_MAX} bytes")));
    }
    let topology: Topology = serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
    topology.resolve().map_err(|error| invalid(error.to_string()))
}

/// Runs ns-3, and returns the completion time of each flow, in seconds.
fn run_driver(driver: &Path, network: &FlowNetwork, scheme: FlowScheme) -> Result<Vec<f64>, Failure> {
    let input =
        write_input(&network.to_ns3(scheme)).map_err(Failure::file_error("write", std::env::temp_dir()))?;
    let mut times = Vec::new();
    let title = format!("ns-3, {}", scheme.name());
    run_step_with_output(&title, Command::new(driver).stdin(input), |line| times.push(line.parse::<f64>()))?;
    let seconds = times.into_iter().map(|time| time.map(|nanoseconds| nanoseconds * 1e-9));
    seconds.collect::<Result<_, _>>().map_err(|error| Failure::UnexpectedOutput {
        program: DRIVER_SOURCE.to_owned(),
        reason: error.to_string(),
    })
}

/// Returns a temporary file with this content, at its start.
fn write_input(text: &str) -> std::io::Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}
