//! Orphaned slices: resources of slices that were left open by an earlier instance of the agent or
//! by a failed call. An orphan that the desired state contains is opened again. Every other orphan
//! is closed, even if the agent is releasing its slice, before the agent reports the slice as
//! released. Running VMs are not affected, because the memory of every process is recorded. A host
//! does not close an orphan that a process still uses, such as a child of a VM that ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use units::limits::HOST_RETRY;
use units::{DesiredVersion, Ns};

use super::{Agent, Effect, HostFailure, Order, SliceStatus};
use crate::protocol::{Handle, Holding};

/// Possible orphans by their location; see [`Handle::place`]. Epochs of an earlier instance are
/// irrelevant.
#[derive(Debug, Default)]
pub(super) struct OrphanedSlices(BTreeMap<Arc<str>, State>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for a desired state or, after a failed attempt, until the given time.
    Waiting(Option<Ns>),
    /// A call to close the orphan is in progress.
    Clearing,
}

impl OrphanedSlices {
    pub(super) fn new(places: Vec<Arc<str>>) -> Self {
        Self(places.into_iter().map(|place| (place, State::Waiting(None))).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that this location may have an orphan.
    pub(super) fn insert(&mut self, handle: &Handle) {
        self.0.insert(Arc::clone(&handle.place), State::Waiting(None));
    }

    pub(super) fn contains(&self, handle: &Handle) -> bool {
        self.0.contains_key(&handle.place)
    }

    /// Records that the location has no orphan any more.
    pub(super) fn remove(&mut self, handle: &Handle) {
        self.0.remove(&handle.place);
    }

    fn is_clearing(&self, place: &str) -> bool {
        self.0.get(place) == Some(&State::Clearing)
    }

    pub(super) fn next_wakeup(&self) -> Option<Ns> {
        let at = |state: &State| if let State::Waiting(at) = state { *at } else { None };
        self.0.values().filter_map(at).min()
    }

    /// Returns the locations of orphans that may be processed now.
    fn due(&self, now: Ns) -> impl Iterator<Item = &Arc<str>> {
        let due = move |state: &State| matches!(state, State::Waiting(at) if at.is_none_or(|at| at <= now));
        self.0.iter().filter(move |(_, state)| due(state)).map(|(place, _)| place)
    }
}

impl Agent {
    /// Returns whether a slice must wait until the orphan at its location is closed.
    pub(super) fn is_being_cleared(&self, holding: Holding) -> bool {
        let handle = self.orders.get(&holding).map(Order::handle);
        handle.is_some_and(|handle| self.orphans.is_clearing(&handle.place))
    }

    /// Closes the orphans at locations that are not in use. Does nothing before the first desired
    /// state.
    pub(super) fn close_orphans(&mut self) {
        if self.orphans.is_empty() || self.newest == DesiredVersion::default() {
            return;
        }
        let in_use = self.places_in_use();
        for place in self.orphans.due(self.now).cloned().collect::<Vec<_>>() {
            // Calls for a desired slice also handle its orphan.
            let desired = in_use.contains(&place);
            let state = if desired { State::Waiting(None) } else { State::Clearing };
            self.orphans.0.insert(Arc::clone(&place), state);
            if !desired {
                self.effects.push_back(Effect::CloseOrphan { place });
            }
        }
    }

    /// Returns the locations of slices that are open or in the desired state, and of slices that a
    /// VM has or had.
    fn places_in_use(&self) -> BTreeSet<Arc<str>> {
        let desired = self.orders.iter().filter(|(holding, _)| !self.has_reportable_failure(holding));
        let ordered = desired.map(|(_, order)| order.handle());
        let open = self.slices.values().map(|status| status.handle());
        let vm_slices = self.vms.values().flat_map(|vm| vm.slices().values());
        ordered.chain(open).chain(vm_slices).map(|handle| Arc::clone(&handle.place)).collect()
    }

    /// Returns whether the agent has a failure of the slice to report.
    fn has_reportable_failure(&self, holding: &Holding) -> bool {
        self.attempts.get(holding).is_some_and(|attempts| attempts.reportable().is_some())
    }

    /// Returns whether the last or the current attempt for a slice may have left an orphan.
    pub(super) fn may_leave_remains(&self, holding: &Holding) -> bool {
        let in_progress =
            matches!(self.slices.get(holding), Some(SliceStatus::Opening(_) | SliceStatus::Scrubbing(_)));
        in_progress || self.orders.get(holding).is_some_and(|order| self.orphans.contains(order.handle()))
    }

    pub(super) fn on_orphan_closed(&mut self, place: &Arc<str>, result: Result<(), HostFailure>) {
        match result {
            Ok(()) => drop(self.orphans.0.remove(place)),
            Err(_) => {
                let again = State::Waiting(Some(self.now.after(HOST_RETRY)));
                self.orphans.0.insert(Arc::clone(place), again);
            }
        }
        self.dirty = true;
        let concerned = |(_, order): &(&Holding, &Order)| order.handle().place == *place;
        let waiting: Vec<Holding> =
            self.orders.iter().filter(concerned).map(|(holding, _)| *holding).collect();
        waiting.into_iter().for_each(|holding| self.step(holding));
    }
}
