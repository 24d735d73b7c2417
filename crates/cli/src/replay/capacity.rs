//! What a replay believes to be free: the latest picture from the manager, less what it has asked for since. It may be a
//! little wrong while calls are under way; the manager's refusals put it right.

use std::collections::{BTreeMap, BTreeSet};

use proto::v1;
use sim::packing::{self, Capacity, Need, Placement, Room};
use units::{Bytes, Name};

use crate::Failure;

/// What is free, and for whom some of it is kept.
#[derive(Debug, Default)]
pub(super) struct Free {
    seen: Capacity,
    now: Capacity,
    holds: BTreeMap<u64, Hold>,
    next: u64,
}

#[derive(Debug)]
struct Hold {
    placement: Placement,
    /// The manager has answered: its next picture shows it.
    answered: bool,
}

/// A place that is kept for one VM until the manager's picture shows it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) placement: Placement,
    hold: u64,
}

impl Free {
    /// What is free now.
    pub(super) fn now(&self) -> &Capacity {
        &self.now
    }

    /// A newer picture.
    pub(super) fn adopt(&mut self, seen: Capacity) {
        self.seen = seen;
        self.holds.retain(|_, hold| !hold.answered);
        self.reckon();
    }

    fn reckon(&mut self) {
        self.now = self.seen.clone();
        for hold in self.holds.values() {
            self.now.take(&hold.placement);
        }
    }

    /// The best place for a VM, kept for it.
    pub(super) fn place(&mut self, need: Need, except: &BTreeSet<Name>) -> Option<Place> {
        let placement = packing::place(need, &self.now, except)?;
        self.now.take(&placement);
        let hold = self.next;
        self.next += 1;
        self.holds.insert(hold, Hold { placement: placement.clone(), answered: false });
        Some(Place { placement, hold })
    }

    /// The manager gave what was kept.
    pub(super) fn given(&mut self, place: &Place) {
        if let Some(hold) = self.holds.get_mut(&place.hold) {
            hold.answered = true;
        }
    }

    /// The manager refused.
    pub(super) fn refused(&mut self, place: &Place) {
        self.holds.remove(&place.hold);
        self.reckon();
    }

    /// Whether a VM would fit if these slices were free, too.
    pub(super) fn would_fit(&self, need: Need, draining: &BTreeMap<Name, u32>) -> bool {
        let mut later = self.now.clone();
        for (emc, slices) in draining {
            *later.slices.entry(emc.clone()).or_default() += slices;
        }
        packing::place(need, &later, &BTreeSet::new()).is_some()
    }
}

/// The manager's picture in the words of the scheduler.
pub(super) fn seen(picture: v1::Capacity) -> Result<Capacity, Failure> {
    let hosts = picture.hosts.into_iter().map(room).collect::<Result<_, _>>()?;
    let slices = picture.emcs.into_iter().map(|emc| Ok((named(emc.emc)?, emc.free_slices)));
    Ok(Capacity { hosts, slices: slices.collect::<Result<_, Failure>>()? })
}

fn room(host: v1::HostCapacity) -> Result<(Name, Room), Failure> {
    let emcs = host.emcs.into_iter().map(|emc| named(emc.emc)).collect::<Result<_, _>>()?;
    let (open, cores) = (host.schedulable, host.free_cores);
    Ok((named(host.host)?, Room { open, cores, local: Bytes::new(host.free_local_bytes), emcs }))
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

    const NEED: Need = Need { cores: 2, memory: Bytes::gib(2) };

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
    fn a_picture_from_before_the_answer_does_not_set_it_free() {
        let mut free = free(2);
        let place = free.place(NEED, &BTreeSet::new()).unwrap();
        free.adopt(picture(2));
        assert!(free.place(NEED, &BTreeSet::new()).is_none());
        free.given(&place);
        free.adopt(picture(2));
        assert!(free.place(NEED, &BTreeSet::new()).is_some(), "by then the picture is right");
    }

    #[test]
    fn what_was_refused_is_free_at_once() {
        let mut free = free(2);
        let place = free.place(NEED, &BTreeSet::new()).unwrap();
        free.refused(&place);
        assert_eq!(*free.now(), picture(2));
    }

    #[test]
    fn waiting_for_slices_helps_only_who_lacks_slices() {
        let free = free(4);
        let draining = BTreeMap::from([(Name::new("e").unwrap(), 4)]);
        let need = |cores, gib| Need { cores, memory: Bytes::gib(gib) };
        assert!(free.would_fit(need(4, 9), &draining));
        assert!(!free.would_fit(need(5, 9), &draining));
        assert!(!free.would_fit(need(4, 10), &draining));
    }
}
