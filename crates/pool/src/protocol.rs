//! Messages between manager and agent: the manager sends a [`DesiredState`], and the agent sends an
//! [`ObservedState`]. Each side sends its complete state of one host at the start of a session and
//! whenever the two sides may differ. A lost message therefore delays progress but never causes a
//! wrong state. The services transport the messages.
//!
//! The complete state of thousands of slices is long and mostly unchanged. A `DesiredState` may
//! therefore contain only the changes since an earlier version, the base version. An agent that has
//! applied another version ignores such a message and soon receives the complete state. An
//! `ObservedState` may leave out VMs and slices of earlier reports: entries of earlier reports
//! remain valid.
//!
//! Reports are numbered within a session. The manager therefore detects a missing report in
//! constant time and requests a complete report. A heartbeat is a report without changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use units::{Bytes, DesiredVersion, Epoch, InstanceId, Name, ReservationId, SliceId, UnixMs, UserId};

/// A slice and the epoch under which its owner holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// Owned slice.
    pub slice: SliceId,
    /// Epoch of the ownership.
    pub epoch: Epoch,
}

/// Location at which a host can open a granted slice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle {
    /// Name of the EMC.
    pub emc: Arc<str>,
    /// Name by which the EMC's driver opens the granted slice on a host; for the driver `emulated`,
    /// the path of the slice's file.
    pub place: Arc<str>,
}

impl Handle {
    /// Creates a handle from an EMC's name and a location.
    pub fn new(emc: impl Into<Arc<str>>, place: impl Into<Arc<str>>) -> Self {
        Self { emc: emc.into(), place: place.into() }
    }
}

/// Desired state of one host, sent by the manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredState {
    /// Version of this state; a higher version replaces a lower version.
    pub number: DesiredVersion,
    /// Base version, to which the changes in this message apply; `None` if the message contains the
    /// complete state.
    pub base: Option<DesiredVersion>,
    /// Agent instance that must apply the state; other instances ignore the message.
    pub instance: InstanceId,
    /// VMs whose slices the agent must bring online, by reservation.
    pub vms: BTreeMap<ReservationId, DesiredVm>,
    /// Slices that the agent must release. It reports each release with the same epoch.
    pub release: BTreeMap<Holding, DesiredRelease>,
    /// Slices that the agent must zero, verify and release.
    pub scrub: BTreeMap<Holding, Handle>,
    /// Entries of the base version that no longer apply.
    pub removals: Removals,
    /// Whether the host was fenced. The agent of a fenced host ends all processes and mappings from
    /// before the fence, then reports [`ObservedState::clean`].
    pub fenced: bool,
}

/// Entries of an earlier desired state that no longer apply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removals {
    /// Reservations whose VM no longer belongs to this host.
    pub vms: BTreeSet<ReservationId>,
    /// Slices that require no action any more. Slices of a VM in the same message are excepted.
    pub slices: BTreeSet<SliceId>,
}

impl DesiredState {
    /// Returns the slices that the message mentions.
    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        let vms = self.vms.values().flat_map(|vm| vm.slices.keys());
        let mentioned = vms.chain(self.release.keys()).chain(self.scrub.keys());
        mentioned.map(|holding| holding.slice).chain(self.removals.slices.iter().copied())
    }

    /// Merges a newer message into this message.
    pub fn merge_newer(&mut self, newer: Self) {
        if newer.base.is_none() {
            *self = newer;
            return;
        }
        self.vms.retain(|id, _| !newer.removals.vms.contains(id));
        for slice in newer.slices().collect::<Vec<_>>() {
            take_entries_of_slice(&mut self.release, slice).for_each(drop);
            take_entries_of_slice(&mut self.scrub, slice).for_each(drop);
        }
        self.vms.extend(newer.vms);
        self.release.extend(newer.release);
        self.scrub.extend(newer.scrub);
        (self.number, self.instance, self.fenced) = (newer.number, newer.instance, newer.fenced);
    }
}

/// Removes the entries of a slice for all epochs, and returns them.
pub(crate) fn take_entries_of_slice<T>(
    entries: &mut BTreeMap<Holding, T>,
    slice: SliceId,
) -> impl Iterator<Item = (Holding, T)> {
    let owners = entries.range(epochs_of(slice)).map(|(holding, _)| *holding).collect::<Vec<_>>();
    owners.into_iter().filter_map(|holding| entries.remove_entry(&holding))
}

/// Returns the range of keys of a slice for all epochs.
pub(crate) fn epochs_of(slice: SliceId) -> std::ops::RangeInclusive<Holding> {
    Holding { slice, epoch: Epoch(0) }..=Holding { slice, epoch: Epoch(u64::MAX) }
}

/// Release of one slice, requested by the manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredRelease {
    /// Whether to release the slice even from a running VM.
    pub force: bool,
    /// Location of the slice. A restarted agent needs it for a slice that an earlier instance
    /// brought online.
    pub handle: Handle,
}

/// Desired memory of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredVm {
    /// Name of the VM.
    pub vm: Name,
    /// Local memory that the VM gets in addition to the slices.
    pub local: Bytes,
    /// Whether the VM's pages must not be migrated.
    pub pinned: bool,
    /// User who may access the VM's memory, in addition to root; `None` for the agent's user.
    pub uid: Option<UserId>,
    /// Slices of the VM, each with its location.
    pub slices: BTreeMap<Holding, Handle>,
    /// Attempt to move the VM's pool memory to local memory; `None` if no attempt is in progress. A move
    /// for an earlier attempt is cancelled.
    pub rehome: Option<DesiredRehome>,
}

/// Attempt to move a VM's pool memory to local memory, whose result the agent must report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DesiredRehome {
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Whether the agent must cancel the attempt instead of performing it.
    pub is_cancelled: bool,
}

/// Observed state of one host, reported by its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedState {
    /// Sequence number of this report in its session, from 1.
    pub sequence: u64,
    /// Sequence number of the preceding report. Less than `sequence - 1` if this report merges
    /// several reports.
    pub after: u64,
    /// Index of this part of the report, from 0; see [`ObservedState::into_parts`].
    pub part: usize,
    /// Whether another part of the same report follows.
    pub is_continued: bool,
    /// Version of the desired state that the agent applied; 0 before the first version.
    pub number: DesiredVersion,
    /// Whether `online` and `vms` are complete; otherwise they contain only changes since earlier
    /// reports.
    pub whole: bool,
    /// Slices that their VMs can use.
    pub online: Vec<Holding>,
    /// Released slices; no process maps them any more. The agent repeats an entry while the desired
    /// state contains the slice.
    pub released: Vec<Holding>,
    /// Zeroed and verified slices. The agent repeats an entry while the desired state contains the
    /// slice.
    pub scrubbed: Vec<ScrubReport>,
    /// Failed operations. The agent repeats an entry while the desired state contains the slice.
    pub failed: Vec<SliceFailure>,
    /// Registered VMs with a running process, by reservation. A VM's name is not unique, because it
    /// may be reserved again before the previous process ends.
    pub vms: BTreeMap<ReservationId, ObservedVm>,
    /// Reservations whose registered process has ended. The agent repeats an entry while the
    /// desired state contains the reservation.
    pub ended: Vec<ReservationId>,
    /// Whether the host is clean: no registered process, mapping or descriptor from before this
    /// agent instance remains.
    pub clean: bool,
}

impl ObservedState {
    /// Returns the slices of the host's VMs, followed by the online slices. A slice may occur
    /// twice. Online slices alone would be incomplete: after a restart, the agent has not yet
    /// opened all slices of its VMs.
    pub fn holdings(&self) -> impl Iterator<Item = &Holding> {
        self.vms.values().flat_map(|vm| &vm.slices).chain(&self.online)
    }

    /// Merges this report and the next report into one report.
    #[must_use]
    pub fn merge_next(self, newer: Self) -> Self {
        if newer.whole {
            return newer;
        }
        let (released, ended): (BTreeSet<_>, BTreeSet<_>) =
            (newer.released.iter().collect(), newer.ended.iter().collect());
        let (mut online, mut vms) = (self.online, self.vms);
        online.retain(|holding| !released.contains(holding));
        online.extend(newer.online.iter().copied());
        vms.extend(newer.vms);
        vms.retain(|id, _| !ended.contains(id));
        Self { after: self.after, whole: self.whole, online, vms, ..newer }
    }

    /// Splits a report into parts of at most `max_entries` entries each, so that applying a part
    /// takes bounded time. A VM counts as one entry plus one entry for each of its slices. A VM is
    /// never split, even if its part exceeds the maximum.
    pub fn into_parts(mut self, max_entries: usize) -> Vec<Self> {
        let (online, vms) = (std::mem::take(&mut self.online), std::mem::take(&mut self.vms));
        let (released, scrubbed) = (std::mem::take(&mut self.released), std::mem::take(&mut self.scrubbed));
        let (failed, ended) = (std::mem::take(&mut self.failed), std::mem::take(&mut self.ended));
        let mut parts = Parts { max_entries, remaining: max_entries, parts: vec![self] };
        online.into_iter().for_each(|holding| parts.next(1).online.push(holding));
        released.into_iter().for_each(|holding| parts.next(1).released.push(holding));
        scrubbed.into_iter().for_each(|scrubbed| parts.next(1).scrubbed.push(scrubbed));
        failed.into_iter().for_each(|failed| parts.next(1).failed.push(failed));
        ended.into_iter().for_each(|id| parts.next(1).ended.push(id));
        vms.into_iter().for_each(|(id, vm)| drop(parts.next(1 + vm.slices.len()).vms.insert(id, vm)));
        let last = parts.parts.len() - 1;
        for (n, part) in parts.parts.iter_mut().enumerate() {
            (part.part, part.is_continued) = (n, n < last);
        }
        parts.parts
    }

    /// Returns the same report without slices, VMs and failures.
    fn without_entries(&self) -> Self {
        let Self { sequence, after, number, whole, clean, .. } = *self;
        Self { sequence, after, number, whole, clean, ..Self::default() }
    }
}

/// Parts of a report while [`ObservedState::into_parts`] splits it.
struct Parts {
    max_entries: usize,
    /// Remaining capacity of the last part, in entries.
    remaining: usize,
    parts: Vec<ObservedState>,
}

impl Parts {
    /// Returns the part for the next VM or slice, which counts as `size` entries.
    fn next(&mut self, size: usize) -> &mut ObservedState {
        if size > self.remaining && self.remaining < self.max_entries {
            self.parts.push(self.parts[0].without_entries());
            self.remaining = self.max_entries;
        }
        self.remaining = self.remaining.saturating_sub(size);
        self.parts.last_mut().expect("the list of parts is never empty")
    }
}

/// Running VM with pool memory, as reported by an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVm {
    /// Name of the VM.
    pub vm: Name,
    /// ID of the VM's process on its host.
    pub pid: u32,
    /// Slices that the VM received.
    pub slices: Vec<Holding>,
    /// Local memory that the VM received.
    pub local: Bytes,
    /// Whether the VM's pages must not be migrated.
    pub pinned: bool,
    /// User who may access the VM's memory, in addition to root; see [`DesiredVm::uid`].
    pub uid: Option<UserId>,
    /// Result of moving the VM's pool memory to local memory.
    pub rehome: ObservedRehome,
}

impl ObservedVm {
    /// Returns the size of the VM's memory.
    pub fn total(&self) -> Bytes {
        self.slices.iter().map(|_| units::SLICE).chain([self.local]).sum()
    }
}

/// Result of moving a VM's pool memory to local memory, as reported by an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ObservedRehome {
    /// No attempt has ended.
    #[default]
    None,
    /// The latest attempt failed. The VM uses its pool memory as before.
    Failed {
        /// Number of the attempt; see [`DesiredVm::rehome`].
        attempt: u32,
        /// Reason of the failure.
        why: String,
    },
    /// The VM uses only local memory. [`ObservedVm::local`] contains the memory that was moved.
    Done,
}

/// Report of a scrubber that zeroed and verified a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Zeroed slice, and the epoch under which the scrubber holds it.
    pub holding: Holding,
    /// Start of the scrub, wall clock.
    pub started: UnixMs,
    /// Time at which the last byte was verified, wall clock.
    pub ended: UnixMs,
    /// Number of bytes verified to be zero.
    pub verified: Bytes,
}

/// Failed operation on a slice, reported by an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceFailure {
    /// Slice, and the epoch under which the host holds it.
    pub holding: Holding,
    /// Kind of the failure.
    pub reason: FailureReason,
    /// Description by the agent; contains errno.
    pub message: String,
}

/// Kind of a slice failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureReason {
    /// The slice was not zeroed when the host received it.
    NotZero,
    /// The host could not open or map the slice.
    Host,
}

/// Identity of a host's agent, sent by the agent at the start of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Agent instance. A newer session of the same instance replaces the older one. Another
    /// instance is rejected while the host's agent is connected and its lease is valid.
    pub instance: InstanceId,
    /// Boot ID of the machine; a restart of the machine changes it.
    pub boot_id: String,
    /// Address of the socket through which VMMs on this host request memory.
    pub host_memory_socket: String,
    /// Shared pool devices that the host detects on its buses.
    pub devices: Vec<SeenDevice>,
    /// Whether the agent moves pool memory to local memory; see [`DesiredVm::rehome`].
    pub can_rehome: bool,
}

/// Shared pool device, as detected on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenDevice {
    /// Serial number of the device, equal on every host that detects the device.
    pub serial: String,
    /// Capacity of the device, in whole slices.
    pub slices: u32,
    /// Reason why the host cannot use the device; `None` if it can.
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(slice: u32) -> Holding {
        Holding { slice: SliceId(slice), epoch: Epoch(1) }
    }

    fn running(id: u64) -> (ReservationId, ObservedVm) {
        let vm = ObservedVm {
            vm: Name::new("a").unwrap(),
            pid: 7,
            slices: vec![holding(0)],
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: ObservedRehome::None,
        };
        (ReservationId(id), vm)
    }

    #[test]
    fn report_parts_contain_all_facts_in_bounded_size() {
        let whole = ObservedState {
            sequence: 4,
            after: 2,
            whole: true,
            clean: true,
            online: (0..5).map(holding).collect(),
            released: (5..8).map(holding).collect(),
            vms: [running(1), running(2)].into(),
            ended: vec![ReservationId(3)],
            ..ObservedState::default()
        };
        for max_entries in 1..20 {
            let parts = whole.clone().into_parts(max_entries);
            let facts = |part: &ObservedState| {
                part.online.len() + part.released.len() + part.ended.len() + 2 * part.vms.len()
            };
            assert!(parts.iter().all(|part| facts(part) <= max_entries.max(2)), "{max_entries}: {parts:?}");
            assert!(parts.len() <= 13usize.div_ceil(max_entries) * 2, "{max_entries}: {} parts", parts.len());
            let (last, before) = parts.split_last().unwrap();
            assert!(!last.is_continued && before.iter().all(|part| part.is_continued), "{max_entries}");
            assert!(parts.iter().map(|part| part.part).eq(0..parts.len()), "{max_entries}");
            let head =
                |part: &ObservedState| (part.sequence, part.after, part.number, part.whole, part.clean);
            assert!(parts.iter().all(|part| head(part) == head(&whole)), "{max_entries}: {parts:?}");
            let sum = parts.iter().cloned().reduce(|mut sum, part| {
                sum.online.extend(part.online);
                sum.released.extend(part.released);
                sum.ended.extend(part.ended);
                sum.vms.extend(part.vms);
                ObservedState { is_continued: part.is_continued, ..sum }
            });
            assert_eq!(sum.as_ref(), Some(&whole), "{max_entries}");
        }
        assert_eq!(ObservedState::default().into_parts(1), [ObservedState::default()]);
    }

    #[test]
    fn report_parts_are_full_and_not_empty() {
        let online = ObservedState { online: (0..8).map(holding).collect(), ..ObservedState::default() };
        assert_eq!(online.into_parts(4).len(), 2);
        let vms = ObservedState { vms: [running(1), running(2)].into(), ..ObservedState::default() };
        assert_eq!(vms.into_parts(1).len(), 2, "a VM counts as two entries and is not split");
    }

    #[test]
    fn merged_reports_follow_the_report_before_the_first() {
        let report = |sequence| ObservedState { sequence, after: sequence - 1, ..ObservedState::default() };
        let both = report(3).merge_next(report(4));
        assert_eq!((both.sequence, both.after), (4, 2));
    }

    #[test]
    fn report_merges_following_changes() {
        let whole = ObservedState {
            whole: true,
            online: vec![holding(0), holding(1)],
            vms: [running(1), running(2)].into(),
            ..ObservedState::default()
        };
        let changes = ObservedState {
            online: vec![holding(2)],
            released: vec![holding(0)],
            vms: [running(3)].into(),
            ended: vec![ReservationId(1)],
            clean: true,
            ..ObservedState::default()
        };
        let both = whole.clone().merge_next(changes.clone());
        let expected = ObservedState {
            whole: true,
            online: vec![holding(1), holding(2)],
            vms: [running(2), running(3)].into(),
            ..changes.clone()
        };
        assert_eq!(both, expected);
        assert_eq!(
            changes.clone().merge_next(whole.clone()),
            whole,
            "a complete report replaces earlier reports"
        );
        assert!(!changes.clone().merge_next(changes).whole);
    }
}
