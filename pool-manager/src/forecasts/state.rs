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

use crate::{
    operating_point::{OperatingPoint, OperatorLimits},
    records::forecast_rows::{self, Counters, EndedVm, ModelPrediction, VmStart},
    store::Write,
};

/// State of predictions.
#[derive(Debug)]
pub struct State {
    predictor: OnlinePredictor,
    /// Version of the predictor's model.
    frigid: Option<u32>,
    sensitivity: Option<Sensitivity>,
    point: OperatingPoint,
    stored: StoredOutcomes,
    plans: Plans,
    /// VMs with memory.
    running: BTreeMap<ReservationId, VmStart>,
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
pub struct SensitivityPrediction {
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
    measured_at: UnixMs,
}

/// Maximum age of a measurement at a VM's end: three intervals of the agent.
const PEAK_AGE_MAX: Ns = Ns(3 * TOUCHED_MEMORY_SAMPLE_INTERVAL.0);

/// A history is rebuilt when more than one in this number of its outcomes has expired.
const EXPIRED_DIVISOR: usize = 8;

/// Durable outcomes, the latest last.
#[derive(Debug, Default)]
struct StoredOutcomes {
    next: u64,
    entries: VecDeque<Entry>,
    fingerprints: HashSet<u64>,
    since_operating_point: usize,
    since_rebuilt: usize,
    expired: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    ended: UnixMs,
    fingerprint: u64,
}

/// Plans whose VMs have no memory yet, and statistics of the latest VMs that got it.
#[derive(Debug, Default)]
struct Plans {
    by_vm: BTreeMap<Name, (u64, VmStart)>,
    in_order: VecDeque<(u64, Name)>,
    next: u64,
    recent: VecDeque<(u64, bool)>,
}

/// Prediction for a VM before it starts.
#[derive(Clone, Debug)]
pub struct VmForecast {
    /// Record to be stored.
    pub start: VmStart,
    /// Features and prediction.
    pub assessment: VmAssessment,
    /// Operating point.
    pub point: OperatingPoint,
    /// Prediction for its workload, if it was measured and a model serves.
    pub sensitivity: Option<SensitivityPrediction>,
    /// Version of each serving model.
    pub serving: [Option<u32>; 2],
}

impl State {
    /// Creates the state of a rack without history.
    pub fn new(limits: OperatorLimits) -> Self {
        Self {
            predictor: OnlinePredictor::default(),
            frigid: None,
            sensitivity: None,
            point: OperatingPoint::without_pool(limits),
            stored: StoredOutcomes { next: 1, ..StoredOutcomes::default() },
            plans: Plans::default(),
            running: BTreeMap::new(),
            peaks: BTreeMap::new(),
        }
    }

    /// Predicts the memory of a VM.
    pub fn predict(&self, request: VmRequest, counters: Option<Counters>) -> VmForecast {
        let assessment = self.predictor.assess(&request);
        let prediction = self
            .frigid
            .zip(assessment.prediction)
            .map(|(version, prediction)| ModelPrediction { version, prediction });
        let measured = counters.as_ref().zip(self.sensitivity.as_ref());
        let sensitivity =
            measured.map(|(counters, Sensitivity { version, model, modelled })| SensitivityPrediction {
                version: *version,
                modelled: *modelled,
                probability: model.probability(counters),
                pdm: model.pdm,
            });
        let start = VmStart { request, counters, prediction, pool_only: false };
        VmForecast { start, assessment, point: self.point, sensitivity, serving: self.serving() }
    }

    /// Records a plan, with its inputs, until the VM has its memory.
    pub fn add_plan(&mut self, vm: &Name, start: VmStart) {
        self.plans.add(vm, start);
    }

    /// Records that a VM has its memory. Returns the entries to be stored: none for an unplanned
    /// VM, whose properties the ledger contains.
    pub fn record_start(
        &mut self,
        id: ReservationId,
        vm: &Name,
        requested: Bytes,
        cores: u32,
        created: UnixMs,
    ) -> Option<Write> {
        if self.running.contains_key(&id) {
            return None;
        }
        let Some(mut start) = self.plans.take(vm, requested) else {
            let groups = Groups { vm: vm.to_string(), ..Groups::default() };
            let request = VmRequest { groups, requested, cores: Some(cores.into()), begins: created };
            self.running.insert(id, VmStart { request, counters: None, prediction: None, pool_only: false });
            return None;
        };
        if start.request.requested != requested {
            start.prediction = None; // the prediction was for another VM
        }
        (start.request.requested, start.request.begins) = (requested, created);
        let write = forecast_rows::put_start(id, &start);
        self.running.insert(id, start);
        Some(write)
    }

    /// Records the memory touched so far by a VM with memory.
    pub fn record_peak(&mut self, host: HostId, id: ReservationId, bytes: Bytes, measured_at: UnixMs) {
        if self.running.contains_key(&id) {
            let before = self.peaks.get(&id).map_or(Bytes::ZERO, |peak| peak.bytes);
            self.peaks.insert(id, Peak { host, bytes: bytes.max(before), measured_at });
        }
    }

    /// Removes the measurements of a host whose agent connected or disconnected: the agent will
    /// measure again.
    pub fn clear_peaks(&mut self, host: HostId) {
        self.peaks.retain(|_, peak| peak.host != host);
    }

    /// Records that a VM released its memory. Returns its outcome, if it was measured until its
    /// end, and the entries to be stored.
    pub fn record_end(
        &mut self,
        id: ReservationId,
        ended: UnixMs,
        ended_by_itself: bool,
    ) -> (Option<EndedVm>, Vec<Write>) {
        let Some(start) = self.running.remove(&id) else { return (None, Vec::new()) };
        let mut writes = vec![forecast_rows::delete_start(id)];
        let is_fresh = |peak: &Peak| {
            ended_by_itself && ended.0.saturating_sub(peak.measured_at.0) <= PEAK_AGE_MAX.as_ms()
        };
        let peak = self.peaks.remove(&id).filter(is_fresh);
        let vm = peak.and_then(|peak| ended_vm(start, peak.bytes, ended, Usage::default()));
        writes.extend(vm.clone().and_then(|vm| self.add(vm)).map(|(_, write)| write));
        (vm, writes)
    }

    /// Adds an ended VM. Returns its number and the entries to be stored; nothing if it is a
    /// duplicate.
    pub fn add(&mut self, vm: EndedVm) -> Option<(u64, Write)> {
        let fingerprint = fingerprint(&vm);
        if !self.stored.fingerprints.insert(fingerprint) {
            return None;
        }
        let number = self.stored.next;
        let write = forecast_rows::put_outcome(number, &vm);
        self.insert(number, &vm, fingerprint);
        Some((number, write))
    }

    /// Removes outcomes that did not become durable, so that they can be added again.
    pub fn remove(&mut self, numbers: &[u64]) {
        let StoredOutcomes { entries, fingerprints, .. } = &mut self.stored;
        entries.retain(|entry| {
            let is_kept = !numbers.contains(&entry.number);
            is_kept || !fingerprints.remove(&entry.fingerprint)
        });
    }

    /// Loads an outcome from the store.
    pub fn load(&mut self, number: u64, vm: &EndedVm) {
        let fingerprint = fingerprint(vm);
        if self.stored.fingerprints.insert(fingerprint) {
            self.insert(number, vm, fingerprint);
        }
    }

    /// Loads a VM with memory from the store.
    pub fn load_start(&mut self, id: ReservationId, start: VmStart) {
        self.running.insert(id, start);
    }

    fn insert(&mut self, number: u64, vm: &EndedVm, fingerprint: u64) {
        let prediction = vm.start.prediction.filter(|prediction| Some(prediction.version) == self.frigid);
        self.predictor.record_outcome(
            &vm.start.request,
            &vm.outcome,
            prediction.map(|prediction| prediction.prediction),
        );
        self.stored.next = number + 1;
        self.stored.entries.push_back(Entry { number, ended: vm.outcome.ended, fingerprint });
        self.stored.since_operating_point += 1;
        self.stored.since_rebuilt += 1;
    }

    /// Deletes outcomes beyond the limit or the retention; returns the entries to be stored.
    pub fn expire(&mut self, before: UnixMs) -> Vec<Write> {
        let mut writes = Vec::new();
        let StoredOutcomes { entries, fingerprints, expired, .. } = &mut self.stored;
        let mut too_many = entries.len().saturating_sub(OUTCOMES_RETAINED_MAX);
        entries.retain(|entry| {
            let is_kept = too_many == 0 && entry.ended >= before;
            if !is_kept {
                too_many = too_many.saturating_sub(1);
                fingerprints.remove(&entry.fingerprint);
                writes.push(forecast_rows::delete_outcome(entry.number));
            }
            is_kept
        });
        *expired += writes.len();
        writes
    }

    /// Returns VMs recorded with memory.
    pub fn running(&self) -> impl Iterator<Item = ReservationId> {
        self.running.keys().copied()
    }

    /// Returns the number of stored outcomes.
    pub fn outcomes(&self) -> usize {
        self.stored.entries.len()
    }

    /// Returns the number of the next outcome.
    pub fn next_outcome(&self) -> u64 {
        self.stored.next
    }

    /// Returns whether the operating point has to be chosen again.
    pub fn is_point_due(&self) -> bool {
        self.stored.since_operating_point >= OUTCOMES_PER_OPERATING_POINT
    }

    /// Returns the inputs of a choice of the operating point.
    pub fn point_inputs(&self, limits: OperatorLimits) -> PointInputs {
        let cutoffs = self.sensitivity.as_ref().map(|serving| serving.model.cutoffs().to_vec());
        PointInputs {
            serving: self.serving(),
            calibration: self.predictor.calibration().clone(),
            cutoffs: cutoffs.unwrap_or_default(),
            counters_fraction: self.plans.counters_fraction(),
            limits,
        }
    }

    /// Sets the operating point, unless another model serves by now.
    pub fn set_point(&mut self, serving: [Option<u32>; 2], point: OperatingPoint) {
        if serving == self.serving() {
            self.point = point;
            self.stored.since_operating_point = 0;
        }
    }

    /// Returns the operating point.
    pub fn point(&self) -> &OperatingPoint {
        &self.point
    }

    /// Returns the serving versions: of frigid memory, and of latency sensitivity.
    pub fn serving(&self) -> [Option<u32>; 2] {
        [self.frigid, self.sensitivity.as_ref().map(|serving| serving.version)]
    }

    /// Installs another model with its operating point. Its calibration includes the VMs of its
    /// backtest.
    pub fn serve(&mut self, version: u32, file: ModelFile, calibration: Calibration, point: OperatingPoint) {
        match file.content {
            Content::Frigid { model, .. } => {
                self.predictor.install_model(model, calibration);
                self.frigid = Some(version);
            }
            Content::Sensitivity { model, .. } => {
                self.sensitivity = Some(Sensitivity { version, model, modelled: file.provenance.modelled });
            }
        }
        self.point = point;
    }

    /// Removes the serving model of a kind.
    pub fn serve_none(&mut self, kind: Kind, point: OperatingPoint) {
        match kind {
            Kind::Frigid => {
                self.predictor.clear_model();
                self.frigid = None;
            }
            Kind::Sensitivity => self.sensitivity = None,
        }
        self.point = point;
    }

    /// Returns whether the history contains many expired outcomes and has to be rebuilt.
    pub fn is_history_due(&self) -> bool {
        let StoredOutcomes { since_rebuilt, expired, entries, .. } = &self.stored;
        *since_rebuilt > 2 * OUTCOMES_RETAINED_MAX || *expired > entries.len() / EXPIRED_DIVISOR
    }

    /// Installs a history rebuilt from all outcomes below a number, unless more have been added
    /// since.
    pub fn set_history(&mut self, history: History, built_from: u64) {
        if built_from == self.stored.next {
            self.predictor.set_history(history);
            (self.stored.since_rebuilt, self.stored.expired) = (self.stored.entries.len(), 0);
        }
    }
}

/// Inputs of a choice of the operating point.
#[derive(Debug)]
pub struct PointInputs {
    /// Serving versions.
    pub serving: [Option<u32>; 2],
    /// Recent outcomes.
    pub calibration: Calibration,
    /// Thresholds of the sensitivity model.
    pub cutoffs: Vec<sensitivity::Cutoff>,
    /// Fraction of recent VMs with measured counters: by VMs or by memory, the larger one.
    pub counters_fraction: Fraction,
    /// Limits of the operator.
    pub limits: OperatorLimits,
}

impl PointInputs {
    /// Chooses the operating point; takes some milliseconds.
    pub fn choose(&self) -> OperatingPoint {
        OperatingPoint::choose(&self.calibration, &self.cutoffs, self.counters_fraction, self.limits)
    }
}

impl Plans {
    fn add(&mut self, vm: &Name, start: VmStart) {
        self.next += 1;
        self.by_vm.insert(vm.clone(), (self.next, start));
        self.in_order.push_back((self.next, vm.clone()));
        while self.in_order.len() > PENDING_PLANS_MAX {
            let (number, vm) = self.in_order.pop_front().expect("the queue is not empty");
            if self.by_vm.get(&vm).is_some_and(|(newest, _)| *newest == number) {
                self.by_vm.remove(&vm);
            }
        }
    }

    /// Counts a VM once it has memory, with its actual size. Unused plans do not count.
    fn take(&mut self, vm: &Name, requested: Bytes) -> Option<VmStart> {
        let (_, start) = self.by_vm.remove(vm)?;
        if self.recent.len() == PLAN_STATISTICS_WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back((requested.get(), start.counters.is_some()));
        Some(start)
    }

    /// Returns the fraction of recent VMs with measured counters: by VMs or by memory, the larger
    /// one, because risk is counted in VMs and gain in memory. Before the first VM it is 1.
    fn counters_fraction(&self) -> Fraction {
        let with_counters = || self.recent.iter().filter(|(_, has_counters)| *has_counters);
        let memory =
            |vms: &mut dyn Iterator<Item = &(u64, bool)>| vms.map(|(size, _)| *size as f64).sum::<f64>();
        let by_vms = (with_counters().count() + 1) as f64 / (self.recent.len() + 1) as f64;
        let all = memory(&mut self.recent.iter());
        let by_memory = if all > 0.0 { memory(&mut with_counters()) / all } else { 0.0 };
        Fraction::new(by_vms.max(by_memory)).expect("a part of a whole")
    }
}

/// Returns the outcome of a VM with a peak of touched memory; none for a VM without requested
/// memory.
pub fn ended_vm(start: VmStart, peak: Bytes, ended: UnixMs, usage: Usage) -> Option<EndedVm> {
    let requested = start.request.requested;
    if requested == Bytes::ZERO {
        return None;
    }
    let untouched_bytes = requested.saturating_sub(peak);
    let untouched =
        Fraction::new(untouched_bytes.get() as f64 / requested.get() as f64).expect("a part of a whole");
    let ended = ended.max(start.request.begins);
    Some(EndedVm { start, outcome: Outcome { ended, untouched, usage } })
}

/// Returns the identity of an ended VM; duplicates are rejected by it.
fn fingerprint(vm: &EndedVm) -> u64 {
    let request = &vm.start.request;
    let mut hasher = DefaultHasher::new();
    (request.groups.all(), request.begins, vm.outcome.ended, request.requested).hash(&mut hasher);
    // Several VMs of one name may have started and ended at the same time. Conversions between
    // bytes and fractions are not exact.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of millionths")]
    let untouched = (vm.outcome.untouched.get() * 1e6).round() as u64;
    untouched.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
