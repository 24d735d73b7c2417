//! Client of the control socket of a VMM (gRPC service `Vmm`). The VMM names its socket when it
//! attaches to the memory of its VM.
//!
//! The VMM chooses the path, so the path may lead to the socket of another process, such as a
//! service that trusts the agent's user. Therefore the client sends nothing before it has checked
//! that the process that listens on the socket is the VM's registered process.

use std::{
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper_util::rt::TokioIo;
use pool::agent::Process;
use proto::v1::{self as wire, vmm_client::VmmClient as GrpcClient};
use rustix::time::{ClockId, Timespec, clock_gettime};
use tokio::net::UnixStream;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint, Uri},
};
use units::limits::VMM_RESPONSE_BYTES_MAX;

use crate::host::process::ProcessHandle;

/// Error of a request to a VMM.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The VMM cannot be reached, or another process listens on its socket.
    #[error("cannot connect to the VMM at {}", path.display())]
    Connect {
        /// Path of the control socket.
        path: PathBuf,
        /// Cause.
        #[source]
        error: tonic::transport::Error,
    },
    /// The VMM rejected the request.
    #[error("the VMM rejected the request: {}", .0.message())]
    Rejected(Box<Status>),
}

impl VmmError {
    /// Returns whether the same request may succeed later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            Self::Rejected(status) => {
                matches!(
                    status.code(),
                    Code::Unavailable | Code::Cancelled | Code::Unknown | Code::ResourceExhausted
                )
            }
        }
    }
}

/// Connection to the control socket of a VMM. The caller limits the time of each call.
#[derive(Clone, Debug)]
pub struct VmmClient(GrpcClient<Channel>);

impl VmmClient {
    /// Connects to the control socket of a VM's process.
    ///
    /// # Errors
    /// [`VmmError::Connect`].
    pub async fn connect(path: PathBuf, process: Process) -> Result<Self, VmmError> {
        let connector = Connector { path: path.clone().into(), process: process.into() };
        // The connector determines the address, so the host in the URI is not used.
        let channel = Endpoint::from_static("http://vmm").connect_with_connector(connector).await;
        let channel = channel.map_err(|error| VmmError::Connect { path, error })?;
        Ok(Self(GrpcClient::new(channel).max_decoding_message_size(VMM_RESPONSE_BYTES_MAX)))
    }

    /// Ends the interval of access sampling that the previous call began, and begins the next one.
    ///
    /// # Errors
    /// [`VmmError::Rejected`].
    pub async fn sample_access(&mut self) -> Result<wire::SampleAccessResponse, VmmError> {
        into_result(self.0.sample_access(wire::SampleAccessRequest {}).await)
    }

    /// Starts to move the guest's pool memory to local memory.
    ///
    /// # Errors
    /// [`VmmError::Rejected`].
    pub async fn rehome(&mut self) -> Result<wire::RehomeStatus, VmmError> {
        into_result(self.0.rehome(wire::RehomeRequest { sent_boottime_ns: boottime_ns() }).await)
    }

    /// Returns the status of the latest move.
    ///
    /// # Errors
    /// [`VmmError::Rejected`].
    pub async fn get_rehome(&mut self) -> Result<wire::RehomeStatus, VmmError> {
        into_result(self.0.get_rehome(wire::GetRehomeRequest {}).await)
    }

    /// Cancels the move in progress, and returns its status.
    ///
    /// # Errors
    /// [`VmmError::Rejected`].
    pub async fn cancel_rehome(&mut self) -> Result<wire::RehomeStatus, VmmError> {
        into_result(self.0.cancel_rehome(wire::CancelRehomeRequest { sent_boottime_ns: boottime_ns() }).await)
    }
}

/// Returns the time since the boot of this machine, in nanoseconds.
fn boottime_ns() -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::Boottime);
    u64::try_from(i128::from(tv_sec) * 1_000_000_000 + i128::from(tv_nsec)).unwrap_or(0)
}

fn into_result<T>(response: Result<tonic::Response<T>, Status>) -> Result<T, VmmError> {
    response.map(tonic::Response::into_inner).map_err(|status| VmmError::Rejected(Box::new(status)))
}

/// Opens the control socket, and checks which process listens on it.
#[derive(Clone)]
struct Connector {
    path: Arc<std::path::Path>,
    process: Arc<Process>,
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { path, process } = self.clone();
        Box::pin(async move {
            let stream = UnixStream::connect(&*path).await?;
            check_listener(&stream, &process)?;
            Ok(TokioIo::new(stream))
        })
    }
}

/// Checks that the process that listens on a socket is the VM's registered process and still runs.
fn check_listener(stream: &UnixStream, process: &Process) -> io::Result<()> {
    let listener = stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok());
    if listener != Some(process.pid) {
        let listener = listener.map_or_else(|| "an unknown process".into(), |pid| format!("process {pid}"));
        let problem = format!("{listener} listens on the socket, not process {} of the VM", process.pid);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    match ProcessHandle::open(process).map_err(io::Error::other)? {
        Some(_) => Ok(()),
        None => Err(io::Error::new(io::ErrorKind::NotFound, "the process of the VM has ended")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncReadExt as _, net::UnixListener};

    use super::*;
    use crate::host::process::identify_process;

    #[tokio::test]
    async fn socket_of_another_process_receives_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let own = identify_process(std::process::id()).unwrap();
        for process in [Process { pid: 1, ..own.clone() }, Process { started: own.started + 1, ..own }] {
            let connected = tokio::spawn(VmmClient::connect(path.clone(), process));
            let (mut accepted, _) = listener.accept().await.unwrap();
            let mut received = Vec::new();
            accepted.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"", "data was sent to a process that is not the VMM");
            let error = units::chain(&connected.await.unwrap().unwrap_err());
            assert!(
                error.contains("listens on the socket, not process 1") || error.contains("has ended"),
                "{error}"
            );
        }
    }
}
