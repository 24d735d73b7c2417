//! Around the circle: tenants do what they do with the shares that they have, that is measured as a host measures it, learnt and decided on, epoch after
//! epoch. What tenants are like nobody is told.

use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

use super::*;
use crate::profile::{Histogram, Learner, Sample, Touched};

const EPOCH_S: f64 = 30.0;
/// What a page takes that is read while the link is not full.
const MISS_S: f64 = 50e-6;
const PAGE_MB: f64 = 4096.0 / 1e6;
const PAGES_PER_MIB: f64 = 256.0;

/// What a tenant truly is.
#[derive(Clone, Copy)]
struct True {
    /// Its memory, in MiB.
    footprint: f64,
    /// Pages that it touches for each second of work, those touched again at once left out.
    touches: f64,
    /// Threads that do so at the same time.
    threads: f64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Goes through all that it has, again and again: what does not fit whole is missed whole.
    Stream,
    /// Touches pages by Zipf's law, with this exponent.
    Zipf(f64),
}

impl True {
    fn misses(&self, memory: f64) -> f64 {
        let part = (memory / self.footprint).clamp(0.0, 1.0);
        match self.kind {
            Kind::Stream if part < 1.0 => 1.0,
            Kind::Stream => 0.0,
            // The first so many of many ranks have about this part of all touches.
            Kind::Zipf(skew) => 1.0 - part.powf(1.0 - skew),
        }
    }

    /// Work done in a second, of all threads: what waiting leaves, or what the link lets through.
    fn throughput(&self, share: Share) -> f64 {
        let misses = self.touches * self.misses(share.memory_mib as f64);
        let through = share.bandwidth_mb_s as f64 / PAGE_MB;
        let alone = self.threads / (1.0 + misses * MISS_S);
        if misses > 0.0 { alone.min(through / misses) } else { alone }
    }

    fn sample(&self, share: Share, random: &mut Pcg64Mcg, is_watched: bool) -> Sample {
        let mut noise = || random.random_range(0.98..1.02);
        let work = self.throughput(share);
        let misses = work * self.touches * self.misses(share.memory_mib as f64);
        let memory = (share.memory_mib as f64).min(self.footprint);
        Sample {
            seconds: EPOCH_S,
            memory,
            remote: self.footprint - memory,
            worked: work * EPOCH_S * noise(),
            misses: misses * EPOCH_S * noise(),
            brought: misses * EPOCH_S * noise(),
            miss: MISS_S * noise(),
            used: misses * PAGE_MB * noise(),
            limit: share.bandwidth_mb_s as f64,
            // One of them at least, as if they stood still each for itself.
            stalled: Some((1.0 - (work / self.threads).powf(self.threads)) * EPOCH_S * noise()),
            touched: is_watched.then(|| self.touched(work)),
        }
    }

    /// As DAMON tells it: how often each of a thousand blocks was seen to be touched.
    fn touched(&self, work: f64) -> Touched {
        const BLOCKS: u32 = 1000;
        let rank = |at: u32| match self.kind {
            Kind::Stream => 20.0,
            Kind::Zipf(skew) => (40.0 * (f64::from(BLOCKS) / f64::from(at + 1)).powf(skew)).min(4000.0),
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let counts = (0..BLOCKS).map(|at| rank(at) as u32);
        Touched {
            histogram: Histogram::new(counts),
            block: self.footprint / f64::from(BLOCKS),
            pages_per_second: (self.touches * work).min(self.footprint * PAGES_PER_MIB * 20.0),
        }
    }
}

/// A host that measures, learns and decides.
struct Host {
    learners: Vec<Learner>,
    epochs: Epochs,
    shares: Vec<Share>,
    random: Pcg64Mcg,
    is_watched: bool,
}

impl Host {
    fn new(tenants: usize, is_watched: bool, seed: u64) -> Self {
        Self {
            learners: vec![Learner::default(); tenants],
            epochs: Epochs::default(),
            shares: vec![equal(tenants); tenants],
            random: Pcg64Mcg::seed_from_u64(seed),
            is_watched,
        }
    }

    fn epochs_of(&mut self, count: usize, tenants: &[True]) {
        for _ in 0..count {
            self.epoch(tenants);
        }
    }

    fn epoch(&mut self, tenants: &[True]) -> Change {
        let members = tenants.iter().zip(&mut self.learners).zip(&self.shares).enumerate();
        let members: Vec<_> = members
            .map(|(at, ((tenant, learner), share))| {
                let sample = tenant.sample(*share, &mut self.random, self.is_watched);
                learner.learn(&sample, SUPPLY.bandwidth_mb_s as f64).unwrap();
                let utility = learner.worth(SUPPLY, f64::INFINITY).unwrap();
                Member { name: format!("t{at}").into(), weight: 1.0, least: Share::default(), utility }
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

/// What each has of its true throughput with an equal split.
fn against_equal(tenants: &[True], shares: &[Share]) -> Vec<f64> {
    let equal = equal(tenants.len());
    tenants
        .iter()
        .zip(shares)
        .map(|(tenant, share)| tenant.throughput(*share) / tenant.throughput(equal))
        .collect()
}

const STREAM: True = True { footprint: 20_000.0, touches: 80_000.0, threads: 1.0, kind: Kind::Stream };
const CACHE: True = True { footprint: 5_000.0, touches: 100_000.0, threads: 1.0, kind: Kind::Zipf(0.8) };
const BUSY: True = True { footprint: 500.0, touches: 1_000.0, threads: 1.0, kind: Kind::Zipf(0.5) };

const MANY: True = True { footprint: 5_000.0, touches: 20_000.0, threads: 8.0, kind: Kind::Zipf(0.8) };

fn mixes() -> [Vec<True>; 4] {
    [
        vec![STREAM, CACHE],
        vec![STREAM, CACHE, CACHE, BUSY],
        vec![STREAM, STREAM, CACHE, BUSY, BUSY, CACHE],
        vec![STREAM, MANY, CACHE, MANY],
    ]
}

#[test]
fn shares_that_are_measured_and_learnt_are_worth_it_and_nobody_loses_more_than_a_fiftieth() {
    for (mix, tenants) in mixes().iter().enumerate() {
        for (is_watched, seed) in [(true, 1), (false, 1), (true, 2), (false, 2)] {
            let mut host = Host::new(tenants.len(), is_watched, seed);
            host.epochs_of(12, tenants);
            let against = against_equal(tenants, &host.shares);
            let mean = against.iter().map(|times| times.ln()).sum::<f64>() / against.len() as f64;
            // What nobody watches may be estimated to need what it has, and then there is nothing to gain.
            let gain = if is_watched { 1.05 } else { 0.999 };
            let told = format!("mix {mix}, watched {is_watched}: {against:.3?} of {:?}", host.shares);
            assert!(against.iter().all(|times| *times >= 0.98), "{told}");
            assert!(mean.exp() > gain, "{told}");
        }
    }
}

#[test]
fn a_stream_that_becomes_a_cache_has_its_new_share_two_epochs_after_that_was_measured() {
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
fn what_is_measured_with_noise_comes_to_rest() {
    for (mix, tenants) in mixes().iter().enumerate() {
        for is_watched in [true, false] {
            let mut host = Host::new(tenants.len(), is_watched, 4);
            host.epochs_of(12, tenants);
            let moved = (0..20).filter(|_| host.epoch(tenants) != Change::Held).count();
            assert!(moved <= 2, "mix {mix}, watched {is_watched}: {moved} of 20 epochs moved something");
        }
    }
}
