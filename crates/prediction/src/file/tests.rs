//! Tests of model files: round trips, and errors for invalid files.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction};

use super::*;
use crate::{
    frigid::{
        Groups, ModelSource, Outcome, OutcomeHistory, QUANTILE_LEVELS, VmRequest, VmUsage,
        backtest::{self, VmSample},
    },
    import::{Format, ImportError, ImportedModel},
    qos::{Evidence, LabelledRun, Placement, Quality},
    sensitivity::Workload,
    trees::{Child, Ensemble, InvalidTree, Node, SplitRule, Tree},
};

fn sample(hour: u64, rng: &mut Pcg64Mcg) -> VmSample {
    let groups = Groups { key: format!("customer {}", hour % 7), ..Groups::default() };
    let begins = UnixMs(hour * 3_600_000);
    let request = VmRequest { groups, requested: Bytes::gib(1 << (hour % 6)), cores: Some(2.0), begins };
    let untouched = Fraction::new(0.3 + 0.5 * rng.random::<f64>()).unwrap();
    let ended = UnixMs(begins.0 + 1000);
    VmSample { request, outcome: Outcome { ended, untouched, usage: VmUsage::default() }, is_trusted: true }
}

fn samples(rows: u64) -> Vec<VmSample> {
    let mut rng = Pcg64Mcg::seed_from_u64(7);
    (0..rows).map(|hour| sample(hour, &mut rng)).collect()
}

fn rates() -> [Fraction; 2] {
    [0.02, 0.1].map(|rate| Fraction::new(rate).unwrap())
}

fn frigid_file() -> ModelFile {
    let trained = backtest::train(&samples(200), &ModelSource::Trained, &rates()).unwrap();
    let provenance = Provenance {
        rows: 200,
        window: Some(trained.window),
        metrics: trained.results,
        ..Provenance::default()
    };
    ModelFile::frigid(provenance, trained.model, trained.calibration)
}

/// Encodes and decodes a file, and checks that the decoded file is encoded to the same bytes.
fn round_trip(file: &ModelFile) -> ModelFile {
    let bytes = file.write().unwrap();
    let decoded = ModelFile::read(&bytes).unwrap();
    assert!(decoded.write().unwrap() == bytes, "a decoded file is encoded to different bytes");
    assert_eq!(decoded.provenance, file.provenance);
    decoded
}

fn workloads() -> Vec<Workload> {
    let mut rng = Pcg64Mcg::seed_from_u64(3);
    let mut workload = |program: u32| {
        let mut counters = [0.0; COUNTER_NAMES.len()];
        counters.iter_mut().for_each(|counter| *counter = rng.random());
        let slowdown = counters[4] * counters[11];
        Workload { program: format!("p{program}"), counters, slowdown }
    };
    (0..60).map(&mut workload).collect()
}

fn loss_file() -> ModelFile {
    let runs: Vec<LabelledRun> = workloads()
        .into_iter()
        .zip(0..)
        .map(|(workload, n)| LabelledRun::new(workload, [0.5, 1.0][n % 2], 2.0))
        .collect();
    let model = LossModel::train(&runs, Fraction::new(0.2).unwrap(), 1).unwrap();
    ModelFile::loss(Provenance { modelled: true, ..Provenance::default() }, model)
}

#[test]
fn loss_model_round_trips() {
    let file = loss_file();
    let (Content::Loss { model: before, .. }, Content::Loss { model: after, .. }) =
        (&file.content, &round_trip(&file).content)
    else {
        panic!("both files must contain models of the loss");
    };
    for workload in workloads() {
        let evidence = Evidence { counters: workload.counters, pool_loads: 0.5, latency_ratio: 2.0 };
        for placement in [Placement::EntirelyOnPool, Placement::Split] {
            let estimate = |model: &LossModel| model.estimate(&evidence, placement, Quality::Unknown);
            assert_eq!(estimate(before), estimate(after));
        }
    }
    assert_eq!(before.accuracy.runs, 60);
    assert!(before.accuracy.flagged_harmed > before.accuracy.flagged_unharmed, "{before:?}");
}

#[test]
fn extreme_leaves_of_a_loss_model_give_an_estimate_in_range() {
    let text = String::from_utf8(loss_file().write().unwrap()).unwrap();
    for start in ["1.7e308", "-1.7e308"] {
        let changed = text.replacen(r#""start":[0.0,0.0]"#, &format!(r#""start":[{start},{start}]"#), 1);
        assert_ne!(changed, text);
        let Content::Loss { model, .. } = ModelFile::read(changed.as_bytes()).unwrap().content else {
            panic!("the file contains a model of the loss");
        };
        for counter in [0.0, 0.5, 1e6, f64::NAN] {
            let counters = [counter; COUNTER_NAMES.len()];
            let evidence = Evidence { counters, pool_loads: f64::NAN, latency_ratio: 1000.0 };
            let estimate = model.estimate(&evidence, Placement::Split, Quality::Unknown);
            assert!((-0.9..=100.0).contains(&estimate.loss), "{start}: {estimate:?}");
            assert!((0.1..=0.4).contains(&estimate.threshold), "{start}: {estimate:?}");
        }
    }
}

#[test]
fn loss_model_with_invalid_values_is_rejected() {
    let text = String::from_utf8(loss_file().write().unwrap()).unwrap();
    for (valid, invalid) in [
        (r#""latency_ratio""#, r#""latency""#),
        (r#""pdm":0.2"#, r#""pdm":0.0"#),
        (r#""flagged_harmed":"#, r#""flagged_harmed":9"#),
        (r#""error_quantiles":[["#, r#""error_quantiles":[[9"#),
        (r#""start":[0.0,0.0]"#, r#""start":[0.0]"#),
        (r#""runs":60"#, r#""runs":0"#),
    ] {
        assert!(text.contains(valid), "{valid}");
        let error = ModelFile::read(text.replacen(valid, invalid, 1).as_bytes()).unwrap_err();
        let is_expected = match valid {
            r#""latency_ratio""# => matches!(error, FileError::Features),
            _ => matches!(error, FileError::Values),
        };
        assert!(is_expected, "{invalid}: {error}");
    }
}

#[test]
fn decoded_model_predicts_identically() {
    let file = frigid_file();
    let decoded = round_trip(&file);
    let (Content::Frigid { model: before, .. }, Content::Frigid { model: after, .. }) =
        (&file.content, &decoded.content)
    else {
        panic!("both files must contain models of frigid memory");
    };
    let mut history = OutcomeHistory::default();
    for sample in samples(50) {
        let features = history.features(&sample.request);
        assert_eq!(before.curve(&features), after.curve(&features));
        history.add(&sample.request, &sample.outcome);
    }
}

/// The field names are part of the file format: files of this format version must remain readable.
#[test]
fn model_file_has_unchanged_field_names() {
    let pdm = Fraction::new(0.2).unwrap();
    let model = sensitivity::Model::train(&workloads(), pdm, 1).unwrap();
    let sensitivity = ModelFile::sensitivity(Provenance::default(), model);
    for (file, names) in [
        (frigid_file(), &["about", "metrics", "rate_asked", "own", "recent", "owner", "curve"][..]),
        (sensitivity, &["about", "says", "own", "cuts", "at_most", "test", "missing_first"]),
        (
            loss_file(),
            &[
                "about",
                "loss",
                "pdm",
                "accuracy",
                "runs",
                "flagged_harmed",
                "flagged_unharmed",
                "forest",
                "error_quantiles",
            ],
        ),
    ] {
        let text = String::from_utf8(file.write().unwrap()).unwrap();
        for name in names {
            assert!(text.contains(&format!("\"{name}\":")), "{name} is not in the file");
        }
    }
}

#[test]
fn sensitivity_model_round_trips_with_cutoffs() {
    let pdm = Fraction::new(0.2).unwrap();
    let model = sensitivity::Model::train(&workloads(), pdm, 1).unwrap();
    let cutoffs = model.cutoffs();
    assert!(
        cutoffs.windows(2).all(|two| two[0].fp < two[1].fp && two[0].placed < two[1].placed),
        "{cutoffs:?}"
    );
    let file = ModelFile::sensitivity(Provenance { modelled: true, ..Provenance::default() }, model);
    round_trip(&file);
}

#[test]
fn truncated_file_is_rejected_at_every_length() {
    let bytes = frigid_file().write().unwrap();
    for end in (0..bytes.len()).step_by(bytes.len() / 50) {
        let error = ModelFile::read(&bytes[..end]).unwrap_err();
        assert!(matches!(error, FileError::Truncated(_)), "{end} bytes: {error}");
    }
}

#[test]
fn file_with_other_version_features_or_format_is_rejected() {
    let error = ModelFile::read(br#"{"tarn_model": 1, "anything": []}"#).unwrap_err().to_string();
    assert!(error.starts_with("tarn_model = 1: must be 2"), "{error}");
    let text = String::from_utf8(frigid_file().write().unwrap()).unwrap();
    let renamed_feature = text.replacen("requested_gib", "requested_mib", 1);
    assert!(matches!(ModelFile::read(renamed_feature.as_bytes()).unwrap_err(), FileError::Features));
    for bytes in [&b"tree\nversion=v4\n"[..], b"[1, 2]", b"{}", b"\xff\xfe", b"{\"tarn_model\": \"1\"}"] {
        let error = ModelFile::read(bytes).unwrap_err();
        assert!(matches!(error, FileError::NotAModel(_)), "{bytes:?}: {error}");
    }
}

#[test]
fn file_with_invalid_content_is_rejected() {
    let text = String::from_utf8(frigid_file().write().unwrap()).unwrap();
    for (valid, invalid, message) in [
        (r#"{"node":1}"#, r#"{"node":999}"#, "index of a child is out of range"),
        (r#""feature":"#, r#""feature":9"#, "feature index 9"),
        (r#""curve":["#, r#""curve":[2,"#, "trailing characters"),
        (r#""requested":1073741824"#, r#""requested":0"#, "a value of the model is out of range"),
        (
            r#""trained_by":"""#,
            r#""trained_by":"a name that is longer than any name of a rack, a host or a VM can be""#,
            "invalid provenance",
        ),
        (r#""untouched":0."#, r#""untouched":7."#, "7."),
    ] {
        assert!(text.contains(valid), "{valid} is not in the file");
        let error = ModelFile::read(text.replacen(valid, invalid, 1).as_bytes()).unwrap_err().to_string();
        assert!(error.contains(message), "{invalid}: {error}");
    }
}

#[test]
fn training_on_too_few_reliable_outcomes_is_rejected() {
    let error = backtest::train(&samples(49), &ModelSource::Trained, &rates()).unwrap_err().to_string();
    assert_eq!(error, "the training set has 49 reliable outcomes: must be at least 50");
    let mut unreliable = samples(60);
    unreliable.iter_mut().for_each(|sample| sample.is_trusted = false);
    assert!(backtest::train(&unreliable, &ModelSource::Trained, &rates()).is_err());
}

#[test]
fn backtest_during_training_equals_separate_backtest() {
    let samples = samples(400);
    let trained = backtest::train(&samples, &ModelSource::Trained, &rates()).unwrap();
    let tested = backtest::run(&[], &samples, &rates()).unwrap();
    for (trained, tested) in trained.results.iter().zip(tested) {
        assert_eq!(*trained, tested.result);
    }
    assert!(trained.results[1].vms > 0 && trained.results[1].frigid_share > 0.0);
}

/// Returns a LightGBM text model of one tree with one split on the named feature.
fn lightgbm_model_text(feature: &str) -> String {
    format!(
        "tree\nversion=v4\nnum_class=1\nnum_tree_per_iteration=1\nlabel_index=0\nmax_feature_idx=0\nobjective=regression\n\
         feature_names={feature}\nfeature_infos=none\ntree_sizes=1\n\nTree=0\nnum_leaves=2\nnum_cat=0\nsplit_feature=0\n\
         split_gain=1\nthreshold=4\ndecision_type=2\nleft_child=-1\nright_child=-2\nleaf_value=0.5 0.25\n\nend of trees\n"
    )
}

#[test]
fn imported_model_is_calibrated_and_round_trips() {
    let names: Vec<String> = feature_names().collect();
    let imported =
        ImportedModel::read(Format::LightGbm, lightgbm_model_text("requested_gib").as_bytes(), &names)
            .unwrap();
    let trained =
        backtest::train(&samples(400), &ModelSource::Imported(Box::new(imported)), &rates()).unwrap();
    assert!(trained.results.iter().all(|result| result.rate_actual <= result.rate_target + 0.02));
    let file = ModelFile::frigid(Provenance::default(), trained.model.clone(), trained.calibration);
    let text = String::from_utf8(file.write().unwrap()).unwrap();
    assert!(["\"foreign\":", "\"answer\":", "\"off\":"].iter().all(|name| text.contains(name)));
    round_trip(&file);
    // The imported model predicts 0.5 for VMs of up to 4 GiB, and 0.25 for larger VMs. The offset
    // of a level is the same for both, so that the difference stays 0.25.
    let request = |gib| VmRequest {
        groups: Groups::default(),
        requested: Bytes::gib(gib),
        cores: None,
        begins: UnixMs(0),
    };
    let curve = |gib| trained.model.curve(&OutcomeHistory::default().features(&request(gib)));
    let difference = curve(4).untouched_at_level(9) - curve(8).untouched_at_level(9);
    assert!((difference - 0.25).abs() < 1e-9, "{difference}");
}

#[test]
fn offsets_of_imported_model_have_conformal_ranks() {
    let names: Vec<String> = feature_names().collect();
    let text = lightgbm_model_text("requested_gib");
    let imported = ImportedModel::read(Format::LightGbm, text.as_bytes(), &names).unwrap();
    let request =
        VmRequest { groups: Groups::default(), requested: Bytes::gib(4), cores: None, begins: UnixMs(0) };
    let features = OutcomeHistory::default().features(&request);
    // The model predicts 0.5 for every VM. The untouched fractions are 0.01 to 0.99.
    let untouched: Vec<f64> = (1..100).map(|n| f64::from(n) / 100.0).collect();
    let model = ModelSource::Imported(Box::new(imported)).fit(&[features; 99], &untouched, 1);
    let curve = model.curve(&features);
    assert_eq!(curve.untouched_at_level(0), 0.0, "99 outcomes are too few for the level 0.003");
    for (at, level) in QUANTILE_LEVELS.into_iter().enumerate().filter(|(_, level)| *level >= 0.01) {
        let below = untouched.iter().filter(|share| **share < curve.untouched_at_level(at) - 1e-9).count();
        assert_eq!((below + 1) as f64, (level * 100.0 + 1e-9).floor(), "level {level}");
    }
}

#[test]
fn imported_model_with_unknown_feature_is_rejected() {
    let names: Vec<String> = feature_names().collect();
    let read = |feature| {
        ImportedModel::read(Format::LightGbm, lightgbm_model_text(feature).as_bytes(), &names).unwrap_err()
    };
    assert!(read("shoe_size").to_string().contains("\"shoe_size\""));
    assert!(matches!(read("Column_0"), ImportError::FeatureCount { found: 1, .. }));
    let error = ImportedModel::read(Format::Onnx, b"not a graph", &names).unwrap_err();
    assert!(matches!(error, ImportError::Onnx(_)), "{error}");
}

/// Random trees that are chains: each node has a leaf and the next node as children.
fn tree() -> impl Strategy<Value = Tree> {
    let node = (
        0..5_usize,
        prop::option::of(prop::collection::vec(any::<u32>(), 1..3)),
        -1e9..1e9_f64,
        any::<[bool; 2]>(),
    );
    prop::collection::vec(node, 0..12).prop_flat_map(|chain| {
        let leaves = prop::collection::vec(-1e3..1e3_f64, 2 * (chain.len() + 1));
        leaves.prop_map(move |leaves| {
            let mut sets = Vec::new();
            let last = chain.len().saturating_sub(1);
            let nodes = chain.iter().enumerate().map(|(at, (feature, set, limit, [missing_first, zero]))| {
                let test = match set {
                    None => SplitRule::AtMost(*limit),
                    Some(set) => {
                        sets.push(set.clone());
                        SplitRule::OneOf(sets.len() - 1)
                    }
                };
                let next = if at == last { Child::Leaf(at + 1) } else { Child::Node(at + 1) };
                let zero_is_missing = *zero && set.is_none();
                let children = [Child::Leaf(at), next];
                Node { feature: *feature, test, missing_first: *missing_first, zero_is_missing, children }
            });
            let nodes = nodes.collect();
            Tree { nodes, leaves, sets }
        })
    })
}

proptest! {
    #[test]
    fn ensemble_round_trips_bit_exactly(
        trees in prop::collection::vec(tree(), 0..6), row in prop::array::uniform5(prop::num::f64::ANY),
    ) {
        let mut ensemble = Ensemble::new(5, vec![0.25, -1.5]);
        trees.iter().for_each(|tree| ensemble.push(tree).unwrap());
        let decoded: Ensemble = serde_json::from_slice(&serde_json::to_vec(&ensemble).unwrap()).unwrap();
        let (mut before, mut after) = ([0.0; 2], [0.0; 2]);
        ensemble.predict(&row, &mut before);
        decoded.predict(&row, &mut after);
        prop_assert_eq!(before.map(f64::to_bits), after.map(f64::to_bits));
    }
}

#[test]
fn ensemble_without_output_is_rejected() {
    let error = serde_json::from_str::<Ensemble>(r#"{"features":1,"start":[],"trees":[]}"#).unwrap_err();
    assert_eq!(error.to_string(), InvalidTree::NoOutput.to_string());
}
