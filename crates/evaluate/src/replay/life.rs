//! The life of one VM of a replay: memory is reserved where it was placed, or on the next best host; when it is ready a
//! stand-in moves in; when the VM departs the stand-in leaves first, then the memory is released. Its steps follow each
//! other; the lives of different VMs go on side by side.

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
    Rack,
    calls::is_refusal,
    capacity::{Free, Place},
    journal::Journal,
    stand_ins::{Running, Started},
    tally::Tally,
    watcher,
};

/// One VM.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    /// Its name on the rack.
    pub(super) name: String,
    pub(super) need: VmShape,
}

/// A VM that runs.
#[derive(Debug)]
struct Home {
    place: Place,
    reservation: v1::Reservation,
    stand_in: Option<Box<Running>>,
}

/// From arrival to departure. The permit is one of the calls that may be under way; departure brings another.
pub(super) async fn live(
    rack: Arc<Rack>,
    vm: Vm,
    place: Place,
    arriving: OwnedSemaphorePermit,
    departing: oneshot::Receiver<OwnedSemaphorePermit>,
) -> Result<(), Failure> {
    let Some(home) = move_in(&rack, &vm, place).await? else {
        rack.tally().rejected += 1;
        return Ok(());
    };
    rack.tally().placed += 1;
    drop(arriving);
    match home.stand_in {
        Some(mut stand_in) => tokio::select! {
            permit = departing => {
                let left = stand_in.leave().await;
                note_leaving(&rack, left.map(|left| left.overwritten));
                leave(&rack, &home.place, &home.reservation).await?;
                drop(permit);
            }
            _ = stand_in.died() => {
                rack.tally().lost += 1;
                leave(&rack, &home.place, &home.reservation).await?;
            }
        },
        None => {
            let permit = departing.await;
            leave(&rack, &home.place, &home.reservation).await?;
            drop(permit);
        }
    }
    Ok(())
}

async fn leave(rack: &Rack, place: &Place, reservation: &v1::Reservation) -> Result<(), Failure> {
    rack.release(reservation).await?;
    rack.free().left(place);
    Ok(())
}

fn note_leaving(rack: &Rack, overwritten: Option<Vec<u32>>) {
    match overwritten {
        Some(slices) => rack.tally().overwritten.extend(slices),
        None => rack.tally().lost += 1,
    }
}

/// Tries hosts until one has taken the VM, from the best one on.
async fn move_in(rack: &Rack, vm: &Vm, first: Place) -> Result<Option<Home>, Failure> {
    let (mut place, mut tried) = (first, BTreeSet::new());
    for attempt in 0..REPLAY_ATTEMPTS_MAX {
        if let Some(home) = try_host(rack, vm, &place, attempt).await? {
            return Ok(Some(home));
        }
        tried.insert(place.placement.host.clone());
        match elsewhere(rack, vm.need, &mut tried).await? {
            Some(next) => place = next,
            None => break,
        }
    }
    Ok(None)
}

/// The best host that was not tried; when all were, the best one by a new picture.
async fn elsewhere(rack: &Rack, need: VmShape, tried: &mut BTreeSet<Name>) -> Result<Option<Place>, Failure> {
    let next = rack.free().place(need, tried);
    if next.is_some() {
        return Ok(next);
    }
    watcher::fresh(&rack.to, &rack.free).await?;
    tried.clear();
    Ok(rack.free().place(need, tried))
}

/// `None` if the host did not take it; then nothing of it is left there.
async fn try_host(rack: &Rack, vm: &Vm, place: &Place, attempt: usize) -> Result<Option<Home>, Failure> {
    let began = Instant::now();
    let reservation = match rack.reserve(&vm.name, &place.placement, attempt).await {
        Ok(reservation) => reservation,
        Err(failure) => {
            rack.free().left(place);
            return if is_refusal(&failure) { Ok(None) } else { Err(failure) };
        }
    };
    rack.free().given(place);
    let moved = match start(rack, vm, &reservation, began).await {
        Ok(moved) => moved,
        Err(failure) if is_refusal(&failure) => None,
        Err(failure) => return Err(failure),
    };
    match moved {
        Some(stand_in) => Ok(Some(Home { place: place.clone(), reservation, stand_in })),
        None => leave(rack, place, &reservation).await.map(|()| None),
    }
}

/// Brings a VM up on its memory; `None` if that failed.
async fn start(
    rack: &Rack,
    vm: &Vm,
    reservation: &v1::Reservation,
    began: Instant,
) -> Result<Option<Option<Box<Running>>>, Failure> {
    let mut stand_in = None;
    if !reservation.slices.is_empty() {
        rack.wait_ready(reservation).await?;
        rack.tally().ready_took(began.elapsed());
        match rack.stand_ins.start(&vm.name, &reservation.host).await {
            Started::Runs(running, found) => {
                let mut tally = rack.tally();
                tally.read += found.slices.len() as u64;
                tally.dirty += found.dirty.len() as u64;
                stand_in = Some(running);
            }
            Started::Absent(why) => rack.tally().unread(why),
            Started::Failed(why) => {
                rack.tally().unread(why);
                return Ok(None);
            }
        }
    }
    rack.commit(reservation).await?;
    Ok(Some(stand_in))
}

const UNPOISONED: &str = "no holder of this lock panics";

impl Rack {
    pub(super) fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().expect(UNPOISONED)
    }

    pub(super) fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().expect(UNPOISONED)
    }

    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().expect(UNPOISONED)
    }
}
