//! Weights of tenants and reported shares, between schedulers, operators and agents: with a real
//! manager and scripted agents.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use proto::v1::{self as wire, from_agent::Message as Up, to_agent::Message as Down};
use rustix::process::Signal;
use tests::{
    rack::{Plan, Rack},
    scripted_agent::{Session, hello, token},
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// The code, the machine-readable reason and the sentence of a refusal.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, reason: &str, says: &[&str]) {
    let status = result.expect_err("this had to be refused");
    assert_eq!(status.code(), code, "{status:?}");
    let info = status.get_details_error_info().expect("every refusal has a reason");
    assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, "tarn"));
    for word in says {
        assert!(status.message().contains(word), "{:?} does not say {word:?}", status.message());
    }
}

/// Rack with scripted agents.
async fn rack() -> Rack {
    let mut rack = Rack::new(Plan::small(1));
    rack.start_manager().await;
    rack
}

fn weights(text: &str) -> Vec<wire::Weight> {
    let weight = |word: &str| {
        let (tenant, weight) = word.split_once('=').unwrap();
        wire::Weight { tenant: tenant.into(), weight: weight.parse().unwrap() }
    };
    text.split_whitespace().map(weight).collect()
}

async fn set(rack: &Rack, host: &str, text: &str) -> Result<Vec<wire::Weight>, Status> {
    let request = wire::SetWeightsRequest { host: host.into(), weights: weights(text) };
    Ok(rack.scheduler().await.set_weights(request).await?.into_inner().weights)
}

async fn get(rack: &Rack, host: &str) -> Result<wire::Shares, Status> {
    Ok(rack.admin().await.get_shares(wire::GetSharesRequest { host: host.into() }).await?.into_inner())
}

/// An agent's session after its welcome.
async fn agent(rack: &Rack, host: &str) -> Session {
    let mut session = Session::connect(rack, &token(rack, host), hello(host)).await.unwrap();
    let first = session.hears.message().await.unwrap().unwrap().message;
    assert!(matches!(first, Some(Down::Welcome(_))), "{first:?}");
    session
}

/// Returns the next weights sent to an agent.
async fn told(session: &mut Session) -> Vec<wire::Weight> {
    loop {
        if let Some(Down::Weights(told)) = session.hears.message().await.unwrap().unwrap().message {
            return told.weights;
        }
    }
}

async fn tell(session: &Session, shares: wire::Shares) {
    session.says.send(wire::FromAgent { message: Some(Up::Shares(shares)) }).await.unwrap();
}

fn shares(epoch: u64) -> wire::Shares {
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
async fn an_agent_is_told_weights_after_its_welcome_and_whenever_they_change() {
    let mut rack = rack().await;
    let mut first = agent(&rack, "h0").await;
    assert_eq!(told(&mut first).await, [], "also that none is set");
    assert_eq!(set(&rack, "h0", "web=2 db=1.5").await.unwrap(), weights("db=1.5 web=2"));
    assert_eq!(told(&mut first).await, weights("db=1.5 web=2"));
    set(&rack, "h1", "web=9").await.unwrap();
    assert_eq!(set(&rack, "h0", "db=0").await.unwrap(), weights("web=2"), "a weight of 0 takes back");
    assert_eq!(told(&mut first).await, weights("web=2"), "and not what is another host's");

    rack.kill_manager();
    rack.start_manager().await;
    let mut again = agent(&rack, "h0").await;
    assert_eq!(told(&mut again).await, weights("web=2"), "what was answered survives a crash");
    assert_eq!(told(&mut agent(&rack, "h1").await).await, weights("web=9"));
    assert_eq!(set(&rack, "h0", "").await.unwrap(), weights("web=2"));
}

#[tokio::test]
async fn a_host_that_leaves_the_rack_leaves_no_weights_to_its_namesake() {
    let rack = rack().await;
    set(&rack, "h0", "web=2").await.unwrap();
    set(&rack, "h1", "web=9").await.unwrap();
    let old = rack.rack_toml();
    for (text, there) in [(old.replace("\"h1\"", "\"h9\""), "h9"), (old, "h1")] {
        rack.write_rack_toml(&text);
        rack.signal_manager(Signal::HUP);
        rack.wait_for("the exchange", async |rack| rack.hosts().await.iter().any(|h| h.host == there)).await;
    }
    assert_eq!(set(&rack, "h0", "").await.unwrap(), weights("web=2"));
    assert_eq!(set(&rack, "h1", "").await.unwrap(), []);
}

#[tokio::test]
async fn weights_that_make_no_sense_are_refused_by_name_and_change_nothing() {
    let rack = rack().await;
    set(&rack, "h0", "web=2").await.unwrap();
    let bad = Code::InvalidArgument;
    refused(set(&rack, "h0", "web=-1").await, bad, "BAD_VALUE", &["weights.weight", "-1", "web"]);
    refused(set(&rack, "h0", "web=NaN").await, bad, "BAD_VALUE", &["weights.weight", "NaN"]);
    refused(set(&rack, "h0", "web=1e7").await, bad, "BAD_VALUE", &["10000000", "from 0.01 to 10000"]);
    refused(set(&rack, "h0", "a/b=1").await, bad, "BAD_VALUE", &["weights.tenant", "a/b"]);
    refused(set(&rack, "h0", "web=1 web=2").await, bad, "BAD_VALUE", &["weights.tenant", "web", "twice"]);
    let many: String = (0..256).map(|n| format!("t{n}=1 ")).collect();
    refused(set(&rack, "h0", &many).await, bad, "BAD_VALUE", &["weights", "257", "at most 256"]);
    refused(set(&rack, "", "web=1").await, bad, "BAD_VALUE", &["host"]);
    refused(set(&rack, "h9", "web=1").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    assert_eq!(set(&rack, "h0", "").await.unwrap(), weights("web=2"));
}

#[tokio::test]
async fn what_an_agent_told_last_of_its_shares_is_shown_until_the_manager_ends() {
    let mut rack = rack().await;
    let none = get(&rack, "h0").await;
    refused(none, Code::NotFound, "SHARES_NOT_REPORTED", &["h0", "since the manager started"]);
    refused(get(&rack, "h9").await, Code::NotFound, "HOST_NOT_FOUND", &["h9"]);
    let session = agent(&rack, "h0").await;
    tell(&session, wire::Shares { host: "h1".into(), ..shares(1) }).await;
    tell(&session, shares(2)).await;
    rack.wait_for("the second epoch", async |rack| get(rack, "h0").await.is_ok_and(|s| s.epoch == 2)).await;
    assert_eq!(get(&rack, "h0").await.unwrap(), wire::Shares { host: "h0".into(), ..shares(2) });
    refused(get(&rack, "h1").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h1"]);
    drop(session);
    assert_eq!(get(&rack, "h0").await.unwrap().epoch, 2, "it is the last that was heard");
    rack.kill_manager();
    rack.start_manager().await;
    refused(get(&rack, "h0").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h0"]);
}

#[tokio::test]
async fn an_operator_weighs_tenants_and_sees_their_shares_by_the_command_line() {
    let rack = rack().await;
    let tarn = |words: &str| {
        let ran = rack.tarn(&words.split_whitespace().collect::<Vec<_>>());
        let [stdout, stderr] = [ran.stdout, ran.stderr].map(|text| String::from_utf8(text).unwrap());
        (ran.status.code(), stdout, stderr)
    };
    let set = "TENANT  WEIGHT\nweb     2\n".to_owned();
    assert_eq!(tarn("set weights h0 web=2 db=0"), (Some(0), set, String::new()));
    let (code, _, said) = tarn("set weights h0 web=-1");
    assert!(code == Some(2) && said.contains("weights.weight: -1 must be from 0.01 to 10000"), "{said}");
    let (code, _, said) = tarn("get shares h0");
    assert!(code == Some(3) && said.contains("SHARES_NOT_REPORTED"), "{said}");
    let session = agent(&rack, "h0").await;
    tell(&session, shares(1)).await;
    rack.wait_for("the epoch", async |rack| get(rack, "h0").await.is_ok()).await;
    let (_, listed, _) = tarn("get shares h0");
    assert!(listed.contains("web     2       swap      2GiB/1GiB    250MB/s  25.0 %   10.0 %\n"), "{listed}");
    let (_, explained, _) = tarn("explain shares h0");
    assert!(explained.contains("  epoch 1 of host h0: shares updated\n"), "{explained}");
    let (_, explained, _) = tarn("explain host h0");
    assert!(explained.contains("weigh host h0 (by scheduler)\n  set now: web=2\n"), "{explained}");
}

#[tokio::test]
async fn an_agent_that_tells_nonsense_of_its_shares_is_cut_off_and_not_believed() {
    let rack = rack().await;
    let mut session = agent(&rack, "h0").await;
    let mut nonsense = shares(1);
    nonsense.tenants[0].gain = f64::NAN;
    tell(&session, nonsense).await;
    let status = loop {
        match session.hears.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the session ended without a reason"),
            Err(status) => break status,
        }
    };
    let says = ["shares.tenants.gain", "NaN", "web"];
    refused::<()>(Err(status), Code::InvalidArgument, "BAD_VALUE", &says);
    refused(get(&rack, "h0").await, Code::NotFound, "SHARES_NOT_REPORTED", &["h0"]);
}
