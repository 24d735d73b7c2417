//! Links of all hosts, indexed by the times at which work for a host is due, so that no event scans
//! all hosts.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Deref, DerefMut},
};

use units::{HostId, Ns};

use super::link::{HostDueTimes, Link};

/// Hosts, ordered by the time at which one kind of work is due.
#[derive(Debug, Default)]
struct HostSchedule(BTreeSet<(Ns, HostId)>);

impl HostSchedule {
    fn update(&mut self, host: HostId, before: Option<Ns>, after: Option<Ns>) {
        if before == after {
            return;
        }
        if let Some(at) = before {
            self.0.remove(&(at, host));
        }
        self.0.extend(after.map(|at| (at, host)));
    }

    fn first(&self) -> Option<Ns> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Returns the hosts whose time plus `delay` has passed, in ascending order of their IDs.
    fn due(&self, now: Ns, delay: Ns) -> Vec<HostId> {
        let due = self.0.iter().take_while(|(at, _)| at.after(delay) <= now);
        let mut hosts: Vec<HostId> = due.map(|(_, host)| *host).collect();
        hosts.sort_unstable();
        hosts
    }
}

/// Links of all hosts.
#[derive(Debug, Default)]
pub(super) struct Links {
    by_host: BTreeMap<HostId, Link>,
    last_message: HostSchedule,
    silent: HostSchedule,
    resends: HostSchedule,
    desired_states: HostSchedule,
    rejected: HostSchedule,
}

impl Links {
    pub(super) fn get(&self, host: &HostId) -> Option<&Link> {
        self.by_host.get(host)
    }

    /// Returns a guard through which a link can be changed. Dropping the guard updates the indexes.
    pub(super) fn get_mut(&mut self, host: &HostId) -> Option<LinkMut<'_>> {
        let before = self.by_host.get(host)?.due_times();
        Some(LinkMut { links: self, host: *host, before })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&HostId, &Link)> {
        self.by_host.iter()
    }

    pub(super) fn insert(&mut self, host: HostId, link: Link) {
        let after = link.due_times();
        let before = self.by_host.insert(host, link).map(|old| old.due_times()).unwrap_or_default();
        self.reschedule_host(host, before, after);
    }

    pub(super) fn remove(&mut self, host: &HostId) -> Option<Link> {
        let link = self.by_host.remove(host)?;
        self.reschedule_host(*host, link.due_times(), HostDueTimes::default());
        Some(link)
    }

    /// Returns the hosts whose last message is at least `ttl` old and whose lease has not yet been
    /// marked as expired.
    pub(super) fn expired_leases(&self, now: Ns, ttl: Ns) -> Vec<HostId> {
        self.last_message.due(now, ttl)
    }

    /// Returns the hosts that have been silent for at least `time` since the end of their lease.
    pub(super) fn hosts_silent_for(&self, now: Ns, time: Ns) -> Vec<HostId> {
        self.silent.due(now, time)
    }

    /// Returns the hosts whose unanswered desired state must be sent again.
    pub(super) fn hosts_with_due_resend(&self, now: Ns) -> Vec<HostId> {
        self.resends.due(now, Ns::ZERO)
    }

    /// Returns the hosts whose pending desired state may be sent now.
    pub(super) fn hosts_with_due_state(&self, now: Ns) -> Vec<HostId> {
        self.desired_states.due(now, Ns::ZERO)
    }

    /// Returns the hosts for which the latest rejection of an agent is at least two leases ago.
    pub(super) fn expired_rejections(&self, now: Ns, ttl: Ns) -> Vec<HostId> {
        self.rejected.due(now, double_lease_time(ttl))
    }

    /// Returns the earliest time at which work for any host is due.
    pub(super) fn next_wakeup(&self, ttl: Ns, fence_after: Option<Ns>) -> Option<Ns> {
        let lease = self.last_message.first().map(|at| at.after(ttl));
        let fence = self.silent.first().and_then(|at| Some(at.after(fence_after?)));
        let rejected = self.rejected.first().map(|at| at.after(double_lease_time(ttl)));
        [lease, fence, self.resends.first(), self.desired_states.first(), rejected]
            .into_iter()
            .flatten()
            .min()
    }

    fn reschedule_host(&mut self, host: HostId, before: HostDueTimes, after: HostDueTimes) {
        self.last_message.update(host, before.last_message, after.last_message);
        self.silent.update(host, before.silent, after.silent);
        self.resends.update(host, before.resend, after.resend);
        self.desired_states.update(host, before.desired_state, after.desired_state);
        self.rejected.update(host, before.rejected, after.rejected);
    }

    /// Checks the indexes against indexes computed from all links.
    #[cfg(test)]
    pub(super) fn check_indexes(&self) {
        let mut computed = Self::default();
        self.by_host.iter().for_each(|(host, link)| {
            computed.reschedule_host(*host, HostDueTimes::default(), link.due_times())
        });
        let schedules = |links: &Self| {
            [&links.last_message, &links.silent, &links.resends, &links.desired_states, &links.rejected]
                .map(|schedule| schedule.0.clone())
        };
        assert_eq!(schedules(self), schedules(&computed), "hosts by due time");
    }
}

fn double_lease_time(ttl: Ns) -> Ns {
    Ns(ttl.0.saturating_mul(2))
}

/// Guard for changes of a link; updates the indexes when it is dropped.
pub(super) struct LinkMut<'a> {
    links: &'a mut Links,
    host: HostId,
    before: HostDueTimes,
}

impl Deref for LinkMut<'_> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.links.by_host[&self.host]
    }
}

impl DerefMut for LinkMut<'_> {
    fn deref_mut(&mut self) -> &mut Link {
        self.links.by_host.get_mut(&self.host).expect("the guard's host has a link")
    }
}

impl Drop for LinkMut<'_> {
    fn drop(&mut self) {
        let after = self.due_times();
        self.links.reschedule_host(self.host, self.before, after);
    }
}
