//! Simulation of the QoS monitor (Pond, sections 4.5 B and 4.6). VMs run on racks with different
//! memory, the monitor receives noisy samples, and a scheduler moves the VMs that it requests.
//!
//! The true slowdown of a VM comes from the processor model, with latency curves that are drawn for
//! each simulation. The models of the monitor are trained on other inputs of the programs and on
//! racks with other curves, so the truth is independent of the monitor. A second monitor knows only
//! the base rate of harmed VMs and flags VMs at random.

mod report;
mod vm;
pub(crate) mod workloads;

use std::collections::BTreeMap;

use pool::request_budget::RequestCounts;
use prediction::{
    qos::{LabelledRun, LossModel, Verdict, hourly_budget, select_most_harmed},
    sensitivity::{Model, backtest::EvaluationError},
};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use units::{Fraction, Ns};

pub use report::Report;
use report::{BudgetChecker, VmHistory};
use vm::{BaseRates, SimulatedVm, VmGenerator};
use workloads::WorkloadLibrary;

/// Interval between the samples of a VM.
pub const SAMPLE_INTERVAL: Ns = Ns::secs(30);
/// Number of samples of each VM: four hours.
pub const SAMPLES: u32 = 480;
/// Number of samples until a requested migration is complete.
const MIGRATION_SAMPLES: u32 = 4;

/// Parameters of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Number of VMs. All VMs start at the same time.
    pub vms: u32,
    /// Performance degradation margin (PDM).
    pub pdm: Fraction,
    /// X: fraction of VMs that the predictions may misplace. It is also the hourly budget of
    /// migrations.
    pub x: Fraction,
}

/// Simulates the monitor for all VMs. The result is deterministic for the same parameters.
///
/// # Errors
/// [`EvaluationError`] if no model can be trained because all or none of the workloads are slowed
/// down beyond the margin.
pub fn simulate(parameters: Parameters) -> Result<Report, EvaluationError> {
    let mut rng = Pcg64Mcg::seed_from_u64(parameters.seed);
    let (before_launch, running) = workloads::training_set(&mut rng);
    let placement_model = Model::train(&before_launch, parameters.pdm, parameters.seed)?;
    let model = LossModel::train(&running, parameters.pdm, parameters.seed)?;
    let library = WorkloadLibrary::new(&mut rng);
    let generator = VmGenerator::new(&placement_model, parameters);
    let vms: Vec<SimulatedVm> = (0..parameters.vms).map(|_| generator.generate(&library, &mut rng)).collect();
    let simulation = Simulation::new(vms, &library, &model, parameters);
    Ok(simulation.run(generator.base_rates(), &mut rng))
}

/// Creates a training set for a model of the loss of running VMs: runs of modelled programs on racks
/// with different memory. The result is deterministic for the same seed.
pub fn modelled_runs(seed: u64) -> Vec<LabelledRun> {
    workloads::training_set(&mut Pcg64Mcg::seed_from_u64(seed)).1
}

/// State of the simulation.
struct Simulation<'a> {
    vms: Vec<SimulatedVm>,
    histories: Vec<VmHistory>,
    library: &'a WorkloadLibrary,
    model: &'a LossModel,
    /// Requests of the last hour.
    requests: RequestCounts,
    checker: BudgetChecker,
    /// Requested migrations: index of the VM, and the sample at which the migration completes.
    migrations: BTreeMap<usize, u32>,
    parameters: Parameters,
}

impl<'a> Simulation<'a> {
    fn new(
        vms: Vec<SimulatedVm>,
        library: &'a WorkloadLibrary,
        model: &'a LossModel,
        parameters: Parameters,
    ) -> Self {
        let histories = vms.iter().map(|_| VmHistory::default()).collect();
        let checker = BudgetChecker::new(parameters.x, vms.len());
        Self {
            vms,
            histories,
            library,
            model,
            requests: RequestCounts::default(),
            checker,
            migrations: BTreeMap::new(),
            parameters,
        }
    }

    fn run(mut self, base_rates: BaseRates, rng: &mut Pcg64Mcg) -> Report {
        for sample in 0..SAMPLES {
            self.complete_migrations(sample);
            let candidates = self.sample_vms(sample, rng);
            self.request_migrations(candidates, sample);
        }
        Report::new(self.parameters, &self.vms, &self.histories, &self.checker, base_rates, rng)
    }

    fn complete_migrations(&mut self, sample: u32) {
        self.migrations.retain(|index, completes_at| {
            let is_complete = *completes_at <= sample;
            self.vms[*index].is_migrated |= is_complete;
            !is_complete
        });
    }

    /// Samples and judges all VMs that have not migrated. Returns the VMs to migrate with their
    /// harm.
    fn sample_vms(&mut self, sample: u32, rng: &mut Pcg64Mcg) -> Vec<(usize, f64)> {
        let now = Ns(SAMPLE_INTERVAL.0 * u64::from(sample + 1));
        let mut candidates = Vec::new();
        for (index, (vm, history)) in self.vms.iter_mut().zip(&mut self.histories).enumerate() {
            if vm.is_migrated {
                continue;
            }
            let observed = vm.observe(self.library, sample, now, rng);
            let judged = vm.judge.observe(&observed, Some(self.model), now);
            let judgement = judged.expect("the simulated samples are valid");
            let loss = vm.true_loss(self.library, sample);
            history.record(sample, loss > self.parameters.pdm.get(), judgement.verdict);
            if judgement.verdict == Verdict::Migrate && !self.migrations.contains_key(&index) {
                candidates.push((index, judgement.severity));
            }
        }
        candidates
    }

    fn request_migrations(&mut self, candidates: Vec<(usize, f64)>, sample: u32) {
        let now = Ns(SAMPLE_INTERVAL.0 * u64::from(sample + 1));
        let budget = hourly_budget(self.parameters.x, self.vms.len());
        let available = budget.saturating_sub(self.requests.recent(now));
        for index in select_most_harmed(candidates, available as usize) {
            self.requests.record(now);
            self.checker.record(now);
            self.histories[index].is_requested = true;
            self.migrations.insert(index, sample + MIGRATION_SAMPLES);
        }
    }
}

#[cfg(test)]
mod tests;
