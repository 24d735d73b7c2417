//! Remains of slices that are not open, left by an earlier instance of the agent or by a failed
//! call. Remains in the desired state are adopted. Others are closed, also for a slice that the
//! agent releases, before the manager receives a report of it. No VM is affected, because the
//! memory of every process is recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use units::limits::HOST_RETRY;
use units::{DesiredVersion, Ns};

use super::{Agent, Effect, HostFailure, Order, SliceStatus};
use crate::protocol::{Handle, Holding};

/// Key of remains, by [`Handle::place`]: the epochs of an earlier instance do not matter.
#[derive(Debug, Default)]
pub(super) struct OrphanedSlices(BTreeMap<Arc<str>, State>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for a desired state, or for a time after a failed attempt.
    Waiting(Option<Ns>),
    /// A call is in progress.
    Clearing,
}

impl OrphanedSlices {
    pub(super) fn new(places: Vec<Arc<str>>) -> Self {
        Self(places.into_iter().map(|place| (place, State::Waiting(None))).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that there may be remains at a location.
    pub(super) fn insert(&mut self, handle: &Handle) {
        self.0.insert(Arc::clone(&handle.place), State::Waiting(None));
    }

    pub(super) fn contains(&self, handle: &Handle) -> bool {
        self.0.contains_key(&handle.place)
    }

    /// Records that remains at a location are adopted or closed.
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

    /// Returns the remains that may be processed now.
    fn due(&self, now: Ns) -> impl Iterator<Item = &Arc<str>> {
        let due = move |state: &State| matches!(state, State::Waiting(at) if at.is_none_or(|at| at <= now));
        self.0.iter().filter(move |(_, state)| due(state)).map(|(place, _)| place)
    }
}

impl Agent {
    /// Returns whether a slice has to wait until its remains are closed.
    pub(super) fn is_being_cleared(&self, holding: Holding) -> bool {
        let handle = self.orders.get(&holding).map(Order::handle);
        handle.is_some_and(|handle| self.orphans.is_clearing(&handle.place))
    }

    /// Closes remains outside the desired state. Before the first desired state nothing is closed.
    pub(super) fn close_orphans(&mut self) {
        if self.orphans.is_empty() || self.newest == DesiredVersion::default() {
            return;
        }
        let in_use = self.places_in_use();
        for place in self.orphans.due(self.now).cloned().collect::<Vec<_>>() {
            let desired = in_use.contains(&place); // calls for the slice itself handle it then
            let state = if desired { State::Waiting(None) } else { State::Clearing };
            self.orphans.0.insert(Arc::clone(&place), state);
            if !desired {
                self.effects.push_back(Effect::CloseOrphan { place });
            }
        }
    }

    /// Returns the locations of slices in the desired state, of open slices, and of slices that a
    /// VM has or had.
    fn places_in_use(&self) -> BTreeSet<Arc<str>> {
        let desired = self.orders.iter().filter(|(holding, _)| !self.has_reportable_failure(holding));
        let ordered = desired.map(|(_, order)| order.handle());
        let open = self.slices.values().map(|status| status.handle());
        let vm_slices = self.vms.values().flat_map(|vm| vm.slices().values());
        ordered.chain(open).chain(vm_slices).map(|handle| Arc::clone(&handle.place)).collect()
    }

    /// Returns whether to report the failure of a slice to the manager.
    fn has_reportable_failure(&self, holding: &Holding) -> bool {
        self.attempts.get(holding).is_some_and(|attempts| attempts.reportable().is_some())
    }

    /// Returns whether a failed slice may have left remains, from the last attempt or the current
    /// one.
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
