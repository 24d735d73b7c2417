//! Estimation of page access rates from samples of a process's accesses.
//!
//! A page with enough samples gets its own rate. Other pages are grouped with their neighbours
//! until a group has enough samples, so groups are small where samples are dense. If two sampled
//! pages are much farther apart than the average, the pages between them count as not accessed or
//! absent.

use crate::host::{
    access_profile::{Region, SAMPLE_INTERVAL_US},
    memory::usage::PAGE_BYTES,
};

/// Minimum number of samples from which a rate is estimated.
const SAMPLES_PER_RATE_MIN: usize = 8;
/// Maximum distance of two sampled pages in a group, as a multiple of the mean distance.
const GAP_FACTOR_MAX: u64 = 64;

/// Sampled memory access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Access {
    /// Number of the accessed page: virtual address divided by the page size.
    pub page: u64,
    /// Number of accesses that the sample represents, including the sampled access.
    pub weight: f64,
}

/// Access rate of a page or of a group of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AccessRate {
    /// Number of pages.
    pages: u64,
    /// Mean number of accesses of each page per sample interval.
    per_interval: f64,
}

impl AccessRate {
    /// Returns the pages as a region. Assumes that bursts of this number of accesses happen at
    /// random times (Poisson process).
    pub fn region(self, accesses_per_burst: f64) -> Region {
        Region {
            bytes: self.pages * PAGE_BYTES,
            touched: 1.0 - (-self.per_interval / accesses_per_burst).exp(),
        }
    }
}

/// Group of neighbouring pages with their samples.
#[derive(Clone, Copy, Debug)]
struct Group {
    /// First sampled page.
    first: u64,
    /// Last sampled page.
    last: u64,
    /// Number of pages between `first` and `last` that have their own rate.
    between: u64,
    /// Number of pages after `last` that have their own rate.
    after: u64,
    /// Number of samples.
    samples: usize,
    /// Estimated number of accesses: the sum of the samples' weights.
    accesses: f64,
}

impl Group {
    fn of(page: &[Access]) -> Self {
        let at = page[0].page;
        let accesses = page.iter().map(|access| access.weight).sum();
        Self { first: at, last: at, between: 0, after: 0, samples: page.len(), accesses }
    }

    fn add(&mut self, next: Self) {
        self.last = next.last;
        self.between += std::mem::take(&mut self.after);
        self.samples += next.samples;
        self.accesses += next.accesses;
    }

    /// Returns the rate of the group, which includes all pages before the next group.
    fn rate_before(self, next: &Self, seconds: f64) -> AccessRate {
        self.rate(next.first - self.first - self.between - self.after, seconds)
    }

    /// Returns the rate of the group, which ends at its last sampled page.
    fn rate_alone(self, seconds: f64) -> AccessRate {
        self.rate(self.last + 1 - self.first - self.between, seconds)
    }

    fn rate(self, pages: u64, seconds: f64) -> AccessRate {
        AccessRate {
            pages,
            per_interval: self.accesses / pages as f64 / seconds * (SAMPLE_INTERVAL_US as f64 / 1e6),
        }
    }
}

/// Splits sorted accesses into the accesses of each page.
pub(super) fn group_by_page(accesses: &[Access]) -> impl Iterator<Item = &[Access]> {
    accesses.chunk_by(|a, b| a.page == b.page)
}

/// Estimates access rates from the accesses of a process that were sampled within `seconds`, sorted
/// by page. The tenant has `tenant_pages` pages. The samples contain `sampled` of them, at least
/// one.
pub(super) fn estimate_rates(
    accesses: &[Access],
    tenant_pages: u64,
    sampled: usize,
    seconds: f64,
) -> Vec<AccessRate> {
    // The maximum distance within a group never exceeds the tenant's memory.
    let gap_max = (GAP_FACTOR_MAX * (tenant_pages / sampled as u64).max(1)).min(tenant_pages);
    let (mut rates, mut open) = (Vec::new(), None::<Group>);
    for page in group_by_page(accesses) {
        let next = Group::of(page);
        if next.samples >= SAMPLES_PER_RATE_MIN {
            rates.push(next.rate_alone(seconds));
            if let Some(open) = &mut open {
                open.after += 1;
            }
            continue;
        }
        match &mut open {
            None => open = Some(next),
            Some(group) if next.first - group.last > gap_max => {
                rates.push(group.rate_alone(seconds));
                *group = next;
            }
            Some(group) if group.samples >= SAMPLES_PER_RATE_MIN => {
                rates.push(group.rate_before(&next, seconds));
                *group = next;
            }
            Some(group) => group.add(next),
        }
    }
    rates.extend(open.map(|group| group.rate_alone(seconds)));
    rates
}
