//! Real processes, killed with SIGKILL at random moments while clients reserve and release: no
//! acknowledged request is lost, and no slice has two owners. Power failures are tested on a
//! simulated disk.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use proto::v1 as wire;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use tests::rack::{Plan, Rack, reservation_ref, reserve};
use tonic::{Code, transport::Endpoint};

/// Number of kills.
const KILLS: usize = 20;
/// Number of concurrent clients.
const CLIENTS: u64 = 4;

/// Acknowledged facts by reservation: its slices, and whether its release was acknowledged.
type Acknowledged = Arc<Mutex<BTreeMap<String, (Vec<u32>, Option<bool>)>>>;

/// Reserves and releases until stopped, and repeats unanswered requests with the same request id.
async fn client(endpoint: String, number: u64, acknowledged: Acknowledged, stop: Arc<AtomicBool>) {
    let channel = Endpoint::from_shared(endpoint).unwrap().connect_lazy();
    let mut scheduler = wire::scheduler_client::SchedulerClient::new(channel);
    let mut random = Pcg64::seed_from_u64(number);
    for round in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let host = format!("h{}", random.random_range(0..2));
        let request = reserve(
            &host,
            &format!("v{number}-{round}"),
            random.random_range(1..4),
            &format!("{number}-{round}"),
        );
        let reply = loop {
            match scheduler.reserve(request.clone()).await {
                Ok(reply) => break Some(reply.into_inner()),
                Err(status)
                    if matches!(status.code(), Code::ResourceExhausted | Code::FailedPrecondition) =>
                {
                    break None;
                }
                Err(_) if stop.load(Ordering::Relaxed) => return, // never acknowledged
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        let Some(reply) = reply else { continue };
        acknowledged.lock().unwrap().insert(reply.reservation.clone(), (reply.slices.clone(), None));
        if random.random_bool(0.3) {
            continue;
        }
        let release =
            wire::ReleaseRequest { target: reservation_ref(&reply.reservation), ..Default::default() };
        acknowledged.lock().unwrap().get_mut(&reply.reservation).unwrap().1 = Some(false);
        while scheduler.release(release.clone()).await.is_err() {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        acknowledged.lock().unwrap().get_mut(&reply.reservation).unwrap().1 = Some(true);
    }
}

/// Compares acknowledged facts with the ledger.
async fn assert_nothing_acknowledged_is_lost(rack: &Rack, acknowledged: &Acknowledged) {
    let expected = acknowledged.lock().unwrap().clone();
    let active: BTreeMap<String, Vec<u32>> =
        rack.reservations().await.into_iter().map(|r| (r.reservation, r.slices)).collect();
    for (reservation, (slices, released)) in expected {
        match released {
            None => assert_eq!(
                active.get(&reservation),
                Some(&slices),
                "{reservation} was acknowledged and is lost"
            ),
            Some(true) => {
                assert!(!active.contains_key(&reservation), "{reservation} was released and is back")
            }
            Some(false) => {} // not acknowledged: both are valid
        }
    }
    let mut owners = BTreeMap::new();
    for (reservation, slices) in &active {
        for slice in slices {
            let other = owners.insert(*slice, reservation);
            assert_eq!(other, None, "slice {slice} belongs to {reservation} and another");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_requests_survive_random_kills() {
    let seed = std::env::var("TARN_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(random_seed);
    println!("seed {seed} (TARN_SEED={seed} repeats the choices)");
    let mut random = Pcg64::seed_from_u64(seed);
    let mut rack = Rack::start(Plan::small(32)).await;
    let (acknowledged, stop) = (Acknowledged::default(), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|n| tokio::spawn(client(rack.endpoint(), n, Arc::clone(&acknowledged), Arc::clone(&stop))))
        .collect();
    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(random.random_range(20..300))).await;
        if random.random_bool(0.6) {
            rack.kill_manager();
            rack.start_manager().await;
            assert_nothing_acknowledged_is_lost(&rack, &acknowledged).await;
        } else {
            let host = random.random_range(0..2);
            rack.kill_agent(host);
            rack.start_agent(host);
        }
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    assert_nothing_acknowledged_is_lost(&rack, &acknowledged).await;
    let count = acknowledged.lock().unwrap().len();
    println!("{count} acknowledged reservations survived {KILLS} kills");
    assert!(count > 20, "too few acknowledged reservations");

    for reservation in rack.reservations().await {
        let release =
            wire::ReleaseRequest { target: reservation_ref(&reservation.reservation), ..Default::default() };
        rack.scheduler().await.release(release).await.unwrap();
    }
    rack.wait_all_free().await; // interrupted operations were completed
}

fn random_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::from(now.subsec_nanos())
}
