//! Tests of `tarn evaluate symbiosis`: results and figures from traces.

use std::{collections::BTreeSet, fmt::Write as _, fs, path::Path};

use serde_json::Value;
use tempfile::TempDir;

use crate::{
    evaluate::{contains_text, texts},
    rack::{CommandOutput, tarn},
};

/// Returns a trace of 12,000 accesses with the given keys.
fn trace(key: impl Fn(u64) -> u64) -> String {
    (0..12_000).fold("key\n".to_owned(), |mut text, at| {
        writeln!(text, "{}", key(at)).unwrap();
        text
    })
}

/// Table that is not a trace, because it has no column `key`, `lbn` or `addr`.
const TABLE_WITHOUT_TRACE: &str = "trace,miss_ratio\nstream,0.5\n";

/// Creates a directory with two traces: `stream` is sensitive to bandwidth, `store` to memory.
fn traces() -> TempDir {
    let folder = TempDir::new().unwrap();
    let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    file("stream.csv", &trace(|at| at % 3_000));
    let mixed = |at: u64| (at ^ (at << 21)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = |at: u64| (mixed(at) ^ (mixed(at) >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 52;
    file("store.csv", &trace(|at| ((hash(at).pow(4) >> 36) * 3_000) >> 12));
    folder
}

async fn evaluate(traces: &Path, options: &str) -> CommandOutput {
    tarn(&format!("evaluate symbiosis --traces {} {options}", traces.display())).await
}

fn numbers(folder: &Path, name: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(format!("{name}.json"))).unwrap()).unwrap()
}

#[tokio::test]
async fn directory_without_traces_is_an_error() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("derived.csv"), TABLE_WITHOUT_TRACE).unwrap();
    fs::write(folder.path().join("short.csv"), "key\n1\n2\n").unwrap();
    let ran = evaluate(folder.path(), "").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("derived.csv: missing column"), "{}", ran.stderr);
    assert!(ran.stderr.contains("short.csv: 2 accesses"), "{}", ran.stderr);
    assert!(ran.stderr.contains("no trace found"), "{}", ran.stderr);
}

#[tokio::test]
async fn unwritable_output_fails_before_the_computation() {
    let ran = evaluate(traces().path(), "--json /nowhere/numbers.json").await;
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("/nowhere/numbers.json"), "{}", ran.stderr);
}

#[tokio::test]
async fn malformed_trace_is_an_error() {
    let folder = traces();
    fs::write(folder.path().join("torn.csv"), "key\n1\nx\n").unwrap();
    let ran = evaluate(folder.path(), "").await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("torn.csv") && ran.stderr.contains("line 3"), "{}", ran.stderr);
}

/// Expected texts of each figure.
const FIGURE_TEXTS: [(&str, &[&str]); 6] = [
    ("figure-1", &["Local memory (equal shares)", "Bandwidth (equal shares)", "bound by bandwidth: stream"]),
    ("figure-3", &["Price of all memory", "Demand and price by round", "supply", "clearing price"]),
    ("figure-6", &["memory for 20.0 %", "memory for 40.0 %", "Harvest", "Trade", "Symbiosis", "ideal"]),
    ("figure-6-mixes", &["Worst-off tenant of a mix", "6 from store", "24 from store"]),
    ("figure-8", &["Tenants", "Time (ms)", "upper bounds from the paper", "100"]),
    (
        "figure-9",
        &["Share of all memory (%)", "Share of the link (%)", "store from 9", "a tenant switches traces"],
    ),
];

#[tokio::test]
async fn figures_are_written_with_their_data() {
    let folder = traces();
    fs::write(folder.path().join("derived.csv"), TABLE_WITHOUT_TRACE).unwrap();
    let into = folder.path().join("some/where");
    let all = folder.path().join("all.json");
    let options = format!("-o json --json {} --figures {}", all.display(), into.display());
    let ran = evaluate(folder.path(), &options).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("derived.csv: missing column `key`"), "{}", ran.stderr);
    assert!(!ran.stdout.contains("derived"), "{}", ran.stdout);
    let listed: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(listed, serde_json::from_slice::<Value>(&fs::read(&all).unwrap()).unwrap());
    assert_eq!(listed.as_array().unwrap().len(), 3 * 6);
    let written = fs::read_dir(&into).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let expected = FIGURE_TEXTS.iter().flat_map(|(name, _)| [format!("{name}.json"), format!("{name}.svg")]);
    assert_eq!(written.collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
    for (name, expected_texts) in FIGURE_TEXTS {
        let texts = texts(&into.join(format!("{name}.svg")));
        for expected in expected_texts {
            assert!(contains_text(&texts, expected), "{name}: {expected}: {texts:?}");
        }
    }
    let changes = numbers(&into, "figure-9");
    assert_eq!(changes["epochs"].as_array().unwrap().len(), 40);
    for change in changes["followed"].as_array().unwrap() {
        assert_eq!(change["within_5_percent_two_epochs_later"], true, "{change}");
        assert!(change["epochs_until_within_5_percent"].as_u64().unwrap() <= 2, "{change}");
    }
    assert_eq!(ran.stderr.matches("figure 9: tenant ").count(), 4, "{}", ran.stderr);
    let gains = numbers(&into, "figure-6-mixes");
    let gain = |scheme: &str| {
        let rows = gains.as_array().unwrap().iter().filter(|row| row["scheme"] == scheme);
        rows.map(|row| row["gain"].as_f64().unwrap()).sum::<f64>()
    };
    assert!(gain("symbiosis") > gain("harvest") && gain("equal split") == 0.0, "{gains}");
}

#[tokio::test]
async fn unwritable_directory_is_named_in_the_error() {
    let folder = traces();
    let ran = evaluate(folder.path(), &format!("--figures {}/stream.csv", folder.path().display())).await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("create directory") && ran.stderr.contains("stream.csv"), "{}", ran.stderr);
}
