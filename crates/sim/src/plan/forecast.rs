//! Predicts the pool memory of each VM of a trace when it arrives, from the VMs that have ended
//! before. The models, their calibration and the choice of the operating point are those of the pool
//! manager.
//!
//! The model of frigid memory is trained when the number of outcomes has doubled. The operating point
//! is chosen once per [`UPDATE_INTERVAL`] of the trace. Until there are enough outcomes, VMs get no
//! pool memory. The outcomes of rejected VMs count, too, because the placement is not known here.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use prediction::{
    frigid::{FEATURE_COUNT, ModelSource, OnlinePredictor, Outcome, VmAssessment, VmRequest, VmUsage},
    operating_point::{OperatingPoint, OperatorLimits, pool_only_memory},
};
use units::{Bytes, Fraction, Ns, UnixMs, limits::TRAINING_OUTCOMES_MAX};

use super::{customers::Customers, input::PlannedVm, to_mib};

/// Time of the trace between two choices of the operating point.
pub const UPDATE_INTERVAL: Ns = Ns::secs(3600);
/// Number of outcomes at which the first model is trained.
const FIRST_TRAINING_OUTCOMES: usize = 500;

/// Pool memory of a VM under a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolChoice {
    /// Pool memory in MiB, at most the memory of the VM.
    pub pool_mib: u64,
    /// Whether the VM is on pool memory only, except for the memory needed to boot.
    pub is_pool_only: bool,
}

/// Predictions for a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmForecast {
    /// Only frigid memory is on the pool.
    pub frigid: PoolChoice,
    /// Frigid memory, and the whole memory of VMs that tolerate the latency of the pool (Eq. 1).
    pub full: PoolChoice,
}

/// Predictor that learns from the VMs of a trace.
#[derive(Debug)]
pub struct Forecaster<'a> {
    customers: &'a Customers,
    limits: OperatorLimits,
    online: OnlinePredictor,
    /// Latest outcomes: features at the start of a VM, and the untouched fraction of its memory.
    training: VecDeque<([f64; FEATURE_COUNT], f64)>,
    outcomes: usize,
    train_at: usize,
    full_point: OperatingPoint,
    frigid_point: OperatingPoint,
    next_update: Ns,
    history: HistoryShare,
    running: BinaryHeap<Reverse<(Ns, u64)>>,
    /// Running VMs by their sequence number.
    started: rustc_hash::FxHashMap<u64, StartedVm>,
    sequence: u64,
}

#[derive(Debug)]
struct StartedVm {
    request: VmRequest,
    outcome: Outcome,
    assessment: VmAssessment,
}

/// Fraction of VMs, and of memory, of owners with a history.
#[derive(Clone, Copy, Debug, Default)]
struct HistoryShare {
    vms: [f64; 2],
    mib: [f64; 2],
}

impl HistoryShare {
    fn add(&mut self, has_history: bool, mib: u64) {
        let known = usize::from(has_history);
        self.vms[known] += 1.0;
        self.mib[known] += mib as f64;
    }

    /// Returns the larger of both fractions.
    fn fraction(&self) -> Fraction {
        let share = |[unknown, known]: [f64; 2]| if known > 0.0 { known / (unknown + known) } else { 0.0 };
        Fraction::new(share(self.vms).max(share(self.mib))).expect("a part of a sum is a fraction")
    }
}

impl<'a> Forecaster<'a> {
    /// Creates a predictor without outcomes.
    pub fn new(customers: &'a Customers, limits: OperatorLimits) -> Self {
        let point = OperatingPoint::without_pool(limits);
        Self {
            customers,
            limits,
            online: OnlinePredictor::default(),
            training: VecDeque::new(),
            outcomes: 0,
            train_at: FIRST_TRAINING_OUTCOMES,
            full_point: point,
            frigid_point: point,
            next_update: UPDATE_INTERVAL,
            history: HistoryShare::default(),
            running: BinaryHeap::new(),
            started: rustc_hash::FxHashMap::default(),
            sequence: 0,
        }
    }

    /// Predicts the next VM of the trace.
    pub fn arrive(&mut self, vm: &PlannedVm) -> VmForecast {
        self.end_vms_until(vm.arrive);
        self.update(vm.arrive);
        let sequence = self.sequence;
        self.sequence += 1;
        let memory = Bytes::mib(vm.mib);
        let request = VmRequest {
            groups: self.customers.groups(vm, sequence),
            requested: memory,
            cores: Some(f64::from(vm.cores)),
            begins: to_unix_ms(vm.arrive),
        };
        let truth = self.customers.truth(vm, sequence);
        let assessment = self.online.assess_vm(&request);
        let forecast = self.choose(vm, sequence, &assessment);
        self.history.add(assessment.prediction.is_some(), vm.mib);
        if vm.depart > vm.arrive && vm.depart < Ns::NEVER {
            let untouched = Fraction::new(truth.untouched_mib as f64 / vm.mib as f64);
            let outcome = Outcome {
                ended: to_unix_ms(vm.depart),
                untouched: untouched.expect("the untouched memory is at most the memory"),
                usage: VmUsage::default(),
            };
            self.running.push(Reverse((vm.depart, sequence)));
            self.started.insert(sequence, StartedVm { request, outcome, assessment });
        }
        forecast
    }

    fn choose(&self, vm: &PlannedVm, sequence: u64, assessment: &VmAssessment) -> VmForecast {
        let memory = Bytes::mib(vm.mib);
        let frigid = |point: &OperatingPoint| {
            let allocation = point.frigid_allocation(memory, assessment.prediction).unwrap_or_default();
            PoolChoice { pool_mib: to_mib(allocation.to_fraction().of(memory)), is_pool_only: false }
        };
        let is_pool_only = assessment.prediction.is_some()
            && self.full_point.is_pool_only(self.customers.slowdown_probability(vm, sequence));
        let full = if is_pool_only {
            PoolChoice { pool_mib: to_mib(pool_only_memory(memory)), is_pool_only }
        } else {
            frigid(&self.full_point)
        };
        VmForecast { frigid: frigid(&self.frigid_point), full }
    }

    fn end_vms_until(&mut self, time: Ns) {
        while let Some(Reverse((_, sequence))) =
            self.running.peek().copied().filter(|Reverse((end, _))| *end <= time)
        {
            self.running.pop();
            let StartedVm { request, outcome, assessment } =
                self.started.remove(&sequence).expect("a running VM was started");
            self.online.record_outcome(&request, &outcome, assessment.prediction);
            if self.training.len() == TRAINING_OUTCOMES_MAX {
                self.training.pop_front();
            }
            self.training.push_back((assessment.features, outcome.untouched.get()));
            self.outcomes += 1;
        }
    }

    /// Trains the model and chooses the operating points, if either is due.
    fn update(&mut self, now: Ns) {
        if self.outcomes >= self.train_at {
            let (features, untouched): (Vec<_>, Vec<_>) = self.training.iter().copied().unzip();
            let model = ModelSource::Trained.fit(&features, &untouched, self.outcomes as u64);
            self.online.install_model(model, self.online.calibration().clone());
            self.train_at = 2 * self.outcomes;
        }
        if now >= self.next_update {
            let skipped = now.since(self.next_update).0 / UPDATE_INTERVAL.0 + 1;
            self.next_update = self.next_update.after(Ns(UPDATE_INTERVAL.0 * skipped));
            let calibration = self.online.calibration();
            let cutoffs = self.customers.model().cutoffs();
            let limits = self.limits;
            self.frigid_point = OperatingPoint::choose(calibration, &[], Fraction::default(), limits);
            self.full_point = OperatingPoint::choose(calibration, cutoffs, self.history.fraction(), limits);
        }
    }
}

fn to_unix_ms(at: Ns) -> UnixMs {
    UnixMs(at.as_ms())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::customers::tests::customers;

    /// Returns a VM per minute that runs for ten minutes. Five successive VMs are a batch.
    fn vm(n: u32) -> PlannedVm {
        let arrive = Ns::secs(60 * u64::from(n));
        PlannedVm {
            arrive,
            depart: arrive.after(Ns::secs(600)),
            cores: 2,
            mib: 8192,
            touched_mib: None,
            owner: Some(n / 5),
            socket: None,
        }
    }

    #[test]
    fn pool_memory_follows_from_earlier_vms_and_is_rarely_touched() {
        let customers = customers(false);
        let mut forecaster = Forecaster::new(&customers, OperatorLimits::default());
        let forecasts: Vec<VmForecast> = (0..2500).map(|n| forecaster.arrive(&vm(n))).collect();
        let (early, late) = (&forecasts[..FIRST_TRAINING_OUTCOMES], &forecasts[2000..]);
        assert!(early.iter().all(|forecast| forecast.frigid.pool_mib == 0));
        let touches = |(n, forecast): (u32, &VmForecast)| {
            customers.truth(&vm(n), u64::from(n)).touches_pool(forecast.frigid.pool_mib)
        };
        let touched = (2000..).zip(late).filter(|vm| touches(*vm)).count();
        let pool_mib: u64 = late.iter().map(|forecast| forecast.frigid.pool_mib).sum();
        // The VMs of both customers leave at least 25 % or 50 % of 8 GiB untouched.
        let mean_mib = pool_mib / late.len() as u64;
        assert!(
            (1024..=4096).contains(&mean_mib) && touched < late.len() / 5,
            "{mean_mib} MiB, {touched} touched"
        );
    }
}
