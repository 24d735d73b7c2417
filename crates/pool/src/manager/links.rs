//! The links of all hosts, indexed by the times at which something is due for a host, so that no event looks at every host.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Deref, DerefMut},
};

use units::{HostId, Ns};

use super::hosts::Link;

/// The times at which something is due for a host, on the clock of decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    /// The latest report, while the lease runs.
    pub(super) heard: Option<Ns>,
    /// The end of the lease, while the agent is not connected.
    pub(super) silent: Option<Ns>,
    /// When an unanswered order is repeated.
    pub(super) repeat: Option<Ns>,
    /// When the next order may be sent, if one is due.
    pub(super) order: Option<Ns>,
    /// When an older agent was last rejected.
    pub(super) rejected: Option<Ns>,
}

/// Hosts by a time.
#[derive(Debug, Default)]
struct Schedule(BTreeSet<(Ns, HostId)>);

impl Schedule {
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

    /// Hosts whose time, `delay` later, has come, in ascending order.
    fn due(&self, now: Ns, delay: Ns) -> Vec<HostId> {
        let due = self.0.iter().take_while(|(at, _)| at.after(delay) <= now);
        let mut hosts: Vec<HostId> = due.map(|(_, host)| *host).collect();
        hosts.sort_unstable();
        hosts
    }
}

/// The links of all hosts.
#[derive(Debug, Default)]
pub(super) struct Links {
    by_host: BTreeMap<HostId, Link>,
    heard: Schedule,
    silent: Schedule,
    repeats: Schedule,
    orders: Schedule,
    rejected: Schedule,
}

impl Links {
    pub(super) fn get(&self, host: &HostId) -> Option<&Link> {
        self.by_host.get(host)
    }

    /// Changes one link; the index follows when the guard is dropped.
    pub(super) fn get_mut(&mut self, host: &HostId) -> Option<LinkMut<'_>> {
        let before = self.by_host.get(host)?.due();
        Some(LinkMut { links: self, host: *host, before })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&HostId, &Link)> {
        self.by_host.iter()
    }

    pub(super) fn insert(&mut self, host: HostId, link: Link) {
        let after = link.due();
        let before = self.by_host.insert(host, link).map(|old| old.due()).unwrap_or_default();
        self.reschedule(host, before, after);
    }

    pub(super) fn remove(&mut self, host: &HostId) -> Option<Link> {
        let link = self.by_host.remove(host)?;
        self.reschedule(*host, link.due(), Due::default());
        Some(link)
    }

    /// Hosts whose lease of this length is over.
    pub(super) fn lease_over(&self, now: Ns, ttl: Ns) -> Vec<HostId> {
        self.heard.due(now, ttl)
    }

    /// Hosts that have been silent for so long past their lease.
    pub(super) fn silent_for(&self, now: Ns, time: Ns) -> Vec<HostId> {
        self.silent.due(now, time)
    }

    /// Hosts whose order is to be repeated.
    pub(super) fn repeats_due(&self, now: Ns) -> Vec<HostId> {
        self.repeats.due(now, Ns::ZERO)
    }

    /// Hosts that may be sent the order that is due.
    pub(super) fn orders_due(&self, now: Ns) -> Vec<HostId> {
        self.orders.due(now, Ns::ZERO)
    }

    /// Hosts at which an older agent was last rejected two leases ago or earlier.
    pub(super) fn rejected_until(&self, now: Ns, ttl: Ns) -> Vec<HostId> {
        self.rejected.due(now, two_leases(ttl))
    }

    /// When the next of all these is due.
    pub(super) fn next_wakeup(&self, ttl: Ns, fence_after: Option<Ns>) -> Option<Ns> {
        let lease = self.heard.first().map(|at| at.after(ttl));
        let fence = self.silent.first().and_then(|at| Some(at.after(fence_after?)));
        let rejected = self.rejected.first().map(|at| at.after(two_leases(ttl)));
        [lease, fence, self.repeats.first(), self.orders.first(), rejected].into_iter().flatten().min()
    }

    fn reschedule(&mut self, host: HostId, before: Due, after: Due) {
        self.heard.update(host, before.heard, after.heard);
        self.silent.update(host, before.silent, after.silent);
        self.repeats.update(host, before.repeat, after.repeat);
        self.orders.update(host, before.order, after.order);
        self.rejected.update(host, before.rejected, after.rejected);
    }

    /// Compares the index with one that is computed from all links.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut computed = Self::default();
        self.by_host.iter().for_each(|(host, link)| computed.reschedule(*host, Due::default(), link.due()));
        let schedules = |links: &Self| {
            [&links.heard, &links.silent, &links.repeats, &links.orders, &links.rejected]
                .map(|schedule| schedule.0.clone())
        };
        assert_eq!(schedules(self), schedules(&computed), "hosts by what is due");
    }
}

fn two_leases(ttl: Ns) -> Ns {
    Ns(ttl.0.saturating_mul(2))
}

/// One link that may be changed.
pub(super) struct LinkMut<'a> {
    links: &'a mut Links,
    host: HostId,
    before: Due,
}

impl Deref for LinkMut<'_> {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.links.by_host[&self.host]
    }
}

impl DerefMut for LinkMut<'_> {
    fn deref_mut(&mut self) -> &mut Link {
        self.links.by_host.get_mut(&self.host).expect("a guard's link is there")
    }
}

impl Drop for LinkMut<'_> {
    fn drop(&mut self) {
        let after = self.due();
        self.links.reschedule(self.host, self.before, after);
    }
}
