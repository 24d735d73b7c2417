//! State of predictions in memory: outcomes, serving models, operating point, and VMs between their
//! plan and their end. It neither waits nor writes; entries to be stored are returned.

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

/// State of predictions.
#[derive(Debug)]
pub struct State {
    live: OnlinePredictor,
    /// Version of [`OnlinePredictor`]'s model.
    frigid: Option<u32>,
    sensitivity: Option<Sensitivity>,
    point: Point,
    kept: Kept,
    plans: Plans,
    /// VMs with memory.
    begun: BTreeMap<ReservationId, Begun>,
    peaks: BTreeMap<ReservationId, Peak>,
}

/// Serving model of latency sensitivity.
#[derive(Debug)]
struct Sensitivity {
    version: u32,
    model: sensitivity::Model,
    modelled: bool,
}

/// Prediction for a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Told {
    /// Version of the model.
    pub version: u32,
    /// The model was trained on modelled workloads.
    pub modelled: bool,
    /// Probability of a slowdown beyond the PDM.
    pub probability: f64,
    /// PDM.
    pub pdm: Fraction,
}

/// Peak of the memory touched by a VM, as measured by its host's agent.
#[derive(Clone, Copy, Debug)]
struct Peak {
    host: HostId,
    bytes: Bytes,
    told: UnixMs,
}

/// Age above which a measurement is too old at a VM's end: three newer ones should exist.
const FRESH: Ns = Ns(3 * TOUCHED_MEMORY_SAMPLE_INTERVAL.0);

/// A history is rebuilt when more than this fraction, as a divisor, of its outcomes expired.
const FORGOTTEN_PART: usize = 8;

/// Durable outcomes, the latest last.
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

/// Plans whose VMs have no memory yet, and the known properties of the latest.
#[derive(Debug, Default)]
struct Plans {
    by_vm: BTreeMap<Name, (u64, Begun)>,
    in_order: VecDeque<(u64, Name)>,
    next: u64,
    counted: VecDeque<(u64, bool)>,
}

/// Prediction for a VM before it starts.
#[derive(Clone, Debug)]
pub struct Foreseen {
    /// Record to be kept.
    pub begun: Begun,
    /// Features and prediction.
    pub known: VmAssessment,
    /// Operating point.
    pub point: Point,
    /// Prediction for its workload, if it was measured and a model serves.
    pub sensitivity: Option<Told>,
    /// Version of each serving model.
    pub serving: [Option<u32>; 2],
}

impl State {
    /// Creates the state of a rack without history.
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

    /// Predicts the memory of a VM.
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

    /// Records a plan, with its inputs, until the VM has its memory.
    pub fn planned(&mut self, vm: &Name, begun: Begun) {
        self.plans.add(vm, begun);
    }

    /// Records that a VM has its memory. Returns the entries to be stored: none for an unplanned
    /// VM, whose properties the ledger contains.
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
            begun.remark = None; // the prediction was for another VM
        }
        (begun.ask.requested, begun.ask.begins) = (requested, created);
        let write = rows::begun(id, &begun);
        self.begun.insert(id, begun);
        Some(write)
    }

    /// Records the memory touched so far by a VM with memory.
    pub fn touched(&mut self, host: HostId, id: ReservationId, bytes: Bytes, told: UnixMs) {
        if self.begun.contains_key(&id) {
            let before = self.peaks.get(&id).map_or(Bytes::ZERO, |peak| peak.bytes);
            self.peaks.insert(id, Peak { host, bytes: bytes.max(before), told });
        }
    }

    /// Marks the measurements of a host as outdated: its agent changed or disconnected, and will
    /// measure again.
    pub fn forget_peaks(&mut self, host: HostId) {
        self.peaks.retain(|_, peak| peak.host != host);
    }

    /// Records that a VM released its memory. Returns its outcome, if it was measured until its
    /// end, and the entries to be stored.
    pub fn ended(&mut self, id: ReservationId, ended: UnixMs, of_itself: bool) -> (Option<Past>, Vec<Write>) {
        let Some(begun) = self.begun.remove(&id) else { return (None, Vec::new()) };
        let mut writes = vec![rows::not_begun(id)];
        let is_fresh = |peak: &Peak| of_itself && ended.0.saturating_sub(peak.told.0) <= FRESH.as_ms();
        let peak = self.peaks.remove(&id).filter(is_fresh);
        let past = peak.and_then(|peak| past(begun, peak.bytes, ended, Usage::default()));
        writes.extend(past.clone().and_then(|past| self.add(past)).map(|(_, write)| write));
        (past, writes)
    }

    /// Adds an ended VM. Returns its number and the entries to be stored; nothing if it is a
    /// duplicate.
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

    /// Removes outcomes that did not become durable, so that they can be added again.
    pub fn take_back(&mut self, numbers: &[u64]) {
        let Kept { entries, known, .. } = &mut self.kept;
        entries.retain(|entry| {
            let is_kept = !numbers.contains(&entry.number);
            is_kept || !known.remove(&entry.fingerprint)
        });
    }

    /// Loads an outcome from the store.
    pub fn load(&mut self, number: u64, past: &Past) {
        let fingerprint = fingerprint(past);
        if self.kept.known.insert(fingerprint) {
            self.take_in(number, past, fingerprint);
        }
    }

    /// Loads a VM with memory from the store.
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

    /// Deletes outcomes beyond the limit or the retention; returns the entries to be stored.
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

    /// Returns VMs recorded with memory.
    pub fn running(&self) -> impl Iterator<Item = ReservationId> {
        self.begun.keys().copied()
    }

    /// Returns the number of stored outcomes.
    pub fn outcomes(&self) -> usize {
        self.kept.entries.len()
    }

    /// Returns the number of the next outcome.
    pub fn next_outcome(&self) -> u64 {
        self.kept.next
    }

    /// Returns whether the operating point has to be chosen again.
    pub fn is_point_due(&self) -> bool {
        self.kept.since_point >= OUTCOMES_PER_OPERATING_POINT
    }

    /// Returns the inputs of a choice of the operating point.
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

    /// Sets the operating point, unless another model serves by now.
    pub fn set_point(&mut self, serving: [Option<u32>; 2], point: Point) {
        if serving == self.serving() {
            self.point = point;
            self.kept.since_point = 0;
        }
    }

    /// Returns the operating point.
    pub fn point(&self) -> &Point {
        &self.point
    }

    /// Returns the serving versions: of frigid memory, and of latency sensitivity.
    pub fn serving(&self) -> [Option<u32>; 2] {
        [self.frigid, self.sensitivity.as_ref().map(|serving| serving.version)]
    }

    /// Installs another model with its operating point. Outcomes of VMs that it predicted in its
    /// backtest count, too.
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

    /// Removes the serving model of a kind.
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

    /// Returns whether groups contain many expired outcomes, so that a history has to be rebuilt.
    pub fn is_history_due(&self) -> bool {
        let Kept { since_rebuilt, forgotten, entries, .. } = &self.kept;
        *since_rebuilt > 2 * OUTCOMES_RETAINED_MAX || *forgotten > entries.len() / FORGOTTEN_PART
    }

    /// Installs a history rebuilt from all outcomes below a number, unless more have been added
    /// since.
    pub fn set_history(&mut self, history: History, made_of: u64) {
        if made_of == self.kept.next {
            self.live.set_history(history);
            (self.kept.since_rebuilt, self.kept.forgotten) = (self.kept.entries.len(), 0);
        }
    }
}

/// Inputs of a choice of the operating point.
#[derive(Debug)]
pub struct Basis {
    /// Serving versions.
    pub serving: [Option<u32>; 2],
    /// Recent outcomes.
    pub calibration: Calibration,
    /// Predictions of the sensitivity model.
    pub cuts: Vec<sensitivity::Cutoff>,
    /// Fraction of recent VMs with known counters: by VMs or by memory, the larger one.
    pub history: Fraction,
    /// Limits of the operator.
    pub rules: Rules,
}

impl Basis {
    /// Chooses the operating point; takes some milliseconds.
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

    /// Counts a VM once it has memory, with its actual size. Unused plans do not count.
    fn take(&mut self, vm: &Name, requested: Bytes) -> Option<Begun> {
        let (_, begun) = self.by_vm.remove(vm)?;
        if self.counted.len() == PLAN_STATISTICS_WINDOW {
            self.counted.pop_front();
        }
        self.counted.push_back((requested.get(), begun.counters.is_some()));
        Some(begun)
    }

    /// Returns the fraction of recent VMs with known counters: by VMs or by memory, the larger one,
    /// because risk is counted in VMs and gain in memory. Before the first VM it is 1.
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

/// Returns the outcome of a VM with a peak of touched memory; none for a VM without requested
/// memory.
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

/// Identity of an ended VM, which is added only once.
fn fingerprint(past: &Past) -> u64 {
    let ask = &past.begun.ask;
    let mut hasher = DefaultHasher::new();
    (ask.groups.all(), ask.begins, past.outcome.ended, ask.requested).hash(&mut hasher);
    // Several VMs of one name may have started and ended at the same time. Conversions between
    // bytes and fractions are not exact.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a millionth of the memory")]
    let untouched = (past.outcome.untouched.get() * 1e6).round() as u64;
    untouched.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
