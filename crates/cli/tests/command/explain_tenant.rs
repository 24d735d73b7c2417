//! Tests of `tarn explain tenant`.

use serde_json::Value;

use crate::rack::{Rack, RackBehavior};

#[tokio::test(flavor = "multi_thread")]
async fn tenant_of_several_functions_has_a_section_of_each() {
    let output = Rack::default().tarn("explain tenant h1 web").await;
    let expected = "\
2023-11-14T22:13:20Z  fair tiering of tenant web of host h1
  local memory of the host: 3MiB free of 245MiB, fully utilized
  protections: the sum of 300MiB exceeds the usable 240MiB, so all are reduced in proportion
  usage: 120MiB of local memory, 40MiB of slower memory
  protection: 80MiB in effect, 100MiB configured; it borrows 40MiB
  bound: 130MiB
  demotion: 5MiB: free memory is low, and usage is above the protection
  promotion: 12MiB/s of hot pages; factor 0.198: above the protection while local memory is full
  thrashing: thrashing, level 2; 30 of 40 observed promotions were demoted soon after
  moved by the agent: 700MiB demoted, 600MiB promoted of 650MiB attempted
  problem of the host: no pages are promoted: another program uses DAMON
  demotion problem: the kernel demoted 0B of 5MiB
2023-11-14T22:13:21Z  early eviction of tenant web of host h1
  usage: 199MiB of 200MiB
  threshold: 161MiB (from 100MiB to 192MiB), lowered: the tenant grows faster than its memory is evicted
  growth: 100MiB/s while it is not blocked
  eviction rate: 84MiB/s
  class: 1 of 7 (most urgent): the tenant is blocked
  evicted by the agent: 420MiB
  waiting: 1.5 s for evictions, 0.0 s for evicted memory
  problem: the kernel evicts less memory than requested
2023-11-14T22:13:20Z  epoch 7 of host h1: shares updated
  tenant web, weight 2, swap: memory beyond its share is swapped out
    memory: share 40GiB, fair share by weight 32GiB, used 39GiB
    link: share 2500MB/s, fair share by weight 8000MB/s, used 1234MB/s, demand 3000MB/s
    stalled on memory or I/O 12.5 % of the time
    throughput: 1.073 times that with an equal split, estimated from damon, error 5.0 %
";
    assert_eq!((output.stdout.as_str(), output.stderr.as_str(), output.code), (expected, "", 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn json_contains_only_reports_about_the_tenant() {
    for (tenant, functions) in [
        ("web", ["tiering", "early_eviction", "shares"].as_slice()),
        ("db", &["tiering", "shares"]),
        ("calm", &["early_eviction"]),
    ] {
        let json = Rack::default().tarn(&format!("explain tenant h1 {tenant} -o json")).await.stdout;
        let explanation: Value = serde_json::from_str(&json).unwrap();
        for function in ["tiering", "early_eviction", "shares"] {
            let names: Vec<_> = explanation[function]["tenants"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|reported| reported["tenant"].as_str().unwrap())
                .collect();
            let expected = if functions.contains(&function) { vec![tenant] } else { Vec::new() };
            assert_eq!(names, expected, "{function} of {tenant}: {json}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_state_of_a_threshold_is_explained() {
    for (tenant, threshold) in [
        (
            "back",
            "192MiB (from 100MiB to 192MiB), lowered by less: the tenant grows faster than its memory is evicted, but its cache miss rate increased",
        ),
        (
            "calm",
            "192MiB (from 100MiB to 192MiB), the largest one: the tenant does not grow faster than its memory is evicted",
        ),
        (
            "costly",
            "192MiB (from 100MiB to 192MiB), the largest one: early eviction was costly, because the tenant needed evicted memory again",
        ),
        ("fixed", "192MiB, fixed"),
        ("newer", "192MiB (from 100MiB to 192MiB), number-99"),
        (
            "reset",
            "192MiB (from 100MiB to 192MiB), raised towards the largest one: the tenant does not grow faster than its memory is evicted",
        ),
        (
            "stalled",
            "192MiB (from 100MiB to 192MiB), the largest one: the device is stalled, no eviction was completed",
        ),
    ] {
        let output = Rack::default().tarn(&format!("explain tenant h1 {tenant}")).await;
        let expected = format!(
            "\
2023-11-14T22:13:21Z  early eviction of tenant {tenant} of host h1
  usage: 150MiB of 200MiB
  threshold: {threshold}
  growth: 3MiB/s while it is not blocked
  eviction rate: 84MiB/s
  class: 4 of 7
  evicted by the agent: 0MiB
  waiting: 0.0 s for evictions, 0.0 s for evicted memory
"
        );
        assert_eq!((output.stdout, output.code), (expected, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_tenant_is_an_error_with_the_reasons_without_decision() {
    let missing = Rack::default().tarn("explain tenant h1 cache").await;
    assert_eq!(
        (missing.stderr.as_str(), missing.code),
        ("error: host h1 has reported no tenant \"cache\"\n", 3)
    );
    let blocked = Rack::new(RackBehavior::Degraded).tarn("explain tenant h1 cache").await;
    let expected = "error: host h1 has reported no tenant \"cache\": no pages are moved: no node without processors has \
                    memory; no memory is evicted early: early_eviction.device: /dev/nbd0 is not in use as swap\n";
    assert_eq!((blocked.stderr.as_str(), blocked.code), (expected, 3));
    let nothing = Rack::default().tarn("explain tenant h2 web").await;
    let expected = "error: host h2 has reported no tenant \"web\"\nhint: the host's agent reports tenants if [tiering], \
                    [early_eviction] or [symbiosis] is configured; check its state with `tarn get hosts`\n";
    assert_eq!((nothing.stderr.as_str(), nothing.code), (expected, 3));
    let host = Rack::default().tarn("explain tenant h9 web").await;
    assert!(host.code == 3 && host.stderr.contains("(HOST_NOT_FOUND)"), "{}", host.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_without_decision_are_noted_beside_the_others() {
    let output = Rack::new(RackBehavior::Degraded).tarn("explain tenant h1 web").await;
    let expected = "\
2023-11-14T22:13:20Z  epoch 7 of host h1: shares unchanged: new shares could not be computed or enforced
  no link is known
  tenant web, weight 2, swap: memory beyond its share is swapped out
";
    assert!(output.stdout.starts_with(expected), "{}", output.stdout);
    let notes = "\
note: no pages are moved: no node without processors has memory
note: no memory is evicted early: early_eviction.device: /dev/nbd0 is not in use as swap
";
    assert_eq!((output.stderr.as_str(), output.code), (notes, 0));
}
