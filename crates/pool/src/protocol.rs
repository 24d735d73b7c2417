//! Messages between manager and agent: the manager sends a [`DesiredState`], the agent an
//! [`ObservedState`]. At the start of a session, and whenever they may differ, each side sends its
//! complete state of one host, so that a lost message costs time and never correctness. The
//! services transport the messages.
//!
//! Complete state of thousands of slices is long and mostly unchanged. A `DesiredState` may
//! therefore contain only the changes since an earlier version that it names: an agent with another
//! version ignores it and soon receives complete state. An `ObservedState` may leave out VMs and
//! slices that were reported before: absence never retracts a fact. Reports are numbered in each
//! session, so the manager detects a missing one in constant time and requests a complete report. A
//! heartbeat is a report without changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use units::{Bytes, DesiredVersion, Epoch, InstanceId, Name, ReservationId, SliceId, UnixMs, UserId};

/// One owner of one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// Slice.
    pub slice: SliceId,
    /// Epoch of the owner.
    pub epoch: Epoch,
}

/// Location of a grant on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle {
    /// Name of the EMC.
    pub emc: Arc<str>,
    /// The EMC driver's name for it on a host: for `emulated`, the path of its file.
    pub place: Arc<str>,
}

impl Handle {
    /// Creates a handle from an EMC's name and a location.
    pub fn new(emc: impl Into<Arc<str>>, place: impl Into<Arc<str>>) -> Self {
        Self { emc: emc.into(), place: place.into() }
    }
}

/// Desired state of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredState {
    /// Version; higher versions replace lower ones.
    pub number: DesiredVersion,
    /// Version that this message changes; `None` if the state is complete.
    pub base: Option<DesiredVersion>,
    /// Agent instance that it is for; other instances ignore it.
    pub instance: InstanceId,
    /// Slices to bring online for their VMs.
    pub vms: BTreeMap<ReservationId, DesiredVm>,
    /// Slices to release, each reported with the same epoch.
    pub release: BTreeMap<Holding, DesiredRelease>,
    /// Slices to zero, verify and release.
    pub scrub: BTreeMap<Holding, Handle>,
    /// Entries of the base version that no longer apply.
    pub removals: Removals,
    /// The host was fenced: the agent ends everything from before the fence, then reports
    /// [`ObservedState::clean`].
    pub fenced: bool,
}

/// Entries that no longer apply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removals {
    /// Reservations without a VM on this host.
    pub vms: BTreeSet<ReservationId>,
    /// Slices without a task, unless a VM in this message has them.
    pub slices: BTreeSet<SliceId>,
}

impl DesiredState {
    /// Returns the slices that the message mentions.
    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        let vms = self.vms.values().flat_map(|vm| vm.slices.keys());
        let named = vms.chain(self.release.keys()).chain(self.scrub.keys());
        named.map(|holding| holding.slice).chain(self.removals.slices.iter().copied())
    }

    /// Merges the next message into this one.
    pub fn amend(&mut self, newer: Self) {
        if newer.base.is_none() {
            *self = newer;
            return;
        }
        self.vms.retain(|id, _| !newer.removals.vms.contains(id));
        for slice in newer.slices().collect::<Vec<_>>() {
            take_slice(&mut self.release, slice).for_each(drop);
            take_slice(&mut self.scrub, slice).for_each(drop);
        }
        self.vms.extend(newer.vms);
        self.release.extend(newer.release);
        self.scrub.extend(newer.scrub);
        (self.number, self.instance, self.fenced) = (newer.number, newer.instance, newer.fenced);
    }
}

/// Removes all entries about any owner of a slice.
pub(crate) fn take_slice<T>(
    said: &mut BTreeMap<Holding, T>,
    slice: SliceId,
) -> impl Iterator<Item = (Holding, T)> {
    let owners = said.range(owners_of(slice)).map(|(holding, _)| *holding).collect::<Vec<_>>();
    owners.into_iter().filter_map(|holding| said.remove_entry(&holding))
}

/// Returns the range of all owners of a slice.
pub(crate) fn owners_of(slice: SliceId) -> std::ops::RangeInclusive<Holding> {
    Holding { slice, epoch: Epoch(0) }..=Holding { slice, epoch: Epoch(u64::MAX) }
}

/// Slice to release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredRelease {
    /// Even from a running VM.
    pub force: bool,
    /// Location: an agent that has just started may not know a slice that an earlier instance
    /// brought online.
    pub handle: Handle,
}

/// Desired memory of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredVm {
    /// Name.
    pub vm: Name,
    /// Local memory to provide with the slices.
    pub local: Bytes,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// User that may use it beside root; `None` for the agent's user.
    pub uid: Option<UserId>,
    /// Slices.
    pub slices: BTreeMap<Holding, Handle>,
}

/// Observed state of one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedState {
    /// Number of this report in its session, from 1.
    pub sequence: u64,
    /// Number of the previous report. It is below `sequence - 1` if this report replaces others.
    pub after: u64,
    /// Index of this part, from 0; see [`ObservedState::into_parts`].
    pub part: usize,
    /// Another part of the same report follows.
    pub is_continued: bool,
    /// Version of the desired state that it reflects; zero before the first.
    pub number: DesiredVersion,
    /// `online` and `vms` are complete; otherwise VMs and slices reported earlier are left out.
    pub whole: bool,
    /// Slices usable by their VMs.
    pub online: Vec<Holding>,
    /// Released slices without any mapping; repeated until the desired state no longer contains
    /// them.
    pub released: Vec<Holding>,
    /// Zeroed and verified slices; repeated until the desired state no longer contains them.
    pub scrubbed: Vec<ScrubReport>,
    /// Failed operations; repeated until the desired state no longer contains them.
    pub failed: Vec<SliceFailure>,
    /// Registered VMs with a running process, by reservation, because a VM's name may be reserved
    /// again while its last process ends.
    pub vms: BTreeMap<ReservationId, ObservedVm>,
    /// Reservations whose registered process has ended; repeated until the desired state no longer
    /// contains them.
    pub ended: Vec<ReservationId>,
    /// No registered process, mapping or descriptor is left from before this instance.
    pub clean: bool,
}

impl ObservedState {
    /// Returns the slices of the host: slices of its VMs, which are not online before a restarted
    /// agent has opened them, and slices online. A slice may occur twice.
    pub fn holdings(&self) -> impl Iterator<Item = &Holding> {
        self.vms.values().flat_map(|vm| &vm.slices).chain(&self.online)
    }

    /// Merges this report and the next.
    #[must_use]
    pub fn followed_by(self, newer: Self) -> Self {
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

    /// Splits a report into parts of at most `most` facts each, so that applying a part takes
    /// bounded time. A VM counts as many facts as it has slices, and is never split.
    pub fn into_parts(mut self, most: usize) -> Vec<Self> {
        let (online, vms) = (std::mem::take(&mut self.online), std::mem::take(&mut self.vms));
        let (released, scrubbed) = (std::mem::take(&mut self.released), std::mem::take(&mut self.scrubbed));
        let (failed, ended) = (std::mem::take(&mut self.failed), std::mem::take(&mut self.ended));
        let mut parts = Parts { most, room: most, parts: vec![self] };
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

    /// Returns the same report without facts.
    fn without_facts(&self) -> Self {
        let Self { sequence, after, number, whole, clean, .. } = *self;
        Self { sequence, after, number, whole, clean, ..Self::default() }
    }
}

/// Parts of a report during the split.
struct Parts {
    most: usize,
    /// Remaining capacity of the last part, in facts.
    room: usize,
    parts: Vec<ObservedState>,
}

impl Parts {
    /// Returns the part for the next fact, which counts as `size` facts.
    fn next(&mut self, size: usize) -> &mut ObservedState {
        if size > self.room && self.room < self.most {
            self.parts.push(self.parts[0].without_facts());
            self.room = self.most;
        }
        self.room = self.room.saturating_sub(size);
        self.parts.last_mut().expect("the first part exists")
    }
}

/// Running VM with pool memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVm {
    /// Name.
    pub vm: Name,
    /// Process id on its host.
    pub pid: u32,
    /// Slices that it received.
    pub slices: Vec<Holding>,
    /// Local memory that it received.
    pub local: Bytes,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// User that may use it beside root, as in [`DesiredVm::uid`].
    pub uid: Option<UserId>,
}

/// Result of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Slice, and the scrubber's epoch.
    pub holding: Holding,
    /// Start, wall clock.
    pub started: UnixMs,
    /// Time at which the last byte was verified.
    pub ended: UnixMs,
    /// Number of bytes verified to be zero.
    pub verified: Bytes,
}

/// Failed operation of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceFailure {
    /// Slice.
    pub holding: Holding,
    /// Reason.
    pub reason: FailureReason,
    /// Description by the host, with errno.
    pub message: String,
}

/// Reason of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureReason {
    /// The slice did not arrive zeroed.
    NotZero,
    /// The host could not open or map it.
    Host,
}

/// Identity of a host's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The newest instance wins.
    pub instance: InstanceId,
    /// Changes when the machine restarts.
    pub boot_id: String,
    /// Where a VMM on this host fetches memory.
    pub host_memory_socket: String,
    /// Pool devices that its machine sees by itself.
    pub devices: Vec<SeenDevice>,
}

/// Shared pool device as seen by a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenDevice {
    /// Serial number, equal on every host that sees the device.
    pub serial: String,
    /// Capacity in whole slices.
    pub slices: u32,
    /// Reason why the host cannot use it.
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
        for most in 1..20 {
            let parts = whole.clone().into_parts(most);
            let facts = |part: &ObservedState| {
                part.online.len() + part.released.len() + part.ended.len() + 2 * part.vms.len()
            };
            assert!(parts.iter().all(|part| facts(part) <= most.max(2)), "{most}: {parts:?}");
            assert!(parts.len() <= 13usize.div_ceil(most) * 2, "{most}: {} parts", parts.len());
            let (last, before) = parts.split_last().unwrap();
            assert!(!last.is_continued && before.iter().all(|part| part.is_continued), "{most}");
            assert!(parts.iter().map(|part| part.part).eq(0..parts.len()), "{most}");
            let sum = parts.iter().cloned().reduce(|mut sum, part| {
                sum.online.extend(part.online);
                sum.released.extend(part.released);
                sum.ended.extend(part.ended);
                sum.vms.extend(part.vms);
                ObservedState { is_continued: part.is_continued, ..sum }
            });
            assert_eq!(sum.as_ref(), Some(&whole), "{most}");
        }
        assert_eq!(ObservedState::default().into_parts(1), [ObservedState::default()]);
    }

    #[test]
    fn merged_reports_follow_the_report_before_the_first() {
        let report = |sequence| ObservedState { sequence, after: sequence - 1, ..ObservedState::default() };
        let both = report(3).followed_by(report(4));
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
        let news = ObservedState {
            online: vec![holding(2)],
            released: vec![holding(0)],
            vms: [running(3)].into(),
            ended: vec![ReservationId(1)],
            clean: true,
            ..ObservedState::default()
        };
        let both = whole.clone().followed_by(news.clone());
        let expected = ObservedState {
            whole: true,
            online: vec![holding(1), holding(2)],
            vms: [running(2), running(3)].into(),
            ..news.clone()
        };
        assert_eq!(both, expected);
        assert_eq!(
            news.clone().followed_by(whole.clone()),
            whole,
            "a whole report replaces what came before"
        );
        assert!(!news.clone().followed_by(news).whole);
    }
}
