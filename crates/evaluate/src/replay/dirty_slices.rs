//! Detection of slices that reached a host without being zeroed. The host's agent reads each slice
//! before a VM gets it, and the manager quarantines slices that are not zero. Test VMMs check their
//! slices in addition.

use std::collections::BTreeSet;

use cli_runtime::{Connection, Failure, lists};
use proto::v1::{self, SliceState};

use super::calls::retry_while_unavailable;

/// Part of the manager's reason for the quarantine of a slice that was not zeroed.
const DIRTY_REASON: &str = "was not zeroed when its host received it";

/// Returns the slices that are quarantined because they were not zeroed.
pub(super) async fn find_quarantined(manager: &Connection) -> Result<BTreeSet<u32>, Failure> {
    let slices = retry_while_unavailable(|| lists::slices(manager, 0, u32::MAX)).await?;
    Ok(slices.into_iter().filter(is_quarantined_as_dirty).map(|slice| slice.slice).collect())
}

fn is_quarantined_as_dirty(slice: &v1::Slice) -> bool {
    slice.state() == SliceState::Quarantined && slice.reason().contains(DIRTY_REASON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slices_quarantined_as_not_zero_are_dirty() {
        let slice = |state: SliceState, reason: &str| v1::Slice {
            state: state.into(),
            reason: Some(reason.into()),
            ..Default::default()
        };
        assert!(is_quarantined_as_dirty(&slice(
            SliceState::Quarantined,
            "it was not zeroed when its host received it"
        )));
        assert!(!is_quarantined_as_dirty(&slice(SliceState::Quarantined, "the device lost the grant")));
        assert!(!is_quarantined_as_dirty(&slice(
            SliceState::Free,
            "it was not zeroed when its host received it"
        )));
    }
}
