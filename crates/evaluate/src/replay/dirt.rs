//! Slices that reached a host with something in them: the host's agent reads each slice before it hands it to a VM, and the
//! manager keeps from everybody what it finds. What VMs find themselves is the stand-ins' to say.

use std::collections::BTreeSet;

use cli_runtime::{Connection, Failure, lists};
use proto::v1::{self, SliceState};

use super::calls::patiently;

/// The manager's words for such a slice.
const FOUND: &str = "did not reach its owner as zeros";

/// Slices that are kept from everybody for that reason.
pub(super) async fn found(to: &Connection) -> Result<BTreeSet<u32>, Failure> {
    let slices = patiently(|| lists::slices(to, 0, u32::MAX)).await?;
    Ok(slices.into_iter().filter(is_dirty).map(|slice| slice.slice).collect())
}

fn is_dirty(slice: &v1::Slice) -> bool {
    slice.state() == SliceState::Quarantined && slice.reason().contains(FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slices_kept_for_their_dirt_count() {
        let slice = |state: SliceState, reason: &str| v1::Slice {
            state: state.into(),
            reason: Some(reason.into()),
            ..Default::default()
        };
        assert!(is_dirty(&slice(SliceState::Quarantined, "it did not reach its owner as zeros")));
        assert!(!is_dirty(&slice(SliceState::Quarantined, "the device lost the grant")));
        assert!(!is_dirty(&slice(SliceState::Free, "it did not reach its owner as zeros")));
    }
}
