//! Detection of acknowledged reservations that are missing in the ledger. The comparison runs
//! during the replay. It therefore covers only reservations that were acknowledged before the
//! ledger was read and were not released while it was read.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use cli_runtime::{Failure, lists};
use proto::v1::{self, ReservationState, SliceState};
use units::limits::{REPLAY_CHECK_INTERVAL, REPLAY_LOSS_COMPARISONS};

use super::{
    ReplayState,
    calls::retry_while_unavailable,
    journal::{AcknowledgedState, HeldReservation},
};

/// Reasons that the manager records when it ends a reservation without a release. Such a reservation
/// was still in the ledger, so it does not count as lost.
const VM_END_REASONS: [&str; 2] = ["the VM's process has ended", "its host was fenced"];

/// Reservations and slices in the manager's ledger.
#[derive(Debug, Default)]
struct LedgerContents {
    reservations: BTreeMap<String, v1::Reservation>,
    slices: BTreeMap<u32, v1::Slice>,
}

/// Returns the acknowledged reservations that the ledger contradicts. The ledger is read in parts
/// while it changes, so a difference counts only if repeated comparisons confirm it.
pub(super) async fn find(rack: Arc<ReplayState>) -> Result<BTreeSet<String>, Failure> {
    let before = rack.journal().acknowledged();
    let ledger = LedgerContents::read(&rack).await?;
    let mut lost = find_missing(&before, &rack.journal().acknowledged(), &ledger);
    for _ in 1..REPLAY_LOSS_COMPARISONS {
        if lost.is_empty() {
            break;
        }
        tokio::time::sleep(REPLAY_CHECK_INTERVAL.as_duration()).await;
        let now = rack.journal().acknowledged();
        let ledger = LedgerContents::read(&rack).await?;
        lost.retain(|reservation| !is_present_or_ended(reservation, &now, &ledger));
    }
    Ok(lost)
}

impl LedgerContents {
    async fn read(rack: &ReplayState) -> Result<Self, Failure> {
        let reservations = retry_while_unavailable(|| lists::reservations(&rack.manager, true)).await?;
        let slices = retry_while_unavailable(|| lists::slices(&rack.manager, 0, u32::MAX)).await?;
        Ok(Self {
            reservations: reservations.into_iter().map(|r| (r.reservation.clone(), r)).collect(),
            slices: slices.into_iter().map(|s| (s.slice, s)).collect(),
        })
    }
}

fn find_missing(
    before: &AcknowledgedState,
    after: &AcknowledgedState,
    ledger: &LedgerContents,
) -> BTreeSet<String> {
    let throughout = before.held.iter().filter(|(id, held)| {
        !held.is_releasing && after.held.get(*id).is_some_and(|later| !later.is_releasing)
    });
    let lost =
        throughout.filter(|(id, held)| !is_in_ledger(held, ledger.reservations.get(*id), &ledger.slices));
    let reappeared = before.released.iter().filter(|id| ledger.reservations.get(*id).is_some_and(is_active));
    lost.map(|(id, _)| id).chain(reappeared).cloned().collect()
}

/// Returns whether a later comparison shows that a reservation was not lost: it is present, or it
/// ended without a release. A release after the first comparison does not prove that.
fn is_present_or_ended(id: &str, now: &AcknowledgedState, ledger: &LedgerContents) -> bool {
    let Some(reservation) = ledger.reservations.get(id) else { return false };
    let is_present =
        |held: &HeldReservation| !held.is_releasing && is_in_ledger(held, Some(reservation), &ledger.slices);
    has_ended_without_release(reservation) || now.held.get(id).is_some_and(is_present)
}

fn has_ended_without_release(reservation: &v1::Reservation) -> bool {
    !is_active(reservation) && VM_END_REASONS.iter().any(|end| reservation.reason().contains(end))
}

fn is_active(reservation: &v1::Reservation) -> bool {
    reservation.state() != ReservationState::Released
}

/// Returns whether the ledger contains an acknowledged reservation with the same host and VM, and
/// the reservation owns the same slices.
fn is_in_ledger(
    held: &HeldReservation,
    reservation: Option<&v1::Reservation>,
    slices: &BTreeMap<u32, v1::Slice>,
) -> bool {
    let Some(ledger) = reservation else { return false };
    let is_same = ledger.host == held.host && ledger.vm == held.vm && ledger.slices == held.slices;
    let is_stage_valid = match ledger.state() {
        ReservationState::Committed => true,
        ReservationState::Assigned | ReservationState::Ready => !held.is_committed,
        ReservationState::Released => return is_same && has_ended_without_release(ledger),
        // A reservation may only break before it is ready: WaitReady then fails, and the replay
        // tries another host.
        ReservationState::Broken => return is_same && !held.is_ready,
        ReservationState::Unspecified => false,
    };
    is_same
        && is_stage_valid
        && held.slices.iter().all(|slice| slices.get(slice).is_some_and(|s| is_owned_by(s, held)))
}

/// Returns whether the reservation owns the slice. A draining slice still belongs to its owner, for
/// example during a fence.
fn is_owned_by(slice: &v1::Slice, held: &HeldReservation) -> bool {
    let owned = [SliceState::Assigned, SliceState::Onlining, SliceState::Online, SliceState::Draining];
    owned.contains(&slice.state()) && slice.host() == held.host && slice.vm() == held.vm
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> HeldReservation {
        HeldReservation {
            vm: "v".into(),
            host: "a".into(),
            slices: vec![4],
            is_ready: true,
            is_committed: true,
            is_releasing: false,
        }
    }

    fn acknowledged(held: HeldReservation) -> AcknowledgedState {
        AcknowledgedState { held: BTreeMap::from([("r-1".into(), held)]), released: ["r-0".into()].into() }
    }

    fn ledger() -> LedgerContents {
        let reservation = v1::Reservation {
            reservation: "r-1".into(),
            vm: "v".into(),
            host: "a".into(),
            slices: vec![4],
            state: ReservationState::Committed.into(),
            ..Default::default()
        };
        let slice = v1::Slice {
            slice: 4,
            host: Some("a".into()),
            vm: Some("v".into()),
            state: SliceState::Online.into(),
            ..Default::default()
        };
        LedgerContents { reservations: [("r-1".into(), reservation)].into(), slices: [(4, slice)].into() }
    }

    /// Returns the lost reservations after a change of reservation r-1 and its slice in the ledger.
    fn lost(change: impl Fn(&mut v1::Reservation, &mut v1::Slice)) -> Vec<String> {
        let mut ledger = ledger();
        change(ledger.reservations.get_mut("r-1").unwrap(), ledger.slices.get_mut(&4).unwrap());
        find_missing(&acknowledged(held()), &acknowledged(held()), &ledger).into_iter().collect()
    }

    #[test]
    fn unchanged_ledger_has_no_lost_reservations() {
        assert_eq!(lost(|_, _| ()), [""; 0]);
    }

    #[test]
    fn changed_or_missing_reservation_is_lost() {
        let empty = LedgerContents::default();
        assert_eq!(find_missing(&acknowledged(held()), &acknowledged(held()), &empty).len(), 1);
        assert_eq!(lost(|r, _| r.host = "b".into()), ["r-1"]);
        assert_eq!(lost(|r, _| r.slices = vec![5]), ["r-1"]);
        assert_eq!(lost(|r, _| r.state = ReservationState::Ready.into()), ["r-1"], "the commit is lost");
        assert_eq!(lost(|r, _| r.state = ReservationState::Broken.into()), ["r-1"]);
        assert_eq!(lost(|_, s| s.host = Some("b".into())), ["r-1"]);
        assert_eq!(lost(|_, s| s.state = SliceState::Quarantined.into()), ["r-1"], "the slice is lost");
    }

    #[test]
    fn ended_or_fenced_vm_is_not_lost() {
        let ended = |reason: &'static str| {
            lost(move |r, s| {
                r.state = ReservationState::Released.into();
                r.reason = Some(reason.into());
                s.state = SliceState::Free.into();
            })
        };
        assert_eq!(ended("its host was fenced"), [""; 0]);
        assert_eq!(ended("the VM's process has ended"), [""; 0]);
        assert_eq!(ended("released"), ["r-1"], "no release was requested");
        assert_eq!(ended("not committed before its deadline"), ["r-1"]);
    }

    #[test]
    fn released_reservation_that_reappears_is_lost() {
        let mut ledger = ledger();
        let reappeared = v1::Reservation { state: ReservationState::Committed.into(), ..Default::default() };
        ledger.reservations.insert("r-0".into(), reappeared);
        assert_eq!(
            find_missing(&acknowledged(held()), &acknowledged(held()), &ledger),
            ["r-0".into()].into()
        );
    }

    #[test]
    fn later_end_disproves_a_loss_but_later_release_does_not() {
        let mut ledger = ledger();
        assert!(is_present_or_ended("r-1", &acknowledged(held()), &ledger), "the reservation is present");
        assert!(!is_present_or_ended("r-1", &acknowledged(held()), &LedgerContents::default()));
        assert!(
            !is_present_or_ended("r-1", &AcknowledgedState::default(), &ledger),
            "the VM was released later"
        );
        let reservation = ledger.reservations.get_mut("r-1").unwrap();
        reservation.set_state(ReservationState::Released);
        reservation.reason = Some("its host was fenced".into());
        assert!(is_present_or_ended("r-1", &AcknowledgedState::default(), &ledger));
    }

    #[test]
    fn releasing_reservation_may_be_present_or_absent() {
        let releasing = acknowledged(HeldReservation { is_releasing: true, ..held() });
        assert_eq!(find_missing(&acknowledged(held()), &releasing, &LedgerContents::default()).len(), 0);
        assert_eq!(
            find_missing(&acknowledged(held()), &AcknowledgedState::default(), &LedgerContents::default())
                .len(),
            0
        );
    }
}
