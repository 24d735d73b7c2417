//! Model files: round trips, and the errors for invalid files.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use units::{Bytes, Fraction};

use super::*;
use crate::{
    frigid::{
        VmRequest, Groups, History, Outcome, ModelSource, Usage,
        backtest::{self, VmSample},
    },
    import::{ImportedModel, Format, ImportError},
    sensitivity::Workload,
    trees::{Child, Ensemble, Node, InvalidTree, SplitRule, Tree},
};

fn sample(hour: u64, rng: &mut Pcg64Mcg) -> VmSample {
    let groups = Groups { key: format!("customer {}", hour % 7), ..Groups::default() };
    let begins = UnixMs(hour * 3_600_000);
    let request = VmRequest { groups, requested: Bytes::gib(1 << (hour % 6)), cores: Some(2.0), begins };
    let untouched = Fraction::new(0.3 + 0.5 * rng.random::<f64>()).unwrap();
    let ended = UnixMs(begins.0 + 1000);
    VmSample { request, outcome: Outcome { ended, untouched, usage: Usage::default() }, is_trusted: true }
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
    let provenance =
        Provenance { rows: 200, window: Some(trained.window), metrics: trained.results, ..Provenance::default() };
    ModelFile::frigid(provenance, trained.model, trained.calibration)
}

/// Encodes and decodes the file, and checks that encoding it again gives the same bytes.
fn written_and_read(file: &ModelFile) -> ModelFile {
    let bytes = file.write().unwrap();
    let read = ModelFile::read(&bytes).unwrap();
    assert!(read.write().unwrap() == bytes, "a file that was read writes something else");
    assert_eq!(read.provenance, file.provenance);
    read
}

fn workloads() -> Vec<Workload> {
    let mut rng = Pcg64Mcg::seed_from_u64(3);
    let mut one = |program: u32| {
        let mut counters = [0.0; COUNTERS.len()];
        counters.iter_mut().for_each(|counter| *counter = rng.random());
        let slowdown = counters[4] * counters[11];
        Workload { program: format!("p{program}"), counters, slowdown }
    };
    (0..60).map(&mut one).collect()
}

#[test]
fn a_model_that_was_written_says_the_same_to_the_last_bit() {
    let file = frigid_file();
    let read = written_and_read(&file);
    let (Content::Frigid { model: before, .. }, Content::Frigid { model: after, .. }) =
        (&file.content, &read.content)
    else {
        panic!("both are of frigid memory");
    };
    let mut history = History::default();
    for sample in samples(50) {
        let features = history.features(&sample.request);
        assert_eq!(before.curve(&features), after.curve(&features));
        history.add(&sample.request, &sample.outcome);
    }
}

#[test]
fn a_model_of_sensitivity_is_written_with_its_cuts() {
    let pdm = Fraction::new(0.2).unwrap();
    let model = sensitivity::Model::train(&workloads(), pdm, 1).unwrap();
    let cutoffs = model.cutoffs();
    assert!(cutoffs.windows(2).all(|two| two[0].fp < two[1].fp && two[0].placed < two[1].placed), "{cutoffs:?}");
    let file = ModelFile::sensitivity(Provenance { modelled: true, ..Provenance::default() }, model);
    written_and_read(&file);
}

#[test]
fn a_file_that_is_cut_short_is_refused_wherever_it_was_cut() {
    let bytes = frigid_file().write().unwrap();
    for end in (0..bytes.len()).step_by(bytes.len() / 50) {
        let error = ModelFile::read(&bytes[..end]).unwrap_err();
        assert!(matches!(error, FileError::CutShort(_)), "{end} bytes: {error}");
    }
}

#[test]
fn a_file_of_another_version_is_refused_by_that_and_not_by_what_is_in_it() {
    let error = ModelFile::read(br#"{"tarn_model": 2, "anything": []}"#).unwrap_err().to_string();
    assert!(error.starts_with("tarn_model = 2: must be 1"), "{error}");
    let text = String::from_utf8(frigid_file().write().unwrap()).unwrap();
    let other = text.replacen("requested_gib", "requested_mib", 1);
    assert!(matches!(ModelFile::read(other.as_bytes()).unwrap_err(), FileError::Features));
    for something_else in
        [&b"tree\nversion=v4\n"[..], b"[1, 2]", b"{}", b"\xff\xfe", b"{\"tarn_model\": \"1\"}"]
    {
        let error = ModelFile::read(something_else).unwrap_err();
        assert!(matches!(error, FileError::NotAModel(_)), "{something_else:?}: {error}");
    }
}

#[test]
fn a_file_whose_trees_are_none_is_refused() {
    let text = String::from_utf8(frigid_file().write().unwrap()).unwrap();
    for (is_trusted, wrong, says) in [
        (r#"{"node":1}"#, r#"{"node":999}"#, "has a child that is not there"),
        (r#""feature":"#, r#""feature":9"#, "looks at number"),
        (r#""curve":["#, r#""curve":[2,"#, "trailing characters"),
        (r#""requested":1073741824"#, r#""requested":0"#, "none of this version's"),
        (r#""caution":1.0"#, r#""caution":0.5"#, "none of this version's"),
        (
            r#""trained_by":"""#,
            r#""trained_by":"somebody whose name is longer than any name of a rack, a host or a VM""#,
            "says more of itself",
        ),
        (r#""untouched":0."#, r#""untouched":7."#, "7."),
    ] {
        assert!(text.contains(is_trusted), "{is_trusted} is not in the file");
        let error = ModelFile::read(text.replacen(is_trusted, wrong, 1).as_bytes()).unwrap_err().to_string();
        assert!(error.contains(says), "{wrong}: {error}");
    }
}

#[test]
fn too_few_outcomes_teach_nothing_and_name_how_many_it_takes() {
    let error = backtest::train(&samples(49), &ModelSource::Trained, &rates()).unwrap_err().to_string();
    assert_eq!(error, "49 outcomes that can be trusted: must be at least 50");
    let mut suspect = samples(60);
    suspect.iter_mut().for_each(|sample| sample.is_trusted = false);
    assert!(backtest::train(&suspect, &ModelSource::Trained, &rates()).is_err());
}

#[test]
fn what_a_training_says_of_later_vms_is_what_a_trial_says_of_them() {
    let samples = samples(400);
    let trained = backtest::train(&samples, &ModelSource::Trained, &rates()).unwrap();
    let tested = backtest::run(&[], &samples, &rates()).unwrap();
    for (trained, tested) in trained.results.iter().zip(tested) {
        let both = |result: &BacktestResult| result.frigid_share * f64::from(result.vms);
        assert!(trained.vms < tested.vms, "a training does not count VMs before its first model");
        assert!(both(trained) > 0.0);
        let hits = |result: &BacktestResult| (result.rate_actual * f64::from(result.vms)).round();
        assert_eq!(hits(trained), hits(&tested));
    }
}

/// LightGBM text of one tree with one split on the named feature.
fn lightgbm(feature: &str) -> String {
    format!(
        "tree\nversion=v4\nnum_class=1\nnum_tree_per_iteration=1\nlabel_index=0\nmax_feature_idx=0\nobjective=regression\n\
         feature_names={feature}\nfeature_infos=none\ntree_sizes=1\n\nTree=0\nnum_leaves=2\nnum_cat=0\nsplit_feature=0\n\
         split_gain=1\nthreshold=4\ndecision_type=2\nleft_child=-1\nright_child=-2\nleaf_value=0.5 0.25\n\nend of trees\n"
    )
}

#[test]
fn a_model_trained_elsewhere_is_held_against_outcomes_and_written_like_our_own() {
    let names: Vec<String> = feature_names().collect();
    let imported = ImportedModel::read(Format::LightGbm, lightgbm("requested_gib").as_bytes(), &names).unwrap();
    let trained = backtest::train(&samples(400), &ModelSource::Imported(Box::new(imported)), &rates()).unwrap();
    assert!(trained.results.iter().all(|result| result.rate_actual <= result.rate_target + 0.02));
    let file = ModelFile::frigid(Provenance::default(), trained.model.clone(), trained.calibration);
    written_and_read(&file);
    // Offsets shift the output at each level: small VMs 0.5, large ones 0.25.
    let request =
        |gib| VmRequest { groups: Groups::default(), requested: Bytes::gib(gib), cores: None, begins: UnixMs(0) };
    let curve = |gib| trained.model.curve(&History::default().features(&request(gib)));
    let off = curve(4).at_level(9) - curve(8).at_level(9);
    assert!((off - 0.25).abs() < 1e-9, "{off}");
}

#[test]
fn a_model_that_asks_for_a_number_that_no_row_has_is_refused_by_its_name() {
    let names: Vec<String> = feature_names().collect();
    let read = |feature| ImportedModel::read(Format::LightGbm, lightgbm(feature).as_bytes(), &names).unwrap_err();
    assert!(read("shoe_size").to_string().contains("\"shoe_size\""));
    assert!(matches!(read("Column_0"), ImportError::Width { found: 1, .. }));
    let error = ImportedModel::read(Format::Onnx, b"not a graph", &names).unwrap_err();
    assert!(matches!(error, ImportError::Onnx(_)), "{error}");
}

/// Arbitrary trees: a chain of nodes, each below the one before it.
fn tree() -> impl Strategy<Value = Tree> {
    let step = (
        0..5_usize,
        prop::option::of(prop::collection::vec(any::<u32>(), 1..3)),
        -1e9..1e9_f64,
        any::<[bool; 2]>(),
    );
    prop::collection::vec(step, 0..12).prop_flat_map(|steps| {
        let leaves = prop::collection::vec(-1e3..1e3_f64, 2 * (steps.len() + 1));
        leaves.prop_map(move |leaves| {
            let mut sets = Vec::new();
            let last = steps.len().saturating_sub(1);
            let nodes = steps.iter().enumerate().map(|(at, (feature, set, limit, [missing_first, zero]))| {
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
    fn any_ensemble_is_the_same_after_it_was_written(
        trees in prop::collection::vec(tree(), 0..6), row in prop::array::uniform5(prop::num::f64::ANY),
    ) {
        let mut ensemble = Ensemble::new(5, vec![0.25, -1.5]);
        trees.iter().for_each(|tree| ensemble.push(tree).unwrap());
        let read: Ensemble = serde_json::from_slice(&serde_json::to_vec(&ensemble).unwrap()).unwrap();
        let (mut before, mut after) = ([0.0; 2], [0.0; 2]);
        ensemble.predict(&row, &mut before);
        read.predict(&row, &mut after);
        prop_assert_eq!(before.map(f64::to_bits), after.map(f64::to_bits));
    }
}

#[test]
fn an_ensemble_without_an_answer_is_none() {
    let error = serde_json::from_str::<Ensemble>(r#"{"features":1,"start":[],"trees":[]}"#).unwrap_err();
    assert_eq!(error.to_string(), InvalidTree::NoOutput.to_string());
}
