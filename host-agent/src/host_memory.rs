//! Unix socket at which a VMM attaches to the memory of its VM. Each SOCK_SEQPACKET datagram
//! contains one protobuf message and file descriptors. The kernel identifies the caller. Requests
//! are passed to the driver; the crate `host_memory` is the client.

mod reply;

use std::{collections::BTreeSet, io, os::fd::OwnedFd, path::Path, sync::OnceLock};

use host_memory::datagram;
use pool::agent::{Caller, Process};
use prost::Message as _;
use proto::v1::{self as wire, host_memory_request};
use service_files::sockets::{SocketError, SocketPath};
use tokio::{io::unix::AsyncFd, sync::OwnedSemaphorePermit};
use units::limits::{
    DATAGRAM_BYTES_MAX, HOST_MEMORY_CONNECTIONS_PER_UID_MAX, HOST_MEMORY_IDLE_TIMEOUT,
    HOST_MEMORY_SEND_TIMEOUT, HOST_MEMORY_UNAUTHORIZED_CONNECTIONS_MAX,
    HOST_MEMORY_UNAUTHORIZED_IDLE_TIMEOUT,
};
use units::{Name, Ns, UserId};

use self::reply::{ReplyMessages, rejection};
use crate::{
    driver,
    host::{
        MemoryForm,
        process::{self, ProcessHandle},
    },
    local_socket::{ConnectionPermits, LocalListener, PeerCredentials},
    readiness,
};

/// Returns the path of the socket with its field in host.toml.
pub fn socket_path(path: &Path) -> SocketPath<'_> {
    SocketPath { field: "agent.socket", path }
}

/// Listening socket for VMMs.
#[derive(Debug)]
pub struct HostMemoryServer {
    listener: LocalListener,
    permits: ConnectionPermits,
}

impl HostMemoryServer {
    /// Listens on a socket. Replaces a socket that no process serves.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn listen(path: &Path, allowed_uids: BTreeSet<UserId>) -> Result<Self, SocketError> {
        let (per_user, others) =
            (HOST_MEMORY_CONNECTIONS_PER_UID_MAX, HOST_MEMORY_UNAUTHORIZED_CONNECTIONS_MAX);
        Ok(Self {
            listener: LocalListener::listen(socket_path(path))?,
            permits: ConnectionPermits::new(allowed_uids, per_user, others),
        })
    }

    /// Serves connections until the driver ends.
    pub async fn serve(self, driver: driver::Handle) {
        let start = |socket| {
            let connection = Connection::new(socket, driver.clone(), &self.permits)?;
            tokio::spawn(connection.serve());
            Ok(())
        };
        tokio::select! {
            () = self.listener.accept_all("host memory", start) => {}
            () = driver.wait_for_driver_end() => {}
        }
    }
}

/// Connection, with the user and process of the caller.
struct Connection {
    socket: AsyncFd<OwnedFd>,
    driver: driver::Handle,
    uid: UserId,
    process: Result<Process, process::ProcessError>,
    is_allowed: bool,
    /// VM to which this connection has attached. Afterwards requests about other VMs are rejected.
    vm: OnceLock<Name>,
    _permit: OwnedSemaphorePermit,
}

/// Receives one request; `None` if it was too long. The buffer exists only if there is a request, so that
/// idle connections use little memory.
fn receive_request(socket: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    let bytes = datagram::receive(socket, &mut buffer)?;
    Ok(bytes.map(|bytes| {
        buffer.truncate(bytes);
        buffer
    }))
}

/// Checks the path of a VMM's control socket; an empty path means that the VMM has none.
fn parse_control_socket(path: String) -> Result<Option<String>, ReplyMessages> {
    if path.is_empty() {
        return Ok(None);
    }
    let checked = match Path::new(&path).is_absolute() {
        _ if path.chars().any(char::is_control) => Err("must contain no control characters".to_owned()),
        true => config_file::check_socket_path_length(Path::new(&path)),
        false => Err("must be an absolute path".to_owned()),
    };
    let reject = |rule: String| rejection("BAD_MESSAGE", format!("attach.control_socket = {path:?}: {rule}"));
    checked.map_err(reject).map(|()| Some(path.clone()))
}

/// Checks that the process that opened a connection still runs. A process can pass its connection to
/// another process and end. The connection must not keep the permissions of the ended process.
fn check_runs(process: &Process) -> Result<(), process::ProcessError> {
    match ProcessHandle::open(process)? {
        Some(_) => Ok(()),
        None => Err(process::ProcessError::Gone { pid: process.pid }),
    }
}

impl Connection {
    /// Creates a connection. The process is identified immediately, because its pid may be reused
    /// after it ends.
    fn new(socket: OwnedFd, driver: driver::Handle, permits: &ConnectionPermits) -> io::Result<Self> {
        let PeerCredentials { pid, user: uid } = PeerCredentials::read(&socket)?;
        let permit = permits.acquire(uid)?;
        // No process has the PID 0, so that the process of another PID namespace counts as ended.
        let process = process::identify_peer(pid.unwrap_or(0), uid);
        let socket = readiness::watch(socket)?;
        let is_allowed = permits.is_allowed(uid);
        Ok(Self { socket, driver, uid, process, is_allowed, vm: OnceLock::new(), _permit: permit })
    }

    async fn serve(self) {
        if let Err(error) = self.serve_requests().await {
            tracing::debug!(uid = %self.uid, %error, "lost connection to a caller");
        }
    }

    async fn serve_requests(&self) -> io::Result<()> {
        loop {
            let received = self.socket.async_io(tokio::io::Interest::READABLE, receive_request);
            let request = match self.idle_timeout() {
                None => received.await?,
                Some(idle_timeout) => tokio::time::timeout(idle_timeout.as_duration(), received).await??,
            };
            let reply = match request {
                Some(request) if request.is_empty() => return Ok(()), // the caller closed the connection
                Some(request) => self.handle_request(&request).await,
                None => {
                    rejection("BAD_MESSAGE", format!("message: must have at most {DATAGRAM_BYTES_MAX} bytes"))
                }
            };
            self.send(reply).await?;
        }
    }

    /// Returns the time limit for the next request; `None` if the connection has attached to a VM.
    fn idle_timeout(&self) -> Option<Ns> {
        match (self.is_allowed, self.vm.get()) {
            (false, _) => Some(HOST_MEMORY_UNAUTHORIZED_IDLE_TIMEOUT),
            (true, None) => Some(HOST_MEMORY_IDLE_TIMEOUT),
            (true, Some(_)) => None,
        }
    }

    /// Checks that a request is about the VM to which this connection has attached, if any.
    /// Otherwise a guest that controls its VMM could use this connection, and the permissions of
    /// its user, to get the memory of another VM.
    fn check_own_vm(&self, field: &str, vm: &str) -> Result<Name, ReplyMessages> {
        let vm = Name::new(vm).map_err(|error| rejection("BAD_MESSAGE", format!("{field}: {error}")))?;
        match self.vm.get() {
            Some(own) if *own != vm => Err(rejection(
                "OTHER_VM",
                format!("{field}: {vm}: must be {own}, to which this connection has attached"),
            )),
            _ => Ok(vm),
        }
    }

    async fn handle_request(&self, bytes: &[u8]) -> ReplyMessages {
        if !self.is_allowed {
            let reason = format!("uid {} is not in agent.allowed_uids of host.toml", self.uid);
            return rejection("PEER_NOT_ALLOWED", reason);
        }
        let process = match &self.process {
            Ok(process) => process.clone(),
            Err(error) => return rejection("PEER_NOT_ALLOWED", units::chain(error)),
        };
        if let Err(why) = check_runs(&process) {
            return rejection("PEER_NOT_ALLOWED", units::chain(&why));
        }
        match wire::HostMemoryRequest::decode(bytes).map(|message| message.request) {
            Err(error) => rejection("BAD_MESSAGE", error.to_string()),
            Ok(None) => rejection("BAD_MESSAGE", "request: must be attach or inspect".to_owned()),
            Ok(Some(host_memory_request::Request::Attach(attach))) => self.attach(process, attach).await,
            Ok(Some(host_memory_request::Request::Inspect(inspect))) => self.inspect(process, inspect).await,
        }
    }

    fn caller(&self, process: Process, control_socket: Option<String>) -> Caller {
        Caller { process, uid: self.uid, control_socket }
    }

    async fn attach(&self, process: Process, attach: wire::Attach) -> ReplyMessages {
        let form = match attach.form() {
            wire::MemoryForm::Descriptors => MemoryForm::Descriptors,
            wire::MemoryForm::Paths => MemoryForm::Paths,
            wire::MemoryForm::Unspecified => {
                return rejection("BAD_MESSAGE", format!("attach.form = {}: must be 1 or 2", attach.form));
            }
        };
        let vm = match self.check_own_vm("attach.vm", &attach.vm) {
            Err(rejection) => return rejection,
            Ok(vm) => vm,
        };
        let control_socket = match parse_control_socket(attach.control_socket) {
            Err(rejection) => return rejection,
            Ok(control_socket) => control_socket,
        };
        let caller = self.caller(process, control_socket);
        let memory = self.driver.attach(vm.clone(), caller, form).await;
        if memory.is_ok() {
            self.vm.get_or_init(|| vm);
        }
        reply::memory_messages(memory)
    }

    async fn inspect(&self, process: Process, inspect: wire::Inspect) -> ReplyMessages {
        match self.check_own_vm("inspect.vm", &inspect.vm) {
            Err(rejection) => rejection,
            Ok(vm) => {
                reply::memory_messages(self.driver.inspect_memory(vm, self.caller(process, None)).await)
            }
        }
    }

    async fn send(&self, reply: ReplyMessages) -> io::Result<()> {
        let sent = async {
            for (message, descriptors) in reply {
                let bytes = message.encode_to_vec();
                let send = |socket: &OwnedFd| datagram::send(socket, &bytes, &descriptors);
                self.socket.async_io(tokio::io::Interest::WRITABLE, send).await?;
            }
            Ok(())
        };
        let within = HOST_MEMORY_SEND_TIMEOUT.as_duration();
        tokio::time::timeout(within, sent).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn control_socket_is_an_absolute_path_that_fits_an_address() {
        let rejected = |path: &str| parse_control_socket(path.to_owned()).is_err();
        let long = format!("/{}", "x".repeat(200));
        assert_eq!(["vm.sock", "./vm.sock", &long, "/run/a\nb.sock"].map(rejected), [true; 4]);
        assert_eq!(parse_control_socket(String::new()).ok(), Some(None));
        assert_eq!(parse_control_socket("/run/a.sock".into()).ok(), Some(Some("/run/a.sock".into())));
    }

    #[test]
    fn connection_of_an_ended_process_loses_its_permissions() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = process::identify_process(child.id()).unwrap();
        check_runs(&process).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let expected = format!("process {} has ended", process.pid);
        assert_eq!(check_runs(&process).unwrap_err().to_string(), expected);
    }
}
