//! Accepts connections to the gRPC server on a TCP or unix socket. Performs TLS handshakes, limits
//! the number of connections, and closes idle connections. [`super::identity`] authorizes the
//! calls.

mod activity;
mod limiter;
mod socket;

use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rustls_pki_types::CertificateDer;
use service_files::log_limit::RejectionLog;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{mpsc, watch},
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig, server::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use units::limits::{
    ACCEPTED_CONNECTIONS_QUEUED_MAX, CONNECTION_ADMISSION_TIMEOUT, UNADMITTED_CONNECTIONS_PER_SOURCE_MAX,
};

use activity::{ConnectionActivity, IdleTimer};
use limiter::{Admission, ConnectionLimiter, Eviction};

pub use activity::CallCounterLayer;
pub use socket::{bind, socket_path};

/// Delay before the next attempt to accept a connection after a failure.
const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(100);
/// Number of evictions after which the manager pauses before it accepts another TCP connection. With
/// [`EVICTION_PAUSE`], it gives every client at least 16 ms to authorize its first request.
const EVICTIONS_PER_PAUSE: u64 = 8;
/// Length of the pause after [`EVICTIONS_PER_PAUSE`] evictions.
const EVICTION_PAUSE: Duration = Duration::from_millis(1);
/// Minimum time for a client to authorize its first request, in pauses.
const PAUSES_PER_EVICTION: u64 = UNADMITTED_CONNECTIONS_PER_SOURCE_MAX as u64 / EVICTIONS_PER_PAUSE;
const _: () = assert!(PAUSES_PER_EVICTION >= 16);
/// Reason in the log if a new connection closes another one.
const EVICTION_REASON: &str = "too many connections without an authorized request: the oldest was closed";

/// Listening socket of the gRPC server.
#[derive(Debug)]
pub enum Listener {
    /// Socket that listens on an IP address and TCP port.
    Tcp(TcpListener),
    /// Socket that listens on a path.
    Unix(UnixListener),
}

/// Client of a connection, attached as extension to each request.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Network address or local process of the client.
    pub origin: ConnectionOrigin,
    /// Verified certificate chain of the client, leaf first; empty without TLS.
    pub certificates: Arc<[CertificateDer<'static>]>,
    activity: Arc<ConnectionActivity>,
}

impl Peer {
    /// Records that a request of this connection was authorized. Connections without an authorized
    /// request are closed after a short time.
    pub fn admit(&self) {
        self.activity.admit();
    }
}

/// Network address or local process from which a connection comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionOrigin {
    /// Address of a TCP client.
    Tcp(SocketAddr),
    /// Local process that is connected through the unix socket.
    Unix {
        /// ID of the user who runs the process.
        uid: u32,
        /// Process ID, if the kernel reports it.
        pid: Option<i32>,
        /// Whether the user is root or the manager's user.
        is_trusted: bool,
    },
}

impl fmt::Display for ConnectionOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix { uid, pid: Some(pid), .. } => write!(f, "process {pid} of user {uid}"),
            Self::Unix { uid, pid: None, .. } => write!(f, "a process of user {uid}"),
        }
    }
}

/// TLS configuration of new connections, which a reload replaces. `None` disables TLS.
pub type TlsConfig = Option<Arc<ServerConfig>>;

/// Accepts connections until the returned stream is dropped. The stream yields connections after
/// their TLS handshakes.
pub fn accept(
    listener: Listener,
    tls: watch::Receiver<TlsConfig>,
    rejections: Arc<RejectionLog>,
) -> ReceiverStream<io::Result<Connection>> {
    let (ready, connections) = mpsc::channel(ACCEPTED_CONNECTIONS_QUEUED_MAX);
    let acceptor = Acceptor { tls, rejections, limiter: Arc::default(), ready };
    tokio::spawn(acceptor.run(listener));
    ReceiverStream::new(connections)
}

#[derive(Clone)]
struct Acceptor {
    tls: watch::Receiver<TlsConfig>,
    rejections: Arc<RejectionLog>,
    limiter: Arc<ConnectionLimiter>,
    ready: mpsc::Sender<io::Result<Connection>>,
}

impl Acceptor {
    async fn run(self, listener: Listener) {
        let mut evictions = 0;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.ready.closed() => return,
            };
            match accepted {
                Ok((stream, origin)) => {
                    if self.start_handshake(stream, origin) {
                        evictions += 1;
                        wait_after_eviction(&listener, evictions).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_AFTER).await; // file descriptors can be exhausted for a while
                }
            }
        }
    }

    /// Starts the handshake of a connection, or closes the connection if there are too many. Returns
    /// whether another connection was evicted.
    fn start_handshake(&self, stream: Stream, origin: ConnectionOrigin) -> bool {
        match self.limiter.acquire(&origin) {
            Ok(Admission { permit, eviction, has_evicted }) => {
                if has_evicted {
                    self.rejections.log(&origin, &EVICTION_REASON);
                }
                let activity = Arc::new(ConnectionActivity::new(permit));
                tokio::spawn(self.clone().prepare_connection(stream, origin, activity, eviction));
                has_evicted
            }
            Err(limit) => {
                self.rejections.log(&origin, &limit);
                false
            }
        }
    }

    /// Performs the TLS handshake, if TLS is configured, and passes the connection to the server.
    async fn prepare_connection(
        self,
        stream: Stream,
        origin: ConnectionOrigin,
        activity: Arc<ConnectionActivity>,
        mut eviction: Eviction,
    ) {
        let tls = self.tls.borrow().clone();
        let timeout = CONNECTION_ADMISSION_TIMEOUT.as_duration();
        let handshake = tokio::select! {
            handshake = tokio::time::timeout(timeout, perform_handshake(stream, tls)) => handshake,
            () = eviction.wait() => return,
        };
        let (stream, certificates) = match handshake {
            Ok(Ok(handshake)) => handshake,
            Ok(Err(error)) => return self.rejections.log(&origin, &format!("TLS handshake failed: {error}")),
            Err(_) => {
                let within = CONNECTION_ADMISSION_TIMEOUT;
                return self.rejections.log(&origin, &format!("TLS handshake took longer than {within}"));
            }
        };
        let idle = IdleTimer::new(Arc::clone(&activity), eviction);
        let peer = Peer { origin, certificates, activity };
        let connection = Connection { stream, peer, idle };
        let _ = self.ready.send(Ok(connection)).await; // fails only if the server has ended
    }
}

impl Listener {
    async fn accept(&self) -> io::Result<(Stream, ConnectionOrigin)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                let _ = stream.set_nodelay(true); // on failure, small replies are only delayed
                Ok((Stream::Tcp(stream), ConnectionOrigin::Tcp(address)))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred()?;
                let (uid, own) = (peer.uid(), rustix::process::geteuid().as_raw());
                let origin =
                    ConnectionOrigin::Unix { uid, pid: peer.pid(), is_trusted: uid == 0 || uid == own };
                Ok((Stream::Unix(stream), origin))
            }
        }
    }
}

/// Lets other tasks run after an eviction, so that clients that send a request are not evicted before
/// the request is processed. Does not pause on a unix socket, where connections fail while the
/// kernel's queue is full.
async fn wait_after_eviction(listener: &Listener, evictions: u64) {
    match listener {
        Listener::Tcp(_) if evictions.is_multiple_of(EVICTIONS_PER_PAUSE) => {
            tokio::time::sleep(EVICTION_PAUSE).await;
        }
        _ => tokio::task::yield_now().await,
    }
}

async fn perform_handshake(
    stream: Stream,
    tls: TlsConfig,
) -> io::Result<(Stream, Arc<[CertificateDer<'static>]>)> {
    match (stream, tls) {
        (Stream::Tcp(stream), Some(config)) => {
            let stream = TlsAcceptor::from(config).accept(stream).await?;
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
            Ok((Stream::Tls(Box::new(stream)), certificates.into()))
        }
        (stream, _) => Ok((stream, Arc::default())),
    }
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

/// Connection that is ready for requests. Reads and writes fail after the connection was idle for
/// too long. Writes also check this, because a client that does not read its replies blocks the
/// server's reads.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Peer,
    idle: IdleTimer,
}

impl Connection {
    fn check_idle(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.idle.poll_expired(cx) {
            Poll::Ready(()) => Err(io::Error::new(io::ErrorKind::TimedOut, "closing an idle connection")),
            Poll::Pending => Ok(()),
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

macro_rules! on_stream {
    ($self:ident, $call:ident, $($argument:expr),*) => {
        match &mut $self.get_mut().stream {
            Stream::Tcp(stream) => Pin::new(stream).$call($($argument),*),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).$call($($argument),*),
            Stream::Unix(stream) => Pin::new(stream).$call($($argument),*),
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_idle(cx)?;
        on_stream!(self, poll_read, cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_idle(cx)?;
        on_stream!(self, poll_write, cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_idle(cx)?;
        on_stream!(self, poll_flush, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, poll_shutdown, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_idle(cx)?;
        on_stream!(self, poll_write_vectored, cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Tcp(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
            Stream::Unix(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests;
