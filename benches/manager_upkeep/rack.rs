//! A rack around one manager: its store, devices and agents answer at once, and every event is timed.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use pool::{
    ledger::When,
    manager::{
        Contents, DeviceCall, DeviceDone, DeviceFailure, Effect, Event, Grant, Manager, SessionId, Settings,
        Token,
    },
    protocol::{Handle, Have, Hello, Holding, Scrubbed, Want},
    record::{Emc, Fence, Host, Meta, Record, RequestKey, Reservation, Scheduling, Stage},
    slice::{Owner, Slot, State},
};
use rustix::time::{ClockId, clock_gettime};
use units::{
    Bytes, DesiredVersion, EmcId, Epoch, HostId, InstanceId, Name, Ns, RequestId, ReservationId, SliceId,
    UnixMs, limits::EMCS_PER_HOST_MAX,
};

/// Answers of a device that arrive together.
const ANSWERS_AT_ONCE: usize = 64;

/// The size of a rack.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub hosts: u32,
    pub emcs: u32,
    pub slices: u32,
}

/// A rack of this shape that the manager loads when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    pub shape: Shape,
    /// Slices that are in use or otherwise not free, from the first on.
    pub used: u32,
    /// Slices of each reservation; 0 makes none.
    pub per_vm: u32,
    /// The state of a used slice.
    pub state: fn(Owner) -> State,
    pub fence: Fence,
    /// Whether EMCs cannot cut hosts off.
    pub is_shared: bool,
}

impl Start {
    /// A rack with so many slices online, in reservations of `per_vm`.
    pub fn held(shape: Shape, used: u32, per_vm: u32) -> Self {
        Self { shape, used, per_vm, state: State::Online, fence: Fence::None, is_shared: false }
    }
}

/// The order of an agent, and the slices that it has reported online.
struct Agent {
    order: Want,
    is_answered: bool,
    reported: BTreeSet<Holding>,
}

pub struct World {
    pub manager: Manager,
    now: Ns,
    shape: Shape,
    stored: VecDeque<u64>,
    calls: VecDeque<(EmcId, DeviceCall)>,
    agents: BTreeMap<SessionId, Agent>,
    /// Times of the events since they were last taken.
    times: Vec<Duration>,
    tokens: u64,
    pub replies: u64,
}

impl Shape {
    fn per_emc(self) -> u32 {
        self.slices / self.emcs
    }

    fn wires(self) -> u32 {
        self.emcs.min(u32::try_from(EMCS_PER_HOST_MAX).expect("a host has few wires"))
    }

    fn wired(self, host: u32) -> Vec<EmcId> {
        (0..self.wires()).map(|k| EmcId((host * self.wires() + k) % self.emcs)).collect()
    }

    /// The host of a slice: one that is wired to its EMC, so that all hosts have about as many.
    fn host_of(self, slice: u32) -> HostId {
        let groups = self.emcs / self.wires();
        let group = slice / self.per_emc() / self.wires();
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
    }
}

pub fn release(vm: Name) -> pool::manager::Ask {
    pool::manager::Ask::Release {
        target: pool::ledger::Target::Vm(vm),
        force: true,
        reason: "bench".to_owned(),
        actor: pool::audit::Actor::Manager,
    }
}

pub fn name(text: &str) -> Name {
    Name::new(text).expect("letters, digits and a dash")
}

pub fn request(id: &str) -> RequestKey {
    RequestKey { client: name("bench"), id: RequestId::new(id).expect("letters, digits and a dash") }
}

fn records(start: Start) -> Vec<Record> {
    let shape = start.shape;
    let emcs = (0..shape.emcs).map(|n| {
        let emc = Emc {
            name: name(&format!("emc{n}")),
            first: SliceId(n * shape.per_emc()),
            slices: shape.per_emc(),
            driver: "emulated".to_owned(),
            path: String::new(),
            scheduling: Scheduling::Enabled,
            serial: start.is_shared.then(|| n.to_string()),
        };
        Record::Emc(EmcId(n), emc)
    });
    let hosts = (0..shape.hosts).map(|n| {
        let host = Host {
            name: name(&format!("h{n}")),
            cores: 4096,
            local: Bytes::gib(4096),
            emcs: shape.wired(n),
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
        let first = slice - slice % start.per_vm.max(1);
        Owner { host: shape.host_of(first), reservation: ReservationId(u64::from(first) + 1) }
    };
    let slots = (0..start.used).map(|n| {
        let slot = Slot { epoch: Epoch(1), state: (start.state)(owner(n)), receipt: None };
        Record::Slice(SliceId(n), slot)
    });
    let firsts = (0..start.used).step_by(start.per_vm.max(1) as usize).filter(|_| start.per_vm > 0);
    let reservations = firsts.map(|first| {
        let last = start.used.min(first + start.per_vm);
        let reservation = Reservation {
            vm: name(&format!("held-{first}")),
            host: owner(first).host,
            slices: (first..last).map(SliceId).collect(),
            local: Bytes::ZERO,
            cores: 0,
            pinned: false,
            request: request(&format!("held-{first}")),
            commit_within: Ns::secs(300),
            created: UnixMs(0),
            stage: Stage::Committed,
            uid: None,
        };
        Record::Reservation(owner(first).reservation, reservation)
    });
    emcs.chain(hosts).chain(slots).chain(reservations).collect()
}

impl World {
    /// Loads the ledger and, unless the hosts are fenced, connects all agents. Device and store calls are left queued.
    pub fn new(start: Start) -> Self {
        let settings = Settings { lease_ttl: Ns::secs(3600), fence_after: Some(Ns::secs(3600)) };
        let mut world = Self {
            manager: Manager::new(settings),
            now: Ns::secs(1),
            shape: start.shape,
            stored: VecDeque::new(),
            calls: VecDeque::new(),
            agents: BTreeMap::new(),
            times: Vec::new(),
            tokens: 0,
            replies: 0,
        };
        let meta = Meta {
            next_reservation: ReservationId(u64::from(start.shape.slices) + 1),
            next_host: HostId(start.shape.hosts),
            next_emc: EmcId(start.shape.emcs),
            next_slice: SliceId(start.shape.slices),
            ..Meta::new("bench".to_owned())
        };
        world.event(Event::Loaded { meta, records: records(start), restored: false });
        if start.fence == Fence::None {
            world.connect();
        }
        world
    }

    /// Connects the agents of all hosts.
    pub fn connect(&mut self) {
        for host in 0..self.shape.hosts {
            self.event(Event::AgentUp(session(host), HostId(host), hello()));
        }
    }

    pub fn when(&self) -> When {
        When { now: self.now, wall: UnixMs(1) }
    }

    pub fn pass(&mut self, time: Ns) {
        self.now = self.now.after(time);
    }

    /// Times a look at the manager, as one under its lock.
    pub fn look<T>(&self, question: impl FnOnce(&Manager) -> T) -> Duration {
        let began = processor_time();
        std::hint::black_box(question(&self.manager));
        processor_time() - began
    }

    /// As [`World::look`], with the answer.
    pub fn look_at<T>(&self, question: impl FnOnce(&Manager) -> T) -> (T, Duration) {
        let began = processor_time();
        let answer = std::hint::black_box(question(&self.manager));
        (answer, processor_time() - began)
    }

    /// Times one event with its effects, and the computation of the next wakeup.
    pub fn event(&mut self, event: Event) -> Duration {
        self.events([event])
    }

    fn events(&mut self, events: impl IntoIterator<Item = Event>) -> Duration {
        let (when, events) = (self.when(), events.into_iter().collect::<Vec<_>>());
        let began = processor_time();
        for event in events {
            self.manager.handle(when, event);
        }
        self.manager.settle(when);
        std::hint::black_box(self.manager.next_wakeup());
        let took = processor_time() - began;
        self.times.push(took);
        while let Some(effect) = self.manager.poll_effect() {
            self.perform(effect);
        }
        took
    }

    pub fn ask(&mut self, ask: pool::manager::Ask) {
        self.tokens += 1;
        self.event(Event::Ask(Token(self.tokens), ask));
    }

    /// The times of all events since the last call.
    pub fn take_times(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.times)
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, .. } => self.stored.push_back(batch),
            Effect::Reply(_, answer) => {
                assert!(answer.is_ok(), "a refused request is no measurement: {answer:?}");
                self.replies += 1;
            }
            Effect::Device(emc, call) => self.calls.push_back((emc, call)),
            Effect::RequestReport(_) => {}
            Effect::Send(session, want) => match self.agents.get_mut(&session) {
                Some(agent) => {
                    agent.order.amend(want);
                    agent.is_answered = false;
                }
                None => {
                    assert!(want.base.is_none(), "the first order is complete");
                    let agent = Agent { order: want, is_answered: false, reported: BTreeSet::new() };
                    self.agents.insert(session, agent);
                }
            },
            Effect::Durable(_) => {}
            Effect::Close(..) => {} // the earlier connection of an agent that connects again
            Effect::Reload => unreachable!("nothing fails here"),
        }
    }

    /// Confirms the batch that is being written, if one is.
    pub fn store(&mut self) -> bool {
        let Some(batch) = self.stored.pop_front() else { return false };
        self.event(Event::Stored { batch, ok: true });
        true
    }

    /// Answers device calls, at most so many at once as in the service.
    pub fn answer_devices(&mut self) -> bool {
        let Some(emc) = self.calls.front().map(|(emc, _)| *emc) else { return false };
        let of_emc = self.calls.iter().take_while(|(other, _)| *other == emc).count();
        let calls: Vec<_> = self.calls.drain(..of_emc.min(ANSWERS_AT_ONCE)).collect();
        let answers: Vec<_> =
            calls.into_iter().map(|(emc, call)| Event::Device(emc, self.done(emc, call))).collect();
        self.events(answers);
        true
    }

    fn done(&self, emc: EmcId, call: DeviceCall) -> DeviceDone {
        match call {
            DeviceCall::Contents => DeviceDone::Contents(self.contents(emc)),
            DeviceCall::Grant { slice, epoch, .. } => {
                DeviceDone::Granted { slice, epoch, handle: handle(slice) }
            }
            DeviceCall::Revoke { slice, epoch } => DeviceDone::Revoked { slice, epoch },
            DeviceCall::Fence { .. } => {
                DeviceDone::Failed { call, failure: DeviceFailure::NotFenced("no command".to_owned()) }
            }
        }
    }

    /// Answers all calls that ask devices for their contents, and lets the manager compare them.
    pub fn compare_devices(&mut self) {
        while self.compare_device() {}
        while !self.manager.durable().emcs().all(|(_, emc)| emc.up) {
            self.event(Event::Tick);
        }
    }

    /// Answers the next call that asks a device for its contents.
    fn compare_device(&mut self) -> bool {
        let Some(at) = self.calls.iter().position(|(_, call)| *call == DeviceCall::Contents) else {
            return false;
        };
        let (emc, call) = self.calls.remove(at).expect("it was just there");
        let done = self.done(emc, call);
        self.event(Event::Device(emc, done));
        true
    }

    /// The device calls that wait.
    pub fn take_calls(&mut self) -> Vec<DeviceCall> {
        self.calls.drain(..).map(|(_, call)| call).collect()
    }

    /// The VMs of a host.
    pub fn vms_of(&self, host: HostId) -> Vec<Name> {
        let ledger = self.manager.durable();
        let ids = ledger.host(host).into_iter().flat_map(|entry| entry.reservations());
        ids.filter_map(|id| Some(ledger.reservation(id)?.vm.clone())).collect()
    }

    /// Connects the agent of a host again; it has no order then.
    pub fn reconnect(&mut self, host: u32) -> Duration {
        self.agents.remove(&session(host));
        self.event(Event::AgentUp(session(host), HostId(host), hello()))
    }

    /// Whether the agent of a host has been sent an order.
    pub fn has_order(&self, host: u32) -> bool {
        self.agents.contains_key(&session(host))
    }

    /// The contents of a device that agrees with the durable ledger.
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

    /// Lets one agent with an unanswered order carry it out and report. Returns whether there was one.
    pub fn obey(&mut self) -> bool {
        let unanswered = self.agents.iter_mut().find(|(_, agent)| !agent.is_answered);
        let Some((session, agent)) = unanswered else { return false };
        agent.is_answered = true;
        let want = &agent.order;
        let online = want.vms.values().flat_map(|vm| vm.slices.keys().copied());
        let online = online.filter(|holding| agent.reported.insert(*holding)).collect();
        let scrubbed =
            |holding| Scrubbed { holding, started: UnixMs(1), ended: UnixMs(2), verified: units::SLICE };
        let have = Have {
            number: want.number,
            online,
            released: want.release.keys().copied().collect(),
            scrubbed: want.scrub.keys().map(|holding| scrubbed(*holding)).collect(),
            ..Have::default()
        };
        let session = *session;
        self.event(Event::AgentHave(session, have));
        true
    }

    /// Heartbeat of an agent without news.
    pub fn heartbeat(&mut self, host: u32) -> Duration {
        let session = session(host);
        let number = self.agents.get(&session).map_or(DesiredVersion::default(), |agent| agent.order.number);
        self.event(Event::AgentHave(session, Have { number, ..Have::default() }))
    }

    /// Answers store, devices and agents, and ticks, until nothing is due soon.
    pub fn go(&mut self) {
        loop {
            while self.store() || self.answer_devices() || self.obey() {}
            let due = self.manager.next_wakeup().filter(|at| at.0 <= self.now.0 + Ns::ms(100).0);
            let Some(at) = due else { return };
            self.now = self.now.max(at);
            self.event(Event::Tick);
        }
    }
}

/// Processor time of this thread: other programs on the machine do not count.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn handle(slice: SliceId) -> Handle {
    Handle::new("emc", format!("/nowhere/{slice}"))
}
