//! Metrics of fair tiering. Series of tenants that have ended are removed in the next step.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use tiering::fair::FAST;
use units::{Bytes, Name};

use super::{StateLabel, TenantLabel, gauge_value};
use crate::tiering_report::{Report, TenantReport};

/// Names of local and slower memory in labels.
const TIER_NAMES: [&str; 2] = ["local", "slow"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TierLabel {
    tenant: String,
    tier: &'static str,
}

/// Metrics of the steps, and of each tenant.
#[derive(Debug, Default)]
pub(super) struct TieringMetrics {
    steps: Family<StateLabel, Counter>,
    last_step: Gauge,
    shortfall: Gauge,
    usage: Family<TierLabel, Gauge>,
    protection: Family<TenantLabel, Gauge>,
    bound: Family<TenantLabel, Gauge>,
    demoted: Family<TenantLabel, Counter>,
    promoted: Family<TenantLabel, Counter>,
    attempted: Family<TenantLabel, Counter>,
    refaulted: Family<TenantLabel, Counter>,
    sampled: Family<TenantLabel, Counter>,
    thrashed: Family<TenantLabel, Counter>,
    thrash_level: Family<TenantLabel, Gauge>,
    /// Counters of each tenant at the latest step.
    counted: Mutex<BTreeMap<Name, Counts>>,
}

/// Values of the counters of a tenant, which grow while the tenant exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts([u64; 6]);

impl Counts {
    fn of(report: &TenantReport) -> Self {
        let TenantReport { moves, thrash, .. } = report;
        let bytes = [moves.demoted, moves.promoted, moves.attempted, report.refaulted].map(Bytes::get);
        Self([bytes[0], bytes[1], bytes[2], bytes[3], thrash.promotions, thrash.thrashed])
    }

    /// Returns the growth since an earlier report; `None` if another tenant has the same name now.
    fn since(self, earlier: Self) -> Option<[u64; 6]> {
        let mut growth = [0; 6];
        for (at, growth) in growth.iter_mut().enumerate() {
            *growth = self.0[at].checked_sub(earlier.0[at])?;
        }
        Some(growth)
    }
}

impl TieringMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let help = "Steps of fair tiering, by result";
        registry.register("tiering_steps", help, self.steps.clone());
        let help = "Time of the end of the last step of fair tiering, since 1970";
        registry.register_with_unit(
            "tiering_last_step_timestamp",
            help,
            Unit::Seconds,
            self.last_step.clone(),
        );
        let help = "Local memory that should be demoted, but cannot be";
        registry.register_with_unit("tiering_shortfall", help, Unit::Bytes, self.shortfall.clone());
        let help = "Memory of a tenant, by tier";
        registry.register_with_unit("tenant_tier_usage", help, Unit::Bytes, self.usage.clone());
        let help = "Local memory of a tenant that is exempt from demotion";
        registry.register_with_unit("tenant_protection", help, Unit::Bytes, self.protection.clone());
        let help = "Largest local memory of a tenant, if it is limited";
        registry.register_with_unit("tenant_bound", help, Unit::Bytes, self.bound.clone());
        let help = "Memory of a tenant that was demoted by orders of the agent";
        registry.register_with_unit("tenant_demoted", help, Unit::Bytes, self.demoted.clone());
        let help = "Memory of a tenant that the agent promoted";
        registry.register_with_unit("tenant_promoted", help, Unit::Bytes, self.promoted.clone());
        let help =
            "Memory of a tenant that the agent promoted, or could not promote because the node was full";
        registry.register_with_unit("tenant_promotion_attempted", help, Unit::Bytes, self.attempted.clone());
        let help = "Memory of a tenant that was reclaimed and faulted back";
        registry.register_with_unit("tenant_refaulted", help, Unit::Bytes, self.refaulted.clone());
        let help = "Promoted pages of a tenant that are observed to detect thrashing";
        registry.register("tenant_sampled_promotions", help, self.sampled.clone());
        let help = "Observed pages of a tenant that were demoted soon after their promotion";
        registry.register("tenant_thrashed_pages", help, self.thrashed.clone());
        let help = "How often the promotion rate of a tenant is halved because of thrashing";
        registry.register("tenant_thrash_level", help, self.thrash_level.clone());
    }

    pub fn observe(&self, report: &Report) {
        let state = if report.reason.is_empty() { "decided" } else { "blocked" };
        self.steps.get_or_create(&StateLabel { state }).inc();
        self.last_step.set(gauge_value(report.at.0 / 1000));
        // A report without a decision contains no tenants, so that all series of tenants are removed.
        self.shortfall.set(gauge_value(report.tiers[FAST].shortfall.get()));
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ended = std::mem::take(&mut *counted);
        for tenant in &report.tenants {
            let (counts, earlier) = (Counts::of(tenant), ended.remove(&tenant.name).unwrap_or_default());
            let growth = counts.since(earlier).unwrap_or_else(|| {
                self.remove(&tenant.name);
                counts.0
            });
            self.observe_tenant(tenant, growth);
            counted.insert(tenant.name.clone(), counts);
        }
        ended.keys().for_each(|name| self.remove(name));
    }

    fn counters(&self) -> [&Family<TenantLabel, Counter>; 6] {
        [&self.demoted, &self.promoted, &self.attempted, &self.refaulted, &self.sampled, &self.thrashed]
    }

    /// Removes the series of a tenant.
    fn remove(&self, name: &Name) {
        let label = TenantLabel { tenant: name.to_string() };
        for tier in TIER_NAMES {
            self.usage.remove(&TierLabel { tenant: name.to_string(), tier });
        }
        for gauges in [&self.protection, &self.bound, &self.thrash_level] {
            gauges.remove(&label);
        }
        for counters in self.counters() {
            counters.remove(&label);
        }
    }

    fn observe_tenant(&self, report: &TenantReport, growth: [u64; 6]) {
        let label = TenantLabel { tenant: report.name.to_string() };
        for (tier, state) in TIER_NAMES.into_iter().zip(report.decided.tiers) {
            let label = TierLabel { tenant: report.name.to_string(), tier };
            self.usage.get_or_create(&label).set(gauge_value(state.usage.get()));
        }
        let fast = report.decided.fast();
        let set = |gauges: &Family<TenantLabel, Gauge>, value: u64| {
            gauges.get_or_create(&label).set(gauge_value(value));
        };
        set(&self.protection, fast.scaled_protection.get());
        match fast.bound {
            Some(bound) => set(&self.bound, bound.get()),
            None => _ = self.bound.remove(&label),
        }
        set(&self.thrash_level, report.decided.thrash_level.into());
        for (counters, growth) in self.counters().into_iter().zip(growth) {
            counters.get_or_create(&label).inc_by(growth);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_another_tenant_with_the_same_name_are_no_growth() {
        let earlier = Counts([5, 1, 1, 0, 0, 9]);
        assert_eq!(Counts([7, 1, 2, 0, 0, 9]).since(earlier), Some([2, 0, 1, 0, 0, 0]));
        assert_eq!(Counts([7, 0, 2, 0, 0, 9]).since(earlier), None);
    }
}
