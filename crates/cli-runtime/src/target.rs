//! Address of one manager, and connections to it.

use std::{io, time::Duration};

use tonic::transport::{Channel, Endpoint};

/// Delay before the next attempt to connect while the queue of a unix socket is full.
const QUEUE_FULL_RETRY_AFTER: Duration = Duration::from_millis(10);

/// Manager to which a connection can be opened.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Address of the manager.
    pub(crate) uri: String,
    pub(crate) endpoint: Endpoint,
}

/// Connects, and retries while the queue of a unix socket is full. The server then processes other
/// connections, and connect(2) fails with EAGAIN instead of waiting.
pub(crate) async fn connect_to_queue(endpoint: &Endpoint) -> Result<Channel, tonic::transport::Error> {
    loop {
        match endpoint.connect().await {
            Err(error) if is_queue_full(&error) => tokio::time::sleep(QUEUE_FULL_RETRY_AFTER).await,
            connected => return connected,
        }
    }
}

fn is_queue_full(error: &tonic::transport::Error) -> bool {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|errno| errno.kind() == io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    };

    use super::*;

    #[tokio::test]
    async fn connect_waits_while_the_queue_of_a_unix_socket_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manager.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let socket =
            || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let listening = socket();
        bind(&listening, &address).unwrap();
        listen(&listening, 1).unwrap();
        let mut queued = Vec::new();
        while queued.last().is_none_or(|(_, connected): &(_, Result<(), _>)| connected.is_ok()) {
            let client = socket();
            let connected = connect(&client, &address);
            queued.push((client, connected));
        }
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap();
        assert!(is_queue_full(&endpoint.connect().await.unwrap_err()));
        let mut connecting = std::pin::pin!(connect_to_queue(&endpoint));
        let waited = tokio::time::timeout(QUEUE_FULL_RETRY_AFTER * 5, &mut connecting).await;
        assert!(waited.is_err(), "connected although the queue is full");
        let listener = UnixListener::from(listening);
        let _accepted: Vec<_> = std::iter::from_fn(|| listener.accept().ok()).collect();
        connecting.await.unwrap();
    }
}
