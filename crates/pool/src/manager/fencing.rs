//! Fencing: once the intent is durable, every device is called until all have confirmed. For a
//! device that cannot revoke access, the machine is stopped; until that is certain, the host keeps
//! its slices, and an alarm gives the reason.
//!
//! EMCs are independent. [`Host::unconfirmed_fences`](crate::record::Host::unconfirmed_fences) is
//! the durable list of EMCs that have not confirmed. A failed EMC without slices of the host delays
//! neither the fence nor the host's return: it is called when it works again, and until it has
//! confirmed, it grants the host nothing.

use units::limits::FENCE_RETRY;
use units::{EmcId, HostId, Ns, SliceId, UnixMs};

use super::{Effect, Manager, devices::DeviceCall, devices::DeviceLink, stop_attempts::StopAttempt};
use crate::{
    ledger::When,
    record::{Fence, Host},
};

impl Manager {
    /// Fences a host at every working device that has yet to confirm, once the intent is durable.
    pub(super) fn drive_fence(&mut self, when: When, host: HostId) {
        let Some(entry) = self.durable.host(host) else { return };
        let (fence, unconfirmed) = (entry.host.fence, entry.host.unconfirmed_fences.clone());
        let needs_stop = fence == (Fence::Fencing { powered_off: false });
        if !needs_stop {
            self.stop_attempts.remove_host(host);
        }
        unconfirmed.iter().for_each(|emc| self.drive_fence_at(when, *emc, host));
        self.complete_fence(when, host);
    }

    /// Completes a fence that no EMC has to confirm.
    pub(super) fn complete_fence(&mut self, when: When, host: HostId) {
        let change = self.head.decide_fence_completed(when, host);
        self.change(when, change);
    }

    /// Fences a host at one device, or schedules a stop of its machine.
    fn drive_fence_at(&mut self, when: When, emc: EmcId, host: HostId) {
        let Some(fence) = self.durable.host(host).map(|entry| entry.host.fence) else { return };
        // A host that returned has proven that nothing is left.
        let stopped = matches!(fence, Fence::None | Fence::Fencing { powered_off: true });
        let needs_stop = fence == (Fence::Fencing { powered_off: false });
        if (stopped || self.can_revoke(emc)) && self.is_to_fence(emc, host, stopped) {
            self.call_fence(emc, host, stopped);
        } else if needs_stop && self.must_stop(emc, host) {
            self.expect_stop(when, emc, host);
        }
    }

    /// Stops a machine for an EMC, unless an attempt is in progress or scheduled.
    fn expect_stop(&mut self, when: When, emc: EmcId, host: HostId) {
        let retry_at = self.first_attempt_at(when, host);
        match self.stop_attempts.get(emc, host) {
            None => {
                let attempt = StopAttempt { why: None, since: when.wall, retry_at };
                self.stop_attempts.insert(emc, host, attempt);
            }
            Some(StopAttempt { retry_at: Ns::NEVER, .. }) if !self.fencing.contains_key(&(emc, host)) => {
                self.stop_attempts.set_retry(emc, host, retry_at);
            }
            Some(_) => {}
        }
    }

    /// Drives all fences at an EMC after its comparison with the ledger.
    pub(super) fn drive_fences_of_emc(&mut self, when: When, emc: EmcId) {
        let concerns = |host: &Host| host.unconfirmed_fences.contains(&emc);
        let hosts = self.durable.hosts().filter(|(_, entry)| concerns(&entry.host)).map(|(host, _)| host);
        hosts.collect::<Vec<_>>().into_iter().for_each(|host| self.drive_fence_at(when, emc, host));
    }

    /// Drives the fence of a host that became holder of a slice, for example by a comparison: its
    /// machine may have to be stopped for it.
    pub(super) fn drive_fence_of_holder(&mut self, when: When, slice: SliceId, host: HostId) {
        let Some(emc) = self.durable.emc_of(slice) else { return };
        if self.durable.host(host).is_some_and(|entry| entry.host.unconfirmed_fences.contains(&emc)) {
            self.drive_fence_at(when, emc, host);
        }
    }

    /// Returns whether only a stop of the machine revokes access to an EMC with slices of the host,
    /// or with slices that a restored ledger may not contain.
    fn must_stop(&self, emc: EmcId, host: HostId) -> bool {
        let may_hold = self.holds_on(emc, host) || self.has_yet_to_report(host);
        may_hold && !self.can_revoke(emc) && self.is_fence_unconfirmed(emc, host)
    }

    /// Returns whether a host has not reported since the ledger was restored.
    fn has_yet_to_report(&self, host: HostId) -> bool {
        self.durable.host(host).is_some_and(|entry| entry.host.must_report)
    }

    /// Returns whether an EMC has yet to fence a host, in the durable ledger and after later
    /// decisions.
    fn is_fence_unconfirmed(&self, emc: EmcId, host: HostId) -> bool {
        [&self.durable, &self.head]
            .into_iter()
            .all(|ledger| ledger.host(host).is_some_and(|entry| entry.host.unconfirmed_fences.contains(&emc)))
    }

    /// Returns whether a host holds slices on an EMC, according to the ledger.
    fn holds_on(&self, emc: EmcId, host: HostId) -> bool {
        [&self.durable, &self.head].into_iter().any(|ledger| {
            let entries = ledger.host(host).zip(ledger.emc(emc));
            entries.is_some_and(|(host, emc)| host.held_on(&emc.emc).is_some())
        })
    }

    /// Returns the EMCs that delay a fence: EMCs with slices of the host, EMCs that may have some
    /// because the ledger was restored and they were not compared with it or need the machine
    /// stopped, and EMCs that will reply soon.
    pub(super) fn fence_waits_for(&self, host: HostId) -> impl Iterator<Item = EmcId> {
        let entry = self.durable.host(host).into_iter();
        let unconfirmed = entry.flat_map(|entry| entry.host.unconfirmed_fences.iter().copied());
        let restored = self.has_yet_to_report(host);
        let is_in_doubt = move |emc| restored && (!self.is_compared(emc) || !self.can_revoke(emc));
        let may_hold = move |emc| self.holds_on(emc, host) || is_in_doubt(emc);
        unconfirmed.filter(move |emc| may_hold(*emc) || self.will_reply_soon(*emc))
    }

    fn will_reply_soon(&self, emc: EmcId) -> bool {
        let link = self.devices.get(&emc);
        link.is_none_or(|link| link.is_starting() || (link.is_up() && self.can_revoke(emc)))
    }

    /// Returns whether a just started manager still waits for connections: agents have a whole
    /// lease for that.
    fn first_attempt_at(&self, when: When, host: HostId) -> Ns {
        let unconnected = self.links.get(&host).filter(|link| !link.has_connected());
        unconnected.map_or(when.now, |link| link.lease_end(self.settings.lease_ttl))
    }

    /// Stops machines that are due, never one with a connected agent, because its report will prove
    /// that nothing is left.
    pub(super) fn retry_fences(&mut self, when: When) {
        let emcs = self.next_stops().filter(|(_, at)| *at <= when.now).map(|(emc, _)| emc);
        for emc in emcs.collect::<Vec<_>>() {
            let due = self.stop_attempts.attempts(emc).take_while(|(at, _)| *at <= when.now);
            for host in due.map(|(_, host)| host).collect::<Vec<_>>() {
                // An attempt that is in progress or no longer needed has no time.
                self.stop_attempts.set_retry(emc, host, Ns::NEVER);
                if self.must_stop(emc, host) && self.is_to_fence(emc, host, false) {
                    self.call_fence(emc, host, false);
                }
            }
        }
    }

    /// Returns the time of the next stop of a machine.
    pub(super) fn next_fence(&self) -> Option<Ns> {
        self.next_stops().map(|(_, at)| at).min()
    }

    /// Returns working devices with machines to stop, each with the earliest time.
    fn next_stops(&self) -> impl Iterator<Item = (EmcId, Ns)> {
        let next = self.stop_attempts.earliest();
        next.filter(|(emc, _)| self.devices.get(emc).is_some_and(DeviceLink::is_up))
    }

    fn can_revoke(&self, emc: EmcId) -> bool {
        self.durable.emc(emc).is_some_and(|entry| entry.emc.can_revoke())
    }

    /// Returns whether a working device has to be called, or called again because it need not stop
    /// the machine any more.
    fn is_to_fence(&self, emc: EmcId, host: HostId, powered_off: bool) -> bool {
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        let is_called = self.fencing.get(&(emc, host)).is_some_and(|before| *before || !powered_off);
        up && !is_called && self.is_fence_unconfirmed(emc, host)
    }

    fn call_fence(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        self.fencing.insert((emc, host), powered_off);
        self.effects.push_back(Effect::Device(emc, DeviceCall::Fence { host, powered_off }));
    }

    /// The reply to the first of two calls leaves the second in progress.
    pub(super) fn on_fence_reply(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        if self.fencing.get(&(emc, host)).is_some_and(|is_called| powered_off || !*is_called) {
            self.fencing.remove(&(emc, host));
        }
    }

    pub(super) fn on_fenced(&mut self, when: When, emc: EmcId, host: HostId) {
        self.stop_attempts.remove(emc, host);
        let change = self.head.decide_fence_confirmed(when, host, emc);
        self.change(when, change);
    }

    /// Records that the machine was not stopped: the host keeps its slices. Ignored if its stop was
    /// proven otherwise.
    pub(super) fn on_not_fenced(&mut self, when: When, emc: EmcId, host: HostId, why: String) {
        let fence = self.head.host(host).map(|entry| entry.host.fence);
        if fence == Some(Fence::Fencing { powered_off: false }) {
            let since = self.stop_attempts.get(emc, host).map_or(when.wall, |before| before.since);
            let retry_at = when.now.after(FENCE_RETRY);
            self.stop_attempts.insert(emc, host, StopAttempt { why: Some(why), since, retry_at });
            self.changed = true;
        }
    }

    /// Returns the time since which a host's machine is to be stopped. A later fence of the same
    /// host has another one.
    pub fn stopping_since(&self, host: HostId) -> Option<UnixMs> {
        self.stop_attempts.of_host(host).next().map(|(_, attempt)| attempt.since)
    }

    /// Returns the reason why a fence has not completed, if it is known.
    pub(super) fn fence_obstacle_since(&self, host: HostId) -> Option<(&str, UnixMs)> {
        let mut of_host = self.stop_attempts.of_host(host).filter(|(emc, _)| self.must_stop(*emc, host));
        of_host.find_map(|(_, attempt)| Some((attempt.why.as_deref()?, attempt.since)))
    }
}
