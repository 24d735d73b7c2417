//! Orders to hosts: the complete desired state of a host, computed from the records on disk and the grants that devices
//! confirmed, and compared with the sum of the orders sent.

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

/// Where hosts find grants, as devices named it to the present manager.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// The manager has read its store, and no write has failed since.
    loaded: bool,
    grants: BTreeMap<SliceId, (Epoch, Handle)>,
    places: BTreeMap<SliceId, Handle>,
    /// Named by a comparison of contents: part of orders from the next durable write on.
    found_grants: Vec<(SliceId, (Epoch, Handle))>,
    found_places: Vec<(SliceId, Handle)>,
    /// Scrubs of a whole slice that were reported since the store was read.
    ended_scrubs: BTreeSet<(HostId, Holding)>,
}

/// The orders of one session up to the latest.
pub(in crate::world) struct Orders {
    pub(in crate::world) host: HostId,
    pub(in crate::world) instance: InstanceId,
    /// The boot that the agent named when it connected.
    pub(in crate::world) boot_id: String,
    /// Scrubs that the latest order is the first to name.
    pub(in crate::world) first_scrubs: Vec<Holding>,
    /// Their sum.
    pub(in crate::world) sum: Want,
}

impl Named {
    /// The store was read.
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

    /// Whether the device of a slice has no grant of it.
    pub(super) fn is_revoked(&self, slice: SliceId) -> bool {
        self.loaded && !self.grants.contains_key(&slice)
    }

    /// Where the host of exactly this grant finds it.
    fn handle(&self, holding: Holding) -> Option<Handle> {
        let granted = self.grants.get(&holding.slice).filter(|(epoch, _)| *epoch == holding.epoch);
        granted.map(|(_, handle)| handle).or_else(|| self.places.get(&holding.slice)).cloned()
    }
}

impl Truth {
    /// The complete desired state of a host.
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

    /// The slices of a reservation, if every one of them is granted to it.
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
    /// A device has answered the present manager.
    pub(in crate::world) fn note_answer(&mut self, done: &DeviceDone) {
        self.truth.named.answered(done);
    }

    /// The present manager has compared the contents of a device. If the record lacks an epoch of a VM's slice, they count for
    /// nothing, unless the end of that VM is decided and not durable yet: then the device works.
    pub(in crate::world) fn note_contents(&mut self, emc: EmcId, contents: &DeviceDone) {
        let device = &self.devices[emc.0 as usize];
        let lacks_record = self.truth.slices_unknown_to(&self.devices).any(|(slice, _)| device.has(slice));
        let running = self.program.running.as_ref();
        let works = running.is_some_and(|running| running.manager.emc_state(emc) == EmcState::Up);
        if works || !lacks_record {
            self.truth.named.answered(contents);
        }
    }

    /// The present manager learns whether its batch is durable.
    pub(in crate::world) fn note_stored(&mut self, ok: bool) {
        self.truth.named.stored(ok);
    }

    /// The present manager receives a report.
    pub(in crate::world) fn note_report(&mut self, host: HostId, have: &Have) {
        if self.truth.named.loaded {
            let whole = have.scrubbed.iter().filter(|scrubbed| scrubbed.verified >= units::SLICE);
            self.truth.named.ended_scrubs.extend(whole.map(|scrubbed| (host, scrubbed.holding)));
        }
    }

    /// Checks an order, and that all orders of its session add up to the desired state of the host.
    pub(in crate::world) fn check_order(&mut self, order: &Want, orders: &Orders) {
        let Orders { host, sum, .. } = orders;
        self.check_granted(*host, order);
        self.check_not_overtaken(*host);
        self.check_not_outdated(orders);
        let desired = self.truth.desired(*host, orders.instance);
        if desired.as_ref() != Some(sum) {
            let what = format!("orders to {host} add up to {sum:?}, its desired state is {desired:?}");
            self.blame("orders add up to the desired state", what);
        }
    }

    /// No order of a VM before the boot of its session is on disk: it may have ended with the earlier boot. And none that
    /// starts a scrub whose end was reported.
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

    /// A VM or a scrub is ordered only on a slice that its device granted to exactly this host under this epoch.
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

    /// No order while a batch is being written that fences the host or ends the VMs of its earlier boot.
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
