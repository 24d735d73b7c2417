//! Lifecycle of one VM of a replay. The memory is reserved on the best host, or on the next best if
//! that host rejects the VM. A test VMM starts when the memory is ready. When the VM departs, the
//! test VMM ends before the memory is released. The lifecycles of several VMs run concurrently.

use std::{
    collections::BTreeSet,
    sync::{Arc, MutexGuard},
    time::Instant,
};

use cli_runtime::Failure;
use proto::v1;
use sim::packing::VmShape;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use units::{Name, limits::REPLAY_ATTEMPTS_MAX};

use super::{
    ReplayState,
    calls::is_rejection,
    capacity::{FreeCapacity, PlacedVm},
    journal::Journal,
    tally::ReplayTally,
    test_vmms::{RunningTestVmm, StartResult},
    watcher,
};

/// VM of a trace that is replayed.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    /// Name of the VM on the rack.
    pub(super) name: String,
    pub(super) shape: VmShape,
}

/// VM that a host accepted.
#[derive(Debug)]
struct RunningVm {
    place: PlacedVm,
    reservation: v1::Reservation,
    test_vmm: Option<Box<RunningTestVmm>>,
}

/// Runs a VM from its arrival to its departure. A permit allows one concurrent call: the caller
/// passes one permit for the arrival, and sends another for the departure.
pub(super) async fn run(
    rack: Arc<ReplayState>,
    vm: Vm,
    place: PlacedVm,
    arrival_permit: OwnedSemaphorePermit,
    departure: oneshot::Receiver<OwnedSemaphorePermit>,
) -> Result<(), Failure> {
    let Some(running) = place_vm(&rack, &vm, place).await? else {
        rack.tally().rejected += 1;
        return Ok(());
    };
    rack.tally().placed += 1;
    drop(arrival_permit);
    match running.test_vmm {
        Some(mut test_vmm) => tokio::select! {
            permit = departure => {
                let findings = test_vmm.end().await;
                record_vm_end(&rack, findings.map(|findings| findings.overwritten));
                release(&rack, &running.place, &running.reservation).await?;
                drop(permit);
            }
            _ = test_vmm.wait_for_exit() => {
                rack.tally().lost += 1;
                release(&rack, &running.place, &running.reservation).await?;
            }
        },
        None => {
            let permit = departure.await;
            release(&rack, &running.place, &running.reservation).await?;
            drop(permit);
        }
    }
    Ok(())
}

async fn release(rack: &ReplayState, place: &PlacedVm, reservation: &v1::Reservation) -> Result<(), Failure> {
    rack.release(reservation).await?;
    rack.free_capacity().remove_placement(place);
    Ok(())
}

fn record_vm_end(rack: &ReplayState, overwritten: Option<Vec<u32>>) {
    match overwritten {
        Some(slices) => rack.tally().overwritten.extend(slices),
        None => rack.tally().lost += 1,
    }
}

/// Tries hosts, best first, until one accepts the VM. Returns `None` if every host rejects the VM.
async fn place_vm(rack: &ReplayState, vm: &Vm, first: PlacedVm) -> Result<Option<RunningVm>, Failure> {
    let (mut place, mut tried) = (first, BTreeSet::new());
    for attempt in 0..REPLAY_ATTEMPTS_MAX {
        if let Some(running) = try_start_on_host(rack, vm, &place, attempt).await? {
            return Ok(Some(running));
        }
        tried.insert(place.placement.host.clone());
        match next_placement(rack, vm.shape, &mut tried).await? {
            Some(next) => place = next,
            None => break,
        }
    }
    Ok(None)
}

/// Returns a placement on the best host that was not tried yet. If there is none, requests a new
/// snapshot and returns a placement on the best of all hosts.
async fn next_placement(
    rack: &ReplayState,
    shape: VmShape,
    tried: &mut BTreeSet<Name>,
) -> Result<Option<PlacedVm>, Failure> {
    let next = rack.free_capacity().place(shape, tried);
    if next.is_some() {
        return Ok(next);
    }
    watcher::apply_fresh_snapshot(&rack.manager, &rack.free).await?;
    tried.clear();
    Ok(rack.free_capacity().place(shape, tried))
}

/// Tries to run a VM on a host. Returns `None` if the host rejected the VM. The memory of the VM is
/// then released.
async fn try_start_on_host(
    rack: &ReplayState,
    vm: &Vm,
    place: &PlacedVm,
    attempt: usize,
) -> Result<Option<RunningVm>, Failure> {
    let reserve_started = Instant::now();
    let reservation = match rack.reserve(&vm.name, &place.placement, attempt).await {
        Ok(reservation) => reservation,
        Err(failure) => {
            rack.free_capacity().remove_placement(place);
            return if is_rejection(&failure) { Ok(None) } else { Err(failure) };
        }
    };
    rack.free_capacity().record_accepted_vm(place);
    let started = match start_vm(rack, vm, &reservation, reserve_started).await {
        Ok(started) => started,
        Err(failure) if is_rejection(&failure) => None,
        Err(failure) => return Err(failure),
    };
    match started {
        Some(test_vmm) => Ok(Some(RunningVm { place: place.clone(), reservation, test_vmm })),
        None => release(rack, place, &reservation).await.map(|()| None),
    }
}

/// Waits for the memory of a VM, starts its test VMM and commits the reservation. Returns `None` if
/// the test VMM failed, and `Some(None)` if the VM runs without a test VMM.
async fn start_vm(
    rack: &ReplayState,
    vm: &Vm,
    reservation: &v1::Reservation,
    reserve_started: Instant,
) -> Result<Option<Option<Box<RunningTestVmm>>>, Failure> {
    let mut test_vmm = None;
    if !reservation.slices.is_empty() {
        rack.wait_ready(reservation).await?;
        rack.tally().record_ready_time(reserve_started.elapsed());
        match rack.test_vmms.start(&vm.name, &reservation.host).await {
            StartResult::Running(running, found) => {
                let mut tally = rack.tally();
                tally.read += found.slices.len() as u64;
                tally.dirty += found.dirty.len() as u64;
                test_vmm = Some(running);
            }
            StartResult::Unavailable(reason) => rack.tally().count_unread_vm(reason),
            StartResult::Failed(reason) => {
                rack.tally().count_unread_vm(reason);
                return Ok(None);
            }
        }
    }
    rack.commit(reservation).await?;
    Ok(Some(test_vmm))
}

const LOCK_NOT_POISONED: &str = "no holder of this lock panics";

impl ReplayState {
    pub(super) fn free_capacity(&self) -> MutexGuard<'_, FreeCapacity> {
        self.free.lock().expect(LOCK_NOT_POISONED)
    }

    pub(super) fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().expect(LOCK_NOT_POISONED)
    }

    pub(super) fn tally(&self) -> MutexGuard<'_, ReplayTally> {
        self.tally.lock().expect(LOCK_NOT_POISONED)
    }
}
