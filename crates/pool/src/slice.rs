//! State machine of one slice, as one `match`. The ledger assigns slices to reservations, and the
//! manager performs the device calls.
//!
//! ```text
//!            Assign        Granted        Onlined          Release            Released
//!   Free ───────────▶ Assigned ──▶ Onlining ──▶ Online ─────────▶ Draining(host) ──▶ Draining(revoking)
//!    ▲                                                                                     │ Revoked
//!    │ Revoked, verified                                                                   ▼
//!   Scrubbing(revoking) ◀── Scrubbed ── Scrubbing(working) ◀── Granted ── (granting) ◀── (waiting)
//! ```
//!
//! Each new owner of a slice, a VM's host or a scrubber, gets a new [`Epoch`]. A slice never has
//! two owners: it is granted only after the states `Free` and `Scrubbing(waiting)`, and it enters
//! these states only after the device has revoked the previous grant.
//!
//! Some devices cannot revoke access: they only record the revocation, and a host can reach a slice
//! until the host releases it. For all devices, [`Call::Revoke`] is therefore made only in three
//! cases: the host released the slice of this epoch (`Released`, `Scrubbed`), the host is proven to
//! have stopped (`OwnerFenced`), or the grant was never sent to the host (`Assigned`, `Granting`).
//!
//! Without such evidence, a faulty slice is quarantined. Before the slice is used again, the host
//! must release it (`Scrubbing(leaving)`), unless the device can revoke access. A reported failure
//! does not count as a release, because the agent may retry.

use serde::{Deserialize, Serialize};
use units::{Epoch, HostId, ReservationId};

use crate::protocol::ScrubReport;

/// State of one slice in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slot {
    /// Epoch of the current or latest owner; 0 before the first owner.
    pub epoch: Epoch,
    /// Current state of the slice.
    pub state: State,
    /// Evidence of the latest scrub; `None` before the first scrub.
    pub receipt: Option<Receipt>,
}

/// State of a slice. The state determines the next device call and the accepted events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum State {
    /// The slice is zeroed and has no owner.
    #[default]
    Free,
    /// The ledger recorded the owner; the device has not confirmed the grant.
    Assigned(Owner),
    /// The device confirmed the grant; the host has not reported the slice online.
    Onlining(Owner),
    /// The host reported the slice online; its VM can use the memory.
    Online(Owner),
    /// The owner's access to the slice is being ended.
    Draining(Owner, DrainStage),
    /// A host owns the slice in order to zero it.
    Scrubbing(Scrub),
    /// The slice is not allocated until an operator or a host's report requalifies it.
    Quarantined(Quarantine),
}

/// Owner of a slice: the host that may reach it, and the reservation that the slice serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// Host that may reach the slice.
    pub host: HostId,
    /// Reservation that the slice serves.
    pub reservation: ReservationId,
}

/// Stage of the release of a slice by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DrainStage {
    /// The manager waits for the host to release the slice.
    Host {
        /// Whether the host must release the slice even if a running VM uses it.
        force: bool,
    },
    /// The host has released the slice or never received it; the device must revoke the grant.
    Revoking,
}

/// Stage of a scrub, which zeroes a slice between two owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scrub {
    /// The device has revoked all access; the slice waits for a scrubber.
    Waiting,
    /// The ledger chose this scrubber; the device has not confirmed the grant to it.
    Granting(HostId),
    /// The device has granted the slice to this scrubber, which zeroes and verifies it.
    Working(HostId),
    /// The scrubber has finished or lost the slice; the device must revoke the grant.
    Revoking {
        /// Scrubber that may still reach the slice.
        host: Option<HostId>,
        /// Whether the scrubber reported the slice zeroed; otherwise another scrub follows.
        verified: bool,
    },
    /// The slice was requalified, but this host may still reach it and the device cannot revoke
    /// access. The manager waits for the host to release the slice.
    Leaving(HostId),
}

/// Reason why a slice is quarantined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Quarantine {
    /// The slice was not zeroed when its host received it.
    Dirty {
        /// Host that reported that the slice was not zeroed.
        host: HostId,
        /// Whether the device has revoked the host's access since the report.
        revoked: bool,
    },
    /// The scrubber reported a failure.
    ScrubFailed {
        /// Scrubber that reported the failure.
        host: HostId,
        /// Whether the device has revoked the scrubber's access since the report.
        revoked: bool,
    },
    /// The device has a grant that the ledger does not contain.
    UnknownGrant {
        /// Owner according to the device.
        host: HostId,
    },
    /// The device no longer has the ledger's grant.
    LostGrant,
    /// The ledger was restored from a backup, and not all hosts have reported.
    Restored {
        /// Owner according to the device; `None` if the device has no grant.
        host: Option<HostId>,
    },
    /// The record of a device that cannot revoke access does not contain the ledger's grant.
    LostRecord {
        /// Host of the ledger's grant, which may still reach the slice.
        host: HostId,
    },
    /// The device repeatedly failed to grant or revoke the slice, although its other calls succeed.
    DeviceFailed {
        /// Host of the failed grant or revocation, which may reach the slice.
        host: Option<HostId>,
        /// `errno` of the last error, if any.
        errno: Option<i32>,
    },
}

/// Evidence that a slice was zeroed after its last owner had lost access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Receipt {
    /// Host that zeroed the slice.
    pub scrubber: HostId,
    /// Report of the scrubber.
    pub scrubbed: ScrubReport,
}

/// Event that changes the state of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The ledger assigns the slice to a reservation on a host.
    Assign(Owner),
    /// The device confirmed the grant of this epoch.
    Granted(Epoch),
    /// The host reports the slice of this epoch online.
    Onlined(HostId, Epoch),
    /// The reservation no longer needs the slice: its VM ended or will not start.
    Release {
        /// Whether the host must release the slice even if a running VM uses it.
        force: bool,
    },
    /// The host reports that it released the slice of this epoch.
    Released(HostId, Epoch),
    /// The device confirmed the revocation of this epoch.
    Revoked(Epoch),
    /// The ledger assigns the slice to a scrubber.
    ScrubBy(HostId),
    /// The scrubber reports that all bytes are zero.
    Scrubbed(HostId, ScrubReport),
    /// The scrubber reports that it cannot zero the slice.
    ScrubFailed(HostId, Epoch),
    /// The host reports that the slice was not zeroed when the host received it.
    FoundDirty(HostId, Epoch),
    /// The device has revoked all access of this host.
    OwnerFenced(HostId),
    /// The slice is quarantined for this reason.
    Quarantine(Quarantine),
    /// An operator, or a host's report, returns a quarantined slice to circulation.
    Requalify {
        /// Whether the slice can be used again without a release by the host, because the device
        /// can revoke access or the host has stopped.
        is_released: bool,
    },
    /// The host's report and the device both show that this owner uses the quarantined slice.
    Adopt(Owner, Epoch),
    /// The device reports a higher epoch than the ledger, so the ledger is outdated.
    Raise(Epoch),
}

/// Error of [`Slot::step`]: the state of the slice does not accept the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InvalidTransition;

impl Slot {
    /// Returns the slot after an event.
    ///
    /// # Errors
    /// Returns [`InvalidTransition`] if the state does not accept the event.
    pub fn step(self, event: Event) -> Result<Self, InvalidTransition> {
        use Event as E;
        use State as S;
        let Self { epoch, state, receipt } = self;
        let with_state = |state| Ok(Self { state, ..self });
        let with_next_owner = |state| Ok(Self { epoch: epoch.next(), state, receipt });
        match (state, event) {
            (S::Free, E::Assign(owner)) => with_next_owner(S::Assigned(owner)),
            (S::Assigned(owner), E::Granted(e)) if e == epoch => with_state(S::Onlining(owner)),
            (S::Onlining(owner), E::Onlined(by, e)) if by == owner.host && e == epoch => {
                with_state(S::Online(owner))
            }

            (S::Assigned(owner), E::Release { .. }) => with_state(S::Draining(owner, DrainStage::Revoking)),
            (S::Onlining(owner) | S::Online(owner), E::Release { force }) => {
                with_state(S::Draining(owner, DrainStage::Host { force }))
            }
            (S::Draining(owner, DrainStage::Host { force: false }), E::Release { force: true }) => {
                with_state(S::Draining(owner, DrainStage::Host { force: true }))
            }
            (S::Draining(owner, DrainStage::Host { .. }), E::Released(by, e))
                if by == owner.host && e == epoch =>
            {
                with_state(S::Draining(owner, DrainStage::Revoking))
            }
            (S::Draining(_, DrainStage::Revoking), E::Revoked(e)) if e == epoch => {
                with_state(S::Scrubbing(Scrub::Waiting))
            }

            (S::Scrubbing(Scrub::Waiting), E::ScrubBy(host)) => {
                with_next_owner(S::Scrubbing(Scrub::Granting(host)))
            }
            (S::Scrubbing(Scrub::Granting(host)), E::Granted(e)) if e == epoch => {
                with_state(S::Scrubbing(Scrub::Working(host)))
            }
            (S::Scrubbing(Scrub::Working(host)), E::Scrubbed(by, scrubbed))
                if by == host && scrubbed.holding.epoch == epoch =>
            {
                let receipt = Some(Receipt { scrubber: host, scrubbed });
                Ok(Self {
                    epoch,
                    receipt,
                    state: S::Scrubbing(Scrub::Revoking { host: Some(host), verified: true }),
                })
            }
            (S::Scrubbing(Scrub::Revoking { verified, .. }), E::Revoked(e)) if e == epoch => {
                with_state(if verified { S::Free } else { S::Scrubbing(Scrub::Waiting) })
            }

            (S::Assigned(o) | S::Onlining(o) | S::Online(o) | S::Draining(o, _), E::OwnerFenced(host))
                if o.host == host =>
            {
                with_state(S::Draining(o, DrainStage::Revoking))
            }
            (
                S::Scrubbing(Scrub::Granting(by) | Scrub::Working(by) | Scrub::Leaving(by)),
                E::OwnerFenced(host),
            ) if by == host => {
                with_state(S::Scrubbing(Scrub::Revoking { host: Some(host), verified: false }))
            }

            (S::Onlining(o), E::FoundDirty(by, e)) if by == o.host && e == epoch => {
                with_state(S::Quarantined(Quarantine::Dirty { host: by, revoked: false }))
            }
            (S::Scrubbing(Scrub::Working(host)), E::ScrubFailed(by, e)) if by == host && e == epoch => {
                with_state(S::Quarantined(Quarantine::ScrubFailed { host, revoked: false }))
            }
            (S::Quarantined(Quarantine::Dirty { host, revoked: false }), E::Revoked(e)) if e == epoch => {
                with_state(S::Quarantined(Quarantine::Dirty { host, revoked: true }))
            }
            (S::Quarantined(Quarantine::ScrubFailed { host, revoked: false }), E::Revoked(e))
                if e == epoch =>
            {
                with_state(S::Quarantined(Quarantine::ScrubFailed { host, revoked: true }))
            }
            (_, E::Quarantine(why)) => with_state(S::Quarantined(why)),
            (S::Quarantined(why), E::Requalify { is_released }) => {
                with_state(S::Scrubbing(why.first_scrub_stage(is_released)))
            }
            (S::Scrubbing(Scrub::Leaving(host)), E::Released(by, e)) if by == host && e == epoch => {
                with_state(S::Scrubbing(Scrub::Revoking { host: Some(host), verified: false }))
            }
            (
                S::Quarantined(Quarantine::UnknownGrant { host } | Quarantine::Restored { host: Some(host) }),
                E::Adopt(owner, e),
            ) if owner.host == host && e == epoch => with_state(S::Online(owner)),
            (_, E::Raise(higher)) if higher > epoch => Ok(Self { epoch: higher, ..self }),
            _ => Err(InvalidTransition),
        }
    }

    /// Returns the host that may still reach the slice at the device, if any.
    pub fn holder(self) -> Option<HostId> {
        match self.state {
            State::Free | State::Scrubbing(Scrub::Waiting) => None,
            State::Assigned(o) | State::Onlining(o) | State::Online(o) | State::Draining(o, _) => {
                Some(o.host)
            }
            State::Scrubbing(Scrub::Granting(host) | Scrub::Working(host) | Scrub::Leaving(host)) => {
                Some(host)
            }
            State::Scrubbing(Scrub::Revoking { host, .. }) => host,
            State::Quarantined(why) => why.host(),
        }
    }

    /// Returns the reservation that the slice serves, from the assignment until the device revokes
    /// the grant.
    pub fn reservation(self) -> Option<ReservationId> {
        match self.state {
            State::Assigned(o) | State::Onlining(o) | State::Online(o) | State::Draining(o, _) => {
                Some(o.reservation)
            }
            State::Free | State::Scrubbing(_) | State::Quarantined(_) => None,
        }
    }

    /// Returns whether a scrubber was chosen for the slice or owns it.
    pub fn is_being_scrubbed(self) -> bool {
        matches!(self.state, State::Scrubbing(Scrub::Granting(_) | Scrub::Working(_)))
    }

    /// Returns whether the slice is quarantined.
    pub fn is_quarantined(self) -> bool {
        matches!(self.state, State::Quarantined(_))
    }

    /// Returns the device call that this state requires, if any. `can_revoke` states whether the
    /// device can revoke access. Calls are idempotent for each slice and epoch, so they can be
    /// repeated.
    pub fn device_call(self, can_revoke: bool) -> Option<Call> {
        match self.state {
            State::Assigned(owner) => Some(Call::Grant { epoch: self.epoch, host: owner.host }),
            State::Scrubbing(Scrub::Granting(host)) => Some(Call::Grant { epoch: self.epoch, host }),
            State::Draining(_, DrainStage::Revoking) | State::Scrubbing(Scrub::Revoking { .. }) => {
                Some(Call::Revoke { epoch: self.epoch })
            }
            State::Quarantined(
                Quarantine::Dirty { revoked: false, .. } | Quarantine::ScrubFailed { revoked: false, .. },
            ) if can_revoke => Some(Call::Revoke { epoch: self.epoch }),
            State::Free
            | State::Onlining(_)
            | State::Online(_)
            | State::Draining(_, DrainStage::Host { .. })
            | State::Scrubbing(Scrub::Waiting | Scrub::Working(_) | Scrub::Leaving(_))
            | State::Quarantined(_) => None,
        }
    }

    /// Returns the state's name, as shown to operators.
    pub fn state_name(self) -> &'static str {
        STATE_NAMES[self.state_index()]
    }

    /// Returns the index of the state's name in [`STATE_NAMES`].
    pub(crate) fn state_index(self) -> usize {
        match self.state {
            State::Free => 0,
            State::Assigned(_) => 1,
            State::Onlining(_) => 2,
            State::Online(_) => 3,
            State::Draining(..) | State::Scrubbing(Scrub::Leaving(_)) => 4,
            State::Scrubbing(_) => 5,
            State::Quarantined(_) => 6,
        }
    }
}

/// Names of the states, as shown to operators; [`Slot::state_name`] returns one of these names.
pub const STATE_NAMES: [&str; 7] =
    ["free", "assigned", "onlining", "online", "draining", "scrubbing", "quarantined"];

/// Device call that a slice's state requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// Grants access to this host only.
    Grant {
        /// Epoch of the new owner.
        epoch: Epoch,
        /// Host of the new owner.
        host: HostId,
    },
    /// Revokes all access to the slice.
    Revoke {
        /// Epoch of the last owner.
        epoch: Epoch,
    },
}

impl Quarantine {
    /// Returns the host that may still reach the quarantined slice, if any.
    pub fn host(self) -> Option<HostId> {
        match self {
            Self::Dirty { host, revoked } | Self::ScrubFailed { host, revoked } => (!revoked).then_some(host),
            Self::UnknownGrant { host } | Self::LostRecord { host } => Some(host),
            Self::Restored { host } | Self::DeviceFailed { host, .. } => host,
            Self::LostGrant => None,
        }
    }

    /// Returns whether device and ledger disagree, or may disagree, on the owner of the slice.
    pub(crate) fn has_uncertain_owner(self) -> bool {
        match self {
            Self::UnknownGrant { .. } | Self::LostGrant | Self::Restored { .. } | Self::LostRecord { .. } => {
                true
            }
            Self::Dirty { .. } | Self::ScrubFailed { .. } | Self::DeviceFailed { .. } => false,
        }
    }

    /// Returns the first scrub stage of a requalified slice. A host that may still reach the slice
    /// must release it first, unless `is_released`.
    fn first_scrub_stage(self, is_released: bool) -> Scrub {
        match self.host() {
            Some(host) if !is_released => Scrub::Leaving(host),
            host => Scrub::Revoking { host, verified: false },
        }
    }
}

impl std::fmt::Display for Quarantine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dirty { .. } => "it was not zeroed when its host received it",
            Self::ScrubFailed { .. } => "its scrubber could not zero it",
            Self::UnknownGrant { .. } => "the device has a grant that the ledger does not contain",
            Self::LostGrant => "the ledger contains a grant that the device does not contain",
            Self::Restored { .. } => {
                "the ledger was restored from a backup and not all hosts have reported since"
            }
            Self::LostRecord { .. } => {
                "the device's record does not contain the grant, and its host may still reach the slice"
            }
            Self::DeviceFailed { errno: Some(errno), .. } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                return write!(f, "the device cannot grant or revoke it: {error}");
            }
            Self::DeviceFailed { errno: None, .. } => "the device cannot grant or revoke it",
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use units::{Bytes, SliceId, UnixMs};

    use super::*;
    use crate::protocol::Holding;

    const VM_HOST: HostId = HostId(1);
    const SCRUBBER_HOST: HostId = HostId(2);

    fn owner() -> Owner {
        Owner { host: VM_HOST, reservation: ReservationId(7) }
    }

    fn scrubbed(epoch: Epoch) -> ScrubReport {
        let holding = Holding { slice: SliceId(0), epoch };
        ScrubReport { holding, started: UnixMs(0), ended: UnixMs(1), verified: Bytes::gib(1) }
    }

    /// Applies events, written as words, to a new slot. Asserts that the final state, or else the
    /// first rejected event, equals `expected`.
    fn assert_result(events: &str, expected: &str) {
        let mut slot = Slot::default();
        for word in events.split_whitespace() {
            let event = match word {
                "assign" => Event::Assign(owner()),
                "granted" => Event::Granted(slot.epoch),
                "granted-late" => Event::Granted(Epoch(slot.epoch.0 - 1)),
                "onlined" => Event::Onlined(VM_HOST, slot.epoch),
                "onlined-by-other" => Event::Onlined(SCRUBBER_HOST, slot.epoch),
                "release" => Event::Release { force: false },
                "force" => Event::Release { force: true },
                "released" => Event::Released(VM_HOST, slot.epoch),
                "released-by-other" => Event::Released(SCRUBBER_HOST, slot.epoch),
                "revoked" => Event::Revoked(slot.epoch),
                "revoked-late" => Event::Revoked(Epoch(slot.epoch.0 - 1)),
                "scrub" => Event::ScrubBy(SCRUBBER_HOST),
                "scrubbed" => Event::Scrubbed(SCRUBBER_HOST, scrubbed(slot.epoch)),
                "scrubbed-late" => Event::Scrubbed(SCRUBBER_HOST, scrubbed(Epoch(slot.epoch.0 - 1))),
                "fenced" => Event::OwnerFenced(VM_HOST),
                "scrubber-fenced" => Event::OwnerFenced(SCRUBBER_HOST),
                "dirty" => Event::FoundDirty(VM_HOST, slot.epoch),
                "dirty-late" => Event::FoundDirty(VM_HOST, Epoch(slot.epoch.0 - 1)),
                "dirty-by-other" => Event::FoundDirty(SCRUBBER_HOST, slot.epoch),
                "scrub-failed" => Event::ScrubFailed(SCRUBBER_HOST, slot.epoch),
                "scrub-failed-late" => Event::ScrubFailed(SCRUBBER_HOST, Epoch(slot.epoch.0 - 1)),
                "scrub-failed-by-other" => Event::ScrubFailed(VM_HOST, slot.epoch),
                "raise" => Event::Raise(Epoch(slot.epoch.0 + 5)),
                "raise-to-same-epoch" => Event::Raise(slot.epoch),
                "raise-lower" => Event::Raise(Epoch(slot.epoch.0 - 1)),
                "requalify" => Event::Requalify { is_released: true },
                "requalify-unreleased" => Event::Requalify { is_released: false },
                other => panic!("unknown event {other:?}"),
            };
            match slot.step(event) {
                Ok(next) => slot = next,
                Err(InvalidTransition) => {
                    return assert_eq!(format!("{word} refused while {}", slot.state_name()), expected);
                }
            }
        }
        assert_eq!(format!("{} epoch {}", slot.state_name(), slot.epoch), expected);
    }

    #[test]
    fn full_cycle_gives_every_owner_a_new_epoch() {
        let once = "assign granted onlined release released revoked scrub granted scrubbed revoked";
        assert_result(once, "free epoch 2");
        assert_result(&format!("{once} {once}"), "free epoch 4");
    }

    #[test]
    fn slice_released_before_grant_needs_no_host_release() {
        assert_result("assign release revoked", "scrubbing epoch 1");
    }

    #[test]
    fn event_of_another_host_or_epoch_is_refused() {
        assert_result("assign granted onlined-by-other", "onlined-by-other refused while onlining");
        assert_result(
            "assign granted onlined release released-by-other",
            "released-by-other refused while draining",
        );
        assert_result("assign granted-late", "granted-late refused while assigned");
        assert_result(
            "assign release revoked scrub granted scrubbed-late",
            "scrubbed-late refused while scrubbing",
        );
        assert_result("assign granted release released revoked-late", "revoked-late refused while draining");
    }

    #[test]
    fn late_or_foreign_scrub_event_is_refused() {
        let scrub = "assign release revoked scrub";
        assert_result(&format!("{scrub} granted-late"), "granted-late refused while scrubbing");
        assert_result(
            &format!("{scrub} granted scrubbed revoked-late"),
            "revoked-late refused while scrubbing",
        );
        for word in ["scrub-failed-late", "scrub-failed-by-other"] {
            assert_result(&format!("{scrub} granted {word}"), &format!("{word} refused while scrubbing"));
        }
        assert_result(&format!("{scrub} granted scrub-failed"), "quarantined epoch 2");
    }

    #[test]
    fn late_or_foreign_quarantine_event_is_refused() {
        for word in ["dirty-late", "dirty-by-other"] {
            assert_result(&format!("assign granted {word}"), &format!("{word} refused while onlining"));
        }
        let quarantined = "revoked-late refused while quarantined";
        assert_result("assign granted dirty revoked-late", quarantined);
        assert_result("assign release revoked scrub granted scrub-failed revoked-late", quarantined);
    }

    #[test]
    fn fence_of_another_host_does_not_affect_owner() {
        assert_result("assign granted onlined scrubber-fenced", "scrubber-fenced refused while online");
        assert_result("assign release revoked scrub granted fenced", "fenced refused while scrubbing");
    }

    #[test]
    fn epoch_is_raised_and_never_lowered() {
        assert_result("assign raise", "assigned epoch 6");
        assert_result("assign raise-to-same-epoch", "raise-to-same-epoch refused while assigned");
        assert_result("assign raise-lower", "raise-lower refused while assigned");
    }

    #[test]
    fn slice_is_not_granted_again_before_device_revoked() {
        assert_result("assign granted onlined release scrub", "scrub refused while draining");
        assert_result("assign granted onlined release released assign", "assign refused while draining");
        assert_result("assign release revoked assign", "assign refused while scrubbing");
        assert_result(
            "assign release revoked scrub granted scrubbed assign",
            "assign refused while scrubbing",
        );
    }

    #[test]
    fn fenced_scrubber_leaves_slice_unverified() {
        assert_result("assign release revoked scrub granted scrubber-fenced revoked", "scrubbing epoch 2");
        assert_result(
            "assign release revoked scrub granted scrubber-fenced revoked assign",
            "assign refused while scrubbing",
        );
    }

    #[test]
    fn slice_of_fenced_host_is_revoked_then_scrubbed() {
        assert_result("assign granted onlined fenced revoked", "scrubbing epoch 1");
        assert_result("assign granted onlined release fenced revoked", "scrubbing epoch 1");
    }

    #[test]
    fn dirty_slice_stays_quarantined_until_scrubbed() {
        assert_result("assign granted dirty revoked", "quarantined epoch 1");
        assert_result("assign granted dirty revoked assign", "assign refused while quarantined");
        assert_result(
            "assign granted dirty revoked requalify revoked scrub granted scrubbed revoked",
            "free epoch 2",
        );
    }

    #[test]
    fn requalified_slice_waits_for_release_or_fence_of_its_host() {
        assert_result("assign granted dirty requalify-unreleased scrub", "scrub refused while draining");
        assert_result("assign granted dirty requalify-unreleased revoked", "revoked refused while draining");
        assert_result(
            "assign granted dirty requalify-unreleased released-by-other",
            "released-by-other refused while draining",
        );
        assert_result("assign granted dirty requalify-unreleased released revoked", "scrubbing epoch 1");
        assert_result("assign granted dirty requalify-unreleased fenced revoked", "scrubbing epoch 1");
    }

    #[test]
    fn reported_failure_is_revoked_only_if_device_can_revoke() {
        let host = VM_HOST;
        for why in
            [Quarantine::Dirty { host, revoked: false }, Quarantine::ScrubFailed { host, revoked: false }]
        {
            let slot = Slot { epoch: Epoch(1), state: State::Quarantined(why), receipt: None };
            assert_eq!(slot.device_call(true), Some(Call::Revoke { epoch: Epoch(1) }));
            assert_eq!((slot.device_call(false), slot.holder()), (None, Some(host)));
        }
    }

    fn any_event() -> impl Strategy<Value = Event> {
        let host = prop_oneof![Just(VM_HOST), Just(SCRUBBER_HOST)];
        let epoch = (0..6u64).prop_map(Epoch);
        prop_oneof![
            host.clone().prop_map(|host| Event::Assign(Owner { host, reservation: ReservationId(1) })),
            epoch.clone().prop_map(Event::Granted),
            (host.clone(), epoch.clone()).prop_map(|(h, e)| Event::Onlined(h, e)),
            any::<bool>().prop_map(|force| Event::Release { force }),
            (host.clone(), epoch.clone()).prop_map(|(h, e)| Event::Released(h, e)),
            epoch.clone().prop_map(Event::Revoked),
            host.clone().prop_map(Event::ScrubBy),
            (host.clone(), epoch.clone()).prop_map(|(h, e)| Event::Scrubbed(h, scrubbed(e))),
            (host.clone(), epoch.clone()).prop_map(|(h, e)| Event::ScrubFailed(h, e)),
            (host.clone(), epoch.clone()).prop_map(|(h, e)| Event::FoundDirty(h, e)),
            host.prop_map(Event::OwnerFenced),
            any::<bool>().prop_map(|is_released| Event::Requalify { is_released }),
        ]
    }

    proptest! {
        /// Models a device with at most one grant per slice. The ledger must never assign a slice
        /// while another host can reach it at the device.
        #[test]
        fn slice_has_at_most_one_owner(events in prop::collection::vec(any_event(), 0..60)) {
            let mut slot = Slot::default();
            let mut device: Option<(Epoch, HostId)> = None;
            for event in events {
                let Ok(next) = slot.step(event) else { continue };
                prop_assert!(next.epoch >= slot.epoch, "an epoch never decreases");
                if let Event::Revoked(_) = event { device = None; }
                if let Event::Assign(_) | Event::ScrubBy(_) = event {
                    prop_assert_eq!(device, None, "assigned while another host can reach the slice");
                    prop_assert!(next.epoch > slot.epoch, "a new owner has a new epoch");
                }
                if let Some(Call::Grant { epoch, host }) = next.device_call(true) { device = Some((epoch, host)); }
                if let Some((_, host)) = device { prop_assert_eq!(next.holder(), Some(host)); }
                slot = next;
            }
        }

        #[test]
        fn free_slice_has_receipt_of_its_last_epoch(events in prop::collection::vec(any_event(), 0..80)) {
            let mut slot = Slot::default();
            for event in events {
                slot = slot.step(event).unwrap_or(slot);
                if slot.state == State::Free && slot.epoch > Epoch(0) {
                    prop_assert_eq!(slot.receipt.map(|r| r.scrubbed.holding.epoch), Some(slot.epoch));
                }
            }
        }
    }
}
