//! Copies long lists from the ledger in chunks. Copying one chunk holds the ledger's lock for a
//! bounded time, and other requests run between chunks. A list is therefore not a snapshot: entries
//! of different chunks can have different revisions.

use pool::manager::{Manager, ReservationView};
use proto::v1 as wire;
use units::limits::{
    HOSTS_PER_CHUNK_MAX, RESERVATIONS_CHUNK_ENTRIES_MAX, RESERVATIONS_SCANNED_PER_CALL_MAX,
    SLICES_PER_CHUNK_MAX,
};
use units::{HostId, ReservationId, SliceId};

use super::views;

/// Part of a list that is copied while the ledger is locked once.
#[derive(Clone, Debug)]
pub struct ListChunk<T, K> {
    /// Entries of this chunk, sorted by key.
    pub entries: Vec<T>,
    /// Key to pass to the call that returns the next chunk; `None` after the last chunk.
    pub next: Option<K>,
}

/// Returns the first hosts with IDs of at least `from`, up to [`HOSTS_PER_CHUNK_MAX`].
pub fn hosts(manager: &Manager, from: HostId) -> ListChunk<wire::Host, HostId> {
    let mut hosts = manager.durable().hosts_from(from).map(|(id, _)| id);
    let views = hosts.by_ref().take(HOSTS_PER_CHUNK_MAX).filter_map(|id| views::host_message(manager, id));
    ListChunk { entries: views.collect(), next: hosts.next() }
}

/// Returns the first slices with IDs of at least `from`, up to `max` and up to
/// [`SLICES_PER_CHUNK_MAX`].
pub fn slices(manager: &Manager, from: SliceId, max: usize) -> ListChunk<wire::Slice, SliceId> {
    let ledger = manager.durable();
    let mut slots = ledger.slots_from(from);
    let views = slots.by_ref().take(max.min(SLICES_PER_CHUNK_MAX));
    let entries = views.map(|(id, emc, slot)| views::slice_message(ledger, id, emc, slot)).collect();
    ListChunk { entries, next: slots.next().map(|(id, ..)| id) }
}

/// Returns the first reservations with IDs above `after`, up to `max`. Includes ended reservations
/// only if `ended` is set. A call scans at most [`RESERVATIONS_SCANNED_PER_CALL_MAX`] reservations. A chunk
/// contains at most [`RESERVATIONS_CHUNK_ENTRIES_MAX`] slices and reservations in total, unless its first
/// reservation alone exceeds this limit.
pub fn reservations(
    manager: &Manager,
    after: ReservationId,
    ended: bool,
    max: usize,
) -> ListChunk<ReservationView, ReservationId> {
    let ledger = manager.durable();
    let mut reservations = ledger.reservations_after(after).peekable();
    let (mut entries, mut last, mut slices) = (Vec::new(), after, 0);
    for _ in 0..RESERVATIONS_SCANNED_PER_CALL_MAX {
        let Some((id, reservation)) = reservations.peek() else { break };
        let is_listed = ended || reservation.is_active() || reservation.has_process;
        let size = if is_listed { 1 + reservation.slices.len() } else { 0 };
        let is_full = slices > 0 && slices + size > RESERVATIONS_CHUNK_ENTRIES_MAX;
        if is_listed && (entries.len() >= max || is_full) {
            break;
        }
        (last, slices) = (*id, slices + size);
        entries.extend(is_listed.then(|| ledger.view(*id)).flatten());
        reservations.next();
    }
    let next = reservations.peek().map(|_| last);
    ListChunk { entries, next }
}
