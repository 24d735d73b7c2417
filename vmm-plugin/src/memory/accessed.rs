//! Measures which fraction of each pool node is in use, by sampling (Waldspurger, OSDI 2002, section
//! 5.3). An interval begins with the removal of the page table entries of randomly selected pages.
//! At the end of the interval, the selected pages that have an entry again were accessed.
//! [`sampled_page`] determines which pages can be sampled.
//!
//! A fault on a page can also map adjacent pages that lack an entry (fault-around), so the result is
//! an upper bound. The error is small, because few pages are selected.

mod sampled_page;

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use rustix::{
    mm::{Advice, madvise},
    rand::{GetRandomFlags, getrandom},
};
use units::limits::{ACCESS_SAMPLE_INTERVAL_MIN, ACCESS_SAMPLE_PAGE_MAX, ACCESS_SAMPLE_PAGES};

use super::Memory;
use crate::layout::Layout;

/// Size of the pages that /proc/PID/pagemap describes.
const BASE_PAGE_BYTES: usize = super::PAGE_BYTES;
/// Size of an entry of /proc/PID/pagemap.
const PAGEMAP_ENTRY_BYTES: usize = 8;
/// Bit of a pagemap entry: the page has a page table entry.
const PAGEMAP_PRESENT: u64 = 1 << 63;

/// Result of an interval for one pool node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAccess {
    /// Number of the node.
    pub node: u32,
    /// Size of the sampled pages, in bytes.
    pub page_bytes: u64,
    /// Number of selected pages. A page that was selected twice counts twice.
    pub sampled_pages: u32,
    /// Number of selected pages that were accessed in the interval.
    pub accessed_pages: u32,
    /// Size of the node, in bytes.
    pub bytes: u64,
}

/// Result of an interval of access sampling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessSample {
    /// Length of the interval.
    pub interval: Duration,
    /// Nodes that can be sampled, in the order of their numbers.
    pub nodes: Vec<NodeAccess>,
}

/// Error returned when accesses cannot be sampled. Guest memory is not affected.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The interval is too short. It continues.
    #[error(
        "the interval began {elapsed:?} ago: must be at least {ACCESS_SAMPLE_INTERVAL_MIN}; the interval continues"
    )]
    IntervalTooShort {
        /// Time since the interval began.
        elapsed: Duration,
    },
    /// A system call failed. No interval is in progress.
    #[error("cannot {operation}")]
    System {
        /// Failed operation, completing "cannot …".
        operation: &'static str,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
}

fn system_error<E: Into<io::Error>>(operation: &'static str) -> impl Fn(E) -> SampleError {
    move |errno| SampleError::System { operation, errno: errno.into() }
}

/// Sampler of the accesses to the pool nodes of a guest.
#[derive(Debug)]
pub struct AccessSampler {
    /// The file /proc/self/pagemap.
    pagemap: File,
    nodes: Vec<SampledNode>,
    interval: Option<Interval>,
}

/// Pool node whose accesses can be sampled.
#[derive(Debug)]
struct SampledNode {
    node: u32,
    page_bytes: usize,
    /// Address ranges of the node in this process. Each range consists of whole pages.
    ranges: Vec<Range<usize>>,
}

/// Interval in progress.
#[derive(Debug)]
struct Interval {
    began: Instant,
    /// Addresses of the selected pages of each node, in the order of [`AccessSampler::nodes`].
    selected: Vec<Vec<usize>>,
}

impl AccessSampler {
    /// Creates a sampler for the pool nodes of a guest. A node with a private mapping is omitted,
    /// because the removal of a page table entry would discard the page. A node with device pages
    /// larger than [`ACCESS_SAMPLE_PAGE_MAX`] is omitted, because the kernel cannot report them.
    ///
    /// # Errors
    /// The error returned by open(2), fstat(2) or read(2).
    pub fn new(memory: &Memory, layout: &Layout) -> io::Result<Self> {
        let smaps = std::fs::read_to_string("/proc/self/smaps")?;
        let mut nodes = Vec::new();
        for node in (0..).zip(&layout.nodes).filter(|(_, node)| node.is_pool()).map(|(number, _)| number) {
            nodes.extend(SampledNode::new(memory, node, &smaps)?);
        }
        Ok(Self { pagemap: File::open("/proc/self/pagemap")?, nodes, interval: None })
    }

    /// Ends the interval in progress and begins the next interval. Returns the result of the ended
    /// interval, or `None` if no interval was in progress.
    ///
    /// # Errors
    /// [`SampleError::IntervalTooShort`] if the interval began less than
    /// [`ACCESS_SAMPLE_INTERVAL_MIN`] ago, and [`SampleError::System`] if a system call fails.
    pub fn sample(&mut self, now: Instant) -> Result<Option<AccessSample>, SampleError> {
        if let Some(interval) = &self.interval {
            let elapsed = now.saturating_duration_since(interval.began);
            if elapsed < ACCESS_SAMPLE_INTERVAL_MIN.as_duration() {
                return Err(SampleError::IntervalTooShort { elapsed });
            }
        }
        let ended = self.interval.take().map(|interval| self.measure(&interval, now)).transpose()?;
        self.interval = Some(self.begin(now)?);
        Ok(ended)
    }

    /// Selects pages of each node and removes their page table entries.
    fn begin(&self, now: Instant) -> Result<Interval, SampleError> {
        let mut selected = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let pages = node.select_pages().map_err(system_error("get random numbers"))?;
            for page in &pages {
                unmap(*page, node.page_bytes).map_err(system_error("unmap a page of pool memory"))?;
            }
            selected.push(pages);
        }
        Ok(Interval { began: now, selected })
    }

    fn measure(&self, interval: &Interval, now: Instant) -> Result<AccessSample, SampleError> {
        let nodes = self.nodes.iter().zip(&interval.selected).map(|(node, selected)| {
            let mut accessed_pages = 0;
            for page in selected {
                let is_mapped = self.is_mapped(*page, node.page_bytes);
                accessed_pages += u32::from(is_mapped.map_err(system_error("read /proc/self/pagemap"))?);
            }
            Ok(NodeAccess {
                node: node.node,
                page_bytes: node.page_bytes as u64,
                sampled_pages: ACCESS_SAMPLE_PAGES,
                accessed_pages,
                bytes: node.ranges.iter().map(|range| range.len() as u64).sum(),
            })
        });
        let interval = now.saturating_duration_since(interval.began);
        Ok(AccessSample { interval, nodes: nodes.collect::<Result<_, _>>()? })
    }

    /// Returns whether any part of a page has a page table entry.
    fn is_mapped(&self, page: usize, bytes: usize) -> io::Result<bool> {
        let mut entries = vec![0; bytes / BASE_PAGE_BYTES * PAGEMAP_ENTRY_BYTES];
        self.pagemap.read_exact_at(&mut entries, (page / BASE_PAGE_BYTES * PAGEMAP_ENTRY_BYTES) as u64)?;
        let (entries, _) = entries.as_chunks::<PAGEMAP_ENTRY_BYTES>();
        Ok(entries.iter().any(|entry| u64::from_ne_bytes(*entry) & PAGEMAP_PRESENT != 0))
    }
}

impl SampledNode {
    /// Returns a pool node with its address ranges, or `None` if the node cannot be sampled.
    fn new(memory: &Memory, node: u32, smaps: &str) -> io::Result<Option<Self>> {
        let regions = || memory.mapped.iter().filter(|mapped| mapped.node == node);
        let mut page_bytes = BASE_PAGE_BYTES;
        for region in regions() {
            if !region.is_shared {
                return Ok(None);
            }
            page_bytes = page_bytes.max(sampled_page::size(&region.file, region.addresses.start, smaps)?);
        }
        let ranges: Vec<_> = regions().map(|region| whole_pages(&region.addresses, page_bytes)).collect();
        let can_be_sampled =
            page_bytes as u64 <= ACCESS_SAMPLE_PAGE_MAX.get() && ranges.iter().any(|range| !range.is_empty());
        Ok(can_be_sampled.then_some(Self { node, page_bytes, ranges }))
    }

    /// Returns the addresses of [`ACCESS_SAMPLE_PAGES`] random pages, with replacement.
    fn select_pages(&self) -> rustix::io::Result<Vec<usize>> {
        let pages: usize = self.ranges.iter().map(|range| range.len() / self.page_bytes).sum();
        let select = |_| Ok(self.page_address(random_below(pages)?));
        (0..ACCESS_SAMPLE_PAGES).map(select).collect()
    }

    /// Returns the address of a page. Pages are numbered through all ranges.
    fn page_address(&self, mut page: usize) -> usize {
        for range in &self.ranges {
            let pages = range.len() / self.page_bytes;
            if page < pages {
                return range.start + page * self.page_bytes;
            }
            page -= pages;
        }
        unreachable!("the number of a page is below the number of pages")
    }
}

/// Returns the largest range of whole pages in an address range.
fn whole_pages(range: &Range<usize>, page_bytes: usize) -> Range<usize> {
    let start = range.start.next_multiple_of(page_bytes);
    start..(range.end / page_bytes * page_bytes).max(start)
}

/// Returns a random number below `end`. The bias is below `end` / 2^64.
fn random_below(end: usize) -> rustix::io::Result<usize> {
    let mut random = [0; size_of::<u64>()];
    getrandom(&mut random, GetRandomFlags::empty())?; // at most 256 bytes are never truncated
    let scaled = (u128::from(u64::from_ne_bytes(random)) * end as u128) >> u64::BITS;
    Ok(usize::try_from(scaled).expect("the number is below `end`"))
}

/// Removes the page table entries of a page in a shared mapping of pool memory.
fn unmap(page: usize, bytes: usize) -> rustix::io::Result<()> {
    // SAFETY: the page is inside a shared file mapping of guest memory, which stays mapped until the
    // process ends. In a shared mapping, the file holds the data, so MADV_DONTNEED only removes the
    // page table entries, and the next access maps the same page of the file. The kernel removes the
    // entries of KVM in the same call. An access by a vCPU or a device during the call is therefore
    // not lost. No Rust reference to guest memory exists.
    unsafe { madvise(std::ptr::with_exposed_provenance_mut(page), bytes, Advice::LinuxDontNeed) }
}

#[cfg(test)]
mod tests;
