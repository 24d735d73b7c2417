//! Record of the daemon: the budgets of all clients, and the free pages of the host.

use std::collections::BTreeMap;

use units::limits::SOFT_CLIENTS_MAX;

use super::sample::{ClientSample, Pid};

/// Error of an operation of the ledger. The operation changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The ledger has `units::limits::SOFT_CLIENTS_MAX` clients.
    #[error("cannot add the client: there are {0} clients, which is the maximum")]
    TooManyClients(usize),
    /// A client with this process ID exists.
    #[error("cannot add the client: process {} is connected already", .0.0)]
    AlreadyConnected(Pid),
    /// No client has this process ID.
    #[error("process {} is not connected", .0.0)]
    NotConnected(Pid),
    /// The free pages do not suffice.
    #[error("cannot grant the pages: {free} pages are free, and {requested} were requested")]
    Short {
        /// Free pages.
        free: u64,
        /// Requested pages.
        requested: u64,
    },
}

/// Budgets of all clients. The free pages and all budgets together are always the total.
#[derive(Clone, Debug)]
pub struct Ledger {
    total: u64,
    free: u64,
    clients: BTreeMap<Pid, Entry>,
}

/// Record of a client.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sample: ClientSample,
    /// Pages of the footprint that were granted and not measured yet. At most the budget.
    unmeasured: u64,
}

impl Ledger {
    /// Creates a ledger without clients, with this number of pages for soft memory.
    pub fn new(total: u64) -> Self {
        Self { total, free: total, clients: BTreeMap::new() }
    }

    /// Returns the number of pages for soft memory.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of pages that are in no budget.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Returns the number of pages that all clients use.
    pub fn used(&self) -> u64 {
        self.clients().map(ClientSample::used).sum()
    }

    /// Returns the number of pages that a client uses, or 0 if it is not connected.
    pub fn used_by(&self, pid: Pid) -> u64 {
        self.clients.get(&pid).map_or(0, |client| client.sample.used())
    }

    /// Returns the budget of a client, or 0 if it is not connected.
    pub fn budget(&self, pid: Pid) -> u64 {
        self.clients.get(&pid).map_or(0, |client| client.sample.budget)
    }

    /// Returns whether a client is connected.
    pub fn contains(&self, pid: Pid) -> bool {
        self.clients.contains_key(&pid)
    }

    /// Returns all clients by process ID.
    pub fn clients(&self) -> impl Iterator<Item = &ClientSample> {
        self.clients.values().map(|client| &client.sample)
    }

    /// Adds a client without budget.
    ///
    /// # Errors
    /// Returns [`LedgerError::AlreadyConnected`] or [`LedgerError::TooManyClients`].
    pub fn connect(&mut self, pid: Pid) -> Result<(), LedgerError> {
        if self.clients.contains_key(&pid) {
            return Err(LedgerError::AlreadyConnected(pid));
        }
        if self.clients.len() >= SOFT_CLIENTS_MAX {
            return Err(LedgerError::TooManyClients(SOFT_CLIENTS_MAX));
        }
        let sample = ClientSample { pid, budget: 0, claimed_used: 0, footprint: 0 };
        self.clients.insert(pid, Entry { sample, unmeasured: 0 });
        Ok(())
    }

    /// Removes a client whose process has ended. Its budget becomes free. Returns its budget.
    ///
    /// # Errors
    /// Returns [`LedgerError::NotConnected`].
    pub fn disconnect(&mut self, pid: Pid) -> Result<u64, LedgerError> {
        let client = self.clients.remove(&pid).ok_or(LedgerError::NotConnected(pid))?;
        self.free += client.sample.budget;
        Ok(client.sample.budget)
    }

    /// Records the claimed use of soft memory of a client. It has no effect on the footprint.
    ///
    /// # Errors
    /// Returns [`LedgerError::NotConnected`].
    pub fn report_used(&mut self, pid: Pid, pages: u64) -> Result<(), LedgerError> {
        self.client(pid)?.sample.claimed_used = pages;
        Ok(())
    }

    /// Records the measured memory of a client. Pages that were granted since the measurement began add to the
    /// footprint, as far as they are in the budget. Returns their number.
    ///
    /// # Errors
    /// Returns [`LedgerError::NotConnected`].
    pub fn report_footprint(&mut self, pid: Pid, measured: u64, granted: u64) -> Result<u64, LedgerError> {
        let Entry { sample, unmeasured } = self.client(pid)?;
        *unmeasured = granted.min(sample.budget);
        sample.footprint = measured.saturating_add(*unmeasured);
        Ok(*unmeasured)
    }

    /// Moves free pages to the budget of a client. They count as used until the next reports, because the client
    /// requested them for use.
    ///
    /// # Errors
    /// Returns [`LedgerError::Short`] or [`LedgerError::NotConnected`].
    pub fn grant(&mut self, pid: Pid, pages: u64) -> Result<(), LedgerError> {
        let free = self.free;
        let Entry { sample, unmeasured } = self.client(pid)?;
        let remaining = free.checked_sub(pages).ok_or(LedgerError::Short { free, requested: pages })?;
        sample.budget += pages;
        sample.claimed_used = sample.claimed_used.saturating_add(pages);
        sample.footprint = sample.footprint.saturating_add(pages);
        *unmeasured += pages;
        self.free = remaining;
        Ok(())
    }

    /// Records that a client gave pages up. A client can return at most its budget. Returns the number of
    /// pages that became free.
    ///
    /// # Errors
    /// Returns [`LedgerError::NotConnected`].
    pub fn record_returned(&mut self, pid: Pid, pages: u64) -> Result<u64, LedgerError> {
        let Entry { sample, unmeasured } = self.client(pid)?;
        let returned = pages.min(sample.budget);
        sample.budget -= returned;
        // The next report measures the use. Until then, returned pages count as unused first.
        sample.claimed_used = sample.claimed_used.min(sample.budget);
        let returned_unmeasured = unmeasured.saturating_sub(sample.budget);
        *unmeasured -= returned_unmeasured;
        sample.footprint -= returned_unmeasured;
        self.free += returned;
        Ok(returned)
    }

    /// Adds pages for soft memory.
    pub fn grow(&mut self, pages: u64) {
        let added = pages.min(u64::MAX - self.total);
        self.total += added;
        self.free += added;
    }

    /// Takes up to `pages` free pages away from soft memory, for other use by the host. Returns their
    /// number.
    pub fn shrink(&mut self, pages: u64) -> u64 {
        let taken = pages.min(self.free);
        self.total -= taken;
        self.free -= taken;
        taken
    }

    fn client(&mut self, pid: Pid) -> Result<&mut Entry, LedgerError> {
        self.clients.get_mut(&pid).ok_or(LedgerError::NotConnected(pid))
    }
}
