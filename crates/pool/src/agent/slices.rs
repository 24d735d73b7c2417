//! Slices of a host. Each slice has at most one call in progress. It is released before a later
//! owner uses it. Failed calls are repeated.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use units::limits::{HOST_CALL_RETRY_DELAY, HOST_FAILURES_BEFORE_REPORT, SCRUBS_PER_HOST_MAX};
use units::{Epoch, Ns, ReservationId, SliceId};

use super::{Agent, Effect, HostFailure, SliceOutcome};
use crate::protocol::{
    DesiredRelease, DesiredState, DesiredVm, FailureReason, Handle, Holding, epochs_of, take_entries_of_slice,
};

/// Desired state of one slice, from the manager's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SliceOrder {
    Online(ReservationId, Handle),
    Release(DesiredRelease),
    Scrub(Handle),
}

/// State of one open slice on this host; closed slices have no state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SliceStatus {
    Opening(Handle),
    Online(Handle),
    Closing(Handle),
    Scrubbing(Handle),
}

impl SliceStatus {
    pub(super) fn handle(&self) -> &Handle {
        match self {
            Self::Opening(handle)
            | Self::Online(handle)
            | Self::Closing(handle)
            | Self::Scrubbing(handle) => handle,
        }
    }
}

/// Failed attempts of the current operation on a slice.
#[derive(Clone, Debug)]
pub(super) struct FailedAttempts {
    count: u32,
    failure: HostFailure,
    /// Time of the next attempt; `None` if the slice was not zeroed, because this failure is not
    /// retried.
    pub(super) next: Option<Ns>,
}

impl FailedAttempts {
    /// Returns the failure if it must be reported: it is not retried, or it occurred repeatedly.
    pub(super) fn reportable_failure(&self) -> Option<&HostFailure> {
        (self.next.is_none() || self.count >= HOST_FAILURES_BEFORE_REPORT).then_some(&self.failure)
    }
}

impl Agent {
    /// Applies a desired state, which is complete or contains only changes.
    pub(super) fn apply_desired_state(&mut self, desired: DesiredState) {
        // The start or end of a fence affects every slice.
        let affects_all = desired.base.is_none() || desired.fenced != self.fenced;
        let mut affected = self.affected_slices(&desired);
        let mut before = BTreeMap::new();
        if desired.base.is_none() {
            before = std::mem::take(&mut self.orders);
            self.desired_vms.clear();
        }
        affected.iter().for_each(|slice| before.extend(take_entries_of_slice(&mut self.orders, *slice)));
        if affects_all {
            let known = self.orders.keys().chain(before.keys());
            // Includes slices of ended VMs, because a child process may still use them.
            let present = self.slices.keys().chain(self.slice_vms.keys());
            affected.extend(known.chain(present).map(|holding| holding.slice));
        }
        self.fenced = desired.fenced;
        for (id, vm) in &desired.vms {
            let order =
                |(holding, handle): (&Holding, &Handle)| (*holding, SliceOrder::Online(*id, handle.clone()));
            self.orders.extend(vm.slices.iter().map(order));
        }
        self.orders
            .extend(desired.scrub.into_iter().map(|(holding, handle)| (holding, SliceOrder::Scrub(handle))));
        self.orders.extend(
            desired.release.into_iter().map(|(holding, release)| (holding, SliceOrder::Release(release))),
        );
        desired.removals.vms.iter().for_each(|id| drop(self.desired_vms.remove(id)));
        self.desired_vms.extend(desired.vms);
        self.drop_call_results(&before, &affected);
        self.reconcile_slices(&affected);
    }

    /// Returns the slices that the message contains, and the previous slices of the VMs that it
    /// contains.
    fn affected_slices(&self, desired: &DesiredState) -> BTreeSet<SliceId> {
        let held = |vm: &DesiredVm| vm.slices.keys().map(|h| h.slice).collect::<Vec<_>>();
        let changed = desired.removals.vms.iter().chain(desired.vms.keys());
        let before = changed.filter_map(|id| self.desired_vms.get(id)).flat_map(held);
        desired.slices().chain(before).collect()
    }

    /// Removes results of calls that the desired state no longer requires. Until then, every report
    /// repeats them. A failure to close a slice that is not in the desired state remains while a
    /// fence or a later owner requires that the slice is closed.
    fn drop_call_results(&mut self, before: &BTreeMap<Holding, SliceOrder>, affected: &BTreeSet<SliceId>) {
        let affected = self.attempts.keys().filter(|holding| affected.contains(&holding.slice)).copied();
        let affected: Vec<(Holding, bool)> = affected.map(|h| (h, self.must_release(h).is_some())).collect();
        let orders = &self.orders;
        self.released.retain(|holding| matches!(orders.get(holding), Some(SliceOrder::Release(_))));
        self.scrubbed.retain(|holding, _| matches!(orders.get(holding), Some(SliceOrder::Scrub(_))));
        self.scrubs_waiting.retain(|holding| matches!(orders.get(holding), Some(SliceOrder::Scrub(_))));
        let kind = |order: &SliceOrder| std::mem::discriminant(order);
        for (holding, must_release) in affected {
            let requested = orders.get(&holding).map(kind);
            if requested != before.get(&holding).map(kind) || (requested.is_none() && !must_release) {
                self.attempts.remove(&holding);
            }
        }
    }

    /// Starts the calls that change the observed state into the desired state. Releases start
    /// before slices are opened or scrubbed.
    fn reconcile_slices(&mut self, affected: &BTreeSet<SliceId>) {
        let (mut releases, mut acquisitions) = (Vec::new(), Vec::new());
        for slice in affected {
            releases.extend(self.slices.range(epochs_of(*slice)).map(|(holding, _)| *holding));
            releases.extend(self.slice_vms.range(epochs_of(*slice)).map(|(holding, _)| *holding));
            for (holding, order) in self.orders.range(epochs_of(*slice)) {
                if order.is_release_order() { releases.push(*holding) } else { acquisitions.push(*holding) }
            }
        }
        releases.into_iter().for_each(|holding| self.release_slice(holding));
        acquisitions.into_iter().for_each(|holding| self.acquire_slice(holding));
    }

    pub(super) fn is_online(&self, holding: Holding) -> bool {
        matches!(self.slices.get(&holding), Some(SliceStatus::Online(_)))
    }

    /// Starts the call that the desired state of a slice requires, if it can start now.
    pub(super) fn step(&mut self, holding: Holding) {
        self.release_slice(holding);
        self.acquire_slice(holding);
    }

    /// Starts to close a slice that the host must release, if no running VM uses the slice or the
    /// release is forced.
    fn release_slice(&mut self, holding: Holding) {
        let Some(force) = self.must_release(holding) else { return };
        if self.released.contains(&holding)
            || self.is_slice_blocked(holding)
            || (self.is_in_use(holding) && !force)
        {
            return;
        }
        let on_record = self.recorded_handle(holding);
        if !self.slices.contains_key(&holding)
            && on_record.as_ref().is_some_and(|old_handle| self.is_reassigned(holding, old_handle))
        {
            return self.remove_from_record(holding);
        }
        let verify = !force && on_record.is_some();
        let known = on_record.or_else(|| Some(self.orders.get(&holding)?.handle().clone()));
        let handle = match (self.slices.get(&holding), known) {
            (Some(SliceStatus::Online(handle)), _) => handle.clone(),
            // A call is in progress.
            (Some(_), _) => return,
            // The slice belonged to an ended VM, or an earlier instance left it open.
            (None, Some(handle)) => handle,
            // The slice is closed, and its location is unknown.
            (None, None) => return,
        };
        self.slices.insert(holding, SliceStatus::Closing(handle.clone()));
        self.calls += 1;
        self.effects.push_back(Effect::Offline { holding, handle, verify });
    }

    /// Returns `Some` if the host must release a slice; the value states whether the release is
    /// forced.
    fn must_release(&self, holding: Holding) -> Option<bool> {
        match self.orders.get(&holding) {
            Some(SliceOrder::Release(release)) => Some(release.force),
            Some(SliceOrder::Online(..) | SliceOrder::Scrub(_)) => None,
            None => (self.fenced || self.has_later_owner(holding)).then_some(false),
        }
    }

    /// Returns whether the desired state requires that the host releases a slice.
    pub(super) fn is_release_ordered(&self, holding: Holding) -> bool {
        matches!(self.orders.get(&holding), Some(SliceOrder::Release(_)))
    }

    /// Returns whether the desired state contains the slice with a later epoch, so that the
    /// ownership under this epoch has ended.
    fn has_later_owner(&self, holding: Holding) -> bool {
        self.orders.range(later_holdings(holding)).next().is_some()
    }

    /// Returns whether a later owner of the slice has or had the memory at the same location. The
    /// memory then no longer belongs to the recorded VM.
    fn is_reassigned(&self, holding: Holding, old_handle: &Handle) -> bool {
        let ordered = self.orders.range(later_holdings(holding)).map(|(_, order)| order.handle().clone());
        let with_vms = self
            .slice_vms
            .range(later_holdings(holding))
            .filter_map(|(holding, _)| self.recorded_handle(*holding));
        ordered.chain(with_vms).any(|handle| handle.place == old_handle.place)
    }

    fn acquire_slice(&mut self, holding: Holding) {
        if self.slices.contains_key(&holding) || self.is_slice_blocked(holding) {
            return;
        }
        match self.orders.get(&holding).cloned() {
            Some(SliceOrder::Online(reservation, handle)) if !self.has_released_memory(reservation) => {
                self.open(holding, handle);
            }
            Some(SliceOrder::Scrub(handle)) if !self.scrubbed.contains_key(&holding) => {
                self.scrub(holding, handle)
            }
            _ => {}
        }
    }

    /// Starts to open a slice for a VM.
    pub(super) fn open(&mut self, holding: Holding, handle: Handle) {
        let check_zero = self.recorded_handle(holding).is_none();
        self.slices.insert(holding, SliceStatus::Opening(handle.clone()));
        self.calls += 1;
        self.effects.push_back(Effect::Online { holding, handle, check_zero });
    }

    fn scrub(&mut self, holding: Holding, handle: Handle) {
        if self.scrubs_running >= SCRUBS_PER_HOST_MAX {
            self.scrubs_waiting.insert(holding);
            return;
        }
        self.scrubs_waiting.remove(&holding);
        self.scrubs_running += 1;
        self.slices.insert(holding, SliceStatus::Scrubbing(handle.clone()));
        self.effects.push_back(Effect::Scrub { holding, handle });
    }

    /// Handles the result of a call and starts the next call for the slice. Ignores unexpected
    /// results.
    pub(super) fn on_call_done(&mut self, holding: Holding, result: Result<SliceOutcome, HostFailure>) {
        let Some(status) = self.slices.get(&holding).cloned() else { return };
        let short = matches!(status, SliceStatus::Opening(_) | SliceStatus::Closing(_));
        match (status, result) {
            (SliceStatus::Opening(handle), Ok(SliceOutcome::Onlined)) => {
                self.on_slice_onlined(holding, handle)
            }
            (SliceStatus::Closing(handle), Ok(SliceOutcome::Offlined)) => {
                self.on_slice_offlined(holding, &handle)
            }
            (SliceStatus::Scrubbing(handle), Ok(SliceOutcome::Scrubbed(scrubbed)))
                if scrubbed.verified >= units::SLICE =>
            {
                self.on_slice_scrubbed(holding, &handle, scrubbed);
            }
            (status @ SliceStatus::Scrubbing(_), Ok(SliceOutcome::Scrubbed(scrubbed))) => {
                let message = format!("verified {} of {}", scrubbed.verified, units::SLICE);
                self.on_slice_call_failed(
                    holding,
                    &status,
                    HostFailure { reason: FailureReason::Host, message },
                );
            }
            (SliceStatus::Online(_), _) | (_, Ok(_)) => return,
            (status, Err(failure)) => self.on_slice_call_failed(holding, &status, failure),
        }
        self.calls -= usize::from(short);
        self.dirty = true;
        self.step(holding);
    }

    fn on_slice_onlined(&mut self, holding: Holding, handle: Handle) {
        self.attempts.remove(&holding);
        self.orphans.remove(&handle);
        self.slices.insert(holding, SliceStatus::Online(handle));
        self.newly_online.insert(holding);
        if let Some(id) = self.slice_vms.get(&holding).copied() {
            self.reconcile_rehome(id);
        }
    }

    /// Handles a failed call, which may have left an orphaned slice.
    fn on_slice_call_failed(&mut self, holding: Holding, status: &SliceStatus, failure: HostFailure) {
        match status {
            SliceStatus::Closing(handle) => {
                drop(self.slices.insert(holding, SliceStatus::Online(handle.clone())))
            }
            SliceStatus::Opening(handle) | SliceStatus::Scrubbing(handle) => {
                self.slices.remove(&holding);
                self.orphans.insert(handle);
            }
            SliceStatus::Online(_) => {}
        }
        self.record_failure(holding, status, failure);
        if matches!(status, SliceStatus::Scrubbing(_)) {
            self.start_waiting_scrubs();
        }
    }

    fn on_slice_offlined(&mut self, holding: Holding, handle: &Handle) {
        self.attempts.remove(&holding);
        self.orphans.remove(handle);
        self.slices.remove(&holding);
        self.remove_from_record(holding);
        self.report_released_slice(holding);
    }

    fn report_released_slice(&mut self, holding: Holding) {
        if self.is_release_ordered(holding) {
            self.released.insert(holding);
        }
    }

    fn on_slice_scrubbed(
        &mut self,
        holding: Holding,
        handle: &Handle,
        scrubbed: crate::protocol::ScrubReport,
    ) {
        self.attempts.remove(&holding);
        self.slices.remove(&holding);
        self.orphans.remove(handle);
        if matches!(self.orders.get(&holding), Some(SliceOrder::Scrub(_))) {
            self.scrubbed.insert(holding, scrubbed);
        }
        self.start_waiting_scrubs();
    }

    fn start_waiting_scrubs(&mut self) {
        self.scrubs_running -= 1;
        while self.scrubs_running < SCRUBS_PER_HOST_MAX
            && let Some(next) = self.scrubs_waiting.pop_first()
        {
            self.acquire_slice(next);
        }
    }

    /// Records a failure if the desired state still requires the failed operation.
    fn record_failure(&mut self, holding: Holding, failed: &SliceStatus, failure: HostFailure) {
        let requested = match failed {
            SliceStatus::Opening(_) => matches!(self.orders.get(&holding), Some(SliceOrder::Online(..))),
            SliceStatus::Scrubbing(_) => matches!(self.orders.get(&holding), Some(SliceOrder::Scrub(_))),
            SliceStatus::Closing(_) | SliceStatus::Online(_) => self.must_release(holding).is_some(),
        };
        if !requested {
            return;
        }
        let count = self.attempts.get(&holding).map_or(1, |before| before.count.saturating_add(1));
        let next = (failure.reason == FailureReason::Host).then(|| self.now.after(HOST_CALL_RETRY_DELAY));
        self.attempts.insert(holding, FailedAttempts { count, failure, next });
    }

    /// Returns whether no call for the slice may start now.
    fn is_slice_blocked(&self, holding: Holding) -> bool {
        self.must_wait_for_orphan(holding) || self.has_slice_failed(holding)
    }

    fn has_slice_failed(&self, holding: Holding) -> bool {
        self.attempts.get(&holding).is_some_and(|attempts| match attempts.next {
            Some(at) => self.now < at,
            // A slice that was not zeroed may be released, but is not opened again.
            None => self.must_release(holding).is_none(),
        })
    }

    pub(super) fn retry_failed_calls(&mut self) {
        let due = self.attempts.iter().filter(|(_, a)| a.next.is_some_and(|at| at <= self.now));
        for holding in due.map(|(holding, _)| *holding).collect::<Vec<_>>() {
            self.step(holding);
            if let Some(attempts) = self.attempts.get_mut(&holding) {
                // If no call could start, the attempt must not remain due.
                attempts.next = Some(self.now.after(HOST_CALL_RETRY_DELAY));
            }
        }
    }
}

fn later_holdings(Holding { slice, epoch }: Holding) -> RangeInclusive<Holding> {
    Holding { slice, epoch: epoch.next() }..=Holding { slice, epoch: Epoch(u64::MAX) }
}

impl SliceOrder {
    /// Returns the location of the slice on the host.
    pub(super) fn handle(&self) -> &Handle {
        match self {
            Self::Online(_, handle) | Self::Scrub(handle) => handle,
            Self::Release(release) => &release.handle,
        }
    }

    fn is_release_order(&self) -> bool {
        matches!(self, Self::Release(_))
    }
}
