//! Thread that performs the effects of the ledger's state machine in their order: batches into the
//! store, replies, device calls, desired states. This thread writes the store itself, because
//! replies wait for the write only.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use pool::manager::{CloseReason, DeviceCall, DeviceFailure, DeviceReply, Effect, Event};
use pool::record::{Key, Record};
use tokio::{
    runtime::Handle as Runtime,
    sync::{mpsc, oneshot},
};
use units::{EmcId, Ns};

use super::{Core, ReplyResult, Session, SessionMessage, Shared, StoreTask, fencing};
use crate::{
    device::Driver,
    emc_thread::{self, EmcDescription, EmcSender},
    ledger_store::LedgerStore,
    metrics::Metrics,
    store::{StoreError, Write},
    write_chunk::WriteChunk,
};

/// Longest sleep; for a later deadline the thread sleeps again.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Caller with its reply.
type Reply = (oneshot::Sender<ReplyResult>, Box<ReplyResult>);

/// Effect to be performed, with its receiver.
enum Action {
    Reply(oneshot::Sender<ReplyResult>, Box<ReplyResult>),
    Send(mpsc::Sender<SessionMessage>, SessionMessage),
    Perform(Effect),
}

/// Thread that performs effects.
pub(super) struct DriverThread {
    shared: Arc<Shared>,
    store: LedgerStore,
    emcs: HashMap<EmcId, EmcSender>,
    metrics: Arc<Metrics>,
    /// Replies of one batch, passed to the connections together. Bounded by the requests that may
    /// wait.
    replies: mpsc::UnboundedSender<Vec<Reply>>,
    /// Runs slow reads beside this thread.
    runtime: Runtime,
    /// Time of the next attempt to read a store.
    reload_at: Option<Instant>,
}

impl DriverThread {
    pub(super) fn new(shared: Arc<Shared>, store: LedgerStore, metrics: Arc<Metrics>) -> Self {
        let (emcs, runtime) = (HashMap::new(), Runtime::current());
        let (replies, received) = mpsc::unbounded_channel();
        runtime.spawn(deliver_replies(received));
        Self { shared, store, emcs, metrics, replies, runtime, reload_at: None }
    }

    pub(super) fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut actions = Vec::new();
        while wait_for_work(&shared, self.wake_at(), &mut actions) {
            self.run_store_tasks();
            if self.store.sleep_max().is_some() {
                self.check_space();
            }
            if self.reload_at.take_if(|at| *at <= Instant::now()).is_some() {
                self.reload();
            }
            self.perform_all(&mut actions);
            if shared.lock().manager.take_changed() {
                shared.notify_change();
            }
        }
        shared.lock().replies.clear(); // remaining callers learn that the manager is stopping
    }

    /// Returns the time of the thread's next work of its own, independent of the ledger.
    fn wake_at(&self) -> Option<Instant> {
        let space = self.store.sleep_max().map(|sleep| Instant::now() + sleep);
        self.reload_at.into_iter().chain(space).min()
    }

    fn check_space(&mut self) {
        if let Some(low) = self.store.space_changed() {
            self.handle_event(Event::StoreSpace { low });
        }
    }

    fn perform_all(&mut self, actions: &mut Vec<Action>) {
        let mut replies = Vec::new();
        for action in actions.drain(..) {
            match action {
                Action::Reply(reply, answer) => replies.push((reply, answer)),
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

    fn perform(&mut self, action: Action) {
        match action {
            Action::Send(outbox, message) => drop(outbox.try_send(message)), // a lost message is sent again
            Action::Perform(Effect::Store { batch, records }) => self.store(batch, &records),
            Action::Perform(Effect::Reload) => self.reload(),
            Action::Perform(Effect::Device(emc, call)) => self.call_device(emc, call),
            Action::Perform(Effect::Durable(durable)) => {
                self.close_removed(&durable.records);
                self.metrics.count_transitions(&durable);
                for chunk in WriteChunk::split(durable) {
                    let _ = self.shared.published.send(chunk); // there may be no watcher
                }
                self.shared.notify_change();
            }
            Action::Reply(..)
            | Action::Perform(
                Effect::Reply(..) | Effect::Send(..) | Effect::RequestReport(_) | Effect::Close(..),
            ) => {} // performed elsewhere
        }
    }

    /// Performs the immediate effects of an event: replies wait neither for upkeep nor for the next
    /// batch. A closing manager still receives the results of its calls.
    fn handle_event(&mut self, event: Event) {
        let mut actions = Vec::new();
        {
            let mut core = self.shared.lock();
            core.manager.handle(self.shared.clock.now(), event);
            collect_effects(&mut core, &mut actions);
        }
        self.shared.batch_space.notify_waiters(); // a batch may have failed with its write
        self.perform_all(&mut actions);
    }

    fn store(&mut self, batch: u64, records: &[Record]) {
        self.shared.batch_space.notify_waiters();
        self.metrics.batch_records.observe(records.len() as f64);
        let result = self.store.commit(records);
        if let Err(error) = &result {
            tracing::error!(batch, error = units::chain(error), "store failed");
            self.metrics.store_failures.inc();
        }
        self.handle_event(Event::Stored { batch, ok: result.is_ok() });
        self.check_space();
    }

    fn reload(&mut self) {
        match self.store.reload() {
            Ok(loaded) => {
                tracing::warn!(records = loaded.records.len(), "store reloaded");
                if let Some(meta) = loaded.meta {
                    let (records, restored) = (loaded.records, loaded.restored);
                    self.handle_event(Event::Loaded { meta, records, restored });
                    self.close_unknown();
                }
            }
            Err(error) => {
                tracing::error!(error = units::chain(&error), "cannot reload store");
                self.reload_at = Some(Instant::now() + units::limits::STORE_RETRY.as_duration());
            }
        }
    }

    fn run_store_tasks(&mut self) {
        let store_tasks = std::mem::take(&mut self.shared.lock().store_tasks);
        for task in store_tasks {
            match task {
                StoreTask::Snapshot(reply) => drop(reply.send(self.store.snapshot())), // the caller may have left
                StoreTask::Write(writes, reply) => drop(reply.send(self.write_entries(&writes))), // as above
            }
        }
    }

    /// A failure leaves no write of the ledger pending, because all writes are made one by one on
    /// this thread. The ledger's next write determines whether the store has to be reloaded.
    fn write_entries(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let result = self.store.write_entries(writes);
        self.check_space();
        if let Err(error) = &result
            && !matches!(error, StoreError::Full)
        {
            tracing::error!(entries = writes.len(), error = units::chain(error), "store failed");
            self.metrics.store_failures.inc();
        }
        result
    }

    fn call_device(&mut self, id: EmcId, call: DeviceCall) {
        if !self.emcs.contains_key(&id)
            && let Some(calls) = self.open_emc(id)
        {
            self.emcs.insert(id, calls);
        }
        let needs_power_off =
            matches!(call, DeviceCall::Fence { powered_off: false, .. }) && !self.can_revoke(id);
        match (self.emcs.get_mut(&id), &call) {
            (Some(calls), DeviceCall::Fence { host, powered_off: false }) if needs_power_off => {
                fencing::start(&self.shared, &self.runtime, *host, (id, calls.clone()));
            }
            (Some(calls), _) => calls.send(call),
            (None, _) => {
                let failure = DeviceFailure::Error("cannot start a thread for the EMC".into());
                self.handle_event(Event::Device(id, DeviceReply::Failed { call, failure }));
            }
        }
    }

    /// Ends the threads of removed EMCs, which closes their devices: another EMC may use the same
    /// path.
    fn close_removed(&mut self, records: &[Record]) {
        for record in records {
            if let Record::Deleted(Key::Emc(id)) = record {
                self.emcs.remove(id);
            }
        }
    }

    /// Closes devices whose removal was written although the store reported an error.
    fn close_unknown(&mut self) {
        let core = self.shared.lock();
        let ledger = core.manager.durable();
        self.emcs.retain(|id, _| ledger.emc(*id).is_some());
    }

    fn can_revoke(&self, id: EmcId) -> bool {
        self.shared.lock().manager.durable().emc(id).is_some_and(|entry| entry.emc.can_revoke())
    }

    fn open_emc(&self, id: EmcId) -> Option<EmcSender> {
        let description = {
            let core = self.shared.lock();
            let emc = &core.manager.durable().emc(id)?.emc;
            let (path, first, slices) = (PathBuf::from(&emc.path), emc.first, emc.slices);
            let (name, serial) = (emc.name.clone(), emc.serial.clone().unwrap_or_default());
            let rack = core.manager.durable().meta().rack_uuid.clone();
            EmcDescription {
                id,
                name,
                driver: Driver::from_name(&emc.driver)?,
                path,
                serial,
                first,
                slices,
                rack,
            }
        };
        let shared = Arc::clone(&self.shared);
        let report = move |id, results| drop(shared.handle_device_results(id, results)); // no receiver exists after the end
        let started = emc_thread::start(description, report);
        started
            .inspect_err(|error| tracing::error!(emc = id.0, %error, "cannot start a thread for an EMC"))
            .ok()
    }
}

/// Sends replies from within the runtime, which wakes waiting callers once per batch.
async fn deliver_replies(mut replies: mpsc::UnboundedReceiver<Vec<Reply>>) {
    while let Some(batch) = replies.recv().await {
        for (reply, answer) in batch {
            let _ = reply.send(*answer); // the caller may have left
        }
    }
}

/// Sleeps until there is work, and collects it. Returns `false` after [`super::Handle::close`] when
/// no work is left.
fn wait_for_work(shared: &Shared, wake_at: Option<Instant>, actions: &mut Vec<Action>) -> bool {
    let mut core = shared.lock();
    loop {
        shared.iterations.fetch_add(1, Ordering::Relaxed);
        let now = shared.clock.now();
        core.manager.settle(now);
        collect_effects(&mut core, actions);
        let is_due = wake_at.is_some_and(|at| at <= Instant::now());
        if !actions.is_empty() || core.manager.has_pending_work() || !core.store_tasks.is_empty() || is_due {
            return true;
        }
        if core.closed && !core.manager.is_writing() {
            return false;
        }
        let wake = core.manager.next_wakeup();
        let sleep = wake.map_or(SLEEP_MAX, |at| Ns(at.0.saturating_sub(now.now.0)).as_duration());
        let due = wake_at.map_or(SLEEP_MAX, |at| at.saturating_duration_since(Instant::now()));
        core.sleeping_until = Some(wake.unwrap_or(Ns::NEVER));
        core = sleep_for(shared, core, sleep.min(due).min(SLEEP_MAX));
    }
}

/// Sleeps until there is work, at most for `time`.
fn sleep_for<'a>(shared: &'a Shared, core: MutexGuard<'a, Core>, time: Duration) -> MutexGuard<'a, Core> {
    let is_asleep = |core: &mut Core| core.sleeping_until.is_some();
    let waited = shared.work.wait_timeout_while(core, time, is_asleep);
    let (mut core, waited) = waited.unwrap_or_else(|_| std::process::abort()); // as in `Shared::lock`
    core.sleeping_until = None;
    if waited.timed_out() {
        core.manager.handle(shared.clock.now(), Event::Tick);
    }
    core
}

fn collect_effects(core: &mut Core, actions: &mut Vec<Action>) {
    while let Some(effect) = core.manager.poll_effect() {
        let action = match effect {
            Effect::Reply(token, answer) => {
                core.replies.remove(&token).map(|reply| Action::Reply(reply, answer))
            }
            Effect::Send(session, want) => core
                .sessions
                .get(&session)
                .map(|session| Action::Send(session.outbox.clone(), SessionMessage::Desired(want))),
            Effect::RequestReport(session) => core
                .sessions
                .get(&session)
                .map(|session| Action::Send(session.outbox.clone(), SessionMessage::RequestReport)),
            Effect::Close(session, why) => close_session(core, session, why),
            other => Some(Action::Perform(other)),
        };
        actions.extend(action);
    }
}

/// Removes a session. If its outbox is full, dropping it closes the connection as well.
fn close_session(core: &mut Core, session: pool::manager::SessionId, why: CloseReason) -> Option<Action> {
    let Session { host, outbox } = core.sessions.remove(&session)?;
    tracing::warn!(host, ?why, "agent connection ended");
    Some(Action::Send(outbox, SessionMessage::Close(why)))
}
