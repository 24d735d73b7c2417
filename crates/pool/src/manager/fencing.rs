//! Cutting hosts off: at every device, once that is durable, until all have done it. A device that cannot cut off by
//! itself has the machine stopped; until that is certain the host keeps what it has, so nobody else gets it, and an
//! operator hears why.

use units::limits::FENCE_RETRY;
use units::{EmcId, HostId, Ns, UnixMs};

use super::{Effect, Manager, devices::DeviceCall, devices::DeviceLink, hosts::Link};
use crate::{ledger::When, record::Fence};

/// A host that a device cannot cut off, and that could not be stopped.
#[derive(Clone, Debug)]
pub(super) struct Unfenced {
    /// Nothing has been heard of the first attempt yet.
    why: Option<String>,
    since: UnixMs,
    /// When to try again, if its agent is not there then; never while it is being tried.
    retry_at: Ns,
}

impl Manager {
    /// Cuts a host off at every device that works, once the intent is durable.
    pub(super) fn drive_fence(&mut self, when: When, host: HostId) {
        let fence = self.durable.host(host).map(|entry| (entry.host.fence, entry.host.emcs.clone()));
        let Some((Fence::Fencing { powered_off }, emcs)) = fence else {
            return self.unfenced.retain(|(_, kept), _| *kept != host);
        };
        self.finish_fence(when, host); // the wire to the last outstanding EMC may have been removed
        for emc in emcs {
            let known = powered_off || self.cuts_off(emc);
            if known && self.is_to_fence(emc, host, powered_off) {
                self.call_fence(emc, host, powered_off);
            } else if !known && !self.fenced.contains(&(emc, host)) {
                let retry_at = self.first_attempt_at(when, host);
                let due = Unfenced { why: None, since: when.wall, retry_at };
                self.unfenced.entry((emc, host)).or_insert(due);
            }
        }
        self.retry_fences(when);
    }

    /// A manager that has just started has yet to hear whose agents speak: they have a whole lease for that.
    fn first_attempt_at(&self, when: When, host: HostId) -> Ns {
        let unheard = self.links.get(&host).filter(|link| !link.was_heard());
        unheard.map_or(when.now, |link| link.lease_end(self.settings.lease_ttl))
    }

    /// Has machines stopped that are to be: never one whose agent speaks, as that will prove that nothing is left.
    pub(super) fn retry_fences(&mut self, when: When) {
        let due = self.unfenced.iter().filter(|(key, unfenced)| {
            unfenced.retry_at <= when.now && self.is_alone(key.1) && self.is_to_fence(key.0, key.1, false)
        });
        for (emc, host) in due.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(unfenced) = self.unfenced.get_mut(&(emc, host)) {
                unfenced.retry_at = Ns::NEVER;
            }
            self.call_fence(emc, host, false);
        }
    }

    /// When a machine is next to be stopped.
    pub(super) fn next_fence(&self) -> Option<Ns> {
        let waits = self.unfenced.iter().filter(|(key, unfenced)| {
            unfenced.retry_at < Ns::NEVER && self.is_alone(key.1) && self.is_to_fence(key.0, key.1, false)
        });
        waits.map(|(_, unfenced)| unfenced.retry_at).min()
    }

    fn is_alone(&self, host: HostId) -> bool {
        !self.links.get(&host).is_some_and(Link::is_connected)
    }

    fn cuts_off(&self, emc: EmcId) -> bool {
        self.durable.emc(emc).is_some_and(|entry| entry.emc.cuts_off())
    }

    /// Whether a device that works has yet to be asked, or asked anew because it need not stop the machine any more.
    fn is_to_fence(&self, emc: EmcId, host: HostId, powered_off: bool) -> bool {
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        let asked = self.fencing.get(&(emc, host)).is_some_and(|before| *before || !powered_off);
        up && !asked && !self.fenced.contains(&(emc, host))
    }

    fn call_fence(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        self.fencing.insert((emc, host), powered_off);
        self.effects.push_back(Effect::Device(emc, DeviceCall::Fence { host, powered_off }));
    }

    /// Of two calls the answer to the first leaves the second under way.
    pub(super) fn fence_answered(&mut self, emc: EmcId, host: HostId, powered_off: bool) {
        if self.fencing.get(&(emc, host)).is_some_and(|asked| powered_off || !*asked) {
            self.fencing.remove(&(emc, host));
        }
    }

    pub(super) fn on_fenced(&mut self, when: When, emc: EmcId, host: HostId) {
        let fence = self.head.host(host).map(|entry| entry.host.fence);
        if !matches!(fence, Some(Fence::Fencing { .. })) {
            return;
        }
        self.unfenced.remove(&(emc, host));
        self.fenced.insert((emc, host));
        self.finish_fence(when, host);
    }

    /// Records what the EMCs of a host that is being fenced have done so far; the fence ends when none is outstanding.
    fn finish_fence(&mut self, when: When, host: HostId) {
        let Some(entry) = self.head.host(host) else { return };
        if !matches!(entry.host.fence, Fence::Fencing { .. }) {
            return;
        }
        let emcs = entry.host.emcs.clone();
        let done: Vec<EmcId> =
            emcs.iter().copied().filter(|emc| self.fenced.contains(&(*emc, host))).collect();
        for emc in &done {
            let cut = self.head.decide_cut_off(host, *emc);
            self.change(when, cut);
        }
        if done == emcs {
            self.fenced.retain(|(_, fenced)| *fenced != host);
            let change = self.head.decide_fenced(when, host);
            self.change(when, change);
        }
    }

    /// The host keeps what it has. Old news if something else has proven since that it has stopped.
    pub(super) fn on_not_fenced(&mut self, when: When, emc: EmcId, host: HostId, why: String) {
        let fence = self.head.host(host).map(|entry| entry.host.fence);
        if fence == Some(Fence::Fencing { powered_off: false }) {
            let since = self.unfenced.get(&(emc, host)).map_or(when.wall, |before| before.since);
            let retry_at = when.now.after(FENCE_RETRY);
            self.unfenced.insert((emc, host), Unfenced { why: Some(why), since, retry_at });
            self.changed = true;
        }
    }

    /// A device could not do it for a reason of its own; it is asked again when it works.
    pub(super) fn fence_failed(&mut self, when: When, emc: EmcId, host: HostId) {
        if let Some(unfenced) = self.unfenced.get_mut(&(emc, host)) {
            unfenced.retry_at = when.now.after(FENCE_RETRY);
        }
    }

    /// Since when a host's machine is to be stopped. A later fence of the same host has another answer.
    pub fn stopping_since(&self, host: HostId) -> Option<UnixMs> {
        self.unfenced.iter().find(|((_, kept), _)| *kept == host).map(|(_, unfenced)| unfenced.since)
    }

    /// Why a host that is being cut off is not yet, as far as that is known.
    pub(super) fn why_unfenced(&self, host: HostId) -> Option<(&str, UnixMs)> {
        let mut of_host = self.unfenced.iter().filter(|((_, kept), _)| *kept == host);
        of_host.find_map(|(_, unfenced)| Some((unfenced.why.as_deref()?, unfenced.since)))
    }
}
