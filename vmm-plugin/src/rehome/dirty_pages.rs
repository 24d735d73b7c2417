//! Set of pages of the guest's pool memory, as one bitmap per region.

use std::ops::Range;

use crate::memory::PAGE_BYTES;

const WORD_BITS: usize = u64::BITS as usize;

/// Set of pages. Page numbers start at 0 in each region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DirtyPages(Vec<Vec<u64>>);

impl DirtyPages {
    /// Creates an empty set for regions of these sizes in bytes.
    pub(super) fn new(region_bytes: impl Iterator<Item = u64>) -> Self {
        let words =
            |bytes: u64| usize::try_from(bytes).expect("usize has 64 bits").div_ceil(PAGE_BYTES * WORD_BITS);
        Self(region_bytes.map(|bytes| vec![0; words(bytes)]).collect())
    }

    /// Returns the bitmap of each region.
    pub(super) fn bitmaps(&mut self) -> impl Iterator<Item = &mut Vec<u64>> {
        self.0.iter_mut()
    }

    /// Adds all pages of a byte range of a region, including pages that are partly in the range.
    pub(super) fn add(&mut self, region: usize, bytes: &Range<u64>) {
        let page = |at: u64| usize::try_from(at).expect("usize has 64 bits") / PAGE_BYTES;
        let end = page(bytes.end.next_multiple_of(PAGE_BYTES as u64));
        for page in page(bytes.start)..end {
            self.0[region][page / WORD_BITS] |= 1 << (page % WORD_BITS);
        }
    }

    /// Adds all pages of another set.
    pub(super) fn add_all(&mut self, other: &Self) {
        for (to, from) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            *to |= from;
        }
    }

    /// Returns the number of bytes in the pages of the set.
    pub(super) fn bytes(&self) -> u64 {
        let pages: u64 = self.0.iter().flatten().map(|word| u64::from(word.count_ones())).sum();
        pages * PAGE_BYTES as u64
    }

    /// Returns runs of adjacent pages of a region as byte ranges, each of at most `pages_max` pages.
    pub(super) fn runs(&self, region: usize, pages_max: usize) -> impl Iterator<Item = Range<u64>> {
        let words = &self.0[region];
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = next_page(words, at)?;
            let mut end = start + 1;
            while end - start < pages_max && has_page(words, end) {
                end += 1;
            }
            at = end;
            Some((start * PAGE_BYTES) as u64..(end * PAGE_BYTES) as u64)
        })
    }
}

fn has_page(words: &[u64], page: usize) -> bool {
    words.get(page / WORD_BITS).is_some_and(|word| word >> (page % WORD_BITS) & 1 != 0)
}

/// Returns the first page of the set that is not below `from`.
fn next_page(words: &[u64], from: usize) -> Option<usize> {
    let first = words.get(from / WORD_BITS)? & (u64::MAX << (from % WORD_BITS));
    if first != 0 {
        return Some(from / WORD_BITS * WORD_BITS + first.trailing_zeros() as usize);
    }
    let rest = words.iter().enumerate().skip(from / WORD_BITS + 1);
    rest.filter(|(_, word)| **word != 0)
        .map(|(index, word)| index * WORD_BITS + word.trailing_zeros() as usize)
        .next()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;
    const PAGES: u64 = 200;

    proptest! {
        #[test]
        fn runs_cover_exactly_the_added_pages(
            added in prop::collection::vec((0..PAGES * PAGE, 1..20 * PAGE), 0..10),
            pages_max in 1..40_usize,
        ) {
            let mut set = DirtyPages::new([PAGE, PAGES * PAGE].into_iter());
            let mut expected = BTreeSet::new();
            for (start, bytes) in added {
                let range = start..(start + bytes).min(PAGES * PAGE);
                expected.extend(range.start / PAGE..=(range.end - 1) / PAGE);
                set.add(1, &range);
            }
            let runs: Vec<_> = set.runs(1, pages_max).collect();
            prop_assert!(runs.iter().all(|run| run.end - run.start <= pages_max as u64 * PAGE));
            let pages: Vec<_> = runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE).collect();
            prop_assert_eq!(&pages, &expected.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(set.bytes(), pages.len() as u64 * PAGE);
            prop_assert_eq!(set.runs(0, pages_max).count(), 0);
        }
    }
}
