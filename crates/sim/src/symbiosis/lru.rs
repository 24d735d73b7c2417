//! Local memory that keeps what was touched last. Which pages there are, is known from the start.

/// Pages in the order in which they were touched: a ring, through one that is none.
#[derive(Clone, Debug)]
pub(super) struct Lru {
    /// What was touched before each, and after each; `ABSENT` if it is not kept.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Where the ring begins and ends: one page beyond the last.
    none: usize,
    kept: usize,
    room: usize,
}

const ABSENT: u32 = u32::MAX;

impl Lru {
    /// Nothing kept yet of so many pages, and no room for any.
    pub fn new(pages: u32) -> Self {
        let none = pages as usize;
        let mut before = vec![ABSENT; none + 1];
        before[none] = pages;
        Self { after: before.clone(), before, none, kept: 0, room: 0 }
    }

    /// From now on there is room for so many; what was touched longest ago leaves.
    pub fn resize(&mut self, room: usize) {
        self.room = room;
        self.shrink();
    }

    /// Touches a page; whether it was kept.
    pub fn touch(&mut self, page: u32) -> bool {
        let place = page as usize;
        let hit = self.before[place] != ABSENT;
        if hit {
            self.unlink(place);
        }
        let last = self.before[self.none];
        (self.before[place], self.after[place]) = (last, self.after[last as usize]);
        (self.after[last as usize], self.before[self.none]) = (page, page);
        self.kept += 1;
        self.shrink();
        hit
    }

    fn shrink(&mut self) {
        while self.kept > self.room {
            self.unlink(self.after[self.none] as usize);
        }
    }

    fn unlink(&mut self, place: usize) {
        let (before, after) = (self.before[place], self.after[place]);
        self.after[before as usize] = after;
        self.before[after as usize] = before;
        self.before[place] = ABSENT;
        self.kept -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_touched_last_is_kept_and_less_room_costs_the_oldest() {
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
