//! Simulated tenant: its memory, the order of its accesses, its counters and its promotion budget.

use tiering::fair::{Candidates, Counters, FAST, PromotionBudget, TenantId, TenantSample, TenantTier};
use units::{Bytes, limits::TIERS_MAX};

use super::{
    clock::{TICK_NS, TICKS_PER_S},
    memory::{TenantMemory, UNIT_BYTES, UNIT_PAGES},
    scenario::{Pattern, Tenant},
};

/// Time of an access to each page of a unit in local memory: 290,000 pages per second without
/// migrations.
const LOCAL_ACCESS_NS: u64 = 3300 * UNIT_PAGES;
/// Time of an access to each page of a unit in a lower tier. A tenant whose memory is almost
/// entirely in CXL memory loses up to 39 %; section III-F reports 28 % for a part of it.
const REMOTE_ACCESS_NS: u64 = LOCAL_ACCESS_NS * 165 / 100;
/// One in this number of accesses goes to the cold part of the memory.
const COLD_ACCESS_INTERVAL: u64 = 10;
/// Units that are scanned per tick for hint faults: 1 GiB per second, four times the default of Linux per process
/// (`scan_size` 256 MB, `scan_period_min` 1 s), for a tenant with several processes.
const SCAN_UNITS_PER_TICK: u64 = (1 << 30) / UNIT_BYTES / TICKS_PER_S;

/// Counts of one second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SecondCounts {
    pub(super) accessed: u64,
    pub(super) promoted: u64,
    pub(super) demoted: u64,
}

/// Tenant in a simulation.
#[derive(Clone, Debug)]
pub(super) struct SimulatedTenant<'a> {
    pub(super) spec: &'a Tenant,
    pub(super) id: TenantId,
    pub(super) memory: TenantMemory,
    pub(super) budget: PromotionBudget,
    pub(super) counts: SecondCounts,
    counters: Counters,
    cursor: AccessCursor,
    /// Time that remains for accesses in this tick, in nanoseconds. Negative if the last access took
    /// longer.
    time_ns: i64,
    /// Bytes that may be promoted now.
    tokens: u64,
    /// Fraction of a unit that is carried over to the next tick, from 0 to 1.
    allocation: f64,
}

impl<'a> SimulatedTenant<'a> {
    /// Creates a tenant without memory.
    pub(super) fn new(id: TenantId, spec: &'a Tenant) -> Self {
        Self {
            spec,
            id,
            memory: TenantMemory::default(),
            budget: PromotionBudget::UNLIMITED,
            counts: SecondCounts::default(),
            counters: Counters { freed: Some(Bytes::ZERO), ..Counters::default() },
            cursor: AccessCursor::default(),
            time_ns: 0,
            tokens: 0,
            allocation: 0.0,
        }
    }

    /// Starts a tick: adds time for accesses and tokens for promotions, and advances the scan.
    pub(super) fn start_tick(&mut self, time_ns: u64) {
        let time_ns = time_ns * u64::from(self.spec.threads);
        self.time_ns += i64::try_from(time_ns).unwrap_or(i64::MAX);
        if let Some(rate) = self.budget.bytes_per_s {
            let burst = rate.get().max(UNIT_BYTES);
            self.tokens = (self.tokens + rate.get() / TICKS_PER_S).min(burst);
        }
        self.memory.advance_scan(usize::try_from(SCAN_UNITS_PER_TICK).unwrap_or(usize::MAX));
    }

    /// Returns the number of units to allocate in this tick, at most the distance to the demand.
    pub(super) fn allocation(&mut self, second: u32) -> usize {
        let missing = self.demand_units(second).saturating_sub(self.memory.len());
        self.allocation += self.spec.allocation_gb_per_s * 1e9 / UNIT_BYTES as f64 / TICKS_PER_S as f64;
        let whole = floor(self.allocation).min(missing);
        self.allocation = (self.allocation - whole as f64).min(1.0);
        whole
    }

    /// Frees memory above the demand.
    pub(super) fn free_excess(&mut self, second: u32) {
        let excess = self.memory.len().saturating_sub(self.demand_units(second));
        let freed = (0..excess).filter_map(|_| self.memory.free_last()).count() as u64;
        self.counters.freed = self.counters.freed.map(|sum| Bytes::new(sum.get() + freed * UNIT_BYTES));
    }

    fn demand_units(&self, second: u32) -> usize {
        let reached = self.spec.demand_gb.iter().rev().find(|(start, _)| *start <= second);
        floor(reached.map_or(0.0, |(_, demand_gb)| demand_gb * 1e9 / UNIT_BYTES as f64))
    }

    /// Returns the next unit to access, or `None` at the end of the tick.
    pub(super) fn next_access(&mut self) -> Option<usize> {
        if self.time_ns <= 0 || self.memory.len() == 0 {
            self.time_ns = self.time_ns.min(0);
            return None;
        }
        let unit = self.cursor.next(self.spec.pattern, self.memory.len());
        let is_local = self.memory.tier_of(unit) == FAST;
        let time_ns = if is_local { LOCAL_ACCESS_NS } else { REMOTE_ACCESS_NS };
        self.time_ns -= i64::try_from(time_ns).unwrap_or(i64::MAX);
        self.counts.accessed += 1;
        Some(unit)
    }

    /// Returns whether the budget permits to promote a unit after a hint fault.
    pub(super) fn is_candidate(&self, is_hot: bool) -> bool {
        self.has_tokens() && (is_hot || self.budget.candidates != Candidates::Hot)
    }

    /// Returns whether the budget permits to promote one more unit.
    pub(super) fn has_tokens(&self) -> bool {
        self.budget.bytes_per_s.is_none() || self.tokens >= UNIT_BYTES
    }

    /// Counts an attempt to promote a unit.
    pub(super) fn record_attempt(&mut self) {
        self.counters.attempted = add_unit(self.counters.attempted);
    }

    /// Promotes a unit.
    pub(super) fn promote(&mut self, unit: usize) {
        self.memory.migrate(unit, FAST);
        self.tokens = self.tokens.saturating_sub(UNIT_BYTES);
        self.counters.promoted = add_unit(self.counters.promoted);
        self.counts.promoted += 1;
    }

    /// Demotes a unit to a lower tier.
    pub(super) fn demote(&mut self, unit: usize, tier: usize) {
        self.memory.migrate(unit, tier);
        self.counters.demoted = add_unit(self.counters.demoted);
        self.counts.demoted += 1;
    }

    /// Returns usage, limits and counters for the scheme. It does not contain the demand.
    pub(super) fn sample(&self) -> TenantSample {
        let tiers = std::array::from_fn(|tier| self.tenant_tier(tier));
        let active = Some(bytes_of(self.memory.active_units()));
        TenantSample { id: self.id, tiers, counters: Counters { active, ..self.counters } }
    }

    fn tenant_tier(&self, tier: usize) -> TenantTier {
        let (protection_gb, bound_gb) = self.spec.limits_gb.get(tier).copied().unwrap_or((0.0, None));
        TenantTier {
            usage: bytes_of(self.memory.units_in(tier)),
            protection: gb(protection_gb),
            bound: bound_gb.map(gb),
        }
    }

    /// Returns whether the tenant may use more memory of a lower tier.
    pub(super) fn has_room_in(&self, tier: usize) -> bool {
        let limits = self.tenant_tier(tier);
        limits.bound.is_none_or(|bound| limits.usage < bound)
    }
}

/// Position in the pattern of accesses.
#[derive(Clone, Copy, Debug, Default)]
struct AccessCursor {
    /// Number of accesses.
    accesses: u64,
    /// Next unit of the part that receives most accesses, or next unit of the block.
    next: usize,
    next_cold: usize,
    block_start: usize,
    pass: u32,
}

impl AccessCursor {
    fn next(&mut self, pattern: Pattern, units: usize) -> usize {
        self.accesses += 1;
        match pattern {
            Pattern::Passes { hot_fraction } => self.next_in_passes(hot_fraction, units),
            Pattern::Blocks { block_gb, passes } => self.next_in_blocks(block_gb, passes, units),
        }
    }

    fn next_in_passes(&mut self, hot_fraction: f64, units: usize) -> usize {
        let hot = floor(hot_fraction * units as f64).clamp(1, units);
        if hot < units && self.accesses.is_multiple_of(COLD_ACCESS_INTERVAL) {
            self.next_cold = (self.next_cold + 1) % (units - hot);
            return hot + self.next_cold;
        }
        self.next = (self.next + 1) % hot;
        self.next
    }

    fn next_in_blocks(&mut self, block_gb: f64, passes: u32, units: usize) -> usize {
        let block = floor(block_gb * 1e9 / UNIT_BYTES as f64).clamp(1, units);
        if self.next == block {
            (self.next, self.pass) = (0, self.pass + 1);
        }
        if self.pass == passes {
            (self.pass, self.block_start) = (0, (self.block_start + block) % units);
        }
        self.next += 1;
        (self.block_start + self.next - 1) % units
    }
}

/// Converts a size in GB to bytes.
pub(super) fn gb(size: f64) -> Bytes {
    Bytes::new(floor(size * 1e9) as u64)
}

fn bytes_of(units: usize) -> Bytes {
    Bytes::new(units as u64 * UNIT_BYTES)
}

fn add_unit(size: Bytes) -> Bytes {
    Bytes::new(size.get() + UNIT_BYTES)
}

/// Rounds a size down. Sizes in a simulation are limited.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes are positive and limited")]
pub(super) fn floor(size: f64) -> usize {
    size.max(0.0) as usize
}

// A tick has time for several accesses, and each tier of a tenant has a sample.
const _: () = assert!(TICK_NS > 10 * REMOTE_ACCESS_NS && TIERS_MAX > 1);
