//! LRU cache of a fixed set of pages, with a capacity that can change.

/// LRU cache. The cached pages form a circular linked list with a sentinel, in LRU order.
#[derive(Clone, Debug)]
pub(super) struct Lru {
    /// Previous page in the list for each page; `NOT_CACHED` if the page is not cached.
    previous: Vec<u32>,
    /// Next page in the list for each page.
    next: Vec<u32>,
    /// Index of the sentinel: the number of pages.
    sentinel: usize,
    len: usize,
    capacity: usize,
}

const NOT_CACHED: u32 = u32::MAX;

impl Lru {
    /// Creates an empty cache with capacity 0 for pages numbered from 0 to `pages` - 1.
    pub fn new(pages: u32) -> Self {
        let sentinel = pages as usize;
        let mut previous = vec![NOT_CACHED; sentinel + 1];
        previous[sentinel] = pages;
        Self { next: previous.clone(), previous, sentinel, len: 0, capacity: 0 }
    }

    /// Sets the capacity in pages. Evicts the least recently used pages beyond the new capacity.
    pub fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        self.evict_excess();
    }

    /// Accesses a page and returns whether the page was cached.
    pub fn touch(&mut self, page: u32) -> bool {
        let index = page as usize;
        let was_cached = self.previous[index] != NOT_CACHED;
        if was_cached {
            self.unlink_page(index);
        }
        let last = self.previous[self.sentinel];
        (self.previous[index], self.next[index]) = (last, self.next[last as usize]);
        (self.next[last as usize], self.previous[self.sentinel]) = (page, page);
        self.len += 1;
        self.evict_excess();
        was_cached
    }

    fn evict_excess(&mut self) {
        while self.len > self.capacity {
            self.unlink_page(self.next[self.sentinel] as usize);
        }
    }

    fn unlink_page(&mut self, index: usize) {
        let (previous, next) = (self.previous[index], self.next[index]);
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.previous[index] = NOT_CACHED;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_pages_are_evicted_first() {
        let mut lru = Lru::new(5);
        lru.resize(3);
        let touched = [0, 1, 2, 0, 3, 1, 0].map(|page| lru.touch(page));
        assert_eq!(touched, [false, false, false, true, false, false, true]);
        lru.resize(1);
        assert_eq!([3, 3, 1].map(|page| lru.touch(page)), [false, true, false]);
        lru.resize(0);
        assert_eq!([1, 1].map(|page| lru.touch(page)), [false, false]);
    }
}
