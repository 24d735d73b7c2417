//! Messages between manager and agent, as values: [`Want`] flows down, [`Have`] flows up. At the start of a session, and
//! whenever it is in doubt, each side sends its complete state of one host, so a lost message costs time and never
//! correctness. The services transport them.
//!
//! The whole truth about thousands of slices is long, and most of it is old. So a `Want` may say only what has changed
//! since the order before, which it names: an agent that did not follow that one ignores it, and is soon told everything.
//! A `Have` may leave out slices it named before, and VMs: facts are never taken back by silence. Reports are numbered in
//! each session, so the manager detects a missing one in constant time and requests a whole report. A heartbeat is a report
//! without news.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use units::{Bytes, DesiredVersion, Epoch, InstanceId, Name, ReservationId, SliceId, UnixMs, UserId};

/// One owner of one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// Which slice.
    pub slice: SliceId,
    /// Which of its owners.
    pub epoch: Epoch,
}

/// Where a host finds one grant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle {
    /// The name of the EMC it is of.
    pub emc: Arc<str>,
    /// How the EMC's driver names it on a host: for `emulated`, the path of its file.
    pub place: Arc<str>,
}

impl Handle {
    /// Of an EMC, at a place of it.
    pub fn new(emc: impl Into<Arc<str>>, place: impl Into<Arc<str>>) -> Self {
        Self { emc: emc.into(), place: place.into() }
    }
}

/// Orders to one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Newer ones win.
    pub number: DesiredVersion,
    /// The order that this one changes; `None` says that this is all there is to say.
    pub base: Option<DesiredVersion>,
    /// The agent instance it is for; any other ignores it.
    pub instance: InstanceId,
    /// Bring these online for their VMs.
    pub vms: BTreeMap<ReservationId, WantVm>,
    /// Give these back, then say so for exactly these.
    pub release: BTreeMap<Holding, WantRelease>,
    /// Zero, verify and give back.
    pub scrub: BTreeMap<Holding, Handle>,
    /// What the order before asked and this one does not.
    pub no_more: NoMore,
    /// The host was fenced: end everything that is left of before, then report [`Have::clean`].
    pub fenced: bool,
}

/// What is not asked any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NoMore {
    /// These have no VM here.
    pub vms: BTreeSet<ReservationId>,
    /// Of these nothing is asked, unless a VM named here has them.
    pub slices: BTreeSet<SliceId>,
}

impl Want {
    /// The slices it says something about.
    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        let vms = self.vms.values().flat_map(|vm| vm.slices.keys());
        let named = vms.chain(self.release.keys()).chain(self.scrub.keys());
        named.map(|holding| holding.slice).chain(self.no_more.slices.iter().copied())
    }

    /// Makes of an order, with the one that follows it, what the latter means in whole.
    pub fn amend(&mut self, newer: Self) {
        if newer.base.is_none() {
            *self = newer;
            return;
        }
        self.vms.retain(|id, _| !newer.no_more.vms.contains(id));
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

/// Takes what is said about any owner of a slice.
pub(crate) fn take_slice<T>(
    said: &mut BTreeMap<Holding, T>,
    slice: SliceId,
) -> impl Iterator<Item = (Holding, T)> {
    let owners = said.range(owners_of(slice)).map(|(holding, _)| *holding).collect::<Vec<_>>();
    owners.into_iter().filter_map(|holding| said.remove_entry(&holding))
}

/// All owners of a slice there ever were or will be.
pub(crate) fn owners_of(slice: SliceId) -> std::ops::RangeInclusive<Holding> {
    Holding { slice, epoch: Epoch(0) }..=Holding { slice, epoch: Epoch(u64::MAX) }
}

/// A slice that is to be given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantRelease {
    /// Even from a VM that still runs.
    pub force: bool,
    /// Where the host finds it: an agent that has just started may know nothing of a slice that its predecessor brought online.
    pub handle: Handle,
}

/// The memory of one VM, as its host should have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantVm {
    /// Its name.
    pub vm: Name,
    /// Local memory to hand out with the slices.
    pub local: Bytes,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
    /// The user that may use it beside root; `None` for the agent's own.
    pub uid: Option<UserId>,
    /// Its slices.
    pub slices: BTreeMap<Holding, Handle>,
}

/// Facts about one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Have {
    /// The number of this report in its session, from 1 on.
    pub sequence: u64,
    /// The number of the last report before this one. It is lower than `sequence - 1` if this one replaces others.
    pub after: u64,
    /// Which part of the report this is, from 0 on, and whether another follows; see [`Have::into_parts`].
    pub part: usize,
    /// Another part of the same report follows.
    pub is_continued: bool,
    /// The order this answers; zero before the first.
    pub number: DesiredVersion,
    /// Whether `online` and `vms` are all of it; else slices that have been told before are left out, and all VMs.
    pub whole: bool,
    /// Usable by their VMs.
    pub online: Vec<Holding>,
    /// Given back, no mapping left; repeated until the order no longer asks.
    pub released: Vec<Holding>,
    /// Zeroed and verified; repeated until the order no longer asks.
    pub scrubbed: Vec<Scrubbed>,
    /// Could not be done; repeated until the order no longer asks.
    pub failed: Vec<Failed>,
    /// Registered VMs whose process lives. By reservation: a VM's name may be reserved again while its last life ends.
    pub vms: BTreeMap<ReservationId, HaveVm>,
    /// Reservations whose registered process is gone; repeated until the order no longer names them.
    pub ended: Vec<ReservationId>,
    /// Nothing is left from before this instance: no registered process, no mapping, no descriptor.
    pub clean: bool,
}

impl Have {
    /// The slices that the host has: those of its VMs, which are not online before an agent that restarted has opened them again,
    /// and those online. A slice can occur twice.
    pub fn holdings(&self) -> impl Iterator<Item = &Holding> {
        self.vms.values().flat_map(|vm| &vm.slices).chain(&self.online)
    }

    /// This report and the next as one.
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
        vms.retain(|id, _| !ended.contains(id));
        Self { after: self.after, whole: self.whole, online, vms, ..newer }
    }

    /// Splits a report into parts of at most `most` facts each, so that applying one takes bounded time. A VM counts as
    /// many facts as it has slices, and is never split.
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

    /// The same report without facts.
    fn without_facts(&self) -> Self {
        let Self { sequence, after, number, whole, clean, .. } = *self;
        Self { sequence, after, number, whole, clean, ..Self::default() }
    }
}

/// The parts of a report, while it is split.
struct Parts {
    most: usize,
    /// Facts for which the last part has room.
    room: usize,
    parts: Vec<Have>,
}

impl Parts {
    /// The part that the next fact goes to, which counts as `size` facts.
    fn next(&mut self, size: usize) -> &mut Have {
        if size > self.room && self.room < self.most {
            self.parts.push(self.parts[0].without_facts());
            self.room = self.most;
        }
        self.room = self.room.saturating_sub(size);
        self.parts.last_mut().expect("there is a first part")
    }
}

/// A VM that runs on memory of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaveVm {
    /// Its name.
    pub vm: Name,
    /// Its process on that host.
    pub pid: u32,
    /// The slices it was handed.
    pub slices: Vec<Holding>,
    /// Local memory it was handed with them.
    pub local: Bytes,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
    /// The user that may use it beside root, as in [`WantVm::uid`].
    pub uid: Option<UserId>,
}

/// What a scrubber did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scrubbed {
    /// Which slice, under which epoch of its own.
    pub holding: Holding,
    /// When it began, as people read time.
    pub started: UnixMs,
    /// When the last byte was verified.
    pub ended: UnixMs,
    /// How many bytes were seen to be zero.
    pub verified: Bytes,
}

/// What a host could not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// With which slice.
    pub holding: Holding,
    /// Why.
    pub reason: FailedReason,
    /// In the host's words, errno included.
    pub message: String,
}

/// Why a host could not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailedReason {
    /// The slice did not arrive as zeros.
    NotZero,
    /// The host could not open or map it.
    Host,
}

/// Who speaks for a host.
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

/// A pool device as a host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenDevice {
    /// The same on every host that sees it.
    pub serial: String,
    /// How many whole slices it has there.
    pub slices: u32,
    /// What keeps the host from using it.
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(slice: u32) -> Holding {
        Holding { slice: SliceId(slice), epoch: Epoch(1) }
    }

    fn running(id: u64) -> (ReservationId, HaveVm) {
        let vm = HaveVm {
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
    fn parts_of_a_report_have_all_its_facts_and_bounded_size() {
        let whole = Have {
            sequence: 4,
            after: 2,
            whole: true,
            clean: true,
            online: (0..5).map(holding).collect(),
            released: (5..8).map(holding).collect(),
            vms: [running(1), running(2)].into(),
            ended: vec![ReservationId(3)],
            ..Have::default()
        };
        for most in 1..20 {
            let parts = whole.clone().into_parts(most);
            let facts =
                |part: &Have| part.online.len() + part.released.len() + part.ended.len() + 2 * part.vms.len();
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
                Have { is_continued: part.is_continued, ..sum }
            });
            assert_eq!(sum.as_ref(), Some(&whole), "{most}");
        }
        assert_eq!(Have::default().into_parts(1), [Have::default()]);
    }

    #[test]
    fn merged_reports_follow_on_the_report_before_the_first() {
        let report = |sequence| Have { sequence, after: sequence - 1, ..Have::default() };
        let both = report(3).followed_by(report(4));
        assert_eq!((both.sequence, both.after), (4, 2));
    }

    #[test]
    fn report_absorbs_the_news_that_follows_it() {
        let whole = Have {
            whole: true,
            online: vec![holding(0), holding(1)],
            vms: [running(1), running(2)].into(),
            ..Have::default()
        };
        let news = Have {
            online: vec![holding(2)],
            released: vec![holding(0)],
            ended: vec![ReservationId(1)],
            clean: true,
            ..Have::default()
        };
        let both = whole.clone().followed_by(news.clone());
        let expected = Have {
            whole: true,
            online: vec![holding(1), holding(2)],
            vms: [running(2)].into(),
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
