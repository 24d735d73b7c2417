//! Metrics of soft memory. The series are those of the host: clients are too many for series of their own.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::{Registry, Unit},
};
use units::Bytes;

use super::{gauge_value, raise};
use crate::soft_memory_report::{Client, Report};

/// Metrics of the state of soft memory.
#[derive(Debug, Default)]
pub(super) struct SoftMemoryMetrics {
    limit: Gauge,
    total: Gauge,
    free: Gauge,
    budget: Gauge,
    used: Gauge,
    clients: Gauge,
    silent: Gauge,
    granted: Counter,
    reclaimed: Counter,
    denied: Counter,
    unanswered: Counter,
}

impl SoftMemoryMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let help = "Largest permitted size of soft memory";
        registry.register_with_unit("soft_memory_limit", help, Unit::Bytes, self.limit.clone());
        let help = "Size of soft memory for which the memory of the host suffices";
        registry.register_with_unit("soft_memory_total", help, Unit::Bytes, self.total.clone());
        let help = "Soft memory that is in no budget";
        registry.register_with_unit("soft_memory_free", help, Unit::Bytes, self.free.clone());
        let help = "Budgets of the clients with the largest budgets";
        registry.register_with_unit("soft_memory_budget", help, Unit::Bytes, self.budget.clone());
        let help = "Soft memory that the clients with the largest budgets use";
        registry.register_with_unit("soft_memory_used", help, Unit::Bytes, self.used.clone());
        registry.register("soft_memory_clients", "Processes with soft memory", self.clients.clone());
        let help = "Clients that have not answered the last demand in time, or have lost their connection";
        registry.register("soft_memory_silent_clients", help, self.silent.clone());
        let help = "Soft memory that was granted to clients";
        registry.register_with_unit("soft_memory_granted", help, Unit::Bytes, self.granted.clone());
        let help = "Soft memory that clients gave up for demands";
        registry.register_with_unit("soft_memory_reclaimed", help, Unit::Bytes, self.reclaimed.clone());
        let help = "Requests for soft memory that were denied";
        registry.register("soft_memory_denied_requests", help, self.denied.clone());
        let help = "Demands of soft memory that were not answered in time";
        registry.register("soft_memory_unanswered_demands", help, self.unanswered.clone());
    }

    pub fn set(&self, report: &Report) {
        let sum =
            |pages: fn(&Client) -> u64| report.clients.iter().map(pages).map(Bytes::pages).sum::<Bytes>();
        for (gauge, bytes) in [
            (&self.limit, report.limit),
            (&self.total, report.total),
            (&self.free, report.free),
            (&self.budget, sum(|client| client.state.sample.budget)),
            (&self.used, sum(|client| client.state.sample.used())),
        ] {
            gauge.set(gauge_value(bytes.get()));
        }
        let silent = report.clients.iter().filter(|client| client.state.is_silent).count();
        self.clients.set(gauge_value(report.client_count as u64));
        self.silent.set(gauge_value(silent as u64));
        raise(&self.granted, Bytes::pages(report.counters.granted).get());
        raise(&self.reclaimed, Bytes::pages(report.counters.reclaimed).get());
        raise(&self.denied, report.counters.denied);
        raise(&self.unanswered, report.counters.unanswered);
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use soft::budget::{ClientReport, ClientSample, Counters, Pid};
    use units::{UnixMs, UserId};

    use super::*;

    fn client(pid: u32, budget: u64, claimed_used: u64, is_silent: bool) -> Client {
        let sample = ClientSample { pid: Pid(pid), budget, claimed_used, footprint: 1024 };
        let state = ClientReport { sample, counters: Counters::default(), is_silent };
        Client { user: UserId::ROOT, program: "cache".to_owned(), state }
    }

    fn report(counters: Counters, clients: Vec<Client>) -> Report {
        Report {
            at: UnixMs(7),
            limit: Bytes::mib(8),
            total: Bytes::mib(6),
            free: Bytes::mib(3),
            counters,
            client_count: clients.len(),
            clients,
        }
    }

    fn series(metrics: &SoftMemoryMetrics) -> Vec<String> {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn clients_are_summed_and_counters_follow_the_report() {
        let metrics = SoftMemoryMetrics::default();
        let counters = Counters { requests: 9, granted: 512, denied: 3, reclaimed: 256, unanswered: 1 };
        metrics.set(&report(counters, vec![client(5, 512, 256, false), client(9, 256, 300, true)]));
        let counters = Counters { requests: 9, granted: 768, denied: 4, ..counters };
        metrics.set(&report(counters, vec![client(5, 512, 256, false), client(9, 256, 300, true)]));
        let expected = [
            "soft_memory_limit_bytes 8388608",
            "soft_memory_total_bytes 6291456",
            "soft_memory_free_bytes 3145728",
            "soft_memory_budget_bytes 3145728",
            "soft_memory_used_bytes 2097152",
            "soft_memory_clients 2",
            "soft_memory_silent_clients 1",
            "soft_memory_granted_bytes_total 3145728",
            "soft_memory_reclaimed_bytes_total 1048576",
            "soft_memory_denied_requests_total 4",
            "soft_memory_unanswered_demands_total 1",
        ];
        assert_eq!(series(&metrics), expected);
        metrics.set(&report(counters, Vec::new()));
        let ended = ["soft_memory_budget_bytes 0", "soft_memory_used_bytes 0", "soft_memory_clients 0"];
        let series = series(&metrics);
        assert_eq!(series[3..6], ended);
        assert_eq!(series[7], "soft_memory_granted_bytes_total 3145728");
    }
}
