//! Forecasts from outcomes to plans, on a real manager asked by the real command: learnt, compared, promoted, swapped under load, rolled
//! back, and refused where they are none.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

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

/// VMs of two customers, one after the other: one's leave 13 of 16 GiB, the other's leave nothing.
fn vms(rows: u32) -> String {
    vms_since(0, rows)
}

fn vms_since(start: u64, rows: u32) -> String {
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

struct Place(Rack);

impl Place {
    async fn new() -> Self {
        Self(Rack::start(Plan { hosts: vec![vec![0]], ..Plan::small(4) }).await)
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.dir().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Returns the output of the command as JSON.
    #[track_caller]
    fn tarn(&self, words: &str) -> Value {
        let (code, said, complained) = self.ran(&format!("{words} -o json"));
        assert_eq!(code, Some(0), "{words}: {complained}");
        serde_json::from_str(&said).unwrap_or(Value::Null)
    }

    /// Returns exit status, output and errors of the command.
    fn ran(&self, words: &str) -> (Option<i32>, String, String) {
        let words = words.replace("DIR", &self.0.dir().display().to_string());
        let ran = self.0.tarn(&words.split_whitespace().collect::<Vec<_>>());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (ran.status.code(), text(ran.stdout), text(ran.stderr))
    }

    /// Returns the pool part of a VM's 16 GiB, in GiB, and the model.
    #[track_caller]
    fn plan(&self, vm: &str, customer: &str) -> (u64, String) {
        let plan = self.tarn(&format!("plan-vm --vm {vm} --cores 4 --memory 16GiB --customer {customer}"));
        let model = plan["decision"]["model"].as_str().unwrap().to_owned();
        (plan["pool_bytes"].as_u64().unwrap() / GIB, model)
    }

    /// Outcomes of 600 VMs, and a model of them that does not serve.
    fn learn(&self) {
        self.file("vms.csv", vms(600));
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
async fn a_model_serves_from_its_promotion_to_its_rollback_and_through_a_restart() {
    let mut place = Place::new().await;
    assert_eq!(place.plan("a", "idle"), (4, "fixed-share/1".to_owned()), "a quarter until a model serves");
    place.learn();
    assert_eq!(place.plan("a", "idle").1, "fixed-share/1", "it was not promoted");
    place.tarn("promote frigid 1");
    assert_eq!(place.plan("a", "idle"), (12, "frigid/1".to_owned()));
    assert_eq!(place.plan("b", "busy"), (0, "frigid/1".to_owned()));
    place.0.stop_manager();
    place.0.start_manager().await;
    assert_eq!(place.plan("c", "idle"), (12, "frigid/1".to_owned()), "what was promoted is durable");
    assert_eq!(place.tarn("get models")[0]["serving"], true);
    assert_eq!(place.tarn("rollback frigid"), Value::Null);
    assert_eq!(place.plan("d", "idle").1, "fixed-share/1");
    let (code, _, said) = place.ran("rollback frigid");
    assert_eq!((code, said.contains("no model of frigid serves")), (Some(4), true), "{said}");
}

#[tokio::test]
async fn every_plan_can_be_explained_by_what_was_known_said_and_allowed() {
    let place = Place::new().await;
    place.learn();
    place.tarn("promote frigid 1");
    place.plan("a", "idle");
    let decision = &place.tarn("explain vm a")[0];
    assert_eq!((&decision["action"], &decision["model"]), (&"plan".into(), &"frigid/1".into()));
    let fact = |name: &str| decision["facts"][name].as_str().unwrap_or_default().to_owned();
    assert_eq!(fact("told: key"), "idle");
    assert!(fact("known of key idle").starts_with("300 VMs ended, "), "{}", fact("known of key idle"));
    assert!(fact("numbers of key").starts_with("count 300, "), "{}", fact("numbers of key"));
    assert!(
        fact("forecast: taken as untouched").starts_with('8'),
        "{}",
        fact("forecast: taken as untouched")
    );
    assert_eq!(fact("operated at: VMs that may be slowed down too much (X, exceed_max)"), "2.0 %");
    assert!(fact("operated at: VMs of which too much may be taken (OP)").ends_with(" %"));
    assert_eq!(fact("model of sensitivity"), "none serves");
    let (_, text, _) = place.ran("explain vm a");
    assert!(
        text.contains("model: frigid/1") && text.contains("12GiB of 16GiB may come from the pool"),
        "{text}"
    );
}

#[tokio::test]
async fn a_newer_model_is_compared_with_the_one_that_serves_on_vms_that_neither_had_seen() {
    let place = Place::new().await;
    let month_ago = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() - 30 * 24 * 3600;
    place.file("earlier.csv", vms_since(month_ago, 600));
    place.tarn("telemetry import --format csv --keep-timestamps DIR/earlier.csv");
    place.tarn("train frigid");
    place.tarn("promote frigid 1");
    let same = place.tarn("train frigid");
    assert_eq!(same["comparison"], Value::Null, "no VM has begun since");
    place.file("later.csv", vms(1400));
    let added = place.tarn("telemetry import --format csv DIR/later.csv");
    assert_eq!(
        (&added["added"], &added["duplicates"]),
        (&1400.into(), &0.into()),
        "they ended now, not a month ago"
    );
    let again = place.tarn("telemetry import --format csv DIR/later.csv");
    assert_eq!((&again["added"], &again["duplicates"]), (&0.into(), &1400.into()), "the same table is known");
    let newer = place.tarn("train frigid");
    let compared = &newer["comparison"];
    assert_eq!(compared["version"], 1);
    for share in ["share", "share_of_serving"] {
        let share = compared[share].as_f64().unwrap();
        assert!((0.3..=0.5).contains(&share), "most of half of the memory: {newer}");
    }
    let said = place.tarn("promote frigid 3 --validate-only");
    assert_eq!((&said["serving"], &said["comparison"]["vms"]), (&false.into(), &compared["vms"]));
    assert_eq!(place.plan("a", "idle").1, "frigid/1", "nothing was changed");
}

#[tokio::test]
async fn models_are_swapped_while_64_clients_plan_and_no_plan_fails() {
    let place = Place::new().await;
    place.learn();
    place.tarn("train frigid");
    let (stop, planned) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..64 {
        let mut scheduler = place.0.scheduler().await;
        let (stop, planned) = (Arc::clone(&stop), Arc::clone(&planned));
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
                planned.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let place = tokio::task::spawn_blocking(move || {
        for _ in 0..5 {
            for words in ["promote frigid 1", "promote frigid 2", "rollback frigid", "rollback frigid"] {
                place.tarn(words);
            }
        }
        place
    });
    let place = place.await.unwrap();
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    assert!(planned.load(Ordering::Relaxed) > 64, "clients planned meanwhile");
    drop(place);
}

/// LightGBM's text of one tree with one split on a number of that name.
fn lightgbm(feature: &str) -> String {
    format!(
        "tree\nversion=v4\nnum_class=1\nnum_tree_per_iteration=1\nlabel_index=0\nmax_feature_idx=0\nobjective=regression\n\
         feature_names={feature}\nfeature_infos=none\ntree_sizes=1\n\nTree=0\nnum_leaves=2\nnum_cat=0\nsplit_feature=0\n\
         split_gain=1\nthreshold=0.5\ndecision_type=2\nleft_child=-1\nright_child=-2\nleaf_value=0 0.8\n\nend of trees\n"
    )
}

#[tokio::test]
async fn a_model_that_was_trained_elsewhere_serves_like_our_own() {
    let place = Place::new().await;
    place.learn();
    place.file("model.txt", lightgbm("key.median"));
    let model = place.tarn("import-model frigid --format lightgbm DIR/model.txt");
    assert_eq!((&model["version"], &model["trained_by"]), (&2.into(), &"lightgbm".into()));
    place.tarn("promote frigid 2");
    assert_eq!(place.plan("a", "idle"), (12, "frigid/2".to_owned()));
    assert_eq!(place.plan("b", "busy").0, 0);
    let (code, exported, _) = place.ran("export-model frigid 2");
    assert_eq!(code, Some(0));
    place.file("exported.json", exported);
    assert_eq!(
        place.tarn("import-model frigid DIR/exported.json")["version"],
        3,
        "what was exported is taken back"
    );
}

#[tokio::test]
async fn what_is_no_model_is_refused_with_what_is_wrong_and_the_old_one_stays() {
    let place = Place::new().await;
    place.learn();
    place.tarn("promote frigid 1");
    let (_, exported, _) = place.ran("export-model frigid");
    place.file("short.json", &exported.as_bytes()[..exported.len() / 2]);
    place.file("later.json", exported.replacen("\"tarn_model\":1", "\"tarn_model\":9", 1));
    place.file("model.txt", lightgbm("shoe_size"));
    place.file("model.onnx", b"not a graph");
    place.file("labels.csv", "program,slowdown\n");
    for (words, says) in [
        ("import-model frigid DIR/short.json", "content: truncated after"),
        ("import-model frigid DIR/later.json", "content: tarn_model = 9: must be 1"),
        ("import-model frigid --format lightgbm DIR/model.txt", "content: unknown feature \"shoe_size\""),
        ("import-model frigid --format onnx DIR/model.onnx", "content: it is no ONNX model"),
        ("import-model frigid --format lightgbm DIR/short.json", "content: not a LightGBM text model"),
        ("import-model sensitivity DIR/later.json", "content: tarn_model = 9"),
        ("promote frigid 7", "version: frigid 7 is not kept"),
        ("promote frigid 1", "version: frigid 1 serves already"),
        ("train sensitivity --labels DIR/labels.csv", "missing column \"retiring\""),
    ] {
        let (code, _, said) = place.ran(words);
        assert!(code != Some(0) && said.contains(says), "{words}: {said}");
    }
    let (code, _, said) = place.ran("import-model sensitivity DIR/short.json");
    assert!(code != Some(0) && said.contains("truncated after"), "{said}");
    place.file("other.json", exported);
    let (_, _, said) = place.ran("import-model sensitivity DIR/other.json");
    assert!(said.contains("kind: the file is a model of frigid: must be of sensitivity"), "{said}");
    assert_eq!(place.plan("a", "idle"), (12, "frigid/1".to_owned()));
    assert_eq!(place.tarn("get models").as_array().unwrap().len(), 1, "nothing else was kept");
}

#[tokio::test]
async fn workloads_that_do_not_mind_latency_are_placed_whole() {
    let place = Place::new().await;
    let mut labels = "program,slowdown,retiring,frontend_bound,bad_speculation,core_bound,memory_bound,l1_bound,l2_bound,l3_bound,\
        dram_latency_bound,dram_bandwidth_bound,store_bound,dram_bound,ipc,l1_mpki,l2_mpki,l3_mpki,memory_level_parallelism\n"
        .to_owned();
    for program in 0..60 {
        let bound = f64::from(program) / 60.0;
        writeln!(labels, "p{program},{},0.5,,,,{bound},,,,,,,{bound},2,,,,", bound / 5.0).unwrap();
    }
    place.file("labels.csv", labels);
    let model = place.tarn("train sensitivity --labels DIR/labels.csv");
    assert_eq!((&model["modelled"], &model["rows"]), (&false.into(), &60.into()));
    place.tarn("promote sensitivity 1");
    let plan = |vm: &str, bound: &str| {
        let words = format!("plan-vm --vm {vm} --cores 4 --memory 16GiB");
        place.tarn(&format!("{words} --counter memory_bound={bound},dram_bound={bound},retiring=0.5,ipc=2"))
    };
    let (calm, bound) = (plan("calm", "0.02"), plan("bound", "0.9"));
    assert_eq!(calm["decision"]["model"], "sensitivity/1");
    assert_eq!(calm["pool_bytes"], 15 * GIB, "a node with processors keeps memory of its own");
    assert_eq!(bound["decision"]["model"], "fixed-share/1");
    for (counter, says) in
        [("shoe_size=1", "\"shoe_size\" must be one of"), ("ipc=-1", "ipc = -1 must be a number from 0")]
    {
        let (code, _, said) =
            place.ran(&format!("plan-vm --vm x --cores 4 --memory 16GiB --counter {counter}"));
        assert!(code == Some(2) && said.contains("profile.counters") && said.contains(says), "{said}");
    }
}

#[tokio::test]
async fn what_ended_too_long_ago_is_not_kept_and_that_is_said() {
    let place = Place::new().await;
    place.file("vms.csv", vms(60));
    let added = place.tarn("telemetry import --format csv --keep-timestamps DIR/vms.csv");
    assert_eq!((&added["added"], &added["too_old"]), (&0.into(), &60.into()), "they ended in 1970");
}

#[tokio::test]
async fn where_nothing_may_go_wrong_no_more_goes_to_the_pool_than_where_little_may() {
    let place = Place::new().await;
    place.learn();
    place.tarn("promote frigid 1");
    let text = place.0.rack_toml() + "\n[prediction]\nexceed_max = 0\n";
    place.0.write_rack_toml(&text);
    place.0.signal_manager(rustix::process::Signal::HUP);
    let is_strict = async |_: &Rack| place.plan("b", "idle").0 == 0;
    place.0.wait_for("the manager to take no risk", is_strict).await;
    assert_eq!(place.plan("b", "idle").1, "frigid/1", "it is the model that says so, and no fixed share");
}

#[tokio::test]
async fn outcomes_go_out_as_they_came_in_and_absurd_ones_not_at_all() {
    let place = Place::new().await;
    place.learn();
    let (_, exported, _) = place.ran("telemetry export");
    assert_eq!(exported.lines().count(), 601);
    place.file("exported.csv", &exported);
    let again = place.tarn("telemetry import --format csv --keep-timestamps DIR/exported.csv");
    assert_eq!((&again["added"], &again["duplicates"]), (&0.into(), &600.into()));
    let (_, features, _) = place.ran("telemetry export --features");
    let rows: Vec<&str> = features.lines().collect();
    assert!(rows[0].starts_with("requested_gib,cores,") && rows[0].ends_with(",untouched"));
    assert_eq!(rows.len(), 601);
    let mut models = wire::models_client::ModelsClient::new(place.0.any_client().await);
    let good = wire::Outcome {
        vm: "v".into(),
        requested_bytes: 8 * GIB,
        ended_unix_ms: 5,
        peak_bytes: GIB,
        ..Default::default()
    };
    for (wrong, field) in [
        (wire::Outcome { requested_bytes: 0, ..good.clone() }, "requested_bytes"),
        (wire::Outcome { peak_bytes: u64::MAX, ..good.clone() }, "peak_bytes"),
        (wire::Outcome { started_unix_ms: 6, ..good.clone() }, "ended_unix_ms"),
        (wire::Outcome { cores: f64::NAN, ..good.clone() }, "cores"),
        (wire::Outcome { cores: -1.0, ..good.clone() }, "cores"),
        (wire::Outcome { ended_unix_ms: u64::MAX, ..good.clone() }, "ended_unix_ms"),
        (wire::Outcome { vm: "x".repeat(300), ..good.clone() }, "vm"),
    ] {
        let outcomes = vec![good.clone(), wrong];
        let refused = models.add_outcomes(wire::AddOutcomesRequest { outcomes }).await.unwrap_err();
        assert!(refused.message().starts_with(&format!("{field}: ")), "{refused}");
        assert!(refused.message().ends_with("(outcome 1, counted from 0)"), "{refused}");
    }
    assert_eq!(place.ran("telemetry export").1.lines().count(), 601, "all of them or none");
}
