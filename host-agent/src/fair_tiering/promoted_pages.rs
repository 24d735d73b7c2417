//! Sampled pages that were promoted recently. The agent queries their nodes later, because the kernel
//! does not report which pages it demotes.

use std::collections::{BTreeMap, VecDeque};

use tiering::fair::{TenantId, ThrashTable};
use units::{Ns, limits::PROMOTED_PAGES_TRACKED_MAX};

use super::mover::PageMover;
use crate::host::{memory::usage::PAGE_BYTES, tiers::Tiers};

/// Maximum number of pages of a tenant that are queried per step.
const QUERIED_PER_STEP_MAX: usize = 1024;

/// Page of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    pid: u32,
    address: usize,
}

impl Page {
    /// Returns a number that identifies the page within its tenant.
    fn key(self) -> u64 {
        u64::from(self.pid).rotate_right(24) ^ (self.address as u64 / PAGE_BYTES)
    }
}

/// Sampled promoted pages of one tenant, at most [`PROMOTED_PAGES_TRACKED_MAX`].
#[derive(Debug, Default)]
pub(super) struct PromotedPages {
    pages: VecDeque<Page>,
}

impl PromotedPages {
    /// Records promoted pages of a process. Pages that the table does not sample are ignored.
    pub fn record(
        &mut self,
        table: &mut ThrashTable,
        tenant: TenantId,
        pid: u32,
        addresses: &[usize],
        now: Ns,
    ) {
        for page in addresses.iter().map(|address| Page { pid, address: *address }) {
            if !table.is_sampled(tenant, page.key()) {
                continue;
            }
            table.record_promotion(tenant, page.key(), now);
            if self.pages.len() == PROMOTED_PAGES_TRACKED_MAX {
                self.pages.pop_front();
            }
            self.pages.push_back(page);
        }
    }

    /// Queries the nodes of some pages, and records those that were demoted.
    pub fn detect_demotions(
        &mut self,
        table: &mut ThrashTable,
        tenant: TenantId,
        mover: &dyn PageMover,
        tiers: &Tiers,
        now: Ns,
    ) {
        let mut of_process: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for page in self.pages.drain(..self.pages.len().min(QUERIED_PER_STEP_MAX)) {
            of_process.entry(page.pid).or_default().push(page.address);
        }
        for (pid, addresses) in of_process {
            let Ok(demoted) = mover.slow_pages(pid, &addresses, tiers) else { continue }; // the process has ended
            let demoted: std::collections::BTreeSet<usize> = demoted.into_iter().collect();
            for page in addresses.into_iter().map(|address| Page { pid, address }) {
                if demoted.contains(&page.address) {
                    table.record_demotion(tenant, page.key(), now);
                } else {
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
}
