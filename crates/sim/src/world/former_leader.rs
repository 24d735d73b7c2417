//! Fault: a manager that does not know that another one was elected, because it was paused, or could not reach etcd
//! until its lease ended. It continues with its own state machine, its connections to agents and its queued device
//! calls, until it notices the end of its lease. The answer of its last write may arrive late; all later writes are
//! rejected. There may be several former leaders.
//!
//! Devices and agents reject the former leader by its fencing token after its successor has reached them. Before, it
//! may repeat calls and messages that its durable records justify. An agent forgets the token when its machine is off.
//! Replies to clients are withheld, because `pool-manager` checks the lease before each reply.

use std::mem;

use pool::manager::{Event, Request};
use rand::Rng as _;
use units::{HostId, Ns};

use super::{
    ScheduledEvent, World,
    manager_process::{DEVICE_CALL_DURATION, FormerLeader},
};

/// Maximum time from the end of a lease until the next manager starts.
const ELECTION_DURATION_MAX: Ns = Ns::ms(300);
/// Maximum duration of a long pause, in which the next leader can fence a host and assign slices to it again.
const LONG_PAUSE_MAX: Ns = Ns::secs(20);
/// Maximum number of former leaders at a time.
const FORMER_LEADERS_MAX: usize = 3;
/// Fraction of fences by a device during which the lease ends.
const FENCE_LEASE_END_RATE: f64 = 0.2;

impl World {
    /// Ends the lease of the leader without its knowledge, at once or during its next write. Without a standby, the
    /// manager crashes.
    pub(super) fn depose_manager(&mut self) {
        if !self.fault_model.has_standby {
            return self.crash_manager();
        }
        if self.random_bool(0.3) {
            self.end_lease();
        } else {
            self.manager_process.is_deposed_by_write = true;
        }
    }

    /// Plans the end of the lease during a write of the given duration.
    pub(super) fn end_lease_during_write(&mut self, write_duration: Ns) {
        if !self.manager_process.is_former_acting()
            && mem::take(&mut self.manager_process.is_deposed_by_write)
        {
            self.end_lease_within(write_duration);
        }
    }

    /// Plans the end of the lease during some fences by a device. A fence has no epoch, so that only its fencing token
    /// prevents a late effect.
    pub(super) fn end_lease_during_fence(&mut self) {
        let is_possible = self.fault_model.has_standby && !self.manager_process.is_former_acting();
        if is_possible && self.random_bool(FENCE_LEASE_END_RATE) {
            self.end_lease_within(DEVICE_CALL_DURATION);
        }
    }

    fn end_lease_within(&mut self, span: Ns) {
        let remaining = self.random_between(Ns::ZERO, span);
        self.schedule_after(remaining, ScheduledEvent::LeaseEnd);
    }

    /// Ends the lease of the leader without its knowledge.
    pub(super) fn end_lease(&mut self) {
        if self.faults_stopped || self.manager_process.formers.len() >= FORMER_LEADERS_MAX {
            return;
        }
        let writing = self.manager_process.running.as_ref().and_then(|running| running.writing.clone());
        let written = writing.filter(|_| self.rng.random_bool(0.5)).map(|(_, records)| records);
        let is_last_write_durable = written.is_some_and(|records| {
            self.check_batch(&records);
            let is_durable = self.manager_process.store.commit(&records);
            if is_durable {
                self.apply_durable_batch(&records);
            }
            is_durable
        });
        let Some(running) = self.manager_process.running.take() else { return };
        let incarnation = running.incarnation;
        let pause = match self.rng.random_range(0..4) {
            0..2 => Ns::ZERO,
            2 => self.random_fault_duration(),
            _ => self.random_between(Ns::ZERO, LONG_PAUSE_MAX),
        };
        let paused_until = self.now.after(pause);
        self.log(|| format!("the lease of manager {incarnation} ends, paused until {paused_until}"));
        self.run_log.counts.leaders_deposed += 1;
        let running = Some(running);
        let former = FormerLeader { running, is_last_write_durable, paused_until };
        self.manager_process.formers.insert(incarnation, former);
        self.drop_pending_requests();
        let ends_at = paused_until.after(self.random_fault_duration());
        self.schedule_at(ends_at, ScheduledEvent::FormerLeaderEnds(incarnation));
        let election = self.random_between(Ns::ms(1), ELECTION_DURATION_MAX);
        self.schedule_after(election, ScheduledEvent::ManagerStart);
    }

    /// Returns the fencing token of a random former leader that is not paused, if there is one.
    pub(super) fn pick_former_leader(&mut self) -> Option<u64> {
        let now = self.now;
        let formers = self.manager_process.formers.iter().filter(|(_, former)| former.paused_until <= now);
        let active: Vec<u64> = formers.map(|(incarnation, _)| *incarnation).collect();
        self.pick_random(&active)
    }

    /// Calls a function with the given run of the manager as the running one.
    pub(super) fn act_as(&mut self, incarnation: u64, function: impl FnOnce(&mut Self)) {
        if !self.manager_process.formers.contains_key(&incarnation) {
            return function(self);
        }
        self.exchange_leaders(incarnation);
        self.manager_process.acting_former = Some(incarnation);
        function(self);
        self.manager_process.acting_former = None;
        self.exchange_leaders(incarnation);
        self.manager_process.formers.retain(|_, former| former.running.is_some());
    }

    fn exchange_leaders(&mut self, incarnation: u64) {
        let process = &mut self.manager_process;
        if let Some(former) = process.formers.get_mut(&incarnation) {
            mem::swap(&mut former.running, &mut process.running);
        }
    }

    /// Reschedules an event of a paused former leader. Returns all other events.
    pub(super) fn postpone_if_former_is_paused(&mut self, event: ScheduledEvent) -> Option<ScheduledEvent> {
        let run = match &event {
            ScheduledEvent::ManagerWakeup(run)
            | ScheduledEvent::ManagerBurstEnd(run)
            | ScheduledEvent::StoreWritten(run)
            | ScheduledEvent::StoreRead(run)
            | ScheduledEvent::DeviceCallDue(run, _) => Some(*run),
            ScheduledEvent::ReportArrival(session, _)
            | ScheduledEvent::ReportPartArrival(session, _)
            | ScheduledEvent::ManagerDetectsClose(session) => self.manager_of(*session),
            _ => None,
        };
        let former = run.and_then(|run| self.manager_process.formers.get(&run));
        let Some(paused_until) = former.map(|former| former.paused_until).filter(|until| *until > self.now)
        else {
            return Some(event);
        };
        self.schedule_at(paused_until, event);
        None
    }

    /// Passes the answer of its last write to the acting former leader. Later writes are rejected.
    pub(super) fn complete_former_store_write(&mut self, incarnation: u64) {
        let process = &mut self.manager_process;
        let former = process.formers.get_mut(&incarnation);
        let ok = former.is_some_and(|former| mem::take(&mut former.is_last_write_durable));
        let batch = process.running.as_mut().and_then(|running| running.writing.take());
        if let Some((batch, _)) = batch {
            self.run_log.counts.late_write_answers += u64::from(ok);
            self.handle_manager_event(Event::Stored { batch, ok });
        }
    }

    /// Ends a former leader that notices the end of its lease.
    pub(super) fn end_former_leader(&mut self, incarnation: u64) {
        if !self.manager_process.formers.contains_key(&incarnation) {
            return;
        }
        self.act_as(incarnation, |world| {
            if let Some(running) = world.manager_process.running.take() {
                world.log(|| format!("manager {incarnation} ends, because another one is the leader"));
                world.end_run(running);
            }
        });
    }

    /// Ends all former leaders.
    pub(super) fn end_former_leaders(&mut self) {
        let formers: Vec<u64> = self.manager_process.formers.keys().copied().collect();
        formers.into_iter().for_each(|incarnation| self.end_former_leader(incarnation));
    }

    /// Sends some requests to a former leader. Returns other requests.
    pub(super) fn send_to_former_leader(&mut self, request: Request) -> Option<Request> {
        let chosen = self.pick_former_leader().filter(|_| self.rng.random_bool(0.3));
        let Some(incarnation) = chosen else { return Some(request) };
        let token = self.manager_process.next_token();
        self.act_as(incarnation, |world| world.handle_manager_event(Event::Request(token, request)));
        None
    }

    /// Returns the fencing token of the manager that an agent connects to, if one accepts connections.
    pub(super) fn choose_manager_for(&mut self, host: HostId) -> Option<u64> {
        if self.machine(host).is_network_down {
            return None;
        }
        let leader = self.manager_process.running.as_ref().filter(|running| running.is_open);
        let leader = leader.map(|running| running.incarnation);
        let former = self.pick_former_leader();
        if former.is_some() && self.random_bool(0.5) { former } else { leader }
    }
}
