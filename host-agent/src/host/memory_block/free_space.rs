//! Check, before a slice is removed from its node, that the node's other slices have enough free
//! space for its pages.

use units::Bytes;

/// Memory of a node, and of the slice to be removed from it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceRemoval {
    /// Free memory of the whole node.
    pub(super) free: Bytes,
    /// Online part of the slice. The offline part does not count in `free` any more.
    pub(super) online: Bytes,
    /// Used part of the slice, including caches of the kernel.
    pub(super) in_use: Bytes,
    /// Memory of all VMs on the node. Caches of the kernel are dropped instead of migrated.
    pub(super) vms: Bytes,
}

/// Memory that has to be migrated, and the free memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeSpace {
    /// Upper bound of the VMs' memory in the slice.
    pub(super) needed: Bytes,
    /// Free memory of the node outside the slice.
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

    /// Computes the free space from sizes in MiB.
    fn space(free: u64, online: u64, in_use: u64, vms: u64) -> FreeSpace {
        let [free, online, in_use, vms] = [free, online, in_use, vms].map(|mib| Bytes::new(mib * MIB));
        FreeSpace::of(SliceRemoval { free, online, in_use, vms })
    }

    #[test]
    fn free_memory_of_removed_slice_does_not_count() {
        assert!(!space(724, 1024, 300, 2000).is_sufficient(), "all 724 MiB are in the removed slice");
        assert!(space(1024, 1024, 300, 2000).is_sufficient(), "300 MiB are free in other slices");
        assert!(!space(1023, 1024, 300, 2000).is_sufficient(), "only 299 MiB are free in other slices");
    }

    #[test]
    fn partly_offline_slice_counts_its_online_part_only() {
        // Only one block of 128 MiB is still online, and it is full, so that the node's 128 free
        // MiB are in other slices.
        assert_eq!(space(128, 128, 128, 2000).available, Bytes::new(128 * MIB));
        assert!(space(128, 128, 128, 2000).is_sufficient());
        assert!(!space(128, 1024, 128, 2000).is_sufficient(), "all blocks of the slice are online");
    }

    #[test]
    fn kernel_caches_need_no_free_space() {
        assert!(space(0, 1024, 1024, 0).is_sufficient());
    }
}
