//! Converts the status of a move to local memory for clients of the control socket.

use proto::v1 as wire;

use crate::rehome::{RehomeState, RehomeStatus};

/// Converts the status of a move.
pub(super) fn to_response(status: RehomeStatus) -> wire::RehomeStatus {
    let state = match status.state {
        RehomeState::None => wire::RehomeState::None,
        RehomeState::Copying => wire::RehomeState::Copying,
        RehomeState::Done => wire::RehomeState::Done,
        RehomeState::Failed => wire::RehomeState::Failed,
    };
    let freed = status.freed_slices.into_iter().map(|(slice, emc)| wire::FreedSlice { slice, emc });
    wire::RehomeStatus {
        state: state.into(),
        reason: status.reason,
        total_bytes: status.total_bytes,
        copied_bytes: status.copied_bytes,
        rounds: status.rounds,
        pause_us: u64::try_from(status.pause.as_micros()).unwrap_or(u64::MAX),
        duration_us: u64::try_from(status.duration.as_micros()).unwrap_or(u64::MAX),
        freed_slices: freed.collect(),
    }
}

/// Adapts the description of a guest to a move. After a move, pool nodes have no slices. From the
/// start of a move, touched memory is unknown, because the nodes share a file with the copies.
pub(super) fn adapt_description(guest: &mut wire::Guest, state: RehomeState) {
    for node in &mut guest.nodes {
        if matches!(state, RehomeState::Copying | RehomeState::Done) {
            node.touched_bytes = None;
        }
        if state == RehomeState::Done {
            node.emc = None;
            node.slices.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_changes_with_the_state_of_the_move() {
        let adapted = |state| {
            let node = wire::GuestNode {
                emc: Some("emc0".into()),
                slices: vec![3],
                touched_bytes: Some(1),
                ..Default::default()
            };
            let mut guest = wire::Guest { nodes: vec![node], ..Default::default() };
            adapt_description(&mut guest, state);
            let node = guest.nodes.remove(0);
            (node.touched_bytes.is_some(), node.emc.is_some(), node.slices.len())
        };
        assert_eq!(adapted(RehomeState::None), (true, true, 1));
        assert_eq!(adapted(RehomeState::Failed), (true, true, 1));
        assert_eq!(adapted(RehomeState::Copying), (false, true, 1));
        assert_eq!(adapted(RehomeState::Done), (false, false, 0));
    }
}
