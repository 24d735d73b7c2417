//! Connection of one client: reads requests, executes them, and sends their replies.
//!
//! A client that does not read its replies is not read from either, so its buffers stay small. All requests that
//! arrive together are executed before their replies are sent together.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, timeout, timeout_at},
};
use units::limits::{
    SOFT_CACHE_AUTHENTICATION_TIMEOUT, SOFT_CACHE_DISCARD_TIMEOUT, SOFT_CACHE_DISCARDED_BYTES_MAX,
    SOFT_CACHE_FLUSH_BYTES, SOFT_CACHE_READ_BYTES, SOFT_CACHE_RETAINED_BYTES_MAX, SOFT_CACHE_WRITE_TIMEOUT,
};

use crate::{
    call::Call,
    commands::execute,
    reply::{Output, Reply},
    request::{ProtocolError, RequestParser},
    server::{ClientSlot, Server, unix_now},
    session::Session,
};

thread_local! {
    /// Buffer for one read of any connection of this thread, so that idle connections need no buffer.
    static READ_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; SOFT_CACHE_READ_BYTES]);
}

/// Reason why a connection is closed that is not due to the client's request.
#[derive(Debug, thiserror::Error)]
enum Closure {
    #[error("protocol error: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("possible attack: the client sent an HTTP request")]
    Http,
    #[error("the replies exceed the limit of their size")]
    Replies,
    #[error("the buffers of all connections exceed their limit")]
    Buffers,
    #[error("the client did not read its replies in time")]
    SlowReader,
    #[error("the client did not authenticate in time")]
    NotAuthenticated,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Connection of one client.
struct Connection<S> {
    stream: S,
    server: Arc<Server>,
    session: Session,
    parser: RequestParser,
    /// Received bytes that are not executed yet: the start of a request, or requests that wait for the replies
    /// to earlier ones.
    input: Vec<u8>,
    output: Output,
    /// Whether `input` may contain complete requests, the first of which may wait for an answer of the daemon.
    is_paused: bool,
    /// Reason to close the connection after the next replies.
    failure: Option<ProtocolError>,
    /// Size of the buffers that the server has counted.
    counted_bytes: usize,
    _slot: ClientSlot,
}

/// Serves a client until it closes the connection, or violates the protocol or a limit.
pub async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    server: Arc<Server>,
    (slot, session): (ClientSlot, Session),
) {
    let mut connection = Connection {
        stream,
        server: server.clone(),
        session,
        parser: RequestParser::default(),
        input: Vec::new(),
        output: Output::default(),
        is_paused: false,
        failure: None,
        counted_bytes: 0,
        _slot: slot,
    };
    match connection.run().await {
        Ok(()) => {}
        Err(Closure::Io(error)) => {
            tracing::debug!(client = %connection.session.client(), %error, "connection failed");
        }
        Err(closure) => {
            server.counters.closed.fetch_add(1, Ordering::Relaxed);
            server.log.log(&connection.session.client(), &closure);
            if matches!(closure, Closure::Protocol(_)) {
                connection.discard_input().await;
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    async fn run(&mut self) -> Result<(), Closure> {
        let server = self.server.clone();
        let mut stopped = pin!(server.stopped());
        let deadline = Instant::now() + SOFT_CACHE_AUTHENTICATION_TIMEOUT.as_duration();
        let mut is_open = !server.is_stopping();
        while is_open {
            let is_authenticated = self.session.is_authenticated;
            let read = poll_fn(|cx| match self.poll_read(cx) {
                Poll::Ready(result) => Poll::Ready(result),
                Poll::Pending => stopped.as_mut().poll(cx).map(|()| Ok(false)),
            });
            is_open = match is_authenticated {
                true => read.await?,
                false => timeout_at(deadline, read).await.map_err(|_| Closure::NotAuthenticated)??,
            };
            yield_to_ready_tasks().await;
            self.send_replies().await?;
            while self.is_paused {
                self.wait_for_budget().await;
                self.execute_input();
                self.send_replies().await?;
            }
            if self.session.is_http {
                return Err(Closure::Http);
            }
            if let Some(failure) = self.failure {
                return Err(failure.into());
            }
            is_open &= !self.session.is_closing && !server.is_stopping();
        }
        Ok(())
    }

    /// Reads and executes requests. Returns whether the connection is open.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        READ_BUFFER.with_borrow_mut(|buffer| {
            let mut read = ReadBuf::new(buffer);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
            let received = read.filled();
            if self.input.is_empty() {
                let executed = self.execute(received);
                self.input.extend_from_slice(&received[executed..]);
            } else {
                self.input.extend_from_slice(received);
                self.execute_input();
            }
            Poll::Ready(Ok(!received.is_empty()))
        })
    }

    /// Waits for the daemon's answer to a request for the next command, if it lacks budget. Other connections are
    /// served meanwhile.
    async fn wait_for_budget(&mut self) {
        if let Some(answer) = self.session.awaited_answer.take() {
            self.session.budget_waits += 1;
            self.server.memory.wait_for(answer).await;
        }
    }

    fn execute_input(&mut self) {
        let mut input = std::mem::take(&mut self.input);
        let executed = self.execute(&input);
        if executed < input.len() {
            input.drain(..executed);
            self.input = input;
        }
    }

    /// Executes the complete requests at the start of `received`, until the size of the replies reaches
    /// [`SOFT_CACHE_FLUSH_BYTES`] or a request lacks budget. Returns the number of executed bytes.
    fn execute(&mut self, received: &[u8]) -> usize {
        let now = unix_now();
        let mut executed = 0;
        self.is_paused = false;
        while !self.session.is_closing && !self.output.has_overflowed {
            if self.output.bytes.len() >= SOFT_CACHE_FLUSH_BYTES {
                self.is_paused = true;
                break;
            }
            let rest = &received[executed..];
            let reply = Reply::new(&mut self.output, self.session.protocol);
            match self.parser.parse(rest, self.session.limits()) {
                Ok(None) => break,
                Ok(Some(len)) => {
                    let mut call = Call { server: &self.server, session: &mut self.session, reply, now };
                    execute(&mut call, self.parser.request(rest));
                    self.parser.finish();
                    if self.session.awaited_answer.is_some() {
                        self.is_paused = true;
                        break;
                    }
                    self.session.budget_waits = 0;
                    executed += len;
                }
                Err(error) => {
                    { reply }.error(&format!("ERR Protocol error: {error}"));
                    self.failure = Some(error);
                    self.session.is_closing = true;
                }
            }
        }
        executed
    }

    /// Sends all replies.
    async fn send_replies(&mut self) -> Result<(), Closure> {
        if self.output.has_overflowed {
            return Err(Closure::Replies);
        }
        if !self.count_buffers() {
            return Err(Closure::Buffers);
        }
        let mut sent = 0;
        while sent < self.output.bytes.len() {
            let rest = &self.output.bytes[sent..];
            let stream = &mut self.stream;
            // The timer is needed only if the client does not read.
            sent += match poll_fn(|cx| Poll::Ready(Pin::new(&mut *stream).poll_write(cx, rest))).await {
                Poll::Ready(written) => check_written(written)?,
                Poll::Pending => {
                    let write = poll_fn(|cx| Pin::new(&mut *stream).poll_write(cx, rest));
                    let written = timeout(SOFT_CACHE_WRITE_TIMEOUT.as_duration(), write).await;
                    check_written(written.map_err(|_| Closure::SlowReader)?)?
                }
            };
        }
        self.output.bytes.clear();
        self.output.bytes.shrink_to(SOFT_CACHE_RETAINED_BYTES_MAX);
        self.count_buffers();
        Ok(())
    }

    /// Reads and discards input after the last reply, within limits: the kernel discards a reply if the connection is
    /// closed with unread input.
    async fn discard_input(&mut self) {
        self.input = Vec::new();
        let stream = &mut self.stream;
        let discard = async {
            poll_fn(|cx| Pin::new(&mut *stream).poll_shutdown(cx)).await.ok()?;
            let mut missing = SOFT_CACHE_DISCARDED_BYTES_MAX;
            loop {
                let len = poll_fn(|cx| {
                    READ_BUFFER.with_borrow_mut(|buffer| {
                        let mut read = ReadBuf::new(buffer);
                        ready!(Pin::new(&mut *stream).poll_read(cx, &mut read))?;
                        Poll::Ready(io::Result::Ok(read.filled().len()))
                    })
                });
                missing = missing.checked_sub(len.await.ok().filter(|len| *len > 0)?)?;
            }
        };
        // The connection ends in any case.
        let _: Result<Option<()>, _> = timeout(SOFT_CACHE_DISCARD_TIMEOUT.as_duration(), discard).await;
    }

    /// Informs the server about the size of the buffers. Returns whether all buffers are within the limit.
    fn count_buffers(&mut self) -> bool {
        let bytes = self.input.capacity() + self.output.bytes.capacity() + self.parser.memory_bytes();
        let before = std::mem::replace(&mut self.counted_bytes, bytes);
        before == bytes || self.server.resize_buffers(before, bytes)
    }
}

impl<S> Drop for Connection<S> {
    fn drop(&mut self) {
        self.server.resize_buffers(self.counted_bytes, 0);
    }
}

/// Lets the tasks run first that are ready already. Clients then receive their replies together, and send their next
/// requests together, so that fewer calls of epoll are necessary.
async fn yield_to_ready_tasks() {
    let mut is_second_poll = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut is_second_poll, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Returns the number of written bytes, at least 1.
fn check_written(written: io::Result<usize>) -> io::Result<usize> {
    match written? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        written => Ok(written),
    }
}
