//! A best-fit scheduler: where a VM goes, and how much of its memory comes from the pool. It watches and answers; asking the
//! rack, and hearing what the rack says to it, is the caller's.
//!
//! A VM takes local memory first and the rest from the pool in whole slices, at most its memory rounded down to whole
//! slices. Hosts that need nothing of the pool come before those that do; among them the one with the fewest cores left
//! over, then the least local memory left over, then the first by name.

use std::collections::{BTreeMap, BTreeSet};

use units::{Bytes, Name, SLICE};

/// What is free in a rack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// By host.
    pub hosts: BTreeMap<Name, Room>,
    /// Free slices by EMC. Hosts wired to the same EMC share them.
    pub slices: BTreeMap<Name, u32>,
}

/// What is free on one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Whether it takes new VMs.
    pub open: bool,
    /// Free cores.
    pub cores: u32,
    /// Free local memory.
    pub local: Bytes,
    /// EMCs it is wired to.
    pub emcs: Vec<Name>,
}

/// What a VM needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Cores.
    pub cores: u32,
    /// Memory, wherever it comes from.
    pub memory: Bytes,
}

/// Where a VM goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its host.
    pub host: Name,
    /// Its cores.
    pub cores: u32,
    /// Its memory on the host itself.
    pub local: Bytes,
    /// Its slices of the pool.
    pub slices: u32,
}

/// The best host for a VM, or `None` if it fits nowhere. Hosts in `except` are not considered.
pub fn place(need: Need, capacity: &Capacity, except: &BTreeSet<Name>) -> Option<Placement> {
    let open = capacity.hosts.iter().filter(|(name, room)| room.open && !except.contains(*name));
    let fits = open.filter_map(|(name, room)| {
        let placement = capacity.fit(need, name, room)?;
        let rank =
            (placement.slices > 0, room.cores - need.cores, room.local.saturating_sub(placement.local));
        Some((rank, placement))
    });
    // Names come in order and the first of equals is kept.
    fits.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, placement)| placement)
}

impl Capacity {
    fn fit(&self, need: Need, host: &Name, room: &Room) -> Option<Placement> {
        let slices = slices_beyond(need.memory, room.local)?;
        let fits = need.cores <= room.cores && slices <= self.reach(room);
        let local = need.memory.saturating_sub(Bytes::slices(slices));
        fits.then(|| Placement { host: host.clone(), cores: need.cores, local, slices })
    }

    /// Free slices that a host can get.
    fn reach(&self, room: &Room) -> u32 {
        let free = room.emcs.iter().filter_map(|emc| self.slices.get(emc));
        free.fold(0, |sum, free| sum.saturating_add(*free))
    }

    /// Takes what a VM was given out of what is free. Which EMCs give its slices is guessed as the pool manager chooses:
    /// those with the most free slices first.
    pub fn take(&mut self, placement: &Placement) {
        let Some(room) = self.hosts.get_mut(&placement.host) else { return };
        room.cores = room.cores.saturating_sub(placement.cores);
        room.local = room.local.saturating_sub(placement.local);
        let mut emcs = room.emcs.clone();
        emcs.sort_by_key(|emc| std::cmp::Reverse(self.slices.get(emc).copied()));
        let mut missing = placement.slices;
        for emc in emcs {
            let Some(free) = self.slices.get_mut(&emc) else { continue };
            let taken = missing.min(*free);
            *free -= taken;
            missing -= taken;
        }
    }

    /// Local memory that is free and of no use: on hosts that take new VMs but have no room for one of this shape, be it
    /// for want of cores or of memory.
    pub fn stranded(&self, shape: Need) -> Bytes {
        let useless =
            self.hosts.iter().filter(|(name, room)| room.open && self.fit(shape, name, room).is_none());
        useless.map(|(_, room)| room.local).sum()
    }
}

/// The slices a VM needs beside so much local memory, or `None` if what is no whole slice does not fit there.
fn slices_beyond(memory: Bytes, local: Bytes) -> Option<u32> {
    let beyond = memory.saturating_sub(local).get().div_ceil(SLICE.get());
    let most = memory.slices_floor().as_slices()?;
    u32::try_from(beyond).ok().filter(|slices| *slices <= most)
}

/// The shape in the middle: the lower median of the cores and that of the memory, each by itself.
pub fn median(needs: impl Iterator<Item = Need>) -> Option<Need> {
    let (mut cores, mut memory): (Vec<u32>, Vec<Bytes>) = needs.map(|need| (need.cores, need.memory)).unzip();
    let middle = cores.len().checked_sub(1)? / 2;
    let cores = *cores.select_nth_unstable(middle).1;
    let memory = *memory.select_nth_unstable(middle).1;
    Some(Need { cores, memory })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    /// Hosts as `name cores local_mib emc,emc` and EMCs as `name slices`, separated by `;`.
    fn rack(words: &str) -> Capacity {
        let mut rack = Capacity::default();
        for part in words.split(';') {
            match part.split_whitespace().collect::<Vec<_>>()[..] {
                [emc, slices] => drop(rack.slices.insert(name(emc), slices.parse().unwrap())),
                [host, cores, mib, emcs] => {
                    let emcs = emcs.split(',').map(name).collect();
                    let (cores, local) = (cores.parse().unwrap(), Bytes::mib(mib.parse().unwrap()));
                    rack.hosts.insert(name(host), Room { open: true, cores, local, emcs });
                }
                _ => panic!("{part:?}"),
            }
        }
        rack
    }

    /// Where a VM of so many cores and MiB goes, as `host local+slices`.
    fn placed(rack: &Capacity, cores: u32, mib: u64) -> String {
        let need = Need { cores, memory: Bytes::mib(mib) };
        let shown = |p: Placement| format!("{} {}+{}", p.host, p.local, p.slices);
        place(need, rack, &BTreeSet::new()).map_or("nowhere".into(), shown)
    }

    #[test]
    fn local_memory_comes_first_and_the_pool_gives_whole_slices() {
        let rack = rack("a 8 2048 e;e 4");
        assert_eq!(placed(&rack, 1, 2048), "a 2GiB+0");
        assert_eq!(placed(&rack, 1, 2049), "a 1025MiB+1");
        assert_eq!(placed(&rack, 1, 6144), "a 2GiB+4");
        assert_eq!(placed(&rack, 1, 6145), "nowhere");
    }

    #[test]
    fn what_is_no_whole_slice_must_be_local() {
        assert_eq!(placed(&rack("a 8 511 e;e 4"), 1, 1536), "nowhere");
        assert_eq!(placed(&rack("a 8 512 e;e 4"), 1, 1536), "a 512MiB+1");
        assert_eq!(placed(&rack("a 8 0 e;e 4"), 1, 2048), "a 0B+2");
    }

    #[test]
    fn the_fullest_host_that_needs_no_pool_wins() {
        let rack = rack("a 8 8192 e;b 4 4096 e;c 2 1024 e;e 9");
        assert_eq!(placed(&rack, 2, 1024), "c 1GiB+0");
        assert_eq!(placed(&rack, 2, 2048), "b 2GiB+0");
        assert_eq!(placed(&rack, 5, 2048), "a 2GiB+0");
        assert_eq!(placed(&rack, 2, 9216), "c 1GiB+8");
    }

    #[test]
    fn slices_of_one_emc_are_shared_by_its_hosts() {
        let mut rack = rack("a 8 0 e;b 8 0 e,f;e 2;f 1");
        let placement = place(Need { cores: 1, memory: Bytes::gib(2) }, &rack, &BTreeSet::new()).unwrap();
        rack.take(&placement);
        assert_eq!(rack.slices[&name("e")], 0);
        assert_eq!(placed(&rack, 1, 1024), "b 0B+1");
        assert_eq!(placed(&rack, 1, 2048), "nowhere");
    }

    #[test]
    fn a_closed_host_and_one_that_was_tried_take_nothing() {
        let mut rack = rack("a 8 8192 e;b 8 8192 e;e 1");
        rack.hosts.get_mut("a").unwrap().open = false;
        assert_eq!(placed(&rack, 1, 1024), "b 1GiB+0");
        let need = Need { cores: 1, memory: Bytes::gib(1) };
        assert_eq!(place(need, &rack, &BTreeSet::from([name("b")])), None);
    }

    #[test]
    fn memory_is_stranded_where_the_middle_vm_does_not_fit() {
        let needs =
            [(1, 1), (2, 2), (2, 9), (8, 64)].map(|(cores, gib)| Need { cores, memory: Bytes::gib(gib) });
        let shape = median(needs.into_iter()).unwrap();
        assert_eq!(shape, Need { cores: 2, memory: Bytes::gib(2) });
        assert_eq!(median(std::iter::empty()), None);
        // No cores left on a, no memory within reach of b; c takes one more.
        let rack = rack("a 1 8192 e;b 9 1024 f;c 2 1024 e;e 1;f 0");
        assert_eq!(rack.stranded(shape), Bytes::gib(9));
    }

    fn some_rack() -> impl Strategy<Value = Capacity> {
        let host = (any::<bool>(), 0..9u32, 0..9000u64, prop::collection::btree_set(0..3u8, 0..3));
        let hosts = prop::collection::vec(host, 0..6);
        (hosts, prop::collection::vec(0..5u32, 3)).prop_map(|(hosts, slices)| Capacity {
            hosts: hosts
                .into_iter()
                .enumerate()
                .map(|(i, (open, cores, mib, emcs))| {
                    let emcs = emcs.into_iter().map(|e| name(&format!("e{e}"))).collect();
                    (name(&format!("h{i}")), Room { open, cores, local: Bytes::mib(mib), emcs })
                })
                .collect(),
            slices: slices.into_iter().enumerate().map(|(i, n)| (name(&format!("e{i}")), n)).collect(),
        })
    }

    proptest! {
        #[test]
        fn nothing_is_promised_that_is_not_there(mut rack in some_rack(), vms in prop::collection::vec((1..5u32, 1..9000u64), 0..20)) {
            for (cores, mib) in vms {
                let need = Need { cores, memory: Bytes::mib(mib) };
                let before = rack.clone();
                let Some(placement) = place(need, &rack, &BTreeSet::new()) else { continue };
                let room = &before.hosts[&placement.host];
                prop_assert!(room.open && room.cores >= cores && room.local >= placement.local);
                prop_assert_eq!(placement.local.checked_add(Bytes::slices(placement.slices)), Some(need.memory));
                rack.take(&placement);
                let left: u32 = rack.slices.values().sum();
                prop_assert_eq!(left + placement.slices, before.slices.values().sum::<u32>());
                for (emc, free) in &rack.slices {
                    prop_assert!(*free == before.slices[emc] || room.emcs.contains(emc));
                }
            }
        }

        #[test]
        fn a_vm_is_turned_away_only_if_it_fits_nowhere(rack in some_rack(), cores in 1..5u32, mib in 1..9000u64) {
            let need = Need { cores, memory: Bytes::mib(mib) };
            if place(need, &rack, &BTreeSet::new()).is_none() {
                for room in rack.hosts.values().filter(|room| room.open && room.cores >= cores) {
                    let slices: u64 = room.emcs.iter().map(|emc| u64::from(rack.slices[emc])).sum();
                    let fits = (0..=slices.min(mib / 1024)).any(|n| Bytes::mib(mib - n * 1024) <= room.local);
                    prop_assert!(!fits, "{room:?} would take it");
                }
            }
        }

        #[test]
        fn the_pool_is_used_only_where_no_host_has_room_of_its_own(rack in some_rack(), cores in 1..5u32, mib in 1..9000u64) {
            let need = Need { cores, memory: Bytes::mib(mib) };
            if place(need, &rack, &BTreeSet::new()).is_some_and(|p| p.slices > 0) {
                prop_assert!(!rack.hosts.values().any(|r| r.open && r.cores >= cores && r.local >= need.memory));
            }
        }
    }
}
