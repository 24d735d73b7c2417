//! Events on hosts: machines boot and fail, agents apply desired states, and processes attach
//! memory, use their memory and end.

use pool::{
    agent::{
        Agent, Caller, Effect, Event, HostFailure, Process, RecoveredVm, SliceOutcome, Ticket, VmRecord,
    },
    manager::SessionId,
    protocol::{FailureReason, Holding},
};
use rand::Rng as _;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use units::{HostId, InstanceId, Name, Ns, ReservationId, SliceId, UserId};

use super::{
    ScheduledEvent, World,
    check::describe_holding,
    device::{DataPattern, Device},
    machine::{Guest, GuestRehome, HostCall, Pid, RunningAgent},
};

/// Maximum number of attempts of a process to attach its memory.
const ATTACH_ATTEMPTS_MAX: u32 = 12;
/// Delay between two attempts to attach memory.
const ATTACH_RETRY_DELAY: Ns = Ns::ms(40);
/// Maximum number of consecutive wakeups without effect. More wakeups indicate a busy loop.
const IDLE_WAKEUPS_MAX: u32 = 100;
const OVERDUE_WAKEUP_DELAY: Ns = Ns(20_000);
const HOST_CALL_DURATION: Ns = Ns(300_000);

impl World {
    pub(super) fn device(&mut self, slice: SliceId) -> &mut Device {
        self.devices.iter_mut().find(|device| device.contains(slice)).expect("every slice is on a device")
    }

    pub(super) fn is_mapping_valid(&self, holding: Holding, host: HostId) -> bool {
        let device = self.devices.iter().find(|device| device.contains(holding.slice));
        device.expect("every slice is on a device").is_mapping_valid(holding, host)
    }

    pub(super) fn boot_host(&mut self, host: HostId) {
        let machine = self.machine(host);
        if machine.is_up {
            return;
        }
        (machine.is_up, machine.boot, machine.next_pid) = (true, machine.boot + 1, 100);
        let boot = machine.boot;
        self.log(|| format!("{host} boots, boot number {boot}"));
        self.schedule_after(Ns::ms(1), ScheduledEvent::AgentStart(host, boot));
    }

    /// Powers a machine off. In half of the cases, the records of the agent survive.
    pub(super) fn power_off(&mut self, host: HostId) {
        self.kill_agent(host, false);
        self.log(|| format!("{host} is off"));
        let loses_records = self.random_bool(0.5);
        let machine = self.machine(host);
        machine.is_up = false;
        machine.manager_token = 0; // /run is lost
        machine.kernel.clear();
        machine.processes.clear();
        if loses_records {
            machine.records.clear();
        }
    }

    pub(super) fn start_agent(&mut self, host: HostId, boot: u64) {
        let now = self.now;
        let machine = self.machine(host);
        if !machine.is_up || machine.boot != boot || machine.running.is_some() {
            return;
        }
        machine.instances += 1;
        let instance = machine.instances;
        let records: Vec<VmRecord> = machine.records.values().cloned().collect();
        let adopt = |record: VmRecord| RecoveredVm { is_alive: machine.is_alive(&record.process), record };
        let adopted_records: Vec<RecoveredVm> = records.into_iter().map(adopt).collect();
        let adopted = adopted_records.len();
        let places = machine.kernel.iter().map(|holding| shared_slice_path(holding.slice)).collect();
        let agent = Agent::new(now, InstanceId(instance), machine.rack.clone(), adopted_records, places);
        machine.running = Some(RunningAgent {
            agent,
            instance,
            session: None,
            wake: None,
            idle_wakeups: 0,
            watched: BTreeMap::new(),
            tickets: BTreeMap::new(),
            rehomes: BTreeSet::new(),
            scrubbing: BTreeSet::new(),
        });
        self.log(|| format!("agent of {host} starts as instance {instance} and finds {adopted} records"));
        self.handle_agent_event(host, instance, Event::Tick);
        self.schedule_after(Ns::ZERO, ScheduledEvent::AgentConnect(host, instance));
    }

    /// Kills the agent of a host. If `notify_manager` is set, the kernel still runs and closes the
    /// connection. Writes in progress may become durable or not.
    pub(super) fn kill_agent(&mut self, host: HostId, notify_manager: bool) {
        let machine = self.machine(host);
        machine.frozen_until = Ns::ZERO;
        let Some(running) = machine.running.take() else { return };
        self.log(|| format!("agent of {host} is killed"));
        self.finish_record_writes(host, running.instance);
        if let Some(session) = running.session {
            self.close_agent_end(session, notify_manager);
        }
    }

    fn finish_record_writes(&mut self, host: HostId, instance: u64) {
        let record_write = |event: &ScheduledEvent| match event {
            ScheduledEvent::HostCallDone(h, i, call) if (*h, *i) == (host, instance) => match &**call {
                HostCall::Record(record) => Some(record.clone()),
                _ => None,
            },
            _ => None,
        };
        let records: Vec<VmRecord> = self.queue.values().filter_map(record_write).collect();
        for record in records {
            if self.random_bool(0.5) {
                self.machine(host).records.insert(record.reservation, record);
            }
        }
    }

    /// Reschedules an event to the time at which a frozen agent resumes. Returns `false` if the
    /// agent is not frozen.
    pub(super) fn postpone_if_frozen(
        &mut self,
        host: HostId,
        retry: impl FnOnce() -> ScheduledEvent,
    ) -> bool {
        let until = self.machine(host).frozen_until;
        let frozen = until > self.now;
        if frozen {
            self.schedule_at(until, retry());
        }
        frozen
    }

    /// Passes one event to an agent and performs the resulting effects.
    pub(super) fn handle_agent_event(&mut self, host: HostId, instance: u64, event: Event) {
        let now = self.now;
        let Some(running) = self.machine(host).find_agent(instance) else { return };
        let tick = matches!(event, Event::Tick);
        running.agent.handle(now, event);
        let mut has_effects = false;
        while let Some(effect) = self.machine(host).find_agent(instance).and_then(|r| r.agent.poll_effect()) {
            has_effects = true;
            self.perform_agent_effect(host, instance, effect);
        }
        let Some(running) = self.machine(host).find_agent(instance) else { return };
        running.idle_wakeups = if tick && !has_effects { running.idle_wakeups + 1 } else { 0 };
        if running.idle_wakeups > IDLE_WAKEUPS_MAX {
            self.report_violation(
                "no state machine wakes up repeatedly without work",
                format!("the agent of {host} has had more than {IDLE_WAKEUPS_MAX} wakeups without effect"),
            );
        }
        self.schedule_agent_wakeup(host, instance);
    }

    fn schedule_agent_wakeup(&mut self, host: HostId, instance: u64) {
        let now = self.now;
        let Some(running) = self.machine(host).find_agent(instance) else { return };
        let Some(at) = running.agent.next_wakeup() else { return };
        let at = at.max(now.after(OVERDUE_WAKEUP_DELAY));
        if running.wake.is_none_or(|planned| at < planned || planned < now) {
            running.wake = Some(at);
            self.schedule_at(at, ScheduledEvent::AgentWakeup(host, instance));
        }
    }

    pub(super) fn wake_agent(&mut self, host: HostId, instance: u64) {
        let now = self.now;
        let Some(running) =
            self.machine(host).find_agent(instance).filter(|r| r.wake.is_some_and(|at| at <= now))
        else {
            return;
        };
        running.wake = None;
        if self.postpone_if_frozen(host, || ScheduledEvent::AgentWakeup(host, instance)) {
            let until = self.machine(host).frozen_until;
            self.machine(host).find_agent(instance).expect("the agent is running").wake = Some(until);
            return;
        }
        self.handle_agent_event(host, instance, Event::Tick);
    }

    fn perform_agent_effect(&mut self, host: HostId, instance: u64, effect: Effect) {
        match effect {
            Effect::Online { holding, check_zero, .. } => {
                self.add_to_kernel(host, holding);
                self.schedule_host_call(
                    host,
                    instance,
                    HOST_CALL_DURATION,
                    HostCall::Online { holding, check_zero },
                );
            }
            Effect::Offline { holding, verify, .. } => {
                self.schedule_host_call(
                    host,
                    instance,
                    HOST_CALL_DURATION,
                    HostCall::Offline { holding, verify },
                );
            }
            Effect::Scrub { holding, .. } => self.start_scrub(host, instance, holding),
            Effect::CloseOrphan { place } => {
                self.schedule_host_call(host, instance, HOST_CALL_DURATION, HostCall::Clear(place))
            }
            Effect::Record(record) => {
                self.schedule_host_call(host, instance, HOST_CALL_DURATION, HostCall::Record(record))
            }
            Effect::DeleteRecord(id) => drop(self.machine(host).records.remove(&id)),
            Effect::PassMemory { ticket, record } => self.attach_memory(host, instance, ticket, &record),
            Effect::Refuse { ticket, why } => {
                self.log(|| format!("{host} rejects an attach request: {why}"));
                self.remove_ticket(host, instance, ticket);
            }
            Effect::Watch { reservation, process } => {
                self.watch_process(host, instance, reservation, process)
            }
            Effect::Rehome { reservation, .. } => self.start_rehome(host, instance, reservation),
            Effect::CancelRehome { reservation, .. } => self.cancel_rehome(host, instance, reservation),
            Effect::Kill(id) => self.kill_watched_process(host, instance, id),
            Effect::FreeLocal(_) => {}
            Effect::SendReport(report) => self.send_agent_report(host, report),
            Effect::RecordRack { rack } => self.machine(host).rack = Some(rack),
            Effect::Disconnect(why) => {
                self.report_violation("the name of a rack does not change", why.to_string())
            }
            Effect::CommandRejection(number, why) => {
                self.log(|| format!("{host} rejects desired state {number}: {why}"))
            }
        }
    }

    fn send_agent_report(&mut self, host: HostId, report: pool::protocol::ObservedState) {
        let session: Option<SessionId> = self.machine(host).current_session();
        if let Some(session) = session {
            self.send_report(host, session, report);
        }
    }

    pub(super) fn schedule_host_call(&mut self, host: HostId, instance: u64, duration: Ns, call: HostCall) {
        let span = self.random_duration_around(duration);
        self.schedule_after(span, ScheduledEvent::HostCallDone(host, instance, Box::new(call)));
    }

    pub(super) fn complete_host_call(&mut self, host: HostId, instance: u64, call: HostCall) {
        if self.machine(host).find_agent(instance).is_none() {
            return;
        }
        let (now, until) = (self.now, self.machine(host).frozen_until);
        if until > now {
            return self.schedule_at(until, ScheduledEvent::HostCallDone(host, instance, Box::new(call)));
        }
        let event = match call {
            HostCall::Online { holding, check_zero } => {
                Event::Done { holding, result: self.online_slice(host, holding, check_zero) }
            }
            HostCall::Offline { holding, verify } => {
                Event::Done { holding, result: self.offline_slice(host, holding, verify) }
            }
            HostCall::Scrub { holding, started } => {
                Event::Done { holding, result: self.complete_scrub(host, instance, holding, started) }
            }
            HostCall::Clear(place) => {
                let result = self.close_orphaned_slice(host, &place);
                Event::OrphanClosed { place, result }
            }
            HostCall::Record(record) => self.store_record(host, record),
            HostCall::PollRehome(id) => return self.poll_rehome(host, instance, id),
        };
        self.handle_agent_event(host, instance, event);
    }

    pub(super) fn inject_host_failure(&mut self) -> Result<(), HostFailure> {
        let fails = !self.faults_stopped && self.random_bool(self.fault_model.host_failure_rate);
        if fails { Err(host_failure(FailureReason::Host, "the host fails")) } else { Ok(()) }
    }

    /// Records that the kernel may use a slice of a shared device. The function is called at the
    /// start of a host call, because a failed call may leave the slice in the kernel.
    pub(super) fn add_to_kernel(&mut self, host: HostId, holding: Holding) {
        if self.device(holding.slice).is_shared() {
            self.machine(host).kernel.retain(|mapped| mapped.slice != holding.slice);
            self.machine(host).kernel.insert(holding);
        }
    }

    fn close_orphaned_slice(&mut self, host: HostId, place: &str) -> Result<(), HostFailure> {
        self.inject_host_failure()?;
        let is_slice = |holding: &Holding| *self::shared_slice_path(holding.slice) == *place;
        if self.machine(host).mappings().any(|(holding, _)| is_slice(&holding)) {
            return Err(host_failure(FailureReason::Host, "the slice is still in use"));
        }
        self.machine(host).kernel.retain(|holding| !is_slice(holding));
        Ok(())
    }

    fn online_slice(
        &mut self,
        host: HostId,
        holding: Holding,
        check_zero: bool,
    ) -> Result<SliceOutcome, HostFailure> {
        self.inject_host_failure()?;
        if !self.is_mapping_valid(holding, host) {
            return Err(host_failure(FailureReason::Host, "the slice is not granted to this host"));
        }
        if check_zero && self.device(holding.slice).read(holding.slice) != DataPattern::ZERO {
            return Err(host_failure(FailureReason::NotZero, "the slice is not zeroed"));
        }
        Ok(SliceOutcome::Onlined)
    }

    fn offline_slice(
        &mut self,
        host: HostId,
        holding: Holding,
        verify: bool,
    ) -> Result<SliceOutcome, HostFailure> {
        self.inject_host_failure()?;
        let users = self.machine(host).mappings().filter(|(held, pid)| *held == holding && *pid != 0);
        let users: Vec<Pid> = users.map(|(_, pid)| pid).collect();
        if verify && !users.is_empty() {
            return Err(host_failure(FailureReason::Host, "the slice is still in use"));
        }
        // A shared device cannot revoke access, so the host removes the mapping.
        if self.device(holding.slice).is_shared() {
            users.into_iter().for_each(|pid| self.lose_memory(host, pid, holding, "released by the host"));
        }
        self.machine(host).kernel.retain(|mapped| mapped.slice != holding.slice);
        Ok(SliceOutcome::Offlined)
    }

    fn store_record(&mut self, host: HostId, record: VmRecord) -> Event {
        let reservation = record.reservation;
        let result = self.inject_host_failure().map_err(|failure| failure.message);
        if result.is_ok() {
            self.machine(host).records.insert(reservation, record);
        }
        Event::Recorded { reservation, result }
    }

    /// Starts a process of a VM. The process tries to attach its memory a limited number of times.
    pub(super) fn launch_vm(&mut self, host: HostId, vm: &Name) {
        let pattern = DataPattern(self.rng.random_range(1..u64::MAX));
        let started = self.now.0;
        let machine = self.machine(host);
        if !machine.is_up {
            return;
        }
        machine.next_pid += 1;
        let (pid, boot) = (machine.next_pid, machine.boot);
        let process = Process { pid, started, cgroup: String::new() };
        let guest = Guest {
            process,
            vm: vm.clone(),
            pattern,
            has_memory: false,
            mapped: BTreeMap::new(),
            rehome: GuestRehome::None,
            attach_attempts: 0,
        };
        machine.processes.insert(pid, guest);
        self.schedule_after(Ns::ms(1), ScheduledEvent::ProcessAttach(host, boot, pid));
    }

    pub(super) fn attach_process(&mut self, host: HostId, boot: u64, pid: Pid) {
        if self.machine(host).boot != boot {
            return;
        }
        let Some(guest) = self.machine(host).processes.get_mut(&pid) else { return };
        guest.attach_attempts += 1;
        let (vm, process, is_unattached) = (guest.vm.clone(), guest.process.clone(), !guest.has_memory);
        if guest.attach_attempts > ATTACH_ATTEMPTS_MAX && is_unattached {
            return self.end_process(host, pid);
        }
        if is_unattached {
            self.schedule_after(ATTACH_RETRY_DELAY, ScheduledEvent::ProcessAttach(host, boot, pid));
        }
        let ticket = Ticket(self.steps);
        let (now, until) = (self.now, self.machine(host).frozen_until);
        let frozen = until > now;
        if let Some(running) = self.machine(host).running.as_mut().filter(|_| !frozen) {
            let instance = running.instance;
            running.tickets.insert(ticket, pid);
            self.handle_agent_event(
                host,
                instance,
                Event::Attach {
                    ticket,
                    vm,
                    caller: Caller {
                        process,
                        uid: UserId::ROOT,
                        control_socket: Some("/vm.sock".to_owned()),
                    },
                },
            );
        }
    }

    fn remove_ticket(&mut self, host: HostId, instance: u64, ticket: Ticket) -> Option<Pid> {
        self.machine(host).find_agent(instance)?.tickets.remove(&ticket)
    }

    /// Passes memory to a process, which checks that its slices are zeroed and writes to them.
    fn attach_memory(&mut self, host: HostId, instance: u64, ticket: Ticket, record: &VmRecord) {
        self.check_attach(host, record);
        let Some(pid) = self.remove_ticket(host, instance, ticket) else { return };
        let boot = self.machine(host).boot;
        let Some(guest) = self.machine(host).processes.get_mut(&pid) else { return };
        let is_first = !guest.has_memory;
        let pattern = guest.pattern;
        guest.has_memory = true;
        let is_rehomed = guest.rehome == GuestRehome::Done; // such a process does not map slices again
        let slices: Vec<Holding> = record.slices.keys().copied().filter(|_| !is_rehomed).collect();
        guest.mapped.extend(slices.iter().map(|holding| (*holding, record.reservation)));
        self.log(|| format!("{host} attaches the memory of {} to process {pid}", record.reservation));
        for holding in slices {
            self.check_first_access(host, pid, holding, pattern);
        }
        if is_first {
            self.run_log.counts.started += 1;
            let span = self.random_between(Ns::ms(10), Ns::ms(300));
            self.schedule_after(span, ScheduledEvent::ProcessAction(host, boot, pid));
        }
    }

    fn check_first_access(&mut self, host: HostId, pid: Pid, holding: Holding, pattern: DataPattern) {
        if !self.is_mapping_valid(holding, host) {
            return self.lose_memory(host, pid, holding, "invalidated before it was attached");
        }
        let content = self.device(holding.slice).read(holding.slice);
        if content != DataPattern::ZERO && content != pattern {
            let description = format!(
                "process {pid} on {host} reads data of another owner in {}",
                describe_holding(holding)
            );
            self.report_violation("a slice is zeroed before its next owner uses it", description);
        }
        self.device(holding.slice).write(holding.slice, pattern);
    }

    /// Runs one random action of a process: the process writes, attaches again or ends.
    pub(super) fn run_process(&mut self, host: HostId, boot: u64, pid: Pid) {
        if self.machine(host).boot != boot {
            return;
        }
        let Some(guest) = self.machine(host).processes.get(&pid).cloned() else { return };
        match self.rng.random_range(0..10) {
            0..3 => return self.end_process(host, pid),
            3 => self.attach_process(host, boot, pid),
            _ => {
                let reached =
                    guest.mapped.into_keys().filter(|holding| self.is_mapping_valid(*holding, host));
                for holding in reached.collect::<Vec<_>>() {
                    self.device(holding.slice).write(holding.slice, guest.pattern);
                }
            }
        }
        let span = self.random_between(Ns::ms(10), Ns::ms(500));
        self.schedule_after(span, ScheduledEvent::ProcessAction(host, boot, pid));
    }

    fn watch_process(&mut self, host: HostId, instance: u64, reservation: ReservationId, process: Process) {
        let alive = self.machine(host).is_alive(&process);
        if let Some(running) = self.machine(host).find_agent(instance) {
            running.watched.insert(reservation, process);
        }
        if !alive {
            self.schedule_after(Ns::ms(1), ScheduledEvent::ProcessExit(host, instance, reservation));
        }
    }

    pub(super) fn handle_process_exit(&mut self, host: HostId, instance: u64, id: ReservationId) {
        if self.postpone_if_frozen(host, || ScheduledEvent::ProcessExit(host, instance, id)) {
            return;
        }
        if let Some(running) = self.machine(host).find_agent(instance) {
            running.watched.remove(&id);
            self.handle_agent_event(host, instance, Event::ProcessGone { reservation: id });
        }
    }

    fn kill_watched_process(&mut self, host: HostId, instance: u64, id: ReservationId) {
        let Some(running) = self.machine(host).find_agent(instance) else { return };
        let Some(process) = running.watched.get(&id).cloned() else { return };
        if self.machine(host).is_alive(&process) {
            let mapped = self.machine(host).processes[&process.pid].mapped.keys().next().copied();
            match mapped {
                Some(holding) => self.lose_memory(host, process.pid, holding, "killed by the agent"),
                None => self.end_process(host, process.pid),
            }
        }
    }

    /// Ends a process. In 15 % of cases, a child process keeps the memory for some time.
    pub(super) fn end_process(&mut self, host: HostId, pid: Pid) {
        let Some(guest) = self.machine(host).processes.get(&pid).cloned() else { return };
        let has_child = !self.faults_stopped && !guest.mapped.is_empty() && self.random_bool(0.15);
        self.remove_process(host, pid);
        if has_child {
            let started = self.now.0 + 1;
            let machine = self.machine(host);
            machine.next_pid += 1;
            let (child, boot) = (machine.next_pid, machine.boot);
            let process = Process { pid: child, started, cgroup: String::new() };
            machine.processes.insert(child, Guest { process, ..guest });
            let span = self.random_between(Ns::ms(1), Ns::ms(900));
            self.schedule_after(span, ScheduledEvent::ProcessAction(host, boot, child));
        }
    }

    fn remove_process(&mut self, host: HostId, pid: Pid) {
        let Some(guest) = self.machine(host).processes.remove(&pid) else { return };
        self.log(|| format!("process {pid} of {} on {host} ends", guest.vm));
        let Some(running) = &self.machine(host).running else { return };
        let instance = running.instance;
        let watched = running.watched.iter().filter(|(_, process)| guest.process.is(process));
        for id in watched.map(|(id, _)| *id).collect::<Vec<_>>() {
            let span = self.random_duration_around(HOST_CALL_DURATION);
            self.schedule_after(span, ScheduledEvent::ProcessExit(host, instance, id));
        }
    }

    /// Ends all processes that use a mapping which a device has invalidated.
    pub(super) fn invalidate_mappings(&mut self, holding: Holding, why: &str) {
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
            self.check_memory_loss(host, &guest, holding, why);
            self.remove_process(host, pid);
        }
    }
}

/// Returns the place part of the handle of a slice on a shared device, which is the same for all
/// owners.
fn shared_slice_path(slice: SliceId) -> Arc<str> {
    slice.to_string().into()
}

pub(super) fn host_failure(reason: FailureReason, message: &str) -> HostFailure {
    HostFailure { reason, message: message.into() }
}
