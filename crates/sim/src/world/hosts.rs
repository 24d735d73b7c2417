//! Events on hosts: machines boot and fail, agents apply desired states, processes attach memory, use it
//! and end.

use pool::{
    agent::{Adopted, Agent, Caller, Done, Effect, Event, HostFailure, Process, Ticket, VmRecord},
    manager::SessionId,
    protocol::{FailedReason, Holding},
};
use rand::Rng as _;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use units::{HostId, InstanceId, Name, Ns, ReservationId, SliceId, UserId};

use super::{
    Happening, World,
    device::{Device, Mark},
    machine::{Guest, Job, Pid, Running},
};

/// Attempts of a process to attach its memory, and the delay between them.
const ASKS_MAX: u32 = 12;
const ASK_AGAIN: Ns = Ns::ms(40);
/// Consecutive ticks without effect; more indicate a busy loop.
const IDLE_TICKS_MAX: u32 = 100;
const AT_ONCE: Ns = Ns(20_000);
const HOST_TAKES: Ns = Ns(300_000);

impl World {
    pub(super) fn device(&mut self, slice: SliceId) -> &mut Device {
        self.devices.iter_mut().find(|device| device.has(slice)).expect("every slice is on a device")
    }

    pub(super) fn reaches(&self, holding: Holding, host: HostId) -> bool {
        let device = self.devices.iter().find(|device| device.has(holding.slice));
        device.expect("every slice is on a device").reaches(holding, host)
    }

    pub(super) fn boot(&mut self, host: HostId) {
        let machine = self.machine(host);
        if machine.up {
            return;
        }
        (machine.up, machine.boot, machine.next_pid) = (true, machine.boot + 1, 100);
        let boot = machine.boot;
        self.say(|| format!("{host} boots for the {boot}. time"));
        self.after(Ns::ms(1), Happening::AgentStarts(host, boot));
    }

    /// Powers the machine off. Only its disk survives.
    pub(super) fn power_off(&mut self, host: HostId) {
        self.kill_agent(host, false);
        self.say(|| format!("{host} is off"));
        let forgets = self.chance(0.5);
        let machine = self.machine(host);
        machine.up = false;
        machine.kernel.clear();
        machine.processes.clear();
        if forgets {
            machine.records.clear();
        }
    }

    pub(super) fn start_agent(&mut self, host: HostId, boot: u64) {
        let now = self.now;
        let machine = self.machine(host);
        if !machine.up || machine.boot != boot || machine.running.is_some() {
            return;
        }
        machine.instances += 1;
        let instance = machine.instances;
        let records: Vec<VmRecord> = machine.records.values().cloned().collect();
        let adopt = |record: VmRecord| Adopted { lives: machine.is_alive(&record.process), record };
        let found: Vec<Adopted> = records.into_iter().map(adopt).collect();
        let adopted = found.len();
        let places = machine.kernel.iter().map(|holding| place(holding.slice)).collect();
        let agent = Agent::new(now, InstanceId(instance), machine.rack.clone(), found, places);
        machine.running = Some(Running {
            agent,
            instance,
            session: None,
            wake: None,
            idle: 0,
            watched: BTreeMap::new(),
            tickets: BTreeMap::new(),
            scrubbing: BTreeSet::new(),
        });
        self.say(|| format!("agent of {host} starts as instance {instance} and finds {adopted} records"));
        self.agent(host, instance, Event::Tick);
        self.after(Ns::ZERO, Happening::Connects(host, instance));
    }

    /// Kills the agent. A running kernel closes its connection. A write in progress may or may not be
    /// durable.
    pub(super) fn kill_agent(&mut self, host: HostId, told: bool) {
        let machine = self.machine(host);
        machine.frozen_until = Ns::ZERO;
        let Some(running) = machine.running.take() else { return };
        self.say(|| format!("agent of {host} dies"));
        self.finish_records(host, running.instance);
        if let Some(session) = running.session {
            self.agent_gone(session, told);
        }
    }

    fn finish_records(&mut self, host: HostId, instance: u64) {
        let under_way = |happening: &Happening| match happening {
            Happening::HostDone(h, i, job) if (*h, *i) == (host, instance) => match &**job {
                Job::Record(record) => Some(record.clone()),
                _ => None,
            },
            _ => None,
        };
        let records: Vec<VmRecord> = self.queue.values().filter_map(under_way).collect();
        for record in records {
            if self.chance(0.5) {
                self.machine(host).records.insert(record.reservation, record);
            }
        }
    }

    /// Delivers events to a stopped agent after it resumes.
    pub(super) fn postpone(&mut self, host: HostId, again: impl FnOnce() -> Happening) -> bool {
        let until = self.machine(host).frozen_until;
        let frozen = until > self.now;
        if frozen {
            self.at(until, again());
        }
        frozen
    }

    /// Passes one event to an agent and performs its effects.
    pub(super) fn agent(&mut self, host: HostId, instance: u64, event: Event) {
        let now = self.now;
        let Some(running) = self.machine(host).running(instance) else { return };
        let tick = matches!(event, Event::Tick);
        running.agent.handle(now, event);
        let mut any = false;
        while let Some(effect) = self.machine(host).running(instance).and_then(|r| r.agent.poll_effect()) {
            any = true;
            self.perform_agent(host, instance, effect);
        }
        let Some(running) = self.machine(host).running(instance) else { return };
        running.idle = if tick && !any { running.idle + 1 } else { 0 };
        if running.idle > IDLE_TICKS_MAX {
            self.blame("nothing spins", format!("the agent of {host} wants to be woken for nothing"));
        }
        self.plan_agent_waking(host, instance);
    }

    fn plan_agent_waking(&mut self, host: HostId, instance: u64) {
        let now = self.now;
        let Some(running) = self.machine(host).running(instance) else { return };
        let Some(at) = running.agent.next_wakeup() else { return };
        let at = at.max(now.after(AT_ONCE));
        if running.wake.is_none_or(|planned| at < planned || planned < now) {
            running.wake = Some(at);
            self.at(at, Happening::AgentWakes(host, instance));
        }
    }

    pub(super) fn wake_agent(&mut self, host: HostId, instance: u64) {
        let now = self.now;
        let Some(running) =
            self.machine(host).running(instance).filter(|r| r.wake.is_some_and(|at| at <= now))
        else {
            return;
        };
        running.wake = None;
        if self.postpone(host, || Happening::AgentWakes(host, instance)) {
            let until = self.machine(host).frozen_until;
            self.machine(host).running(instance).expect("it was just there").wake = Some(until);
            return;
        }
        self.agent(host, instance, Event::Tick);
    }

    fn perform_agent(&mut self, host: HostId, instance: u64, effect: Effect) {
        match effect {
            Effect::Online { holding, check_zero, .. } => {
                self.kernel_takes(host, holding);
                self.host_job(host, instance, HOST_TAKES, Job::Online { holding, check_zero });
            }
            Effect::Offline { holding, verify, .. } => {
                self.host_job(host, instance, HOST_TAKES, Job::Offline { holding, verify });
            }
            Effect::Scrub { holding, .. } => self.begin_scrub(host, instance, holding),
            Effect::Clear { place } => self.host_job(host, instance, HOST_TAKES, Job::Clear(place)),
            Effect::Record(record) => self.host_job(host, instance, HOST_TAKES, Job::Record(record)),
            Effect::Forget(id) => drop(self.machine(host).records.remove(&id)),
            Effect::HandOut { ticket, record } => self.hand_out(host, instance, ticket, &record),
            Effect::Refuse { ticket, why } => {
                self.say(|| format!("{host} refuses: {why}"));
                self.take_ticket(host, instance, ticket);
            }
            Effect::Watch { reservation, process } => self.watch(host, instance, reservation, process),
            Effect::Kill(id) => self.kill_watched(host, instance, id),
            Effect::FreeLocal(_) => {}
            Effect::SendHave(have) => self.speak(host, have),
            Effect::Remember { rack } => self.machine(host).rack = Some(rack),
            Effect::HangUp(why) => self.blame("one rack has one name", why.to_string()),
            Effect::Bounced(number, why) => self.say(|| format!("{host} bounces order {number}: {why}")),
        }
    }

    fn speak(&mut self, host: HostId, have: pool::protocol::Have) {
        let session: Option<SessionId> = self.machine(host).current_session();
        if let Some(session) = session {
            self.send_have(host, session, have);
        }
    }

    pub(super) fn host_job(&mut self, host: HostId, instance: u64, takes: Ns, job: Job) {
        let span = self.about(takes);
        self.after(span, Happening::HostDone(host, instance, Box::new(job)));
    }

    pub(super) fn host_done(&mut self, host: HostId, instance: u64, job: Job) {
        if self.machine(host).running(instance).is_none() {
            return;
        }
        let (now, until) = (self.now, self.machine(host).frozen_until);
        if until > now {
            return self.at(until, Happening::HostDone(host, instance, Box::new(job)));
        }
        let event = match job {
            Job::Online { holding, check_zero } => {
                Event::Done { holding, result: self.online(host, holding, check_zero) }
            }
            Job::Offline { holding, verify } => {
                Event::Done { holding, result: self.offline(host, holding, verify) }
            }
            Job::Scrub { holding, started } => {
                Event::Done { holding, result: self.scrub(host, instance, holding, started) }
            }
            Job::Clear(place) => {
                let result = self.clear(host, &place);
                Event::Cleared { place, result }
            }
            Job::Record(record) => self.keep_record(host, record),
        };
        self.agent(host, instance, event);
    }

    pub(super) fn host_call(&mut self) -> Result<(), HostFailure> {
        let fails = !self.calm && self.chance(self.weather.host_fails);
        if fails { Err(failed(FailedReason::Host, "the host fails")) } else { Ok(()) }
    }

    /// Marks a slice as present in the kernel from the first step of a call; a failed call may leave it
    /// so.
    pub(super) fn kernel_takes(&mut self, host: HostId, holding: Holding) {
        if self.device(holding.slice).is_shared() {
            self.machine(host).kernel.retain(|had| had.slice != holding.slice);
            self.machine(host).kernel.insert(holding);
        }
    }

    fn clear(&mut self, host: HostId, place: &str) -> Result<(), HostFailure> {
        self.host_call()?;
        let is_it = |holding: &Holding| *self::place(holding.slice) == *place;
        let users = self.machine(host).mappings().find(|(holding, _)| is_it(holding));
        if let Some((holding, pid)) = users {
            let what = format!("{host} closes {holding:?}, which process {pid} has, as if nobody had it");
            self.blame("guests outlive us", what);
        }
        self.machine(host).kernel.retain(|holding| !is_it(holding));
        Ok(())
    }

    fn online(&mut self, host: HostId, holding: Holding, check_zero: bool) -> Result<Done, HostFailure> {
        self.host_call()?;
        if !self.reaches(holding, host) {
            return Err(failed(FailedReason::Host, "no such grant"));
        }
        if check_zero && self.device(holding.slice).read(holding.slice) != Mark::ZERO {
            return Err(failed(FailedReason::NotZero, "not zero"));
        }
        Ok(Done::Onlined)
    }

    fn offline(&mut self, host: HostId, holding: Holding, verify: bool) -> Result<Done, HostFailure> {
        self.host_call()?;
        let users = self.machine(host).mappings().filter(|(held, pid)| *held == holding && *pid != 0);
        let users: Vec<Pid> = users.map(|(_, pid)| pid).collect();
        if verify && !users.is_empty() {
            return Err(failed(FailedReason::Host, "still in use"));
        }
        // Where the device cannot revoke access, the host removes the mapping itself.
        if self.device(holding.slice).is_shared() {
            users.into_iter().for_each(|pid| self.lose_memory(host, pid, holding, "taken by the host"));
        }
        self.machine(host).kernel.retain(|had| had.slice != holding.slice);
        Ok(Done::Offlined)
    }

    fn keep_record(&mut self, host: HostId, record: VmRecord) -> Event {
        let reservation = record.reservation;
        let result = self.host_call().map_err(|failure| failure.message);
        if result.is_ok() {
            self.machine(host).records.insert(reservation, record);
        }
        Event::Recorded { reservation, result }
    }

    /// Starts a process of a VM, which tries to attach until it succeeds.
    pub(super) fn launch(&mut self, host: HostId, vm: &Name) {
        let mark = Mark(self.rng.random_range(1..u64::MAX));
        let started = self.now.0;
        let machine = self.machine(host);
        if !machine.up {
            return;
        }
        machine.next_pid += 1;
        let (pid, boot) = (machine.next_pid, machine.boot);
        let process = Process { pid, started, cgroup: String::new() };
        let guest =
            Guest { process, vm: vm.clone(), mark, has_memory: false, mapped: BTreeMap::new(), asked: 0 };
        machine.processes.insert(pid, guest);
        self.after(Ns::ms(1), Happening::Asks(host, boot, pid));
    }

    pub(super) fn process_asks(&mut self, host: HostId, boot: u64, pid: Pid) {
        if self.machine(host).boot != boot {
            return;
        }
        let Some(guest) = self.machine(host).processes.get_mut(&pid) else { return };
        guest.asked += 1;
        let (vm, process, waits) = (guest.vm.clone(), guest.process.clone(), !guest.has_memory);
        if guest.asked > ASKS_MAX && waits {
            return self.end_process(host, pid);
        }
        if waits {
            self.after(ASK_AGAIN, Happening::Asks(host, boot, pid));
        }
        let ticket = Ticket(self.steps);
        let (now, until) = (self.now, self.machine(host).frozen_until);
        let frozen = until > now;
        if let Some(running) = self.machine(host).running.as_mut().filter(|_| !frozen) {
            let instance = running.instance;
            running.tickets.insert(ticket, pid);
            self.agent(
                host,
                instance,
                Event::Attach { ticket, vm, caller: Caller { process, uid: UserId::ROOT } },
            );
        }
    }

    fn take_ticket(&mut self, host: HostId, instance: u64, ticket: Ticket) -> Option<Pid> {
        self.machine(host).running(instance)?.tickets.remove(&ticket)
    }

    /// Hands memory to a process, which checks it for zeros and writes to it.
    fn hand_out(&mut self, host: HostId, instance: u64, ticket: Ticket, record: &VmRecord) {
        self.check_hand_out(host, record);
        let Some(pid) = self.take_ticket(host, instance, ticket) else { return };
        let boot = self.machine(host).boot;
        let Some(guest) = self.machine(host).processes.get_mut(&pid) else { return };
        let first = !guest.has_memory;
        let mark = guest.mark;
        guest.has_memory = true;
        guest.mapped.extend(record.slices.keys().map(|holding| (*holding, record.reservation)));
        self.say(|| format!("{host} hands {} to process {pid}", record.reservation));
        for holding in record.slices.keys() {
            self.first_look(host, pid, *holding, mark);
        }
        if first {
            self.story.counts.started += 1;
            let span = self.between(Ns::ms(10), Ns::ms(300));
            self.after(span, Happening::Lives(host, boot, pid));
        }
    }

    fn first_look(&mut self, host: HostId, pid: Pid, holding: Holding, mark: Mark) {
        if !self.reaches(holding, host) {
            return self.lose_memory(host, pid, holding, "gone before it was handed out");
        }
        let seen = self.device(holding.slice).read(holding.slice);
        if seen != Mark::ZERO && seen != mark {
            let what = format!("process {pid} of {host} sees another's bytes in {holding:?}");
            self.blame("clean hands", what);
        }
        self.device(holding.slice).write(holding.slice, mark);
    }

    /// Lets a process write, attach again or end.
    pub(super) fn process_lives(&mut self, host: HostId, boot: u64, pid: Pid) {
        if self.machine(host).boot != boot {
            return;
        }
        let Some(guest) = self.machine(host).processes.get(&pid).cloned() else { return };
        match self.rng.random_range(0..10) {
            0..3 => return self.end_process(host, pid),
            3 => self.process_asks(host, boot, pid),
            _ => {
                let reached = guest.mapped.into_keys().filter(|holding| self.reaches(*holding, host));
                for holding in reached.collect::<Vec<_>>() {
                    self.device(holding.slice).write(holding.slice, guest.mark);
                }
            }
        }
        let span = self.between(Ns::ms(10), Ns::ms(500));
        self.after(span, Happening::Lives(host, boot, pid));
    }

    fn watch(&mut self, host: HostId, instance: u64, reservation: ReservationId, process: Process) {
        let alive = self.machine(host).is_alive(&process);
        if let Some(running) = self.machine(host).running(instance) {
            running.watched.insert(reservation, process);
        }
        if !alive {
            self.after(Ns::ms(1), Happening::ProcessGone(host, instance, reservation));
        }
    }

    pub(super) fn process_gone(&mut self, host: HostId, instance: u64, id: ReservationId) {
        if self.postpone(host, || Happening::ProcessGone(host, instance, id)) {
            return;
        }
        if let Some(running) = self.machine(host).running(instance) {
            running.watched.remove(&id);
            self.agent(host, instance, Event::ProcessGone { reservation: id });
        }
    }

    fn kill_watched(&mut self, host: HostId, instance: u64, id: ReservationId) {
        let Some(running) = self.machine(host).running(instance) else { return };
        let Some(process) = running.watched.get(&id).cloned() else { return };
        if self.machine(host).is_alive(&process) {
            let held = self.machine(host).processes[&process.pid].mapped.keys().next().copied();
            match held {
                Some(holding) => self.lose_memory(host, process.pid, holding, "killed by the agent"),
                None => self.end_process(host, process.pid),
            }
        }
    }

    /// Ends a process; sometimes a child keeps the memory for a while.
    pub(super) fn end_process(&mut self, host: HostId, pid: Pid) {
        let Some(guest) = self.machine(host).processes.get(&pid).cloned() else { return };
        let leaves_child = !self.calm && !guest.mapped.is_empty() && self.chance(0.15);
        self.remove_process(host, pid);
        if leaves_child {
            let started = self.now.0 + 1;
            let machine = self.machine(host);
            machine.next_pid += 1;
            let (child, boot) = (machine.next_pid, machine.boot);
            let process = Process { pid: child, started, cgroup: String::new() };
            machine.processes.insert(child, Guest { process, ..guest });
            let span = self.between(Ns::ms(1), Ns::ms(900));
            self.after(span, Happening::Lives(host, boot, child));
        }
    }

    fn remove_process(&mut self, host: HostId, pid: Pid) {
        let Some(guest) = self.machine(host).processes.remove(&pid) else { return };
        self.say(|| format!("process {pid} of {} on {host} is gone", guest.vm));
        let Some(running) = &self.machine(host).running else { return };
        let instance = running.instance;
        let watched = running.watched.iter().filter(|(_, process)| guest.process.is(process));
        for id in watched.map(|(id, _)| *id).collect::<Vec<_>>() {
            let span = self.about(HOST_TAKES);
            self.after(span, Happening::ProcessGone(host, instance, id));
        }
    }

    /// Ends processes with a mapping that a device has invalidated.
    pub(super) fn cut_off(&mut self, holding: Holding, why: &str) {
        if self.device(holding.slice).is_shared() && why == "revoked" {
            return;
        }
        for host in self.hosts() {
            let users = self.machine(host).mappings().filter(|(held, pid)| *held == holding && *pid != 0);
            for pid in users.map(|(_, pid)| pid).collect::<Vec<_>>() {
                self.lose_memory(host, pid, holding, why);
            }
        }
    }

    fn lose_memory(&mut self, host: HostId, pid: Pid, holding: Holding, why: &str) {
        if let Some(guest) = self.machine(host).processes.get(&pid).cloned() {
            self.check_loss(host, &guest, holding, why);
            self.remove_process(host, pid);
        }
    }
}

/// Returns the handle of a slice of a shared device that a kernel has, independent of its owner.
fn place(slice: SliceId) -> Arc<str> {
    slice.to_string().into()
}

pub(super) fn failed(reason: FailedReason, message: &str) -> HostFailure {
    HostFailure { reason, message: message.into() }
}
