//! The agent's own socket, where a VMM fetches the memory of its VM: one protobuf message per SOCK_SEQPACKET datagram,
//! descriptors beside it. Who asks is what the kernel says, not what the caller says. A handler translates, asks the
//! driver and translates back; the other end is the room `host_memory`.

mod answer;

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use host_memory::datagram;
use pool::agent::Process;
use prost::Message as _;
use proto::v1::{self as wire, host_memory_request};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with, sockopt,
};
use tokio::{
    io::unix::AsyncFd,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use units::Name;
use units::limits::{DATAGRAM_BYTES_MAX, HOST_MEMORY_ANSWER_WITHIN, HOST_MEMORY_CONNECTIONS_MAX};

use self::answer::{Answer, refused};
use crate::{
    driver,
    host::{Form, process},
    readiness,
};

/// Connections the kernel holds while all places are taken.
const BACKLOG: i32 = 128;

/// Why the socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// Something else is there.
    #[error("{} is there and is no socket", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
}

/// The socket, ready for callers.
#[derive(Debug)]
pub struct HostMemory {
    listener: AsyncFd<OwnedFd>,
    allowed_uids: BTreeSet<u32>,
    places: Arc<Semaphore>,
}

impl HostMemory {
    /// Listens. The lock of the runtime directory says that a socket left there is nobody's.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn listen(path: &Path, allowed_uids: BTreeSet<u32>) -> Result<Self, ListenError> {
        let io_error = |doing| move |errno| ListenError::Io { doing, path: path.to_owned(), errno };
        remove_old(path)?;
        let listener = open_listener(path).map_err(io_error("listen on"))?;
        // Anybody may knock; who is let in is decided by uid.
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(io_error("set the mode of"))?;
        let listener = readiness::watch(listener).map_err(io_error("listen on"))?;
        Ok(Self { listener, allowed_uids, places: Arc::new(Semaphore::new(HOST_MEMORY_CONNECTIONS_MAX)) })
    }

    /// Answers callers until the driver ends.
    pub async fn serve(self, driver: driver::Handle) {
        let allowed_uids = Arc::new(self.allowed_uids);
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await.expect("it is never closed");
            let accepted = tokio::select! {
                accepted = self.listener.async_io(tokio::io::Interest::READABLE, accept) => accepted,
                () = driver.ended() => return,
            };
            match accepted
                .and_then(|connection| Caller::new(connection, driver.clone(), &allowed_uids, place))
            {
                Ok(caller) => drop(tokio::spawn(caller.serve())),
                Err(error) => {
                    tracing::warn!(%error, "caller lost");
                    tokio::task::yield_now().await; // out of descriptors: others may give some back
                }
            }
        }
    }
}

fn remove_old(path: &Path) -> Result<(), ListenError> {
    let io_error = |errno| ListenError::Io { doing: "remove", path: path.to_owned(), errno };
    match fs::symlink_metadata(path) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(there) if !there.file_type().is_socket() => Err(ListenError::NotASocket { path: path.to_owned() }),
        Ok(_) => fs::remove_file(path).map_err(io_error),
        Err(errno) => Err(io_error(errno)),
    }
}

fn open_listener(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

/// One connection, and who is at its other end.
struct Caller {
    connection: AsyncFd<OwnedFd>,
    driver: driver::Handle,
    uid: u32,
    process: Result<Process, process::ProcessError>,
    allowed: bool,
    _place: OwnedSemaphorePermit,
}

impl Caller {
    /// The caller is looked up at once, while it is most likely still there: a pid alone comes round again.
    fn new(
        connection: OwnedFd,
        driver: driver::Handle,
        allowed_uids: &BTreeSet<u32>,
        place: OwnedSemaphorePermit,
    ) -> io::Result<Self> {
        let peer = sockopt::socket_peercred(&connection)?;
        let process = process::identify(peer.pid.as_raw_nonzero().get().unsigned_abs());
        let uid = peer.uid.as_raw();
        let connection = readiness::watch(connection)?;
        Ok(Self { connection, driver, uid, process, allowed: allowed_uids.contains(&uid), _place: place })
    }

    async fn serve(self) {
        if let Err(error) = self.answer_all().await {
            tracing::debug!(uid = self.uid, %error, "caller lost");
        }
    }

    async fn answer_all(&self) -> io::Result<()> {
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        loop {
            let receive = |socket: &OwnedFd| datagram::receive(socket, &mut buffer);
            let bytes = self.connection.async_io(tokio::io::Interest::READABLE, receive).await?;
            let answer = match bytes {
                Some(0) => return Ok(()), // closed
                Some(bytes) => self.answer(&buffer[..bytes]).await,
                None => refused("BAD_MESSAGE", format!("a message has at most {DATAGRAM_BYTES_MAX} bytes")),
            };
            self.send(answer).await?;
        }
    }

    async fn answer(&self, bytes: &[u8]) -> Answer {
        if !self.allowed {
            let why = format!("processes of uid {} may not: see agent.allowed_uids", self.uid);
            return refused("PEER_NOT_ALLOWED", why);
        }
        let process = match &self.process {
            Ok(process) => process.clone(),
            Err(error) => return refused("PEER_NOT_ALLOWED", units::chain(error)),
        };
        match wire::HostMemoryRequest::decode(bytes).map(|message| message.request) {
            Err(error) => refused("BAD_MESSAGE", error.to_string()),
            Ok(None) => refused("BAD_MESSAGE", "request: must be attach, touched or look".to_owned()),
            Ok(Some(host_memory_request::Request::Attach(attach))) => self.attach(process, attach).await,
            Ok(Some(host_memory_request::Request::Touched(touched))) => self.touched(process, touched).await,
            Ok(Some(host_memory_request::Request::Look(look))) => self.look(process, look).await,
        }
    }

    async fn attach(&self, process: Process, attach: wire::Attach) -> Answer {
        let form = match attach.form() {
            wire::MemoryForm::Descriptors => Form::Descriptors,
            wire::MemoryForm::Paths => Form::Paths { uid: self.uid },
            wire::MemoryForm::Unspecified => {
                return refused("BAD_MESSAGE", format!("attach.form = {}: must be 1 or 2", attach.form));
            }
        };
        match Name::new(&attach.vm) {
            Err(error) => refused("BAD_MESSAGE", format!("attach.vm: {error}")),
            Ok(vm) => answer::memory(self.driver.attach(vm, process, form).await),
        }
    }

    async fn look(&self, process: Process, look: wire::Look) -> Answer {
        match Name::new(&look.vm) {
            Err(error) => refused("BAD_MESSAGE", format!("look.vm: {error}")),
            Ok(vm) => answer::memory(self.driver.show(vm, process, Form::Shown { uid: self.uid }).await),
        }
    }

    async fn touched(&self, process: Process, touched: wire::Touched) -> Answer {
        match Name::new(&touched.vm) {
            Err(error) => refused("BAD_MESSAGE", format!("touched.vm: {error}")),
            Ok(vm) => {
                let noted = self.driver.touched(vm, process, touched.local_bytes, touched.pool_bytes).await;
                answer::noted(noted)
            }
        }
    }

    async fn send(&self, answer: Answer) -> io::Result<()> {
        let sent = async {
            for (message, descriptors) in answer {
                let bytes = message.encode_to_vec();
                let send = |socket: &OwnedFd| datagram::send(socket, &bytes, &descriptors);
                self.connection.async_io(tokio::io::Interest::WRITABLE, send).await?;
            }
            Ok(())
        };
        let within = HOST_MEMORY_ANSWER_WITHIN.as_duration();
        tokio::time::timeout(within, sent).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}
