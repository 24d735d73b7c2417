//! Simulated rack with a real manager. The store, the devices and the agents are simulated and
//! reply without delay. The rack records the duration of every event.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use pool::{
    ledger::When,
    manager::{
        Contents, DeviceCall, DeviceFailure, DeviceReply, Effect, Event, Grant, Manager, SessionId, Settings,
        Token,
    },
    protocol::{DesiredState, Handle, Hello, Holding, ObservedState, ScrubReport},
    record::{Emc, Fence, Host, Meta, Record, RequestKey, Reservation, Scheduling, Stage},
    slice::{Owner, Slot, State},
};
use rustix::time::{ClockId, clock_gettime};
use units::{
    Bytes, DesiredVersion, EmcId, Epoch, HostId, InstanceId, Name, Ns, RequestId, ReservationId, SliceId,
    UnixMs, limits::EMCS_PER_HOST_MAX,
};

/// Maximum number of device replies that the manager handles as one batch.
const REPLIES_PER_BATCH_MAX: usize = 64;

/// Numbers of hosts, EMCs and slices of a rack.
#[derive(Clone, Copy, Debug)]
pub struct RackSize {
    pub hosts: u32,
    pub emcs: u32,
    pub slices: u32,
}

/// Parameters of the manager's initial records.
#[derive(Clone, Copy, Debug)]
pub struct InitialState {
    pub size: RackSize,
    /// Number of slices in use. The slices with the lowest numbers are in use.
    pub used: u32,
    /// Number of slices of each reservation. 0 means no reservations.
    pub slices_per_vm: u32,
    /// Returns the state of a used slice with this owner.
    pub state: fn(Owner) -> State,
    pub fence: Fence,
    /// Whether EMCs are shared devices, which cannot revoke access.
    pub is_shared: bool,
}

impl InitialState {
    /// Returns parameters for `used` slices that are online, in reservations of `slices_per_vm`
    /// slices.
    pub fn with_used_slices(size: RackSize, used: u32, slices_per_vm: u32) -> Self {
        Self { size, used, slices_per_vm, state: State::Online, fence: Fence::None, is_shared: false }
    }
}

/// Simulated agent, with its desired state and the slices that the agent has reported as online.
struct Agent {
    desired_state: DesiredState,
    has_reported: bool,
    reported: BTreeSet<Holding>,
}

pub struct SimulatedRack {
    pub manager: Manager,
    now: Ns,
    size: RackSize,
    pending_batches: VecDeque<u64>,
    pending_calls: VecDeque<(EmcId, DeviceCall)>,
    agents: BTreeMap<SessionId, Agent>,
    /// Durations of the events since [`SimulatedRack::take_times`].
    times: Vec<Duration>,
    tokens: u64,
    pub replies: u64,
}

impl RackSize {
    fn slices_per_emc(self) -> u32 {
        self.slices / self.emcs
    }

    fn emcs_per_host(self) -> u32 {
        self.emcs.min(u32::try_from(EMCS_PER_HOST_MAX).expect("the limit fits u32"))
    }

    fn emcs_of(self, host: u32) -> Vec<EmcId> {
        (0..self.emcs_per_host()).map(|k| EmcId((host * self.emcs_per_host() + k) % self.emcs)).collect()
    }

    /// Returns the host that owns a slice. The slices of an EMC are spread evenly over the hosts
    /// that are connected to the EMC.
    fn host_of(self, slice: u32) -> HostId {
        let groups = self.emcs / self.emcs_per_host();
        let group = slice / self.slices_per_emc() / self.emcs_per_host();
        let turns = self.hosts / groups;
        HostId(group + groups * (slice % turns))
    }
}

pub fn session(host: u32) -> SessionId {
    SessionId(u64::from(host))
}

fn hello() -> Hello {
    Hello {
        instance: InstanceId(1),
        boot_id: "boot".to_owned(),
        host_memory_socket: String::new(),
        devices: Vec::new(),
        can_rehome: true,
    }
}

pub fn release_request(vm: Name) -> pool::manager::Request {
    pool::manager::Request::Release {
        target: pool::ledger::Target::Vm(vm),
        force: true,
        reason: "bench".to_owned(),
        actor: pool::audit::Actor::Manager,
    }
}

pub fn name(text: &str) -> Name {
    Name::new(text).expect("letters, digits and a dash")
}

pub fn request_key(id: &str) -> RequestKey {
    RequestKey { client: name("bench"), id: RequestId::new(id).expect("letters, digits and a dash") }
}

fn initial_records(start: InitialState) -> Vec<Record> {
    let size = start.size;
    let emcs = (0..size.emcs).map(|n| {
        let emc = Emc {
            name: name(&format!("emc{n}")),
            first: SliceId(n * size.slices_per_emc()),
            slices: size.slices_per_emc(),
            driver: "emulated".to_owned(),
            path: String::new(),
            scheduling: Scheduling::Enabled,
            serial: start.is_shared.then(|| n.to_string()),
        };
        Record::Emc(EmcId(n), emc)
    });
    let hosts = (0..size.hosts).map(|n| {
        let host = Host {
            name: name(&format!("h{n}")),
            cores: 4096,
            local: Bytes::gib(4096),
            emcs: size.emcs_of(n),
            scheduling: Scheduling::Enabled,
            fence: start.fence,
            boot_id: "boot".to_owned(),
            must_report: false,
            unconfirmed_fences: BTreeSet::new(),
            unwired_fences: BTreeSet::new(),
            fenced_at: UnixMs::default(),
        };
        Record::Host(HostId(n), host)
    });
    let owner = |slice: u32| {
        let first = slice - slice % start.slices_per_vm.max(1);
        Owner { host: size.host_of(first), reservation: ReservationId(u64::from(first) + 1) }
    };
    let slots = (0..start.used).map(|n| {
        let slot = Slot { epoch: Epoch(1), state: (start.state)(owner(n)), receipt: None };
        Record::Slice(SliceId(n), slot)
    });
    let firsts =
        (0..start.used).step_by(start.slices_per_vm.max(1) as usize).filter(|_| start.slices_per_vm > 0);
    let reservations = firsts.map(|first| {
        let last = start.used.min(first + start.slices_per_vm);
        let reservation = Reservation {
            vm: name(&format!("held-{first}")),
            host: owner(first).host,
            slices: (first..last).map(SliceId).collect(),
            local: Bytes::ZERO,
            cores: 0,
            pinned: false,
            request: request_key(&format!("held-{first}")),
            commit_within: Ns::secs(300),
            created: UnixMs(0),
            stage: Stage::Committed,
            uid: None,
            has_process: false,
            rehome: pool::record::Rehome::None,
        };
        Record::Reservation(owner(first).reservation, reservation)
    });
    emcs.chain(hosts).chain(slots).chain(reservations).collect()
}

impl SimulatedRack {
    /// Loads the initial records and, unless the hosts are fenced, connects all agents. Leaves the
    /// resulting device and store calls queued.
    pub fn new(start: InitialState) -> Self {
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: Some(Ns::secs(3600)) };
        let mut rack = Self {
            manager: Manager::new(settings),
            now: Ns::secs(1),
            size: start.size,
            pending_batches: VecDeque::new(),
            pending_calls: VecDeque::new(),
            agents: BTreeMap::new(),
            times: Vec::new(),
            tokens: 0,
            replies: 0,
        };
        let meta = Meta {
            next_reservation: ReservationId(u64::from(start.size.slices) + 1),
            next_host: HostId(start.size.hosts),
            next_emc: EmcId(start.size.emcs),
            next_slice: SliceId(start.size.slices),
            ..Meta::new("bench".to_owned())
        };
        rack.handle_event(Event::Loaded { meta, records: initial_records(start), restored: false });
        if start.fence == Fence::None {
            rack.connect();
        }
        rack
    }

    /// Connects one agent for each host.
    pub fn connect(&mut self) {
        for host in 0..self.size.hosts {
            self.handle_event(Event::AgentUp(session(host), HostId(host), hello()));
        }
    }

    pub fn when(&self) -> When {
        When { now: self.now, wall: UnixMs(1) }
    }

    pub fn advance(&mut self, time: Ns) {
        self.now = self.now.after(time);
    }

    /// Returns the CPU time of a read of the manager, which runs under a lock in production.
    pub fn time_read<T>(&self, read: impl FnOnce(&Manager) -> T) -> Duration {
        let start = cpu_time();
        std::hint::black_box(read(&self.manager));
        cpu_time() - start
    }

    /// Returns the result and the CPU time of a read of the manager.
    pub fn time_read_with_result<T>(&self, read: impl FnOnce(&Manager) -> T) -> (T, Duration) {
        let start = cpu_time();
        let result = std::hint::black_box(read(&self.manager));
        (result, cpu_time() - start)
    }

    /// Handles one event and performs its effects. Returns the CPU time of the manager, including
    /// the computation of its next wakeup.
    pub fn handle_event(&mut self, event: Event) -> Duration {
        self.handle_events([event])
    }

    fn handle_events(&mut self, events: impl IntoIterator<Item = Event>) -> Duration {
        let (when, events) = (self.when(), events.into_iter().collect::<Vec<_>>());
        let start = cpu_time();
        for event in events {
            self.manager.handle(when, event);
        }
        self.manager.settle(when);
        std::hint::black_box(self.manager.next_wakeup());
        let duration = cpu_time() - start;
        self.times.push(duration);
        while let Some(effect) = self.manager.poll_effect() {
            self.execute_effect(effect);
        }
        duration
    }

    pub fn submit_request(&mut self, request: pool::manager::Request) {
        self.tokens += 1;
        self.handle_event(Event::Request(Token(self.tokens), request));
    }

    /// Returns the durations of all events since the last call of this function.
    pub fn take_times(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.times)
    }

    fn execute_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, .. } => self.pending_batches.push_back(batch),
            Effect::Reply(_, reply) => {
                assert!(reply.is_ok(), "a request was rejected: {reply:?}");
                self.replies += 1;
            }
            Effect::Device(emc, call) => self.pending_calls.push_back((emc, call)),
            Effect::RequestReport(_) => {}
            Effect::Send(session, desired) => match self.agents.get_mut(&session) {
                Some(agent) => {
                    agent.desired_state.merge_newer(desired);
                    agent.has_reported = false;
                }
                None => {
                    assert!(desired.base.is_none(), "the first desired state must be complete");
                    let agent =
                        Agent { desired_state: desired, has_reported: false, reported: BTreeSet::new() };
                    self.agents.insert(session, agent);
                }
            },
            Effect::Durable(_) => {}
            Effect::Close(..) => {} // closes the previous connection of a reconnected agent
            Effect::Reload => unreachable!("store operations do not fail in this simulation"),
        }
    }

    /// Completes the oldest pending store batch. Returns whether a batch was pending.
    pub fn complete_store_batch(&mut self) -> bool {
        let Some(batch) = self.pending_batches.pop_front() else { return false };
        self.handle_event(Event::Stored { batch, ok: true });
        true
    }

    /// Completes one batch of device calls of one EMC, as pool-manager does. Returns whether a call
    /// was pending.
    pub fn complete_device_calls(&mut self) -> bool {
        let Some(emc) = self.pending_calls.front().map(|(emc, _)| *emc) else { return false };
        let count = self.pending_calls.iter().take_while(|(other, _)| *other == emc).count();
        let calls: Vec<_> = self.pending_calls.drain(..count.min(REPLIES_PER_BATCH_MAX)).collect();
        let events: Vec<_> =
            calls.into_iter().map(|(emc, call)| Event::Device(emc, self.device_reply(emc, call))).collect();
        self.handle_events(events);
        true
    }

    fn device_reply(&self, emc: EmcId, call: DeviceCall) -> DeviceReply {
        match call {
            DeviceCall::Contents => DeviceReply::Contents(self.contents(emc)),
            DeviceCall::Grant { slice, epoch, .. } => {
                DeviceReply::Granted { slice, epoch, handle: handle(slice) }
            }
            DeviceCall::Revoke { slice, epoch } => DeviceReply::Revoked { slice, epoch },
            DeviceCall::Fence { .. } => {
                DeviceReply::Failed { call, failure: DeviceFailure::NotFenced("no command".to_owned()) }
            }
        }
    }

    /// Completes all `Contents` calls, and sends ticks until the manager has compared the contents
    /// of all EMCs with the ledger.
    pub fn compare_devices(&mut self) {
        while self.compare_device() {}
        while !self.manager.durable().emcs().all(|(_, emc)| emc.up) {
            self.handle_event(Event::Tick);
        }
    }

    /// Completes the next `Contents` call. Returns whether such a call was pending.
    fn compare_device(&mut self) -> bool {
        let Some(at) = self.pending_calls.iter().position(|(_, call)| *call == DeviceCall::Contents) else {
            return false;
        };
        let (emc, call) = self.pending_calls.remove(at).expect("the index is valid");
        let done = self.device_reply(emc, call);
        self.handle_event(Event::Device(emc, done));
        true
    }

    /// Removes all queued device calls and returns them.
    pub fn take_device_calls(&mut self) -> Vec<DeviceCall> {
        self.pending_calls.drain(..).map(|(_, call)| call).collect()
    }

    /// Returns the names of the VMs with a reservation on a host.
    pub fn vms_of(&self, host: HostId) -> Vec<Name> {
        let ledger = self.manager.durable();
        let ids = ledger.host(host).into_iter().flat_map(|entry| entry.reservations());
        ids.filter_map(|id| Some(ledger.reservation(id)?.vm.clone())).collect()
    }

    /// Reconnects the agent of a host. The agent loses its desired state.
    pub fn reconnect(&mut self, host: u32) -> Duration {
        self.agents.remove(&session(host));
        self.handle_event(Event::AgentUp(session(host), HostId(host), hello()))
    }

    /// Returns whether the agent of a host has received a desired state.
    pub fn has_desired_state(&self, host: u32) -> bool {
        self.agents.contains_key(&session(host))
    }

    /// Returns device contents that match the durable ledger.
    fn contents(&self, of: EmcId) -> Contents {
        let ledger = self.manager.durable();
        let slices = || ledger.emc(of).map(|entry| entry.emc.range()).into_iter().flatten();
        let slots = || slices().filter_map(|slice| Some((slice, ledger.slot(slice)?)));
        let grants = slots().filter_map(|(slice, slot)| {
            let host = slot.holder()?;
            Some(Grant { slice, epoch: slot.epoch, host, handle: handle(slice) })
        });
        let highest = slots().map(|(slice, slot)| (slice, slot.epoch));
        Contents { grants: grants.collect(), highest: highest.collect(), places: Vec::new() }
    }

    /// Reports the desired state of one agent as applied. Returns whether an agent had a report
    /// pending.
    pub fn run_agent(&mut self) -> bool {
        let pending = self.agents.iter_mut().find(|(_, agent)| !agent.has_reported);
        let Some((session, agent)) = pending else { return false };
        agent.has_reported = true;
        let desired = &agent.desired_state;
        let online = desired.vms.values().flat_map(|vm| vm.slices.keys().copied());
        let online = online.filter(|holding| agent.reported.insert(*holding)).collect();
        let scrubbed =
            |holding| ScrubReport { holding, started: UnixMs(1), ended: UnixMs(2), verified: units::SLICE };
        let observed = ObservedState {
            number: desired.number,
            online,
            released: desired.release.keys().copied().collect(),
            scrubbed: desired.scrub.keys().map(|holding| scrubbed(*holding)).collect(),
            ..ObservedState::default()
        };
        let session = *session;
        self.handle_event(Event::AgentReport(session, observed));
        true
    }

    /// Sends a report without changes from the agent of a host. Returns the CPU time of the
    /// manager.
    pub fn send_heartbeat(&mut self, host: u32) -> Duration {
        let session = session(host);
        let number =
            self.agents.get(&session).map_or(DesiredVersion::default(), |agent| agent.desired_state.number);
        self.handle_event(Event::AgentReport(session, ObservedState { number, ..ObservedState::default() }))
    }

    /// Completes store and device calls, agent reports and ticks until the manager has no wakeup
    /// within 100 ms.
    pub fn settle(&mut self) {
        loop {
            while self.complete_store_batch() || self.complete_device_calls() || self.run_agent() {}
            let due = self.manager.next_wakeup().filter(|at| at.0 <= self.now.0 + Ns::ms(100).0);
            let Some(at) = due else { return };
            self.now = self.now.max(at);
            self.handle_event(Event::Tick);
        }
    }
}

/// Returns the CPU time of this thread. Unlike wall-clock time, it excludes other programs.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn handle(slice: SliceId) -> Handle {
    Handle::new("emc", format!("/nowhere/{slice}"))
}
