//! Tests of a listener with clients that authorize no request.

use std::{
    collections::VecDeque,
    io::{Read as _, Write as _},
    net::TcpStream as StdStream,
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;

use super::*;
use crate::tls;

/// Time limit of a client that must be served or closed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Number of clients that request a reply during the flood.
const CLIENTS: usize = 8;
/// Number of connections that the flood opens between two steps of a client. The listener closes a
/// connection only after [`UNADMITTED_CONNECTIONS_PER_SOURCE_MAX`] newer ones.
const FLOOD_BETWEEN_STEPS: usize = UNADMITTED_CONNECTIONS_PER_SOURCE_MAX / 2;
/// Number of connections that the flood keeps open.
const FLOOD_CONNECTIONS: usize = 2 * UNADMITTED_CONNECTIONS_PER_SOURCE_MAX;

/// Starts a server that admits every client that sends a byte, and returns the byte.
async fn start_server(tls: TlsConfig) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_, receiver) = watch::channel(tls);
    let mut connections = accept(Listener::Tcp(listener), receiver, Arc::default());
    tokio::spawn(async move {
        while let Some(Ok(mut connection)) = connections.next().await {
            tokio::spawn(async move {
                while let Ok(byte) = connection.read_u8().await {
                    connection.peer.admit();
                    if connection.write_u8(byte).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// Connections that send nothing.
struct Flood {
    address: SocketAddr,
    streams: VecDeque<StdStream>,
}

impl Flood {
    /// Opens connections, and closes the oldest ones above [`FLOOD_CONNECTIONS`].
    fn open(&mut self, count: usize) {
        let connect = |_| StdStream::connect_timeout(&self.address, TIMEOUT).unwrap();
        self.streams.extend((0..count).map(connect));
        let surplus = self.streams.len().saturating_sub(FLOOD_CONNECTIONS);
        self.streams.drain(..surplus);
    }
}

/// One thread opens the connections of the flood and of the clients, so that the number of
/// connections between two steps of a client does not depend on the load of the machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_is_served_during_a_flood_of_connections() {
    let mut flood = Flood { address: start_server(None).await, streams: VecDeque::new() };
    flood.open(FLOOD_CONNECTIONS);
    for client in 0..CLIENTS {
        let mut stream = StdStream::connect_timeout(&flood.address, TIMEOUT).unwrap();
        flood.open(FLOOD_BETWEEN_STEPS);
        stream.write_all(&[7]).unwrap();
        flood.open(UNADMITTED_CONNECTIONS_PER_SOURCE_MAX);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut reply = [0];
        stream.read_exact(&mut reply).unwrap_or_else(|error| panic!("client {client}: {error}"));
        assert_eq!(reply, [7]);
    }
}

/// Opens more connections than allowed, and returns whether exactly the oldest one is closed.
async fn is_only_the_oldest_closed(address: SocketAddr) -> bool {
    let mut streams = Vec::new();
    for _ in 0..=UNADMITTED_CONNECTIONS_PER_SOURCE_MAX {
        streams.push(TcpStream::connect(address).await.unwrap());
    }
    let mut byte = [0];
    let closed = tokio::time::timeout(TIMEOUT, streams[0].read(&mut byte)).await;
    let is_open = |stream: &TcpStream| {
        let read = stream.try_read(&mut [0]);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    !matches!(closed, Err(_) | Ok(Ok(1))) && streams[1..].iter().all(is_open)
}

#[tokio::test]
async fn idle_connection_above_the_limit_closes_the_oldest() {
    assert!(is_only_the_oldest_closed(start_server(None).await).await);
}

#[tokio::test]
async fn unfinished_tls_handshake_above_the_limit_closes_the_oldest() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = tls::load(&tls::tests::write_files(folder.path(), 2020, 2500)).unwrap();
    assert!(is_only_the_oldest_closed(start_server(Some(loaded.config)).await).await);
}
