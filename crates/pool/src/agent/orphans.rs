//! Orphaned slices: slices that an earlier instance of the agent or a failed call left open. An
//! orphaned slice that the desired state contains is opened again. Every other orphaned slice is
//! closed before the agent reports it as released. Running VMs are not affected, because their
//! slices are recorded. The host refuses to close an orphaned slice that a process still uses, such
//! as a child of a VM that has ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use units::Ns;
use units::limits::HOST_CALL_RETRY_DELAY;

use super::{Agent, Effect, HostFailure, SliceOrder, SliceStatus};
use crate::protocol::{Handle, Holding};

/// Locations that may have an orphaned slice; see [`Handle::place`]. The epoch of an orphaned slice
/// is unknown and not needed.
#[derive(Debug, Default)]
pub(super) struct OrphanedSlices(BTreeMap<Arc<str>, OrphanState>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OrphanState {
    /// Waits for the first desired state or, after a failed attempt, until the given time.
    Waiting(Option<Ns>),
    /// A call to close the orphaned slice is in progress.
    Closing,
}

impl OrphanedSlices {
    pub(super) fn new(places: Vec<Arc<str>>) -> Self {
        Self(places.into_iter().map(|place| (place, OrphanState::Waiting(None))).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that this location may have an orphaned slice.
    pub(super) fn insert(&mut self, handle: &Handle) {
        self.0.insert(Arc::clone(&handle.place), OrphanState::Waiting(None));
    }

    pub(super) fn contains(&self, handle: &Handle) -> bool {
        self.0.contains_key(&handle.place)
    }

    /// Records that this location has no orphaned slice any more.
    pub(super) fn remove(&mut self, handle: &Handle) {
        self.0.remove(&handle.place);
    }

    fn is_closing(&self, place: &str) -> bool {
        self.0.get(place) == Some(&OrphanState::Closing)
    }

    pub(super) fn next_wakeup(&self) -> Option<Ns> {
        let at = |state: &OrphanState| if let OrphanState::Waiting(at) = state { *at } else { None };
        self.0.values().filter_map(at).min()
    }

    /// Returns the locations of orphaned slices whose next step is due.
    fn due(&self, now: Ns) -> impl Iterator<Item = &Arc<str>> {
        let due = move |state: &OrphanState| matches!(state, OrphanState::Waiting(at) if at.is_none_or(|at| at <= now));
        self.0.iter().filter(move |(_, state)| due(state)).map(|(place, _)| place)
    }
}

impl Agent {
    /// Returns whether a slice must wait until the orphaned slice at its location is closed.
    pub(super) fn must_wait_for_orphan(&self, holding: Holding) -> bool {
        let handle = self.orders.get(&holding).map(SliceOrder::handle);
        handle.is_some_and(|handle| self.orphans.is_closing(&handle.place))
    }

    /// Closes the orphaned slices at locations that are not in use. Does nothing before the first
    /// desired state.
    pub(super) fn close_orphans(&mut self) {
        if self.orphans.is_empty() || !self.has_desired_state() {
            return;
        }
        let in_use = self.locations_in_use();
        for place in self.orphans.due(self.now).cloned().collect::<Vec<_>>() {
            // The calls for a desired slice also handle the orphaned slice at its location.
            let desired = in_use.contains(&place);
            let state = if desired { OrphanState::Waiting(None) } else { OrphanState::Closing };
            self.orphans.0.insert(Arc::clone(&place), state);
            if !desired {
                self.effects.push_back(Effect::CloseOrphan { place });
            }
        }
    }

    /// Returns the locations of slices that are open, are in the desired state, or belong to the
    /// record of a VM.
    fn locations_in_use(&self) -> BTreeSet<Arc<str>> {
        let desired = self.orders.iter().filter(|(holding, _)| !self.has_reportable_failure(holding));
        let ordered = desired.map(|(_, order)| order.handle());
        let open = self.slices.values().map(|status| status.handle());
        let vm_slices = self.vms.values().flat_map(|vm| vm.slices().values());
        ordered.chain(open).chain(vm_slices).map(|handle| Arc::clone(&handle.place)).collect()
    }

    /// Returns whether the agent must report a failure of the slice.
    fn has_reportable_failure(&self, holding: &Holding) -> bool {
        self.attempts.get(holding).is_some_and(|attempts| attempts.reportable_failure().is_some())
    }

    /// Returns whether the latest or current call for a slice may leave an orphaned slice.
    pub(super) fn may_leave_orphan(&self, holding: &Holding) -> bool {
        let in_progress =
            matches!(self.slices.get(holding), Some(SliceStatus::Opening(_) | SliceStatus::Scrubbing(_)));
        in_progress || self.orders.get(holding).is_some_and(|order| self.orphans.contains(order.handle()))
    }

    pub(super) fn on_orphan_closed(&mut self, place: &Arc<str>, result: Result<(), HostFailure>) {
        match result {
            Ok(()) => drop(self.orphans.0.remove(place)),
            Err(_) => {
                let again = OrphanState::Waiting(Some(self.now.after(HOST_CALL_RETRY_DELAY)));
                self.orphans.0.insert(Arc::clone(place), again);
            }
        }
        self.dirty = true;
        let has_place = |(_, order): &(&Holding, &SliceOrder)| order.handle().place == *place;
        let waiting: Vec<Holding> =
            self.orders.iter().filter(has_place).map(|(holding, _)| *holding).collect();
        waiting.into_iter().for_each(|holding| self.step(holding));
    }
}
