//! Tests of the socket of the daemon. This process is the client.

use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use soft::{
    budget::Settings,
    protocol::{MESSAGE_BYTES, VERSION},
};
use tokio::runtime::Runtime;
use units::{Name, limits::SOFT_CLIENT_PAGES_MAX};

use super::*;

/// Running daemon with 1 MiB.
struct Served {
    dir: tempfile::TempDir,
    _runtime: Runtime,
}

impl Served {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let user = crate::user::current_user();
        let config = Config {
            socket: None,
            allowed_uids: None,
            size: Bytes::mib(1),
            reserve: Bytes::mib(1),
            stalled_percent: 100,
            reservation: None,
            settings: Settings::default(),
        };
        let inputs = Inputs {
            config,
            allowed_uids: BTreeSet::from([user]),
            slices: None,
            proc: Sysfs::at("/proc"),
            reports: Arc::default(),
            metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "emulated")),
        };
        let runtime = Runtime::new().unwrap();
        let path = dir.path().join("socket");
        let server = runtime.block_on(async { SoftMemoryServer::listen(&path, inputs) }).unwrap();
        runtime.spawn(server.serve());
        Self { dir, _runtime: runtime }
    }

    fn connect(&self) -> Client {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(self.dir.path().join("socket")).unwrap()).unwrap();
        let client = Client(socket);
        client.send(&ClientMessage::Hello { version: VERSION, budget: 0 }.encode());
        client
    }
}

struct Client(OwnedFd);

impl Client {
    fn send(&self, bytes: &[u8]) {
        assert_eq!(send(&self.0, bytes, SendFlags::NOSIGNAL).unwrap(), bytes.len());
    }

    /// Returns the next message, or `None` at the end of the connection.
    fn receive(&self) -> Option<DaemonMessage> {
        let mut buffer = [0; MESSAGE_BYTES];
        let (_, bytes) = recv(&self.0, &mut buffer, RecvFlags::empty()).unwrap();
        (bytes > 0).then(|| DaemonMessage::decode(&buffer[..bytes]).unwrap())
    }
}

/// Answer to a client without budget.
const WELCOME: DaemonMessage = DaemonMessage::Welcome { budget: 0, maximum: SOFT_CLIENT_PAGES_MAX };

#[test]
fn invalid_message_ends_the_connection_with_the_reason() {
    let served = Served::start();
    for invalid in [&[1; 5][..], &[255; MESSAGE_BYTES], &[0; 100]] {
        let client = served.connect();
        assert_eq!(client.receive(), Some(WELCOME));
        client.send(invalid);
        assert_eq!(client.receive(), Some(DaemonMessage::Refused(Refusal::InvalidMessage)));
        assert_eq!(client.receive(), None);
    }
}

#[test]
fn process_can_connect_immediately_after_the_end_of_its_connection() {
    let served = Served::start();
    for _ in 0..500 {
        assert_eq!(served.connect().receive(), Some(WELCOME));
    }
    let first = served.connect();
    assert_eq!(first.receive(), Some(WELCOME));
    let second = served.connect();
    assert_eq!(second.receive(), Some(DaemonMessage::Refused(Refusal::AlreadyConnected)));
}
