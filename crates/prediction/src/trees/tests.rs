//! Tests of trees: training, evaluation, and errors for malformed trees.

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::{
    boost::{BoostParams, fit_quantiles},
    grow::grow_tree,
    *,
};

const TREE_PARAMS: TreeParams = TreeParams { leaves_max: 8, leaf_rows_min: 2, column_fraction: 1.0 };

fn columns(rows: &[Vec<f64>]) -> FeatureColumns {
    let mut columns = FeatureColumns::new(rows[0].len());
    rows.iter().for_each(|row| columns.push(row));
    columns
}

/// Returns a node that tests the first feature.
fn node(test: SplitRule, children: [Child; 2]) -> Node {
    Node { feature: 0, test, missing_first: false, zero_is_missing: false, children }
}

/// Returns a tree with one node. The value of the first leaf is 1, that of the second leaf 2.
fn stump(test: SplitRule) -> Tree {
    Tree {
        nodes: vec![node(test, [Child::Leaf(0), Child::Leaf(1)])],
        leaves: vec![1.0, 2.0],
        sets: vec![vec![0b101]],
    }
}

fn error_of(tree: &Tree) -> String {
    let mut ensemble = Ensemble::new(1, vec![0.0]);
    let error = ensemble.push(tree).expect_err("the tree is malformed").to_string();
    assert_eq!(ensemble.trees(), 0, "a rejected tree must not change the ensemble");
    error
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![4 => -3.0..3.0_f64, 2 => (-2..3_i32).prop_map(f64::from), 1 => Just(f64::NAN)]
}

proptest! {
    #[test]
    fn binned_and_numeric_evaluation_agree(
        rows in prop::collection::vec(prop::collection::vec(number(), 3), 1..60),
        seed: u64,
    ) {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let targets: Vec<f64> = rows.iter().map(|_| rng.random()).collect();
        let binned = BinnedColumns::new(&columns(&rows));
        let mut all: Vec<u32> = (0..).take(rows.len()).collect();
        let grown = grow_tree(&binned, &mut all, &targets, &TREE_PARAMS, &mut rng);
        prop_assert!(grown.leaves.len() <= TREE_PARAMS.leaves_max);
        let mut sorted = all.clone();
        sorted.sort_unstable();
        prop_assert!(sorted.into_iter().eq((0..).take(rows.len())), "each row must be in one leaf");
        let leaf_by_bins: Vec<usize> = (0..rows.len()).map(|row| grown.leaf_of_row(&binned, row)).collect();
        for (leaf, range) in grown.leaves.iter().enumerate() {
            let leaf_rows = &all[range.clone()];
            prop_assert!(leaf_rows.iter().all(|row| leaf_by_bins[*row as usize] == leaf), "a row reaches another leaf");
            prop_assert!(grown.leaves.len() == 1 || leaf_rows.len() >= TREE_PARAMS.leaf_rows_min);
        }
        let leaf_indexes = (0..).take(grown.leaves.len()).map(f64::from).collect();
        let mut ensemble = Ensemble::new(3, vec![0.0]);
        ensemble.push(&grown.into_tree(leaf_indexes)).unwrap();
        for (row, leaf) in rows.iter().zip(leaf_by_bins) {
            prop_assert_eq!(ensemble.predict_one(row), leaf as f64);
        }
    }
}

#[test]
fn predicted_quantiles_are_correct_for_unseen_rows() {
    let mut rng = Pcg64Mcg::seed_from_u64(7);
    // The spread of the target grows with the first feature, so that quantiles depend on it.
    let mut draw = |rows: usize| -> (Vec<Vec<f64>>, Vec<f64>) {
        let pair = |rng: &mut Pcg64Mcg| (rng.random::<f64>(), rng.random::<f64>());
        (0..rows).map(|_| pair(&mut rng)).map(|(x, noise)| (vec![x, noise.round()], x + x * noise)).unzip()
    };
    let (rows, targets) = draw(4000);
    let params = BoostParams {
        trees: 100,
        learning_rate: 0.1,
        tree: TreeParams { leaf_rows_min: 20, ..TREE_PARAMS },
        row_fraction: 0.7,
    };
    let levels = [0.02, 0.1, 0.5];
    let ensemble = fit_quantiles(&columns(&rows), &targets, &levels, &params, 1);
    let (rows, targets) = draw(4000);
    let mut counts_below = [0.0; 3];
    for (row, target) in rows.iter().zip(&targets) {
        let mut quantiles = [0.0; 3];
        ensemble.predict(row, &mut quantiles);
        counts_below
            .iter_mut()
            .zip(quantiles)
            .for_each(|(count, quantile)| *count += f64::from(u8::from(*target < quantile)));
    }
    for (count, level) in counts_below.into_iter().zip(levels) {
        let share = count / 4000.0;
        assert!(
            (share - level).abs() < 0.25 * level + 0.005,
            "{share} of targets are below the quantile at level {level}"
        );
    }
    let mut quantiles = [[0.0; 3]; 2];
    ensemble.predict(&[0.2, 0.0], &mut quantiles[0]);
    ensemble.predict(&[0.9, 0.0], &mut quantiles[1]);
    assert!(quantiles[1][1] - quantiles[0][1] > 0.5, "the first feature has no effect: {quantiles:?}");
}

#[test]
fn same_rows_and_seed_give_same_trees() {
    let rows: Vec<Vec<f64>> = (0..200).map(|n| vec![f64::from(n % 17), f64::from(n % 5)]).collect();
    let targets: Vec<f64> = (0..200).map(|n| f64::from(n % 7)).collect();
    let params = BoostParams { trees: 5, learning_rate: 0.5, tree: TREE_PARAMS, row_fraction: 0.5 };
    let trained = |seed| fit_quantiles(&columns(&rows), &targets, &[0.1, 0.5], &params, seed);
    assert_eq!(trained(3), trained(3));
    assert_ne!(trained(3), trained(4));
}

#[test]
fn empty_and_constant_columns_are_never_split() {
    let rows = vec![vec![f64::NAN, 1.0]; 40];
    let targets: Vec<f64> = (0..40).map(f64::from).collect();
    let params = BoostParams { trees: 3, learning_rate: 1.0, tree: TREE_PARAMS, row_fraction: 1.0 };
    let ensemble = fit_quantiles(&columns(&rows), &targets, &[0.5], &params, 1);
    assert_eq!(ensemble.predict_one(&[f64::NAN, 1.0]), ensemble.predict_one(&[5.0, -1.0]));
}

#[test]
fn missing_value_goes_to_the_child_set_in_the_node() {
    let mut tree = stump(SplitRule::AtMost(0.5));
    for (missing_first, zero_is_missing, expected) in [(false, false, [1.0, 2.0]), (true, true, [1.0, 1.0])] {
        tree.nodes[0] = Node { missing_first, zero_is_missing, ..tree.nodes[0] };
        let mut ensemble = Ensemble::new(1, vec![0.0]);
        ensemble.push(&tree).unwrap();
        assert_eq!([ensemble.predict_one(&[0.0]), ensemble.predict_one(&[f64::NAN])], expected);
    }
    tree.nodes[0] = Node { missing_first: false, zero_is_missing: true, ..tree.nodes[0] };
    let mut ensemble = Ensemble::new(1, vec![0.0]);
    ensemble.push(&tree).unwrap();
    assert_eq!([0.0, 1e-36, 0.2, 0.9].map(|x| ensemble.predict_one(&[x])), [2.0, 2.0, 1.0, 2.0]);
}

#[test]
fn feature_value_is_truncated_to_an_integer_for_a_set() {
    let mut ensemble = Ensemble::new(1, vec![10.0]);
    ensemble.push(&stump(SplitRule::OneOf(0))).unwrap();
    ensemble.push(&Tree { sets: vec![vec![0], vec![0, 1]], ..stump(SplitRule::OneOf(1)) }).unwrap();
    let prediction =
        [0.0, 1.0, 2.7, 32.0, 1e18, -1.0, f64::NAN, f64::INFINITY].map(|x| ensemble.predict_one(&[x]));
    assert_eq!(prediction, [13.0, 14.0, 13.0, 13.0, 14.0, 14.0, 14.0, 14.0]);
}

#[test]
fn single_leaf_tree_is_constant() {
    let mut ensemble = Ensemble::new(1, vec![1.0, 2.0]);
    ensemble.push(&Tree { leaves: vec![10.0, 20.0], ..Tree::default() }).unwrap();
    let mut prediction = [0.0; 2];
    ensemble.predict(&[f64::NAN], &mut prediction);
    assert_eq!(prediction, [11.0, 22.0]);
}

#[test]
fn malformed_tree_is_rejected_and_not_added() {
    let error_after = |change: &dyn Fn(&mut Tree)| {
        let mut tree = stump(SplitRule::AtMost(0.5));
        change(&mut tree);
        error_of(&tree)
    };
    assert!(error_after(&|tree| tree.leaves.clear()).starts_with("0 leaf values"));
    assert_eq!(
        error_after(&|tree| tree.nodes[0].feature = 1),
        "node 0: feature index 1 is out of range, must be below 1"
    );
    for child in [Child::Node(1), Child::Leaf(2)] {
        assert_eq!(
            error_after(&|tree| tree.nodes[0].children[1] = child),
            "node 0: index of a child is out of range, must be the index of a node or leaf of the tree"
        );
    }
    assert_eq!(
        error_after(&|tree| tree.nodes[0].children[1] = Child::Node(0)),
        "node 0: has several parents or is its own ancestor, nodes must form a tree"
    );
    assert_eq!(
        error_after(&|tree| tree.nodes[0].test = SplitRule::OneOf(1)),
        "node 0: set index is out of range, must be the index of a set of the tree"
    );
}

#[test]
fn tree_that_splits_only_missing_values_round_trips() {
    let mut columns = FeatureColumns::new(1);
    let number = |row: u32| if row.is_multiple_of(2) { f64::NAN } else { f64::from(row) };
    (0..40).for_each(|row| columns.push(&[number(row)]));
    let targets: Vec<[f64; 1]> =
        (0..40_u32).map(|row| [f64::from(u8::from(row.is_multiple_of(2)))]).collect();
    let tree = TreeParams { leaves_max: 2, leaf_rows_min: 2, column_fraction: 1.0 };
    let params = forest::ForestParams { trees: 3, tree };
    let forest = forest::fit_forest(&columns, &targets, &(0..40).collect::<Vec<_>>(), &params, 1).forest;
    let decoded: Ensemble = serde_json::from_slice(&serde_json::to_vec(&forest).unwrap()).unwrap();
    for number in [f64::NAN, 3.0, 1e300] {
        assert_eq!(decoded.predict_one(&[number]), forest.predict_one(&[number]));
    }
    assert!((forest.predict_one(&[f64::NAN]) - 1.0).abs() < 1e-9 && forest.predict_one(&[3.0]).abs() < 1e-9);
}

#[test]
fn forest_predicts_the_mean_of_each_target() {
    let mut columns = FeatureColumns::new(1);
    (0..40_u32).for_each(|row| columns.push(&[f64::from(row / 20)]));
    let targets: Vec<[f64; 2]> = (0..40_u32).map(|row| [f64::from(row / 20), f64::from(row % 4)]).collect();
    let tree = TreeParams { leaves_max: 2, leaf_rows_min: 2, column_fraction: 1.0 };
    let params = forest::ForestParams { trees: 200, tree };
    let fitted = forest::fit_forest(&columns, &targets, &(0..40).collect::<Vec<_>>(), &params, 1);
    for (row, out_of_bag) in [0.0, 1.0].into_iter().zip([fitted.out_of_bag[0], fitted.out_of_bag[39]]) {
        let mut outputs = [0.0; 2];
        fitted.forest.predict(&[row], &mut outputs);
        for means in [outputs, out_of_bag.unwrap()] {
            assert!((means[0] - row).abs() < 1e-9 && (means[1] - 1.5).abs() < 0.2, "{row}: {means:?}");
        }
    }
}

#[test]
fn missing_value_without_training_rows_follows_the_majority() {
    let mut columns = FeatureColumns::new(1);
    (0..40).for_each(|row| columns.push(&[f64::from(row)]));
    let targets: Vec<[f64; 1]> = (0..40).map(|row| [f64::from(u8::from(row >= 30))]).collect();
    let tree = TreeParams { leaves_max: 2, leaf_rows_min: 2, column_fraction: 1.0 };
    let params = forest::ForestParams { trees: 20, tree };
    let forest = forest::fit_forest(&columns, &targets, &(0..40).collect::<Vec<_>>(), &params, 1).forest;
    assert!(
        forest.predict_one(&[f64::NAN]) < 0.2,
        "NaN must reach the first child, which has three quarters of the rows"
    );
}
