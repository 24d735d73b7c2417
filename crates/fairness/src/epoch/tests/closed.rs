//! Closed-loop tests over many epochs: simulated tenants run with their shares, the host measures
//! them, and the allocator decides the next shares from the measurements.

use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

use super::*;
use crate::profile::{Histogram, Learner, PageAccesses, Sample};

/// Duration of an epoch, in seconds.
const EPOCH_S: f64 = 30.0;
/// Latency of a page fault on an idle link, in seconds.
const MISS_LATENCY_S: f64 = 50e-6;
/// Size of a page of 4 KiB, in MB.
const PAGE_MB: f64 = 4096.0 / 1e6;
const PAGES_PER_MIB: f64 = 256.0;

/// Simulated tenant, whose actual behavior the allocator must estimate from measurements.
#[derive(Clone, Copy)]
struct SimulatedTenant {
    /// Memory in use, in MiB.
    footprint: f64,
    /// Number of pages accessed per second of work. Immediately repeated accesses count once.
    accesses: f64,
    threads: f64,
    pattern: AccessPattern,
}

#[derive(Clone, Copy, PartialEq)]
enum AccessPattern {
    /// Repeated scan of all memory. All accesses miss unless all memory of the tenant is local.
    Stream,
    /// Zipf's law with this exponent.
    Zipf(f64),
}

impl SimulatedTenant {
    /// Returns the miss ratio with `memory` MiB, 0 to 1.
    fn misses(&self, memory: f64) -> f64 {
        let part = (memory / self.footprint).clamp(0.0, 1.0);
        match self.pattern {
            AccessPattern::Stream if part < 1.0 => 1.0,
            AccessPattern::Stream => 0.0,
            // `part.powf(1.0 - skew)` approximates the fraction of accesses to the local pages.
            AccessPattern::Zipf(skew) => 1.0 - part.powf(1.0 - skew),
        }
    }

    /// Returns the work per second of all threads, limited by stalls or by the link.
    fn throughput(&self, share: Share) -> f64 {
        let misses = self.accesses * self.misses(share.memory_mib() as f64);
        let link_pages_per_s = share.bandwidth_mb_s() as f64 / PAGE_MB;
        let stall_bound = self.threads / (1.0 + misses * MISS_LATENCY_S);
        if misses > 0.0 { stall_bound.min(link_pages_per_s / misses) } else { stall_bound }
    }

    /// Returns the measurements of one epoch with 2 % of random noise.
    fn sample(&self, share: Share, random: &mut Pcg64Mcg, is_monitored: bool) -> Sample {
        let mut noise = || random.random_range(0.98..1.02);
        let work = self.throughput(share);
        let misses = work * self.accesses * self.misses(share.memory_mib() as f64);
        let memory = (share.memory_mib() as f64).min(self.footprint);
        Sample {
            duration_s: EPOCH_S,
            local_mib: memory,
            remote_mib: self.footprint - memory,
            work_s: work * EPOCH_S * noise(),
            misses: misses * EPOCH_S * noise(),
            pages_in: misses * EPOCH_S * noise(),
            miss_latency_s: MISS_LATENCY_S * noise(),
            used_mb_s: misses * PAGE_MB * noise(),
            limit_mb_s: share.bandwidth_mb_s() as f64,
            // Threads stall independently. The first factor is the probability that at least one
            // thread is stalled.
            stalled_s: Some((1.0 - (work / self.threads).powf(self.threads)) * EPOCH_S * noise()),
            accesses: is_monitored.then(|| self.monitored_accesses(work)),
        }
    }

    /// Returns access counts of a thousand blocks, as DAMON reports them.
    fn monitored_accesses(&self, work: f64) -> PageAccesses {
        const BLOCKS: u32 = 1000;
        let count = |rank: u32| match self.pattern {
            AccessPattern::Stream => 20.0,
            AccessPattern::Zipf(skew) => {
                (40.0 * (f64::from(BLOCKS) / f64::from(rank + 1)).powf(skew)).min(4000.0)
            }
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of 20 to 4000")]
        let counts = (0..BLOCKS).map(|rank| count(rank) as u32);
        PageAccesses {
            histogram: Histogram::new(counts),
            block_mib: self.footprint / f64::from(BLOCKS),
            pages_per_second: (self.accesses * work).min(self.footprint * PAGES_PER_MIB * 20.0),
        }
    }
}

/// Simulated host with a learner for each tenant.
struct Host {
    learners: Vec<Learner>,
    epochs: EpochAllocator,
    shares: Vec<Share>,
    random: Pcg64Mcg,
    is_monitored: bool,
}

impl Host {
    fn new(tenants: usize, is_monitored: bool, seed: u64) -> Self {
        Self {
            learners: vec![Learner::default(); tenants],
            epochs: EpochAllocator::default(),
            shares: vec![equal_share(tenants); tenants],
            random: Pcg64Mcg::seed_from_u64(seed),
            is_monitored,
        }
    }

    fn run_epochs(&mut self, count: usize, tenants: &[SimulatedTenant]) {
        for _ in 0..count {
            self.run_epoch(tenants);
        }
    }

    /// Measures all tenants, decides shares and applies them.
    fn run_epoch(&mut self, tenants: &[SimulatedTenant]) -> Change {
        let members = tenants.iter().zip(&mut self.learners).zip(&self.shares).enumerate();
        let members: Vec<_> = members
            .map(|(at, ((tenant, learner), share))| {
                let sample = tenant.sample(*share, &mut self.random, self.is_monitored);
                learner.learn(&sample, Bundle::from(SUPPLY.all()).bandwidth).unwrap();
                let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
                MarketMember { name: format!("t{at}").into(), weight: 1.0, min: Share::default(), utility }
            })
            .collect();
        let decision = self.epochs.decide(SUPPLY, &members).unwrap();
        self.shares = decision.shares;
        decision.change
    }
}

fn equal_share(tenants: usize) -> Share {
    let parts = tenants as u64;
    Share { memory_pages: SUPPLY.memory_pages / parts, bandwidth_kb_s: SUPPLY.bandwidth_kb_s / parts }
}

/// Returns the actual throughput of each tenant relative to its throughput with an equal split.
fn actual_gains(tenants: &[SimulatedTenant], shares: &[Share]) -> Vec<f64> {
    let equal = equal_share(tenants.len());
    tenants
        .iter()
        .zip(shares)
        .map(|(tenant, share)| tenant.throughput(*share) / tenant.throughput(equal))
        .collect()
}

const STREAM_TENANT: SimulatedTenant =
    SimulatedTenant { footprint: 20_000.0, accesses: 80_000.0, threads: 1.0, pattern: AccessPattern::Stream };
const CACHE_TENANT: SimulatedTenant = SimulatedTenant {
    footprint: 5_000.0,
    accesses: 100_000.0,
    threads: 1.0,
    pattern: AccessPattern::Zipf(0.8),
};
const COMPUTE_BOUND_TENANT: SimulatedTenant =
    SimulatedTenant { footprint: 500.0, accesses: 1_000.0, threads: 1.0, pattern: AccessPattern::Zipf(0.5) };
const MULTITHREADED_TENANT: SimulatedTenant = SimulatedTenant {
    footprint: 5_000.0,
    accesses: 20_000.0,
    threads: 8.0,
    pattern: AccessPattern::Zipf(0.8),
};

fn tenant_mixes() -> [Vec<SimulatedTenant>; 4] {
    [
        vec![STREAM_TENANT, CACHE_TENANT],
        vec![STREAM_TENANT, CACHE_TENANT, CACHE_TENANT, COMPUTE_BOUND_TENANT],
        vec![
            STREAM_TENANT,
            STREAM_TENANT,
            CACHE_TENANT,
            COMPUTE_BOUND_TENANT,
            COMPUTE_BOUND_TENANT,
            CACHE_TENANT,
        ],
        vec![STREAM_TENANT, MULTITHREADED_TENANT, CACHE_TENANT, MULTITHREADED_TENANT],
    ]
}

#[test]
fn learned_shares_gain_and_no_tenant_loses_over_two_percent() {
    for (mix, tenants) in tenant_mixes().iter().enumerate() {
        for (is_monitored, seed) in [(true, 1), (false, 1), (true, 2), (false, 2)] {
            let mut host = Host::new(tenants.len(), is_monitored, seed);
            host.run_epochs(12, tenants);
            let gains = actual_gains(tenants, &host.shares);
            let log_mean = gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len() as f64;
            // Without monitored accesses, each tenant may be estimated to need all its memory. The
            // shares may then be an equal split, without a gain.
            let mean_gain_min = if is_monitored { 1.05 } else { 0.999 };
            let context = format!("mix {mix}, monitored {is_monitored}: {gains:.3?} of {:?}", host.shares);
            assert!(gains.iter().all(|gain| *gain >= 0.98), "{context}");
            assert!(log_mean.exp() > mean_gain_min, "{context}");
        }
    }
}

#[test]
fn stream_that_becomes_a_cache_gets_its_share_within_two_epochs() {
    let mut tenants = vec![STREAM_TENANT, CACHE_TENANT, STREAM_TENANT, COMPUTE_BOUND_TENANT];
    let mut host = Host::new(4, true, 3);
    host.run_epochs(12, &tenants);
    let before = host.shares[0].memory_mib();
    tenants[0] = CACHE_TENANT;
    host.run_epochs(2, &tenants);
    let after_two = host.shares[0].memory_mib() as f64;
    host.run_epochs(10, &tenants);
    let converged = host.shares[0].memory_mib() as f64;
    assert!(converged > 1.5 * before as f64, "{before} {converged}");
    assert!(
        (0.85..=1.15).contains(&(after_two / converged)),
        "before {before}, after two epochs {after_two}, converged {converged}"
    );
}

#[test]
fn shares_converge_with_noisy_measurements() {
    for (mix, tenants) in tenant_mixes().iter().enumerate() {
        for is_monitored in [true, false] {
            let mut host = Host::new(tenants.len(), is_monitored, 4);
            host.run_epochs(12, tenants);
            let changes = (0..20).filter(|_| host.run_epoch(tenants) != Change::Unchanged).count();
            assert!(
                changes <= 2,
                "mix {mix}, monitored {is_monitored}: {changes} of 20 epochs changed shares"
            );
        }
    }
}
