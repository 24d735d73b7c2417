//! Thread that performs the effects of the ledger's state machine in order: it writes batches to
//! the store, and sends replies, device calls and desired states. The thread performs the blocking
//! writes itself, because all later effects depend on them.

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

use super::{DriverCore, ReplyResult, Session, SessionMessage, SharedDriver, StoreTask, fencing};
use crate::{
    device::{Driver, EmcOwner},
    emc_thread::{self, EmcDescription, EmcSender},
    ledger_store::LedgerStore,
    metrics::Metrics,
    store::{StoreError, Write},
    write_chunk::WriteChunk,
};

/// Maximum duration of one sleep of the driver's thread. For a later deadline, the thread sleeps
/// several times.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Reply with the channel to its caller.
type Reply = (oneshot::Sender<ReplyResult>, Box<ReplyResult>);

/// Effect to perform after the lock is released, with the channel to its recipient.
enum Action {
    Reply(oneshot::Sender<ReplyResult>, Box<ReplyResult>),
    Send(mpsc::Sender<SessionMessage>, SessionMessage),
    Perform(Effect),
}

/// State of the driver's thread.
pub(super) struct DriverThread {
    shared: Arc<SharedDriver>,
    store: LedgerStore,
    emcs: HashMap<EmcId, EmcSender>,
    metrics: Arc<Metrics>,
    /// Channel to the task that delivers replies, one message per batch. The number of replies is
    /// bounded by the number of waiting requests.
    replies: mpsc::UnboundedSender<Vec<Reply>>,
    /// Runtime for tasks that this thread must not wait for.
    runtime: Runtime,
    /// Time of the next attempt to reload the store; `None` if none is needed.
    reload_at: Option<Instant>,
}

impl DriverThread {
    pub(super) fn new(shared: Arc<SharedDriver>, store: LedgerStore, metrics: Arc<Metrics>) -> Self {
        let (emcs, runtime) = (HashMap::new(), Runtime::current());
        let (replies, received) = mpsc::unbounded_channel();
        runtime.spawn(deliver_replies(received));
        Self { shared, store, emcs, metrics, replies, runtime, reload_at: None }
    }

    pub(super) fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut actions = Vec::new();
        while wait_for_work(&shared, self.next_wakeup(), &mut actions) {
            self.run_store_tasks();
            if self.store.max_sleep().is_some() {
                self.check_disk_space();
            }
            if self.reload_at.take_if(|at| *at <= Instant::now()).is_some() {
                self.reload();
            }
            self.perform_actions(&mut actions);
            if shared.lock().manager.take_change_flag() {
                shared.notify_change();
            }
        }
        shared.lock().replies.clear(); // remaining callers get `DriverError::Stopping`
    }

    /// Returns the time of the next check of free space or reload of the store.
    fn next_wakeup(&self) -> Option<Instant> {
        let space = self.store.max_sleep().map(|sleep| Instant::now() + sleep);
        self.reload_at.into_iter().chain(space).min()
    }

    fn check_disk_space(&mut self) {
        if let Some(low) = self.store.check_space_change() {
            self.handle_event(Event::StoreSpace { low });
        }
    }

    fn perform_actions(&mut self, actions: &mut Vec<Action>) {
        let mut replies = Vec::new();
        for action in actions.drain(..) {
            match action {
                Action::Reply(reply, answer) => replies.push((reply, answer)),
                other => {
                    self.send_replies(&mut replies);
                    self.perform_action(other);
                }
            }
        }
        self.send_replies(&mut replies);
    }

    fn send_replies(&self, replies: &mut Vec<Reply>) {
        if !replies.is_empty() {
            let _ = self.replies.send(std::mem::take(replies)); // fails only if the runtime has ended
        }
    }

    fn perform_action(&mut self, action: Action) {
        match action {
            Action::Send(outbox, message) => drop(outbox.try_send(message)), // the manager repeats messages if the outbox is full
            Action::Perform(Effect::Store { batch, records }) => self.write_batch(batch, &records),
            Action::Perform(Effect::Reload) => self.reload(),
            Action::Perform(Effect::Device(emc, call)) => self.call_device(emc, call),
            Action::Perform(Effect::Durable(durable)) => {
                self.close_removed_emcs(&durable.records);
                self.metrics.count_transitions(&durable);
                for chunk in WriteChunk::split_batch(durable) {
                    let _ = self.shared.published.send(chunk); // fails if there is no watcher
                }
                self.shared.notify_change();
            }
            Action::Reply(..)
            | Action::Perform(
                Effect::Reply(..) | Effect::Send(..) | Effect::RequestReport(_) | Effect::Close(..),
            ) => {} // collect_effects() turns these into other actions
        }
    }

    /// Passes an event to the state machine and performs its effects at once, so that replies wait
    /// neither for periodic work nor for the next batch. Unlike [`SharedDriver::change`], this also works
    /// while the manager is stopping.
    fn handle_event(&mut self, event: Event) {
        let mut actions = Vec::new();
        {
            let mut core = self.shared.lock();
            core.manager.handle(self.shared.clock.now(), event);
            collect_effects(&mut core, &mut actions);
        }
        self.shared.batch_space.notify_waiters(); // a failed write also fails the open batch
        self.perform_actions(&mut actions);
    }

    fn write_batch(&mut self, batch: u64, records: &[Record]) {
        self.shared.batch_space.notify_waiters();
        self.metrics.batch_records.observe(records.len() as f64);
        let result = self.store.commit(records);
        if let Err(error) = &result {
            tracing::error!(batch, error = units::chain(error), "cannot write to the store");
            self.metrics.store_failures.inc();
        } else {
            self.metrics.count_rehomes(records);
        }
        self.handle_event(Event::Stored { batch, ok: result.is_ok() });
        self.check_disk_space();
    }

    fn reload(&mut self) {
        match self.store.reload() {
            Ok(loaded) => {
                tracing::warn!(records = loaded.records.len(), "store reloaded");
                if let Some(meta) = loaded.meta {
                    let (records, restored) = (loaded.records, loaded.restored);
                    self.handle_event(Event::Loaded { meta, records, restored });
                    self.close_unknown_emcs();
                }
            }
            Err(error) => {
                tracing::error!(error = units::chain(&error), "cannot reload store");
                self.reload_at = Some(Instant::now() + units::limits::STORE_OPEN_RETRY_DELAY.as_duration());
            }
        }
    }

    fn run_store_tasks(&mut self) {
        let store_tasks = std::mem::take(&mut self.shared.lock().store_tasks);
        for task in store_tasks {
            match task {
                StoreTask::Snapshot(reply) => drop(reply.send(self.store.snapshot())), // the caller may be gone
                StoreTask::Write(writes, reply) => drop(reply.send(self.write_entries(&writes))), // the caller may be gone
            }
        }
    }

    /// Writes entries that do not belong to the ledger. A failure requires no reload here: this
    /// thread has no pending write of the ledger, and the ledger's next write detects whether the
    /// store must be reloaded.
    fn write_entries(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        let result = self.store.write_entries(writes);
        self.check_disk_space();
        if let Err(error) = &result
            && !matches!(error, StoreError::Full)
        {
            tracing::error!(entries = writes.len(), error = units::chain(error), "cannot write to the store");
            self.metrics.store_failures.inc();
        }
        result
    }

    fn call_device(&mut self, id: EmcId, call: DeviceCall) {
        if !self.emcs.contains_key(&id)
            && let Some(calls) = self.start_emc_thread(id)
        {
            self.emcs.insert(id, calls);
        }
        let needs_power_off =
            matches!(call, DeviceCall::Fence { powered_off: false, .. }) && !self.can_revoke(id);
        match (self.emcs.get_mut(&id), &call) {
            (Some(calls), DeviceCall::Fence { host, powered_off: false }) if needs_power_off => {
                fencing::start_fence_command(&self.shared, &self.runtime, *host, (id, calls.clone()));
            }
            (Some(calls), _) => calls.send(call),
            (None, _) => {
                let failure = DeviceFailure::Error("cannot start the thread of the EMC".into());
                self.handle_event(Event::Device(id, DeviceReply::Failed { call, failure }));
            }
        }
    }

    /// Ends the threads of removed EMCs, which closes their devices. A new EMC may use the same
    /// path.
    fn close_removed_emcs(&mut self, records: &[Record]) {
        for record in records {
            if let Record::Deleted(Key::Emc(id)) = record {
                self.emcs.remove(id);
            }
        }
    }

    /// Closes devices of EMCs that are not in the reloaded ledger: a removal can be on disk
    /// although the store reported an error.
    fn close_unknown_emcs(&mut self) {
        let core = self.shared.lock();
        let ledger = core.manager.durable();
        self.emcs.retain(|id, _| ledger.emc(*id).is_some());
    }

    fn can_revoke(&self, id: EmcId) -> bool {
        self.shared.lock().manager.durable().emc(id).is_some_and(|entry| entry.emc.can_revoke())
    }

    fn start_emc_thread(&self, id: EmcId) -> Option<EmcSender> {
        let description = {
            let core = self.shared.lock();
            let emc = &core.manager.durable().emc(id)?.emc;
            let (path, first, slices) = (PathBuf::from(&emc.path), emc.first, emc.slices);
            let serial = emc.serial.clone().unwrap_or_default();
            let ledger = core.manager.durable();
            let others = ledger.emcs().filter(|(other, _)| *other != id).map(|(_, e)| e.emc.name.clone());
            let owner = EmcOwner {
                rack: ledger.meta().rack_uuid.clone(),
                emc: emc.name.clone(),
                others: others.collect(),
            };
            let driver = Driver::from_name(&emc.driver)?;
            let generation = ledger.meta().generation;
            let leader = self.shared.leader.as_ref().map(|leader| leader.for_devices(generation));
            EmcDescription { id, driver, path, serial, first, slices, owner, leader }
        };
        let shared = Arc::clone(&self.shared);
        let report = move |id, results| drop(shared.handle_device_results(id, results)); // fails only if the manager is stopping
        let started = emc_thread::start(description, report);
        started
            .inspect_err(|error| tracing::error!(emc = id.0, %error, "cannot start the thread of an EMC"))
            .ok()
    }
}

/// Sends replies from a task of the runtime. The task is woken once per batch instead of once per
/// reply.
async fn deliver_replies(mut replies: mpsc::UnboundedReceiver<Vec<Reply>>) {
    while let Some(batch) = replies.recv().await {
        for (reply, answer) in batch {
            let _ = reply.send(*answer); // the caller may be gone
        }
    }
}

/// Sleeps until there is work, and appends the effects to `actions`. Returns `false` after
/// [`super::Handle::close`] when no work is left.
fn wait_for_work(shared: &SharedDriver, wake_at: Option<Instant>, actions: &mut Vec<Action>) -> bool {
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
        if core.is_closed && !core.manager.is_writing() {
            return false;
        }
        let wake = core.manager.next_wakeup();
        let sleep = wake.map_or(SLEEP_MAX, |at| Ns(at.0.saturating_sub(now.now.0)).as_duration());
        let due = wake_at.map_or(SLEEP_MAX, |at| at.saturating_duration_since(Instant::now()));
        core.sleeping_until = Some(wake.unwrap_or(Ns::NEVER));
        core = sleep_for(shared, core, sleep.min(due).min(SLEEP_MAX));
    }
}

/// Releases the lock and sleeps until there is work, at most for `timeout`.
fn sleep_for<'a>(
    shared: &'a SharedDriver,
    core: MutexGuard<'a, DriverCore>,
    timeout: Duration,
) -> MutexGuard<'a, DriverCore> {
    let is_asleep = |core: &mut DriverCore| core.sleeping_until.is_some();
    let waited = shared.work_available.wait_timeout_while(core, timeout, is_asleep);
    let (mut core, waited) = waited.unwrap_or_else(|_| std::process::abort()); // panic under the lock, as in `SharedDriver::lock`
    core.sleeping_until = None;
    if waited.timed_out() {
        core.manager.handle(shared.clock.now(), Event::Tick);
    }
    core
}

fn collect_effects(core: &mut DriverCore, actions: &mut Vec<Action>) {
    while let Some(effect) = core.manager.poll_effect() {
        let action = match effect {
            Effect::Reply(token, answer) => {
                core.replies.remove(&token).map(|reply| Action::Reply(reply, answer))
            }
            Effect::Send(session, desired) => core
                .sessions
                .get(&session)
                .map(|session| Action::Send(session.outbox.clone(), SessionMessage::Desired(desired))),
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

/// Removes a session and asks its connection to close. If the outbox is full, dropping its sender
/// closes the connection as well.
fn close_session(
    core: &mut DriverCore,
    session: pool::manager::SessionId,
    why: CloseReason,
) -> Option<Action> {
    let Session { host, outbox } = core.sessions.remove(&session)?;
    tracing::warn!(host, ?why, "closing the connection of an agent");
    Some(Action::Send(outbox, SessionMessage::Close(why)))
}
