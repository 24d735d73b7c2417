//! Simulated processes of the manager: consecutive runs of the real state machine, with a store and
//! one thread per device. A process performs effects in the same way as `pool-manager`. It may
//! crash between any two effects. [`former_leader`](super::former_leader) simulates a process that still runs
//! after another one was elected.

use std::collections::{BTreeMap, VecDeque};

use pool::{
    ledger::When,
    manager::{DeviceCall, DeviceFailure, DeviceReply, Effect, Event, Manager, Request, Token},
    record::{Fence, Meta, Record},
};
use rand::Rng as _;
use units::{EmcId, HostId, Ns, limits::STORE_OPEN_RETRY_DELAY};

use super::{Records, ScheduledEvent, World, store::Store};

/// Maximum number of consecutive wakeups without effect. More wakeups indicate a busy loop.
const IDLE_WAKEUPS_MAX: u32 = 100;
/// Delay of a wakeup that is due in the past.
const OVERDUE_WAKEUP_DELAY: Ns = Ns(20_000);
/// Maximum number of slices that the manager processes per event. It is small so that comparisons
/// and desired states are split over several events.
const SLICES_PER_EVENT_MAX: usize = 4;
/// Mean duration of a device call.
pub(super) const DEVICE_CALL_DURATION: Ns = Ns(300_000);

#[derive(Debug)]
pub(super) struct ManagerProcess {
    /// The manager that may write to the store.
    pub(super) running: Option<RunningManager>,
    /// Managers before it, by the number of their runs. They do not know that another one was elected.
    pub(super) formers: BTreeMap<u64, FormerLeader>,
    /// Former leader that handles an event and is exchanged with `running`.
    pub(super) acting_former: Option<u64>,
    /// Whether the lease of the leader ends during its next write.
    pub(super) is_deposed_by_write: bool,
    pub(super) store: Box<dyn Store>,
    disk_full: bool,
    incarnation: u64,
    tokens: u64,
}

/// Running manager: one run, from its start to its crash.
#[derive(Debug)]
pub(super) struct RunningManager {
    pub(super) manager: Manager,
    /// Number of the run. The fencing token of the manager.
    pub(super) incarnation: u64,
    /// Rack time at which this manager process started.
    rack_time_at_start: Ns,
    /// Simulated time at which this manager process started.
    started_at: Ns,
    /// Token of the request that submits rack.toml at start, until the reply arrives.
    pub(super) start_request: Option<Token>,
    /// Whether the manager has loaded its rack.toml and accepts connections.
    pub(super) is_open: bool,
    pub(super) writing: Option<(u64, Records)>,
    /// Rack time at which the write of the latest batch began.
    write_started: Ns,
    /// Rack time at which the write of the previous batch began. The decisions in the latest batch
    /// were made after this time.
    decided_since: Ns,
    /// For each device, the queue of calls and the completion time of the last call.
    pub(super) calls: Vec<(VecDeque<DeviceCall>, Ns)>,
    pub(super) wake: Option<Ns>,
    idle_wakeups: u32,
    /// Whether the effects of some events have not been performed yet.
    is_bursting: bool,
}

/// Manager that was the leader before another one was elected.
#[derive(Debug)]
pub(super) struct FormerLeader {
    /// The manager; while it handles an event, its successor.
    pub(super) running: Option<RunningManager>,
    /// Whether the write in progress at the end of the lease is durable, and its answer arrives late.
    pub(super) is_last_write_durable: bool,
    pub(super) paused_until: Ns,
}

impl ManagerProcess {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        Self {
            running: None,
            formers: BTreeMap::new(),
            acting_former: None,
            is_deposed_by_write: false,
            store,
            disk_full: false,
            incarnation: 0,
            tokens: 0,
        }
    }

    pub(super) fn next_token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    /// Delays the next wakeup by the time for which all machines were suspended.
    pub(super) fn delay_wakeup(&mut self, span: Ns) {
        if let Some(running) = &mut self.running {
            running.wake = running.wake.map(|at| at.after(span));
        }
    }

    fn find_running_manager(&mut self, incarnation: u64) -> Option<&mut RunningManager> {
        self.running.as_mut().filter(|running| running.incarnation == incarnation)
    }

    /// Returns whether a former leader handles an event.
    pub(super) fn is_former_acting(&self) -> bool {
        self.acting_former.is_some()
    }

    /// Returns the number of the run of the manager that handles an event now.
    fn acting_incarnation(&self) -> u64 {
        self.running.as_ref().map_or(0, |running| running.incarnation)
    }

    /// Returns the batch that is being written.
    pub(super) fn batch_in_progress(&self) -> Option<&[Record]> {
        let (_, records) = self.running.as_ref()?.writing.as_ref()?;
        Some(records)
    }

    /// Returns the earliest rack time of the decisions in the latest batch.
    pub(super) fn earliest_decision_time(&self) -> Option<Ns> {
        self.running.as_ref().map(|running| running.decided_since)
    }

    /// Fills the disk of the store, or frees space.
    pub(super) fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
        self.store.set_full(full);
    }

    /// Returns whether a run of the manager is the leader.
    pub(super) fn is_leader(&self, incarnation: u64) -> bool {
        self.running.as_ref().is_some_and(|running| running.incarnation == incarnation)
            && !self.is_former_acting()
    }

    /// Returns whether the manager accepts connections and all effects have been performed.
    pub(super) fn is_settled(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.is_open && !running.is_bursting)
    }

    /// Returns whether the manager accepts connections and requests.
    pub(super) fn is_open(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.is_open)
    }
}

impl World {
    pub(super) fn start_manager(&mut self) {
        if self.manager_process.running.is_some() {
            return;
        }
        let Some((meta, records)) = self.manager_process.store.load() else {
            self.log(|| "manager cannot read its store".into());
            return self.schedule_after(Ns::ms(100), ScheduledEvent::ManagerStart);
        };
        let restored = self.manager_process.store.is_restored();
        if restored {
            self.drop_lost_reservations(&records);
        }
        self.handle_load(meta.as_ref(), &records, restored);
        if restored {
            self.choose_restored_rack();
            self.apply_restore();
        }
        self.apply_rack();
        self.renew_leases();
        let meta = meta.unwrap_or_else(|| Meta::new("rack".into()));
        self.manager_process.incarnation += 1;
        let start_request = self.manager_process.next_token();
        let mut manager = Manager::new(self.fault_model.settings.clone());
        manager.set_chunk_size(self.rng.random_range(1..=SLICES_PER_EVENT_MAX));
        let (incarnation, rack_time_at_start) = (self.manager_process.incarnation, meta.rack_time);
        self.manager_process.running = Some(RunningManager {
            manager,
            incarnation,
            rack_time_at_start,
            started_at: self.now,
            start_request: Some(start_request),
            is_open: false,
            writing: None,
            write_started: rack_time_at_start,
            decided_since: rack_time_at_start,
            calls: self.devices.iter().map(|_| (VecDeque::new(), Ns::ZERO)).collect(),
            wake: None,
            idle_wakeups: 0,
            is_bursting: false,
        });
        self.log(|| format!("manager starts as incarnation {incarnation}"));
        self.handle_manager_event(Event::Loaded { meta, records, restored });
        let rack = self.rack.spec().clone();
        self.handle_manager_event(Event::Request(start_request, Request::Configure(rack)));
        self.report_store_space();
    }

    /// Crashes the manager. Queued device calls may take effect or not.
    pub(super) fn kill_manager(&mut self) {
        let writing = self.manager_process.running.as_ref().and_then(|running| running.writing.clone());
        writing.into_iter().for_each(|(_, records)| self.check_batch(&records)); // the batch may become durable despite the crash
        let Some(running) = self.manager_process.running.take() else { return };
        self.log(|| "manager is killed".into());
        self.manager_process.store.crash(running.writing.as_ref().map(|(_, records)| records.as_slice()));
        self.drop_pending_requests();
        self.end_run(running);
    }

    /// Performs the queued device calls of a killed manager or not, and closes its connections.
    pub(super) fn end_run(&mut self, running: RunningManager) {
        let incarnation = running.incarnation;
        for (calls, emc) in running.calls.into_iter().zip(0..) {
            let performed = if self.random_bool(0.5) { calls.0.len() } else { 0 };
            for call in calls.0.iter().take(performed) {
                self.perform_device_call(incarnation, EmcId(emc), call);
            }
        }
        self.close_manager_ends(incarnation);
    }

    /// Passes one event to the manager and performs the effects. One in five events starts a burst:
    /// further events are passed to the manager before the effects are performed.
    pub(super) fn handle_manager_event(&mut self, event: Event) {
        let when = self.current_time();
        let burst = !self.faults_stopped && self.random_bool(0.2);
        let Some(running) = &mut self.manager_process.running else { return };
        let tick = matches!(event, Event::Tick);
        running.manager.handle(when, event);
        if running.is_bursting {
            return;
        }
        if burst {
            running.is_bursting = true;
            let incarnation = running.incarnation;
            return self.schedule_after(OVERDUE_WAKEUP_DELAY, ScheduledEvent::ManagerBurstEnd(incarnation));
        }
        self.settle_manager(tick);
    }

    pub(super) fn resume_after_burst(&mut self, incarnation: u64) {
        if let Some(running) = self.manager_process.find_running_manager(incarnation) {
            running.is_bursting = false;
            self.settle_manager(false);
        }
    }

    pub(super) fn current_time(&self) -> When {
        let now =
            self.manager_process.running.as_ref().map_or(Ns::ZERO, |running| {
                running.rack_time_at_start.after(self.now.since(running.started_at))
            });
        When { now, wall: self.wall_time() }
    }

    fn settle_manager(&mut self, tick: bool) {
        let when = self.current_time();
        let Some(running) = &mut self.manager_process.running else { return };
        running.manager.settle(when);
        let idle = !self.perform_manager_effects() && tick;
        let Some(running) = &mut self.manager_process.running else { return };
        running.idle_wakeups = if idle { running.idle_wakeups + 1 } else { 0 };
        if running.idle_wakeups > IDLE_WAKEUPS_MAX {
            let at = running.manager.next_wakeup();
            self.report_violation(
                "no state machine wakes up repeatedly without work",
                format!(
                    "the manager has had more than {IDLE_WAKEUPS_MAX} wakeups without effect; \
                     at {}, its next wakeup is at {at:?}",
                    when.now
                ),
            );
        }
        self.schedule_manager_wakeup();
    }

    fn schedule_manager_wakeup(&mut self) {
        let now = self.now;
        let Some(running) = &mut self.manager_process.running else { return };
        let Some(at) = running.manager.next_wakeup() else { return };
        let at = running
            .started_at
            .after(at.since(running.rack_time_at_start))
            .max(now.after(OVERDUE_WAKEUP_DELAY));
        if running.wake.is_none_or(|planned| at < planned || planned < now) {
            running.wake = Some(at);
            let incarnation = running.incarnation;
            self.schedule_at(at, ScheduledEvent::ManagerWakeup(incarnation));
        }
    }

    pub(super) fn wake_manager(&mut self, incarnation: u64) {
        let now = self.now;
        if let Some(running) = self.manager_process.find_running_manager(incarnation)
            && running.wake.is_some_and(|at| at <= now)
        {
            running.wake = None;
            self.handle_manager_event(Event::Tick);
        }
    }

    /// Performs all pending effects of the manager. Returns whether any effect was pending.
    fn perform_manager_effects(&mut self) -> bool {
        let mut has_effects = false;
        while let Some(effect) =
            self.manager_process.running.as_mut().and_then(|running| running.manager.poll_effect())
        {
            has_effects = true;
            self.perform_manager_effect(effect);
        }
        has_effects
    }

    fn perform_manager_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, records } => self.start_store_write(batch, records),
            Effect::Reload => {
                self.log(|| "store is read again".into());
                let (incarnation, span) = (
                    self.manager_process.acting_incarnation(),
                    self.random_duration_around(self.fault_model.store_write_duration),
                );
                self.schedule_after(span, ScheduledEvent::StoreRead(incarnation));
            }
            Effect::Reply(token, answer) => self.handle_reply(token, *answer),
            Effect::Device(emc, call) => self.start_device_call(emc, call),
            Effect::Send(session, desired) => self.send_desired_state(session, desired),
            Effect::RequestReport(session) => self.request_report(session),
            Effect::Close(session, why) => self.close_session_by_manager(session, &why),
            Effect::Durable(_) => {}
        }
    }

    fn start_store_write(&mut self, batch: u64, records: Records) {
        let incarnation = self.manager_process.acting_incarnation();
        let now = self.current_time().now;
        let running = self.manager_process.running.as_mut().expect("only a running manager has effects");
        running.writing = Some((batch, records));
        running.decided_since = std::mem::replace(&mut running.write_started, now);
        let span = self.random_duration_around(self.fault_model.store_write_duration);
        self.schedule_after(span, ScheduledEvent::StoreWritten(incarnation));
        self.end_lease_during_write(span);
    }

    pub(super) fn complete_store_write(&mut self, incarnation: u64) {
        if self.manager_process.is_former_acting() {
            return self.complete_former_store_write(incarnation);
        }
        let Some(running) = self.manager_process.find_running_manager(incarnation) else { return };
        let Some((batch, records)) = running.writing.take() else { return };
        self.check_batch(&records);
        let ok = self.manager_process.store.commit(&records);
        if ok {
            self.apply_durable_batch(&records);
        }
        self.run_log.counts.full_disk_writes += u64::from(!ok && self.manager_process.disk_full);
        self.record_stored(ok);
        self.log(|| format!("batch {batch} ok={ok}: {}", describe_records(&records)));
        self.handle_manager_event(Event::Stored { batch, ok });
        if ok {
            self.compare_periodically();
            self.check_return_times();
        }
    }

    pub(super) fn complete_store_read(&mut self, incarnation: u64) {
        if self.manager_process.is_former_acting() {
            return self.schedule_after(STORE_OPEN_RETRY_DELAY, ScheduledEvent::StoreRead(incarnation));
        }
        if self.manager_process.find_running_manager(incarnation).is_none() {
            return;
        }
        match self.manager_process.store.load() {
            None => self.schedule_after(STORE_OPEN_RETRY_DELAY, ScheduledEvent::StoreRead(incarnation)),
            Some((meta, records)) => {
                let restored = self.manager_process.store.is_restored();
                self.handle_load(meta.as_ref(), &records, restored);
                if restored {
                    self.apply_restore();
                }
                self.apply_rack();
                // The manager cannot load an empty store a second time, so it exits and restarts.
                match meta {
                    Some(meta) => self.handle_manager_event(Event::Loaded { meta, records, restored }),
                    None => {
                        self.kill_manager();
                        self.schedule_after(Ns::ms(1), ScheduledEvent::ManagerStart);
                    }
                }
            }
        }
    }

    fn start_device_call(&mut self, emc: EmcId, call: DeviceCall) {
        let is_former = self.manager_process.is_former_acting();
        if !is_former {
            self.check_device_call(emc, &call);
        }
        self.log(|| format!("manager -> {emc}: {call:?}"));
        match call {
            DeviceCall::Fence { host, powered_off: false } if self.devices[emc.0 as usize].is_shared() => {
                if is_former {
                    return; // a manager without a lease starts no fence command
                }
                let incarnation = self.manager_process.acting_incarnation();
                let span = self.random_fault_duration();
                self.schedule_after(span, ScheduledEvent::FenceCommandEnd(incarnation, emc, host));
            }
            call => self.queue_call(emc, call),
        }
    }

    /// Ends a fence command of the operator with success or failure. The command continues even if
    /// the manager that started the command has crashed.
    pub(super) fn end_fence_command(&mut self, incarnation: u64, emc: EmcId, host: HostId) {
        let fence_success_rate = self.fault_model.fence_success_rate.unwrap_or_default();
        let stopped = self.random_bool(fence_success_rate);
        if stopped {
            self.power_off(host);
            let span = self.random_fault_duration();
            self.schedule_after(span, ScheduledEvent::HostBoot(host));
        }
        let Some(running) = self.manager_process.find_running_manager(incarnation) else { return };
        let fence = running.manager.durable().host(host).map(|entry| entry.host.fence);
        if stopped && matches!(fence, Some(Fence::Fencing { .. })) {
            return self.queue_call(emc, DeviceCall::Fence { host, powered_off: true });
        }
        let call = DeviceCall::Fence { host, powered_off: false };
        let failure = DeviceFailure::NotFenced("the machine was not stopped".into());
        self.handle_manager_event(Event::Device(emc, DeviceReply::Failed { call, failure }));
    }

    fn queue_call(&mut self, emc: EmcId, call: DeviceCall) {
        if matches!(call, DeviceCall::Fence { .. }) {
            self.end_lease_during_fence();
        }
        let (now, span) = (self.now, self.random_duration_around(DEVICE_CALL_DURATION));
        let incarnation = self.manager_process.acting_incarnation();
        let running = self.manager_process.running.as_mut().expect("only a running manager has effects");
        let devices = self.devices.len().max(running.calls.len());
        running.calls.resize_with(devices, Default::default);
        let (calls, last) = &mut running.calls[emc.0 as usize];
        calls.push_back(call);
        *last = (*last).max(now).after(span);
        let at = *last;
        self.schedule_at(at, ScheduledEvent::DeviceCallDue(incarnation, emc));
    }

    pub(super) fn make_next_device_call(&mut self, incarnation: u64, emc: EmcId) {
        let Some(running) = self.manager_process.find_running_manager(incarnation) else { return };
        let Some(call) = running.calls[emc.0 as usize].0.pop_front() else { return };
        let done = self.perform_device_call(incarnation, emc, &call);
        self.log(|| format!("{emc} -> manager: {done:?}"));
        if self.manager_process.is_former_acting() {
            return self.handle_manager_event(Event::Device(emc, done));
        }
        if let DeviceReply::Contents(_) = done {
            self.add_pending_contents(emc, done.clone());
            return self.handle_manager_event(Event::Device(emc, done));
        }
        self.record_device_reply(&done);
        self.handle_manager_event(Event::Device(emc, done));
    }

    fn perform_device_call(&mut self, incarnation: u64, emc: EmcId, call: &DeviceCall) -> DeviceReply {
        let device = &mut self.devices[emc.0 as usize];
        self.run_log.counts.former_calls_rejected += u64::from(device.has_later_token(incarnation));
        let (done, revoked) = device.perform(incarnation, call);
        self.record_device_call(emc, call, &done);
        revoked.into_iter().for_each(|holding| self.invalidate_mappings(holding, "revoked"));
        done
    }
}

fn describe_records(records: &[Record]) -> String {
    let describe = |record: &Record| match record {
        Record::Slice(id, slot) => format!("{id}.{} {:?}; ", slot.epoch, slot.state),
        Record::Reservation(id, r) => format!("{id} {:?}; ", r.stage),
        Record::Host(id, host) => format!("{id} {:?} {:?}; ", host.fence, host.scheduling),
        Record::Deleted(key) => format!("deleted {key:?}; "),
        Record::Meta(_) | Record::Emc(..) | Record::Migration(..) | Record::Decision(..) => String::new(),
    };
    records.iter().map(describe).collect()
}
