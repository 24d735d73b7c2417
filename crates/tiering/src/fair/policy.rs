//! Steps of the policy: scales protections, decides demotions tier by tier, and limits promotions.

use std::collections::{BTreeMap, BTreeSet};

use units::{
    Bytes, Ns,
    limits::{TIERING_TENANTS_MAX, TIERS_MAX},
};

use super::{
    Candidates, Decision, Demotion, DemotionReason, FAST, Factor, HostSample, Order, PromotionBudget,
    Settings, SettingsError, TenantReport, TenantSample, TenantTierReport, ThrashState, ThrottleReason,
    TierReport, TierSample, Urgency, demotion_target,
    distribution::{Part, distribute},
    equations::{mul_div, throttled_rate},
    promotion_factor,
    tenant_state::TenantState,
};

/// Time between two steps that is assumed in the first step.
const FIRST_INTERVAL: Ns = Ns::secs(1);
/// Longest time between two steps for which memory is kept free.
const INTERVAL_MAX: Ns = Ns::secs(10);
/// Part of the promotion rate for which memory is kept free, if a tenant below its protection has
/// memory in lower tiers but attempted no promotion.
const PROBE_DIVISOR: u64 = 16;

/// Policy of one host. The size of its state is bounded by the number of tenants.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    /// Time of the last step.
    at: Option<Ns>,
    /// Whether each tier is below its high watermark after it fell below the low one.
    is_demoting: [bool; TIERS_MAX],
    /// State of each tenant, in the order of the last step.
    states: Vec<TenantState>,
    decision: Decision,
    parts: Vec<Part>,
    /// Demotions in the background, while orders are collected.
    background: Vec<Order>,
}

impl Policy {
    /// Creates a policy without tenants.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting is out of range.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            settings,
            at: None,
            is_demoting: [false; TIERS_MAX],
            states: Vec::new(),
            decision: Decision::default(),
            parts: Vec::new(),
            background: Vec::new(),
        })
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the decision of the last step. It is empty before the first step.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Decides the demotions and the promotion budgets until the next step. Tenants that `tenants`
    /// does not contain are forgotten. The order of the tenants affects only rounding.
    ///
    /// The caller may choose any time between two steps. Between the steps, a tenant can exceed its
    /// bound by as much as it allocates and promotes.
    pub fn step(&mut self, host: &HostSample, tenants: &[TenantSample]) -> &Decision {
        let interval = self.at.map_or(FIRST_INTERVAL, |last| host.at.since(last).min(INTERVAL_MAX));
        self.observe(host.at, tenants);
        self.decision.tiers = [TierReport::default(); TIERS_MAX];
        let tiers = (0..TIERS_MAX).filter(|tier| host.tiers[*tier].capacity > Bytes::ZERO);
        tiers.clone().for_each(|tier| self.scale_protections(tier, &host.tiers[tier]));
        tiers.for_each(|tier| self.demote(tier, interval));
        self.limit_promotions();
        self.collect_orders();
        &self.decision
    }

    /// Updates the states of all tenants, and creates their reports.
    fn observe(&mut self, at: Ns, tenants: &[TenantSample]) {
        let is_backwards = self.at.is_some_and(|last| at < last);
        self.at = Some(at);
        self.decision.tenants.clear();
        self.decision.rejected_tenants = 0;
        if !self.states.iter().map(|state| state.id).eq(tenants.iter().map(|tenant| tenant.id)) {
            self.replace_tenants(at, tenants);
        }
        let mut samples = tenants.iter();
        for state in &mut self.states {
            // Samples without a state were rejected.
            let Some(sample) = samples.find(|sample| sample.id == state.id) else { break };
            state.observe(at, sample, &self.settings.thrash);
            if is_backwards {
                state.restart_period(at, sample);
            }
            self.decision.tenants.push(empty_report(sample));
        }
    }

    /// Adds and removes states, so that there is one per accepted sample, in the same order.
    fn replace_tenants(&mut self, at: Ns, tenants: &[TenantSample]) {
        let known: BTreeMap<_, _> = self.states.drain(..).map(|state| (state.id, state)).collect();
        let mut accepted = BTreeSet::new();
        for sample in tenants {
            if accepted.len() == TIERING_TENANTS_MAX || !accepted.insert(sample.id) {
                self.decision.rejected_tenants += 1;
                continue;
            }
            let state = known.get(&sample.id).copied();
            self.states.push(state.unwrap_or_else(|| TenantState::new(at, sample)));
        }
    }

    /// Scales the protections in a tier in proportion, so that their sum does not exceed the usable
    /// memory.
    fn scale_protections(&mut self, tier: usize, sample: &TierSample) {
        let tenants = &mut self.decision.tenants;
        let free = sample.free.min(sample.capacity);
        let (usage, sum) = tenants.iter().fold((0, 0), |(usage, sum): (u128, u128), tenant| {
            let tier = &tenant.tiers[tier];
            (usage + u128::from(tier.usage.get()), sum + u128::from(tier.protection.get()))
        });
        let (usage, protection) = (saturated(usage), saturated(sum));
        let foreign = sample.capacity.saturating_sub(free).saturating_sub(usage);
        let high = self.settings.high_watermark.of(sample.capacity);
        let usable = sample.capacity.saturating_sub(high).saturating_sub(foreign);
        let scaled_protection = if sum <= u128::from(usable.get()) {
            protection
        } else {
            let scale = |tier: &mut TenantTierReport| {
                tier.scaled_protection = scaled(tier.protection, usable, sum);
                tier.scaled_protection
            };
            tenants.iter_mut().map(|tenant| scale(&mut tenant.tiers[tier])).sum()
        };
        self.decision.tiers[tier] = TierReport {
            capacity: sample.capacity,
            free,
            usable,
            protection,
            scaled_protection,
            ..TierReport::default()
        };
    }

    /// Decides the demotions from a tier: memory above bounds first, and then memory above
    /// protections if the tier is short of free memory.
    fn demote(&mut self, tier: usize, interval: Ns) {
        let Watermarks { low, high } = self.watermarks(tier);
        let free = self.decision.tiers[tier].free;
        self.is_demoting[tier] = free < low || self.is_demoting[tier] && free < high;
        let mut room = self.decision.tiers[tier + 1..].iter().map(|lower| lower.free).sum();
        let freed = self.enforce_bounds(tier, &mut room);
        let claimed = if tier == FAST { self.claimed(interval).min(high) } else { Bytes::ZERO };
        let restored = if self.is_demoting[tier] { high } else { Bytes::ZERO };
        let kept_for_claims = if claimed > Bytes::ZERO { low.saturating_add(claimed) } else { Bytes::ZERO };
        let excess = self.usage(tier).saturating_sub(self.decision.tiers[tier].capacity);
        let target = restored.max(kept_for_claims).saturating_add(excess);
        let needed = target.saturating_sub(free.saturating_add(freed));
        let shortfall = self.demote_borrowed(tier, needed, room, free < low_urgent(low));
        // Demotion stops at the high watermark. The tier counts as full slightly longer, so that
        // the promotions of tenants above their protection are not resumed at this moment.
        let is_full = free < high.saturating_add(high.saturating_sub(low)) || needed > Bytes::ZERO;
        let report = &mut self.decision.tiers[tier];
        (report.is_full, report.shortfall) = (is_full, shortfall);
        report.is_below_watermark = self.is_demoting[tier];
    }

    /// Returns the usage of all tenants. It can exceed the capacity if the capacity is a part of a
    /// larger memory.
    fn usage(&self, tier: usize) -> Bytes {
        self.decision.tenants.iter().map(|tenant| tenant.tiers[tier].usage).sum()
    }

    fn watermarks(&self, tier: usize) -> Watermarks {
        let capacity = self.decision.tiers[tier].capacity;
        Watermarks {
            low: self.settings.low_watermark.of(capacity),
            high: self.settings.high_watermark.of(capacity),
        }
    }

    /// Orders the demotion of memory above bounds, and of memory within the margin below them
    /// (section IV-D). Returns the size of all these demotions. `room` is the free memory of lower
    /// tiers, which is reduced.
    fn enforce_bounds(&mut self, tier: usize, room: &mut Bytes) -> Bytes {
        let (settings, lower) = (&self.settings, &self.decision.tiers);
        self.parts.clear();
        self.parts.extend(self.decision.tenants.iter().map(|tenant| {
            let excess = excess_of_bound(&tenant.tiers[tier], settings);
            let max = excess.min(lower_tiers_room(tenant, tier, lower));
            Part { weight: excess.get(), max: max.get(), assigned: 0 }
        }));
        let total = self.parts.iter().map(|part| Bytes::new(part.max)).sum::<Bytes>().min(*room);
        if total == Bytes::ZERO {
            return total;
        }
        distribute(total.get(), &mut self.parts);
        *room = room.saturating_sub(total);
        for (tenant, part) in self.decision.tenants.iter_mut().zip(&self.parts) {
            let tier = &mut tenant.tiers[tier];
            let is_above = tier.bound.is_some_and(|bound| tier.usage > bound);
            let (urgency, reason) = if is_above {
                (Urgency::Immediate, DemotionReason::AboveBound)
            } else {
                (Urgency::Background, DemotionReason::NearBound)
            };
            add_demotion(tier, Demotion { bytes: Bytes::new(part.assigned), urgency, reason });
        }
        total
    }

    /// Orders the demotion of `needed` bytes from tenants above their protection, in proportion to
    /// Eq. 1. Returns the size that cannot be demoted.
    fn demote_borrowed(&mut self, tier: usize, needed: Bytes, room: Bytes, is_urgent: bool) -> Bytes {
        if needed == Bytes::ZERO {
            return Bytes::ZERO;
        }
        let lower = &self.decision.tiers;
        self.parts.clear();
        self.parts.extend(self.decision.tenants.iter().map(|tenant| {
            let report = &tenant.tiers[tier];
            let ordered = report.demotion.map_or(Bytes::ZERO, |demotion| demotion.bytes);
            let usage = report.usage.saturating_sub(ordered).get();
            let weight = demotion_target(usage, usage, report.scaled_protection.get());
            let max = weight.min(lower_tiers_room(tenant, tier, lower).saturating_sub(ordered).get());
            Part { weight, max, assigned: 0 }
        }));
        let size = needed.min(room);
        let rest = distribute(size.get(), &mut self.parts);
        let urgency = if is_urgent { Urgency::Immediate } else { Urgency::Background };
        let reason = if self.is_demoting[tier] {
            DemotionReason::LowFreeMemory
        } else {
            DemotionReason::ClaimedProtection
        };
        for (tenant, part) in self.decision.tenants.iter_mut().zip(&self.parts) {
            let bytes = Bytes::new(part.assigned);
            add_demotion(&mut tenant.tiers[tier], Demotion { bytes, urgency, reason });
        }
        needed.saturating_sub(size.saturating_sub(Bytes::new(rest)))
    }

    /// Returns the local memory that tenants below their protection will use before the next step.
    /// It is the return of donated memory.
    fn claimed(&self, interval: Ns) -> Bytes {
        let rate = self.settings.promotion_bytes_per_s.get() / PROBE_DIVISOR;
        let probe = Bytes::new(mul_div(rate, interval.0, Ns::secs(1).0));
        let claims = self.decision.tenants.iter().zip(&self.states).map(|(tenant, state)| {
            let room = entitled(tenant.fast(), &self.settings).saturating_sub(tenant.fast().usage);
            if room < self.settings.claim_min {
                return Bytes::ZERO;
            }
            room.min(state.expected_growth(lower_tiers_usage(tenant), probe))
        });
        claims.sum()
    }

    /// Decides the promotion budget of each tenant: Eq. 2 and the thrash level (sections IV-E, IV-F).
    fn limit_promotions(&mut self) {
        let is_full = self.decision.tiers[FAST].is_full;
        for (tenant, state) in self.decision.tenants.iter_mut().zip(&self.states) {
            let fast = tenant.tiers[FAST];
            tenant.throttle = throttle_reason(&fast, is_full, &self.settings);
            tenant.factor = promotion_factor(fast.usage, fast.scaled_protection, tenant.throttle.is_some());
            tenant.thrash_level = state.thrash_level();
            tenant.thrash = state.thrash_state();
            let entitled = entitled(&fast, &self.settings);
            // Within the margin, a budget for all pages would exceed the protection before the next
            // step.
            let is_below = fast.usage < self.settings.threshold_of(entitled);
            let is_throttled = tenant.throttle.is_some() || tenant.thrash_level > 0;
            tenant.budget = PromotionBudget {
                bytes_per_s: promotion_rate(tenant, state, self.settings.promotion_bytes_per_s),
                candidates: match (is_throttled, is_below) {
                    (false, true) => Candidates::All,
                    (false, false) if !is_full => Candidates::Accessed,
                    _ => Candidates::Hot,
                },
            };
        }
    }

    /// Converts the reports to orders.
    fn collect_orders(&mut self) {
        let Decision { orders, tenants, .. } = &mut self.decision;
        orders.clear();
        self.background.clear();
        for tenant in tenants.iter() {
            for (tier, report) in tenant.tiers.iter().enumerate() {
                let Some(Demotion { bytes, urgency, .. }) = report.demotion else { continue };
                let orders = if urgency == Urgency::Immediate { &mut *orders } else { &mut self.background };
                orders.push(Order::Demote { tenant: tenant.tenant, tier, bytes, urgency });
            }
        }
        orders.append(&mut self.background);
        let limit =
            |tenant: &TenantReport| Order::LimitPromotion { tenant: tenant.tenant, budget: tenant.budget };
        orders.extend(tenants.iter().map(limit));
    }
}

/// Watermarks of a tier.
struct Watermarks {
    low: Bytes,
    high: Bytes,
}

/// Returns the free memory below which demotion is urgent: 4/5 of the low watermark, which is the
/// ratio of the kernel's watermarks `min` and `low`.
fn low_urgent(low: Bytes) -> Bytes {
    Bytes::new(mul_div(low.get(), 4, 5))
}

/// Creates the report of a tenant with its usage and its limits.
fn empty_report(sample: &TenantSample) -> TenantReport {
    let tiers = sample.tiers.map(|tier| TenantTierReport {
        usage: tier.usage,
        protection: tier.protection,
        scaled_protection: tier.protection,
        bound: tier.bound,
        ..TenantTierReport::default()
    });
    TenantReport {
        tenant: sample.id,
        tiers,
        throttle: None,
        factor: Factor::ONE,
        thrash_level: 0,
        thrash: ThrashState::Unobserved,
        budget: PromotionBudget::UNLIMITED,
    }
}

/// Returns a protection, scaled by the usable memory divided by the sum of all protections. The sum
/// exceeds the usable memory.
fn scaled(protection: Bytes, usable: Bytes, sum: u128) -> Bytes {
    saturated(u128::from(protection.get()) * u128::from(usable.get()) / sum)
}

/// Converts a sum to a size. Saturates at `u64::MAX` bytes.
fn saturated(sum: u128) -> Bytes {
    Bytes::new(u64::try_from(sum).unwrap_or(u64::MAX))
}

/// Returns the usage above the margin below the bound; 0 without a bound.
fn excess_of_bound(tier: &TenantTierReport, settings: &Settings) -> Bytes {
    tier.bound.map_or(Bytes::ZERO, |bound| tier.usage.saturating_sub(settings.threshold_of(bound)))
}

/// Returns the memory that a tenant can use in spite of other tenants: its protection, limited by
/// its bound.
fn entitled(tier: &TenantTierReport, settings: &Settings) -> Bytes {
    let bound = tier.bound.map(|bound| settings.threshold_of(bound));
    bound.map_or(tier.scaled_protection, |bound| bound.min(tier.scaled_protection))
}

/// Returns the memory that the tenant may demote from `tier` without exceeding its bounds in lower
/// tiers. `tiers` shows which tiers exist.
fn lower_tiers_room(tenant: &TenantReport, tier: usize, tiers: &[TierReport; TIERS_MAX]) -> Bytes {
    let lower = (tier + 1..TIERS_MAX).filter(|lower| tiers[*lower].capacity > Bytes::ZERO);
    let room = |lower: usize| match tenant.tiers[lower].bound {
        Some(bound) => bound.saturating_sub(tenant.tiers[lower].usage).min(tiers[lower].free),
        None => tiers[lower].free,
    };
    lower.map(room).sum()
}

/// Returns the memory of a tenant outside of local memory.
fn lower_tiers_usage(tenant: &TenantReport) -> Bytes {
    tenant.tiers[FAST + 1..].iter().map(|tier| tier.usage).sum()
}

/// Adds a demotion to the report. The first reason remains, and the higher urgency applies.
fn add_demotion(tier: &mut TenantTierReport, added: Demotion) {
    if added.bytes == Bytes::ZERO {
        return;
    }
    tier.demotion = Some(tier.demotion.map_or(added, |first| Demotion {
        bytes: [first.bytes, added.bytes].into_iter().sum(),
        urgency: first.urgency.max(added.urgency),
        reason: first.reason,
    }));
}

/// Returns the reason why Eq. 2 applies to a tenant (section IV-E).
fn throttle_reason(fast: &TenantTierReport, is_full: bool, settings: &Settings) -> Option<ThrottleReason> {
    let is_near_bound = fast.bound.is_some_and(|bound| fast.usage >= settings.threshold_of(bound));
    match (is_full && fast.usage > fast.scaled_protection, is_near_bound) {
        (true, _) => Some(ThrottleReason::AboveProtection),
        (false, true) => Some(ThrottleReason::NearBound),
        (false, false) => None,
    }
}

/// Returns the largest promotion rate in bytes per second. Returns `None` if the tenant is not
/// limited.
fn promotion_rate(tenant: &TenantReport, state: &TenantState, base: Bytes) -> Option<Bytes> {
    match tenant.thrash_level {
        0 if tenant.factor == Factor::ONE => None,
        0 => Some(tenant.factor.of(base)),
        level => Some(throttled_rate(tenant.factor.of(base.min(state.unthrottled_rate())), level)),
    }
}
