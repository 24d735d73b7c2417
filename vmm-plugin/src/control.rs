//! Control socket of a running guest: a gRPC server on a separate thread. The server forwards each
//! request to the event loop, which executes the request, and returns the reply. The client is
//! `control_client`.

mod connection;
mod describe;
mod rehome_status;
pub mod socket;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Instant,
};

use proto::v1::{
    self as wire,
    vmm_server::{Vmm, VmmServer},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::retry_on_intr,
};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};
use units::limits::{
    CONTROL_REQUEST_BYTES_MAX, CONTROL_REQUESTS_IN_FLIGHT_MAX, CONTROL_RESPONSE_TIMEOUT, VCPUS_STOP_TIMEOUT,
};

use self::socket::ControlSocket;
use crate::{
    config::Config,
    confine::threads::SeccompFilters,
    exit,
    layout::Layout,
    memory::{
        Memory,
        accessed::{AccessSample, AccessSampler, SampleError},
        touched::{NodeFiles, TouchedByNode},
    },
    rehome::{RehomeControl, RehomeState},
    thread_role::ThreadRole,
    wakeup::Wakeup,
};

/// State of a guest, as reported to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The vCPUs run.
    Running,
    /// The vCPUs are paused.
    Paused,
    /// The power button was pressed, and the guest has not powered off yet.
    Stopping,
}

/// Action that a client requests from the event loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Return the state of the guest without changing it.
    QueryState,
    /// Pause the vCPUs.
    Pause,
    /// Resume the vCPUs.
    Resume,
    /// Press the power button.
    PressPowerButton,
    /// End the guest at once.
    Kill,
}

/// Error returned when the guest cannot be paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestActionError {
    /// The power button was pressed: a paused guest could not power off.
    #[error("the guest is powering off and cannot be paused")]
    Stopping,
    /// A vCPU did not pause in time. The guest continues to run.
    #[error("a vCPU did not pause within {VCPUS_STOP_TIMEOUT}; all vCPUs were resumed")]
    Busy,
}

/// Request of a client to the event loop, with the channel for the reply.
#[derive(Debug)]
pub struct ControlRequest {
    /// Action to execute.
    pub action: Action,
    /// Channel for the state of the guest after the action.
    pub reply: oneshot::Sender<Result<State, GuestActionError>>,
}

/// Sender of requests to the event loop.
#[derive(Debug)]
pub struct RequestSender {
    sender: mpsc::Sender<ControlRequest>,
    wakeup: Arc<Wakeup>,
}

impl RequestSender {
    /// Creates a channel to the event loop. The event loop waits for `wakeup`, then reads requests
    /// from the returned receiver.
    pub fn new(wakeup: Arc<Wakeup>) -> (Self, mpsc::Receiver<ControlRequest>) {
        let (sender, receiver) = mpsc::channel();
        (Self { sender, wakeup }, receiver)
    }

    async fn send(&self, action: Action) -> Result<State, Status> {
        let ended = || Status::unavailable("the guest has ended");
        let (reply, response) = oneshot::channel();
        self.sender.send(ControlRequest { action, reply }).map_err(|_| ended())?;
        self.wakeup.notify();
        match tokio::time::timeout(CONTROL_RESPONSE_TIMEOUT.as_duration(), response).await {
            Ok(Ok(result)) => result.map_err(to_status),
            Ok(Err(_)) => Err(ended()),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "no reply from the event loop within {CONTROL_RESPONSE_TIMEOUT}"
            ))),
        }
    }
}

fn to_status(error: GuestActionError) -> Status {
    match error {
        GuestActionError::Stopping => Status::failed_precondition(error.to_string()),
        GuestActionError::Busy => Status::unavailable(error.to_string()),
    }
}

/// Control socket of a guest that has not started yet.
#[derive(Debug)]
pub struct Control {
    socket: ControlSocket,
    guest: wire::Guest,
    files: NodeFiles,
    sampler: AccessSampler,
    rehome: RehomeControl,
}

impl Control {
    /// Creates the server for the control socket of a guest. [`Self::start`] starts the server.
    pub fn new(
        socket: ControlSocket,
        (config, layout, memory): (&Config, &Layout, &Memory),
        files: NodeFiles,
        sampler: AccessSampler,
    ) -> Self {
        let rehome = RehomeControl::new(memory);
        Self { socket, guest: describe::describe(config, layout, memory), files, sampler, rehome }
    }

    /// Returns the control of moves to local memory.
    pub fn rehome(&self) -> &RehomeControl {
        &self.rehome
    }

    /// Serves the socket on a new thread until the process ends. The thread creates the tokio
    /// runtime at the first connection, which saves memory if no client connects.
    ///
    /// # Errors
    /// The error returned by the operating system if it cannot create the thread.
    pub fn start(self, requests: RequestSender, filters: &SeccompFilters) -> io::Result<()> {
        let serve = move || {
            if let Err(error) = self.serve(requests) {
                // The guest continues to run.
                exit::print(&format!("error: the control socket is closed: {error}"));
            }
        };
        filters.spawn(ThreadRole::Control, "control".into(), serve).map(drop)
    }

    fn serve(self, requests: RequestSender) -> Result<(), Box<dyn std::error::Error>> {
        let listener = self.socket.into_listener();
        let mut first_connection = [PollFd::new(&listener, PollFlags::IN)];
        retry_on_intr(|| poll(&mut first_connection, None))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let service_impl = VmmService {
            guest: self.guest,
            files: self.files,
            sampler: Mutex::new(self.sampler),
            rehome: self.rehome,
            requests,
        };
        let service = VmmServer::new(service_impl).max_decoding_message_size(CONTROL_REQUEST_BYTES_MAX);
        runtime.block_on(async move {
            let connections = connection::accept(tokio::net::UnixListener::from_std(listener)?);
            let mut server = tonic::transport::Server::builder()
                .concurrency_limit_per_connection(CONTROL_REQUESTS_IN_FLIGHT_MAX);
            Ok(server.add_service(service).serve_with_incoming(connections).await?)
        })
    }
}

/// gRPC service that handles the requests of all clients.
#[derive(Debug)]
struct VmmService {
    guest: wire::Guest,
    files: NodeFiles,
    sampler: Mutex<AccessSampler>,
    rehome: RehomeControl,
    requests: RequestSender,
}

#[tonic::async_trait]
impl Vmm for VmmService {
    async fn info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::Guest>, Status> {
        let state = self.requests.send(Action::QueryState).await?;
        let touched =
            self.files.measure_touched_memory().map_err(|error| Status::internal(error.to_string()))?;
        let mut guest = with_current_state(self.guest.clone(), state, &touched);
        rehome_status::adapt_description(&mut guest, self.rehome.status().state);
        Ok(Response::new(guest))
    }

    async fn pause(&self, _: Request<wire::PauseRequest>) -> Result<Response<wire::PauseResponse>, Status> {
        self.requests.send(Action::Pause).await?;
        Ok(Response::new(wire::PauseResponse {}))
    }

    async fn resume(
        &self,
        _: Request<wire::ResumeRequest>,
    ) -> Result<Response<wire::ResumeResponse>, Status> {
        self.requests.send(Action::Resume).await?;
        Ok(Response::new(wire::ResumeResponse {}))
    }

    async fn stop(
        &self,
        request: Request<wire::StopRequest>,
    ) -> Result<Response<wire::StopResponse>, Status> {
        let action = if request.into_inner().force { Action::Kill } else { Action::PressPowerButton };
        self.requests.send(action).await?;
        Ok(Response::new(wire::StopResponse {}))
    }

    async fn sample_access(
        &self,
        _: Request<wire::SampleAccessRequest>,
    ) -> Result<Response<wire::SampleAccessResponse>, Status> {
        let mut sampler = self.sampler.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sample = sampler.sample(Instant::now()).map_err(|error| sampling_status(&error))?;
        if matches!(self.rehome.status().state, RehomeState::Copying | RehomeState::Done) {
            // The copies also access the pages, and afterwards the pages are local memory.
            sample.iter_mut().for_each(|sample| sample.nodes.clear());
        }
        Ok(Response::new(to_access_response(sample)))
    }

    async fn rehome(
        &self,
        request: Request<wire::RehomeRequest>,
    ) -> Result<Response<wire::RehomeStatus>, Status> {
        if self.requests.send(Action::QueryState).await? == State::Stopping {
            return Err(Status::failed_precondition("the guest is powering off"));
        }
        let status = self.rehome.start(request.into_inner().sent_boottime_ns).map_err(|reason| {
            Status::failed_precondition(format!("the pool memory cannot be moved: {reason}"))
        })?;
        Ok(Response::new(rehome_status::to_response(status)))
    }

    async fn get_rehome(
        &self,
        _: Request<wire::GetRehomeRequest>,
    ) -> Result<Response<wire::RehomeStatus>, Status> {
        Ok(Response::new(rehome_status::to_response(self.rehome.status())))
    }

    async fn cancel_rehome(
        &self,
        request: Request<wire::CancelRehomeRequest>,
    ) -> Result<Response<wire::RehomeStatus>, Status> {
        Ok(Response::new(rehome_status::to_response(
            self.rehome.cancel(request.into_inner().sent_boottime_ns),
        )))
    }
}

fn sampling_status(error: &SampleError) -> Status {
    let reason = units::chain(error);
    match error {
        SampleError::IntervalTooShort { .. } => Status::resource_exhausted(reason),
        SampleError::System { .. } => Status::internal(reason),
    }
}

/// Converts the result of an interval. Without an interval, the response is empty.
fn to_access_response(sample: Option<AccessSample>) -> wire::SampleAccessResponse {
    let Some(AccessSample { interval, nodes }) = sample else { return wire::SampleAccessResponse::default() };
    let nodes = nodes.into_iter().map(|node| wire::NodeAccess {
        node: node.node,
        page_bytes: node.page_bytes,
        sampled_pages: node.sampled_pages,
        accessed_pages: node.accessed_pages,
        bytes: node.bytes,
    });
    let interval_ms = Some(u64::try_from(interval.as_millis()).unwrap_or(u64::MAX));
    wire::SampleAccessResponse { interval_ms, nodes: nodes.collect() }
}

/// Adds the current state and the touched bytes of each node to the description of a guest.
fn with_current_state(mut guest: wire::Guest, state: State, touched: &TouchedByNode) -> wire::Guest {
    let state = match state {
        State::Running => wire::GuestState::Running,
        State::Paused => wire::GuestState::Paused,
        State::Stopping => wire::GuestState::Stopping,
    };
    guest.set_state(state);
    for node in &mut guest.nodes {
        node.touched_bytes = touched.get(&node.node).copied().flatten();
    }
    guest
}
