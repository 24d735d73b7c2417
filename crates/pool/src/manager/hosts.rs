//! Hosts: sessions of their agents, leases, desired states and reports.
//!
//! Silence frees nothing. A host with an expired lease is `unknown`: it gets no new memory and
//! keeps its slices until its agent returns or it is fenced.

use std::collections::BTreeSet;

use units::limits::{
    DELTA_CHANGES_PER_HOST_MAX, DESIRED_STATE_INTERVAL_MIN, DESIRED_STATE_LINGER, DESIRED_STATE_RESEND_AFTER,
};
use units::{DesiredVersion, Epoch, HostId, InstanceId, Ns, ReservationId, SliceId, UnixMs};

use super::{CloseReason, Effect, Manager, SessionId, desired_states::Draft, links::Due, reports::ReportLog};
use crate::{
    audit::Actor,
    ledger::When,
    protocol::{Hello, Holding},
    slice::{Drain, Event, Scrub, Slot, State},
};

/// State of a host beside the ledger. Not durable: after a restart every host gets a full lease.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) session: Option<SessionId>,
    hello: Option<Hello>,
    /// Rack time of the last message; the manager's start before the first one.
    last_message: Ns,
    pub(super) last_message_wall: Option<UnixMs>,
    unknown_since: Option<(Ns, UnixMs)>,
    pub(super) last_sent: Option<SentState>,
    /// There are changes for the next desired state.
    pub(super) desired_state_due: bool,
    pub(super) pending_changes: PendingChanges,
    /// Newest version that its agent has reflected.
    pub(super) reflected: DesiredVersion,
    /// First version of this session that contained the fence.
    pub(super) fence_sent: Option<DesiredVersion>,
    /// Scrubs sent in this session.
    pub(super) scrubs_sent: BTreeSet<Holding>,
    rejected: Option<RejectedAgent>,
    pub(super) reports: ReportLog,
    /// Complete desired state in preparation.
    pub(super) draft: Option<Draft>,
}

/// Older agent of the same boot, rejected while a newer instance represents the host. It shows that
/// the host runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct RejectedAgent {
    pub(super) instance: InstanceId,
    pub(super) since: UnixMs,
    latest: Ns,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SentState {
    pub(super) number: DesiredVersion,
    pub(super) at: Ns,
}

/// Changes for a host since its last desired state.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingChanges {
    pub(super) reservations: BTreeSet<ReservationId>,
    pub(super) slices: BTreeSet<SliceId>,
    /// More changes than are listed.
    pub(super) all: bool,
    /// A caller waits for the result of the next desired state.
    pub(super) awaited: bool,
}

impl PendingChanges {
    /// Records a slice, reservations, or both. Beyond the limit the next desired state is complete.
    pub(super) fn add(&mut self, slice: Option<SliceId>, of: impl IntoIterator<Item = ReservationId>) {
        self.slices.extend(slice);
        self.reservations.extend(of);
        if self.slices.len() + self.reservations.len() > DELTA_CHANGES_PER_HOST_MAX {
            *self = Self { all: true, awaited: self.awaited, ..Self::default() };
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.slices.len() + self.reservations.len()
    }

    #[cfg(test)]
    pub(super) fn awaited() -> Self {
        Self { awaited: true, ..Self::default() }
    }

    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited
    }

    #[cfg(test)]
    pub(super) fn is_complete(&self) -> bool {
        self.all
    }
}

impl Link {
    fn new(now: Ns) -> Self {
        Self {
            session: None,
            hello: None,
            last_message: now,
            last_message_wall: None,
            unknown_since: None,
            last_sent: None,
            desired_state_due: true,
            pending_changes: PendingChanges { all: true, ..PendingChanges::default() },
            reflected: DesiredVersion::default(),
            fence_sent: None,
            scrubs_sent: BTreeSet::new(),
            rejected: None,
            reports: ReportLog::default(),
            draft: None,
        }
    }

    /// Returns whether the current or latest session has reported all VMs of the host.
    pub(super) fn has_reported(&self) -> bool {
        self.reports.has_reported()
    }

    /// Records a message of its agent, and returns whether it reflects an older version than an
    /// earlier report.
    pub(super) fn record_message(&mut self, when: When, reflected: DesiredVersion) -> bool {
        (self.last_message, self.last_message_wall) = (when.now, Some(when.wall));
        let is_outdated = reflected < self.reflected;
        self.reflected = self.reflected.max(reflected);
        is_outdated
    }

    /// Returns the first version of this session that contained the fence.
    pub(super) fn fence_sent(&self) -> Option<DesiredVersion> {
        self.fence_sent
    }

    /// Keeps a complete desired state whose next piece is due at once.
    pub(super) fn keep_draft(&mut self, draft: Draft) {
        self.draft = Some(draft);
        self.desired_state_due = true;
    }

    /// Returns whether its agent has sent a message to this manager.
    pub(super) fn has_connected(&self) -> bool {
        self.hello.is_some()
    }

    /// Returns the end of its lease without further messages.
    pub(super) fn lease_end(&self, ttl: Ns) -> Ns {
        self.last_message.after(ttl)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    pub(super) fn is_expected(&self) -> bool {
        self.hello.is_none() && self.unknown_since.is_none()
    }

    pub(super) fn is_unknown(&self) -> bool {
        self.unknown_since.is_some()
    }

    pub(super) fn unknown_since(&self) -> Option<UnixMs> {
        self.unknown_since.map(|(_, wall)| wall)
    }

    pub(super) fn hello(&self) -> Option<&Hello> {
        self.hello.as_ref()
    }

    pub(super) fn instance(&self) -> Option<InstanceId> {
        self.session.and(self.hello.as_ref()).map(|hello| hello.instance)
    }

    /// Returns whether its agent is connected with a valid lease.
    fn is_live(&self) -> bool {
        self.is_connected() && !self.is_unknown()
    }

    /// Returns the times at which something is due for the host.
    pub(super) fn due(&self) -> Due {
        Due {
            last_message: self.unknown_since.is_none().then_some(self.last_message),
            silent: self.unknown_since.map(|(since, _)| since).filter(|_| !self.is_connected()),
            resend: self.resend_at(),
            desired_state: if self.desired_state_due { self.next_send() } else { None },
            rejected: self.rejected.map(|agent| agent.latest),
        }
    }

    /// Returns the older agent that keeps connecting, if any.
    pub(super) fn rejected(&self) -> Option<RejectedAgent> {
        self.rejected
    }

    /// Returns whether a newer instance of the same boot is the host's agent: it is connected, or
    /// its lease has not expired.
    fn has_newer_agent(&self, hello: &Hello, now: Ns, ttl: Ns) -> bool {
        let newer = |led: &Hello| led.instance > hello.instance && led.boot_id == hello.boot_id;
        self.hello.as_ref().is_some_and(newer) && (self.is_connected() || now < self.lease_end(ttl))
    }

    /// Returns when the next due desired state may be sent.
    fn next_send(&self) -> Option<Ns> {
        self.session?;
        let Some(sent) = self.last_sent.filter(|_| self.draft.is_none()) else { return Some(Ns::ZERO) };
        let answered = self.reflected >= sent.number;
        Some(sent.at.after(match self.pending_changes.awaited {
            _ if !answered => DESIRED_STATE_RESEND_AFTER,
            true => DESIRED_STATE_INTERVAL_MIN,
            false => DESIRED_STATE_LINGER,
        }))
    }

    /// Returns when an unanswered desired state is sent again.
    fn resend_at(&self) -> Option<Ns> {
        let is_unanswered = |sent: &SentState| self.is_connected() && self.reflected < sent.number;
        let sent = self.last_sent.filter(|sent| is_unanswered(sent) && self.draft.is_none())?;
        Some(sent.at.after(DESIRED_STATE_RESEND_AFTER))
    }
}

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

    /// Only hosts with a connected agent and a valid lease scrub slices; a host with a connected
    /// agent is not stopped.
    fn update_liveness(&mut self, host: HostId) {
        let link = self.links.get(&host);
        self.stop_attempts.set_connected(host, link.is_some_and(Link::is_connected));
        self.head.set_live(host, link.is_some_and(Link::is_live));
    }

    pub(super) fn on_agent_up(&mut self, when: When, session: SessionId, host: HostId, hello: Hello) {
        let Some(link) = self.links.get(&host) else { return self.close(session, CloseReason::HostRemoved) };
        if link.has_newer_agent(&hello, when.now, self.settings.lease_ttl) {
            return self.reject_agent(when, session, host, hello.instance);
        }
        if self.must_await_lease(link, when, host, &hello) {
            // No other agent is connected: probably this machine restarted, so there is no contest
            // to report.
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
        let rejected = rejected.filter(|rejected| rejected.instance < hello.instance);
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

    /// Returns whether an agent of another boot than the host's has to wait for the end of the lease: the
    /// host's VMs would count as ended, although they run if the agent is on another machine. The boot is
    /// that of the connected agent, which the ledger lacks while it is read again, else the recorded one,
    /// for which a just started manager waits.
    fn must_await_lease(&self, link: &Link, when: When, host: HostId, hello: &Hello) -> bool {
        let entry = self.head.host(host);
        let connected = link.hello.as_ref().filter(|_| link.is_connected()).map(|led| &led.boot_id);
        let boot_id = connected.or_else(|| entry.map(|entry| &entry.host.boot_id));
        let is_other = boot_id.is_some_and(|boot_id| !boot_id.is_empty() && *boot_id != hello.boot_id);
        let is_led = link.is_connected() || entry.is_some_and(|entry| entry.reservations().len() > 0);
        is_other && is_led && when.now < link.lease_end(self.settings.lease_ttl)
    }

    /// Rejects an agent while another represents the host, and records the attempt.
    fn reject_agent(&mut self, when: When, session: SessionId, host: HostId, instance: InstanceId) {
        if let Some(mut link) = self.links.get_mut(&host) {
            let since = link.rejected.map_or(when.wall, |rejected| rejected.since);
            self.changed |= link.rejected.is_none();
            link.rejected = Some(RejectedAgent { instance, since, latest: when.now });
        }
        self.close(session, CloseReason::Superseded);
    }

    /// Drops rejected agents that no longer connect: they try at least once per lease.
    fn forget_rejected(&mut self, when: When) {
        for host in self.links.expired_rejections(when.now, self.settings.lease_ttl) {
            if let Some(mut link) = self.links.get_mut(&host) {
                link.rejected = None;
                self.changed = true;
            }
        }
    }

    /// Compares the index of links, and the live and connected hosts, with the links.
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

    /// Applies the identities of agents that connected while the store was loaded, because the
    /// state recorded then is lost.
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

    /// Decides a fence again whose decision before a load of the store may not be on disk.
    pub(super) fn retry_silence_fences(&mut self, when: When) {
        for host in self.links.silent_for(Ns::NEVER, Ns::ZERO) {
            if let Some(mut link) = self.links.get_mut(&host)
                && let Some((since, _)) = &mut link.unknown_since
            {
                *since = (*since).min(when.now);
            }
        }
    }

    /// Handles expired leases, and hosts to be fenced.
    pub(super) fn expire_leases(&mut self, when: When) {
        self.forget_rejected(when);
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

    /// Returns whether a host has never reported and can have no slices. Such a host stays expected
    /// and is not fenced.
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

/// Returns the task of a slice's holder, if any.
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
