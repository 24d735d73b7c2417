//! Metrics of early eviction. Series of tenants that have ended are removed in the next cycle.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError, atomic::AtomicU64},
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use tiering::evict::ThresholdChange;
use units::Name;

use super::{StateLabel, TenantLabel, gauge_value};
use crate::eviction_report::{Counts, Report, TenantReport};

/// States of a threshold in labels.
const THRESHOLD_STATES: [&str; 6] = ["unchanged", "lowered", "pulled_back", "reset", "costly", "stalled"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ThresholdLabel {
    tenant: String,
    state: &'static str,
}

/// Returns the name of a state of [`THRESHOLD_STATES`].
const fn state_name(change: ThresholdChange) -> &'static str {
    match change {
        ThresholdChange::Unchanged => "unchanged",
        ThresholdChange::Lowered => "lowered",
        ThresholdChange::PulledBack => "pulled_back",
        ThresholdChange::Reset => "reset",
        ThresholdChange::Costly => "costly",
        ThresholdChange::Stalled => "stalled",
    }
}

/// Metrics of the cycles, and of each tenant.
#[derive(Debug, Default)]
pub(super) struct EvictionMetrics {
    cycles: Family<StateLabel, Counter>,
    threshold: Family<TenantLabel, Gauge>,
    threshold_state: Family<ThresholdLabel, Gauge>,
    growth: Family<TenantLabel, Gauge>,
    rate: Family<TenantLabel, Gauge>,
    class: Family<TenantLabel, Gauge>,
    evicted: Family<TenantLabel, Counter>,
    blocked: Family<TenantLabel, Counter<f64, AtomicU64>>,
    fetching: Family<TenantLabel, Counter<f64, AtomicU64>>,
    /// Counters of each tenant at the latest cycle.
    counted: Mutex<BTreeMap<Name, Counts>>,
}

impl EvictionMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let help = "Cycles of early eviction, by result";
        registry.register("eviction_cycles", help, self.cycles.clone());
        let help = "Usage of a tenant above which its memory is evicted";
        registry.register_with_unit("tenant_eviction_threshold", help, Unit::Bytes, self.threshold.clone());
        let help = "1 for the state of the threshold of a tenant after the last cycle, 0 for the others";
        registry.register("tenant_eviction_threshold_state", help, self.threshold_state.clone());
        let help = "Growth of the memory of a tenant while it does not wait for evictions";
        registry.register("tenant_growth_bytes_per_second", help, self.growth.clone());
        let help = "Eviction rate of a tenant while memory is evicted";
        registry.register("tenant_eviction_rate_bytes_per_second", help, self.rate.clone());
        let help = "Class of the evictions of a tenant, from 1 (most urgent) to 7";
        registry.register("tenant_eviction_class", help, self.class.clone());
        let help = "Memory of a tenant that the agent evicted";
        registry.register_with_unit("tenant_evicted", help, Unit::Bytes, self.evicted.clone());
        let help = "Time in which a tenant could not run because it waited for evictions";
        registry.register_with_unit("tenant_blocked", help, Unit::Seconds, self.blocked.clone());
        let help = "Time in which a tenant could not run because it waited for evicted memory";
        registry.register_with_unit("tenant_fetching", help, Unit::Seconds, self.fetching.clone());
    }

    pub fn observe(&self, report: &Report) {
        let state = if report.reason.is_empty() { "decided" } else { "blocked" };
        self.cycles.get_or_create(&StateLabel { state }).inc();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ended = std::mem::take(&mut *counted);
        for tenant in &report.tenants {
            let earlier = ended.remove(&tenant.name).unwrap_or_default();
            let is_new = tenant.counts.evicted < earlier.evicted
                || tenant.counts.blocked < earlier.blocked
                || tenant.counts.fetching < earlier.fetching;
            if is_new {
                self.remove(&tenant.name);
            }
            self.observe_tenant(tenant, if is_new { Counts::default() } else { earlier });
            counted.insert(tenant.name.clone(), tenant.counts);
        }
        ended.keys().for_each(|name| self.remove(name));
    }

    fn observe_tenant(&self, TenantReport { name, decided, counts, .. }: &TenantReport, earlier: Counts) {
        let label = TenantLabel { tenant: name.to_string() };
        for (gauges, bytes) in [
            (&self.threshold, decided.threshold),
            (&self.growth, decided.growth_bytes_per_s),
            (&self.rate, decided.eviction_bytes_per_s),
        ] {
            gauges.get_or_create(&label).set(gauge_value(bytes.get()));
        }
        for state in THRESHOLD_STATES {
            let label = ThresholdLabel { tenant: name.to_string(), state };
            let is_current = state == state_name(decided.change);
            self.threshold_state.get_or_create(&label).set(is_current.into());
        }
        self.class.get_or_create(&label).set(decided.class.number().into());
        let evicted = counts.evicted.saturating_sub(earlier.evicted);
        self.evicted.get_or_create(&label).inc_by(evicted.get());
        let seconds = |now: units::Ns, earlier| now.since(earlier).as_duration().as_secs_f64();
        self.blocked.get_or_create(&label).inc_by(seconds(counts.blocked, earlier.blocked));
        self.fetching.get_or_create(&label).inc_by(seconds(counts.fetching, earlier.fetching));
    }

    /// Removes the series of a tenant.
    fn remove(&self, name: &Name) {
        let label = TenantLabel { tenant: name.to_string() };
        for gauges in [&self.threshold, &self.growth, &self.rate, &self.class] {
            gauges.remove(&label);
        }
        for state in THRESHOLD_STATES {
            self.threshold_state.remove(&ThresholdLabel { tenant: name.to_string(), state });
        }
        self.evicted.remove(&label);
        for seconds in [&self.blocked, &self.fetching] {
            seconds.remove(&label);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use tiering::{
        evict::{FlowClass, TenantReport as Decision},
        fair::TenantId,
    };
    use units::{Bytes, Ns};

    use super::*;

    fn tenant(name: &str, change: ThresholdChange, evicted: Bytes) -> TenantReport {
        let decided = Decision {
            id: TenantId(1),
            usage: Bytes::new(190),
            limit: Bytes::new(200),
            threshold: Bytes::new(150),
            lower_threshold: Bytes::new(100),
            upper_threshold: Bytes::new(192),
            excess: Bytes::new(40),
            growth_bytes_per_s: Bytes::new(30),
            eviction_bytes_per_s: Bytes::new(20),
            change,
            class: FlowClass::URGENT,
        };
        let counts = Counts { evicted, blocked: Ns::ms(1500), fetching: Ns::ms(250) };
        TenantReport { name: Name::new(name).unwrap(), decided, counts, problem: String::new() }
    }

    fn text(metrics: &EvictionMetrics) -> String {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    /// Returns the series of tenants, in alphabetical order, without the ones that are 0.
    fn series(metrics: &EvictionMetrics) -> Vec<String> {
        let text = text(metrics);
        let of_tenants = |line: &&str| line.contains("{tenant=") && !line.ends_with(" 0");
        let mut series: Vec<_> = text.lines().filter(of_tenants).map(str::to_owned).collect();
        series.sort_unstable();
        series
    }

    /// Returns the series of one tenant with these states and evicted memory.
    fn expected(name: &str, state: &str, evicted: u64) -> [String; 8] {
        [
            ("blocked_seconds_total", "", "1.5".to_owned()),
            ("evicted_bytes_total", "", evicted.to_string()),
            ("eviction_class", "", "1".to_owned()),
            ("eviction_rate_bytes_per_second", "", "20".to_owned()),
            ("eviction_threshold_bytes", "", "150".to_owned()),
            ("eviction_threshold_state", state, "1".to_owned()),
            ("fetching_seconds_total", "", "0.25".to_owned()),
            ("growth_bytes_per_second", "", "30".to_owned()),
        ]
        .map(|(metric, label, value)| format!("tenant_{metric}{{tenant=\"{name}\"{label}}} {value}"))
    }

    #[test]
    fn series_of_ended_tenants_are_removed() {
        let metrics = EvictionMetrics::default();
        let [db, web] = ["db", "web"].map(|name| tenant(name, ThresholdChange::Lowered, Bytes::new(9)));
        metrics.observe(&Report::decided(vec![db.clone(), web]));
        let lowered = ",state=\"lowered\"";
        let mut both = [expected("db", lowered, 9), expected("web", lowered, 9)].concat();
        both.sort_unstable();
        assert_eq!(series(&metrics), both);
        metrics.observe(&Report::decided(vec![db]));
        assert_eq!(series(&metrics), expected("db", lowered, 9));
        assert!(!text(&metrics).contains("tenant=\"web\""), "also series that are 0 are removed");
        metrics.observe(&Report::blocked("the device is not in use as swap".to_owned()));
        assert!(!text(&metrics).contains("tenant="));
    }

    #[test]
    fn threshold_has_one_state_and_counters_of_a_new_tenant_restart() {
        let metrics = EvictionMetrics::default();
        metrics.observe(&Report::decided(vec![tenant("db", ThresholdChange::Lowered, Bytes::new(9))]));
        metrics.observe(&Report::decided(vec![tenant("db", ThresholdChange::Stalled, Bytes::new(12))]));
        assert_eq!(series(&metrics), expected("db", ",state=\"stalled\"", 12));
        metrics.observe(&Report::decided(vec![tenant("db", ThresholdChange::Reset, Bytes::new(4))]));
        assert_eq!(series(&metrics), expected("db", ",state=\"reset\"", 4));
    }
}
