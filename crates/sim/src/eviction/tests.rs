//! Tests of the model of one tenant: the closed form without fetches, published gains of the adaptive
//! threshold, and conservation of memory.

use tiering::evict::Settings;
use units::Fraction;

use super::*;

const WORKING_SET: f64 = 16e9;
const LOCAL_RATIO: f64 = 0.4;
const EVICTION_PER_S: f64 = 287e6;

fn spec(growth_mb_per_s: f64) -> TenantSpec {
    TenantSpec {
        working_set: WORKING_SET,
        growth_per_s: growth_mb_per_s * 1e6,
        burst_s: 0.0,
        accesses_again: 0.0,
        fetch_s_per_byte: 0.0,
        limit: WORKING_SET * LOCAL_RATIO,
        eviction_per_s: EVICTION_PER_S,
    }
}

fn settings(lower: f64) -> Settings {
    Settings { lower: Fraction::new(lower).unwrap(), ..Settings::default() }
}

fn run_fixed(spec: TenantSpec) -> Outcome {
    Tenant::new(spec, &Settings::default(), false).unwrap().run()
}

fn run_adaptive(spec: TenantSpec, lower: f64) -> Outcome {
    Tenant::new(spec, &settings(lower), true).unwrap().run()
}

fn gain(spec: TenantSpec, lower: f64) -> f64 {
    gain_with(spec, &settings(lower))
}

/// Gain of the adaptive threshold, in percent of the time with the fixed threshold.
fn gain_with(spec: TenantSpec, settings: &Settings) -> f64 {
    let adaptive = Tenant::new(spec, settings, true).unwrap().run();
    100.0 * (1.0 - adaptive.completion_s / run_fixed(spec).completion_s)
}

#[test]
fn time_with_fixed_threshold_equals_closed_form() {
    for growth in [150.0, 287.0, 330.0, 430.0, 800.0, 2870.0] {
        let alpha = growth * 1e6 / EVICTION_PER_S;
        let local = WORKING_SET / (growth * 1e6);
        let expected = local * if alpha > 1.0 { LOCAL_RATIO + (1.0 - LOCAL_RATIO) * alpha } else { 1.0 };
        let found = run_fixed(spec(growth)).completion_s;
        assert!((found / expected - 1.0).abs() < 0.005, "{growth} MB/s: {found} s, not {expected} s");
    }
}

/// The gain is 0 for slow growth, rises, and falls again, as in figure 13 of the paper: a tenant that grows
/// fast reaches its limit soon, before much can be evicted.
#[test]
fn gains_equal_published_values() {
    for (growth, gains) in [
        (150.0, [0.0, 0.0, 0.0]),
        (280.0, [0.0, 0.0, 0.0]),
        (330.0, [7.30, 8.21, 8.21]),
        (430.0, [6.12, 15.36, 22.99]),
        (574.0, [4.97, 12.47, 19.97]),
        (657.0, [4.48, 11.25, 18.02]),
        (800.0, [3.84, 9.62, 15.42]),
        (1000.0, [3.19, 8.01, 12.83]),
        (1435.0, [2.34, 5.87, 9.40]),
        (2000.0, [1.74, 4.35, 6.98]),
        (2870.0, [1.24, 3.12, 4.99]),
    ] {
        for (lower, expected) in [0.8, 0.5, 0.2].into_iter().zip(gains) {
            let found = gain(spec(growth), lower);
            assert!((found - expected).abs() < 0.05, "{growth} MB/s, {lower}: {found} %, not {expected} %");
        }
    }
}

#[test]
fn adaptive_threshold_avoids_urgent_evictions_of_moderate_growth() {
    let (fixed, adaptive) = (run_fixed(spec(330.0)), run_adaptive(spec(330.0), 0.5));
    assert!(fixed.urgent_bytes > 9e9, "{fixed:?}");
    assert!(adaptive.urgent_bytes < 1e7 && adaptive.blocked_s < 0.1, "{adaptive:?}");
}

#[test]
fn time_is_the_sum_of_computing_fetching_and_waiting() {
    for (again, fetch) in [(0.2, 1e-9), (1.0, 4e-9), (10.0, 2e-9)] {
        let spec = TenantSpec { accesses_again: again, fetch_s_per_byte: fetch, ..spec(430.0) };
        for outcome in [run_fixed(spec), run_adaptive(spec, 0.5)] {
            let computing = WORKING_SET / spec.growth_per_s;
            let sum = computing + outcome.fetching_s + outcome.blocked_s;
            assert!((outcome.completion_s / sum - 1.0).abs() < 0.001, "{outcome:?}: {sum} s");
        }
    }
}

/// If a tenant often accesses evicted memory again, early eviction as in the paper can be slower than the fixed
/// threshold. The limit of the loss prevents this.
#[test]
fn early_eviction_loses_at_most_one_percent() {
    let mut gains_in_paper = Vec::new();
    for again in [0.1, 0.3, 1.0, 3.0, 10.0] {
        for fetch in [0.3e-9, 1e-9, 4e-9, 10e-9, 100e-9] {
            for growth in [200.0, 300.0, 330.0, 430.0, 657.0, 1435.0] {
                let spec = TenantSpec { accesses_again: again, fetch_s_per_byte: fetch, ..spec(growth) };
                let found = gain(spec, 0.5);
                assert!(found > -1.0, "{spec:?}: {found} %");
                let in_paper = Settings { loss_limit: None, ..settings(0.5) };
                gains_in_paper.push(gain_with(spec, &in_paper));
            }
        }
    }
    assert!(gains_in_paper.iter().any(|gain| *gain < -20.0), "{gains_in_paper:?}");
}

/// The only results to which parameters are fitted: section IV-C2, one task with a server of its own.
#[test]
fn fitted_parameters_reproduce_the_results_of_one_host() {
    let parameters = Parameters::default();
    parameters.check().unwrap();
    for (name, local_ratio, expected) in
        [("linpack", 0.4, 8.22), ("pagerank", 0.6, 17.80), ("quicksort", 0.9, 19.73), ("kmeans", 0.8, 18.70)]
    {
        let workload = parameters.workloads.iter().find(|workload| workload.name == name).unwrap();
        let spec = workload.tenant(local_ratio, parameters.eviction_mb_per_s);
        let found = gain_with(spec, &parameters.settings());
        assert!((found - expected).abs() < 1.0, "{name}: {found} %, not {expected} %");
    }
}

/// Cluster of four servers, of which two run the workload.
fn small_cluster() -> Parameters {
    let changes = serde_json::json!({
        "leaves": 2, "servers_per_leaf": 2, "intensive_servers": 2, "tasks_per_server": 1, "warm_up_s": 5, "measured_s": 200
    });
    let parameters = Parameters::with(changes.as_object().unwrap().clone()).unwrap();
    parameters.check().unwrap();
    parameters
}

#[test]
fn task_in_an_idle_network_needs_the_time_of_one_host() {
    let parameters = small_cluster();
    let workload = &parameters.workloads[1];
    let report = simulate_cluster(&parameters, workload, 0.4, EvictionScheme::Fixed);
    let spec = workload.tenant(0.4, parameters.eviction_mb_per_s);
    let alone = run_fixed(spec).completion_s * spec.growth_per_s / spec.working_set;
    assert!((report.normalized_time / alone - 1.0).abs() < 0.05, "{report:?}, alone {alone}");
    assert!((report.others_normalized_time - 1.0).abs() < 0.05, "{report:?}");
    // A flow of 128 KiB at 287 MB/s, and 24 µs for eight links.
    assert!((report.urgent_mean_s.unwrap() - 0.000_480_7).abs() < 1e-6, "{report:?}");
}

#[test]
fn classes_shorten_urgent_flows_of_a_shared_link() {
    let changes = serde_json::json!({"server_gbit_per_s": 2.5, "tasks_per_server": 2, "intensive_servers": 1,
        "other_workload": {"name": "other", "working_set_gb": 2, "growth_mb_per_s": 140}});
    let all = serde_json::to_value(small_cluster()).unwrap();
    let mut all = all.as_object().unwrap().clone();
    all.extend(changes.as_object().unwrap().clone());
    let parameters = Parameters::with(all).unwrap();
    let workload = &parameters.workloads[0];
    let [fixed, classes] = [EvictionScheme::Fixed, EvictionScheme::Classes]
        .map(|scheme| simulate_cluster(&parameters, workload, 0.4, scheme));
    assert!(classes.urgent_mean_s < fixed.urgent_mean_s, "{classes:?} {fixed:?}");
    assert_eq!(classes, simulate_cluster(&parameters, workload, 0.4, EvictionScheme::Classes));
}

#[test]
fn invalid_parameters_are_rejected_by_field() {
    for (field, value, message) in [
        ("servers", 7.into(), "unknown field `servers`"),
        ("spines", 0.into(), "invalid spines = 0.0: must be a number from 1 to 64"),
        ("queue_weights", serde_json::json!([0, 1, 1, 1, 1, 1, 1, 1]), "invalid queue_weights[0] = 0.0"),
        ("lower_threshold", 2.into(), "invalid lower_threshold = 2.0: must be a number from 0.01 to 1"),
        ("intensive_servers", 97.into(), "invalid intensive_servers = 97.0: must be a number from 1 to 96"),
        ("workloads", serde_json::json!([]), "invalid number of workloads = 0.0"),
    ] {
        let changes = [(field.to_owned(), value)].into_iter().collect();
        let checked = Parameters::with(changes).map_err(|error| error.to_string());
        let error = checked.and_then(|parameters| parameters.check().map_err(|error| error.to_string()));
        let error = error.unwrap_err();
        assert!(error.starts_with(message), "{error}");
    }
}
