//! The control socket of a running guest: gRPC on a thread of its own. It decides nothing: what is asked goes to the loop that
//! decides about the guest's life, and its answer goes back. Who is at the other end is `ask`.

mod connection;
mod describe;
pub mod socket;

use std::{
    io,
    sync::{Arc, mpsc},
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
    bell::Bell,
    config::Config,
    confine::threads::{Filters, Work},
    exit,
    layout::Layout,
    memory::{
        Memory,
        touched::{NodeFiles, TouchedByNode},
    },
};

/// Where a guest stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its processors run.
    Running,
    /// Its processors stand still until it is resumed.
    Paused,
    /// It was asked to switch itself off.
    Ending,
}

/// What is wanted of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Nothing but to know how it is.
    State,
    /// Processors stand still.
    Pause,
    /// Processors go on.
    Resume,
    /// The power button pressed.
    PowerButton,
    /// Its end, at once.
    End,
}

/// Why a guest does not do what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It would not get to its end.
    #[error("the guest was asked to switch itself off, and is not paused on its way")]
    Ending,
    /// It runs on.
    #[error("a processor did not stand still within {VCPUS_STOP_TIMEOUT}; all go on")]
    Busy,
}

/// One wish, and where the answer goes.
#[derive(Debug)]
pub struct Order {
    /// What is wanted.
    pub wanted: Wanted,
    /// Takes how the guest is afterwards.
    pub reply: oneshot::Sender<Result<State, Refused>>,
}

/// Where orders are given.
#[derive(Debug)]
pub struct Orders {
    sender: mpsc::Sender<Order>,
    bell: Arc<Bell>,
}

impl Orders {
    /// Orders go to whoever has the receiver, and listens to the bell.
    pub fn new(bell: Arc<Bell>) -> (Self, mpsc::Receiver<Order>) {
        let (sender, receiver) = mpsc::channel();
        (Self { sender, bell }, receiver)
    }

    async fn give(&self, wanted: Wanted) -> Result<State, Status> {
        let over = || Status::unavailable("the guest is over");
        let (reply, answer) = oneshot::channel();
        self.sender.send(Order { wanted, reply }).map_err(|_| over())?;
        self.bell.ring();
        match tokio::time::timeout(CONTROL_RESPONSE_TIMEOUT.as_duration(), answer).await {
            Ok(Ok(done)) => done.map_err(refused),
            Ok(Err(_)) => Err(over()),
            Err(_) => Err(Status::deadline_exceeded(format!("no answer within {CONTROL_RESPONSE_TIMEOUT}"))),
        }
    }
}

fn refused(why: Refused) -> Status {
    match why {
        Refused::Ending => Status::failed_precondition(why.to_string()),
        Refused::Busy => Status::unavailable(why.to_string()),
    }
}

/// What a control socket needs, found before the guest starts.
#[derive(Debug)]
pub struct Control {
    socket: ControlSocket,
    guest: wire::Guest,
    files: NodeFiles,
}

impl Control {
    /// For a guest that is put together.
    pub fn new(
        socket: ControlSocket,
        (config, layout, memory): (&Config, &Layout, &Memory),
        files: NodeFiles,
    ) -> Self {
        Self { socket, guest: describe::describe(config, layout, memory), files }
    }

    /// Answers callers on a thread of its own, until the process ends. What an answer needs comes up with the first caller: a
    /// guest that nobody asks stays small.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(self, orders: Orders, filters: &Filters) -> io::Result<()> {
        let serve = move || {
            if let Err(error) = self.serve(orders) {
                exit::say(&format!("error: the control socket is closed: {error}")); // the guest goes on
            }
        };
        filters.spawn(Work::Control, "control".into(), serve).map(drop)
    }

    fn serve(self, orders: Orders) -> Result<(), Box<dyn std::error::Error>> {
        let listener = self.socket.into_listener();
        let mut first_caller = [PollFd::new(&listener, PollFlags::IN)];
        retry_on_intr(|| poll(&mut first_caller, None))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let desk = Desk { guest: self.guest, files: self.files, orders };
        let service = VmmServer::new(desk).max_decoding_message_size(CONTROL_REQUEST_BYTES_MAX);
        runtime.block_on(async move {
            let callers = connection::accept(tokio::net::UnixListener::from_std(listener)?);
            let mut server = tonic::transport::Server::builder()
                .concurrency_limit_per_connection(CONTROL_REQUESTS_IN_FLIGHT_MAX);
            Ok(server.add_service(service).serve_with_incoming(callers).await?)
        })
    }
}

/// Answers one request after the other.
#[derive(Debug)]
struct Desk {
    guest: wire::Guest,
    files: NodeFiles,
    orders: Orders,
}

#[tonic::async_trait]
impl Vmm for Desk {
    async fn info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::Guest>, Status> {
        let state = self.orders.give(Wanted::State).await?;
        let touched = self.files.touched().map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(now(self.guest.clone(), state, &touched)))
    }

    async fn pause(&self, _: Request<wire::PauseRequest>) -> Result<Response<wire::PauseResponse>, Status> {
        self.orders.give(Wanted::Pause).await?;
        Ok(Response::new(wire::PauseResponse {}))
    }

    async fn resume(
        &self,
        _: Request<wire::ResumeRequest>,
    ) -> Result<Response<wire::ResumeResponse>, Status> {
        self.orders.give(Wanted::Resume).await?;
        Ok(Response::new(wire::ResumeResponse {}))
    }

    async fn stop(
        &self,
        request: Request<wire::StopRequest>,
    ) -> Result<Response<wire::StopResponse>, Status> {
        let wanted = if request.into_inner().now { Wanted::End } else { Wanted::PowerButton };
        self.orders.give(wanted).await?;
        Ok(Response::new(wire::StopResponse {}))
    }
}

/// A guest as it is now.
fn now(mut guest: wire::Guest, state: State, touched: &TouchedByNode) -> wire::Guest {
    let state = match state {
        State::Running => wire::GuestState::Running,
        State::Paused => wire::GuestState::Paused,
        State::Ending => wire::GuestState::Ending,
    };
    guest.set_state(state);
    for node in &mut guest.nodes {
        node.touched_bytes = touched.get(&node.node).copied().flatten();
    }
    guest
}
