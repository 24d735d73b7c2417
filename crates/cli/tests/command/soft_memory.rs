//! Tests of `tarn get soft`.

use crate::rack::{Rack, RackBehavior};

#[tokio::test(flavor = "multi_thread")]
async fn sizes_and_clients_are_shown() {
    let shown = "\
limit 4096MiB, total 3072MiB, free 512MiB

PID   USER  PROGRAM   BUDGET   USED     FOOTPRINT  WEIGHT   GRANTED  RECLAIMED  DENIED  STATE
812   2001  kv-cache  2048MiB  2000MiB  2600MiB    1061MiB  3000MiB  952MiB     3       ok
1034  0     -         512MiB   0MiB     100MiB     100MiB   512MiB   0MiB       0       silent
";
    let at = "note: reported by host h1 at 2023-11-14T22:13:22Z\n";
    for arguments in ["get soft h1", "get soft-memory h1"] {
        let output = Rack::default().tarn(arguments).await;
        assert_eq!((&*output.stdout, &*output.stderr, output.code), (shown, at, 0));
    }
    let wide = Rack::default().tarn("get soft h1 -o wide").await.stdout;
    let heads: Vec<_> = wide.lines().nth(2).unwrap().split_whitespace().collect();
    assert_eq!(heads[9..], ["DENIED", "STATE", "UNANSWERED"]);
    assert!(wide.contains("  0       silent  2\n"), "{wide}");
}

#[tokio::test(flavor = "multi_thread")]
async fn json_contains_sizes_in_bytes_and_the_counters_of_the_host() {
    let json = Rack::default().tarn("get soft h1 -o json").await.stdout;
    let mut shown: serde_json::Value = serde_json::from_str(&json).unwrap();
    let clients = shown.as_object_mut().unwrap().remove("clients").unwrap();
    assert_eq!(
        shown,
        serde_json::json!({
            "host": "h1", "at_unix_ms": 1_700_000_002_000_u64, "limit_bytes": 4096_u64 << 20,
            "total_bytes": 3072_u64 << 20, "free_bytes": 512 << 20, "granted_bytes": 9000_u64 << 20,
            "reclaimed_bytes": 1000 << 20, "denied_requests": 7, "unanswered_demands": 3, "client_count": 2,
        })
    );
    assert_eq!(
        clients[1],
        serde_json::json!({
            "pid": 1034, "uid": 0, "program": null, "budget_bytes": 512 << 20, "used_bytes": 4096,
            "footprint_bytes": 100 << 20, "weight_bytes": 100 << 20, "granted_bytes": 512 << 20,
            "reclaimed_bytes": 0, "denied_requests": 0, "unanswered_demands": 2, "silent": true,
        })
    );
    let yaml = Rack::default().tarn("get soft h1 -o yaml").await.stdout;
    assert!(yaml.starts_with("host: h1\n") && yaml.contains("\n- pid: 812\n"), "{yaml}");
}

#[tokio::test(flavor = "multi_thread")]
async fn omitted_clients_are_noted() {
    let output = Rack::new(RackBehavior::Degraded).tarn("get soft h1").await;
    let expected = "\
note: 2 of 300 processes are listed: those with the largest budgets
note: reported by host h1 at 2023-11-14T22:13:22Z
";
    assert_eq!((&*output.stderr, output.code), (expected, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn host_without_soft_memory_is_an_error_with_a_hint() {
    let output = Rack::default().tarn("get soft h2").await;
    let expected = "(SOFT_MEMORY_NOT_REPORTED)\nhint: the host's agent reports soft memory every two seconds if \
                    [soft_memory] is configured; check its state with `tarn get hosts`\n";
    assert!(output.code == 3 && output.stderr.ends_with(expected), "{}", output.stderr);
    assert_eq!(output.stdout, "");
}
