//! Check that the node's other slices have space for the pages of a leaving one, before its first
//! block is changed.

use units::Bytes;

/// State of a node and of a slice that has to leave it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceRemoval {
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
pub(super) struct FreeSpace {
    pub(super) needed: Bytes,
    pub(super) available: Bytes,
}

impl FreeSpace {
    pub(super) fn of(removal: SliceRemoval) -> Self {
        let unused = removal.online.get().saturating_sub(removal.in_use.get());
        Self {
            needed: removal.in_use.min(removal.vms),
            available: Bytes::new(removal.free.get().saturating_sub(unused)),
        }
    }

    pub(super) fn is_sufficient(self) -> bool {
        self.needed <= self.available
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn space(free: u64, online: u64, in_use: u64, vms: u64) -> FreeSpace {
        let [free, online, in_use, vms] = [free, online, in_use, vms].map(|mib| Bytes::new(mib * MIB));
        FreeSpace::of(SliceRemoval { free, online, in_use, vms })
    }

    #[test]
    fn free_memory_of_leaving_slice_does_not_count() {
        assert!(!space(724, 1024, 300, 2000).is_sufficient(), "all that is free leaves with it");
        assert!(space(1024, 1024, 300, 2000).is_sufficient(), "300 of 300 MiB are free elsewhere");
        assert!(!space(1023, 1024, 300, 2000).is_sufficient());
    }

    #[test]
    fn partly_offline_slice_counts_its_online_part_only() {
        // One block of 128 MiB is left, full: all that the node has free is in other slices.
        assert_eq!(space(128, 128, 128, 2000).available, Bytes::new(128 * MIB));
        assert!(space(128, 128, 128, 2000).is_sufficient());
        // Reckoned with all of the slice, there would seem to be none.
        assert!(!space(128, 1024, 128, 2000).is_sufficient());
    }

    #[test]
    fn kernel_caches_need_no_free_space() {
        assert!(space(0, 1024, 1024, 0).is_sufficient());
    }
}
