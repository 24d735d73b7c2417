//! Liveness: without further faults, active reservations become ready, released slices become free,
//! waiting callers receive replies, and the store contains the state of the manager.

use std::collections::BTreeSet;

use pool::{
    ledger::{SchedulingTarget, Target},
    record::{Fence, Record, Rehome, Scheduling, Stage},
    slice::{Scrub, Slot, State},
};
use units::{Ns, SliceId};

use super::{Failure, ScheduledEvent, World, check::has_ended, machine::Machine};

/// Time limit for all active reservations to become ready.
const READY_TIMEOUT: Ns = Ns::secs(60);
/// Time limit for all slices to become free.
const SLICES_FREE_TIMEOUT: Ns = Ns::secs(120);
/// Time limit for the expiry of old records.
const EXPIRY_TIMEOUT: Ns = Ns::secs(60);
/// Interval between the retries of clients.
const CLIENT_RETRY_INTERVAL: Ns = Ns::ms(500);

impl World {
    /// Runs without further faults until the world is quiescent.
    ///
    /// # Errors
    /// An invariant was violated, or the world did not become quiescent.
    pub fn run_until_quiescent(&mut self) -> Result<(), Box<Failure>> {
        self.stop_all_faults();
        self.run_until_resolved(READY_TIMEOUT, Self::find_unready_reservation)?;
        self.run_until_resolved(READY_TIMEOUT, Self::find_wrong_process_record)?;
        self.run_until_resolved(READY_TIMEOUT, Self::find_unfinished_rehome)?;
        self.end_all_processes();
        self.run_until_resolved(SLICES_FREE_TIMEOUT, Self::release_everything)?;
        if self.fault_model.suspends_for_days {
            self.suspend_for_a_day();
        }
        self.run_until_resolved(EXPIRY_TIMEOUT, Self::find_undeleted_reservation)?;
        self.compare_with_disk();
        self.run_log.failure(self.seed, self.steps).map_or(Ok(()), Err)
    }

    fn stop_all_faults(&mut self) {
        self.log(|| "fault injection ends".into());
        self.faults_stopped = true;
        self.end_former_leaders();
        self.manager_process.store.stop_faults();
        self.manager_process.set_disk_full(false);
        self.set_disk_space_low(false);
        self.schedule_after(Ns::ms(1), ScheduledEvent::ManagerStart);
        for device in &mut self.devices {
            device.failed = false;
            device.failing_slices.clear();
        }
        for host in self.hosts() {
            self.kill_agent(host, true); // only a restarted agent reports devices added while it ran
            let machine = self.machine(host);
            (machine.is_network_down, machine.frozen_until) = (false, Ns::ZERO);
            let boot = machine.boot;
            self.schedule_after(Ns::ms(1), ScheduledEvent::HostBoot(host));
            self.schedule_after(Ns::ms(2), ScheduledEvent::AgentStart(host, boot));
        }
    }

    fn end_all_processes(&mut self) {
        for host in self.hosts() {
            let pids: Vec<_> = self.machine(host).processes.keys().copied().collect();
            pids.into_iter().for_each(|pid| self.end_process(host, pid));
        }
    }

    /// Runs until `find_missing` returns `None`. Reports a violation if it still returns a
    /// description after `within`.
    fn run_until_resolved(
        &mut self,
        within: Ns,
        find_missing: fn(&mut Self) -> Option<String>,
    ) -> Result<(), Box<Failure>> {
        let deadline = self.now.after(within);
        loop {
            let Some(what) = find_missing(self) else { return Ok(()) };
            if self.now >= deadline {
                self.report_violation("the rack becomes quiescent after all faults", what);
            }
            let next_retry = self.now.after(CLIENT_RETRY_INTERVAL);
            while self.queue.first_key_value().is_some_and(|((at, _), _)| *at <= next_retry) {
                self.step()?;
            }
            self.now = next_retry;
            self.run_log.failure(self.seed, self.steps).map_or(Ok(()), Err)?;
        }
    }

    /// Returns a description of an active reservation that is not ready, if any.
    fn find_unready_reservation(&mut self) -> Option<String> {
        if !self.manager_process.is_open() {
            return Some("the manager does not accept connections".into());
        }
        self.release_vms_with_lost_slices();
        let online = |slice: &SliceId| matches!(self.truth.slot(*slice).state, State::Online(_));
        let active = self.truth.reservations().filter(|(_, r)| !has_ended(r));
        let mut active = active.filter(|(_, r)| !matches!(r.stage, Stage::Broken { .. }));
        let (id, reservation) = active.find(|(_, r)| !r.slices.iter().all(online))?;
        let slots: Vec<_> = reservation.slices.iter().map(|s| (*s, self.truth.slot(*s).state)).collect();
        Some(format!(
            "VM {} on {} (reservation {id}) is not ready: {slots:?}",
            reservation.vm, reservation.host
        ))
    }

    /// Returns a description of a reservation, if any, whose record and host disagree about whether
    /// the process of its VM runs.
    fn find_wrong_process_record(&mut self) -> Option<String> {
        let running: BTreeSet<_> = self.machines.iter().flat_map(Machine::running_vms).collect();
        let mut records = self.truth.reservations();
        let (id, reservation) = records.find(|(id, r)| r.has_process != running.contains(id))?;
        Some(format!(
            "VM {} on {} (reservation {id}): process runs: {}, recorded as running: {}",
            reservation.vm,
            reservation.host,
            running.contains(&id),
            reservation.has_process
        ))
    }

    /// Returns a description of a running VM, if any, whose move to local memory is in progress, or has
    /// ended but is not recorded.
    fn find_unfinished_rehome(&mut self) -> Option<String> {
        let running: BTreeSet<_> = self.machines.iter().flat_map(Machine::running_vms).collect();
        let running = self.truth.reservations().filter(|(id, _)| running.contains(id));
        let mut unfinished = running.filter(|(id, reservation)| {
            let has_pool_memory = !self.truth.rehomed.contains(id);
            matches!(reservation.rehome, Rehome::Moving { .. } | Rehome::Cancelling { .. })
                || (!has_pool_memory && !reservation.slices.is_empty())
        });
        let (id, reservation) = unfinished.next()?;
        let moved = self.truth.rehomed.contains(&id);
        Some(format!(
            "reservation {id}: the process has moved its memory: {moved}, recorded: {reservation:?}"
        ))
    }

    /// Releases VMs with slices on a device that lost its record, as the alarm EMC_FAILED requests.
    fn release_vms_with_lost_slices(&mut self) {
        let lost: BTreeSet<_> = self.truth.slices_missing_from(&self.devices).map(|(_, id)| id).collect();
        for id in lost {
            if let Some(vm) = self.truth.reservation(id).filter(|r| !has_ended(r)).map(|r| r.vm.clone()) {
                self.release(vm, Target::Reservation(id), false);
            }
        }
    }

    /// Releases all reservations, and uncordons all slices and hosts. Returns a description of a
    /// resource that is not free yet, if any.
    fn release_everything(&mut self) -> Option<String> {
        self.attach_all_emcs();
        let active: Vec<_> = self
            .truth
            .reservations()
            .filter(|(_, r)| !has_ended(r))
            .map(|(id, r)| (id, r.vm.clone()))
            .collect();
        for (id, vm) in active {
            self.release(vm, Target::Reservation(id), false);
        }
        self.slices_to_uncordon().into_iter().for_each(|slice| self.uncordon_slice(slice));
        for host in self.hosts() {
            let place = SchedulingTarget::Host(self.machine(host).name.clone());
            self.set_scheduling(place, Scheduling::Enabled);
        }
        self.find_unfreed_resource()
    }

    fn find_unfreed_resource(&self) -> Option<String> {
        let unfreed = self.truth.records().find_map(|record| match record {
            Record::Host(id, host) if host.fence != Fence::None || !host.unconfirmed_fences.is_empty() => {
                Some(format!(
                    "fence of {id} is {:?}, not confirmed by {:?}",
                    host.fence, host.unconfirmed_fences
                ))
            }
            Record::Reservation(id, r) if !has_ended(r) || r.has_process => Some(format!(
                "VM {} on {} (reservation {id}) is {:?}, has a process: {}",
                r.vm, r.host, r.stage, r.has_process
            )),
            Record::Slice(id, slot) if slot.state != State::Free && self.can_become_free(*id, *slot) => {
                Some(format!("slice {id} is {slot:?}"))
            }
            _ => None,
        });
        unfreed.or_else(|| {
            (!self.clients.pending.is_empty())
                .then(|| format!("requests without a reply: {:?}", self.clients.pending))
        })
    }

    /// Returns whether a slice can become free. A slice that waits for a scrub cannot if no host is
    /// attached to its EMC.
    fn can_become_free(&self, slice: SliceId, slot: Slot) -> bool {
        let emc = self.truth.emc_of(slice);
        let attached = |record: &Record| matches!(record, Record::Host(_, host) if host.emcs.iter().any(|of| Some(*of) == emc));
        self.truth.records().any(attached) || slot.state != State::Scrubbing(Scrub::Waiting)
    }
}
