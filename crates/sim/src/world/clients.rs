//! Client workload. Schedulers, launchers and operators send, repeat, alter and cancel requests,
//! and check the replies.

use std::collections::BTreeMap;

use pool::{
    audit::Actor,
    ledger::{Reserve, SchedulingTarget, Target},
    manager::{Event, Request, RequestReply, ReservationView, Token},
    record::{Migration, MigrationAnswer, Record, RequestKey, Scheduling, Stage},
    rejection::Rejection,
    slice::{Quarantine, Slot, State},
};
use rand::Rng as _;
use units::{Bytes, HostId, MigrationId, Name, Ns, RequestId, ReservationId, SliceId, UserId};

use super::{
    ScheduledEvent, World,
    check::{AcknowledgedReservation, Justification, holder, memory},
    device::Device,
    fault_model::numbered_name,
};

/// Number of latest tenants that clients still send requests for.
const ACTIVE_TENANTS_MAX: usize = 10;
/// Number of different VM names. It is small so that tenants reuse names.
const VM_NAME_COUNT: usize = 12;

#[derive(Debug, Default)]
pub(super) struct ClientWorkload {
    tenants: Vec<Tenant>,
    pub(super) pending: BTreeMap<Token, PendingRequest>,
    /// Whether the disk of the store has little free space.
    is_disk_space_low: bool,
}

/// Request of a client for the memory of a VM, and the ID of the resulting reservation.
#[derive(Clone, Debug)]
struct Tenant {
    reserve: Reserve,
    host: HostId,
    id: Option<ReservationId>,
}

#[derive(Clone, Debug)]
pub(super) enum PendingRequest {
    Reserve {
        tenant: usize,
        content: Box<Reserve>,
        wait: bool,
        /// Whether the disk of the store had enough space when the request was sent.
        had_space: bool,
    },
    Wait,
    Commit,
    Release,
    Fence {
        /// Whether the host was connected to the manager when the request was sent.
        connected: bool,
    },
    Configure,
    Schedule(SchedulingTarget),
    MigrationAnswer(PendingMigrationAnswer),
    /// Request or withdrawal of a migration because of a slowdown.
    Slowdown,
    Rehome,
}

/// Answer to a migration request, not yet acknowledged by the manager.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PendingMigrationAnswer {
    pub(super) vm: Name,
    pub(super) id: Option<MigrationId>,
    pub(super) answer: MigrationAnswer,
    pub(super) message: String,
    /// Migration request on disk when the answer was sent.
    pub(super) request: Option<(ReservationId, Migration)>,
    /// Whether no other answer for this VM was outstanding when the answer was sent.
    pub(super) is_only_answer: bool,
}

impl World {
    pub(super) fn perform_client_action(&mut self) {
        if self.faults_stopped {
            return;
        }
        let pause = self.random_duration_around(self.fault_model.client_interval);
        self.schedule_after(pause, ScheduledEvent::ClientAction);
        match self.rng.random_range(0..100) {
            0..24 => self.reserve_new_vm(),
            24..32 => self.repeat_reserve(false),
            32..34 => self.repeat_reserve(true),
            34..40 => self.wait_until_ready(),
            40..47 => self.commit_some_reservation(),
            47..59 => self.release_some_vm(),
            59..75 => self.launch_some_vm(),
            75 if self.random_bool(0.3) => self.cancel_some_rehome(),
            75..77 => self.request_some_rehome(),
            77..82 => self.change_some_scheduling(),
            82..86 => self.answer_some_migration(),
            86..88 => self.report_some_slowdown(),
            88..89 if self.fault_model.rack_changes => self.change_rack(),
            88..92 => self.fence_some_host(),
            92..95 => self.uncordon_some_slice(),
            95..96 => self.cancel_some_request(),
            96..97 => self.set_disk_space_low(!self.clients.is_disk_space_low),
            97..99 if self.fault_model.old_backups && self.random_bool(0.8) => self.change_rack(),
            97..99 => self.back_up_store(),
            _ => self.kill_some_process(),
        }
    }

    fn back_up_store(&mut self) {
        self.manager_process.store.backup();
        let devices = self.devices.iter_mut().filter(|_| self.rng.random_bool(0.5));
        devices.for_each(Device::take_snapshot);
    }

    /// Sends a request if the manager accepts requests.
    pub(super) fn send_request(&mut self, request: Request, pending: PendingRequest) {
        self.send_justified_request(request, pending, None);
    }

    /// Sends a request if the manager accepts requests. Records the justification of an action that
    /// the checks would otherwise report as a violation.
    pub(super) fn send_justified_request(
        &mut self,
        request: Request,
        pending: PendingRequest,
        justification: Option<Justification>,
    ) {
        let Some(request) = self.send_to_former_leader(request) else { return };
        if self.manager_process.is_open() {
            let token = self.manager_process.next_token();
            self.log(|| format!("request {}: {}", token.0, describe_request(&request)));
            self.clients.pending.insert(token, pending);
            if let Some(justification) = justification {
                self.truth.add_justification(token, justification);
            }
            self.handle_manager_event(Event::Request(token, request));
        }
    }

    fn reserve_new_vm(&mut self) {
        let number = self.clients.tenants.len();
        let Some(host) = self.pick_random(&self.hosts()) else { return };
        let client = numbered_name("c", self.rng.random_range(0..3));
        let id = RequestId::new(&format!("r{number}")).expect("a letter with a number is a valid request id");
        let reserve = Reserve {
            request: RequestKey { client, id },
            host: self.machine(host).name.clone(),
            vm: numbered_name("v", self.rng.random_range(0..VM_NAME_COUNT)),
            slices: self.rng.random_range(1..=3),
            local: Bytes::gib(1),
            cores: 1,
            pinned: false,
            commit_within: Ns::ms(self.rng.random_range(200..5000)),
            uid: (number % 2 == 1).then(|| user_id_of(number)),
        };
        self.clients.tenants.push(Tenant { reserve, host, id: None });
        self.send_reserve(number, false);
    }

    fn pick_tenant(&mut self) -> Option<usize> {
        let count = self.clients.tenants.len();
        (count > 0).then(|| self.rng.random_range(count.saturating_sub(ACTIVE_TENANTS_MAX)..count))
    }

    /// Returns the VM of a random tenant among the latest.
    pub(super) fn pick_vm(&mut self) -> Option<Name> {
        self.pick_tenant().map(|tenant| self.clients.tenants[tenant].reserve.vm.clone())
    }

    fn repeat_reserve(&mut self, altered: bool) {
        if let Some(tenant) = self.pick_tenant() {
            self.send_reserve(tenant, altered);
        }
    }

    fn send_reserve(&mut self, tenant: usize, altered: bool) {
        let mut content = self.clients.tenants[tenant].reserve.clone();
        content.slices += u32::from(altered);
        let wait = self.random_bool(0.3).then(|| Ns::ms(500));
        let (had_space, boxed) = (!self.clients.is_disk_space_low, Box::new(content.clone()));
        if had_space && self.manager_process.is_open() {
            self.truth.requested_with_space.insert(content.request.clone());
        }
        let pending = PendingRequest::Reserve { tenant, content: boxed, wait: wait.is_some(), had_space };
        self.send_request(Request::Reserve { reserve: content, wait }, pending);
    }

    fn pick_target(&mut self) -> Option<(usize, Target)> {
        let tenant = self.pick_tenant()?;
        let Tenant { reserve, id, .. } = &self.clients.tenants[tenant];
        let (vm, id) = (Target::Vm(reserve.vm.clone()), id.map(Target::Reservation));
        let by_id = self.random_bool(0.7);
        Some((tenant, id.filter(|_| by_id).unwrap_or(vm)))
    }

    fn wait_until_ready(&mut self) {
        if let Some((_, target)) = self.pick_target() {
            let within = self.random_between(Ns::ZERO, Ns::secs(3));
            self.send_request(Request::WaitReady { target, within }, PendingRequest::Wait);
        }
    }

    fn commit_some_reservation(&mut self) {
        if let Some((_, target)) = self.pick_target() {
            self.send_request(Request::Commit { target, actor: Actor::Manager }, PendingRequest::Commit);
        }
    }

    fn release_some_vm(&mut self) {
        if let Some((tenant, target)) = self.pick_target() {
            let force = self.random_bool(0.25);
            let vm = self.clients.tenants[tenant].reserve.vm.clone();
            self.release(vm, target, force);
        }
    }

    pub(super) fn release(&mut self, vm: Name, target: Target, force: bool) {
        let reason = if force { "by force".into() } else { String::new() };
        let request = Request::Release { target, force, reason, actor: Actor::Manager };
        self.send_justified_request(
            request,
            PendingRequest::Release,
            force.then_some(Justification::Force(vm)),
        );
    }

    fn launch_some_vm(&mut self) {
        let Some(tenant) = self.pick_tenant() else { return };
        let Tenant { reserve, host, .. } = self.clients.tenants[tenant].clone();
        let on_other_host = self.random_bool(0.05);
        let host = if on_other_host { self.pick_random(&self.hosts()).unwrap_or(host) } else { host };
        self.launch_vm(host, &reserve.vm);
    }

    fn change_some_scheduling(&mut self) {
        let hosts = self.rack.spec().hosts.iter().map(|host| SchedulingTarget::Host(host.name.clone()));
        let emcs = self.rack.spec().emcs.iter().map(|emc| SchedulingTarget::Emc(emc.name.clone()));
        let places: Vec<SchedulingTarget> = hosts.chain(emcs).collect();
        let to = [Scheduling::Enabled, Scheduling::Enabled, Scheduling::Cordoned, Scheduling::Draining];
        let (place, to) = (self.pick_random(&places), self.pick_random(&to));
        if let Some((place, to)) = place.zip(to) {
            self.set_scheduling(place, to);
        }
    }

    pub(super) fn set_scheduling(&mut self, place: SchedulingTarget, to: Scheduling) {
        let justification = match place {
            SchedulingTarget::Slice(slice) => Some(Justification::Uncordon(slice)),
            SchedulingTarget::Host(_) | SchedulingTarget::Emc(_) => None,
        };
        let pending = PendingRequest::Schedule(place.clone());
        let request = Request::Schedule { place, to, actor: Actor::Manager, reason: "maintenance".into() };
        self.send_justified_request(request, pending, justification);
    }

    /// Requests the fence of a random host. The operator confirms a power-off only if the machine
    /// is off.
    fn fence_some_host(&mut self) {
        let Some(host) = self.pick_random(&self.hosts()) else { return };
        let off = !self.machine(host).is_up;
        let name = self.machine(host).name.clone();
        let justification = Justification::Fence(name.clone());
        let request =
            Request::Fence { host: name, powered_off: off, actor: Actor::Manager, reason: "lost".into() };
        let connected = self.is_connected(host);
        self.send_justified_request(request, PendingRequest::Fence { connected }, Some(justification));
    }

    /// Uncordons a random quarantined slice, in the role of an operator.
    pub(super) fn uncordon_some_slice(&mut self) {
        let slices = self.slices_to_uncordon();
        if let Some(slice) = self.pick_random(&slices) {
            self.uncordon_slice(slice);
        }
    }

    /// Returns the quarantined slices that an operator must uncordon.
    pub(super) fn slices_to_uncordon(&self) -> Vec<SliceId> {
        // The manager releases slices from quarantine after a restore, except slices of hosts that
        // the backup lacks.
        let returns_by_itself =
            |slot: &Slot, why| matches!(why, Quarantine::Restored { .. }) && self.is_holder_in_rack(slot);
        let quarantined = |record: &Record| match record {
            Record::Slice(slice, slot) => match slot.state {
                State::Quarantined(why) => (!returns_by_itself(slot, why)).then_some(*slice),
                _ => None,
            },
            _ => None,
        };
        self.truth.records().filter_map(quarantined).collect()
    }

    fn is_holder_in_rack(&self, slot: &Slot) -> bool {
        holder(slot).is_none_or(|host| self.truth.has_host(host))
    }

    /// Uncordons a slice, even while a process uses the slice. The manager must then reject the
    /// request or leave the slice to the process. A holder that is not in the rack is powered off
    /// first.
    pub(super) fn uncordon_slice(&mut self, slice: SliceId) {
        let slot = self.truth.slot(slice);
        if let Some(outsider) = holder(&slot).filter(|_| !self.is_holder_in_rack(&slot)) {
            self.power_off(outsider);
        }
        self.set_scheduling(SchedulingTarget::Slice(slice), Scheduling::Enabled);
    }

    fn cancel_some_request(&mut self) {
        let cancels = |pending: &PendingRequest| !matches!(pending, PendingRequest::MigrationAnswer(_));
        let waiting =
            self.clients.pending.iter().filter(|(_, pending)| cancels(pending)).map(|(token, _)| *token);
        let waiting: Vec<Token> = waiting.collect();
        if let Some(token) = self.pick_random(&waiting) {
            self.clients.pending.remove(&token);
            self.handle_manager_event(Event::CallerGone(token));
        }
    }

    /// Sets whether the free space on the disk of the store is below the limit for new
    /// reservations.
    pub(super) fn set_disk_space_low(&mut self, low: bool) {
        self.clients.is_disk_space_low = low;
        self.report_store_space();
    }

    /// Reports to the manager whether the disk of the store has little free space.
    pub(super) fn report_store_space(&mut self) {
        let low = self.clients.is_disk_space_low;
        self.handle_manager_event(Event::StoreSpace { low });
    }

    fn kill_some_process(&mut self) {
        let Some(host) = self.pick_random(&self.hosts()) else { return };
        let pids: Vec<_> = self.machine(host).processes.keys().copied().collect();
        if let Some(pid) = self.pick_random(&pids) {
            self.end_process(host, pid);
        }
    }

    /// Drops all outstanding requests after a crash of the manager.
    pub(super) fn drop_pending_requests(&mut self) {
        self.clients.pending.clear();
        self.truth.mark_outcomes_unknown();
    }

    pub(super) fn handle_reply(&mut self, token: Token, answer: Result<RequestReply, Rejection>) {
        if self.manager_process.is_former_acting() {
            return; // the lease is checked before each reply
        }
        self.truth.record_justification_reply(token, &answer);
        if self.manager_process.running.as_ref().is_some_and(|running| running.start_request == Some(token)) {
            return self.handle_start_reply(&answer);
        }
        let Some(pending) = self.clients.pending.remove(&token) else { return };
        self.log(|| format!("reply {}: {}", token.0, describe_reply(&answer)));
        self.check_store_full_rejection(&pending, &answer);
        match (pending, answer) {
            (PendingRequest::Configure, answer) => self.handle_rack_reply(&answer),
            (PendingRequest::Reserve { tenant, content, wait, .. }, Ok(RequestReply::Reservation(view))) => {
                self.check_reserve_reply(tenant, &content, &view);
                if wait {
                    self.check_ready_reply(&view);
                }
            }
            (PendingRequest::Reserve { content, wait, .. }, Err(rejection)) => {
                self.check_rejected_repeat(&content, wait, &rejection);
            }
            (PendingRequest::Wait, Ok(RequestReply::Reservation(view))) => self.check_ready_reply(&view),
            (PendingRequest::Commit, Ok(RequestReply::Reservation(view))) => {
                self.check_reservation_stage(&view, false)
            }
            (PendingRequest::Release, Ok(RequestReply::Reservation(view))) => {
                self.run_log.counts.low_space_releases += u64::from(self.clients.is_disk_space_low);
                self.check_reservation_stage(&view, true);
            }
            (PendingRequest::Schedule(SchedulingTarget::Host(_)), Ok(_)) => {
                self.run_log.counts.hosts_scheduled += 1
            }
            (PendingRequest::Schedule(SchedulingTarget::Emc(_)), Ok(_)) => {
                self.run_log.counts.emcs_scheduled += 1
            }
            (PendingRequest::MigrationAnswer(pending), answer) => {
                self.handle_migration_reply(&pending, &answer)
            }
            (PendingRequest::Fence { connected: true }, Ok(_)) => {
                self.report_violation(
                    "a connected host is not fenced",
                    "a host with a session to the manager is fenced".into(),
                );
            }
            _ => {}
        }
    }

    /// Checks that lack of disk space causes the rejection of reserve requests only, and only while
    /// disk space is low.
    fn check_store_full_rejection(
        &mut self,
        pending: &PendingRequest,
        answer: &Result<RequestReply, Rejection>,
    ) {
        if matches!(answer, Err(Rejection::StoreFull))
            && !matches!(pending, PendingRequest::Reserve { had_space: false, .. })
        {
            self.report_violation(
                "a full disk blocks only new reservations",
                format!("{pending:?} is rejected for lack of disk space"),
            );
        }
    }

    /// Processes the reply to the rack.toml of a starting manager. The manager accepts connections
    /// after its rack.toml is durable. If the file is rejected, the manager exits and restarts.
    fn handle_start_reply(&mut self, answer: &Result<RequestReply, Rejection>) {
        let Some(running) = &mut self.manager_process.running else { return };
        running.start_request = None;
        running.is_open = answer.is_ok();
        self.handle_rack_reply(answer);
        if answer.is_err() {
            self.kill_manager();
            self.schedule_after(Ns::ms(10), ScheduledEvent::ManagerStart);
        }
    }

    /// Checks that a reply matches its request, is durable, and equals earlier replies to the same
    /// request.
    fn check_reserve_reply(&mut self, tenant: usize, content: &Reserve, view: &ReservationView) {
        let reservation = &view.reservation;
        let requested = (&content.vm, content.slices as usize, &content.request, content.uid);
        let slices = memory(reservation).0;
        let on_host = view.host == content.host || !self.truth.has_host(reservation.host);
        if !on_host || requested != (&reservation.vm, slices.len(), &reservation.request, reservation.uid) {
            self.report_violation(
                "a reply matches its request",
                format!("request {content:?} receives reply {view:?}"),
            );
        }
        if self.truth.reservation(view.id) != Some(reservation) {
            self.report_violation(
                "a change is durable before it is acknowledged",
                format!("{view:?} is not on disk"),
            );
        }
        let new =
            AcknowledgedReservation { id: view.id, slices: slices.to_vec(), committed: false, ended: false };
        let earlier = self.truth.acknowledged.get(&content.request).cloned();
        if let Some(earlier) = earlier.as_ref().filter(|k| (k.id, &k.slices) != (new.id, &new.slices)) {
            self.report_violation(
                "a repeated request returns the same reply",
                format!("the first reply is {earlier:?}, a later reply is {new:?}"),
            );
        }
        if earlier.is_none() {
            self.run_log.counts.reserved += 1;
            self.truth.acknowledged.insert(content.request.clone(), new);
        }
        self.clients.tenants[tenant].id = Some(view.id);
        self.clients.tenants[tenant].reserve = content.clone();
    }

    fn check_rejected_repeat(&mut self, content: &Reserve, wait: bool, rejection: &Rejection) {
        let Some(acked) = self.truth.acknowledged.get(&content.request).cloned() else { return };
        let altered = acked.slices.len() != content.slices as usize;
        let allowed = match rejection {
            Rejection::StoreFailed | Rejection::Starting(_) => true,
            Rejection::RequestReused { .. } => altered,
            Rejection::NotReadyBeforeTimeout { .. }
            | Rejection::WrongState { .. }
            | Rejection::LimitExceeded { .. } => wait && !altered,
            _ => false,
        };
        if !allowed {
            self.report_violation(
                "a repeated request returns the same reply",
                format!("{acked:?} was acknowledged, but a repeat is rejected: {rejection:?}"),
            );
        }
    }

    /// Checks that every slice of a reservation acknowledged as ready is online.
    fn check_ready_reply(&mut self, view: &ReservationView) {
        let online = |slice: &SliceId| matches!(self.truth.slot(*slice).state, State::Online(owner) if owner.reservation == view.id);
        let ready = view.reservation.slices.iter().all(online);
        if !ready || !view.reservation.is_active() {
            self.report_violation(
                "a change is durable before it is acknowledged",
                format!("{view:?} is acknowledged as ready but has a slice that is not online"),
            );
        }
    }

    fn check_reservation_stage(&mut self, view: &ReservationView, release: bool) {
        let ended = matches!(view.reservation.stage, Stage::Ended { .. });
        if self.truth.reservation(view.id) != Some(&view.reservation) || (release && !ended) {
            self.report_violation(
                "a change is durable before it is acknowledged",
                format!("{view:?} is not on disk"),
            );
        }
        for acked in self.truth.acknowledged.values_mut().filter(|acked| acked.id == view.id) {
            acked.committed = true;
            acked.ended |= ended;
        }
    }
}

fn describe_request(request: &Request) -> String {
    match request {
        Request::Reserve { reserve, wait } => format!(
            "reserve {} of {} on {} as {} wait={}",
            reserve.slices,
            reserve.vm,
            reserve.host,
            reserve.request.id.as_str(),
            wait.is_some()
        ),
        other => format!("{other:?}"),
    }
}

/// Returns the user id under which the VMs of a tenant run.
fn user_id_of(tenant: usize) -> UserId {
    u32::try_from(tenant)
        .ok()
        .and_then(|number| UserId::new(number).ok())
        .expect("the number of tenants is a valid user id")
}

fn describe_reply(answer: &Result<RequestReply, Rejection>) -> String {
    match answer {
        Ok(RequestReply::Reservation(view)) => {
            format!("{} {:?} {:?}", view.id, view.reservation.stage, view.reservation.slices)
        }
        Ok(other) => format!("{other:?}"),
        Err(rejection) => format!("rejected: {rejection}"),
    }
}
