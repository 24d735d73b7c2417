//! Prometheus metrics of the manager, which `docs/metrics.md` lists. Gauges are computed from the
//! ledger for each scrape. Counters and histograms are updated when records become durable.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::Instant,
};

use pool::{
    audit::DecisionKind,
    ledger::{EmcEntry, HostEntry},
    manager::{Alarm, EmcState, HostState, Manager, PublishedBatch},
    record::{Key, Record},
};
use prediction::file::Kind;
use prediction::operating_point::OperatingPoint;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use units::{Bytes, EmcId, HostId, Name, Ns, Revision, SliceId};

use crate::{records::forecast_rows::EndedVm, rpc_metrics::RpcMetrics};

/// Labels of `tarn_slice_transition_seconds`: the states before and after a change.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TransitionLabels {
    from: &'static str,
    to: &'static str,
}

/// Labels of `tarn_pool_slices`: EMC and state of the slices.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SliceStateLabels {
    emc: String,
    state: &'static str,
}

/// Label of metrics about one host.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HostLabel {
    host: String,
}

/// Labels of `tarn_alarm`: reason and subject of the alarm.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct AlarmLabel {
    reason: &'static str,
    subject: String,
}

/// All metrics of the manager, with their registry.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    /// Metrics of calls of the gRPC services.
    pub rpc: Arc<RpcMetrics>,
    state_since: Mutex<HashMap<SliceId, Instant>>,
    /// Number of durable writes that failed.
    pub store_failures: Counter,
    /// Number of records per durable write.
    pub batch_records: Histogram,
    /// Time from the request of a reservation until the reservation is durable, in seconds.
    pub reserve_seconds: Histogram,
    /// Time from the request of a plan until its decision is durable, in seconds.
    pub plan_seconds: Histogram,
    /// Number of samples of running VMs.
    pub vm_samples: Counter,
    dropped_samples: Family<DropLabel, Counter>,
    vm_verdicts: Family<VerdictLabel, Gauge>,
    rehomes: Family<ResultLabel, Counter>,
    vm_outcomes: Family<ResultLabel, Counter>,
    stored_outcomes: Gauge,
    measured_moves: Gauge,
    /// VMs with the verdict `migrate` that wait for the hourly budget of requests.
    pub requests_waiting: Gauge,
    model_versions: Family<KindLabel, Gauge>,
    operating_point: Family<PointLabel, Gauge<f64, AtomicU64>>,
    transition_seconds: Family<TransitionLabels, Histogram, fn() -> Histogram>,
    scrubbed_bytes: Counter,
    lease_expired: Counter,
    slices: Family<SliceStateLabels, Gauge>,
    buffer_target: Gauge,
    drain_seconds: Gauge<f64, AtomicU64>,
    hosts_up: Family<HostLabel, Gauge>,
    host_slices: Family<HostLabel, Gauge>,
    emc_up: Family<EmcLabel, Gauge>,
    alarms: Family<AlarmLabel, Gauge>,
    revision: Gauge,
    /// Number of other managers that can take over.
    pub standbys: Gauge,
    /// Duration of the calls to etcd with which the leader observes the other managers, in seconds.
    pub etcd_call_seconds: Histogram,
}

/// Label of metrics about one EMC.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EmcLabel {
    emc: String,
}

/// Label of `tarn_vm_outcomes`: result of the prediction for an ended VM.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// Label of `tarn_vm_samples_dropped`: reason.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DropLabel {
    reason: &'static str,
}

/// Label of `tarn_vm_verdicts`: verdict about running VMs.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VerdictLabel {
    verdict: &'static str,
}

/// Label of `tarn_model_version`: kind of the model.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// Label of `tarn_operating_point`: name of the value.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PointLabel {
    share: &'static str,
}

/// Returns a histogram of times from 50 µs to about 26 s.
fn seconds_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_05, 2.0, 20))
}

/// Values of the gauges, copied from the ledger under its lock.
#[derive(Clone, Debug)]
pub struct MetricsSnapshot {
    leases_expired: u64,
    emcs: Vec<EmcSnapshot>,
    hosts: Vec<HostSnapshot>,
    alarms: Vec<Alarm>,
    buffer_target: u32,
    drain_time: Ns,
    revision: Revision,
}

#[derive(Clone, Debug)]
struct EmcSnapshot {
    name: Name,
    is_up: bool,
    states: Vec<(&'static str, u32)>,
}

#[derive(Clone, Debug)]
struct HostSnapshot {
    name: Name,
    is_up: bool,
    slices: usize,
}

impl MetricsSnapshot {
    /// Copies the current values from the ledger.
    pub fn of(manager: &Manager) -> Self {
        let ledger = manager.durable();
        let emc = |(id, entry): (EmcId, &EmcEntry)| EmcSnapshot {
            name: entry.emc.name.clone(),
            is_up: manager.emc_state(id) == EmcState::Up,
            states: entry.states().collect(),
        };
        let host = |(id, entry): (HostId, &HostEntry)| HostSnapshot {
            name: entry.host.name.clone(),
            is_up: matches!(manager.host_state(id), HostState::Up | HostState::Silent),
            slices: entry.held().len(),
        };
        Self {
            leases_expired: manager.leases_expired(),
            emcs: ledger.emcs().map(emc).collect(),
            hosts: ledger.hosts().map(host).collect(),
            alarms: manager.alarms(),
            buffer_target: manager.buffer_target(),
            drain_time: manager.drain_time(),
            revision: ledger.meta().revision,
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Mutex::new(Registry::with_prefix("tarn")),
            rpc: Arc::default(),
            state_since: Mutex::default(),
            store_failures: Counter::default(),
            batch_records: Histogram::new(exponential_buckets(1.0, 2.0, 14)),
            reserve_seconds: seconds_histogram(),
            plan_seconds: seconds_histogram(),
            vm_samples: Counter::default(),
            dropped_samples: Family::default(),
            vm_verdicts: Family::default(),
            rehomes: Family::default(),
            vm_outcomes: Family::default(),
            stored_outcomes: Gauge::default(),
            measured_moves: Gauge::default(),
            requests_waiting: Gauge::default(),
            model_versions: Family::default(),
            operating_point: Family::default(),
            transition_seconds: Family::new_with_constructor(seconds_histogram),
            scrubbed_bytes: Counter::default(),
            lease_expired: Counter::default(),
            slices: Family::default(),
            buffer_target: Gauge::default(),
            drain_seconds: Gauge::default(),
            hosts_up: Family::default(),
            host_slices: Family::default(),
            emc_up: Family::default(),
            alarms: Family::default(),
            revision: Gauge::default(),
            standbys: Gauge::default(),
            etcd_call_seconds: seconds_histogram(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&self) {
        let mut r = self.registry.lock().expect("no thread panics under this lock");
        r.register("store_failures", "Durable writes that failed", self.store_failures.clone());
        r.register("store_batch_records", "Records in one durable write", self.batch_records.clone());
        r.register_with_unit(
            "reserve",
            "Time from a Reserve request until the reservation is durable",
            Unit::Seconds,
            self.reserve_seconds.clone(),
        );
        let help = "Time from a PlanVm request until its decision is durable";
        r.register_with_unit("plan", help, Unit::Seconds, self.plan_seconds.clone());
        r.register("vm_samples", "Samples of running VMs", self.vm_samples.clone());
        let help = "Slowed-down VMs that wait for the hourly budget of migration requests";
        r.register("slowdown_requests_waiting", help, self.requests_waiting.clone());
        let help =
            "Samples of VMs that were dropped: invalid, too_frequent, or unknown_vm (not on this host)";
        r.register("vm_samples_dropped", help, self.dropped_samples.clone());
        let help = "Sampled VMs by verdict about the effect of pool memory: fine, watch, migrate";
        r.register("vm_verdicts", help, self.vm_verdicts.clone());
        let help = "Moves of pool memory to local memory: started, done, failed";
        r.register("rehomes", help, self.rehomes.clone());
        let help = "Ended VMs by result: within (touched memory fits into local memory), overpredicted (it does not), pool_only";
        r.register("vm_outcomes", help, self.vm_outcomes.clone());
        r.register("outcomes_stored", "Outcomes of VMs in the store", self.stored_outcomes.clone());
        let help = "Measured slowdowns of VMs that were moved to local memory, in the store";
        r.register("measured_moves_stored", help, self.measured_moves.clone());
        r.register(
            "model_version",
            "Version of the serving model; 0 if there is none",
            self.model_versions.clone(),
        );
        let help = "Operating point of the predictions: fractions of VMs or memory, from 0 to 1";
        r.register("operating_point", help, self.operating_point.clone());
        let help = "Time that a slice spent in a state before the next state";
        r.register_with_unit("slice_transition", help, Unit::Seconds, self.transition_seconds.clone());
        r.register_with_unit(
            "scrub",
            "Memory that was scrubbed and verified",
            Unit::Bytes,
            self.scrubbed_bytes.clone(),
        );
        r.register("lease_expired", "Expired leases", self.lease_expired.clone());
        r.register("pool_slices", "Slices by EMC and state", self.slices.clone());
        r.register(
            "pool_buffer_target_slices",
            "Number of free slices that the manager tries to keep available",
            self.buffer_target.clone(),
        );
        let help = "Longest time from the release of a slice until it was free, in the last minute";
        r.register_with_unit("pool_drain", help, Unit::Seconds, self.drain_seconds.clone());
        r.register("host_up", "1 if the host's lease has not expired", self.hosts_up.clone());
        r.register("host_slices", "Slices that a host can access", self.host_slices.clone());
        r.register("emc_up", "1 if the EMC works", self.emc_up.clone());
        r.register("alarm", "1 for each active alarm", self.alarms.clone());
        r.register(
            "ledger_revision",
            "Revision of the ledger: number of durable changes",
            self.revision.clone(),
        );
        let leader = Gauge::<i64>::default();
        leader.set(1);
        r.register("manager_leader", "1 if this manager serves requests, 0 if it is a standby", leader);
        r.register("manager_standbys", "Other managers that can take over", self.standbys.clone());
        let help = "Time in which etcd lists the managers; only if the ledger is in etcd";
        r.register_with_unit("etcd_call", help, Unit::Seconds, self.etcd_call_seconds.clone());
    }

    /// Counts a dropped sample of a VM.
    pub fn count_dropped_sample(&self, reason: &'static str) {
        self.dropped_samples.get_or_create(&DropLabel { reason }).inc();
    }

    /// Sets the number of sampled VMs with each verdict.
    pub fn set_verdicts(&self, counts: [(&'static str, usize); 3]) {
        for (verdict, count) in counts {
            let gauge = self.vm_verdicts.get_or_create(&VerdictLabel { verdict });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Counts an ended VM by result. `pool` is the VM's pool memory.
    pub fn count_outcome(&self, vm: &EndedVm, pool: Bytes) {
        let untouched = vm.outcome.untouched.of(vm.start.request.requested);
        let result = match pool > untouched {
            _ if vm.start.pool_only => "pool_only",
            true => "overpredicted",
            false => "within",
        };
        self.vm_outcomes.get_or_create(&ResultLabel { result }).inc();
    }

    /// Sets the versions of the serving models, in the order of [`Kind::ALL`], the operating point and the
    /// numbers of outcomes and of measured moves.
    pub fn set_forecasts(
        &self,
        versions: [Option<u32>; Kind::ALL.len()],
        point: &OperatingPoint,
        [outcomes, measured_moves]: [usize; 2],
    ) {
        for (kind, version) in Kind::ALL.into_iter().zip(versions) {
            let kind = kind.name();
            self.model_versions.get_or_create(&KindLabel { kind }).set(version.unwrap_or(0).into());
        }
        let choice = &point.choice;
        let shares = [
            ("exceed_max", point.limits.exceed_max.get()),
            ("miss_expected", choice.miss),
            ("overpredictions", choice.frigid.op.get()),
            ("false_positives", choice.insensitive.fp.get()),
            ("pool", choice.pool),
        ];
        for (share, value) in shares {
            self.operating_point.get_or_create(&PointLabel { share }).set(value);
        }
        self.stored_outcomes.set(i64::try_from(outcomes).unwrap_or(i64::MAX));
        self.measured_moves.set(i64::try_from(measured_moves).unwrap_or(i64::MAX));
    }

    /// Updates the metrics of slice states from a durable batch, and logs each change of a slice's
    /// state.
    pub fn count_transitions(&self, durable: &PublishedBatch) {
        let mut state_since = self.state_since.lock().expect("no thread panics under this lock");
        for record in durable.records.iter() {
            if let Record::Deleted(Key::Slice(slice)) = record {
                state_since.remove(slice);
            }
        }
        for (slice, from, to) in &durable.transitions {
            let span =
                tracing::debug_span!("slice", slice = slice.0, from, to, revision = durable.revision.0);
            span.in_scope(|| tracing::debug!("slice changed"));
            let now = Instant::now();
            if let Some(since) = state_since.insert(*slice, now) {
                let labels = TransitionLabels { from, to };
                self.transition_seconds.get_or_create(&labels).observe((now - since).as_secs_f64());
            }
            if (*from, *to) == ("scrubbing", "free") {
                self.scrubbed_bytes.inc_by(units::SLICE.get());
            }
        }
    }

    /// Counts the moves of pool memory in durable decisions.
    pub fn count_rehomes<'a>(&self, records: impl IntoIterator<Item = &'a Record>) {
        for record in records {
            let Record::Decision(_, decision) = record else { continue };
            let result = match decision.what {
                DecisionKind::RehomeStarted { .. } => "started",
                DecisionKind::Rehomed { .. } => "done",
                DecisionKind::RehomeFailed { .. } => "failed",
                _ => continue,
            };
            self.rehomes.get_or_create(&ResultLabel { result }).inc();
        }
    }

    /// Sets all gauges to the values of a snapshot.
    #[expect(clippy::cast_possible_wrap, reason = "counts of slices and revisions are far below i64::MAX")]
    fn set_gauges(&self, snapshot: &MetricsSnapshot) {
        self.lease_expired.inc_by(snapshot.leases_expired.saturating_sub(self.lease_expired.get()));
        self.slices.clear();
        self.emc_up.clear();
        for emc in &snapshot.emcs {
            let name = emc.name.to_string();
            for (state, slices) in emc.states.iter().filter(|(_, slices)| *slices > 0) {
                let label = SliceStateLabels { emc: name.clone(), state };
                self.slices.get_or_create(&label).set((*slices).into());
            }
            self.emc_up.get_or_create(&EmcLabel { emc: name }).set(i64::from(emc.is_up));
        }
        self.hosts_up.clear();
        self.host_slices.clear();
        for host in &snapshot.hosts {
            let label = HostLabel { host: host.name.to_string() };
            self.hosts_up.get_or_create(&label).set(i64::from(host.is_up));
            self.host_slices.get_or_create(&label).set(host.slices as i64);
        }
        self.alarms.clear();
        for alarm in &snapshot.alarms {
            let label = AlarmLabel { reason: alarm.reason, subject: alarm.subject.to_string() };
            self.alarms.get_or_create(&label).set(1);
        }
        self.buffer_target.set(i64::from(snapshot.buffer_target));
        self.drain_seconds.set(snapshot.drain_time.as_duration().as_secs_f64());
        self.revision.set(snapshot.revision.0 as i64);
    }

    /// Returns the page of metrics, see [`exposition`], with the gauges of a snapshot. A lock
    /// ensures that pages are built one at a time.
    ///
    /// # Errors
    /// Returns an error if formatting fails.
    pub fn page(&self, snapshot: &MetricsSnapshot) -> Result<String, std::fmt::Error> {
        let registry = self.registry.lock().expect("no thread panics under this lock");
        self.set_gauges(snapshot);
        self.rpc.with_registry(|rpc| {
            exposition::page(&[&registry, rpc], env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
        })
    }
}

#[cfg(test)]
mod tests {
    use pool::{
        ledger::{HostSpec, RackSpec, When},
        manager::{Effect, Event, Request, SessionId, Settings, Token},
        protocol::Hello,
        record::Meta,
    };
    use units::{Bytes, HostId, InstanceId, Name, Ns};

    use super::*;

    #[test]
    fn expired_lease_is_counted_once() {
        let mut manager = Manager::new(Settings { lease_ttl: Ns::secs(1), fence_after: None });
        let host =
            HostSpec { name: Name::new("h1").unwrap(), cores: 1, local: Bytes::gib(1), emcs: Vec::new() };
        let rack = RackSpec { emcs: Vec::new(), hosts: vec![host] };
        let mut handle = |at, event| {
            let when = When { now: Ns::secs(at), ..When::default() };
            manager.handle(when, event);
            manager.settle(when);
            while let Some(effect) = manager.poll_effect() {
                if let Effect::Store { batch, .. } = effect {
                    manager.handle(when, Event::Stored { batch, ok: true });
                    manager.settle(when);
                }
            }
        };
        handle(0, Event::Loaded { meta: Meta::new("rack".into()), records: Vec::new(), restored: false });
        handle(0, Event::Request(Token(1), Request::Configure(rack)));
        let hello = Hello {
            instance: InstanceId(1),
            boot_id: "b".into(),
            host_memory_socket: String::new(),
            devices: Vec::new(),
            can_rehome: true,
        };
        handle(1, Event::AgentUp(SessionId(1), HostId(0), hello));
        handle(5, Event::Tick);
        handle(9, Event::Tick);
        let metrics = Metrics::default();
        for _ in 0..2 {
            let page = metrics.page(&MetricsSnapshot::of(&manager)).unwrap();
            assert!(page.contains("tarn_lease_expired_total 1\n"), "{page}");
        }
    }
}
