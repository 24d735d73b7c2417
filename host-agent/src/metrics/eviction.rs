//! Metrics of early eviction. Series of tenants that have ended are removed in the next cycle.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError, atomic::AtomicU64},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use units::Name;

use super::{StateLabel, TenantLabel, gauge_value};
use crate::eviction_report::{Counts, Report, TenantReport};

/// Metrics of the cycles, and of each tenant.
#[derive(Debug, Default)]
pub(super) struct EvictionMetrics {
    cycles: Family<StateLabel, Counter>,
    threshold: Family<TenantLabel, Gauge>,
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
        self.threshold.get_or_create(&label).set(gauge_value(decided.threshold.get()));
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
        for gauges in [&self.threshold, &self.class] {
            gauges.remove(&label);
        }
        self.evicted.remove(&label);
        for seconds in [&self.blocked, &self.fetching] {
            seconds.remove(&label);
        }
    }
}
