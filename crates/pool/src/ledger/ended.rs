//! Request ids of ended reservations: how many are remembered, and which is forgotten first.
//!
//! Only reservations whose slices are all back are here. Their number is bounded for each client and in total; every
//! index follows from the set of entries alone, so that a ledger read from its records forgets in the same order.
//!
//! Client names are certified under mTLS only; elsewhere a caller may use a new one for each request, so a share for each
//! name protects no client. Time does: a caller cannot invent a past. While there are too many ids in total, those of
//! clients without one that is [`CLIENT_ESTABLISHED_AFTER`] old are forgotten first, oldest first. A flood, under however
//! many names, thus displaces its own ids and those of other new clients. Only where no new client is left, the client
//! with the most ids loses its oldest.

use std::collections::{BTreeMap, BTreeSet};

use units::limits::{
    CLIENT_ESTABLISHED_AFTER, ENDED_REQUESTS_MAX, ENDED_REQUESTS_PER_CLIENT_MAX, REQUEST_ID_RETENTION,
};
use units::{Name, Ns, ReservationId};

/// When a reservation ended, and which it is.
type Entry = (Ns, ReservationId);

/// Limits on remembered ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub per_client: usize,
    pub total: usize,
    pub established_after: Ns,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            per_client: ENDED_REQUESTS_PER_CLIENT_MAX,
            total: ENDED_REQUESTS_MAX,
            established_after: CLIENT_ESTABLISHED_AFTER,
        }
    }
}

/// Ended reservations that may be forgotten.
#[derive(Clone, Debug, Default)]
pub(super) struct EndedRequests {
    pub(super) bounds: Bounds,
    all: BTreeSet<Entry>,
    by_client: BTreeMap<Name, BTreeSet<Entry>>,
    /// Clients by the number of their entries.
    by_count: BTreeSet<(usize, Name)>,
    /// Clients by their oldest entry.
    by_oldest: BTreeMap<Entry, Name>,
}

impl EndedRequests {
    pub(super) fn insert(&mut self, client: &Name, entry: Entry) {
        if self.all.insert(entry) {
            self.update(client, |entries| entries.insert(entry));
        }
    }

    pub(super) fn remove(&mut self, client: &Name, entry: Entry) {
        if self.all.remove(&entry) {
            self.update(client, |entries| entries.remove(&entry));
        }
    }

    fn update(&mut self, client: &Name, change: impl FnOnce(&mut BTreeSet<Entry>) -> bool) {
        let mut entries = self.by_client.remove(client).unwrap_or_default();
        if let Some(oldest) = entries.first() {
            self.by_oldest.remove(oldest);
            self.by_count.remove(&(entries.len(), client.clone()));
        }
        change(&mut entries);
        if let Some(oldest) = entries.first() {
            self.by_oldest.insert(*oldest, client.clone());
            self.by_count.insert((entries.len(), client.clone()));
            self.by_client.insert(client.clone(), entries);
        }
    }

    /// When the next entry is past its time.
    pub(super) fn next_expiry(&self) -> Option<Ns> {
        self.all.first().map(|(at, _)| at.after(REQUEST_ID_RETENTION))
    }

    /// Entries past their time, oldest first.
    pub(super) fn expired(&self, now: Ns) -> impl Iterator<Item = ReservationId> {
        let expired = self.all.iter().take_while(move |(at, _)| at.after(REQUEST_ID_RETENTION) <= now);
        expired.map(|(_, id)| *id)
    }

    /// Whether more entries are remembered than allowed.
    pub(super) fn has_excess(&self) -> bool {
        self.all.len() > self.bounds.total
            || self.by_count.last().is_some_and(|(most, _)| *most > self.bounds.per_client)
    }

    /// The entry to forget next because there are too many: of a client, or in total. None that ended at `durable_until` or
    /// later is chosen, as the reply to its release may still wait for the disk.
    pub(super) fn excess(&self, now: Ns, durable_until: Ns) -> Option<ReservationId> {
        if !self.has_excess() {
            return None;
        }
        let (most, client) = self.by_count.last()?;
        let is_durable = |(at, _): &Entry| *at < durable_until;
        let oldest_of_most = || self.by_client[client].first().copied().filter(is_durable);
        let chosen = if *most > self.bounds.per_client {
            oldest_of_most()
        } else {
            self.oldest_of_newcomers(now).filter(is_durable).or_else(oldest_of_most)
        };
        chosen.map(|(_, id)| id)
    }

    /// The oldest entry of all clients that are not established yet: the oldest one of the client with the longest past
    /// among them.
    fn oldest_of_newcomers(&self, now: Ns) -> Option<Entry> {
        let since = Ns((now.0 + 1).saturating_sub(self.bounds.established_after.0));
        self.by_oldest.range((since, ReservationId(0))..).next().map(|(entry, _)| *entry)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Entries by client, once every index agrees with them.
    #[cfg(test)]
    pub(super) fn checked(&self) -> &BTreeMap<Name, BTreeSet<Entry>> {
        let all: BTreeSet<Entry> = self.by_client.values().flatten().copied().collect();
        assert_eq!(all, self.all);
        let count = self.by_client.iter().map(|(client, entries)| (entries.len(), client.clone()));
        assert_eq!(count.collect::<BTreeSet<_>>(), self.by_count);
        let oldest = self.by_client.iter().map(|(client, entries)| {
            (*entries.first().expect("a client without entries is not kept"), client.clone())
        });
        assert_eq!(oldest.collect::<BTreeMap<_, _>>(), self.by_oldest);
        &self.by_client
    }
}
