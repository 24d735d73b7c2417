//! Comparison of an EMC's contents with the ledger, in pieces of bounded size, so that other
//! requests do not wait. An EMC may have thousands of slices, and is not used before all of them
//! are compared.
//!
//! The device is not called meanwhile, so its contents stay as reported, and each slice is compared
//! with its current state. A fence in progress restarts the comparison.

use units::{EmcId, Epoch, SliceId, limits::OWNER_EPOCH_MAX};

use super::{
    Manager,
    devices::{Contents, DeviceLink, Grant},
};
use crate::{ledger::When, protocol::Handle};

/// Contents of a device, and the progress of their comparison.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    contents: Contents,
    phase: Phase,
    /// First slice of the next piece.
    next: SliceId,
}

/// Phases of a comparison. Each processes all slices of the EMC before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Searches for signs of another device, before any slice changes.
    Check,
    Compare,
    /// Makes the outstanding calls of the EMC, which works by then.
    Drive,
}

impl Comparison {
    fn new(mut contents: Contents, first: SliceId) -> Self {
        contents.grants.sort_by_key(|grant| grant.slice); // drivers list grants in order: this only ensures it
        contents.highest.sort_by_key(|(slice, _)| *slice);
        contents.places.sort_by_key(|(slice, _)| *slice);
        Self { contents, phase: Phase::Check, next: first }
    }

    fn grant(&self, slice: SliceId) -> Option<&Grant> {
        find(&self.contents.grants, slice, |grant| grant.slice)
    }

    fn highest(&self, slice: SliceId) -> Epoch {
        find(&self.contents.highest, slice, |(slice, _)| *slice).map_or(Epoch(0), |(_, epoch)| *epoch)
    }

    fn place(&self, slice: SliceId) -> Option<&Handle> {
        find(&self.contents.places, slice, |(slice, _)| *slice).map(|(_, place)| place)
    }
}

fn find<T>(sorted: &[T], slice: SliceId, key: impl Fn(&T) -> SliceId) -> Option<&T> {
    sorted.binary_search_by_key(&slice, key).ok().map(|at| &sorted[at])
}

impl Manager {
    /// Starts the comparison of a device's contents with the ledger.
    pub(super) fn begin_comparison(&mut self, when: When, emc: EmcId, contents: Contents) {
        let Some(first) = self.head.emc(emc).map(|entry| entry.emc.first) else { return };
        self.comparisons.insert(emc, Comparison::new(contents, first));
        self.continue_comparison(when, emc);
    }

    /// Compares the next piece of an EMC.
    pub(super) fn continue_comparisons(&mut self, when: When) {
        if let Some(emc) = self.comparisons.first_key_value().map(|(emc, _)| *emc) {
            self.continue_comparison(when, emc);
        }
    }

    /// Quarantines slices on which ledger and device differ. A device that lacks the epoch of a
    /// VM's slice is another device, or was emptied: it counts as failed, and no slice changes.
    fn continue_comparison(&mut self, when: When, emc: EmcId) {
        let Some(mut comparison) = self.comparisons.remove(&emc) else { return };
        let Some(end) = self.head.emc(emc).map(|entry| entry.emc.end()) else { return };
        let mut remaining = u32::try_from(self.piece).unwrap_or(u32::MAX);
        while remaining > 0 {
            let last = SliceId(comparison.next.0.saturating_add(remaining).min(end.0));
            let piece = || (comparison.next.0..last.0).map(SliceId);
            remaining -= last.0 - comparison.next.0;
            let result = match comparison.phase {
                Phase::Check => self.check_piece(&comparison, piece()),
                Phase::Compare => self.compare_piece(when, &comparison, piece()),
                Phase::Drive => {
                    piece().for_each(|slice| self.drive_slice(slice));
                    Ok(())
                }
            };
            if let Err(error) = result {
                return self.fail_emc(when, emc, error);
            }
            comparison.next = last;
            if last < end {
                continue;
            }
            comparison.phase = match comparison.phase {
                Phase::Check => Phase::Compare,
                Phase::Compare => {
                    self.end_comparison(emc);
                    Phase::Drive
                }
                Phase::Drive => return self.drive_fences_of_emc(when, emc),
            };
            let Some(first) = self.head.emc(emc).map(|entry| entry.emc.first) else { return };
            comparison.next = first;
        }
        self.comparisons.insert(emc, comparison);
    }

    /// Returns the evidence in a piece for another device or a damaged record.
    fn check_piece(
        &self,
        comparison: &Comparison,
        mut piece: impl Iterator<Item = SliceId>,
    ) -> Result<(), String> {
        piece.try_for_each(|slice| {
            let known = comparison.highest(slice);
            if known.0 > OWNER_EPOCH_MAX {
                return Err(format!("the device's record is damaged: it has epoch {known} of slice {slice}"));
            }
            match self.head.granted_epoch(slice).filter(|epoch| known < *epoch) {
                None => Ok(()),
                Some(epoch) => Err(format!(
                    "the device does not know epoch {epoch} of slice {slice}: it is another device or was emptied; restore \
                     its directory, or release the VMs that have slices of it"
                )),
            }
        })
    }

    fn compare_piece(
        &mut self,
        when: When,
        comparison: &Comparison,
        piece: impl Iterator<Item = SliceId> + Clone,
    ) -> Result<(), String> {
        self.check_piece(comparison, piece.clone())?; // slices may have changed since they were checked
        let granted = piece.clone().filter_map(|slice| Some(comparison.grant(slice)?.host));
        let change = self.head.decide_reserve_host_ids(granted);
        self.change(when, change);
        for slice in piece {
            let slot = self.head.slot(slice).unwrap_or_default();
            let (highest, grant) = (comparison.highest(slice), comparison.grant(slice));
            self.compare(when, slice, slot, highest, grant);
            if let Some(place) =
                comparison.place(slice).filter(|place| self.places.get(&slice) != Some(place))
            {
                self.pending_places.insert(slice, place.clone());
            }
            let granted = grant.map(|grant| (grant.epoch, &grant.handle));
            let known = self.handles.get(&slice).map(|(epoch, handle)| (*epoch, handle));
            if let Some((epoch, handle)) = granted.filter(|granted| known != Some(*granted)) {
                self.pending_handles.insert(slice, (epoch, handle.clone()));
            }
        }
        self.store_pending_handles(when);
        Ok(())
    }

    /// Ends a comparison: the EMC works.
    fn end_comparison(&mut self, emc: EmcId) {
        self.adoption_events += 1; // VMs that could not be adopted may be adoptable now
        self.devices.insert(emc, DeviceLink::up());
        self.set_emc_up(emc, true);
    }

    /// Restarts a comparison because the device has changed since it reported its contents.
    pub(super) fn repeat_comparison(&mut self, emc: EmcId) {
        if self.comparisons.get(&emc).is_some_and(|comparison| comparison.phase != Phase::Drive) {
            self.compare_emc(emc);
        }
    }

    pub(super) fn drop_comparison(&mut self, emc: EmcId) {
        self.comparisons.remove(&emc);
    }
}
