//! Model of a pool device, emulated or shared. Its replies are correct; the checker decides whether
//! the manager's calls are allowed.

use std::collections::BTreeSet;

use pool::manager::{Contents, DeviceCall, DeviceDone, DeviceFailure, Grant, SliceError};
use pool::protocol::{Handle, Holding};
use units::{Epoch, HostId, SliceId};

/// Contents of a slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark(pub u64);

impl Mark {
    /// Zeros only.
    pub(super) const ZERO: Self = Self(0);
}

/// Behaviour of a device towards mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Physics {
    /// Revoking invalidates every mapping, and a grant starts zeroed.
    Emulated,
    /// Revoking changes the record only; contents stay until they are overwritten.
    SharedDax,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    highest: Epoch,
    revoked: bool,
    grant: Option<(Epoch, HostId)>,
    holds: Mark,
}

/// A pool device.
#[derive(Debug)]
pub(super) struct Device {
    physics: Physics,
    first: SliceId,
    cells: Vec<Cell>,
    /// Every call fails.
    pub(super) failed: bool,
    /// Slices whose grants and revocations fail.
    pub(super) bad: BTreeSet<SliceId>,
    /// Earlier versions of the record, oldest first.
    snapshots: Vec<Vec<Cell>>,
}

/// Versions of the record kept for a rollback.
const SNAPSHOTS_MAX: usize = 3;

impl Device {
    pub(super) fn new(physics: Physics, first: SliceId, slices: u32) -> Self {
        Self {
            physics,
            first,
            cells: vec![Cell::default(); slices as usize],
            failed: false,
            bad: BTreeSet::new(),
            snapshots: Vec::new(),
        }
    }

    /// Saves a version of the record, like a backup of its folder.
    pub(super) fn take_snapshot(&mut self) {
        if self.snapshots.len() == SNAPSHOTS_MAX {
            self.snapshots.remove(0);
        }
        self.snapshots.push(self.cells.clone());
    }

    /// Returns the number of versions that [`Device::roll_back`] can choose from.
    pub(super) fn snapshots(&self) -> usize {
        self.snapshots.len()
    }

    /// Replaces the record by an earlier version or an empty one. Contents and mappings stay, because the
    /// device cannot revoke access.
    pub(super) fn roll_back(&mut self, version: Option<usize>) {
        let empty = vec![Cell::default(); self.cells.len()];
        let earlier = version.and_then(|n| self.snapshots.get(n).cloned()).unwrap_or(empty);
        for (cell, earlier) in self.cells.iter_mut().zip(earlier) {
            *cell = Cell { holds: cell.holds, ..earlier };
        }
    }

    /// Returns whether the record has this epoch of a slice, or a later one.
    pub(super) fn has_seen(&self, holding: Holding) -> bool {
        self.cells[(holding.slice.0 - self.first.0) as usize].highest >= holding.epoch
    }

    /// Returns whether the device cannot revoke access.
    pub(super) fn is_shared(&self) -> bool {
        self.physics == Physics::SharedDax
    }

    pub(super) fn has(&self, slice: SliceId) -> bool {
        slice >= self.first
            && slice.0 - self.first.0 < u32::try_from(self.cells.len()).expect("made from a u32")
    }

    pub(super) fn slices(&self) -> Vec<SliceId> {
        (self.first.0..).map(SliceId).zip(&self.cells).map(|(slice, _)| slice).collect()
    }

    fn cell(&mut self, slice: SliceId) -> &mut Cell {
        &mut self.cells[(slice.0 - self.first.0) as usize]
    }

    /// Returns whether a mapping of this grant still reaches the slice.
    pub(super) fn reaches(&self, holding: Holding, host: HostId) -> bool {
        let cell = &self.cells[(holding.slice.0 - self.first.0) as usize];
        self.physics == Physics::SharedDax || cell.grant == Some((holding.epoch, host))
    }

    pub(super) fn read(&self, slice: SliceId) -> Mark {
        self.cells[(slice.0 - self.first.0) as usize].holds
    }

    pub(super) fn write(&mut self, slice: SliceId, mark: Mark) {
        self.cell(slice).holds = mark;
    }

    /// Performs a call and returns its result with the mappings that it invalidated.
    pub(super) fn perform(&mut self, call: &DeviceCall) -> (DeviceDone, Vec<Holding>) {
        let failed = |failure| DeviceDone::Failed { call: call.clone(), failure };
        if self.failed {
            return (failed(DeviceFailure::Error("the device does not answer".into())), Vec::new());
        }
        match *call {
            DeviceCall::Grant { slice, epoch, .. } | DeviceCall::Revoke { slice, epoch }
                if self.bad.contains(&slice) =>
            {
                let cut = if epoch.0 % 2 == 1 { self.half_do(call) } else { None };
                let error = SliceError { message: "the slice does not answer".into(), errno: Some(5) };
                (failed(DeviceFailure::Slice(error)), cut.into_iter().collect())
            }
            DeviceCall::Contents => (DeviceDone::Contents(self.contents()), Vec::new()),
            DeviceCall::Grant { slice, epoch, host } => match self.grant(slice, epoch, host) {
                Ok(()) => {
                    (DeviceDone::Granted { slice, epoch, handle: self.handle(slice, epoch) }, Vec::new())
                }
                Err(failure) => (failed(failure), Vec::new()),
            },
            DeviceCall::Revoke { slice, epoch } => {
                (DeviceDone::Revoked { slice, epoch }, self.revoke(slice, epoch).into_iter().collect())
            }
            DeviceCall::Fence { powered_off: false, .. } if self.physics == Physics::SharedDax => {
                (failed(DeviceFailure::NotFenced("it has no fence of its own".into())), Vec::new())
            }
            DeviceCall::Fence { host, .. } => (DeviceDone::Fenced { host }, self.fence(host)),
        }
    }

    /// Performs a call that is reported as failed and may still have taken effect.
    fn half_do(&mut self, call: &DeviceCall) -> Option<Holding> {
        match *call {
            DeviceCall::Grant { slice, epoch, host } => {
                let _ = self.grant(slice, epoch, host); // the result is reported as failed in either case
                None
            }
            DeviceCall::Revoke { slice, epoch } => self.revoke(slice, epoch),
            DeviceCall::Contents | DeviceCall::Fence { .. } => None,
        }
    }

    fn grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId) -> Result<(), DeviceFailure> {
        let physics = self.physics;
        let cell = self.cell(slice);
        let is_over = epoch < cell.highest || (epoch == cell.highest && cell.revoked);
        match cell.grant {
            Some(held) if held != (epoch, host) => Err(DeviceFailure::Held { epoch: held.0, host: held.1 }),
            _ if is_over => Err(DeviceFailure::StaleEpoch { highest: cell.highest }),
            Some(_) => Ok(()),
            None => {
                let holds = if physics == Physics::Emulated { Mark::ZERO } else { cell.holds };
                *cell = Cell { highest: epoch, revoked: false, grant: Some((epoch, host)), holds };
                Ok(())
            }
        }
    }

    fn revoke(&mut self, slice: SliceId, epoch: Epoch) -> Option<Holding> {
        let cell = self.cell(slice);
        if epoch >= cell.highest {
            (cell.highest, cell.revoked) = (epoch, true);
        }
        let (held, _) = cell.grant.take_if(|(held, _)| *held <= epoch)?;
        Some(Holding { slice, epoch: held })
    }

    /// Revokes all slices of a host except those that fail.
    fn fence(&mut self, host: HostId) -> Vec<Holding> {
        let theirs = self.grants().into_iter().filter(|(_, _, by)| *by == host);
        let theirs: Vec<_> = theirs.collect();
        let works = theirs.into_iter().filter(|(slice, ..)| !self.bad.contains(slice)).collect::<Vec<_>>();
        works.into_iter().filter_map(|(slice, epoch, _)| self.revoke(slice, epoch)).collect()
    }

    /// Loses contents and grants in a power failure. The highest epochs stay, unless the record is
    /// `emptied`, as on a tmpfs.
    pub(super) fn lose_power(&mut self, emptied: bool) -> Vec<Holding> {
        let lost = self.grants();
        for cell in &mut self.cells {
            let (highest, revoked) = if emptied { Default::default() } else { (cell.highest, cell.revoked) };
            *cell = Cell { highest, revoked, ..Cell::default() };
        }
        lost.into_iter().map(|(slice, epoch, _)| Holding { slice, epoch }).collect()
    }

    fn grants(&self) -> Vec<(SliceId, Epoch, HostId)> {
        let cells = (self.first.0..).map(SliceId).zip(&self.cells);
        cells.filter_map(|(slice, cell)| cell.grant.map(|(epoch, host)| (slice, epoch, host))).collect()
    }

    /// Returns the handle of a grant; a shared device has one per slice.
    pub(super) fn handle(&self, slice: SliceId, epoch: Epoch) -> Handle {
        let place = if self.is_shared() { format!("{slice}") } else { format!("{slice}.{epoch}") };
        Handle::new("emc", place)
    }

    fn contents(&self) -> Contents {
        let grant = |(slice, epoch, host)| Grant { slice, epoch, host, handle: self.handle(slice, epoch) };
        let seen = (self.first.0..).map(SliceId).zip(&self.cells).filter(|(_, cell)| cell.highest.0 > 0);
        let slices = (self.first.0..).map(SliceId).zip(&self.cells).map(|(slice, _)| slice);
        let places = slices.filter(|_| self.is_shared()).map(|slice| (slice, self.handle(slice, Epoch(0))));
        Contents {
            grants: self.grants().into_iter().map(grant).collect(),
            highest: seen.map(|(slice, cell)| (slice, cell.highest)).collect(),
            places: places.collect(),
        }
    }
}
