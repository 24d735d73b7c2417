//! Desired states: computed for each host from the records on disk and the confirmed grants, and compared
//! with the sum of the messages sent.

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    manager::{DeviceDone, EmcState},
    protocol::{Handle, Have, Holding, NoMore, Want, WantRelease, WantVm},
    record::{Fence, Host, Key, Record, Reservation, Stage},
    slice::{Drain, Scrub, State},
};
use units::{DesiredVersion, EmcId, Epoch, HostId, InstanceId, ReservationId, SliceId};

use super::Truth;
use crate::world::World;

/// Handles of grants, as returned by devices to the running manager.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// The manager has loaded its store, and no write has failed since.
    loaded: bool,
    grants: BTreeMap<SliceId, (Epoch, Handle)>,
    places: BTreeMap<SliceId, Handle>,
    /// Handles from a comparison of contents, used from the next durable write on.
    found_grants: Vec<(SliceId, (Epoch, Handle))>,
    found_places: Vec<(SliceId, Handle)>,
    /// Contents that the manager has not accepted: it compares them in pieces, whose handles it uses from
    /// the next durable write on.
    undecided: BTreeMap<EmcId, DeviceDone>,
    /// Complete scrubs reported since the store was loaded.
    ended_scrubs: BTreeSet<(HostId, Holding)>,
}

/// Desired states of one session up to the latest.
pub(in crate::world) struct Orders {
    pub(in crate::world) host: HostId,
    pub(in crate::world) instance: InstanceId,
    /// Boot id that the agent sent.
    pub(in crate::world) boot_id: String,
    /// Scrubs that the latest message contains for the first time.
    pub(in crate::world) first_scrubs: Vec<Holding>,
    /// Sum of the messages.
    pub(in crate::world) sum: Want,
}

impl Named {
    /// Resets the state after a load of the store.
    pub(super) fn load(&mut self) {
        self.loaded = true;
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.loaded
    }

    fn answered(&mut self, done: &DeviceDone) {
        match done {
            _ if !self.loaded => {}
            DeviceDone::Granted { slice, epoch, handle } => {
                self.grants.insert(*slice, (*epoch, handle.clone()));
            }
            DeviceDone::Revoked { slice, .. } => drop(self.grants.remove(slice)),
            DeviceDone::Contents(contents) => {
                let grants = contents.grants.iter().map(|g| (g.slice, (g.epoch, g.handle.clone())));
                self.found_grants.extend(grants);
                self.found_places.extend(contents.places.iter().cloned());
            }
            DeviceDone::Fenced { .. } | DeviceDone::Failed { .. } => {}
        }
    }

    fn stored(&mut self, ok: bool) {
        if !ok {
            self.loaded = false;
            self.ended_scrubs.clear();
            return;
        }
        self.places.extend(self.found_places.drain(..));
        for (slice, found) in self.found_grants.drain(..) {
            if self.grants.get(&slice).is_none_or(|(known, _)| *known <= found.0) {
                self.grants.insert(slice, found);
            }
        }
    }

    /// Returns whether the device of a slice has no grant of it.
    pub(super) fn is_revoked(&self, slice: SliceId) -> bool {
        self.loaded && !self.grants.contains_key(&slice)
    }

    /// Returns the handle of exactly this grant.
    fn handle(&self, holding: Holding) -> Option<Handle> {
        let granted = self.grants.get(&holding.slice).filter(|(epoch, _)| *epoch == holding.epoch);
        granted.map(|(_, handle)| handle).or_else(|| self.places.get(&holding.slice)).cloned()
    }
}

impl Truth {
    /// Computes the complete desired state of a host.
    fn desired(&self, id: HostId, instance: InstanceId) -> Option<Want> {
        let host = self.host(id)?;
        let Some(Record::Meta(meta)) = self.records.get(&Key::Meta) else { return None };
        let mut want = Want {
            number: DesiredVersion { generation: meta.generation, revision: meta.revision },
            base: None,
            instance,
            vms: BTreeMap::new(),
            release: BTreeMap::new(),
            scrub: BTreeMap::new(),
            no_more: NoMore::default(),
            fenced: host.fence != Fence::None,
        };
        if !want.fenced {
            want.vms = self.desired_vms(id);
            self.desire_slices(id, &mut want);
        }
        Some(want)
    }

    /// Removes the slices whose device is being compared, and VMs with such slices.
    fn decided_part(&self, mut want: Want) -> Want {
        let undecided = &self.named.undecided;
        let is_decided = |slice: SliceId| self.emc_of(slice).is_none_or(|emc| !undecided.contains_key(&emc));
        want.vms.retain(|_, vm| vm.slices.keys().all(|holding| is_decided(holding.slice)));
        want.release.retain(|holding, _| is_decided(holding.slice));
        want.scrub.retain(|holding, _| is_decided(holding.slice));
        want
    }

    fn desired_vms(&self, host: HostId) -> BTreeMap<ReservationId, WantVm> {
        let here = self.reservations().filter(|(_, reservation)| reservation.host == host);
        let alive = here.filter(|(_, r)| matches!(r.stage, Stage::Reserved { .. } | Stage::Committed));
        let vms = alive.filter_map(|(id, reservation)| {
            let slices = self.granted(id, reservation)?;
            let Reservation { vm, local, pinned, uid, .. } = reservation;
            Some((id, WantVm { vm: vm.clone(), local: *local, pinned: *pinned, uid: *uid, slices }))
        });
        vms.collect()
    }

    /// Returns the slices of a reservation if all of them are granted to it.
    fn granted(&self, id: ReservationId, reservation: &Reservation) -> Option<BTreeMap<Holding, Handle>> {
        let granted = |slice: &SliceId| {
            let slot = self.slot(*slice);
            let (State::Onlining(owner) | State::Online(owner)) = slot.state else { return None };
            let holding = Holding { slice: *slice, epoch: slot.epoch };
            let own = (owner.host, owner.reservation) == (reservation.host, id);
            Some((holding, self.named.handle(holding).filter(|_| own)?))
        };
        reservation.slices.iter().map(granted).collect()
    }

    fn desire_slices(&self, host: HostId, want: &mut Want) {
        for record in self.records.values() {
            let Record::Slice(slice, slot) = record else { continue };
            let holding = Holding { slice: *slice, epoch: slot.epoch };
            let Some(handle) = self.named.handle(holding) else { continue };
            match slot.state {
                State::Draining(owner, Drain::Host { force }) if owner.host == host => {
                    want.release.insert(holding, WantRelease { force, handle });
                }
                State::Scrubbing(Scrub::Leaving(holder)) if holder == host => {
                    want.release.insert(holding, WantRelease { force: false, handle });
                }
                State::Scrubbing(Scrub::Working(scrubber)) if scrubber == host => {
                    want.scrub.insert(holding, handle);
                }
                _ => {}
            }
        }
    }
}

impl World {
    /// Records a reply of a device to the running manager.
    pub(in crate::world) fn note_answer(&mut self, done: &DeviceDone) {
        self.truth.named.answered(done);
    }

    /// Records the contents of a device, reported to the running manager.
    pub(in crate::world) fn note_contents(&mut self, emc: EmcId, contents: DeviceDone) {
        self.truth.named.undecided.insert(emc, contents);
    }

    /// Records the undecided contents that the running manager has accepted: a device that works has been
    /// compared with its latest contents.
    fn note_decided_contents(&mut self) {
        let Some(running) = &self.program.running else { return };
        let named = &mut self.truth.named;
        let is_up = |emc: &EmcId| running.manager.emc_state(*emc) == EmcState::Up;
        let accepted: Vec<EmcId> = named.undecided.keys().copied().filter(is_up).collect();
        let contents: Vec<_> = accepted.iter().filter_map(|emc| named.undecided.remove(emc)).collect();
        contents.iter().for_each(|contents| named.answered(contents));
    }

    /// Records the outcome of the running manager's batch.
    pub(in crate::world) fn note_stored(&mut self, ok: bool) {
        if ok {
            self.note_decided_contents();
        }
        self.truth.named.stored(ok);
    }

    /// Records a report to the running manager.
    pub(in crate::world) fn note_report(&mut self, host: HostId, have: &Have) {
        if self.truth.named.loaded {
            let whole = have.scrubbed.iter().filter(|scrubbed| scrubbed.verified >= units::SLICE);
            self.truth.named.ended_scrubs.extend(whole.map(|scrubbed| (host, scrubbed.holding)));
        }
    }

    /// Checks a message, and that the messages of its session add up to the desired state of the host,
    /// apart from slices whose device is being compared.
    pub(in crate::world) fn check_order(&mut self, order: &Want, orders: &Orders) {
        let Orders { host, sum, .. } = orders;
        self.check_granted(*host, order);
        self.check_not_overtaken(*host);
        self.check_not_outdated(orders);
        let sum = self.truth.decided_part(sum.clone());
        let desired = self.truth.desired(*host, orders.instance).map(|want| self.truth.decided_part(want));
        if desired.as_ref() != Some(&sum) {
            let what = format!("orders to {host} add up to {sum:?}, its desired state is {desired:?}");
            self.blame("orders add up to the desired state", what);
        }
    }

    /// Checks that no VM is sent before the boot id of the session is on disk, because it may have ended
    /// with the earlier boot, and that no scrub is sent whose end was reported.
    fn check_not_outdated(&mut self, orders: &Orders) {
        let host = self.truth.host(orders.host).filter(|host| host.fence == Fence::None);
        let boot = host.map(|host| host.boot_id.clone()).filter(|boot| !boot.is_empty());
        if !orders.sum.vms.is_empty() && boot.is_some_and(|boot| boot != orders.boot_id) {
            let what = format!("{} is ordered VMs of its earlier boot", orders.host);
            self.blame("no order against a decision", what);
        }
        let ended = |scrub: &&Holding| self.truth.named.ended_scrubs.contains(&(orders.host, **scrub));
        if let Some(scrub) = orders.first_scrubs.iter().find(ended).copied() {
            let what = format!("{} is to start {scrub:?}, which it reported scrubbed", orders.host);
            self.blame("no order against a decision", what);
        }
    }

    /// Checks that VMs and scrubs use only slices granted to exactly this host and epoch.
    fn check_granted(&mut self, host: HostId, order: &Want) {
        let vms = order.vms.values().flat_map(|vm| vm.slices.keys());
        for holding in vms.chain(order.scrub.keys()) {
            match self.truth.hands.get_mut(&holding.slice) {
                Some(hand) if (hand.host, hand.epoch) == (host, holding.epoch) => hand.told = true,
                hand => {
                    let what = format!("{host} is ordered to use {holding:?}, last granted is {hand:?}");
                    return self.blame("intent before act", what);
                }
            }
        }
    }

    /// Checks that no message is sent while a batch is written that fences the host or ends VMs of its
    /// earlier boot.
    fn check_not_overtaken(&mut self, id: HostId) {
        let Some(now) = self.truth.host(id).filter(|host| host.fence == Fence::None) else { return };
        let ends = |next: &Host| {
            next.fence != Fence::None || (!now.boot_id.is_empty() && now.boot_id != next.boot_id)
        };
        let batch = self.program.writing().unwrap_or_default();
        let next = batch.iter().find_map(|record| match record {
            Record::Host(host, next) if *host == id && ends(next) => Some(next.clone()),
            _ => None,
        });
        if let Some(next) = next {
            self.blame(
                "no order against a decision",
                format!("{id} gets an order, being written is {next:?}"),
            );
        }
    }
}
