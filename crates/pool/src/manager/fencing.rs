//! Fencing of hosts. After the intent is durable, the manager calls every EMC until all have
//! confirmed the fence. If an EMC cannot revoke access, the host's machine must be stopped. Until
//! the stop is proven, the host keeps its slices, and an alarm gives the reason.
//!
//! EMCs are independent. [`Host::unconfirmed_fences`](crate::record::Host::unconfirmed_fences) is
//! the durable list of EMCs that have not confirmed. A failed EMC without slices of the host delays
//! neither the fence nor the host's return. The manager calls this EMC when it works again. Until
//! the EMC has confirmed the fence, the host gets none of its slices.

use units::limits::FENCE_RETRY_DELAY;
use units::{EmcId, HostId, Ns, SliceId, UnixMs};

use super::{Effect, Manager, devices::DeviceCall, devices::DeviceLink, stop_attempts::StopAttempt};
use crate::{
    ledger::When,
    record::{Fence, Host},
};

impl Manager {
    /// Calls every working EMC that has not confirmed the fence of a host, once the intent is
    /// durable.
    pub(super) fn advance_fence(&mut self, when: When, host: HostId) {
        let Some(entry) = self.durable.host(host) else { return };
        let (fence, unconfirmed) = (entry.host.fence, entry.host.unconfirmed_fences.clone());
        let needs_stop = fence == (Fence::Fencing { powered_off: false });
        if !needs_stop {
            self.stop_attempts.remove_host(host);
        }
        unconfirmed.iter().for_each(|emc| self.advance_fence_at(when, *emc, host));
        self.complete_fence(when, host);
    }

    /// Completes the fence of a host if no EMC must still confirm it.
    pub(super) fn complete_fence(&mut self, when: When, host: HostId) {
        let change = self.head.decide_fence_completion(when, host);
        self.change(when, change);
    }

    /// Calls one EMC to fence a host, or schedules a stop of the host's machine.
    fn advance_fence_at(&mut self, when: When, emc: EmcId, host: HostId) {
        let Some(fence) = self.durable.host(host).map(|entry| entry.host.fence) else { return };
        // If the fence has ended, the host has restarted or reported that it is clean.
        let stopped = matches!(fence, Fence::None | Fence::Fencing { powered_off: true });
        let needs_stop = fence == (Fence::Fencing { powered_off: false });
        if (stopped || self.can_revoke(emc)) && self.needs_fence_call(emc, host, stopped) {
            self.request_fence(emc, host, stopped);
        } else if needs_stop && self.must_stop_machine(emc, host) {
            self.schedule_stop(when, emc, host);
        }
    }

    /// Schedules a stop of a host's machine for an EMC, unless an attempt is scheduled. An attempt
    /// in progress is not repeated: [`Self::stop_due_machines`] checks for it.
    fn schedule_stop(&mut self, when: When, emc: EmcId, host: HostId) {
        let retry_at = self.first_stop_attempt_time(when, host);
        match self.stop_attempts.get(emc, host) {
            None => {
                let attempt = StopAttempt { why: None, since: when.wall, retry_at };
                self.stop_attempts.insert(emc, host, attempt);
            }
            Some(StopAttempt { retry_at: Ns::NEVER, .. }) => {
                self.stop_attempts.set_retry(emc, host, retry_at);
            }
            Some(_) => {}
        }
    }

    /// Continues all fences at an EMC after its comparison with the ledger.
    pub(super) fn advance_fences_of_emc(&mut self, when: When, emc: EmcId) {
        let concerns = |host: &Host| host.unconfirmed_fences.contains(&emc);
        let hosts = self.durable.hosts().filter(|(_, entry)| concerns(&entry.host)).map(|(host, _)| host);
        hosts.collect::<Vec<_>>().into_iter().for_each(|host| self.advance_fence_at(when, emc, host));
    }

    /// Continues the fence of a host that became the holder of a slice, for example because of a
    /// comparison. The fence may now require that the host's machine is stopped.
    pub(super) fn advance_fence_of_holder(&mut self, when: When, slice: SliceId, host: HostId) {
        let Some(emc) = self.durable.emc_of(slice) else { return };
        if self.durable.host(host).is_some_and(|entry| entry.host.unconfirmed_fences.contains(&emc)) {
            self.advance_fence_at(when, emc, host);
        }
    }

    /// Returns whether the host's machine must be stopped for the fence: the EMC cannot revoke
    /// access, and the host has slices of the EMC or may have slices that a restored ledger does
    /// not contain.
    fn must_stop_machine(&self, emc: EmcId, host: HostId) -> bool {
        let may_hold = self.has_slices_on(emc, host) || self.has_not_reported(host);
        may_hold && !self.can_revoke(emc) && self.is_fence_unconfirmed(emc, host)
    }

    /// Returns whether a host has not reported since the ledger was restored.
    fn has_not_reported(&self, host: HostId) -> bool {
        self.durable.host(host).is_some_and(|entry| entry.host.must_report)
    }

    /// Returns whether an EMC has not confirmed the fence of a host, according to both the durable
    /// ledger and the pending decisions.
    fn is_fence_unconfirmed(&self, emc: EmcId, host: HostId) -> bool {
        [&self.durable, &self.head]
            .into_iter()
            .all(|ledger| ledger.host(host).is_some_and(|entry| entry.host.unconfirmed_fences.contains(&emc)))
    }

    /// Returns whether a host may reach slices of an EMC, according to the durable ledger or the
    /// pending decisions.
    fn has_slices_on(&self, emc: EmcId, host: HostId) -> bool {
        [&self.durable, &self.head].into_iter().any(|ledger| {
            let entries = ledger.host(host).zip(ledger.emc(emc));
            entries.is_some_and(|(host, emc)| host.lowest_held_slice_on(&emc.emc).is_some())
        })
    }

    /// Returns the EMCs that delay the fence of a host. These are EMCs with slices of the host, and
    /// EMCs that will reply soon. Until the host has reported after a restore, they also include
    /// EMCs that may have unrecorded slices of the host: EMCs not yet compared with the ledger, and
    /// EMCs that cannot revoke access.
    pub(super) fn emcs_delaying_fence(&self, host: HostId) -> impl Iterator<Item = EmcId> {
        let entry = self.durable.host(host).into_iter();
        let unconfirmed = entry.flat_map(|entry| entry.host.unconfirmed_fences.iter().copied());
        let restored = self.has_not_reported(host);
        let is_in_doubt = move |emc| restored && (!self.is_compared(emc) || !self.can_revoke(emc));
        let may_hold = move |emc| self.has_slices_on(emc, host) || is_in_doubt(emc);
        unconfirmed.filter(move |emc| may_hold(*emc) || self.is_fence_reply_expected(*emc))
    }

    fn is_fence_reply_expected(&self, emc: EmcId) -> bool {
        let link = self.devices.get(&emc);
        link.is_none_or(|link| link.is_starting() || (link.is_up() && self.can_revoke(emc)))
    }

    /// Returns the rack time of the first attempt to stop a machine. After a start of the manager,
    /// each agent has one lease to connect before its machine is stopped.
    fn first_stop_attempt_time(&self, when: When, host: HostId) -> Ns {
        let unconnected = self.links.get(&host).filter(|link| !link.has_connected());
        unconnected.map_or(when.now, |link| link.lease_end(self.settings.lease_ttl))
    }

    /// Starts the stop attempts that are due. A machine with a connected agent is not stopped,
    /// because a report of the agent will prove that the host is clean.
    pub(super) fn stop_due_machines(&mut self, when: When) {
        let emcs = self.next_stop_attempts().filter(|(_, at)| *at <= when.now).map(|(emc, _)| emc);
        for emc in emcs.collect::<Vec<_>>() {
            let due = self.stop_attempts.attempts(emc).take_while(|(at, _)| *at <= when.now);
            for host in due.map(|(_, host)| host).collect::<Vec<_>>() {
                // The attempt is now in progress or no longer needed.
                self.stop_attempts.set_retry(emc, host, Ns::NEVER);
                if self.must_stop_machine(emc, host) && self.needs_fence_call(emc, host, false) {
                    self.request_fence(emc, host, false);
                }
            }
        }
    }

    /// Returns the rack time of the next attempt to stop a machine.
    pub(super) fn next_machine_stop(&self) -> Option<Ns> {
        self.next_stop_attempts().map(|(_, at)| at).min()
    }

    /// Returns each working EMC with scheduled stops of machines, and the rack time of the next
    /// attempt.
    fn next_stop_attempts(&self) -> impl Iterator<Item = (EmcId, Ns)> {
        let next = self.stop_attempts.earliest();
        next.filter(|(emc, _)| self.devices.get(emc).is_some_and(DeviceLink::is_up))
    }

    fn can_revoke(&self, emc: EmcId) -> bool {
        self.durable.emc(emc).is_some_and(|entry| entry.emc.can_revoke())
    }

    /// Returns whether an EMC works and must be called to fence a host. A second call is needed
    /// once the host is known to be powered off, because the EMC then no longer has to stop the
    /// machine.
    fn needs_fence_call(&self, emc: EmcId, host: HostId, powered_off: bool) -> bool {
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        let is_called = self.fence_calls.get(&(emc, host)).is_some_and(|before| *before || !powered_off);
        up && !is_called && self.is_fence_unconfirmed(emc, host)
    }

    fn request_fence(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        self.fence_calls.insert((emc, host), powered_off);
        self.effects.push_back(Effect::Device(emc, DeviceCall::Fence { host, powered_off }));
    }

    /// Removes a fence call after its reply. If two calls are in progress, the reply to the first
    /// call leaves the second call in progress.
    pub(super) fn on_fence_reply(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        if self.fence_calls.get(&(emc, host)).is_some_and(|is_called| powered_off || !*is_called) {
            self.fence_calls.remove(&(emc, host));
        }
    }

    pub(super) fn on_host_fenced(&mut self, when: When, emc: EmcId, host: HostId) {
        self.stop_attempts.remove(emc, host);
        let change = self.head.decide_fence_confirmation(when, host, emc);
        self.change(when, change);
    }

    /// Records that the machine was not stopped, so the host keeps its slices. Does nothing if a
    /// stop is no longer needed.
    pub(super) fn on_stop_failed(&mut self, when: When, emc: EmcId, host: HostId, why: String) {
        let fence = self.head.host(host).map(|entry| entry.host.fence);
        if fence == Some(Fence::Fencing { powered_off: false }) {
            let since = self.stop_attempts.get(emc, host).map_or(when.wall, |before| before.since);
            let retry_at = when.now.after(FENCE_RETRY_DELAY);
            self.stop_attempts.insert(emc, host, StopAttempt { why: Some(why), since, retry_at });
            self.changed = true;
        }
    }

    /// Returns the time since which a host's machine must be stopped, wall clock, if it must be
    /// stopped. A later fence of the same host has a different time.
    pub fn stop_start_time(&self, host: HostId) -> Option<UnixMs> {
        self.stop_attempts.attempts_of_host(host).next().map(|(_, attempt)| attempt.since)
    }

    /// If a stop of the host's machine failed, returns the error and the time since which the
    /// machine must be stopped.
    pub(super) fn fence_obstacle_since(&self, host: HostId) -> Option<(&str, UnixMs)> {
        let mut of_host =
            self.stop_attempts.attempts_of_host(host).filter(|(emc, _)| self.must_stop_machine(*emc, host));
        of_host.find_map(|(_, attempt)| Some((attempt.why.as_deref()?, attempt.since)))
    }
}
