//! Requests of clients. Each request is decided immediately on `head`. Its reply is derived from
//! `durable` after its batch became durable.

use units::limits::SLICE_WAITERS_MAX;
use units::{HostId, MigrationId, Name, Ns, ReservationId, Revision};

use super::{Effect, Manager, Reply, Token, decision_change, link::Link};
use crate::{
    audit::{Actor, Decision},
    ledger::{Change, Ledger, RackSpec, Reserve, ReserveOutcome, SchedulingTarget, Target, When},
    record::{
        EndReason, Migration, MigrationAnswer, MigrationKey, Reservation, Scheduling, SlowdownEstimate, Stage,
    },
    rejection::Rejection,
};

/// Validated request of a client.
#[derive(Clone, Debug)]
pub enum Request {
    /// Reserves memory and cores for a VM. With `wait`, the reply is sent when the slices are
    /// online or the time limit expires.
    Reserve {
        /// Requested memory and cores.
        reserve: Reserve,
        /// Time limit for the slices to come online; `None` replies without waiting.
        wait: Option<Ns>,
    },
    /// Checks a [`Request::Reserve`] without performing it. The reply is the same as for the
    /// reservation.
    Validate(Reserve),
    /// Waits until all slices of a reservation are online.
    WaitReady {
        /// Reservation to wait for.
        target: Target,
        /// Time limit of the wait.
        within: Ns,
    },
    /// Commits a reservation, because its VM was started.
    Commit {
        /// Reservation to commit.
        target: Target,
        /// Client that sent the request.
        actor: Actor,
    },
    /// Releases a reservation, because its VM has ended or will not start.
    Release {
        /// Reservation to release.
        target: Target,
        /// Whether to release the memory even if the VM is running.
        force: bool,
        /// Reason given by the caller.
        reason: String,
        /// Client that sent the request.
        actor: Actor,
    },
    /// Moves the pool memory of a running VM to local memory of its host.
    Rehome {
        /// Reservation of the VM.
        target: Target,
        /// Client that sent the request, or the manager.
        actor: Actor,
        /// Whether the limits of automatic moves apply.
        is_automatic: bool,
    },
    /// Cancels the move of a VM's pool memory to local memory.
    CancelRehome {
        /// Reservation of the VM.
        target: Target,
        /// Client that sent the request.
        actor: Actor,
    },
    /// Cordons, uncordons or drains a host or EMC, or uncordons a slice.
    Schedule {
        /// Host, EMC or slice.
        place: SchedulingTarget,
        /// Requested scheduling.
        to: Scheduling,
        /// Client that sent the request.
        actor: Actor,
        /// Reason given by the caller.
        reason: String,
    },
    /// Fences a host that is not connected.
    Fence {
        /// Name of the host.
        host: Name,
        /// Whether the operator confirms that the machine is powered off.
        powered_off: bool,
        /// Client that sent the request.
        actor: Actor,
        /// Reason given by the caller.
        reason: String,
    },
    /// Answers a migration request.
    ResolveMigration {
        /// Name of the VM.
        vm: Name,
        /// ID of the request; `None` means the only request of the VM.
        id: Option<MigrationId>,
        /// Answer of the scheduler.
        answer: MigrationAnswer,
        /// Explanation of the answer by the scheduler; may be empty.
        explanation: String,
        /// Client that sent the request.
        actor: Actor,
    },
    /// Requests the migration of a VM that pool memory slows down, or confirms its request.
    RequestSlowdownMigration {
        /// Reservation of the VM.
        reservation: ReservationId,
        /// Estimate of the slowdown.
        estimate: SlowdownEstimate,
        /// Maximum number of such requests per hour.
        max_per_hour: u32,
    },
    /// Withdraws the migration request of a VM that is no longer slowed down.
    WithdrawSlowdownMigration(ReservationId),
    /// Records a decision made outside the ledger.
    RecordDecision(Decision),
    /// Applies a new rack.toml.
    Configure(RackSpec),
}

impl Request {
    /// Returns whether the reply may have to wait for slices to come online.
    pub fn waits_for_slices(&self) -> bool {
        matches!(self, Self::WaitReady { .. } | Self::Reserve { wait: Some(_), .. })
    }
}

/// Reply to an accepted request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestReply {
    /// Current state of the reservation.
    Reservation(ReservationView),
    /// The cordon, uncordon, drain or fence is durable.
    Scheduled {
        /// Revision of the durable ledger at the reply.
        revision: Revision,
        /// For a drain, names of the VMs that must still be migrated; otherwise empty.
        waiting_for: Vec<Name>,
    },
    /// Current state of the migration request.
    Migration(ReservationId, Migration),
    /// The request is durable. The value is the revision of the durable ledger at the reply.
    Done(Revision),
}

/// Reservation with values derived from the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct ReservationView {
    /// ID of the reservation.
    pub id: ReservationId,
    /// Name of the reservation's host; "removed" if the host is no longer in the rack.
    pub host: Name,
    /// Number of online slices.
    pub online: u32,
    /// Durable record of the reservation.
    pub reservation: Reservation,
}

impl Ledger {
    /// Returns a reservation with values derived from the ledger.
    pub fn view(&self, id: ReservationId) -> Option<ReservationView> {
        let reservation = self.reservation(id)?.clone();
        let removed = || Name::new("removed").expect("the placeholder name is valid");
        let host = self.host(reservation.host).map_or_else(removed, |entry| entry.host.name.clone());
        Some(ReservationView { id, host, online: self.online(id), reservation })
    }
}

impl ReservationView {
    /// Returns whether all slices of the reservation are online and its VM may still start.
    pub fn is_ready(&self) -> bool {
        let may_start = matches!(self.reservation.stage, Stage::Reserved { .. } | Stage::Committed);
        may_start && self.online as usize == self.reservation.slices.len()
    }
}

impl Manager {
    pub(super) fn on_request(&mut self, when: When, token: Token, request: Request) {
        if !self.loaded {
            return self.reply_rejection(token, Rejection::Starting("its store is being read"));
        }
        let outcome = match request {
            Request::Reserve { reserve, wait } => return self.on_reserve(when, token, reserve, wait),
            Request::WaitReady { target, within } => return self.on_wait_ready(when, token, &target, within),
            Request::Validate(reserve) => return self.on_validate(when, token, reserve),
            Request::Commit { target, actor } => self.on_commit(when, &target, actor),
            Request::Release { target, force, reason, actor } => {
                self.on_release(when, &target, force, reason, actor)
            }
            Request::Rehome { target, actor, is_automatic } => {
                self.on_rehome(when, &target, actor, is_automatic)
            }
            Request::CancelRehome { target, actor } => self
                .head
                .decide_rehome_cancellation(when, &target, actor)
                .map(|(id, change)| (change, Reply::Reservation(id))),
            Request::Schedule { place, to, actor, reason } => {
                let allowed = match (&place, to) {
                    (SchedulingTarget::Slice(slice), Scheduling::Enabled) => {
                        self.check_requalification(*slice)
                    }
                    _ => Ok(()),
                };
                let outcome = self.head.decide_scheduling(when, &place, to, actor, &reason);
                allowed
                    .and(outcome)
                    .map(|change| (change, Reply::Scheduled { place, drains: to == Scheduling::Draining }))
            }
            Request::Fence { host, powered_off, actor, reason } => {
                self.on_fence(when, host, powered_off, actor, &reason)
            }
            Request::ResolveMigration { vm, id, answer, explanation, actor } => self
                .head
                .decide_migration(when, (&vm, id), answer, explanation, actor)
                .map(|(key, change)| (change, Reply::Migration(key))),
            Request::RequestSlowdownMigration { reservation, estimate, max_per_hour } => {
                let decided = self.head.decide_slowdown(when, reservation, estimate, max_per_hour);
                decided.map(|change| (change, Reply::Done))
            }
            Request::WithdrawSlowdownMigration(reservation) => {
                Ok((self.head.decide_slowdown_end(when, reservation), Reply::Done))
            }
            Request::RecordDecision(decision) => Ok((decision_change(decision), Reply::Done)),
            Request::Configure(spec) => {
                self.head.decide_configuration(when, &spec).map(|change| (change, Reply::Done))
            }
        };
        match outcome {
            Ok((change, reply)) => {
                self.change(when, change);
                self.reply_durable(token, reply);
            }
            Err(rejection) => self.reply_durable(token, Reply::Rejected(rejection)),
        }
    }

    /// Decides a reservation. A repeated request gets its reply in any state of the host. A new
    /// request requires that the host's agent has connected and its lease is valid.
    fn decide_reserve(&self, when: When, reserve: Reserve) -> Result<ReserveOutcome, Rejection> {
        let host = self.head.find_host_by_name(&reserve.host);
        let outcome = self.head.decide_reserve(when, reserve);
        if let Ok(ReserveOutcome::Repeat(_))
        | Err(
            Rejection::RequestReused { .. }
            | Rejection::VmAlreadyReserved { .. }
            | Rejection::HostNotSchedulable { .. },
        ) = outcome
        {
            // These outcomes do not depend on the host's connection.
            return outcome;
        }
        if let Some(host) = host {
            self.check_host_accepts_reservations(host)?;
            if let Err(Rejection::OutOfSlices { .. }) = &outcome
                && self.has_starting_emc(host)
            {
                return Err(Rejection::Starting("its EMCs are being compared with the ledger"));
            }
        }
        if self.store_low_since.is_some() && outcome.is_ok() {
            return Err(Rejection::StoreFull);
        }
        outcome
    }

    fn check_host_accepts_reservations(&self, id: HostId) -> Result<(), Rejection> {
        let Some(host) = self.head.host(id).map(|entry| &entry.host.name) else { return Ok(()) };
        match self.links.get(&id) {
            Some(link) if link.is_unknown() => Err(Rejection::HostNotSchedulable {
                host: host.clone(),
                why: "unknown: its lease has expired",
            }),
            Some(link) if !link.is_expected() => Ok(()),
            Some(_) | None => Err(Rejection::HostExpected(host.clone())),
        }
    }

    fn on_reserve(&mut self, when: When, token: Token, reserve: Reserve, wait: Option<Ns>) {
        let slices = reserve.slices;
        let within_limit = wait.map_or(Ok(()), |_| self.check_waiter_limit());
        let id = match within_limit.and_then(|()| self.decide_reserve(when, reserve)) {
            Err(rejection) => return self.reply_durable(token, Reply::Rejected(rejection)),
            Ok(ReserveOutcome::Repeat(id)) => id,
            Ok(ReserveOutcome::New(id, change)) => {
                self.buffer.record_demand(when.now, slices);
                self.change(when, change);
                id
            }
        };
        match wait {
            None => self.reply_durable(token, Reply::Reservation(id)),
            Some(within) => self.add_durability_waiter(token, id, when.now.after(within)),
        }
    }

    fn on_validate(&mut self, when: When, token: Token, reserve: Reserve) {
        let host = reserve.host.clone();
        let view = match self.decide_reserve(when, reserve) {
            Err(rejection) => return self.reply_durable(token, Reply::Rejected(rejection)),
            Ok(ReserveOutcome::Repeat(id)) => return self.reply_durable(token, Reply::Reservation(id)),
            Ok(ReserveOutcome::New(id, change)) => {
                let new_reservation = change.0.into_iter().find_map(|record| match record {
                    crate::record::Record::Reservation(_, reservation) => Some(reservation),
                    _ => None,
                });
                let reservation =
                    new_reservation.expect("the change of a new reservation contains its record");
                ReservationView { id, host, online: 0, reservation }
            }
        };
        self.effects.push_back(Effect::Reply(token, Box::new(Ok(RequestReply::Reservation(view)))));
    }

    fn on_wait_ready(&mut self, when: When, token: Token, target: &Target, within: Ns) {
        match self.check_waiter_limit().and_then(|()| self.head.find(target)) {
            Ok(id) => self.add_durability_waiter(token, id, when.now.after(within)),
            Err(rejection) => self.reply_durable(token, Reply::Rejected(rejection)),
        }
    }

    fn on_commit(&self, when: When, target: &Target, actor: Actor) -> Result<(Change, Reply), Rejection> {
        let id = self.head.find(target)?;
        Ok((self.head.decide_commit(when, id, actor)?, Reply::Reservation(id)))
    }

    fn on_release(
        &self,
        when: When,
        target: &Target,
        force: bool,
        reason: String,
        actor: Actor,
    ) -> Result<(Change, Reply), Rejection> {
        let id = self.head.find(target)?;
        let change =
            self.head.decide_reservation_end(when, id, EndReason::Released { force, reason }, actor)?;
        Ok((change, Reply::Reservation(id)))
    }

    /// Decides a move to local memory. A new move requires that the agent of the host is connected and
    /// performs moves: otherwise the booked memory would be unavailable for an unknown time.
    fn on_rehome(
        &self,
        when: When,
        target: &Target,
        actor: Actor,
        is_automatic: bool,
    ) -> Result<(Change, Reply), Rejection> {
        let (id, change) = self.head.decide_rehome(when, target, actor, is_automatic)?;
        if let Some(reservation) = self.head.reservation(id).filter(|_| !change.0.is_empty()) {
            let link = self.links.get(&reservation.host);
            let hello = link.filter(|link| link.is_live()).and_then(Link::hello);
            let obstacle = match hello {
                None => Some("the agent of its host is not connected"),
                Some(hello) if !hello.can_rehome => Some("the agent of its host is of an earlier version"),
                Some(_) => None,
            };
            if let Some(why) = obstacle {
                return Err(Rejection::CannotRehome { vm: reservation.vm.clone(), why });
            }
        }
        Ok((change, Reply::Reservation(id)))
    }

    fn on_fence(
        &self,
        when: When,
        host: Name,
        powered_off: bool,
        actor: Actor,
        reason: &str,
    ) -> Result<(Change, Reply), Rejection> {
        let id = self.head.find_host_by_name(&host).ok_or_else(|| Rejection::NoSuchHost(host.clone()))?;
        let link = self.links.get(&id);
        if link.is_some_and(Link::is_connected) {
            return Err(Rejection::HostConnected(host));
        }
        if !powered_off && link.is_some_and(Link::is_expected) {
            // The agent may connect soon, and the host's VMs may be running.
            return Err(Rejection::HostExpected(host));
        }
        Ok((
            self.head.decide_fence(when, id, powered_off, actor, reason),
            Reply::Scheduled { place: SchedulingTarget::Host(host), drains: false },
        ))
    }

    pub(super) fn reply_now(&mut self, token: Token, reply: Reply) {
        let revision = self.durable.meta().revision;
        let answer = match reply {
            Reply::Reservation(id) => {
                self.durable.view(id).map(RequestReply::Reservation).ok_or(Rejection::NoSuchReservation(id))
            }
            Reply::Scheduled { place, drains } => {
                let waiting =
                    self.durable.reservations_of_target(&place).ok().filter(|_| drains).unwrap_or_default();
                let waiting = waiting.iter().filter_map(|id| self.durable.reservation(*id));
                Ok(RequestReply::Scheduled { revision, waiting_for: waiting.map(|r| r.vm.clone()).collect() })
            }
            Reply::Migration(key) => {
                let MigrationKey { reservation, .. } = key;
                let migration = self.durable.migration(key).cloned();
                let reply = migration.map(|migration| RequestReply::Migration(reservation, migration));
                reply.ok_or(Rejection::NoSuchReservation(reservation))
            }
            Reply::Done => Ok(RequestReply::Done(revision)),
            Reply::Rejected(rejection) => Err(rejection),
        };
        self.effects.push_back(Effect::Reply(token, Box::new(answer)));
    }

    /// Checks that another caller may wait for slices. The limit includes the callers that will
    /// wait once a batch is durable.
    fn check_waiter_limit(&self) -> Result<(), Rejection> {
        let in_write = self.writing.as_ref().map_or(0, |(batch, _)| batch.waiting.len());
        if self.waiter_deadlines.len() + self.open.waiting.len() + in_write < SLICE_WAITERS_MAX {
            return Ok(());
        }
        Err(Rejection::LimitExceeded { what: "callers waiting for slices", max: SLICE_WAITERS_MAX as u64 })
    }

    fn add_durability_waiter(&mut self, token: Token, id: ReservationId, deadline: Ns) {
        if !self.open.records.is_empty() {
            self.open.urgent = true;
            self.open.waiting.push((token, id, deadline));
        } else if let Some((batch, _)) = &mut self.writing {
            batch.waiting.push((token, id, deadline));
        } else {
            self.add_readiness_waiter(token, id, deadline);
        }
    }

    pub(super) fn add_readiness_waiter(&mut self, token: Token, id: ReservationId, deadline: Ns) {
        self.waiters.entry(id).or_default().push((deadline, token));
        self.waiter_deadlines.insert((deadline, token, id));
        self.waiting.insert(token, (deadline, id));
        self.reply_to_waiters(id);
    }

    /// Replies to callers that wait for a reservation if the reservation is ready or cannot become
    /// ready. Otherwise expedites the next desired state of its host.
    pub(super) fn reply_to_waiters(&mut self, id: ReservationId) {
        if !self.waiters.contains_key(&id) {
            return;
        }
        let answer = match self.durable.reservation(id) {
            None => Err(Rejection::NoSuchReservation(id)),
            Some(reservation) => match &reservation.stage {
                Stage::Broken { why, .. } => Err(wrong_state_rejection(id, format!("broken ({why})"))),
                Stage::Ended { why, .. } => Err(wrong_state_rejection(id, format!("ended ({why})"))),
                Stage::Reserved { .. } | Stage::Committed if self.durable.is_all_online(id, reservation) => {
                    self.durable
                        .view(id)
                        .map(RequestReply::Reservation)
                        .ok_or(Rejection::NoSuchReservation(id))
                }
                Stage::Reserved { .. } | Stage::Committed => return self.expedite_desired_state(id),
            },
        };
        for (deadline, token) in self.waiters.remove(&id).unwrap_or_default() {
            self.waiter_deadlines.remove(&(deadline, token, id));
            self.waiting.remove(&token);
            self.effects.push_back(Effect::Reply(token, Box::new(answer.clone())));
        }
    }

    pub(super) fn remove_waiter(&mut self, token: Token) {
        let batches = std::iter::once(&mut self.open).chain(self.writing.as_mut().map(|(batch, _)| batch));
        batches.for_each(|batch| batch.waiting.retain(|(waiting, ..)| *waiting != token));
        let Some((deadline, id)) = self.waiting.remove(&token) else { return };
        self.waiter_deadlines.remove(&(deadline, token, id));
        if let Some(tokens) = self.waiters.get_mut(&id) {
            tokens.retain(|(_, waiting)| *waiting != token);
            if tokens.is_empty() {
                self.waiters.remove(&id);
            }
        }
    }
}

fn wrong_state_rejection(reservation: ReservationId, state: String) -> Rejection {
    Rejection::WrongState { reservation, state, what: "wait for its slices" }
}

#[cfg(test)]
mod tests {
    use units::{Bytes, EmcId, RequestId, SliceId, UnixMs};

    use super::*;
    use crate::record::{Emc, Meta, Record, RequestKey};
    use crate::slice::{Owner, Slot, State};

    fn emc() -> Emc {
        let name = Name::new("e0").unwrap();
        let (driver, path) = ("emulated".into(), String::new());
        Emc {
            name,
            first: SliceId(0),
            slices: 1,
            driver,
            path,
            scheduling: Scheduling::Enabled,
            serial: None,
        }
    }

    fn reserved() -> Reservation {
        let client = Name::new("c").unwrap();
        Reservation {
            vm: Name::new("v").unwrap(),
            host: HostId(0),
            slices: vec![SliceId(0)],
            local: Bytes::ZERO,
            cores: 0,
            pinned: false,
            request: RequestKey { client, id: RequestId::new("r").unwrap() },
            commit_within: Ns::secs(1),
            created: UnixMs(0),
            stage: Stage::Committed,
            uid: None,
            has_process: false,
            rehome: crate::record::Rehome::None,
        }
    }

    fn broken() -> Reservation {
        let why = "its slice was quarantined".into();
        Reservation { stage: Stage::Broken { why, deadline: None, at: UnixMs::default() }, ..reserved() }
    }

    #[test]
    fn reservation_is_ready_if_all_its_slices_are_online_and_its_vm_may_start() {
        let view = |reservation, online| {
            ReservationView { id: ReservationId(1), host: Name::new("h").unwrap(), online, reservation }
                .is_ready()
        };
        assert!(view(reserved(), 1));
        assert!(!view(reserved(), 0));
        assert!(!view(broken(), 1));
    }

    /// Regression test: an operator uncordoned a slice of a broken reservation. When the slice came
    /// online for another VM, the broken reservation counted the slice as its own and was reported
    /// as ready.
    #[test]
    fn broken_reservation_ignores_slice_online_for_another_vm() {
        let mut ledger = Ledger::new(Meta::new("rack".into()));
        ledger.install(Record::Emc(EmcId(0), emc()));
        let other = Owner { host: HostId(1), reservation: ReservationId(2) };
        let slot = Slot { state: State::Online(other), ..Slot::default() };
        ledger.install(Record::Slice(SliceId(0), slot));
        ledger.install(Record::Reservation(ReservationId(1), broken()));
        let view = ledger.view(ReservationId(1)).unwrap();
        assert_eq!((view.online, view.is_ready()), (0, false));
    }
}
