//! Check that the node's other slices have space for the pages of a leaving one, before its first
//! block is changed.

use units::Bytes;

/// State of a node and of a slice that has to leave it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    /// Free memory of the whole node.
    pub(super) free: Bytes,
    /// Online part of the slice's memory. The remainder is no longer part of `free`.
    pub(super) online: Bytes,
    /// Part of the slice's memory in use.
    pub(super) in_use: Bytes,
    /// Memory of VMs on the node. The kernel's own caches need no space: they are dropped.
    pub(super) vms: Bytes,
}

/// Memory to be moved, and the space for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) needed: Bytes,
    pub(super) there: Bytes,
}

impl Room {
    pub(super) fn of(leaving: Leaving) -> Self {
        let unused = leaving.online.get().saturating_sub(leaving.in_use.get());
        Self {
            needed: leaving.in_use.min(leaving.vms),
            there: Bytes::new(leaving.free.get().saturating_sub(unused)),
        }
    }

    pub(super) fn is_enough(self) -> bool {
        self.needed <= self.there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(free: u64, online: u64, in_use: u64, vms: u64) -> Room {
        let [free, online, in_use, vms] = [free, online, in_use, vms].map(|mib| Bytes::new(mib * MIB));
        Room::of(Leaving { free, online, in_use, vms })
    }

    #[test]
    fn free_memory_of_leaving_slice_does_not_count() {
        assert!(!room(724, 1024, 300, 2000).is_enough(), "all that is free leaves with it");
        assert!(room(1024, 1024, 300, 2000).is_enough(), "300 of 300 MiB are free elsewhere");
        assert!(!room(1023, 1024, 300, 2000).is_enough());
    }

    #[test]
    fn partly_offline_slice_counts_its_online_part_only() {
        // One block of 128 MiB is left, full: all that the node has free is in other slices.
        assert_eq!(room(128, 128, 128, 2000).there, Bytes::new(128 * MIB));
        assert!(room(128, 128, 128, 2000).is_enough());
        // Reckoned with all of the slice, there would seem to be none.
        assert!(!room(128, 1024, 128, 2000).is_enough());
    }

    #[test]
    fn kernel_caches_need_no_free_space() {
        assert!(room(0, 1024, 1024, 0).is_enough());
    }
}
