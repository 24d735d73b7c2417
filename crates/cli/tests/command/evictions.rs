//! Tests of `tarn get evictions`.

use crate::rack::{Rack, RackBehavior};

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_listed_with_their_eviction_thresholds() {
    let listed = "\
TENANT   USAGE   LIMIT   THRESHOLD  STATE        GROWTH    EVICTION  CLASS
web      199MiB  200MiB  161MiB     lowered      100MiB/s  84MiB/s   1
";
    let at = "note: reported by host h1 at 2023-11-14T22:13:21Z\n";
    for arguments in ["get evictions h1", "get eviction h1"] {
        let output = Rack::default().tarn(arguments).await;
        assert!(output.stdout.starts_with(listed), "{}", output.stdout);
        assert_eq!((&*output.stderr, output.code), (at, 0));
    }
    let wide = Rack::default().tarn("get evictions h1 -o wide").await.stdout;
    let columns =
        "100MiB    192MiB   420MiB   1.5 s    0.0 s     the kernel evicts less memory than requested\n";
    assert!(wide.contains(columns), "{wide}");
    let json = Rack::default().tarn("get evictions h1 -o json").await.stdout;
    let tenants: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        tenants[1],
        serde_json::json!({
            "tenant": "back", "usage_bytes": 150 << 20, "limit_bytes": 200 << 20, "threshold_bytes": 192 << 20,
            "lower_threshold_bytes": 100 << 20, "upper_threshold_bytes": 192 << 20,
            "growth_bytes_per_s": 3 << 20, "eviction_bytes_per_s": 84 << 20, "threshold_change": "pulled_back",
            "class": 4, "evicted_bytes": 0, "blocked_ms": 0, "fetching_ms": 0, "problem": null,
        })
    );
    assert_eq!(tenants[5]["threshold_change"], "number-99");
}

#[tokio::test(flavor = "multi_thread")]
async fn reason_without_decision_is_noted() {
    let blocked = Rack::new(RackBehavior::Degraded).tarn("get evictions h1").await;
    let expected = "\
note: no memory is evicted early: early_eviction.device: /dev/nbd0 is not in use as swap
note: reported by host h1 at 2023-11-14T22:13:21Z
";
    assert_eq!((&*blocked.stderr, blocked.code), (expected, 0));
    let host = Rack::default().tarn("get evictions h2").await;
    let expected = "(EVICTIONS_NOT_REPORTED)\nhint: the host's agent reports evictions every few seconds";
    assert!(host.code == 3 && host.stderr.contains(expected), "{}", host.stderr);
}
