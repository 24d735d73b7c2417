//! Promotion of the pages of tenants: which address ranges are promoted first.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    path::Path,
    time::{Duration, Instant},
};

use tiering::fair::Candidates;
use units::{
    Bytes, Name, Ns,
    limits::{PROFILED_PROCESSES_MAX, PROMOTION_PAGES_EXAMINED_PER_S_MAX, PROMOTION_PROCESSES_MAX},
};

use super::{
    accesses::{RangeMonitor, TenantProcess, of_tenant},
    mover::PageMover,
};
use crate::host::{
    access_profile::{AccessProfile, AccessSource, Region},
    damon::MonitoredRange,
    memory::{
        numa::PromotionLimits,
        usage::{HUGE_PAGE_BYTES, PAGE_BYTES},
    },
    tiers::Tiers,
};

/// Number of pages of a range that are queried to find out whether the range contains pages in slower
/// memory.
const PROBES_PER_RANGE: usize = 8;
/// Age at which the ranges of a process are replaced although some were not examined yet.
const RANGES_AGE_MAX: Ns = Ns::secs(10);
/// Age at which the ranges of a process are dropped.
const RANGES_EXPIRY: Ns = Ns::secs(60);

/// Promotion of pages that DAMON has seen accessed.
#[derive(Debug)]
pub(super) struct Promoter {
    /// Monitor of accesses.
    pub monitor: RangeMonitor,
    /// Ranges that are not examined yet, for each process.
    ranges: BTreeMap<TenantProcess, ProcessRanges>,
    /// Latest accesses of processes for access profiles, at most [`PROFILED_PROCESSES_MAX`].
    accesses: BTreeMap<TenantProcess, (Ns, Vec<Region>)>,
    /// Number of refreshes, which selects the probed pages.
    refreshes: usize,
    /// Number of pages that may still be examined in this step, and for this tenant.
    examined_rest: usize,
    examined_rest_of_tenant: usize,
    /// End of the promotions of this step.
    deadline: Instant,
    /// Reason why pages of the latest process could not be promoted; empty if there was none.
    problem: String,
}

/// Address ranges of a process that contain pages in slower memory, the most accessed first.
#[derive(Debug, Default)]
struct ProcessRanges {
    ranges: VecDeque<MonitoredRange>,
    /// Largest number of accesses of all ranges of the process.
    accesses_max: u64,
    at: Ns,
}

/// Result of the promotion of pages of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PromotionOutcome {
    /// Addresses of promoted pages.
    pub pages: Vec<usize>,
    /// Number of pages that were promoted, or would have been if the target node were not full.
    pub attempted: u64,
    /// Whether the target node is full.
    pub is_node_full: bool,
}

impl Promoter {
    /// Creates a promoter without ranges. `sys` is the root of sysfs.
    pub fn new(sys: &Path, runtime_dir: &Path, boot_id: String) -> Self {
        let monitor = RangeMonitor::at(sys, runtime_dir, boot_id);
        Self {
            monitor,
            ranges: BTreeMap::new(),
            accesses: BTreeMap::new(),
            refreshes: 0,
            examined_rest: 0,
            examined_rest_of_tenant: 0,
            deadline: Instant::now(),
            problem: String::new(),
        }
    }

    /// Stops monitoring, and drops all results.
    pub fn stop(&mut self) {
        self.monitor.stop();
        self.ranges.clear();
        self.accesses.clear();
    }

    /// Begins a step: monitors these processes, which are in their order, and takes new results, for at most
    /// about `limit`.
    pub fn begin_step(
        &mut self,
        processes: &[TenantProcess],
        mover: &dyn PageMover,
        tiers: &Tiers,
        now: Ns,
        limit: Duration,
    ) {
        self.problem.clear();
        let is_recent = |ranges: &ProcessRanges| ranges.at <= now && now.since(ranges.at) < RANGES_EXPIRY;
        let is_listed = |process: &TenantProcess| processes.binary_search(process).is_ok();
        self.ranges.retain(|process, ranges| is_listed(process) && is_recent(ranges));
        let results = self.monitor.monitor(processes, limit);
        self.store_accesses(&results, processes, now);
        for (process, results) in results {
            let is_current = |ranges: &ProcessRanges| {
                !ranges.ranges.is_empty() && ranges.at <= now && now.since(ranges.at) < RANGES_AGE_MAX
            };
            if !is_listed(&process) || self.ranges.get(&process).is_some_and(is_current) {
                continue;
            }
            self.refreshes = self.refreshes.wrapping_add(1);
            let accesses_max = results.first().map_or(0, |range| range.accesses);
            let ranges = ranges_with_slow_pages(process.pid, results, self.refreshes, mover, tiers);
            self.ranges.insert(process, ProcessRanges { ranges, accesses_max, at: now });
        }
    }

    /// Begins the promotions of a step. `interval` is the time since the last step.
    pub fn begin_promotions(&mut self, interval: Duration, deadline: Instant) {
        let examined = PROMOTION_PAGES_EXAMINED_PER_S_MAX as u128 * interval.as_millis() / 1000;
        self.examined_rest = usize::try_from(examined).unwrap_or(usize::MAX);
        self.deadline = deadline;
    }

    /// Stores the accesses of processes. The oldest are dropped if there are too many.
    fn store_accesses(
        &mut self,
        results: &[(TenantProcess, Vec<MonitoredRange>)],
        processes: &[TenantProcess],
        now: Ns,
    ) {
        for (process, ranges) in results {
            let regions = ranges.iter().map(MonitoredRange::region).collect();
            self.accesses.insert(process.clone(), (now, regions));
        }
        self.accesses.retain(|process, _| processes.binary_search(process).is_ok());
        while self.accesses.len() > PROFILED_PROCESSES_MAX
            && let Some((oldest, _)) = self.accesses.iter().min_by_key(|(_, (at, _))| *at)
        {
            let oldest = oldest.clone();
            self.accesses.remove(&oldest);
        }
    }

    /// Returns the access profiles of tenants whose accesses are known for at least half of the processes,
    /// or for [`PROMOTION_PROCESSES_MAX`] processes.
    pub fn profiles(&self, processes: &[TenantProcess]) -> BTreeMap<Name, AccessProfile> {
        let mut profiles: BTreeMap<Name, (usize, AccessProfile)> = BTreeMap::new();
        for (process, (_, regions)) in &self.accesses {
            let empty = || (0, AccessProfile { source: AccessSource::Damon, regions: Vec::new() });
            let (known, profile) = profiles.entry(process.tenant.clone()).or_insert_with(empty);
            *known += 1;
            profile.regions.extend(regions.iter().cloned());
        }
        let is_representative = |name: &Name, known: usize| {
            known >= of_tenant(processes, name).len().div_ceil(2).min(PROMOTION_PROCESSES_MAX)
        };
        let complete = profiles.into_iter().filter(|(name, (known, _))| is_representative(name, *known));
        complete.map(|(name, (_, profile))| (name, profile)).collect()
    }

    /// Returns whether there are pages of a tenant that could be promoted.
    pub fn has_ranges(&self, tenant: &Name) -> bool {
        let first = TenantProcess { tenant: tenant.clone(), pid: 0 };
        let mut of_tenant = self.ranges.range(first..).take_while(|(process, _)| process.tenant == *tenant);
        of_tenant.any(|(_, ranges)| !ranges.ranges.is_empty())
    }

    /// Returns the reason why accesses are not monitored or pages could not be promoted in this step;
    /// empty if there is none.
    pub fn problem(&self) -> &str {
        if self.monitor.problem().is_empty() { &self.problem } else { self.monitor.problem() }
    }

    /// Begins the promotions of a tenant. `remaining` is the number of tenants that are left in this step,
    /// with this tenant. Each may examine an equal part of the remaining pages, and at least a huge page.
    pub fn begin_tenant(&mut self, remaining: usize) {
        let equal = self.examined_rest / remaining.max(1);
        self.examined_rest_of_tenant = equal.max(HUGE_PAGE_PAGES).min(self.examined_rest);
    }

    /// Promotes pages of a process, at most `budget`.
    pub fn promote(
        &mut self,
        process: &TenantProcess,
        candidates: Candidates,
        budget: Bytes,
        mover: &mut dyn PageMover,
        tiers: &Tiers,
        to: u32,
    ) -> PromotionOutcome {
        let Some(ranges) = self.ranges.get_mut(process) else { return PromotionOutcome::default() };
        let moved = usize::try_from(budget.get() / PAGE_BYTES).unwrap_or(usize::MAX);
        let limits =
            PromotionLimits { moved, examined: self.examined_rest_of_tenant, deadline: self.deadline };
        let selected = ranges.select(candidates, limits.examined);
        if selected.is_empty() || moved == 0 {
            return PromotionOutcome::default();
        }
        let result = match mover.promote(process, &selected, tiers, to, limits) {
            Ok(result) => result,
            Err(error) => {
                // The ranges of an ended process are dropped in the next step.
                if error.raw_os_error() != Some(libc::ESRCH) {
                    self.problem = format!("cannot promote pages of process {}: {error}", process.pid);
                }
                return PromotionOutcome::default();
            }
        };
        ranges.drop_front(result.examined);
        for rest in [&mut self.examined_rest, &mut self.examined_rest_of_tenant] {
            *rest = rest.saturating_sub(result.examined);
        }
        PromotionOutcome {
            attempted: result.moved.len() as u64 + result.failed.get(&libc::ENOMEM).copied().unwrap_or(0),
            is_node_full: result.failed.contains_key(&libc::ENOMEM),
            pages: result.moved,
        }
    }
}

impl ProcessRanges {
    /// Returns the first ranges that may be promoted, with at most `pages` pages, in whole huge pages.
    fn select(&self, candidates: Candidates, pages: usize) -> Vec<Range<usize>> {
        let is_candidate = |range: &&MonitoredRange| match candidates {
            Candidates::All => true,
            Candidates::Accessed => range.accesses > 0,
            Candidates::Hot => range.accesses > 0 && range.accesses >= self.accesses_max.div_ceil(2),
        };
        let mut rest = pages / HUGE_PAGE_PAGES * HUGE_PAGE_PAGES;
        let mut selected = Vec::new();
        for range in self.ranges.iter().take_while(is_candidate) {
            let Range { start, end } = range.addresses;
            let end = end.min(start.saturating_add(rest.saturating_mul(PAGE_BYTES_USIZE)));
            if start < end {
                selected.push(start..end);
            }
            rest = rest.saturating_sub((end - start) / PAGE_BYTES_USIZE);
            if rest == 0 {
                break;
            }
        }
        selected
    }

    /// Drops the first `pages` pages. A huge page that is only partly among them remains.
    fn drop_front(&mut self, pages: usize) {
        let mut rest = pages;
        while rest > 0
            && let Some(range) = self.ranges.front_mut()
        {
            let size = range.addresses.len().div_ceil(PAGE_BYTES_USIZE);
            if size > rest {
                range.addresses.start += rest / HUGE_PAGE_PAGES * HUGE_PAGE_PAGES * PAGE_BYTES_USIZE;
                return;
            }
            rest -= size;
            self.ranges.pop_front();
        }
    }
}

/// Size of a page, for addresses.
#[expect(clippy::cast_possible_truncation, reason = "fits into any address")]
const PAGE_BYTES_USIZE: usize = PAGE_BYTES as usize;
/// Size of a huge page, in pages.
const HUGE_PAGE_PAGES: usize = (HUGE_PAGE_BYTES / PAGE_BYTES) as usize;

/// Extends ranges to huge pages, because the kernel moves a transparent huge page as a whole. A huge page
/// with several ranges belongs to the most accessed one. Returns the most accessed ranges first.
fn align_to_huge_pages(mut ranges: Vec<MonitoredRange>) -> Vec<MonitoredRange> {
    let huge = HUGE_PAGE_PAGES * PAGE_BYTES_USIZE;
    ranges.sort_by_key(|range| range.addresses.start);
    let mut aligned: Vec<MonitoredRange> = Vec::new();
    for MonitoredRange { addresses: Range { start, end }, accesses } in ranges {
        let (mut start, end) = (start / huge * huge, end.next_multiple_of(huge));
        while let Some(previous) = aligned.last_mut().filter(|previous| previous.addresses.end > start) {
            if previous.accesses >= accesses {
                start = previous.addresses.end;
            } else if previous.addresses.start >= start {
                aligned.pop();
            } else {
                previous.addresses.end = start;
            }
        }
        if start < end {
            aligned.push(MonitoredRange { addresses: start..end, accesses });
        }
    }
    aligned.sort_by_key(|range| std::cmp::Reverse(range.accesses));
    aligned
}

/// Returns the ranges in which at least one of [`PROBES_PER_RANGE`] pages is in slower memory. `seed`
/// selects other pages in each call, so that ranges with few such pages are found after some calls.
fn ranges_with_slow_pages(
    pid: u32,
    ranges: Vec<MonitoredRange>,
    seed: usize,
    mover: &dyn PageMover,
    tiers: &Tiers,
) -> VecDeque<MonitoredRange> {
    let ranges = align_to_huge_pages(ranges);
    let probes = |range: &MonitoredRange| {
        let pages = range.addresses.len() / PAGE_BYTES_USIZE;
        let distance = pages.div_ceil(PROBES_PER_RANGE).max(1);
        let start = range.addresses.start;
        let offsets = (seed % distance..pages).step_by(distance);
        offsets.map(|page| start + page * PAGE_BYTES_USIZE).collect::<Vec<_>>()
    };
    let probed: Vec<usize> = ranges.iter().flat_map(probes).collect();
    let Ok(mut slow) = mover.slow_pages(pid, &probed, tiers) else { return VecDeque::new() };
    slow.sort_unstable();
    let has_slow = |range: &MonitoredRange| {
        let first = slow.partition_point(|page| *page < range.addresses.start);
        slow.get(first).is_some_and(|page| range.addresses.contains(page))
    };
    ranges.into_iter().filter(has_slow).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{fair_tiering::mover::fake::FakeMover, host::sysfs::fake::FakeSysfs};

    const HUGE: usize = HUGE_PAGE_PAGES * PAGE_BYTES_USIZE;

    fn process(tenant: &str, pid: u32) -> TenantProcess {
        TenantProcess { tenant: Name::new(tenant).unwrap(), pid }
    }

    fn tiers() -> Tiers {
        Tiers { local: [0].into(), slow: [2].into() }
    }

    /// Returns a promoter with the ranges of process 1: each a huge page at this index, with its accesses.
    fn promoter(ranges: &[(usize, u64)]) -> Promoter {
        let (sys, folder) = (FakeSysfs::new(&[]), tempfile::tempdir().unwrap());
        let mut promoter = Promoter::new(&sys.path(""), folder.path(), "boot".to_owned());
        let range = |(at, accesses): &(usize, u64)| MonitoredRange {
            addresses: at * HUGE..(at + 1) * HUGE,
            accesses: *accesses,
        };
        let accesses_max = ranges.iter().map(|(_, accesses)| *accesses).max().unwrap_or(0);
        let ranges = ranges.iter().map(range).collect();
        promoter.ranges.insert(process("a", 1), ProcessRanges { ranges, accesses_max, at: Ns::ZERO });
        promoter.examined_rest = 1 << 20;
        promoter.deadline = Instant::now() + Duration::from_secs(60);
        promoter
    }

    fn slow_pages(huge_pages: &[usize]) -> BTreeSet<usize> {
        let pages = |at: &usize| (at * HUGE..(at + 1) * HUGE).step_by(PAGE_BYTES_USIZE);
        huge_pages.iter().flat_map(pages).collect()
    }

    /// Promotes up to `huge_pages` of process 1, and returns the indexes of the promoted huge pages.
    fn promote(
        promoter: &mut Promoter,
        mover: &mut FakeMover,
        candidates: Candidates,
        huge_pages: u64,
    ) -> Vec<usize> {
        promoter.begin_tenant(1);
        let budget = Bytes::new(huge_pages * HUGE_PAGE_BYTES);
        let outcome = promoter.promote(&process("a", 1), candidates, budget, mover, &tiers(), 0);
        let promoted: BTreeSet<usize> = outcome.pages.iter().map(|page| page / HUGE).collect();
        assert_eq!(outcome.pages.len(), promoted.len() * HUGE_PAGE_PAGES, "whole huge pages");
        promoted.into_iter().collect()
    }

    #[test]
    fn candidates_are_selected_by_their_accesses() {
        for (candidates, expected) in [
            (Candidates::All, vec![1, 2, 3, 4]),
            (Candidates::Accessed, vec![1, 2, 3]),
            (Candidates::Hot, vec![1, 2]), // at least half of the accesses of the hottest range
        ] {
            let mut promoter = promoter(&[(1, 20), (2, 10), (3, 9), (4, 0)]);
            let mut mover = FakeMover { slow: slow_pages(&[1, 2, 3, 4]), ..FakeMover::default() };
            assert_eq!(promote(&mut promoter, &mut mover, candidates, 9), expected);
        }
        let mut promoter = promoter(&[(1, 0)]);
        let mut mover = FakeMover { slow: slow_pages(&[1]), ..FakeMover::default() };
        assert_eq!(promote(&mut promoter, &mut mover, Candidates::Hot, 9), [0; 0], "nothing is accessed");
    }

    #[test]
    fn promotion_continues_at_the_first_page_that_was_not_examined() {
        let mut promoter = promoter(&[(1, 20), (5, 19), (3, 18)]);
        let mut mover = FakeMover { slow: slow_pages(&[1, 5, 3]), ..FakeMover::default() };
        assert!(promoter.has_ranges(&process("a", 1).tenant));
        assert_eq!(promote(&mut promoter, &mut mover, Candidates::All, 2), [1, 5]);
        assert_eq!(promote(&mut promoter, &mut mover, Candidates::All, 0), [0; 0]);
        assert_eq!(promote(&mut promoter, &mut mover, Candidates::All, 2), [3]);
        assert_eq!(promote(&mut promoter, &mut mover, Candidates::All, 2), [0; 0]);
        assert!(!promoter.has_ranges(&process("a", 1).tenant));
    }

    #[test]
    fn tenants_examine_equal_parts_and_at_least_a_huge_page() {
        let mut promoter = promoter(&[(1, 1), (2, 1), (3, 1), (4, 1)]);
        promoter.examined_rest = 4 * HUGE_PAGE_PAGES;
        let examined = |promoter: &mut Promoter, remaining: usize| {
            promoter.begin_tenant(remaining);
            let before = promoter.examined_rest;
            let mut mover = FakeMover::default();
            let budget = Bytes::gib(1);
            promoter.promote(&process("a", 1), Candidates::All, budget, &mut mover, &tiers(), 0);
            (before - promoter.examined_rest) / HUGE_PAGE_PAGES
        };
        assert_eq!(examined(&mut promoter, 2), 2);
        assert_eq!(examined(&mut promoter, 100), 1);
        assert_eq!(examined(&mut promoter, 1), 1);
        assert_eq!(examined(&mut promoter, 1), 0);
    }

    #[test]
    fn only_promotions_that_a_full_node_prevents_count_as_attempted() {
        let of = |mover: &mut FakeMover| {
            let mut promoter = promoter(&[(1, 1)]);
            promoter.begin_tenant(1);
            let outcome =
                promoter.promote(&process("a", 1), Candidates::All, Bytes::gib(1), mover, &tiers(), 0);
            (outcome.attempted, outcome.is_node_full)
        };
        let pages = HUGE_PAGE_PAGES as u64;
        assert_eq!(of(&mut FakeMover { slow: slow_pages(&[1]), ..FakeMover::default() }), (pages, false));
        assert_eq!(of(&mut FakeMover { is_full: true, ..FakeMover::default() }), (pages, true));
        assert_eq!(of(&mut FakeMover { shared: slow_pages(&[1]), ..FakeMover::default() }), (0, false));
    }

    #[test]
    fn huge_page_belongs_to_the_most_accessed_of_its_ranges() {
        let range = |addresses, accesses| MonitoredRange { addresses, accesses };
        let kib = |n: usize| n << 10;
        let aligned = align_to_huge_pages(vec![
            range(kib(3000)..kib(5000), 9), // huge pages 1 and 2
            range(0..kib(3000), 5),         // huge pages 0 and 1
            range(kib(5000)..kib(5100), 7), // huge page 2
            range(kib(5100)..kib(9000), 9), // huge pages 2 to 4
        ]);
        assert_eq!(aligned, [range(HUGE..3 * HUGE, 9), range(3 * HUGE..5 * HUGE, 9), range(0..HUGE, 5)]);
        let within = [range(0..4096, 1), range(4096..8192, 2), range(8192..12_288, 3)];
        assert_eq!(align_to_huge_pages(within.to_vec()), [range(0..HUGE, 3)]);
    }

    #[test]
    fn ranges_without_pages_in_slower_memory_are_dropped() {
        let range = |addresses, accesses| MonitoredRange { addresses, accesses };
        let all = vec![range(HUGE + 4096..2 * HUGE, 5), range(3 * HUGE..4 * HUGE, 4)];
        let mover = FakeMover { slow: slow_pages(&[1]), ..FakeMover::default() };
        let found = ranges_with_slow_pages(1, all, 0, &mover, &tiers());
        assert_eq!(found, [range(HUGE..2 * HUGE, 5)], "extended to whole huge pages");
    }

    #[test]
    fn profile_needs_the_accesses_of_half_of_the_processes() {
        let mut promoter = promoter(&[]);
        let processes = [process("a", 1), process("a", 2), process("a", 3), process("b", 4)];
        let accessed = || vec![MonitoredRange { addresses: 0..4096, accesses: 1 }];
        let tenants = |promoter: &Promoter| -> Vec<String> {
            promoter.profiles(&processes).keys().map(Name::to_string).collect()
        };
        promoter.store_accesses(&[(process("a", 1), accessed())], &processes, Ns::ZERO);
        assert_eq!(tenants(&promoter), [""; 0]);
        let more = [(process("a", 3), accessed()), (process("b", 4), Vec::new())];
        promoter.store_accesses(&more, &processes, Ns::secs(2));
        assert_eq!(tenants(&promoter), ["a", "b"]);
        assert_eq!(promoter.profiles(&processes)[&process("a", 1).tenant].regions.len(), 2);
        promoter.store_accesses(&[], &processes[1..], Ns::secs(3));
        assert_eq!(promoter.accesses.len(), 2, "the accesses of an ended process are dropped");
        let many: Vec<_> = (0..300).map(|pid| (process("c", pid), Vec::new())).collect();
        let pids: Vec<_> = many.iter().map(|(process, _)| process.clone()).collect();
        promoter.store_accesses(&many, &pids, Ns::secs(4));
        assert_eq!(promoter.accesses.len(), 128);
    }
}
