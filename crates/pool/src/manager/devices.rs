//! Devices: every durable intent is driven until the device confirms it. Calls are idempotent on (slice, epoch), so
//! after a restart, a failure or a doubt they are simply made again.

use units::{EmcId, Epoch, HostId, Ns, SliceId, UnixMs, limits::DEVICE_RETRY};

use super::{Effect, Manager};
use crate::{
    ledger::{Change, Ledger, When},
    protocol::Handle,
    record::{Fence, Key},
    slice::{Call, Event, Quarantine, Scrub, Slot, State},
};

/// What a device is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// What do you hold? Also the question whether it works at all.
    Contents,
    /// Let this host reach the slice, and nobody else.
    Grant {
        /// Which slice.
        slice: SliceId,
        /// Under which number.
        epoch: Epoch,
        /// Which host.
        host: HostId,
    },
    /// Let nobody who got it under this number, or an older one, reach the slice.
    Revoke {
        /// Which slice.
        slice: SliceId,
        /// Up to which number.
        epoch: Epoch,
    },
    /// Cut a host off everything.
    Fence {
        /// Which host.
        host: HostId,
        /// It is vouched for or proven that nothing is left on the host: a device that cannot cut it off need not have
        /// the machine stopped.
        powered_off: bool,
    },
}

/// What a device answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceDone {
    /// This is what it holds.
    Contents(Contents),
    /// The host can reach the slice.
    Granted {
        /// Which slice.
        slice: SliceId,
        /// Under which number.
        epoch: Epoch,
        /// How the driver names it on a host.
        handle: Handle,
    },
    /// Nobody of that number or older can reach the slice.
    Revoked {
        /// Which slice.
        slice: SliceId,
        /// Up to which number.
        epoch: Epoch,
    },
    /// The host can reach nothing.
    Fenced {
        /// Which host.
        host: HostId,
    },
    /// A call could not be done.
    Failed {
        /// Which.
        call: DeviceCall,
        /// Why.
        failure: DeviceFailure,
    },
}

/// Why a device could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFailure {
    /// It has granted this slice under this number or a higher one before.
    StaleEpoch {
        /// The highest number it knows.
        highest: Epoch,
    },
    /// Anything else, in the driver's words: the device counts as failed until it answers again.
    Error(String),
    /// It cannot cut the host off, and why the machine was not stopped. The device works.
    NotFenced(String),
    /// A grant or a revocation failed for a reason of its slice alone. The device works.
    Slice(SliceError),
    /// It grants the slice to another owner. The device works.
    Held {
        /// Under which number.
        epoch: Epoch,
        /// Which host.
        host: HostId,
    },
}

/// Why a device could not grant or revoke one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceError {
    /// In the driver's words.
    pub message: String,
    /// As the operating system numbers it, if it was the operating system.
    pub errno: Option<i32>,
}

/// What a device holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Slices that some host can reach.
    pub grants: Vec<Grant>,
    /// The highest number ever granted, by slice; none means never.
    pub highest: Vec<(SliceId, Epoch)>,
    /// Where a host finds a slice whoever has it, if that is the same for every grant: then it is known of one that the device
    /// has forgotten, too.
    pub places: Vec<(SliceId, Handle)>,
}

/// A slice that a host can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Which slice.
    pub slice: SliceId,
    /// Under which number.
    pub epoch: Epoch,
    /// Which host.
    pub host: HostId,
    /// How the driver names it on a host.
    pub handle: Handle,
}

/// What the manager knows of a device beside the ledger.
#[derive(Clone, Debug)]
pub(super) struct DeviceLink {
    pub(super) condition: Condition,
    asked: bool,
    /// Its contents have been compared with the ledger since the store was read.
    compared: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Its contents are being compared with the ledger.
    Starting,
    /// It works.
    Up,
    /// It does not.
    Failed { error: String, since: UnixMs, retry_at: Ns },
}

impl DeviceLink {
    /// Of a device that has been compared and works.
    pub(super) fn up() -> Self {
        Self { condition: Condition::Up, asked: false, compared: true }
    }

    pub(super) fn is_up(&self) -> bool {
        self.condition == Condition::Up
    }

    pub(super) fn is_starting(&self) -> bool {
        self.condition == Condition::Starting
    }

    pub(super) fn next_wakeup(&self) -> Option<Ns> {
        match self.condition {
            Condition::Failed { retry_at, .. } if !self.asked => Some(retry_at),
            _ => None,
        }
    }
}

impl Manager {
    /// An EMC is part of the rack.
    pub(super) fn expect_emc(&mut self, emc: EmcId) {
        if !self.devices.contains_key(&emc) {
            self.compare_emc(emc);
        }
    }

    /// Asks an EMC what it holds; nothing is asked of it or taken from it before that is compared with the ledger. After
    /// the store was read again, too: what an earlier comparison found may not be on disk, and an answer that came
    /// meanwhile was not looked at.
    pub(super) fn compare_emc(&mut self, emc: EmcId) {
        self.drop_comparison(emc);
        let link = self.devices.remove(&emc);
        let failed = link.map(|link| link.condition).filter(|c| matches!(c, Condition::Failed { .. }));
        let condition = failed.unwrap_or(Condition::Starting);
        self.devices.insert(emc, DeviceLink { condition, asked: true, compared: false });
        self.set_emc_up(emc, false);
        self.effects.push_back(Effect::Device(emc, DeviceCall::Contents));
    }

    pub(super) fn drop_emc(&mut self, emc: EmcId) {
        self.drop_comparison(emc);
        self.devices.remove(&emc);
        self.fencing.retain(|(of, _), _| *of != emc);
        self.stop_attempts.remove_emc(emc);
    }

    /// A slice was removed with its EMC. Its number is never reused.
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

    /// Whether one of a host's EMCs has yet to be compared with the ledger.
    pub(super) fn has_starting_emc(&self, host: HostId) -> bool {
        let starting =
            |emc: &EmcId| self.devices.get(emc).is_none_or(|link| link.condition == Condition::Starting);
        self.head.host(host).is_some_and(|entry| entry.host.emcs.iter().any(starting))
    }

    /// The first EMC of a host whose contents have not been compared with the ledger, whether it starts or has failed.
    pub(super) fn uncompared_emc(&self, host: HostId) -> Option<EmcId> {
        let emcs = &self.head.host(host)?.host.emcs;
        emcs.iter().copied().find(|emc| !self.is_compared(*emc))
    }

    pub(super) fn has_uncompared_emc(&self, host: HostId) -> bool {
        self.uncompared_emc(host).is_some()
    }

    pub(super) fn is_compared(&self, emc: EmcId) -> bool {
        self.devices.get(&emc).is_some_and(|link| link.compared)
    }

    /// Whether a slice is on an EMC whose contents have not been compared with the ledger.
    pub(super) fn is_uncompared(&self, slice: SliceId) -> bool {
        self.head.emc_of(slice).is_some_and(|emc| !self.is_compared(emc))
    }

    /// Makes the device call that a durable slot owes, unless a newer decision has overtaken it or one is under way.
    pub(super) fn drive_slice(&mut self, slice: SliceId) {
        let Some(slot) = self.durable.slot(slice) else { return };
        let Some(emc) = self.durable.emc_of(slice) else { return };
        let Some(call) = slot.device_call(self.durable.cuts_off(slice)) else {
            return drop(self.faults.remove(slice));
        };
        let up = self.devices.get(&emc).is_some_and(DeviceLink::is_up);
        if self.is_overtaken(slice) || !up || self.faults.is_paused(slice) {
            return;
        }
        if self.calls.contains_key(&slice) || self.is_cut_off(emc, call) {
            return;
        }
        self.calls.insert(slice, call);
        let call = match call {
            Call::Grant { epoch, host } => DeviceCall::Grant { slice, epoch, host },
            Call::Revoke { epoch } => DeviceCall::Revoke { slice, epoch },
        };
        self.effects.push_back(Effect::Device(emc, call));
    }

    /// Whether more is decided about a slice than is durable.
    pub(super) fn is_overtaken(&self, slice: SliceId) -> bool {
        let of = |ledger: &Ledger| ledger.slot(slice).map(|slot| (slot.state, slot.epoch));
        of(&self.head) != of(&self.durable)
    }

    /// A host that is fenced is granted nothing, nor one that returned before the EMC had cut it off.
    fn is_cut_off(&self, emc: EmcId, call: Call) -> bool {
        let Call::Grant { host, .. } = call else { return false };
        self.head.host(host).is_none_or(|entry| {
            entry.host.fence != Fence::None || entry.host.unconfirmed_fences.contains(&emc)
        })
    }

    pub(super) fn on_device(&mut self, when: When, emc: EmcId, done: DeviceDone) {
        match &done {
            DeviceDone::Granted { slice, .. } | DeviceDone::Revoked { slice, .. } => {
                self.calls.remove(slice);
                self.changed |= self.faults.remove(*slice).is_some();
            }
            DeviceDone::Failed { call, .. } => self.call_failed(emc, call),
            DeviceDone::Fenced { host } => self.fence_answered(emc, *host, true),
            DeviceDone::Contents(_) => {}
        }
        if !self.loaded || !self.devices.contains_key(&emc) {
            return; // once the store is read again the device is asked what it holds
        }
        match done {
            DeviceDone::Contents(contents) => self.begin_comparison(when, emc, contents),
            DeviceDone::Granted { slice, epoch, handle } => {
                self.handles.insert(slice, (epoch, handle));
                self.slice_event(when, slice, Event::Granted(epoch));
                self.drive_slice(slice);
            }
            DeviceDone::Revoked { slice, epoch } => {
                self.handles.remove(&slice);
                self.slice_event(when, slice, Event::Revoked(epoch));
                self.drive_slice(slice);
            }
            DeviceDone::Fenced { host } => {
                self.on_fenced(when, emc, host);
                self.repeat_comparison(emc);
            }
            DeviceDone::Failed { call, failure } => self.on_failed(when, emc, &call, failure),
        }
    }

    fn call_failed(&mut self, emc: EmcId, call: &DeviceCall) {
        match call {
            DeviceCall::Grant { slice, .. } | DeviceCall::Revoke { slice, .. } => {
                self.calls.remove(slice);
            }
            DeviceCall::Fence { host, powered_off } => self.fence_answered(emc, *host, *powered_off),
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
            // A fence that failed is driven again when the EMC has been compared anew.
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
        let compared = self.is_compared(emc);
        self.devices.insert(emc, DeviceLink { condition, asked: false, compared });
        self.set_emc_up(emc, false);
    }

    /// A failed device is asked again after a while what it holds.
    pub(super) fn retry_devices(&mut self, when: When) {
        for (emc, link) in &mut self.devices {
            if link.next_wakeup().is_some_and(|at| at <= when.now) {
                link.asked = true;
                self.effects.push_back(Effect::Device(*emc, DeviceCall::Contents));
            }
        }
    }

    /// Handles that a device named are shown to hosts with the next durable revision: two orders of one number are equal,
    /// so that the answer to one cannot be taken for the answer to the other.
    pub(super) fn note_found(&mut self, when: When) {
        if !self.found.is_empty() || !self.found_places.is_empty() {
            let meta = self.head.record(Key::Meta);
            self.change(when, Change(vec![meta]));
        }
    }

    pub(super) fn show_found(&mut self) {
        for (slice, place) in std::mem::take(&mut self.found_places) {
            self.tell_holder(slice);
            self.places.insert(slice, place);
        }
        for (slice, named) in std::mem::take(&mut self.found) {
            self.tell_holder(slice);
            // What was found waits for a durable write, and while the store fails a later grant may come before it.
            if self.handles.get(&slice).is_none_or(|(known, _)| *known <= named.0) {
                self.handles.insert(slice, named);
            }
        }
    }

    fn tell_holder(&mut self, slice: SliceId) {
        if let Some(slot) = self.durable.slot(slice)
            && let Some(host) = slot.holder()
        {
            self.tell_slice(host, slice, [slot.reservation(), None]);
        }
    }

    pub(super) fn compare(
        &mut self,
        when: When,
        slice: SliceId,
        slot: Slot,
        high: Epoch,
        grant: Option<&Grant>,
    ) {
        if high > slot.epoch {
            self.slice_event(when, slice, Event::Raise(high));
        }
        let restored = matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }));
        // A device that revokes has lost the grant of a slice that its host was asked to release: nothing is left to release.
        if let (None, State::Scrubbing(Scrub::Leaving(host)), true) =
            (grant, slot.state, self.head.cuts_off(slice))
        {
            return self.slice_event(when, slice, Event::OwnerFenced(host));
        }
        // Who may reach it whatever the device's record says.
        let kept = slot.holder().filter(|_| !self.head.cuts_off(slice));
        let expected = |grant: &Grant| grant.epoch == slot.epoch && slot.holder() == Some(grant.host);
        // Epochs count owners: a record that names an earlier one is older than the ledger or a host's report.
        let is_outdated =
            |grant: &Grant| grant.epoch < slot.epoch && kept.is_some_and(|host| host != grant.host);
        let (why, detail) = match grant {
            Some(grant) if restored && is_outdated(grant) => return,
            Some(grant) if restored => (Quarantine::Restored { host: Some(grant.host) }, String::new()),
            None if restored && kept.is_some() => return,
            None if restored => (Quarantine::Restored { host: None }, String::new()),
            Some(grant) if expected(grant) => return,
            Some(grant)
                if is_outdated(grant)
                    && let Some(host) = kept =>
            {
                (Quarantine::LostRecord { host }, format!("it names the owner of epoch {}", grant.epoch))
            }
            Some(grant) => {
                let detail = format!("epoch {} at the device, {} in the ledger", grant.epoch, slot.epoch);
                (Quarantine::UnknownGrant { host: grant.host }, detail)
            }
            None if self.is_being_fenced(slot) => return, // the device may have done it: it is asked again
            None if needs_grant(slot)
                && let Some(host) = kept =>
            {
                (Quarantine::LostRecord { host }, String::new())
            }
            None if needs_grant(slot) => (Quarantine::LostGrant, String::new()),
            None if slot.state == State::Free && high > slot.epoch => {
                let detail = format!("the device has seen epoch {high}, the ledger {}", slot.epoch);
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
            self.doubts += 1;
            self.change(when, change);
        }
    }
}

/// Whether a slot claims that the device has confirmed its grant and not yet revoked it.
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
