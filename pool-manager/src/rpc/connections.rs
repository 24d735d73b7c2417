//! Connections to the gRPC server: accepted from a TCP or unix socket, authenticated by TLS where
//! configured, limited in number, and closed when idle. Permissions of callers are decided in
//! [`super::identity`].

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
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{mpsc, watch},
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig, server::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use units::limits::{CONNECTION_ADMISSION_TIMEOUT, CONNECTIONS_ACCEPTED_QUEUED_MAX};

use super::rejection_log::RejectionLog;
use activity::{Activity, IdleTimer};
use limiter::ConnectionLimiter;

pub use activity::CountCallsLayer;
pub use socket::{SocketError, bind};

/// Delay after a failed accept, for example without free descriptors.
const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(100);

/// Listening socket.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix socket.
    Unix(UnixListener),
}

/// Caller of a connection; an extension of each of its requests.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Source.
    pub origin: Origin,
    /// Certificate chain over TLS, the leaf first; empty otherwise.
    pub certificates: Arc<[CertificateDer<'static>]>,
    activity: Arc<Activity>,
}

impl Peer {
    /// Records that a request of this connection was admitted, so that the connection may stay
    /// open.
    pub fn admit(&self) {
        self.activity.admit();
    }
}

/// Source of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Network address.
    Tcp(SocketAddr),
    /// Process of this machine, through the unix socket.
    Unix {
        /// User.
        uid: u32,
        /// Process, if the kernel reports it.
        pid: Option<i32>,
        /// The user is root or the manager's user.
        is_trusted: bool,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix { uid, pid: Some(pid), .. } => write!(f, "process {pid} of user {uid}"),
            Self::Unix { uid, pid: None, .. } => write!(f, "a process of user {uid}"),
        }
    }
}

/// TLS configuration of new connections; replaced when certificates are renewed. `None` without
/// TLS.
pub type TlsConfig = Option<Arc<ServerConfig>>;

/// Accepts connections until the server ends, and returns those ready for requests.
pub fn accept(
    listener: Listener,
    tls: watch::Receiver<TlsConfig>,
    rejections: Arc<RejectionLog>,
) -> ReceiverStream<io::Result<Connection>> {
    let (ready, connections) = mpsc::channel(CONNECTIONS_ACCEPTED_QUEUED_MAX);
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
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.ready.closed() => return,
            };
            match accepted {
                Ok((stream, origin)) => self.serve(stream, origin),
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_RETRY_AFTER).await; // descriptors may be used up
                }
            }
        }
    }

    /// Serves a connection, or closes it if there are too many.
    fn serve(&self, stream: Stream, origin: Origin) {
        match self.limiter.acquire(&origin) {
            Ok(permit) => {
                let activity = Arc::new(Activity::new(permit));
                tokio::spawn(self.clone().prepare(stream, origin, activity));
            }
            Err(limit) => self.rejections.log(&origin, &limit),
        }
    }

    /// Performs the TLS handshake, if configured, and passes the connection on.
    async fn prepare(self, stream: Stream, origin: Origin, activity: Arc<Activity>) {
        let tls = self.tls.borrow().clone();
        let handshake =
            tokio::time::timeout(CONNECTION_ADMISSION_TIMEOUT.as_duration(), secure(stream, tls)).await;
        let (stream, certificates) = match handshake {
            Ok(Ok(handshake)) => handshake,
            Ok(Err(error)) => return self.rejections.log(&origin, &format!("TLS handshake failed: {error}")),
            Err(_) => {
                let within = CONNECTION_ADMISSION_TIMEOUT;
                return self.rejections.log(&origin, &format!("TLS handshake took longer than {within}"));
            }
        };
        let idle = IdleTimer::new(Arc::clone(&activity));
        let peer = Peer { origin, certificates, activity };
        let connection = Connection { stream, peer, idle };
        let _ = self.ready.send(Ok(connection)).await; // the server may have ended
    }
}

impl Listener {
    async fn accept(&self) -> io::Result<(Stream, Origin)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                let _ = stream.set_nodelay(true); // small replies must not be delayed; without it everything is only slower
                Ok((Stream::Tcp(stream), Origin::Tcp(address)))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = stream.peer_cred()?;
                let (uid, own) = (peer.uid(), rustix::process::geteuid().as_raw());
                let origin = Origin::Unix { uid, pid: peer.pid(), is_trusted: uid == 0 || uid == own };
                Ok((Stream::Unix(stream), origin))
            }
        }
    }
}

async fn secure(stream: Stream, tls: TlsConfig) -> io::Result<(Stream, Arc<[CertificateDer<'static>]>)> {
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

/// Connection that is ready for requests. Its use fails once it has been idle for too long. Writes
/// check that, too: a peer that reads nothing keeps the server from reading.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Peer,
    idle: IdleTimer,
}

impl Connection {
    fn check_idle(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.idle.poll_expired(cx) {
            Poll::Ready(()) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the connection was idle for too long"))
            }
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
