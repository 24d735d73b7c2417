//! Symbiosis on this host: in every epoch, measurements of tenants become utilities, and utilities
//! become shares of local memory and of the link. `fairness` computes the shares; `host` accesses
//! files of the kernel.
//!
//! Shares stay unchanged while an input is missing: an unreadable tenant, a limit that cannot be
//! set, a weight that leaves a tenant less than its guarantee. A tenant that ended is no missing
//! input. A starting agent continues from the stored shares, and changes nothing before it has
//! measured an epoch.

mod access_monitor;
mod enforce;
mod meter;
mod persisted_shares;
mod run;
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
    access_monitor::AccessMonitor,
    enforce::{Advice, Enforcer, LimitRequest, Swap, enforce},
    meter::Meter,
};
pub use self::{
    persisted_shares::{PersistedShares, PersistedSharesError},
    run::{EpochRunner, SymbiosisThread},
};
use crate::{
    config::symbiosis::{Enforce, Symbiosis as Config},
    host::{
        access_profile::AccessProfile,
        cgroup::{Cgroups, Counters},
        process::{self, ProcessError},
        remote::{Remote, RemoteError},
        sysfs::SysfsError,
    },
    records::{self, RecordsError},
    shares::{self, Report, ShareCertificate, SharesState, State, TenantMeasurement, TenantReport},
};

/// Reason why Symbiosis does not start.
#[derive(Debug, thiserror::Error)]
pub enum SymbiosisError {
    /// Device of remote memory.
    #[error("symbiosis.remote")]
    Remote(#[from] RemoteError),
    /// Shares of the previous epoch.
    #[error(transparent)]
    Stored(#[from] PersistedSharesError),
    /// This machine's boot.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Paths of devices and swap.
#[derive(Clone, Debug)]
pub struct KernelPaths {
    /// Such as `/sys`.
    pub sys: PathBuf,
    /// Such as `/proc/swaps`.
    pub swaps: PathBuf,
}

/// State of Symbiosis on this host.
#[derive(Debug)]
pub struct Symbiosis {
    config: Config,
    kernel: KernelPaths,
    cgroups: Cgroups,
    remote: Remote,
    monitor: AccessMonitor,
    meters: BTreeMap<Name, Meter>,
    epochs: EpochAllocator,
    persisted: PersistedShares,
    runtime_dir: PathBuf,
    state: Arc<SharesState>,
    number: u64,
}

/// Cgroup that may be a tenant, at the end of an epoch.
struct Candidate {
    name: Name,
    /// VM that runs in it, if any: whether it is pinned, and its local memory.
    vm: Option<(bool, Bytes)>,
    counters: Counters,
    /// Bandwidth limit of a tenant in MB/s, if any.
    limit: Option<f64>,
}

/// Participating tenant with its settings.
struct Participant {
    name: Name,
    weight: f64,
    enforce: Enforce,
    least: Share,
    measured: TenantMeasurement,
    most: Option<Bytes>,
}

/// Missing input, which leaves shares unchanged.
struct MissingInput(String);

impl Symbiosis {
    /// Continues from the stored shares.
    ///
    /// # Errors
    /// The remote device is unusable, or the stored shares are invalid.
    pub fn open(
        config: Config,
        runtime_dir: &Path,
        kernel: KernelPaths,
        state: Arc<SharesState>,
    ) -> Result<Self, SymbiosisError> {
        let remote = Remote::open(&config.remote, &kernel.sys)?;
        Self::with(remote, config, runtime_dir, kernel, state)
    }

    fn with(
        remote: Remote,
        config: Config,
        runtime_dir: &Path,
        kernel: KernelPaths,
        state: Arc<SharesState>,
    ) -> Result<Self, SymbiosisError> {
        let persisted = PersistedShares::at(runtime_dir);
        let epochs = EpochAllocator::resume(persisted.load()?);
        let cgroups = Cgroups::at(&config.cgroups);
        Ok(Self {
            monitor: AccessMonitor::open(&kernel.sys, &cgroups, config.epoch.as_duration(), &persisted)?,
            cgroups,
            remote,
            meters: BTreeMap::new(),
            epochs,
            persisted,
            runtime_dir: runtime_dir.to_owned(),
            state,
            number: 0,
            config,
            kernel,
        })
    }

    /// Starts an epoch: page accesses are monitored where possible.
    pub fn begin_epoch(&mut self) {
        self.monitor.begin_epoch();
    }

    /// Ends an epoch: decides, enforces, stores and reports shares.
    pub fn end_epoch(&mut self, now: Duration) -> Report {
        self.number += 1;
        // Counters first, because reading the access monitor takes time.
        let candidates = self.candidates();
        let profiles = self.profiles(candidates.as_deref().unwrap_or_default());
        let mut tenants = Vec::new();
        let ended = candidates.and_then(|candidates| self.decide(now, candidates, profiles, &mut tenants));
        let report = match ended {
            Ok((state, certificate)) => self.report(state, String::new(), tenants, certificate),
            Err(MissingInput(reason)) => {
                tracing::warn!(reason, "shares unchanged");
                self.report(State::Blocked, reason, self.previous_shares(), None)
            }
        };
        self.state.store_report(report.clone());
        report
    }

    /// Stops monitoring; limits remain.
    fn stop(&mut self) {
        self.monitor.stop();
    }

    /// Returns the page accesses since the start of the epoch.
    fn profiles(&mut self, candidates: &[Candidate]) -> BTreeMap<Name, AccessProfile> {
        let has = |one: &Candidate| (one.name.clone(), one.counters.memory_with_swap());
        let no_vm = candidates.iter().filter(|one| one.vm.is_none());
        let tenants: Vec<(Name, Bytes)> = no_vm.map(has).collect();
        self.monitor.end_epoch(&tenants)
    }

    fn decide(
        &mut self,
        now: Duration,
        candidates: Vec<Candidate>,
        mut profiles: BTreeMap<Name, AccessProfile>,
        reports: &mut Vec<TenantReport>,
    ) -> Result<(State, Option<ShareCertificate>), MissingInput> {
        self.meters.retain(|name, _| candidates.iter().any(|candidate| candidate.name == *name));
        let (miss_latency_s, link) = (self.remote.read_latency_s(), self.config.supply.bandwidth_mb_s as f64);
        let (mut participants, mut missing) = (Vec::new(), None);
        for Candidate { name, vm, counters, limit } in candidates {
            let meter = self.meters.entry(name.clone()).or_default();
            let period = meter::Period {
                now,
                miss_latency_s,
                limit: limit.map_or(link, |limit| limit.min(link)),
                link,
            };
            match meter.measure(counters, profiles.remove(&name), &period) {
                Ok(Some(measured)) => participants.push(self.participant(name, vm, counters, measured)),
                Ok(None) => {
                    let enforce = self.enforcement(&name, vm.is_some());
                    reports.push(TenantReport::new(&name, enforce, "its first epoch is measured only"));
                }
                // The others are measured nevertheless, so that the next epoch begins now for all
                // tenants.
                Err(error) => missing = missing.or(Some(MissingInput(format!("{name}: {error}")))),
            }
        }
        missing.map_or(Ok(()), Err)?;
        if participants.is_empty() {
            return Err(MissingInput("no tenant has been measured for an epoch".to_owned()));
        }
        let (decision, previous) = self.decide_shares(&participants, reports)?;
        let result = self.apply_decision(&participants, &decision, reports);
        if result.is_err() {
            let restored = previous
                .as_ref()
                .map_or_else(|| self.persisted.remove(), |previous| self.persisted.save(previous));
            self.epochs.rollback(previous);
            restored.map_err(|error| MissingInput(units::chain(&error)))?;
        }
        result?;
        let (state, step_fraction) = match decision.change {
            Change::Set { step_fraction } => (State::Set, step_fraction),
            Change::Unchanged => (State::Unchanged, 0.0),
        };
        let worst_off = participants[decision.certificate.worst_off].name.clone();
        Ok((state, Some(ShareCertificate { certificate: decision.certificate, step_fraction, worst_off })))
    }

    /// Returns participating cgroups: memory of pinned VMs is not moved.
    fn candidates(&self) -> Result<Vec<Candidate>, MissingInput> {
        let missing = |error: &dyn std::error::Error| MissingInput(units::chain(error));
        self.check_swap()?;
        let names = self.cgroups.names().map_err(|error| missing(&error))?;
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(MissingInput(format!(
                "{} tenants exceed the limit of {TENANTS_PER_HOST_MAX}",
                names.len()
            )));
        }
        let vms = self.vms().map_err(|error| missing(&error))?;
        let mut candidates = Vec::new();
        for name in &names {
            let Ok(tenant) = Name::new(name) else {
                tracing::warn!(cgroup = name, "cgroup ignored: invalid tenant name");
                continue;
            };
            match self.candidate(tenant, &vms) {
                Err(_) if !self.cgroups.exists(name) => {}
                Err(error) => return Err(missing(&error)),
                Ok(candidate) => candidates.extend(candidate),
            }
        }
        Ok(candidates)
    }

    /// Returns a cgroup as candidate; `None` if a pinned VM runs in it.
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
        let lives = |record: &VmRecord| !matches!(process::ProcessHandle::open(&record.process), Ok(None));
        Ok(records::recorded_vms(&self.runtime_dir)?.into_iter().filter(lives).collect())
    }

    /// A limit on an unused device would reclaim pages without a place for them.
    fn check_swap(&self) -> Result<(), MissingInput> {
        let swaps = std::fs::read_to_string(&self.kernel.swaps);
        let swaps =
            swaps.map_err(|error| MissingInput(format!("read {}: {error}", self.kernel.swaps.display())))?;
        if self.remote.is_swap(&swaps) {
            return Ok(());
        }
        Err(MissingInput(format!("symbiosis.remote: {} is not in use as swap", self.remote.path().display())))
    }

    fn participant(
        &self,
        name: Name,
        vm: Option<(bool, Bytes)>,
        counters: Counters,
        measured: TenantMeasurement,
    ) -> Participant {
        let settings = self.config.tenants.get(&name);
        let weight = self.weight(&name).or(settings.map(|one| one.weight)).unwrap_or(1.0);
        // A guest's declared local node is never shrunk.
        let of_vm = vm.map_or(0, |(_, local)| local.get().div_ceil(Bytes::mib(1).get()));
        let memory_mib = settings.map_or(0, |one| one.least_mib).max(of_vm);
        let enforce = self.enforcement(&name, vm.is_some());
        let least = Share { memory_mib, bandwidth_mb_s: 0 };
        Participant { name, weight, enforce, least, measured, most: counters.memory_max }
    }

    /// Returns the enforcement of a tenant's share: nothing takes a VM's memory away.
    fn enforcement(&self, name: &Name, is_vm: bool) -> Enforce {
        let settings = self.config.tenants.get(name).map_or(self.config.enforce, |one| one.enforce);
        if is_vm { Enforce::Tiered } else { settings }
    }

    /// Returns a tenant's weight: from the manager or, before it has sent weights, from the stored
    /// shares.
    fn weight(&self, name: &Name) -> Option<f64> {
        match self.state.weights() {
            Some(weights) => weights.get(name).copied(),
            None => Some(self.epochs.applied()?.tenants.get(name.as_str())?.weight),
        }
    }

    /// Decides shares; returns them with the previous ones.
    fn decide_shares(
        &mut self,
        participants: &[Participant],
        reports: &mut Vec<TenantReport>,
    ) -> Result<(Decision, Option<AppliedShares>), MissingInput> {
        let supply = self.config.supply;
        let members =
            participants.iter().map(|one| self.member(one, supply)).collect::<Result<Vec<_>, _>>()?;
        let previous = self.epochs.applied().cloned();
        let decision =
            self.epochs.decide(supply, &members).map_err(|error| market_error(&error, participants))?;
        for (at, one) in participants.iter().enumerate() {
            let learner = self.meters[&one.name].learner();
            reports.push(TenantReport {
                weight: one.weight,
                fair: decision.fair[at],
                share: decision.shares[at],
                measured: Some(one.measured),
                demand_mb_s: learner.wanted(),
                gain: decision.gains[at],
                error: learner.error(),
                ..TenantReport::new(&one.name, one.enforce, one.enforce.limitation())
            });
        }
        Ok((decision, previous))
    }

    fn member(&self, one: &Participant, supply: Supply) -> Result<Member<TenantUtility>, MissingInput> {
        let most = one.most.map_or(f64::INFINITY, meter::mib);
        let utility = self.meters[&one.name].learner().utility(supply, most);
        let utility = utility.map_err(|error| MissingInput(format!("{}: {error}", one.name)))?;
        Ok(Member { name: one.name.as_str().into(), weight: one.weight, min: one.least, utility })
    }

    /// Stores shares, and then sets limits.
    fn apply_decision(
        &self,
        participants: &[Participant],
        decision: &Decision,
        reports: &mut [TenantReport],
    ) -> Result<(), MissingInput> {
        let applied = self.epochs.applied().expect("shares have been applied");
        self.persisted.save(applied).map_err(|error| MissingInput(units::chain(&error)))?;
        let swap = Swap { cgroups: &self.cgroups, device: self.remote.number() };
        let by = |one: &Participant| -> &dyn Enforcer {
            match one.enforce {
                Enforce::Swap => &swap,
                Enforce::Tiered | Enforce::Advise => &Advice,
            }
        };
        let orders = participants.iter().zip(&decision.shares);
        let orders: Vec<LimitRequest<'_>> = orders
            .map(|(one, share)| LimitRequest { tenant: &one.name, share: *share, by: by(one) })
            .collect();
        let failed = enforce(&orders).map_err(MissingInput)?;
        for (tenant, problem) in failed {
            tracing::warn!(%tenant, problem, "share not set");
            reports
                .iter_mut()
                .filter(|one| one.name == tenant)
                .for_each(|one| one.problem.clone_from(&problem));
        }
        Ok(())
    }

    /// Returns the unchanged shares, with the report of the epoch that decided them, if this agent
    /// decided them.
    fn previous_shares(&self) -> Vec<TenantReport> {
        let last = self.state.last_report().map_or_else(Vec::new, |last| last.tenants);
        let last: Vec<_> = last.into_iter().filter(|one| one.measured.is_some()).collect();
        if !last.is_empty() {
            return last;
        }
        let Some(applied) = self.epochs.applied() else { return Vec::new() };
        let tenants = applied.tenants.iter().filter_map(|(name, one)| Some((Name::new(name).ok()?, one)));
        let one = |(name, one): (Name, &WeightedShare)| {
            let (weight, share) = (one.weight, one.share);
            TenantReport { weight, share, ..TenantReport::new(&name, self.enforcement(&name, false), "") }
        };
        tenants.map(one).collect()
    }

    fn report(
        &self,
        state: State,
        reason: String,
        tenants: Vec<TenantReport>,
        certificate: Option<ShareCertificate>,
    ) -> Report {
        Report {
            epoch: self.number,
            at: shares::now(),
            supply: self.config.supply,
            state,
            reason,
            tenants,
            certificate,
        }
    }
}

/// Converts an error, with the tenant's name instead of its index.
fn market_error(error: &MarketError, participants: &[Participant]) -> MissingInput {
    let name = error.tenant().and_then(|at| participants.get(at)).map(|one| one.name.to_string());
    MissingInput(name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}")))
}
