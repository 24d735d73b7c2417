//! Tests of tenant weights and of reported shares, evictions and soft memory with a real manager and scripted
//! agents. Schedulers set weights, agents report, and operators read weights and reports.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use proto::v1::{self as wire, from_agent::Message as Up, to_agent::Message as Down};
use rustix::process::Signal;
use tests::{
    rack::{Plan, Rack},
    scripted_agent::{Session, hello_message, read_token},
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// Checks the code, the machine-readable reason and the message of a rejection.
#[track_caller]
fn assert_rejected<T: std::fmt::Debug>(
    result: Result<T, Status>,
    code: Code,
    reason: &str,
    expected_words: &[&str],
) {
    let status = result.expect_err("the request must be rejected");
    assert_eq!(status.code(), code, "{status:?}");
    let info = status.get_details_error_info().expect("a rejection has a reason");
    assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, "tarn"));
    for word in expected_words {
        assert!(status.message().contains(word), "{:?} does not contain {word:?}", status.message());
    }
}

/// Starts a manager without agents.
async fn start_rack() -> Rack {
    let mut rack = Rack::new(Plan::small(1));
    rack.start_manager().await;
    rack
}

fn parse_weights(text: &str) -> Vec<wire::Weight> {
    let weight = |word: &str| {
        let (tenant, weight) = word.split_once('=').unwrap();
        wire::Weight { tenant: tenant.into(), weight: weight.parse().unwrap() }
    };
    text.split_whitespace().map(weight).collect()
}

async fn set_weights(rack: &Rack, host: &str, text: &str) -> Result<Vec<wire::Weight>, Status> {
    let request = wire::SetWeightsRequest { host: host.into(), weights: parse_weights(text) };
    Ok(rack.scheduler().await.set_weights(request).await?.into_inner().weights)
}

async fn get_shares(rack: &Rack, host: &str) -> Result<wire::Shares, Status> {
    Ok(rack.admin().await.get_shares(wire::GetSharesRequest { host: host.into() }).await?.into_inner())
}

/// Connects as the agent of a host and waits for the welcome message.
async fn connect_agent(rack: &Rack, host: &str) -> Session {
    let mut session = Session::connect(rack, &read_token(rack, host), hello_message(host)).await.unwrap();
    let first = session.incoming.message().await.unwrap().unwrap().message;
    assert!(matches!(first, Some(Down::Welcome(_))), "{first:?}");
    session
}

/// Waits for the next weights that the manager sends to an agent, and returns them.
async fn next_weights(session: &mut Session) -> Vec<wire::Weight> {
    loop {
        if let Some(Down::Weights(message)) = session.incoming.message().await.unwrap().unwrap().message {
            return message.weights;
        }
    }
}

async fn send(session: &Session, message: Up) {
    session.outgoing.send(wire::FromAgent { message: Some(message) }).await.unwrap();
}

async fn send_shares(session: &Session, shares: wire::Shares) {
    send(session, Up::Shares(shares)).await;
}

/// Waits until the manager ends a session, and returns its reason.
async fn end_of_session(session: &mut Session) -> Status {
    loop {
        match session.incoming.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the session ended without a reason"),
            Err(status) => break status,
        }
    }
}

async fn get_evictions(rack: &Rack, host: &str) -> Result<wire::Evictions, Status> {
    let request = wire::GetEvictionsRequest { host: host.into() };
    Ok(rack.admin().await.get_evictions(request).await?.into_inner())
}

/// Returns the report of a cycle at this time.
fn example_evictions(at_unix_ms: u64) -> wire::Evictions {
    let tenant = wire::EvictedTenant {
        tenant: "web".into(),
        usage_bytes: 199 << 20,
        limit_bytes: 200 << 20,
        threshold_bytes: 161 << 20,
        lower_threshold_bytes: 100 << 20,
        upper_threshold_bytes: 192 << 20,
        growth_bytes_per_s: 100 << 20,
        eviction_bytes_per_s: 84 << 20,
        threshold_change: wire::ThresholdChange::Lowered.into(),
        class: 1,
        ..Default::default()
    };
    wire::Evictions { at_unix_ms, tenants: vec![tenant], ..Default::default() }
}

async fn get_soft_memory(rack: &Rack, host: &str) -> Result<wire::SoftMemory, Status> {
    let request = wire::GetSoftMemoryRequest { host: host.into() };
    Ok(rack.admin().await.get_soft_memory(request).await?.into_inner())
}

/// Returns the state of soft memory at this time, with one client.
fn example_soft_memory(at_unix_ms: u64) -> wire::SoftMemory {
    let client = wire::SoftMemoryClient {
        pid: 812,
        uid: 2001,
        program: "cache".into(),
        budget_bytes: 64 << 20,
        used_bytes: 60 << 20,
        footprint_bytes: 100 << 20,
        weight_bytes: 64 << 20,
        granted_bytes: 80 << 20,
        reclaimed_bytes: 16 << 20,
        denied_requests: 2,
        ..Default::default()
    };
    wire::SoftMemory {
        at_unix_ms,
        limit_bytes: 256 << 20,
        total_bytes: 128 << 20,
        free_bytes: 64 << 20,
        client_count: 1,
        clients: vec![client],
        ..Default::default()
    }
}

fn example_shares(epoch: u64) -> wire::Shares {
    let share = |memory_mib, bandwidth_mb_s| Some(wire::Share { memory_mib, bandwidth_mb_s });
    let tenant = wire::TenantShare {
        tenant: "web".into(),
        weight: 2.0,
        enforcer: "swap".into(),
        fair: share(1024, 500),
        share: share(2048, 250),
        memory_used_mib: 1000,
        stalled: 0.25,
        gain: 1.1,
        access_source: "damon".into(),
        error: 0.05,
        ..Default::default()
    };
    wire::Shares {
        epoch,
        at_unix_ms: 1_700_000_000_000,
        supply: share(2048, 1000),
        state: wire::ShareState::Set.into(),
        tenants: vec![tenant],
        ..Default::default()
    }
}

#[tokio::test]
async fn agent_gets_weights_after_welcome_and_on_changes() {
    let mut rack = start_rack().await;
    let mut first = connect_agent(&rack, "h0").await;
    assert_eq!(next_weights(&mut first).await, [], "weights must be sent even if no weight is set");
    assert_eq!(set_weights(&rack, "h0", "web=2 db=1.5").await.unwrap(), parse_weights("db=1.5 web=2"));
    assert_eq!(next_weights(&mut first).await, parse_weights("db=1.5 web=2"));
    set_weights(&rack, "h1", "web=9").await.unwrap();
    assert_eq!(
        set_weights(&rack, "h0", "db=0").await.unwrap(),
        parse_weights("web=2"),
        "a weight of 0 must remove the entry"
    );
    assert_eq!(
        next_weights(&mut first).await,
        parse_weights("web=2"),
        "the agent must not get the weights of another host"
    );

    rack.kill_manager();
    rack.start_manager().await;
    let mut again = connect_agent(&rack, "h0").await;
    assert_eq!(
        next_weights(&mut again).await,
        parse_weights("web=2"),
        "acknowledged weights must survive a crash"
    );
    assert_eq!(next_weights(&mut connect_agent(&rack, "h1").await).await, parse_weights("web=9"));
    assert_eq!(set_weights(&rack, "h0", "").await.unwrap(), parse_weights("web=2"));
}

#[tokio::test]
async fn weights_of_removed_host_do_not_apply_to_host_of_same_name() {
    let rack = start_rack().await;
    set_weights(&rack, "h0", "web=2").await.unwrap();
    set_weights(&rack, "h1", "web=9").await.unwrap();
    let old = rack.rack_toml();
    for (text, there) in [(old.replace("\"h1\"", "\"h9\""), "h9"), (old, "h1")] {
        rack.write_rack_toml(&text);
        rack.signal_manager(Signal::HUP);
        rack.wait_for("the reload of rack.toml", async |rack| {
            rack.hosts().await.iter().any(|h| h.host == there)
        })
        .await;
    }
    assert_eq!(set_weights(&rack, "h0", "").await.unwrap(), parse_weights("web=2"));
    assert_eq!(set_weights(&rack, "h1", "").await.unwrap(), []);
}

#[tokio::test]
async fn invalid_weights_are_rejected_without_side_effects() {
    let rack = start_rack().await;
    set_weights(&rack, "h0", "web=2").await.unwrap();
    let invalid = Code::InvalidArgument;
    assert_rejected(
        set_weights(&rack, "h0", "web=-1").await,
        invalid,
        "BAD_VALUE",
        &["weights.weight", "-1", "web"],
    );
    assert_rejected(
        set_weights(&rack, "h0", "web=NaN").await,
        invalid,
        "BAD_VALUE",
        &["weights.weight", "NaN"],
    );
    assert_rejected(
        set_weights(&rack, "h0", "web=1e7").await,
        invalid,
        "BAD_VALUE",
        &["10000000", "from 0.01 to 10000"],
    );
    assert_rejected(
        set_weights(&rack, "h0", "a/b=1").await,
        invalid,
        "BAD_VALUE",
        &["weights.tenant", "a/b"],
    );
    assert_rejected(
        set_weights(&rack, "h0", "web=1 web=2").await,
        invalid,
        "BAD_VALUE",
        &["weights.tenant", "web", "duplicate"],
    );
    let many: String = (0..256).map(|n| format!("t{n}=1 ")).collect();
    assert_rejected(
        set_weights(&rack, "h0", &many).await,
        invalid,
        "BAD_VALUE",
        &["weights", "257", "at most 256"],
    );
    assert_rejected(set_weights(&rack, "", "web=1").await, invalid, "BAD_VALUE", &["host"]);
    assert_rejected(set_weights(&rack, "h9", "web=1").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    assert_eq!(set_weights(&rack, "h0", "").await.unwrap(), parse_weights("web=2"));
}

#[tokio::test]
async fn last_reported_shares_are_shown_until_manager_ends() {
    let mut rack = start_rack().await;
    let none = get_shares(&rack, "h0").await;
    assert_rejected(none, Code::NotFound, "SHARES_NOT_REPORTED", &["h0", "since the manager started"]);
    assert_rejected(get_shares(&rack, "h9").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    let session = connect_agent(&rack, "h0").await;
    send_shares(&session, wire::Shares { host: "h1".into(), ..example_shares(1) }).await;
    send_shares(&session, example_shares(2)).await;
    rack.wait_for("the second epoch", async |rack| get_shares(rack, "h0").await.is_ok_and(|s| s.epoch == 2))
        .await;
    assert_eq!(
        get_shares(&rack, "h0").await.unwrap(),
        wire::Shares { host: "h0".into(), ..example_shares(2) }
    );
    assert_rejected(get_shares(&rack, "h1").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h1"]);
    drop(session);
    assert_eq!(
        get_shares(&rack, "h0").await.unwrap().epoch,
        2,
        "the last report must remain after a disconnect"
    );
    rack.kill_manager();
    rack.start_manager().await;
    assert_rejected(get_shares(&rack, "h0").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn command_line_sets_weights_and_shows_shares() {
    let rack = start_rack().await;
    let tarn = |words: &str| {
        let output = rack.tarn(&words.split_whitespace().collect::<Vec<_>>());
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), stdout, stderr)
    };
    let set = "TENANT  WEIGHT\nweb     2\n".to_owned();
    assert_eq!(tarn("set weights h0 web=2 db=0"), (Some(0), set, String::new()));
    let (code, _, stderr) = tarn("set weights h0 web=-1");
    assert!(code == Some(2) && stderr.contains("weights.weight: -1 must be from 0.01 to 10000"), "{stderr}");
    let (code, _, stderr) = tarn("get shares h0");
    assert!(code == Some(3) && stderr.contains("SHARES_NOT_REPORTED"), "{stderr}");
    let session = connect_agent(&rack, "h0").await;
    send_shares(&session, example_shares(1)).await;
    rack.wait_for("the epoch", async |rack| get_shares(rack, "h0").await.is_ok()).await;
    let (_, listed, _) = tarn("get shares h0");
    assert!(listed.contains("web     2       swap      2GiB/1GiB    250MB/s  25.0 %   10.0 %\n"), "{listed}");
    let (_, explained, _) = tarn("explain shares h0");
    assert!(explained.contains("  epoch 1 of host h0: shares updated\n"), "{explained}");
    let (_, explained, _) = tarn("explain host h0");
    assert!(explained.contains("weigh host h0 (by scheduler)\n  weights: web=2\n"), "{explained}");
}

#[tokio::test]
async fn agent_with_invalid_shares_is_disconnected() {
    let rack = start_rack().await;
    let mut session = connect_agent(&rack, "h0").await;
    let mut nonsense = example_shares(1);
    nonsense.tenants[0].gain = f64::NAN;
    send_shares(&session, nonsense).await;
    let status = end_of_session(&mut session).await;
    let expected_words = ["shares.tenants.gain", "NaN", "web"];
    assert_rejected::<()>(Err(status), Code::InvalidArgument, "BAD_VALUE", &expected_words);
    assert_rejected(get_shares(&rack, "h0").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn last_reported_evictions_are_shown_until_manager_ends() {
    let mut rack = start_rack().await;
    let none = get_evictions(&rack, "h0").await;
    assert_rejected(none, Code::NotFound, "EVICTIONS_NOT_REPORTED", &["h0", "since the manager started"]);
    assert_rejected(get_evictions(&rack, "h9").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    let session = connect_agent(&rack, "h0").await;
    send(&session, Up::Evictions(wire::Evictions { host: "h1".into(), ..example_evictions(1) })).await;
    send(&session, Up::Evictions(example_evictions(1_700_000_000_000))).await;
    rack.wait_for("the second report", async |rack| {
        get_evictions(rack, "h0").await.is_ok_and(|report| report.at_unix_ms > 1)
    })
    .await;
    let expected = wire::Evictions { host: "h0".into(), ..example_evictions(1_700_000_000_000) };
    assert_eq!(get_evictions(&rack, "h0").await.unwrap(), expected);
    assert_rejected(get_evictions(&rack, "h1").await, Code::NotFound, "EVICTIONS_NOT_REPORTED", &["h1"]);
    send_shares(&session, example_shares(1)).await;
    rack.wait_for("the shares", async |rack| get_shares(rack, "h0").await.is_ok()).await;
    let explained = String::from_utf8(rack.tarn(&["explain", "tenant", "h0", "web"]).stdout).unwrap();
    let eviction =
        "2023-11-14T22:13:20Z  early eviction of tenant web of host h0\n  usage: 199MiB of 200MiB\n";
    assert!(explained.starts_with(eviction), "{explained}");
    assert!(explained.contains("  epoch 1 of host h0: shares updated\n"), "{explained}");
    drop(session);
    rack.kill_manager();
    rack.start_manager().await;
    assert_rejected(get_evictions(&rack, "h0").await, Code::NotFound, "EVICTIONS_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn agent_with_invalid_evictions_is_disconnected() {
    let rack = start_rack().await;
    let mut session = connect_agent(&rack, "h0").await;
    let mut report = example_evictions(1);
    report.tenants[0].class = 8;
    send(&session, Up::Evictions(report)).await;
    let status = end_of_session(&mut session).await;
    let expected_words = ["evictions.tenants.class: 8 must be from 1 to 7", "web"];
    assert_rejected::<()>(Err(status), Code::InvalidArgument, "BAD_VALUE", &expected_words);
    assert_rejected(get_evictions(&rack, "h0").await, Code::NotFound, "EVICTIONS_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn last_reported_soft_memory_is_shown_until_manager_ends() {
    let mut rack = start_rack().await;
    let none = get_soft_memory(&rack, "h0").await;
    assert_rejected(none, Code::NotFound, "SOFT_MEMORY_NOT_REPORTED", &["h0", "since the manager started"]);
    assert_rejected(get_soft_memory(&rack, "h9").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    let session = connect_agent(&rack, "h0").await;
    send(&session, Up::SoftMemory(wire::SoftMemory { host: "h1".into(), ..example_soft_memory(1) })).await;
    send(&session, Up::SoftMemory(example_soft_memory(1_700_000_000_000))).await;
    rack.wait_for("the second report", async |rack| {
        get_soft_memory(rack, "h0").await.is_ok_and(|report| report.at_unix_ms > 1)
    })
    .await;
    let expected = wire::SoftMemory { host: "h0".into(), ..example_soft_memory(1_700_000_000_000) };
    assert_eq!(get_soft_memory(&rack, "h0").await.unwrap(), expected);
    assert_rejected(get_soft_memory(&rack, "h1").await, Code::NotFound, "SOFT_MEMORY_NOT_REPORTED", &["h1"]);
    let shown = String::from_utf8(rack.tarn(&["get", "soft", "h0"]).stdout).unwrap();
    let expected = "\
limit 256MiB, total 128MiB, free 64MiB

PID  USER  PROGRAM  BUDGET  USED   FOOTPRINT  WEIGHT  GRANTED  RECLAIMED  DENIED  STATE
812  2001  cache    64MiB   60MiB  100MiB     64MiB   80MiB    16MiB      2       ok
";
    assert_eq!(shown, expected);
    drop(session);
    rack.kill_manager();
    rack.start_manager().await;
    let none = get_soft_memory(&rack, "h0").await;
    assert_rejected(none, Code::NotFound, "SOFT_MEMORY_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn agent_with_invalid_soft_memory_is_disconnected() {
    let rack = start_rack().await;
    let mut session = connect_agent(&rack, "h0").await;
    let mut report = example_soft_memory(1);
    report.clients[0].program = "x".repeat(46);
    send(&session, Up::SoftMemory(report)).await;
    let status = end_of_session(&mut session).await;
    let expected_words = ["soft_memory.clients.program: 46 bytes must have at most 45 bytes", "812"];
    assert_rejected::<()>(Err(status), Code::InvalidArgument, "BAD_VALUE", &expected_words);
    let none = get_soft_memory(&rack, "h0").await;
    assert_rejected(none, Code::NotFound, "SOFT_MEMORY_NOT_REPORTED", &["h0"]);
}
