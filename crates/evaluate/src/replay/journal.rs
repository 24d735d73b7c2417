//! Journal of the requests that the manager acknowledged. A reply is recorded before it is used.
//! The journal is compared with the manager's ledger, and can be written to a log file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

use cli_runtime::Failure;
use proto::v1;
use serde::Serialize;

/// Kind of an acknowledged request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum JournalAction {
    Reserve,
    Ready,
    Commit,
    Release,
}

/// Reservation that the manager acknowledged and whose release it has not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeldReservation {
    pub(super) vm: String,
    pub(super) host: String,
    pub(super) slices: Vec<u32>,
    /// Whether all slices of the reservation were reported online.
    pub(super) is_ready: bool,
    /// Whether the commit was acknowledged.
    pub(super) is_committed: bool,
    /// Whether the release was requested. The reservation may then be absent from the ledger.
    pub(super) is_releasing: bool,
}

/// Reservations and releases that the manager acknowledged, by reservation ID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AcknowledgedState {
    pub(super) held: BTreeMap<String, HeldReservation>,
    pub(super) released: BTreeSet<String>,
}

/// Statistics about the owners of slices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SliceMovement {
    /// Number of reservations of a slice on a different host than its previous reservation.
    pub(super) moved: u64,
    /// Largest number of slices that were reserved at the same time.
    pub(super) peak: u64,
}

/// Journal of the acknowledged requests of one replay.
#[derive(Debug, Default)]
pub(super) struct Journal {
    log: Option<(PathBuf, File)>,
    acknowledged: AcknowledgedState,
    movement: SliceMovement,
    last_host: BTreeMap<u32, String>,
    /// Reservation that owns each slice. After a fence, a slice may have a new reservation before
    /// the old reservation is released.
    owner_by_slice: BTreeMap<u32, String>,
}

#[derive(Serialize)]
struct LogLine<'a> {
    action: JournalAction,
    request_id: &'a str,
    reservation: &'a str,
    vm: &'a str,
    host: &'a str,
    slices: &'a [u32],
}

impl Journal {
    /// Creates an empty journal. If `log` is a path, every record is also written to that file.
    pub(super) fn open(log: Option<&Path>) -> Result<Self, Failure> {
        let open = |path: &Path| match File::create(path) {
            Ok(file) => Ok((path.to_owned(), file)),
            Err(errno) => Err(Failure::File { operation: "create", path: path.to_owned(), errno }),
        };
        Ok(Self { log: log.map(open).transpose()?, ..Self::default() })
    }

    pub(super) fn acknowledged(&self) -> AcknowledgedState {
        self.acknowledged.clone()
    }

    pub(super) fn slice_movement(&self) -> SliceMovement {
        self.movement
    }

    /// Records an acknowledged reservation.
    pub(super) fn record_reservation(&mut self, reservation: &v1::Reservation) -> Result<(), Failure> {
        for slice in &reservation.slices {
            let previous = self.last_host.insert(*slice, reservation.host.clone());
            self.movement.moved += u64::from(previous.is_some_and(|host| host != reservation.host));
            self.owner_by_slice.insert(*slice, reservation.reservation.clone());
        }
        self.movement.peak = self.movement.peak.max(self.owner_by_slice.len() as u64);
        let held = HeldReservation {
            vm: reservation.vm.clone(),
            host: reservation.host.clone(),
            slices: reservation.slices.clone(),
            is_ready: false,
            is_committed: false,
            is_releasing: false,
        };
        self.acknowledged.held.insert(reservation.reservation.clone(), held);
        self.write(JournalAction::Reserve, reservation)
    }

    /// Records that a reservation is ready or committed.
    pub(super) fn record_confirmation(
        &mut self,
        action: JournalAction,
        reservation: &v1::Reservation,
    ) -> Result<(), Failure> {
        if let Some(held) = self.acknowledged.held.get_mut(&reservation.reservation) {
            held.is_ready |= action == JournalAction::Ready;
            held.is_committed |= action == JournalAction::Commit;
        }
        self.write(action, reservation)
    }

    /// Records that a release is about to be requested.
    pub(super) fn record_release_request(&mut self, reservation: &v1::Reservation) {
        if let Some(held) = self.acknowledged.held.get_mut(&reservation.reservation) {
            held.is_releasing = true;
        }
    }

    /// Records an acknowledged release.
    pub(super) fn record_release(&mut self, reservation: &v1::Reservation) -> Result<(), Failure> {
        if let Some(held) = self.acknowledged.held.remove(&reservation.reservation) {
            for slice in &held.slices {
                if self.owner_by_slice.get(slice) == Some(&reservation.reservation) {
                    self.owner_by_slice.remove(slice);
                }
            }
            self.acknowledged.released.insert(reservation.reservation.clone());
        }
        self.write(JournalAction::Release, reservation)
    }

    fn write(&mut self, action: JournalAction, reservation: &v1::Reservation) -> Result<(), Failure> {
        let Some((path, file)) = &mut self.log else { return Ok(()) };
        let v1::Reservation { request_id, reservation, vm, host, slices, .. } = reservation;
        let line = LogLine { action, request_id, reservation, vm, host, slices };
        let mut text = serde_json::to_vec(&line).expect("texts and numbers serialize to JSON");
        text.push(b'\n');
        file.write_all(&text).map_err(|errno| Failure::File { operation: "write", path: path.clone(), errno })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reservation(id: &str, host: &str, slices: &[u32]) -> v1::Reservation {
        v1::Reservation {
            reservation: id.into(),
            vm: format!("vm-{id}"),
            host: host.into(),
            slices: slices.into(),
            ..Default::default()
        }
    }

    #[test]
    fn slice_reserved_on_another_host_counts_as_moved() {
        let mut journal = Journal::default();
        for (id, host) in [("r-1", "a"), ("r-2", "a"), ("r-3", "b"), ("r-4", "a")] {
            let r = reservation(id, host, &[7, 8]);
            journal.record_reservation(&r).unwrap();
            journal.record_release(&r).unwrap();
        }
        assert_eq!(journal.slice_movement().moved, 4);
        assert_eq!((journal.owner_by_slice.len(), journal.slice_movement().peak), (0, 2));
    }

    #[test]
    fn slice_of_fenced_vm_counts_as_in_use_once() {
        let mut journal = Journal::default();
        let (fenced, next) = (reservation("r-1", "a", &[7]), reservation("r-2", "b", &[7]));
        journal.record_reservation(&fenced).unwrap();
        journal.record_reservation(&next).unwrap();
        assert_eq!(journal.slice_movement().peak, 1);
        journal.record_release(&fenced).unwrap();
        assert_eq!(
            journal.owner_by_slice.len(),
            1,
            "releasing the fenced VM does not free the slice of the next VM"
        );
    }

    #[test]
    fn acknowledged_replies_are_written_to_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut journal = Journal::open(Some(&path)).unwrap();
        let r = reservation("r-1", "a", &[3]);
        journal.record_reservation(&r).unwrap();
        journal.record_confirmation(JournalAction::Commit, &r).unwrap();
        journal.record_release(&r).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let actions: Vec<_> = lines.iter().map(|line| line["action"].as_str().unwrap()).collect();
        assert_eq!(actions, ["reserve", "commit", "release"]);
        assert_eq!((&lines[0]["reservation"], &lines[0]["slices"][0]), (&"r-1".into(), &3.into()));
    }
}
