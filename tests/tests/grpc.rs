//! Tests of the gRPC API for schedulers and operators with a real manager and real agents:
//! guarantees of requests, and errors of invalid requests.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use proto::v1 as wire;
use tests::rack::{Plan, Rack, reservation_ref, reserve_request, vm_ref};
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

#[tokio::test]
async fn vm_gets_slices_of_one_emc_and_releases_them() {
    let rack = Rack::start(Plan::small(8)).await;
    let mut scheduler = rack.scheduler().await;
    let request = wire::ReserveRequest {
        wait_ready: true,
        cores: 4,
        local_bytes: 8 << 30,
        ..reserve_request("h0", "v", 5, "r1")
    };
    let ready = scheduler.reserve(request.clone()).await.unwrap().into_inner();
    assert_eq!(
        (ready.state(), ready.slices.len(), ready.slices_online),
        (wire::ReservationState::Ready, 5, 5)
    );
    let slices = rack.slices().await;
    let of_vm: Vec<_> = slices.iter().filter(|s| ready.slices.contains(&s.slice)).collect();
    assert!(of_vm.iter().all(|s| s.emc == of_vm[0].emc), "all slices must be on one EMC: {of_vm:?}");
    assert!(
        of_vm.iter().all(|s| s.host.as_deref() == Some("h0") && s.vm.as_deref() == Some("v") && s.epoch == 1)
    );

    let host = &rack.hosts().await[0];
    assert_eq!((host.free_cores, host.free_local_bytes), (60, (256 - 8) << 30));

    let commit = wire::CommitRequest { target: vm_ref("v") };
    assert_eq!(
        scheduler.commit(commit.clone()).await.unwrap().into_inner().state(),
        wire::ReservationState::Committed
    );
    assert_eq!(
        scheduler.commit(commit).await.unwrap().into_inner().state(),
        wire::ReservationState::Committed
    );

    for target in [vm_ref("v"), vm_ref("v"), reservation_ref(&ready.reservation)] {
        let release = wire::ReleaseRequest { target, ..Default::default() };
        let released = scheduler.release(release).await.unwrap().into_inner();
        assert_eq!(released.state(), wire::ReservationState::Released, "release must be idempotent");
    }
    rack.wait_all_slices_free().await;
    for slice in rack.slices().await.iter().filter(|s| ready.slices.contains(&s.slice)) {
        let receipt = slice.receipt.as_ref().expect("a slice that had an owner has a receipt");
        assert_eq!((receipt.epoch, receipt.bytes_verified), (slice.epoch, 1 << 30));
    }
}

#[tokio::test]
async fn repeated_request_returns_same_reply_after_restart() {
    let mut rack = Rack::start(Plan::small(4)).await;
    let reply =
        rack.scheduler().await.reserve(reserve_request("h0", "v", 2, "same")).await.unwrap().into_inner();
    for restart in [false, true] {
        if restart {
            rack.kill_manager();
            rack.start_manager().await;
        }
        let repeated =
            rack.scheduler().await.reserve(reserve_request("h0", "v", 2, "same")).await.unwrap().into_inner();
        assert_eq!((&repeated.reservation, &repeated.slices), (&reply.reservation, &reply.slices));
        let changed = rack.scheduler().await.reserve(reserve_request("h0", "v", 3, "same")).await;
        assert_rejected(changed, Code::AlreadyExists, "REQUEST_ID_REUSED", &["same", "pool_bytes"]);
    }
    assert_eq!(rack.reservations().await.len(), 1);
}

#[tokio::test]
async fn invalid_requests_are_rejected_without_side_effects() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut scheduler = rack.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "taken", 1, "r0") })
        .await
        .unwrap();
    rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref("taken") }).await.unwrap();
    let before = (rack.slices().await, rack.reservations().await);

    let mut reserve_with = async |change: &dyn Fn(&mut wire::ReserveRequest)| {
        let mut request = reserve_request("h0", "v", 1, "r1");
        change(&mut request);
        scheduler.reserve(request).await
    };
    let invalid = Code::InvalidArgument;
    assert_rejected(reserve_with(&|r| r.pool_bytes = 0).await, invalid, "BAD_VALUE", &["pool_bytes", "0"]);
    assert_rejected(
        reserve_with(&|r| r.pool_bytes = (1 << 30) + 1).await,
        invalid,
        "BAD_VALUE",
        &["pool_bytes", "1073741825", "multiple of"],
    );
    assert_rejected(reserve_with(&|r| r.pool_bytes = u64::MAX).await, invalid, "BAD_VALUE", &["pool_bytes"]);
    assert_rejected(
        reserve_with(&|r| r.pool_bytes = 1 << 50).await,
        invalid,
        "BAD_VALUE",
        &["pool_bytes", "at most"],
    );
    assert_rejected(
        reserve_with(&|r| r.local_bytes = 7).await,
        invalid,
        "BAD_VALUE",
        &["local_bytes", "7", "whole MiB"],
    );
    assert_rejected(reserve_with(&|r| r.vm = "a/b".into()).await, invalid, "BAD_VALUE", &["vm", "a/b"]);
    assert_rejected(
        reserve_with(&|r| r.request_id = String::new()).await,
        invalid,
        "BAD_VALUE",
        &["request_id"],
    );
    assert_rejected(
        reserve_with(&|r| r.host = "nobody".into()).await,
        Code::NotFound,
        "HOST_NOT_FOUND",
        &["nobody"],
    );
    assert_rejected(
        reserve_with(&|r| r.vm = "taken".into()).await,
        Code::AlreadyExists,
        "VM_ALREADY_RESERVED",
        &["taken", "h0"],
    );
    assert_rejected(
        reserve_with(&|r| r.pool_bytes = 8 << 30).await,
        Code::ResourceExhausted,
        "OUT_OF_SLICES",
        &["7", "8"],
    );
    assert_rejected(
        reserve_with(&|r| r.cores = 65).await,
        Code::ResourceExhausted,
        "OUT_OF_CORES",
        &["64", "65"],
    );
    assert_rejected(
        reserve_with(&|r| r.local_bytes = 257 << 30).await,
        Code::ResourceExhausted,
        "OUT_OF_LOCAL_MEMORY",
        &["257GiB"],
    );

    let target = vm_ref("nobody");
    let commit = rack.scheduler().await.commit(wire::CommitRequest { target: target.clone() }).await;
    assert_rejected(commit, Code::NotFound, "VM_NOT_FOUND", &["nobody"]);
    let release = wire::ReleaseRequest { target: vm_ref("taken"), force: true, reason: String::new() };
    assert_rejected(
        rack.scheduler().await.release(release).await,
        invalid,
        "BAD_VALUE",
        &["reason", "force"],
    );
    let without_target = wire::ReleaseRequest::default();
    assert_rejected(rack.scheduler().await.release(without_target).await, invalid, "BAD_VALUE", &["target"]);
    let fence = wire::FenceRequest { host: "h0".into(), ..Default::default() };
    assert_rejected(
        rack.admin().await.fence(fence).await,
        Code::FailedPrecondition,
        "HOST_CONNECTED",
        &["h0"],
    );
    let slice = wire::Target { slice: Some(0), ..Default::default() };
    let uncordon = wire::TargetRequest { target: Some(slice), reason: String::new() };
    assert_rejected(
        rack.admin().await.uncordon(uncordon).await,
        Code::FailedPrecondition,
        "SLICE_WRONG_STATE",
        &["slice 0"],
    );
    let get = rack.admin().await.get_slice(wire::GetSliceRequest { slice: 99 }).await;
    assert_rejected(get, Code::NotFound, "SLICE_NOT_FOUND", &["99"]);

    assert_eq!((rack.slices().await, rack.reservations().await), before, "a rejected request changed state");
}

#[tokio::test]
async fn validate_only_request_changes_nothing() {
    let rack = Rack::start(Plan::small(4)).await;
    let request = wire::ReserveRequest { validate_only: true, ..reserve_request("h0", "v", 2, "r1") };
    let preview = rack.scheduler().await.reserve(request).await.unwrap().into_inner();
    assert_eq!(preview.slices.len(), 2);
    assert!(rack.reservations().await.is_empty());
    assert!(rack.slices().await.iter().all(|s| s.state() == wire::SliceState::Free));
}

#[tokio::test]
async fn oversized_message_is_out_of_range() {
    let rack = Rack::start(Plan::small(1)).await;
    let request = reserve_request("h0", &"v".repeat(5 << 20), 1, "r1");
    let status = rack.scheduler().await.reserve(request).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
}

#[tokio::test]
async fn uncommitted_reservation_expires() {
    let rack = Rack::start(Plan::small(4)).await;
    let request = wire::ReserveRequest { commit_within_ms: 300, ..reserve_request("h0", "v", 2, "r1") };
    let reply = rack.scheduler().await.reserve(request).await.unwrap().into_inner();
    rack.wait_all_slices_free().await;
    let get = wire::GetReservationRequest { target: reservation_ref(&reply.reservation) };
    let ended = rack.admin().await.get_reservation(get).await.unwrap().into_inner();
    assert_eq!(ended.state(), wire::ReservationState::Released);
    assert!(ended.reason().contains("deadline"), "{ended:?}");
    let commit = rack
        .scheduler()
        .await
        .commit(wire::CommitRequest { target: reservation_ref(&reply.reservation) })
        .await;
    assert_rejected(
        commit,
        Code::FailedPrecondition,
        "RESERVATION_WRONG_STATE",
        &[&reply.reservation, "ended"],
    );
}

#[tokio::test]
async fn cordoned_host_rejects_vms_and_drain_requests_migrations() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut scheduler = rack.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "v", 1, "r1") })
        .await
        .unwrap();
    let host = || wire::TargetRequest {
        target: Some(wire::Target { host: "h0".into(), ..Default::default() }),
        reason: "maintenance".into(),
    };
    rack.admin().await.cordon(host()).await.unwrap();
    let result = scheduler.reserve(reserve_request("h0", "w", 1, "r2")).await;
    assert_rejected(result, Code::FailedPrecondition, "HOST_NOT_SCHEDULABLE", &["h0", "cordoned"]);

    let drained = rack.admin().await.drain(host()).await.unwrap().into_inner();
    assert_eq!(drained.waiting_for, ["v"]);
    let mut migrations =
        scheduler.watch_migrations(wire::WatchMigrationsRequest {}).await.unwrap().into_inner();
    let migration = migrations.message().await.unwrap().unwrap();
    assert_eq!(
        (migration.vm.as_str(), migration.host.as_str(), migration.state()),
        ("v", "h0", wire::MigrationState::Open)
    );
    let resolve = wire::ResolveMigrationRequest {
        vm: "v".into(),
        state: wire::MigrationState::Accepted.into(),
        answer: "soon".into(),
        id: String::new(),
    };
    let resolved = scheduler.resolve_migration(resolve).await.unwrap().into_inner();
    assert_eq!(resolved.state(), wire::MigrationState::Accepted);
    let listed = rack.admin().await.list_migrations(wire::ListMigrationsRequest::default()).await.unwrap();
    assert_eq!(listed.into_inner().migrations, [resolved]);

    scheduler.release(wire::ReleaseRequest { target: vm_ref("v"), ..Default::default() }).await.unwrap();
    let mut update = migrations.message().await.unwrap().unwrap();
    while update.state() == wire::MigrationState::Accepted {
        update = migrations.message().await.unwrap().unwrap();
    }
    assert_eq!((update.vm.as_str(), update.state()), ("v", wire::MigrationState::Withdrawn));
    rack.wait_for("the host to be drained", async |rack| {
        rack.hosts().await[0].scheduling() == wire::Scheduling::Drained
    })
    .await;
    rack.admin().await.uncordon(host()).await.unwrap();
    scheduler.reserve(reserve_request("h0", "w", 1, "r3")).await.unwrap();
}

#[tokio::test]
async fn capacity_watch_sends_current_state_and_changes() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut scheduler = rack.scheduler().await;
    let mut capacity = scheduler.watch_capacity(wire::WatchCapacityRequest {}).await.unwrap().into_inner();
    let free = |c: &wire::Capacity| c.emcs.iter().map(|e| e.free_slices).sum::<u32>();
    let now = capacity.message().await.unwrap().unwrap();
    assert_eq!((free(&now), now.hosts.len()), (8, 2));
    scheduler
        .reserve(wire::ReserveRequest { cores: 3, ..reserve_request("h1", "v", 3, "r1") })
        .await
        .unwrap();
    let mut next = capacity.message().await.unwrap().unwrap();
    while free(&next) != 5 {
        next = capacity.message().await.unwrap().unwrap();
    }
    assert!(next.revision > now.revision);
    assert_eq!(next.hosts.iter().find(|h| h.host == "h1").unwrap().free_cores, 61);
}

#[tokio::test]
async fn decisions_about_a_vm_are_explained() {
    let rack = Rack::start(Plan::small(4)).await;
    let mut scheduler = rack.scheduler().await;
    let plan = wire::PlanVmRequest { vm: "v".into(), cores: 4, memory_bytes: 16 << 30, ..Default::default() };
    let planned = scheduler.plan_vm(plan).await.unwrap().into_inner();
    assert_eq!(
        (planned.local_bytes, planned.pool_bytes),
        (12 << 30, 4 << 30),
        "a quarter must go to the pool by default"
    );
    assert!(planned.hosts.iter().all(|host| host.fits), "{:?}", planned.hosts);
    scheduler.reserve(reserve_request("h0", "v", 4, "r1")).await.unwrap();
    scheduler.release(wire::ReleaseRequest { target: vm_ref("v"), ..Default::default() }).await.unwrap();
    let explained =
        rack.admin().await.explain(wire::ExplainRequest { subject: "vm v".into() }).await.unwrap();
    let decisions = explained.into_inner().decisions;
    let actions: Vec<&str> = decisions.iter().map(|d| d.action.as_str()).collect();
    assert_eq!(actions, ["plan", "reserve", "end"]);
    assert_eq!(decisions[0].model, "fixed-share/1");
    let reason = &decisions[0].facts["because"];
    assert_eq!(reason, "no model of frigid memory is in use: fixed share of 25.0 %");
    assert!(decisions[1].alternatives.iter().any(|a| a.starts_with("emc emc")), "{:?}", decisions[1]);
}
