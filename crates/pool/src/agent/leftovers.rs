//! What is left on the machine of slices that are not open: by a predecessor of this agent, or by a call that failed halfway.
//! What an order wants is taken over as it is; the rest is closed, also of a slice that the agent gives up, and only then is
//! the manager told of that. Nobody loses anything by it, as whoever was handed a slice is on record.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use units::limits::HOST_RETRY;
use units::{DesiredVersion, Ns};

use super::{Agent, Effect, HostFailure, Order, Stand};
use crate::protocol::{Handle, Holding};

/// By [`Handle::place`]: a predecessor's epochs are nobody's business.
#[derive(Debug, Default)]
pub(super) struct Leftovers(BTreeMap<Arc<str>, State>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Until an order says what is to become of it, or until a moment if that was tried and failed.
    Waiting(Option<Ns>),
    /// A call is under way.
    Clearing,
}

impl Leftovers {
    pub(super) fn new(places: Vec<Arc<str>>) -> Self {
        Self(places.into_iter().map(|place| (place, State::Waiting(None))).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// There may be something.
    pub(super) fn note(&mut self, handle: &Handle) {
        self.0.insert(Arc::clone(&handle.place), State::Waiting(None));
    }

    pub(super) fn has(&self, handle: &Handle) -> bool {
        self.0.contains_key(&handle.place)
    }

    /// Whatever was left there is somebody's now, or gone.
    pub(super) fn settle(&mut self, handle: &Handle) {
        self.0.remove(&handle.place);
    }

    fn is_clearing(&self, place: &str) -> bool {
        self.0.get(place) == Some(&State::Clearing)
    }

    pub(super) fn next_wakeup(&self) -> Option<Ns> {
        let at = |state: &State| if let State::Waiting(at) = state { *at } else { None };
        self.0.values().filter_map(at).min()
    }

    /// Those that may be looked at now.
    fn due(&self, now: Ns) -> impl Iterator<Item = &Arc<str>> {
        let due = move |state: &State| matches!(state, State::Waiting(at) if at.is_none_or(|at| at <= now));
        self.0.iter().filter(move |(_, state)| due(state)).map(|(place, _)| place)
    }
}

impl Agent {
    /// Whether a slice has to wait until what was left of it is closed.
    pub(super) fn is_being_cleared(&self, holding: Holding) -> bool {
        let handle = self.orders.get(&holding).map(Order::handle);
        handle.is_some_and(|handle| self.leftovers.is_clearing(&handle.place))
    }

    /// Closes what no order names. Before the first order nobody knows what that is.
    pub(super) fn clear_leftovers(&mut self) {
        if self.leftovers.is_empty() || self.newest == DesiredVersion::default() {
            return;
        }
        let kept = self.places_in_use();
        for place in self.leftovers.due(self.now).cloned().collect::<Vec<_>>() {
            let wanted = kept.contains(&place); // then the calls of its own see to it
            let state = if wanted { State::Waiting(None) } else { State::Clearing };
            self.leftovers.0.insert(Arc::clone(&place), state);
            if !wanted {
                self.effects.push_back(Effect::Clear { place });
            }
        }
    }

    /// Where there is a slice that an order says something about, that is open, or that a VM has or had.
    fn places_in_use(&self) -> BTreeSet<Arc<str>> {
        let wanted = self.orders.iter().filter(|(holding, _)| !self.is_given_up(holding));
        let ordered = wanted.map(|(_, order)| order.handle());
        let open = self.slices.values().map(|stand| stand.handle());
        let handed = self.vms.values().flat_map(|vm| vm.slices().values());
        ordered.chain(open).chain(handed).map(|handle| Arc::clone(&handle.place)).collect()
    }

    /// Whether the manager is to hear that a slice cannot be had.
    fn is_given_up(&self, holding: &Holding) -> bool {
        self.attempts.get(holding).is_some_and(|attempts| attempts.told().is_some())
    }

    /// Whether something may be there of a slice that could not be had: of the last attempt, or of the one under way.
    pub(super) fn leaves_something(&self, holding: &Holding) -> bool {
        let tries = matches!(self.slices.get(holding), Some(Stand::Opening(_) | Stand::Scrubbing(_)));
        tries || self.orders.get(holding).is_some_and(|order| self.leftovers.has(order.handle()))
    }

    pub(super) fn on_cleared(&mut self, place: &Arc<str>, result: Result<(), HostFailure>) {
        match result {
            Ok(()) => drop(self.leftovers.0.remove(place)),
            Err(_) => {
                let again = State::Waiting(Some(self.now.after(HOST_RETRY)));
                self.leftovers.0.insert(Arc::clone(place), again);
            }
        }
        self.dirty = true;
        let named = |(_, order): &(&Holding, &Order)| order.handle().place == *place;
        let waiting: Vec<Holding> = self.orders.iter().filter(named).map(|(holding, _)| *holding).collect();
        waiting.into_iter().for_each(|holding| self.step(holding));
    }
}
