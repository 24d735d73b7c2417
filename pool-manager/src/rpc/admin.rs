//! Implements the gRPC service Admin for operators.

use std::pin::Pin;

use pool::{
    manager::{Manager, Request as PoolRequest, RequestReply, ReservationView},
    record::Scheduling,
};
use proto::v1::{self as wire, admin_server};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Code, Request, Response, Status};
use units::limits::{LIST_PAGE_ENTRIES_MAX, RESERVATIONS_PER_PAGE_MAX};
use units::{HostId, Name, ReservationId, SliceId};

use super::{
    ServiceContext, backup,
    scheduler::unexpected_reply_status,
    status::{driver_error_status, error_status, invalid_argument, stopping_status},
};
use crate::{
    convert::{
        self, InvalidField,
        lists::{self, ListChunk},
    },
    driver::{DriverError, WatchService},
    host_reports::HostReports,
    store::StoreError,
    write_chunk::WriteChunk,
};

/// Handlers of the gRPC service Admin.
#[derive(Clone, Debug)]
pub struct Admin(pub ServiceContext);

type Reply<T> = Result<Response<T>, Status>;

/// Maximum number of events queued for one watcher. A watcher that falls further behind loses the
/// oldest changes.
const EVENTS_QUEUED_MAX: usize = 256;

impl Admin {
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Manager) -> T + Send + 'static,
    ) -> Result<T, Status> {
        self.0.driver.read(|manager, _| read(manager)).map_err(driver_error_status)
    }

    /// Looks up an object in the ledger and returns it as response.
    ///
    /// # Errors
    /// NOT_FOUND if the object does not exist.
    async fn find<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Manager) -> Result<T, pool::rejection::Rejection> + Send + 'static,
    ) -> Reply<T> {
        let found = self.read(read).await?;
        found.map(Response::new).map_err(|rejection| driver_error_status(DriverError::Rejection(rejection)))
    }

    /// Returns the latest report of a host. `kind` names the reported objects.
    ///
    /// # Errors
    /// NOT_FOUND if the host does not exist, or with `reason` if it has not reported any.
    async fn find_report<R: Clone>(
        &self,
        host: &str,
        reports: &HostReports<R>,
        kind: &str,
        reason: &str,
    ) -> Result<R, Status> {
        let host = self.find_host(host).await?;
        reports.get(&host).ok_or_else(|| {
            let message = format!("host: {host} has reported no {kind} since the manager started");
            error_status(Code::NotFound, reason, message)
        })
    }

    /// Parses the name of a host, and checks that the host exists.
    async fn find_host(&self, name: &str) -> Result<Name, Status> {
        let host = convert::parse_name("host", name).map_err(invalid_argument)?;
        let name = host.clone();
        let found = move |manager: &Manager| {
            manager.durable().find_host_by_name(&name).ok_or(pool::rejection::Rejection::NoSuchHost(name))
        };
        self.find(found).await.map(|_| host)
    }

    /// Converts a reservation, and adds the verdict about its VM.
    fn monitored_reservation(&self, view: ReservationView) -> wire::Reservation {
        let monitoring = self.0.monitor.message(view.id);
        wire::Reservation { monitoring, ..convert::reservation_message(view) }
    }

    async fn request_target(&self, request: PoolRequest) -> Reply<wire::TargetResponse> {
        match self.0.driver.request(request).await.map_err(driver_error_status)? {
            RequestReply::Scheduled { revision, waiting_for } => Ok(Response::new(wire::TargetResponse {
                revision: revision.0,
                waiting_for: waiting_for.into_iter().map(String::from).collect(),
            })),
            other => Err(unexpected_reply_status(&other)),
        }
    }

    async fn set_scheduling(
        &self,
        request: Request<wire::TargetRequest>,
        to: Scheduling,
    ) -> Reply<wire::TargetResponse> {
        let actor = self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let place = convert::parse_scheduling_target(request.target).map_err(invalid_argument)?;
        let reason = convert::check_reason("reason", request.reason).map_err(invalid_argument)?;
        self.request_target(PoolRequest::Schedule { place, to, actor, reason }).await
    }
}

/// Returns the page size for the limit in a request; 0 selects the maximum.
fn page_size(limit: u32) -> usize {
    if limit == 0 { LIST_PAGE_ENTRIES_MAX as usize } else { limit.min(LIST_PAGE_ENTRIES_MAX) as usize }
}

/// Parses a pagination cursor: the page begins after this reservation. An empty cursor selects the
/// first page.
fn parse_cursor(text: &str) -> Result<ReservationId, Status> {
    match text {
        "" => Ok(ReservationId(0)),
        text => text.parse().map_err(|problem| invalid_argument(InvalidField { field: "after", problem })),
    }
}

impl Admin {
    /// Collects at most `max` entries of a list, and the start of the next page. The list is copied
    /// in chunks, and the ledger is locked once per chunk. `copy_chunk` receives the start of the
    /// chunk and the maximum number of entries.
    async fn collect_list<T, K: Copy>(
        &self,
        from: K,
        max: usize,
        copy_chunk: impl Fn(&Manager, K, usize) -> ListChunk<T, K>,
    ) -> Result<ListChunk<T, K>, Status> {
        let mut all = ListChunk { entries: Vec::new(), next: Some(from) };
        while let Some(from) = all.next.filter(|_| all.entries.len() < max) {
            let missing = max - all.entries.len();
            let found = self
                .0
                .driver
                .read(|manager, _| copy_chunk(manager, from, missing))
                .map_err(driver_error_status)?;
            all.entries.extend(found.entries);
            all.next = found.next;
            tokio::task::yield_now().await;
        }
        Ok(all)
    }

    fn revision(&self) -> Result<u64, Status> {
        self.0.driver.read(|manager, _| manager.durable().meta().revision.0).map_err(driver_error_status)
    }
}

/// Returns the first `page` entries, and the cursor of the next page. The cursor is empty if there
/// are no more entries.
fn collect_page<T>(
    mut entries: impl Iterator<Item = (ReservationId, T)>,
    page: usize,
) -> (Vec<(ReservationId, T)>, String) {
    let taken: Vec<_> = entries.by_ref().take(page).collect();
    let last = entries.next().and(taken.last()).map(|(id, _)| id.to_string());
    (taken, last.unwrap_or_default())
}

#[tonic::async_trait]
impl admin_server::Admin for Admin {
    async fn get_rack(&self, request: Request<wire::GetRackRequest>) -> Reply<wire::Rack> {
        self.0.admit_operator(&request)?;
        let started_unix_ms = self.0.started_unix_ms;
        let rack = self.read(move |manager| {
            let ledger = manager.durable();
            wire::Rack {
                rack_uuid: ledger.meta().rack_uuid.clone(),
                version: env!("CARGO_PKG_VERSION").into(),
                revision: ledger.meta().revision.0,
                generation: ledger.meta().generation,
                alarms: manager.alarms().into_iter().map(convert::alarm_message).collect(),
                slices: ledger.emcs().map(|(_, e)| e.emc.slices).sum(),
                slices_free: ledger.emcs().map(|(_, e)| e.free()).sum(),
                buffer_target: manager.buffer_target(),
                started_unix_ms,
            }
        });
        Ok(Response::new(rack.await?))
    }

    async fn list_managers(
        &self,
        request: Request<wire::ListManagersRequest>,
    ) -> Reply<wire::ListManagersResponse> {
        self.0.admit_operator(&request)?;
        let unavailable =
            |error: StoreError| error_status(Code::Unavailable, "ETCD_UNAVAILABLE", units::chain(&error));
        let managers = self.0.managers.list().await.map_err(unavailable)?;
        Ok(Response::new(wire::ListManagersResponse { managers }))
    }

    async fn list_hosts(&self, request: Request<wire::ListHostsRequest>) -> Reply<wire::ListHostsResponse> {
        self.0.admit_operator(&request)?;
        let hosts =
            self.collect_list(HostId(0), usize::MAX, |manager, from, _| lists::hosts(manager, from)).await?;
        Ok(Response::new(wire::ListHostsResponse { hosts: hosts.entries }))
    }

    async fn get_host(&self, request: Request<wire::GetHostRequest>) -> Reply<wire::Host> {
        self.0.admit_operator(&request)?;
        let name = convert::parse_name("host", &request.into_inner().host).map_err(invalid_argument)?;
        self.find(move |manager| {
            let id = manager.durable().find_host_by_name(&name);
            id.and_then(|id| convert::host_message(manager, id))
                .ok_or(pool::rejection::Rejection::NoSuchHost(name))
        })
        .await
    }

    async fn list_emcs(&self, request: Request<wire::ListEmcsRequest>) -> Reply<wire::ListEmcsResponse> {
        self.0.admit_operator(&request)?;
        Ok(Response::new(wire::ListEmcsResponse { emcs: self.read(convert::emc_messages).await? }))
    }

    async fn get_emc(&self, request: Request<wire::GetEmcRequest>) -> Reply<wire::Emc> {
        self.0.admit_operator(&request)?;
        let name = convert::parse_name("emc", &request.into_inner().emc).map_err(invalid_argument)?;
        self.find(move |manager| {
            let id = manager.durable().find_emc_by_name(&name);
            id.and_then(|id| convert::emc_message(manager, id))
                .ok_or(pool::rejection::Rejection::NoSuchEmc(name))
        })
        .await
    }

    async fn list_slices(
        &self,
        request: Request<wire::ListSlicesRequest>,
    ) -> Reply<wire::ListSlicesResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let page = page_size(request.limit);
        let revision = self.revision()?;
        let ListChunk { entries: slices, next } =
            self.collect_list(SliceId(request.from), page, lists::slices).await?;
        Ok(Response::new(wire::ListSlicesResponse { slices, next: next.map(|id| id.0), revision }))
    }

    async fn get_slice(&self, request: Request<wire::GetSliceRequest>) -> Reply<wire::Slice> {
        self.0.admit_operator(&request)?;
        let id = SliceId(request.into_inner().slice);
        self.find(move |manager| {
            let ledger = manager.durable();
            let found = ledger.emc_of(id).zip(ledger.slot(id));
            found
                .map(|(emc, slot)| convert::slice_message(ledger, id, emc, slot))
                .ok_or(pool::rejection::Rejection::NoSuchSlice(id))
        })
        .await
    }

    async fn list_reservations(
        &self,
        request: Request<wire::ListReservationsRequest>,
    ) -> Reply<wire::ListReservationsResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let after = parse_cursor(&request.after)?;
        let page = page_size(request.limit).min(RESERVATIONS_PER_PAGE_MAX);
        let revision = self.revision()?;
        let copy_chunk =
            |manager: &Manager, after, max| lists::reservations(manager, after, request.ended, max);
        let ListChunk { entries, next } = self.collect_list(after, page, copy_chunk).await?;
        let reservations = entries.into_iter().map(|view| self.monitored_reservation(view)).collect();
        let next_after = next.map(|id| id.to_string()).unwrap_or_default();
        Ok(Response::new(wire::ListReservationsResponse { reservations, next_after, revision }))
    }

    async fn get_reservation(
        &self,
        request: Request<wire::GetReservationRequest>,
    ) -> Reply<wire::Reservation> {
        self.0.admit_operator(&request)?;
        let target = convert::parse_reservation_ref(request.into_inner().target).map_err(invalid_argument)?;
        let found = self.find(move |manager| {
            let ledger = manager.durable();
            let id = ledger.find(&target)?;
            ledger.view(id).ok_or(pool::rejection::Rejection::NoSuchReservation(id))
        });
        Ok(Response::new(self.monitored_reservation(found.await?.into_inner())))
    }

    async fn list_migrations(
        &self,
        request: Request<wire::ListMigrationsRequest>,
    ) -> Reply<wire::ListMigrationsResponse> {
        self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let after = parse_cursor(&request.after)?;
        let page = page_size(request.limit).min(RESERVATIONS_PER_PAGE_MAX);
        let listed = self.read(move |manager| {
            let ledger = manager.durable();
            let (entries, next_after) = collect_page(ledger.migrations_after(after), page);
            let requests = entries.into_iter().flat_map(|(id, all)| all.into_iter().map(move |m| (id, m)));
            (convert::migration_list(manager, requests), next_after, ledger.meta().revision.0)
        });
        let (migrations, next_after, revision) = listed.await?;
        Ok(Response::new(wire::ListMigrationsResponse {
            migrations: migrations.into(),
            next_after,
            revision,
        }))
    }

    async fn get_shares(&self, request: Request<wire::GetSharesRequest>) -> Reply<wire::Shares> {
        self.0.admit_operator(&request)?;
        let report = self
            .find_report(&request.into_inner().host, &self.0.shares.reports, "shares", "SHARES_NOT_REPORTED")
            .await?;
        Ok(Response::new(report.into_message()))
    }

    async fn get_tenants(&self, request: Request<wire::GetTenantsRequest>) -> Reply<wire::Tenants> {
        self.0.admit_operator(&request)?;
        let report = self
            .find_report(
                &request.into_inner().host,
                &self.0.shares.tenants,
                "tenants",
                "TENANTS_NOT_REPORTED",
            )
            .await?;
        Ok(Response::new(report.into_message()))
    }

    async fn get_evictions(&self, request: Request<wire::GetEvictionsRequest>) -> Reply<wire::Evictions> {
        self.0.admit_operator(&request)?;
        let report = self
            .find_report(
                &request.into_inner().host,
                &self.0.shares.evictions,
                "evictions",
                "EVICTIONS_NOT_REPORTED",
            )
            .await?;
        Ok(Response::new(report.into_message()))
    }

    async fn get_soft_memory(&self, request: Request<wire::GetSoftMemoryRequest>) -> Reply<wire::SoftMemory> {
        self.0.admit_operator(&request)?;
        let report = self
            .find_report(
                &request.into_inner().host,
                &self.0.shares.soft_memory,
                "soft memory",
                "SOFT_MEMORY_NOT_REPORTED",
            )
            .await?;
        Ok(Response::new(report.into_message()))
    }

    async fn cordon(&self, request: Request<wire::TargetRequest>) -> Reply<wire::TargetResponse> {
        self.set_scheduling(request, Scheduling::Cordoned).await
    }

    async fn uncordon(&self, request: Request<wire::TargetRequest>) -> Reply<wire::TargetResponse> {
        self.set_scheduling(request, Scheduling::Enabled).await
    }

    async fn drain(&self, request: Request<wire::TargetRequest>) -> Reply<wire::TargetResponse> {
        self.set_scheduling(request, Scheduling::Draining).await
    }

    async fn fence(&self, request: Request<wire::FenceRequest>) -> Reply<wire::TargetResponse> {
        let actor = self.0.admit_operator(&request)?;
        let request = request.into_inner();
        let host = convert::parse_name("host", &request.host).map_err(invalid_argument)?;
        let reason = convert::check_reason("reason", request.reason).map_err(invalid_argument)?;
        self.request_target(PoolRequest::Fence {
            host,
            powered_off: request.confirm_powered_off,
            actor,
            reason,
        })
        .await
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<wire::Event, Status>> + Send>>;

    async fn watch(&self, request: Request<wire::WatchRequest>) -> Reply<Self::WatchStream> {
        self.0.admit_operator(&request)?;
        let permit = self.0.acquire_watch_permit(WatchService::Admin)?;
        let (sender, receiver) = tokio::sync::mpsc::channel(EVENTS_QUEUED_MAX);
        let events = forward_events(self.0.clone(), self.0.driver.subscribe_to_changes(), sender);
        tokio::spawn(async move {
            let _permit = permit;
            events.await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type BackupStream = backup::ChunkStream;

    async fn backup(&self, request: Request<wire::BackupRequest>) -> Reply<Self::BackupStream> {
        self.0.admit_operator(&request)?;
        backup::start(&self.0).await.map(Response::new)
    }

    async fn explain(&self, request: Request<wire::ExplainRequest>) -> Reply<wire::ExplainResponse> {
        self.0.admit_operator(&request)?;
        let subject = request.into_inner().subject;
        let decisions = self.0.driver.explain(subject).await.map_err(driver_error_status)?;
        let decisions =
            decisions.iter().map(|(seq, decision)| convert::decision_message(*seq, decision)).collect();
        Ok(Response::new(wire::ExplainResponse { decisions }))
    }
}

async fn forward_events(
    shared: ServiceContext,
    mut changes: broadcast::Receiver<WriteChunk>,
    sender: tokio::sync::mpsc::Sender<Result<wire::Event, Status>>,
) {
    loop {
        let events = tokio::select! {
            change = changes.recv() => match change {
                Ok(chunk) => shared.driver.read(|m, when| convert::event_messages(m, when, &chunk)),
                Err(RecvError::Lagged(chunks)) => Ok(vec![events_dropped_message(chunks)]),
                Err(RecvError::Closed) => return,
            },
            () = sender.closed() => return,
            () = shared.wait_until_stopping() => return drop(sender.send(Err(stopping_status())).await),
        };
        for event in events.unwrap_or_default() {
            if sender.send(Ok(event)).await.is_err() {
                return;
            }
        }
    }
}

fn events_dropped_message(chunks: u64) -> wire::Event {
    let change = Some(wire::event::Change::EventsDropped(wire::EventsDropped { batches: chunks }));
    wire::Event { revision: 0, at_unix_ms: 0, change }
}
