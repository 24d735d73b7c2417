//! Tests that imported models have the same outputs as the library that trained them. The models
//! and the expected outputs are created by `fixtures/make.py`.

use proptest::prelude::*;

use super::{lightgbm, onnx};

/// Expands to the bytes of a model file, and the CSV text of rows with their expected outputs.
macro_rules! fixture {
    ($name:literal, $kind:literal) => {
        (
            include_bytes!(concat!("../../fixtures/", $name, ".", $kind)).as_slice(),
            include_str!(concat!("../../fixtures/", $name, ".csv")),
        )
    };
}

/// Reads rows of four features, each with its expected outputs.
fn rows_of(csv: &str) -> Vec<(Vec<f64>, Vec<f64>)> {
    let numbers =
        |line: &str| line.split(',').map(|number| number.parse::<f64>().unwrap()).collect::<Vec<_>>();
    csv.lines().map(numbers).map(|row| (row[..4].to_vec(), row[4..].to_vec())).collect()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn lightgbm_models_have_the_outputs_of_lightgbm() {
    for (name, (model, csv)) in [
        ("quantile", fixture!("quantile", "txt")),
        ("binary", fixture!("binary", "txt")),
        ("zero_missing", fixture!("zero_missing", "txt")),
        ("none_missing", fixture!("none_missing", "txt")),
        ("averaged", fixture!("averaged", "txt")),
    ] {
        let model = lightgbm::Model::read(text(model)).unwrap();
        let rows = rows_of(csv);
        assert!(rows.len() > 60, "the fixture {name} has too few rows: {}", rows.len());
        for (row, expected) in rows {
            let predicted = model.predict(&row);
            assert!(
                (predicted - expected[0]).abs() <= 1e-12 * expected[0].abs().max(1.0),
                "{name}: {row:?}: {predicted} {expected:?}"
            );
        }
    }
}

#[test]
fn onnx_models_have_the_outputs_of_scikit_learn() {
    for (name, (model, csv), classes) in [
        ("classes", fixture!("classes", "onnx"), &["insensitive", "sensitive"][..]),
        ("classes_plain", fixture!("classes_plain", "onnx"), &["0", "1"]),
        ("numbers", fixture!("numbers", "onnx"), &[]),
        ("boosted", fixture!("boosted", "onnx"), &[]),
        ("gaps", fixture!("gaps", "onnx"), &[]),
    ] {
        let model = onnx::Model::read(model).unwrap();
        assert_eq!(
            (model.features(), model.classes()),
            (4, &classes.iter().map(ToString::to_string).collect::<Vec<_>>()[..])
        );
        for (row, expected) in rows_of(csv) {
            let mut predicted = vec![0.0; model.outputs()];
            model.predict(&row, &mut predicted);
            let error = predicted
                .iter()
                .zip(&expected)
                .map(|(predicted, expected)| (predicted - expected).abs())
                .fold(0.0, f64::max);
            assert!(
                predicted.len() == expected.len() && error < 1e-6,
                "{name}: {row:?}: {predicted:?} {expected:?}"
            );
        }
    }
}

#[test]
fn unsupported_models_are_rejected_with_reason() {
    let lightgbm_error = |bytes: &[u8]| lightgbm::Model::read(text(bytes)).unwrap_err().to_string();
    let classes = lightgbm_error(include_bytes!("../../fixtures/refused_classes.txt"));
    assert_eq!(
        classes,
        "header: num_class = \"3\": must be 1: models with several outputs are not supported"
    );
    let linear = lightgbm_error(include_bytes!("../../fixtures/refused_linear.txt"));
    assert_eq!(linear, "tree 0: is_linear = \"1\": must be 0: linear trees are not supported");
    let onnx_error = |bytes: &[u8]| onnx::Model::read(bytes).unwrap_err().to_string();
    let line = onnx_error(include_bytes!("../../fixtures/refused_line.onnx"));
    assert_eq!(
        line,
        "the graph does not consist of one tree ensemble: unsupported operator LinearClassifier"
    );
    let scaled = onnx_error(include_bytes!("../../fixtures/refused_scaled.onnx"));
    assert_eq!(scaled, "the graph does not consist of one tree ensemble: unsupported operator Scaler");
}

#[test]
fn truncated_model_is_rejected_at_every_length() {
    let (model, _) = fixture!("quantile", "txt");
    let end = text(model).find("end of trees").unwrap();
    for cut in (0..=end).step_by(37) {
        assert!(lightgbm::Model::read(&text(model)[..cut]).is_err(), "cut at {cut}");
    }
    let (model, _) = fixture!("classes", "onnx");
    for cut in 0..model.len() - 200 {
        assert!(onnx::Model::read(&model[..cut]).is_err(), "cut at {cut}");
    }
}

#[test]
fn invalid_line_is_named_in_error() {
    let (model, _) = fixture!("quantile", "txt");
    let with = |old: &str, new: &str| {
        assert!(text(model).contains(old));
        lightgbm::Model::read(&text(model).replacen(old, new, 1)).unwrap_err().to_string()
    };
    assert_eq!(with("version=v4", "version=v9"), "header: version = \"v9\": must be v3 or v4");
    assert_eq!(
        with("objective=quantile", "objective=lambdarank"),
        "header: objective = \"lambdarank\": must be a regression or binary objective"
    );
    let sqrt = with("objective=quantile", "objective=quantile sqrt");
    assert_eq!(
        sqrt,
        "header: objective = \"quantile sqrt\": must not have the option sqrt: it is not supported"
    );
    assert!(
        with("max_feature_idx=3", "max_feature_idx=18446744073709551615")
            .starts_with("header: feature_names = ")
    );
    assert!(with("num_leaves=8", "num_leaves=9").starts_with("tree 0: leaf_value = "));
    assert!(with("split_feature=0", "split_feature=4").starts_with("tree 0: node 0: feature index 4"));
    assert!(with("left_child=1", "left_child=0").starts_with("tree 0: node 0: has several parents"));
    assert!(with("threshold=", "threshold=x ").starts_with("tree 0: threshold = \"x "));
    assert_eq!(lightgbm::Model::read("forest").unwrap_err(), lightgbm::ParseError::NotAModel);
}

proptest! {
    /// A model with one changed byte is either accepted or rejected with an error.
    #[test]
    fn corrupted_model_never_panics(at in any::<prop::sample::Index>(), byte: u8, which in 0..4_usize) {
        let (bytes, csv) = [
            fixture!("quantile", "txt"), fixture!("binary", "txt"), fixture!("gaps", "onnx"), fixture!("classes", "onnx"),
        ][which];
        let mut bytes = bytes.to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let (row, _) = &rows_of(csv)[0];
        if which < 2 {
            let model = std::str::from_utf8(&bytes).ok().and_then(|text| lightgbm::Model::read(text).ok());
            if let Some(model) = model.filter(|model| model.features.len() == row.len()) {
                model.predict(row);
            }
        } else if let Ok(model) = onnx::Model::read(&bytes) && model.features() == row.len() {
            model.predict(row, &mut vec![0.0; model.outputs()]);
        }
    }
}
