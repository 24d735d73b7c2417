//! The manager's end of the protocol: events in, effects out. It keeps the order that all invariants rest on (decide,
//! store, and only then reply, device call and order) and performs nothing itself.
//!
//! Two ledgers: `head` has every decision at once, so that concurrent requests never pick the same slice; `durable` has
//! what the store has confirmed. Everything that leaves the process (replies, device calls, orders, lists) is made from
//! `durable`, so nothing ever has to be taken back. Decisions gather in one open batch while another is being written.
//!
//! ```text
//!   event ─▶ decide on head ─▶ open batch ─▶ Store ─▶ stored ─▶ durable ─┬▶ Reply
//!                                                                        ├▶ Device: Granted, Revoked ... come back as events
//!                                                                        └▶ Send(Want): Have comes back as an event
//! ```
//!
//! After a failed write nothing is known: everybody waiting hears UNAVAILABLE, and the store is read again.

mod asks;
mod buffer;
mod comparison;
mod devices;
mod faults;
mod fencing;
mod hosts;
mod links;
mod orders;
mod reports;
mod restore;
mod sight;
mod stop_attempts;
mod upkeep;
mod view;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use units::limits::{
    AUDIT_ENTRIES_MAX, AUDIT_ENTRIES_PRUNED_PER_BATCH, BATCH_CHANGES_MAX, BATCH_LINGER, LEDGER_PIECE_MAX,
    SLICES_LOST_MAX,
};
use units::{EmcId, Epoch, HostId, Ns, ReservationId, Revision, SliceId, UnixMs};

pub use self::{
    asks::{Answer, Ask, ReservationView},
    buffer::Buffer,
    devices::{Contents, DeviceCall, DeviceDone, DeviceFailure, Grant, SliceError},
    view::{Alarm, EmcState, HostState},
};
use self::{
    comparison::Comparison, devices::DeviceLink, faults::SliceFaults, links::Links, restore::UnadoptedVm,
    stop_attempts::StopAttempts,
};
use crate::{
    audit::Decision,
    denied::Denied,
    ledger::{Change, Ledger, When},
    protocol::{Handle, Have, Hello, Want},
    record::{Fence, Key, Meta, Record},
    slice::Call,
};

/// Names one caller who waits for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Names one connection of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What an operator may set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// An agent must be heard at least this often.
    pub lease_ttl: Ns,
    /// When a host that is silent past its lease is cut off; `None` never.
    pub fence_after: Option<Ns>,
}

/// What happens to the manager.
#[derive(Clone, Debug)]
pub enum Event {
    /// Everything the store has; first of all, and after every failed write.
    Loaded {
        /// What concerns the whole ledger.
        meta: Meta,
        /// The rest, in any order.
        records: Vec<Record>,
        /// The store was restored from a backup and has not been used since.
        restored: bool,
    },
    /// Somebody asks for something.
    Ask(Token, Ask),
    /// The caller is no longer interested.
    Gone(Token),
    /// A batch is durable, or nobody knows.
    Stored {
        /// Which batch.
        batch: u64,
        /// Whether it is durable.
        ok: bool,
    },
    /// A device answers.
    Device(EmcId, DeviceDone),
    /// An agent connected and said who it is.
    AgentUp(SessionId, HostId, Hello),
    /// An agent reports.
    AgentHave(SessionId, Have),
    /// An agent's connection is gone.
    AgentDown(SessionId),
    /// Whether the store's disk has room for new reservations.
    StoreSpace {
        /// Below the limit.
        low: bool,
    },
    /// Time has passed.
    Tick,
}

/// What is to be done, in this order.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make these durable, all or none, then say so.
    Store {
        /// To be named in the answer.
        batch: u64,
        /// One per key.
        records: Arc<Vec<Record>>,
    },
    /// Open the store again and read everything.
    Reload,
    /// Answer a caller.
    Reply(Token, Box<Result<Answer, Denied>>),
    /// Ask a device, in order per device.
    Device(EmcId, DeviceCall),
    /// Send an order to an agent.
    Send(SessionId, Want),
    /// Request a whole report from an agent.
    RequestReport(SessionId),
    /// End an agent's connection.
    Close(SessionId, Closed),
    /// This has become durable: for watchers, metrics and traces.
    Durable(Published),
}

/// Why the manager ends an agent's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// A newer instance, or a newer connection of the same one, speaks for the host.
    Superseded,
    /// It claims a slice it was never given.
    FalseClaim(SliceId, Epoch),
    /// It was silent past its lease.
    LeaseOver,
    /// The host is not in this rack any more.
    HostGone,
}

/// What has become durable in one batch.
#[derive(Clone, Debug)]
pub struct Published {
    /// The ledger's revision with it.
    pub revision: Revision,
    /// When.
    pub when: When,
    /// The records.
    pub records: Arc<Vec<Record>>,
    /// Slices that changed state: from, to.
    pub transitions: Vec<(SliceId, &'static str, &'static str)>,
}

/// Decisions that become durable together, and who waits for them.
#[derive(Debug, Default)]
struct Batch {
    number: u64,
    records: BTreeMap<Key, Record>,
    replies: Vec<(Token, Reply)>,
    waiting: Vec<(Token, ReservationId, Ns)>,
    /// When it was opened, and whether somebody waits for it: then it waits for no company.
    since: Ns,
    urgent: bool,
}

/// A reply that is made when its batch is durable.
#[derive(Clone, Debug)]
enum Reply {
    Reservation(ReservationId),
    /// With the VMs that are to move, if it drains.
    Place {
        place: crate::ledger::Place,
        drains: bool,
    },
    Migration(ReservationId),
    Done,
    /// Decided from facts that may not be durable yet: it names a reservation that a failed write would undo.
    Refused(Denied),
}

/// The manager's end of the protocol.
#[derive(Debug)]
pub struct Manager {
    settings: Settings,
    head: Ledger,
    durable: Ledger,
    loaded: bool,
    loaded_at: UnixMs,
    /// No EMC that a restored ledger lacks had slices from here on.
    lost_slices_end: SliceId,
    open: Batch,
    writing: Option<(Batch, Arc<Vec<Record>>)>,
    batches: u64,
    links: Links,
    sessions: BTreeMap<SessionId, HostId>,
    devices: BTreeMap<EmcId, DeviceLink>,
    calls: BTreeMap<SliceId, Call>,
    faults: SliceFaults,
    /// Fence calls under way, with whether the host is known to have stopped; and those that need a machine stopped which
    /// is not yet.
    fencing: BTreeMap<(EmcId, HostId), bool>,
    stop_attempts: StopAttempts,
    /// Running VMs, by host, that the ledger could not adopt; only hosts that have such VMs.
    unadopted: BTreeMap<HostId, Vec<UnadoptedVm>>,
    handles: BTreeMap<SliceId, (Epoch, Handle)>,
    places: BTreeMap<SliceId, Handle>,
    /// Handles and places that a device named when it was compared; hosts see them with the next durable revision.
    found: BTreeMap<SliceId, (Epoch, Handle)>,
    found_places: BTreeMap<SliceId, Handle>,
    waiters: BTreeMap<ReservationId, Vec<(Ns, Token)>>,
    waiter_deadlines: BTreeSet<(Ns, Token, ReservationId)>,
    /// What each caller waits for: callers leave often, and most of them wait for nothing.
    waiting: BTreeMap<Token, (Ns, ReservationId)>,
    buffer: Buffer,
    /// Since when the store's disk has had no room for new reservations.
    store_low_since: Option<UnixMs>,
    /// When slices were quarantined since the ledger was loaded.
    quarantined_at: BTreeMap<SliceId, UnixMs>,
    /// When hosts were first found not to see a device that they are wired to.
    unseen_since: BTreeMap<HostId, UnixMs>,
    leases_expired: u64,
    /// Events that may change whether the VMs of a report can be adopted: the ledger was loaded, an EMC was compared, a slice
    /// was quarantined. A host that has not sent a whole report since the latest of them is asked for one.
    doubts: u64,
    /// Devices whose contents are being compared.
    comparisons: BTreeMap<EmcId, Comparison>,
    /// How many slices one event passes through.
    piece: usize,
    /// How often the ledger was loaded.
    loads: u64,
    /// A fact came in since the last upkeep; a request alone makes none due.
    upkeep_due: bool,
    forget_at: Ns,
    /// Something that is not durable has changed since it was last asked: a host fell silent, an EMC failed.
    changed: bool,
    effects: VecDeque<Effect>,
}

impl Manager {
    /// Knows nothing until [`Event::Loaded`].
    pub fn new(settings: Settings) -> Self {
        let empty = || Ledger::new(Meta::new(String::new()));
        Self {
            settings,
            head: empty(),
            durable: empty(),
            loaded: false,
            loaded_at: UnixMs(0),
            lost_slices_end: SliceId(0),
            open: Batch::default(),
            writing: None,
            batches: 0,
            links: Links::default(),
            sessions: BTreeMap::new(),
            devices: BTreeMap::new(),
            calls: BTreeMap::new(),
            faults: SliceFaults::default(),
            fencing: BTreeMap::new(),
            stop_attempts: StopAttempts::default(),
            unadopted: BTreeMap::new(),
            handles: BTreeMap::new(),
            places: BTreeMap::new(),
            found: BTreeMap::new(),
            found_places: BTreeMap::new(),
            waiters: BTreeMap::new(),
            waiter_deadlines: BTreeSet::new(),
            waiting: BTreeMap::new(),
            buffer: Buffer::default(),
            store_low_since: None,
            quarantined_at: BTreeMap::new(),
            unseen_since: BTreeMap::new(),
            leases_expired: 0,
            doubts: 0,
            comparisons: BTreeMap::new(),
            piece: LEDGER_PIECE_MAX,
            loads: 0,
            upkeep_due: false,
            forget_at: Ns::ZERO,
            changed: false,
            effects: VecDeque::new(),
        }
    }

    /// Sets how many slices one event passes through when an EMC is compared or a complete order is made.
    pub fn set_piece(&mut self, slices: usize) {
        self.piece = slices.max(1);
    }

    /// What is durable: the only thing anybody outside may see.
    pub fn durable(&self) -> &Ledger {
        &self.durable
    }

    /// Changes what an operator may set.
    pub fn set(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Whether requests should wait until a batch has been written.
    pub fn is_full(&self) -> bool {
        self.open.records.len() >= BATCH_CHANGES_MAX
    }

    /// Whether anything decided is not yet durable.
    pub fn is_writing(&self) -> bool {
        self.writing.is_some() || !self.open.records.is_empty()
    }

    /// Whether something that watchers see but no batch tells has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Whether there is something to do or to tell before [`Manager::next_wakeup`].
    pub fn has_news(&self) -> bool {
        !self.effects.is_empty() || self.changed
    }

    /// The next thing to do, oldest first.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Takes one event in. [`Manager::settle`] is to follow once a burst of them is in; then what is to be done waits in
    /// [`Manager::poll_effect`].
    pub fn handle(&mut self, when: When, event: Event) {
        self.upkeep_due |= !matches!(event, Event::Ask(..) | Event::Gone(_));
        match event {
            Event::Loaded { meta, records, restored } => self.on_loaded(when, meta, records, restored),
            Event::Ask(token, ask) => self.on_ask(when, token, ask),
            Event::Gone(token) => self.forget_waiter(token),
            Event::Stored { batch, ok } => self.on_stored(when, batch, ok),
            Event::Device(emc, done) => self.on_device(when, emc, done),
            Event::AgentUp(session, host, hello) => self.on_agent_up(when, session, host, hello),
            Event::AgentHave(session, have) => self.on_have(when, session, &have),
            Event::AgentDown(session) => self.on_agent_down(session),
            Event::StoreSpace { low } => self.on_store_space(when, low),
            Event::Tick => {}
        }
    }

    /// Does once for many events what follows from all of them: what is due by now, orders, the next durable write.
    pub fn settle(&mut self, when: When) {
        if self.loaded && std::mem::take(&mut self.upkeep_due) {
            self.keep_up(when);
            self.send_orders(when);
        }
        self.write_batch(when);
    }

    /// When to call [`Manager::handle`] with [`Event::Tick`] and settle, if nothing else happens first.
    pub fn next_wakeup(&self) -> Option<Ns> {
        if !self.loaded {
            return None; // nothing is known, so nothing can be due
        }
        let batch = (!self.open.records.is_empty() && self.writing.is_none()).then(|| self.batch_due());
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
            self.next_fence(),
            self.faults.next_retry(),
        ];
        others.into_iter().flatten().chain(devices).min()
    }

    fn on_loaded(&mut self, when: When, meta: Meta, records: Vec<Record>, restored: bool) {
        self.durable = Ledger::load(meta, records);
        let emcs: Vec<_> = self.durable.emcs().map(|(id, _)| id).collect();
        emcs.iter().for_each(|emc| self.durable.set_emc_up(*emc, false));
        self.head = self.durable.clone();
        self.open = Batch::default();
        self.writing = None;
        self.stop_attempts.clear(); // an answer that came meanwhile was not looked at
        (self.loaded, self.loaded_at) = (true, when.wall);
        if restored {
            // The backup's orders and fences are old, and have no effects from the first moment on.
            let change = self.durable.decide_restored();
            self.durable.apply(change.clone());
            self.change(when, change);
            self.open.urgent = true;
        }
        self.lost_slices_end = SliceId(self.head.meta().next_slice.0.saturating_add(SLICES_LOST_MAX));
        self.drop_removed();
        let hosts: Vec<_> = self.head.hosts().map(|(id, _)| id).collect();
        hosts.iter().for_each(|host| self.expect_host(when, *host));
        hosts.iter().for_each(|host| self.complete_fence(when, *host)); // its completion may not be on disk
        hosts.into_iter().for_each(|host| self.tell_host(host)); // what was just read may be news to the connected
        (self.loads, self.doubts) = (self.loads + 1, self.doubts + 1);
        self.hear_boots(when);
        self.count_silence_anew(when);
        self.note_found(when);
        emcs.into_iter().for_each(|emc| self.compare_emc(emc));
    }

    /// Drops hosts and EMCs that are not in the ledger: their removal was written although the store reported an error.
    fn drop_removed(&mut self) {
        let hosts = self.links.iter().map(|(host, _)| *host).filter(|host| self.head.host(*host).is_none());
        hosts.collect::<Vec<_>>().into_iter().for_each(|host| self.drop_host(host));
        let emcs = self.devices.keys().copied().filter(|emc| self.head.emc(*emc).is_none());
        emcs.collect::<Vec<_>>().into_iter().for_each(|emc| self.drop_emc(emc));
    }

    /// Applies a change, and forgets ended requests beyond their limits: at most as many as the change has records, so that
    /// forgetting keeps up with ending.
    fn change(&mut self, when: When, change: Change) {
        let most = change.0.len();
        self.apply(when, change);
        self.evict(when, most);
    }

    /// Applies a change to `head` and adds it to the open batch.
    fn apply(&mut self, when: When, change: Change) {
        if self.open.records.is_empty() {
            self.open.since = when.now;
        }
        for record in self.head.apply(change) {
            if let Record::Emc(id, _) = &record
                && !self.devices.contains_key(id)
            {
                self.head.set_emc_up(*id, false); // nothing is taken from it before it is compared
            }
            self.open.urgent |= self.is_awaited(&record);
            self.open.records.insert(record.key(), record);
        }
    }

    /// Whether somebody waits for this step of a reservation or of one of its slices to be durable.
    fn is_awaited(&self, record: &Record) -> bool {
        let concerned = match record {
            Record::Slice(_, slot) => slot.reservation(),
            Record::Reservation(id, _) => Some(*id),
            _ => None,
        };
        concerned.is_some_and(|id| self.waiters.contains_key(&id))
    }

    /// Replies when everything decided so far is durable.
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

    fn refuse(&mut self, token: Token, denied: Denied) {
        self.effects.push_back(Effect::Reply(token, Box::new(Err(denied))));
    }

    fn batch_due(&self) -> Ns {
        if self.open.urgent || self.is_full() { Ns::ZERO } else { self.open.since.after(BATCH_LINGER) }
    }

    fn write_batch(&mut self, when: When) {
        let due = when.now >= self.batch_due();
        if !self.loaded || self.writing.is_some() || self.open.records.is_empty() || !due {
            return;
        }
        self.batches += 1;
        let mut batch = std::mem::take(&mut self.open);
        batch.number = self.batches;
        self.forget_decisions(&mut batch);
        let meta = self.head.meta_mut();
        meta.revision = meta.revision.next();
        meta.rack_time = when.now;
        batch.records.insert(Key::Meta, Record::Meta(meta.clone()));
        let records = Arc::new(std::mem::take(&mut batch.records).into_values().collect::<Vec<_>>());
        self.effects.push_back(Effect::Store { batch: batch.number, records: Arc::clone(&records) });
        self.writing = Some((batch, records));
    }

    fn forget_decisions(&mut self, batch: &mut Batch) {
        let meta = self.head.meta();
        if meta.next_decision.saturating_sub(meta.first_decision) <= AUDIT_ENTRIES_MAX {
            return;
        }
        let oldest = meta.next_decision - (AUDIT_ENTRIES_MAX - AUDIT_ENTRIES_PRUNED_PER_BATCH);
        for seq in meta.first_decision..oldest {
            batch.records.insert(Key::Decision(seq), Record::Gone(Key::Decision(seq)));
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
        let transitions = self.transitions(&before);
        transitions.iter().for_each(|(slice, _, to)| self.buffer.moved(when.now, *slice, to));
        self.date_quarantines(when, &transitions);
        let revision = self.durable.meta().revision;
        let published = Published { revision, when, records: Arc::clone(&records), transitions };
        self.effects.push_back(Effect::Durable(published));
        for (token, reservation, deadline) in batch.waiting {
            self.wait_ready(token, reservation, deadline);
        }
        self.show_found();
        for record in records.iter() {
            self.act_on(when, record, &before);
        }
    }

    fn transitions(
        &self,
        before: &BTreeMap<SliceId, crate::slice::Slot>,
    ) -> Vec<(SliceId, &'static str, &'static str)> {
        let changed = before.iter().filter_map(|(id, old)| {
            let (from, to) = (old.state_name(), self.durable.slot(*id)?.state_name());
            (from != to).then_some((*id, from, to))
        });
        changed.collect()
    }

    /// What a fact obliges us to, now that it is durable.
    fn act_on(&mut self, when: When, record: &Record, before: &BTreeMap<SliceId, crate::slice::Slot>) {
        match record {
            Record::Slice(id, slot) => {
                let old = before.get(id);
                let of = [slot.reservation(), old.and_then(|old| old.reservation())];
                if hosts::asked_of(old.copied()) != hosts::asked_of(Some(*slot)) {
                    for host in old.and_then(|old| old.holder()).into_iter().chain(slot.holder()) {
                        self.tell_slice(host, *id, of);
                    }
                }
                self.drive_slice(*id);
                let had = old.and_then(|old| old.holder());
                if let Some(holder) = slot.holder().filter(|holder| had != Some(*holder)) {
                    self.drive_fence_of_holder(when, *id, holder);
                }
                of.into_iter()
                    .flatten()
                    .next()
                    .into_iter()
                    .for_each(|concerned| self.answer_waiters(concerned));
            }
            Record::Reservation(id, reservation) => {
                self.tell_reservation(*id, reservation);
                self.answer_waiters(*id);
            }
            Record::Host(id, host) => {
                self.expect_host(when, *id);
                self.tell_host(*id);
                if host.fence == Fence::Fenced {
                    self.forget_unadopted(*id);
                }
                self.drive_fence(when, *id);
            }
            Record::Emc(id, _) => self.expect_emc(*id),
            Record::Gone(Key::Host(id)) => self.drop_host(*id),
            Record::Gone(Key::Emc(id)) => self.drop_emc(*id),
            Record::Gone(Key::Slice(id)) => self.drop_slice(*id),
            Record::Meta(_) | Record::Migration(..) | Record::Decision(..) | Record::Gone(_) => {}
        }
    }

    fn on_store_failed(&mut self, batch: Batch) {
        self.loaded = false;
        let open = std::mem::take(&mut self.open);
        let replies = batch.replies.into_iter().chain(open.replies).map(|(token, _)| token);
        let waiting = batch.waiting.into_iter().chain(open.waiting).map(|(token, ..)| token);
        let waiters = std::mem::take(&mut self.waiter_deadlines).into_iter().map(|(_, token, _)| token);
        for token in replies.chain(waiting).chain(waiters).collect::<Vec<_>>() {
            self.refuse(token, Denied::StoreFailed);
        }
        self.waiters.clear();
        self.waiting.clear();
        self.effects.push_back(Effect::Reload);
    }
}

/// A decision made outside the ledger, to be remembered with the others.
pub fn note(decision: Decision) -> Change {
    Change(vec![Record::Decision(0, decision)])
}

#[cfg(test)]
mod tests;
