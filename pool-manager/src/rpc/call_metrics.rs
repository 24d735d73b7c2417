//! Counts the calls of a gRPC service, and reports requests that cannot be decoded as client
//! errors.

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http_body::{Frame, SizeHint};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service, http},
    server::NamedService,
};

use super::status;
use crate::rpc_metrics::{RpcCall, RpcMetrics};

/// Prefix of tonic's error message for a request that cannot be decoded.
const UNDECODABLE_MESSAGE_PREFIX: &str = "failed to decode Protobuf message";

/// Wrapper of a gRPC service that counts its calls.
#[derive(Clone)]
pub struct CountedService<S> {
    service: S,
    metrics: Arc<RpcMetrics>,
}

impl<S> fmt::Debug for CountedService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CountedService")
    }
}

impl<S> CountedService<S> {
    /// Wraps a service and counts its calls in `metrics`.
    pub fn new(service: S, metrics: &Arc<RpcMetrics>) -> Self {
        Self { service, metrics: Arc::clone(metrics) }
    }
}

impl<S: NamedService> NamedService for CountedService<S> {
    const NAME: &'static str = S::NAME;
}

type ResponseFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl<S> Service<http::Request<Body>> for CountedService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> ResponseFuture {
        let mut call = self.metrics.start_call(request.uri().path());
        let response = self.service.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            reclassify_decode_error(response.headers_mut());
            call.record_status(response.headers());
            Ok(response.map(|body| Body::new(CountedBody { body, call })))
        })
    }
}

/// Changes the status of a request that cannot be decoded from INTERNAL, which tonic reports, to
/// INVALID_ARGUMENT.
fn reclassify_decode_error(headers: &mut http::HeaderMap) {
    if let Some(status) = Status::from_header_map(headers)
        && status.code() == Code::Internal
        && status.message().starts_with(UNDECODABLE_MESSAGE_PREFIX)
    {
        let status =
            status::error_status(Code::InvalidArgument, "MALFORMED_MESSAGE", status.message().to_owned());
        // `add_header` fails only if a header cannot contain the message, and then leaves the
        // status unchanged.
        let _ = status.add_header(headers);
    }
}

/// Response body that records the status of the call from the trailers.
struct CountedBody {
    body: Body,
    call: RpcCall,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                frame.trailers_ref().into_iter().for_each(|trailers| self.call.record_status(trailers));
            }
            Poll::Ready(Some(Err(status))) => self.call.code = status.code(),
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
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

    /// Service that always returns the same status code.
    #[derive(Clone)]
    struct ConstantService(Code);

    impl Service<http::Request<Body>> for ConstantService {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            std::future::ready(Ok(Status::new(self.0, "test").into_http()))
        }
    }

    fn page(metrics: &RpcMetrics) -> String {
        metrics.with_registry(|registry| exposition::page(&[registry], "test", "0").unwrap())
    }

    /// Sends a message of 2 bytes whose field claims 255 bytes or more.
    #[tokio::test]
    async fn undecodable_request_returns_invalid_argument() {
        let (_, health) = tonic_health::server::health_reporter();
        let request = http::Request::builder()
            .uri("/grpc.health.v1.Health/Check")
            .header("content-type", "application/grpc")
            .body(Body::new(axum::body::Body::from(vec![0, 0, 0, 0, 2, 0x0a, 0xff])))
            .unwrap();
        let response = CountedService::new(health, &Arc::default()).call(request).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(UNDECODABLE_MESSAGE_PREFIX), "{status:?}");
    }

    #[test]
    fn other_internal_errors_keep_their_code() {
        let mut headers = Status::internal("a bug").into_http::<Body>().headers().clone();
        reclassify_decode_error(&mut headers);
        assert_eq!(Status::from_header_map(&headers).unwrap().code(), Code::Internal);
    }

    #[tokio::test]
    async fn calls_are_counted_by_method_and_code() {
        let metrics = Arc::new(RpcMetrics::default());
        for (path, code) in [
            ("/tarn.v1.Scheduler/Reserve", Code::NotFound),
            ("/tarn.v1.Scheduler/Invented", Code::Unimplemented),
        ] {
            let request = http::Request::builder().uri(path).body(Body::empty()).unwrap();
            drop(CountedService::new(ConstantService(code), &metrics).call(request).await.unwrap());
        }
        drop(metrics.start_call("/tarn.v1.Admin/Watch"));
        let page = page(&metrics);
        for line in [
            "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"tarn.v1.Scheduler\",grpc_method=\"Reserve\",grpc_code=\"NotFound\"} 1",
            "grpc_server_handled_total{grpc_type=\"unknown\",grpc_service=\"unknown\",grpc_method=\"unknown\",grpc_code=\"Unimplemented\"} 1",
            "grpc_server_handled_total{grpc_type=\"server_stream\",grpc_service=\"tarn.v1.Admin\",grpc_method=\"Watch\",grpc_code=\"Canceled\"} 1",
            "grpc_server_handling_seconds_count{grpc_type=\"unary\",grpc_service=\"tarn.v1.Scheduler\",grpc_method=\"Reserve\"} 1",
        ] {
            assert!(page.contains(line), "{line} in {page}");
        }
        assert!(!page.contains("Invented"), "{page}");
    }
}
