//! Liveness: without further faults, live reservations become ready, released slices become free,
//! waiting callers get replies, and the store contains the state of the manager.

use std::collections::BTreeSet;

use pool::{
    ledger::{Place, Target},
    record::{Fence, Record, Scheduling, Stage},
    slice::{Scrub, Slot, State},
};
use units::{Ns, SliceId};

use super::{Failure, Happening, World, check::has_ended};

/// Time limit for reservations to become ready, and for slices to become free.
const READY_WITHIN: Ns = Ns::secs(60);
const FREE_WITHIN: Ns = Ns::secs(120);
/// Time limit for the expiry of old records.
const FORGOTTEN_WITHIN: Ns = Ns::secs(60);
/// Interval between the retries of clients.
const LOOK_EVERY: Ns = Ns::ms(500);

impl World {
    /// Runs without further faults until the world is quiescent.
    ///
    /// # Errors
    /// An invariant was violated, or the world did not become quiescent.
    pub fn settle(&mut self) -> Result<(), Box<Failure>> {
        self.end_all_trouble();
        self.live_until(READY_WITHIN, Self::not_ready)?;
        self.end_all_guests();
        self.live_until(FREE_WITHIN, Self::not_free)?;
        if self.weather.days_pass {
            self.pass_a_day();
        }
        self.live_until(FORGOTTEN_WITHIN, Self::not_forgotten)?;
        self.compare_with_disk();
        self.story.failure(self.seed, self.steps).map_or(Ok(()), Err)
    }

    fn end_all_trouble(&mut self) {
        self.say(|| "all trouble is over".into());
        self.calm = true;
        self.program.store.calm();
        self.program.set_disk_full(false);
        self.set_store_low(false);
        self.after(Ns::ms(1), Happening::ManagerStarts);
        for device in &mut self.devices {
            device.failed = false;
            device.bad.clear();
        }
        for host in self.hosts() {
            self.kill_agent(host, true); // it reports devices added since it started only after a restart
            let machine = self.machine(host);
            (machine.is_cut_off, machine.frozen_until) = (false, Ns::ZERO);
            let boot = machine.boot;
            self.after(Ns::ms(1), Happening::Boots(host));
            self.after(Ns::ms(2), Happening::AgentStarts(host, boot));
        }
    }

    fn end_all_guests(&mut self) {
        for host in self.hosts() {
            let pids: Vec<_> = self.machine(host).processes.keys().copied().collect();
            pids.into_iter().for_each(|pid| self.end_process(host, pid));
        }
    }

    /// Runs until `missing` returns nothing.
    fn live_until(
        &mut self,
        within: Ns,
        missing: fn(&mut Self) -> Option<String>,
    ) -> Result<(), Box<Failure>> {
        let deadline = self.now.after(within);
        loop {
            let Some(what) = missing(self) else { return Ok(()) };
            if self.now >= deadline {
                self.blame("everything comes to rest", what);
            }
            let look = self.now.after(LOOK_EVERY);
            while self.queue.first_key_value().is_some_and(|((at, _), _)| *at <= look) {
                self.step()?;
            }
            self.now = look;
            self.story.failure(self.seed, self.steps).map_or(Ok(()), Err)?;
        }
    }

    /// Returns a live reservation that is not ready.
    fn not_ready(&mut self) -> Option<String> {
        if !self.program.is_open() {
            return Some("the manager does not start".into());
        }
        self.release_lost_vms();
        let online = |slice: &SliceId| matches!(self.truth.slot(*slice).state, State::Online(_));
        let live = self.truth.reservations().filter(|(_, r)| !has_ended(r));
        let mut live = live.filter(|(_, r)| !matches!(r.stage, Stage::Broken { .. }));
        let (id, reservation) = live.find(|(_, r)| !r.slices.iter().all(online))?;
        let slots: Vec<_> = reservation.slices.iter().map(|s| (*s, self.truth.slot(*s).state)).collect();
        Some(format!("{id} is not ready: {slots:?}"))
    }

    /// Releases VMs with slices on a device that lost its record, as the alarm EMC_FAILED requests.
    fn release_lost_vms(&mut self) {
        let lost: BTreeSet<_> = self.truth.slices_unknown_to(&self.devices).map(|(_, id)| id).collect();
        for id in lost {
            if let Some(vm) = self.truth.reservation(id).filter(|r| !has_ended(r)).map(|r| r.vm.clone()) {
                self.release(vm, Target::Reservation(id), false);
            }
        }
    }

    /// Returns a slice that is not free although it should be. Clients keep releasing reservations.
    fn not_free(&mut self) -> Option<String> {
        self.wire_everything();
        let active: Vec<_> = self
            .truth
            .reservations()
            .filter(|(_, r)| !has_ended(r))
            .map(|(id, r)| (id, r.vm.clone()))
            .collect();
        for (id, vm) in active {
            self.release(vm, Target::Reservation(id), false);
        }
        self.quarantined().into_iter().for_each(|slice| self.let_back(slice));
        for host in self.hosts() {
            let place = Place::Host(self.machine(host).name.clone());
            self.schedule(place, Scheduling::Enabled);
        }
        self.first_not_free()
    }

    fn first_not_free(&self) -> Option<String> {
        let fenced = self.truth.records().find_map(|record| match record {
            Record::Host(id, host) if host.fence != Fence::None || !host.unconfirmed_fences.is_empty() => {
                Some(format!("{id} is {:?}, not cut off by {:?}", host.fence, host.unconfirmed_fences))
            }
            Record::Reservation(id, r) if !has_ended(r) => Some(format!("{id} is {:?}", r.stage)),
            Record::Slice(id, slot) if slot.state != State::Free && self.has_scrubber(*id, *slot) => {
                Some(format!("slice {id} is {slot:?}"))
            }
            _ => None,
        });
        fenced.or_else(|| {
            (!self.people.asked.is_empty()).then(|| format!("unanswered: {:?}", self.people.asked))
        })
    }

    /// Returns whether a slice can make progress. A slice that waits for a scrubber cannot if no host is
    /// attached to its EMC.
    fn has_scrubber(&self, slice: SliceId, slot: Slot) -> bool {
        let emc = self.truth.emc_of(slice);
        let wired = |record: &Record| matches!(record, Record::Host(_, host) if host.emcs.iter().any(|of| Some(*of) == emc));
        self.truth.records().any(wired) || slot.state != State::Scrubbing(Scrub::Waiting)
    }
}
