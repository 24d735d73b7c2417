//! How often a tenant misses, measured: reuse distances of some of its pages (SHARDS: Waldspurger et al., FAST 2015).
//!
//! Of all pages those are watched whose hash is below a threshold, and of them every touch. How many watched pages were touched since a page was last,
//! over the part that is watched, is about how many of all were: with that much memory or more, and the least recently used page leaving first, it
//! is still there. As many pages are watched as there is room for: the threshold falls as more turn up.

use std::collections::{BTreeMap, BinaryHeap};

use rustc_hash::FxHashMap;

use super::MissModel;

/// Sizes between one power of two and the next that are told apart.
const SIZES_PER_OCTAVE: f64 = 64.0;

/// Touches that are as good as forgotten.
const FORGOTTEN: f64 = 1e-6;

/// Touches that would have hit with about so much memory.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    /// How many, each for as many as are not watched.
    touches: f64,
    /// The most pages that one of them needs.
    most: f64,
}

/// Reuse distances of a sample of pages.
#[derive(Clone, Debug)]
pub struct Reuse {
    pages_max: usize,
    pages_per_mib: f64,
    /// Pages with this hash or a larger one are not watched.
    threshold: u64,
    /// Where in the order of touches each watched page was touched last.
    touched: FxHashMap<u64, usize>,
    /// Watched pages by their hash, the largest first: those that are given up first.
    by_hash: BinaryHeap<(u64, u64)>,
    order: Order,
    /// Touches by the memory with which they would have hit.
    needs: BTreeMap<u32, Need>,
    /// Touches of pages that had not been touched before.
    first_touches: f64,
    /// All touches, watched or not.
    seen: f64,
    /// Those that were watched.
    watched: u64,
}

impl Reuse {
    /// Nothing seen yet; at most so many pages are watched. A MiB has so many pages.
    pub fn new(pages_max: usize, pages_per_mib: f64) -> Self {
        Self {
            pages_max: pages_max.max(1),
            pages_per_mib,
            threshold: u64::MAX,
            touched: FxHashMap::default(),
            by_hash: BinaryHeap::new(),
            order: Order::new(2 * pages_max.max(1)),
            needs: BTreeMap::new(),
            first_touches: 0.0,
            seen: 0.0,
            watched: 0,
        }
    }

    /// A page is touched.
    pub fn touch(&mut self, page: u64) {
        self.seen += 1.0;
        let hash = hashed(page);
        if hash >= self.threshold {
            return;
        }
        self.watched += 1;
        let part = self.part_watched();
        if self.order.is_full() {
            self.order.close_up(&mut self.touched);
        }
        match self.touched.remove(&page) {
            Some(at) => {
                // The page itself, and those touched since.
                let pages = 1.0 + self.order.after(at) as f64 / part;
                let need = self.needs.entry(bucket(pages)).or_default();
                need.touches += 1.0 / part;
                need.most = need.most.max(pages);
                self.order.remove(at);
            }
            None => {
                self.first_touches += 1.0 / part;
                self.by_hash.push((hash, page));
            }
        }
        self.touched.insert(page, self.order.push());
        while self.touched.len() > self.pages_max {
            self.watch_fewer();
        }
    }

    /// What was seen so far counts for so much only from now on, 0 to 1: what a tenant was like is forgotten by and by.
    pub fn age(&mut self, keep: f64) {
        self.needs.values_mut().for_each(|need| need.touches *= keep);
        self.needs.retain(|_, need| need.touches > FORGOTTEN);
        self.first_touches *= keep;
        self.seen *= keep;
    }

    /// The part of all pages that is watched.
    fn part_watched(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    fn watch_fewer(&mut self) {
        let Some((hash, page)) = self.by_hash.pop() else { return };
        self.threshold = hash;
        if let Some(at) = self.touched.remove(&page) {
            self.order.remove(at);
        }
    }

    /// All touches there were, those estimated that were not watched.
    fn estimated(&self) -> f64 {
        self.first_touches + self.needs.values().map(|need| need.touches).sum::<f64>()
    }
}

impl MissModel for Reuse {
    fn misses(&self, memory: f64) -> f64 {
        if self.seen == 0.0 {
            return 1.0;
        }
        let pages = memory * self.pages_per_mib;
        let hits: f64 =
            self.needs.range(..=bucket(pages)).map(|(bucket, need)| need.met(*bucket, pages)).sum();
        // Whether the few pages are watched that are touched most is chance: what is missing of all touches was theirs (SHARDS-adj).
        let of_the_busiest = self.seen - self.estimated();
        let hits = if pages >= 1.0 { hits + of_the_busiest } else { 0.0 };
        (1.0 - hits / self.seen).clamp(0.0, 1.0)
    }

    fn footprint(&self) -> f64 {
        self.needs.values().next_back().map_or(1.0, |last| last.most) / self.pages_per_mib
    }

    fn error(&self) -> f64 {
        if self.watched == 0 { 1.0 } else { 0.5 / (self.touched.len().max(1) as f64).sqrt() }
    }
}

/// Spread evenly over all numbers, whatever pages there are (the finaliser of SplitMix64).
fn hashed(page: u64) -> u64 {
    let page = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (page ^ (page >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Numbers of pages that are not told apart have one number.
fn bucket(pages: f64) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a logarithm, from 0 on")]
    let bucket = (pages.max(0.0).ln_1p() / std::f64::consts::LN_2 * SIZES_PER_OCTAVE) as u32;
    bucket
}

fn bucket_start(bucket: u32) -> f64 {
    (f64::from(bucket) / SIZES_PER_OCTAVE * std::f64::consts::LN_2).exp_m1()
}

impl Need {
    /// Of these touches, those that hit with so many pages: all with the most that any of them needs, none with less than the least.
    fn met(&self, bucket: u32, pages: f64) -> f64 {
        let start = bucket_start(bucket);
        if pages >= self.most {
            self.touches
        } else {
            self.touches * ((pages - start) / (self.most - start)).clamp(0.0, 1.0)
        }
    }
}

/// Pages in the order in which they were touched last: how many were touched after one is counted by a tree of sums (Fenwick's).
#[derive(Clone, Debug)]
struct Order {
    sums: Vec<u32>,
    places: usize,
    taken: usize,
    /// Places that are taken and were not given back.
    live: usize,
}

impl Order {
    fn new(places: usize) -> Self {
        Self { sums: vec![0; places + 1], places, taken: 0, live: 0 }
    }

    const fn is_full(&self) -> bool {
        self.taken == self.places
    }

    /// The next place.
    fn push(&mut self) -> usize {
        let at = self.taken;
        self.taken += 1;
        self.live += 1;
        self.add(at, 1);
        at
    }

    fn remove(&mut self, at: usize) {
        self.live -= 1;
        self.add(at, u32::MAX);
    }

    /// How many live places come after one that is live.
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
        while index <= self.places {
            self.sums[index] = self.sums[index].wrapping_add(one);
            index += index & index.wrapping_neg();
        }
    }

    /// Numbers live places anew, from the first.
    fn close_up(&mut self, touched: &mut FxHashMap<u64, usize>) {
        let mut places: Vec<&mut usize> = touched.values_mut().collect();
        places.sort_unstable();
        *self = Self::new(self.places);
        for place in places {
            *place = self.push();
        }
    }
}
