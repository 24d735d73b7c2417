//! Moves of pool memory to local memory. A process moves its memory on its own after the agent has
//! started the move, even if the agent crashes. The agent polls the process.

use pool::{agent::Event, audit::Actor, ledger::Target, manager::Request, record::Reservation};
use units::{HostId, Ns, ReservationId};

use super::{
    ScheduledEvent, World,
    check::Justification,
    clients::PendingRequest,
    machine::{Guest, GuestRehome, HostCall, Pid},
};

/// Interval at which an agent polls a process.
const POLL_INTERVAL: Ns = Ns::ms(5);

impl World {
    /// Requests the move of a VM's pool memory to local memory. In 15 % of cases, the VM may have ended,
    /// not run or have no pool memory.
    pub(super) fn request_some_rehome(&mut self) {
        let is_running = self.random_bool(0.85);
        let is_candidate = |reservation: &Reservation| {
            !is_running || (reservation.has_process && !reservation.slices.is_empty())
        };
        let candidates = self.truth.reservations().filter(|(_, reservation)| is_candidate(reservation));
        let ids: Vec<ReservationId> = candidates.map(|(id, _)| id).collect();
        let Some(id) = self.pick_random(&ids) else { return };
        let is_automatic = self.random_bool(0.3);
        let request =
            Request::Rehome { target: Target::Reservation(id), actor: Actor::Manager, is_automatic };
        self.send_justified_request(request, PendingRequest::Rehome, Some(Justification::Rehome(id)));
    }

    /// Cancels the move of a VM's pool memory. In 15 % of cases, there may be no move in progress.
    pub(super) fn cancel_some_rehome(&mut self) {
        let requires_move = self.random_bool(0.85);
        let is_candidate =
            |reservation: &Reservation| !requires_move || reservation.rehome.attempt_in_progress().is_some();
        let candidates = self.truth.reservations().filter(|(_, reservation)| is_candidate(reservation));
        let ids: Vec<ReservationId> = candidates.map(|(id, _)| id).collect();
        let Some(id) = self.pick_random(&ids) else { return };
        let request = Request::CancelRehome { target: Target::Reservation(id), actor: Actor::Manager };
        self.send_justified_request(request, PendingRequest::Rehome, Some(Justification::CancelRehome(id)));
    }

    fn rehoming_guest(&mut self, host: HostId, instance: u64, id: ReservationId) -> Option<&mut Guest> {
        let process = self.machine(host).find_agent(instance)?.watched.get(&id)?.clone();
        let guest = self.machine(host).processes.get_mut(&process.pid)?;
        guest.process.is(&process).then_some(guest)
    }

    pub(super) fn start_rehome(&mut self, host: HostId, instance: u64, id: ReservationId) {
        if let Some(guest) = self.rehoming_guest(host, instance, id)
            && matches!(guest.rehome, GuestRehome::None | GuestRehome::Failed)
        {
            guest.rehome = GuestRehome::Copying;
            let pid = guest.process.pid;
            let boot = self.machine(host).boot;
            self.log(|| format!("process {pid} of {id} on {host} moves its memory"));
            let span = self.random_between(Ns::ms(1), Ns::ms(80));
            self.schedule_after(span, ScheduledEvent::RehomeCopied(host, boot, pid));
        }
        self.start_poll(host, instance, id);
    }

    pub(super) fn cancel_rehome(&mut self, host: HostId, instance: u64, id: ReservationId) {
        if let Some(guest) = self.rehoming_guest(host, instance, id)
            && guest.rehome == GuestRehome::Copying
        {
            guest.rehome = GuestRehome::Failed;
        }
        let is_polled =
            self.machine(host).find_agent(instance).is_some_and(|agent| agent.rehomes.contains(&id));
        if !is_polled {
            self.start_poll(host, instance, id);
        }
    }

    fn start_poll(&mut self, host: HostId, instance: u64, id: ReservationId) {
        if let Some(agent) = self.machine(host).find_agent(instance) {
            agent.rehomes.insert(id);
            self.schedule_host_call(host, instance, POLL_INTERVAL, HostCall::PollRehome(id));
        }
    }

    pub(super) fn poll_rehome(&mut self, host: HostId, instance: u64, id: ReservationId) {
        let state = self.rehoming_guest(host, instance, id).map(|guest| guest.rehome);
        let result = match state {
            Some(GuestRehome::Copying) => return self.start_poll(host, instance, id),
            Some(GuestRehome::Done) => Ok(()),
            Some(GuestRehome::None | GuestRehome::Failed) => Err("not moved".to_owned()),
            None => Err("the process has ended".to_owned()),
        };
        if let Some(agent) = self.machine(host).find_agent(instance) {
            agent.rehomes.remove(&id);
        }
        self.handle_agent_event(host, instance, Event::RehomeEnded { reservation: id, result });
    }

    /// A process has copied its memory. In 70 % of cases, it then uses only local memory.
    pub(super) fn complete_rehome(&mut self, host: HostId, boot: u64, pid: Pid) {
        let succeeds = self.faults_stopped || self.random_bool(0.7);
        if self.machine(host).boot != boot {
            return;
        }
        let Some(guest) = self.machine(host).processes.get_mut(&pid) else { return };
        if guest.rehome != GuestRehome::Copying {
            return;
        }
        if !succeeds {
            guest.rehome = GuestRehome::Failed;
            return;
        }
        guest.rehome = GuestRehome::Done;
        let reservations = std::mem::take(&mut guest.mapped).into_values();
        self.truth.rehomed.extend(reservations);
        self.run_log.counts.rehomed += 1;
        self.log(|| format!("process {pid} on {host} uses only local memory"));
    }
}
