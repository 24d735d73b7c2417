//! Scenarios of `cargo xtask rack tiering`: those of Equilibria, section V, or one from a file of
//! `cargo xtask sim tiering --scenario FILE`. Sizes in GB become MiB.

use std::{path::Path, process::Command, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{failure::Failure, rack::commands::unexpected_output};

/// Largest sum of demands beyond local memory, in MiB: most of a slice.
const SLOW_MIB_MAX: u64 = 900;
/// Smallest demand: the programs have two arrays of at least 1 MiB.
const DEMAND_MIN: f64 = 2.0;
/// Largest local memory, in MiB. The host also needs memory for itself.
const LOCAL_MIB_MAX: u64 = 800;
/// Maximum number of tenants. Their names are single letters.
const TENANTS_MAX: usize = 8;
/// Duration of a scenario from a file, in seconds.
const SECONDS: std::ops::RangeInclusive<u64> = 30..=600;
/// Duration of the simulation after the last start, in seconds: until the memory is steady.
const SIMULATED_SECONDS: f64 = 900.0;
/// Time between the first tenant and the others, if they start later.
const LATE_START: Duration = Duration::from_secs(20);

/// Demands and limits of all tenants, and the expected local memory with fair tiering.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scenario {
    pub name: String,
    /// Local memory that the tenants can use without demotion, in MiB.
    pub usable_mib: u64,
    /// Duration after the start of the last tenant.
    pub duration: Duration,
    /// Tenants, in the order of their starts.
    pub tenants: Vec<Tenant>,
}

/// Program that copies memory all the time, in its own cgroup.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tenant {
    /// Name of the cgroup: a letter.
    pub name: String,
    /// Time of its start.
    pub start: Duration,
    pub demand_mib: u64,
    pub protection_mib: u64,
    pub bound_mib: Option<u64>,
    /// Expected local memory, in MiB.
    pub expected_mib: f64,
}

impl Scenario {
    /// Local memory that the tenants share, in MiB: the usable memory and the high watermark of 2 %.
    pub fn local_mib(&self) -> u64 {
        (self.usable_mib * 100).div_ceil(98)
    }
}

/// Returns the scenarios of the paper, each with this duration.
pub(super) fn of_paper(duration: Duration) -> Vec<Scenario> {
    let scenario = |name: &str, demands: [u64; 3], bound_of_first, others_start, expected: [f64; 3]| {
        let tenant = |at: usize| Tenant {
            name: letter(at),
            start: if at > 0 { others_start } else { Duration::ZERO },
            demand_mib: demands[at],
            protection_mib: 80,
            bound_mib: if at == 0 { bound_of_first } else { None },
            expected_mib: expected[at],
        };
        Scenario {
            name: name.to_owned(),
            usable_mib: 240,
            duration,
            tenants: (0..demands.len()).map(tenant).collect(),
        }
    };
    vec![
        scenario("120/40/40", [120, 40, 40], None, Duration::ZERO, [120.0, 40.0, 40.0]),
        scenario("120/90/90", [120, 90, 90], None, Duration::ZERO, [80.0, 80.0, 80.0]),
        scenario("120/70/70", [120, 70, 70], None, LATE_START, [100.0, 70.0, 70.0]),
        scenario("120/40/40 bound 80", [120, 40, 40], Some(80), Duration::ZERO, [80.0, 40.0, 40.0]),
    ]
}

fn letter(at: usize) -> String {
    char::from(b'a' + u8::try_from(at).expect("the number of tenants is limited")).to_string()
}

/// Scenario as in the file. `tarn` checks the other fields.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FileScenario {
    name: String,
    capacity_gb: f64,
    seconds: f64,
    tenants: Vec<FileTenant>,
}

impl FileScenario {
    /// Returns the time of the last start, in seconds.
    fn last_start(&self) -> f64 {
        self.tenants.iter().map(|tenant| tenant.start_s).fold(0.0, f64::max)
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FileTenant {
    #[serde(default)]
    name: String,
    #[serde(default)]
    start_s: f64,
    demand_gb: f64,
    #[serde(default)]
    protection_gb: f64,
    bound_gb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hot_fraction: Option<f64>,
}

/// Results of `tarn evaluate tiering`.
#[derive(Debug, Deserialize)]
struct SimulationResults {
    scenarios: Vec<SimulatedScenario>,
}

#[derive(Debug, Deserialize)]
struct SimulatedScenario {
    local_gb: Vec<f64>,
}

/// Reads a scenario from a file. The expected local memory is the result of a longer simulation, whose
/// scenario and result are written to `folder`.
///
/// # Errors
/// Returns an error if the scenario is invalid or cannot run on an emulated host.
pub(super) fn read(path: &Path, tarn: &Path, folder: &Path) -> Result<Scenario, Failure> {
    let invalid = |reason: String| Failure::UnexpectedOutput { program: path.display().to_string(), reason };
    let text = |path: &Path| std::fs::read_to_string(path).map_err(Failure::file_error("read", path));
    let file: FileScenario =
        serde_json::from_str(&text(path)?).map_err(|error| invalid(error.to_string()))?;
    let (longer, results) = (folder.join("scenario.json"), folder.join("simulated.json"));
    let simulated = FileScenario { seconds: file.last_start() + SIMULATED_SECONDS, ..file.clone() };
    let simulated = serde_json::to_string(&simulated).expect("numbers and names can be serialized");
    std::fs::write(&longer, simulated).map_err(Failure::file_error("write", &longer))?;
    let mut simulation = Command::new(tarn);
    simulation.args(["evaluate", "tiering", "--scenario"]).arg(&longer).arg("--json").arg(&results);
    let output = simulation.output().map_err(Failure::start_error("tarn"))?;
    if !output.status.success() {
        return Err(unexpected_output("tarn evaluate tiering", &String::from_utf8_lossy(&output.stderr)));
    }
    let simulated: SimulationResults =
        serde_json::from_str(&text(&results)?).map_err(|error| invalid(error.to_string()))?;
    let expected = simulated.scenarios.into_iter().next().map(|scenario| scenario.local_gb);
    convert(file, &expected.unwrap_or_default()).map_err(invalid)
}

/// Converts a scenario of a file. The error is the violated rule.
fn convert(file: FileScenario, expected_gb: &[f64]) -> Result<Scenario, String> {
    let last_start = file.last_start();
    let FileScenario { name, capacity_gb, seconds, tenants } = file;
    if tenants.len() > TENANTS_MAX || tenants.len() != expected_gb.len() {
        return Err(format!("{} tenants: must be at most {TENANTS_MAX}", tenants.len()));
    }
    if let Some(hot) = tenants.iter().find_map(|tenant| tenant.hot_fraction.filter(|hot| *hot < 1.0)) {
        return Err(format!(
            "hot_fraction = {hot}: must be 1, because the programs access all memory equally"
        ));
    }
    let usable_mib = to_mib(capacity_gb);
    if usable_mib > LOCAL_MIB_MAX {
        return Err(format!(
            "capacity_gb = {capacity_gb}: must be at most {LOCAL_MIB_MAX} on an emulated host"
        ));
    }
    if let Some(tenant) = tenants.iter().find(|tenant| tenant.demand_gb < DEMAND_MIN) {
        return Err(format!("demand_gb = {}: must be at least {DEMAND_MIN}", tenant.demand_gb));
    }
    let demand: u64 = tenants.iter().map(|tenant| to_mib(tenant.demand_gb)).sum();
    if demand > usable_mib + SLOW_MIB_MAX {
        return Err(format!("demand of {demand}: must be at most capacity_gb + {SLOW_MIB_MAX}"));
    }
    let duration = to_number(seconds - last_start);
    if !SECONDS.contains(&duration) {
        return Err(format!(
            "seconds = {seconds}: the last start must be {} to {} seconds before the end",
            SECONDS.start(),
            SECONDS.end()
        ));
    }
    let mut tenants: Vec<Tenant> = tenants
        .iter()
        .zip(expected_gb)
        .enumerate()
        .map(|(at, (tenant, expected_mib))| Tenant {
            name: letter(at),
            start: Duration::from_secs_f64(tenant.start_s.max(0.0)),
            demand_mib: to_mib(tenant.demand_gb),
            // The agent rejects limits above local memory, and a protection above the bound. They have no
            // effect in the simulation.
            protection_mib: to_mib(tenant.protection_gb.min(tenant.bound_gb.unwrap_or(f64::INFINITY)))
                .min(usable_mib),
            bound_mib: tenant.bound_gb.map(to_mib).filter(|bound| *bound <= usable_mib),
            expected_mib: *expected_mib,
        })
        .collect();
    tenants.sort_by_key(|tenant| tenant.start);
    Ok(Scenario { name, usable_mib, duration: Duration::from_secs(duration), tenants })
}

fn to_mib(gb: f64) -> u64 {
    to_number(gb)
}

/// Rounds a number, which must not be negative.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates at both ends")]
fn to_number(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> FileScenario {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn scenario_of_a_file_is_scaled_to_mib() {
        let text = r#"{"name": "n", "capacity_gb": 100, "seconds": 90, "tenants": [
            {"name": "late", "start_s": 30, "demand_gb": 60, "protection_gb": 50},
            {"name": "first", "demand_gb": 80, "protection_gb": 90, "bound_gb": 70}]}"#;
        let scenario = convert(file(text), &[60.0, 40.0]).unwrap();
        let tenants: Vec<_> =
            scenario.tenants.iter().map(|t| (&*t.name, t.start.as_secs(), t.bound_mib)).collect();
        assert_eq!(tenants, [("b", 0, Some(70)), ("a", 30, None)]);
        assert_eq!(scenario.tenants[0].protection_mib, 70);
        assert_eq!((scenario.duration.as_secs(), scenario.local_mib()), (60, 103));
        assert!((scenario.tenants[1].expected_mib - 60.0).abs() < 1e-9);
    }

    #[test]
    fn scenario_that_does_not_fit_a_host_is_rejected_with_its_field() {
        let tenant = r#"{"name": "a", "demand_gb": 900, "hot_fraction": 0.5}"#;
        let scenario = |capacity: u64, seconds: u64, tenant: &str| {
            let text = format!(
                r#"{{"name": "n", "capacity_gb": {capacity}, "seconds": {seconds}, "tenants": [{tenant}]}}"#
            );
            convert(file(&text), &[1.0]).unwrap_err()
        };
        assert!(scenario(100, 90, tenant).starts_with("hot_fraction = 0.5"));
        let tenant = r#"{"name": "a", "demand_gb": 1900}"#;
        assert!(scenario(1000, 90, tenant).starts_with("capacity_gb = 1000"));
        assert!(scenario(100, 90, tenant).starts_with("demand of 1900"));
        assert!(scenario(100, 90, &tenant.replace("1900", "1")).starts_with("demand_gb = 1"));
        assert!(scenario(800, 10, &tenant.replace("1900", "9")).starts_with("seconds = 10"));
    }
}
