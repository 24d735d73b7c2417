//! Liveness: without further faults, live reservations become ready, released slices become free,
//! waiting callers get replies, and the store contains the state of the manager.

use std::collections::BTreeSet;

use pool::{
    ledger::{Place, Target},
    record::{Fence, Record, Scheduling, Stage},
    slice::{Scrub, Slot, State},
};
use units::{Ns, SliceId};

use super::{Failure, ScheduledEvent, World, check::has_ended, machine::Machine};

/// Time limit for reservations to become ready, and for slices to become free.
const READY_TIMEOUT: Ns = Ns::secs(60);
const FREE_TIMEOUT: Ns = Ns::secs(120);
/// Time limit for the expiry of old records.
const EXPIRY_TIMEOUT: Ns = Ns::secs(60);
/// Interval between the retries of clients.
const CLIENT_RETRY_INTERVAL: Ns = Ns::ms(500);

impl World {
    /// Runs without further faults until the world is quiescent.
    ///
    /// # Errors
    /// An invariant was violated, or the world did not become quiescent.
    pub fn settle(&mut self) -> Result<(), Box<Failure>> {
        self.stop_all_faults();
        self.run_until_none(READY_TIMEOUT, Self::find_unready_reservation)?;
        self.run_until_none(READY_TIMEOUT, Self::find_wrong_process_record)?;
        self.end_all_processes();
        self.run_until_none(FREE_TIMEOUT, Self::free_everything)?;
        if self.fault_model.suspends_for_days {
            self.suspend_for_a_day();
        }
        self.run_until_none(EXPIRY_TIMEOUT, Self::find_unexpired_reservation)?;
        self.compare_with_disk();
        self.run_log.failure(self.seed, self.steps).map_or(Ok(()), Err)
    }

    fn stop_all_faults(&mut self) {
        self.log(|| "fault injection ends".into());
        self.faults_stopped = true;
        self.manager_process.store.stop_faults();
        self.manager_process.set_disk_full(false);
        self.set_store_low(false);
        self.schedule_after(Ns::ms(1), ScheduledEvent::ManagerStart);
        for device in &mut self.devices {
            device.failed = false;
            device.failing_slices.clear();
        }
        for host in self.hosts() {
            self.kill_agent(host, true); // it reports devices added since it started only after a restart
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

    /// Runs until `find_missing` returns nothing.
    fn run_until_none(
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

    /// Returns a live reservation that is not ready.
    fn find_unready_reservation(&mut self) -> Option<String> {
        if !self.manager_process.is_open() {
            return Some("the manager does not accept connections".into());
        }
        self.release_vms_with_lost_slices();
        let online = |slice: &SliceId| matches!(self.truth.slot(*slice).state, State::Online(_));
        let live = self.truth.reservations().filter(|(_, r)| !has_ended(r));
        let mut live = live.filter(|(_, r)| !matches!(r.stage, Stage::Broken { .. }));
        let (id, reservation) = live.find(|(_, r)| !r.slices.iter().all(online))?;
        let slots: Vec<_> = reservation.slices.iter().map(|s| (*s, self.truth.slot(*s).state)).collect();
        Some(format!("VM {} on {} ({id}) is not ready: {slots:?}", reservation.vm, reservation.host))
    }

    /// Returns a reservation whose record disagrees with its host about whether the VM's process runs.
    fn find_wrong_process_record(&mut self) -> Option<String> {
        let running: BTreeSet<_> = self.machines.iter().flat_map(Machine::running_vms).collect();
        let mut records = self.truth.reservations();
        let (id, reservation) = records.find(|(id, r)| r.has_process != running.contains(id))?;
        let recorded = if reservation.has_process { "a running" } else { "no" };
        Some(format!(
            "{recorded} process of VM {} on {} ({id}) is recorded",
            reservation.vm, reservation.host
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

    /// Returns a slice that is not free although it should be. Clients keep releasing reservations.
    fn free_everything(&mut self) -> Option<String> {
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
        self.quarantined().into_iter().for_each(|slice| self.uncordon_slice(slice));
        for host in self.hosts() {
            let place = Place::Host(self.machine(host).name.clone());
            self.schedule(place, Scheduling::Enabled);
        }
        self.find_unfreed_resource()
    }

    fn find_unfreed_resource(&self) -> Option<String> {
        let unfreed = self.truth.records().find_map(|record| match record {
            Record::Host(id, host) if host.fence != Fence::None || !host.unconfirmed_fences.is_empty() => {
                Some(format!(
                    "{id} is {:?}, fence not confirmed by {:?}",
                    host.fence, host.unconfirmed_fences
                ))
            }
            Record::Reservation(id, r) if !has_ended(r) || r.has_process => Some(format!(
                "VM {} on {} ({id}) is {:?}, has a process: {}",
                r.vm, r.host, r.stage, r.has_process
            )),
            Record::Slice(id, slot) if slot.state != State::Free && self.has_scrubber(*id, *slot) => {
                Some(format!("slice {id} is {slot:?}"))
            }
            _ => None,
        });
        unfreed.or_else(|| {
            (!self.clients.pending.is_empty())
                .then(|| format!("requests without a reply: {:?}", self.clients.pending))
        })
    }

    /// Returns whether a slice can make progress. A slice that waits for a scrubber cannot if no
    /// host is attached to its EMC.
    fn has_scrubber(&self, slice: SliceId, slot: Slot) -> bool {
        let emc = self.truth.emc_of(slice);
        let attached = |record: &Record| matches!(record, Record::Host(_, host) if host.emcs.iter().any(|of| Some(*of) == emc));
        self.truth.records().any(attached) || slot.state != State::Scrubbing(Scrub::Waiting)
    }
}
