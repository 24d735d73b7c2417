//! Compares an EMC's contents with the ledger. An EMC may have thousands of slices. The comparison
//! therefore runs in chunks of bounded size, so that requests do not wait. The EMC is not used
//! before all its slices are compared.
//!
//! During a comparison, the manager calls the device only for fences, so the grants remain as
//! reported. Each slice is compared with its current state in the ledger. A completed fence
//! restarts the comparison.

use units::{EmcId, Epoch, SliceId, limits::OWNER_EPOCH_MAX};

use super::{
    Manager,
    devices::{Contents, DeviceLink, Grant},
};
use crate::{ledger::When, protocol::Handle};

/// Contents of a device, and the progress of their comparison.
#[derive(Clone, Debug)]
pub(super) struct EmcComparison {
    contents: Contents,
    phase: ComparisonPhase,
    /// First slice of the next chunk of the comparison.
    next: SliceId,
}

/// Phases of a comparison. Each phase processes all slices of the EMC before the next phase begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparisonPhase {
    /// Checks that the device is the same device as before. This phase changes no slice.
    Check,
    Compare,
    /// Makes the outstanding device calls of all slices; the EMC is in use from this phase on.
    Drive,
}

impl EmcComparison {
    fn new(mut contents: Contents, first: SliceId) -> Self {
        // Drivers already list grants in this order; sorting guarantees it.
        contents.grants.sort_by_key(|grant| grant.slice);
        contents.highest.sort_by_key(|(slice, _)| *slice);
        contents.places.sort_by_key(|(slice, _)| *slice);
        Self { contents, phase: ComparisonPhase::Check, next: first }
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
    /// Starts the comparison of an EMC's contents with the ledger.
    pub(super) fn begin_comparison(&mut self, when: When, emc: EmcId, contents: Contents) {
        let Some(first) = self.head.emc(emc).map(|entry| entry.emc.first) else { return };
        self.comparisons.insert(emc, EmcComparison::new(contents, first));
        self.continue_comparison(when, emc);
    }

    /// Processes the next chunk of the first comparison in progress.
    pub(super) fn continue_comparisons(&mut self, when: When) {
        if let Some(emc) = self.comparisons.first_key_value().map(|(emc, _)| *emc) {
            self.continue_comparison(when, emc);
        }
    }

    /// Processes the next chunk of an EMC's comparison. Quarantines slices for which ledger and
    /// device differ. If the device has no record of a VM's grant, it was replaced or emptied: the
    /// EMC then counts as failed, and no slice changes.
    fn continue_comparison(&mut self, when: When, emc: EmcId) {
        let Some(mut comparison) = self.comparisons.remove(&emc) else { return };
        let Some(end) = self.head.emc(emc).map(|entry| entry.emc.end()) else { return };
        let mut remaining = u32::try_from(self.chunk_size).unwrap_or(u32::MAX);
        while remaining > 0 {
            let last = SliceId(comparison.next.0.saturating_add(remaining).min(end.0));
            let chunk = || (comparison.next.0..last.0).map(SliceId);
            remaining -= last.0 - comparison.next.0;
            let result = match comparison.phase {
                ComparisonPhase::Check => self.check_chunk(&comparison, chunk()),
                ComparisonPhase::Compare => self.compare_chunk(when, &comparison, chunk()),
                ComparisonPhase::Drive => {
                    chunk().for_each(|slice| self.advance_slice(slice));
                    Ok(())
                }
            };
            if let Err(error) = result {
                return self.mark_emc_failed(when, emc, error);
            }
            comparison.next = last;
            if last < end {
                continue;
            }
            comparison.phase = match comparison.phase {
                ComparisonPhase::Check => ComparisonPhase::Compare,
                ComparisonPhase::Compare => {
                    self.end_comparison(emc);
                    ComparisonPhase::Drive
                }
                ComparisonPhase::Drive => return self.advance_fences_of_emc(when, emc),
            };
            let Some(first) = self.head.emc(emc).map(|entry| entry.emc.first) else { return };
            comparison.next = first;
        }
        self.comparisons.insert(emc, comparison);
    }

    /// Checks a chunk of slices for evidence that the device was replaced or its record is damaged.
    /// The error describes the evidence.
    fn check_chunk(
        &self,
        comparison: &EmcComparison,
        mut chunk: impl Iterator<Item = SliceId>,
    ) -> Result<(), String> {
        chunk.try_for_each(|slice| {
            let known = comparison.highest(slice);
            if known.0 > OWNER_EPOCH_MAX {
                return Err(format!("the device's record is damaged: epoch {known} of slice {slice} is out of range; see \"Damaged records\" in docs/operations.md"));
            }
            let is_granted = |epoch| comparison.grant(slice).is_some_and(|grant| grant.epoch == epoch);
            match self.head.granted_epoch(slice) {
                Some(epoch) if known < epoch => Err(format!(
                    "the device has no record of epoch {epoch} of slice {slice}: it was replaced or emptied; restore \
                     its directory, or release the VMs that have slices of it"
                )),
                Some(epoch) if known > epoch && is_granted(epoch) => Err(format!(
                    "the device's record is damaged: slice {slice} is granted with epoch {epoch}, but its highest \
                     epoch is {known}; see \"Damaged records\" in docs/operations.md"
                )),
                _ => Ok(()),
            }
        })
    }

    fn compare_chunk(
        &mut self,
        when: When,
        comparison: &EmcComparison,
        chunk: impl Iterator<Item = SliceId> + Clone,
    ) -> Result<(), String> {
        // Slices may have changed since the check phase.
        self.check_chunk(comparison, chunk.clone())?;
        let granted = chunk.clone().filter_map(|slice| Some(comparison.grant(slice)?.host));
        let change = self.head.decide_reserve_host_ids(granted);
        self.change(when, change);
        for slice in chunk {
            let slot = self.head.slot(slice).unwrap_or_default();
            let (highest, grant) = (comparison.highest(slice), comparison.grant(slice));
            self.compare_slice(when, slice, slot, highest, grant);
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

    /// Ends a comparison and puts the EMC into use.
    fn end_comparison(&mut self, emc: EmcId) {
        // VMs that could not be adopted before may now be adopted.
        self.adoption_events += 1;
        self.devices.insert(emc, DeviceLink::up());
        self.set_emc_up(emc, true);
    }

    /// Restarts a comparison, because the device changed after it reported its contents.
    pub(super) fn repeat_comparison(&mut self, emc: EmcId) {
        if self.comparisons.get(&emc).is_some_and(|comparison| comparison.phase != ComparisonPhase::Drive) {
            self.compare_emc(emc);
        }
    }

    pub(super) fn drop_comparison(&mut self, emc: EmcId) {
        self.comparisons.remove(&emc);
    }
}
