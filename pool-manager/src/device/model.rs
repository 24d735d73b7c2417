//! Reference model of a device. Property tests compare the drivers with it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use units::{Epoch, HostId};

use super::Device;

/// Operation of a property test: a call of the device, or a restart of the manager.
#[derive(Clone, Copy, Debug)]
pub(super) enum DeviceOp {
    Grant(u32, Epoch, HostId),
    Revoke(u32, Epoch),
    Fence(HostId),
    Restart,
}

pub(super) fn device_op() -> impl Strategy<Value = DeviceOp> {
    let slice = 0..3_u32;
    let epoch = (0..6_u64).prop_map(Epoch);
    let host = (0..3_u32).prop_map(HostId);
    prop_oneof![
        6 => (slice.clone(), epoch.clone(), host.clone()).prop_map(|(s, e, h)| DeviceOp::Grant(s, e, h)),
        4 => (slice, epoch).prop_map(|(s, e)| DeviceOp::Revoke(s, e)),
        1 => host.prop_map(DeviceOp::Fence),
        1 => Just(DeviceOp::Restart),
    ]
}

impl DeviceOp {
    /// Performs the call on a device, and returns whether it succeeded; a restart returns `true`.
    pub(super) fn apply(self, device: &mut dyn Device) -> bool {
        match self {
            Self::Grant(slice, epoch, host) => device.grant(slice, epoch, host).is_ok(),
            Self::Revoke(slice, epoch) => device.revoke(slice, epoch).is_ok(),
            Self::Fence(host) => device.fence(host).is_ok(),
            Self::Restart => true,
        }
    }
}

/// Expected state of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) owners: BTreeMap<u32, (Epoch, HostId)>,
    /// Lowest epoch of each slice that may still be granted.
    lowest_epoch: BTreeMap<u32, Epoch>,
}

impl Model {
    /// Returns the lowest epoch that may be granted for this slice.
    pub(super) fn lowest_epoch(&self, slice: u32) -> Epoch {
        self.lowest_epoch.get(&slice).copied().unwrap_or(Epoch(1))
    }

    /// Applies a call to the model, and returns whether the device must accept it.
    pub(super) fn apply(&mut self, device_op: DeviceOp) -> bool {
        match device_op {
            DeviceOp::Grant(slice, epoch, host) => return self.grant(slice, epoch, host),
            DeviceOp::Revoke(slice, epoch) => self.revoke(slice, epoch),
            DeviceOp::Fence(host) => {
                let grants = self.owners.iter().filter(|(_, owner)| owner.1 == host);
                let grants: Vec<_> = grants.map(|(slice, owner)| (*slice, owner.0)).collect();
                grants.into_iter().for_each(|(slice, epoch)| self.revoke(slice, epoch));
            }
            DeviceOp::Restart => {}
        }
        true
    }

    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> bool {
        let lowest_epoch = self.lowest_epoch.entry(slice).or_insert(Epoch(1));
        let is_granted =
            epoch >= *lowest_epoch && self.owners.get(&slice).is_none_or(|owner| *owner == (epoch, host));
        if is_granted {
            *lowest_epoch = epoch;
            self.owners.insert(slice, (epoch, host));
        }
        is_granted
    }

    fn revoke(&mut self, slice: u32, epoch: Epoch) {
        let lowest_epoch = self.lowest_epoch.entry(slice).or_insert(Epoch(1));
        *lowest_epoch = (*lowest_epoch).max(epoch.next());
        self.owners.retain(|s, (current, _)| *s != slice || *current > epoch);
    }
}
