//! Sampled pages that were promoted recently. The agent queries their nodes later, because the kernel
//! does not report which pages it demotes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tiering::fair::{TenantId, ThrashTable};
use units::{Ns, limits::PROMOTED_PAGES_TRACKED_MAX};

use super::mover::PageMover;
use crate::host::{memory::usage::PAGE_BYTES, tiers::Tiers};

/// Largest number of pages of a tenant that are queried per second. All pages of a tenant are queried within
/// 8 seconds, or in each step if steps are longer.
const QUERIED_PER_S_MAX: u64 = 512;
/// Largest number of times that the sample of a tenant is halved.
const HALVINGS_MAX: u32 = 14;

/// Page of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    pid: u32,
    address: usize,
    promoted: Ns,
}

impl Page {
    /// Returns a number that identifies the page within its tenant.
    fn key(self) -> u64 {
        u64::from(self.pid).rotate_right(24) ^ (self.address as u64 / PAGE_BYTES)
    }
}

/// Sampled promoted pages of one tenant, at most [`PROMOTED_PAGES_TRACKED_MAX`]. If there are more, the
/// sample is halved: otherwise the pages of a tenant that promotes much would be dropped before they are
/// demoted.
#[derive(Debug, Default)]
pub(super) struct PromotedPages {
    pages: VecDeque<Page>,
    halvings: u32,
    queried: Ns,
}

impl PromotedPages {
    /// Records promoted pages of a process. Pages that are not sampled are ignored.
    pub fn record(
        &mut self,
        table: &mut ThrashTable,
        tenant: TenantId,
        pid: u32,
        addresses: &[usize],
        now: Ns,
    ) {
        for page in addresses.iter().map(|address| Page { pid, address: *address, promoted: now }) {
            if !table.is_in_subsample(tenant, page.key(), self.halvings) {
                continue;
            }
            if self.pages.len() == PROMOTED_PAGES_TRACKED_MAX {
                self.make_room(table, tenant);
            }
            if table.is_in_subsample(tenant, page.key(), self.halvings) {
                table.record_promotion(tenant, page.key(), now);
                self.pages.push_back(page);
            }
        }
    }

    /// Halves the sample, or drops the oldest page if the sample cannot be halved.
    fn make_room(&mut self, table: &ThrashTable, tenant: TenantId) {
        if self.halvings < HALVINGS_MAX {
            self.halvings += 1;
            self.pages.retain(|page| table.is_in_subsample(tenant, page.key(), self.halvings));
        }
        if self.pages.len() == PROMOTED_PAGES_TRACKED_MAX {
            self.pages.pop_front();
        }
    }

    /// Queries the nodes of some pages, and records those that were demoted. Pages that have been in local
    /// memory for too long to count as thrashing are forgotten.
    pub fn detect_demotions(
        &mut self,
        table: &mut ThrashTable,
        tenant: TenantId,
        mover: &dyn PageMover,
        tiers: &Tiers,
        now: Ns,
    ) {
        if self.pages.len() < PROMOTED_PAGES_TRACKED_MAX / 8 {
            self.halvings = self.halvings.saturating_sub(1);
        }
        let seconds = now.0.saturating_sub(self.queried.0).div_ceil(Ns::secs(1).0).max(1);
        self.queried = now;
        let limit = usize::try_from(QUERIED_PER_S_MAX.saturating_mul(seconds)).unwrap_or(usize::MAX);
        let residence_max = table.residence_max(tenant);
        let mut of_process: BTreeMap<u32, Vec<Page>> = BTreeMap::new();
        for page in self.pages.drain(..self.pages.len().min(limit)) {
            of_process.entry(page.pid).or_default().push(page);
        }
        for (pid, pages) in of_process {
            let addresses: Vec<usize> = pages.iter().map(|page| page.address).collect();
            let Ok(demoted) = mover.slow_pages(pid, &addresses, tiers) else { continue }; // the process has ended
            let demoted: BTreeSet<usize> = demoted.into_iter().collect();
            for page in pages {
                if demoted.contains(&page.address) {
                    table.record_demotion(tenant, page.key(), now);
                } else if now.0.saturating_sub(page.promoted.0) < residence_max.0 {
                    self.pages.push_back(page);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tiering::fair::ThrashTableSettings;

    use super::*;
    use crate::fair_tiering::mover::fake::FakeMover;

    #[test]
    fn only_pages_that_are_in_slower_memory_again_count_as_thrashing() {
        let settings = ThrashTableSettings { sample_shift: 0, ..ThrashTableSettings::default() };
        let mut table = ThrashTable::new(settings).unwrap();
        let (tenant, tiers) = (TenantId(1), Tiers { local: [0].into(), slow: [2].into() });
        let mut pages = PromotedPages::default();
        let addresses = [0, 4096, 8192, 12_288];
        pages.record(&mut table, tenant, 7, &addresses, Ns::secs(1));
        pages.record(&mut table, tenant, 8, &addresses, Ns::secs(1));
        let counts = |table: &ThrashTable| (table.counts(tenant).promotions, table.counts(tenant).thrashed);
        assert_eq!(counts(&table), (8, 0));
        let mover = FakeMover { slow: [4096, 8192].into(), ended: Some(8), ..FakeMover::default() };
        pages.detect_demotions(&mut table, tenant, &mover, &tiers, Ns::secs(2));
        assert_eq!(counts(&table), (8, 2));
        assert_eq!(pages.pages.len(), 2, "demoted pages and pages of ended processes are forgotten");
        pages.detect_demotions(&mut table, tenant, &mover, &tiers, Ns::secs(3));
        assert_eq!(counts(&table), (8, 2), "a demotion counts once");
    }

    /// Promotes pages in order, each of which is demoted after `residence_s`. Returns the sampled promotions and
    /// the detected demotions in the second half of the time.
    fn thrashed_part(pages_per_s: usize, residence_s: usize, step_s: usize) -> (u64, u64) {
        let settings = ThrashTableSettings { sample_shift: 6, ..ThrashTableSettings::default() };
        let mut table = ThrashTable::new(settings).unwrap();
        let (tenant, tiers) = (TenantId(1), Tiers { local: [0].into(), slow: [2].into() });
        let mut pages = PromotedPages::default();
        let mut mover = FakeMover::default();
        let mut halfway = None;
        let steps = 6 * residence_s / step_s;
        for step in 1..=steps {
            let now = Ns::secs((step * step_s) as u64);
            let promoted = (step - 1) * step_s * pages_per_s..step * step_s * pages_per_s;
            let addresses: Vec<usize> = promoted.clone().map(|page| page << 12).collect();
            pages.record(&mut table, tenant, 7, &addresses, now);
            mover.slow_below = Some(promoted.end.saturating_sub(residence_s * pages_per_s) << 12);
            pages.detect_demotions(&mut table, tenant, &mover, &tiers, now);
            if step == steps / 2 {
                halfway = Some(table.counts(tenant));
            }
        }
        let (end, halfway) = (table.counts(tenant), halfway.unwrap());
        (end.promotions - halfway.promotions, end.thrashed - halfway.thrashed)
    }

    /// The rates of section V-B 5 and others: a tenant with 10 GB of local memory promotes 100,000 pages
    /// per second.
    #[test]
    fn thrashing_is_detected_at_all_rates_and_steps() {
        for (pages_per_s, residence_s, step_s) in
            [(400, 20, 2), (8192, 10, 2), (16_384, 30, 2), (32_768, 10, 10), (102_400, 24, 2), (2048, 60, 30)]
        {
            let (promotions, thrashed) = thrashed_part(pages_per_s, residence_s, step_s);
            let case = format!("{pages_per_s} pages/s for {residence_s} s, steps of {step_s} s");
            assert!(thrashed >= promotions * 3 / 4, "{case}: {thrashed} of {promotions}");
            assert!(thrashed >= (8 * 3 * residence_s / 5) as u64, "{case}: only {thrashed}");
        }
    }
}
