//! Hosts: sessions and leases of their agents.
//!
//! A silent host keeps its slices. A host whose lease has expired is `unknown`: it gets no new
//! memory, and it keeps its slices until its agent returns or the host is fenced.

use units::{Epoch, HostId, InstanceId, Ns, SliceId};

use super::{
    CloseReason, Effect, Manager, SessionId,
    link::{Link, RejectedAgent},
};
use crate::{
    audit::Actor,
    ledger::When,
    protocol::Hello,
    slice::{DrainStage, Event, Scrub, Slot, State},
};

impl Manager {
    pub(super) fn ensure_link(&mut self, when: When, host: HostId) {
        if self.links.get(&host).is_none() {
            self.links.insert(host, Link::new(when.now));
        }
        self.update_liveness(host);
        self.update_visibility(when, host);
    }

    pub(super) fn drop_host(&mut self, host: HostId) {
        self.fence_calls.retain(|(_, of), _| *of != host);
        self.stop_attempts.remove_host(host);
        self.unadopted.remove(&host);
        self.unusable_emcs_since.remove(&host);
        if let Some(session) = self.links.remove(&host).and_then(|link| link.session) {
            self.close_agent_session(session, CloseReason::HostRemoved);
        }
    }

    pub(super) fn close_agent_session(&mut self, session: SessionId, why: CloseReason) {
        self.drop_session(session);
        self.effects.push_back(Effect::Close(session, why));
    }

    fn drop_session(&mut self, session: SessionId) {
        let Some(host) = self.sessions.remove(&session) else { return };
        if let Some(mut link) = self.links.get_mut(&host).filter(|link| link.session == Some(session)) {
            link.session = None;
            link.last_sent = None;
            link.draft = None;
        }
        self.update_liveness(host);
    }

    /// Updates the indexes that depend on a host's connection and lease. Only hosts with a
    /// connected agent and a valid lease scrub slices. Machines with a connected agent are not
    /// stopped.
    fn update_liveness(&mut self, host: HostId) {
        let link = self.links.get(&host);
        self.stop_attempts.set_connected(host, link.is_some_and(Link::is_connected));
        self.head.set_host_live(host, link.is_some_and(Link::is_live));
    }

    /// Returns whether a session is that of the agent that represents its host.
    pub fn has_agent_session(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    pub(super) fn on_agent_up(&mut self, when: When, session: SessionId, host: HostId, hello: Hello) {
        let Some(link) = self.links.get(&host) else {
            return self.close_agent_session(session, CloseReason::HostRemoved);
        };
        if link.has_other_agent(&hello, when.now, self.settings.lease_ttl) {
            return self.reject_agent(when, session, host, hello.instance);
        }
        if self.must_await_lease(link, when, host, &hello) {
            // If no agent is connected, the machine has probably restarted, so no conflict is
            // reported.
            return match link.is_connected() {
                true => self.reject_agent(when, session, host, hello.instance),
                false => self.close_agent_session(session, CloseReason::OtherBootLeased),
            };
        }
        if let Some(old) = link.session {
            self.close_agent_session(old, CloseReason::Superseded);
        }
        let change = self.head.decide_agent_identity(when, host, &hello.boot_id, false);
        self.change(when, change);
        self.sessions.insert(session, host);
        let last_message_wall = Some(when.wall);
        let rejected = self.links.get(&host).and_then(Link::rejected_agent);
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

    /// Returns whether an agent with another boot ID must wait until the host's lease ends.
    /// Accepting the agent ends the host's VMs in the ledger, although they still run if the agent
    /// is on another machine. The boot ID is compared with that of the connected agent, because the
    /// ledger may lack it during a load; if no agent is connected, with the recorded boot ID.
    fn must_await_lease(&self, link: &Link, when: When, host: HostId, hello: &Hello) -> bool {
        let entry = self.head.host(host);
        let connected = link.hello.as_ref().filter(|_| link.is_connected()).map(|current| &current.boot_id);
        let boot_id = connected.or_else(|| entry.map(|entry| &entry.host.boot_id));
        let is_other = boot_id.is_some_and(|boot_id| !boot_id.is_empty() && *boot_id != hello.boot_id);
        let may_run_vms = link.is_connected() || entry.is_some_and(|entry| entry.reservations().len() > 0);
        is_other && may_run_vms && when.now < link.lease_end(self.settings.lease_ttl)
    }

    /// Rejects an agent because another agent represents the host, and records the rejection.
    fn reject_agent(&mut self, when: When, session: SessionId, host: HostId, instance: InstanceId) {
        if let Some(mut link) = self.links.get_mut(&host) {
            let since = link.rejected.map_or(when.wall, |rejected| rejected.since);
            self.changed |= link.rejected.is_none();
            link.rejected = Some(RejectedAgent { instance, since, latest: when.now });
        }
        self.close_agent_session(session, CloseReason::Superseded);
    }

    /// Removes rejected agents that no longer try to connect. A running agent tries to connect at
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
        self.links.check_indexes();
        for (host, entry) in self.head.hosts() {
            let live = self.links.get(&host).is_some_and(Link::is_live);
            assert_eq!(entry.is_live(), live, "liveness of {host:?}");
        }
        let connected = self.links.iter().filter(|(_, link)| link.is_connected()).map(|(host, _)| *host);
        self.stop_attempts.check_indexes(&connected.collect());
    }

    /// Applies the boot IDs of connected agents again after a load, because changes from the time
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
        self.drop_session(session);
    }

    pub(super) fn apply_slice_event(&mut self, when: When, slice: SliceId, event: Event) {
        if let Some(change) = self.head.decide_slice_change(slice, event) {
            self.change(when, change);
        }
    }

    /// After a load, makes all hosts with an expired lease due for a fence again, because an
    /// earlier decision to fence them may not be durable.
    pub(super) fn reschedule_silence_fences(&mut self, when: When) {
        for host in self.links.hosts_silent_for(Ns::NEVER, Ns::ZERO) {
            if let Some(mut link) = self.links.get_mut(&host)
                && let Some((since, _)) = &mut link.unknown_since
            {
                *since = (*since).min(when.now);
            }
        }
    }

    /// Ends expired leases. Fences each host that has been silent for `fence_after` since its lease
    /// expired.
    pub(super) fn expire_leases(&mut self, when: When) {
        self.drop_expired_rejections(when);
        for host in self.links.expired_leases(when.now, self.settings.lease_ttl) {
            self.end_lease(when, host);
        }
        let Some(fence_after) = self.settings.fence_after else { return };
        for host in self.links.hosts_silent_for(when.now, fence_after) {
            if !self.has_never_reported(host) {
                let reason = format!("silent for {fence_after} since its lease expired");
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
    pub(super) fn has_never_reported(&self, host: HostId) -> bool {
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
        self.leases_expired += u64::from(!self.has_never_reported(host));
        self.changed = true;
        self.update_liveness(host);
        if let Some(session) = session {
            self.close_agent_session(session, CloseReason::LeaseExpired);
        }
    }
}

/// Returns the part of a slot that determines the task of the slice's holder, or `None` if the
/// holder has no task.
pub(super) fn required_holder_action(slot: Option<Slot>) -> Option<(Epoch, State)> {
    let slot = slot?;
    match slot.state {
        State::Onlining(owner) | State::Online(owner) => Some((slot.epoch, State::Online(owner))),
        State::Draining(_, DrainStage::Host { .. })
        | State::Scrubbing(Scrub::Working(_) | Scrub::Leaving(_)) => Some((slot.epoch, slot.state)),
        _ => None,
    }
}
