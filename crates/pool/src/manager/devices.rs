//! Device calls. The call that a durable slot requires is repeated until the device confirms it.
//! Calls are idempotent for each slice and epoch, so they can be repeated after a restart or a
//! failure.

use units::{EmcId, Epoch, HostId, Ns, SliceId, UnixMs, limits::DEVICE_RETRY_DELAY};

use super::{Effect, Manager};
use crate::{
    ledger::{Change, Ledger, When},
    protocol::Handle,
    record::{Fence, Key},
    slice::{Call, Event, Quarantine, Scrub, Slot, State},
};

/// Call to an EMC's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// Requests the contents of the device; also tests whether the device works.
    Contents,
    /// Grants this host exclusive access to the slice.
    Grant {
        /// Slice to grant.
        slice: SliceId,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Host that gets access.
        host: HostId,
    },
    /// Revokes the grants of this epoch and of earlier epochs.
    Revoke {
        /// Slice to revoke.
        slice: SliceId,
        /// Highest epoch to revoke.
        epoch: Epoch,
    },
    /// Revokes all access of a host.
    Fence {
        /// Host to fence.
        host: HostId,
        /// Whether the host is known to be powered off or clean. If set, a device that cannot
        /// revoke access is fenced without stopping the machine.
        powered_off: bool,
    },
}

/// Reply of an EMC's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceReply {
    /// The contents of the device.
    Contents(Contents),
    /// The device granted the slice to the host.
    Granted {
        /// Granted slice.
        slice: SliceId,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Location of the slice on the host.
        handle: Handle,
    },
    /// No owner of this epoch or an earlier epoch can access the slice.
    Revoked {
        /// Revoked slice.
        slice: SliceId,
        /// Highest revoked epoch.
        epoch: Epoch,
    },
    /// The host can access no slice of the device.
    Fenced {
        /// Fenced host.
        host: HostId,
    },
    /// A device call failed.
    Failed {
        /// Failed call.
        call: DeviceCall,
        /// Reason of the failure.
        failure: DeviceFailure,
    },
}

/// Error of a device call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFailure {
    /// The device has already granted the slice under this epoch or a higher epoch.
    StaleEpoch {
        /// Highest epoch that the device has recorded for the slice.
        highest: Epoch,
    },
    /// Any other error; the text is the driver's description. The EMC counts as failed until its
    /// device replies again.
    Error(String),
    /// The device cannot revoke the host's access, and the machine was not stopped; the text is the
    /// reason. The device itself works.
    NotFenced(String),
    /// A grant or revocation failed because of an error of one slice. The device itself works.
    Slice(SliceError),
    /// The device has granted the slice to another owner. The device itself works.
    Held {
        /// Epoch of the existing grant.
        epoch: Epoch,
        /// Host of the existing grant.
        host: HostId,
    },
}

/// Error of a grant or revocation that concerns only one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceError {
    /// Error message of the device driver.
    pub message: String,
    /// `errno`, if the error came from the operating system.
    pub errno: Option<i32>,
}

/// Contents of a device, as reported by its driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Grants of the device, each of one slice to one host.
    pub grants: Vec<Grant>,
    /// Highest epoch granted for each slice; slices that were never granted are absent.
    pub highest: Vec<(SliceId, Epoch)>,
    /// Locations of slices whose location on a host is the same for every grant. These locations
    /// are available even if the device has lost the grant.
    pub places: Vec<(SliceId, Handle)>,
}

/// Grant of a slice to a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Granted slice.
    pub slice: SliceId,
    /// Epoch of the grant.
    pub epoch: Epoch,
    /// Host that can access the slice.
    pub host: HostId,
    /// Location of the slice on the host.
    pub handle: Handle,
}

/// Volatile state of a device.
#[derive(Clone, Debug)]
pub(super) struct DeviceLink {
    pub(super) condition: Condition,
    is_requested: bool,
    /// Whether the contents were compared with the ledger since the store was loaded.
    is_compared: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// The contents of the device are being compared with the ledger.
    Starting,
    /// The device works, and its contents were compared with the ledger.
    Up,
    /// The device has failed; its contents are requested again at `retry_at`.
    Failed { error: String, since: UnixMs, retry_at: Ns },
}

impl DeviceLink {
    /// Returns the state of a device that works and was compared with the ledger.
    pub(super) fn up() -> Self {
        Self { condition: Condition::Up, is_requested: false, is_compared: true }
    }

    pub(super) fn is_up(&self) -> bool {
        self.condition == Condition::Up
    }

    pub(super) fn is_starting(&self) -> bool {
        self.condition == Condition::Starting
    }

    pub(super) fn next_wakeup(&self) -> Option<Ns> {
        match self.condition {
            Condition::Failed { retry_at, .. } if !self.is_requested => Some(retry_at),
            _ => None,
        }
    }
}

impl Manager {
    /// Starts to compare an EMC that was added to the rack.
    pub(super) fn compare_new_emc(&mut self, emc: EmcId) {
        if !self.devices.contains_key(&emc) {
            self.compare_emc(emc);
        }
    }

    /// Requests the contents of an EMC. The EMC is not used before its contents are compared with
    /// the ledger. The comparison is repeated after each load of the store, because results of an
    /// earlier comparison may not be durable and replies during the load were ignored.
    pub(super) fn compare_emc(&mut self, emc: EmcId) {
        self.drop_comparison(emc);
        let link = self.devices.remove(&emc);
        let failed = link.map(|link| link.condition).filter(|c| matches!(c, Condition::Failed { .. }));
        let condition = failed.unwrap_or(Condition::Starting);
        self.devices.insert(emc, DeviceLink { condition, is_requested: true, is_compared: false });
        self.set_emc_up(emc, false);
        self.effects.push_back(Effect::Device(emc, DeviceCall::Contents));
    }

    pub(super) fn drop_emc(&mut self, emc: EmcId) {
        self.drop_comparison(emc);
        self.devices.remove(&emc);
        self.fence_calls.retain(|(of, _), _| *of != emc);
        self.stop_attempts.remove_emc(emc);
    }

    /// Drops the state of a slice that was removed with its EMC. Slice IDs are never reused.
    pub(super) fn drop_slice(&mut self, slice: SliceId) {
        self.calls.remove(&slice);
        self.faults.remove(slice);
        self.release_failures.remove(&slice);
        self.quarantined_at.remove(&slice);
        self.handles.remove(&slice);
        self.places.remove(&slice);
    }

    pub(super) fn set_emc_up(&mut self, emc: EmcId, up: bool) {
        self.changed = true;
        self.head.set_emc_up(emc, up);
        self.durable.set_emc_up(emc, up);
    }

    /// Returns whether an EMC of a host is starting: it has not been compared with the ledger and
    /// has not failed.
    pub(super) fn has_starting_emc(&self, host: HostId) -> bool {
        let starting =
            |emc: &EmcId| self.devices.get(emc).is_none_or(|link| link.condition == Condition::Starting);
        self.head.host(host).is_some_and(|entry| entry.host.emcs.iter().any(starting))
    }

    /// Returns the first of a host's EMCs that was not compared with the ledger, because the EMC is
    /// starting or has failed.
    pub(super) fn first_uncompared_emc(&self, host: HostId) -> Option<EmcId> {
        let emcs = &self.head.host(host)?.host.emcs;
        emcs.iter().copied().find(|emc| !self.is_compared(*emc))
    }

    pub(super) fn has_uncompared_emc(&self, host: HostId) -> bool {
        self.first_uncompared_emc(host).is_some()
    }

    pub(super) fn is_compared(&self, emc: EmcId) -> bool {
        self.devices.get(&emc).is_some_and(|link| link.is_compared)
    }

    /// Returns whether a slice is on an EMC that was not compared with the ledger.
    pub(super) fn is_uncompared(&self, slice: SliceId) -> bool {
        self.head.emc_of(slice).is_some_and(|emc| !self.is_compared(emc))
    }

    /// Makes the device call that the durable slot of a slice requires. Does nothing if a decision
    /// about the slice is pending, or a call for the slice is in progress.
    pub(super) fn advance_slice(&mut self, slice: SliceId) {
        let Some(slot) = self.durable.slot(slice) else { return };
        let Some(emc) = self.durable.emc_of(slice) else { return };
        let Some(call) = slot.device_call(self.durable.can_revoke(slice)) else {
            return drop(self.faults.remove(slice));
        };
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        if self.has_pending_decision(slice) || !up || self.faults.is_waiting_for_retry(slice) {
            return;
        }
        if self.calls.contains_key(&slice) || self.is_fenced_at(emc, call) {
            return;
        }
        self.calls.insert(slice, call);
        let call = match call {
            Call::Grant { epoch, host } => DeviceCall::Grant { slice, epoch, host },
            Call::Revoke { epoch } => DeviceCall::Revoke { slice, epoch },
        };
        self.effects.push_back(Effect::Device(emc, call));
    }

    /// Returns whether the latest decision about a slice is not durable yet.
    pub(super) fn has_pending_decision(&self, slice: SliceId) -> bool {
        let of = |ledger: &Ledger| ledger.slot(slice).map(|slot| (slot.state, slot.epoch));
        of(&self.head) != of(&self.durable)
    }

    /// Returns whether a grant must wait because of a fence: its host is fenced, or has returned
    /// while the EMC has not confirmed the fence.
    fn is_fenced_at(&self, emc: EmcId, call: Call) -> bool {
        let Call::Grant { host, .. } = call else { return false };
        self.head.host(host).is_none_or(|entry| {
            entry.host.fence != Fence::None || entry.host.unconfirmed_fences.contains(&emc)
        })
    }

    pub(super) fn on_device_reply(&mut self, when: When, emc: EmcId, reply: DeviceReply) {
        match &reply {
            DeviceReply::Granted { slice, .. } | DeviceReply::Revoked { slice, .. } => {
                self.calls.remove(slice);
                self.changed |= self.faults.remove(*slice).is_some();
            }
            DeviceReply::Failed { call, .. } => self.on_call_failed(emc, call),
            DeviceReply::Fenced { host } => self.on_fence_reply(emc, *host, true),
            DeviceReply::Contents(_) => {}
        }
        if !self.loaded || !self.devices.contains_key(&emc) {
            // After the store is loaded, the contents are requested again.
            return;
        }
        match reply {
            DeviceReply::Contents(contents) => self.begin_comparison(when, emc, contents),
            DeviceReply::Granted { slice, epoch, handle } => {
                self.handles.insert(slice, (epoch, handle));
                self.apply_slice_event(when, slice, Event::Granted(epoch));
                self.advance_slice(slice);
            }
            DeviceReply::Revoked { slice, epoch } => {
                self.handles.remove(&slice);
                self.apply_slice_event(when, slice, Event::Revoked(epoch));
                self.advance_slice(slice);
            }
            DeviceReply::Fenced { host } => {
                self.on_host_fenced(when, emc, host);
                self.repeat_comparison(emc);
            }
            DeviceReply::Failed { call, failure } => self.on_device_failure(when, emc, &call, failure),
        }
    }

    fn on_call_failed(&mut self, emc: EmcId, call: &DeviceCall) {
        match call {
            DeviceCall::Grant { slice, .. } | DeviceCall::Revoke { slice, .. } => {
                self.calls.remove(slice);
            }
            DeviceCall::Fence { host, powered_off } => self.on_fence_reply(emc, *host, *powered_off),
            DeviceCall::Contents => {}
        }
    }

    fn on_device_failure(&mut self, when: When, emc: EmcId, call: &DeviceCall, failure: DeviceFailure) {
        match (failure, call) {
            (DeviceFailure::StaleEpoch { highest }, DeviceCall::Grant { slice, host, .. }) => {
                self.apply_slice_event(when, *slice, Event::Raise(highest));
                let why = Event::Quarantine(Quarantine::UnknownGrant { host: *host });
                self.quarantine_slice(when, *slice, why, "the device has revoked a later epoch");
            }
            (DeviceFailure::NotFenced(why), DeviceCall::Fence { host, .. }) => {
                self.on_stop_failed(when, emc, *host, why);
            }
            (
                DeviceFailure::Slice(error),
                DeviceCall::Grant { slice, .. } | DeviceCall::Revoke { slice, .. },
            ) => {
                self.on_slice_failed(when, *slice, error);
            }
            (DeviceFailure::Held { epoch, host }, DeviceCall::Grant { slice, .. }) => {
                self.apply_slice_event(when, *slice, Event::Raise(epoch));
                let why = Event::Quarantine(Quarantine::UnknownGrant { host });
                self.quarantine_slice(when, *slice, why, &format!("the device has epoch {epoch}"));
            }
            (
                DeviceFailure::StaleEpoch { .. } | DeviceFailure::NotFenced(_) | DeviceFailure::Held { .. },
                _,
            ) => {}
            // A failed fence call is repeated after the next comparison of the EMC.
            (DeviceFailure::Slice(SliceError { message: error, .. }) | DeviceFailure::Error(error), _) => {
                self.mark_emc_failed(when, emc, error);
            }
        }
    }

    pub(super) fn mark_emc_failed(&mut self, when: When, emc: EmcId, error: String) {
        self.drop_comparison(emc);
        let since = match &self.devices[&emc].condition {
            Condition::Failed { since, .. } => *since,
            Condition::Starting | Condition::Up => when.wall,
        };
        let condition = Condition::Failed { error, since, retry_at: when.now.after(DEVICE_RETRY_DELAY) };
        let is_compared = self.is_compared(emc);
        self.devices.insert(emc, DeviceLink { condition, is_requested: false, is_compared });
        self.set_emc_up(emc, false);
    }

    /// Requests the contents of failed devices whose retry time has come.
    pub(super) fn retry_devices(&mut self, when: When) {
        for (emc, link) in &mut self.devices {
            if link.next_wakeup().is_some_and(|at| at <= when.now) {
                link.is_requested = true;
                self.effects.push_back(Effect::Device(*emc, DeviceCall::Contents));
            }
        }
    }

    /// Lets pending handles be published with a new durable revision. Desired states of the same
    /// version must be equal, because agents confirm desired states by version.
    pub(super) fn store_pending_handles(&mut self, when: When) {
        if !self.pending_handles.is_empty() || !self.pending_places.is_empty() {
            let meta = self.head.record(Key::Meta);
            self.change(when, Change(vec![meta]));
        }
    }

    pub(super) fn publish_pending_handles(&mut self) {
        for (slice, place) in std::mem::take(&mut self.pending_places) {
            self.notify_holder(slice);
            self.places.insert(slice, place);
        }
        for (slice, granted) in std::mem::take(&mut self.pending_handles) {
            self.notify_holder(slice);
            // The handles of a comparison wait for a durable write. While the store fails, a newer
            // grant may arrive before they are published.
            if self.handles.get(&slice).is_none_or(|(known, _)| *known <= granted.0) {
                self.handles.insert(slice, granted);
            }
        }
    }

    fn notify_holder(&mut self, slice: SliceId) {
        if let Some(slot) = self.durable.slot(slice)
            && let Some(host) = slot.holder()
        {
            self.notify_slice(host, slice, [slot.reservation(), None]);
        }
    }

    pub(super) fn compare_slice(
        &mut self,
        when: When,
        slice: SliceId,
        slot: Slot,
        highest: Epoch,
        grant: Option<&Grant>,
    ) {
        self.apply_slice_event(when, slice, Event::Raise(highest));
        let restored = matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }));
        // If the device can revoke access and no longer has the grant, the host cannot reach the
        // slice and need not release it.
        if let (None, State::Scrubbing(Scrub::Leaving(host)), true) =
            (grant, slot.state, self.head.can_revoke(slice))
        {
            return self.apply_slice_event(when, slice, Event::OwnerFenced(host));
        }
        // Host that may reach the slice, regardless of the device's record.
        let holder = slot.holder().filter(|_| !self.head.can_revoke(slice));
        let expected = |grant: &Grant| {
            grant.epoch == slot.epoch && highest <= slot.epoch && slot.holder() == Some(grant.host)
        };
        // Epochs increase with each owner of a slice. A record with a lower epoch is therefore
        // older than the ledger, which may include a host's report.
        let is_outdated =
            |grant: &Grant| grant.epoch < slot.epoch && holder.is_some_and(|host| host != grant.host);
        let (why, detail) = match grant {
            Some(grant) if restored && is_outdated(grant) => return,
            Some(grant) if restored => (Quarantine::Restored { host: Some(grant.host) }, String::new()),
            None if restored && holder.is_some() => return,
            None if restored => (Quarantine::Restored { host: None }, String::new()),
            Some(grant) if expected(grant) => return,
            Some(grant)
                if is_outdated(grant)
                    && let Some(host) = holder =>
            {
                (
                    Quarantine::LostRecord { host },
                    format!("the record contains the grant of epoch {}", grant.epoch),
                )
            }
            Some(grant) => {
                let on_device = highest.max(grant.epoch);
                let detail = format!("the device has epoch {on_device}, the ledger has epoch {}", slot.epoch);
                (Quarantine::UnknownGrant { host: grant.host }, detail)
            }
            // The device may already have performed the fence; the fence call will be repeated.
            None if self.is_being_fenced(slot) => return,
            None if needs_grant(slot)
                && let Some(host) = holder =>
            {
                (Quarantine::LostRecord { host }, String::new())
            }
            None if needs_grant(slot) => (Quarantine::LostGrant, String::new()),
            None if slot.state == State::Free && highest > slot.epoch => {
                let detail = format!("the device has epoch {highest}, the ledger has epoch {}", slot.epoch);
                (Quarantine::Restored { host: None }, detail)
            }
            None => return,
        };
        self.quarantine_slice(when, slice, Event::Quarantine(why), &detail);
    }

    fn is_being_fenced(&self, slot: Slot) -> bool {
        let host = slot.holder().and_then(|host| self.head.host(host));
        host.is_some_and(|entry| matches!(entry.host.fence, Fence::Fencing { .. }))
    }

    pub(super) fn quarantine_slice(&mut self, when: When, slice: SliceId, event: Event, detail: &str) {
        if let Some(change) = self.head.decide_quarantine(when, slice, event, detail) {
            self.adoption_events += 1;
            self.change(when, change);
        }
    }
}

/// Returns whether the device must have a grant for the slot: the device has confirmed the grant,
/// and no revocation was requested since.
fn needs_grant(slot: Slot) -> bool {
    use crate::slice::DrainStage;
    matches!(
        slot.state,
        State::Onlining(_)
            | State::Online(_)
            | State::Draining(_, DrainStage::Host { .. })
            | State::Scrubbing(Scrub::Working(_))
    )
}
