//! Tests of `tarn evaluate tiering`: results, figures, and errors in scenario files.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rack::{CommandOutput, tarn};

/// Returns a scenario in which two tenants of 15 GB share 20 GB.
fn scenario() -> Value {
    json!({"name": "mine", "capacity_gb": 20, "seconds": 90, "tenants": [
        {"name": "A", "start_s": 0, "demand_gb": 15, "protection_gb": 10, "bound_gb": null, "hot_fraction": 1},
        {"name": "B", "demand_gb": 15, "protection_gb": 5, "bound_gb": 8.5},
    ]})
}

async fn evaluate(folder: &Path, scenario: &str, options: &str) -> CommandOutput {
    fs::write(folder.join("scenario.json"), scenario).unwrap();
    let options = options.replace("DIR", folder.to_str().unwrap());
    tarn(&format!("evaluate tiering --scenario {}/scenario.json {options}", folder.display())).await
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn scenario_is_simulated_with_each_scheme() {
    let folder = TempDir::new().unwrap();
    let ran =
        evaluate(folder.path(), &scenario().to_string(), "--json DIR/out.json --figures DIR/figures").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.starts_with("SCENARIO "), "{}", ran.stdout);
    let results = read_json(&folder.path().join("out.json"));
    let [report] = results["scenarios"].as_array().unwrap().as_slice() else { panic!("{results}") };
    assert_eq!(report["name"], "mine");
    let local: Vec<f64> =
        report["local_gb"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
    assert!(local[0] >= 10.0 && (8.3..8.6).contains(&local[1]), "{local:?}");
    let schemes: Vec<&str> = report["schemes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|scheme| scheme["scheme"].as_str().unwrap())
        .collect();
    assert_eq!(schemes, ["no_control", "tpp", "static_caps", "equilibria"]);
    let figure = fs::read_to_string(folder.path().join("figures/tiering-1-mine.svg")).unwrap();
    assert!(figure.contains("equilibria, local memory (GB)"), "{figure}");
    let numbers = read_json(&folder.path().join("figures/tiering-1-mine.json"));
    assert_eq!(numbers.as_array().unwrap().len(), 6, "two tenants in three panels");
}

#[tokio::test]
async fn same_scenario_gives_the_same_output() {
    let folder = TempDir::new().unwrap();
    let first = evaluate(folder.path(), &scenario().to_string(), "-o json").await;
    let second = evaluate(folder.path(), &scenario().to_string(), "-o json").await;
    assert_eq!((first.code, &first.stdout), (0, &second.stdout), "{}", first.stderr);
}

#[tokio::test]
async fn invalid_scenarios_are_rejected_with_field_value_and_rule() {
    let folder = TempDir::new().unwrap();
    let with = |pointer: &str, value: Value| {
        let mut scenario = scenario();
        *scenario.pointer_mut(pointer).unwrap() = value;
        scenario.to_string()
    };
    let cases = [
        (with("/capacity_gb", json!(0)), "invalid capacity_gb = 0.0: must be a number from 1 to 4096"),
        (with("/tenants/1/demand_gb", json!(-1)), "invalid tenants[1].demand_gb = -1.0: must be"),
        (with("/tenants/0/demand_gb", json!(1e300)), "invalid tenants[0].demand_gb = 1e300: must be"),
        (with("/tenants/0/bound_gb", json!(-2)), "invalid tenants[0].bound_gb = -2.0: must be"),
        (with("/tenants", json!([])), "invalid number of tenants = 0: must be from 1 to 64"),
        (with("/seconds", json!("many")), "invalid type: string \"many\", expected f64"),
        (with("/tenants/0/demand_gb", Value::Null), "invalid type: null, expected f64"),
        (r#"{"name": "x", "ram_gb": 1}"#.to_owned(), "unknown field `ram_gb`, expected one of `name`"),
        (r#"{"name": "x"}"#.to_owned(), "missing field `capacity_gb`"),
        (r#"{"name": "x", "capacity_gb": NaN}"#.to_owned(), "line 1"),
        (" ".repeat((1 << 20) + 1), "longer than 1048576 bytes"),
    ];
    for (scenario, expected) in cases {
        let ran = evaluate(folder.path(), &scenario, "").await;
        assert!(ran.code != 0 && ran.stderr.contains(expected), "{expected}: {}", ran.stderr);
        assert!(ran.stderr.contains("scenario.json"), "{}", ran.stderr);
    }
    let ran = tarn("evaluate tiering --scenario /nowhere/scenario.json").await;
    assert!(ran.code != 0 && ran.stderr.contains("/nowhere/scenario.json"), "{}", ran.stderr);
    let ran = evaluate(folder.path(), &scenario().to_string(), "--json /nowhere/out.json").await;
    assert!(ran.code != 0 && ran.stderr.contains("/nowhere/out.json"), "{}", ran.stderr);
}
