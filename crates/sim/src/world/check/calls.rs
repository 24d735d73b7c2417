//! Device calls: calls justified by the records on disk, and calls confirmed by devices.

use pool::{
    manager::{DeviceCall, DeviceDone},
    protocol::Holding,
    record::{Emc, Fence, Key, Record},
    slice::{Drain, Quarantine, Scrub, Slot, State},
};
use units::{EmcId, Epoch, HostId, SliceId};

use super::{Hand, Truth};
use crate::world::World;

/// Call on one slice that its record on disk justifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Justified {
    /// Grant to this host under the slice's epoch.
    Grant(HostId),
    /// Revoke the slice's epoch.
    Revoke,
}

/// Returns the call justified by the state on disk. Any other call is a violation.
fn justified(slot: &Slot, cuts_off: bool) -> Option<Justified> {
    match slot.state {
        State::Assigned(owner) => Some(Justified::Grant(owner.host)),
        State::Scrubbing(Scrub::Granting(scrubber)) => Some(Justified::Grant(scrubber)),
        State::Draining(_, Drain::Revoking) | State::Scrubbing(Scrub::Revoking { .. }) => {
            Some(Justified::Revoke)
        }
        // Without a release by the host, only a device that enforces it may revoke.
        State::Quarantined(
            Quarantine::Dirty { revoked: false, .. } | Quarantine::ScrubFailed { revoked: false, .. },
        ) => cuts_off.then_some(Justified::Revoke),
        State::Free
        | State::Onlining(_)
        | State::Online(_)
        | State::Draining(_, Drain::Host { .. })
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

impl Truth {
    pub(in crate::world) fn emc(&self, emc: EmcId) -> Option<&Emc> {
        match self.records.get(&Key::Emc(emc)) {
            Some(Record::Emc(_, emc)) => Some(emc),
            _ => None,
        }
    }

    /// Returns the EMC of a slice according to the records on disk.
    pub(in crate::world) fn emc_of(&self, slice: SliceId) -> Option<EmcId> {
        self.records.values().find_map(|record| match record {
            Record::Emc(id, emc) if (emc.first.0..emc.first.0 + emc.slices).contains(&slice.0) => Some(*id),
            _ => None,
        })
    }

    /// Returns whether an EMC has yet to fence a host, according to the records on disk.
    fn is_fence_unconfirmed(&self, emc: EmcId, host: HostId) -> bool {
        self.host(host).is_some_and(|host| host.unconfirmed_fences.contains(&emc))
    }

    /// Returns whether the records on disk justify a call to this device.
    fn justifies(&self, emc: EmcId, call: &DeviceCall) -> bool {
        let Some(device) = self.emc(emc) else { return false };
        let owed = |slice: SliceId, epoch: Epoch| {
            let slot = self.slot(slice);
            let here = (device.first.0..device.first.0 + device.slices).contains(&slice.0);
            justified(&slot, device.serial.is_none()).filter(|_| here && slot.epoch == epoch)
        };
        match *call {
            DeviceCall::Contents => true,
            DeviceCall::Grant { slice, epoch, host } => {
                let fit = self.host(host).is_some_and(|h| h.fence == Fence::None && h.emcs.contains(&emc));
                let fit = fit && !self.is_fence_unconfirmed(emc, host);
                fit && owed(slice, epoch) == Some(Justified::Grant(host))
            }
            DeviceCall::Revoke { slice, epoch } => owed(slice, epoch) == Some(Justified::Revoke),
            DeviceCall::Fence { host, powered_off } => {
                // A host that returned has proven that no mapping is left: its machine need not be stopped.
                let fits = match self.host(host).map(|host| host.fence) {
                    Some(Fence::Fencing { powered_off: vouched }) => vouched || !powered_off,
                    Some(Fence::Fenced) => !powered_off,
                    Some(Fence::None) => powered_off,
                    None => false,
                };
                fits && self.is_fence_unconfirmed(emc, host)
            }
        }
    }
}

impl World {
    /// Checks that the intent of a device call is on disk and is the latest.
    pub(in crate::world) fn check_call(&mut self, emc: EmcId, call: &DeviceCall) {
        if !self.truth.justifies(emc, call) {
            self.blame("intent before act", format!("no record on disk justifies {call:?} at {emc}"));
        }
    }

    /// Checks that a grant follows the end of the previous owner's access.
    pub(in crate::world) fn note_device(&mut self, emc: EmcId, call: &DeviceCall, done: &DeviceDone) {
        match (call, done) {
            (DeviceCall::Grant { host, .. }, DeviceDone::Granted { slice, epoch, .. }) => {
                self.note_grant(*slice, *epoch, *host);
            }
            (DeviceCall::Revoke { slice, .. }, _) => self.note_revoked(*slice),
            (_, DeviceDone::Fenced { host }) => {
                self.check_stopped(emc, *host);
                self.truth.cut.insert((emc, *host));
                self.note_cut_off(&self.devices[emc.0 as usize].slices(), *host);
            }
            _ => {}
        }
    }

    /// Keeps a slice that could not be revoked with its host; it may be revoked later.
    fn note_cut_off(&mut self, slices: &[SliceId], host: HostId) {
        for slice in slices {
            let Some(hand) = self.truth.hands.get(slice).copied().filter(|hand| hand.host == host) else {
                continue;
            };
            let holding = Holding { slice: *slice, epoch: hand.epoch };
            let device = self.device(*slice);
            if device.is_shared() || !device.reaches(holding, host) {
                self.truth.let_go(host, holding);
                self.truth.lost.insert(holding);
            } else {
                self.truth.unrevoked.insert(holding);
            }
        }
    }

    /// Completes a fence for a slice whose revocation succeeds later.
    fn note_revoked(&mut self, slice: SliceId) {
        let Some(hand) = self.truth.hands.get(&slice).copied() else { return };
        let holding = Holding { slice, epoch: hand.epoch };
        if self.truth.unrevoked.contains(&holding) && !self.device(slice).reaches(holding, hand.host) {
            self.truth.let_go(hand.host, holding);
        }
    }

    /// Checks that a fence by a device that cannot revoke access leaves no mapping on the host.
    fn check_stopped(&mut self, emc: EmcId, host: HostId) {
        let device = &self.devices[emc.0 as usize];
        let here = |holding: &Holding| device.is_shared() && device.has(holding.slice);
        let left = self.machine_of(host).and_then(|machine| machine.reachable().find(here));
        if let Some(holding) = left {
            self.blame("unknown is not free", format!("{host} counts as fenced and still has {holding:?}"));
        }
    }

    fn note_grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId) {
        let before = self.truth.hands.get(&slice).copied();
        if before.is_some_and(|hand| (hand.epoch, hand.host) == (epoch, host)) {
            return;
        }
        if let Some(hand) = before.filter(|hand| hand.told && !hand.let_go) {
            let what =
                format!("slice {slice} goes to {host}; {} never let go of epoch {}", hand.host, hand.epoch);
            self.blame("unknown is not free", what);
        }
        self.story.counts.moved += u64::from(before.is_some_and(|hand| hand.host != host));
        self.truth.hands.insert(slice, Hand { epoch, host, told: false, online: false, let_go: false });
    }

    /// Ends grants with a power failure of their device.
    pub(in crate::world) fn lost_with_power(&mut self, holding: Holding) {
        self.truth.lost.insert(holding);
        self.freed_by_hand(holding.slice);
    }

    /// Ends the ownership of a slice after an operator's confirmation or the loss of a device.
    pub(in crate::world) fn freed_by_hand(&mut self, slice: SliceId) {
        if let Some(hand) = self.truth.hands.get_mut(&slice) {
            hand.let_go = true;
        }
    }
}
