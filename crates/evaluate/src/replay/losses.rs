//! Acknowledged facts that the ledger no longer knows. Compared while the replay goes on, so only what was acknowledged
//! before the ledger was read, and not taken back until after, can be missed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use cli_runtime::{Failure, lists};
use proto::v1::{self, ReservationState, SliceState};
use units::limits::{REPLAY_CHECK_INTERVAL, REPLAY_COMPARISONS};

use super::{
    Rack,
    calls::patiently,
    journal::{Acknowledged, Held},
};

/// Words of the manager for the ends that a VM comes to without anybody's release, both of which prove that the ledger knew
/// of it.
const ENDS_BY_ITSELF: [&str; 2] = ["the VM's process is gone", "its host was fenced"];

/// Contents of the ledger.
#[derive(Debug, Default)]
struct Known {
    reservations: BTreeMap<String, v1::Reservation>,
    slices: BTreeMap<u32, v1::Slice>,
}

/// Reservations about which the ledger disagrees with what it acknowledged. It is read in parts while it changes, so what
/// seems lost is looked at again, and counts unless that explains it.
pub(super) async fn lost(rack: Arc<Rack>) -> Result<BTreeSet<String>, Failure> {
    let before = rack.journal().acknowledged();
    let known = Known::read(&rack).await?;
    let mut lost = missing(&before, &rack.journal().acknowledged(), &known);
    for _ in 1..REPLAY_COMPARISONS {
        if lost.is_empty() {
            break;
        }
        tokio::time::sleep(REPLAY_CHECK_INTERVAL.as_duration()).await;
        let now = rack.journal().acknowledged();
        let known = Known::read(&rack).await?;
        lost.retain(|reservation| !is_explained(reservation, &now, &known));
    }
    Ok(lost)
}

impl Known {
    async fn read(rack: &Rack) -> Result<Self, Failure> {
        let reservations = patiently(|| lists::reservations(&rack.to, true)).await?;
        let slices = patiently(|| lists::slices(&rack.to, 0, u32::MAX)).await?;
        Ok(Self {
            reservations: reservations.into_iter().map(|r| (r.reservation.clone(), r)).collect(),
            slices: slices.into_iter().map(|s| (s.slice, s)).collect(),
        })
    }
}

fn missing(before: &Acknowledged, after: &Acknowledged, known: &Known) -> BTreeSet<String> {
    let throughout = before.held.iter().filter(|(id, held)| {
        !held.giving_back && after.held.get(*id).is_some_and(|later| !later.giving_back)
    });
    let forgotten =
        throughout.filter(|(id, held)| !is_known(held, known.reservations.get(*id), &known.slices));
    let risen = before.released.iter().filter(|id| known.reservations.get(*id).is_some_and(is_active));
    forgotten.map(|(id, _)| id).chain(risen).cloned().collect()
}

/// Whether what seemed lost ended by itself just then, or is there after all. That its VM has left since explains nothing.
fn is_explained(id: &str, now: &Acknowledged, known: &Known) -> bool {
    let Some(reservation) = known.reservations.get(id) else { return false };
    let there = |held: &Held| !held.giving_back && is_known(held, Some(reservation), &known.slices);
    ended_by_itself(reservation) || now.held.get(id).is_some_and(there)
}

fn ended_by_itself(reservation: &v1::Reservation) -> bool {
    !is_active(reservation) && ENDS_BY_ITSELF.iter().any(|end| reservation.reason().contains(end))
}

fn is_active(reservation: &v1::Reservation) -> bool {
    reservation.state() != ReservationState::Released
}

/// Whether the ledger has what was acknowledged: the same host, the same slices, and these in its hands.
fn is_known(held: &Held, reservation: Option<&v1::Reservation>, slices: &BTreeMap<u32, v1::Slice>) -> bool {
    let Some(known) = reservation else { return false };
    let same = known.host == held.host && known.vm == held.vm && known.slices == held.slices;
    let stage = match known.state() {
        ReservationState::Committed => true,
        ReservationState::Assigned | ReservationState::Ready => !held.committed,
        ReservationState::Released => return same && ended_by_itself(known),
        // Before it is ready, the scheduler gets an error and tries another host.
        ReservationState::Broken => return same && !held.ready,
        ReservationState::Unspecified => false,
    };
    same && stage && held.slices.iter().all(|slice| slices.get(slice).is_some_and(|s| is_owned(s, held)))
}

/// A slice that is being taken from its owner, as a fence does, is known to be the owner's.
fn is_owned(slice: &v1::Slice, held: &Held) -> bool {
    let owned = [SliceState::Assigned, SliceState::Onlining, SliceState::Online, SliceState::Draining];
    owned.contains(&slice.state()) && slice.host() == held.host && slice.vm() == held.vm
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> Held {
        Held {
            vm: "v".into(),
            host: "a".into(),
            slices: vec![4],
            ready: true,
            committed: true,
            giving_back: false,
        }
    }

    fn acknowledged(held: Held) -> Acknowledged {
        Acknowledged { held: BTreeMap::from([("r-1".into(), held)]), released: ["r-0".into()].into() }
    }

    fn known() -> Known {
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
        Known { reservations: [("r-1".into(), reservation)].into(), slices: [(4, slice)].into() }
    }

    /// Returns losses after such a change of the ledger.
    fn lost(change: impl Fn(&mut v1::Reservation, &mut v1::Slice)) -> Vec<String> {
        let mut known = known();
        change(known.reservations.get_mut("r-1").unwrap(), known.slices.get_mut(&4).unwrap());
        missing(&acknowledged(held()), &acknowledged(held()), &known).into_iter().collect()
    }

    #[test]
    fn a_ledger_that_knows_everything_has_lost_nothing() {
        assert_eq!(lost(|_, _| ()), [""; 0]);
    }

    #[test]
    fn an_acknowledged_reservation_must_be_there_as_it_was() {
        let nothing = Known::default();
        assert_eq!(missing(&acknowledged(held()), &acknowledged(held()), &nothing).len(), 1);
        assert_eq!(lost(|r, _| r.host = "b".into()), ["r-1"]);
        assert_eq!(lost(|r, _| r.slices = vec![5]), ["r-1"]);
        assert_eq!(lost(|r, _| r.state = ReservationState::Ready.into()), ["r-1"], "its commit is lost");
        assert_eq!(lost(|r, _| r.state = ReservationState::Broken.into()), ["r-1"]);
        assert_eq!(lost(|_, s| s.host = Some("b".into())), ["r-1"]);
        assert_eq!(lost(|_, s| s.state = SliceState::Quarantined.into()), ["r-1"], "its grant is lost");
    }

    #[test]
    fn a_vm_that_died_or_was_fenced_is_not_forgotten() {
        let ended = |reason: &'static str| {
            lost(move |r, s| {
                r.state = ReservationState::Released.into();
                r.reason = Some(reason.into());
                s.state = SliceState::Free.into();
            })
        };
        assert_eq!(ended("its host was fenced"), [""; 0]);
        assert_eq!(ended("the VM's process is gone"), [""; 0]);
        assert_eq!(ended("released"), ["r-1"], "nobody asked for that");
        assert_eq!(ended("not committed before its deadline"), ["r-1"]);
    }

    #[test]
    fn a_release_that_was_acknowledged_stays_one() {
        let mut known = known();
        let risen = v1::Reservation { state: ReservationState::Committed.into(), ..Default::default() };
        known.reservations.insert("r-0".into(), risen);
        assert_eq!(missing(&acknowledged(held()), &acknowledged(held()), &known), ["r-0".into()].into());
    }

    #[test]
    fn a_second_look_explains_what_ended_by_itself_but_not_what_left_since() {
        let mut known = known();
        assert!(is_explained("r-1", &acknowledged(held()), &known), "it is there after all");
        assert!(!is_explained("r-1", &acknowledged(held()), &Known::default()));
        assert!(!is_explained("r-1", &Acknowledged::default(), &known), "it left");
        let reservation = known.reservations.get_mut("r-1").unwrap();
        reservation.set_state(ReservationState::Released);
        reservation.reason = Some("its host was fenced".into());
        assert!(is_explained("r-1", &Acknowledged::default(), &known));
    }

    #[test]
    fn what_is_being_given_back_may_be_there_or_not() {
        let leaving = acknowledged(Held { giving_back: true, ..held() });
        assert_eq!(missing(&acknowledged(held()), &leaving, &Known::default()).len(), 0);
        assert_eq!(missing(&acknowledged(held()), &Acknowledged::default(), &Known::default()).len(), 0);
    }
}
