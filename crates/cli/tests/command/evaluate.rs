//! `tarn evaluate`: files in, verdicts out, and what is said of files that are none.

use std::{fmt::Write as _, fs, io::Write as _, path::PathBuf};

use flate2::{Compression, write::GzEncoder};
use prediction::sensitivity::COUNTERS;
use serde_json::Value;
use tempfile::TempDir;

use crate::rack::{Ran, tarn};

/// Files of VMs that run for most of an hour, one after the other, and leave half of 8 GiB.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    async fn evaluate(&self, words: &str) -> Ran {
        let words = words.replace("DIR", self.0.path().to_str().unwrap());
        tarn(&format!("evaluate frigid --format csv {words}")).await
    }
}

fn vms(hours: std::ops::Range<u32>) -> String {
    let mut text = "began_s,ended_s,requested_gib,peak_gib,key,suspect\n".to_owned();
    for hour in hours {
        writeln!(text, "{},{},8,4,customer,0", hour * 3600, hour * 3600 + 3000).unwrap();
    }
    text
}

fn packed(text: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

#[tokio::test]
async fn forecasts_are_judged_at_four_rates_for_programs_and_for_people() {
    let files = Files::new();
    files.file("before.csv.gz", &packed(&vms(0..400)));
    files.file("after.csv", vms(400..500).as_bytes());
    let ran = files.evaluate("--train DIR/before.csv.gz --test DIR/after.csv -o json").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let verdicts: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let asked: Vec<f64> = verdicts.iter().map(|verdict| verdict["rate_asked"].as_f64().unwrap()).collect();
    assert_eq!(asked, [0.01, 0.02, 0.04, 0.1]);
    let last = &verdicts[3];
    for (name, expected) in [
        ("rate_actual", 0.0),
        ("frigid_share", 0.5),
        ("slice_share", 0.5),
        ("slice_rate", 0.0),
        ("static_share", 0.5),
        ("static_rate", 0.0),
        ("vms", 100.0),
    ] {
        assert_eq!(last[name].as_f64(), Some(expected), "{name} of {last}");
    }
    let ran = files.evaluate("--train DIR/before.csv.gz --test DIR/after.csv").await;
    assert!(ran.stdout.starts_with("OVER, ASKED"), "{}", ran.stdout);
    assert!(ran.stdout.contains("10.0 %") && ran.stdout.contains("50.0 %"), "{}", ran.stdout);
}

#[tokio::test]
async fn vms_may_be_learnt_from_those_tested_before_them_alone() {
    let files = Files::new();
    files.file("all.csv", vms(0..400).as_bytes());
    let ran = files.evaluate("--test DIR/all.csv").await;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
}

#[tokio::test]
async fn a_file_from_which_nothing_could_be_learnt_is_pointed_out() {
    let files = Files::new();
    files.file("late.csv", vms(400..500).as_bytes());
    files.file("early.csv", vms(0..100).as_bytes());
    let ran = files.evaluate("--train DIR/late.csv --test DIR/early.csv").await;
    assert_eq!(ran.code, 0);
    assert!(ran.stderr.contains("nothing was learnt from it"), "{}", ran.stderr);
}

#[tokio::test]
async fn what_is_no_table_is_an_error_that_names_the_file_and_what_is_wrong() {
    let files = Files::new();
    files.file("good.csv", vms(0..9).as_bytes());
    files.file("wrong.csv", vms(0..9).replace(",8,4,", ",8,x,").as_bytes());
    files.file("suspect.csv", vms(0..9).replace("customer,0", "customer,1").as_bytes());
    let gzip = packed(&vms(0..400));
    files.file("torn.csv.gz", &gzip[..gzip.len() / 2]);
    for (test, expected) in [
        ("missing.csv", "No such file"),
        ("wrong.csv", "line 2: peak_gib = \"x\": must be a number"),
        ("suspect.csv", "no VM to test"),
        ("torn.csv.gz", "the bytes end before their end"),
    ] {
        let ran = files.evaluate(&format!("--train DIR/good.csv --test DIR/{test}")).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{test}");
        assert!(ran.stderr.contains(test) && ran.stderr.contains(expected), "{test}: {}", ran.stderr);
    }
}

#[tokio::test]
async fn help_lists_the_columns_of_ones_own_table() {
    let help = tarn("evaluate frigid --help").await.stdout;
    for line in ["bitbrains-week", "nfcore-tasks", "began_s", "may be left out or empty"] {
        assert!(help.contains(line), "{help}");
    }
}

/// Programs of which those that wait for memory are slowed down.
fn labels() -> String {
    let mut text = format!("program,slowdown,{}\n", COUNTERS.join(","));
    for program in 0..40 {
        let bound = f64::from(program) / 40.0;
        let counters =
            COUNTERS.map(|name| if name == "dram_bound" { bound.to_string() } else { "0.1".to_owned() });
        writeln!(text, "p{program},{},{}", bound / 2.0, counters.join(",")).unwrap();
    }
    text
}

#[tokio::test]
async fn an_operators_own_labels_take_the_place_of_modelled_ones() {
    let files = Files::new();
    let path = files.file("labels.csv", labels().as_bytes());
    let words = format!("evaluate sensitivity --labels {} --splits 9 -o json", path.display());
    let ran = tarn(&words).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        !ran.stderr.contains("MODELLED") && ran.stderr.contains("40 runs of workloads, 35 of them"),
        "{}",
        ran.stderr
    );
    let verdicts: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let asked: Vec<f64> = verdicts.iter().map(|verdict| verdict["fp_asked"].as_f64().unwrap()).collect();
    assert_eq!(asked, [0.01, 0.02, 0.04, 0.1]);
    let placed = |way: &str| verdicts[1][way]["placed"].as_f64().unwrap();
    assert!(placed("dram_bound") > 0.05 && placed("memory_bound") == 0.0, "{}", verdicts[1]);
    let short = files.file("short.csv", labels().lines().take(5).collect::<Vec<_>>().join("\n").as_bytes());
    let ran = tarn(&format!("evaluate sensitivity --labels {}", short.display())).await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("4 programs: must be at least 10"), "{}", ran.stderr);
}

#[tokio::test]
async fn modelled_workloads_are_called_modelled_and_a_forest_places_more_of_them_than_thresholds() {
    let ran = tarn("evaluate sensitivity --splits 20 -o json").await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("MODELLED"), "{}", ran.stderr);
    let verdicts: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let placed = |way: &str| verdicts[1][way]["placed"].as_f64().unwrap();
    assert!(placed("forest") > placed("dram_bound") + 0.05, "{}", verdicts[1]);
    assert!(placed("forest") > placed("memory_bound") + 0.05, "{}", verdicts[1]);
}

#[tokio::test]
async fn a_margin_is_a_percentage_and_modelled_words_do_not_go_with_labels() {
    for words in
        ["--pdm 0", "--pdm NaN", "--pdm 101", "--splits 0", "--labels a --latency b", "--labels a --trace b"]
    {
        assert_eq!(tarn(&format!("evaluate sensitivity {words}")).await.code, 2, "{words}");
    }
}
