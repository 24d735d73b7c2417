//! Accepts connections to a control socket, up to a limit. Each connection holds a permit until it
//! is closed.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use units::limits::CONTROL_CONNECTIONS_MAX;

/// Delay between a failed accept(2) and the next attempt. The process may lack file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Connection of a client. The permit counts the connection until it is closed.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    _permit: OwnedSemaphorePermit,
}

/// Accepts up to [`CONTROL_CONNECTIONS_MAX`] connections at a time. Further clients wait in the
/// backlog of the socket.
pub(super) fn accept(listener: UnixListener) -> ReceiverStream<io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(1);
    let permits = Arc::new(Semaphore::new(CONTROL_CONNECTIONS_MAX));
    tokio::spawn(async move {
        loop {
            let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
            match listener.accept().await {
                Ok((stream, _)) => {
                    if sender.send(Ok(Connection { stream, _permit: permit })).await.is_err() {
                        return; // the gRPC server has stopped
                    }
                }
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    });
    ReceiverStream::new(receiver)
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
