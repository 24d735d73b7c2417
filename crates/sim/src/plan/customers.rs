//! Modelled customers of a trace: the memory that their VMs touch, and the slowdown of their
//! workloads by pool memory.
//!
//! Traces do not contain these values. A customer therefore has the usage of one owner of a usage
//! table, and a workload of the processor model. The untouched fraction of a VM's memory is drawn
//! from all VMs of this owner. A batch of VMs, or a VM without an owner, belongs to a random customer.
//! VMs with a stable owner, such as an application, belong to a customer of their own with random
//! usage. The model of latency sensitivity is trained on labelled runs of the same workloads, as if the
//! operator had run the customers' programs (Pond, section 6.4.1). All draws are hashes of the seed and of
//! a number, so that they do not depend on each other. The slowdown of a VM that touches its pool memory does
//! not depend on how much it touches.

use std::{
    collections::BTreeMap,
    hash::{Hash as _, Hasher as _},
};

use prediction::{
    frigid::{Groups, backtest::VmSample},
    sensitivity::{Model, backtest::EvaluationError},
};
use rand::SeedableRng as _;
use rand_pcg::Pcg64Mcg;
use rustc_hash::FxHasher;
use units::Fraction;

use super::input::PlannedVm;
use crate::{processor::add_noise, qos::workloads::WorkloadLibrary};

/// Customers, with a profile of usage and a workload for each owner of the usage tables.
#[derive(Clone, Debug)]
pub struct Customers {
    profiles: Vec<Profile>,
    model: Model,
    overpredicted_exceeds: Fraction,
    seed: u64,
    has_stable_owners: bool,
}

/// Usage and workload of one or more customers.
#[derive(Clone, Debug)]
struct Profile {
    /// Untouched fractions of the VMs of an owner, at least one.
    untouched: Vec<f64>,
    /// Predicted probability of a slowdown beyond the margin.
    slowdown_probability: f64,
    /// Relative slowdown with all memory on the pool.
    slowdown_on_pool: f64,
    /// Relative slowdown if the VM touches a part of its pool memory.
    slowdown_split: f64,
}

/// True behaviour of a VM, which is known only after it has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmTruth {
    /// Memory that the VM never touches, in MiB.
    pub untouched_mib: u64,
    /// Relative slowdown with all memory on the pool.
    pub slowdown_on_pool: f64,
    /// Relative slowdown if the VM touches a part of its pool memory.
    pub slowdown_split: f64,
}

impl VmTruth {
    /// Returns whether the VM touches its pool memory, because a part of it was not frigid.
    pub fn touches_pool(&self, pool_mib: u64) -> bool {
        pool_mib > self.untouched_mib
    }

    /// Returns whether a VM with local and pool memory is slowed down beyond the margin.
    pub fn is_slowed_by_split(&self, pool_mib: u64, pdm: Fraction) -> bool {
        self.touches_pool(pool_mib) && self.slowdown_split > pdm.get()
    }

    /// Returns whether a VM on pool memory only is slowed down beyond the margin.
    pub fn is_slowed_on_pool(&self, pdm: Fraction) -> bool {
        self.slowdown_on_pool > pdm.get()
    }
}

/// Error while creating customers.
#[derive(Debug, thiserror::Error)]
pub enum CustomersError {
    /// The usage tables have no VM with a known owner and a reliable outcome.
    #[error("the usage tables have no reliable VM of a known owner: must have at least one")]
    NoUsage,
    /// The model of latency sensitivity cannot be trained.
    #[error(transparent)]
    Sensitivity(#[from] EvaluationError),
}

/// Purpose of a draw, so that draws for one number are independent.
#[derive(Clone, Copy, Debug, Hash)]
enum Draw {
    Profile,
    Untouched,
}

impl Customers {
    /// Creates the customers from ended VMs. `has_stable_owners` is set if the owners in the trace are
    /// customers or applications instead of batches.
    ///
    /// # Errors
    /// [`CustomersError`] if no VM has a known owner and a reliable outcome, or if all or none of the
    /// modelled workloads are slowed down beyond the margin.
    pub fn new(
        usage: &[VmSample],
        pdm: Fraction,
        has_stable_owners: bool,
        seed: u64,
    ) -> Result<Self, CustomersError> {
        let mut by_owner: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for sample in usage.iter().filter(|sample| sample.is_trusted) {
            if let Some(owner) = sample.request.groups.owner() {
                by_owner.entry(owner).or_default().push(sample.outcome.untouched.get());
            }
        }
        if by_owner.is_empty() {
            return Err(CustomersError::NoUsage);
        }
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let library = WorkloadLibrary::new(&mut rng);
        let model = Model::train(&library.labelled(&mut rng), pdm, seed)?;
        let overpredicted_exceeds = library.fraction(|workload| workload.split.slowdown > pdm.get());
        let profile = |untouched| {
            let workload = library.get(library.draw(&mut rng));
            Profile {
                untouched,
                slowdown_probability: model.probability(&add_noise(&workload.local_counters, &mut rng)),
                slowdown_on_pool: workload.on_pool.slowdown,
                slowdown_split: workload.split.slowdown,
            }
        };
        let profiles = by_owner.into_values().map(profile).collect();
        Ok(Self { profiles, model, overpredicted_exceeds, seed, has_stable_owners })
    }

    /// Returns the number of profiles: owners of the usage tables.
    pub fn profiles(&self) -> usize {
        self.profiles.len()
    }

    /// Returns the model of latency sensitivity.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the fraction of workloads that are slowed down beyond the margin if they touch a part of
    /// their pool memory: r of Eq. 1.
    pub fn overpredicted_exceeds(&self) -> Fraction {
        self.overpredicted_exceeds
    }

    /// Returns the groups of similar VMs to which a VM belongs: its customer with VMs of its size, and
    /// its size. `sequence` is the number of VMs that arrived before.
    pub fn groups(&self, vm: &PlannedVm, sequence: u64) -> Groups {
        let size = format!("{} cores {} MiB", vm.cores, vm.mib);
        let customer = match vm.owner.filter(|_| self.has_stable_owners) {
            Some(owner) => format!("owner {owner}, {size}"),
            None => format!("profile {}, {size}", self.profile_index(vm, sequence)),
        };
        Groups { key: customer, kind: size, ..Groups::default() }
    }

    /// Returns the predicted probability that pool memory slows a VM down beyond the margin.
    pub fn slowdown_probability(&self, vm: &PlannedVm, sequence: u64) -> f64 {
        self.profile(vm, sequence).slowdown_probability
    }

    /// Returns the true behaviour of a VM. The touched memory is that of the trace, if it has it.
    pub fn truth(&self, vm: &PlannedVm, sequence: u64) -> VmTruth {
        let profile = self.profile(vm, sequence);
        let drawn = profile.untouched[self.draw(Draw::Untouched, sequence, profile.untouched.len())];
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of MiB")]
        let drawn_mib = (drawn * vm.mib as f64) as u64;
        VmTruth {
            untouched_mib: vm.touched_mib.map_or(drawn_mib, |touched| vm.mib - touched),
            slowdown_on_pool: profile.slowdown_on_pool,
            slowdown_split: profile.slowdown_split,
        }
    }

    fn profile(&self, vm: &PlannedVm, sequence: u64) -> &Profile {
        &self.profiles[self.profile_index(vm, sequence)]
    }

    fn profile_index(&self, vm: &PlannedVm, sequence: u64) -> usize {
        // Owners and VMs without an owner have different numbers.
        let number = vm.owner.map_or(sequence << 1, |owner| u64::from(owner) << 1 | 1);
        self.draw(Draw::Profile, number, self.profiles.len())
    }

    /// Draws a number below `count`.
    fn draw(&self, purpose: Draw, number: u64, count: usize) -> usize {
        let mut hasher = FxHasher::default();
        (self.seed, purpose, number).hash(&mut hasher);
        #[expect(clippy::cast_possible_truncation, reason = "the remainder is less than a usize")]
        let index = (mix(hasher.finish()) % count as u64) as usize;
        index
    }
}

/// Mixes the bits of a number (the finalizer of SplitMix64).
const fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
pub(super) mod tests {
    use prediction::sensitivity::{COUNTER_NAMES, Workload};
    use units::Ns;

    use super::*;

    fn pdm(margin: f64) -> Fraction {
        Fraction::new(margin).unwrap()
    }

    /// Returns two customers: the VMs of the first leave 25 % of their memory untouched, those of the
    /// second 50 % or 75 %.
    pub(in crate::plan) fn customers(has_stable_owners: bool) -> Customers {
        let workload = |n: u32| Workload {
            program: format!("p{n}"),
            counters: [f64::from(n); COUNTER_NAMES.len()],
            slowdown: f64::from(n % 2),
        };
        let workloads: Vec<Workload> = (0..20).map(workload).collect();
        let profile = |untouched: &[f64]| Profile {
            untouched: untouched.to_vec(),
            slowdown_probability: 0.1,
            slowdown_on_pool: 0.2,
            slowdown_split: 0.1,
        };
        Customers {
            profiles: vec![profile(&[0.25]), profile(&[0.5, 0.75])],
            model: Model::train(&workloads, pdm(0.05), 1).unwrap(),
            overpredicted_exceeds: pdm(0.3),
            seed: 7,
            has_stable_owners,
        }
    }

    fn vm(owner: Option<u32>) -> PlannedVm {
        PlannedVm {
            arrive: Ns::ZERO,
            depart: Ns::NEVER,
            cores: 2,
            mib: 1000,
            touched_mib: None,
            owner,
            socket: None,
        }
    }

    #[test]
    fn vms_of_a_batch_have_one_customer_and_draw_its_usage() {
        let customers = customers(false);
        let mut profiles = [0, 0];
        for batch in 0..200 {
            let untouched =
                |n: u32| customers.truth(&vm(Some(batch)), u64::from(4 * batch + n)).untouched_mib;
            let vms: Vec<u64> = (0..4).map(untouched).collect();
            let is_first = vms.iter().all(|untouched| *untouched == 250);
            assert!(is_first || vms.iter().all(|untouched| [500, 750].contains(untouched)), "{vms:?}");
            profiles[usize::from(!is_first)] += 1;
        }
        assert!(profiles.iter().all(|batches| (80..=120).contains(batches)), "{profiles:?}");
        let touched = PlannedVm { touched_mib: Some(900), ..vm(Some(1)) };
        assert_eq!(customers.truth(&touched, 1).untouched_mib, 100);
    }

    #[test]
    fn stable_owners_have_a_history_of_their_own() {
        let customer = |is_stable, owner| customers(is_stable).groups(&vm(owner), 3).key;
        assert_eq!(customer(true, Some(9)), "owner 9, 2 cores 1000 MiB");
        assert!(customer(false, Some(9)).starts_with("profile "));
        assert!(customer(true, None).starts_with("profile "));
        let empty = Customers::new(&[], pdm(0.05), false, 7);
        assert!(matches!(empty, Err(CustomersError::NoUsage)));
    }

    #[test]
    fn vm_is_slowed_only_if_it_touches_its_pool_memory() {
        let truth = VmTruth { untouched_mib: 500, slowdown_on_pool: 0.1, slowdown_split: 0.06 };
        assert!(!truth.is_slowed_by_split(500, pdm(0.05)) && truth.is_slowed_by_split(501, pdm(0.05)));
        assert!(!truth.is_slowed_by_split(501, pdm(0.06)));
        assert!(truth.is_slowed_on_pool(pdm(0.09)) && !truth.is_slowed_on_pool(pdm(0.1)));
    }
}
