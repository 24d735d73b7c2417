//! From samples of a process's accesses to regions whose pages are touched equally often, about.
//!
//! A page that is sampled often is a region by itself. The others are put together with their neighbours, until there are enough samples to say how often
//! those pages are touched: regions are small where samples are close to each other, and large where they are far apart. Pages between two samples that are
//! much farther apart than is usual were not touched, or are not there.
//!
//! Accesses come in swarms: a page that is in use is accessed many times in a moment, and what a host wants to know is whether it was touched at all between
//! two looks. With accesses at random times that is so with a probability that their number gives.

use crate::host::watched::{LOOK_US, PAGE, Region};

/// Samples that say enough of a region.
const ENOUGH: usize = 8;
/// Between two sampled pages there is nothing if they are so many times as far apart as they would be if they were all over the tenant's memory.
const FAR: u64 = 64;

/// A sampled access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Access {
    /// To which page of the process.
    pub page: u64,
    /// For how many, itself among them.
    pub stands_for: f64,
}

/// Samples of neighbours.
#[derive(Clone, Copy, Debug)]
struct Group {
    first: u64,
    last: u64,
    /// Pages between them that are regions by themselves; and those after the last.
    between: u64,
    after: u64,
    samples: usize,
    accesses: f64,
}

impl Group {
    fn of(page: &[Access]) -> Self {
        let at = page[0].page;
        let accesses = page.iter().map(|access| access.stands_for).sum();
        Self { first: at, last: at, between: 0, after: 0, samples: page.len(), accesses }
    }

    fn add(&mut self, next: Self) {
        self.last = next.last;
        self.between += std::mem::take(&mut self.after);
        self.samples += next.samples;
        self.accesses += next.accesses;
    }

    /// All of them, and what is before the next.
    fn region_before(self, next: &Self, seconds: f64) -> Region {
        self.region(next.first - self.first - self.between - self.after, seconds)
    }

    /// All of them.
    fn region_alone(self, seconds: f64) -> Region {
        self.region(self.last + 1 - self.first - self.between, seconds)
    }

    fn region(self, pages: u64, seconds: f64) -> Region {
        let in_a_look = self.accesses / pages as f64 / seconds * (LOOK_US as f64 / 1e6);
        Region { bytes: pages * PAGE, touched: 1.0 - (-in_a_look).exp() }
    }
}

/// Each page's accesses of all, in order of pages.
pub(super) fn pages(accesses: &[Access]) -> impl Iterator<Item = &[Access]> {
    accesses.chunk_by(|one, other| one.page == other.page)
}

/// Regions of accesses that were sampled in so many seconds, in order of pages; of so many pages of the tenant's one was.
pub(super) fn of(accesses: &[Access], apart: u64, seconds: f64) -> Vec<Region> {
    let far = FAR * apart.max(1);
    let (mut regions, mut open) = (Vec::new(), None::<Group>);
    for page in pages(accesses) {
        let next = Group::of(page);
        if next.samples >= ENOUGH {
            regions.push(next.region_alone(seconds));
            if let Some(open) = &mut open {
                open.after += 1;
            }
            continue;
        }
        match &mut open {
            None => open = Some(next),
            Some(group) if next.first - group.last > far => {
                regions.push(group.region_alone(seconds));
                *group = next;
            }
            Some(group) if group.samples >= ENOUGH => {
                regions.push(group.region_before(&next, seconds));
                *group = next;
            }
            Some(group) => group.add(next),
        }
    }
    regions.extend(open.map(|group| group.region_alone(seconds)));
    regions
}
