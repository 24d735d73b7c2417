//! Lists of a reply, collected in pieces: each piece is copied under the ledger's lock in bounded
//! time, and other requests run between pieces. A list is therefore no snapshot: each entry is as
//! it was when its piece was copied.

use pool::manager::{Manager, ReservationView};
use proto::v1 as wire;
use units::limits::{HOSTS_PIECE_MAX, RESERVATIONS_PIECE_MAX, RESERVATIONS_SCANNED_MAX, SLICES_PIECE_MAX};
use units::{HostId, ReservationId, SliceId};

use super::views;

/// Entries of a list, with the start of the next piece.
#[derive(Clone, Debug)]
pub struct Piece<T, K> {
    /// Entries, ascending.
    pub entries: Vec<T>,
    /// Key at or after which the next piece begins.
    pub next: Option<K>,
}

/// Returns at most [`HOSTS_PIECE_MAX`] hosts, from a number on.
pub fn hosts(manager: &Manager, from: HostId) -> Piece<wire::Host, HostId> {
    let mut hosts = manager.durable().hosts_from(from).map(|(id, _)| id);
    let views = hosts.by_ref().take(HOSTS_PIECE_MAX).filter_map(|id| views::host(manager, id));
    Piece { entries: views.collect(), next: hosts.next() }
}

/// Returns at most `most` and [`SLICES_PIECE_MAX`] slices, from a number on.
pub fn slices(manager: &Manager, from: SliceId, most: usize) -> Piece<wire::Slice, SliceId> {
    let ledger = manager.durable();
    let mut slots = ledger.slots_from(from);
    let views = slots.by_ref().take(most.min(SLICES_PIECE_MAX));
    let entries = views.map(|(id, emc, slot)| views::slice(ledger, id, emc, slot)).collect();
    Piece { entries, next: slots.next().map(|(id, ..)| id) }
}

/// Returns reservations above a number: at most `most`, with [`RESERVATIONS_PIECE_MAX`] slices
/// unless the first one has more, among the next [`RESERVATIONS_SCANNED_MAX`].
pub fn reservations(
    manager: &Manager,
    after: ReservationId,
    ended: bool,
    most: usize,
) -> Piece<ReservationView, ReservationId> {
    let ledger = manager.durable();
    let mut reservations = ledger.reservations_after(after).peekable();
    let (mut entries, mut last, mut slices) = (Vec::new(), after, 0);
    for _ in 0..RESERVATIONS_SCANNED_MAX {
        let Some((id, reservation)) = reservations.peek() else { break };
        let is_shown = ended || reservation.is_active() || reservation.has_process;
        let size = if is_shown { 1 + reservation.slices.len() } else { 0 };
        let is_full = slices > 0 && slices + size > RESERVATIONS_PIECE_MAX;
        if is_shown && (entries.len() >= most || is_full) {
            break;
        }
        (last, slices) = (*id, slices + size);
        entries.extend(is_shown.then(|| ledger.view(*id)).flatten());
        reservations.next();
    }
    let next = reservations.peek().map(|_| last);
    Piece { entries, next }
}
