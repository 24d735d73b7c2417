//! Free capacity as seen by a replay. It counts cores and local memory itself, so that VMs are
//! placed independent of delays of the manager's snapshots; free slices are those of the latest
//! snapshot minus later requests. It may be slightly wrong during calls; rejections by the manager
//! correct it.

use std::collections::{BTreeMap, BTreeSet};

use cli_runtime::Failure;
use proto::v1;
use sim::packing::{self, Capacity, HostCapacity, Placement, VmShape};
use units::{Bytes, Name};

/// Free capacity, and the part used by this replay.
#[derive(Debug, Default)]
pub(super) struct Free {
    seen: Capacity,
    /// Cores and local memory of each host without VMs of this replay.
    whole: BTreeMap<Name, (u32, Bytes)>,
    now: Capacity,
    mine: BTreeMap<u64, Mine>,
    next: u64,
}

#[derive(Debug)]
struct Mine {
    placement: Placement,
    slices: Shown,
}

/// Whether the manager's snapshot contains a VM's slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    NotYet,
    /// The manager has replied: its next snapshot contains it.
    Next,
    Yes,
}

/// Placement of one VM.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) placement: Placement,
    number: u64,
}

impl Free {
    /// Returns the current free capacity.
    pub(super) fn now(&self) -> &Capacity {
        &self.now
    }

    /// Applies a newer snapshot.
    pub(super) fn adopt(&mut self, seen: Capacity) {
        for mine in self.mine.values_mut().filter(|mine| mine.slices == Shown::Next) {
            mine.slices = Shown::Yes;
        }
        for (host, room) in &seen.hosts {
            self.whole.entry(host.clone()).or_insert((room.cores, room.local));
        }
        self.seen = seen;
        self.reckon();
    }

    /// Applies a snapshot from a time without calls in progress, which is exact.
    pub(super) fn adopt_calm(&mut self, seen: Capacity) {
        self.whole = seen.hosts.iter().map(|(host, room)| (host.clone(), (room.cores, room.local))).collect();
        for Mine { placement, slices } in self.mine.values_mut() {
            *slices = Shown::Yes;
            if let Some((cores, local)) = self.whole.get_mut(&placement.host) {
                *cores += placement.cores;
                *local = local.checked_add(placement.local).unwrap_or(*local);
            }
        }
        self.adopt(seen);
    }

    fn reckon(&mut self) {
        self.now = self.seen.clone();
        for (host, room) in &mut self.now.hosts {
            (room.cores, room.local) = self.whole.get(host).copied().unwrap_or_default();
        }
        for Mine { placement, slices } in self.mine.values() {
            let missing = if *slices == Shown::Yes { 0 } else { placement.slices };
            self.now.take(&Placement { slices: missing, ..placement.clone() });
        }
    }

    /// Returns the best placement of a VM, and reserves it.
    pub(super) fn place(&mut self, need: VmShape, except: &BTreeSet<Name>) -> Option<Place> {
        let placement = packing::place(need, &self.now, except)?;
        self.now.take(&placement);
        let number = self.next;
        self.next += 1;
        self.mine.insert(number, Mine { placement: placement.clone(), slices: Shown::NotYet });
        Some(Place { placement, number })
    }

    /// Records that the manager accepted the placement.
    pub(super) fn given(&mut self, place: &Place) {
        if let Some(mine) = self.mine.get_mut(&place.number) {
            mine.slices = Shown::Next;
        }
    }

    /// Drops a placement that ended or was rejected.
    pub(super) fn left(&mut self, place: &Place) {
        self.mine.remove(&place.number);
        self.reckon();
    }

    /// Returns whether a VM would fit if these slices were free, too.
    pub(super) fn would_fit(&self, need: VmShape, draining: &BTreeMap<Name, u32>) -> bool {
        let mut later = self.now.clone();
        for (emc, slices) in draining {
            *later.slices.entry(emc.clone()).or_default() += slices;
        }
        packing::place(need, &later, &BTreeSet::new()).is_some()
    }
}

/// Converts the manager's snapshot for the scheduler.
pub(super) fn seen(picture: v1::Capacity) -> Result<Capacity, Failure> {
    let hosts = picture.hosts.into_iter().map(room).collect::<Result<_, _>>()?;
    let slices = picture.emcs.into_iter().map(|emc| Ok((named(emc.emc)?, emc.free_slices)));
    Ok(Capacity { hosts, slices: slices.collect::<Result<_, Failure>>()? })
}

fn room(host: v1::HostCapacity) -> Result<(Name, HostCapacity), Failure> {
    let emcs = host.emcs.into_iter().map(|emc| named(emc.emc)).collect::<Result<_, _>>()?;
    let (open, cores) = (host.schedulable, host.free_cores);
    Ok((
        named(host.host)?,
        HostCapacity { is_schedulable: open, cores, local: Bytes::new(host.free_local_bytes), emcs },
    ))
}

pub(super) fn named(text: String) -> Result<Name, Failure> {
    Name::try_from(text).map_err(|wrong| Failure::Protocol(wrong.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(cores: u32) -> Capacity {
        let emc = v1::EmcCapacity { emc: "e".into(), free_slices: 4, slices: 8 };
        let host = v1::HostCapacity {
            host: "a".into(),
            schedulable: true,
            free_cores: cores,
            free_local_bytes: 1 << 30,
            emcs: vec![emc.clone()],
        };
        seen(v1::Capacity { revision: 1, hosts: vec![host], emcs: vec![emc] }).unwrap()
    }

    const NEED: VmShape = VmShape { cores: 2, memory: Bytes::gib(2) };

    fn free(cores: u32) -> Free {
        let mut free = Free::default();
        free.adopt(picture(cores));
        free
    }

    #[test]
    fn what_was_asked_for_is_not_offered_again() {
        let mut free = free(4);
        let first = free.place(NEED, &BTreeSet::new()).unwrap();
        assert_eq!((first.placement.local, first.placement.slices), (Bytes::gib(1), 1));
        assert_eq!(free.place(NEED, &BTreeSet::new()).unwrap().placement.slices, 2);
        assert!(free.place(NEED, &BTreeSet::new()).is_none(), "no cores are left");
    }

    #[test]
    fn cores_are_counted_once_however_early_or_late_the_pictures_come() {
        for when_shown in 0..3 {
            let mut free = free(4);
            let place = free.place(NEED, &BTreeSet::new()).unwrap();
            // The snapshot that contains the VM may precede the reply, and the one before may
            // follow it.
            free.adopt(picture(if when_shown == 0 { 2 } else { 4 }));
            assert_eq!(free.now().hosts["a"].cores, 2);
            free.given(&place);
            free.adopt(picture(if when_shown == 1 { 2 } else { 4 }));
            assert_eq!(free.now().hosts["a"].cores, 2);
            free.left(&place);
            assert_eq!(free.now().hosts["a"].cores, 4, "it is free as soon as it was released");
        }
    }

    #[test]
    fn what_others_have_shows_when_nothing_is_under_way() {
        let mut free = free(8);
        let place = free.place(NEED, &BTreeSet::new()).unwrap();
        free.given(&place);
        free.adopt_calm(picture(3));
        assert_eq!(free.now().hosts["a"].cores, 3);
        free.left(&place);
        assert_eq!(free.now().hosts["a"].cores, 5);
    }

    #[test]
    fn slices_stay_taken_until_a_picture_after_the_answer() {
        let mut free = free(8);
        let place = free.place(NEED, &BTreeSet::new()).unwrap();
        let slices = |free: &Free| free.now().slices["e"];
        assert_eq!(slices(&free), 3);
        free.adopt(picture(8));
        assert_eq!(slices(&free), 3);
        free.given(&place);
        free.adopt(picture(8));
        assert_eq!(slices(&free), 4, "by then the picture is right");
    }

    #[test]
    fn what_was_refused_is_free_at_once() {
        let mut free = free(2);
        let place = free.place(NEED, &BTreeSet::new()).unwrap();
        free.left(&place);
        assert_eq!(*free.now(), picture(2));
    }

    #[test]
    fn waiting_for_slices_helps_only_who_lacks_slices() {
        let free = free(4);
        let draining = BTreeMap::from([(Name::new("e").unwrap(), 4)]);
        let need = |cores, gib| VmShape { cores, memory: Bytes::gib(gib) };
        assert!(free.would_fit(need(4, 9), &draining));
        assert!(!free.would_fit(need(5, 9), &draining));
        assert!(!free.would_fit(need(4, 10), &draining));
    }
}
