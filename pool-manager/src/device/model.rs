//! Model of a device, with which drivers are compared in tests.

use std::collections::BTreeMap;

use proptest::prelude::*;
use units::{Epoch, HostId};

use super::Device;

/// Call of a device, or a restart of its manager.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Grant(u32, Epoch, HostId),
    Revoke(u32, Epoch),
    Fence(HostId),
    Restart,
}

pub(super) fn order() -> impl Strategy<Value = Order> {
    let slice = 0..3_u32;
    let epoch = (0..6_u64).prop_map(Epoch);
    let host = (0..3_u32).prop_map(HostId);
    prop_oneof![
        6 => (slice.clone(), epoch.clone(), host.clone()).prop_map(|(s, e, h)| Order::Grant(s, e, h)),
        4 => (slice, epoch).prop_map(|(s, e)| Order::Revoke(s, e)),
        1 => host.prop_map(Order::Fence),
        1 => Just(Order::Restart),
    ]
}

impl Order {
    /// Returns whether the device performed it; a restart has no result.
    pub(super) fn make(self, device: &mut dyn Device) -> bool {
        match self {
            Self::Grant(slice, epoch, host) => device.grant(slice, epoch, host).is_ok(),
            Self::Revoke(slice, epoch) => device.revoke(slice, epoch).is_ok(),
            Self::Fence(host) => device.fence(host).is_ok(),
            Self::Restart => true,
        }
    }
}

/// State of the model.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) owners: BTreeMap<u32, (Epoch, HostId)>,
    /// Epochs below this one have ended.
    open_from: BTreeMap<u32, Epoch>,
}

impl Model {
    /// Returns the lowest epoch that may be granted for this slice.
    pub(super) fn open_from(&self, slice: u32) -> Epoch {
        self.open_from.get(&slice).copied().unwrap_or(Epoch(1))
    }

    /// Returns whether a device has to perform a call.
    pub(super) fn make(&mut self, order: Order) -> bool {
        match order {
            Order::Grant(slice, epoch, host) => return self.grant(slice, epoch, host),
            Order::Revoke(slice, epoch) => self.revoke(slice, epoch),
            Order::Fence(host) => {
                let theirs = self.owners.iter().filter(|(_, owner)| owner.1 == host);
                let theirs: Vec<_> = theirs.map(|(slice, owner)| (*slice, owner.0)).collect();
                theirs.into_iter().for_each(|(slice, epoch)| self.revoke(slice, epoch));
            }
            Order::Restart => {}
        }
        true
    }

    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> bool {
        let open_from = self.open_from.entry(slice).or_insert(Epoch(1));
        let may = epoch >= *open_from && self.owners.get(&slice).is_none_or(|owner| *owner == (epoch, host));
        if may {
            *open_from = epoch;
            self.owners.insert(slice, (epoch, host));
        }
        may
    }

    fn revoke(&mut self, slice: u32, epoch: Epoch) {
        let open_from = self.open_from.entry(slice).or_insert(Epoch(1));
        *open_from = (*open_from).max(epoch.next());
        self.owners.retain(|s, (held, _)| *s != slice || *held > epoch);
    }
}
