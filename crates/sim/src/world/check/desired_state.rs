//! Checks of desired states. The desired state of a host is computed from the records on disk and
//! the confirmed grants. The sum of the messages sent to the host must equal this state.

use std::collections::{BTreeMap, BTreeSet};

use pool::{
    manager::{DeviceReply, EmcState},
    protocol::{DesiredRehome, DesiredRelease, DesiredState, DesiredVm, Handle, Holding, Removals},
    record::{Fence, Host, Key, Record, Rehome, Reservation, Stage},
    slice::{DrainStage, Scrub, State},
};
use units::{DesiredVersion, EmcId, Epoch, HostId, InstanceId, ReservationId, SliceId};

use super::{GroundTruth, describe_holding};
use crate::world::World;

/// Handles of grants that devices have returned to the running manager.
#[derive(Debug, Default)]
pub(super) struct KnownHandles {
    /// Whether the manager has loaded its store and no write has failed since.
    loaded: bool,
    grants: BTreeMap<SliceId, (Epoch, Handle)>,
    /// Epochs that devices have revoked. Contents that are accepted later may still contain them.
    revoked: BTreeMap<SliceId, Epoch>,
    places: BTreeMap<SliceId, Handle>,
    /// Grants in accepted device contents. The manager uses the handles of these grants after the
    /// next durable write.
    found_grants: Vec<(SliceId, (Epoch, Handle))>,
    /// Handles of slices in accepted device contents, used after the next durable write.
    found_places: Vec<(SliceId, Handle)>,
    /// Device contents that the manager has not accepted yet. The manager compares contents in
    /// batches and uses the handles of a batch after the next durable write.
    pending_contents: BTreeMap<EmcId, DeviceReply>,
    /// Devices whose contents the manager accepted after it decided the latest durable write. Until
    /// the next durable write, the records on disk do not contain the result of this comparison.
    newly_compared: BTreeSet<EmcId>,
    /// Complete scrubs that hosts have reported since the store was loaded.
    ended_scrubs: BTreeSet<(HostId, Holding)>,
}

/// Sum of the desired states sent in one session.
pub(in crate::world) struct SentStates {
    pub(in crate::world) host: HostId,
    pub(in crate::world) instance: InstanceId,
    /// Boot id that the agent sent at the start of the session.
    pub(in crate::world) boot_id: String,
    /// Scrubs that the latest message contains, and the sum before it does not.
    pub(in crate::world) first_scrubs: Vec<Holding>,
    /// Desired state that results from all messages of the session.
    pub(in crate::world) sum: DesiredState,
}

impl KnownHandles {
    /// Marks the store as loaded.
    pub(super) fn reset(&mut self) {
        self.loaded = true;
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.loaded
    }

    fn apply_reply(&mut self, done: &DeviceReply) {
        match done {
            _ if !self.loaded => {}
            DeviceReply::Granted { slice, epoch, handle } => {
                self.grants.insert(*slice, (*epoch, handle.clone()));
            }
            DeviceReply::Revoked { slice, epoch } => {
                self.grants.remove(slice);
                self.revoked.insert(*slice, *epoch);
            }
            DeviceReply::Contents(contents) => {
                let grants = contents.grants.iter().map(|g| (g.slice, (g.epoch, g.handle.clone())));
                self.found_grants.extend(grants);
                self.found_places.extend(contents.places.iter().cloned());
            }
            DeviceReply::Fenced { .. } | DeviceReply::Failed { .. } => {}
        }
    }

    fn record_stored(&mut self, ok: bool) {
        if !ok {
            self.loaded = false;
            self.ended_scrubs.clear();
            return;
        }
        self.places.extend(self.found_places.drain(..));
        for (slice, found) in self.found_grants.drain(..) {
            let is_revoked = self.revoked.get(&slice).is_some_and(|revoked| *revoked >= found.0);
            if !is_revoked && self.grants.get(&slice).is_none_or(|(known, _)| *known <= found.0) {
                self.grants.insert(slice, found);
            }
        }
    }

    /// Returns whether the device of a slice has no grant for the slice.
    pub(super) fn is_revoked(&self, slice: SliceId) -> bool {
        self.loaded && !self.grants.contains_key(&slice)
    }

    /// Returns the handle of the grant with this slice and epoch, or else the handle of the slice.
    fn handle(&self, holding: Holding) -> Option<Handle> {
        let granted = self.grants.get(&holding.slice).filter(|(epoch, _)| *epoch == holding.epoch);
        granted.map(|(_, handle)| handle).or_else(|| self.places.get(&holding.slice)).cloned()
    }
}

impl GroundTruth {
    /// Computes the complete desired state of a host from the records on disk.
    fn desired_state(&self, id: HostId, instance: InstanceId) -> Option<DesiredState> {
        let host = self.host(id)?;
        let Some(Record::Meta(meta)) = self.records.get(&Key::Meta) else { return None };
        let mut desired = DesiredState {
            number: DesiredVersion { generation: meta.generation, revision: meta.revision },
            base: None,
            instance,
            vms: BTreeMap::new(),
            release: BTreeMap::new(),
            scrub: BTreeMap::new(),
            removals: Removals::default(),
            fenced: host.fence != Fence::None,
        };
        if !desired.fenced {
            desired.vms = self.desired_vms(id);
            self.add_releases_and_scrubs(id, &mut desired);
        }
        Some(desired)
    }

    /// Removes slices on devices with pending contents, and VMs with such slices.
    fn without_pending_slices(&self, mut desired: DesiredState) -> DesiredState {
        let KnownHandles { pending_contents, newly_compared, .. } = &self.handles;
        let is_pending = |emc: EmcId| pending_contents.contains_key(&emc) || newly_compared.contains(&emc);
        let is_compared = |slice: SliceId| self.emc_of(slice).is_none_or(|emc| !is_pending(emc));
        desired.vms.retain(|_, vm| vm.slices.keys().all(|holding| is_compared(holding.slice)));
        desired.release.retain(|holding, _| is_compared(holding.slice));
        desired.scrub.retain(|holding, _| is_compared(holding.slice));
        desired
    }

    fn desired_vms(&self, host: HostId) -> BTreeMap<ReservationId, DesiredVm> {
        let here = self.reservations().filter(|(_, reservation)| reservation.host == host);
        let active = here.filter(|(_, r)| matches!(r.stage, Stage::Reserved { .. } | Stage::Committed));
        let vms = active.filter_map(|(id, reservation)| {
            let slices = self.granted_slices(id, reservation)?;
            let Reservation { vm, local, pinned, uid, .. } = reservation;
            let rehome = match reservation.rehome {
                Rehome::Moving { attempt } => Some(DesiredRehome { attempt, is_cancelled: false }),
                Rehome::Cancelling { attempt } => Some(DesiredRehome { attempt, is_cancelled: true }),
                _ => None,
            };
            Some((
                id,
                DesiredVm { vm: vm.clone(), local: *local, pinned: *pinned, uid: *uid, slices, rehome },
            ))
        });
        vms.collect()
    }

    /// Returns the slices of a reservation with their handles, or `None` if a slice is not granted
    /// to the reservation.
    fn granted_slices(
        &self,
        id: ReservationId,
        reservation: &Reservation,
    ) -> Option<BTreeMap<Holding, Handle>> {
        let granted = |slice: &SliceId| {
            let slot = self.slot(*slice);
            let (State::Onlining(owner) | State::Online(owner)) = slot.state else { return None };
            let holding = Holding { slice: *slice, epoch: slot.epoch };
            let is_owner = (owner.host, owner.reservation) == (reservation.host, id);
            Some((holding, self.handles.handle(holding).filter(|_| is_owner)?))
        };
        reservation.slices.iter().map(granted).collect()
    }

    fn add_releases_and_scrubs(&self, host: HostId, desired: &mut DesiredState) {
        for record in self.records.values() {
            let Record::Slice(slice, slot) = record else { continue };
            let holding = Holding { slice: *slice, epoch: slot.epoch };
            let Some(handle) = self.handles.handle(holding) else { continue };
            match slot.state {
                State::Draining(owner, DrainStage::Host { force }) if owner.host == host => {
                    desired.release.insert(holding, DesiredRelease { force, handle });
                }
                State::Scrubbing(Scrub::Leaving(holder)) if holder == host => {
                    desired.release.insert(holding, DesiredRelease { force: false, handle });
                }
                State::Scrubbing(Scrub::Working(scrubber)) if scrubber == host => {
                    desired.scrub.insert(holding, handle);
                }
                _ => {}
            }
        }
    }
}

impl World {
    /// Records the reply of a device to the running manager.
    pub(in crate::world) fn record_device_reply(&mut self, done: &DeviceReply) {
        self.truth.handles.apply_reply(done);
    }

    /// Records the contents that a device reported to the running manager.
    pub(in crate::world) fn add_pending_contents(&mut self, emc: EmcId, contents: DeviceReply) {
        self.truth.handles.pending_contents.insert(emc, contents);
    }

    /// Applies the pending contents that the running manager has accepted. The state `Up` of an EMC
    /// shows that the manager has compared its latest contents.
    fn apply_accepted_contents(&mut self) {
        let Some(running) = &self.manager_process.running else { return };
        let handles = &mut self.truth.handles;
        let is_up = |emc: &EmcId| running.manager.emc_state(*emc) == EmcState::Up;
        let accepted: Vec<EmcId> = handles.pending_contents.keys().copied().filter(is_up).collect();
        handles.newly_compared = accepted.iter().copied().collect();
        for emc in accepted {
            if let Some(contents) = handles.pending_contents.remove(&emc) {
                handles.apply_reply(&contents);
            }
        }
    }

    /// Records whether the store committed the current batch of the running manager.
    pub(in crate::world) fn record_stored(&mut self, ok: bool) {
        if ok {
            self.apply_accepted_contents();
        }
        self.truth.handles.record_stored(ok);
    }

    /// Records the complete scrubs in a report that the running manager received.
    pub(in crate::world) fn record_ended_scrubs(&mut self, host: HostId, scrubs: Vec<Holding>) {
        if self.truth.handles.loaded {
            self.truth.handles.ended_scrubs.extend(scrubs.into_iter().map(|scrub| (host, scrub)));
        }
    }

    /// Checks a desired-state message. All messages of a session must add up to the desired state
    /// of the host, except for slices whose device contents are pending.
    pub(in crate::world) fn check_desired_state(&mut self, message: &DesiredState, sent: &SentStates) {
        let SentStates { host, sum, .. } = sent;
        self.check_sent_grants(*host, message);
        self.check_not_superseded(*host);
        self.check_not_outdated(sent);
        let sum = self.truth.without_pending_slices(sum.clone());
        let desired = self
            .truth
            .desired_state(*host, sent.instance)
            .map(|desired| self.truth.without_pending_slices(desired));
        if desired.as_ref() != Some(&sum) {
            let description =
                format!("messages to {host} add up to {sum:?}, but its desired state is {desired:?}");
            self.report_violation("the messages of a session add up to the desired state", description);
        }
    }

    /// Checks that no message contains a VM before the boot id of the session is on disk, because
    /// the VM may have ended with the earlier boot. Also checks that no message contains a
    /// completed scrub.
    fn check_not_outdated(&mut self, sent: &SentStates) {
        let host = self.truth.host(sent.host).filter(|host| host.fence == Fence::None);
        let boot = host.map(|host| host.boot_id.clone()).filter(|boot| !boot.is_empty());
        if !sent.sum.vms.is_empty() && boot.is_some_and(|boot| boot != sent.boot_id) {
            let description =
                format!("a message to {} contains VMs of an earlier boot of this host", sent.host);
            self.report_violation("no message contradicts a decision", description);
        }
        let ended = |scrub: &&Holding| self.truth.handles.ended_scrubs.contains(&(sent.host, **scrub));
        if let Some(scrub) = sent.first_scrubs.iter().find(ended).copied() {
            let description = format!(
                "a message to {} contains a scrub of {}, which this host has completed",
                sent.host,
                describe_holding(scrub)
            );
            self.report_violation("no message contradicts a decision", description);
        }
    }

    /// Checks that VMs and scrubs use only slices granted to this host under the current epoch.
    fn check_sent_grants(&mut self, host: HostId, message: &DesiredState) {
        let vms = message.vms.values().flat_map(|vm| vm.slices.keys());
        for holding in vms.chain(message.scrub.keys()) {
            match self.truth.last_grants.get_mut(&holding.slice) {
                Some(grant) if (grant.host, grant.epoch) == (host, holding.epoch) => grant.sent = true,
                grant => {
                    let description = format!(
                        "a message to {host} contains {}, but the latest grant is {grant:?}",
                        describe_holding(*holding)
                    );
                    return self.report_violation("records on disk justify every action", description);
                }
            }
        }
    }

    /// Records the current grants in a message of a former leader, which the checks of messages do not concern.
    pub(in crate::world) fn record_sent_grants(&mut self, host: HostId, message: &DesiredState) {
        for holding in message.vms.values().flat_map(|vm| vm.slices.keys()).chain(message.scrub.keys()) {
            let grant = self.truth.last_grants.get_mut(&holding.slice);
            if let Some(grant) = grant.filter(|grant| (grant.host, grant.epoch) == (host, holding.epoch)) {
                grant.sent = true;
            }
        }
    }

    /// Checks that no message is sent while the store writes a batch that fences the host or ends
    /// VMs of its earlier boot.
    fn check_not_superseded(&mut self, id: HostId) {
        let Some(now) = self.truth.host(id).filter(|host| host.fence == Fence::None) else { return };
        let ends_vms = |next: &Host| {
            next.fence != Fence::None || (!now.boot_id.is_empty() && now.boot_id != next.boot_id)
        };
        let batch = self.manager_process.batch_in_progress().unwrap_or_default();
        let next = batch.iter().find_map(|record| match record {
            Record::Host(host, next) if *host == id && ends_vms(next) => Some(next.clone()),
            _ => None,
        });
        if let Some(next) = next {
            self.report_violation(
                "no message contradicts a decision",
                format!("a desired state is sent to {id} while the store writes {next:?}"),
            );
        }
    }
}
