//! The manager's end of the protocol: turns events into effects, and performs no effect itself. All
//! invariants depend on the order of its work: the manager decides, then stores the decision, and
//! only then replies, calls devices and sends desired states.
//!
//! The manager has two ledgers. `head` contains every decision immediately, so that concurrent
//! requests never choose the same slice. `durable` contains the decisions that the store has
//! confirmed. Everything that leaves the process (replies, device calls, desired states, lists) is
//! derived from `durable`, so none of it is ever retracted. New decisions are collected in the open
//! batch while another batch is being written.
//!
//! ```text
//!   event ─▶ decide on head ─▶ open batch ─▶ Store ─▶ stored ─▶ durable ─┬▶ Reply
//!                                                                        ├▶ Device ─▶ event
//!                                                                        └▶ Send ─▶ event
//! ```
//!
//! The outcome of a failed write is unknown. After a failed write, all waiting callers get
//! UNAVAILABLE, and the store is loaded again.

mod buffer;
mod comparison;
mod desired_states;
mod devices;
mod faults;
mod fencing;
mod hosts;
mod link;
mod links;
mod report_log;
mod reports;
mod requests;
mod restore;
mod stop_attempts;
mod upkeep;
mod view;
mod visibility;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use units::limits::{
    AUDIT_ENTRIES_MAX, AUDIT_ENTRIES_PRUNED_PER_BATCH, BATCH_DELAY, CHANGES_PER_BATCH_MAX,
    LEDGER_CHUNK_SLICES_MAX, SLICES_ADDED_SINCE_BACKUP_MAX, SUCCESSIVE_RESTORES_MAX,
};
use units::{EmcId, Epoch, HostId, Ns, ReservationId, Revision, SliceId, UnixMs};

pub use self::{
    buffer::SliceBuffer,
    devices::{Contents, DeviceCall, DeviceFailure, DeviceReply, Grant, SliceError},
    requests::{Request, RequestReply, ReservationView},
    view::{Alarm, EmcState, HostState},
};
use self::{
    comparison::EmcComparison,
    devices::DeviceLink,
    faults::{ReleaseFailure, SliceFaults},
    links::Links,
    report_log::UnadoptedVm,
    stop_attempts::StopAttempts,
};
use crate::{
    audit::Decision,
    ledger::{Change, Ledger, When},
    protocol::{DesiredState, Handle, Hello, ObservedState},
    record::{Fence, Key, Meta, MigrationKey, Record},
    rejection::Rejection,
    slice::Call,
};

/// Identifies a caller that waits for a reply; chosen by the caller of [`Manager::handle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Identifies a connection of a host's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Settings of the manager that an operator can change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time after the last message of an agent at which its host's lease expires.
    pub lease_ttl: Ns,
    /// Time between the end of a host's lease and its fence; `None` disables automatic fences.
    pub fence_after: Option<Ns>,
}

/// Input of the manager.
#[derive(Clone, Debug)]
pub enum Event {
    /// The store was loaded. This is the first event, and is repeated after every failed write.
    Loaded {
        /// Identity, revision and counters of the ledger.
        meta: Meta,
        /// All other records, in any order.
        records: Vec<Record>,
        /// Whether the store was restored from a backup and has not been used since.
        restored: bool,
    },
    /// A client sent a request.
    Request(Token, Request),
    /// The caller no longer waits for its reply.
    CallerGone(Token),
    /// A write of a batch has ended.
    Stored {
        /// Number of the batch in [`Effect::Store`].
        batch: u64,
        /// Whether the batch is durable; otherwise the outcome of the write is unknown.
        ok: bool,
    },
    /// A device replied to a call or failed.
    Device(EmcId, DeviceReply),
    /// An agent connected and identified itself.
    AgentUp(SessionId, HostId, Hello),
    /// An agent reported the observed state of its host.
    AgentReport(SessionId, ObservedState),
    /// The connection of an agent was closed.
    AgentDown(SessionId),
    /// The free space on the store's disk was measured.
    StoreSpace {
        /// Whether the free space is below the limit for new reservations.
        low: bool,
    },
    /// Time has passed; deadlines may be due.
    Tick,
}

/// Output of the manager. Effects must be performed in order.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make all or none of these records durable, then report [`Event::Stored`].
    Store {
        /// Number of the batch, for [`Event::Stored`].
        batch: u64,
        /// Records of the batch, at most one per key.
        records: Arc<Vec<Record>>,
    },
    /// Open the store again and load all records, then report [`Event::Loaded`].
    Reload,
    /// Send this reply to a caller.
    Reply(Token, Box<Result<RequestReply, Rejection>>),
    /// Call a device. Calls to the same device must be performed in order.
    Device(EmcId, DeviceCall),
    /// Send a desired state to an agent.
    Send(SessionId, DesiredState),
    /// Request a complete report from an agent.
    RequestReport(SessionId),
    /// Close an agent's connection.
    Close(SessionId, CloseReason),
    /// A batch became durable; watchers, metrics and traces receive it.
    Durable(PublishedBatch),
}

/// Reason why the manager closes an agent's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// Another connection represents the host: a newer connection of the same agent instance, an
    /// agent that replaced this agent after its lease expired, or the connected agent that this
    /// agent cannot replace.
    Superseded,
    /// The host has VMs and a valid lease from another boot. Its agent must wait until that lease
    /// expires.
    OtherBootLeased,
    /// The agent reported a slice and an epoch that its host cannot have.
    FalseClaim(SliceId, Epoch),
    /// The lease of the host expired.
    LeaseExpired,
    /// The host was removed from the rack.
    HostRemoved,
}

/// Durable batch, published to watchers, metrics and traces.
#[derive(Clone, Debug)]
pub struct PublishedBatch {
    /// Revision of the ledger after the batch.
    pub revision: Revision,
    /// Time at which the batch became durable.
    pub when: When,
    /// Records of the batch.
    pub records: Arc<Vec<Record>>,
    /// Slices that changed state, each with the names of the old and the new state.
    pub transitions: Vec<(SliceId, &'static str, &'static str)>,
}

/// Decisions that become durable together, and the callers that wait for them.
#[derive(Debug, Default)]
struct WriteBatch {
    number: u64,
    records: BTreeMap<Key, Record>,
    replies: Vec<(Token, Reply)>,
    waiting: Vec<(Token, ReservationId, Ns)>,
    /// Rack time of the first decision of the batch.
    since: Ns,
    /// Whether a caller waits for the batch, so that it must be written without delay.
    urgent: bool,
}

/// Reply that is sent after its batch became durable.
#[derive(Clone, Debug)]
enum Reply {
    Reservation(ReservationId),
    /// Reply to a cordon, uncordon, drain or fence. If `drains` is set, the reply lists the VMs
    /// that must be migrated.
    Scheduled {
        place: crate::ledger::SchedulingTarget,
        drains: bool,
    },
    Migration(MigrationKey),
    Done,
    /// Rejection. It is sent only after earlier decisions became durable, because it may depend on
    /// them: for example, it may name a reservation that a failed write would lose.
    Rejected(Rejection),
}

/// State machine of the manager; see the module documentation.
#[derive(Debug)]
pub struct Manager {
    settings: Settings,
    head: Ledger,
    durable: Ledger,
    loaded: bool,
    loaded_at: UnixMs,
    /// First slice ID that no EMC can have had. EMCs that are missing in a restored ledger had
    /// lower slice IDs.
    lost_slices_end: SliceId,
    open: WriteBatch,
    writing: Option<(WriteBatch, Arc<Vec<Record>>)>,
    /// Number of batches written since the start of the manager.
    batch_count: u64,
    links: Links,
    sessions: BTreeMap<SessionId, HostId>,
    devices: BTreeMap<EmcId, DeviceLink>,
    calls: BTreeMap<SliceId, Call>,
    faults: SliceFaults,
    /// Draining slices that their hosts cannot release, until the state of the slice changes.
    release_failures: BTreeMap<SliceId, ReleaseFailure>,
    /// Fence calls in progress. The value states whether the host was known to have stopped.
    fence_calls: BTreeMap<(EmcId, HostId), bool>,
    stop_attempts: StopAttempts,
    /// Running VMs that the ledger could not adopt, by host.
    unadopted: BTreeMap<HostId, Vec<UnadoptedVm>>,
    handles: BTreeMap<SliceId, (Epoch, Handle)>,
    places: BTreeMap<SliceId, Handle>,
    /// Handles and locations found by comparisons of EMCs. Hosts receive them with the next durable
    /// revision.
    pending_handles: BTreeMap<SliceId, (Epoch, Handle)>,
    pending_places: BTreeMap<SliceId, Handle>,
    waiters: BTreeMap<ReservationId, Vec<(Ns, Token)>>,
    waiter_deadlines: BTreeSet<(Ns, Token, ReservationId)>,
    /// Reservation and deadline of each waiting caller. Used to remove a caller that no longer
    /// waits.
    waiting: BTreeMap<Token, (Ns, ReservationId)>,
    buffer: SliceBuffer,
    /// Time since which the store's disk has too little space for reservations, wall clock.
    store_low_since: Option<UnixMs>,
    /// Alarms of the rack that the caller observes, by reason: message and start.
    rack_alarms: BTreeMap<&'static str, (String, UnixMs)>,
    /// Time of each quarantine since the ledger was loaded, wall clock.
    quarantined_at: BTreeMap<SliceId, UnixMs>,
    /// Time since which a host cannot use one of its attached EMCs, wall clock.
    unusable_emcs_since: BTreeMap<HostId, UnixMs>,
    leases_expired: u64,
    /// Number of events so far that may change whether a reported VM can be adopted: loads of the
    /// ledger, comparisons of EMCs, and quarantines. After such an event, every host must send a
    /// complete report.
    adoption_events: u64,
    /// EMCs whose contents are being compared with the ledger.
    comparisons: BTreeMap<EmcId, EmcComparison>,
    /// Maximum number of slices that one event processes.
    chunk_size: usize,
    /// Number of times that the ledger was loaded.
    loads: u64,
    /// Whether an event that requires upkeep arrived since the last upkeep. Requests do not require
    /// upkeep.
    upkeep_due: bool,
    prune_at: Ns,
    /// Whether state that is not durable changed since the last call of [`Manager::take_change_flag`],
    /// for example because a host became silent or an EMC failed.
    changed: bool,
    effects: VecDeque<Effect>,
}

impl Manager {
    /// Creates a manager that waits for [`Event::Loaded`].
    pub fn new(settings: Settings) -> Self {
        let empty = || Ledger::new(Meta::new(String::new()));
        Self {
            settings,
            head: empty(),
            durable: empty(),
            loaded: false,
            loaded_at: UnixMs(0),
            lost_slices_end: SliceId(0),
            open: WriteBatch::default(),
            writing: None,
            batch_count: 0,
            links: Links::default(),
            sessions: BTreeMap::new(),
            devices: BTreeMap::new(),
            calls: BTreeMap::new(),
            faults: SliceFaults::default(),
            release_failures: BTreeMap::new(),
            fence_calls: BTreeMap::new(),
            stop_attempts: StopAttempts::default(),
            unadopted: BTreeMap::new(),
            handles: BTreeMap::new(),
            places: BTreeMap::new(),
            pending_handles: BTreeMap::new(),
            pending_places: BTreeMap::new(),
            waiters: BTreeMap::new(),
            waiter_deadlines: BTreeSet::new(),
            waiting: BTreeMap::new(),
            buffer: SliceBuffer::default(),
            store_low_since: None,
            rack_alarms: BTreeMap::new(),
            quarantined_at: BTreeMap::new(),
            unusable_emcs_since: BTreeMap::new(),
            leases_expired: 0,
            adoption_events: 0,
            comparisons: BTreeMap::new(),
            chunk_size: LEDGER_CHUNK_SLICES_MAX,
            loads: 0,
            upkeep_due: false,
            prune_at: Ns::ZERO,
            changed: false,
            effects: VecDeque::new(),
        }
    }

    /// Sets the maximum number of slices that one event processes in comparisons and complete
    /// desired states.
    pub fn set_chunk_size(&mut self, slices: usize) {
        self.chunk_size = slices.max(1);
    }

    /// Returns the durable ledger, which is the only ledger visible outside of the manager.
    pub fn durable(&self) -> &Ledger {
        &self.durable
    }

    /// Replaces the settings.
    pub fn set(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Returns whether the open batch is full, so that requests should wait for its write.
    pub fn is_full(&self) -> bool {
        self.open.records.len() >= CHANGES_PER_BATCH_MAX
    }

    /// Returns whether any decision is not durable yet.
    pub fn is_writing(&self) -> bool {
        self.writing.is_some() || !self.open.records.is_empty()
    }

    /// Returns whether non-durable state that watchers can see changed since the last call.
    pub fn take_change_flag(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Returns whether the caller must act before [`Manager::next_wakeup`], because effects or
    /// changes are pending.
    pub fn has_pending_work(&self) -> bool {
        !self.effects.is_empty() || self.changed
    }

    /// Removes and returns the oldest pending effect, if any.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Applies one event. After a burst of events, the caller calls [`Manager::settle`], then takes
    /// the effects from [`Manager::poll_effect`].
    pub fn handle(&mut self, when: When, event: Event) {
        self.upkeep_due |= !matches!(event, Event::Request(..) | Event::CallerGone(_));
        match event {
            Event::Loaded { meta, records, restored } => self.on_loaded(when, meta, records, restored),
            Event::Request(token, request) => self.on_request(when, token, request),
            Event::CallerGone(token) => self.remove_waiter(token),
            Event::Stored { batch, ok } => self.on_stored(when, batch, ok),
            Event::Device(emc, reply) => self.on_device_reply(when, emc, reply),
            Event::AgentUp(session, host, hello) => self.on_agent_up(when, session, host, hello),
            Event::AgentReport(session, report) => self.on_report(when, session, &report),
            Event::AgentDown(session) => self.on_agent_down(session),
            Event::StoreSpace { low } => self.on_store_space_change(when, low),
            Event::Tick => {}
        }
    }

    /// Performs the common work after a burst of events: handles deadlines, sends desired states,
    /// and starts the next durable write.
    pub fn settle(&mut self, when: When) {
        if self.loaded && std::mem::take(&mut self.upkeep_due) {
            self.run_upkeep(when);
            self.send_desired_states(when);
        }
        self.write_batch(when);
    }

    /// Returns the rack time at which the manager needs [`Event::Tick`] if no other event arrives
    /// before.
    pub fn next_wakeup(&self) -> Option<Ns> {
        if !self.loaded {
            return None;
        }
        let batch = (!self.open.records.is_empty() && self.writing.is_none()).then(|| self.batch_due_time());
        let waiter = self.waiter_deadlines.first().map(|(at, ..)| *at);
        let links = self.links.next_wakeup(self.settings.lease_ttl, self.settings.fence_after);
        let devices = self.devices.values().filter_map(DeviceLink::next_wakeup);
        let comparison = (!self.comparisons.is_empty()).then_some(Ns::ZERO);
        let others = [
            comparison,
            batch,
            waiter,
            links,
            self.next_upkeep(),
            self.next_machine_stop(),
            self.faults.next_retry(),
        ];
        others.into_iter().flatten().chain(devices).min()
    }

    fn on_loaded(&mut self, when: When, meta: Meta, records: Vec<Record>, restored: bool) {
        self.durable = Ledger::load(meta, records);
        let emcs: Vec<_> = self.durable.emcs().map(|(id, _)| id).collect();
        emcs.iter().for_each(|emc| self.durable.set_emc_up(*emc, false));
        self.head = self.durable.clone();
        self.open = WriteBatch::default();
        self.writing = None;
        // Device replies that arrived during the load were ignored.
        self.stop_attempts.clear();
        (self.loaded, self.loaded_at) = (true, when.wall);
        if restored {
            // Desired states and fences derived from the backup would be outdated, so the change is
            // applied before the first effect.
            let change = self.durable.decide_restore();
            self.durable.apply(change.clone());
            self.change(when, change);
            self.open.urgent = true;
        }
        let lost = SUCCESSIVE_RESTORES_MAX.saturating_mul(SLICES_ADDED_SINCE_BACKUP_MAX);
        self.lost_slices_end = SliceId(self.head.meta().next_slice.0.saturating_add(lost));
        self.drop_removed_hosts_and_emcs();
        let hosts: Vec<_> = self.head.hosts().map(|(id, _)| id).collect();
        hosts.iter().for_each(|host| self.ensure_link(when, *host));
        // The decision that completed a fence may not have become durable.
        hosts.iter().for_each(|host| self.complete_fence(when, *host));
        // Connected hosts may have received older desired states.
        hosts.into_iter().for_each(|host| self.notify_host(host));
        (self.loads, self.adoption_events) = (self.loads + 1, self.adoption_events + 1);
        self.reapply_boot_ids(when);
        self.reschedule_silence_fences(when);
        self.store_pending_handles(when);
        emcs.into_iter().for_each(|emc| self.compare_emc(emc));
    }

    /// Removes the state of hosts and EMCs that the loaded ledger no longer contains, because their
    /// removal became durable although the store reported an error.
    fn drop_removed_hosts_and_emcs(&mut self) {
        let hosts = self.links.iter().map(|(host, _)| *host).filter(|host| self.head.host(*host).is_none());
        hosts.collect::<Vec<_>>().into_iter().for_each(|host| self.drop_host(host));
        let emcs = self.devices.keys().copied().filter(|emc| self.head.emc(*emc).is_none());
        emcs.collect::<Vec<_>>().into_iter().for_each(|emc| self.drop_emc(emc));
    }

    /// Applies a change and deletes ended requests that exceed their limits. Deletes at most as
    /// many requests as the change has records, which is enough to stay within the limits.
    fn change(&mut self, when: When, change: Change) {
        let limit = change.0.len();
        self.apply(when, change);
        self.evict_requests(when, limit);
    }

    /// Applies a change to `head` and adds its records to the open batch.
    fn apply(&mut self, when: When, change: Change) {
        if self.open.records.is_empty() {
            self.open.since = when.now;
        }
        for record in self.head.apply(change) {
            if let Record::Emc(id, _) = &record
                && !self.devices.contains_key(id)
            {
                // The slices of a new EMC must not be used before its contents are compared with
                // the ledger.
                self.head.set_emc_up(*id, false);
            }
            self.open.urgent |= self.is_awaited(&record);
            self.open.records.insert(record.key(), record);
        }
    }

    /// Returns whether a caller waits for a change of this reservation or of a slice that serves
    /// it.
    fn is_awaited(&self, record: &Record) -> bool {
        let concerned = match record {
            Record::Slice(_, slot) => slot.reservation(),
            Record::Reservation(id, _) => Some(*id),
            _ => None,
        };
        concerned.is_some_and(|id| self.waiters.contains_key(&id))
    }

    /// Sends a reply after all earlier decisions became durable.
    fn reply_durable(&mut self, token: Token, reply: Reply) {
        if !self.open.records.is_empty() {
            self.open.urgent = true;
            self.open.replies.push((token, reply));
        } else if let Some((batch, _)) = &mut self.writing {
            batch.replies.push((token, reply));
        } else {
            self.reply_now(token, reply);
        }
    }

    fn reply_rejection(&mut self, token: Token, rejection: Rejection) {
        self.effects.push_back(Effect::Reply(token, Box::new(Err(rejection))));
    }

    fn batch_due_time(&self) -> Ns {
        if self.open.urgent || self.is_full() { Ns::ZERO } else { self.open.since.after(BATCH_DELAY) }
    }

    fn write_batch(&mut self, when: When) {
        let due = when.now >= self.batch_due_time();
        if !self.loaded || self.writing.is_some() || self.open.records.is_empty() || !due {
            return;
        }
        self.batch_count += 1;
        let mut batch = std::mem::take(&mut self.open);
        batch.number = self.batch_count;
        self.prune_decisions(&mut batch);
        let meta = self.head.meta_mut();
        meta.revision = meta.revision.next();
        meta.rack_time = when.now;
        batch.records.insert(Key::Meta, Record::Meta(meta.clone()));
        let records = Arc::new(std::mem::take(&mut batch.records).into_values().collect::<Vec<_>>());
        self.effects.push_back(Effect::Store { batch: batch.number, records: Arc::clone(&records) });
        self.writing = Some((batch, records));
    }

    fn prune_decisions(&mut self, batch: &mut WriteBatch) {
        let meta = self.head.meta();
        if meta.next_decision.saturating_sub(meta.first_decision) <= AUDIT_ENTRIES_MAX {
            return;
        }
        let oldest = meta.next_decision - (AUDIT_ENTRIES_MAX - AUDIT_ENTRIES_PRUNED_PER_BATCH);
        for seq in meta.first_decision..oldest {
            batch.records.insert(Key::Decision(seq), Record::Deleted(Key::Decision(seq)));
        }
        self.head.meta_mut().first_decision = oldest;
    }

    fn on_stored(&mut self, when: When, number: u64, ok: bool) {
        let Some((batch, records)) = self.writing.take_if(|(batch, _)| batch.number == number) else {
            return;
        };
        if !ok {
            return self.on_store_failed(batch);
        }
        let before: BTreeMap<SliceId, crate::slice::Slot> = records
            .iter()
            .filter_map(|r| {
                if let Record::Slice(id, _) = r { Some((*id, self.durable.slot(*id)?)) } else { None }
            })
            .collect();
        for record in records.iter() {
            self.durable.install(record.clone());
        }
        for (token, reply) in batch.replies {
            self.reply_now(token, reply);
        }
        let transitions = self.state_transitions(&before);
        for (slice, _, to) in &transitions {
            self.buffer.record_state_change(when.now, *slice, to);
            self.release_failures.remove(slice);
        }
        self.record_quarantine_times(when, &transitions);
        let revision = self.durable.meta().revision;
        let published = PublishedBatch { revision, when, records: Arc::clone(&records), transitions };
        self.effects.push_back(Effect::Durable(published));
        for (token, reservation, deadline) in batch.waiting {
            self.add_readiness_waiter(token, reservation, deadline);
        }
        self.publish_pending_handles();
        for record in records.iter() {
            self.apply_durable_record(when, record, &before);
        }
    }

    fn state_transitions(
        &self,
        before: &BTreeMap<SliceId, crate::slice::Slot>,
    ) -> Vec<(SliceId, &'static str, &'static str)> {
        let changed = before.iter().filter_map(|(id, old)| {
            let (from, to) = (old.state_name(), self.durable.slot(*id)?.state_name());
            (from != to).then_some((*id, from, to))
        });
        changed.collect()
    }

    /// Notifies hosts, calls devices and replies to callers because of a record that became
    /// durable.
    fn apply_durable_record(
        &mut self,
        when: When,
        record: &Record,
        before: &BTreeMap<SliceId, crate::slice::Slot>,
    ) {
        match record {
            Record::Slice(id, slot) => {
                let old = before.get(id);
                let of = [slot.reservation(), old.and_then(|old| old.reservation())];
                if hosts::required_holder_action(old.copied()) != hosts::required_holder_action(Some(*slot)) {
                    for host in old.and_then(|old| old.holder()).into_iter().chain(slot.holder()) {
                        self.notify_slice(host, *id, of);
                    }
                }
                self.advance_slice(*id);
                let old_holder = old.and_then(|old| old.holder());
                if let Some(holder) = slot.holder().filter(|holder| old_holder != Some(*holder)) {
                    self.advance_fence_of_holder(when, *id, holder);
                }
                of.into_iter()
                    .flatten()
                    .next()
                    .into_iter()
                    .for_each(|concerned| self.reply_to_waiters(concerned));
            }
            Record::Reservation(id, reservation) => {
                self.notify_reservation(*id, reservation);
                self.reply_to_waiters(*id);
            }
            Record::Host(id, host) => {
                self.ensure_link(when, *id);
                self.notify_host(*id);
                if host.fence == Fence::Fenced {
                    self.clear_unadopted_vms(*id);
                }
                self.advance_fence(when, *id);
            }
            Record::Emc(id, _) => self.compare_new_emc(*id),
            Record::Deleted(Key::Host(id)) => self.drop_host(*id),
            Record::Deleted(Key::Emc(id)) => self.drop_emc(*id),
            Record::Deleted(Key::Slice(id)) => self.drop_slice(*id),
            Record::Meta(_) | Record::Migration(..) | Record::Decision(..) | Record::Deleted(_) => {}
        }
    }

    fn on_store_failed(&mut self, batch: WriteBatch) {
        self.loaded = false;
        let open = std::mem::take(&mut self.open);
        let replies = batch.replies.into_iter().chain(open.replies).map(|(token, _)| token);
        let waiting = batch.waiting.into_iter().chain(open.waiting).map(|(token, ..)| token);
        let waiters = std::mem::take(&mut self.waiter_deadlines).into_iter().map(|(_, token, _)| token);
        for token in replies.chain(waiting).chain(waiters).collect::<Vec<_>>() {
            self.reply_rejection(token, Rejection::StoreFailed);
        }
        self.waiters.clear();
        self.waiting.clear();
        self.effects.push_back(Effect::Reload);
    }
}

/// Returns a change that records a decision made outside the ledger.
pub fn decision_change(decision: Decision) -> Change {
    Change(vec![Record::Decision(0, decision)])
}

#[cfg(test)]
mod tests;
