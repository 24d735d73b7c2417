//! Workloads of the simulation: the training set of the monitor, and the library from which the
//! VMs of the simulation are drawn.

use prediction::{qos::LabelledRun, sensitivity::Workload};
use rand::Rng;
use rand_pcg::Pcg64Mcg;
use units::Fraction;

use crate::processor::{
    Counters, Measurement, Memory, Program, SERVER_CORE, add_noise, kernel_family, measure_each,
};

/// Number of inputs of each program in the training set.
const TRAINING_INPUTS: u64 = 4;
/// Number of samples of each run in the training set of the monitor. Several samples show the model
/// which differences of the counters are noise.
const TRAINING_SAMPLES: usize = 3;
/// Number of racks with different memory. Each program of the library runs on one of them per
/// input.
const RACKS: usize = 6;
/// Range of the fraction of accesses to the pool, for a VM with overpredicted frigid memory.
const POOL_SHARE_MIN: f64 = 0.02;

/// Workload of the library: the truth about a program on one rack.
#[derive(Clone, Debug)]
pub(crate) struct LibraryWorkload {
    /// Name of the program.
    program: String,
    /// Counters with local memory, from which the VM was placed.
    pub(crate) local_counters: Counters,
    /// Counters and slowdown entirely on the pool.
    pub(crate) on_pool: Measurement,
    /// Counters and slowdown with a part of the accesses on the pool.
    pub(crate) split: Measurement,
    /// Fraction of the accesses on the pool in `split`.
    pub(crate) pool_share: f64,
    /// Idle latency of the pool divided by the idle latency of local memory.
    pub(crate) latency_ratio: f64,
}

/// Library of workloads.
#[derive(Clone, Debug)]
pub(crate) struct WorkloadLibrary(Vec<LibraryWorkload>);

impl WorkloadLibrary {
    /// Creates the library with latency curves drawn from `rng`. Inputs differ from the training
    /// set.
    pub(crate) fn new(rng: &mut Pcg64Mcg) -> Self {
        let racks: Vec<[Memory; 2]> = (0..RACKS).map(|_| draw_rack_memory(rng)).collect();
        let mut workloads = Vec::new();
        for kernel in kernel_family() {
            for (input, [local, pool]) in (TRAINING_INPUTS..).zip(&racks) {
                workloads.push(run(&kernel.name, &kernel.program(input), [local, pool], rng));
            }
        }
        Self(workloads)
    }

    /// Returns noisy counters of all workloads with local memory, with their slowdowns entirely on the
    /// pool.
    pub(crate) fn labelled(&self, rng: &mut Pcg64Mcg) -> Vec<Workload> {
        let labelled = |workload: &LibraryWorkload| Workload {
            program: workload.program.clone(),
            counters: add_noise(&workload.local_counters, rng),
            slowdown: workload.on_pool.slowdown,
        };
        self.0.iter().map(labelled).collect()
    }

    /// Returns the fraction of workloads for which `is_counted` returns true.
    pub(crate) fn fraction(&self, is_counted: impl Fn(&LibraryWorkload) -> bool) -> Fraction {
        let counted = self.0.iter().filter(|workload| is_counted(workload)).count();
        Fraction::new(counted as f64 / self.0.len() as f64).expect("a part of a count is a fraction")
    }

    /// Draws the index of a workload.
    pub(crate) fn draw(&self, rng: &mut Pcg64Mcg) -> usize {
        rng.random_range(0..self.0.len())
    }

    /// Draws the index of a workload that runs on the same rack as another workload.
    pub(super) fn draw_on_same_rack(&self, other: usize, rng: &mut Pcg64Mcg) -> usize {
        let programs = self.0.len() / RACKS;
        rng.random_range(0..programs) * RACKS + other % RACKS
    }

    /// Returns a workload.
    pub(crate) fn get(&self, index: usize) -> &LibraryWorkload {
        &self.0[index]
    }
}

/// Creates the training sets of the placement model and of the monitor. The placement model has
/// counters with local memory. The monitor's model has counters with the memory of the placement.
pub(super) fn training_set(rng: &mut Pcg64Mcg) -> (Vec<Workload>, Vec<LabelledRun>) {
    let racks: Vec<[Memory; 2]> = (0..TRAINING_INPUTS).map(|_| draw_rack_memory(rng)).collect();
    let (mut before_launch, mut running) = (Vec::new(), Vec::new());
    for kernel in kernel_family() {
        for (input, [local, pool]) in (0..).zip(&racks) {
            let truth = run(&kernel.name, &kernel.program(input), [local, pool], rng);
            let mut workload = |counters: &Counters, slowdown: f64| Workload {
                program: kernel.name.clone(),
                counters: add_noise(counters, rng),
                slowdown,
            };
            before_launch.push(workload(&truth.local_counters, truth.on_pool.slowdown));
            for (run, pool_loads) in [(&truth.on_pool, 1.0), (&truth.split, truth.pool_share)] {
                running.extend((0..TRAINING_SAMPLES).map(|_| {
                    let workload = workload(&run.counters, run.slowdown);
                    LabelledRun::new(workload, pool_loads, truth.latency_ratio)
                }));
            }
        }
    }
    (before_launch, running)
}

/// Runs a program with local memory, entirely on the pool, and with a random part of its accesses
/// on the pool.
fn run(name: &str, program: &Program, [local, pool]: [&Memory; 2], rng: &mut Pcg64Mcg) -> LibraryWorkload {
    let pool_share = draw_log_uniform(POOL_SHARE_MIN, 1.0, rng);
    let others = [pool.clone(), Memory::split(local, pool, pool_share)];
    let (local_counters, runs) = measure_each(&SERVER_CORE, program, local, &others);
    let [on_pool, split] = runs.try_into().expect("there are two runs");
    let latency_ratio = pool.latency_ns(0.0) / local.latency_ns(0.0);
    LibraryWorkload { program: name.to_owned(), local_counters, on_pool, split, pool_share, latency_ratio }
}

/// Draws local and pool memory with loaded-latency curves of random height and steepness.
fn draw_rack_memory(rng: &mut Pcg64Mcg) -> [Memory; 2] {
    let idle_ns = rng.random_range(85.0..115.0);
    let gb_per_s = rng.random_range(6.0..10.0);
    let (latency_factor, bandwidth_factor) = (rng.random_range(1.8..2.8), rng.random_range(0.6..0.95));
    [(idle_ns, gb_per_s), (latency_factor * idle_ns, bandwidth_factor * gb_per_s)].map(
        |(idle_ns, gb_per_s)| {
            let steepness = rng.random_range(0.6..1.8);
            let mut memory = Memory::synthetic(idle_ns, gb_per_s);
            for (_, latency_ns) in &mut memory.curve {
                *latency_ns = idle_ns + steepness * (*latency_ns - idle_ns);
            }
            memory
        },
    )
}

/// Draws a number whose logarithm is uniformly distributed.
pub(super) fn draw_log_uniform(low: f64, high: f64, rng: &mut Pcg64Mcg) -> f64 {
    (rng.random_range(low.ln()..=high.ln())).exp()
}
