//! Tests of `tarn evaluate` for predictions: results, figures, and errors in input files.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use prediction::sensitivity::COUNTER_NAMES;
use quick_xml::{Reader, events::Event};
use serde_json::Value;
use tempfile::TempDir;

use crate::rack::{CommandOutput, tarn};

/// Temporary directory with input and output files of a test.
struct InputFiles(TempDir);

impl InputFiles {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    async fn evaluate(&self, options: &str) -> CommandOutput {
        let options = options.replace("DIR", self.0.path().to_str().unwrap());
        tarn(&format!("evaluate frigid --format csv {options}")).await
    }
}

/// Returns a table of one VM per hour. Each VM runs for 50 minutes and touches 4 of its 8 GiB.
fn vms(hours: std::ops::Range<u32>) -> String {
    let mut text = "began_s,ended_s,requested_gib,peak_gib,key,suspect\n".to_owned();
    for hour in hours {
        writeln!(text, "{},{},8,4,customer,0", hour * 3600, hour * 3600 + 3000).unwrap();
    }
    text
}

fn gzip(text: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

#[tokio::test]
async fn frigid_memory_is_evaluated_at_four_target_rates() {
    let files = InputFiles::new();
    files.file("before.csv.gz", &gzip(&vms(0..400)));
    files.file("after.csv", vms(400..500).as_bytes());
    let ran = files.evaluate("--train DIR/before.csv.gz --test DIR/after.csv -o json").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let results: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let targets: Vec<f64> = results.iter().map(|result| result["rate_asked"].as_f64().unwrap()).collect();
    assert_eq!(targets, [0.01, 0.02, 0.04, 0.1]);
    let last = &results[3];
    for (name, expected) in [
        ("rate_actual", 0.0),
        ("frigid_share", 0.5),
        ("slice_share", 0.5),
        ("slice_rate", 0.0),
        ("static_share", 0.5),
        ("static_rate", 0.0),
        ("vms", 100.0),
        ("vms_without_forecast", 0.0),
        ("memory_without_forecast", 0.0),
    ] {
        assert_eq!(last[name].as_f64(), Some(expected), "{name} of {last}");
    }
    assert_eq!(last["rule"]["share_in_hindsight"].as_f64(), Some(0.5), "{last}");
    let sizes = last["by_size"].as_array().unwrap();
    assert_eq!(sizes.iter().map(|class| class["vms"].as_u64().unwrap()).sum::<u64>(), 100, "{last}");
    assert_eq!(last["by_owner"]["owners"].as_u64(), Some(1), "{last}");
    let ran = files.evaluate("--train DIR/before.csv.gz --test DIR/after.csv").await;
    assert!(ran.stdout.starts_with("TARGET RATE"), "{}", ran.stdout);
    for expected in ["10.0 %", "50.0 %", "8GiB to 8GiB", "ABOVE TARGET", "0, 0.0 %"] {
        assert!(ran.stdout.contains(expected), "{expected}: {}", ran.stdout);
    }
}

#[tokio::test]
async fn owners_are_held_out_in_cross_validation() {
    let files = InputFiles::new();
    let two_owners = vms(0..800).lines().enumerate().fold(String::new(), |mut text, (line, row)| {
        let owner = if line % 2 == 0 { "even" } else { "odd" };
        writeln!(text, "{}", row.replace("customer", owner)).unwrap();
        text
    });
    files.file("all.csv", two_owners.as_bytes());
    let ran = files.evaluate("--test DIR/all.csv --owner-folds 2 -o json").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let results: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let last = &results[3];
    assert!(last["vms"].as_u64().unwrap() > 500 && last["frigid_share"].as_f64() == Some(0.5), "{last}");
    assert_eq!(last["by_owner"]["owners"].as_u64(), Some(2), "{last}");
    for invalid in
        ["--owner-folds 1", "--owner-folds 2 --train DIR/all.csv", "--owner-folds 2 --figure a.svg"]
    {
        assert_eq!(files.evaluate(&format!("--test DIR/all.csv {invalid}")).await.code, 2, "{invalid}");
    }
}

#[tokio::test]
async fn training_file_is_optional() {
    let files = InputFiles::new();
    files.file("all.csv", vms(0..400).as_bytes());
    let ran = files.evaluate("--test DIR/all.csv").await;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
}

#[tokio::test]
async fn training_file_without_earlier_vms_is_reported() {
    let files = InputFiles::new();
    files.file("late.csv", vms(400..500).as_bytes());
    files.file("early.csv", vms(0..100).as_bytes());
    let ran = files.evaluate("--train DIR/late.csv --test DIR/early.csv").await;
    assert_eq!(ran.code, 0);
    assert!(ran.stderr.contains("--train was not used for training"), "{}", ran.stderr);
}

#[tokio::test]
async fn suspect_vms_are_skipped_with_note() {
    let files = InputFiles::new();
    let suspect = vms(0..3).replace("customer,0", "customer,1") + vms(3..9).split_once('\n').unwrap().1;
    files.file("some.csv", suspect.as_bytes());
    let ran = files.evaluate("--test DIR/some.csv").await;
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (0, "note: 3 of 9 VMs of --test are suspect and were skipped\n")
    );
}

#[tokio::test]
async fn invalid_table_error_names_file_and_reason() {
    let files = InputFiles::new();
    files.file("good.csv", vms(0..9).as_bytes());
    files.file("wrong.csv", vms(0..9).replace(",8,4,", ",8,x,").as_bytes());
    files.file("suspect.csv", vms(0..9).replace("customer,0", "customer,1").as_bytes());
    let gzip = gzip(&vms(0..400));
    files.file("torn.csv.gz", &gzip[..gzip.len() / 2]);
    for (test, expected) in [
        ("missing.csv", "No such file"),
        ("wrong.csv", "line 2: peak_gib = \"x\": must be a number"),
        ("suspect.csv", "the test set has no VM with a reliable outcome"),
        ("torn.csv.gz", "cannot read the table"),
    ] {
        let ran = files.evaluate(&format!("--train DIR/good.csv --test DIR/{test}")).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{test}");
        assert!(ran.stderr.contains(test) && ran.stderr.contains(expected), "{test}: {}", ran.stderr);
    }
}

#[tokio::test]
async fn help_lists_columns_of_custom_table() {
    let help = tarn("evaluate frigid --help").await.stdout;
    for line in ["bitbrains-week", "nfcore-tasks", "began_s", "may be missing or empty"] {
        assert!(help.contains(line), "{help}");
    }
}

/// Returns labelled workloads of 40 programs. The slowdown is half of `dram_bound`, and all other
/// counters are constant.
fn labels() -> String {
    let mut text = format!("program,slowdown,{}\n", COUNTER_NAMES.join(","));
    for program in 0..40 {
        let bound = f64::from(program) / 40.0;
        let counters =
            COUNTER_NAMES.map(|name| if name == "dram_bound" { bound.to_string() } else { "0.1".to_owned() });
        writeln!(text, "p{program},{},{}", bound / 2.0, counters.join(",")).unwrap();
    }
    text
}

#[tokio::test]
async fn labelled_workloads_replace_modelled_workloads() {
    let files = InputFiles::new();
    let path = files.file("labels.csv", labels().as_bytes());
    let ran = tarn(&format!("evaluate sensitivity --labels {} --splits 9 -o json", path.display())).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        !ran.stderr.contains("MODELLED") && ran.stderr.contains("40 runs of workloads, 35 of them"),
        "{}",
        ran.stderr
    );
    let results: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let targets: Vec<f64> = results.iter().map(|result| result["fp_asked"].as_f64().unwrap()).collect();
    assert_eq!(targets, [0.01, 0.02, 0.04, 0.1]);
    let placed = |method: &str| results[1][method]["placed"].as_f64().unwrap();
    assert!(placed("dram_bound") > 0.05 && placed("memory_bound") == 0.0, "{}", results[1]);
    let short = files.file("short.csv", labels().lines().take(5).collect::<Vec<_>>().join("\n").as_bytes());
    let ran = tarn(&format!("evaluate sensitivity --labels {}", short.display())).await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("4 different programs: must be at least 10"), "{}", ran.stderr);
}

#[tokio::test]
async fn forest_places_more_modelled_workloads_than_thresholds() {
    let ran = tarn("evaluate sensitivity --splits 20 -o json").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("MODELLED"), "{}", ran.stderr);
    let results: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let placed = |method: &str| results[1][method]["placed"].as_f64().unwrap();
    assert!(placed("forest") > placed("dram_bound") + 0.05, "{}", results[1]);
    assert!(placed("forest") > placed("memory_bound") + 0.05, "{}", results[1]);
}

#[tokio::test]
async fn invalid_or_conflicting_options_are_rejected() {
    for options in
        ["--pdm 0", "--pdm NaN", "--pdm 101", "--splits 0", "--labels a --latency b", "--labels a --trace b"]
    {
        assert_eq!(tarn(&format!("evaluate sensitivity {options}")).await.code, 2, "{options}");
    }
}

/// Returns the texts of an SVG file, and asserts that the file is well-formed.
pub(crate) fn texts(path: &Path) -> Vec<String> {
    let svg = fs::read_to_string(path).unwrap();
    let (mut reader, mut texts, mut open) = (Reader::from_str(&svg), Vec::new(), 0);
    reader.config_mut().trim_text(true);
    loop {
        match reader.read_event().unwrap() {
            Event::Start(_) => open += 1,
            Event::End(_) => open -= 1,
            Event::Text(text) => texts.push(text.into_inner().into_owned()),
            Event::Eof => break,
            _ => {}
        }
    }
    assert!(svg.starts_with("<svg") && open == 0, "{svg}");
    texts
}

pub(crate) fn contains_text(texts: &[String], expected: &str) -> bool {
    texts.iter().any(|text| text.contains(expected))
}

#[tokio::test]
async fn frigid_figure_shows_all_methods_and_leaves_output_unchanged() {
    let files = InputFiles::new();
    files.file("all.csv", vms(0..400).as_bytes());
    let listed = files.evaluate("--test DIR/all.csv -o json").await;
    let [first, second] = ["first.svg", "second.svg"].map(|name| files.0.path().join(name));
    for path in [&first, &second] {
        let ran = files.evaluate(&format!("--test DIR/all.csv -o json --figure {}", path.display())).await;
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        assert_eq!(ran.stdout, listed.stdout);
    }
    let texts = texts(&first);
    for expected in [
        "VMs overpredicted (% of VMs)",
        "Memory predicted frigid (% of memory)",
        "Tarn: trees, calibrated by size class",
        "trees alone",
        "minimum of the customer",
        "a fixed share",
    ] {
        assert!(contains_text(&texts, expected), "{expected}: {texts:?}");
    }
    assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap(), "the same input gives the same figure");
    let names = fs::read_dir(files.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().ends_with("partial")));
}

#[tokio::test]
async fn unwritable_figure_is_an_error_and_leaves_no_partial_file() {
    let files = InputFiles::new();
    files.file("all.csv", vms(0..100).as_bytes());
    fs::create_dir(files.0.path().join("folder.svg")).unwrap();
    for (name, expected) in [("none/a.svg", "No such file"), ("folder.svg", "directory")] {
        let ran = files.evaluate(&format!("--test DIR/all.csv --figure DIR/{name}")).await;
        assert_eq!(ran.code, 1, "{name}");
        assert!(ran.stderr.contains(name) && ran.stderr.contains(expected), "{name}: {}", ran.stderr);
    }
    assert_eq!(fs::read_dir(files.0.path()).unwrap().count(), 2, "all.csv and folder.svg");
}

#[tokio::test]
async fn sensitivity_figure_marks_modelled_workloads() {
    let files = InputFiles::new();
    files.file("labels.csv", labels().as_bytes());
    let path = files.0.path().join("a.svg");
    let options = format!("--splits 2 -o json --figure {}", path.display());
    let labels = format!("--labels {}/labels.csv --pdm 7", files.0.path().display());
    let drawn = tarn(&format!("evaluate sensitivity {labels} {options}")).await;
    let listed = tarn(&format!("evaluate sensitivity {labels} --splits 2 -o json")).await;
    assert_eq!((drawn.code, drawn.stdout), (0, listed.stdout), "{}", drawn.stderr);
    let texts_of_labelled = texts(&path);
    for expected in [
        "(a) Slowdown",
        "margin (PDM): 7.0 %",
        "DRAM bound with local memory (% of cycles)",
        "Slowdown with pool memory (%)",
        "(b) Predicted insensitive",
        "False positives (% of workloads)",
        "forest, best threshold",
        "DRAM bound, best threshold",
        "memory bound, best threshold",
        "L3 MPKI, best threshold",
        "forest, threshold learnt",
    ] {
        assert!(contains_text(&texts_of_labelled, expected), "{expected}: {texts_of_labelled:?}");
    }
    assert!(!contains_text(&texts_of_labelled, "MODELLED"));
    assert_eq!(tarn(&format!("evaluate sensitivity {options}")).await.code, 0);
    let marked = texts(&path).iter().filter(|text| text.contains("MODELLED")).count();
    assert_eq!(marked, 3, "both titles and the legend entry of the dots");
}

impl InputFiles {
    async fn run_combination(&self, options: &str) -> CommandOutput {
        self.file("vms.csv", vms(0..400).as_bytes());
        self.file("labels.csv", labels().as_bytes());
        let options = format!("--format csv --test DIR/vms.csv --labels DIR/labels.csv --splits 9 {options}");
        let options = options.replace("DIR", self.0.path().to_str().unwrap());
        tarn(&format!("evaluate combination {options}")).await
    }

    async fn combined(&self, options: &str) -> Value {
        let ran = self.run_combination(&format!("-o json {options}")).await;
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        serde_json::from_str(&ran.stdout).unwrap()
    }
}

#[tokio::test]
async fn chosen_combination_stays_within_exceed_max() {
    let files = InputFiles::new();
    let combined = files.combined("").await;
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!(combined["modelled"], false);
    let inputs = &combined["inputs"];
    for (name, expected) in [("exceed_max", 0.02), ("history", 0.8), ("exceeds", 0.25), ("pdm", 0.05)] {
        assert_eq!(number(&inputs[name]), expected, "{name} of {inputs}");
    }
    let Value::Array(frontier) = &combined["frontier"] else { panic!("{combined}") };
    assert!(frontier.contains(&combined["chosen"]), "{combined}");
    let (pool, miss) = (|pair: &Value| number(&pair["pool"]), |pair: &Value| number(&pair["miss"]));
    assert!(frontier.is_sorted_by(|pair, next| pool(pair) < pool(next) && miss(pair) < miss(next)));
    let chosen = &combined["chosen"];
    // Each VM leaves half of its memory untouched, so much memory can be placed on the pool.
    assert!(pool(chosen) > 0.3 && miss(chosen) <= 0.02, "{chosen}");
    for alone in ["frigid", "insensitive", "fixed"] {
        assert!(pool(&combined["alone"][alone]) <= pool(chosen), "{alone}: {combined}");
    }
    assert!(inputs["frigid"].as_array().unwrap().contains(&chosen["frigid"]), "{combined}");
    let combined = files.combined("--exceed-max 0 --history 0").await;
    let chosen = &combined["chosen"];
    assert_eq!((number(&chosen["miss"]), number(&chosen["insensitive"]["placed"])), (0.0, 0.0));
}

#[tokio::test]
async fn combination_is_printed_and_drawn() {
    let files = InputFiles::new();
    let path = files.0.path().join("d.svg");
    let ran = files.run_combination(&format!("--exceed-max 3 --figure {}", path.display())).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout.starts_with("METHOD ") && ran.stdout.contains("\nboth predictions "),
        "{}",
        ran.stdout
    );
    let texts = texts(&path);
    for expected in [
        "VMs expected to be slowed down beyond the PDM (% of VMs)",
        "Memory on the pool (% of memory)",
        "both predictions",
        "frigid memory alone",
        "insensitivity alone",
        "a fixed share",
        "chosen",
        "allowed (X): 3.0 %",
    ] {
        assert!(contains_text(&texts, expected), "{expected}: {texts:?}");
    }
    assert!(!contains_text(&texts, "MODELLED"));
}

#[tokio::test]
async fn combination_options_must_be_percentages() {
    for (options, option) in [
        ("--exceed-max 101", "--exceed-max"),
        ("--history NaN", "--history"),
        ("--overpredicted-exceeds many", "--overpredicted-exceeds"),
    ] {
        let ran = tarn(&format!("evaluate combination --format csv --test a {options}")).await;
        assert_eq!(ran.code, 2, "{options}");
        let rule = "must be a percentage from 0 to 100";
        assert!(ran.stderr.contains(option) && ran.stderr.contains(rule), "{options}: {}", ran.stderr);
    }
    let help = tarn("evaluate combination --help").await.stdout;
    for expected in ["began_s", "dram_bound", "--history", "BEYOND PDM"] {
        assert!(help.contains(expected), "{expected}: {help}");
    }
}

#[tokio::test]
async fn invalid_options_of_the_qos_simulation_are_rejected() {
    for (options, expected) in [
        ("--vms 0", "not in 1..=1000000"),
        ("--pdm 0", "must be a percentage from 0.1 to 100"),
        ("--exceed-max 101", "must be a percentage from 0 to 100"),
    ] {
        let ran = tarn(&format!("evaluate qos {options}")).await;
        assert_eq!(ran.code, 2, "{options}");
        assert!(ran.stderr.contains(expected), "{options}: {}", ran.stderr);
    }
    let ran = tarn("evaluate qos --json /nowhere/qos.json").await;
    assert!(ran.code != 0 && ran.stderr.contains("/nowhere/qos.json"), "{}", ran.stderr);
}
