//! Results of the simulation, computed from the true slowdowns and the verdicts of all VMs.

use prediction::qos::{Placement, Verdict};
use rand::Rng;
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use units::{Fraction, Ns};

use super::{
    Parameters, SAMPLES,
    vm::{BaseRates, SimulatedVm},
};

/// Number of samples within which a harmed VM must be flagged.
const DETECTION_SAMPLES: u32 = 3;
/// Period of the budget, and of a flap.
const HOUR: Ns = Ns::secs(3600);

/// Harm and verdicts of one VM over time.
#[derive(Clone, Debug, Default)]
pub(super) struct VmHistory {
    harmed_since: Option<u32>,
    is_flagged: bool,
    is_flagged_in_time: bool,
    last_verdict: Verdict,
    /// Start of the latest period with the verdict `Migrate`.
    migrate_since: Option<u32>,
    /// Whether another verdict followed that period.
    has_cleared: bool,
    flaps: u32,
    /// Whether a migration was requested.
    pub(super) is_requested: bool,
}

impl VmHistory {
    /// Records the truth and the verdict of one sample.
    pub(super) fn record(&mut self, sample: u32, is_harmed: bool, verdict: Verdict) {
        if is_harmed && self.harmed_since.is_none() {
            self.harmed_since = Some(sample);
        }
        if verdict == Verdict::Migrate {
            self.is_flagged = true;
            self.is_flagged_in_time |=
                self.harmed_since.is_some_and(|since| sample < since + DETECTION_SAMPLES);
        }
        self.count_flaps(sample, verdict);
        self.last_verdict = verdict;
    }

    fn count_flaps(&mut self, sample: u32, verdict: Verdict) {
        let is_migrate = verdict == Verdict::Migrate;
        if is_migrate && self.last_verdict != Verdict::Migrate {
            let span = |since: u32| Ns(super::SAMPLE_INTERVAL.0 * u64::from(sample - since));
            let is_flap = self.has_cleared && self.migrate_since.is_some_and(|since| span(since) <= HOUR);
            self.flaps += u32::from(is_flap);
            (self.migrate_since, self.has_cleared) = (Some(sample), false);
        } else if verdict == Verdict::Fine && self.migrate_since.is_some() {
            self.has_cleared = true;
        }
    }

    /// Returns whether the VM was harmed early enough that it could be flagged in time.
    fn is_harmed(&self) -> bool {
        self.harmed_since.is_some_and(|since| since + DETECTION_SAMPLES <= SAMPLES)
    }
}

/// Independent check of the budget: at most the fraction X of the VMs, rounded up, in each hour.
#[derive(Clone, Debug)]
pub(super) struct BudgetChecker {
    limit: usize,
    sent: Vec<Ns>,
}

impl BudgetChecker {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the product is at most the number of VMs"
    )]
    pub(super) fn new(x: Fraction, vms: usize) -> Self {
        Self { limit: (x.get() * vms as f64).ceil() as usize, sent: Vec::new() }
    }

    pub(super) fn record(&mut self, now: Ns) {
        self.sent.push(now);
    }

    /// Returns the number of requests beyond the limit of the hour before them.
    pub(super) fn exceeded(&self) -> usize {
        let is_excess = |index: &usize| {
            let first = index.checked_sub(self.limit);
            first.is_some_and(|first| self.sent[*index].since(self.sent[first]) < HOUR)
        };
        (0..self.sent.len()).filter(is_excess).count()
    }
}

/// Fractions of flagged VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Flagged {
    /// Harmed VMs that were flagged within three samples of the start of the harm, of all harmed
    /// VMs.
    pub flagged_harmed: f64,
    /// VMs that were flagged at any time, of all VMs that were never harmed.
    pub flagged_unharmed: f64,
}

/// Result of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Seed of the simulation.
    pub seed: u64,
    /// Number of VMs.
    pub vms: u32,
    /// Performance degradation margin.
    pub pdm: f64,
    /// X: allowed fraction of misplaced VMs, and hourly budget of migrations.
    pub x: f64,
    /// Number of VMs that are placed entirely on the pool.
    pub entirely_on_pool: u32,
    /// Number of VMs that are placed entirely on the pool or access their pool node.
    pub monitored: u32,
    /// Number of VMs that were slowed down beyond the margin at any time.
    pub harmed: u32,
    /// Results of the monitor.
    #[serde(flatten)]
    pub monitor: Flagged,
    /// Results of a monitor that knows only the base rates of harmed VMs.
    pub base_rate: Flagged,
    /// Number of migration requests.
    pub requests: u32,
    /// Number of requests beyond the budget.
    pub budget_exceeded: u32,
    /// Number of sequences Migrate, Fine, Migrate within an hour.
    pub flaps: u32,
}

impl Report {
    pub(super) fn new(
        parameters: Parameters,
        vms: &[SimulatedVm],
        histories: &[VmHistory],
        checker: &BudgetChecker,
        base_rates: BaseRates,
        rng: &mut Pcg64Mcg,
    ) -> Self {
        let count = |is_counted: &dyn Fn(&SimulatedVm, &VmHistory) -> bool| {
            let counted = vms.iter().zip(histories).filter(|(vm, history)| is_counted(vm, history)).count();
            u32::try_from(counted).expect("there are fewer VMs than u32::MAX")
        };
        let share = |part: u32, whole: u32| f64::from(part) / f64::from(whole.max(1));
        let harmed = count(&|_, history| history.is_harmed());
        let unharmed = count(&|_, history| history.harmed_since.is_none());
        let monitor = Flagged {
            flagged_harmed: share(
                count(&|_, history| history.is_harmed() && history.is_flagged_in_time),
                harmed,
            ),
            flagged_unharmed: share(
                count(&|_, history| history.harmed_since.is_none() && history.is_flagged),
                unharmed,
            ),
        };
        let (mut random_harmed, mut random_unharmed) = (0, 0);
        for (vm, history) in vms.iter().zip(histories) {
            let rate = match vm.placement {
                _ if !vm.is_monitored() => 0.0,
                Placement::EntirelyOnPool => base_rates.on_pool,
                Placement::Split => base_rates.overpredicted,
            };
            let is_flagged = rng.random_bool(rate);
            random_harmed += u32::from(is_flagged && history.is_harmed());
            random_unharmed += u32::from(is_flagged && history.harmed_since.is_none());
        }
        Self {
            seed: parameters.seed,
            vms: parameters.vms,
            pdm: parameters.pdm.get(),
            x: parameters.x.get(),
            entirely_on_pool: count(&|vm, _| vm.placement == Placement::EntirelyOnPool),
            monitored: count(&|vm, _| vm.is_monitored()),
            harmed,
            monitor,
            base_rate: Flagged {
                flagged_harmed: share(random_harmed, harmed),
                flagged_unharmed: share(random_unharmed, unharmed),
            },
            requests: count(&|_, history| history.is_requested),
            budget_exceeded: u32::try_from(checker.exceeded()).expect("there are few requests"),
            flaps: histories.iter().map(|history| history.flaps).sum(),
        }
    }
}
