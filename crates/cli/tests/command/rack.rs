//! Fake manager of a rack with two hosts and two EMCs. It records all requests, and returns fixed
//! responses or errors.

use std::{
    fmt::Debug,
    net::SocketAddr,
    pin::Pin,
    process::Stdio,
    sync::{Arc, Mutex},
};

use proto::v1::{
    self,
    admin_server::{Admin, AdminServer},
    scheduler_server::{Scheduler, SchedulerServer},
};
use tokio::{net::TcpListener, process::Command};
use tokio_stream::{StreamExt as _, wrappers::TcpListenerStream};
use tonic::{Code, Request, Response, Status, transport::Server};
use tonic_types::{ErrorDetails, StatusExt as _};

type RpcResult<T> = Result<Response<T>, Status>;
type Stream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

/// Number of slices per page. It is small, so that the list of slices has several pages.
const SLICES_PER_PAGE: u32 = 3;

/// Behaviour of the fake manager.
#[derive(Clone, Debug, Default)]
pub enum RackBehavior {
    #[default]
    Normal,
    /// Rejects every request with this status, reason and message.
    Rejecting(Code, &'static str, &'static str),
    /// Never responds to requests.
    Unresponsive,
    /// Reports problems of the rack: an alarm, a host in state unknown and a quarantined slice.
    Degraded,
    /// Keeps watches open after the last event.
    OpenWatch,
    /// Returns lists whose pages never end.
    EndlessLists,
}

#[derive(Clone, Debug, Default)]
pub struct Rack {
    behavior: RackBehavior,
    requests: Arc<Mutex<Vec<String>>>,
    tokens: Arc<Mutex<Vec<String>>>,
}

/// Output and exit code of a command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Rack {
    pub fn new(behavior: RackBehavior) -> Self {
        Self { behavior, ..Self::default() }
    }

    /// Returns all requests in `Debug` format.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    /// Returns the `authorization` headers of all requests.
    pub fn tokens(&self) -> Vec<String> {
        self.tokens.lock().unwrap().clone()
    }

    /// Returns the services, to be served over any transport.
    pub fn services(&self) -> (SchedulerServer<Self>, AdminServer<Self>) {
        (SchedulerServer::new(self.clone()), AdminServer::new(self.clone()))
    }

    /// Serves on a loopback address until the runtime of the test ends, and returns the address.
    pub async fn listen(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (scheduler, admin) = self.services();
        let serving = Server::builder().add_service(scheduler).add_service(admin);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    /// Runs `tarn` against this rack. The arguments are separated by spaces.
    pub async fn tarn(&self, arguments: &str) -> CommandOutput {
        let address = self.listen().await;
        tarn(&format!("--endpoint http://{address} {arguments}")).await
    }

    async fn record_request<T: Debug>(&self, call: &str, request: Request<T>) -> Result<T, Status> {
        let token = request.metadata().get("authorization").map(|token| token.to_str().unwrap().to_owned());
        self.tokens.lock().unwrap().extend(token);
        let request = request.into_inner();
        self.requests.lock().unwrap().push(format!("{call} {request:?}"));
        match &self.behavior {
            RackBehavior::Normal
            | RackBehavior::Degraded
            | RackBehavior::OpenWatch
            | RackBehavior::EndlessLists => Ok(request),
            RackBehavior::Rejecting(code, reason, message) => Err(rejected_status(*code, reason, message)),
            RackBehavior::Unresponsive => std::future::pending().await,
        }
    }
}

/// Returns a command that runs `tarn` with an empty environment. The arguments are separated by
/// spaces.
pub fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tarn"));
    command.args(arguments.split_whitespace()).env_clear().stdin(Stdio::null());
    command
}

/// Runs `tarn` and returns its output. The arguments are separated by spaces.
pub async fn tarn(arguments: &str) -> CommandOutput {
    let output = command(arguments).output().await.unwrap();
    CommandOutput {
        code: output.status.code().expect("not killed"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn rejected_status(code: Code, reason: &str, message: &str) -> Status {
    let details = ErrorDetails::with_error_info(reason, "tarn", []);
    Status::with_error_details(code, message, details)
}

fn not_found_status(reason: &str, message: String) -> Status {
    rejected_status(Code::NotFound, reason, &message)
}

fn stream_response<T: Send + 'static>(items: Vec<T>) -> RpcResult<Stream<T>> {
    Ok(Response::new(Box::pin(tokio_stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>()))))
}

pub fn slice(slice: u32) -> v1::Slice {
    let state = [
        v1::SliceState::Online,
        v1::SliceState::Online,
        v1::SliceState::Free,
        v1::SliceState::Draining,
        v1::SliceState::Free,
        v1::SliceState::Scrubbing,
        v1::SliceState::Free,
        v1::SliceState::Quarantined,
    ][slice as usize];
    let receipt = v1::ScrubReceipt {
        scrubber: "h2".into(),
        epoch: 4,
        started_unix_ms: 1_700_000_000_000,
        ended_unix_ms: 1_700_000_001_000,
        bytes_verified: 1 << 30,
    };
    v1::Slice {
        slice,
        emc: if slice < 4 { "e0" } else { "e1" }.into(),
        state: state.into(),
        host: (state != v1::SliceState::Free).then(|| "h1".into()),
        vm: (slice < 2).then(|| "web".into()),
        epoch: u64::from(slice) + 1,
        reason: (slice == 7).then(|| "not zero after a scrub".into()),
        receipt: (slice == 6).then_some(receipt),
    }
}

fn monitoring() -> v1::Monitoring {
    v1::Monitoring {
        verdict: v1::MonitoringVerdict::Watch.into(),
        reason: "some samples indicate a slowdown".into(),
        loss: None,
        accessed_share: Some(0.355),
        accessed_share_low: Some(0.29),
        accessed_share_high: Some(0.42),
        access_source: "vmm".into(),
        access_problem: String::new(),
        counter_source: "none".into(),
        sampled_unix_ms: 1_700_000_000_000,
        counter_problem: "the host has no performance counters".into(),
        samples: 2,
        steal_share: Some(0.125),
        ..Default::default()
    }
}

pub fn reservation() -> v1::Reservation {
    v1::Reservation {
        reservation: "r-1".into(),
        vm: "web".into(),
        host: "h1".into(),
        state: v1::ReservationState::Ready.into(),
        slices: vec![0, 1],
        local_bytes: 512 << 20,
        pool_bytes: 2 << 30,
        cores: 2,
        pinned: false,
        commit_deadline_unix_ms: Some(1_700_000_300_000),
        created_unix_ms: 1_700_000_000_000,
        request_id: "q1".into(),
        slices_online: 2,
        reason: None,
        uid: Some(2001),
        process_running: false,
        monitoring: Some(monitoring()),
        rehome: None,
    }
}

fn host(name: &str, state: v1::HostState) -> v1::Host {
    v1::Host {
        host: name.into(),
        state: state.into(),
        scheduling: v1::Scheduling::Enabled.into(),
        emcs: vec!["e0".into(), "e1".into()],
        cores: 32,
        free_cores: 30,
        local_bytes: 64 << 30,
        free_local_bytes: 63 << 30,
        slices: 2,
        reservations: 1,
        last_heartbeat_unix_ms: Some(1_700_000_000_000),
        ..Default::default()
    }
}

fn emc(name: &str, first_slice: u32, quarantined: u32) -> v1::Emc {
    v1::Emc {
        emc: name.into(),
        state: v1::EmcState::Up.into(),
        scheduling: v1::Scheduling::Enabled.into(),
        driver: "emulated".into(),
        path: format!("/pool/{name}"),
        first_slice,
        slices: 4,
        free: 1,
        in_use: 2,
        draining: 1,
        quarantined,
        ..Default::default()
    }
}

fn decision() -> v1::Decision {
    v1::Decision {
        seq: 7,
        at_unix_ms: 1_700_000_000_000,
        actor: "nova".into(),
        action: "reserve".into(),
        subject: "vm web".into(),
        reason: "e0 alone has enough free slices".into(),
        model: "fewest-emcs 1".into(),
        facts: [("free_on_e0".to_owned(), "4".to_owned())].into(),
        alternatives: vec!["e1: 2 free slices".into()],
    }
}

fn capacity() -> v1::Capacity {
    let emc = |name: &str| v1::EmcCapacity { emc: name.into(), free_slices: 1, slices: 4 };
    let host = v1::HostCapacity {
        host: "h1".into(),
        schedulable: true,
        free_cores: 30,
        free_local_bytes: 63 << 30,
        emcs: vec![emc("e0"), emc("e1")],
    };
    v1::Capacity { revision: 9, hosts: vec![host], emcs: vec![emc("e0"), emc("e1")] }
}

fn migration(state: i32) -> v1::Migration {
    v1::Migration {
        vm: "web".into(),
        host: "h1".into(),
        state,
        reason: "h1 is draining".into(),
        requested_unix_ms: 1_700_000_000_000,
        answer: String::new(),
        reservation: "r-1".into(),
        id: "m-3".into(),
        kind: v1::MigrationKind::Drain.into(),
        slowdown: None,
    }
}

/// Returns the result of a step of fair tiering with two tenants.
fn tenants() -> v1::Tenants {
    let mib = |n: u64| n << 20;
    let tier = |capacity: u64, free: u64| v1::TierMemory {
        capacity_bytes: mib(capacity),
        free_bytes: mib(free),
        usable_bytes: mib(capacity * 98 / 100),
        protection_bytes: mib(300),
        scaled_protection_bytes: mib(240),
        shortfall_bytes: 0,
        full: free < 5,
    };
    let web = v1::TieredTenant {
        tenant: "web".into(),
        local_bytes: mib(120),
        slow_bytes: mib(40),
        protection_bytes: mib(100),
        scaled_protection_bytes: mib(80),
        bound_bytes: Some(mib(130)),
        demotion_bytes: mib(5),
        demotion_reason: "free memory is low, and usage is above the protection".into(),
        promotion_bytes_per_s: Some(mib(12)),
        promotion_candidates: "hot pages".into(),
        throttle_reason: "above the protection while local memory is full".into(),
        promotion_factor: 0.1975,
        thrash_level: 2,
        thrash_state: "thrashing".into(),
        demoted_bytes: mib(700),
        promoted_bytes: mib(600),
        attempted_bytes: mib(650),
        refaulted_bytes: mib(1),
        sampled_promotions: 40,
        thrashed_pages: 30,
        problem: "the kernel demoted 0B of 5MiB".into(),
    };
    let db = v1::TieredTenant {
        tenant: "db".into(),
        local_bytes: mib(40),
        protection_bytes: mib(80),
        scaled_protection_bytes: mib(80),
        promotion_candidates: "accessed pages".into(),
        promotion_factor: 1.0,
        thrash_state: "not thrashing".into(),
        ..Default::default()
    };
    v1::Tenants {
        host: "h1".into(),
        at_unix_ms: 1_700_000_000_000,
        reason: String::new(),
        problems: vec!["no pages are promoted: another program uses DAMON".into()],
        local: Some(tier(245, 3)),
        slow: Some(tier(1024, 900)),
        tenants: vec![web, db],
    }
}

/// Returns the result of a cycle of early eviction with a tenant per state of the threshold. The threshold
/// of the tenant `fixed` cannot change.
fn evictions() -> v1::Evictions {
    let mib = |n: u64| n << 20;
    let tenant = |tenant: &str, change: v1::ThresholdChange| v1::EvictedTenant {
        tenant: tenant.into(),
        usage_bytes: mib(150),
        limit_bytes: mib(200),
        threshold_bytes: mib(192),
        lower_threshold_bytes: mib(100),
        upper_threshold_bytes: mib(192),
        growth_bytes_per_s: mib(3),
        eviction_bytes_per_s: mib(84),
        threshold_change: change.into(),
        class: 4,
        ..Default::default()
    };
    let web = v1::EvictedTenant {
        usage_bytes: mib(199),
        threshold_bytes: mib(161),
        growth_bytes_per_s: mib(100),
        class: 1,
        evicted_bytes: mib(420),
        blocked_ms: 1560,
        fetching_ms: 70,
        problem: "the kernel evicts less memory than requested".into(),
        ..tenant("web", v1::ThresholdChange::Lowered)
    };
    let fixed = v1::EvictedTenant {
        lower_threshold_bytes: mib(192),
        ..tenant("fixed", v1::ThresholdChange::Lowered)
    };
    let newer = v1::EvictedTenant { threshold_change: 99, ..tenant("newer", v1::ThresholdChange::Reset) };
    v1::Evictions {
        host: "h1".into(),
        at_unix_ms: 1_700_000_001_000,
        reason: String::new(),
        tenants: vec![
            web,
            tenant("back", v1::ThresholdChange::PulledBack),
            tenant("calm", v1::ThresholdChange::Unchanged),
            tenant("costly", v1::ThresholdChange::Costly),
            fixed,
            newer,
            tenant("reset", v1::ThresholdChange::Reset),
            tenant("stalled", v1::ThresholdChange::Stalled),
        ],
    }
}

/// Returns the state of soft memory with two clients. The second one is silent, and its program is unknown.
fn soft_memory() -> v1::SoftMemory {
    let mib = |n: u64| n << 20;
    let cache = v1::SoftMemoryClient {
        pid: 812,
        uid: 2001,
        program: "kv-cache".into(),
        budget_bytes: mib(2048),
        used_bytes: mib(2000),
        footprint_bytes: mib(2600),
        weight_bytes: mib(1061),
        granted_bytes: mib(3000),
        reclaimed_bytes: mib(952),
        denied_requests: 3,
        ..Default::default()
    };
    let silent = v1::SoftMemoryClient {
        pid: 1034,
        budget_bytes: mib(512),
        used_bytes: 4096,
        footprint_bytes: mib(100),
        weight_bytes: mib(100),
        granted_bytes: mib(512),
        unanswered_demands: 2,
        silent: true,
        ..Default::default()
    };
    v1::SoftMemory {
        host: "h1".into(),
        at_unix_ms: 1_700_000_002_000,
        limit_bytes: mib(4096),
        total_bytes: mib(3072),
        free_bytes: mib(512),
        granted_bytes: mib(9000),
        reclaimed_bytes: mib(1000),
        denied_requests: 7,
        unanswered_demands: 3,
        client_count: 2,
        clients: vec![cache, silent],
    }
}

/// Returns the result of an epoch that updated the shares of two tenants.
fn shares() -> v1::Shares {
    let share = |memory_mib, bandwidth_mb_s| Some(v1::Share { memory_mib, bandwidth_mb_s });
    let web = v1::TenantShare {
        tenant: "web".into(),
        weight: 2.0,
        enforcer: "swap".into(),
        fair: share(32 << 10, 8000),
        share: share(40 << 10, 2500),
        memory_used_mib: 39 << 10,
        bandwidth_used_mb_s: 1234.5,
        stalled: 0.125,
        bandwidth_demand_mb_s: 3000.0,
        gain: 1.0731,
        access_source: "damon".into(),
        error: 0.05,
        problem: String::new(),
    };
    let db = v1::TenantShare {
        tenant: "db".into(),
        weight: 1.0,
        enforcer: "advise".into(),
        fair: share(16 << 10, 4000),
        share: share(8 << 10, 9500),
        gain: 0.99999,
        access_source: "none".into(),
        problem: "it is no cgroup".into(),
        ..Default::default()
    };
    v1::Shares {
        host: "h1".into(),
        epoch: 7,
        at_unix_ms: 1_700_000_000_000,
        supply: share(48 << 10, 12000),
        state: v1::ShareState::Set.into(),
        reason: String::new(),
        tenants: vec![web, db],
        certificate: Some(v1::ShareCertificate {
            status: "exact".into(),
            memory_price: 0.62,
            dividend: 1.05,
            rounds: 23,
            refinements: 0,
            step: 0.5,
            memory_excess: 0.0,
            bandwidth_excess: 0.012,
            budget_excess: 0.0001,
            sharing_incentive: 1.0,
            worst_off: "db".into(),
            envy: Some(0.034),
        }),
    }
}

fn target_response() -> Response<v1::TargetResponse> {
    Response::new(v1::TargetResponse { revision: 12, waiting_for: vec!["vm web".into()] })
}

#[tonic::async_trait]
impl Scheduler for Rack {
    type WatchCapacityStream = Stream<v1::Capacity>;
    type WatchMigrationsStream = Stream<v1::Migration>;

    async fn plan_vm(&self, r: Request<v1::PlanVmRequest>) -> RpcResult<v1::PlanVmResponse> {
        self.record_request("PlanVm", r).await?;
        let fit = |host: &str, fits, emc: &str, reason: &str| v1::HostFit {
            host: host.into(),
            fits,
            free_cores: 30,
            free_local_bytes: 63 << 30,
            emc: emc.into(),
            reason: reason.into(),
        };
        let hosts = vec![fit("h1", true, "e0", ""), fit("h2", false, "", "too few cores")];
        let decision = Some(decision());
        Ok(Response::new(v1::PlanVmResponse { local_bytes: 6 << 30, pool_bytes: 2 << 30, hosts, decision }))
    }

    async fn reserve(&self, r: Request<v1::ReserveRequest>) -> RpcResult<v1::Reservation> {
        self.record_request("Reserve", r).await?;
        Ok(Response::new(reservation()))
    }

    async fn wait_ready(&self, r: Request<v1::WaitReadyRequest>) -> RpcResult<v1::Reservation> {
        self.record_request("WaitReady", r).await?;
        Ok(Response::new(reservation()))
    }

    async fn commit(&self, r: Request<v1::CommitRequest>) -> RpcResult<v1::Reservation> {
        self.record_request("Commit", r).await?;
        Ok(Response::new(reservation()))
    }

    async fn release(&self, r: Request<v1::ReleaseRequest>) -> RpcResult<v1::Reservation> {
        let process_running = r.get_ref().force;
        self.record_request("Release", r).await?;
        let state = v1::ReservationState::Released.into();
        Ok(Response::new(v1::Reservation { state, process_running, ..reservation() }))
    }

    /// The move of VM web is in progress, and lost when it is polled. Other moves are complete at once.
    async fn rehome_vm(&self, r: Request<v1::RehomeVmRequest>) -> RpcResult<v1::Reservation> {
        let target = self.record_request("RehomeVm", r).await?.target.unwrap_or_default();
        let state = if target.vm == "web" { v1::RehomeState::Copying } else { v1::RehomeState::Done };
        let rehome = v1::Rehome { state: state.into(), attempt: 1, bytes: 2 << 30, ..Default::default() };
        Ok(Response::new(v1::Reservation { rehome: Some(rehome), ..reservation() }))
    }

    async fn watch_capacity(&self, r: Request<v1::WatchCapacityRequest>) -> RpcResult<Stream<v1::Capacity>> {
        self.record_request("WatchCapacity", r).await?;
        stream_response(vec![capacity()])
    }

    async fn watch_migrations(
        &self,
        r: Request<v1::WatchMigrationsRequest>,
    ) -> RpcResult<Stream<v1::Migration>> {
        self.record_request("WatchMigrations", r).await?;
        stream_response(vec![migration(1)])
    }

    async fn resolve_migration(&self, r: Request<v1::ResolveMigrationRequest>) -> RpcResult<v1::Migration> {
        let request = self.record_request("ResolveMigration", r).await?;
        Ok(Response::new(migration(request.state)))
    }

    async fn set_weights(&self, r: Request<v1::SetWeightsRequest>) -> RpcResult<v1::SetWeightsResponse> {
        let request = self.record_request("SetWeights", r).await?;
        check_host(&request.host)?;
        let weights = request.weights.into_iter().filter(|weight| weight.weight > 0.0).collect();
        Ok(Response::new(v1::SetWeightsResponse { weights }))
    }
}

fn check_host(host: &str) -> Result<(), Status> {
    let exists = ["h1", "h2"].contains(&host);
    exists
        .then_some(())
        .ok_or_else(|| not_found_status("HOST_NOT_FOUND", format!("host {host} is not in this rack")))
}

#[tonic::async_trait]
impl Admin for Rack {
    type WatchStream = Stream<v1::Event>;
    type BackupStream = Stream<v1::BackupChunk>;

    async fn backup(&self, r: Request<v1::BackupRequest>) -> RpcResult<Self::BackupStream> {
        self.record_request("Backup", r).await?;
        let chunk = |data: &[u8]| Ok(v1::BackupChunk { data: data.to_vec(), total_bytes: None });
        let broken = || Err(Status::internal("backup: cannot read the copy: I/O error"));
        let rest = if matches!(self.behavior, RackBehavior::Degraded) { broken() } else { chunk(b"chunk") };
        let last = v1::BackupChunk { data: Vec::new(), total_bytes: Some(11) };
        let chunks = [chunk(b"first "), rest, Ok(last)];
        let sent = if matches!(self.behavior, RackBehavior::EndlessLists) { 2 } else { 3 };
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks.into_iter().take(sent)))))
    }

    async fn get_rack(&self, r: Request<v1::GetRackRequest>) -> RpcResult<v1::Rack> {
        self.record_request("GetRack", r).await?;
        let degraded = matches!(self.behavior, RackBehavior::Degraded);
        let alarm = v1::Alarm {
            reason: "HOST_UNKNOWN".into(),
            subject: "host h2".into(),
            message: "silent past its lease".into(),
            since_unix_ms: 1_700_000_000_000,
        };
        Ok(Response::new(v1::Rack {
            rack_uuid: "u-1".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            revision: 11,
            generation: 1,
            alarms: if degraded { vec![alarm] } else { Vec::new() },
            slices: 8,
            slices_free: 3,
            buffer_target: 2,
            started_unix_ms: 1_700_000_000_000,
        }))
    }

    async fn list_hosts(&self, r: Request<v1::ListHostsRequest>) -> RpcResult<v1::ListHostsResponse> {
        self.record_request("ListHosts", r).await?;
        let degraded = matches!(self.behavior, RackBehavior::Degraded);
        let second = if degraded { v1::HostState::Unknown } else { v1::HostState::Up };
        let hosts = vec![host("h1", v1::HostState::Up), host("h2", second)];
        Ok(Response::new(v1::ListHostsResponse { hosts }))
    }

    async fn get_host(&self, r: Request<v1::GetHostRequest>) -> RpcResult<v1::Host> {
        let request = self.record_request("GetHost", r).await?.host;
        match request.as_str() {
            "h1" | "h2" => Ok(Response::new(host(&request, v1::HostState::Up))),
            _ => Err(not_found_status("HOST_NOT_FOUND", format!("host {request} is not in this rack"))),
        }
    }

    async fn list_emcs(&self, r: Request<v1::ListEmcsRequest>) -> RpcResult<v1::ListEmcsResponse> {
        self.record_request("ListEmcs", r).await?;
        let degraded = matches!(self.behavior, RackBehavior::Degraded);
        Ok(Response::new(v1::ListEmcsResponse {
            emcs: vec![emc("e0", 0, 0), emc("e1", 4, u32::from(degraded))],
        }))
    }

    async fn get_emc(&self, r: Request<v1::GetEmcRequest>) -> RpcResult<v1::Emc> {
        let request = self.record_request("GetEmc", r).await?.emc;
        match request.as_str() {
            "e0" | "e1" => Ok(Response::new(emc(&request, 0, 0))),
            _ => Err(not_found_status("EMC_NOT_FOUND", format!("emc {request} is not in this rack"))),
        }
    }

    async fn list_slices(&self, r: Request<v1::ListSlicesRequest>) -> RpcResult<v1::ListSlicesResponse> {
        let from = self.record_request("ListSlices", r).await?.from;
        let next =
            if matches!(self.behavior, RackBehavior::EndlessLists) { from } else { from + SLICES_PER_PAGE };
        let slices = (from..next.min(8)).map(slice).collect();
        Ok(Response::new(v1::ListSlicesResponse { slices, next: (next < 8).then_some(next), revision: 11 }))
    }

    async fn get_slice(&self, r: Request<v1::GetSliceRequest>) -> RpcResult<v1::Slice> {
        let request = self.record_request("GetSlice", r).await?.slice;
        if request < 8 {
            return Ok(Response::new(slice(request)));
        }
        Err(not_found_status("SLICE_NOT_FOUND", format!("slice {request} is not in this pool")))
    }

    async fn list_reservations(
        &self,
        r: Request<v1::ListReservationsRequest>,
    ) -> RpcResult<v1::ListReservationsResponse> {
        let after = self.record_request("ListReservations", r).await?.after;
        let repeats_page = matches!(self.behavior, RackBehavior::EndlessLists);
        let second = v1::Reservation {
            reservation: "r-2".into(),
            vm: "db".into(),
            monitoring: None,
            host: "h2".into(),
            ..reservation()
        };
        let (reservations, next_after) = if after.is_empty() || repeats_page {
            (vec![reservation()], "r-1".to_owned())
        } else {
            (vec![second], String::new())
        };
        Ok(Response::new(v1::ListReservationsResponse { reservations, next_after, revision: 11 }))
    }

    async fn get_reservation(&self, r: Request<v1::GetReservationRequest>) -> RpcResult<v1::Reservation> {
        let target = self.record_request("GetReservation", r).await?.target.unwrap();
        match (target.reservation.as_str(), target.vm.as_str()) {
            ("r-1", "") | ("", "web") => Ok(Response::new(reservation())),
            ("r-0", "") => Ok(Response::new(v1::Reservation { slices: vec![1, 2], ..reservation() })),
            ("", vm) => Err(not_found_status("VM_NOT_FOUND", format!("vm {vm} has no reservation"))),
            (id, _) => {
                Err(not_found_status("RESERVATION_NOT_FOUND", format!("reservation {id} does not exist")))
            }
        }
    }

    async fn get_shares(&self, r: Request<v1::GetSharesRequest>) -> RpcResult<v1::Shares> {
        let host = self.record_request("GetShares", r).await?.host;
        check_host(&host)?;
        let degraded = matches!(self.behavior, RackBehavior::Degraded);
        match host.as_str() {
            "h1" if degraded => {
                let (state, reason) = (v1::ShareState::Blocked.into(), "no link is known".into());
                Ok(Response::new(v1::Shares { state, reason, certificate: None, ..shares() }))
            }
            "h1" => Ok(Response::new(shares())),
            _ => Err(not_found_status("SHARES_NOT_REPORTED", format!("host: {host} has reported no shares"))),
        }
    }

    async fn get_tenants(&self, r: Request<v1::GetTenantsRequest>) -> RpcResult<v1::Tenants> {
        let host = self.record_request("GetTenants", r).await?.host;
        check_host(&host)?;
        match host.as_str() {
            "h1" if matches!(self.behavior, RackBehavior::Degraded) => {
                let reason = "no node without processors has memory".into();
                Ok(Response::new(v1::Tenants {
                    reason,
                    local: None,
                    slow: None,
                    tenants: Vec::new(),
                    ..tenants()
                }))
            }
            "h1" => Ok(Response::new(tenants())),
            _ => {
                Err(not_found_status("TENANTS_NOT_REPORTED", format!("host: {host} has reported no tenants")))
            }
        }
    }

    async fn get_evictions(&self, r: Request<v1::GetEvictionsRequest>) -> RpcResult<v1::Evictions> {
        let host = self.record_request("GetEvictions", r).await?.host;
        check_host(&host)?;
        match host.as_str() {
            "h1" if matches!(self.behavior, RackBehavior::Degraded) => {
                let reason = "early_eviction.device: /dev/nbd0 is not in use as swap".into();
                Ok(Response::new(v1::Evictions { reason, tenants: Vec::new(), ..evictions() }))
            }
            "h1" => Ok(Response::new(evictions())),
            _ => Err(not_found_status(
                "EVICTIONS_NOT_REPORTED",
                format!("host: {host} has reported no evictions"),
            )),
        }
    }

    async fn get_soft_memory(&self, r: Request<v1::GetSoftMemoryRequest>) -> RpcResult<v1::SoftMemory> {
        let host = self.record_request("GetSoftMemory", r).await?.host;
        check_host(&host)?;
        match host.as_str() {
            "h1" if matches!(self.behavior, RackBehavior::Degraded) => {
                Ok(Response::new(v1::SoftMemory { client_count: 300, ..soft_memory() }))
            }
            "h1" => Ok(Response::new(soft_memory())),
            _ => Err(not_found_status(
                "SOFT_MEMORY_NOT_REPORTED",
                format!("host: {host} has reported no soft memory"),
            )),
        }
    }

    async fn cordon(&self, r: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        self.record_request("Cordon", r).await?;
        Ok(target_response())
    }

    async fn uncordon(&self, r: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        self.record_request("Uncordon", r).await?;
        Ok(target_response())
    }

    async fn drain(&self, r: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        self.record_request("Drain", r).await?;
        Ok(target_response())
    }

    async fn fence(&self, r: Request<v1::FenceRequest>) -> RpcResult<v1::TargetResponse> {
        self.record_request("Fence", r).await?;
        Ok(target_response())
    }

    async fn list_managers(
        &self,
        r: Request<v1::ListManagersRequest>,
    ) -> RpcResult<v1::ListManagersResponse> {
        self.record_request("ListManagers", r).await?;
        let manager = |name: &str, is_leader| v1::Manager {
            name: name.into(),
            address: format!("https://{name}:9750"),
            version: "0.1.0".into(),
            started_unix_ms: 1_700_000_000_000,
            is_leader,
        };
        let managers = vec![manager("a", false), manager("b", true)];
        Ok(Response::new(v1::ListManagersResponse { managers }))
    }

    async fn list_migrations(
        &self,
        r: Request<v1::ListMigrationsRequest>,
    ) -> RpcResult<v1::ListMigrationsResponse> {
        self.record_request("ListMigrations", r).await?;
        let migrations = vec![migration(1)];
        Ok(Response::new(v1::ListMigrationsResponse { migrations, next_after: String::new(), revision: 9 }))
    }

    async fn watch(&self, r: Request<v1::WatchRequest>) -> RpcResult<Stream<v1::Event>> {
        use v1::event::Change;
        self.record_request("Watch", r).await?;
        let changes = [
            Change::Slice(slice(7)),
            Change::Reservation(reservation()),
            Change::EventsDropped(v1::EventsDropped { batches: 3 }),
        ];
        let event =
            |(n, change)| v1::Event { revision: n, at_unix_ms: 1_700_000_000_000, change: Some(change) };
        let events: Vec<_> = (1..).zip(changes).map(event).collect();
        if matches!(self.behavior, RackBehavior::OpenWatch) {
            let events = tokio_stream::iter(events.into_iter().map(Ok)).chain(tokio_stream::pending());
            return Ok(Response::new(Box::pin(events)));
        }
        stream_response(events)
    }

    async fn explain(&self, r: Request<v1::ExplainRequest>) -> RpcResult<v1::ExplainResponse> {
        let subject = self.record_request("Explain", r).await?.subject;
        let decisions = if subject == "vm web" { vec![decision()] } else { Vec::new() };
        Ok(Response::new(v1::ExplainResponse { decisions }))
    }
}
