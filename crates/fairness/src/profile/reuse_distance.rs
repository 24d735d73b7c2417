//! Reuse distances of a sample of pages, from which miss ratios follow (SHARDS: Waldspurger et al.,
//! FAST 2015).
//!
//! Pages whose hash is below a threshold are sampled, with all their accesses. The number of
//! sampled pages accessed since the last access of a page, divided by the sampling rate, estimates
//! its reuse distance. Under LRU, an access hits if memory holds at least that many pages. The
//! number of sampled pages is bounded: the threshold falls as more pages appear.

use std::collections::{BTreeMap, BinaryHeap};

use rustc_hash::FxHashMap;

use super::MissModel;

/// Buckets per power of two of the reuse distance.
const BUCKETS_PER_OCTAVE: f64 = 64.0;

/// Weight below which a bucket is dropped.
const TOUCH_WEIGHT_MIN: f64 = 1e-6;

/// Accesses of similar reuse distance.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Number of accesses, scaled by the sampling rate.
    touches: f64,
    /// Largest reuse distance among them, in pages.
    most: f64,
}

/// Miss-ratio model measured by reuse distances of a sample of pages.
#[derive(Clone, Debug)]
pub struct ReuseDistances {
    pages_max: usize,
    pages_per_mib: f64,
    /// Pages with a hash of this or more are not sampled.
    threshold: u64,
    /// Position of the last access of each sampled page in the order of accesses.
    touched: FxHashMap<u64, usize>,
    /// Sampled pages by hash, largest first, which is the order of eviction from the sample.
    by_hash: BinaryHeap<(u64, u64)>,
    order: AccessOrder,
    /// Accesses by reuse distance.
    buckets: BTreeMap<u32, Bucket>,
    /// Number of first accesses of a page, scaled by the sampling rate.
    first_touches: f64,
    /// Number of all accesses, sampled or not.
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
            touched: FxHashMap::default(),
            by_hash: BinaryHeap::new(),
            order: AccessOrder::new(2 * pages_max.max(1)),
            buckets: BTreeMap::new(),
            first_touches: 0.0,
            accesses: 0.0,
            sampled: 0,
        }
    }

    /// Records an access.
    pub fn touch(&mut self, page: u64) {
        self.accesses += 1.0;
        let hash = hash(page);
        if hash >= self.threshold {
            return;
        }
        self.sampled += 1;
        let rate = self.sampling_rate();
        if self.order.is_full() {
            self.order.compact(&mut self.touched);
        }
        match self.touched.remove(&page) {
            Some(at) => {
                // Counts the page itself and the pages accessed since.
                let pages = 1.0 + self.order.after(at) as f64 / rate;
                let bucket = self.buckets.entry(bucket_index(pages)).or_default();
                bucket.touches += 1.0 / rate;
                bucket.most = bucket.most.max(pages);
                self.order.remove(at);
            }
            None => {
                self.first_touches += 1.0 / rate;
                self.by_hash.push((hash, page));
            }
        }
        self.touched.insert(page, self.order.push());
        while self.touched.len() > self.pages_max {
            self.lower_threshold();
        }
    }

    /// Multiplies the weight of past accesses by `factor`, 0 to 1, so that old behavior is
    /// forgotten gradually.
    pub fn decay(&mut self, factor: f64) {
        self.buckets.values_mut().for_each(|bucket| bucket.touches *= factor);
        self.buckets.retain(|_, bucket| bucket.touches > TOUCH_WEIGHT_MIN);
        self.first_touches *= factor;
        self.accesses *= factor;
    }

    /// Returns the fraction of pages that is sampled.
    fn sampling_rate(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    fn lower_threshold(&mut self) {
        let Some((hash, page)) = self.by_hash.pop() else { return };
        self.threshold = hash;
        if let Some(at) = self.touched.remove(&page) {
            self.order.remove(at);
        }
    }

    /// Returns the number of accesses estimated from the sample.
    fn estimated(&self) -> f64 {
        self.first_touches + self.buckets.values().map(|bucket| bucket.touches).sum::<f64>()
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
        // Chance decides whether the few most accessed pages are sampled. The difference between
        // all accesses and the estimate is attributed to them (SHARDS-adj).
        let unsampled = self.accesses - self.estimated();
        let hits = if pages >= 1.0 { hits + unsampled } else { 0.0 };
        (1.0 - hits / self.accesses).clamp(0.0, 1.0)
    }

    fn footprint(&self) -> f64 {
        self.buckets.values().next_back().map_or(1.0, |last| last.most) / self.pages_per_mib
    }

    fn error(&self) -> f64 {
        if self.sampled == 0 { 1.0 } else { 0.5 / (self.touched.len().max(1) as f64).sqrt() }
    }
}

/// Hashes a page number uniformly (the finalizer of SplitMix64).
fn hash(page: u64) -> u64 {
    let page = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (page ^ (page >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the index of the bucket of a reuse distance, in pages.
fn bucket_index(pages: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a logarithm, from 0 on")]
    let index = (pages.max(0.0).ln_1p() / std::f64::consts::LN_2 * BUCKETS_PER_OCTAVE) as u32;
    index
}

fn bucket_start(index: u32) -> f64 {
    (f64::from(index) / BUCKETS_PER_OCTAVE * std::f64::consts::LN_2).exp_m1()
}

impl Bucket {
    /// Returns the number of these accesses that hit with `pages` pages of memory: all from the
    /// largest reuse distance on, none below the smallest, linear between.
    fn hits(&self, index: u32, pages: f64) -> f64 {
        let start = bucket_start(index);
        if pages >= self.most {
            self.touches
        } else {
            self.touches * ((pages - start) / (self.most - start)).clamp(0.0, 1.0)
        }
    }
}

/// Order of last accesses. A Fenwick tree counts the pages accessed after a position.
#[derive(Clone, Debug)]
struct AccessOrder {
    sums: Vec<u32>,
    positions: usize,
    used: usize,
    /// Positions that are in use.
    live: usize,
}

impl AccessOrder {
    fn new(positions: usize) -> Self {
        Self { sums: vec![0; positions + 1], positions, used: 0, live: 0 }
    }

    const fn is_full(&self) -> bool {
        self.used == self.positions
    }

    /// Returns the next position.
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

    /// Returns the number of live positions after a live one.
    fn after(&self, at: usize) -> usize {
        let (mut index, mut upto) = (at + 1, 0_u32);
        while index > 0 {
            upto = upto.wrapping_add(self.sums[index]);
            index &= index - 1;
        }
        self.live - upto as usize
    }

    fn add(&mut self, at: usize, one: u32) {
        let mut index = at + 1;
        while index <= self.positions {
            self.sums[index] = self.sums[index].wrapping_add(one);
            index += index & index.wrapping_neg();
        }
    }

    /// Renumbers live positions from 0.
    fn compact(&mut self, touched: &mut FxHashMap<u64, usize>) {
        let mut positions: Vec<&mut usize> = touched.values_mut().collect();
        positions.sort_unstable();
        *self = Self::new(self.positions);
        for place in positions {
            *place = self.push();
        }
    }
}
