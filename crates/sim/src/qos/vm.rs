//! A simulated VM: its placement, the truth about its slowdown over time, and its noisy samples.

use prediction::{
    combination::{CombinedPoint, FrigidPoint, InsensitivityPoint, VmMix, choose_combination},
    qos::{AccessedShare, Judge, LoadSource, Placement, PoolLoads, Sample},
    sensitivity::{COUNTER_NAMES, Cutoff, Model, counter_range},
};
use rand::Rng;
use rand_pcg::Pcg64Mcg;
use units::{Fraction, Ns};

use super::{
    Parameters, SAMPLES,
    workloads::{LibraryWorkload, WorkloadLibrary, draw_log_uniform},
};
use crate::processor::{Counters, add_noise};

/// Fraction of VMs with enough history to predict their sensitivity (Pond, section 6.1).
const HISTORY: f64 = 0.8;
/// Probability that an overpredicted VM is slowed down beyond the margin (Pond, section 6.5).
const OVERPREDICTED_EXCEEDS: f64 = 0.25;
/// Operating point of the prediction of frigid memory (Pond, section 6.4): overpredicted VMs, and
/// memory on the pool.
const FRIGID_POINT: (f64, f64) = (0.04, 0.20);
/// Fraction of VMs that change their workload once.
const CHANGING_SHARE: f64 = 0.1;
/// Number of pages of the pool node in each sample.
const SAMPLED_PAGES: u32 = 200;
/// Largest fraction of an idle pool node that the guest's kernel accesses in an interval.
const KERNEL_ACCESSED_SHARE_MAX: f64 = 0.005;
/// Smallest fraction of the pool node that an overpredicted VM accesses in an interval.
const ACCESSED_SHARE_MIN: f64 = 0.05;
/// Probability that a VM with correctly predicted frigid memory touches its pool node once.
const TOUCHED_ONCE: f64 = 0.2;
/// Probability that counters are missing in a sample.
const COUNTERS_MISSING: f64 = 0.01;
/// Largest relative error of a VM's counters that is the same in all samples.
const COUNTER_BIAS_MAX: f64 = 0.05;
/// Largest relative error of the latency ratio that a host reports.
const LATENCY_ERROR_MAX: f64 = 0.05;
/// Largest relative error of the pool loads in a sample.
const POOL_LOADS_ERROR_MAX: f64 = 0.1;

/// Access of a VM to its pool node.
#[derive(Clone, Copy, Debug)]
enum PoolAccess {
    /// Only the guest's kernel accesses the pool node, except for one sample.
    Idle {
        /// Sample in which the workload touches the pool node once.
        touched_at: Option<u32>,
    },
    /// The workload accesses a part of the pool node from this sample on.
    Accessed { since: u32, share: f64 },
}

/// Simulated VM.
#[derive(Clone, Debug)]
pub(super) struct SimulatedVm {
    /// Judge under test.
    pub(super) judge: Judge,
    /// Placement of the VM's memory.
    pub(super) placement: Placement,
    /// Whether the VM has migrated to local memory.
    pub(super) is_migrated: bool,
    access: PoolAccess,
    /// Index of the workload from the start, and of the workload from the sample `changes_at` on.
    workloads: [usize; 2],
    changes_at: u32,
    counter_bias: Counters,
    /// Relative error of the pool loads that is the same in all samples.
    pool_loads_bias: f64,
}

impl SimulatedVm {
    /// Returns whether the VM is monitored at any time: it is entirely on the pool or its workload
    /// accesses its pool node.
    pub(super) fn is_monitored(&self) -> bool {
        self.placement == Placement::EntirelyOnPool || matches!(self.access, PoolAccess::Accessed { .. })
    }

    fn workload<'a>(&self, library: &'a WorkloadLibrary, sample: u32) -> &'a LibraryWorkload {
        library.get(self.workloads[usize::from(sample >= self.changes_at)])
    }

    /// Returns whether the workload accesses the pool in a sample.
    fn uses_pool(&self, sample: u32) -> bool {
        match self.access {
            _ if self.placement == Placement::EntirelyOnPool => true,
            PoolAccess::Accessed { since, .. } => since <= sample,
            PoolAccess::Idle { .. } => false,
        }
    }

    /// Returns the true slowdown in a sample, relative to local memory.
    pub(super) fn true_loss(&self, library: &WorkloadLibrary, sample: u32) -> f64 {
        let workload = self.workload(library, sample);
        match self.placement {
            Placement::EntirelyOnPool => workload.on_pool.slowdown,
            Placement::Split if self.uses_pool(sample) => workload.split.slowdown,
            Placement::Split => 0.0,
        }
    }

    /// Returns the sample that the host reports.
    pub(super) fn observe(
        &self,
        library: &WorkloadLibrary,
        sample: u32,
        at: Ns,
        rng: &mut Pcg64Mcg,
    ) -> Sample {
        let workload = self.workload(library, sample);
        let truth = match self.placement {
            Placement::EntirelyOnPool => &workload.on_pool.counters,
            Placement::Split if self.uses_pool(sample) => &workload.split.counters,
            Placement::Split => &workload.local_counters,
        };
        let is_measured = !rng.random_bool(COUNTERS_MISSING);
        let counters = is_measured.then(|| {
            let noisy = add_noise(truth, rng);
            // The manager rejects larger values.
            let limited = |index: usize, value: f64| value.min(*counter_range(index).end());
            std::array::from_fn(|index| limited(index, noisy[index] * self.counter_bias[index]))
        });
        let accessed = self.accessed_share(sample, rng);
        let pages = (0..SAMPLED_PAGES).filter(|_| rng.random_bool(accessed)).count();
        let pages = u32::try_from(pages).expect("the number of sampled pages is small");
        let accessed = AccessedShare::from_pages(pages, SAMPLED_PAGES).expect("the pages were sampled");
        let pool_loads = is_measured.then(|| self.pool_loads(workload, sample, rng));
        Sample { at, accessed: Some(accessed), touched: None, counters, pool_loads }
    }

    /// Returns the measured fraction of the loads that the pool serves in a sample.
    fn pool_loads(&self, workload: &LibraryWorkload, sample: u32, rng: &mut Pcg64Mcg) -> PoolLoads {
        let truth = if self.uses_pool(sample) { workload.pool_share } else { 0.0 };
        let measured = truth * self.pool_loads_bias * draw_error(POOL_LOADS_ERROR_MAX, rng);
        let share = Fraction::new(measured.min(1.0)).expect("a share of at most 1 is a fraction");
        PoolLoads { share, source: LoadSource::Events }
    }

    /// Returns the true fraction of the pool node that is accessed in a sample.
    fn accessed_share(&self, sample: u32, rng: &mut Pcg64Mcg) -> f64 {
        match self.access {
            PoolAccess::Accessed { since, share } if since <= sample => share,
            PoolAccess::Idle { touched_at: Some(touched_at) } if touched_at == sample => 1.0,
            PoolAccess::Accessed { .. } | PoolAccess::Idle { .. } => {
                rng.random_range(0.0..KERNEL_ACCESSED_SHARE_MAX)
            }
        }
    }
}

/// Draws a factor that differs from 1 by at most `max`.
fn draw_error(max: f64, rng: &mut Pcg64Mcg) -> f64 {
    1.0 + rng.random_range(-max..max)
}

/// Generator of VMs. It places VMs with the predictions of Pond before they start.
pub(super) struct VmGenerator<'a> {
    placement_model: &'a Model,
    point: CombinedPoint,
    /// Highest predicted probability of a VM that is placed entirely on the pool.
    cutoff: f64,
    base_rates: BaseRates,
}

/// Fractions of harmed VMs, as known before launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BaseRates {
    /// Among the VMs that are placed entirely on the pool.
    pub(super) on_pool: f64,
    /// Among the VMs with overpredicted frigid memory.
    pub(super) overpredicted: f64,
}

impl<'a> VmGenerator<'a> {
    pub(super) fn new(placement_model: &'a Model, parameters: Parameters) -> Self {
        let fraction = |share: f64| Fraction::new(share).expect("a share is a fraction");
        let cutoffs = placement_model.cutoffs();
        let points: Vec<InsensitivityPoint> = cutoffs.iter().map(Cutoff::operating_point).collect();
        let frigid = FrigidPoint { op: fraction(FRIGID_POINT.0), share: fraction(FRIGID_POINT.1) };
        let mix = VmMix { history: fraction(HISTORY), exceeds: fraction(OVERPREDICTED_EXCEEDS) };
        let point = choose_combination(&points, &[frigid], mix, parameters.x);
        let is_chosen = |cutoff: &&Cutoff| cutoff.operating_point() == point.insensitive;
        let cutoff = cutoffs.iter().find(is_chosen).map_or(f64::NEG_INFINITY, |cutoff| cutoff.at_most);
        let InsensitivityPoint { fp, placed } = point.insensitive;
        let on_pool = if placed.get() > 0.0 { fp.get() / placed.get() } else { 0.0 };
        let base_rates = BaseRates { on_pool, overpredicted: OVERPREDICTED_EXCEEDS };
        Self { placement_model, point, cutoff, base_rates }
    }

    pub(super) const fn base_rates(&self) -> BaseRates {
        self.base_rates
    }

    /// Draws a VM and places it.
    pub(super) fn generate(&self, library: &WorkloadLibrary, rng: &mut Pcg64Mcg) -> SimulatedVm {
        let first = library.draw(rng);
        let placement = self.place(library.get(first), rng);
        let (changes_at, second) = if rng.random_bool(CHANGING_SHARE) {
            (rng.random_range(0..SAMPLES), library.draw_on_same_rack(first, rng))
        } else {
            (SAMPLES, first)
        };
        let latency_ratio = library.get(first).latency_ratio * draw_error(LATENCY_ERROR_MAX, rng);
        let mut judge = Judge::new(placement);
        judge.set_latency_ratio(latency_ratio);
        SimulatedVm {
            judge,
            placement,
            is_migrated: false,
            access: self.draw_access(placement, rng),
            workloads: [first, second],
            changes_at,
            counter_bias: [(); COUNTER_NAMES.len()].map(|()| draw_error(COUNTER_BIAS_MAX, rng)),
            pool_loads_bias: draw_error(COUNTER_BIAS_MAX, rng),
        }
    }

    fn place(&self, workload: &LibraryWorkload, rng: &mut Pcg64Mcg) -> Placement {
        let counters = add_noise(&workload.local_counters, rng);
        let has_history = rng.random_bool(HISTORY);
        if has_history && self.placement_model.probability(&counters) <= self.cutoff {
            Placement::EntirelyOnPool
        } else {
            Placement::Split
        }
    }

    fn draw_access(&self, placement: Placement, rng: &mut Pcg64Mcg) -> PoolAccess {
        let is_overpredicted = rng.random_bool(self.point.frigid.op.get());
        if placement == Placement::EntirelyOnPool || is_overpredicted {
            let since = if rng.random_bool(0.5) { 0 } else { rng.random_range(0..SAMPLES) };
            return PoolAccess::Accessed { since, share: draw_log_uniform(ACCESSED_SHARE_MIN, 1.0, rng) };
        }
        let touched_at = rng.random_bool(TOUCHED_ONCE).then(|| rng.random_range(0..SAMPLES));
        PoolAccess::Idle { touched_at }
    }
}
