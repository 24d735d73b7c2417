//! What is known for forecasts, in memory: outcomes, who serves, where it is operated, and VMs between their plan and their end. Nothing
//! here waits or writes; what is to be durable is handed back as entries.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use prediction::{
    file::{Content, Kind, ModelFile},
    frigid::{Calibration, Groups, History, OnlinePredictor, Outcome, Usage, VmAssessment, VmRequest},
    sensitivity,
};
use units::{
    Bytes, Fraction, HostId, Name, Ns, ReservationId, UnixMs,
    limits::{
        OUTCOMES_PER_OPERATING_POINT, OUTCOMES_RETAINED_MAX, PENDING_PLANS_MAX, PLAN_STATISTICS_WINDOW,
        TOUCHED_MEMORY_SAMPLE_INTERVAL,
    },
};

use super::{
    point::{Point, Rules},
    rows::{self, Begun, Counters, Past, Remark},
};
use crate::store::Write;

/// What is known for forecasts.
#[derive(Debug)]
pub struct State {
    live: OnlinePredictor,
    /// Which version [`OnlinePredictor`] speaks by.
    frigid: Option<u32>,
    sensitivity: Option<Sensitivity>,
    point: Point,
    kept: Kept,
    plans: Plans,
    /// VMs that have their memory.
    begun: BTreeMap<ReservationId, Begun>,
    peaks: BTreeMap<ReservationId, Peak>,
}

/// The model of latency sensitivity that serves.
#[derive(Debug)]
struct Sensitivity {
    version: u32,
    model: sensitivity::Model,
    modelled: bool,
}

/// What is said of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Told {
    /// By which version.
    pub version: u32,
    /// Whether that was made of modelled workloads.
    pub modelled: bool,
    /// How likely it is slowed down beyond the margin.
    pub probability: f64,
    /// The margin.
    pub pdm: Fraction,
}

/// The most that a VM has touched, as its host's agent measured it.
#[derive(Clone, Copy, Debug)]
struct Peak {
    host: HostId,
    bytes: Bytes,
    told: UnixMs,
}

/// An older word than this, when a VM ends, may be too little: it has been told three times since.
const FRESH: Ns = Ns(3 * TOUCHED_MEMORY_SAMPLE_INTERVAL.0);

/// A history is made anew when more than one in so many outcomes that it was made of were forgotten.
const FORGOTTEN_PART: usize = 8;

/// Outcomes that are durable, the latest last.
#[derive(Debug, Default)]
struct Kept {
    next: u64,
    entries: VecDeque<Entry>,
    known: HashSet<u64>,
    since_point: usize,
    since_rebuilt: usize,
    forgotten: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    ended: UnixMs,
    fingerprint: u64,
}

/// Plans whose VMs have no memory yet, and how much was known of the latest.
#[derive(Debug, Default)]
struct Plans {
    by_vm: BTreeMap<Name, (u64, Begun)>,
    in_order: VecDeque<(u64, Name)>,
    next: u64,
    counted: VecDeque<(u64, bool)>,
}

/// What can be said of a VM before it starts.
#[derive(Clone, Debug)]
pub struct Foreseen {
    /// What is to be remembered of it.
    pub begun: Begun,
    /// What was known, as numbers, and what was said.
    pub known: VmAssessment,
    /// Where it is operated.
    pub point: Point,
    /// What is said of its workload, if it was measured and a model serves.
    pub sensitivity: Option<Told>,
    /// Which version of each kind serves.
    pub serving: [Option<u32>; 2],
}

impl State {
    /// Of a rack without a past.
    pub fn new(rules: Rules) -> Self {
        Self {
            live: OnlinePredictor::default(),
            frigid: None,
            sensitivity: None,
            point: Point::nothing(rules),
            kept: Kept { next: 1, ..Kept::default() },
            plans: Plans::default(),
            begun: BTreeMap::new(),
            peaks: BTreeMap::new(),
        }
    }

    /// What can be said of a VM now.
    pub fn foresee(&self, ask: VmRequest, counters: Option<Counters>) -> Foreseen {
        let known = self.live.assess(&ask);
        let remark = self.frigid.zip(known.prediction).map(|(version, said)| Remark { version, said });
        let asked = counters.as_ref().zip(self.sensitivity.as_ref());
        let sensitivity = asked.map(|(counters, Sensitivity { version, model, modelled })| Told {
            version: *version,
            modelled: *modelled,
            probability: model.probability(counters),
            pdm: model.pdm,
        });
        let begun = Begun { ask, counters, remark, whole: false };
        Foreseen { begun, known, point: self.point, sensitivity, serving: self.serving() }
    }

    /// A VM was planned: what was known and said of it is remembered until it has its memory.
    pub fn planned(&mut self, vm: &Name, begun: Begun) {
        self.plans.add(vm, begun);
    }

    /// A VM has its memory. What is to be durable of it: nothing if it was never planned, as the ledger knows what is known of it then.
    pub fn began(
        &mut self,
        id: ReservationId,
        vm: &Name,
        requested: Bytes,
        cores: u32,
        created: UnixMs,
    ) -> Option<Write> {
        if self.begun.contains_key(&id) {
            return None;
        }
        let Some(mut begun) = self.plans.take(vm, requested) else {
            let groups = Groups { vm: vm.to_string(), ..Groups::default() };
            let ask = VmRequest { groups, requested, cores: Some(cores.into()), begins: created };
            self.begun.insert(id, Begun { ask, counters: None, remark: None, whole: false });
            return None;
        };
        if begun.ask.requested != requested {
            begun.remark = None; // it was said of another VM
        }
        (begun.ask.requested, begun.ask.begins) = (requested, created);
        let write = rows::begun(id, &begun);
        self.begun.insert(id, begun);
        Some(write)
    }

    /// A VM's word about how much it has touched so far; of one that has its memory.
    pub fn touched(&mut self, host: HostId, id: ReservationId, bytes: Bytes, told: UnixMs) {
        if self.begun.contains_key(&id) {
            let before = self.peaks.get(&id).map_or(Bytes::ZERO, |peak| peak.bytes);
            self.peaks.insert(id, Peak { host, bytes: bytes.max(before), told });
        }
    }

    /// A host's agent is another one, or away: what it said before may be too little by now, and it says it again.
    pub fn forget_peaks(&mut self, host: HostId) {
        self.peaks.retain(|_, peak| peak.host != host);
    }

    /// A VM gave its memory back, of itself or not. What came of it, if it was seen to its end how much it had touched; and what is to be
    /// durable.
    pub fn ended(&mut self, id: ReservationId, ended: UnixMs, of_itself: bool) -> (Option<Past>, Vec<Write>) {
        let Some(begun) = self.begun.remove(&id) else { return (None, Vec::new()) };
        let mut writes = vec![rows::not_begun(id)];
        let is_fresh = |peak: &Peak| of_itself && ended.0.saturating_sub(peak.told.0) <= FRESH.as_ms();
        let peak = self.peaks.remove(&id).filter(is_fresh);
        let past = peak.and_then(|peak| past(begun, peak.bytes, ended, Usage::default()));
        writes.extend(past.clone().and_then(|past| self.add(past)).map(|(_, write)| write));
        (past, writes)
    }

    /// Takes in a VM that has ended. Its number, and what is to be durable; nothing if it is known already.
    pub fn add(&mut self, past: Past) -> Option<(u64, Write)> {
        let fingerprint = fingerprint(&past);
        if !self.kept.known.insert(fingerprint) {
            return None;
        }
        let number = self.kept.next;
        let write = rows::past(number, &past);
        self.take_in(number, &past, fingerprint);
        Some((number, write))
    }

    /// Outcomes did not become durable: told again they are new.
    pub fn take_back(&mut self, numbers: &[u64]) {
        let Kept { entries, known, .. } = &mut self.kept;
        entries.retain(|entry| {
            let is_kept = !numbers.contains(&entry.number);
            is_kept || !known.remove(&entry.fingerprint)
        });
    }

    /// Takes in what a store has.
    pub fn load(&mut self, number: u64, past: &Past) {
        let fingerprint = fingerprint(past);
        if self.kept.known.insert(fingerprint) {
            self.take_in(number, past, fingerprint);
        }
    }

    /// Takes in what a store has of a VM that had its memory.
    pub fn load_begun(&mut self, id: ReservationId, begun: Begun) {
        self.begun.insert(id, begun);
    }

    fn take_in(&mut self, number: u64, past: &Past, fingerprint: u64) {
        let remark = past.begun.remark.filter(|remark| Some(remark.version) == self.frigid);
        self.live.record_outcome(&past.begun.ask, &past.outcome, remark.map(|remark| remark.said));
        self.kept.next = number + 1;
        self.kept.entries.push_back(Entry { number, ended: past.outcome.ended, fingerprint });
        self.kept.since_point += 1;
        self.kept.since_rebuilt += 1;
    }

    /// Forgets outcomes that are too many or too old; what is to be durable.
    pub fn forget(&mut self, before: UnixMs) -> Vec<Write> {
        let mut writes = Vec::new();
        let Kept { entries, known, forgotten, .. } = &mut self.kept;
        let mut too_many = entries.len().saturating_sub(OUTCOMES_RETAINED_MAX);
        entries.retain(|entry| {
            let is_kept = too_many == 0 && entry.ended >= before;
            if !is_kept {
                too_many = too_many.saturating_sub(1);
                known.remove(&entry.fingerprint);
                writes.push(rows::no_past(entry.number));
            }
            is_kept
        });
        *forgotten += writes.len();
        writes
    }

    /// VMs that are remembered as having their memory.
    pub fn running(&self) -> impl Iterator<Item = ReservationId> {
        self.begun.keys().copied()
    }

    /// How many outcomes are kept.
    pub fn outcomes(&self) -> usize {
        self.kept.entries.len()
    }

    /// The number that the next outcome gets.
    pub fn next_outcome(&self) -> u64 {
        self.kept.next
    }

    /// Whether it is time to choose the operating point anew.
    pub fn is_point_due(&self) -> bool {
        self.kept.since_point >= OUTCOMES_PER_OPERATING_POINT
    }

    /// What a choice of the operating point is made of.
    pub fn basis(&self, rules: Rules) -> Basis {
        let cuts = self.sensitivity.as_ref().map(|serving| serving.model.cutoffs().to_vec());
        Basis {
            serving: self.serving(),
            calibration: self.live.calibration().clone(),
            cuts: cuts.unwrap_or_default(),
            history: self.plans.history(),
            rules,
        }
    }

    /// Operates there from now on, unless another model serves by now.
    pub fn set_point(&mut self, serving: [Option<u32>; 2], point: Point) {
        if serving == self.serving() {
            self.point = point;
            self.kept.since_point = 0;
        }
    }

    /// Where it is operated.
    pub fn point(&self) -> &Point {
        &self.point
    }

    /// Which versions serve: of frigid memory, and of latency sensitivity.
    pub fn serving(&self) -> [Option<u32>; 2] {
        [self.frigid, self.sensitivity.as_ref().map(|serving| serving.version)]
    }

    /// Another model serves from now on, operated there. Outcomes of VMs that it spoke of before count, too.
    pub fn serve(&mut self, version: u32, file: ModelFile, calibration: Calibration, point: Point) {
        match file.content {
            Content::Frigid { model, .. } => {
                self.live.install_model(model, calibration);
                self.frigid = Some(version);
            }
            Content::Sensitivity { model, .. } => {
                self.sensitivity = Some(Sensitivity { version, model, modelled: file.provenance.modelled });
            }
        }
        self.point = point;
    }

    /// No model of this kind serves any more.
    pub fn serve_none(&mut self, kind: Kind, point: Point) {
        match kind {
            Kind::Frigid => {
                self.live.clear_model();
                self.frigid = None;
            }
            Kind::Sensitivity => self.sensitivity = None,
        }
        self.point = point;
    }

    /// Whether groups hold much that was forgotten, so that a history is to be made anew.
    pub fn is_history_due(&self) -> bool {
        let Kept { since_rebuilt, forgotten, entries, .. } = &self.kept;
        *since_rebuilt > 2 * OUTCOMES_RETAINED_MAX || *forgotten > entries.len() / FORGOTTEN_PART
    }

    /// A history made anew of all outcomes below a number; another time if more have come since.
    pub fn set_history(&mut self, history: History, made_of: u64) {
        if made_of == self.kept.next {
            self.live.set_history(history);
            (self.kept.since_rebuilt, self.kept.forgotten) = (self.kept.entries.len(), 0);
        }
    }
}

/// What a choice of the operating point is made of.
#[derive(Debug)]
pub struct Basis {
    /// Which versions served.
    pub serving: [Option<u32>; 2],
    /// Outcomes of late.
    pub calibration: Calibration,
    /// Of the model of latency sensitivity.
    pub cuts: Vec<sensitivity::Cutoff>,
    /// Of VMs of late, those whose counters were known: by VMs or by memory, whichever is more.
    pub history: Fraction,
    /// What the operator allows.
    pub rules: Rules,
}

impl Basis {
    /// The choice; takes some milliseconds.
    pub fn choose(&self) -> Point {
        Point::choose(&self.calibration, &self.cuts, self.history, self.rules)
    }
}

impl Plans {
    fn add(&mut self, vm: &Name, begun: Begun) {
        self.next += 1;
        self.by_vm.insert(vm.clone(), (self.next, begun));
        self.in_order.push_back((self.next, vm.clone()));
        while self.in_order.len() > PENDING_PLANS_MAX {
            let (number, vm) = self.in_order.pop_front().expect("it was just seen");
            if self.by_vm.get(&vm).is_some_and(|(newest, _)| *newest == number) {
                self.by_vm.remove(&vm);
            }
        }
    }

    /// The VM has its memory: it counts from now on, with what it really has. A plan that nobody follows does not.
    fn take(&mut self, vm: &Name, requested: Bytes) -> Option<Begun> {
        let (_, begun) = self.by_vm.remove(vm)?;
        if self.counted.len() == PLAN_STATISTICS_WINDOW {
            self.counted.pop_front();
        }
        self.counted.push_back((requested.get(), begun.counters.is_some()));
        Some(begun)
    }

    /// Of the latest VMs, those whose counters were known: by VMs or by memory, whichever is more. What may go wrong is counted in VMs, and
    /// what is gained in memory. The next one may have some: before the first, all do.
    fn history(&self) -> Fraction {
        let known = || self.counted.iter().filter(|(_, known)| *known);
        let memory =
            |vms: &mut dyn Iterator<Item = &(u64, bool)>| vms.map(|(size, _)| *size as f64).sum::<f64>();
        let by_vms = (known().count() + 1) as f64 / (self.counted.len() + 1) as f64;
        let all = memory(&mut self.counted.iter());
        let by_memory = if all > 0.0 { memory(&mut known()) / all } else { 0.0 };
        Fraction::new(by_vms.max(by_memory)).expect("a part of a whole")
    }
}

/// What came of a VM that touched so much at most; none of one that asked for nothing.
pub fn past(begun: Begun, peak: Bytes, ended: UnixMs, usage: Usage) -> Option<Past> {
    let requested = begun.ask.requested;
    if requested == Bytes::ZERO {
        return None;
    }
    let left = requested.saturating_sub(peak);
    let untouched = Fraction::new(left.get() as f64 / requested.get() as f64).expect("a part of a whole");
    let ended = ended.max(begun.ask.begins);
    Some(Past { begun, outcome: Outcome { ended, untouched, usage } })
}

/// Tells VMs apart that ended: the same one is not told twice.
fn fingerprint(past: &Past) -> u64 {
    let ask = &past.begun.ask;
    let mut hasher = DefaultHasher::new();
    (ask.groups.all(), ask.begins, past.outcome.ended, ask.requested).hash(&mut hasher);
    // Several of one name may have begun and ended at once. Bytes and shares are not quite the same after one became the other.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a millionth of the memory")]
    let untouched = (past.outcome.untouched.get() * 1e6).round() as u64;
    untouched.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
