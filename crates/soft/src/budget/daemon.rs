//! State of the daemon: answers requests, demands pages from clients, and adapts the total to the memory of the
//! host.

mod client;

use std::collections::BTreeMap;

use units::{
    Ns, UserId,
    limits::{
        SOFT_ANSWER_TIMEOUT, SOFT_CLIENTS_MAX, SOFT_DECISIONS_MAX, SOFT_DENIAL_INTERVAL, SOFT_PASS_OVER_TIME,
        SOFT_RECONNECT_TIME,
    },
};

use self::client::{Client, Pending};
pub use self::client::{ClientReport, Counters};
use super::{
    decision::{Decision, Demand, Settings, decide, decide_for_host},
    ledger::{Ledger, LedgerError},
    queue::RequestQueue,
    sample::{ClientSample, Pid},
};
use crate::protocol::{ClientMessage, DaemonMessage, Refusal, VERSION};

/// A client that gives up less than the demanded pages divided by this number is passed over.
const PASS_OVER_DIVISOR: u64 = 2;

/// Message for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Process of the client.
    pub pid: Pid,
    /// Message.
    pub message: DaemonMessage,
}

/// Memory of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Maximum number of pages of soft memory: the configured size, and slices that the host may use.
    pub limit: u64,
    /// Pages that the host can use without swapping, less the pages that must stay available. Negative if too
    /// few pages are available.
    pub headroom: i64,
}

/// Request that is being fulfilled.
#[derive(Clone, Copy, Debug)]
struct Active {
    pid: Pid,
    decisions: u32,
    /// Time until which the request waits for answers to demands.
    deadline: Ns,
}

/// Soft memory daemon (Soft Memory, section 3.3), without its sockets and its clock.
///
/// Requests are fulfilled one after the other. The users take turns, so that a user with many clients does not delay
/// the requests of others: before the next request of a user, at most one of each other user is fulfilled.
///
/// If the free pages do not suffice, a request waits until all demands are answered, but at most
/// `units::limits::SOFT_ANSWER_TIMEOUT` before its first decision and after each of its
/// `units::limits::SOFT_DECISIONS_MAX` decisions. So a decision is based on the pages that clients still have. A
/// client that answers late, or gives up less than half of the demanded pages, is passed over for a time, in which it
/// receives no demands for other clients' requests. A client that gives up more lets a request succeed within its
/// decisions, and passing it over would deny the requests of others while it keeps its pages.
///
/// After its start, the daemon only accepts clients of an earlier daemon for
/// `units::limits::SOFT_RECONNECT_TIME`, so that their budgets are known before it grants pages.
#[derive(Debug)]
pub struct Daemon {
    settings: Settings,
    ledger: Ledger,
    clients: BTreeMap<Pid, Client>,
    /// Processes that receive no demands until then, unless the host needs memory and no other client can receive a
    /// demand. A process cannot end this time by a new connection. At most `units::limits::SOFT_CLIENTS_MAX`.
    passed_over: BTreeMap<Pid, Ns>,
    queue: RequestQueue,
    active: Option<Active>,
    /// Maximum total, by which the memory of the host suffices.
    target: u64,
    /// Whether the memory of the clients was measured after the last adaptation to the host.
    is_measured: bool,
    grants_from: Ns,
    last_demand: u64,
    counters: Counters,
    outgoing: Vec<Outgoing>,
}

impl Daemon {
    /// Creates a daemon without clients. `now` is the time on a monotonic clock, as for all methods.
    pub fn new(settings: Settings, total: u64, now: Ns) -> Self {
        Self {
            settings,
            ledger: Ledger::new(total),
            clients: BTreeMap::new(),
            passed_over: BTreeMap::new(),
            queue: RequestQueue::default(),
            active: None,
            target: total,
            is_measured: false,
            grants_from: now.after(SOFT_RECONNECT_TIME),
            last_demand: 0,
            counters: Counters::default(),
            outgoing: Vec::new(),
        }
    }

    /// Returns the budgets.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the counters of all clients, including those that have ended.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the state of all clients by process ID.
    pub fn clients(&self) -> impl Iterator<Item = ClientReport> {
        self.ledger.clients().zip(self.clients.values()).map(|(sample, client)| ClientReport {
            sample: *sample,
            counters: client.counters,
            is_silent: client.detached_until.is_some()
                || client.pending.is_some_and(|pending| pending.is_late),
        })
    }

    /// Returns the messages that the caller must send, in their order for each client.
    pub fn take_outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// Adds a client of a user after its first message, and records its measured memory in pages. A new client has no
    /// budget. A client with budget from an earlier connection keeps as much of it as is free and as its memory shows,
    /// and must give up the rest.
    ///
    /// # Errors
    /// Returns the reason why the client is refused.
    pub fn connect(
        &mut self,
        pid: Pid,
        user: UserId,
        first: ClientMessage,
        footprint: u64,
    ) -> Result<(), Refusal> {
        let ClientMessage::Hello { version, budget } = first else { return Err(Refusal::InvalidMessage) };
        if version != VERSION {
            return Err(Refusal::Version);
        }
        if self.clients.get(&pid).is_some_and(|client| client.detached_until.is_some()) {
            self.remove(pid);
        }
        self.ledger.connect(pid).map_err(|error| match error {
            LedgerError::AlreadyConnected(_) => Refusal::AlreadyConnected,
            _ => Refusal::TooManyClients,
        })?;
        let kept = budget.min(footprint).min(self.ledger.free()).min(self.settings.client_pages_max);
        self.ledger.grant(pid, kept).expect("the client is connected, and the pages are free");
        self.ledger.report_footprint(pid, footprint, 0).expect("the client is connected");
        self.clients.insert(pid, Client::new(user, kept));
        self.send(pid, DaemonMessage::Welcome { budget: kept, maximum: self.settings.client_pages_max });
        Ok(())
    }

    /// Removes a client whose process has ended. Its budget becomes free.
    pub fn disconnect(&mut self, pid: Pid, now: Ns) {
        self.remove(pid);
        self.passed_over.remove(&pid);
        self.shrink_to_target();
        self.fulfil_requests(now);
    }

    /// Records that a client has lost its connection. Its process may still have memory, so it keeps its budget for
    /// `units::limits::SOFT_RECONNECT_TIME`, in which it can connect again. A pending demand counts as not answered.
    pub fn connection_lost(&mut self, pid: Pid, now: Ns) {
        if let Some(client) = self.clients.get_mut(&pid)
            && let Some(pending) = client.pending.take()
        {
            if !pending.is_late {
                count_unanswered([&mut client.counters, &mut self.counters]);
            }
            self.pass_over(pid, now);
        }
        if self.ledger.budget(pid) == 0 {
            self.remove(pid);
            self.shrink_to_target();
        } else if let Some(client) = self.clients.get_mut(&pid) {
            client.requested = 0;
            client.detached_until = Some(now.after(SOFT_RECONNECT_TIME));
            let user = client.user;
            self.forget_messages(pid, user);
        }
        self.fulfil_requests(now);
    }

    fn remove(&mut self, pid: Pid) {
        if let Some(client) = self.clients.remove(&pid) {
            self.ledger.disconnect(pid).expect("the client is connected");
            self.forget_messages(pid, client.user);
        }
    }

    /// Removes the request of a client, and expects no answer from it.
    fn forget_messages(&mut self, pid: Pid, user: UserId) {
        self.queue.remove(user, pid);
        self.outgoing.retain(|outgoing| outgoing.pid != pid);
        self.active.take_if(|active| active.pid == pid);
    }

    /// Sends no demands to a process for a time.
    fn pass_over(&mut self, pid: Pid, now: Ns) {
        if self.passed_over.len() >= SOFT_CLIENTS_MAX
            && let Some(first) = self.passed_over.iter().min_by_key(|(_, until)| **until).map(|(pid, _)| *pid)
        {
            self.passed_over.remove(&first);
        }
        self.passed_over.insert(pid, now.after(SOFT_PASS_OVER_TIME));
    }

    /// Handles a message of a connected client. Messages of a lost connection are ignored.
    ///
    /// # Errors
    /// Returns a reason to disconnect the client, which the caller does.
    pub fn receive(&mut self, pid: Pid, message: ClientMessage, now: Ns) -> Result<(), Refusal> {
        let is_connected = |client: &&mut Client| client.detached_until.is_none();
        let Some(client) = self.clients.get_mut(&pid).filter(is_connected) else { return Ok(()) };
        let held = match message {
            ClientMessage::Hello { .. } => return Err(Refusal::InvalidMessage),
            ClientMessage::Request { held, .. }
            | ClientMessage::Returned { held, .. }
            | ClientMessage::Answered { held, .. }
            | ClientMessage::Usage { held } => held,
        };
        match message {
            ClientMessage::Request { .. } if client.requested > 0 => return Err(Refusal::InvalidMessage),
            ClientMessage::Request { pages, .. } => {
                client.requested = pages;
                self.queue.push(client.user, pid);
            }
            ClientMessage::Returned { pages, .. } => self.add_returned(pid, pages),
            ClientMessage::Answered { demand, .. } => self.finish_demand(pid, demand, now)?,
            ClientMessage::Hello { .. } | ClientMessage::Usage { .. } => {}
        }
        self.ledger.report_used(pid, held).expect("the client is connected");
        self.fulfil_requests(now);
        Ok(())
    }

    /// Begins a measurement of the memory of all clients.
    pub fn begin_measurement(&mut self) {
        self.clients.values_mut().for_each(|client| client.granted_since_measurement = 0);
    }

    /// Records the measured memory of a client. Pages that were granted since the measurement began are added, as far
    /// as the client still has them.
    pub fn report_footprint(&mut self, pid: Pid, pages: u64) {
        // The client may have ended since the measurement.
        let Some(client) = self.clients.get_mut(&pid) else { return };
        let granted = client.granted_since_measurement;
        let granted = self.ledger.report_footprint(pid, pages, granted).expect("the client is connected");
        client.measured_used = self.ledger.used_by(pid).saturating_sub(granted);
        self.is_measured = true;
    }

    /// Passes over clients that did not answer in time, removes clients that did not connect again, and continues
    /// with requests that wait for them. The caller repeats this periodically.
    pub fn tick(&mut self, now: Ns) {
        let ended = |client: &Client| client.detached_until.is_some_and(|until| until <= now);
        let ended: Vec<Pid> =
            self.clients.iter().filter(|(_, client)| ended(client)).map(|(pid, _)| *pid).collect();
        ended.into_iter().for_each(|pid| self.remove(pid));
        self.passed_over.retain(|_, until| *until > now);
        self.shrink_to_target();
        for client in self.clients.values_mut() {
            let late = client.pending.as_mut().filter(|pending| !pending.is_late && pending.deadline <= now);
            let Some(pending) = late else { continue };
            pending.is_late = true;
            count_unanswered([&mut client.counters, &mut self.counters]);
        }
        self.fulfil_requests(now);
    }

    /// Adapts the total to the memory of the host, and demands pages if they are needed. The caller repeats this
    /// periodically, and after each measurement: the clients of one call are limited in number.
    ///
    /// The budgets may add up to the soft memory in use and the available memory. Pages that were granted since the
    /// last measurement are part of one of both, but of which one is unknown. So the total only grows to the sum
    /// without these pages, and only shrinks to the sum with them. A budget that is larger than this sum is demanded
    /// back directly after a measurement: before, pages that are in use again since the last one are in neither.
    pub fn adapt_to_host(&mut self, memory: HostMemory, now: Ns) {
        let sum = |used: u64| used.saturating_add_signed(memory.headroom).min(memory.limit);
        let (lower, upper) = (sum(self.measured_used()), sum(self.ledger.used()));
        self.target = self.ledger.total().clamp(lower, upper);
        if now < self.grants_from {
            // Clients of an earlier daemon, whose memory is not available any more, have not connected yet.
            self.target = self.target.max(self.ledger.total());
        }
        self.ledger.grow(self.target.saturating_sub(self.ledger.total()));
        self.shrink_to_target();
        if now >= self.grants_from {
            let is_measured = std::mem::take(&mut self.is_measured);
            let permitted = if is_measured { self.target } else { memory.limit };
            self.demand_for_host(permitted, memory.headroom, now);
        }
        self.fulfil_requests(now);
    }

    /// Returns the soft memory in use according to the last measurements. Later claims only reduce it.
    fn measured_used(&self) -> u64 {
        let clients = self.ledger.clients().zip(self.clients.values());
        clients.map(|(sample, client)| sample.used().min(client.measured_used)).sum()
    }

    /// Demands pages so that the budgets do not exceed `permitted` pages, and so that missing memory becomes free.
    fn demand_for_host(&mut self, permitted: u64, headroom: i64, now: Ns) {
        let pending = || self.clients.values().filter_map(|client| client.pending);
        let demanded: u64 = pending().map(|pending| pending.missing_pages()).sum();
        let demanded_memory: u64 = pending().map(|pending| pending.missing_used_pages()).sum();
        let excess = self.ledger.total().saturating_sub(permitted).saturating_sub(demanded);
        let missing_memory = headroom.min(0).unsigned_abs().saturating_sub(demanded_memory);
        let decide =
            |samples: &[ClientSample]| decide_for_host(&self.settings, samples, excess, missing_memory);
        let mut demands = decide(&self.available_samples(now));
        if demands.is_empty() {
            demands = decide(&self.samples(|_, client| client.is_reachable()));
        }
        demands.into_iter().for_each(|demand| self.demand(demand, now));
    }

    /// Returns the samples of the clients that can receive a demand, and are not passed over.
    fn available_samples(&self, now: Ns) -> Vec<ClientSample> {
        let is_passed_over = |pid| self.passed_over.get(&pid).is_some_and(|until| *until > now);
        self.samples(|pid, client| client.is_reachable() && !is_passed_over(pid))
    }

    /// Returns the samples of the clients for which `is_included` is true.
    fn samples(&self, is_included: impl Fn(Pid, &Client) -> bool) -> Vec<ClientSample> {
        let samples = self.ledger.clients().zip(self.clients.values());
        samples
            .filter(|(sample, client)| is_included(sample.pid, client))
            .map(|(sample, _)| *sample)
            .collect()
    }

    fn send(&mut self, pid: Pid, message: DaemonMessage) {
        self.outgoing.push(Outgoing { pid, message });
    }

    fn demand(&mut self, demand: Demand, now: Ns) {
        let (pid, pages) = (demand.pid, demand.pages());
        self.last_demand += 1;
        let number = self.last_demand;
        let Some(client) = self.clients.get_mut(&pid) else { return };
        let deadline = now.after(SOFT_ANSWER_TIMEOUT);
        client.pending = Some(Pending { number, demand, returned: 0, deadline, is_late: false });
        self.send(pid, DaemonMessage::Demand { demand: number, pages });
    }

    /// Records that a client gave pages up.
    fn add_returned(&mut self, pid: Pid, pages: u64) {
        let returned = self.ledger.record_returned(pid, pages).expect("the client is connected");
        if let Some(client) = self.clients.get_mut(&pid)
            && let Some(pending) = &mut client.pending
        {
            pending.returned += returned;
            client.counters.reclaimed += returned;
            self.counters.reclaimed += returned;
        }
        self.shrink_to_target();
    }

    fn finish_demand(&mut self, pid: Pid, number: u64, now: Ns) -> Result<(), Refusal> {
        let client = self.clients.get_mut(&pid).ok_or(Refusal::InvalidMessage)?;
        let pending = client.pending.take_if(|pending| pending.number == number);
        let pending = pending.ok_or(Refusal::InvalidMessage)?;
        let is_useful = pending.returned >= pending.demand.pages() / PASS_OVER_DIVISOR && !pending.is_late;
        if is_useful {
            self.passed_over.remove(&pid);
        } else {
            self.pass_over(pid, now);
        }
        Ok(())
    }

    /// Removes free pages above the target from the total, so that they are not granted.
    fn shrink_to_target(&mut self) {
        self.ledger.shrink(self.ledger.total().saturating_sub(self.target));
    }

    /// Answers requests until one must wait.
    fn fulfil_requests(&mut self, now: Ns) {
        if now < self.grants_from {
            return;
        }
        loop {
            let next = |pid| Active { pid, decisions: 0, deadline: now.after(SOFT_ANSWER_TIMEOUT) };
            let Some(active) = self.active.take().or_else(|| self.queue.pop().map(next)) else {
                return;
            };
            if let Some(active) = self.fulfil(active, now) {
                self.active = Some(active);
                return;
            }
        }
    }

    /// Answers a request, or returns it if it must wait for clients.
    fn fulfil(&mut self, mut active: Active, now: Ns) -> Option<Active> {
        let client = self.clients.get(&active.pid)?;
        let pages = client.requested;
        let budget = self.ledger.budget(active.pid);
        let was_denied = |(at, denied): (Ns, u64)| pages >= denied && now < at.after(SOFT_DENIAL_INTERVAL);
        let is_denied = client.denied.is_some_and(was_denied)
            || pages > self.settings.client_pages_max.saturating_sub(budget);
        if is_denied {
            self.answer(active.pid, 0, now);
            return None;
        }
        if self.ledger.grant(active.pid, pages).is_ok() {
            self.answer(active.pid, pages, now);
            return None;
        }
        if now < active.deadline && self.clients.values().any(Client::is_awaited) {
            return Some(active);
        }
        active.decisions += 1;
        let samples = self.available_samples(now);
        let decision = decide(&self.settings, self.ledger.free(), &samples, active.pid, pages);
        let Decision::Reclaim { demands } = decision else {
            self.answer(active.pid, 0, now);
            return None;
        };
        if active.decisions > SOFT_DECISIONS_MAX {
            self.answer(active.pid, 0, now);
            return None;
        }
        active.deadline = now.after(SOFT_ANSWER_TIMEOUT);
        demands.into_iter().for_each(|demand| self.demand(demand, now));
        Some(active)
    }

    /// Sends the answer to a request. The ledger contains the granted pages.
    fn answer(&mut self, pid: Pid, granted: u64, now: Ns) {
        let Some(client) = self.clients.get_mut(&pid) else { return };
        let requested = std::mem::take(&mut client.requested);
        client.denied = (granted == 0).then_some((now, requested));
        client.granted_since_measurement += granted;
        for counters in [&mut client.counters, &mut self.counters] {
            counters.requests += 1;
            counters.granted += granted;
            counters.denied += u64::from(granted == 0);
        }
        self.send(pid, DaemonMessage::Granted { pages: granted });
    }
}

/// Counts a demand that was not answered in time, for its client and for the daemon.
fn count_unanswered(counters: [&mut Counters; 2]) {
    counters.into_iter().for_each(|counters| counters.unanswered += 1);
}

#[cfg(test)]
mod tests;
