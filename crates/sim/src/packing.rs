//! Best-fit scheduler: chooses the host of a VM and the size of its pool memory. Callers reserve
//! the memory and handle rejections.
//!
//! A VM receives local memory first and its remaining memory from the pool. Pool memory is a whole
//! number of slices, at most the memory of the VM rounded down to whole slices. Hosts where the VM
//! needs no pool memory are preferred. Ties are resolved by the fewest remaining cores, then the
//! least remaining local memory, then the name of the host.

use std::collections::{BTreeMap, BTreeSet};

use units::{Bytes, Name, SLICE};

/// Free resources of a rack, by host and by EMC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Free resources of each host, by name.
    pub hosts: BTreeMap<Name, HostCapacity>,
    /// Number of free slices by EMC. All hosts connected to an EMC share its slices.
    pub slices: BTreeMap<Name, u32>,
}

/// Free resources of one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostCapacity {
    /// Whether the host accepts new VMs.
    pub is_schedulable: bool,
    /// Number of free cores.
    pub cores: u32,
    /// Free local memory, in bytes.
    pub local: Bytes,
    /// Names of the EMCs that the host is connected to.
    pub emcs: Vec<Name>,
}

/// Size of a VM: the resources that the VM requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmShape {
    /// Number of cores that the VM requests.
    pub cores: u32,
    /// Total memory: local and pool memory together.
    pub memory: Bytes,
}

/// Placement of a VM: its host, and the split of its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Name of the host.
    pub host: Name,
    /// Number of cores of the VM.
    pub cores: u32,
    /// Memory from the host, in bytes.
    pub local: Bytes,
    /// Memory from the pool, in slices.
    pub slices: u32,
}

/// Returns the best placement for a VM, or `None` if no host has enough free resources. Hosts in
/// `excluded` are skipped.
pub fn place(shape: VmShape, capacity: &Capacity, excluded: &BTreeSet<Name>) -> Option<Placement> {
    let is_schedulable = capacity
        .hosts
        .iter()
        .filter(|(name, host_capacity)| host_capacity.is_schedulable && !excluded.contains(*name));
    let candidates = is_schedulable.filter_map(|(name, host_capacity)| {
        let placement = capacity.placement_on(shape, name, host_capacity)?;
        let rank = (
            placement.slices > 0,
            host_capacity.cores - shape.cores,
            host_capacity.local.saturating_sub(placement.local),
        );
        Some((rank, placement))
    });
    // Ties are resolved by name: the map is sorted by name and `min_by` returns the first minimum.
    candidates.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, placement)| placement)
}

impl Capacity {
    fn placement_on(&self, shape: VmShape, host: &Name, host_capacity: &HostCapacity) -> Option<Placement> {
        let slices = slices_needed(shape.memory, host_capacity.local)?;
        let fits = shape.cores <= host_capacity.cores && slices <= self.reachable_slices(host_capacity);
        let local = shape.memory.saturating_sub(Bytes::slices(slices));
        fits.then(|| Placement { host: host.clone(), cores: shape.cores, local, slices })
    }

    /// Returns the number of free slices on the EMCs that a host is connected to.
    fn reachable_slices(&self, host_capacity: &HostCapacity) -> u32 {
        let free = host_capacity.emcs.iter().filter_map(|emc| self.slices.get(emc));
        free.fold(0, |sum, free| sum.saturating_add(*free))
    }

    /// Subtracts a placement from the free resources. Slices are taken from the EMC with the most
    /// free slices first, in the same order as the pool manager.
    pub fn allocate_resources(&mut self, placement: &Placement) {
        let Some(host_capacity) = self.hosts.get_mut(&placement.host) else { return };
        host_capacity.cores = host_capacity.cores.saturating_sub(placement.cores);
        host_capacity.local = host_capacity.local.saturating_sub(placement.local);
        let mut emcs = host_capacity.emcs.clone();
        emcs.sort_by_key(|emc| std::cmp::Reverse(self.slices.get(emc).copied()));
        let mut needed = placement.slices;
        for emc in emcs {
            let Some(free) = self.slices.get_mut(&emc) else { continue };
            let taken = needed.min(*free);
            *free -= taken;
            needed -= taken;
        }
    }

    /// Returns the stranded local memory for a VM shape. Stranded memory is the free local memory
    /// of schedulable hosts on which no VM of this shape fits.
    pub fn stranded(&self, shape: VmShape) -> Bytes {
        let unusable = self.hosts.iter().filter(|(name, host_capacity)| {
            host_capacity.is_schedulable && self.placement_on(shape, name, host_capacity).is_none()
        });
        unusable.map(|(_, host_capacity)| host_capacity.local).sum()
    }
}

/// Returns the number of slices that a VM needs in addition to `local` memory. Returns `None` if
/// the fraction of a slice that remains does not fit into `local`.
fn slices_needed(memory: Bytes, local: Bytes) -> Option<u32> {
    let beyond = memory.saturating_sub(local).get().div_ceil(SLICE.get());
    let slices_max = memory.slices_floor().as_slices()?;
    u32::try_from(beyond).ok().filter(|slices| *slices <= slices_max)
}

/// Returns the lower median of the cores and, independently, the lower median of the memory.
/// Returns `None` if `shapes` is empty.
pub fn median(shapes: impl Iterator<Item = VmShape>) -> Option<VmShape> {
    let (mut cores, mut memory): (Vec<u32>, Vec<Bytes>) =
        shapes.map(|shape| (shape.cores, shape.memory)).unzip();
    let middle = cores.len().checked_sub(1)? / 2;
    let cores = *cores.select_nth_unstable(middle).1;
    let memory = *memory.select_nth_unstable(middle).1;
    Some(VmShape { cores, memory })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    /// Parses a rack: a list, separated by `;`, of hosts as `name cores local_mib emc,emc` and of
    /// EMCs as `name slices`.
    fn rack(text: &str) -> Capacity {
        let mut rack = Capacity::default();
        for part in text.split(';') {
            match part.split_whitespace().collect::<Vec<_>>()[..] {
                [emc, slices] => drop(rack.slices.insert(name(emc), slices.parse().unwrap())),
                [host, cores, mib, emcs] => {
                    let emcs = emcs.split(',').map(name).collect();
                    let (cores, local) = (cores.parse().unwrap(), Bytes::mib(mib.parse().unwrap()));
                    rack.hosts.insert(name(host), HostCapacity { is_schedulable: true, cores, local, emcs });
                }
                _ => panic!("{part:?}"),
            }
        }
        rack
    }

    /// Returns the placement of a VM, formatted as `host local+slices`.
    fn placement_of(rack: &Capacity, cores: u32, mib: u64) -> String {
        let shape = VmShape { cores, memory: Bytes::mib(mib) };
        let format = |p: Placement| format!("{} {}+{}", p.host, p.local, p.slices);
        place(shape, rack, &BTreeSet::new()).map_or("nowhere".into(), format)
    }

    #[test]
    fn placement_prefers_local_memory_and_uses_whole_slices() {
        let rack = rack("a 8 2048 e;e 4");
        assert_eq!(placement_of(&rack, 1, 2048), "a 2GiB+0");
        assert_eq!(placement_of(&rack, 1, 2049), "a 1025MiB+1");
        assert_eq!(placement_of(&rack, 1, 6144), "a 2GiB+4");
        assert_eq!(placement_of(&rack, 1, 6145), "nowhere");
    }

    #[test]
    fn fraction_of_a_slice_must_fit_locally() {
        assert_eq!(placement_of(&rack("a 8 511 e;e 4"), 1, 1536), "nowhere");
        assert_eq!(placement_of(&rack("a 8 512 e;e 4"), 1, 1536), "a 512MiB+1");
        assert_eq!(placement_of(&rack("a 8 0 e;e 4"), 1, 2048), "a 0B+2");
    }

    #[test]
    fn fullest_host_that_needs_no_pool_memory_is_preferred() {
        let rack = rack("a 8 8192 e;b 4 4096 e;c 2 1024 e;e 9");
        assert_eq!(placement_of(&rack, 2, 1024), "c 1GiB+0");
        assert_eq!(placement_of(&rack, 2, 2048), "b 2GiB+0");
        assert_eq!(placement_of(&rack, 5, 2048), "a 2GiB+0");
        assert_eq!(placement_of(&rack, 2, 9216), "c 1GiB+8");
    }

    #[test]
    fn hosts_share_the_slices_of_their_emc() {
        let mut rack = rack("a 8 0 e;b 8 0 e,f;e 2;f 1");
        let placement = place(VmShape { cores: 1, memory: Bytes::gib(2) }, &rack, &BTreeSet::new()).unwrap();
        rack.allocate_resources(&placement);
        assert_eq!(rack.slices[&name("e")], 0);
        assert_eq!(placement_of(&rack, 1, 1024), "b 0B+1");
        assert_eq!(placement_of(&rack, 1, 2048), "nowhere");
    }

    #[test]
    fn unschedulable_and_excluded_hosts_are_skipped() {
        let mut rack = rack("a 8 8192 e;b 8 8192 e;e 1");
        rack.hosts.get_mut("a").unwrap().is_schedulable = false;
        assert_eq!(placement_of(&rack, 1, 1024), "b 1GiB+0");
        let shape = VmShape { cores: 1, memory: Bytes::gib(1) };
        assert_eq!(place(shape, &rack, &BTreeSet::from([name("b")])), None);
    }

    #[test]
    fn memory_of_hosts_too_small_for_the_median_vm_is_stranded() {
        let shapes =
            [(1, 1), (2, 2), (2, 9), (8, 64)].map(|(cores, gib)| VmShape { cores, memory: Bytes::gib(gib) });
        let shape = median(shapes.into_iter()).unwrap();
        assert_eq!(shape, VmShape { cores: 2, memory: Bytes::gib(2) });
        assert_eq!(median(std::iter::empty()), None);
        // Only host c fits another VM. Host a has too few cores; host b has too little memory.
        let rack = rack("a 1 8192 e;b 9 1024 f;c 2 1024 e;e 1;f 0");
        assert_eq!(rack.stranded(shape), Bytes::gib(9));
    }

    fn any_rack() -> impl Strategy<Value = Capacity> {
        let host = (any::<bool>(), 0..9u32, 0..9000u64, prop::collection::btree_set(0..3u8, 0..3));
        let hosts = prop::collection::vec(host, 0..6);
        (hosts, prop::collection::vec(0..5u32, 3)).prop_map(|(hosts, slices)| Capacity {
            hosts: hosts
                .into_iter()
                .enumerate()
                .map(|(i, (is_schedulable, cores, mib, emcs))| {
                    let emcs = emcs.into_iter().map(|e| name(&format!("e{e}"))).collect();
                    (
                        name(&format!("h{i}")),
                        HostCapacity { is_schedulable, cores, local: Bytes::mib(mib), emcs },
                    )
                })
                .collect(),
            slices: slices.into_iter().enumerate().map(|(i, n)| (name(&format!("e{i}")), n)).collect(),
        })
    }

    proptest! {
        #[test]
        fn placements_never_exceed_free_resources(mut rack in any_rack(), vms in prop::collection::vec((1..5u32, 1..9000u64), 0..20)) {
            for (cores, mib) in vms {
                let shape = VmShape { cores, memory: Bytes::mib(mib) };
                let before = rack.clone();
                let Some(placement) = place(shape, &rack, &BTreeSet::new()) else { continue };
                let host_capacity = &before.hosts[&placement.host];
                prop_assert!(host_capacity.is_schedulable && host_capacity.cores >= cores && host_capacity.local >= placement.local);
                prop_assert_eq!(placement.local.checked_add(Bytes::slices(placement.slices)), Some(shape.memory));
                rack.allocate_resources(&placement);
                let left: u32 = rack.slices.values().sum();
                prop_assert_eq!(left + placement.slices, before.slices.values().sum::<u32>());
                for (emc, free) in &rack.slices {
                    prop_assert!(*free == before.slices[emc] || host_capacity.emcs.contains(emc));
                }
            }
        }

        #[test]
        fn vm_is_rejected_only_if_no_host_fits(rack in any_rack(), cores in 1..5u32, mib in 1..9000u64) {
            let shape = VmShape { cores, memory: Bytes::mib(mib) };
            if place(shape, &rack, &BTreeSet::new()).is_none() {
                for host_capacity in rack.hosts.values().filter(|host_capacity| host_capacity.is_schedulable && host_capacity.cores >= cores) {
                    let slices: u64 = host_capacity.emcs.iter().map(|emc| u64::from(rack.slices[emc])).sum();
                    let fits = (0..=slices.min(mib / 1024)).any(|n| Bytes::mib(mib - n * 1024) <= host_capacity.local);
                    prop_assert!(!fits, "{host_capacity:?} has enough resources for the rejected VM");
                }
            }
        }

        #[test]
        fn pool_is_used_only_if_no_host_has_enough_local_memory(rack in any_rack(), cores in 1..5u32, mib in 1..9000u64) {
            let shape = VmShape { cores, memory: Bytes::mib(mib) };
            if place(shape, &rack, &BTreeSet::new()).is_some_and(|p| p.slices > 0) {
                prop_assert!(!rack.hosts.values().any(|r| r.is_schedulable && r.cores >= cores && r.local >= shape.memory));
            }
        }
    }
}
