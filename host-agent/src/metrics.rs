//! Metrics of one agent for Prometheus. Every series has the name of the host as a label. Counters
//! are updated when events happen; gauges are updated at each request for metrics.

mod eviction;
mod soft_memory;
mod tiering;

use std::{
    collections::BTreeMap,
    sync::atomic::AtomicU64,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use pool::{agent::Agent, protocol::ObservedState};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use units::{Name, ReservationId, SLICE};

use self::{eviction::EvictionMetrics, soft_memory::SoftMemoryMetrics, tiering::TieringMetrics};
use crate::{
    eviction_report,
    host::{Counters, Usage},
    shares::{Report, State},
    soft_memory_report, tiering_report,
};

/// Kind of a host call, which is a label of metrics.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Call {
    /// Call that opens a slice.
    Online,
    /// Call that closes a slice.
    Offline,
    /// Call that zeroes a slice.
    Scrub,
    /// Call that closes a slice of an earlier agent.
    CloseOrphan,
}

impl EncodeLabelValue for Call {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Online => "online",
            Self::Offline => "offline",
            Self::Scrub => "scrub",
            Self::CloseOrphan => "clear",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabel {
    call: Call,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TouchedLabel {
    vm: String,
    memory: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VmLabel {
    vm: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TenantLabel {
    tenant: String,
}

/// Measurement of a running VM, which is a label of metrics.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Measurement {
    /// Accesses to pool memory.
    Accesses,
    /// Processor counters.
    Counters,
    /// Signs of a shortage of processors or memory.
    Pressure,
}

impl EncodeLabelValue for Measurement {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Accesses => "accesses",
            Self::Counters => "counters",
            Self::Pressure => "pressure",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct MeasurementLabel {
    measurement: Measurement,
}

/// Metrics of an agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    /// 1 while the agent is connected to a manager of its rack, else 0.
    pub connected: Gauge,
    /// Number of rejected desired states.
    pub commands_rejected: Counter,
    call_seconds: Family<CallLabel, Histogram, fn() -> Histogram>,
    calls_failed: Family<CallLabel, Counter>,
    slices: Family<StateLabel, Gauge>,
    vms: Gauge,
    touched: Family<TouchedLabel, Gauge>,
    unmeasured: Family<TouchedLabel, Gauge>,
    overflow: Family<VmLabel, Gauge>,
    scrubbed: Counter,
    pages_migrated: Counter,
    page_migration_failures: Counter,
    slices_changing: Gauge,
    vm_sampling_failures: Family<MeasurementLabel, Counter>,
    epochs: Family<StateLabel, Counter>,
    tenant_memory: Family<TenantLabel, Gauge>,
    tenant_bandwidth: Family<TenantLabel, Gauge>,
    tenant_stalled: Family<TenantLabel, Gauge<f64, AtomicU64>>,
    tenant_gain: Family<TenantLabel, Gauge<f64, AtomicU64>>,
    tenant_refaults: Family<TenantLabel, Gauge<f64, AtomicU64>>,
    tiering: TieringMetrics,
    eviction: EvictionMetrics,
    soft_memory: SoftMemoryMetrics,
}

/// Creates a histogram of durations in seconds, with buckets from 50 µs to 26 s.
fn seconds_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_05, 2.0, 20))
}

impl Metrics {
    /// Creates the metrics of a host; all values are 0.
    pub fn new(host: &Name, backend: &'static str) -> Self {
        let labels = [("host".into(), host.to_string().into()), ("backend".into(), backend.into())];
        let metrics = Self {
            registry: Mutex::new(Registry::with_prefix_and_labels("tarn", labels.into_iter())),
            connected: Gauge::default(),
            commands_rejected: Counter::default(),
            call_seconds: Family::new_with_constructor(seconds_histogram),
            calls_failed: Family::default(),
            slices: Family::default(),
            vms: Gauge::default(),
            touched: Family::default(),
            unmeasured: Family::default(),
            overflow: Family::default(),
            scrubbed: Counter::default(),
            pages_migrated: Counter::default(),
            page_migration_failures: Counter::default(),
            slices_changing: Gauge::default(),
            vm_sampling_failures: Family::default(),
            epochs: Family::default(),
            tenant_memory: Family::default(),
            tenant_bandwidth: Family::default(),
            tenant_stalled: Family::default(),
            tenant_gain: Family::default(),
            tenant_refaults: Family::default(),
            tiering: TieringMetrics::default(),
            eviction: EvictionMetrics::default(),
            soft_memory: SoftMemoryMetrics::default(),
        };
        metrics.register();
        metrics.register_shares();
        metrics.tiering.register(&mut metrics.registry());
        metrics.eviction.register(&mut metrics.registry());
        metrics.soft_memory.register(&mut metrics.registry());
        metrics
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self) {
        let mut registry = self.registry();
        registry.register(
            "agent_connected",
            "1 while a manager of the host's rack is connected",
            self.connected.clone(),
        );
        registry.register(
            "agent_commands_rejected",
            "Desired states that the agent rejected",
            self.commands_rejected.clone(),
        );
        let help = "Duration of a host call, which opens, closes or zeroes a slice";
        registry.register_with_unit("agent_host_call", help, Unit::Seconds, self.call_seconds.clone());
        registry.register("agent_host_calls_failed", "Host calls that failed", self.calls_failed.clone());
        registry.register(
            "agent_slices",
            "Slices in the agent's report to the manager, by state",
            self.slices.clone(),
        );
        registry.register("agent_vms", "VMs with a running process", self.vms.clone());
        let help = "Memory that the guest of a VM has touched, measured by the allocated size of its files";
        registry.register_with_unit("vm_touched", help, Unit::Bytes, self.touched.clone());
        let help = "Memory of a VM whose touched part cannot be measured, such as device-dax memory";
        registry.register_with_unit("vm_unmeasured", help, Unit::Bytes, self.unmeasured.clone());
        let help = "Pool memory of a VM that is on local nodes because the pool's node was full, estimated from a sample of pages";
        registry.register_with_unit("agent_vm_overflow", help, Unit::Bytes, self.overflow.clone());
        let help = "Memory zeroed by this host, including scrubs in progress";
        registry.register_with_unit("agent_scrub", help, Unit::Bytes, self.scrubbed.clone());
        let help = "Pages of VMs that were migrated from local memory back to the pool's node";
        registry.register("agent_pages_migrated", help, self.pages_migrated.clone());
        let help = "Pages of VMs that could not be migrated from local memory back to the pool's node";
        registry.register("agent_page_migration_failures", help, self.page_migration_failures.clone());
        let help = "Slices with a change in progress; a slice whose change takes longer than 20 s is stuck in the kernel";
        registry.register("agent_slices_changing", help, self.slices_changing.clone());
        let help = "Measurements of running VMs that failed, without those that this host does not support";
        registry.register("agent_vm_sampling_failures", help, self.vm_sampling_failures.clone());
    }

    fn register_shares(&self) {
        let mut registry = self.registry();
        let help = "Epochs of Symbiosis, by result";
        registry.register("symbiosis_epochs", help, self.epochs.clone());
        let help = "Local memory share of a tenant";
        registry.register_with_unit("tenant_memory_share", help, Unit::Bytes, self.tenant_memory.clone());
        let help = "Link bandwidth share of a tenant, in each direction";
        registry.register("tenant_link_share_bytes_per_second", help, self.tenant_bandwidth.clone());
        let help = "Fraction of the last epoch in which some task of a tenant was stalled on memory or I/O";
        registry.register("tenant_stalled_ratio", help, self.tenant_stalled.clone());
        let help = "Pages of a tenant that were reclaimed and faulted back, per second";
        registry.register("tenant_refaults_per_second", help, self.tenant_refaults.clone());
        let help = "Estimated throughput of a tenant relative to an equal split";
        registry.register("tenant_gain_ratio", help, self.tenant_gain.clone());
    }

    /// Records the result of an epoch of Symbiosis.
    pub fn observe_shares(&self, report: &Report) {
        let state = match report.state {
            State::Set => "set",
            State::Unchanged => "unchanged",
            State::Blocked => "blocked",
        };
        self.epochs.get_or_create(&StateLabel { state }).inc();
        if report.state == State::Blocked {
            return; // the shares have not changed
        }
        self.tenant_memory.clear();
        self.tenant_bandwidth.clear();
        self.tenant_stalled.clear();
        self.tenant_gain.clear();
        self.tenant_refaults.clear();
        for tenant in report.tenants.iter().filter(|tenant| tenant.measured.is_some()) {
            let label = TenantLabel { tenant: tenant.name.to_string() };
            self.tenant_memory.get_or_create(&label).set(gauge_value(tenant.share.memory_bytes()));
            self.tenant_bandwidth.get_or_create(&label).set(gauge_value(tenant.share.bandwidth_bytes_s()));
            let stalled = tenant.measured.map_or(0.0, |measured| measured.stalled_fraction);
            self.tenant_stalled.get_or_create(&label).set(stalled);
            self.tenant_gain.get_or_create(&label).set(tenant.gain);
            let refaults = tenant.measured.map_or(0.0, |measured| measured.refaults);
            self.tenant_refaults.get_or_create(&label).set(refaults);
        }
    }

    /// Records the result of a step of fair tiering.
    pub fn observe_tiering(&self, report: &tiering_report::Report) {
        self.tiering.observe(report);
    }

    /// Records the result of a cycle of early eviction.
    pub fn observe_eviction(&self, report: &eviction_report::Report) {
        self.eviction.observe(report);
    }

    /// Sets the metrics of soft memory to a report.
    pub fn set_soft_memory(&self, report: &soft_memory_report::Report) {
        self.soft_memory.set(report);
    }

    /// Records the duration and the result of a host call.
    pub fn record_call(&self, call: Call, took: Duration, ok: bool) {
        self.call_seconds.get_or_create(&CallLabel { call }).observe(took.as_secs_f64());
        if !ok {
            self.calls_failed.get_or_create(&CallLabel { call }).inc();
        }
    }

    /// Counts a failed measurement of a running VM.
    pub fn count_sampling_failure(&self, measurement: Measurement) {
        self.vm_sampling_failures.get_or_create(&MeasurementLabel { measurement }).inc();
    }

    /// Sets the gauges to the current state of the agent and the usage of VMs.
    pub fn observe(&self, agent: &Agent, usage: &BTreeMap<ReservationId, Usage>) {
        let observed = agent.observed_state();
        self.connected.set(i64::from(agent.is_connected()));
        for (state, count) in [
            ("online", observed.online.len()),
            ("released", observed.released.len()),
            ("scrubbed", observed.scrubbed.len()),
            ("failed", observed.failed.len()),
        ] {
            self.slices.get_or_create(&StateLabel { state }).set(gauge_value(count as u64));
        }
        self.vms.set(gauge_value(observed.vms.len() as u64));
        self.observe_usage(&observed, usage);
    }

    /// Updates the metrics of the host's memory from its counters.
    pub fn observe_host(&self, counters: Counters) {
        raise(&self.scrubbed, counters.scrubbed.get());
        raise(&self.pages_migrated, counters.pages_migrated);
        raise(&self.page_migration_failures, counters.page_migration_failures);
        self.slices_changing.set(gauge_value(counters.slices_changing));
    }

    /// Sets the gauges of touched memory. Memory that is not measured has no series, because 0
    /// would mean that the guest has touched no memory.
    fn observe_usage(&self, observed: &ObservedState, usage: &BTreeMap<ReservationId, Usage>) {
        self.touched.clear();
        self.unmeasured.clear();
        self.overflow.clear();
        for (reservation, usage) in usage {
            let Some(vm) = observed.vms.get(reservation) else { continue };
            let pool = SLICE.get() * vm.slices.len() as u64;
            if let Some(overflow) = usage.overflow {
                let label = VmLabel { vm: vm.vm.to_string() };
                self.overflow.get_or_create(&label).set(gauge_value(overflow.get()));
            }
            for (memory, bytes, touched) in
                [("local", vm.local.get(), usage.local), ("pool", pool, usage.pool)]
            {
                let label = TouchedLabel { vm: vm.vm.to_string(), memory };
                match touched {
                    Some(touched) => self.touched.get_or_create(&label).set(gauge_value(touched.get())),
                    None => self.unmeasured.get_or_create(&label).set(gauge_value(bytes)),
                };
            }
        }
    }

    /// Formats all metrics for Prometheus, see [`exposition`].
    ///
    /// # Errors
    /// A metric cannot be formatted.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        exposition::page(&[&self.registry()], env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
    }
}

/// Raises a counter to a value. A lower value has no effect.
fn raise(counter: &Counter, to: u64) {
    counter.inc_by(to.saturating_sub(counter.get()));
}

fn gauge_value(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use pool::protocol::{Holding, ObservedVm};
    use units::{Bytes, Epoch, SliceId};

    use super::*;

    #[test]
    fn unmeasured_memory_is_not_exported_as_untouched() {
        let metrics = Metrics::new(&Name::new("h0").unwrap(), "dax");
        let holding = Holding { slice: SliceId(1), epoch: Epoch(1) };
        let (vm, local) = (Name::new("a").unwrap(), Bytes::mib(64));
        let vm = ObservedVm {
            vm,
            pid: 1,
            slices: vec![holding],
            local,
            pinned: false,
            uid: None,
            rehome: pool::protocol::ObservedRehome::None,
        };
        let observed = ObservedState { vms: [(ReservationId(1), vm)].into(), ..ObservedState::default() };
        let usage = Usage { local: Some(Bytes::mib(3)), pool: None, overflow: Some(Bytes::mib(5)) };
        metrics.observe_usage(&observed, &[(ReservationId(1), usage)].into());
        let text = metrics.text().unwrap();
        let series = |name: &str, memory: &str| {
            let line = format!("{name}{{host=\"h0\",backend=\"dax\",vm=\"a\",memory=\"{memory}\"}} ");
            text.lines().find_map(|series| series.strip_prefix(&line)?.parse::<u64>().ok())
        };
        assert_eq!(series("tarn_vm_touched_bytes", "local"), Some(3 << 20));
        assert_eq!(series("tarn_vm_touched_bytes", "pool"), None);
        assert_eq!(series("tarn_vm_unmeasured_bytes", "pool"), Some(1 << 30));
        assert_eq!(series("tarn_vm_unmeasured_bytes", "local"), None);
        let overflow =
            format!("tarn_agent_vm_overflow_bytes{{host=\"h0\",backend=\"dax\",vm=\"a\"}} {}", 5 << 20);
        assert!(text.lines().any(|line| line == overflow), "{text}");
    }

    #[test]
    fn every_series_has_a_host_label() {
        let metrics = Metrics::new(&Name::new("h0").unwrap(), "fake");
        metrics.record_call(Call::Scrub, Duration::from_millis(3), false);
        metrics.connected.set(1);
        let text = metrics.text().unwrap();
        let own = |line: &&str| line.starts_with("tarn_") && !line.starts_with("tarn_build_info");
        for line in text.lines().filter(own) {
            assert!(line.contains("host=\"h0\""), "{line}");
        }
        assert!(
            text.contains(
                "tarn_agent_host_calls_failed_total{host=\"h0\",backend=\"fake\",call=\"scrub\"} 1"
            ),
            "{text}"
        );
        assert!(text.contains("tarn_agent_connected{host=\"h0\",backend=\"fake\"} 1"), "{text}");
    }
}
