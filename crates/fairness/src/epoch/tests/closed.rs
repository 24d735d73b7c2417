//! Closed-loop tests: simulated tenants run with their shares, a host measures them, learns, and
//! decides the next shares, epoch after epoch. The allocator sees measurements only.

use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

use super::*;
use crate::profile::{Histogram, Learner, PageAccesses, Sample};

const EPOCH_S: f64 = 30.0;
/// Latency of a page fault on an idle link.
const MISS_S: f64 = 50e-6;
const PAGE_MB: f64 = 4096.0 / 1e6;
const PAGES_PER_MIB: f64 = 256.0;

/// True behavior of a simulated tenant.
#[derive(Clone, Copy)]
struct TrueTenant {
    /// Memory in use, in MiB.
    footprint: f64,
    /// Pages accessed per second of work, without immediate repetitions.
    touches: f64,
    /// Number of threads.
    threads: f64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Scans all its memory repeatedly: all accesses miss unless all of it fits.
    Stream,
    /// Accesses pages by Zipf's law with this exponent.
    Zipf(f64),
}

impl TrueTenant {
    fn misses(&self, memory: f64) -> f64 {
        let part = (memory / self.footprint).clamp(0.0, 1.0);
        match self.kind {
            Kind::Stream if part < 1.0 => 1.0,
            Kind::Stream => 0.0,
            // Approximate fraction of accesses to the most accessed pages.
            Kind::Zipf(skew) => 1.0 - part.powf(1.0 - skew),
        }
    }

    /// Work per second of all threads, limited by stalls or by the link.
    fn throughput(&self, share: Share) -> f64 {
        let misses = self.touches * self.misses(share.memory_mib as f64);
        let through = share.bandwidth_mb_s as f64 / PAGE_MB;
        let alone = self.threads / (1.0 + misses * MISS_S);
        if misses > 0.0 { alone.min(through / misses) } else { alone }
    }

    fn sample(&self, share: Share, random: &mut Pcg64Mcg, is_monitored: bool) -> Sample {
        let mut noise = || random.random_range(0.98..1.02);
        let work = self.throughput(share);
        let misses = work * self.touches * self.misses(share.memory_mib as f64);
        let memory = (share.memory_mib as f64).min(self.footprint);
        Sample {
            duration_s: EPOCH_S,
            local_mib: memory,
            remote_mib: self.footprint - memory,
            work_s: work * EPOCH_S * noise(),
            misses: misses * EPOCH_S * noise(),
            pages_in: misses * EPOCH_S * noise(),
            miss_latency_s: MISS_S * noise(),
            used_mb_s: misses * PAGE_MB * noise(),
            limit_mb_s: share.bandwidth_mb_s as f64,
            // Probability that at least one thread is stalled if threads stall independently.
            stalled_s: Some((1.0 - (work / self.threads).powf(self.threads)) * EPOCH_S * noise()),
            accesses: is_monitored.then(|| self.accesses(work)),
        }
    }

    /// Access counts of a thousand blocks, as DAMON reports them.
    fn accesses(&self, work: f64) -> PageAccesses {
        const BLOCKS: u32 = 1000;
        let rank = |at: u32| match self.kind {
            Kind::Stream => 20.0,
            Kind::Zipf(skew) => (40.0 * (f64::from(BLOCKS) / f64::from(at + 1)).powf(skew)).min(4000.0),
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let counts = (0..BLOCKS).map(|at| rank(at) as u32);
        PageAccesses {
            histogram: Histogram::new(counts),
            block_mib: self.footprint / f64::from(BLOCKS),
            pages_per_second: (self.touches * work).min(self.footprint * PAGES_PER_MIB * 20.0),
        }
    }
}

/// A host that measures, learns and decides.
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
            shares: vec![equal(tenants); tenants],
            random: Pcg64Mcg::seed_from_u64(seed),
            is_monitored,
        }
    }

    fn epochs_of(&mut self, count: usize, tenants: &[TrueTenant]) {
        for _ in 0..count {
            self.epoch(tenants);
        }
    }

    fn epoch(&mut self, tenants: &[TrueTenant]) -> Change {
        let members = tenants.iter().zip(&mut self.learners).zip(&self.shares).enumerate();
        let members: Vec<_> = members
            .map(|(at, ((tenant, learner), share))| {
                let sample = tenant.sample(*share, &mut self.random, self.is_monitored);
                learner.learn(&sample, SUPPLY.bandwidth_mb_s as f64).unwrap();
                let utility = learner.utility(SUPPLY, f64::INFINITY).unwrap();
                Member { name: format!("t{at}").into(), weight: 1.0, min: Share::default(), utility }
            })
            .collect();
        let decision = self.epochs.decide(SUPPLY, &members).unwrap();
        self.shares = decision.shares;
        decision.change
    }
}

fn equal(tenants: usize) -> Share {
    let parts = tenants as u64;
    Share { memory_mib: SUPPLY.memory_mib / parts, bandwidth_mb_s: SUPPLY.bandwidth_mb_s / parts }
}

/// Ratio of true throughput to that of an equal split, for each tenant.
fn against_equal(tenants: &[TrueTenant], shares: &[Share]) -> Vec<f64> {
    let equal = equal(tenants.len());
    tenants
        .iter()
        .zip(shares)
        .map(|(tenant, share)| tenant.throughput(*share) / tenant.throughput(equal))
        .collect()
}

const STREAM: TrueTenant =
    TrueTenant { footprint: 20_000.0, touches: 80_000.0, threads: 1.0, kind: Kind::Stream };
const CACHE: TrueTenant =
    TrueTenant { footprint: 5_000.0, touches: 100_000.0, threads: 1.0, kind: Kind::Zipf(0.8) };
const BUSY: TrueTenant =
    TrueTenant { footprint: 500.0, touches: 1_000.0, threads: 1.0, kind: Kind::Zipf(0.5) };

const MULTITHREADED: TrueTenant =
    TrueTenant { footprint: 5_000.0, touches: 20_000.0, threads: 8.0, kind: Kind::Zipf(0.8) };

fn mixes() -> [Vec<TrueTenant>; 4] {
    [
        vec![STREAM, CACHE],
        vec![STREAM, CACHE, CACHE, BUSY],
        vec![STREAM, STREAM, CACHE, BUSY, BUSY, CACHE],
        vec![STREAM, MULTITHREADED, CACHE, MULTITHREADED],
    ]
}

#[test]
fn learned_shares_gain_and_no_tenant_loses_over_two_percent() {
    for (mix, tenants) in mixes().iter().enumerate() {
        for (is_monitored, seed) in [(true, 1), (false, 1), (true, 2), (false, 2)] {
            let mut host = Host::new(tenants.len(), is_monitored, seed);
            host.epochs_of(12, tenants);
            let against = against_equal(tenants, &host.shares);
            let mean = against.iter().map(|times| times.ln()).sum::<f64>() / against.len() as f64;
            // Without monitoring, a tenant may be estimated to need all its memory, so that there
            // is nothing to gain.
            let gain = if is_monitored { 1.05 } else { 0.999 };
            let context = format!("mix {mix}, monitored {is_monitored}: {against:.3?} of {:?}", host.shares);
            assert!(against.iter().all(|times| *times >= 0.98), "{context}");
            assert!(mean.exp() > gain, "{context}");
        }
    }
}

#[test]
fn stream_turned_cache_has_its_share_after_two_epochs() {
    let mut tenants = vec![STREAM, CACHE, STREAM, BUSY];
    let mut host = Host::new(4, true, 3);
    host.epochs_of(12, &tenants);
    let before = host.shares[0].memory_mib;
    tenants[0] = CACHE;
    host.epochs_of(2, &tenants);
    let after = host.shares[0].memory_mib as f64;
    host.epochs_of(10, &tenants);
    let due = host.shares[0].memory_mib as f64;
    assert!(due > 1.5 * before as f64, "{before} {due}");
    assert!((0.85..=1.15).contains(&(after / due)), "{before}, then {after}, at last {due}");
}

#[test]
fn noisy_measurements_converge() {
    for (mix, tenants) in mixes().iter().enumerate() {
        for is_monitored in [true, false] {
            let mut host = Host::new(tenants.len(), is_monitored, 4);
            host.epochs_of(12, tenants);
            let moved = (0..20).filter(|_| host.epoch(tenants) != Change::Unchanged).count();
            assert!(moved <= 2, "mix {mix}, monitored {is_monitored}: {moved} of 20 epochs changed shares");
        }
    }
}
