//! Simulated connections between agents and the manager. Messages may be delayed, lost, duplicated
//! or reordered. Messages on a closed connection are dropped. The two ends of a connection detect a
//! close at different times.

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    agent::Event as AgentEvent,
    manager::{CloseReason, Event, SessionId},
    protocol::{DesiredState, Hello, Holding, ObservedState, SeenDevice},
};
use rand::Rng as _;
use units::limits::{RECONNECT_BACKOFF_MAX, RECONNECT_BACKOFF_MIN};
use units::{DesiredVersion, HostId, InstanceId, Ns};

use super::{ScheduledEvent, World, check::SentStates};

/// Minimum delay of a message.
const MESSAGE_DELAY: Ns = Ns(150_000);
/// Time between the arrivals of two parts of a report.
const REPORT_PART_DURATION: Ns = Ns(20_000);
/// Maximum number of entries per part of a report. It is small so that most reports have several
/// parts.
const REPORT_PART_ENTRIES_MAX: usize = 8;
/// Maximum additional delay of a message that is reordered.
const REORDER_DELAY_MAX: Ns = Ns::ms(600);

#[derive(Debug, Default)]
pub(super) struct Network {
    sessions: BTreeMap<SessionId, Session>,
    sessions_opened: u64,
    /// Sessions of duplicate agents, each with the host that the agent claims to be. The manager
    /// must reject these sessions.
    duplicate_agents: BTreeMap<SessionId, HostId>,
}

#[derive(Debug)]
struct Session {
    /// Fencing token of the manager.
    manager: u64,
    host: HostId,
    instance: u64,
    /// Whether the manager considers the connection open.
    open_at_manager: bool,
    /// Whether the agent considers the connection open.
    open_at_agent: bool,
    /// Arrival time of the latest message to the manager. Used if messages arrive in order.
    last_to_manager: Ns,
    /// Arrival time of the latest message to the agent. Used if messages arrive in order.
    last_to_agent: Ns,
    /// Boot number that the agent sent at the start of the session.
    boot: u64,
    /// Sum of the desired states sent so far.
    sent: Option<DesiredState>,
    /// Scrubs in the sum, each with the version since which every sum contained it.
    scrubs: BTreeMap<Holding, DesiredVersion>,
}

impl Network {
    /// Delays the arrival times of all sessions by the time for which all machines were suspended.
    pub(super) fn delay_arrivals(&mut self, span: Ns) {
        for session in self.sessions.values_mut() {
            (session.last_to_manager, session.last_to_agent) =
                (session.last_to_manager.after(span), session.last_to_agent.after(span));
        }
    }
}

impl Session {
    /// Adds a desired state to the sum of the desired states sent before.
    fn add_desired_state(&mut self, desired: &DesiredState) -> SentStates {
        match &mut self.sent {
            Some(sent) => merge_into_sum(sent, desired),
            None => self.sent = Some(desired.clone()),
        }
        let sum = self.sent.clone().expect("set above");
        let first_scrubs: Vec<Holding> =
            sum.scrub.keys().filter(|scrub| !self.scrubs.contains_key(scrub)).copied().collect();
        self.scrubs.retain(|scrub, _| sum.scrub.contains_key(scrub));
        self.scrubs.extend(first_scrubs.iter().map(|scrub| (*scrub, desired.number)));
        let (instance, boot_id) = (InstanceId(self.instance), boot_id(self.boot));
        SentStates { host: self.host, instance, boot_id, first_scrubs, sum }
    }

    /// Returns the complete scrubs in a report after which the agent does not start the scrub again. The
    /// agent may have dropped a result from before the scrub was sent.
    fn final_scrubs(&self, report: &ObservedState) -> Vec<Holding> {
        let complete = report.scrubbed.iter().filter(|scrubbed| scrubbed.verified >= units::SLICE);
        let is_final = |scrub: &Holding| self.scrubs.get(scrub).is_none_or(|since| report.number >= *since);
        complete.map(|scrubbed| scrubbed.holding).filter(is_final).collect()
    }
}

/// Adds the next desired state of a session to the sum. This is a separate implementation that does
/// not use the code of the agents.
fn merge_into_sum(sum: &mut DesiredState, next: &DesiredState) {
    if next.base.is_none() {
        *sum = next.clone();
        return;
    }
    let in_vms = next.vms.values().flat_map(|vm| vm.slices.keys()).map(|holding| holding.slice);
    let in_lists = next.release.keys().chain(next.scrub.keys()).map(|holding| holding.slice);
    let replaced: BTreeSet<_> = in_vms.chain(in_lists).chain(next.removals.slices.iter().copied()).collect();
    sum.release.retain(|holding, _| !replaced.contains(&holding.slice));
    sum.scrub.retain(|holding, _| !replaced.contains(&holding.slice));
    next.removals.vms.iter().for_each(|vm| drop(sum.vms.remove(vm)));
    sum.vms.extend(next.vms.clone());
    sum.release.extend(next.release.clone());
    sum.scrub.extend(next.scrub.clone());
    (sum.number, sum.instance, sum.fenced) = (next.number, next.instance, next.fenced);
}

impl World {
    pub(super) fn connect_agent(&mut self, host: HostId, instance: u64) {
        if self.postpone_if_frozen(host, || ScheduledEvent::AgentConnect(host, instance)) {
            return;
        }
        let Some(hello) = self.create_hello(host, instance) else { return };
        let Some(manager) = self.choose_manager_for(host) else {
            return self.connect_agent_later(host, instance);
        };
        self.network.sessions_opened += 1;
        let id = SessionId(self.network.sessions_opened);
        let at = self.now.after(MESSAGE_DELAY);
        let boot = self.machine(host).boot;
        let (sent, scrubs) = (None, BTreeMap::new());
        let session = Session {
            manager,
            host,
            instance,
            open_at_manager: true,
            open_at_agent: true,
            last_to_manager: at,
            last_to_agent: at,
            boot,
            sent,
            scrubs,
        };
        self.network.sessions.insert(id, session);
        self.machine(host).set_session(Some(id));
        self.log(|| {
            format!("{host} connects as instance {instance} to manager {manager} in session {}", id.0)
        });
        self.schedule_at(at, ScheduledEvent::SessionAccepted(id));
        self.act_as(manager, |world| world.handle_manager_event(Event::AgentUp(id, host, hello)));
    }

    fn connect_agent_later(&mut self, host: HostId, instance: u64) {
        let pause = self.random_between(RECONNECT_BACKOFF_MIN, RECONNECT_BACKOFF_MAX);
        self.schedule_after(pause, ScheduledEvent::AgentConnect(host, instance));
    }

    /// Returns the fencing token of the manager of a session.
    pub(super) fn manager_of(&self, id: SessionId) -> Option<u64> {
        self.network.sessions.get(&id).map(|session| session.manager)
    }

    fn create_hello(&mut self, host: HostId, instance: u64) -> Option<Hello> {
        let devices = self.visible_devices();
        let machine = self.machine(host);
        machine.find_agent(instance).filter(|running| running.session.is_none())?;
        Some(Hello {
            instance: InstanceId(instance),
            boot_id: boot_id(machine.boot),
            host_memory_socket: "/run/host-memory".into(),
            devices,
            can_rehome: true,
        })
    }

    /// Returns the shared devices, which are visible on every machine.
    fn visible_devices(&self) -> Vec<SeenDevice> {
        self.rack.visible_devices.clone()
    }

    pub(super) fn accept_session(&mut self, id: SessionId) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_agent) else {
            return;
        };
        let (host, instance, manager) = (session.host, session.instance, session.manager);
        if self.postpone_if_frozen(host, || ScheduledEvent::SessionAccepted(id)) {
            return;
        }
        if self.machine(host).manager_token > manager {
            self.log(|| format!("{host} rejects manager {manager}"));
            self.run_log.counts.former_sessions_rejected += 1;
            self.machine(host).set_session(None);
            self.close_agent_end(id, true);
            return self.connect_agent_later(host, instance);
        }
        self.machine(host).manager_token = manager;
        let lease_ttl = self.fault_model.settings.lease_ttl;
        self.handle_agent_event(host, instance, AgentEvent::SessionUp { rack: "rack".into(), lease_ttl });
    }

    pub(super) fn send_desired_state(&mut self, id: SessionId, desired: DesiredState) {
        let Some(session) = self.network.sessions.get_mut(&id) else { return };
        let host = session.host;
        let sent = session.add_desired_state(&desired);
        if self.manager_process.is_former_acting() {
            self.record_sent_grants(host, &desired);
        } else {
            self.check_desired_state(&desired, &sent);
        }
        self.log(|| format!("manager -> {host}: {}", describe_state(&desired)));
        for at in self.random_arrival_times(id, false) {
            self.schedule_at(at, ScheduledEvent::DesiredStateArrival(id, Box::new(desired.clone())));
        }
    }

    pub(super) fn request_report(&mut self, id: SessionId) {
        let Some(session) = self.network.sessions.get(&id) else { return };
        let host = session.host;
        self.log(|| format!("manager -> {host}: report all"));
        for at in self.random_arrival_times(id, false) {
            self.schedule_at(at, ScheduledEvent::ReportRequestArrival(id));
        }
    }

    pub(super) fn agent_receives_report_request(&mut self, id: SessionId) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_agent) else {
            return;
        };
        let (host, instance) = (session.host, session.instance);
        if self.drop_or_delay(host, |()| ScheduledEvent::ReportRequestArrival(id), ())
            || self.postpone_if_frozen(host, || ScheduledEvent::ReportRequestArrival(id))
        {
            return;
        }
        self.handle_agent_event(host, instance, AgentEvent::ReportRequested);
    }

    pub(super) fn send_report(&mut self, host: HostId, id: SessionId, report: ObservedState) {
        self.check_sent_report(host, &report);
        self.log(|| format!("{host} -> manager: {}", describe_report(&report)));
        for at in self.random_arrival_times(id, true) {
            self.schedule_at(at, ScheduledEvent::ReportArrival(id, Box::new(report.clone())));
        }
    }

    /// Returns the arrival times of all copies of a message. A lost message has no arrival time; a
    /// duplicated message has two.
    fn random_arrival_times(&mut self, id: SessionId, to_manager: bool) -> Vec<Ns> {
        let (loss_rate, duplication_rate) =
            (self.fault_model.message_loss_rate, self.fault_model.message_duplication_rate);
        let faults_stopped = self.faults_stopped;
        if !faults_stopped && self.random_bool(loss_rate) {
            return Vec::new();
        }
        let copies = 1 + usize::from(!faults_stopped && self.random_bool(duplication_rate));
        (0..copies).map(|_| self.random_arrival_time(id, to_manager)).collect()
    }

    fn random_arrival_time(&mut self, id: SessionId, to_manager: bool) -> Ns {
        let span = self.random_duration_around(MESSAGE_DELAY);
        let ordered = self.fault_model.in_order || self.faults_stopped;
        let reordering_max = if ordered || !self.random_bool(0.15) { Ns::ZERO } else { REORDER_DELAY_MAX };
        let reordering = self.random_between(Ns::ZERO, reordering_max);
        let at = self.now.after(MESSAGE_DELAY).after(span).after(reordering);
        let session = self.network.sessions.get_mut(&id).expect("messages are sent on a session");
        let latest = if to_manager { &mut session.last_to_manager } else { &mut session.last_to_agent };
        if !ordered {
            return at;
        }
        *latest = at.max(*latest);
        *latest
    }

    pub(super) fn manager_receives_report(&mut self, id: SessionId, report: ObservedState) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_manager) else {
            return;
        };
        let (host, is_from_leader) = (session.host, self.manager_process.is_leader(session.manager));
        if self.drop_or_delay(
            host,
            |report| ScheduledEvent::ReportArrival(id, Box::new(report)),
            report.clone(),
        ) {
            return;
        }
        if is_from_leader {
            self.record_contact(host);
        }
        let part_max = self.rng.random_range(1..=REPORT_PART_ENTRIES_MAX);
        let mut at = self.now;
        for part in report.into_parts(part_max) {
            self.schedule_at(at, ScheduledEvent::ReportPartArrival(id, Box::new(part)));
            at = at.after(REPORT_PART_DURATION);
        }
    }

    pub(super) fn manager_receives_part(&mut self, id: SessionId, part: ObservedState) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_manager) else {
            return;
        };
        let (host, manager, scrubs) = (session.host, session.manager, session.final_scrubs(&part));
        if self.manager_process.is_leader(manager) {
            self.record_ended_scrubs(host, scrubs);
        }
        self.act_as(manager, |world| world.handle_manager_event(Event::AgentReport(id, part)));
    }

    pub(super) fn agent_receives_state(&mut self, id: SessionId, desired: DesiredState) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_agent) else {
            return;
        };
        let (host, instance) = (session.host, session.instance);
        if self.drop_or_delay(
            host,
            |desired| ScheduledEvent::DesiredStateArrival(id, Box::new(desired)),
            desired.clone(),
        ) {
            return;
        }
        if self
            .postpone_if_frozen(host, || ScheduledEvent::DesiredStateArrival(id, Box::new(desired.clone())))
        {
            return;
        }
        self.handle_agent_event(host, instance, AgentEvent::DesiredState { rack: "rack".into(), desired });
    }

    /// Returns whether the network of a host is down, so that the message is not delivered now. On
    /// a stream, the message is delivered later; otherwise, the message is lost.
    fn drop_or_delay<M>(
        &mut self,
        host: HostId,
        retry: impl FnOnce(M) -> ScheduledEvent,
        message: M,
    ) -> bool {
        if !self.machine(host).is_network_down {
            return false;
        }
        if self.fault_model.in_order {
            self.schedule_after(Ns::ms(20), retry(message));
        }
        true
    }

    /// Connects a duplicate agent while the agent of a host is connected with a valid lease. The
    /// duplicate is another instance of the same boot, older or newer, or an agent of another
    /// machine. The manager must reject the duplicate.
    pub(super) fn connect_duplicate_agent(&mut self, host: HostId) {
        let current = self.network.sessions.values().find(|session| self.is_connection_of(session, host));
        let Some((instance, boot)) = current.map(|session| (session.instance, session.boot)) else { return };
        if !self.manager_process.is_settled() || !self.is_lease_valid(host) {
            return;
        }
        let duplicates = [(instance - 1, boot), (instance + 1000, boot), (instance, boot + 1000)];
        let (instance, boot) = self.pick_random(&duplicates).unwrap_or(duplicates[0]);
        self.network.sessions_opened += 1;
        let id = SessionId(self.network.sessions_opened);
        self.log(|| format!("a second agent connects as {host}, instance {instance}, session {}", id.0));
        self.network.duplicate_agents.insert(id, host);
        let hello = Hello {
            instance: InstanceId(instance),
            boot_id: boot_id(boot),
            host_memory_socket: "/run/host-memory".into(),
            devices: self.visible_devices(),
            can_rehome: true,
        };
        self.schedule_after(Ns::ms(1), ScheduledEvent::DuplicateAgentLeaves(id));
        self.handle_manager_event(Event::AgentUp(id, host, hello));
    }

    pub(super) fn end_duplicate_agent(&mut self, id: SessionId) {
        if let Some(host) = self.network.duplicate_agents.remove(&id) {
            self.report_violation(
                "a host has one connected agent",
                format!("{host}: a second agent is accepted in session {}", id.0),
            );
        }
    }

    /// Closes the manager's end of a connection. The agent detects the close later.
    pub(super) fn close_session_by_manager(&mut self, id: SessionId, reason: &CloseReason) {
        if self.network.duplicate_agents.remove(&id).is_some() {
            self.run_log.counts.duplicate_agents_rejected += u64::from(*reason == CloseReason::Superseded);
            return;
        }
        let Some(session) = self.network.sessions.get_mut(&id) else { return };
        session.open_at_manager = false;
        let host = session.host;
        self.log(|| format!("manager closes session {} of {host}: {reason:?}", id.0));
        if let CloseReason::FalseClaim(slice, epoch) = reason {
            self.report_violation(
                "an honest agent is never accused of a false claim",
                format!("{host} is accused of claiming slice {slice} under epoch {epoch}"),
            );
        }
        self.schedule_after(Ns::ms(1), ScheduledEvent::AgentDetectsClose(id));
    }

    /// Breaks the connection of a host. The two ends detect the close at different times.
    pub(super) fn break_session(&mut self, host: HostId) {
        let id = self.machine(host).current_session();
        let Some(id) = id else { return };
        self.log(|| format!("session {} of {host} breaks", id.0));
        let (manager_delay, agent_delay) =
            (self.random_between(Ns::ZERO, Ns::ms(50)), self.random_between(Ns::ZERO, Ns::ms(50)));
        self.schedule_after(manager_delay, ScheduledEvent::ManagerDetectsClose(id));
        self.schedule_after(agent_delay, ScheduledEvent::AgentDetectsClose(id));
    }

    /// Closes the agent's end of a connection after the agent process has ended. If
    /// `notify_manager` is set, the kernel of the host notifies the manager.
    pub(super) fn close_agent_end(&mut self, id: SessionId, notify_manager: bool) {
        if let Some(session) = self.network.sessions.get_mut(&id) {
            session.open_at_agent = false;
            if notify_manager {
                self.schedule_after(Ns::ms(1), ScheduledEvent::ManagerDetectsClose(id));
            }
        }
    }

    /// Closes the manager's ends of all connections after a manager process has ended.
    pub(super) fn close_manager_ends(&mut self, manager: u64) {
        if !self.manager_process.is_former_acting() {
            self.network.duplicate_agents.clear();
        }
        let open = self.network.sessions.iter().filter(|(_, session)| session.manager == manager);
        let open: Vec<SessionId> = open.map(|(id, _)| *id).collect();
        for id in open {
            self.network.sessions.entry(id).and_modify(|session| session.open_at_manager = false);
            let pause = self.random_between(Ns(100_000), Ns::ms(5));
            self.schedule_after(pause, ScheduledEvent::AgentDetectsClose(id));
        }
    }

    pub(super) fn manager_detects_close(&mut self, id: SessionId) {
        let Some(session) = self.network.sessions.get_mut(&id).filter(|session| session.open_at_manager)
        else {
            return;
        };
        session.open_at_manager = false;
        let manager = session.manager;
        self.remove_closed_session(id);
        self.act_as(manager, |world| world.handle_manager_event(Event::AgentDown(id)));
    }

    pub(super) fn agent_detects_close(&mut self, id: SessionId) {
        let Some(session) = self.network.sessions.get(&id).filter(|session| session.open_at_agent) else {
            return self.remove_closed_session(id);
        };
        let (host, instance) = (session.host, session.instance);
        if self.postpone_if_frozen(host, || ScheduledEvent::AgentDetectsClose(id)) {
            return;
        }
        if self.machine(host).is_network_down {
            return self.schedule_after(Ns::ms(20), ScheduledEvent::AgentDetectsClose(id));
        }
        self.network.sessions.entry(id).and_modify(|session| session.open_at_agent = false);
        self.remove_closed_session(id);
        if self.machine(host).current_session() == Some(id) {
            self.machine(host).set_session(None);
            self.handle_agent_event(host, instance, AgentEvent::SessionDown);
            self.connect_agent_later(host, instance);
        }
    }

    /// Returns whether the leader has an open connection to this host.
    pub(super) fn is_connected(&self, host: HostId) -> bool {
        self.network.sessions.values().any(|session| self.is_connection_of(session, host))
    }

    fn is_connection_of(&self, session: &Session, host: HostId) -> bool {
        session.host == host && session.open_at_manager && self.manager_process.is_leader(session.manager)
    }

    fn remove_closed_session(&mut self, id: SessionId) {
        if self
            .network
            .sessions
            .get(&id)
            .is_some_and(|session| !session.open_at_manager && !session.open_at_agent)
        {
            self.network.sessions.remove(&id);
        }
    }
}

fn boot_id(boot: u64) -> String {
    format!("boot-{boot}")
}

fn describe_state(desired: &DesiredState) -> String {
    let vms = desired.vms.iter().map(|(id, vm)| (id.0, describe_holdings(vm.slices.keys())));
    let fenced = if desired.fenced { " FENCED" } else { "" };
    let base = desired
        .base
        .map(|base| format!(" on base {base}, removed {:?},", desired.removals))
        .unwrap_or_default();
    format!(
        "desired state {}{base}{fenced} vms {:?} release {:?} scrub {}",
        desired.number,
        vms.collect::<Vec<_>>(),
        desired.release.iter().map(|(h, r)| (h.slice.0, h.epoch.0, r.force)).collect::<Vec<_>>(),
        describe_holdings(desired.scrub.keys())
    )
}

fn describe_report(report: &ObservedState) -> String {
    let scrubbed: Vec<_> = report.scrubbed.iter().map(|scrubbed| scrubbed.holding).collect();
    let failed: Vec<_> = report.failed.iter().map(|failed| failed.holding).collect();
    format!(
        "report {} online {} released {} scrubbed {} failed {} vms {:?} ended {:?}{}",
        report.number,
        describe_holdings(&report.online),
        describe_holdings(&report.released),
        describe_holdings(&scrubbed),
        describe_holdings(&failed),
        report.vms.keys().map(|id| id.0).collect::<Vec<_>>(),
        report.ended.iter().map(|id| id.0).collect::<Vec<_>>(),
        if report.clean { " clean" } else { "" },
    )
}

fn describe_holdings<'a>(holdings: impl IntoIterator<Item = &'a pool::protocol::Holding>) -> String {
    let names: Vec<_> = holdings.into_iter().map(|h| format!("{}.{}", h.slice, h.epoch)).collect();
    format!("[{}]", names.join(" "))
}
