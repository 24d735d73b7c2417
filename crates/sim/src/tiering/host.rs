//! Simulated host: allocates, accesses, promotes and demotes units of all tenants, tick by tick.

use tiering::fair::{Candidates, FAST, HostSample, Order, TenantId, TierSample, Urgency};
use units::{Bytes, Ns, limits::TIERS_MAX};

use super::{
    Scenario, Scheme, TimePoint,
    clock::{TICK_NS, TICKS_PER_S},
    controller::Controller,
    memory::{Access, Scan, UNIT_BYTES, UNIT_PAGES},
    report::TenantPoint,
    tenant::{SecondCounts, SimulatedTenant, gb},
};

/// Time of all tenants that the migration of a unit takes.
const MIGRATION_NS: u64 = 400 * UNIT_PAGES;
/// Largest time per tick that migrations take from the tenants, in nanoseconds: 90 % of the tick.
const MIGRATION_TIME_MAX_NS: u64 = TICK_NS / 10 * 9;
/// Units that the host demotes per tick in the background: 4 GB per second, which is four times the
/// largest rate in figure 5 of the paper.
const BACKGROUND_DEMOTIONS_PER_TICK: u64 = 4_000_000_000 / UNIT_BYTES / TICKS_PER_S;
/// Units that the host promotes per tick and tenant without an access.
const SEARCH_PROMOTIONS_PER_TICK: u64 = 1_000_000_000 / UNIT_BYTES / TICKS_PER_S;
/// Number of units that the kernel scans per round, distributed among tenants by the size of their
/// lists.
const KERNEL_SCAN_BATCH: u64 = 32;
/// Number of scanned units per unit to demote after which the kernel demotes referenced units.
const KERNEL_SCANS_PER_DEMOTION: u64 = 64;
/// Ratio of usable memory to capacity: 1 minus the high watermark.
const USABLE_FRACTION: f64 = 0.98;
/// Part of the capacity that stays free for urgent allocations (watermark `min`). It is below the
/// low watermark.
const RESERVE_FRACTION: f64 = 0.012;

/// Demotion that has been ordered and not completed.
#[derive(Clone, Copy, Debug)]
struct PendingDemotion {
    tenant: usize,
    tier: usize,
    units: u64,
    urgency: Urgency,
}

/// Tier of a simulated host.
#[derive(Clone, Copy, Debug, Default)]
struct SimulatedTier {
    capacity: Bytes,
    reserve: Bytes,
}

/// Simulated host.
pub(super) struct Host<'a> {
    tiers: [SimulatedTier; TIERS_MAX],
    tenants: Vec<SimulatedTenant<'a>>,
    controller: Controller,
    pending: Vec<PendingDemotion>,
    now: Ns,
    /// Units that were migrated in the last tick.
    migrated: u64,
}

impl<'a> Host<'a> {
    /// Creates a host without running tenants.
    pub(super) fn new(scenario: &'a Scenario, scheme: Scheme) -> Self {
        let mut tiers = [SimulatedTier::default(); TIERS_MAX];
        for (index, (tier, size_gb)) in tiers.iter_mut().zip(&scenario.tiers_gb).enumerate() {
            let capacity_gb = if index == FAST { size_gb / USABLE_FRACTION } else { *size_gb };
            let reserve_gb = if index == FAST { capacity_gb * RESERVE_FRACTION } else { 0.0 };
            *tier = SimulatedTier { capacity: gb(capacity_gb), reserve: gb(reserve_gb) };
        }
        let tenants = (0..).zip(&scenario.tenants).map(|(id, spec)| SimulatedTenant::new(TenantId(id), spec));
        Self {
            tiers,
            tenants: tenants.collect(),
            controller: Controller::new(scheme),
            pending: Vec::new(),
            now: Ns::ZERO,
            migrated: 0,
        }
    }

    /// Simulates one second, and returns the state at its end.
    pub(super) fn run_second(&mut self, second: u32) -> TimePoint {
        self.now = Ns::secs(u64::from(second));
        self.tenants.iter_mut().for_each(|tenant| tenant.counts = SecondCounts::default());
        self.follow_orders();
        for _ in 0..TICKS_PER_S {
            self.run_tick(second);
            self.now = self.now.after(Ns(TICK_NS));
        }
        let point = |(index, tenant): (usize, &SimulatedTenant<'_>)| {
            TenantPoint::new(tenant, self.controller.thrash_level(index))
        };
        TimePoint { second, tenants: self.tenants.iter().enumerate().map(point).collect() }
    }

    /// Lets the controller decide, and stores its orders.
    fn follow_orders(&mut self) {
        let samples: Vec<_> = self.tenants.iter().map(SimulatedTenant::sample).collect();
        let host = HostSample {
            at: self.now,
            tiers: std::array::from_fn(|tier| TierSample {
                capacity: self.tiers[tier].capacity,
                free: self.free(tier),
            }),
        };
        self.pending.clear();
        for order in self.controller.step(&host, &samples) {
            match order {
                Order::Demote { tenant, tier, bytes, urgency } => self.pending.push(PendingDemotion {
                    tenant: tenant.0 as usize,
                    tier,
                    units: bytes.get().div_ceil(UNIT_BYTES),
                    urgency,
                }),
                Order::LimitPromotion { tenant, budget } => self.tenants[tenant.0 as usize].budget = budget,
            }
        }
    }

    fn run_tick(&mut self, second: u32) {
        let lost_ns = (self.migrated * MIGRATION_NS).min(MIGRATION_TIME_MAX_NS);
        self.migrated = 0;
        for index in 0..self.tenants.len() {
            self.tenants[index].start_tick(TICK_NS - lost_ns);
            self.allocate(index, second);
        }
        self.demote_pending();
        for index in 0..self.tenants.len() {
            self.access(index);
            self.promote_without_access(index);
        }
    }

    /// Frees and allocates memory of a tenant. Local memory is used first.
    fn allocate(&mut self, index: usize, second: u32) {
        self.tenants[index].free_excess(second);
        for _ in 0..self.tenants[index].allocation(second) {
            let tier =
                if self.may_use_local_memory(index) { Some(FAST) } else { self.lower_tier(index, FAST) };
            if let Some(tier) = tier {
                self.tenants[index].memory.allocate(tier);
            }
        }
    }

    fn demote_pending(&mut self) {
        if self.controller.is_kernel() {
            self.demote_like_kernel();
        }
        let mut background = BACKGROUND_DEMOTIONS_PER_TICK;
        for mut pending in std::mem::take(&mut self.pending) {
            let limit = match pending.urgency {
                Urgency::Immediate => pending.units,
                Urgency::Background => pending.units.min(background),
            };
            let demoted = (0..limit).take_while(|_| self.demote_unit(pending.tenant, pending.tier)).count();
            let demoted = demoted as u64;
            pending.units -= demoted;
            if pending.urgency == Urgency::Background {
                background -= demoted;
            }
            if pending.units > 0 {
                self.pending.push(pending);
            }
        }
    }

    /// Demotes like kswapd without protections: scans the lists of all tenants in proportion to their
    /// sizes, until enough units were found that were not referenced. Tenants with colder memory lose
    /// more of it.
    fn demote_like_kernel(&mut self) {
        let total: u64 = self.pending.iter().map(|pending| pending.units).sum();
        let (mut wanted, mut scans) = (total.min(BACKGROUND_DEMOTIONS_PER_TICK), 0);
        while wanted > 0 && scans < total * KERNEL_SCANS_PER_DEMOTION {
            for index in 0..self.pending.len() {
                let PendingDemotion { tenant, tier, units, .. } = self.pending[index];
                let batch = (KERNEL_SCAN_BATCH * units).div_ceil(total);
                let found = (0..batch).filter(|_| self.scan_unit(tenant, tier)).count() as u64;
                wanted = wanted.saturating_sub(found);
                scans += batch;
            }
        }
        if wanted == 0 {
            self.pending.clear();
        }
    }

    /// Inspects a unit of a tenant, and demotes it if it was not referenced. Returns whether the unit
    /// was demoted.
    fn scan_unit(&mut self, index: usize, tier: usize) -> bool {
        let Some(lower) = self.lower_tier(index, tier) else { return false };
        let Scan::Victim(unit) = self.tenants[index].memory.scan_inactive(tier) else { return false };
        self.tenants[index].demote(unit, lower);
        self.migrated += 1;
        true
    }

    /// Demotes the least recently used unit of a tenant. Returns whether there was a unit and room
    /// for it.
    fn demote_unit(&mut self, index: usize, tier: usize) -> bool {
        let Some(lower) = self.lower_tier(index, tier) else { return false };
        let tenant = &mut self.tenants[index];
        let Some(unit) = tenant.memory.select_victim(tier) else { return false };
        tenant.demote(unit, lower);
        self.controller.record_demotion(tenant.id, unit, self.now);
        self.migrated += 1;
        true
    }

    /// Performs the accesses of a tenant in a tick, and promotes candidates.
    fn access(&mut self, index: usize) {
        while let Some(unit) = self.tenants[index].next_access() {
            if let Access::HintFault { is_hot } = self.tenants[index].memory.access(unit)
                && self.tenants[index].is_candidate(is_hot)
            {
                self.promote(index, unit);
            }
        }
    }

    /// Promotes units without an access, if the budget of the tenant permits all units.
    fn promote_without_access(&mut self, index: usize) {
        if self.tenants[index].budget.candidates != Candidates::All {
            return;
        }
        for _ in 0..SEARCH_PROMOTIONS_PER_TICK {
            let Some(unit) = self.tenants[index].memory.next_remote_unit() else { return };
            if !self.tenants[index].has_tokens() || !self.promote(index, unit) {
                return;
            }
        }
    }

    /// Attempts to promote a unit. Returns whether local memory was available.
    fn promote(&mut self, index: usize, unit: usize) -> bool {
        self.tenants[index].record_attempt();
        if !self.may_use_local_memory(index) {
            return false;
        }
        let tenant = &mut self.tenants[index];
        tenant.promote(unit);
        self.controller.record_promotion(tenant.id, unit, self.now);
        self.migrated += 1;
        true
    }

    fn may_use_local_memory(&self, index: usize) -> bool {
        self.has_room(FAST) && self.controller.may_use_local_memory(&self.tenants[index].sample())
    }

    /// Returns the next lower tier with room for a unit of the tenant.
    fn lower_tier(&self, index: usize, tier: usize) -> Option<usize> {
        let has_room = |lower: &usize| self.has_room(*lower) && self.tenants[index].has_room_in(*lower);
        (tier + 1..TIERS_MAX).find(has_room)
    }

    fn has_room(&self, tier: usize) -> bool {
        self.free(tier).get() >= self.tiers[tier].reserve.get() + UNIT_BYTES
    }

    /// Returns the free memory of a tier.
    fn free(&self, tier: usize) -> Bytes {
        let units: usize = self.tenants.iter().map(|tenant| tenant.memory.units_in(tier)).sum();
        self.tiers[tier].capacity.saturating_sub(Bytes::new(units as u64 * UNIT_BYTES))
    }
}
