//! Checks of device calls. The records on disk must justify each call, and a slice must be granted
//! only after the access of its previous owner has ended.

use pool::{
    manager::{DeviceCall, DeviceReply},
    protocol::Holding,
    record::{Emc, Fence, Key, Record},
    slice::{DrainStage, Quarantine, Scrub, Slot, State},
};
use units::{EmcId, Epoch, HostId, SliceId};

use super::{GroundTruth, LastGrant, describe_holding};
use crate::world::World;

/// Device call that the record of a slice on disk justifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedCall {
    /// Grant the slice to this host under the recorded epoch.
    Grant(HostId),
    /// Revoke the grant of the recorded epoch.
    Revoke,
}

/// Returns the device call that the state of a slice on disk justifies. Any other call is a
/// violation.
fn justified_call(slot: &Slot, can_revoke: bool) -> Option<ExpectedCall> {
    match slot.state {
        State::Assigned(owner) => Some(ExpectedCall::Grant(owner.host)),
        State::Scrubbing(Scrub::Granting(scrubber)) => Some(ExpectedCall::Grant(scrubber)),
        State::Draining(_, DrainStage::Revoking) | State::Scrubbing(Scrub::Revoking { .. }) => {
            Some(ExpectedCall::Revoke)
        }
        // The host has not released the slice, so only a device that can revoke access may revoke.
        State::Quarantined(
            Quarantine::Dirty { revoked: false, .. } | Quarantine::ScrubFailed { revoked: false, .. },
        ) => can_revoke.then_some(ExpectedCall::Revoke),
        State::Free
        | State::Onlining(_)
        | State::Online(_)
        | State::Draining(_, DrainStage::Host { .. })
        | State::Scrubbing(Scrub::Waiting | Scrub::Working(_) | Scrub::Leaving(_))
        | State::Quarantined(
            Quarantine::Dirty { revoked: true, .. }
            | Quarantine::ScrubFailed { revoked: true, .. }
            | Quarantine::UnknownGrant { .. }
            | Quarantine::LostGrant
            | Quarantine::Restored { .. }
            | Quarantine::LostRecord { .. }
            | Quarantine::DeviceFailed { .. },
        ) => None,
    }
}

impl GroundTruth {
    pub(in crate::world) fn emc(&self, emc: EmcId) -> Option<&Emc> {
        match self.records.get(&Key::Emc(emc)) {
            Some(Record::Emc(_, emc)) => Some(emc),
            _ => None,
        }
    }

    /// Returns the EMC of a slice, from the records on disk.
    pub(in crate::world) fn emc_of(&self, slice: SliceId) -> Option<EmcId> {
        self.records.values().find_map(|record| match record {
            Record::Emc(id, emc) if (emc.first.0..emc.first.0 + emc.slices).contains(&slice.0) => Some(*id),
            _ => None,
        })
    }

    /// Returns whether the records on disk list the fence of a host by an EMC as unconfirmed.
    fn is_fence_unconfirmed(&self, emc: EmcId, host: HostId) -> bool {
        self.host(host).is_some_and(|host| host.unconfirmed_fences.contains(&emc))
    }

    /// Returns whether the records on disk justify a call to the device of an EMC.
    fn justifies(&self, emc: EmcId, call: &DeviceCall) -> bool {
        let Some(device) = self.emc(emc) else { return false };
        let expected = |slice: SliceId, epoch: Epoch| {
            let slot = self.slot(slice);
            let on_device = (device.first.0..device.first.0 + device.slices).contains(&slice.0);
            justified_call(&slot, device.serial.is_none()).filter(|_| on_device && slot.epoch == epoch)
        };
        match *call {
            DeviceCall::Contents => true,
            DeviceCall::Grant { slice, epoch, host } => {
                let allowed =
                    self.host(host).is_some_and(|h| h.fence == Fence::None && h.emcs.contains(&emc));
                let allowed = allowed && !self.is_fence_unconfirmed(emc, host);
                allowed && expected(slice, epoch) == Some(ExpectedCall::Grant(host))
            }
            DeviceCall::Revoke { slice, epoch } => expected(slice, epoch) == Some(ExpectedCall::Revoke),
            DeviceCall::Fence { host, powered_off } => {
                // A host without a fence has returned and has proven that it has no mapping left.
                // The call therefore sets `powered_off`, although the machine need not be off.
                let allowed = match self.host(host).map(|host| host.fence) {
                    Some(Fence::Fencing { powered_off: confirmed_off }) => confirmed_off || !powered_off,
                    Some(Fence::Fenced) => !powered_off,
                    Some(Fence::None) => powered_off,
                    None => false,
                };
                allowed && self.is_fence_unconfirmed(emc, host)
            }
        }
    }
}

impl World {
    /// Checks that the latest records on disk justify a device call.
    pub(in crate::world) fn check_device_call(&mut self, emc: EmcId, call: &DeviceCall) {
        if !self.truth.justifies(emc, call) {
            self.report_violation(
                "records on disk justify every action",
                format!("no record on disk justifies {call:?} at {emc}"),
            );
        }
    }

    /// Records the result of a device call. Checks that a slice is granted only after the access of
    /// its previous owner has ended.
    pub(in crate::world) fn record_device_call(&mut self, emc: EmcId, call: &DeviceCall, done: &DeviceReply) {
        match (call, done) {
            (DeviceCall::Grant { host, .. }, DeviceReply::Granted { slice, epoch, .. }) => {
                self.record_grant(*slice, *epoch, *host);
            }
            (DeviceCall::Revoke { slice, .. }, _) => self.end_revoked_access(*slice),
            (_, DeviceReply::Fenced { host }) => {
                self.check_host_stopped(emc, *host);
                self.truth.fences_confirmed.insert((emc, *host));
                self.end_fenced_access(&self.devices[emc.0 as usize].slices(), *host);
            }
            _ => {}
        }
    }

    /// Ends the access of a fenced host to its slices on a device. A slice that the device could
    /// not revoke remains with the host until a later revocation.
    fn end_fenced_access(&mut self, slices: &[SliceId], host: HostId) {
        for slice in slices {
            let Some(grant) = self.truth.last_grants.get(slice).copied().filter(|grant| grant.host == host)
            else {
                continue;
            };
            let holding = Holding { slice: *slice, epoch: grant.epoch };
            let device = self.device(*slice);
            if device.is_shared() || !device.is_mapping_valid(holding, host) {
                self.truth.end_access(host, holding);
                self.truth.ended_grants.insert(holding);
            } else {
                self.truth.unrevoked_grants.insert(holding);
            }
        }
    }

    /// Ends the access to a slice if its revocation failed during a fence but has succeeded now.
    fn end_revoked_access(&mut self, slice: SliceId) {
        let Some(grant) = self.truth.last_grants.get(&slice).copied() else { return };
        let holding = Holding { slice, epoch: grant.epoch };
        if self.truth.unrevoked_grants.contains(&holding)
            && !self.device(slice).is_mapping_valid(holding, grant.host)
        {
            self.truth.end_access(grant.host, holding);
        }
    }

    /// Checks that a fenced host has no mapping on a device that cannot revoke access.
    fn check_host_stopped(&mut self, emc: EmcId, host: HostId) {
        let device = &self.devices[emc.0 as usize];
        let on_device = |holding: &Holding| device.is_shared() && device.contains(holding.slice);
        let reachable = self.find_machine(host).and_then(|machine| machine.reachable().find(on_device));
        if let Some(holding) = reachable {
            self.report_violation(
                "a fenced host cannot reach its former slices",
                format!("{host} is recorded as fenced but can still reach {}", describe_holding(holding)),
            );
        }
    }

    fn record_grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId) {
        let before = self.truth.last_grants.get(&slice).copied();
        if before.is_some_and(|grant| (grant.epoch, grant.host) == (epoch, host)) {
            return;
        }
        if let Some(grant) = before.filter(|grant| grant.sent && !grant.access_ended) {
            let description = format!(
                "slice {slice} is granted to {host}, but {} has not released epoch {}",
                grant.host, grant.epoch
            );
            self.report_violation(
                "a slice is granted only after its previous owner cannot reach it",
                description,
            );
        }
        self.run_log.counts.moved += u64::from(before.is_some_and(|grant| grant.host != host));
        self.truth.last_grants.insert(
            slice,
            LastGrant { epoch, host, sent: false, reported_online: false, access_ended: false },
        );
    }

    /// Ends a grant after a power failure of its device.
    pub(in crate::world) fn end_lost_grant(&mut self, holding: Holding) {
        self.truth.ended_grants.insert(holding);
        self.end_ownership(holding.slice);
    }

    /// Ends the ownership of a slice after a confirmation by an operator or the loss of a device.
    pub(in crate::world) fn end_ownership(&mut self, slice: SliceId) {
        if let Some(grant) = self.truth.last_grants.get_mut(&slice) {
            grant.access_ended = true;
        }
    }
}
