//! Tracks the open calls of each connection, to detect idle connections.

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;
use units::limits::{CONNECTION_ADMISSION_TIMEOUT, CONNECTION_IDLE_TIMEOUT};

use super::{
    Peer,
    limiter::{ConnectionPermit, Eviction},
};

/// Open calls and idle time of one connection.
#[derive(Debug)]
pub(super) struct ConnectionActivity {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    permit: ConnectionPermit,
    open_calls: usize,
    /// Time at which the connection was accepted or its last call ended, whichever is later.
    idle_since: Instant,
}

impl ConnectionActivity {
    pub(super) fn new(permit: ConnectionPermit) -> Self {
        Self { state: Mutex::new(State { permit, open_calls: 0, idle_since: Instant::now() }) }
    }

    pub(super) fn admit(&self) {
        self.state.lock().expect("no thread panics under this lock").permit.admit();
    }

    fn start_call(self: &Arc<Self>) -> OpenCall {
        self.state.lock().expect("no thread panics under this lock").open_calls += 1;
        OpenCall(Arc::clone(self))
    }

    /// Returns the time at which the connection will be closed unless it is used earlier. A
    /// connection without an authorized request is closed after a short time, even with open calls.
    fn deadline(&self, now: Instant) -> Instant {
        let state = self.state.lock().expect("no thread panics under this lock");
        match (state.permit.is_unadmitted(), state.open_calls) {
            (true, _) => state.idle_since.min(now) + CONNECTION_ADMISSION_TIMEOUT.as_duration(),
            (false, 0) => state.idle_since + CONNECTION_IDLE_TIMEOUT.as_duration(),
            (false, _) => now + CONNECTION_IDLE_TIMEOUT.as_duration(),
        }
    }
}

/// Guard of an open call; the call ends when the guard is dropped.
#[derive(Debug)]
struct OpenCall(Arc<ConnectionActivity>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().expect("no thread panics under this lock");
        state.open_calls -= 1;
        if !state.permit.is_unadmitted() {
            state.idle_since = Instant::now();
        }
    }
}

/// Timer that expires when a connection has been idle for too long, or was evicted.
#[derive(Debug)]
pub(super) struct IdleTimer {
    eviction: Eviction,
    activity: Arc<ConnectionActivity>,
    sleep: Pin<Box<Sleep>>,
}

impl IdleTimer {
    pub(super) fn new(activity: Arc<ConnectionActivity>, eviction: Eviction) -> Self {
        let first = CONNECTION_ADMISSION_TIMEOUT.as_duration().min(CONNECTION_IDLE_TIMEOUT.as_duration());
        Self { eviction, activity, sleep: Box::pin(tokio::time::sleep(first)) }
    }

    pub(super) fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.eviction.poll_occurred(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            ready!(self.sleep.as_mut().poll(cx));
            let now = Instant::now();
            let deadline = self.activity.deadline(now);
            if deadline <= now {
                return Poll::Ready(());
            }
            // Sleep for at least 1 ms, so that the loop does not spin.
            self.sleep.as_mut().reset(deadline.max(now + Duration::from_millis(1)));
        }
    }
}

/// Layer that counts the open calls of each connection. Streams are open calls until they end.
#[derive(Clone, Debug, Default)]
pub struct CallCounterLayer;

impl<S> Layer<S> for CallCounterLayer {
    type Service = CallCounter<S>;

    fn layer(&self, inner: S) -> CallCounter<S> {
        CallCounter { inner }
    }
}

/// Wrapper that counts the open calls of a service.
#[derive(Clone, Debug)]
pub struct CallCounter<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for CallCounter<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let open = request.extensions().get::<Peer>().map(|peer| peer.activity.start_call());
        let response = self.inner.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| Body::new(CountedBody { body, _open: open }))) })
    }
}

/// Body of a response. The call stays open until the body is dropped.
#[derive(Debug)]
struct CountedBody {
    body: Body,
    _open: Option<OpenCall>,
}

impl HttpBody for CountedBody {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::connections::{ConnectionOrigin, limiter::ConnectionLimiter};

    const ADMISSION_TIMEOUT: Duration = CONNECTION_ADMISSION_TIMEOUT.as_duration();
    const IDLE_MAX: Duration = CONNECTION_IDLE_TIMEOUT.as_duration();

    fn activity(uid: u32) -> Arc<ConnectionActivity> {
        let origin = ConnectionOrigin::Unix { uid, pid: None, is_trusted: uid == 0 };
        let admission = Arc::new(ConnectionLimiter::default()).acquire(&origin).unwrap();
        Arc::new(ConnectionActivity::new(admission.permit))
    }

    #[test]
    fn unadmitted_connection_expires_despite_an_open_call() {
        let activity = activity(1000);
        let start = Instant::now();
        assert!(activity.deadline(start) <= start + ADMISSION_TIMEOUT);
        let call = activity.start_call();
        let later = start + ADMISSION_TIMEOUT;
        assert!(activity.deadline(later) <= later);
        drop(call);
        assert!(activity.deadline(later) <= later);
        activity.admit();
        assert!(activity.deadline(later) > later);
    }

    #[test]
    fn admitted_connection_expires_after_idle_time_without_calls() {
        let activity = activity(0);
        let start = Instant::now();
        let call = activity.start_call();
        let late = start + 10 * IDLE_MAX;
        assert!(activity.deadline(late) > late);
        drop(call);
        let call_end = Instant::now();
        assert!(activity.deadline(late) <= call_end + IDLE_MAX);
        assert!(activity.deadline(late) >= start + IDLE_MAX);
    }
}
