//! State of a tenant of early eviction: converts the counters of the kernel to those of the policy.

use tiering::{
    evict::{Counters, FlowClass, TenantSample},
    fair::TenantId,
};
use units::{Bytes, Name, Ns};

use super::requests::Requests;
use crate::{eviction_report::Counts, host::cgroup::EvictionCounters};

/// Number of cycles in a row in which a blocked tenant can have the most urgent class. A tenant can block
/// itself, and would otherwise always come before the others.
const URGENT_CYCLES_MAX: u32 = 8;
/// Number of tokens that an urgent cycle takes, so that at most every second cycle is urgent in the long run.
const TOKENS_PER_URGENT_CYCLE: u32 = 2;
/// Largest number of tokens. An urgent cycle also adds a token.
const URGENT_TOKENS_MAX: u32 = URGENT_CYCLES_MAX * (TOKENS_PER_URGENT_CYCLE - 1) + 1;
/// Longest time to fetch memory after one page fault. Longer stalls on I/O have other reasons.
const FETCH_TIME_MAX: Ns = Ns::ms(50);
/// Smallest number of page faults in a cycle that have a rate. Fewer count as none for β, because their ratio
/// to those of another cycle is random.
const FAULTS_MIN: u64 = 16;
/// Nanoseconds per microsecond.
const NS_PER_US: u64 = 1000;

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
    /// Whether the tenant is blocked, and may have the most urgent class.
    is_urgent: bool,
    /// Tokens for the most urgent class: each cycle adds one, and an urgent cycle takes
    /// [`TOKENS_PER_URGENT_CYCLE`].
    urgent_tokens: u32,
    /// Class for which the priority of I/O was set.
    pub io_class: Option<FlowClass>,
    /// Usage above which memory is evicted.
    pub threshold: Bytes,
    /// Largest growth without waiting, in bytes per second.
    pub growth: Bytes,
    /// Class of the evictions.
    pub class: FlowClass,
    /// Whether there was no cycle before.
    pub is_new: bool,
    /// State of the requests to evict memory.
    pub requests: Requests,
    /// Reason why the last request had no effect; empty if it had.
    pub problem: String,
    /// Reason why the priority of I/O could not be set; empty if it could.
    pub io_problem: String,
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
            is_urgent: false,
            urgent_tokens: URGENT_TOKENS_MAX,
            io_class: None,
            threshold: Bytes::new(u64::MAX),
            growth: Bytes::ZERO,
            class: FlowClass::LEAST_URGENT,
            is_new: true,
            requests: Requests::new(),
            problem: String::new(),
            io_problem: String::new(),
            logged_problem: String::new(),
        }
    }

    /// Adds a cycle. The tenant counts as blocked if its usage reached the limit, and a task waited for
    /// memory.
    ///
    /// The kernel counts no accesses, so processor time stands for them: β compares the major page faults
    /// per microsecond.
    pub fn add_cycle(&mut self, now: EvictionCounters, elapsed: Ns) {
        let before = std::mem::replace(&mut self.last, now);
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let faults = since(now.major_faults, before.major_faults);
        let stalled = |of: fn(&EvictionCounters) -> u64| {
            Ns(since(of(&now), of(&before)).saturating_mul(NS_PER_US)).min(elapsed)
        };
        // Reclaim is a stall on memory. The wait for a page is a stall on I/O, and also on memory if the page
        // was recently in use. Other I/O cannot be distinguished, but page faults limit the time.
        let fetching =
            Ns(FETCH_TIME_MAX.0.saturating_mul(faults)).min(stalled(|counters| counters.io_stalled_us));
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
        counters.misses = counters.misses.saturating_add(if faults < FAULTS_MIN { 0 } else { faults });
        counters.accesses = counters.accesses.saturating_add(since(now.cpu_us, before.cpu_us));
        self.counts.blocked = self.counts.blocked.after(blocked);
        self.counts.fetching = self.counts.fetching.after(fetching);
        let is_blocked =
            now.limit_hits > before.limit_hits && now.memory_some_stalled_us > before.memory_some_stalled_us;
        self.limit_urgency(is_blocked);
        self.is_new = false;
        // Without a limit, there is no decision.
        (self.threshold, self.growth) = (Bytes::new(u64::MAX), Bytes::ZERO);
    }

    /// Limits the cycles in which the tenant has the most urgent class to half of all cycles.
    fn limit_urgency(&mut self, is_blocked: bool) {
        self.is_urgent = is_blocked && self.urgent_tokens >= TOKENS_PER_URGENT_CYCLE;
        let spent = if self.is_urgent { TOKENS_PER_URGENT_CYCLE } else { 0 };
        self.urgent_tokens = (self.urgent_tokens - spent + 1).min(URGENT_TOKENS_MAX);
    }

    /// Returns the reason why early eviction or the priority of I/O has no effect; empty if both have.
    pub fn problem(&self) -> &str {
        if self.problem.is_empty() { &self.io_problem } else { &self.problem }
    }

    /// Logs a problem unless it is that of the last cycle.
    pub fn log_new_problem(&mut self, name: &Name) {
        let problem = self.problem().to_owned();
        if problem != self.logged_problem {
            if !problem.is_empty() {
                tracing::warn!(tenant = %name, problem, "early eviction has no effect");
            }
            self.logged_problem = problem;
        }
    }

    /// Returns the sample for the policy, or `None` without a memory limit.
    pub fn sample(&self) -> Option<TenantSample> {
        Some(TenantSample {
            id: self.id,
            limit: self.last.limit?,
            usage: self.last.memory,
            is_blocked: self.is_urgent,
            counters: self.counters,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Bytes = Bytes::mib(100);

    /// Counters of a tenant that only waits for evictions at its limit.
    fn counters(memory_mib: u64, memory_stalled_ms: u64) -> EvictionCounters {
        EvictionCounters {
            memory: Bytes::mib(memory_mib),
            limit: Some(LIMIT),
            limit_hits: memory_stalled_ms,
            memory_stalled_us: memory_stalled_ms * 1000,
            memory_some_stalled_us: memory_stalled_ms * 1000,
            ..EvictionCounters::default()
        }
    }

    /// Adds a cycle of 500 ms.
    fn add(tenant: &mut Tenant, now: EvictionCounters) {
        tenant.add_cycle(now, Ns::ms(500));
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
        let urgent: Vec<bool> = (1..=108)
            .map(|cycle| {
                add(&mut tenant, counters(100, cycle));
                tenant.sample().unwrap().is_blocked
            })
            .collect();
        assert!(urgent[..8].iter().all(|urgent| *urgent), "a short time is not limited");
        assert_eq!(urgent[8..].iter().filter(|urgent| **urgent).count(), 50);
        assert!(urgent[8..].windows(2).all(|cycles| cycles[0] != cycles[1]), "every second cycle");
    }

    #[test]
    fn tenant_is_blocked_if_a_task_waited_at_the_limit() {
        let start = counters(99, 7);
        for (limit_hits, some_stalled_us, is_blocked) in
            [(7, 7000, false), (8, 7000, false), (7, 7001, false), (8, 7001, true)]
        {
            let mut tenant = Tenant::new(TenantId(1), 7, start);
            // One of several tasks waits, and the usage is below the limit again.
            add(
                &mut tenant,
                EvictionCounters { limit_hits, memory_some_stalled_us: some_stalled_us, ..start },
            );
            assert_eq!(tenant.sample().unwrap().is_blocked, is_blocked, "{limit_hits} {some_stalled_us}");
        }
    }

    #[test]
    fn few_page_faults_do_not_explain_long_stalls_or_a_miss_rate() {
        let start = counters(90, 0);
        let after = |faults| {
            let mut tenant = Tenant::new(TenantId(1), 7, start);
            add(&mut tenant, EvictionCounters { major_faults: faults, io_stalled_us: 400_000, ..start });
            let counters = tenant.sample().unwrap().counters;
            (counters.fetching, counters.misses)
        };
        assert_eq!([0, 1, 7].map(after), [(Ns::ZERO, 0), (Ns::ms(50), 0), (Ns::ms(350), 0)]);
        assert_eq!([15, 16].map(after), [(Ns::ms(400), 0), (Ns::ms(400), 16)]);
    }

    #[test]
    fn tenant_without_a_limit_is_not_evicted() {
        let mut tenant = Tenant::new(TenantId(1), 7, EvictionCounters::default());
        add(&mut tenant, EvictionCounters::default());
        assert_eq!(tenant.sample(), None);
    }
}
