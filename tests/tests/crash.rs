//! Crash test with real processes. The manager and agents are killed with SIGKILL at random times
//! while clients reserve and release memory. No acknowledged request may be lost, and no slice may
//! have two owners. Power failures are tested elsewhere, on a simulated disk.
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
use tests::{
    environment::seed,
    rack::{Plan, Rack, reservation_ref, reserve_request},
};
use tonic::{Code, transport::Endpoint};

/// Number of times that a process is killed.
const MANAGER_KILL_COUNT: usize = 20;
/// Number of concurrent clients of the scheduler API.
const CONCURRENT_CLIENT_COUNT: u64 = 4;

/// Acknowledged reservations by id: slices, and state of the release. The state is `None` before
/// the release, `Some(false)` until the release is acknowledged, and `Some(true)` afterwards.
type Acknowledged = Arc<Mutex<BTreeMap<String, (Vec<u32>, Option<bool>)>>>;

/// Reserves and releases memory until `stop` is set. Repeats requests without a reply with the same
/// request id.
async fn run_client(endpoint: String, number: u64, acknowledged: Acknowledged, stop: Arc<AtomicBool>) {
    let channel = Endpoint::from_shared(endpoint).unwrap().connect_lazy();
    let mut scheduler = wire::scheduler_client::SchedulerClient::new(channel);
    let mut random = Pcg64::seed_from_u64(number);
    for round in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let host = format!("h{}", random.random_range(0..2));
        let request = reserve_request(
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
                Err(_) if stop.load(Ordering::Relaxed) => return, // the request was not acknowledged
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

/// Compares the acknowledged reservations with the active reservations of the manager.
async fn assert_acknowledged_requests_are_kept(rack: &Rack, acknowledged: &Acknowledged) {
    let expected = acknowledged.lock().unwrap().clone();
    let active: BTreeMap<String, Vec<u32>> =
        rack.reservations().await.into_iter().map(|r| (r.reservation, r.slices)).collect();
    for (reservation, (slices, released)) in expected {
        match released {
            None => assert_eq!(
                active.get(&reservation),
                Some(&slices),
                "{reservation} was acknowledged but is lost"
            ),
            Some(true) => {
                assert!(!active.contains_key(&reservation), "{reservation} was released but is active again")
            }
            Some(false) => {} // the release was not acknowledged: both outcomes are valid
        }
    }
    let mut owners = BTreeMap::new();
    for (reservation, slices) in &active {
        for slice in slices {
            let other = owners.insert(*slice, reservation);
            assert_eq!(other, None, "slice {slice} belongs to {reservation} and to another reservation");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_requests_survive_random_kills() {
    let mut random = Pcg64::seed_from_u64(seed());
    let mut rack = Rack::start(Plan::small(32)).await;
    let (acknowledged, stop) = (Acknowledged::default(), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..CONCURRENT_CLIENT_COUNT)
        .map(|n| tokio::spawn(run_client(rack.endpoint(), n, Arc::clone(&acknowledged), Arc::clone(&stop))))
        .collect();
    for _ in 0..MANAGER_KILL_COUNT {
        tokio::time::sleep(Duration::from_millis(random.random_range(20..300))).await;
        if random.random_bool(0.6) {
            rack.kill_manager();
            rack.start_manager().await;
            assert_acknowledged_requests_are_kept(&rack, &acknowledged).await;
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
    assert_acknowledged_requests_are_kept(&rack, &acknowledged).await;
    let count = acknowledged.lock().unwrap().len();
    println!("{count} acknowledged reservations survived {MANAGER_KILL_COUNT} kills");
    assert!(count > 20, "too few acknowledged reservations");

    for reservation in rack.reservations().await {
        let release =
            wire::ReleaseRequest { target: reservation_ref(&reservation.reservation), ..Default::default() };
        rack.scheduler().await.release(release).await.unwrap();
    }
    rack.wait_all_slices_free().await; // no slice is stuck in an interrupted operation
}
