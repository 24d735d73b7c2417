//! Hosts: sessions of their agents, and leases.
//!
//! A silent host keeps its slices. A host with an expired lease is `unknown`: it gets no new memory
//! and keeps its slices until its agent returns or the host is fenced.

use units::{Epoch, HostId, InstanceId, Ns, SliceId};

use super::{
    CloseReason, Effect, Manager, SessionId,
    link::{Link, RejectedAgent},
};
use crate::{
    audit::Actor,
    ledger::When,
    protocol::Hello,
    slice::{Drain, Event, Scrub, Slot, State},
};

impl Manager {
    pub(super) fn expect_host(&mut self, when: When, host: HostId) {
        if self.links.get(&host).is_none() {
            self.links.insert(host, Link::new(when.now));
        }
        self.update_liveness(host);
        self.update_visibility(when, host);
    }

    pub(super) fn drop_host(&mut self, host: HostId) {
        self.fencing.retain(|(_, of), _| *of != host);
        self.stop_attempts.remove_host(host);
        self.unadopted.remove(&host);
        self.unseen_since.remove(&host);
        if let Some(session) = self.links.remove(&host).and_then(|link| link.session) {
            self.close(session, CloseReason::HostRemoved);
        }
    }

    pub(super) fn close(&mut self, session: SessionId, why: CloseReason) {
        self.disconnect(session);
        self.effects.push_back(Effect::Close(session, why));
    }

    fn disconnect(&mut self, session: SessionId) {
        let Some(host) = self.sessions.remove(&session) else { return };
        if let Some(mut link) = self.links.get_mut(&host).filter(|link| link.session == Some(session)) {
            link.session = None;
            link.last_sent = None;
            link.draft = None;
        }
        self.update_liveness(host);
    }

    /// Updates the indexes that depend on a host's connection and lease. Only hosts with a
    /// connected agent and a valid lease scrub slices. A host with a connected agent is not
    /// stopped.
    fn update_liveness(&mut self, host: HostId) {
        let link = self.links.get(&host);
        self.stop_attempts.set_connected(host, link.is_some_and(Link::is_connected));
        self.head.set_live(host, link.is_some_and(Link::is_live));
    }

    pub(super) fn on_agent_up(&mut self, when: When, session: SessionId, host: HostId, hello: Hello) {
        let Some(link) = self.links.get(&host) else { return self.close(session, CloseReason::HostRemoved) };
        if link.has_other_agent(&hello, when.now, self.settings.lease_ttl) {
            return self.reject_agent(when, session, host, hello.instance);
        }
        if self.must_await_lease(link, when, host, &hello) {
            // No other agent is connected. Probably this machine restarted, so no conflict is
            // reported.
            return match link.is_connected() {
                true => self.reject_agent(when, session, host, hello.instance),
                false => self.close(session, CloseReason::Superseded),
            };
        }
        if let Some(old) = link.session {
            self.close(old, CloseReason::Superseded);
        }
        let change = self.head.decide_agent_identity(when, host, &hello.boot_id, false);
        self.change(when, change);
        self.sessions.insert(session, host);
        let last_message_wall = Some(when.wall);
        let rejected = self.links.get(&host).and_then(Link::rejected);
        let rejected = rejected.filter(|rejected| rejected.instance != hello.instance);
        let link = Link {
            session: Some(session),
            hello: Some(hello),
            last_message_wall,
            rejected,
            ..Link::new(when.now)
        };
        self.links.insert(host, link);
        self.update_liveness(host);
        self.update_visibility(when, host);
    }

    /// Returns whether an agent with another boot id must wait until the host's lease ends. If the
    /// agent were accepted earlier, the host's VMs would count as ended, although they still run if
    /// the agent is on another machine. The boot id is compared with the boot id of the connected
    /// agent, because the ledger lacks it during a load. Without a connected agent, the recorded
    /// boot id is used.
    fn must_await_lease(&self, link: &Link, when: When, host: HostId, hello: &Hello) -> bool {
        let entry = self.head.host(host);
        let connected = link.hello.as_ref().filter(|_| link.is_connected()).map(|led| &led.boot_id);
        let boot_id = connected.or_else(|| entry.map(|entry| &entry.host.boot_id));
        let is_other = boot_id.is_some_and(|boot_id| !boot_id.is_empty() && *boot_id != hello.boot_id);
        let is_led = link.is_connected() || entry.is_some_and(|entry| entry.reservations().len() > 0);
        is_other && is_led && when.now < link.lease_end(self.settings.lease_ttl)
    }

    /// Rejects an agent because another agent represents the host, and records the rejection.
    fn reject_agent(&mut self, when: When, session: SessionId, host: HostId, instance: InstanceId) {
        if let Some(mut link) = self.links.get_mut(&host) {
            let since = link.rejected.map_or(when.wall, |rejected| rejected.since);
            self.changed |= link.rejected.is_none();
            link.rejected = Some(RejectedAgent { instance, since, latest: when.now });
        }
        self.close(session, CloseReason::Superseded);
    }

    /// Drops rejected agents that have stopped connecting. A running agent tries to connect at
    /// least once per lease.
    fn drop_expired_rejections(&mut self, when: When) {
        for host in self.links.expired_rejections(when.now, self.settings.lease_ttl) {
            if let Some(mut link) = self.links.get_mut(&host) {
                link.rejected = None;
                self.changed = true;
            }
        }
    }

    /// Checks the indexes of links, live hosts and connected hosts against the links.
    #[cfg(test)]
    pub(super) fn check_indexes(&self) {
        self.links.check();
        for (host, entry) in self.head.hosts() {
            let live = self.links.get(&host).is_some_and(Link::is_live);
            assert_eq!(entry.is_live(), live, "liveness of {host:?}");
        }
        let connected = self.links.iter().filter(|(_, link)| link.is_connected()).map(|(host, _)| *host);
        self.stop_attempts.check(&connected.collect());
    }

    /// Applies the boot ids of connected agents again after a load, because changes from the time
    /// of the load are lost.
    pub(super) fn reapply_boot_ids(&mut self, when: When) {
        let live = self.links.iter().filter(|(_, link)| link.is_connected());
        let boot_ids = live.filter_map(|(host, link)| Some((*host, link.hello()?.boot_id.clone())));
        for (host, boot_id) in boot_ids.collect::<Vec<_>>() {
            let change = self.head.decide_agent_identity(when, host, &boot_id, false);
            self.change(when, change);
        }
    }

    pub(super) fn on_agent_down(&mut self, session: SessionId) {
        self.disconnect(session);
    }

    pub(super) fn slice_event(&mut self, when: When, slice: SliceId, event: Event) {
        if let Some(change) = self.head.decide_slice(slice, event) {
            self.change(when, change);
        }
    }

    /// Makes all silent hosts due for a fence again after a load, because an earlier decision to
    /// fence may not be durable.
    pub(super) fn retry_silence_fences(&mut self, when: When) {
        for host in self.links.silent_for(Ns::NEVER, Ns::ZERO) {
            if let Some(mut link) = self.links.get_mut(&host)
                && let Some((since, _)) = &mut link.unknown_since
            {
                *since = (*since).min(when.now);
            }
        }
    }

    /// Ends expired leases, and fences hosts that were silent for too long.
    pub(super) fn expire_leases(&mut self, when: When) {
        self.drop_expired_rejections(when);
        for host in self.links.expired_leases(when.now, self.settings.lease_ttl) {
            self.end_lease(when, host);
        }
        let Some(fence_after) = self.settings.fence_after else { return };
        for host in self.links.silent_for(when.now, fence_after) {
            if !self.never_started(host) {
                let reason = format!("silent for {} past its lease", fence_after);
                let change = self.head.decide_fence(when, host, false, Actor::Manager, &reason);
                self.change(when, change);
            }
            if let Some(mut link) = self.links.get_mut(&host) {
                let wall = link.unknown_since().unwrap_or(when.wall);
                link.unknown_since = Some((Ns::NEVER, wall));
            }
        }
    }

    /// Returns whether a host has never reported and cannot have slices. Such a host is shown as
    /// expected and is not fenced.
    pub(super) fn never_started(&self, host: HostId) -> bool {
        self.head.host(host).is_some_and(|entry| {
            let has_nothing = entry.held().len() == 0 && entry.reservations().len() == 0;
            has_nothing && entry.host.boot_id.is_empty() && !entry.host.must_report
        })
    }

    fn end_lease(&mut self, when: When, host: HostId) {
        let Some(mut link) = self.links.get_mut(&host) else { return };
        link.unknown_since = Some((when.now, when.wall));
        let session = link.session;
        drop(link);
        self.leases_expired += u64::from(!self.never_started(host));
        self.changed = true;
        self.update_liveness(host);
        if let Some(session) = session {
            self.close(session, CloseReason::LeaseExpired);
        }
    }
}

/// Returns the work of a slice's holder in this state of the slice, if any.
pub(super) fn holder_task(slot: Option<Slot>) -> Option<(Epoch, State)> {
    let slot = slot?;
    match slot.state {
        State::Onlining(owner) | State::Online(owner) => Some((slot.epoch, State::Online(owner))),
        State::Draining(_, Drain::Host { .. }) | State::Scrubbing(Scrub::Working(_) | Scrub::Leaving(_)) => {
            Some((slot.epoch, slot.state))
        }
        _ => None,
    }
}
