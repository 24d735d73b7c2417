//! Model of a pool device, emulated or shared. The model replies as a correct device. The checks of
//! the world decide whether the calls of the manager are allowed.

use std::collections::BTreeSet;

use pool::manager::{Contents, DeviceCall, DeviceFailure, DeviceReply, Grant, SliceError};
use pool::protocol::{Handle, Holding};
use units::{Epoch, HostId, SliceId};

/// Contents of a slice, represented by one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DataPattern(pub u64);

impl DataPattern {
    /// Contents of a zeroed slice.
    pub(super) const ZERO: Self = Self(0);
}

/// Kind of a device, which determines the effect of a revocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceKind {
    /// A revocation invalidates every mapping. A granted slice is zeroed.
    Emulated,
    /// A revocation changes only the record of the device. The contents remain until a host
    /// overwrites them.
    SharedDax,
}

#[derive(Clone, Copy, Debug, Default)]
struct SliceRecord {
    highest_epoch: Epoch,
    revoked: bool,
    grant: Option<(Epoch, HostId)>,
    content: DataPattern,
}

/// Simulated pool device.
#[derive(Debug)]
pub(super) struct Device {
    kind: DeviceKind,
    first: SliceId,
    records: Vec<SliceRecord>,
    /// Whether every call fails.
    pub(super) failed: bool,
    /// Slices whose grants and revocations fail.
    pub(super) failing_slices: BTreeSet<SliceId>,
    /// Saved versions of the record, oldest first.
    snapshots: Vec<Vec<SliceRecord>>,
    /// Highest fencing token of a manager that has used the device.
    token: u64,
}

/// Maximum number of saved versions of the record.
const SNAPSHOTS_MAX: usize = 3;

impl Device {
    pub(super) fn new(kind: DeviceKind, first: SliceId, slices: u32) -> Self {
        Self {
            kind,
            first,
            records: vec![SliceRecord::default(); slices as usize],
            failed: false,
            failing_slices: BTreeSet::new(),
            snapshots: Vec::new(),
            token: 0,
        }
    }

    /// Returns whether a manager with a higher fencing token has used the device.
    pub(super) fn has_later_token(&self, token: u64) -> bool {
        self.token > token
    }

    /// Saves the current version of the record, like a backup of its directory.
    pub(super) fn take_snapshot(&mut self) {
        if self.snapshots.len() == SNAPSHOTS_MAX {
            self.snapshots.remove(0);
        }
        self.snapshots.push(self.records.clone());
    }

    /// Returns the number of saved versions for [`Device::roll_back`].
    pub(super) fn snapshot_count(&self) -> usize {
        self.snapshots.len()
    }

    /// Replaces the record by a saved version, or by an empty record for `None`. Contents and
    /// mappings do not change, because the device cannot revoke access.
    pub(super) fn roll_back(&mut self, version: Option<usize>) {
        let empty = vec![SliceRecord::default(); self.records.len()];
        let earlier = version.and_then(|n| self.snapshots.get(n).cloned()).unwrap_or(empty);
        for (record, earlier) in self.records.iter_mut().zip(earlier) {
            *record = SliceRecord { content: record.content, ..earlier };
        }
    }

    /// Returns whether the record of a slice has this epoch or a later epoch.
    pub(super) fn has_epoch(&self, holding: Holding) -> bool {
        self.records[(holding.slice.0 - self.first.0) as usize].highest_epoch >= holding.epoch
    }

    /// Returns whether the device is shared, which means that it cannot revoke access.
    pub(super) fn is_shared(&self) -> bool {
        self.kind == DeviceKind::SharedDax
    }

    pub(super) fn contains(&self, slice: SliceId) -> bool {
        slice >= self.first
            && slice.0 - self.first.0
                < u32::try_from(self.records.len()).expect("the number of slices fits u32")
    }

    pub(super) fn slices(&self) -> Vec<SliceId> {
        (self.first.0..).map(SliceId).zip(&self.records).map(|(slice, _)| slice).collect()
    }

    fn record(&mut self, slice: SliceId) -> &mut SliceRecord {
        &mut self.records[(slice.0 - self.first.0) as usize]
    }

    /// Returns whether a host can still access a slice through a mapping of this grant.
    pub(super) fn is_mapping_valid(&self, holding: Holding, host: HostId) -> bool {
        let record = &self.records[(holding.slice.0 - self.first.0) as usize];
        self.kind == DeviceKind::SharedDax || record.grant == Some((holding.epoch, host))
    }

    pub(super) fn read(&self, slice: SliceId) -> DataPattern {
        self.records[(slice.0 - self.first.0) as usize].content
    }

    pub(super) fn write(&mut self, slice: SliceId, pattern: DataPattern) {
        self.record(slice).content = pattern;
    }

    /// Performs a call of the manager with a fencing token. Returns the reply, and the holdings whose mappings became
    /// invalid.
    pub(super) fn perform(&mut self, token: u64, call: &DeviceCall) -> (DeviceReply, Vec<Holding>) {
        let failed = |failure| DeviceReply::Failed { call: call.clone(), failure };
        if self.failed {
            return (failed(DeviceFailure::Error("the device does not answer".into())), Vec::new());
        }
        if self.has_later_token(token) {
            return (failed(DeviceFailure::Error("another manager uses the device".into())), Vec::new());
        }
        self.token = token;
        match *call {
            DeviceCall::Grant { slice, epoch, .. } | DeviceCall::Revoke { slice, epoch }
                if self.failing_slices.contains(&slice) =>
            {
                let revoked = if epoch.0 % 2 == 1 { self.perform_despite_error(call) } else { None };
                let error = SliceError { message: "the slice does not answer".into(), errno: Some(5) };
                (failed(DeviceFailure::Slice(error)), revoked.into_iter().collect())
            }
            DeviceCall::Contents => (DeviceReply::Contents(self.contents()), Vec::new()),
            DeviceCall::Grant { slice, epoch, host } => match self.grant(slice, epoch, host) {
                Ok(()) => {
                    (DeviceReply::Granted { slice, epoch, handle: self.handle(slice, epoch) }, Vec::new())
                }
                Err(failure) => (failed(failure), Vec::new()),
            },
            DeviceCall::Revoke { slice, epoch } => {
                (DeviceReply::Revoked { slice, epoch }, self.revoke(slice, epoch).into_iter().collect())
            }
            DeviceCall::Fence { powered_off: false, .. } if self.kind == DeviceKind::SharedDax => {
                (failed(DeviceFailure::NotFenced("the device cannot fence a host".into())), Vec::new())
            }
            DeviceCall::Fence { host, .. } => (DeviceReply::Fenced { host }, self.fence(host)),
        }
    }

    /// Performs a call whose reply reports a failure.
    fn perform_despite_error(&mut self, call: &DeviceCall) -> Option<Holding> {
        match *call {
            DeviceCall::Grant { slice, epoch, host } => {
                let _ = self.grant(slice, epoch, host); // the reply reports a failure in either case
                None
            }
            DeviceCall::Revoke { slice, epoch } => self.revoke(slice, epoch),
            DeviceCall::Contents | DeviceCall::Fence { .. } => None,
        }
    }

    fn grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId) -> Result<(), DeviceFailure> {
        let kind = self.kind;
        let record = self.record(slice);
        let is_stale = epoch < record.highest_epoch || (epoch == record.highest_epoch && record.revoked);
        match record.grant {
            Some(held) if held != (epoch, host) => Err(DeviceFailure::Held { epoch: held.0, host: held.1 }),
            _ if is_stale => Err(DeviceFailure::StaleEpoch { highest: record.highest_epoch }),
            Some(_) => Ok(()),
            None => {
                let content = if kind == DeviceKind::Emulated { DataPattern::ZERO } else { record.content };
                *record =
                    SliceRecord { highest_epoch: epoch, revoked: false, grant: Some((epoch, host)), content };
                Ok(())
            }
        }
    }

    fn revoke(&mut self, slice: SliceId, epoch: Epoch) -> Option<Holding> {
        let record = self.record(slice);
        if epoch >= record.highest_epoch {
            (record.highest_epoch, record.revoked) = (epoch, true);
        }
        let (held, _) = record.grant.take_if(|(held, _)| *held <= epoch)?;
        Some(Holding { slice, epoch: held })
    }

    /// Revokes all slices of a host, except slices with an injected fault.
    fn fence(&mut self, host: HostId) -> Vec<Holding> {
        let of_host = self.grants().into_iter().filter(|(_, _, by)| *by == host);
        let of_host: Vec<_> = of_host.collect();
        let working = of_host
            .into_iter()
            .filter(|(slice, ..)| !self.failing_slices.contains(slice))
            .collect::<Vec<_>>();
        working.into_iter().filter_map(|(slice, epoch, _)| self.revoke(slice, epoch)).collect()
    }

    /// Clears contents and grants, as in a power failure. The highest epochs are kept, unless the
    /// record is also lost (`record_lost`), as on a tmpfs. Returns the lost grants.
    pub(super) fn lose_power(&mut self, record_lost: bool) -> Vec<Holding> {
        let lost = self.grants();
        for record in &mut self.records {
            let (highest_epoch, revoked) =
                if record_lost { Default::default() } else { (record.highest_epoch, record.revoked) };
            *record = SliceRecord { highest_epoch, revoked, ..SliceRecord::default() };
        }
        lost.into_iter().map(|(slice, epoch, _)| Holding { slice, epoch }).collect()
    }

    fn grants(&self) -> Vec<(SliceId, Epoch, HostId)> {
        let records = (self.first.0..).map(SliceId).zip(&self.records);
        records.filter_map(|(slice, record)| record.grant.map(|(epoch, host)| (slice, epoch, host))).collect()
    }

    /// Returns the handle of a grant. A shared device has the same handle for all grants of a
    /// slice.
    pub(super) fn handle(&self, slice: SliceId, epoch: Epoch) -> Handle {
        let place = if self.is_shared() { format!("{slice}") } else { format!("{slice}.{epoch}") };
        Handle::new("emc", place)
    }

    fn contents(&self) -> Contents {
        let grant = |(slice, epoch, host)| Grant { slice, epoch, host, handle: self.handle(slice, epoch) };
        let used =
            (self.first.0..).map(SliceId).zip(&self.records).filter(|(_, record)| record.highest_epoch.0 > 0);
        let slices = (self.first.0..).map(SliceId).zip(&self.records).map(|(slice, _)| slice);
        let places = slices.filter(|_| self.is_shared()).map(|slice| (slice, self.handle(slice, Epoch(0))));
        Contents {
            grants: self.grants().into_iter().map(grant).collect(),
            highest: used.map(|(slice, record)| (slice, record.highest_epoch)).collect(),
            places: places.collect(),
        }
    }
}
