//! Slots of the existing slices, grouped by EMC. Slice IDs are never reused, so removed EMCs leave
//! gaps. The used memory is proportional to the number of existing slices.

use units::{EmcId, SliceId};

use crate::slice::Slot;

/// Slots of all EMCs, in ascending order of their first slice.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(Vec<EmcSlots>);

#[derive(Clone, Debug)]
struct EmcSlots {
    first: SliceId,
    emc: EmcId,
    slots: Vec<Slot>,
}

impl Slots {
    /// Adds the slots of a new EMC; every slot is free and has epoch 0.
    pub(super) fn add(&mut self, emc: EmcId, first: SliceId, slices: u32) {
        let at = self.0.partition_point(|other| (other.first, other.emc) < (first, emc));
        self.0.insert(at, EmcSlots { first, emc, slots: vec![Slot::default(); slices as usize] });
    }

    pub(super) fn remove(&mut self, emc: EmcId) {
        self.0.retain(|of| of.emc != emc);
    }

    /// Returns the index of a slice's EMC and the index of the slice on this EMC. Uses a binary
    /// search over at most [`units::limits::EMCS_MAX`] EMCs.
    fn find(&self, slice: SliceId) -> Option<(usize, usize)> {
        let emc = self.0.partition_point(|of| of.first <= slice).checked_sub(1)?;
        let index = (slice.0 - self.0[emc].first.0) as usize;
        (index < self.0[emc].slots.len()).then_some((emc, index))
    }

    pub(super) fn get(&self, slice: SliceId) -> Option<Slot> {
        self.find(slice).map(|(emc, index)| self.0[emc].slots[index])
    }

    pub(super) fn emc_of(&self, slice: SliceId) -> Option<EmcId> {
        self.find(slice).map(|(emc, _)| self.0[emc].emc)
    }

    /// Replaces the slot of a slice. Returns the slice's EMC and the previous slot, or `None` if
    /// the slice does not exist.
    pub(super) fn replace(&mut self, slice: SliceId, slot: Slot) -> Option<(EmcId, Slot)> {
        let (emc, index) = self.find(slice)?;
        let of = &mut self.0[emc];
        Some((of.emc, std::mem::replace(&mut of.slots[index], slot)))
    }

    /// Returns all slots with slice IDs of at least `from`, in ascending order.
    pub(super) fn iter_from(&self, from: SliceId) -> impl Iterator<Item = (SliceId, EmcId, Slot)> {
        self.0.iter().flat_map(move |EmcSlots { first, emc, slots }| {
            let skipped = from.0.saturating_sub(first.0);
            let numbered = (first.0..).zip(slots).skip(skipped as usize);
            numbered.map(move |(slice, slot)| (SliceId(slice), *emc, *slot))
        })
    }

    /// Returns the number of slots of all EMCs.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|of| of.slots.len()).sum()
    }
}
