//! Schemes that decide demotions and promotion budgets: Equilibria and the baselines.

use serde::Serialize;
use tiering::fair::{
    Candidates, FAST, Factor, HostSample, Order, Policy, PromotionBudget, Settings, TenantId, TenantSample,
    ThrashTable, ThrashTableSettings, Urgency,
};
use units::{Bytes, Ns};

/// Free memory at which the baselines start to demote.
const KERNEL_LOW_WATERMARK: Factor = Factor::from_ppm(15_000);
/// Free memory at which the baselines stop to demote: `demote_scale_factor` of TPP.
const KERNEL_HIGH_WATERMARK: Factor = Factor::from_ppm(20_000);

/// Scheme that shares local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Demotion by the watermarks, without promotion and without limits per tenant.
    NoControl,
    /// TPP, as in Linux: demotion by the watermarks, and promotion at the second hint fault. There
    /// are no limits per tenant.
    Tpp,
    /// Static caps: local memory is limited to the protection. Unused protection is not donated.
    StaticCaps,
    /// Equilibria without the limit for thrashing tenants.
    EquilibriaWithoutMitigation,
    /// Equilibria.
    Equilibria,
}

impl Scheme {
    /// Schemes of most scenarios.
    pub(super) const DEFAULT: [Self; 4] = [Self::NoControl, Self::Tpp, Self::StaticCaps, Self::Equilibria];

    /// Returns the name for tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoControl => "no_control",
            Self::Tpp => "tpp",
            Self::StaticCaps => "static_caps",
            Self::EquilibriaWithoutMitigation => "equilibria_without_mitigation",
            Self::Equilibria => "equilibria",
        }
    }
}

/// Controller of a host that applies a scheme.
#[derive(Clone, Debug)]
pub(super) struct Controller {
    scheme: Scheme,
    policy: Policy,
    table: ThrashTable,
    /// Whether the tier is below its high watermark after it fell below the low one. Used by the baselines.
    is_demoting: bool,
}

impl Controller {
    /// Creates a controller.
    pub(super) fn new(scheme: Scheme) -> Self {
        // A unit is recorded as one page, so that all units are sampled.
        let table = ThrashTableSettings { sample_shift: 0, ..ThrashTableSettings::default() };
        Self {
            scheme,
            policy: Policy::new(Settings::default()).expect("the default settings are valid"),
            table: ThrashTable::new(table).expect("the settings of the table are valid"),
            is_demoting: false,
        }
    }

    /// Returns the orders for the next second.
    pub(super) fn step(&mut self, host: &HostSample, tenants: &[TenantSample]) -> Vec<Order> {
        match self.scheme {
            Scheme::Equilibria | Scheme::EquilibriaWithoutMitigation => self.step_policy(host, tenants),
            Scheme::NoControl | Scheme::Tpp | Scheme::StaticCaps => self.step_kernel(host, tenants),
        }
    }

    fn step_policy(&mut self, host: &HostSample, tenants: &[TenantSample]) -> Vec<Order> {
        let with_counts = |sample: &TenantSample| {
            let mut sample = *sample;
            // Without the counts, the policy never detects thrashing.
            if self.scheme == Scheme::Equilibria {
                let counts = self.table.counts(sample.id);
                sample.counters.sampled_promotions = counts.promotions;
                sample.counters.sampled_thrashed = counts.thrashed;
            }
            sample
        };
        let tenants: Vec<TenantSample> = tenants.iter().map(with_counts).collect();
        let decision = self.policy.step(host, &tenants);
        self.table.apply(decision);
        decision.orders().to_vec()
    }

    /// Demotes in proportion to the LRU lists, like kswapd without protections.
    fn step_kernel(&mut self, host: &HostSample, tenants: &[TenantSample]) -> Vec<Order> {
        let fast = host.tiers[FAST];
        let (low, high) = (KERNEL_LOW_WATERMARK.of(fast.capacity), KERNEL_HIGH_WATERMARK.of(fast.capacity));
        self.is_demoting = fast.free < low || self.is_demoting && fast.free < high;
        let needed = if self.is_demoting { high.saturating_sub(fast.free) } else { Bytes::ZERO };
        let usage: u128 = tenants.iter().map(|tenant| u128::from(tenant.tiers[FAST].usage.get())).sum();
        let share = |tenant: &TenantSample| {
            let share = u128::from(needed.get()) * u128::from(tenant.tiers[FAST].usage.get());
            Bytes::new(u64::try_from(share.div_ceil(usage.max(1))).unwrap_or(u64::MAX))
        };
        let demotions = tenants.iter().map(|tenant| Order::Demote {
            tenant: tenant.id,
            tier: FAST,
            bytes: share(tenant),
            urgency: Urgency::Background,
        });
        let budget = self.kernel_budget();
        let budgets = tenants.iter().map(|tenant| Order::LimitPromotion { tenant: tenant.id, budget });
        demotions.chain(budgets).collect()
    }

    fn kernel_budget(&self) -> PromotionBudget {
        let bytes_per_s = (self.scheme == Scheme::NoControl).then_some(Bytes::ZERO);
        PromotionBudget { bytes_per_s, candidates: Candidates::Hot }
    }

    /// Returns whether the kernel demotes without regard to tenants.
    pub(super) fn is_kernel(&self) -> bool {
        !matches!(self.scheme, Scheme::Equilibria | Scheme::EquilibriaWithoutMitigation)
    }

    /// Returns whether a tenant may use more local memory. Only static caps limit it at once.
    pub(super) fn may_use_local_memory(&self, tenant: &TenantSample) -> bool {
        let fast = &tenant.tiers[FAST];
        self.scheme != Scheme::StaticCaps
            || fast.usage < fast.bound.map_or(fast.protection, |bound| bound.min(fast.protection))
    }

    /// Records the promotion of a unit.
    pub(super) fn record_promotion(&mut self, tenant: TenantId, unit: usize, now: Ns) {
        self.table.record_promotion(tenant, unit as u64, now);
    }

    /// Records the demotion of a unit.
    pub(super) fn record_demotion(&mut self, tenant: TenantId, unit: usize, now: Ns) {
        self.table.record_demotion(tenant, unit as u64, now);
    }

    /// Returns the thrash level of a tenant, by its position.
    pub(super) fn thrash_level(&self, index: usize) -> u8 {
        self.policy.decision().tenants().get(index).map_or(0, |report| report.thrash_level)
    }
}
