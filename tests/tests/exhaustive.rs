//! Every state of a rack with two hosts and two slices within a few changes of owner: the real
//! state machine of slices with a device that cannot revoke access, hosts that lose power, agents
//! that restart, and a connection that loses, duplicates and reorders. The simulation tests large
//! racks at random; this tests a small one completely.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use pool::{
    protocol::{Holding, Scrubbed},
    slice::{Call, Drain, Event, Owner, Scrub, Slot, State},
};
use units::{Epoch, HostId, ReservationId, SliceId, UnixMs};

const HOSTS: usize = 2;

/// Where this little world ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bounds {
    /// No owner has a number above this.
    epoch: Epoch,
    /// Messages under way at the same time.
    wire: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rack<const SLICES: usize> {
    bounds: Bounds,
    /// Durable state.
    slots: [Slot; SLICES],
    device: [Cell; SLICES],
    hosts: [Machine<SLICES>; HOSTS],
    wire: Vec<Message>,
    /// Some VM has seen another's bytes.
    soiled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct Cell {
    highest: Epoch,
    grant: Option<(Epoch, HostId)>,
    /// Last writer; `None` if it is zero.
    written: Option<Epoch>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Machine<const SLICES: usize> {
    off: bool,
    slices: [Stand; SLICES],
}

/// Task of a host with one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct Stand {
    /// The newest order its agent has seen; older ones bounce.
    order: Option<Order>,
    /// A VM has it mapped under this epoch.
    vm: Option<Epoch>,
    /// A VM that had it has ended: no other process gets it.
    ended: Option<Epoch>,
    /// The agent has it mapped to zero it, or has done so.
    scrubbing: Option<Epoch>,
    scrubbed: Option<Epoch>,
}

/// Desired state of one slice, in the order of the ledger's revisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Order {
    epoch: Epoch,
    what: Told,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Told {
    Online,
    Scrub,
    Release,
    ReleaseByForce,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Message {
    ToHost(usize, usize, Order),
    FromHost(usize, usize, Event),
    FromDevice(usize, Event),
}

/// Something that may happen next.
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
    HostId(u32::try_from(h).expect("a handful of hosts"))
}

fn owner(h: usize) -> Owner {
    Owner { host: host(h), reservation: ReservationId(1) }
}

impl<const SLICES: usize> Rack<SLICES> {
    fn new(bounds: Bounds) -> Self {
        let machine = Machine { off: false, slices: [Stand::default(); SLICES] };
        Self {
            bounds,
            slots: [Slot::default(); SLICES],
            device: [Cell::default(); SLICES],
            hosts: [machine; HOSTS],
            wire: Vec::new(),
            soiled: false,
        }
    }

    /// Returns a canonical form of racks that differ only in the order of slices.
    fn fingerprint(&self) -> u64 {
        let hash = |rack: &Self| {
            let mut hasher = DefaultHasher::new();
            rack.hash(&mut hasher);
            hasher.finish()
        };
        if SLICES == 2 { hash(self).min(hash(&self.swapped())) } else { hash(self) }
    }

    fn swapped(&self) -> Self {
        let mut other = self.clone();
        other.slots.swap(0, 1);
        other.device.swap(0, 1);
        other.hosts.iter_mut().for_each(|host| host.slices.swap(0, 1));
        for message in &mut other.wire {
            let (Message::ToHost(_, s, _) | Message::FromHost(_, s, _) | Message::FromDevice(s, _)) = message;
            *s = 1 - *s;
        }
        other
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps: Vec<Step> = (0..self.wire.len()).map(Step::Lose).collect();
        steps.extend((0..self.wire.len()).map(Step::Arrive));
        steps.extend((0..self.wire.len()).map(Step::ArriveAgain));
        for h in 0..HOSTS {
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

    /// Returns the result of a step, if it is possible.
    fn after(&self, step: &Step) -> Option<Self> {
        let mut next = self.clone();
        let happened = match *step {
            Step::Assign(s, h) => next.hand_over(s, Event::Assign(owner(h))),
            Step::ScrubBy(s, h) => next.hand_over(s, Event::ScrubBy(host(h))),
            Step::Release(s, force) => next.take(s, Event::Release { force }),
            Step::CallDevice(s) => next.call_device(s),
            Step::SendOrder(s) => next.send_order(s),
            Step::Report(h, s) => next.report(h, s),
            Step::Lose(m) => {
                next.wire.remove(m);
                Some(())
            }
            Step::Arrive(m) => {
                let message = next.wire.remove(m);
                next.arrive(&message)
            }
            Step::ArriveAgain(m) => next.arrive(&self.wire[m]),
            Step::VmStarts(h, s) => next.vm_starts(h, s),
            Step::VmEnds(h, s) => next.vm_ends(h, s),
            Step::ScrubEnds(h, s) => next.scrub_ends(h, s),
            Step::AgentRestarts(h) => next.agent_restarts(h),
            Step::PowerOff(h) => next.power_off(h),
            Step::PowerOn(h) => next.hosts[h].off.then(|| next.hosts[h].off = false),
            Step::FencePoweredOff(h) => next.fence(h),
        };
        happened.filter(|()| next.wire.len() <= self.bounds.wire && next != *self).map(|()| next)
    }

    /// The real state machine decides; rejected events change nothing.
    fn take(&mut self, s: usize, event: Event) -> Option<()> {
        self.slots[s] = self.slots[s].step(event).ok()?;
        Some(())
    }

    fn hand_over(&mut self, s: usize, event: Event) -> Option<()> {
        self.take(s, event)?;
        (self.slots[s].epoch <= self.bounds.epoch).then_some(())
    }

    fn send(&mut self, message: Message) -> Option<()> {
        (!self.wire.contains(&message)).then(|| self.wire.push(message))
    }

    fn call_device(&mut self, s: usize) -> Option<()> {
        let cell = &mut self.device[s];
        let answer = match self.slots[s].device_call(false)? {
            Call::Grant { epoch, host } => {
                let fits = cell.grant.map_or(epoch > cell.highest, |grant| grant == (epoch, host));
                fits.then(|| (cell.highest, cell.grant) = (epoch, Some((epoch, host))))?;
                Event::Granted(epoch)
            }
            Call::Revoke { epoch } => {
                cell.highest = cell.highest.max(epoch);
                cell.grant = cell.grant.filter(|(held, _)| *held > epoch);
                Event::Revoked(epoch)
            }
        };
        self.send(Message::FromDevice(s, answer))
    }

    /// Returns the part of a host's desired state for one slice.
    fn send_order(&mut self, s: usize) -> Option<()> {
        let Slot { epoch, state, .. } = self.slots[s];
        let (to, what) = match state {
            State::Onlining(owner) | State::Online(owner) => (owner.host, Told::Online),
            State::Draining(owner, Drain::Host { force: false }) => (owner.host, Told::Release),
            State::Draining(owner, Drain::Host { force: true }) => (owner.host, Told::ReleaseByForce),
            State::Scrubbing(Scrub::Working(by)) => (by, Told::Scrub),
            _ => return None,
        };
        let to = to.0 as usize;
        let connected = !self.hosts[to].off;
        connected.then(|| self.send(Message::ToHost(to, s, Order { epoch, what })))?
    }

    /// Applies the part of a host's desired state for one slice.
    fn report(&mut self, h: usize, s: usize) -> Option<()> {
        let stand = self.hosts[h].slices[s];
        let Order { epoch, what } = stand.order.filter(|_| !self.hosts[h].off)?;
        let fact = match what {
            Told::Online if stand.ended != Some(epoch) => Event::Onlined(host(h), epoch),
            Told::Release | Told::ReleaseByForce if stand.vm != Some(epoch) => {
                Event::Released(host(h), epoch)
            }
            Told::Scrub if stand.scrubbed == Some(epoch) => Event::Scrubbed(host(h), scrubbed(epoch)),
            _ => return None,
        };
        self.send(Message::FromHost(h, s, fact))
    }

    fn arrive(&mut self, message: &Message) -> Option<()> {
        match *message {
            Message::FromHost(_, s, event) | Message::FromDevice(s, event) => {
                let _ = self.take(s, event); // late and repeated facts are refused, and that is right
            }
            Message::ToHost(h, s, order) => self.follow(h, s, order),
        }
        Some(())
    }

    fn follow(&mut self, h: usize, s: usize, order: Order) {
        let stand = &mut self.hosts[h].slices[s];
        if stand.order.is_some_and(|newest| order < newest) {
            return;
        }
        stand.order = Some(order);
        match order.what {
            Told::Scrub if stand.scrubbed != Some(order.epoch) => stand.scrubbing = Some(order.epoch),
            Told::ReleaseByForce if stand.vm == Some(order.epoch) => {
                (stand.vm, stand.ended) = (None, stand.vm);
            }
            _ => {}
        }
    }

    fn vm_starts(&mut self, h: usize, s: usize) -> Option<()> {
        let stand = &mut self.hosts[h].slices[s];
        let epoch = stand.order.filter(|order| order.what == Told::Online)?.epoch;
        (stand.vm.is_none() && stand.ended != Some(epoch)).then_some(())?;
        stand.vm = Some(epoch);
        self.soiled |= self.device[s].written.is_some_and(|writer| writer != epoch);
        self.device[s].written = Some(epoch);
        Some(())
    }

    fn vm_ends(&mut self, h: usize, s: usize) -> Option<()> {
        let stand = &mut self.hosts[h].slices[s];
        stand.ended = Some(stand.vm.take()?);
        Some(())
    }

    fn scrub_ends(&mut self, h: usize, s: usize) -> Option<()> {
        let stand = &mut self.hosts[h].slices[s];
        stand.scrubbed = Some(stand.scrubbing.take()?);
        self.device[s].written = None;
        Some(())
    }

    /// Closes the connection and drops desired states; VMs and records stay.
    fn agent_restarts(&mut self, h: usize) -> Option<()> {
        for stand in &mut self.hosts[h].slices {
            *stand = Stand { vm: stand.vm, ended: stand.ended, ..Stand::default() };
        }
        self.hang_up(h);
        Some(())
    }

    fn power_off(&mut self, h: usize) -> Option<()> {
        self.hosts[h] = Machine { off: true, slices: [Stand::default(); SLICES] };
        self.hang_up(h);
        Some(())
    }

    fn hang_up(&mut self, h: usize) {
        let of_host = |m: &Message| matches!(m, Message::ToHost(x, ..) | Message::FromHost(x, ..) if *x == h);
        self.wire.retain(|message| !of_host(message));
    }

    /// The operator vouches that the machine is off.
    fn fence(&mut self, h: usize) -> Option<()> {
        self.hosts[h].off.then_some(())?;
        for s in 0..SLICES {
            self.device[s].grant = self.device[s].grant.filter(|(_, by)| *by != host(h));
            let _ = self.take(s, Event::OwnerFenced(host(h))); // not its slice
        }
        Some(())
    }

    /// Which promise does not hold here.
    fn broken(&self) -> Option<&'static str> {
        let users = |s: usize| {
            let here = |stand: Stand| stand.vm.is_some() || stand.scrubbing.is_some();
            self.hosts.iter().filter(|host| here(host.slices[s])).count()
        };
        let proven = |slot: &Slot| {
            let receipt = slot.receipt.map(|receipt| receipt.scrubbed.holding.epoch);
            slot.state != State::Free || slot.epoch == Epoch(0) || receipt == Some(slot.epoch)
        };
        let scrubbed = |s: usize| self.slots[s].state != State::Free || self.device[s].written.is_none();
        match () {
            () if (0..SLICES).any(|s| users(s) > 1) => Some("one owner"),
            () if self.soiled || !(0..SLICES).all(scrubbed) => Some("clean hands"),
            () if !self.slots.iter().all(proven) => Some("no grant without a scrub"),
            () => None,
        }
    }

    /// Every slice is free, or one more change of hands away from it that this little world does not have.
    fn is_at_rest(&self) -> bool {
        let spent =
            |slot: &Slot| slot.epoch == self.bounds.epoch && slot.state == State::Scrubbing(Scrub::Waiting);
        self.slots.iter().all(|slot| slot.state == State::Free || spent(slot))
    }
}

/// The receipt does not name its slice, so that slices are interchangeable.
fn scrubbed(epoch: Epoch) -> Scrubbed {
    let holding = Holding { slice: SliceId(0), epoch };
    Scrubbed { holding, started: UnixMs(0), ended: UnixMs(0), verified: units::SLICE }
}

/// Every state by its number: how it was reached first, and from where it can be reached.
#[derive(Default)]
struct Explored {
    first: Vec<Option<(u32, Step)>>,
    before: Vec<Vec<u32>>,
    at_rest: Vec<u32>,
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer states than memory")
}

impl Explored {
    /// Visits all states, the nearest first; they are distinguished by a 64-bit hash.
    fn all<const SLICES: usize>(start: Rack<SLICES>) -> Self {
        let mut known = HashMap::from([(start.fingerprint(), 0)]);
        let mut all = Self { first: vec![None], before: vec![Vec::new()], at_rest: Vec::new() };
        let mut ahead = VecDeque::from([(0, start)]);
        while let Some((at, rack)) = ahead.pop_front() {
            assert_eq!(rack.broken(), None, "after {:?}", all.way_to(at));
            all.at_rest.extend(rack.is_at_rest().then_some(at));
            for step in rack.steps() {
                let Some(next) = rack.after(&step) else { continue };
                let new = number(all.first.len());
                let index = *known.entry(next.fingerprint()).or_insert(new);
                if index == new {
                    all.first.push(Some((at, step)));
                    all.before.push(Vec::new());
                    ahead.push_back((new, next));
                }
                all.before[index as usize].push(at);
            }
        }
        all
    }

    /// The shortest way from the beginning.
    fn way_to(&self, mut at: u32) -> Vec<&Step> {
        let mut way = VecDeque::new();
        while let Some((from, step)) = &self.first[at as usize] {
            way.push_front(step);
            at = *from;
        }
        way.into()
    }

    /// Returns a state from which no path leads to all slices being free.
    fn stuck(&self) -> Option<u32> {
        let mut can = vec![false; self.first.len()];
        let mut reached = self.at_rest.clone();
        reached.iter().for_each(|index| can[*index as usize] = true);
        while let Some(index) = reached.pop() {
            for before in &self.before[index as usize] {
                if !std::mem::replace(&mut can[*before as usize], true) {
                    reached.push(*before);
                }
            }
        }
        can.iter().position(|can| !can).map(number)
    }
}

#[track_caller]
fn check<const SLICES: usize>(bounds: Bounds, states_min: usize) {
    let all = Explored::all(Rack::<SLICES>::new(bounds));
    println!("{SLICES} slices, {bounds:?}: {} states", all.first.len());
    assert!(all.first.len() > states_min, "{} states are too few to prove anything", all.first.len());
    if let Some(stuck) = all.stuck() {
        panic!("nothing becomes free again after {:?}", all.way_to(stuck));
    }
}

#[test]
fn one_slice_through_four_owners_is_never_shared_never_dirty_and_can_always_become_free() {
    check::<1>(Bounds { epoch: Epoch(4), wire: 2 }, 10_000);
}

#[test]
fn two_slices_on_two_hosts_are_never_shared_never_dirty_and_can_always_become_free() {
    check::<2>(Bounds { epoch: Epoch(2), wire: 1 }, 100_000);
}
