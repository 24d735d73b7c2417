//! Tests of operating points: the numbers of Pond's example, and properties of random points.

use proptest::prelude::*;

use super::*;

fn share(part: f64) -> Fraction {
    Fraction::new(part).unwrap()
}

fn insensitive(fp: f64, placed: f64) -> InsensitivityPoint {
    InsensitivityPoint { fp: share(fp), placed: share(placed) }
}

fn frigid(op: f64, part: f64) -> FrigidPoint {
    FrigidPoint { op: share(op), share: share(part) }
}

fn mix(history: f64, exceeds: f64) -> VmMix {
    VmMix { history: share(history), exceeds: share(exceeds) }
}

#[test]
fn combined_point_matches_corrected_equation() {
    // Columns: h, LI, FP, FM, OP, r, pool, miss. The second row is the paper's operating point of
    // 40 % of memory at X = 2 %. The last two rows are the paper's fixed shares.
    for [h, li, fp, fm, op, r, pool, miss] in [
        [1.0, 0.30, 0.02, 0.20, 0.04, 0.25, 0.44, 0.027],
        [0.8, 0.30, 0.02, 0.20, 0.04, 0.25, 0.392, 0.0236],
        [0.8, 0.0, 0.0, 0.20, 0.04, 0.25, 0.2, 0.01],
        [0.8, 0.30, 0.02, 0.0, 0.0, 0.25, 0.24, 0.016],
        [1.0, 0.30, 0.02, 0.20, 0.04, 1.0, 0.44, 0.048],
        [1.0, 0.0, 0.0, 0.15, 0.10, 0.25, 0.15, 0.025],
        [1.0, 0.0, 0.0, 0.10, 0.09, 2.0 / 3.0, 0.1, 0.06],
    ] {
        let point = CombinedPoint::new(insensitive(fp, li), frigid(op, fm), mix(h, r));
        assert!((point.pool - pool).abs() < 1e-9 && (point.miss - miss).abs() < 1e-9, "{point:?}");
        let solved =
            choose_combination(&[insensitive(fp, li)], &[frigid(op, fm)], mix(h, r), share(point.miss));
        assert_eq!(solved, point, "the only point is within the limit and must be chosen");
    }
}

#[test]
fn solve_uses_one_prediction_if_both_together_exceed_the_limit() {
    let (insensitive, frigid) = ([insensitive(0.02, 0.3)], [frigid(0.04, 0.2)]);
    let solved = |x| choose_combination(&insensitive, &frigid, mix(0.8, 0.25), share(x));
    assert_eq!(solved(0.024).pool, 0.24 + 0.76 * 0.2);
    assert_eq!((solved(0.02).pool, solved(0.02).frigid), (0.24, FrigidPoint::default()));
    assert_eq!((solved(0.012).pool, solved(0.012).insensitive), (0.2, InsensitivityPoint::default()));
    assert_eq!((solved(0.0).pool, solved(0.0).miss), (0.0, 0.0));
}

#[test]
fn solve_without_points_places_nothing() {
    let nothing = CombinedPoint::new(InsensitivityPoint::default(), FrigidPoint::default(), mix(0.8, 0.25));
    assert_eq!(choose_combination(&[], &[], mix(0.8, 0.25), share(1.0)), nothing);
    assert_eq!(frontier(&[], &[], mix(0.8, 0.25)), [nothing]);
}

#[test]
fn solve_prefers_fewer_misses_at_equal_pool_share() {
    let points = [frigid(0.4, 0.2), frigid(0.1, 0.2), frigid(0.4, 0.2)];
    assert_eq!(choose_combination(&[], &points, mix(1.0, 0.5), share(1.0)).frigid, points[1]);
    // Both predictions have equal misses and equal memory. The choice must be deterministic.
    let point = choose_combination(&[insensitive(0.1, 0.5)], &[frigid(0.1, 0.5)], mix(1.0, 1.0), share(0.1));
    assert_eq!((point.insensitive, point.pool), (InsensitivityPoint::default(), 0.5));
}

#[test]
fn out_of_range_share_is_rejected() {
    for json in [r#"{"fp":1.5,"placed":0.1}"#, r#"{"fp":-0.1,"placed":0.1}"#, r#"{"fp":null,"placed":0.1}"#] {
        assert!(serde_json::from_str::<InsensitivityPoint>(json).is_err(), "{json}");
    }
    assert!(Fraction::new(f64::NAN).is_err());
}

/// Random shares. Many are multiples of 0.05, so that duplicates occur.
fn any_share() -> impl Strategy<Value = f64> {
    prop_oneof![(0..=20_u32).prop_map(|n| f64::from(n) / 20.0), 0.0..=1.0]
}

fn insensitive_points() -> impl Strategy<Value = Vec<InsensitivityPoint>> {
    let point = (any_share(), any_share()).prop_map(|(fp, placed)| insensitive(fp * placed, placed));
    prop::collection::vec(point, 0..6)
}

fn frigid_points() -> impl Strategy<Value = Vec<FrigidPoint>> {
    let point = (any_share(), any_share()).prop_map(|(op, part)| frigid(op, part));
    prop::collection::vec(point, 0..6)
}

fn any_mix() -> impl Strategy<Value = VmMix> {
    (any_share(), any_share()).prop_map(|(history, exceeds)| mix(history, exceeds))
}

proptest! {
    #[test]
    fn solution_places_most_memory_within_the_miss_limit(
        insensitive in insensitive_points(), frigid in frigid_points(), mix in any_mix(), x in any_share(),
    ) {
        let chosen = choose_combination(&insensitive, &frigid, mix, share(x));
        prop_assert!(chosen.miss <= x);
        prop_assert_eq!(CombinedPoint::new(chosen.insensitive, chosen.frigid, mix), chosen);
        for insensitive in insensitive.iter().copied().chain([InsensitivityPoint::default()]) {
            for frigid in frigid.iter().copied().chain([FrigidPoint::default()]) {
                let pair = CombinedPoint::new(insensitive, frigid, mix);
                prop_assert!(pair.miss > x || pair.pool <= chosen.pool);
                prop_assert!(pair.pool != chosen.pool || pair.miss >= chosen.miss);
            }
        }
    }

    #[test]
    fn higher_miss_limit_never_places_less(
        insensitive in insensitive_points(), frigid in frigid_points(), mix in any_mix(), x in any_share(), y in any_share(),
    ) {
        let solved = |x| choose_combination(&insensitive, &frigid, mix, share(x)).pool;
        prop_assert!(solved(x.min(y)) <= solved(x.max(y)));
    }

    #[test]
    fn frontier_ascends_and_contains_solution(
        insensitive in insensitive_points(), frigid in frigid_points(), mix in any_mix(), x in any_share(),
    ) {
        let frontier = frontier(&insensitive, &frigid, mix);
        prop_assert!(frontier.is_sorted_by(|one, next| one.pool < next.pool && one.miss < next.miss));
        prop_assert!(frontier.contains(&choose_combination(&insensitive, &frigid, mix, share(x))));
        for point in frontier.iter().filter(|point| point.miss <= 1.0) {
            prop_assert_eq!(choose_combination(&insensitive, &frigid, mix, share(point.miss)), *point);
        }
    }

    #[test]
    fn order_and_duplicates_do_not_change_frontier(
        mut insensitive in insensitive_points(), mut frigid in frigid_points(), mix in any_mix(),
    ) {
        let before = frontier(&insensitive, &frigid, mix);
        insensitive.reverse();
        frigid.reverse();
        insensitive.extend_from_within(..);
        prop_assert_eq!(frontier(&insensitive, &frigid, mix), before);
    }
}
