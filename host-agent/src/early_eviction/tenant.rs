//! State of a tenant of early eviction: converts the counters of the kernel to those of the policy.

use tiering::{
    evict::{Counters, FlowClass, Settings, TenantSample},
    fair::TenantId,
};
use units::{Bytes, Ns};

use crate::{eviction_report::Counts, host::cgroup::EvictionCounters};

/// Largest number of the last 64 cycles in which a tenant may have the most urgent class. A tenant can block
/// itself, and would otherwise always come before the others.
const URGENT_CYCLES_MAX: u32 = u64::BITS / 2;
/// Nanoseconds per microsecond.
const NS_PER_US: u64 = 1000;

/// Cycle that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cycle<'a> {
    /// Duration of the cycle.
    pub elapsed: Ns,
    /// Time in which the swap device reads a page.
    pub read_latency: Ns,
    /// Settings of the policy.
    pub settings: &'a Settings,
}

/// State of a tenant.
#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub id: TenantId,
    /// Inode of the cgroup, which identifies it.
    pub inode: u64,
    /// Counters of the kernel at the end of the last cycle.
    last: EvictionCounters,
    /// Counters for the policy.
    counters: Counters,
    /// Time in which the agent requested evictions, since the end of the last cycle.
    pub requesting: Ns,
    /// Counters for reports.
    pub counts: Counts,
    /// Recent cycles in which the tenant had the most urgent class, one bit per cycle.
    urgent: u64,
    /// Class for which the priority of I/O was set.
    pub io_class: Option<FlowClass>,
    /// Usage above which memory is evicted.
    pub threshold: Bytes,
    /// Largest growth without waiting, in bytes per second.
    pub growth: Bytes,
    /// Class of the evictions.
    pub class: FlowClass,
    /// Whether the kernel could not evict as much as requested in this cycle.
    pub is_exhausted: bool,
    pub problem: String,
}

impl Tenant {
    /// Starts to observe a tenant.
    pub fn new(id: TenantId, inode: u64, counters: EvictionCounters) -> Self {
        Self {
            id,
            inode,
            last: counters,
            counters: Counters::default(),
            requesting: Ns::ZERO,
            counts: Counts::default(),
            urgent: 0,
            io_class: None,
            threshold: Bytes::new(u64::MAX),
            growth: Bytes::ZERO,
            class: FlowClass::LEAST_URGENT,
            is_exhausted: false,
            problem: String::new(),
        }
    }

    /// Adds a cycle. The tenant counts as blocked if its usage exceeds the largest threshold, and it has
    /// waited for evictions.
    ///
    /// The kernel counts no accesses, so processor time stands for them: β compares the major page faults
    /// per microsecond.
    pub fn add_cycle(&mut self, now: EvictionCounters, cycle: &Cycle<'_>) {
        let Cycle { elapsed, read_latency, settings } = *cycle;
        let before = std::mem::replace(&mut self.last, now);
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let faults = since(now.major_faults, before.major_faults);
        let stalled = Ns(since(now.stalled_us, before.stalled_us).saturating_mul(NS_PER_US)).min(elapsed);
        // A page fault that reads the device stalls the task for at least as long as the device needs.
        let fetching = Ns(read_latency.0.saturating_mul(faults)).min(stalled);
        let blocked = stalled.since(fetching);
        let evicted = now.reclaimed.saturating_sub(before.reclaimed);
        let grown = now.memory.saturating_add(evicted).saturating_sub(before.memory);
        let requesting = std::mem::take(&mut self.requesting);
        let counters = &mut self.counters;
        counters.grown = counters.grown.saturating_add(grown);
        counters.evicted = counters.evicted.saturating_add(evicted);
        counters.evicting = counters.evicting.after(requesting.after(blocked).min(elapsed));
        counters.blocked = counters.blocked.after(blocked);
        counters.fetching = counters.fetching.after(fetching);
        counters.misses = counters.misses.saturating_add(faults);
        counters.accesses = counters.accesses.saturating_add(since(now.cpu_us, before.cpu_us));
        self.counts.blocked = self.counts.blocked.after(blocked);
        self.counts.fetching = self.counts.fetching.after(fetching);
        let is_blocked =
            now.limit.is_some_and(|limit| now.memory > settings.upper_threshold(limit)) && blocked > Ns::ZERO;
        self.urgent <<= 1;
        self.urgent |= u64::from(is_blocked && self.urgent.count_ones() < URGENT_CYCLES_MAX);
        self.is_exhausted = false;
    }

    /// Returns the sample for the policy, or `None` without a memory limit.
    pub fn sample(&self) -> Option<TenantSample> {
        Some(TenantSample {
            id: self.id,
            limit: self.last.limit?,
            usage: self.last.memory,
            is_blocked: self.urgent & 1 == 1,
            counters: self.counters,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Bytes = Bytes::mib(100);

    fn counters(memory_mib: u64, reclaimed_mib: u64, major_faults: u64, stalled_us: u64) -> EvictionCounters {
        EvictionCounters {
            memory: Bytes::mib(memory_mib),
            limit: Some(LIMIT),
            reclaimed: Bytes::mib(reclaimed_mib),
            major_faults,
            cpu_us: stalled_us + 1000 * reclaimed_mib,
            stalled_us,
        }
    }

    /// Adds a cycle of 500 ms.
    fn add(tenant: &mut Tenant, now: EvictionCounters, read_latency: Ns) {
        let settings = Settings { reserve: Bytes::mib(1), ..Settings::default() };
        tenant.add_cycle(now, &Cycle { elapsed: Ns::ms(500), read_latency, settings: &settings });
    }

    #[test]
    fn waiting_is_divided_into_evictions_and_fetches() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(90, 10, 5, 1000));
        tenant.requesting = Ns::ms(40);
        add(&mut tenant, counters(100, 60, 105, 101_000), Ns(200_000));
        let expected = Counters {
            grown: Bytes::mib(60),
            evicted: Bytes::mib(50),
            evicting: Ns::ms(120),
            blocked: Ns::ms(80),
            fetching: Ns::ms(20),
            misses: 100,
            accesses: 150_000,
        };
        let sample = tenant.sample().unwrap();
        assert_eq!(sample.counters, expected);
        assert!(sample.is_blocked && sample.limit == LIMIT && sample.usage == Bytes::mib(100));
        assert_eq!((tenant.counts.blocked, tenant.counts.fetching), (Ns::ms(80), Ns::ms(20)));
        assert_eq!(tenant.requesting, Ns::ZERO);
    }

    #[test]
    fn fetches_never_exceed_the_stalled_time() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(90, 0, 0, 0));
        add(&mut tenant, counters(90, 0, u64::MAX / 2, 3000), Ns::secs(1));
        assert_eq!((tenant.counts.blocked, tenant.counts.fetching), (Ns::ZERO, Ns::ms(3)));
        add(&mut tenant, counters(90, 0, u64::MAX, u64::MAX), Ns::secs(1));
        assert_eq!(tenant.counts.fetching, Ns::ms(503));
    }

    #[test]
    fn tenant_that_is_always_blocked_is_urgent_half_of_the_time() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(100, 0, 0, 0));
        let mut urgent = 0;
        for cycle in 1..=640 {
            add(&mut tenant, counters(100, 0, 0, cycle * 1000), Ns::ZERO);
            urgent += u32::from(tenant.sample().unwrap().is_blocked);
        }
        assert_eq!(urgent, 320);
    }

    #[test]
    fn tenant_below_its_limit_is_not_blocked() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(99, 0, 0, 0));
        add(&mut tenant, counters(99, 0, 0, 1000), Ns::ZERO);
        assert!(!tenant.sample().unwrap().is_blocked);
        add(&mut tenant, counters(100, 0, 0, 1000), Ns::ZERO);
        assert!(!tenant.sample().unwrap().is_blocked, "it has not waited");
        add(&mut tenant, counters(100, 0, 0, 2000), Ns::ZERO);
        assert!(tenant.sample().unwrap().is_blocked);
    }

    #[test]
    fn tenant_without_a_limit_is_not_evicted() {
        let mut tenant = Tenant::new(TenantId(1), 7, EvictionCounters::default());
        add(&mut tenant, EvictionCounters::default(), Ns::ZERO);
        assert_eq!(tenant.sample(), None);
    }
}
