//! Compares the model of flows over a network in `sim::eviction` with ns-3, which simulates each packet.

use std::{path::Path, process::Command};

use serde_json::Value;

/// Largest difference of the mean completion times, relative to ns-3.
const MEAN_TOLERANCE: f64 = 0.10;
/// The same for the 99th percentiles.
const P99_TOLERANCE: f64 = 0.15;

/// Runs `xtask sim eviction --topology`, and returns the results of the schemes `one_queue` and `classes`.
fn compare(programs: &Path, topology: &Path) -> [Value; 2] {
    let folder = tempfile::tempdir().expect("a temporary folder is created");
    let json = folder.path().join("comparison.json");
    let mut xtask = Command::new(programs.join("xtask"));
    let command = xtask.args(["sim", "eviction", "--topology"]).arg(topology).arg("--json").arg(&json);
    let output = command.output().expect("xtask runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results = std::fs::read(&json).expect("xtask writes the results");
    let results: Value = serde_json::from_slice(&results).expect("the results are JSON");
    let schemes = [0, 1].map(|scheme| results["schemes"][scheme].clone());
    assert_eq!([&schemes[0]["scheme"], &schemes[1]["scheme"]], ["one_queue", "classes"]);
    schemes
}

fn assert_model_agrees_with_ns3(schemes: &[Value; 2]) {
    let number = |scheme: &Value, field: &str| scheme[field].as_f64().expect("the field is a number");
    for scheme in schemes {
        assert!(number(scheme, "flows") >= 100.0, "{scheme}");
        assert!((number(scheme, "mean_ratio") - 1.0).abs() < MEAN_TOLERANCE, "{scheme}");
        assert!((number(scheme, "p99_ratio") - 1.0).abs() < P99_TOLERANCE, "{scheme}");
    }
    let gain = |field: &str| number(&schemes[0], field) - number(&schemes[1], field);
    let (model, ns3) = (gain("urgent_mean_s"), gain("ns3_urgent_mean_s"));
    assert!(model * ns3 > 0.0, "classes save {model} s per urgent flow in the model, and {ns3} s in ns-3");
}

/// Topologies: many senders and few receivers, a leaf-spine network, and a chain of bottlenecks. They run one after
/// the other, because the first run can install ns-3 and compile its driver.
#[test]
fn completion_times_of_flows_agree_with_ns3() {
    let programs = local_rack::program_dir(&["xtask"]).expect("xtask is built");
    for name in ["incast.json", "leaf_spine.json", "chain.json"] {
        let topology = Path::new(env!("CARGO_MANIFEST_DIR")).join("ns3").join(name);
        assert_model_agrees_with_ns3(&compare(&programs, &topology));
    }
}
