//! HTTP server for Prometheus, and for checks of orchestrators: `/metrics`, `/livez` (the process works) and `/readyz` (the
//! manager serves requests, because it is the leader).

use std::net::SocketAddr;

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    routing::get,
};
use prometheus_client::{metrics::gauge::Gauge, registry::Registry};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use super::{ServeError, io_error, wait_until_stopping};
use crate::{metrics::MetricsSnapshot, rpc::ServiceContext};

/// Starts the server of a manager that serves requests.
pub(super) async fn start(
    address: SocketAddr,
    shared: ServiceContext,
    stopping: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let page = move || {
        let snapshot = shared.driver.read(|manager, _| MetricsSnapshot::of(manager));
        let snapshot = snapshot.map_err(|error| error.to_string())?;
        shared.metrics.page(&snapshot).map_err(|error| error.to_string())
    };
    serve(address, page, (StatusCode::OK, "ok"), stopping).await
}

/// Starts the server of a standby.
pub(super) async fn start_standby(
    address: SocketAddr,
    stopping: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let page = || {
        let (mut registry, leader) = (Registry::with_prefix("tarn"), Gauge::<i64>::default());
        registry.register(
            "manager_leader",
            "1 if this manager serves requests, 0 if it is a standby",
            leader,
        );
        let page = exposition::page(&[&registry], env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"));
        page.map_err(|error| error.to_string())
    };
    serve(address, page, (StatusCode::SERVICE_UNAVAILABLE, "standby"), stopping).await
}

async fn serve(
    address: SocketAddr,
    page: impl Fn() -> Result<String, String> + Clone + Send + Sync + 'static,
    readiness: (StatusCode, &'static str),
    stopping: watch::Receiver<bool>,
) -> Result<JoinHandle<()>, ServeError> {
    let failed = io_error("listen on", format!("manager.metrics_listen {address}"));
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let metrics = async move || page().map(|text| ([(CONTENT_TYPE, exposition::CONTENT_TYPE)], text));
    let app = Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(async || "ok"))
        .route("/readyz", get(async move || readiness));
    let stopped = wait_until_stopping(stopping);
    Ok(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).with_graceful_shutdown(stopped).await {
            tracing::error!(%error, "metrics server ended");
        }
    }))
}
