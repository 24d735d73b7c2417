//! Connections between agents and the manager. Messages may be delayed, lost, duplicated or reordered.
//! Messages on a closed connection are dropped. The ends learn of a close at different times.

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    agent::Event as Told,
    manager::{Closed, Event, SessionId},
    protocol::{Have, Hello, Holding, SeenDevice, Want},
};
use rand::Rng as _;
use units::limits::{RECONNECT_BACKOFF_MAX, RECONNECT_BACKOFF_MIN};
use units::{HostId, InstanceId, Ns};

use super::{Happening, World, check::Orders};

/// Delay of a message.
const WIRE_TAKES: Ns = Ns(150_000);
/// Time that the manager takes for one part of a report.
const PART_TAKES: Ns = Ns(20_000);
/// Facts per part of a report: few, so that most reports have several parts.
const REPORT_PART_MAX: usize = 8;
/// Longest delay of a message.
const LATE_MAX: Ns = Ns::ms(600);

#[derive(Debug, Default)]
pub(super) struct Wire {
    sessions: BTreeMap<SessionId, Session>,
    made: u64,
    /// Connections of agents to be rejected, with the host that they claim.
    intruders: BTreeMap<SessionId, HostId>,
}

#[derive(Debug)]
struct Session {
    host: HostId,
    instance: u64,
    /// Ends for which the connection is open.
    manager: bool,
    agent: bool,
    /// Arrival time of the latest message in each direction, where order is kept.
    up: Ns,
    down: Ns,
    /// Boot id that the agent sent.
    boot: u64,
    /// Sum of the desired states sent so far, and the scrubs in them.
    told: Option<Want>,
    scrubs: BTreeSet<Holding>,
}

impl Wire {
    /// Accounts for time in which nothing ran.
    pub(super) fn shift(&mut self, span: Ns) {
        for session in self.sessions.values_mut() {
            (session.up, session.down) = (session.up.after(span), session.down.after(span));
        }
    }
}

impl Session {
    /// Adds a desired state to those sent before.
    fn add(&mut self, want: &Want) -> Orders {
        match &mut self.told {
            Some(told) => add_order(told, want),
            None => self.told = Some(want.clone()),
        }
        let first = want.scrub.keys().filter(|scrub| self.scrubs.insert(**scrub));
        Orders {
            host: self.host,
            instance: InstanceId(self.instance),
            boot_id: boot_id(self.boot),
            first_scrubs: first.copied().collect(),
            sum: self.told.clone().expect("it was just set"),
        }
    }
}

/// Computes the sum of a desired state and its successor, independently of the agents' code.
fn add_order(sum: &mut Want, next: &Want) {
    if next.base.is_none() {
        *sum = next.clone();
        return;
    }
    let in_vms = next.vms.values().flat_map(|vm| vm.slices.keys()).map(|holding| holding.slice);
    let in_lists = next.release.keys().chain(next.scrub.keys()).map(|holding| holding.slice);
    let renewed: BTreeSet<_> = in_vms.chain(in_lists).chain(next.no_more.slices.iter().copied()).collect();
    sum.release.retain(|holding, _| !renewed.contains(&holding.slice));
    sum.scrub.retain(|holding, _| !renewed.contains(&holding.slice));
    next.no_more.vms.iter().for_each(|vm| drop(sum.vms.remove(vm)));
    sum.vms.extend(next.vms.clone());
    sum.release.extend(next.release.clone());
    sum.scrub.extend(next.scrub.clone());
    (sum.number, sum.instance, sum.fenced) = (next.number, next.instance, next.fenced);
}

impl World {
    pub(super) fn connect(&mut self, host: HostId, instance: u64) {
        if self.postpone(host, || Happening::Connects(host, instance)) {
            return;
        }
        let Some(hello) = self.hello(host, instance) else { return };
        if !self.program.is_open() || self.machine(host).is_cut_off {
            let pause = self.between(RECONNECT_BACKOFF_MIN, RECONNECT_BACKOFF_MAX);
            return self.after(pause, Happening::Connects(host, instance));
        }
        self.wire.made += 1;
        let id = SessionId(self.wire.made);
        let at = self.now.after(WIRE_TAKES);
        let boot = self.machine(host).boot;
        let (told, scrubs) = (None, BTreeSet::new());
        let session =
            Session { host, instance, manager: true, agent: true, up: at, down: at, boot, told, scrubs };
        self.wire.sessions.insert(id, session);
        self.machine(host).session(Some(id));
        self.say(|| format!("{host} connects as instance {instance} in session {}", id.0));
        self.at(at, Happening::Welcome(id));
        self.manager(Event::AgentUp(id, host, hello));
    }

    fn hello(&mut self, host: HostId, instance: u64) -> Option<Hello> {
        let devices = self.seen_devices();
        let machine = self.machine(host);
        machine.running(instance).filter(|running| running.session.is_none())?;
        Some(Hello {
            instance: InstanceId(instance),
            boot_id: boot_id(machine.boot),
            host_memory_socket: "/run/host-memory".into(),
            devices,
        })
    }

    /// Returns the shared devices, which every machine sees.
    fn seen_devices(&self) -> Vec<SeenDevice> {
        self.rack.seen.clone()
    }

    pub(super) fn welcome(&mut self, id: SessionId) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.agent) else { return };
        let (host, instance) = (session.host, session.instance);
        if self.postpone(host, || Happening::Welcome(id)) {
            return;
        }
        let lease_ttl = self.weather.settings.lease_ttl;
        self.agent(host, instance, Told::SessionUp { rack: "rack".into(), lease_ttl });
    }

    pub(super) fn send_want(&mut self, id: SessionId, want: Want) {
        let Some(session) = self.wire.sessions.get_mut(&id) else { return };
        let host = session.host;
        let orders = session.add(&want);
        self.check_order(&want, &orders);
        self.say(|| format!("manager -> {host}: {}", brief(&want)));
        for at in self.arrivals(id, false) {
            self.at(at, Happening::ToAgent(id, Box::new(want.clone())));
        }
    }

    pub(super) fn request_report(&mut self, id: SessionId) {
        let Some(session) = self.wire.sessions.get(&id) else { return };
        let host = session.host;
        self.say(|| format!("manager -> {host}: report all"));
        for at in self.arrivals(id, false) {
            self.at(at, Happening::AsksReport(id));
        }
    }

    pub(super) fn agent_is_asked(&mut self, id: SessionId) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.agent) else { return };
        let (host, instance) = (session.host, session.instance);
        if self.held_back(host, |()| Happening::AsksReport(id), ())
            || self.postpone(host, || Happening::AsksReport(id))
        {
            return;
        }
        self.agent(host, instance, Told::ReportRequested);
    }

    pub(super) fn send_have(&mut self, host: HostId, id: SessionId, have: Have) {
        self.note_have(host, &have);
        self.say(|| format!("{host} -> manager: {}", brief_have(&have)));
        for at in self.arrivals(id, true) {
            self.at(at, Happening::ToManager(id, Box::new(have.clone())));
        }
    }

    /// Returns the arrival times of a message: none, one or two.
    fn arrivals(&mut self, id: SessionId, up: bool) -> Vec<Ns> {
        let (lost, repeated) = (self.weather.lost, self.weather.repeated);
        let calm = self.calm;
        if !calm && self.chance(lost) {
            return Vec::new();
        }
        let copies = 1 + usize::from(!calm && self.chance(repeated));
        (0..copies).map(|_| self.arrival(id, up)).collect()
    }

    fn arrival(&mut self, id: SessionId, up: bool) -> Ns {
        let span = self.about(WIRE_TAKES);
        let ordered = self.weather.in_order || self.calm;
        let far = if ordered || !self.chance(0.15) { Ns::ZERO } else { LATE_MAX };
        let late = self.between(Ns::ZERO, far);
        let at = self.now.after(WIRE_TAKES).after(span).after(late);
        let session = self.wire.sessions.get_mut(&id).expect("messages are sent on a session");
        let latest = if up { &mut session.up } else { &mut session.down };
        if !ordered {
            return at;
        }
        *latest = at.max(*latest);
        *latest
    }

    pub(super) fn manager_hears(&mut self, id: SessionId, have: Have) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.manager) else { return };
        let host = session.host;
        if self.held_back(host, |have| Happening::ToManager(id, Box::new(have)), have.clone()) {
            return;
        }
        self.heard(host);
        let most = self.rng.random_range(1..=REPORT_PART_MAX);
        let mut at = self.now;
        for part in have.into_parts(most) {
            self.at(at, Happening::ToManagerPart(id, Box::new(part)));
            at = at.after(PART_TAKES);
        }
    }

    pub(super) fn manager_hears_part(&mut self, id: SessionId, part: Have) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.manager) else { return };
        self.note_report(session.host, &part);
        self.manager(Event::AgentHave(id, part));
    }

    pub(super) fn agent_hears(&mut self, id: SessionId, want: Want) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.agent) else { return };
        let (host, instance) = (session.host, session.instance);
        if self.held_back(host, |want| Happening::ToAgent(id, Box::new(want)), want.clone()) {
            return;
        }
        if self.postpone(host, || Happening::ToAgent(id, Box::new(want.clone()))) {
            return;
        }
        self.agent(host, instance, Told::Want { rack: "rack".into(), want });
    }

    /// Returns whether the network is down: a stream retransmits later, other links lose the message.
    fn held_back<M>(&mut self, host: HostId, again: impl FnOnce(M) -> Happening, message: M) -> bool {
        if !self.machine(host).is_cut_off {
            return false;
        }
        if self.weather.in_order {
            self.after(Ns::ms(20), again(message));
        }
        true
    }

    /// Connects a second agent while the agent of a host is connected with a valid lease: an older
    /// instance of the same boot, or one of another machine. It must be rejected.
    pub(super) fn contest_host(&mut self, host: HostId) {
        let led = self.wire.sessions.values().find(|session| session.host == host && session.manager);
        let Some((instance, boot)) = led.map(|session| (session.instance, session.boot)) else { return };
        if !self.program.is_settled() || !self.is_lease_fresh(host) {
            return;
        }
        let older = self.chance(0.5);
        let (instance, boot) = if older { (instance - 1, boot) } else { (instance, boot + 1000) };
        self.wire.made += 1;
        let id = SessionId(self.wire.made);
        self.say(|| format!("another agent connects as {host}, instance {instance}, session {}", id.0));
        self.wire.intruders.insert(id, host);
        let hello = Hello {
            instance: InstanceId(instance),
            boot_id: boot_id(boot),
            host_memory_socket: "/run/host-memory".into(),
            devices: self.seen_devices(),
        };
        self.after(Ns::ms(1), Happening::IntruderLeaves(id));
        self.manager(Event::AgentUp(id, host, hello));
    }

    pub(super) fn intruder_leaves(&mut self, id: SessionId) {
        if let Some(host) = self.wire.intruders.remove(&id) {
            self.blame(
                "a host has one agent",
                format!("{host}: another agent is accepted in session {}", id.0),
            );
        }
    }

    /// Closes a connection at the manager.
    pub(super) fn manager_closes(&mut self, id: SessionId, why: &Closed) {
        if self.wire.intruders.remove(&id).is_some() {
            self.story.counts.contested += u64::from(*why == Closed::Superseded);
            return;
        }
        let Some(session) = self.wire.sessions.get_mut(&id) else { return };
        session.manager = false;
        let host = session.host;
        self.say(|| format!("manager closes session {} of {host}: {why:?}", id.0));
        if let Closed::FalseClaim(slice, epoch) = why {
            self.blame("nobody honest is accused", format!("{host} of claiming {slice} under epoch {epoch}"));
        }
        self.after(Ns::ms(1), Happening::AgentHearsEnd(id));
    }

    /// Breaks a connection; each end notices it at its own time.
    pub(super) fn break_session(&mut self, host: HostId) {
        let id = self.machine(host).current_session();
        let Some(id) = id else { return };
        self.say(|| format!("session {} of {host} breaks", id.0));
        let (one, other) = (self.between(Ns::ZERO, Ns::ms(50)), self.between(Ns::ZERO, Ns::ms(50)));
        self.after(one, Happening::ManagerHearsEnd(id));
        self.after(other, Happening::AgentHearsEnd(id));
    }

    /// Closes the agent's end with its process; its kernel notifies the manager.
    pub(super) fn agent_gone(&mut self, id: SessionId, told: bool) {
        if let Some(session) = self.wire.sessions.get_mut(&id) {
            session.agent = false;
            if told {
                self.after(Ns::ms(1), Happening::ManagerHearsEnd(id));
            }
        }
    }

    /// Closes the manager's ends with its process.
    pub(super) fn break_connections(&mut self) {
        self.wire.intruders.clear();
        let open: Vec<SessionId> = self.wire.sessions.keys().copied().collect();
        for id in open {
            self.wire.sessions.entry(id).and_modify(|session| session.manager = false);
            let late = self.between(Ns(100_000), Ns::ms(5));
            self.after(late, Happening::AgentHearsEnd(id));
        }
    }

    pub(super) fn manager_hears_end(&mut self, id: SessionId) {
        let Some(session) = self.wire.sessions.get_mut(&id).filter(|session| session.manager) else { return };
        session.manager = false;
        self.sweep(id);
        self.manager(Event::AgentDown(id));
    }

    pub(super) fn agent_hears_end(&mut self, id: SessionId) {
        let Some(session) = self.wire.sessions.get(&id).filter(|session| session.agent) else {
            return self.sweep(id);
        };
        let (host, instance) = (session.host, session.instance);
        if self.postpone(host, || Happening::AgentHearsEnd(id)) {
            return;
        }
        if self.machine(host).is_cut_off {
            return self.after(Ns::ms(20), Happening::AgentHearsEnd(id));
        }
        self.wire.sessions.entry(id).and_modify(|session| session.agent = false);
        self.sweep(id);
        if self.machine(host).current_session() == Some(id) {
            self.machine(host).session(None);
            self.agent(host, instance, Told::SessionDown);
            let pause = self.between(RECONNECT_BACKOFF_MIN, RECONNECT_BACKOFF_MAX);
            self.after(pause, Happening::Connects(host, instance));
        }
    }

    /// Returns whether the manager has a connection of this host.
    pub(super) fn speaks(&self, host: HostId) -> bool {
        self.wire.sessions.values().any(|session| session.host == host && session.manager)
    }

    fn sweep(&mut self, id: SessionId) {
        if self.wire.sessions.get(&id).is_some_and(|session| !session.manager && !session.agent) {
            self.wire.sessions.remove(&id);
        }
    }
}

fn boot_id(boot: u64) -> String {
    format!("boot-{boot}")
}

fn brief(want: &Want) -> String {
    let vms = want.vms.iter().map(|(id, vm)| (id.0, held(vm.slices.keys())));
    let fenced = if want.fenced { " FENCED" } else { "" };
    let base =
        want.base.map(|base| format!(" changes {base}, no more {:?},", want.no_more)).unwrap_or_default();
    format!(
        "want {}{base}{fenced} vms {:?} release {:?} scrub {}",
        want.number,
        vms.collect::<Vec<_>>(),
        want.release.iter().map(|(h, r)| (h.slice.0, h.epoch.0, r.force)).collect::<Vec<_>>(),
        held(want.scrub.keys())
    )
}

fn brief_have(have: &Have) -> String {
    let scrubbed: Vec<_> = have.scrubbed.iter().map(|scrubbed| scrubbed.holding).collect();
    let failed: Vec<_> = have.failed.iter().map(|failed| failed.holding).collect();
    format!(
        "have {} online {} released {} scrubbed {} failed {} vms {:?} ended {:?}{}",
        have.number,
        held(&have.online),
        held(&have.released),
        held(&scrubbed),
        held(&failed),
        have.vms.keys().map(|id| id.0).collect::<Vec<_>>(),
        have.ended.iter().map(|id| id.0).collect::<Vec<_>>(),
        if have.clean { " clean" } else { "" },
    )
}

fn held<'a>(holdings: impl IntoIterator<Item = &'a pool::protocol::Holding>) -> String {
    let words: Vec<_> = holdings.into_iter().map(|h| format!("{}.{}", h.slice, h.epoch)).collect();
    format!("[{}]", words.join(" "))
}
