//! Checks of the progress of fences. A working device that can revoke access must fence a host
//! within a time limit. The slices of the host on this device must then start to drain. Failed
//! devices of the same host must not delay this fence.

use std::collections::BTreeMap;

use pool::{
    protocol::Holding,
    record::{Emc, Fence, Host, Key, Record},
    slice::{DrainStage, Scrub, Slot, State},
};
use units::{EmcId, HostId, Ns, ReservationId, SliceId, limits::DEVICE_RETRY_DELAY};

use super::GroundTruth;
use crate::world::{World, device::Device};

/// Time limit of a fence by a working device.
const FENCE_TIMEOUT: Ns = Ns::ms(500);

/// Earliest times at which fences can make progress.
#[derive(Debug, Default)]
pub(super) struct FenceProgress {
    /// Start time of each fence, by device and host.
    fences: BTreeMap<(EmcId, HostId), Ns>,
    /// Earliest time of the next call to a device. The manager retries a failed device after a
    /// delay.
    devices: BTreeMap<EmcId, Ns>,
}

/// Returns whether the fence of host `fenced` must end this state of a slice.
fn is_ended_by_fence(state: State, fenced: HostId) -> bool {
    match state {
        State::Assigned(o)
        | State::Onlining(o)
        | State::Online(o)
        | State::Draining(o, DrainStage::Host { .. }) => o.host == fenced,
        State::Scrubbing(Scrub::Granting(host) | Scrub::Working(host) | Scrub::Leaving(host)) => {
            host == fenced
        }
        State::Free
        | State::Draining(_, DrainStage::Revoking)
        | State::Scrubbing(Scrub::Waiting | Scrub::Revoking { .. })
        | State::Quarantined(_) => false,
    }
}

impl GroundTruth {
    /// Returns the pending fences as pairs of a device and the host to fence. Includes only devices
    /// that can revoke access.
    fn pending_fences(&self) -> Vec<(EmcId, HostId)> {
        let hosts = self.records.range(Key::Host(HostId(0))..Key::Slice(SliceId(0)));
        let fencing = hosts.filter_map(|(_, record)| match record {
            Record::Host(id, host) if matches!(host.fence, Fence::Fencing { .. }) => Some((*id, host)),
            _ => None,
        });
        let with_emcs =
            |(id, host): (HostId, &Host)| host.emcs.iter().map(|emc| (*emc, id)).collect::<Vec<_>>();
        let can_revoke = |emc: &Emc| emc.serial.is_none();
        fencing.flat_map(with_emcs).filter(|(emc, _)| self.emc(*emc).is_some_and(can_revoke)).collect()
    }

    /// Returns the VM slices whose epoch their device has not recorded, each with its reservation.
    /// The manager treats a device without this epoch as failed.
    pub(in crate::world) fn slices_missing_from<'a>(
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
            let device = devices.iter().find(|device| device.contains(*slice))?;
            let has_epoch = device.has_epoch(Holding { slice: *slice, epoch: *epoch });
            (!has_epoch).then_some((*slice, o.reservation))
        })
    }

    fn find_undrained_slice(&self, emc: EmcId, host: HostId) -> Option<SliceId> {
        let emc = self.emc(emc)?;
        let mut slices = (emc.first.0..emc.first.0 + emc.slices).map(SliceId);
        slices.find(|slice| is_ended_by_fence(self.slot(*slice).state, host))
    }
}

impl World {
    /// Restarts the time limits of all fences, after a period in which nothing ran.
    pub(in crate::world) fn reset_fence_progress(&mut self) {
        self.truth.fence_progress = FenceProgress::default();
    }

    pub(super) fn check_fence_progress(&mut self) {
        let now = self.now;
        let missing_slices: Vec<SliceId> =
            self.truth.slices_missing_from(&self.devices).map(|(slice, _)| slice).collect();
        let has_failed =
            |device: &Device| device.failed || missing_slices.iter().any(|slice| device.contains(*slice));
        for (emc, _) in (0..).map(EmcId).zip(&self.devices).filter(|(_, device)| has_failed(device)) {
            self.truth.fence_progress.devices.insert(emc, now.after(DEVICE_RETRY_DELAY));
        }
        let pairs = self.truth.pending_fences();
        let is_running = self.manager_process.running.is_some() && self.truth.handles.is_loaded();
        self.truth.fence_progress.fences.retain(|pair, _| is_running && pairs.contains(pair));
        for (emc, host) in pairs.into_iter().filter(|_| is_running) {
            let since = *self.truth.fence_progress.fences.entry((emc, host)).or_insert(now);
            let since =
                self.truth.fence_progress.devices.get(&emc).map_or(since, |usable| since.max(*usable));
            let overdue = now > since.after(FENCE_TIMEOUT);
            if let Some(slice) = self.truth.find_undrained_slice(emc, host).filter(|_| overdue) {
                let description =
                    format!("{emc} works but has not fenced {host}: slice {slice} does not drain");
                self.report_violation("a working EMC fences a host independently of other EMCs", description);
            }
        }
    }
}
