//! Tests of `tarn get tenants`.

use crate::rack::{Rack, RackBehavior};

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_listed_with_their_tiers() {
    let listed = "\
TENANT  LOCAL   SLOW   PROTECTION  BOUND   PROMOTION  THRASH LEVEL
web     120MiB  40MiB  80MiB       130MiB  12MiB/s    2
db      40MiB   0MiB   80MiB       -       unlimited  0
";
    let at = "note: reported by host h1 at 2023-11-14T22:13:20Z\n";
    let problem = "note: no pages are promoted: another program uses DAMON\n";
    for arguments in ["get tenants h1", "get tenant h1"] {
        let output = Rack::default().tarn(arguments).await;
        assert_eq!((&*output.stdout, output.stderr, output.code), (listed, format!("{problem}{at}"), 0));
    }
    let wide = Rack::default().tarn("get tenants h1 -o wide").await.stdout;
    assert!(wide.contains("700MiB   600MiB    1MiB       the kernel demoted 0B of 5MiB\n"), "{wide}");
    let json = Rack::default().tarn("get tenants h1 -o json").await.stdout;
    let tenants: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        tenants[1],
        serde_json::json!({
            "tenant": "db", "local_bytes": 40 << 20, "slow_bytes": 0, "protection_bytes": 80 << 20,
            "scaled_protection_bytes": 80 << 20, "bound_bytes": null, "demotion_bytes": 0, "demotion_reason": null,
            "promotion_bytes_per_s": null, "promotion_candidates": "accessed pages", "throttle_reason": null,
            "promotion_factor": 1.0, "thrash_level": 0, "thrash_state": "not thrashing", "demoted_bytes": 0,
            "promoted_bytes": 0, "attempted_bytes": 0, "refaulted_bytes": 0, "sampled_promotions": 0,
            "thrashed_pages": 0, "problem": null,
        })
    );
    let blocked = Rack::new(RackBehavior::Degraded).tarn("get tenants h1").await;
    assert!(
        blocked.stderr.starts_with("note: no pages are moved: no node without processors has memory\n"),
        "{}",
        blocked.stderr
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_not_reported_without_fair_tiering() {
    let host = Rack::default().tarn("get tenants h2").await;
    assert!(
        host.code == 3
            && host.stderr.contains("(TENANTS_NOT_REPORTED)\nhint: the host's agent reports tenants"),
        "{}",
        host.stderr
    );
}
