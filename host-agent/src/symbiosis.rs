//! Symbiosis on this host: in every epoch, measurements of tenants become utilities, and utilities
//! become shares of local memory and of the link. `fairness` computes the shares; `host` accesses
//! files of the kernel.
//!
//! Shares stay unchanged while an input is missing: an unreadable tenant, a limit that cannot be
//! set, a weight that leaves a tenant less than its guarantee. A tenant that ended is no missing
//! input. A starting agent continues from the stored shares, and changes nothing before it has
//! measured an epoch.

mod enforce;
mod kept;
mod meter;
mod report;
mod run;
mod sight;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fairness::{
    epoch::{AppliedShares, Change, Decision, EpochAllocator, Member, WeightedShare},
    market::{MarketError, Share, Supply},
    profile::TenantUtility,
};
use pool::agent::VmRecord;
use units::{Bytes, Name, limits::TENANTS_PER_HOST_MAX};

use self::{
    enforce::{Advice, Enforcer, Order, Swap, enforce},
    meter::{Measured, Meter},
    sight::Sight,
};
pub use self::{
    kept::{Kept, KeptError},
    report::{Book, Certified, Report, State, TenantReport},
    run::{Running, Start},
};
use crate::{
    config::symbiosis::{Enforce, Symbiosis as Config},
    host::{
        cgroup::{Cgroups, Counters},
        process::{self, ProcessError},
        remote::{Remote, RemoteError},
        sysfs::SysfsError,
        watched::Watched,
    },
    records::{self, RecordsError},
};

/// Why symbiosis does not start.
#[derive(Debug, thiserror::Error)]
pub enum SymbiosisError {
    /// The device that remote memory is on.
    #[error("symbiosis.remote")]
    Remote(#[from] RemoteError),
    /// Shares of the previous epoch.
    #[error(transparent)]
    Kept(#[from] KeptError),
    /// This machine's boot.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Paths of devices and swap.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// As `/sys`.
    pub sys: PathBuf,
    /// As `/proc/swaps`.
    pub swaps: PathBuf,
}

/// State of Symbiosis on this host.
#[derive(Debug)]
pub struct Symbiosis {
    config: Config,
    kernel: Kernel,
    cgroups: Cgroups,
    remote: Remote,
    sight: Sight,
    meters: BTreeMap<Name, Meter>,
    epochs: EpochAllocator,
    kept: Kept,
    runtime_dir: PathBuf,
    book: Arc<Book>,
    number: u64,
}

/// A cgroup that may be a tenant, as an epoch ends.
struct Candidate {
    name: Name,
    /// Of a VM that runs in it, if one does, whether it is pinned, and its local memory.
    vm: Option<(bool, Bytes)>,
    counters: Counters,
    /// Bandwidth limit of a tenant in MB/s, if any.
    limit: Option<f64>,
}

/// Participating tenant with its settings.
struct Taking {
    name: Name,
    weight: f64,
    enforce: Enforce,
    least: Share,
    measured: Measured,
    most: Option<Bytes>,
}

/// Why shares stay as they are.
struct Missing(String);

impl Symbiosis {
    /// Continues from the stored shares.
    ///
    /// # Errors
    /// The remote device is unusable, or the stored shares are invalid.
    pub fn open(
        config: Config,
        runtime_dir: &Path,
        kernel: Kernel,
        book: Arc<Book>,
    ) -> Result<Self, SymbiosisError> {
        let remote = Remote::open(&config.remote, &kernel.sys)?;
        Self::with(remote, config, runtime_dir, kernel, book)
    }

    fn with(
        remote: Remote,
        config: Config,
        runtime_dir: &Path,
        kernel: Kernel,
        book: Arc<Book>,
    ) -> Result<Self, SymbiosisError> {
        let kept = Kept::at(runtime_dir);
        let epochs = EpochAllocator::resume(kept.load()?);
        let cgroups = Cgroups::at(&config.cgroups);
        Ok(Self {
            sight: Sight::open(&kernel.sys, &cgroups, config.epoch.as_duration(), &kept)?,
            cgroups,
            remote,
            meters: BTreeMap::new(),
            epochs,
            kept,
            runtime_dir: runtime_dir.to_owned(),
            book,
            number: 0,
            config,
            kernel,
        })
    }

    /// Starts an epoch: page accesses are monitored where possible.
    pub fn begin(&mut self) {
        self.sight.begin();
    }

    /// Ends an epoch: decides, enforces, stores and reports shares.
    pub fn end(&mut self, now: Duration) -> Report {
        self.number += 1;
        // Counters first, because reading the access monitor takes time.
        let candidates = self.candidates();
        let seen = self.seen(candidates.as_deref().unwrap_or_default());
        let mut tenants = Vec::new();
        let ended = candidates.and_then(|candidates| self.decide(now, candidates, seen, &mut tenants));
        let report = match ended {
            Ok((state, certificate)) => self.report(state, String::new(), tenants, certificate),
            Err(Missing(why)) => {
                tracing::warn!(why, "shares stay as they are");
                self.report(State::Kept, why, self.as_they_were(), None)
            }
        };
        self.book.put(report.clone());
        report
    }

    /// Stops monitoring; limits remain.
    fn leave(&mut self) {
        self.sight.leave();
    }

    /// Returns the page accesses since the start of the epoch.
    fn seen(&mut self, candidates: &[Candidate]) -> BTreeMap<Name, Watched> {
        let has = |one: &Candidate| (one.name.clone(), one.counters.everywhere());
        let no_vm = candidates.iter().filter(|one| one.vm.is_none());
        let tenants: Vec<(Name, Bytes)> = no_vm.map(has).collect();
        self.sight.end(&tenants)
    }

    fn decide(
        &mut self,
        now: Duration,
        candidates: Vec<Candidate>,
        mut seen: BTreeMap<Name, Watched>,
        told: &mut Vec<TenantReport>,
    ) -> Result<(State, Option<Certified>), Missing> {
        self.meters.retain(|name, _| candidates.iter().any(|candidate| candidate.name == *name));
        let (miss, link) = (self.remote.read_s(), self.config.supply.bandwidth_mb_s as f64);
        let (mut taking, mut missing) = (Vec::new(), None);
        for Candidate { name, vm, counters, limit } in candidates {
            let meter = self.meters.entry(name.clone()).or_default();
            let period =
                meter::Period { now, miss, limit: limit.map_or(link, |limit| limit.min(link)), link };
            match meter.measure(counters, seen.remove(&name), &period) {
                Ok(Some(measured)) => taking.push(self.taking(name, vm, counters, measured)),
                Ok(None) => {
                    let enforce = self.enforces(&name, vm.is_some());
                    told.push(TenantReport::new(&name, enforce, "its first epoch is measured only"));
                }
                // The others are measured nevertheless, so that the next epoch begins now for all
                // tenants.
                Err(error) => missing = missing.or(Some(Missing(format!("{name}: {error}")))),
            }
        }
        missing.map_or(Ok(()), Err)?;
        if taking.is_empty() {
            return Err(Missing("no tenant has been measured for an epoch".to_owned()));
        }
        let (decision, before) = self.decided(&taking, told)?;
        let done = self.done(&taking, &decision, told);
        if done.is_err() {
            let kept = before.as_ref().map_or_else(|| self.kept.forget(), |before| self.kept.save(before));
            self.epochs.rollback(before);
            kept.map_err(|error| Missing(units::chain(&error)))?;
        }
        done?;
        let (state, way) = match decision.change {
            Change::Set { step_fraction: way } => (State::Set, way),
            Change::Unchanged => (State::Held, 0.0),
        };
        let worst_off = taking[decision.certificate.worst_off].name.clone();
        Ok((state, Some(Certified { certificate: decision.certificate, way, worst_off })))
    }

    /// Returns participating cgroups: memory of pinned VMs is not moved.
    fn candidates(&self) -> Result<Vec<Candidate>, Missing> {
        let missing = |error: &dyn std::error::Error| Missing(units::chain(error));
        self.check_swap()?;
        let names = self.cgroups.names().map_err(|error| missing(&error))?;
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(Missing(format!("{} tenants: there may be {TENANTS_PER_HOST_MAX}", names.len())));
        }
        let vms = self.vms().map_err(|error| missing(&error))?;
        let mut candidates = Vec::new();
        for name in &names {
            let Ok(named) = Name::new(name) else {
                tracing::warn!(cgroup = name, "is no tenant: its name is none");
                continue;
            };
            match self.candidate(named, &vms) {
                Err(_) if !self.cgroups.is_there(name) => {}
                Err(error) => return Err(missing(&error)),
                Ok(candidate) => candidates.extend(candidate),
            }
        }
        Ok(candidates)
    }

    /// A cgroup that may be a tenant; nothing, if a pinned VM runs in it.
    fn candidate(&self, name: Name, vms: &[VmRecord]) -> Result<Option<Candidate>, SysfsError> {
        let counters = self.cgroups.counters(name.as_str(), self.remote.number())?;
        // Limits that cannot be read cannot be set either, which is reported then.
        let limits = self.cgroups.limits(name.as_str(), self.remote.number()).unwrap_or_default();
        let limit = limits.read.into_iter().chain(limits.written).min().map(|bytes| bytes as f64 / 1e6);
        let processes = self.cgroups.processes(name.as_str())?;
        let vm = vms.iter().find(|vm| processes.contains(&vm.process.pid));
        let vm = vm.map(|vm| (vm.pinned, vm.local));
        let is_pinned = matches!(vm, Some((true, _)));
        Ok((!is_pinned).then_some(Candidate { name, vm, counters, limit }))
    }

    /// Returns VMs with running processes, including VMs in an unknown state.
    fn vms(&self) -> Result<Vec<VmRecord>, RecordsError> {
        let lives = |record: &VmRecord| !matches!(process::Watched::open(&record.process), Ok(None));
        Ok(records::noted(&self.runtime_dir)?.into_iter().filter(lives).collect())
    }

    /// A limit on an unused device would reclaim pages without a place for them.
    fn check_swap(&self) -> Result<(), Missing> {
        let swaps = std::fs::read_to_string(&self.kernel.swaps);
        let swaps =
            swaps.map_err(|error| Missing(format!("read {}: {error}", self.kernel.swaps.display())))?;
        if self.remote.is_swap(&swaps) {
            return Ok(());
        }
        Err(Missing(format!("symbiosis.remote: {} is not in use as swap", self.remote.path().display())))
    }

    fn taking(
        &self,
        name: Name,
        vm: Option<(bool, Bytes)>,
        counters: Counters,
        measured: Measured,
    ) -> Taking {
        let said = self.config.tenants.get(&name);
        let weight = self.weight(&name).or(said.map(|one| one.weight)).unwrap_or(1.0);
        // A guest's declared local node is never shrunk.
        let of_vm = vm.map_or(0, |(_, local)| local.get().div_ceil(Bytes::mib(1).get()));
        let memory_mib = said.map_or(0, |one| one.least_mib).max(of_vm);
        let enforce = self.enforces(&name, vm.is_some());
        let least = Share { memory_mib, bandwidth_mb_s: 0 };
        Taking { name, weight, enforce, least, measured, most: counters.most }
    }

    /// Returns the enforcement of a tenant's share: nothing takes a VM's memory away.
    fn enforces(&self, name: &Name, is_vm: bool) -> Enforce {
        let said = self.config.tenants.get(name).map_or(self.config.enforce, |one| one.enforce);
        if is_vm { Enforce::Tiered } else { said }
    }

    /// A tenant's weight by the manager's word; until there is one, as it was before the agent started.
    fn weight(&self, name: &Name) -> Option<f64> {
        match self.book.weights() {
            Some(weights) => weights.get(name).copied(),
            None => Some(self.epochs.applied()?.tenants.get(name.as_str())?.weight),
        }
    }

    /// Changes of limits, with the previous shares.
    fn decided(
        &mut self,
        taking: &[Taking],
        told: &mut Vec<TenantReport>,
    ) -> Result<(Decision, Option<AppliedShares>), Missing> {
        let supply = self.config.supply;
        let members = taking.iter().map(|one| self.member(one, supply)).collect::<Result<Vec<_>, _>>()?;
        let before = self.epochs.applied().cloned();
        let decision = self.epochs.decide(supply, &members).map_err(|error| named(&error, taking))?;
        for (at, one) in taking.iter().enumerate() {
            let learner = self.meters[&one.name].learner();
            told.push(TenantReport {
                weight: one.weight,
                fair: decision.fair[at],
                share: decision.shares[at],
                measured: Some(one.measured),
                wanted: learner.wanted(),
                gain: decision.gains[at],
                error: learner.error(),
                ..TenantReport::new(&one.name, one.enforce, one.enforce.caveat())
            });
        }
        Ok((decision, before))
    }

    fn member(&self, one: &Taking, supply: Supply) -> Result<Member<TenantUtility>, Missing> {
        let most = one.most.map_or(f64::INFINITY, meter::mib);
        let utility = self.meters[&one.name].learner().utility(supply, most);
        let utility = utility.map_err(|error| Missing(format!("{}: {error}", one.name)))?;
        Ok(Member { name: one.name.as_str().into(), weight: one.weight, min: one.least, utility })
    }

    /// Keeps shares, and then sets limits.
    fn done(&self, taking: &[Taking], decision: &Decision, told: &mut [TenantReport]) -> Result<(), Missing> {
        let dealt = self.epochs.applied().expect("something was decided");
        self.kept.save(dealt).map_err(|error| Missing(units::chain(&error)))?;
        let swap = Swap { cgroups: &self.cgroups, device: self.remote.number() };
        let by = |one: &Taking| -> &dyn Enforcer {
            match one.enforce {
                Enforce::Swap => &swap,
                Enforce::Tiered | Enforce::Advise => &Advice,
            }
        };
        let orders = taking.iter().zip(&decision.shares);
        let orders: Vec<Order<'_>> =
            orders.map(|(one, share)| Order { tenant: &one.name, share: *share, by: by(one) }).collect();
        let failed = enforce(&orders).map_err(Missing)?;
        for (tenant, problem) in failed {
            tracing::warn!(%tenant, problem, "share not set");
            told.iter_mut().filter(|one| one.name == tenant).for_each(|one| one.problem.clone_from(&problem));
        }
        Ok(())
    }

    /// Shares that stay, with all that was known of them when they were decided on, if this agent has.
    fn as_they_were(&self) -> Vec<TenantReport> {
        let last = self.book.last().map_or_else(Vec::new, |last| last.tenants);
        let last: Vec<_> = last.into_iter().filter(|one| one.measured.is_some()).collect();
        if !last.is_empty() {
            return last;
        }
        let Some(dealt) = self.epochs.applied() else { return Vec::new() };
        let named = dealt.tenants.iter().filter_map(|(name, one)| Some((Name::new(name).ok()?, one)));
        let one = |(name, one): (Name, &WeightedShare)| {
            let (weight, share) = (one.weight, one.share);
            TenantReport { weight, share, ..TenantReport::new(&name, self.enforces(&name, false), "") }
        };
        named.map(one).collect()
    }

    fn report(
        &self,
        state: State,
        why: String,
        tenants: Vec<TenantReport>,
        certified: Option<Certified>,
    ) -> Report {
        Report {
            epoch: self.number,
            at: report::now(),
            supply: self.config.supply,
            state,
            why,
            tenants,
            certified,
        }
    }
}

/// With the tenant's name instead of its place.
fn named(error: &MarketError, taking: &[Taking]) -> Missing {
    let name = error.tenant().and_then(|at| taking.get(at)).map(|one| one.name.to_string());
    Missing(name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}")))
}
