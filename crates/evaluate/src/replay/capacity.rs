//! Free capacity of the rack as computed by a replay. Cores and local memory are counted by the
//! replay, so that placements do not depend on the delay of the manager's snapshots. Free slices
//! are the free slices of the latest snapshot minus the slices of later requests. During calls the
//! computed capacity may be slightly wrong. The manager rejects a placement that does not fit.

use std::collections::{BTreeMap, BTreeSet};

use cli_runtime::Failure;
use proto::v1;
use sim::packing::{self, Capacity, HostCapacity, Placement, VmShape};
use units::{Bytes, Name};

/// Free capacity of the rack, and the placements of this replay.
#[derive(Debug, Default)]
pub(super) struct FreeCapacity {
    snapshot: Capacity,
    /// Free cores and local memory of each host before the VMs of this replay are subtracted.
    total: BTreeMap<Name, (u32, Bytes)>,
    current: Capacity,
    placements: BTreeMap<u64, PlacementState>,
    next: u64,
}

#[derive(Debug)]
struct PlacementState {
    placement: Placement,
    slices: SnapshotState,
}

/// Whether the latest snapshot of the manager already excludes the slices of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SnapshotState {
    /// The manager has not replied yet, so the slices may still be free in snapshots.
    Missing,
    /// The manager has accepted the VM, so the next snapshot excludes the slices.
    InNext,
    /// The latest snapshot excludes the slices.
    Contained,
}

/// Placement of one VM, as returned by [`FreeCapacity::place`].
#[derive(Clone, Debug)]
pub(super) struct PlacedVm {
    pub(super) placement: Placement,
    number: u64,
}

impl FreeCapacity {
    /// Returns the current free capacity.
    pub(super) fn current(&self) -> &Capacity {
        &self.current
    }

    /// Applies a newer snapshot of the manager.
    pub(super) fn apply(&mut self, snapshot: Capacity) {
        for placement in
            self.placements.values_mut().filter(|placement| placement.slices == SnapshotState::InNext)
        {
            placement.slices = SnapshotState::Contained;
        }
        for (host, host_capacity) in &snapshot.hosts {
            self.total.entry(host.clone()).or_insert((host_capacity.cores, host_capacity.local));
        }
        self.snapshot = snapshot;
        self.recompute_capacity();
    }

    /// Applies a snapshot that was taken while no call was in progress. It is exact, so it also
    /// determines free cores and local memory.
    pub(super) fn apply_exact_capacity(&mut self, snapshot: Capacity) {
        self.total = snapshot
            .hosts
            .iter()
            .map(|(host, host_capacity)| (host.clone(), (host_capacity.cores, host_capacity.local)))
            .collect();
        for PlacementState { placement, slices } in self.placements.values_mut() {
            *slices = SnapshotState::Contained;
            if let Some((cores, local)) = self.total.get_mut(&placement.host) {
                *cores += placement.cores;
                *local = local.checked_add(placement.local).unwrap_or(*local);
            }
        }
        self.apply(snapshot);
    }

    fn recompute_capacity(&mut self) {
        self.current = self.snapshot.clone();
        for (host, host_capacity) in &mut self.current.hosts {
            (host_capacity.cores, host_capacity.local) = self.total.get(host).copied().unwrap_or_default();
        }
        for PlacementState { placement, slices } in self.placements.values() {
            let missing = if *slices == SnapshotState::Contained { 0 } else { placement.slices };
            self.current.allocate_resources(&Placement { slices: missing, ..placement.clone() });
        }
    }

    /// Selects the best placement for a VM and subtracts it from the free capacity. Returns `None`
    /// if the VM does not fit on any host outside `excluded`.
    pub(super) fn place(&mut self, shape: VmShape, excluded: &BTreeSet<Name>) -> Option<PlacedVm> {
        let placement = packing::place(shape, &self.current, excluded)?;
        self.current.allocate_resources(&placement);
        let number = self.next;
        self.next += 1;
        self.placements
            .insert(number, PlacementState { placement: placement.clone(), slices: SnapshotState::Missing });
        Some(PlacedVm { placement, number })
    }

    /// Records that the manager accepted a placement.
    pub(super) fn record_accepted_vm(&mut self, vm: &PlacedVm) {
        if let Some(placement) = self.placements.get_mut(&vm.number) {
            placement.slices = SnapshotState::InNext;
        }
    }

    /// Frees the capacity of a placement whose VM ended or was rejected.
    pub(super) fn remove_placement(&mut self, vm: &PlacedVm) {
        self.placements.remove(&vm.number);
        self.recompute_capacity();
    }

    /// Returns whether a VM would fit if the draining slices, counted per EMC, were free.
    pub(super) fn would_fit(&self, shape: VmShape, draining: &BTreeMap<Name, u32>) -> bool {
        let mut later = self.current.clone();
        for (emc, slices) in draining {
            *later.slices.entry(emc.clone()).or_default() += slices;
        }
        packing::place(shape, &later, &BTreeSet::new()).is_some()
    }
}

/// Converts a snapshot of the manager to the capacity type of the packing algorithm.
///
/// # Errors
/// [`Failure::Protocol`] if a name is invalid.
pub(super) fn from_snapshot(snapshot: v1::Capacity) -> Result<Capacity, Failure> {
    let hosts = snapshot.hosts.into_iter().map(host_capacity).collect::<Result<_, _>>()?;
    let slices = snapshot.emcs.into_iter().map(|emc| Ok((parse_name(emc.emc)?, emc.free_slices)));
    Ok(Capacity { hosts, slices: slices.collect::<Result<_, Failure>>()? })
}

fn host_capacity(host: v1::HostCapacity) -> Result<(Name, HostCapacity), Failure> {
    let emcs = host.emcs.into_iter().map(|emc| parse_name(emc.emc)).collect::<Result<_, _>>()?;
    let (is_schedulable, cores) = (host.schedulable, host.free_cores);
    Ok((
        parse_name(host.host)?,
        HostCapacity { is_schedulable, cores, local: Bytes::new(host.free_local_bytes), emcs },
    ))
}

pub(super) fn parse_name(text: String) -> Result<Name, Failure> {
    Name::try_from(text).map_err(|error| Failure::Protocol(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(cores: u32) -> Capacity {
        let emc = v1::EmcCapacity { emc: "e".into(), free_slices: 4, slices: 8 };
        let host = v1::HostCapacity {
            host: "a".into(),
            schedulable: true,
            free_cores: cores,
            free_local_bytes: 1 << 30,
            emcs: vec![emc.clone()],
        };
        from_snapshot(v1::Capacity { revision: 1, hosts: vec![host], emcs: vec![emc] }).unwrap()
    }

    const VM_SHAPE: VmShape = VmShape { cores: 2, memory: Bytes::gib(2) };

    fn free(cores: u32) -> FreeCapacity {
        let mut free = FreeCapacity::default();
        free.apply(snapshot(cores));
        free
    }

    #[test]
    fn requested_capacity_is_not_used_for_another_vm() {
        let mut free = free(4);
        let first = free.place(VM_SHAPE, &BTreeSet::new()).unwrap();
        assert_eq!((first.placement.local, first.placement.slices), (Bytes::gib(1), 1));
        assert_eq!(free.place(VM_SHAPE, &BTreeSet::new()).unwrap().placement.slices, 2);
        assert!(free.place(VM_SHAPE, &BTreeSet::new()).is_none(), "no cores are left");
    }

    #[test]
    fn cores_are_counted_once_independent_of_snapshot_time() {
        for contained_in in 0..3 {
            let mut free = free(4);
            let place = free.place(VM_SHAPE, &BTreeSet::new()).unwrap();
            // A snapshot that includes the VM can arrive before the reply to its reservation, and
            // one that omits the VM can arrive after this reply. The number of free cores must be
            // correct in both cases.
            free.apply(snapshot(if contained_in == 0 { 2 } else { 4 }));
            assert_eq!(free.current().hosts["a"].cores, 2);
            free.record_accepted_vm(&place);
            free.apply(snapshot(if contained_in == 1 { 2 } else { 4 }));
            assert_eq!(free.current().hosts["a"].cores, 2);
            free.remove_placement(&place);
            assert_eq!(free.current().hosts["a"].cores, 4, "a released VM frees its cores at once");
        }
    }

    #[test]
    fn exact_snapshot_includes_capacity_used_by_other_clients() {
        let mut free = free(8);
        let place = free.place(VM_SHAPE, &BTreeSet::new()).unwrap();
        free.record_accepted_vm(&place);
        free.apply_exact_capacity(snapshot(3));
        assert_eq!(free.current().hosts["a"].cores, 3);
        free.remove_placement(&place);
        assert_eq!(free.current().hosts["a"].cores, 5);
    }

    #[test]
    fn slices_stay_reserved_until_snapshot_after_reply() {
        let mut free = free(8);
        let place = free.place(VM_SHAPE, &BTreeSet::new()).unwrap();
        let slices = |free: &FreeCapacity| free.current().slices["e"];
        assert_eq!(slices(&free), 3);
        free.apply(snapshot(8));
        assert_eq!(slices(&free), 3);
        free.record_accepted_vm(&place);
        free.apply(snapshot(8));
        assert_eq!(slices(&free), 4, "the snapshot already excludes the slices of the VM");
    }

    #[test]
    fn capacity_of_rejected_placement_is_free_at_once() {
        let mut free = free(2);
        let place = free.place(VM_SHAPE, &BTreeSet::new()).unwrap();
        free.remove_placement(&place);
        assert_eq!(*free.current(), snapshot(2));
    }

    #[test]
    fn draining_slices_help_only_if_other_capacity_suffices() {
        let free = free(4);
        let draining = BTreeMap::from([(Name::new("e").unwrap(), 4)]);
        let shape = |cores, gib| VmShape { cores, memory: Bytes::gib(gib) };
        assert!(free.would_fit(shape(4, 9), &draining));
        assert!(!free.would_fit(shape(5, 9), &draining));
        assert!(!free.would_fit(shape(4, 10), &draining));
    }
}
