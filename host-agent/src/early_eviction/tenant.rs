//! State of a tenant of early eviction: converts the counters of the kernel to those of the policy.

use tiering::{
    evict::{Counters, FlowClass, Settings, TenantSample},
    fair::TenantId,
};
use units::{Bytes, Name, Ns};

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
    /// Reason why a request in this cycle had no effect; empty if all had.
    pub problem: String,
    /// Problem that was logged last, so that a lasting problem is logged once.
    logged_problem: String,
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
            logged_problem: String::new(),
        }
    }

    /// Adds a cycle. The tenant counts as blocked if its usage exceeds the largest threshold, and it has
    /// waited for evictions.
    ///
    /// The kernel counts no accesses, so processor time stands for them: β compares the major page faults
    /// per microsecond.
    pub fn add_cycle(&mut self, now: EvictionCounters, cycle: &Cycle<'_>) {
        let Cycle { elapsed, settings } = *cycle;
        let before = std::mem::replace(&mut self.last, now);
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let faults = since(now.major_faults, before.major_faults);
        let stalled = |of: fn(&EvictionCounters) -> u64| {
            Ns(since(of(&now), of(&before)).saturating_mul(NS_PER_US)).min(elapsed)
        };
        // Reclaim is a stall on memory. The wait for a page is a stall on I/O, and also on memory if the page
        // was recently in use. Other I/O cannot be distinguished, unless there was no page fault.
        let io_stalled = stalled(|counters| counters.io_stalled_us);
        let fetching = if faults > 0 { io_stalled } else { Ns::ZERO };
        let blocked = stalled(|counters| counters.memory_stalled_us).since(fetching);
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
        // Without a limit, there is no decision.
        (self.threshold, self.growth) = (Bytes::new(u64::MAX), Bytes::ZERO);
    }

    /// Logs the problem of this cycle unless it is that of the last one.
    pub fn log_new_problem(&mut self, name: &Name) {
        if self.problem != self.logged_problem {
            if !self.problem.is_empty() {
                tracing::warn!(tenant = %name, problem = self.problem, "early eviction has no effect");
            }
            self.logged_problem.clone_from(&self.problem);
        }
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

    /// Counters of a tenant that only waits for evictions.
    fn counters(memory_mib: u64, memory_stalled_ms: u64) -> EvictionCounters {
        EvictionCounters {
            memory: Bytes::mib(memory_mib),
            limit: Some(LIMIT),
            memory_stalled_us: memory_stalled_ms * 1000,
            ..EvictionCounters::default()
        }
    }

    /// Adds a cycle of 500 ms.
    fn add(tenant: &mut Tenant, now: EvictionCounters) {
        let settings = Settings { reserve: Bytes::mib(1), ..Settings::default() };
        tenant.add_cycle(now, &Cycle { elapsed: Ns::ms(500), settings: &settings });
    }

    #[test]
    fn waiting_is_divided_into_evictions_and_fetches() {
        let before =
            EvictionCounters { reclaimed: Bytes::mib(10), major_faults: 5, cpu_us: 1000, ..counters(90, 1) };
        let mut tenant = Tenant::new(TenantId(1), 7, before);
        tenant.requesting = Ns::ms(40);
        let now = EvictionCounters {
            reclaimed: Bytes::mib(60),
            major_faults: 105,
            cpu_us: 151_000,
            io_stalled_us: 20_000,
            ..counters(100, 101)
        };
        add(&mut tenant, now);
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
    fn io_without_page_faults_is_no_fetch() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(90, 0));
        add(&mut tenant, EvictionCounters { io_stalled_us: 20_000, ..counters(90, 100) });
        assert_eq!((tenant.counts.blocked, tenant.counts.fetching), (Ns::ms(100), Ns::ZERO));
    }

    #[test]
    fn waiting_never_exceeds_the_cycle() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(90, 0));
        let now = EvictionCounters { io_stalled_us: u64::MAX, major_faults: u64::MAX, ..counters(90, 10) };
        add(&mut tenant, now);
        assert_eq!((tenant.counts.blocked, tenant.counts.fetching), (Ns::ZERO, Ns::ms(500)));
        add(&mut tenant, EvictionCounters { memory_stalled_us: u64::MAX, ..now });
        assert_eq!((tenant.counts.blocked, tenant.counts.fetching), (Ns::ms(500), Ns::ms(500)));
    }

    #[test]
    fn tenant_that_is_always_blocked_is_urgent_half_of_the_time() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(100, 0));
        let mut urgent = 0;
        for cycle in 1..=640 {
            add(&mut tenant, counters(100, cycle));
            urgent += u32::from(tenant.sample().unwrap().is_blocked);
        }
        assert_eq!(urgent, 320);
    }

    #[test]
    fn tenant_below_its_largest_threshold_is_not_blocked() {
        let mut tenant = Tenant::new(TenantId(1), 7, counters(99, 0));
        add(&mut tenant, counters(99, 1));
        assert!(!tenant.sample().unwrap().is_blocked);
        add(&mut tenant, counters(100, 1));
        assert!(!tenant.sample().unwrap().is_blocked, "it has not waited");
        add(&mut tenant, counters(100, 2));
        assert!(tenant.sample().unwrap().is_blocked);
    }

    #[test]
    fn tenant_without_a_limit_is_not_evicted() {
        let mut tenant = Tenant::new(TenantId(1), 7, EvictionCounters::default());
        add(&mut tenant, EvictionCounters::default());
        assert_eq!(tenant.sample(), None);
    }
}
