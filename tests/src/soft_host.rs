//! Rack with one host whose real agent serves soft memory, for tests.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use proto::v1 as wire;

use crate::rack::{Plan, Rack};

/// Rack with one host, whose agent serves soft memory and metrics.
#[derive(Debug)]
pub struct SoftHost {
    /// The rack.
    pub rack: Rack,
    metrics: SocketAddr,
}

impl SoftHost {
    /// Starts the rack with soft memory of this size, and waits until the agent has reported.
    pub async fn start(size_mib: u64) -> Self {
        let metrics = TcpListener::bind("127.0.0.1:0")
            .expect("a port is free")
            .local_addr()
            .expect("a socket has an address");
        let agent_toml_extra = format!(
            "metrics_listen = \"{metrics}\"\n[soft_memory]\nsize_mib = {size_mib}\nreserve_mib = 1\n\
             stalled_percent = 100\nover_reclaim_percent = 0\n"
        );
        let rack = Rack::start(Plan { hosts: vec![vec![0]], agent_toml_extra, ..Plan::small(1) }).await;
        let host = Self { rack, metrics };
        host.next_report().await;
        host
    }

    /// Returns the path of the socket of the daemon.
    pub fn socket(&self) -> PathBuf {
        self.rack.dir().join("h0/soft-memory.sock")
    }

    /// Returns the last report of the agent, if the manager has received one since `at`.
    async fn report_since(&self, at: SystemTime) -> Option<wire::SoftMemory> {
        let request = wire::GetSoftMemoryRequest { host: "h0".into() };
        let report = self.rack.admin().await.get_soft_memory(request).await.ok()?.into_inner();
        let since = at.duration_since(UNIX_EPOCH).expect("the clock is right").as_millis();
        (u128::from(report.at_unix_ms) > since).then_some(report)
    }

    /// Waits for a report of the agent from after the call.
    pub async fn next_report(&self) -> wire::SoftMemory {
        let now = SystemTime::now();
        self.rack.wait_for("a report", async |_| self.report_since(now).await.is_some()).await;
        self.report_since(now).await.expect("the manager keeps the report")
    }

    /// Returns the value of a metric of soft memory.
    pub fn metric(&self, name: &str) -> u64 {
        let mut agent = TcpStream::connect(self.metrics).expect("the agent serves metrics");
        agent
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: h0\r\nConnection: close\r\n\r\n")
            .expect("the agent reads");
        let mut text = String::new();
        agent.read_to_string(&mut text).expect("metrics are text");
        let line = format!("tarn_soft_memory_{name}{{host=\"h0\",backend=\"emulated\"}} ");
        let value = text.lines().find_map(|candidate| candidate.strip_prefix(&line)?.parse().ok());
        value.unwrap_or_else(|| panic!("no metric {line} in {text}"))
    }
}
