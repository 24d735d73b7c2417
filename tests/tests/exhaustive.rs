//! Exhaustive test of a small rack: explores every state of two hosts and two slices within a
//! bounded number of owner changes. The state machine of slices is the real one. The device cannot
//! revoke access, hosts lose power, agents restart, and messages are lost, duplicated and
//! reordered. The simulation complements this test with random runs of large racks.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use pool::{
    protocol::{Holding, ScrubReport},
    slice::{Call, DrainStage, Event, Owner, Scrub, Slot, State},
};
use units::{Epoch, HostId, ReservationId, SliceId, UnixMs};

const RACK_HOST_COUNT: usize = 2;

/// Limits of the explored state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SearchBounds {
    /// Maximum epoch of a slice.
    epoch_max: Epoch,
    /// Maximum number of messages in flight.
    in_flight_max: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rack<const SLICES: usize> {
    bounds: SearchBounds,
    /// Durable state of the slices in the manager.
    slots: [Slot; SLICES],
    device: [DeviceSlice; SLICES],
    hosts: [Host<SLICES>; RACK_HOST_COUNT],
    in_flight: Vec<Message>,
    /// Whether a VM has read data of another VM, which violates an invariant.
    has_leaked_data: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct DeviceSlice {
    highest: Epoch,
    grant: Option<(Epoch, HostId)>,
    /// Epoch of the VM that wrote to the slice last, or `None` if the slice is zero.
    written: Option<Epoch>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Host<const SLICES: usize> {
    is_off: bool,
    slices: [HostSlice; SLICES],
}

/// State of a slice on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct HostSlice {
    /// Newest order that the agent has received. The agent rejects older orders.
    order: Option<SliceOrder>,
    /// Epoch under which a VM maps the slice, if any.
    vm: Option<Epoch>,
    /// Epoch of the last VM that has ended. No process gets the slice under this epoch again.
    ended: Option<Epoch>,
    /// Epoch under which the agent is scrubbing the slice, if any.
    scrubbing: Option<Epoch>,
    /// Epoch of the last complete scrub.
    scrubbed: Option<Epoch>,
}

/// Desired state of one slice on a host. Orders are sorted in the sequence in which the manager
/// sends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct SliceOrder {
    epoch: Epoch,
    kind: OrderKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum OrderKind {
    Online,
    Scrub,
    Release,
    ReleaseByForce,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Message {
    ToHost(usize, usize, SliceOrder),
    FromHost(usize, usize, Event),
    FromDevice(usize, Event),
}

/// Step that may change the state of the rack.
#[derive(Clone, Debug)]
enum Step {
    Assign(usize, usize),
    Release(usize, bool),
    ScrubBy(usize, usize),
    CallDevice(usize),
    SendOrder(usize),
    Report(usize, usize),
    Arrive(usize),
    ArriveAgain(usize),
    Lose(usize),
    VmStarts(usize, usize),
    VmEnds(usize, usize),
    ScrubEnds(usize, usize),
    AgentRestarts(usize),
    PowerOff(usize),
    PowerOn(usize),
    FencePoweredOff(usize),
}

fn host(h: usize) -> HostId {
    HostId(u32::try_from(h).expect("the number of hosts fits u32"))
}

fn owner(h: usize) -> Owner {
    Owner { host: host(h), reservation: ReservationId(1) }
}

impl<const SLICES: usize> Rack<SLICES> {
    fn new(bounds: SearchBounds) -> Self {
        let host_state = Host { is_off: false, slices: [HostSlice::default(); SLICES] };
        Self {
            bounds,
            slots: [Slot::default(); SLICES],
            device: [DeviceSlice::default(); SLICES],
            hosts: [host_state; RACK_HOST_COUNT],
            in_flight: Vec::new(),
            has_leaked_data: false,
        }
    }

    /// Returns a hash of the state. The hash is equal for states that differ only in the order of
    /// the slices.
    fn fingerprint(&self) -> u64 {
        let hash = |rack: &Self| {
            let mut hasher = DefaultHasher::new();
            rack.hash(&mut hasher);
            hasher.finish()
        };
        if SLICES == 2 { hash(self).min(hash(&self.with_slices_swapped())) } else { hash(self) }
    }

    fn with_slices_swapped(&self) -> Self {
        let mut other = self.clone();
        other.slots.swap(0, 1);
        other.device.swap(0, 1);
        other.hosts.iter_mut().for_each(|host| host.slices.swap(0, 1));
        for message in &mut other.in_flight {
            let (Message::ToHost(_, s, _) | Message::FromHost(_, s, _) | Message::FromDevice(s, _)) = message;
            *s = 1 - *s;
        }
        other
    }

    fn possible_steps(&self) -> Vec<Step> {
        let mut steps: Vec<Step> = (0..self.in_flight.len()).map(Step::Lose).collect();
        steps.extend((0..self.in_flight.len()).map(Step::Arrive));
        steps.extend((0..self.in_flight.len()).map(Step::ArriveAgain));
        for h in 0..RACK_HOST_COUNT {
            steps.extend([
                Step::AgentRestarts(h),
                Step::PowerOff(h),
                Step::PowerOn(h),
                Step::FencePoweredOff(h),
            ]);
            for s in 0..SLICES {
                steps.extend([Step::Assign(s, h), Step::ScrubBy(s, h), Step::Report(h, s)]);
                steps.extend([Step::VmStarts(h, s), Step::VmEnds(h, s), Step::ScrubEnds(h, s)]);
            }
        }
        for s in 0..SLICES {
            steps.extend([Step::Release(s, false), Step::Release(s, true)]);
            steps.extend([Step::CallDevice(s), Step::SendOrder(s)]);
        }
        steps
    }

    /// Returns the state after a step, or `None` if the step is impossible or changes nothing.
    fn apply_step(&self, step: &Step) -> Option<Self> {
        let mut next = self.clone();
        let result = match *step {
            Step::Assign(s, h) => next.assign(s, Event::Assign(owner(h))),
            Step::ScrubBy(s, h) => next.assign(s, Event::ScrubBy(host(h))),
            Step::Release(s, force) => next.apply(s, Event::Release { force }),
            Step::CallDevice(s) => next.call_device(s),
            Step::SendOrder(s) => next.send_order(s),
            Step::Report(h, s) => next.report(h, s),
            Step::Lose(m) => {
                next.in_flight.remove(m);
                Some(())
            }
            Step::Arrive(m) => {
                let message = next.in_flight.remove(m);
                next.deliver_message(&message)
            }
            Step::ArriveAgain(m) => next.deliver_message(&self.in_flight[m]),
            Step::VmStarts(h, s) => next.apply_vm_start(h, s),
            Step::VmEnds(h, s) => next.apply_vm_end(h, s),
            Step::ScrubEnds(h, s) => next.apply_scrub_end(h, s),
            Step::AgentRestarts(h) => next.apply_agent_restart(h),
            Step::PowerOff(h) => next.power_off(h),
            Step::PowerOn(h) => next.hosts[h].is_off.then(|| next.hosts[h].is_off = false),
            Step::FencePoweredOff(h) => next.fence_host(h),
        };
        result.filter(|()| next.in_flight.len() <= self.bounds.in_flight_max && next != *self).map(|()| next)
    }

    /// Applies an event with the real state machine. Returns `None` if the event is rejected.
    fn apply(&mut self, s: usize, event: Event) -> Option<()> {
        self.slots[s] = self.slots[s].step(event).ok()?;
        Some(())
    }

    fn assign(&mut self, s: usize, event: Event) -> Option<()> {
        self.apply(s, event)?;
        (self.slots[s].epoch <= self.bounds.epoch_max).then_some(())
    }

    fn send_message(&mut self, message: Message) -> Option<()> {
        (!self.in_flight.contains(&message)).then(|| self.in_flight.push(message))
    }

    fn call_device(&mut self, s: usize) -> Option<()> {
        let slice = &mut self.device[s];
        let event = match self.slots[s].device_call(false)? {
            Call::Grant { epoch, host } => {
                let fits = slice.grant.map_or(epoch > slice.highest, |grant| grant == (epoch, host));
                fits.then(|| (slice.highest, slice.grant) = (epoch, Some((epoch, host))))?;
                Event::Granted(epoch)
            }
            Call::Revoke { epoch } => {
                slice.highest = slice.highest.max(epoch);
                slice.grant = slice.grant.filter(|(held, _)| *held > epoch);
                Event::Revoked(epoch)
            }
        };
        self.send_message(Message::FromDevice(s, event))
    }

    /// Sends the desired state of one slice to its host.
    fn send_order(&mut self, s: usize) -> Option<()> {
        let Slot { epoch, state, .. } = self.slots[s];
        let (to, kind) = match state {
            State::Onlining(owner) | State::Online(owner) => (owner.host, OrderKind::Online),
            State::Draining(owner, DrainStage::Host { force: false }) => (owner.host, OrderKind::Release),
            State::Draining(owner, DrainStage::Host { force: true }) => {
                (owner.host, OrderKind::ReleaseByForce)
            }
            State::Scrubbing(Scrub::Working(by)) => (by, OrderKind::Scrub),
            _ => return None,
        };
        let to = to.0 as usize;
        let is_connected = !self.hosts[to].is_off;
        is_connected.then(|| self.send_message(Message::ToHost(to, s, SliceOrder { epoch, kind })))?
    }

    /// Sends the report of a host about one slice, if the host has applied its order.
    fn report(&mut self, h: usize, s: usize) -> Option<()> {
        let host_slice = self.hosts[h].slices[s];
        let SliceOrder { epoch, kind } = host_slice.order.filter(|_| !self.hosts[h].is_off)?;
        let event = match kind {
            OrderKind::Online if host_slice.ended != Some(epoch) => Event::Onlined(host(h), epoch),
            OrderKind::Release | OrderKind::ReleaseByForce if host_slice.vm != Some(epoch) => {
                Event::Released(host(h), epoch)
            }
            OrderKind::Scrub if host_slice.scrubbed == Some(epoch) => {
                Event::Scrubbed(host(h), scrub_report(epoch))
            }
            _ => return None,
        };
        self.send_message(Message::FromHost(h, s, event))
    }

    fn deliver_message(&mut self, message: &Message) -> Option<()> {
        match *message {
            Message::FromHost(_, s, event) | Message::FromDevice(s, event) => {
                let _ = self.apply(s, event); // late and repeated events are rejected
            }
            Message::ToHost(h, s, order) => self.receive_order(h, s, order),
        }
        Some(())
    }

    fn receive_order(&mut self, h: usize, s: usize, order: SliceOrder) {
        let host_slice = &mut self.hosts[h].slices[s];
        if host_slice.order.is_some_and(|newest| order < newest) {
            return;
        }
        host_slice.order = Some(order);
        match order.kind {
            OrderKind::Scrub if host_slice.scrubbed != Some(order.epoch) => {
                host_slice.scrubbing = Some(order.epoch)
            }
            OrderKind::ReleaseByForce if host_slice.vm == Some(order.epoch) => {
                (host_slice.vm, host_slice.ended) = (None, host_slice.vm);
            }
            _ => {}
        }
    }

    fn apply_vm_start(&mut self, h: usize, s: usize) -> Option<()> {
        let host_slice = &mut self.hosts[h].slices[s];
        let epoch = host_slice.order.filter(|order| order.kind == OrderKind::Online)?.epoch;
        (host_slice.vm.is_none() && host_slice.ended != Some(epoch)).then_some(())?;
        host_slice.vm = Some(epoch);
        self.has_leaked_data |= self.device[s].written.is_some_and(|writer| writer != epoch);
        self.device[s].written = Some(epoch);
        Some(())
    }

    fn apply_vm_end(&mut self, h: usize, s: usize) -> Option<()> {
        let host_slice = &mut self.hosts[h].slices[s];
        host_slice.ended = Some(host_slice.vm.take()?);
        Some(())
    }

    fn apply_scrub_end(&mut self, h: usize, s: usize) -> Option<()> {
        let host_slice = &mut self.hosts[h].slices[s];
        host_slice.scrubbed = Some(host_slice.scrubbing.take()?);
        self.device[s].written = None;
        Some(())
    }

    /// Restarts an agent. Its connection is closed and its orders are lost. VMs and records remain.
    fn apply_agent_restart(&mut self, h: usize) -> Option<()> {
        for host_slice in &mut self.hosts[h].slices {
            *host_slice = HostSlice { vm: host_slice.vm, ended: host_slice.ended, ..HostSlice::default() };
        }
        self.drop_messages(h);
        Some(())
    }

    fn power_off(&mut self, h: usize) -> Option<()> {
        self.hosts[h] = Host { is_off: true, slices: [HostSlice::default(); SLICES] };
        self.drop_messages(h);
        Some(())
    }

    fn drop_messages(&mut self, h: usize) {
        let of_host = |m: &Message| matches!(m, Message::ToHost(x, ..) | Message::FromHost(x, ..) if *x == h);
        self.in_flight.retain(|message| !of_host(message));
    }

    /// Fences a host after the operator has confirmed that the host is off.
    fn fence_host(&mut self, h: usize) -> Option<()> {
        self.hosts[h].is_off.then_some(())?;
        for s in 0..SLICES {
            self.device[s].grant = self.device[s].grant.filter(|(_, by)| *by != host(h));
            let _ = self.apply(s, Event::OwnerFenced(host(h))); // rejected for slices of other hosts
        }
        Some(())
    }

    /// Returns the name of an invariant that does not hold in this state, if any.
    fn violated_invariant(&self) -> Option<&'static str> {
        let users = |s: usize| {
            let here = |host_slice: HostSlice| host_slice.vm.is_some() || host_slice.scrubbing.is_some();
            self.hosts.iter().filter(|host| here(host.slices[s])).count()
        };
        let has_receipt = |slot: &Slot| {
            let receipt = slot.receipt.map(|receipt| receipt.scrubbed.holding.epoch);
            slot.state != State::Free || slot.epoch == Epoch(0) || receipt == Some(slot.epoch)
        };
        let scrubbed = |s: usize| self.slots[s].state != State::Free || self.device[s].written.is_none();
        match () {
            () if (0..SLICES).any(|s| users(s) > 1) => Some("a slice has at most one user"),
            () if self.has_leaked_data || !(0..SLICES).all(scrubbed) => {
                Some("a free slice is zero, and no VM reads data of another VM")
            }
            () if !self.slots.iter().all(has_receipt) => Some("a free slice has a receipt of its scrub"),
            () => None,
        }
    }

    /// Returns whether every slice is free or can become free only with an epoch above the limit.
    fn is_quiescent(&self) -> bool {
        let is_out_of_epochs = |slot: &Slot| {
            slot.epoch == self.bounds.epoch_max && slot.state == State::Scrubbing(Scrub::Waiting)
        };
        self.slots.iter().all(|slot| slot.state == State::Free || is_out_of_epochs(slot))
    }
}

/// Returns a scrub report. The slice in the report is always 0, so that both slices are
/// interchangeable.
fn scrub_report(epoch: Epoch) -> ScrubReport {
    let holding = Holding { slice: SliceId(0), epoch };
    ScrubReport { holding, started: UnixMs(0), ended: UnixMs(0), verified: units::SLICE }
}

/// Graph of all states. For each state, it contains the step that first led to this state, and all
/// predecessors.
#[derive(Default)]
struct StateGraph {
    parents: Vec<Option<(u32, Step)>>,
    predecessors: Vec<Vec<u32>>,
    quiescent: Vec<u32>,
}

fn to_u32(index: usize) -> u32 {
    u32::try_from(index).expect("the number of states fits u32")
}

impl StateGraph {
    /// Explores all states breadth-first and checks the invariants in each state. States are
    /// identified by a 64-bit hash.
    fn explore_states<const SLICES: usize>(start: Rack<SLICES>) -> Self {
        let mut indices = HashMap::from([(start.fingerprint(), 0)]);
        let mut all = Self { parents: vec![None], predecessors: vec![Vec::new()], quiescent: Vec::new() };
        let mut queue = VecDeque::from([(0, start)]);
        while let Some((at, rack)) = queue.pop_front() {
            assert_eq!(rack.violated_invariant(), None, "after {:?}", all.steps_to_state(at));
            all.quiescent.extend(rack.is_quiescent().then_some(at));
            for step in rack.possible_steps() {
                let Some(next) = rack.apply_step(&step) else { continue };
                let new = to_u32(all.parents.len());
                let index = *indices.entry(next.fingerprint()).or_insert(new);
                if index == new {
                    all.parents.push(Some((at, step)));
                    all.predecessors.push(Vec::new());
                    queue.push_back((new, next));
                }
                all.predecessors[index as usize].push(at);
            }
        }
        all
    }

    /// Returns the steps of the shortest path from the initial state.
    fn steps_to_state(&self, mut at: u32) -> Vec<&Step> {
        let mut path = VecDeque::new();
        while let Some((from, step)) = &self.parents[at as usize] {
            path.push_front(step);
            at = *from;
        }
        path.into()
    }

    /// Returns a state from which no path leads to a quiescent state, if any.
    fn find_stuck_state(&self) -> Option<u32> {
        let mut can_finish = vec![false; self.parents.len()];
        let mut reached = self.quiescent.clone();
        reached.iter().for_each(|index| can_finish[*index as usize] = true);
        while let Some(index) = reached.pop() {
            for predecessor in &self.predecessors[index as usize] {
                if !std::mem::replace(&mut can_finish[*predecessor as usize], true) {
                    reached.push(*predecessor);
                }
            }
        }
        can_finish.iter().position(|can_finish| !can_finish).map(to_u32)
    }
}

#[track_caller]
fn check_all_states<const SLICES: usize>(bounds: SearchBounds, states_min: usize) {
    let all = StateGraph::explore_states(Rack::<SLICES>::new(bounds));
    println!("{SLICES} slices, {bounds:?}: {} states", all.parents.len());
    assert!(all.parents.len() > states_min, "only {} states", all.parents.len());
    if let Some(stuck) = all.find_stuck_state() {
        panic!("slices cannot become free after {:?}", all.steps_to_state(stuck));
    }
}

#[test]
fn one_slice_with_four_owners_is_never_shared_dirty_or_stuck() {
    check_all_states::<1>(SearchBounds { epoch_max: Epoch(4), in_flight_max: 2 }, 10_000);
}

#[test]
fn two_slices_on_two_hosts_are_never_shared_dirty_or_stuck() {
    check_all_states::<2>(SearchBounds { epoch_max: Epoch(2), in_flight_max: 1 }, 100_000);
}
