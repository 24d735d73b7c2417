//! Progress of fences: a working device that can revoke access does so soon, and the slices of the fenced
//! host on it start to drain, also while other devices of the host have failed.

use std::collections::BTreeMap;

use pool::{
    protocol::Holding,
    record::{Emc, Fence, Host, Key, Record},
    slice::{Drain, Scrub, Slot, State},
};
use units::{EmcId, HostId, Ns, ReservationId, SliceId, limits::DEVICE_RETRY};

use super::Truth;
use crate::world::{World, device::Device};

/// Time limit for a fence without an obstacle.
const FENCED_WITHIN: Ns = Ns::ms(500);

/// Times since which there is no obstacle.
#[derive(Debug, Default)]
pub(super) struct Unhindered {
    /// For the fence of a host by a device.
    fences: BTreeMap<(EmcId, HostId), Ns>,
    /// For any call of a device: a failed device is called again after a delay.
    devices: BTreeMap<EmcId, Ns>,
}

/// Returns whether a slice is in a state that the fence of this host ends.
fn waits_for_fence(state: State, fenced: HostId) -> bool {
    match state {
        State::Assigned(o)
        | State::Onlining(o)
        | State::Online(o)
        | State::Draining(o, Drain::Host { .. }) => o.host == fenced,
        State::Scrubbing(Scrub::Granting(host) | Scrub::Working(host) | Scrub::Leaving(host)) => {
            host == fenced
        }
        State::Free
        | State::Draining(_, Drain::Revoking)
        | State::Scrubbing(Scrub::Waiting | Scrub::Revoking { .. })
        | State::Quarantined(_) => false,
    }
}

impl Truth {
    /// Returns the devices that have to fence a host and can do so by themselves.
    fn to_fence(&self) -> Vec<(EmcId, HostId)> {
        let hosts = self.records.range(Key::Host(HostId(0))..Key::Slice(SliceId(0)));
        let fencing = hosts.filter_map(|(_, record)| match record {
            Record::Host(id, host) if matches!(host.fence, Fence::Fencing { .. }) => Some((*id, host)),
            _ => None,
        });
        let by = |(id, host): (HostId, &Host)| host.emcs.iter().map(|emc| (*emc, id)).collect::<Vec<_>>();
        let cuts_off = |emc: &Emc| emc.serial.is_none();
        fencing.flat_map(by).filter(|(emc, _)| self.emc(*emc).is_some_and(cuts_off)).collect()
    }

    /// Returns slices of VMs, with the reservation, whose epoch the record of their device lacks: such a
    /// device counts as failed.
    pub(in crate::world) fn slices_unknown_to<'a>(
        &'a self,
        devices: &'a [Device],
    ) -> impl Iterator<Item = (SliceId, ReservationId)> + 'a {
        let slots = self.records.range(Key::Slice(SliceId(0))..=Key::Slice(SliceId(u32::MAX)));
        slots.filter_map(|(_, record)| {
            let Record::Slice(slice, Slot { epoch, state: State::Onlining(o) | State::Online(o), .. }) =
                record
            else {
                return None;
            };
            let device = devices.iter().find(|device| device.has(*slice))?;
            let seen = device.has_seen(Holding { slice: *slice, epoch: *epoch });
            (!seen).then_some((*slice, o.reservation))
        })
    }

    fn stuck(&self, emc: EmcId, host: HostId) -> Option<SliceId> {
        let emc = self.emc(emc)?;
        let mut slices = (emc.first.0..emc.first.0 + emc.slices).map(SliceId);
        slices.find(|slice| waits_for_fence(self.slot(*slice).state, host))
    }
}

impl World {
    /// Accounts for time in which nothing ran.
    pub(in crate::world) fn forget_delays(&mut self) {
        self.truth.unhindered = Unhindered::default();
    }

    pub(super) fn check_fences_advance(&mut self) {
        let now = self.now;
        let lacking: Vec<SliceId> =
            self.truth.slices_unknown_to(&self.devices).map(|(slice, _)| slice).collect();
        let is_out = |device: &Device| device.failed || lacking.iter().any(|slice| device.has(*slice));
        for (emc, _) in (0..).map(EmcId).zip(&self.devices).filter(|(_, device)| is_out(device)) {
            self.truth.unhindered.devices.insert(emc, now.after(DEVICE_RETRY));
        }
        let pairs = self.truth.to_fence();
        let runs = self.program.running.is_some() && self.truth.named.is_loaded();
        self.truth.unhindered.fences.retain(|pair, _| runs && pairs.contains(pair));
        for (emc, host) in pairs.into_iter().filter(|_| runs) {
            let since = *self.truth.unhindered.fences.entry((emc, host)).or_insert(now);
            let since = self.truth.unhindered.devices.get(&emc).map_or(since, |works| since.max(*works));
            let overdue = now > since.after(FENCED_WITHIN);
            if let Some(slice) = self.truth.stuck(emc, host).filter(|_| overdue) {
                let what = format!("{host} is to be fenced, {emc} works and slice {slice} waits");
                self.blame("hosts are fenced EMC by EMC", what);
            }
        }
    }
}
