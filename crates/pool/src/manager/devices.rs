//! Devices: every durable intent is driven until the device confirms it. Calls are idempotent in
//! (slice, epoch), so they are repeated after a restart, a failure or a doubt.

use units::{EmcId, Epoch, HostId, Ns, SliceId, UnixMs, limits::DEVICE_RETRY};

use super::{Effect, Manager};
use crate::{
    ledger::{Change, Ledger, When},
    protocol::Handle,
    record::{Fence, Key},
    slice::{Call, Event, Quarantine, Scrub, Slot, State},
};

/// Device call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// Requests the contents, and tests whether the device works.
    Contents,
    /// Grants access to the slice to this host only.
    Grant {
        /// Slice.
        slice: SliceId,
        /// Epoch.
        epoch: Epoch,
        /// Host.
        host: HostId,
    },
    /// Revokes access under this epoch and earlier ones.
    Revoke {
        /// Slice.
        slice: SliceId,
        /// Highest epoch.
        epoch: Epoch,
    },
    /// Fences a host.
    Fence {
        /// Host.
        host: HostId,
        /// The host is known to have nothing left: a device that cannot revoke access need not have
        /// the machine stopped.
        powered_off: bool,
    },
}

/// Reply of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceReply {
    /// Contents.
    Contents(Contents),
    /// The host can access the slice.
    Granted {
        /// Slice.
        slice: SliceId,
        /// Epoch.
        epoch: Epoch,
        /// Handle on the host.
        handle: Handle,
    },
    /// No owner of this epoch or earlier can access the slice.
    Revoked {
        /// Slice.
        slice: SliceId,
        /// Highest epoch.
        epoch: Epoch,
    },
    /// The host can access nothing.
    Fenced {
        /// Host.
        host: HostId,
    },
    /// A call failed.
    Failed {
        /// Call.
        call: DeviceCall,
        /// Reason.
        failure: DeviceFailure,
    },
}

/// Error of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFailure {
    /// It has granted the slice under this epoch or a higher one before.
    StaleEpoch {
        /// Highest epoch known to the device.
        highest: Epoch,
    },
    /// Any other error, as described by the driver: the device counts as failed until it replies
    /// again.
    Error(String),
    /// It cannot revoke the host's access, with the reason why the machine was not stopped. The
    /// device works.
    NotFenced(String),
    /// A grant or revocation failed for a reason of its slice only. The device works.
    Slice(SliceError),
    /// It grants the slice to another owner. The device works.
    Held {
        /// Epoch.
        epoch: Epoch,
        /// Host.
        host: HostId,
    },
}

/// Error of a grant or revocation of one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceError {
    /// Description by the driver.
    pub message: String,
    /// `errno`, if the error came from the operating system.
    pub errno: Option<i32>,
}

/// Contents of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Slices that a host can access.
    pub grants: Vec<Grant>,
    /// Highest epoch granted, by slice; absent if never granted.
    pub highest: Vec<(SliceId, Epoch)>,
    /// Location of a slice on hosts, if it is the same for every grant: it is then also known for
    /// grants that the device has lost.
    pub places: Vec<(SliceId, Handle)>,
}

/// Slice that a host can access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Slice.
    pub slice: SliceId,
    /// Epoch.
    pub epoch: Epoch,
    /// Host.
    pub host: HostId,
    /// Handle on the host.
    pub handle: Handle,
}

/// State of a device beside the ledger.
#[derive(Clone, Debug)]
pub(super) struct DeviceLink {
    pub(super) condition: Condition,
    is_requested: bool,
    /// Its contents were compared with the ledger since the store was loaded.
    is_compared: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Its contents are being compared with the ledger.
    Starting,
    /// It works.
    Up,
    /// It has failed.
    Failed { error: String, since: UnixMs, retry_at: Ns },
}

impl DeviceLink {
    /// State of a device that was compared and works.
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
    /// Adds an EMC of the rack.
    pub(super) fn expect_emc(&mut self, emc: EmcId) {
        if !self.devices.contains_key(&emc) {
            self.compare_emc(emc);
        }
    }

    /// Requests the contents of an EMC. It is not used before they are compared with the ledger,
    /// also after the store was loaded again: results of an earlier comparison may not be durable,
    /// and replies received meanwhile were ignored.
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
        self.fencing.retain(|(of, _), _| *of != emc);
        self.stop_attempts.remove_emc(emc);
    }

    /// Handles the removal of a slice with its EMC. Its number is never reused.
    pub(super) fn drop_slice(&mut self, slice: SliceId) {
        self.calls.remove(&slice);
        self.faults.remove(slice);
        self.quarantined_at.remove(&slice);
        self.handles.remove(&slice);
        self.places.remove(&slice);
    }

    pub(super) fn set_emc_up(&mut self, emc: EmcId, up: bool) {
        self.changed = true;
        self.head.set_emc_up(emc, up);
        self.durable.set_emc_up(emc, up);
    }

    /// Returns whether an EMC of a host has yet to be compared with the ledger.
    pub(super) fn has_starting_emc(&self, host: HostId) -> bool {
        let starting =
            |emc: &EmcId| self.devices.get(emc).is_none_or(|link| link.condition == Condition::Starting);
        self.head.host(host).is_some_and(|entry| entry.host.emcs.iter().any(starting))
    }

    /// Returns the first EMC of a host that was not compared with the ledger, because it is
    /// starting or has failed.
    pub(super) fn uncompared_emc(&self, host: HostId) -> Option<EmcId> {
        let emcs = &self.head.host(host)?.host.emcs;
        emcs.iter().copied().find(|emc| !self.is_compared(*emc))
    }

    pub(super) fn has_uncompared_emc(&self, host: HostId) -> bool {
        self.uncompared_emc(host).is_some()
    }

    pub(super) fn is_compared(&self, emc: EmcId) -> bool {
        self.devices.get(&emc).is_some_and(|link| link.is_compared)
    }

    /// Returns whether a slice is on an EMC that was not compared with the ledger.
    pub(super) fn is_uncompared(&self, slice: SliceId) -> bool {
        self.head.emc_of(slice).is_some_and(|emc| !self.is_compared(emc))
    }

    /// Makes the device call required by a durable slot, unless a newer decision supersedes it or a
    /// call is in progress.
    pub(super) fn drive_slice(&mut self, slice: SliceId) {
        let Some(slot) = self.durable.slot(slice) else { return };
        let Some(emc) = self.durable.emc_of(slice) else { return };
        let Some(call) = slot.device_call(self.durable.can_revoke(slice)) else {
            return drop(self.faults.remove(slice));
        };
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        if self.has_pending_decision(slice) || !up || self.faults.is_paused(slice) {
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

    /// Returns whether a decision about a slice is not durable yet.
    pub(super) fn has_pending_decision(&self, slice: SliceId) -> bool {
        let of = |ledger: &Ledger| ledger.slot(slice).map(|slot| (slot.state, slot.epoch));
        of(&self.head) != of(&self.durable)
    }

    /// Returns whether a host may be granted slices: not while it is fenced, nor after its return
    /// before the EMC has confirmed the fence.
    fn is_fenced_at(&self, emc: EmcId, call: Call) -> bool {
        let Call::Grant { host, .. } = call else { return false };
        self.head.host(host).is_none_or(|entry| {
            entry.host.fence != Fence::None || entry.host.unconfirmed_fences.contains(&emc)
        })
    }

    pub(super) fn on_device(&mut self, when: When, emc: EmcId, reply: DeviceReply) {
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
            return; // the contents are requested after the store is loaded again
        }
        match reply {
            DeviceReply::Contents(contents) => self.begin_comparison(when, emc, contents),
            DeviceReply::Granted { slice, epoch, handle } => {
                self.handles.insert(slice, (epoch, handle));
                self.slice_event(when, slice, Event::Granted(epoch));
                self.drive_slice(slice);
            }
            DeviceReply::Revoked { slice, epoch } => {
                self.handles.remove(&slice);
                self.slice_event(when, slice, Event::Revoked(epoch));
                self.drive_slice(slice);
            }
            DeviceReply::Fenced { host } => {
                self.on_fenced(when, emc, host);
                self.repeat_comparison(emc);
            }
            DeviceReply::Failed { call, failure } => self.on_failed(when, emc, &call, failure),
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

    fn on_failed(&mut self, when: When, emc: EmcId, call: &DeviceCall, failure: DeviceFailure) {
        match (failure, call) {
            (DeviceFailure::StaleEpoch { highest }, DeviceCall::Grant { slice, host, .. }) => {
                self.slice_event(when, *slice, Event::Raise(highest));
                let why = Event::Quarantine(Quarantine::UnknownGrant { host: *host });
                self.quarantine(when, *slice, why, "the device has revoked a later epoch");
            }
            (DeviceFailure::NotFenced(why), DeviceCall::Fence { host, .. }) => {
                self.on_not_fenced(when, emc, *host, why);
            }
            (
                DeviceFailure::Slice(error),
                DeviceCall::Grant { slice, .. } | DeviceCall::Revoke { slice, .. },
            ) => {
                self.on_slice_failed(when, *slice, error);
            }
            (DeviceFailure::Held { epoch, host }, DeviceCall::Grant { slice, .. }) => {
                self.slice_event(when, *slice, Event::Raise(epoch));
                let why = Event::Quarantine(Quarantine::UnknownGrant { host });
                self.quarantine(when, *slice, why, &format!("epoch {epoch} at the device"));
            }
            (
                DeviceFailure::StaleEpoch { .. } | DeviceFailure::NotFenced(_) | DeviceFailure::Held { .. },
                _,
            ) => {}
            // A failed fence is driven again after the next comparison of the EMC.
            (DeviceFailure::Slice(SliceError { message: error, .. }) | DeviceFailure::Error(error), _) => {
                self.fail_emc(when, emc, error);
            }
        }
    }

    pub(super) fn fail_emc(&mut self, when: When, emc: EmcId, error: String) {
        self.drop_comparison(emc);
        let since = match &self.devices[&emc].condition {
            Condition::Failed { since, .. } => *since,
            Condition::Starting | Condition::Up => when.wall,
        };
        let condition = Condition::Failed { error, since, retry_at: when.now.after(DEVICE_RETRY) };
        let is_compared = self.is_compared(emc);
        self.devices.insert(emc, DeviceLink { condition, is_requested: false, is_compared });
        self.set_emc_up(emc, false);
    }

    /// Requests the contents of a failed device again after a delay.
    pub(super) fn retry_devices(&mut self, when: When) {
        for (emc, link) in &mut self.devices {
            if link.next_wakeup().is_some_and(|at| at <= when.now) {
                link.is_requested = true;
                self.effects.push_back(Effect::Device(*emc, DeviceCall::Contents));
            }
        }
    }

    /// Publishes handles of a device with the next durable revision: two desired states of one
    /// version are equal, so a reply to one cannot be mistaken for a reply to the other.
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
            // The comparison's decisions wait for a durable write, and while the store fails a
            // later grant may precede them.
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

    pub(super) fn compare(
        &mut self,
        when: When,
        slice: SliceId,
        slot: Slot,
        highest: Epoch,
        grant: Option<&Grant>,
    ) {
        if highest > slot.epoch {
            self.slice_event(when, slice, Event::Raise(highest));
        }
        let restored = matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }));
        // A device that can revoke access has lost the grant of a slice that its host was to
        // release: nothing is left to release.
        if let (None, State::Scrubbing(Scrub::Leaving(host)), true) =
            (grant, slot.state, self.head.can_revoke(slice))
        {
            return self.slice_event(when, slice, Event::OwnerFenced(host));
        }
        // The host that may reach it, independent of the device's record.
        let holder = slot.holder().filter(|_| !self.head.can_revoke(slice));
        let expected = |grant: &Grant| grant.epoch == slot.epoch && slot.holder() == Some(grant.host);
        // Epochs count owners: a record with an earlier epoch is older than the ledger or a host's
        // report.
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
                (Quarantine::LostRecord { host }, format!("it names the owner of epoch {}", grant.epoch))
            }
            Some(grant) => {
                let detail = format!("epoch {} at the device, {} in the ledger", grant.epoch, slot.epoch);
                (Quarantine::UnknownGrant { host: grant.host }, detail)
            }
            None if self.is_being_fenced(slot) => return, // the device may have performed it: the call is repeated
            None if needs_grant(slot)
                && let Some(host) = holder =>
            {
                (Quarantine::LostRecord { host }, String::new())
            }
            None if needs_grant(slot) => (Quarantine::LostGrant, String::new()),
            None if slot.state == State::Free && highest > slot.epoch => {
                let detail = format!("the device has seen epoch {highest}, the ledger {}", slot.epoch);
                (Quarantine::Restored { host: None }, detail)
            }
            None => return,
        };
        self.quarantine(when, slice, Event::Quarantine(why), &detail);
    }

    fn is_being_fenced(&self, slot: Slot) -> bool {
        let host = slot.holder().and_then(|host| self.head.host(host));
        host.is_some_and(|entry| matches!(entry.host.fence, Fence::Fencing { .. }))
    }

    pub(super) fn quarantine(&mut self, when: When, slice: SliceId, event: Event, detail: &str) {
        if let Some(change) = self.head.decide_quarantine(when, slice, event, detail) {
            self.adoption_events += 1;
            self.change(when, change);
        }
    }
}

/// Returns whether a slot states that the device has confirmed its grant and not yet revoked it.
fn needs_grant(slot: Slot) -> bool {
    use crate::slice::Drain;
    matches!(
        slot.state,
        State::Onlining(_)
            | State::Online(_)
            | State::Draining(_, Drain::Host { .. })
            | State::Scrubbing(Scrub::Working(_))
    )
}
