//! Tests of a listener with clients that authorize no request.

use std::{net::TcpStream as StdStream, time::Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;

use super::*;
use crate::tls;

/// Time limit of a client that must be served or closed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Number of connections that the flood keeps open.
const FLOOD_CONNECTIONS: usize = 1000;
const FLOOD_TIME: Duration = Duration::from_secs(3);

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

/// Keeps [`FLOOD_CONNECTIONS`] connections open that send nothing, and replaces closed ones. Returns
/// the number of opened connections.
fn flood(address: SocketAddr) -> usize {
    let (start, mut opened) = (Instant::now(), 0);
    let mut streams = std::collections::VecDeque::new();
    while start.elapsed() < FLOOD_TIME {
        if let Ok(stream) = StdStream::connect_timeout(&address, TIMEOUT) {
            streams.push_back(stream);
            opened += 1;
        }
        if streams.len() > FLOOD_CONNECTIONS {
            streams.pop_front();
        }
    }
    opened
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_is_served_during_a_flood_of_connections() {
    let address = start_server(None).await;
    let flood = std::thread::spawn(move || flood(address));
    let mut served = 0;
    while !flood.is_finished() {
        let echo = async {
            let mut stream = TcpStream::connect(address).await?;
            stream.write_u8(7).await?;
            stream.read_u8().await
        };
        let reply = tokio::time::timeout(TIMEOUT, echo).await.expect("timeout: the client is not served");
        assert_eq!(reply.expect("the client was evicted"), 7);
        served += 1;
    }
    let opened = flood.join().unwrap();
    assert!(served > 0 && opened > UNADMITTED_CONNECTIONS_PER_SOURCE_MAX, "{served} served, {opened} opened");
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
