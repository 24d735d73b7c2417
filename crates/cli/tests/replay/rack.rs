//! Fake manager of a rack. It counts cores, memory and slices, and injects faults. Draining slices
//! become free when a client requests their number.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use proto::v1::{
    self, ReservationState, SliceState,
    admin_server::{Admin, AdminServer},
    scheduler_server::{Scheduler, SchedulerServer},
};
use tokio::{net::TcpListener, sync::watch};
use tokio_stream::{
    Stream, StreamExt as _,
    wrappers::{TcpListenerStream, WatchStream},
};
use tonic::{Request, Response, Status, transport::Server};

type RpcResult<T> = Result<Response<T>, Status>;
type RpcStream<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Fault of the fake manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Restarts once: executes a request without a reply, and ends its streams.
    Unavailable,
    /// Restarts once like [`Self::Unavailable`], and loses the first reservation.
    LosesReservation,
    /// Rejects all reservations on host a, although it reports free capacity there.
    HostRejects,
}

#[derive(Clone, Debug)]
pub struct Host {
    pub cores: u32,
    pub local_gib: u64,
}

#[derive(Clone, Debug, Default)]
pub struct SliceSlot {
    pub epoch: u64,
    pub owner: Option<(String, String)>,
    draining: bool,
}

/// State of the fake manager.
#[derive(Debug, Default)]
pub struct State {
    pub hosts: BTreeMap<String, Host>,
    pub slots: Vec<SliceSlot>,
    pub reservations: BTreeMap<String, v1::Reservation>,
    pub requests: BTreeMap<String, String>,
    /// Path of the agent's socket; empty if the agent is not on this machine.
    pub socket: String,
    /// Directory of the EMC.
    pub emc: String,
    pub fault: Fault,
    /// Number of calls until the fault occurs.
    countdown: u32,
    /// Number of requests in which a client read the number of draining slices.
    pub draining_queries: u32,
}

#[derive(Clone, Debug)]
pub struct Rack {
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
}

impl Rack {
    /// Creates a rack with two hosts of this size, a and b, and one EMC.
    pub fn new(cores: u32, local_gib: u64, slices: usize) -> Self {
        let host = Host { cores, local_gib };
        let state = State {
            hosts: [("a".into(), host.clone()), ("b".into(), host)].into(),
            slots: vec![SliceSlot::default(); slices],
            emc: "/nowhere".into(),
            ..State::default()
        };
        Self { state: Arc::new(Mutex::new(state)), changed: watch::channel(0).0 }
    }

    pub fn with_fault(self, fault: Fault, after: u32) -> Self {
        self.state().fault = fault;
        self.state().countdown = after;
        self
    }

    pub fn with_local_device(self, emc: &Path, socket: &Path) -> Self {
        self.state().emc = emc.to_str().unwrap().into();
        self.state().socket = socket.to_str().unwrap().into();
        self
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn notify_watchers(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Serves on a loopback address until the runtime of the test ends, and returns the endpoint.
    pub async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let services = Server::builder()
            .add_service(SchedulerServer::new(self.clone()))
            .add_service(AdminServer::new(self.clone()));
        tokio::spawn(services.serve_with_incoming(TcpListenerStream::new(listener)));
        format!("http://{address}")
    }

    /// Injects a restart after `countdown` calls: returns an error instead of the reply, once.
    fn lose_reply_if_faulty(&self) -> Result<(), Status> {
        let mut state = self.state();
        if !matches!(state.fault, Fault::Unavailable | Fault::LosesReservation) {
            return Ok(());
        }
        state.countdown = state.countdown.saturating_sub(1);
        if state.countdown > 0 {
            return Ok(());
        }
        if state.fault == Fault::LosesReservation {
            let first = state.reservations.keys().next().cloned();
            first.map(|id| state.reservations.remove(&id));
        }
        state.fault = Fault::None;
        drop(state);
        self.changed.send_modify(|n| *n = u64::MAX / 2);
        Err(Status::unavailable("restarting"))
    }
}

impl State {
    fn used_capacity(&self, host: &str) -> (u32, u64) {
        let own = self.reservations.values().filter(|r| r.host == host && is_active(r));
        own.fold((0, 0), |(cores, local), r| (cores + r.cores, local + r.local_bytes))
    }

    fn free_slices(&self) -> Vec<u32> {
        let free = |(n, slot): (usize, &SliceSlot)| {
            (slot.owner.is_none() && !slot.draining).then(|| u32::try_from(n).unwrap())
        };
        self.slots.iter().enumerate().filter_map(free).collect()
    }

    fn capacity(&self) -> v1::Capacity {
        let slices = u32::try_from(self.slots.len()).unwrap();
        let free_slices = u32::try_from(self.free_slices().len()).unwrap();
        let emc = v1::EmcCapacity { emc: "e".into(), free_slices, slices };
        let host = |(name, host): (&String, &Host)| {
            let (cores, local) = self.used_capacity(name);
            v1::HostCapacity {
                host: name.clone(),
                schedulable: true,
                free_cores: host.cores - cores,
                free_local_bytes: (host.local_gib << 30) - local,
                emcs: vec![emc.clone()],
            }
        };
        v1::Capacity { revision: 1, hosts: self.hosts.iter().map(host).collect(), emcs: vec![emc.clone()] }
    }

    fn reserve(&mut self, r: v1::ReserveRequest) -> Result<v1::Reservation, Status> {
        if let Some(id) = self.requests.get(&r.request_id) {
            return self
                .reservations
                .get(id)
                .cloned()
                .ok_or_else(|| Status::not_found("lost by the restart"));
        }
        assert!(
            !self.reservations.values().any(|other| other.vm == r.vm && is_active(other)),
            "VM {} is reserved twice",
            r.vm
        );
        let (host, (cores, local)) = (&self.hosts[&r.host], self.used_capacity(&r.host));
        let free = self.free_slices();
        let slices = usize::try_from(r.pool_bytes >> 30).unwrap();
        let fits = cores + r.cores <= host.cores && local + r.local_bytes <= host.local_gib << 30;
        if !fits || free.len() < slices || (self.fault == Fault::HostRejects && r.host == "a") {
            return Err(Status::resource_exhausted("not enough capacity"));
        }
        let id = format!("r-{}", self.requests.len() + 1);
        for slice in &free[..slices] {
            let slot = &mut self.slots[*slice as usize];
            slot.epoch += 1;
            slot.owner = Some((r.vm.clone(), r.host.clone()));
        }
        let reservation = v1::Reservation {
            reservation: id.clone(),
            vm: r.vm,
            host: r.host,
            state: ReservationState::Ready.into(),
            slices: free[..slices].to_vec(),
            local_bytes: r.local_bytes,
            pool_bytes: r.pool_bytes,
            cores: r.cores,
            request_id: r.request_id.clone(),
            ..Default::default()
        };
        self.requests.insert(r.request_id, id.clone());
        self.reservations.insert(id, reservation.clone());
        Ok(reservation)
    }

    fn find_reservation(
        &mut self,
        target: Option<v1::ReservationRef>,
    ) -> Result<&mut v1::Reservation, Status> {
        let id = target.unwrap_or_default().reservation;
        self.reservations.get_mut(&id).ok_or_else(|| Status::not_found(id))
    }

    fn release(&mut self, target: Option<v1::ReservationRef>) -> Result<v1::Reservation, Status> {
        let reservation = self.find_reservation(target)?;
        let slices = if is_active(reservation) { reservation.slices.clone() } else { Vec::new() };
        reservation.set_state(ReservationState::Released);
        let reservation = reservation.clone();
        for slice in slices {
            self.slots[slice as usize].owner = None;
            self.slots[slice as usize].draining = true;
        }
        Ok(reservation)
    }

    fn slice(&self, n: usize) -> v1::Slice {
        let slot = &self.slots[n];
        let state = match (&slot.owner, slot.draining) {
            (Some(_), _) => SliceState::Online,
            (None, true) => SliceState::Draining,
            (None, false) => SliceState::Free,
        };
        v1::Slice {
            slice: u32::try_from(n).unwrap(),
            emc: "e".into(),
            state: state.into(),
            host: slot.owner.as_ref().map(|(_, host)| host.clone()),
            vm: slot.owner.as_ref().map(|(vm, _)| vm.clone()),
            epoch: slot.epoch,
            ..Default::default()
        }
    }
}

pub fn is_active(r: &v1::Reservation) -> bool {
    r.state() != ReservationState::Released
}

#[tonic::async_trait]
impl Scheduler for Rack {
    type WatchCapacityStream = RpcStream<v1::Capacity>;
    type WatchMigrationsStream = RpcStream<v1::Migration>;

    async fn plan_vm(&self, _: Request<v1::PlanVmRequest>) -> RpcResult<v1::PlanVmResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn reserve(&self, r: Request<v1::ReserveRequest>) -> RpcResult<v1::Reservation> {
        let reply = self.state().reserve(r.into_inner())?;
        self.notify_watchers();
        self.lose_reply_if_faulty()?;
        Ok(Response::new(reply))
    }

    async fn wait_ready(&self, r: Request<v1::WaitReadyRequest>) -> RpcResult<v1::Reservation> {
        Ok(Response::new(self.state().find_reservation(r.into_inner().target)?.clone()))
    }

    async fn commit(&self, r: Request<v1::CommitRequest>) -> RpcResult<v1::Reservation> {
        let mut state = self.state();
        let reservation = state.find_reservation(r.into_inner().target)?;
        reservation.set_state(ReservationState::Committed);
        Ok(Response::new(reservation.clone()))
    }

    async fn rehome_vm(&self, _: Request<v1::RehomeVmRequest>) -> RpcResult<v1::Reservation> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn release(&self, r: Request<v1::ReleaseRequest>) -> RpcResult<v1::Reservation> {
        let reply = self.state().release(r.into_inner().target)?;
        self.notify_watchers();
        self.lose_reply_if_faulty()?;
        Ok(Response::new(reply))
    }

    async fn watch_capacity(
        &self,
        _: Request<v1::WatchCapacityRequest>,
    ) -> RpcResult<RpcStream<v1::Capacity>> {
        // A restart ends all streams that were opened before.
        let (rack, from) = (self.clone(), *self.changed.borrow());
        let snapshots = WatchStream::new(self.changed.subscribe()).map(move |n| {
            let is_unavailable = n >= u64::MAX / 2 && from < u64::MAX / 2;
            if is_unavailable { Err(Status::unavailable("restarting")) } else { Ok(rack.state().capacity()) }
        });
        Ok(Response::new(Box::pin(snapshots)))
    }

    async fn watch_migrations(
        &self,
        _: Request<v1::WatchMigrationsRequest>,
    ) -> RpcResult<RpcStream<v1::Migration>> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn resolve_migration(&self, _: Request<v1::ResolveMigrationRequest>) -> RpcResult<v1::Migration> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn set_weights(&self, _: Request<v1::SetWeightsRequest>) -> RpcResult<v1::SetWeightsResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }
}

#[tonic::async_trait]
impl Admin for Rack {
    type WatchStream = RpcStream<v1::Event>;
    type BackupStream = RpcStream<v1::BackupChunk>;

    async fn backup(&self, _: Request<v1::BackupRequest>) -> RpcResult<Self::BackupStream> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn get_rack(&self, _: Request<v1::GetRackRequest>) -> RpcResult<v1::Rack> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_hosts(&self, _: Request<v1::ListHostsRequest>) -> RpcResult<v1::ListHostsResponse> {
        let state = self.state();
        let host = |(name, host): (&String, &Host)| v1::Host {
            host: name.clone(),
            cores: host.cores,
            local_bytes: host.local_gib << 30,
            host_memory_socket: state.socket.clone(),
            ..Default::default()
        };
        Ok(Response::new(v1::ListHostsResponse { hosts: state.hosts.iter().map(host).collect() }))
    }

    async fn get_host(&self, _: Request<v1::GetHostRequest>) -> RpcResult<v1::Host> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_emcs(&self, _: Request<v1::ListEmcsRequest>) -> RpcResult<v1::ListEmcsResponse> {
        let mut state = self.state();
        let draining = state.slots.iter().filter(|slot| slot.draining).count();
        for slot in &mut state.slots {
            slot.draining = false;
        }
        state.draining_queries += 1;
        let emc = v1::Emc {
            emc: "e".into(),
            driver: "emulated".into(),
            path: state.emc.clone(),
            slices: u32::try_from(state.slots.len()).unwrap(),
            draining: u32::try_from(draining).unwrap(),
            ..Default::default()
        };
        drop(state);
        self.notify_watchers();
        Ok(Response::new(v1::ListEmcsResponse { emcs: vec![emc] }))
    }

    async fn get_emc(&self, _: Request<v1::GetEmcRequest>) -> RpcResult<v1::Emc> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_slices(&self, _: Request<v1::ListSlicesRequest>) -> RpcResult<v1::ListSlicesResponse> {
        let state = self.state();
        let slices = (0..state.slots.len()).map(|n| state.slice(n)).collect();
        Ok(Response::new(v1::ListSlicesResponse { slices, next: None, revision: 1 }))
    }

    async fn get_slice(&self, _: Request<v1::GetSliceRequest>) -> RpcResult<v1::Slice> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_reservations(
        &self,
        _: Request<v1::ListReservationsRequest>,
    ) -> RpcResult<v1::ListReservationsResponse> {
        let reservations = self.state().reservations.values().cloned().collect();
        let next_after = String::new();
        Ok(Response::new(v1::ListReservationsResponse { reservations, next_after, revision: 1 }))
    }

    async fn get_reservation(&self, _: Request<v1::GetReservationRequest>) -> RpcResult<v1::Reservation> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn get_shares(&self, _: Request<v1::GetSharesRequest>) -> RpcResult<v1::Shares> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn get_tenants(&self, _: Request<v1::GetTenantsRequest>) -> RpcResult<v1::Tenants> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn get_evictions(&self, _: Request<v1::GetEvictionsRequest>) -> RpcResult<v1::Evictions> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn get_soft_memory(&self, _: Request<v1::GetSoftMemoryRequest>) -> RpcResult<v1::SoftMemory> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn cordon(&self, _: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn uncordon(&self, _: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn drain(&self, _: Request<v1::TargetRequest>) -> RpcResult<v1::TargetResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn fence(&self, _: Request<v1::FenceRequest>) -> RpcResult<v1::TargetResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_managers(
        &self,
        _: Request<v1::ListManagersRequest>,
    ) -> RpcResult<v1::ListManagersResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn list_migrations(
        &self,
        _: Request<v1::ListMigrationsRequest>,
    ) -> RpcResult<v1::ListMigrationsResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> RpcResult<RpcStream<v1::Event>> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }

    async fn explain(&self, _: Request<v1::ExplainRequest>) -> RpcResult<v1::ExplainResponse> {
        Err(Status::unimplemented("not implemented by the fake manager"))
    }
}
