//! Stored request IDs of ended reservations: their limits, and the order in which they expire.
//!
//! The index contains only ended reservations without outstanding slices and without a running
//! process. Their number is limited per client and in total. All indexes are derived from the set
//! of entries, so that a ledger loaded from its records expires entries in the same order.
//!
//! Client names are authenticated only under mTLS. Without mTLS, a caller can use a new name for
//! each request, so a limit per name does not protect other clients. But a caller cannot forge the
//! age of a client. Above the total limit, IDs of clients without an entry older than
//! [`CLIENT_ESTABLISHMENT_TIME`] expire first, in order of age. A flood of requests under many names
//! therefore displaces only IDs of new clients. Without new clients, the client with the most IDs
//! loses its oldest ID.

use std::collections::{BTreeMap, BTreeSet};

use units::limits::{
    CLIENT_ESTABLISHMENT_TIME, ENDED_REQUESTS_MAX, ENDED_REQUESTS_PER_CLIENT_MAX, REQUEST_ID_RETENTION,
};
use units::{Name, Ns, ReservationId};

/// Rack time at which a reservation ended, and the ID of the reservation.
type Entry = (Ns, ReservationId);

/// Limits on the number of stored request IDs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    pub per_client: usize,
    pub total: usize,
    pub established_after: Ns,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            per_client: ENDED_REQUESTS_PER_CLIENT_MAX,
            total: ENDED_REQUESTS_MAX,
            established_after: CLIENT_ESTABLISHMENT_TIME,
        }
    }
}

/// Index of the ended reservations that may expire.
#[derive(Clone, Debug, Default)]
pub(super) struct EndedRequests {
    pub(super) bounds: RequestLimits,
    all: BTreeSet<Entry>,
    by_client: BTreeMap<Name, BTreeSet<Entry>>,
    /// Clients, each with its number of entries, in ascending order of this number.
    by_count: BTreeSet<(usize, Name)>,
    /// Clients, by their oldest entry.
    by_oldest: BTreeMap<Entry, Name>,
}

impl EndedRequests {
    pub(super) fn insert(&mut self, client: &Name, entry: Entry) {
        if self.all.insert(entry) {
            self.update_client_requests(client, |entries| entries.insert(entry));
        }
    }

    pub(super) fn remove(&mut self, client: &Name, entry: Entry) {
        if self.all.remove(&entry) {
            self.update_client_requests(client, |entries| entries.remove(&entry));
        }
    }

    fn update_client_requests(&mut self, client: &Name, change: impl FnOnce(&mut BTreeSet<Entry>) -> bool) {
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

    /// Returns the rack time at which the next entry expires.
    pub(super) fn next_expiry(&self) -> Option<Ns> {
        self.all.first().map(|(at, _)| at.after(REQUEST_ID_RETENTION))
    }

    /// Returns the reservations whose entries have expired, oldest first.
    pub(super) fn expired(&self, now: Ns) -> impl Iterator<Item = ReservationId> {
        let expired = self.all.iter().take_while(move |(at, _)| at.after(REQUEST_ID_RETENTION) <= now);
        expired.map(|(_, id)| *id)
    }

    /// Returns whether a client, or all clients together, exceed their limit.
    pub(super) fn exceeds_request_limits(&self) -> bool {
        self.all.len() > self.bounds.total
            || self.by_count.last().is_some_and(|(most, _)| *most > self.bounds.per_client)
    }

    /// Returns the reservation to delete next because a client, or all clients together, exceed
    /// their limit. Excludes reservations that ended at `durable_until` or later, because their end
    /// may not be durable yet.
    pub(super) fn next_excess_request(&self, now: Ns, durable_until: Ns) -> Option<ReservationId> {
        if !self.exceeds_request_limits() {
            return None;
        }
        let (most, client) = self.by_count.last()?;
        let is_durable = |(at, _): &Entry| *at < durable_until;
        let oldest_of_most = || self.by_client[client].first().copied().filter(is_durable);
        let chosen = if *most > self.bounds.per_client {
            oldest_of_most()
        } else {
            self.oldest_of_new_clients(now).filter(is_durable).or_else(oldest_of_most)
        };
        chosen.map(|(_, id)| id)
    }

    /// Returns the oldest entry among the clients that are not established: all their entries are
    /// recent.
    fn oldest_of_new_clients(&self, now: Ns) -> Option<Entry> {
        let since = Ns((now.0 + 1).saturating_sub(self.bounds.established_after.0));
        self.by_oldest.range((since, ReservationId(0))..).next().map(|(entry, _)| *entry)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Checks that all indexes agree, and returns the entries by client.
    #[cfg(test)]
    pub(super) fn check_indexes(&self) -> &BTreeMap<Name, BTreeSet<Entry>> {
        let all: BTreeSet<Entry> = self.by_client.values().flatten().copied().collect();
        assert_eq!(all, self.all);
        let count = self.by_client.iter().map(|(client, entries)| (entries.len(), client.clone()));
        assert_eq!(count.collect::<BTreeSet<_>>(), self.by_count);
        let oldest = self.by_client.iter().map(|(client, entries)| {
            (*entries.first().expect("every listed client has an entry"), client.clone())
        });
        assert_eq!(oldest.collect::<BTreeMap<_, _>>(), self.by_oldest);
        &self.by_client
    }
}
