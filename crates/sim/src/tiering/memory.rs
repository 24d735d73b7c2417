//! Memory of one tenant: units in tiers, LRU lists, and the scan for hint faults.

use std::collections::VecDeque;

use tiering::fair::FAST;
use units::limits::TIERS_MAX;

/// Size of a unit, the granularity of the simulation: 4 MiB.
pub(super) const UNIT_BYTES: u64 = 4 << 20;
/// Number of pages of 4 KiB in a unit.
pub(super) const UNIT_PAGES: u64 = UNIT_BYTES / 4096;
/// Part of the units of a tier that the inactive list contains at least, as a divisor.
const INACTIVE_DIVISOR: usize = 4;
/// Number of accesses outside of local memory after which a unit is hot: the second access, as for
/// pages on the active list in TPP.
const HOT_ACCESSES: u8 = 2;

/// State of a unit.
#[derive(Clone, Copy, Debug)]
struct Unit {
    tier: usize,
    is_active: bool,
    is_referenced: bool,
    /// Whether the scan has passed this unit since it was allocated or migrated.
    is_scanned: bool,
    /// Number of accesses since the unit was allocated or migrated.
    accesses: u8,
    /// Identifies the entry of the unit in a list. Entries with an older stamp are ignored.
    stamp: u32,
}

/// Entry of an LRU list.
#[derive(Clone, Copy, Debug)]
struct Entry {
    unit: usize,
    stamp: u32,
}

/// LRU lists of a tenant in one tier. New entries are at the front.
#[derive(Clone, Debug, Default)]
struct LruLists {
    active: VecDeque<Entry>,
    inactive: VecDeque<Entry>,
    active_units: usize,
    units: usize,
}

/// Access to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// The unit is in local memory.
    Local,
    /// The unit is in a lower tier, and the access caused no hint fault.
    Remote,
    /// The unit is in a lower tier, and the access caused a hint fault.
    HintFault {
        /// Whether it is at least the second access since the unit left local memory.
        is_hot: bool,
    },
}

/// Result of the inspection of a unit on the inactive list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// The unit was referenced and moved to the active list.
    Referenced,
    /// The unit can be demoted.
    Victim(usize),
    /// The tier contains no unit.
    Empty,
}

/// Memory of a tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantMemory {
    units: Vec<Unit>,
    lists: [LruLists; TIERS_MAX],
    /// Next unit of the scan.
    scan: usize,
    /// Next unit of the search for units to promote without an access.
    search: usize,
}

impl TenantMemory {
    /// Returns the number of units.
    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    /// Returns the number of units in a tier.
    pub(super) fn units_in(&self, tier: usize) -> usize {
        self.lists[tier].units
    }

    /// Returns the number of units on active lists.
    pub(super) fn active_units(&self) -> usize {
        self.lists.iter().map(|lists| lists.active_units).sum()
    }

    /// Allocates a unit in a tier. Like anonymous pages, it starts on the inactive list.
    pub(super) fn allocate(&mut self, tier: usize) {
        let unit =
            Unit { tier, is_active: false, is_referenced: true, is_scanned: false, accesses: 0, stamp: 0 };
        self.units.push(unit);
        self.lists[tier].units += 1;
        self.insert(self.units.len() - 1, false);
    }

    /// Frees the unit that was allocated last. Returns its tier, or `None` without units.
    pub(super) fn free_last(&mut self) -> Option<usize> {
        let unit = self.units.pop()?;
        let lists = &mut self.lists[unit.tier];
        lists.units -= 1;
        lists.active_units -= usize::from(unit.is_active);
        (self.scan, self.search) = (0, 0);
        Some(unit.tier)
    }

    /// Accesses a unit.
    pub(super) fn access(&mut self, index: usize) -> Access {
        let unit = &mut self.units[index];
        unit.is_referenced = true;
        unit.accesses = unit.accesses.saturating_add(1);
        match (unit.tier, unit.is_scanned) {
            (FAST, _) => Access::Local,
            (_, false) => Access::Remote,
            (_, true) => Access::HintFault { is_hot: unit.accesses >= HOT_ACCESSES },
        }
    }

    /// Advances the scan by `units` units, so that accesses to them cause hint faults
    /// in lower tiers.
    pub(super) fn advance_scan(&mut self, units: usize) {
        for _ in 0..units.min(self.units.len()) {
            self.units[self.scan].is_scanned = true;
            self.scan = (self.scan + 1) % self.units.len();
        }
    }

    /// Returns the next unit outside of local memory, in the order of addresses. Returns `None` if
    /// all units are in local memory.
    pub(super) fn next_remote_unit(&mut self) -> Option<usize> {
        for _ in 0..self.units.len() {
            let index = self.search;
            self.search = (self.search + 1) % self.units.len();
            if self.units[index].tier != FAST {
                return Some(index);
            }
        }
        None
    }

    /// Returns the tier of a unit.
    pub(super) fn tier_of(&self, unit: usize) -> usize {
        self.units[unit].tier
    }

    /// Moves a unit to another tier. It starts there on the inactive list.
    pub(super) fn migrate(&mut self, index: usize, tier: usize) {
        let unit = &mut self.units[index];
        let (from, was_active) = (unit.tier, unit.is_active);
        (unit.tier, unit.is_scanned, unit.accesses) = (tier, false, 0);
        self.lists[from].active_units -= usize::from(was_active);
        self.lists[from].units -= 1;
        self.lists[tier].units += 1;
        self.units[index].is_active = false;
        self.insert(index, false);
    }

    /// Selects the unit of a tier to demote, and removes it from its list. A referenced unit on the
    /// inactive list gets a second chance on the active list. Returns `None` if the tier contains no
    /// unit. The caller migrates the unit.
    pub(super) fn select_victim(&mut self, tier: usize) -> Option<usize> {
        let limit = 2 * self.lists[tier].units;
        for _ in 0..limit {
            match self.scan_inactive(tier) {
                Scan::Referenced => {}
                Scan::Victim(index) => return Some(index),
                Scan::Empty => return None,
            }
        }
        self.pop(tier, false)
    }

    /// Inspects the last unit of the inactive list. A victim is removed from the list, and the caller
    /// migrates it.
    pub(super) fn scan_inactive(&mut self, tier: usize) -> Scan {
        self.balance_lists(tier);
        let Some(index) = self.pop(tier, false) else { return Scan::Empty };
        let unit = &mut self.units[index];
        if !unit.is_referenced {
            return Scan::Victim(index);
        }
        (unit.is_referenced, unit.is_active) = (false, true);
        self.lists[tier].active_units += 1;
        self.insert(index, true);
        Scan::Referenced
    }

    /// Moves units from the active to the inactive list until the inactive list has its minimum
    /// size, and clears their referenced bits.
    fn balance_lists(&mut self, tier: usize) {
        loop {
            let lists = &self.lists[tier];
            let inactive = lists.units - lists.active_units;
            let is_balanced = inactive > 0 && inactive * INACTIVE_DIVISOR >= lists.units;
            if is_balanced {
                return;
            }
            let Some(index) = self.pop(tier, true) else { return };
            let unit = &mut self.units[index];
            (unit.is_active, unit.is_referenced) = (false, false);
            self.lists[tier].active_units -= 1;
            self.insert(index, false);
        }
    }

    /// Adds a unit to the front of a list. Its earlier entries become invalid.
    fn insert(&mut self, index: usize, is_active: bool) {
        let unit = &mut self.units[index];
        unit.stamp = unit.stamp.wrapping_add(1);
        let (lists, entry) = (&mut self.lists[unit.tier], Entry { unit: index, stamp: unit.stamp });
        if is_active { lists.active.push_front(entry) } else { lists.inactive.push_front(entry) }
    }

    /// Removes the last valid entry of a list and returns its unit.
    fn pop(&mut self, tier: usize, is_active: bool) -> Option<usize> {
        loop {
            let lists = &mut self.lists[tier];
            let entry = if is_active { lists.active.pop_back() } else { lists.inactive.pop_back() }?;
            let is_valid = self.units.get(entry.unit).is_some_and(|unit| {
                unit.tier == tier && unit.is_active == is_active && unit.stamp == entry.stamp
            });
            if is_valid {
                return Some(entry.unit);
            }
        }
    }
}
