//! Estimates access rates of pages from samples of a process's accesses.
//!
//! A page with enough samples has its own rate. Other pages are grouped with their neighbours until
//! the group has enough samples: groups are small where samples are close to each other, and large
//! where they are far apart. Pages between two samples that are much farther apart than usual were
//! not accessed, or do not exist.

use crate::host::{
    access_profile::{Region, SAMPLE_INTERVAL_US},
    memory::usage::PAGE,
};

/// Sufficient number of samples.
const SAMPLES_PER_RATE_MIN: usize = 8;
/// Factor of the mean distance of samples above which the pages between two sampled pages are not
/// counted.
const GAP_FACTOR_MAX: u64 = 64;

/// A sampled access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Access {
    /// Page of the process.
    pub page: u64,
    /// Number of accesses that it represents, including itself.
    pub weight: f64,
}

/// Access rate of some pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    pages: u64,
    /// Accesses of each page per sample interval.
    per_interval: f64,
}

impl Rate {
    /// Returns the fraction of samples in which such a page was accessed, for visits at random
    /// times with a number of accesses each.
    pub fn region(self, accesses_per_visit: f64) -> Region {
        Region { bytes: self.pages * PAGE, touched: 1.0 - (-self.per_interval / accesses_per_visit).exp() }
    }
}

/// Samples of neighbouring pages.
#[derive(Clone, Copy, Debug)]
struct Group {
    first: u64,
    last: u64,
    /// Pages between them with a rate of their own, and those after the last.
    between: u64,
    after: u64,
    samples: usize,
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

    /// Returns its rate, with all pages before the next group.
    fn before(self, next: &Self, seconds: f64) -> Rate {
        self.rate(next.first - self.first - self.between - self.after, seconds)
    }

    /// Returns its rate without the pages after it.
    fn alone(self, seconds: f64) -> Rate {
        self.rate(self.last + 1 - self.first - self.between, seconds)
    }

    fn rate(self, pages: u64, seconds: f64) -> Rate {
        Rate {
            pages,
            per_interval: self.accesses / pages as f64 / seconds * (SAMPLE_INTERVAL_US as f64 / 1e6),
        }
    }
}

/// Groups accesses by page.
pub(super) fn pages(accesses: &[Access]) -> impl Iterator<Item = &[Access]> {
    accesses.chunk_by(|one, other| one.page == other.page)
}

/// Returns the rates of accesses, ordered by page, that were sampled in a number of seconds. The
/// tenant has `tenant_pages` pages, of which `sampled` were sampled, at least one.
pub(super) fn of(accesses: &[Access], tenant_pages: u64, sampled: usize, seconds: f64) -> Vec<Rate> {
    // At most all pages of the tenant.
    let gap_max = (GAP_FACTOR_MAX * (tenant_pages / sampled as u64).max(1)).min(tenant_pages);
    let (mut rates, mut open) = (Vec::new(), None::<Group>);
    for page in pages(accesses) {
        let next = Group::of(page);
        if next.samples >= SAMPLES_PER_RATE_MIN {
            rates.push(next.alone(seconds));
            if let Some(open) = &mut open {
                open.after += 1;
            }
            continue;
        }
        match &mut open {
            None => open = Some(next),
            Some(group) if next.first - group.last > gap_max => {
                rates.push(group.alone(seconds));
                *group = next;
            }
            Some(group) if group.samples >= SAMPLES_PER_RATE_MIN => {
                rates.push(group.before(&next, seconds));
                *group = next;
            }
            Some(group) => group.add(next),
        }
    }
    rates.extend(open.map(|group| group.alone(seconds)));
    rates
}
