//! Tests of the requests that commands send to the manager.

use std::{fs, os::unix::fs::MetadataExt as _};

use crate::rack::{Rack, RackBehavior};

/// Asserts that the last request of a command to the manager contains each of `parts`.
async fn assert_request_contains(arguments: &str, parts: &[&str]) {
    let rack = Rack::default();
    let ran = rack.tarn(arguments).await;
    assert_eq!(ran.code, 0, "tarn {arguments}: {}", ran.stderr);
    let request = rack.requests().pop().unwrap();
    for part in parts {
        assert!(request.contains(part), "tarn {arguments}: {part} is missing in {request}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_options_of_reserve_are_sent() {
    let arguments = "reserve --host h1 --vm web --pool 4GiB --local 8GiB --cores 3 --pinned --wait-ready \
                 --commit-within 5m --request-id q9 --client nova --uid 2001";
    let parts = [
        "Reserve ReserveRequest",
        "request_id: \"q9\"",
        "host: \"h1\"",
        "vm: \"web\"",
        "pool_bytes: 4294967296",
        "local_bytes: 8589934592",
        "cores: 3",
        "pinned: true",
        "validate_only: false",
        "wait_ready: true",
        "commit_within_ms: 300000",
        "client: \"nova\"",
        "uid: Some(2001)",
    ];
    assert_request_contains(arguments, &parts).await;
    let parts = ["validate_only: true", "commit_within_ms: 0", "pool_bytes: 0", "uid: None"];
    assert_request_contains("reserve --host h1 --vm web --cores 1 --validate-only --request-id q9", &parts)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uid_must_be_below_the_maximum() {
    for uid in ["4294967295", "-1", "root"] {
        let rack = Rack::default();
        let ran = rack.tarn(&format!("reserve --host h1 --vm web --cores 1 --uid={uid}")).await;
        assert_eq!((ran.code, rack.requests().len()), (2, 0), "{}", ran.stderr);
        assert!(ran.stderr.contains("--uid") && ran.stderr.contains(uid), "{}", ran.stderr);
    }
    assert_request_contains(
        "reserve --host h1 --vm web --cores 1 --uid 0 --request-id q9",
        &["uid: Some(0)"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_request_id_is_generated_and_printed() {
    let rack = Rack::default();
    let first = rack.tarn("reserve --host h1 --vm web --pool 1GiB").await;
    let id = first.stderr.trim_end().strip_prefix("request_id: ").expect("the ID is on stderr").to_owned();
    assert!(id.len() == 32 && rack.requests()[0].contains(&format!("request_id: \"{id}\"")), "{id}");
    let second = rack.tarn("reserve --host h1 --vm web --pool 1GiB -o json").await;
    let output: serde_json::Value = serde_json::from_str(&second.stderr).unwrap();
    assert_ne!(output["request_id"], id.as_str(), "IDs are random");
}

#[tokio::test(flavor = "multi_thread")]
async fn reservation_is_given_by_id_or_vm() {
    assert_request_contains("commit r-1", &["Commit", "reservation: \"r-1\", vm: \"\""]).await;
    assert_request_contains("commit web", &["Commit", "reservation: \"\", vm: \"web\""]).await;
    assert_request_contains("wait-ready web --timeout 3s", &["WaitReady", "vm: \"web\"", "timeout_ms: 3000"])
        .await;
    assert_request_contains("wait-ready web", &["timeout_ms: 300000"]).await;
    assert_request_contains("rehome web", &["RehomeVm", "vm: \"web\""]).await;
    assert_request_contains("release web", &["Release", "force: false", "reason: \"\""]).await;
    assert_request_contains("release web --force --reason stuck", &["force: true", "reason: \"stuck\""])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_command_has_exactly_one_target() {
    assert_request_contains(
        "cordon host h1 --reason fans",
        &["Cordon", "host: \"h1\", emc: \"\", slice: None", "\"fans\""],
    )
    .await;
    assert_request_contains("drain emc e0", &["Drain", "host: \"\", emc: \"e0\", slice: None"]).await;
    assert_request_contains("uncordon slice 0", &["Uncordon", "host: \"\", emc: \"\", slice: Some(0)"]).await;
    assert_request_contains("uncordon host h1", &["Uncordon", "host: \"h1\""]).await;
    assert_request_contains("fence h1", &["Fence", "host: \"h1\"", "confirm_powered_off: false"]).await;
    assert_request_contains("fence h1 --confirm-powered-off", &["confirm_powered_off: true"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_is_resolved_with_a_state() {
    assert_request_contains(
        "migration resolve web accepted",
        &["ResolveMigration", "vm: \"web\"", "state: Accepted"],
    )
    .await;
    assert_request_contains(
        "migration resolve web declined --reason later",
        &["state: Declined", "answer: \"later\""],
    )
    .await;
    assert_request_contains("migration resolve web done", &["state: Done"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_are_set_for_tenants_of_one_host() {
    let web = "Weight { tenant: \"web\", weight: 2.5 }";
    assert_request_contains(
        "set weights h1 web=2.5 db=0",
        &["SetWeights", "host: \"h1\"", web, "tenant: \"db\", weight: 0.0"],
    )
    .await;
    assert_request_contains("get weights h1", &["SetWeights", "host: \"h1\"", "weights: []"]).await;
    // The manager, not the client, checks the range of weights.
    assert_request_contains("set weights h1 a.slice:b=-1", &["tenant: \"a.slice:b\", weight: -1.0"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_pages_of_a_list_are_requested() {
    let rack = Rack::default();
    rack.tarn("get slices").await;
    let from: Vec<_> = rack.requests().iter().map(|call| call.contains("from: ")).collect();
    assert_eq!(from, [true; 3], "8 slices in pages of 3");
    let rack = Rack::default();
    rack.tarn("get reservations --include-ended").await;
    let requests = rack.requests();
    assert!(requests[0].contains("after: \"\"") && requests[1].contains("after: \"r-1\""), "{requests:?}");
    assert!(requests.iter().all(|call| call.contains("ended: true")), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_file_is_complete_and_readable_only_by_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rack.backup");
    let arguments = format!("backup --to {}", file.display());
    let ran = Rack::default().tarn(&arguments).await;
    assert_eq!((ran.code, fs::read(&file).unwrap().as_slice()), (0, &b"first chunk"[..]), "{}", ran.stderr);
    assert!(ran.stdout.contains("11 bytes"), "{}", ran.stdout);
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    let again = Rack::default().tarn(&arguments).await;
    assert_eq!(again.code, 2, "an existing file was replaced: {}", again.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_backup_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = format!("backup --to {}/rack.backup", folder.path().display());
    let ran = Rack::new(RackBehavior::Degraded).tarn(&arguments).await;
    assert!(ran.code == 1 && ran.stderr.contains("I/O error"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let ran = Rack::new(RackBehavior::EndlessLists).tarn(&arguments).await;
    assert!(ran.code == 1 && ran.stderr.contains("before its final chunk"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let ran = Rack::default().tarn("backup --to /no/such/folder/rack.backup").await;
    assert!(ran.code == 1 && ran.stderr.contains("/no/such/folder/rack.backup."), "{}", ran.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_sent_to_local_addresses_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("admin.token");
    fs::write(&file, "5ec2e7\n").unwrap();
    let rack = Rack::default();
    let ran = rack.tarn(&format!("get rack --token-file {}", file.display())).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(rack.tokens(), ["Bearer 5ec2e7"]);
    for remote in ["http://10.0.0.1:1", "http://example.org:1"] {
        let ran =
            crate::rack::tarn(&format!("get rack --endpoint {remote} --token-file {}", file.display())).await;
        assert!(ran.code == 2 && ran.stderr.contains("loopback"), "{remote}: {}", ran.stderr);
    }
}
