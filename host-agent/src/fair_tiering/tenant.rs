//! State of one tenant of fair tiering from step to step.

use tiering::fair::{Counters, FAST, TenantId, TenantSample, TenantTier, ThrashCounts};
use units::{Bytes, Ns, limits::DEMOTION_RETRY_DELAY_MAX};

use super::promoted_pages::PromotedPages;
use crate::{
    config::tiering::TenantSettings,
    host::{cgroup::TierCounters, memory::usage::HUGE_PAGE_BYTES, tiers::Tiers},
    tiering_report::Moves,
};

/// Index of slower memory among the tiers of the policy. All nodes without processors are one tier.
pub(super) const SLOW: usize = FAST + 1;
/// First delay after a demotion without effect.
const DEMOTION_RETRY_DELAY_MIN: Ns = Ns::secs(1);

/// Time before which a tenant is not demoted, because earlier orders had no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backoff {
    until: Ns,
    delay: Ns,
    /// Local memory of the tenant after the last order without effect.
    usage: Bytes,
}

impl Backoff {
    /// Returns whether the tenant, which uses `usage` of local memory, may be demoted: after the delay, or if
    /// it uses more memory than at the last order.
    pub fn is_over(self, now: Ns, usage: Bytes) -> bool {
        now >= self.until || usage >= self.usage.saturating_add(Bytes::new(HUGE_PAGE_BYTES))
    }

    /// Doubles the delay after a demotion without effect.
    pub fn extend(&mut self, now: Ns, usage: Bytes) {
        self.usage = usage;
        let doubled = Ns(self.delay.0.saturating_mul(2));
        self.delay = doubled.clamp(DEMOTION_RETRY_DELAY_MIN, DEMOTION_RETRY_DELAY_MAX);
        self.until = Ns(now.0.saturating_add(self.delay.0));
    }
}

/// State of a tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    /// Identifier in the policy.
    pub id: TenantId,
    /// Inode of the cgroup. A cgroup with the same name and another inode is another tenant.
    pub inode: u64,
    /// Counters of the kernel at the last step.
    pub counters: TierCounters,
    /// Moves by this agent.
    pub moves: Moves,
    /// Pages that were promoted recently.
    pub promoted_pages: PromotedPages,
    /// Unused part of the promotion rate of earlier steps, at most a huge page.
    pub promotion_credit: Bytes,
    /// Delay of demotions.
    pub backoff: Backoff,
    /// Reason why orders had no effect; empty if they had.
    pub problem: String,
}

impl Tenant {
    /// Creates the state of a tenant that has just appeared.
    pub fn new(id: TenantId, inode: u64) -> Self {
        Self {
            id,
            inode,
            counters: TierCounters::default(),
            moves: Moves::default(),
            promoted_pages: PromotedPages::default(),
            promotion_credit: Bytes::ZERO,
            backoff: Backoff::default(),
            problem: String::new(),
        }
    }

    /// Returns the usage of local memory and of slower memory.
    pub fn usage(&self, tiers: &Tiers) -> [Bytes; 2] {
        usage_of(&self.counters, tiers)
    }

    /// Returns the input of the policy. `protection` is used if the settings contain none.
    pub fn sample(
        &self,
        tiers: &Tiers,
        settings: TenantSettings,
        protection: Bytes,
        thrash: ThrashCounts,
    ) -> TenantSample {
        let [local, slow] = self.usage(tiers);
        let mut sample = TenantSample::new(self.id);
        sample.tiers[FAST] = TenantTier {
            usage: local,
            protection: settings.protection.unwrap_or(protection),
            bound: settings.bound,
        };
        sample.tiers[SLOW] = TenantTier { usage: slow, ..TenantTier::default() };
        let by_kernel = self.counters.promoted.unwrap_or_default();
        sample.counters = Counters {
            demoted: self.counters.demoted.unwrap_or(self.moves.demoted),
            promoted: self.moves.promoted.saturating_add(by_kernel),
            attempted: self.moves.attempted.saturating_add(by_kernel),
            sampled_promotions: thrash.promotions,
            sampled_thrashed: thrash.thrashed,
            active: self.counters.active,
            freed: None,
        };
        sample
    }
}

/// Returns the usage of local memory and of slower memory.
pub(super) fn usage_of(counters: &TierCounters, tiers: &Tiers) -> [Bytes; 2] {
    [&tiers.local, &tiers.slow]
        .map(|nodes| nodes.iter().map(|node| counters.usage.get(node).copied().unwrap_or_default()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let mut backoff = Backoff::default();
        assert!(backoff.is_over(Ns::ZERO, Bytes::ZERO));
        let delays: Vec<u64> = (0..9)
            .map(|_| {
                backoff.extend(Ns::secs(100), Bytes::mib(7));
                backoff.until.0 / Ns::secs(1).0 - 100
            })
            .collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        let is_over = |second, mib| backoff.is_over(Ns::secs(second), Bytes::mib(mib));
        assert!(!is_over(163, 8) && is_over(164, 8));
        assert!(is_over(163, 9), "the tenant uses a huge page more");
    }

    #[test]
    fn sample_contains_moves_of_the_agent_and_of_the_kernel() {
        let tiers = Tiers { local: [0].into(), slow: [2, 3].into() };
        let mut tenant = Tenant::new(TenantId(7), 1);
        tenant.counters = TierCounters {
            usage: [(0, Bytes::mib(5)), (2, Bytes::mib(1)), (3, Bytes::mib(2)), (9, Bytes::mib(50))].into(),
            promoted: Some(Bytes::mib(3)),
            ..TierCounters::default()
        };
        tenant.moves = Moves { demoted: Bytes::mib(4), promoted: Bytes::mib(6), attempted: Bytes::mib(8) };
        let settings = TenantSettings { protection: None, bound: Some(Bytes::mib(9)) };
        let sample = tenant.sample(&tiers, settings, Bytes::mib(2), ThrashCounts::default());
        let of =
            |tier: usize| (sample.tiers[tier].usage, sample.tiers[tier].protection, sample.tiers[tier].bound);
        assert_eq!(of(FAST), (Bytes::mib(5), Bytes::mib(2), Some(Bytes::mib(9))));
        assert_eq!(of(SLOW), (Bytes::mib(3), Bytes::ZERO, None));
        let Counters { demoted, promoted, attempted, .. } = sample.counters;
        assert_eq!([demoted, promoted, attempted], [4, 9, 11].map(Bytes::mib));
        tenant.counters.demoted = Some(Bytes::mib(100));
        let settings = TenantSettings { protection: Some(Bytes::ZERO), bound: None };
        let sample = tenant.sample(&tiers, settings, Bytes::mib(2), ThrashCounts::default());
        assert_eq!((sample.counters.demoted, sample.tiers[FAST].protection), (Bytes::mib(100), Bytes::ZERO));
    }
}
