//! The manager's program: consecutive runs of the real state machine, with a store and a thread per
//! device. It performs effects like `pool-manager` and may crash between any two of them.

use std::collections::VecDeque;

use pool::{
    ledger::When,
    manager::{Ask, DeviceCall, DeviceDone, DeviceFailure, Effect, Event, Manager, Token},
    record::{Fence, Meta, Record},
};
use rand::Rng as _;
use units::{EmcId, HostId, Ns, limits::STORE_RETRY};

use super::{Happening, Records, World, store::Store};

/// Consecutive ticks without effect; more indicate a busy loop.
const IDLE_TICKS_MAX: u32 = 100;
/// Delay of a wakeup that is due in the past.
const AT_ONCE: Ns = Ns(20_000);
/// Slices per event of the manager: few, so that comparisons and desired states have several pieces.
const PIECE_MAX: usize = 4;
/// Duration of a device call.
const DEVICE_TAKES: Ns = Ns(300_000);

#[derive(Debug)]
pub(super) struct Program {
    pub(super) running: Option<Running>,
    pub(super) store: Box<dyn Store>,
    disk_full: bool,
    life: u64,
    tokens: u64,
}

/// One run of the manager.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) manager: Manager,
    life: u64,
    /// Rack time at its start, and the world's time.
    base: Ns,
    started: Ns,
    /// It has loaded its rack.toml and accepts connections.
    pub(super) ready: Option<Token>,
    pub(super) open: bool,
    writing: Option<(u64, Records)>,
    /// Rack times at which the writes of the latest two batches began. The decisions of the latest batch
    /// were made in between.
    began: Ns,
    decided_since: Ns,
    /// Calls queued for each device's thread, and the completion time of the last one.
    calls: Vec<(VecDeque<DeviceCall>, Ns)>,
    wake: Option<Ns>,
    idle: u32,
    /// Events were applied whose effects have not been performed.
    bursting: bool,
}

impl Program {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        Self { running: None, store, disk_full: false, life: 0, tokens: 0 }
    }

    pub(super) fn token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    /// Accounts for time in which nothing ran.
    pub(super) fn shift_waking(&mut self, span: Ns) {
        if let Some(running) = &mut self.running {
            running.wake = running.wake.map(|at| at.after(span));
        }
    }

    fn alive(&mut self, life: u64) -> Option<&mut Running> {
        self.running.as_mut().filter(|running| running.life == life)
    }

    /// Returns the batch that is being written.
    pub(super) fn writing(&self) -> Option<&[Record]> {
        let (_, records) = self.running.as_ref()?.writing.as_ref()?;
        Some(records)
    }

    /// Returns the rack time from which on the decisions of the latest batch were made.
    pub(super) fn decided_since(&self) -> Option<Ns> {
        self.running.as_ref().map(|running| running.decided_since)
    }

    /// Fills the store's disk, or frees space.
    pub(super) fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
        self.store.set_full(full);
    }

    /// Returns whether it accepts connections and has performed all effects of its events.
    pub(super) fn is_settled(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.open && !running.bursting)
    }

    /// Returns whether it accepts connections and requests.
    pub(super) fn is_open(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.open)
    }
}

impl World {
    pub(super) fn start_manager(&mut self) {
        if self.program.running.is_some() {
            return;
        }
        let Some((meta, records)) = self.program.store.load() else {
            self.say(|| "manager cannot read its store".into());
            return self.after(Ns::ms(100), Happening::ManagerStarts);
        };
        let restored = self.program.store.is_restored();
        if restored {
            self.forget_lost_history(&records);
        }
        self.truth_loaded(meta.as_ref(), &records, restored);
        if restored {
            self.restore_rack();
            self.doubt_everything();
        }
        self.follow_rack();
        self.fresh_leases();
        let meta = meta.unwrap_or_else(|| Meta::new("rack".into()));
        self.program.life += 1;
        let ready = self.program.token();
        let mut manager = Manager::new(self.weather.settings.clone());
        manager.set_piece(self.rng.random_range(1..=PIECE_MAX));
        let (life, base) = (self.program.life, meta.rack_time);
        self.program.running = Some(Running {
            manager,
            life,
            base,
            started: self.now,
            ready: Some(ready),
            open: false,
            writing: None,
            began: base,
            decided_since: base,
            calls: self.devices.iter().map(|_| (VecDeque::new(), Ns::ZERO)).collect(),
            wake: None,
            idle: 0,
            bursting: false,
        });
        self.say(|| format!("manager starts its life {life}"));
        self.manager(Event::Loaded { meta, records, restored });
        let rack = self.rack.spec().clone();
        self.manager(Event::Ask(ready, Ask::Configure(rack)));
        self.report_store_space();
    }

    /// Crashes. Calls of its threads may or may not take effect.
    pub(super) fn kill_manager(&mut self) {
        let writing = self.program.running.as_ref().and_then(|running| running.writing.clone());
        writing.into_iter().for_each(|(_, records)| self.check_batch(&records)); // the batch may become durable
        let Some(running) = self.program.running.take() else { return };
        self.say(|| "manager is killed".into());
        self.program.store.crash(running.writing.as_ref().map(|(_, records)| records.as_slice()));
        for (calls, emc) in running.calls.into_iter().zip(0..) {
            let done = if self.chance(0.5) { calls.0.len() } else { 0 };
            for call in calls.0.iter().take(done) {
                self.make_call(EmcId(emc), call);
            }
        }
        self.forget_askers();
        self.break_connections();
    }

    /// Passes one event to the manager. Sometimes further events join before effects are performed.
    pub(super) fn manager(&mut self, event: Event) {
        let when = self.when();
        let burst = !self.calm && self.chance(0.2);
        let Some(running) = &mut self.program.running else { return };
        let tick = matches!(event, Event::Tick);
        running.manager.handle(when, event);
        if running.bursting {
            return;
        }
        if burst {
            running.bursting = true;
            let life = running.life;
            return self.after(AT_ONCE, Happening::ManagerSettles(life));
        }
        self.settle_manager(tick);
    }

    pub(super) fn end_burst(&mut self, life: u64) {
        if let Some(running) = self.program.alive(life) {
            running.bursting = false;
            self.settle_manager(false);
        }
    }

    pub(super) fn when(&self) -> When {
        let now = self
            .program
            .running
            .as_ref()
            .map_or(Ns::ZERO, |running| running.base.after(self.now.since(running.started)));
        When { now, wall: self.wall() }
    }

    fn settle_manager(&mut self, tick: bool) {
        let when = self.when();
        let Some(running) = &mut self.program.running else { return };
        running.manager.settle(when);
        let idle = !self.perform_manager() && tick;
        let Some(running) = &mut self.program.running else { return };
        running.idle = if idle { running.idle + 1 } else { 0 };
        if running.idle > IDLE_TICKS_MAX {
            let at = running.manager.next_wakeup();
            self.blame("nothing spins", format!("the manager, at {}, wants to be woken at {at:?}", when.now));
        }
        self.plan_waking();
    }

    fn plan_waking(&mut self) {
        let now = self.now;
        let Some(running) = &mut self.program.running else { return };
        let Some(at) = running.manager.next_wakeup() else { return };
        let at = running.started.after(at.since(running.base)).max(now.after(AT_ONCE));
        if running.wake.is_none_or(|planned| at < planned || planned < now) {
            running.wake = Some(at);
            self.at(at, Happening::ManagerWakes);
        }
    }

    pub(super) fn wake_manager(&mut self) {
        let now = self.now;
        if let Some(running) = self.program.running.as_mut()
            && running.wake == Some(now)
        {
            running.wake = None;
            self.manager(Event::Tick);
        }
    }

    /// Returns whether there were effects to perform.
    fn perform_manager(&mut self) -> bool {
        let mut any = false;
        while let Some(effect) =
            self.program.running.as_mut().and_then(|running| running.manager.poll_effect())
        {
            any = true;
            self.perform_manager_effect(effect);
        }
        any
    }

    fn perform_manager_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, records } => self.begin_store(batch, records),
            Effect::Reload => {
                self.say(|| "store is read again".into());
                let (life, span) = (self.program.life, self.about(self.weather.store_takes));
                self.after(span, Happening::StoreRead(life));
            }
            Effect::Reply(token, answer) => self.on_reply(token, *answer),
            Effect::Device(emc, call) => self.begin_call(emc, call),
            Effect::Send(session, want) => self.send_want(session, want),
            Effect::RequestReport(session) => self.request_report(session),
            Effect::Close(session, why) => self.manager_closes(session, &why),
            Effect::Durable(_) => {}
        }
    }

    fn begin_store(&mut self, batch: u64, records: Records) {
        let life = self.program.life;
        let now = self.when().now;
        let running = self.program.running.as_mut().expect("an effect of a running manager");
        running.writing = Some((batch, records));
        running.decided_since = std::mem::replace(&mut running.began, now);
        let span = self.about(self.weather.store_takes);
        self.after(span, Happening::StoreDone(life));
    }

    pub(super) fn store_done(&mut self, life: u64) {
        let Some(running) = self.program.alive(life) else { return };
        let Some((batch, records)) = running.writing.take() else { return };
        self.check_batch(&records);
        let ok = self.program.store.commit(&records);
        if ok {
            self.note_durable(&records);
        }
        self.story.counts.writes_without_room += u64::from(!ok && self.program.disk_full);
        self.note_stored(ok);
        self.say(|| format!("batch {batch} ok={ok}: {}", brief(&records)));
        self.manager(Event::Stored { batch, ok });
        if ok {
            self.compare_now_and_then();
            self.check_returns();
        }
    }

    pub(super) fn store_read(&mut self, life: u64) {
        if self.program.alive(life).is_none() {
            return;
        }
        match self.program.store.load() {
            None => self.after(STORE_RETRY, Happening::StoreRead(life)),
            Some((meta, records)) => {
                let restored = self.program.store.is_restored();
                self.truth_loaded(meta.as_ref(), &records, restored);
                if restored {
                    self.doubt_everything();
                }
                self.follow_rack();
                // A store that was never written cannot be loaded again: the program ends and restarts.
                match meta {
                    Some(meta) => self.manager(Event::Loaded { meta, records, restored }),
                    None => {
                        self.kill_manager();
                        self.after(Ns::ms(1), Happening::ManagerStarts);
                    }
                }
            }
        }
    }

    fn begin_call(&mut self, emc: EmcId, call: DeviceCall) {
        self.check_call(emc, &call);
        self.say(|| format!("{emc} is asked {call:?}"));
        match call {
            DeviceCall::Fence { host, powered_off: false } if self.devices[emc.0 as usize].is_shared() => {
                let (life, span) = (self.program.life, self.a_while());
                self.after(span, Happening::CommandEnds(life, emc, host));
            }
            call => self.queue_call(emc, call),
        }
    }

    /// Ends an operator's fence command with success or failure, also if the manager that ran it has
    /// crashed.
    pub(super) fn command_ends(&mut self, life: u64, emc: EmcId, host: HostId) {
        let stops = self.weather.stops.unwrap_or_default();
        let stopped = self.chance(stops);
        if stopped {
            self.power_off(host);
            let span = self.a_while();
            self.after(span, Happening::Boots(host));
        }
        let Some(running) = self.program.alive(life) else { return };
        let fence = running.manager.durable().host(host).map(|entry| entry.host.fence);
        if stopped && matches!(fence, Some(Fence::Fencing { .. })) {
            return self.queue_call(emc, DeviceCall::Fence { host, powered_off: true });
        }
        let call = DeviceCall::Fence { host, powered_off: false };
        let failure = DeviceFailure::NotFenced("the machine was not stopped".into());
        self.manager(Event::Device(emc, DeviceDone::Failed { call, failure }));
    }

    fn queue_call(&mut self, emc: EmcId, call: DeviceCall) {
        let (now, span) = (self.now, self.about(DEVICE_TAKES));
        let life = self.program.life;
        let running = self.program.running.as_mut().expect("an effect of a running manager");
        let devices = self.devices.len().max(running.calls.len());
        running.calls.resize_with(devices, Default::default);
        let (calls, last) = &mut running.calls[emc.0 as usize];
        calls.push_back(call);
        *last = (*last).max(now).after(span);
        let at = *last;
        self.at(at, Happening::DeviceTurn(life, emc));
    }

    pub(super) fn device_turn(&mut self, life: u64, emc: EmcId) {
        let Some(running) = self.program.alive(life) else { return };
        let Some(call) = running.calls[emc.0 as usize].0.pop_front() else { return };
        let done = self.make_call(emc, &call);
        self.say(|| format!("{emc} answers {done:?}"));
        if let DeviceDone::Contents(_) = done {
            self.note_contents(emc, done.clone());
            return self.manager(Event::Device(emc, done));
        }
        self.note_answer(&done);
        self.manager(Event::Device(emc, done));
    }

    fn make_call(&mut self, emc: EmcId, call: &DeviceCall) -> DeviceDone {
        let (done, cut) = self.devices[emc.0 as usize].perform(call);
        self.note_device(emc, call, &done);
        cut.into_iter().for_each(|holding| self.cut_off(holding, "revoked"));
        done
    }
}

fn brief(records: &[Record]) -> String {
    let word = |record: &Record| match record {
        Record::Slice(id, slot) => format!("{id}.{} {:?}; ", slot.epoch, slot.state),
        Record::Reservation(id, r) => format!("{id} {:?}; ", r.stage),
        Record::Host(id, host) => format!("{id} {:?} {:?}; ", host.fence, host.scheduling),
        Record::Gone(key) => format!("gone {key:?}; "),
        Record::Meta(_) | Record::Emc(..) | Record::Migration(..) | Record::Decision(..) => String::new(),
    };
    records.iter().map(word).collect()
}
