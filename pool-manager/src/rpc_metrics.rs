//! Counts gRPC calls by method and status code, with the usual names of gRPC server metrics. Label
//! values come only from the `.proto` files and gRPC's codes, so that clients cannot add label
//! values.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use tonic::{Code, Status, codegen::http};

/// Labels of metrics about a method.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RpcMethod {
    grpc_type: &'static str,
    grpc_service: &'static str,
    grpc_method: &'static str,
}

/// Labels for calls of unknown methods.
const UNKNOWN_METHOD: RpcMethod =
    RpcMethod { grpc_type: "unknown", grpc_service: "unknown", grpc_method: "unknown" };

/// Labels of finished calls: method and status code.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallResult {
    grpc_type: &'static str,
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_code: String,
}

/// Metrics of all gRPC calls, with their registry.
#[derive(Debug)]
pub struct RpcMetrics {
    registry: Mutex<Registry>,
    methods: HashMap<String, RpcMethod>,
    started_calls: Family<RpcMethod, Counter>,
    handled_calls: Family<CallResult, Counter>,
    handling_seconds: Family<RpcMethod, Histogram, fn() -> Histogram>,
}

impl Default for RpcMetrics {
    fn default() -> Self {
        let method = |(grpc_service, grpc_method, grpc_type): &(&'static str, &'static str, &'static str)| {
            let method = RpcMethod { grpc_type, grpc_service, grpc_method };
            (format!("/{grpc_service}/{grpc_method}"), method)
        };
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.000_25, 4.0, 10));
        let metrics = Self {
            registry: Mutex::new(Registry::default()),
            methods: proto::v1::RPC_METHODS.iter().map(method).collect(),
            started_calls: Family::default(),
            handled_calls: Family::default(),
            handling_seconds: Family::new_with_constructor(seconds),
        };
        metrics.with_registry(|r| {
            r.register("grpc_server_started", "Started calls", metrics.started_calls.clone());
            r.register("grpc_server_handled", "Finished calls by gRPC code", metrics.handled_calls.clone());
            let help = "Duration of calls, including streams";
            r.register_with_unit(
                "grpc_server_handling",
                help,
                Unit::Seconds,
                metrics.handling_seconds.clone(),
            );
        });
        metrics
    }
}

impl RpcMetrics {
    /// Calls `f` with the registry of these metrics.
    pub fn with_registry<T>(&self, f: impl FnOnce(&mut Registry) -> T) -> T {
        f(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts the start of a call. `path` is the HTTP path of the method.
    pub(crate) fn start_call(self: &Arc<Self>, path: &str) -> RpcCall {
        let method = self.methods.get(path).cloned().unwrap_or(UNKNOWN_METHOD);
        self.started_calls.get_or_create(&method).inc();
        RpcCall { metrics: Arc::clone(self), method, since: Instant::now(), code: Code::Cancelled }
    }
}

/// Guard that counts one call as finished when it is dropped. The code of a call that the client
/// abandons is `Cancelled`.
pub(crate) struct RpcCall {
    metrics: Arc<RpcMetrics>,
    method: RpcMethod,
    since: Instant,
    pub(crate) code: Code,
}

impl RpcCall {
    /// Records the status in headers or trailers, if there is one.
    pub(crate) fn record_status(&mut self, headers: &http::HeaderMap) {
        if let Some(status) = Status::from_header_map(headers) {
            self.code = status.code();
        }
    }
}

impl Drop for RpcCall {
    fn drop(&mut self) {
        let RpcMethod { grpc_type, grpc_service, grpc_method } = self.method;
        let grpc_code = match self.code {
            Code::Ok => "OK".to_owned(),
            Code::Cancelled => "Canceled".to_owned(), // the standard label value; other codes have the same name in Rust
            other => format!("{other:?}"),
        };
        let handled_calls = CallResult { grpc_type, grpc_service, grpc_method, grpc_code };
        self.metrics.handled_calls.get_or_create(&handled_calls).inc();
        let seconds = self.since.elapsed().as_secs_f64();
        self.metrics.handling_seconds.get_or_create(&self.method).observe(seconds);
    }
}
