//! Miss ratios from reuse distances of a sample of pages (SHARDS: Waldspurger et al., FAST 2015).
//!
//! Pages whose hash is below a threshold are sampled, with all their accesses. The reuse distance
//! of an access is the number of different pages accessed since the last access to the same page,
//! including that page. It is estimated by the number of sampled pages among them, divided by the
//! sampling rate. With LRU replacement, an access hits if memory holds at least as many pages as
//! its reuse distance. The threshold is lowered if more than the maximum number of pages would be
//! sampled.

use std::collections::{BTreeMap, BinaryHeap};

use rustc_hash::FxHashMap;

use super::MissModel;

/// Number of buckets per doubling of the reuse distance.
const BUCKETS_PER_OCTAVE: f64 = 64.0;

/// Decayed number of accesses below which a bucket is dropped.
const ACCESS_WEIGHT_MIN: f64 = 1e-6;

/// Accesses with similar reuse distances.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Number of sampled accesses divided by the sampling rate.
    accesses: f64,
    /// Largest reuse distance of these accesses, in pages.
    distance_max: f64,
}

/// Miss-ratio model measured by the reuse distances of a sample of pages.
#[derive(Clone, Debug)]
pub struct ReuseDistances {
    /// Largest number of sampled pages, at least 1.
    pages_max: usize,
    pages_per_mib: f64,
    /// Exclusive upper bound of the hashes of sampled pages.
    threshold: u64,
    /// Position in `order` of the last access to each sampled page.
    last_access: FxHashMap<u64, usize>,
    /// Hash and number of each sampled page. The page with the largest hash is removed first.
    by_hash: BinaryHeap<(u64, u64)>,
    order: AccessOrder,
    /// Accesses by bucket of their reuse distance.
    buckets: BTreeMap<u32, Bucket>,
    /// Number of sampled first accesses to a page, divided by the sampling rate.
    first_accesses: f64,
    /// Number of all accesses, sampled or not, reduced by decay.
    accesses: f64,
    /// Number of sampled accesses.
    sampled: u64,
}

impl ReuseDistances {
    /// Creates an empty model that samples at most `pages_max` pages.
    pub fn new(pages_max: usize, pages_per_mib: f64) -> Self {
        Self {
            pages_max: pages_max.max(1),
            pages_per_mib,
            threshold: u64::MAX,
            last_access: FxHashMap::default(),
            by_hash: BinaryHeap::new(),
            order: AccessOrder::new(2 * pages_max.max(1)),
            buckets: BTreeMap::new(),
            first_accesses: 0.0,
            accesses: 0.0,
            sampled: 0,
        }
    }

    /// Records an access to a page.
    pub fn touch(&mut self, page: u64) {
        self.accesses += 1.0;
        let hash = hash(page);
        if hash >= self.threshold {
            return;
        }
        self.sampled += 1;
        let rate = self.sampling_rate();
        if self.order.is_full() {
            self.order.compact_positions(&mut self.last_access);
        }
        match self.last_access.remove(&page) {
            Some(at) => {
                // The reuse distance includes the page itself.
                let distance = 1.0 + self.order.live_positions_after(at) as f64 / rate;
                let bucket = self.buckets.entry(bucket_index(distance)).or_default();
                bucket.accesses += 1.0 / rate;
                bucket.distance_max = bucket.distance_max.max(distance);
                self.order.remove(at);
            }
            None => {
                self.first_accesses += 1.0 / rate;
                self.by_hash.push((hash, page));
            }
        }
        self.last_access.insert(page, self.order.push());
        while self.last_access.len() > self.pages_max {
            self.reduce_sampling_threshold();
        }
    }

    /// Multiplies the weight of past accesses by `factor`, 0 to 1, so that recent accesses count
    /// more than old ones.
    pub fn decay(&mut self, factor: f64) {
        self.buckets.values_mut().for_each(|bucket| bucket.accesses *= factor);
        self.buckets.retain(|_, bucket| bucket.accesses > ACCESS_WEIGHT_MIN);
        self.first_accesses *= factor;
        self.accesses *= factor;
    }

    /// Returns the fraction of pages that are sampled, 0 to 1.
    fn sampling_rate(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    /// Removes the page with the largest hash from the sample and lowers the threshold to its hash.
    fn reduce_sampling_threshold(&mut self) {
        let Some((hash, page)) = self.by_hash.pop() else { return };
        self.threshold = hash;
        if let Some(at) = self.last_access.remove(&page) {
            self.order.remove(at);
        }
    }

    /// Returns the number of all accesses as estimated from the sampled accesses.
    fn estimated_accesses(&self) -> f64 {
        self.first_accesses + self.buckets.values().map(|bucket| bucket.accesses).sum::<f64>()
    }
}

impl MissModel for ReuseDistances {
    fn misses(&self, memory: f64) -> f64 {
        if self.accesses == 0.0 {
            return 1.0;
        }
        let pages = memory * self.pages_per_mib;
        let hits: f64 = self
            .buckets
            .range(..=bucket_index(pages))
            .map(|(index, bucket)| bucket.hits(*index, pages))
            .sum();
        // The few most accessed pages may be missing from the sample or be overrepresented. The
        // difference between the actual and the estimated number of accesses is attributed to these
        // pages (SHARDS-adj).
        let correction = self.accesses - self.estimated_accesses();
        let hits = if pages >= 1.0 { hits + correction } else { 0.0 };
        (1.0 - hits / self.accesses).clamp(0.0, 1.0)
    }

    fn footprint(&self) -> f64 {
        self.buckets.values().next_back().map_or(1.0, |last| last.distance_max) / self.pages_per_mib
    }

    fn error(&self) -> f64 {
        if self.sampled == 0 { 1.0 } else { 0.5 / (self.last_access.len().max(1) as f64).sqrt() }
    }
}

/// Returns a uniformly distributed hash of a page number (the finalizer of SplitMix64).
fn hash(page: u64) -> u64 {
    let page = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (page ^ (page >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the index of the bucket for a reuse distance in pages.
fn bucket_index(distance: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a logarithm of at least 0")]
    let index = (distance.max(0.0).ln_1p() / std::f64::consts::LN_2 * BUCKETS_PER_OCTAVE) as u32;
    index
}

/// Returns the smallest reuse distance, in pages, of the bucket with this index.
fn bucket_start(index: u32) -> f64 {
    (f64::from(index) / BUCKETS_PER_OCTAVE * std::f64::consts::LN_2).exp_m1()
}

impl Bucket {
    /// Returns the number of accesses in this bucket that hit with `pages` pages of memory. The
    /// number rises linearly from 0 at the start of the bucket to all accesses at the largest reuse
    /// distance.
    fn hits(&self, index: u32, pages: f64) -> f64 {
        let start = bucket_start(index);
        if pages >= self.distance_max {
            self.accesses
        } else {
            self.accesses * ((pages - start) / (self.distance_max - start)).clamp(0.0, 1.0)
        }
    }
}

/// Order of the last accesses to all sampled pages. A position is live while it is the last access
/// to its page. A Fenwick tree counts the live positions after a position.
#[derive(Clone, Debug)]
struct AccessOrder {
    /// Fenwick tree: sums of ranges of live positions.
    sums: Vec<u32>,
    /// Maximum number of positions in the order of accesses. When all are assigned, the positions of
    /// pages that are no longer tracked are removed.
    positions: usize,
    /// Number of assigned positions, live or not.
    used: usize,
    /// Number of live positions.
    live: usize,
}

impl AccessOrder {
    fn new(positions: usize) -> Self {
        Self { sums: vec![0; positions + 1], positions, used: 0, live: 0 }
    }

    const fn is_full(&self) -> bool {
        self.used == self.positions
    }

    /// Assigns the next position to an access and returns it.
    fn push(&mut self) -> usize {
        let at = self.used;
        self.used += 1;
        self.live += 1;
        self.add(at, 1);
        at
    }

    fn remove(&mut self, at: usize) {
        self.live -= 1;
        self.add(at, u32::MAX);
    }

    /// Returns the number of live positions after the live position `at`.
    fn live_positions_after(&self, at: usize) -> usize {
        let (mut index, mut up_to_at) = (at + 1, 0_u32);
        while index > 0 {
            up_to_at = up_to_at.wrapping_add(self.sums[index]);
            index &= index - 1;
        }
        self.live - up_to_at as usize
    }

    /// Adds `delta` to the count of a position, modulo 2³².
    fn add(&mut self, at: usize, delta: u32) {
        let mut index = at + 1;
        while index <= self.positions {
            self.sums[index] = self.sums[index].wrapping_add(delta);
            index += index & index.wrapping_neg();
        }
    }

    /// Renumbers the live positions from 0, in the same order. `last_access` holds all live
    /// positions.
    fn compact_positions(&mut self, last_access: &mut FxHashMap<u64, usize>) {
        let mut live_positions: Vec<&mut usize> = last_access.values_mut().collect();
        live_positions.sort_unstable();
        *self = Self::new(self.positions);
        for position in live_positions {
            *position = self.push();
        }
    }
}
