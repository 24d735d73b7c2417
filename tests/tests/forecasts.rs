//! Tests of forecasts with a real manager and the real command line. The tests import outcomes,
//! train, compare, promote, replace and roll back models, and reject invalid models.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fmt::Write as _,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use proto::v1 as wire;
use serde_json::Value;
use tests::rack::{Plan, Rack};

const GIB: u64 = 1 << 30;

/// Returns outcomes of VMs as CSV, alternating between two customers. VMs of customer "idle" leave
/// 13 of 16 GiB untouched. VMs of customer "busy" use all memory.
fn outcome_rows(rows: u32) -> String {
    outcome_rows_since(0, rows)
}

fn outcome_rows_since(start: u64, rows: u32) -> String {
    let mut text = "began_s,ended_s,requested_gib,peak_gib,key,cores\n".to_owned();
    for row in 0..rows {
        let (customer, peak) = if row % 2 == 0 { ("idle", 3) } else { ("busy", 16) };
        writeln!(
            text,
            "{},{},16,{peak},{customer},4",
            start + u64::from(row) * 60,
            start + u64::from(row) * 60 + 50
        )
        .unwrap();
    }
    text
}

struct ModelRack(Rack);

impl ModelRack {
    async fn new() -> Self {
        Self(Rack::start(Plan { hosts: vec![vec![0]], ..Plan::small(4) }).await)
    }

    fn write_file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.dir().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Runs a `tarn` command and returns its JSON output. The command must succeed.
    #[track_caller]
    fn tarn(&self, words: &str) -> Value {
        let (code, stdout, stderr) = self.run(&format!("{words} -o json"));
        assert_eq!(code, Some(0), "{words}: {stderr}");
        serde_json::from_str(&stdout).unwrap_or(Value::Null)
    }

    /// Runs a `tarn` command and returns its exit code, stdout and stderr. Replaces DIR by the
    /// folder of the rack.
    fn run(&self, words: &str) -> (Option<i32>, String, String) {
        let words = words.replace("DIR", &self.0.dir().display().to_string());
        let output = self.0.tarn(&words.split_whitespace().collect::<Vec<_>>());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// Plans a VM of 16 GiB. Returns the planned pool memory in GiB and the model that decided.
    #[track_caller]
    fn plan(&self, vm: &str, customer: &str) -> (u64, String) {
        let plan = self.tarn(&format!("plan-vm --vm {vm} --cores 4 --memory 16GiB --customer {customer}"));
        let model = plan["decision"]["model"].as_str().unwrap().to_owned();
        (plan["pool_bytes"].as_u64().unwrap() / GIB, model)
    }

    /// Imports outcomes of 600 VMs and trains a model. The model is not promoted.
    fn train_model(&self) {
        self.write_file("vms.csv", outcome_rows(600));
        let added = self.tarn("telemetry import --format csv DIR/vms.csv");
        assert_eq!((&added["added"], &added["duplicates"]), (&600.into(), &0.into()));
        let model = self.tarn("train frigid");
        assert_eq!(
            (&model["version"], &model["serving"], &model["rows"]),
            (&1.into(), &false.into(), &600.into())
        );
    }
}

#[tokio::test]
async fn model_serves_from_promotion_to_rollback_across_restart() {
    let mut rack = ModelRack::new().await;
    assert_eq!(
        rack.plan("a", "idle"),
        (4, "fixed-share/1".to_owned()),
        "a quarter must go to the pool without a model"
    );
    rack.train_model();
    assert_eq!(rack.plan("a", "idle").1, "fixed-share/1", "a model must not serve before its promotion");
    rack.tarn("promote frigid 1");
    assert_eq!(rack.plan("a", "idle"), (12, "frigid/1".to_owned()));
    assert_eq!(rack.plan("b", "busy"), (0, "frigid/1".to_owned()));
    rack.0.stop_manager();
    rack.0.start_manager().await;
    assert_eq!(rack.plan("c", "idle"), (12, "frigid/1".to_owned()), "the promotion must be durable");
    assert_eq!(rack.tarn("get models")[0]["serving"], true);
    assert_eq!(rack.tarn("rollback frigid"), Value::Null);
    assert_eq!(rack.plan("d", "idle").1, "fixed-share/1");
    let (code, _, output) = rack.run("rollback frigid");
    assert_eq!((code, output.contains("no frigid model is serving")), (Some(4), true), "{output}");
}

#[tokio::test]
async fn plan_is_explained_by_inputs_forecast_and_limits() {
    let rack = ModelRack::new().await;
    rack.train_model();
    rack.tarn("promote frigid 1");
    rack.plan("a", "idle");
    let decision = &rack.tarn("explain vm a")[0];
    assert_eq!((&decision["action"], &decision["model"]), (&"plan".into(), &"frigid/1".into()));
    let fact = |name: &str| decision["facts"][name].as_str().unwrap_or_default().to_owned();
    assert_eq!(fact("request: key"), "idle");
    assert!(fact("history: key idle").starts_with("300 VMs ended, "), "{}", fact("history: key idle"));
    assert!(fact("features: key").starts_with("count 300, "), "{}", fact("features: key"));
    assert!(
        fact("prediction: frigid memory taken").starts_with('8'),
        "{}",
        fact("prediction: frigid memory taken")
    );
    assert_eq!(fact("operating point: allowed fraction of VMs beyond the PDM (X, exceed_max)"), "2.0 %");
    assert!(fact("operating point: rate of overpredictions (OP)").ends_with(" %"));
    assert_eq!(fact("model: latency sensitivity"), "no serving model");
    let (_, text, _) = rack.run("explain vm a");
    assert!(
        text.contains("model: frigid/1") && text.contains("12GiB of 16GiB may come from the pool"),
        "{text}"
    );
}

#[tokio::test]
async fn new_model_is_compared_with_serving_model_on_unseen_vms() {
    let rack = ModelRack::new().await;
    let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() - 30 * 24 * 3600;
    rack.write_file("earlier.csv", outcome_rows_since(start, 600));
    rack.tarn("telemetry import --format csv --keep-timestamps DIR/earlier.csv");
    rack.tarn("train frigid");
    rack.tarn("promote frigid 1");
    let model = rack.tarn("train frigid");
    assert_eq!(model["comparison"], Value::Null, "no VM started since the training of the serving model");
    rack.write_file("later.csv", outcome_rows(1400));
    let added = rack.tarn("telemetry import --format csv DIR/later.csv");
    assert_eq!(
        (&added["added"], &added["duplicates"]),
        (&1400.into(), &0.into()),
        "import must shift the timestamps to now"
    );
    let repeated = rack.tarn("telemetry import --format csv DIR/later.csv");
    assert_eq!(
        (&repeated["added"], &repeated["duplicates"]),
        (&0.into(), &1400.into()),
        "all rows of a repeated import must be duplicates"
    );
    let newer = rack.tarn("train frigid");
    let compared = &newer["comparison"];
    assert_eq!(compared["version"], 1);
    for share in ["share", "share_of_serving"] {
        let share = compared[share].as_f64().unwrap();
        assert!(
            (0.3..=0.5).contains(&share),
            "must be most of the untouched memory, which is about half: {newer}"
        );
    }
    let output = rack.tarn("promote frigid 3 --validate-only");
    assert_eq!((&output["serving"], &output["comparison"]["vms"]), (&false.into(), &compared["vms"]));
    assert_eq!(rack.plan("a", "idle").1, "frigid/1", "--validate-only must not promote the model");
}

#[tokio::test]
async fn models_are_swapped_under_load_without_failed_plans() {
    let rack = ModelRack::new().await;
    rack.train_model();
    rack.tarn("train frigid");
    let (stop, plan_count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..64 {
        let mut scheduler = rack.0.scheduler().await;
        let (stop, plan_count) = (Arc::clone(&stop), Arc::clone(&plan_count));
        clients.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let profile = wire::VmProfile { key: "idle".into(), ..Default::default() };
                let request = wire::PlanVmRequest {
                    vm: format!("v{client}"),
                    cores: 4,
                    memory_bytes: 16 * GIB,
                    pinned: false,
                    profile: Some(profile),
                };
                let plan = scheduler.plan_vm(request).await.unwrap().into_inner();
                let model = plan.decision.unwrap().model;
                let expected = if model == "fixed-share/1" { 4 } else { 12 };
                assert_eq!(plan.pool_bytes, expected * GIB, "{model}");
                plan_count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let rack = tokio::task::spawn_blocking(move || {
        for _ in 0..5 {
            for words in ["promote frigid 1", "promote frigid 2", "rollback frigid", "rollback frigid"] {
                rack.tarn(words);
            }
        }
        rack
    });
    let rack = rack.await.unwrap();
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    assert!(plan_count.load(Ordering::Relaxed) > 64, "too few plans during the swaps");
    drop(rack);
}

/// Returns a LightGBM text model with one tree, which has one split on this feature.
fn lightgbm_model(feature: &str) -> String {
    format!(
        "tree\nversion=v4\nnum_class=1\nnum_tree_per_iteration=1\nlabel_index=0\nmax_feature_idx=0\nobjective=regression\n\
         feature_names={feature}\nfeature_infos=none\ntree_sizes=1\n\nTree=0\nnum_leaves=2\nnum_cat=0\nsplit_feature=0\n\
         split_gain=1\nthreshold=0.5\ndecision_type=2\nleft_child=-1\nright_child=-2\nleaf_value=0 0.8\n\nend of trees\n"
    )
}

#[tokio::test]
async fn imported_model_serves_like_trained_model() {
    let rack = ModelRack::new().await;
    rack.train_model();
    rack.write_file("model.txt", lightgbm_model("key.median"));
    let model = rack.tarn("import-model frigid --format lightgbm DIR/model.txt");
    assert_eq!((&model["version"], &model["trained_by"]), (&2.into(), &"lightgbm".into()));
    rack.tarn("promote frigid 2");
    assert_eq!(rack.plan("a", "idle"), (12, "frigid/2".to_owned()));
    assert_eq!(rack.plan("b", "busy").0, 0);
    let (code, exported, _) = rack.run("export-model frigid 2");
    assert_eq!(code, Some(0));
    rack.write_file("exported.json", exported);
    assert_eq!(
        rack.tarn("import-model frigid DIR/exported.json")["version"],
        3,
        "an exported model must be importable"
    );
}

#[tokio::test]
async fn invalid_models_are_rejected_and_serving_model_remains() {
    let rack = ModelRack::new().await;
    rack.train_model();
    rack.tarn("promote frigid 1");
    let (_, exported, _) = rack.run("export-model frigid");
    rack.write_file("short.json", &exported.as_bytes()[..exported.len() / 2]);
    rack.write_file("later.json", exported.replacen("\"tarn_model\":2", "\"tarn_model\":9", 1));
    rack.write_file("model.txt", lightgbm_model("shoe_size"));
    rack.write_file("model.onnx", b"not a graph");
    rack.write_file("labels.csv", "program,slowdown\n");
    for (words, expected) in [
        ("import-model frigid DIR/short.json", "content: truncated after"),
        ("import-model frigid DIR/later.json", "content: tarn_model = 9: must be 2"),
        ("import-model frigid --format lightgbm DIR/model.txt", "content: unknown feature \"shoe_size\""),
        ("import-model frigid --format onnx DIR/model.onnx", "content: not an ONNX model"),
        ("import-model frigid --format lightgbm DIR/short.json", "content: not a LightGBM text model"),
        ("import-model sensitivity DIR/later.json", "content: tarn_model = 9"),
        ("promote frigid 7", "version: frigid 7 does not exist"),
        ("promote frigid 1", "version: frigid 1 is already serving"),
        ("train sensitivity --labels DIR/labels.csv", "missing column \"retiring\""),
        ("train loss --labels DIR/labels.csv", "missing column \"pool_load_share\""),
        ("import-model loss --format onnx DIR/model.onnx", "format: models of loss cannot be imported"),
        ("rollback loss", "kind: no loss model is serving"),
    ] {
        let (code, _, output) = rack.run(words);
        assert!(code != Some(0) && output.contains(expected), "{words}: {output}");
    }
    let (code, _, output) = rack.run("import-model sensitivity DIR/short.json");
    assert!(code != Some(0) && output.contains("truncated after"), "{output}");
    rack.write_file("other.json", exported);
    let (_, _, output) = rack.run("import-model sensitivity DIR/other.json");
    assert!(output.contains("kind: the file contains a model of frigid: must be of sensitivity"), "{output}");
    assert_eq!(rack.plan("a", "idle"), (12, "frigid/1".to_owned()));
    assert_eq!(rack.tarn("get models").as_array().unwrap().len(), 1, "no rejected model must be stored");
}

#[tokio::test]
async fn latency_tolerant_vms_get_all_but_1_gib_from_the_pool() {
    let rack = ModelRack::new().await;
    let mut labels = "program,slowdown,retiring,frontend_bound,bad_speculation,core_bound,memory_bound,l1_bound,l2_bound,l3_bound,\
        dram_latency_bound,dram_bandwidth_bound,store_bound,dram_bound,ipc,l1_mpki,l2_mpki,l3_mpki,memory_level_parallelism\n"
        .to_owned();
    for program in 0..60 {
        let bound = f64::from(program) / 60.0;
        writeln!(labels, "p{program},{},0.5,,,,{bound},,,,,,,{bound},2,,,,", bound / 5.0).unwrap();
    }
    rack.write_file("labels.csv", labels);
    let model = rack.tarn("train sensitivity --labels DIR/labels.csv");
    assert_eq!((&model["modelled"], &model["rows"]), (&false.into(), &60.into()));
    rack.tarn("promote sensitivity 1");
    let plan = |vm: &str, bound: &str| {
        let words = format!("plan-vm --vm {vm} --cores 4 --memory 16GiB");
        rack.tarn(&format!("{words} --counter memory_bound={bound},dram_bound={bound},retiring=0.5,ipc=2"))
    };
    let (calm, bound) = (plan("calm", "0.02"), plan("bound", "0.9"));
    assert_eq!(calm["decision"]["model"], "sensitivity/1");
    assert_eq!(calm["pool_bytes"], 15 * GIB, "1 GiB must remain local for the node with CPUs");
    assert_eq!(bound["decision"]["model"], "fixed-share/1");
    for (counter, expected) in
        [("shoe_size=1", "\"shoe_size\" must be one of"), ("ipc=-1", "ipc = -1 must be a number from 0")]
    {
        let (code, _, output) =
            rack.run(&format!("plan-vm --vm x --cores 4 --memory 16GiB --counter {counter}"));
        assert!(code == Some(2) && output.contains("--counter: ") && output.contains(expected), "{output}");
    }
}

#[tokio::test]
async fn outcomes_that_are_too_old_are_counted_and_dropped() {
    let rack = ModelRack::new().await;
    rack.write_file("vms.csv", outcome_rows(60));
    let added = rack.tarn("telemetry import --format csv --keep-timestamps DIR/vms.csv");
    assert_eq!((&added["added"], &added["too_old"]), (&0.into(), &60.into()), "the VMs ended in 1970");
}

#[tokio::test]
async fn zero_risk_limit_plans_no_pool_memory() {
    let rack = ModelRack::new().await;
    rack.train_model();
    rack.tarn("promote frigid 1");
    let text = rack.0.rack_toml() + "\n[prediction]\nexceed_max = 0\n";
    rack.0.write_rack_toml(&text);
    rack.0.signal_manager(rustix::process::Signal::HUP);
    let is_strict = async |_: &Rack| rack.plan("b", "idle").0 == 0;
    rack.0.wait_for("the manager to take no risk", is_strict).await;
    assert_eq!(rack.plan("b", "idle").1, "frigid/1", "the model must decide, not the fixed share");
}

#[tokio::test]
async fn outcomes_round_trip_and_invalid_outcomes_are_rejected() {
    let rack = ModelRack::new().await;
    rack.train_model();
    let (_, exported, _) = rack.run("telemetry export");
    assert_eq!(exported.lines().count(), 601);
    rack.write_file("exported.csv", &exported);
    let repeated = rack.tarn("telemetry import --format csv --keep-timestamps DIR/exported.csv");
    assert_eq!((&repeated["added"], &repeated["duplicates"]), (&0.into(), &600.into()));
    let (_, features, _) = rack.run("telemetry export --features");
    let rows: Vec<&str> = features.lines().collect();
    assert!(rows[0].starts_with("requested_gib,cores,") && rows[0].ends_with(",untouched"));
    assert_eq!(rows.len(), 601);
    let mut models = wire::models_client::ModelsClient::new(rack.0.open_channel().await);
    let good = wire::Outcome {
        vm: "v".into(),
        requested_bytes: 8 * GIB,
        ended_unix_ms: 5,
        peak_bytes: GIB,
        ..Default::default()
    };
    for (invalid, field) in [
        (wire::Outcome { requested_bytes: 0, ..good.clone() }, "requested_bytes"),
        (wire::Outcome { peak_bytes: u64::MAX, ..good.clone() }, "peak_bytes"),
        (wire::Outcome { started_unix_ms: 6, ..good.clone() }, "ended_unix_ms"),
        (wire::Outcome { cores: f64::NAN, ..good.clone() }, "cores"),
        (wire::Outcome { cores: -1.0, ..good.clone() }, "cores"),
        (wire::Outcome { ended_unix_ms: u64::MAX, ..good.clone() }, "ended_unix_ms"),
        (wire::Outcome { vm: "x".repeat(300), ..good.clone() }, "vm"),
    ] {
        let outcomes = vec![good.clone(), invalid];
        let status = models.add_outcomes(wire::AddOutcomesRequest { outcomes }).await.unwrap_err();
        assert!(status.message().starts_with(&format!("{field}: ")), "{status}");
        assert!(status.message().ends_with("(outcome 1, counted from 0)"), "{status}");
    }
    assert_eq!(
        rack.run("telemetry export").1.lines().count(),
        601,
        "no outcome of a rejected batch must be added"
    );
}
