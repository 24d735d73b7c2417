//! Deterministic simulation of a rack in one thread. The state machines of the manager and the
//! agents are the real ones. Connections, disks, devices, hosts and clients are simulated and
//! inject faults. After every step, [`World::step`] checks the invariants.
//!
//! Two runs with the same seed are identical.

mod check;
mod clients;
mod clock;
mod device;
mod fault_model;
mod faults;
mod former_leader;
mod history;
mod hosts;
mod machine;
mod manager_process;
mod migrations;
mod network;
mod quiescence;
mod rack;
mod rehome;
mod run_log;
mod scrubs;
mod store;

use std::{collections::BTreeMap, sync::Arc};

use pool::manager::SessionId;
use pool::protocol::{DesiredState, ObservedState};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use units::{EmcId, HostId, Ns, ReservationId};

use self::{
    check::{GroundTruth, has_ended},
    clients::ClientWorkload,
    clock::WallClock,
    device::Device,
    fault_model::FaultModel,
    faults::Fault,
    machine::{HostCall, Machine, Pid},
    manager_process::ManagerProcess,
    network::Network,
    rack::RackFile,
    run_log::RunLog,
};
pub use self::{
    run_log::{Failure, RunSummary},
    store::{BACKUPS_MAX, MemoryStore, Store},
};

/// Event that the simulation executes at a scheduled time.
#[derive(Debug)]
enum ScheduledEvent {
    ManagerStart,
    /// A timer of this run of the manager.
    ManagerWakeup(u64),
    ManagerBurstEnd(u64),
    /// The lease of the leader ends.
    LeaseEnd,
    /// This run of the manager notices that another one was elected.
    FormerLeaderEnds(u64),
    /// The store completes a batch of this run of the manager.
    StoreWritten(u64),
    StoreRead(u64),
    /// A device performs the first queued call of this run of the manager.
    DeviceCallDue(u64, EmcId),
    /// The fence command of the operator ends. This run of the manager started the command for this
    /// device and host.
    FenceCommandEnd(u64, EmcId, HostId),
    HostBoot(HostId),
    AgentStart(HostId, u64),
    AgentWakeup(HostId, u64),
    /// The host completes a call of this run of the agent.
    HostCallDone(HostId, u64, Box<HostCall>),
    ProcessExit(HostId, u64, ReservationId),
    /// A process, started in this boot of the host, tries to attach memory.
    ProcessAttach(HostId, u64, Pid),
    /// A process writes to its memory, attaches again or ends.
    ProcessAction(HostId, u64, Pid),
    /// A process has copied its pool memory to local memory.
    RehomeCopied(HostId, u64, Pid),
    AgentConnect(HostId, u64),
    SessionAccepted(SessionId),
    ReportArrival(SessionId, Box<ObservedState>),
    /// The manager applies one part of a report.
    ReportPartArrival(SessionId, Box<ObservedState>),
    DesiredStateArrival(SessionId, Box<DesiredState>),
    ReportRequestArrival(SessionId),
    ManagerDetectsClose(SessionId),
    AgentDetectsClose(SessionId),
    /// A duplicate agent disconnects, unless the manager has already rejected it.
    DuplicateAgentLeaves(SessionId),
    ClientAction,
    FaultStart,
    FaultEnd(Fault),
}

/// Simulated rack with its clients and faults.
#[derive(Debug)]
pub struct World {
    seed: u64,
    rng: Pcg64,
    now: Ns,
    wall_clock: WallClock,
    steps: u64,
    queue: BTreeMap<(Ns, u64), ScheduledEvent>,
    events_queued: u64,
    fault_model: FaultModel,
    manager_process: ManagerProcess,
    rack: RackFile,
    devices: Vec<Device>,
    machines: Vec<Machine>,
    network: Network,
    clients: ClientWorkload,
    truth: GroundTruth,
    run_log: RunLog,
    /// Whether fault injection has ended.
    faults_stopped: bool,
}

impl World {
    /// Creates the world for a seed, with a store in memory.
    pub fn new(seed: u64) -> Self {
        let mut rng = Pcg64::seed_from_u64(seed);
        let fault_model = FaultModel::random(&mut rng);
        let store = Box::new(MemoryStore::new(rng.random(), fault_model.store_failure_rate));
        Self::build(seed, rng, fault_model, store)
    }

    /// Creates the world for a seed, with the given store, which only one manager can open.
    pub fn with_store(seed: u64, store: Box<dyn Store>) -> Self {
        let mut rng = Pcg64::seed_from_u64(seed);
        let fault_model = FaultModel { has_standby: false, ..FaultModel::random(&mut rng) };
        Self::build(seed, rng, fault_model, store)
    }

    fn build(seed: u64, rng: Pcg64, fault_model: FaultModel, store: Box<dyn Store>) -> Self {
        let mut world = Self {
            seed,
            rng,
            now: Ns::ZERO,
            wall_clock: WallClock::default(),
            steps: 0,
            queue: BTreeMap::new(),
            events_queued: 0,
            devices: fault_model.create_devices(),
            machines: fault_model.create_machines(),
            manager_process: ManagerProcess::new(store),
            rack: RackFile::new(fault_model.rack.clone()),
            network: Network::default(),
            clients: ClientWorkload::default(),
            truth: GroundTruth::default(),
            run_log: RunLog::default(),
            faults_stopped: false,
            fault_model,
        };
        if world.fault_model.long_history {
            world.write_long_history();
        }
        world.schedule_after(Ns::ZERO, ScheduledEvent::ManagerStart);
        for host in world.hosts() {
            world.schedule_after(Ns::ms(1), ScheduledEvent::HostBoot(host));
        }
        world.schedule_after(Ns::ms(5), ScheduledEvent::ClientAction);
        world.schedule_after(Ns::ms(20), ScheduledEvent::FaultStart);
        world
    }

    /// Keeps the latest `events` log lines, which are printed with a failure.
    #[must_use]
    pub fn with_event_log(mut self, events: usize) -> Self {
        self.run_log.keep_events(events);
        self
    }

    /// Runs `steps` steps, then stops all faults and runs until the world is quiescent.
    ///
    /// # Errors
    /// Returns [`Failure`] if an invariant is violated or the world does not become quiescent.
    pub fn run(mut self, steps: u64) -> Result<RunSummary, Box<Failure>> {
        for _ in 0..steps {
            self.step()?;
        }
        self.run_until_quiescent()?;
        Ok(self.run_log.summary(self.steps))
    }

    /// Executes the next event and checks the invariants.
    ///
    /// # Errors
    /// Returns [`Failure`] if an invariant is violated.
    pub fn step(&mut self) -> Result<(), Box<Failure>> {
        if let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            self.steps += 1;
            self.dispatch_event(event);
            self.check_invariants();
        }
        self.run_log.failure(self.seed, self.steps).map_or(Ok(()), Err)
    }

    fn dispatch_event(&mut self, event: ScheduledEvent) {
        let Some(event) = self.postpone_if_former_is_paused(event) else { return };
        match event {
            ScheduledEvent::ManagerStart => self.start_manager(),
            ScheduledEvent::ManagerWakeup(run) => self.act_as(run, |world| world.wake_manager(run)),
            ScheduledEvent::ManagerBurstEnd(run) => self.act_as(run, |world| world.resume_after_burst(run)),
            ScheduledEvent::LeaseEnd => self.end_lease(),
            ScheduledEvent::FormerLeaderEnds(run) => self.end_former_leader(run),
            ScheduledEvent::StoreWritten(run) => self.act_as(run, |world| world.complete_store_write(run)),
            ScheduledEvent::StoreRead(run) => self.act_as(run, |world| world.complete_store_read(run)),
            ScheduledEvent::DeviceCallDue(run, emc) => {
                self.act_as(run, |world| world.make_next_device_call(run, emc));
            }
            ScheduledEvent::FenceCommandEnd(run, emc, host) => {
                self.act_as(run, |world| world.end_fence_command(run, emc, host));
            }
            ScheduledEvent::HostBoot(host) => self.boot_host(host),
            ScheduledEvent::AgentStart(host, boot) => self.start_agent(host, boot),
            ScheduledEvent::AgentWakeup(host, instance) => self.wake_agent(host, instance),
            ScheduledEvent::HostCallDone(host, instance, call) => {
                self.complete_host_call(host, instance, *call)
            }
            ScheduledEvent::ProcessExit(host, instance, id) => self.handle_process_exit(host, instance, id),
            ScheduledEvent::ProcessAttach(host, boot, pid) => self.attach_process(host, boot, pid),
            ScheduledEvent::ProcessAction(host, boot, pid) => self.run_process(host, boot, pid),
            ScheduledEvent::RehomeCopied(host, boot, pid) => self.complete_rehome(host, boot, pid),
            ScheduledEvent::AgentConnect(host, instance) => self.connect_agent(host, instance),
            ScheduledEvent::SessionAccepted(session) => self.accept_session(session),
            ScheduledEvent::ReportArrival(session, report) => self.manager_receives_report(session, *report),
            ScheduledEvent::ReportPartArrival(session, part) => self.manager_receives_part(session, *part),
            ScheduledEvent::DesiredStateArrival(session, desired) => {
                self.agent_receives_state(session, *desired)
            }
            ScheduledEvent::ReportRequestArrival(session) => self.agent_receives_report_request(session),
            ScheduledEvent::ManagerDetectsClose(session) => self.manager_detects_close(session),
            ScheduledEvent::AgentDetectsClose(session) => self.agent_detects_close(session),
            ScheduledEvent::DuplicateAgentLeaves(session) => self.end_duplicate_agent(session),
            ScheduledEvent::ClientAction => self.perform_client_action(),
            ScheduledEvent::FaultStart => self.start_fault(),
            ScheduledEvent::FaultEnd(fault) => self.end_fault(fault),
        }
    }

    fn schedule_at(&mut self, at: Ns, event: ScheduledEvent) {
        self.events_queued += 1; // events for the same time are executed in the order of their scheduling
        self.queue.insert((at.max(self.now), self.events_queued), event);
    }

    fn schedule_after(&mut self, span: Ns, event: ScheduledEvent) {
        self.schedule_at(self.now.after(span), event);
    }

    /// Draws a duration between half and one and a half of `span`. One in twenty durations is ten
    /// times longer.
    fn random_duration_around(&mut self, span: Ns) -> Ns {
        let usual = self.rng.random_range(span.0 / 2..=span.0 * 3 / 2);
        Ns(if self.rng.random_bool(0.05) { usual * 10 } else { usual })
    }

    fn random_between(&mut self, min: Ns, max: Ns) -> Ns {
        Ns(self.rng.random_range(min.0..=max.0))
    }

    fn random_bool(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }

    fn pick_random<T: Clone>(&mut self, items: &[T]) -> Option<T> {
        (!items.is_empty()).then(|| items[self.rng.random_range(0..items.len())].clone())
    }

    fn hosts(&self) -> Vec<HostId> {
        self.machines.iter().map(|machine| machine.id).collect()
    }

    fn machine(&mut self, host: HostId) -> &mut Machine {
        self.machines.iter_mut().find(|machine| machine.id == host).expect("every host has a machine")
    }

    fn find_machine(&self, host: HostId) -> Option<&Machine> {
        self.machines.iter().find(|machine| machine.id == host)
    }

    fn log(&mut self, line: impl FnOnce() -> String) {
        self.run_log.log(self.now, line);
    }

    /// Records a violation of an invariant. Only the first violation of a run is kept.
    fn report_violation(&mut self, invariant: &'static str, description: String) {
        self.run_log.record_violation(invariant, description);
    }
}

/// Batch of records that the manager writes to its store.
type Records = Arc<Vec<pool::record::Record>>;

#[cfg(test)]
mod tests {
    use super::*;

    const SEED_COUNT: u64 = 150;
    const STEPS_PER_SEED: u64 = 1500;
    /// Rare events, which may not occur within [`SEED_COUNT`] seeds.
    const RARE_EVENTS: [&str; 3] = ["long_histories", "migrations_retried", "rehomes_cancelled"];

    /// Verifies that each kind of event occurs, because an invariant is not tested without its
    /// events.
    #[test]
    fn every_event_kind_occurs_within_150_seeds() {
        let mut sum = RunSummary::default();
        for seed in 0..SEED_COUNT {
            sum += World::new(seed).run(STEPS_PER_SEED).expect("every invariant holds");
        }
        let mut missing =
            sum.counts().into_iter().filter(|(name, count)| *count == 0 && !RARE_EVENTS.contains(name));
        assert_eq!(missing.next(), None, "{sum:?}");
    }
}
