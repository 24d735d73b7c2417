//! Thread that performs the effects of the ledger's state machine in their order: batches into the
//! store, replies, device calls, desired states. The store is written here, because a reply waits
//! for nothing else.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use pool::manager::{Closed, DeviceCall, DeviceDone, DeviceFailure, Effect, Event};
use pool::record::{Key, Record};
use tokio::{
    runtime::Handle as Runtime,
    sync::{mpsc, oneshot},
};
use units::{EmcId, Ns};

use super::{Core, Errand, Replied, Session, Shared, ToSession, WriteChunk, stopping};
use crate::{
    device::Driver,
    emc::{self, EmcCalls, EmcPlace},
    keeper::Keeper,
    metrics::Metrics,
    store::{StoreError, Write},
};

/// Longest sleep; a later deadline is checked again.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Waiting callers by effect.
type Reply = (oneshot::Sender<Replied>, Box<Replied>);

/// Effect with its receiver.
enum Act {
    Reply(oneshot::Sender<Replied>, Box<Replied>),
    Tell(mpsc::Sender<ToSession>, ToSession),
    Do(Effect),
}

pub(super) struct Driving {
    shared: Arc<Shared>,
    keeper: Keeper,
    emcs: HashMap<EmcId, EmcCalls>,
    metrics: Arc<Metrics>,
    /// Replies of one batch, passed to the connections together. Bounded by the requests that may
    /// wait.
    replies: mpsc::UnboundedSender<Vec<Reply>>,
    /// Runs slow reads beside this thread.
    runtime: Runtime,
    /// Time of the next attempt to read a store.
    reload_at: Option<Instant>,
}

impl Driving {
    pub(super) fn new(shared: Arc<Shared>, keeper: Keeper, metrics: Arc<Metrics>) -> Self {
        let (emcs, runtime) = (HashMap::new(), Runtime::current());
        let (replies, received) = mpsc::unbounded_channel();
        runtime.spawn(pass_on(received));
        Self { shared, keeper, emcs, metrics, replies, runtime, reload_at: None }
    }

    pub(super) fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut acts = Vec::new();
        while wait_for_work(&shared, self.wake_at(), &mut acts) {
            self.run_errands();
            if self.keeper.sleep_max().is_some() {
                self.check_space();
            }
            if self.reload_at.take_if(|at| *at <= Instant::now()).is_some() {
                self.reload();
            }
            self.perform_all(&mut acts);
            if shared.lock().manager.take_changed() {
                shared.note_change();
            }
        }
        shared.lock().replies.clear(); // remaining callers learn that the manager is stopping
    }

    /// Returns when the thread has work that the ledger does not know.
    fn wake_at(&self) -> Option<Instant> {
        let space = self.keeper.sleep_max().map(|sleep| Instant::now() + sleep);
        self.reload_at.into_iter().chain(space).min()
    }

    fn check_space(&mut self) {
        if let Some(low) = self.keeper.space_changed() {
            self.event(Event::StoreSpace { low });
        }
    }

    fn perform_all(&mut self, acts: &mut Vec<Act>) {
        let mut replies = Vec::new();
        for act in acts.drain(..) {
            match act {
                Act::Reply(reply, answer) => replies.push((reply, answer)),
                other => {
                    self.reply(&mut replies);
                    self.perform(other);
                }
            }
        }
        self.reply(&mut replies);
    }

    fn reply(&self, replies: &mut Vec<Reply>) {
        if !replies.is_empty() {
            let _ = self.replies.send(std::mem::take(replies)); // without the runtime no caller waits
        }
    }

    fn perform(&mut self, act: Act) {
        match act {
            Act::Tell(outbox, message) => drop(outbox.try_send(message)), // a lost message is sent again
            Act::Do(Effect::Store { batch, records }) => self.store(batch, &records),
            Act::Do(Effect::Reload) => self.reload(),
            Act::Do(Effect::Device(emc, call)) => self.call_device(emc, call),
            Act::Do(Effect::Durable(durable)) => {
                self.forget_removed(&durable.records);
                self.metrics.transitions(&durable);
                for chunk in WriteChunk::split(durable) {
                    let _ = self.shared.published.send(chunk); // there may be no watcher
                }
                self.shared.note_change();
            }
            Act::Reply(..)
            | Act::Do(Effect::Reply(..) | Effect::Send(..) | Effect::RequestReport(_) | Effect::Close(..)) => {
            } // performed elsewhere
        }
    }

    /// Performs the immediate effects of an event: replies wait neither for upkeep nor for the next
    /// batch. A closing manager still receives the results of its calls.
    fn event(&mut self, event: Event) {
        let mut acts = Vec::new();
        {
            let mut core = self.shared.lock();
            core.manager.handle(self.shared.clock.now(), event);
            collect(&mut core, &mut acts);
        }
        self.shared.room.notify_waiters(); // a batch may have failed with its write
        self.perform_all(&mut acts);
    }

    fn store(&mut self, batch: u64, records: &[Record]) {
        self.shared.room.notify_waiters();
        self.metrics.batch_records.observe(records.len() as f64);
        let result = self.keeper.commit(records);
        if let Err(error) = &result {
            tracing::error!(batch, error = units::chain(error), "store failed");
            self.metrics.store_failures.inc();
        }
        self.event(Event::Stored { batch, ok: result.is_ok() });
        self.check_space();
    }

    fn reload(&mut self) {
        match self.keeper.reload() {
            Ok(loaded) => {
                tracing::warn!(records = loaded.records.len(), "store read again");
                if let Some(meta) = loaded.meta {
                    let (records, restored) = (loaded.records, loaded.restored);
                    self.event(Event::Loaded { meta, records, restored });
                    self.forget_unknown();
                }
            }
            Err(error) => {
                tracing::error!(error = units::chain(&error), "store cannot be read again");
                self.reload_at = Some(Instant::now() + units::limits::STORE_RETRY.as_duration());
            }
        }
    }

    fn run_errands(&mut self) {
        let errands = std::mem::take(&mut self.shared.lock().errands);
        for errand in errands {
            match errand {
                Errand::Snapshot(reply) => drop(reply.send(self.keeper.snapshot())), // the caller may have left
                Errand::Keep(writes, reply) => drop(reply.send(self.keep(&writes))), // as above
            }
        }
    }

    /// After a failure nothing of the ledger is open: these writes are made one by one on this
    /// thread, and the next write of the ledger determines whether the store has to be loaded
    /// again.
    fn keep(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let kept = self.keeper.keep(writes);
        self.check_space();
        if let Err(error) = &kept
            && !matches!(error, StoreError::Full)
        {
            tracing::error!(entries = writes.len(), error = units::chain(error), "store failed");
            self.metrics.store_failures.inc();
        }
        kept
    }

    fn call_device(&mut self, id: EmcId, call: DeviceCall) {
        if !self.emcs.contains_key(&id)
            && let Some(calls) = self.open_emc(id)
        {
            self.emcs.insert(id, calls);
        }
        let must_stop = matches!(call, DeviceCall::Fence { powered_off: false, .. }) && !self.cuts_off(id);
        match (self.emcs.get_mut(&id), &call) {
            (Some(calls), DeviceCall::Fence { host, powered_off: false }) if must_stop => {
                stopping::stop(&self.shared, &self.runtime, *host, (id, calls.clone()));
            }
            (Some(calls), _) => calls.send(call),
            (None, _) => {
                let failure = DeviceFailure::Error("no thread for its driver".into());
                self.event(Event::Device(id, DeviceDone::Failed { call, failure }));
            }
        }
    }

    /// Ends the threads of removed EMCs, which closes their devices: another EMC may use the same
    /// path.
    fn forget_removed(&mut self, records: &[Record]) {
        for record in records {
            if let Record::Gone(Key::Emc(id)) = record {
                self.emcs.remove(id);
            }
        }
    }

    /// Closes devices whose removal was written although the store reported an error.
    fn forget_unknown(&mut self) {
        let core = self.shared.lock();
        let ledger = core.manager.durable();
        self.emcs.retain(|id, _| ledger.emc(*id).is_some());
    }

    fn cuts_off(&self, id: EmcId) -> bool {
        self.shared.lock().manager.durable().emc(id).is_some_and(|entry| entry.emc.cuts_off())
    }

    fn open_emc(&self, id: EmcId) -> Option<EmcCalls> {
        let place = {
            let core = self.shared.lock();
            let emc = &core.manager.durable().emc(id)?.emc;
            let (path, first, slices) = (PathBuf::from(&emc.path), emc.first, emc.slices);
            let (name, serial) = (emc.name.clone(), emc.serial.clone().unwrap_or_default());
            let rack = core.manager.durable().meta().rack_uuid.clone();
            EmcPlace { id, name, driver: Driver::named(&emc.driver)?, path, serial, first, slices, rack }
        };
        let shared = Arc::clone(&self.shared);
        let report = move |id, answers| drop(shared.device_answers(id, answers)); // no receiver exists after the end
        let started = emc::start(place, report);
        started.inspect_err(|error| tracing::error!(emc = id.0, %error, "no thread for an EMC")).ok()
    }
}

/// Wakes waiting callers from within the runtime, once for a batch.
async fn pass_on(mut replies: mpsc::UnboundedReceiver<Vec<Reply>>) {
    while let Some(batch) = replies.recv().await {
        for (reply, answer) in batch {
            let _ = reply.send(*answer); // the caller may have left
        }
    }
}

/// Sleeps until there is work, and collects it. Returns `false` when nothing is left and nothing
/// can come.
fn wait_for_work(shared: &Shared, wake_at: Option<Instant>, acts: &mut Vec<Act>) -> bool {
    let mut core = shared.lock();
    loop {
        shared.turns.fetch_add(1, Ordering::Relaxed);
        let now = shared.clock.now();
        core.manager.settle(now);
        collect(&mut core, acts);
        let is_due = wake_at.is_some_and(|at| at <= Instant::now());
        if !acts.is_empty() || core.manager.has_news() || !core.errands.is_empty() || is_due {
            return true;
        }
        if core.closed && !core.manager.is_writing() {
            return false;
        }
        let wake = core.manager.next_wakeup();
        let sleep = wake.map_or(SLEEP_MAX, |at| Ns(at.0.saturating_sub(now.now.0)).as_duration());
        let due = wake_at.map_or(SLEEP_MAX, |at| at.saturating_duration_since(Instant::now()));
        core.asleep = Some(wake.unwrap_or(Ns::NEVER));
        core = sleep_for(shared, core, sleep.min(due).min(SLEEP_MAX));
    }
}

/// Sleeps at most for a time, until there is work.
fn sleep_for<'a>(shared: &'a Shared, core: MutexGuard<'a, Core>, time: Duration) -> MutexGuard<'a, Core> {
    let still = |core: &mut Core| core.asleep.is_some();
    let slept = shared.work.wait_timeout_while(core, time, still);
    let (mut core, slept) = slept.unwrap_or_else(|_| std::process::abort()); // as in `Shared::lock`
    core.asleep = None;
    if slept.timed_out() {
        core.manager.handle(shared.clock.now(), Event::Tick);
    }
    core
}

fn collect(core: &mut Core, acts: &mut Vec<Act>) {
    while let Some(effect) = core.manager.poll_effect() {
        let act = match effect {
            Effect::Reply(token, answer) => {
                core.replies.remove(&token).map(|reply| Act::Reply(reply, answer))
            }
            Effect::Send(session, want) => {
                core.sessions.get(&session).map(|to| Act::Tell(to.outbox.clone(), ToSession::Order(want)))
            }
            Effect::RequestReport(session) => {
                core.sessions.get(&session).map(|to| Act::Tell(to.outbox.clone(), ToSession::RequestReport))
            }
            Effect::Close(session, why) => close(core, session, why),
            other => Some(Act::Do(other)),
        };
        acts.extend(act);
    }
}

/// A full outbox is dropped with its connection, which also ends the session.
fn close(core: &mut Core, session: pool::manager::SessionId, why: Closed) -> Option<Act> {
    let Session { host, outbox } = core.sessions.remove(&session)?;
    tracing::warn!(host, ?why, "agent connection ended");
    Some(Act::Tell(outbox, ToSession::Close(why)))
}
