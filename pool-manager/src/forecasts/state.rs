//! State of the prediction service in memory: serving models, operating point, planned and running
//! VMs, and outcomes. Functions neither block nor write; they return the entries that the caller
//! must write.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use prediction::{
    file::{Content, Kind, ModelFile},
    frigid::{
        Calibration, Groups, OnlinePredictor, Outcome, OutcomeHistory, VmAssessment, VmRequest, VmUsage,
    },
    operating_point::{OperatingPoint, OperatorLimits},
    qos::LossModel,
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
    records::forecast_rows::{self, Counters, EndedVm, MeasuredMove, ModelPrediction, VmStart},
    store::Write,
};

use super::stored_moves::StoredMoves;

/// State of the prediction service in memory.
#[derive(Debug)]
pub struct State {
    predictor: OnlinePredictor,
    /// Version of the serving model of frigid memory.
    frigid: Option<u32>,
    sensitivity: Option<Sensitivity>,
    loss: Option<ServingLossModel>,
    point: OperatingPoint,
    stored: StoredOutcomes,
    moves: StoredMoves,
    plans: Plans,
    /// Running VMs, by reservation.
    running: BTreeMap<ReservationId, VmStart>,
    /// Measurements of running VMs, by reservation.
    peaks: BTreeMap<ReservationId, PeakMemory>,
}

/// Serving model of latency sensitivity.
#[derive(Debug)]
struct Sensitivity {
    version: u32,
    model: sensitivity::Model,
    modelled: bool,
}

/// Serving model of the loss of running VMs.
#[derive(Clone, Debug)]
pub struct ServingLossModel {
    /// Version of the model.
    pub version: u32,
    /// Whether the model was trained on simulated runs instead of measurements.
    pub modelled: bool,
    /// Model.
    pub model: Arc<LossModel>,
}

impl fmt::Display for ServingLossModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let modelled = if self.modelled { " (trained on MODELLED runs)" } else { "" };
        write!(f, "loss/{}{modelled}", self.version)
    }
}

/// Predicted latency sensitivity of a VM's workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SensitivityPrediction {
    /// Version of the model that made the prediction.
    pub version: u32,
    /// Whether the model was trained on simulated workloads instead of measurements.
    pub modelled: bool,
    /// Probability, from 0 to 1, of a slowdown beyond the PDM.
    pub probability: f64,
    /// Performance degradation margin (PDM) of the model: the largest tolerated slowdown.
    pub pdm: Fraction,
}

/// Largest amount of memory that a VM touched, as measured by its host's agent.
#[derive(Clone, Copy, Debug)]
struct PeakMemory {
    host: HostId,
    bytes: Bytes,
    measured_at: UnixMs,
}

/// Maximum age of the last measurement when a VM ends: three sampling intervals of the agent. A VM
/// with an older measurement has no outcome.
const PEAK_AGE_MAX: Ns = Ns(3 * TOUCHED_MEMORY_SAMPLE_INTERVAL.0);

/// The history is rebuilt when the number of expired outcomes exceeds the number of stored outcomes
/// divided by this.
const EXPIRED_OUTCOMES_DIVISOR: usize = 8;

/// Index of the outcomes in the store, oldest first, without their contents.
#[derive(Debug, Default)]
struct StoredOutcomes {
    next: u64,
    entries: VecDeque<OutcomeEntry>,
    fingerprints: HashSet<u64>,
    added_since_operating_point: usize,
    added_since_rebuild: usize,
    expired: usize,
}

#[derive(Clone, Copy, Debug)]
struct OutcomeEntry {
    number: u64,
    ended: UnixMs,
    fingerprint: u64,
}

/// Plans whose VMs have not started yet, and statistics of recently started VMs.
#[derive(Debug, Default)]
struct Plans {
    by_vm: BTreeMap<Name, (u64, VmStart)>,
    in_order: VecDeque<(u64, Name)>,
    next: u64,
    recent: VecDeque<(u64, bool)>,
}

/// Predictions for a VM that has not started yet, with their inputs.
#[derive(Clone, Debug)]
pub struct VmForecast {
    /// Record that is stored when the VM starts.
    pub start: VmStart,
    /// Features of the VM and prediction of its frigid memory.
    pub assessment: VmAssessment,
    /// Operating point at the time of the prediction.
    pub point: OperatingPoint,
    /// Predicted latency sensitivity; `None` without performance counters or without a serving
    /// model.
    pub sensitivity: Option<SensitivityPrediction>,
    /// Versions of the serving models: frigid memory, latency sensitivity.
    pub serving: [Option<u32>; 2],
}

impl State {
    /// Creates the state of a new rack, without models and outcomes.
    pub fn new(limits: OperatorLimits) -> Self {
        Self {
            predictor: OnlinePredictor::default(),
            frigid: None,
            sensitivity: None,
            loss: None,
            point: OperatingPoint::without_pool(limits),
            stored: StoredOutcomes { next: 1, ..StoredOutcomes::default() },
            moves: StoredMoves::default(),
            plans: Plans::default(),
            running: BTreeMap::new(),
            peaks: BTreeMap::new(),
        }
    }

    /// Predicts the frigid memory and, from performance counters, the latency sensitivity of a VM.
    pub fn predict(&self, request: VmRequest, counters: Option<Counters>) -> VmForecast {
        let assessment = self.predictor.assess_vm(&request);
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
        VmForecast { start, assessment, point: self.point, sensitivity, serving: self.serving_versions() }
    }

    /// Keeps the inputs of a plan until the VM starts.
    pub fn add_plan(&mut self, vm: &Name, start: VmStart) {
        self.plans.add(vm, start);
    }

    /// Records the start of a VM. Returns the entry that the caller must write, or `None` for a VM
    /// that was recorded before or has no plan. A VM without a plan needs no entry, because the
    /// ledger contains its properties.
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
        let Some(mut start) = self.plans.remove_plan(vm, requested) else {
            let groups = Groups { vm: vm.to_string(), ..Groups::default() };
            let request = VmRequest { groups, requested, cores: Some(cores.into()), begins: created };
            self.running.insert(id, VmStart { request, counters: None, prediction: None, pool_only: false });
            return None;
        };
        if start.request.requested != requested {
            start.prediction = None; // the prediction was for another size
        }
        (start.request.requested, start.request.begins) = (requested, created);
        let write = forecast_rows::put_start(id, &start);
        self.running.insert(id, start);
        Some(write)
    }

    /// Returns whether a running VM was placed entirely on the pool.
    pub fn is_pool_only(&self, id: ReservationId) -> bool {
        self.running.get(&id).is_some_and(|start| start.pool_only)
    }

    /// Returns the customer or application of a running VM, if its plan named one.
    pub fn owner(&self, id: ReservationId) -> Option<&str> {
        let key = self.running.get(&id).map(|start| start.request.groups.key.as_str());
        key.filter(|key| !key.is_empty())
    }

    /// Records how much memory a running VM has touched so far. Ignores other VMs.
    pub fn record_peak(&mut self, host: HostId, id: ReservationId, bytes: Bytes, measured_at: UnixMs) {
        if self.running.contains_key(&id) {
            let before = self.peaks.get(&id).map_or(Bytes::ZERO, |peak| peak.bytes);
            self.peaks.insert(id, PeakMemory { host, bytes: bytes.max(before), measured_at });
        }
    }

    /// Deletes the measurements of a host whose agent connected or disconnected. A connected agent
    /// measures again.
    pub fn clear_memory_peaks(&mut self, host: HostId) {
        self.peaks.retain(|_, peak| peak.host != host);
    }

    /// Records the end of a VM. Returns the VM's outcome, if its memory was measured until the end,
    /// and the entries that the caller must write.
    pub fn record_end(
        &mut self,
        id: ReservationId,
        ended: UnixMs,
        ended_by_itself: bool,
    ) -> (Option<EndedVm>, Vec<Write>) {
        let Some(start) = self.running.remove(&id) else { return (None, Vec::new()) };
        let mut writes = vec![forecast_rows::delete_start(id)];
        let is_fresh = |peak: &PeakMemory| {
            ended_by_itself && ended.0.saturating_sub(peak.measured_at.0) <= PEAK_AGE_MAX.as_ms()
        };
        let peak = self.peaks.remove(&id).filter(is_fresh);
        let vm = peak.and_then(|peak| new_ended_vm(start, peak.bytes, ended, VmUsage::default()));
        writes.extend(vm.clone().and_then(|vm| self.add_outcome(vm)).map(|(_, write)| write));
        (vm, writes)
    }

    /// Adds the outcome of a VM. Returns its number and the entry that the caller must write, or
    /// `None` for a duplicate.
    pub fn add_outcome(&mut self, vm: EndedVm) -> Option<(u64, Write)> {
        let fingerprint = compute_fingerprint(&vm);
        if !self.stored.fingerprints.insert(fingerprint) {
            return None;
        }
        let number = self.stored.next;
        let write = forecast_rows::put_outcome(number, &vm);
        self.insert_outcome(number, &vm, fingerprint);
        Some((number, write))
    }

    /// Removes outcomes whose write failed, so that they can be added again.
    pub fn remove_outcomes(&mut self, numbers: &[u64]) {
        let StoredOutcomes { entries, fingerprints, .. } = &mut self.stored;
        entries.retain(|entry| {
            let is_kept = !numbers.contains(&entry.number);
            is_kept || !fingerprints.remove(&entry.fingerprint)
        });
    }

    /// Adds an outcome that was read from the store.
    pub fn load_outcome(&mut self, number: u64, vm: &EndedVm) {
        let fingerprint = compute_fingerprint(vm);
        if self.stored.fingerprints.insert(fingerprint) {
            self.insert_outcome(number, vm, fingerprint);
        }
    }

    /// Adds a measured move. Returns the entries that the caller must write.
    pub fn add_measured_move(&mut self, moved: &MeasuredMove) -> Vec<Write> {
        self.moves.add(moved)
    }

    /// Adds a measured move that was read from the store.
    pub fn load_measured_move(&mut self, number: u64, moved: &MeasuredMove) {
        self.moves.load(number, moved);
    }

    /// Returns the number of stored measured moves.
    pub fn measured_move_count(&self) -> usize {
        self.moves.len()
    }

    /// Adds a running VM that was read from the store.
    pub fn load_start(&mut self, id: ReservationId, start: VmStart) {
        self.running.insert(id, start);
    }

    fn insert_outcome(&mut self, number: u64, vm: &EndedVm, fingerprint: u64) {
        let prediction = vm.start.prediction.filter(|prediction| Some(prediction.version) == self.frigid);
        self.predictor.record_outcome(
            &vm.start.request,
            &vm.outcome,
            prediction.map(|prediction| prediction.prediction),
        );
        self.stored.next = number + 1;
        self.stored.entries.push_back(OutcomeEntry { number, ended: vm.outcome.ended, fingerprint });
        self.stored.added_since_operating_point += 1;
        self.stored.added_since_rebuild += 1;
    }

    /// Deletes outcomes of VMs that ended earlier than `before`, the oldest outcomes beyond the limit, and
    /// moves that were measured earlier than `before`. Returns the deletions that the caller must write.
    pub fn expire(&mut self, before: UnixMs) -> Vec<Write> {
        let mut writes = self.expire_outcomes(before);
        writes.extend(self.moves.expire(before));
        writes
    }

    fn expire_outcomes(&mut self, before: UnixMs) -> Vec<Write> {
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

    /// Returns the reservations of all running VMs.
    pub fn running_reservations(&self) -> impl Iterator<Item = ReservationId> {
        self.running.keys().copied()
    }

    /// Returns the number of stored outcomes.
    pub fn outcome_count(&self) -> usize {
        self.stored.entries.len()
    }

    /// Returns the number that the next outcome will get.
    pub fn next_outcome_number(&self) -> u64 {
        self.stored.next
    }

    /// Returns whether enough outcomes were added to choose the operating point again.
    pub fn is_operating_point_due(&self) -> bool {
        self.stored.added_since_operating_point >= OUTCOMES_PER_OPERATING_POINT
    }

    /// Returns a copy of the inputs from which the operating point is chosen.
    pub fn operating_point_inputs(&self, limits: OperatorLimits) -> OperatingPointInputs {
        let cutoffs = self.sensitivity.as_ref().map(|serving| serving.model.cutoffs().to_vec());
        OperatingPointInputs {
            serving: self.serving_versions(),
            calibration: self.predictor.calibration().clone(),
            cutoffs: cutoffs.unwrap_or_default(),
            counters_fraction: self.plans.counters_fraction(),
            limits,
        }
    }

    /// Sets the operating point, unless the serving models have changed since `serving` was read.
    pub fn set_operating_point(&mut self, serving: [Option<u32>; 2], point: OperatingPoint) {
        if serving == self.serving_versions() {
            self.point = point;
            self.stored.added_since_operating_point = 0;
        }
    }

    /// Returns the current operating point.
    pub fn operating_point(&self) -> &OperatingPoint {
        &self.point
    }

    /// Returns the versions of the serving models: frigid memory, latency sensitivity.
    pub fn serving_versions(&self) -> [Option<u32>; 2] {
        [self.frigid, self.sensitivity.as_ref().map(|serving| serving.version)]
    }

    /// Returns the serving model of the loss of running VMs.
    pub const fn loss_model(&self) -> Option<&ServingLossModel> {
        self.loss.as_ref()
    }

    /// Replaces the serving model and the operating point. `calibration` includes the VMs of the
    /// model's backtest.
    pub fn set_serving_model(
        &mut self,
        version: u32,
        file: ModelFile,
        calibration: Calibration,
        point: OperatingPoint,
    ) {
        match file.content {
            Content::Frigid { model, .. } => {
                self.predictor.install_model(model, calibration);
                self.frigid = Some(version);
            }
            Content::Sensitivity { model, .. } => {
                self.sensitivity = Some(Sensitivity { version, model, modelled: file.provenance.modelled });
            }
            Content::Loss { model, .. } => {
                let (model, modelled) = (Arc::new(model), file.provenance.modelled);
                self.loss = Some(ServingLossModel { version, modelled, model });
            }
        }
        self.point = point;
    }

    /// Removes the serving model of a kind, and sets the operating point without it.
    pub fn remove_serving_model(&mut self, kind: Kind, point: OperatingPoint) {
        match kind {
            Kind::Frigid => {
                self.predictor.clear_model();
                self.frigid = None;
            }
            Kind::Sensitivity => self.sensitivity = None,
            Kind::Loss => self.loss = None,
        }
        self.point = point;
    }

    /// Returns whether the history must be rebuilt, because it contains many expired outcomes.
    pub fn is_history_rebuild_due(&self) -> bool {
        let StoredOutcomes { added_since_rebuild, expired, entries, .. } = &self.stored;
        *added_since_rebuild > 2 * OUTCOMES_RETAINED_MAX
            || *expired > entries.len() / EXPIRED_OUTCOMES_DIVISOR
    }

    /// Replaces the history by one that was rebuilt from all outcomes with numbers below
    /// `built_from`. Does nothing if outcomes were added since.
    pub fn set_history(&mut self, history: OutcomeHistory, built_from: u64) {
        if built_from == self.stored.next {
            self.predictor.set_history(history);
            (self.stored.added_since_rebuild, self.stored.expired) = (self.stored.entries.len(), 0);
        }
    }
}

/// Inputs from which the operating point is chosen.
#[derive(Debug)]
pub struct OperatingPointInputs {
    /// Versions of the serving models when the inputs were read.
    pub serving: [Option<u32>; 2],
    /// Calibration of the model of frigid memory on recent outcomes.
    pub calibration: Calibration,
    /// Decision thresholds of the model of latency sensitivity.
    pub cutoffs: Vec<sensitivity::Cutoff>,
    /// Fraction of recent VMs with performance counters: the larger of the fractions by number and
    /// by memory.
    pub counters_fraction: Fraction,
    /// Limits of the operator, from `rack.toml`.
    pub limits: OperatorLimits,
}

impl OperatingPointInputs {
    /// Chooses the operating point. The computation takes a few milliseconds.
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

    /// Removes the plan of a started VM, and adds the VM with its actual size to the statistics.
    fn remove_plan(&mut self, vm: &Name, requested: Bytes) -> Option<VmStart> {
        let (_, start) = self.by_vm.remove(vm)?;
        if self.recent.len() == PLAN_STATISTICS_WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back((requested.get(), start.counters.is_some()));
        Some(start)
    }

    /// Returns the fraction of recent VMs with performance counters: the larger of the fractions by
    /// number and by memory, because risk is counted in VMs and gain in memory. Returns 1 before
    /// the first VM.
    fn counters_fraction(&self) -> Fraction {
        let with_counters = || self.recent.iter().filter(|(_, has_counters)| *has_counters);
        let memory =
            |vms: &mut dyn Iterator<Item = &(u64, bool)>| vms.map(|(size, _)| *size as f64).sum::<f64>();
        let by_vms = (with_counters().count() + 1) as f64 / (self.recent.len() + 1) as f64;
        let all = memory(&mut self.recent.iter());
        let by_memory = if all > 0.0 { memory(&mut with_counters()) / all } else { 0.0 };
        Fraction::new(by_vms.max(by_memory)).expect("the numerator is at most the denominator")
    }
}

/// Computes the outcome of a VM from its largest amount of touched memory. Returns `None` for a VM
/// without memory.
pub fn new_ended_vm(start: VmStart, peak: Bytes, ended: UnixMs, usage: VmUsage) -> Option<EndedVm> {
    let requested = start.request.requested;
    if requested == Bytes::ZERO {
        return None;
    }
    let untouched_bytes = requested.saturating_sub(peak);
    let untouched = Fraction::new(untouched_bytes.get() as f64 / requested.get() as f64)
        .expect("the numerator is at most the denominator");
    let ended = ended.max(start.request.begins);
    Some(EndedVm { start, outcome: Outcome { ended, untouched, usage } })
}

/// Returns a hash of an ended VM, for detecting duplicates.
fn compute_fingerprint(vm: &EndedVm) -> u64 {
    let request = &vm.start.request;
    let mut hasher = DefaultHasher::new();
    (request.groups.all(), request.begins, vm.outcome.ended, request.requested).hash(&mut hasher);
    // VMs of the same name and times can differ in untouched memory. Rounding hides the errors of
    // conversions between bytes and fractions.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is an integer from 0 to 1,000,000"
    )]
    let untouched = (vm.outcome.untouched.get() * 1e6).round() as u64;
    untouched.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
