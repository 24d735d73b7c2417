//! Symbiosis on this host: in every epoch, measures the tenants, derives their utilities, and
//! decides their shares of local memory and of the link. The crate `fairness` computes the shares;
//! the module `host` accesses files of the kernel.
//!
//! Shares stay unchanged while an input is missing: a tenant cannot be read, a limit cannot be set,
//! or a weight leaves a tenant less than its guarantee. A tenant that has ended does not count as
//! missing input. A restarted agent continues from the stored shares, and changes no limits before
//! it has measured an epoch.

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
    epoch::{AppliedShares, Change, Decision, EpochAllocator, MarketMember, WeightedShare},
    market::{Bundle, MarketError, Share, Supply},
    profile::TenantUtility,
};
use pool::agent::VmRecord;
use units::{
    Bytes, Name,
    limits::{CGROUP_PROCESSES_MAX, TENANTS_PER_HOST_MAX},
};

use self::{
    access_monitor::AccessMonitor,
    enforce::{AdviceEnforcer, Enforcer, LimitRequest, Swap, enforce},
    meter::Meter,
};
pub use self::{
    persisted_shares::{PersistedShares, PersistedSharesError},
    run::EpochRunner,
};
use crate::{
    config::symbiosis::{EnforcementMethod, Symbiosis as Config},
    host::{
        access_profile::AccessProfile,
        cgroup::{Cgroups, Counters},
        process::{self, ProcessError},
        remote::{RemoteDevice, RemoteError},
        sysfs::SysfsError,
    },
    records::{self, RecordsError},
    shares::{self, Report, ShareCertificate, SharesState, State, TenantMeasurement, TenantReport},
    tenant_profiles::TenantProfiles,
};

/// Reason why Symbiosis does not start.
#[derive(Debug, thiserror::Error)]
pub enum SymbiosisError {
    /// The swap device for remote memory cannot be used.
    #[error("symbiosis.remote")]
    RemoteDevice(#[from] RemoteError),
    /// The stored shares cannot be loaded.
    #[error(transparent)]
    Stored(#[from] PersistedSharesError),
    /// The boot id of this machine cannot be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Paths of kernel files that Symbiosis reads; tests use simulated files.
#[derive(Clone, Debug)]
pub struct KernelPaths {
    /// Root of sysfs: `/sys`.
    pub sys: PathBuf,
    /// List of active swap devices: `/proc/swaps`.
    pub swaps: PathBuf,
}

/// State of Symbiosis on this host.
#[derive(Debug)]
pub struct Symbiosis {
    config: Config,
    kernel: KernelPaths,
    cgroups: Cgroups,
    remote: RemoteDevice,
    monitor: AccessMonitor,
    meters: BTreeMap<Name, Meter>,
    epochs: EpochAllocator,
    persisted: PersistedShares,
    runtime_dir: PathBuf,
    state: Arc<SharesState>,
    /// Number of the last epoch.
    number: u64,
}

/// Cgroup that may be a tenant, at the end of an epoch.
struct Candidate {
    name: Name,
    /// VM that runs in the cgroup, if any: whether it is pinned, and its local memory.
    vm: Option<(bool, Bytes)>,
    counters: Counters,
    /// Current bandwidth limit, in MB/s, if any.
    limit_mb_s: Option<f64>,
}

/// Tenant that takes part in the decision on shares.
struct Participant {
    name: Name,
    weight: f64,
    enforce: EnforcementMethod,
    /// Whether a VM runs in the cgroup.
    is_vm: bool,
    /// Guaranteed share.
    least: Share,
    measured: TenantMeasurement,
    /// Hard limit of the cgroup's memory, if any.
    memory_max: Option<Bytes>,
}

/// Reason why shares cannot be decided, so that they stay unchanged.
struct MissingInput(String);

impl Symbiosis {
    /// Opens the swap device, and loads the stored shares, if any.
    ///
    /// # Errors
    /// [`SymbiosisError`].
    pub fn open(
        config: Config,
        runtime_dir: &Path,
        kernel: KernelPaths,
        state: Arc<SharesState>,
        profiles: Option<Arc<TenantProfiles>>,
    ) -> Result<Self, SymbiosisError> {
        let remote = RemoteDevice::open(&config.remote, &kernel.sys)?;
        Self::with(remote, config, runtime_dir, kernel, state, profiles)
    }

    fn with(
        remote: RemoteDevice,
        config: Config,
        runtime_dir: &Path,
        kernel: KernelPaths,
        state: Arc<SharesState>,
        profiles: Option<Arc<TenantProfiles>>,
    ) -> Result<Self, SymbiosisError> {
        let persisted = PersistedShares::at(runtime_dir);
        let epochs = EpochAllocator::resume(persisted.load()?);
        let cgroups = Cgroups::at(&config.cgroups);
        Ok(Self {
            monitor: AccessMonitor::open(
                &kernel.sys,
                &cgroups,
                config.epoch.as_duration(),
                &persisted,
                profiles,
            )?,
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

    /// Starts an epoch, in which page accesses are monitored if possible.
    pub fn begin_epoch(&mut self) {
        self.monitor.begin_epoch();
    }

    /// Ends an epoch: decides, stores, enforces and reports shares. `now` is the time since the
    /// start of Symbiosis.
    pub fn end_epoch(&mut self, now: Duration) -> Report {
        self.number += 1;
        // Read the counters first, because reading the access monitor takes long.
        let candidates = self.find_candidates();
        let profiles = self.end_access_epoch(candidates.as_deref().unwrap_or_default());
        let mut tenants = Vec::new();
        let ended = candidates.and_then(|candidates| self.decide(now, candidates, profiles, &mut tenants));
        let report = match ended {
            Ok((state, certificate)) => self.new_report(state, String::new(), tenants, certificate),
            Err(MissingInput(reason)) => {
                tracing::warn!(reason, "cannot decide shares, so they are unchanged");
                self.new_report(State::Blocked, reason, self.unchanged_tenant_reports(), None)
            }
        };
        self.state.reports.store(report.clone());
        report
    }

    /// Stops monitoring. Limits of tenants remain set.
    fn stop(&mut self) {
        self.monitor.stop();
    }

    /// Returns the access profiles of tenants since the start of the epoch.
    fn end_access_epoch(&mut self, candidates: &[Candidate]) -> BTreeMap<Name, AccessProfile> {
        let memory = |tenant: &Candidate| (tenant.name.clone(), tenant.counters.memory_with_swap());
        let without_vms = candidates.iter().filter(|tenant| tenant.vm.is_none());
        let tenants: Vec<(Name, Bytes)> = without_vms.map(memory).collect();
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
        let (miss_latency_s, link) =
            (self.remote.read_latency_s(), Bundle::from(self.config.supply.all()).bandwidth);
        let (mut participants, mut missing) = (Vec::new(), None);
        for Candidate { name, vm, counters, limit_mb_s } in candidates {
            let meter = self.meters.entry(name.clone()).or_default();
            let period = meter::MeasuredPeriod {
                now,
                miss_latency_s,
                limit_mb_s: limit_mb_s.map_or(link, |limit| limit.min(link)),
                link_mb_s: link,
            };
            match meter.measure(counters, profiles.remove(&name), &period) {
                Ok(Some(measured)) => participants.push(self.to_participant(name, vm, counters, measured)),
                Ok(None) => {
                    let enforce = self.enforcement_of(&name, vm.is_some());
                    let problem = "the tenant is new: its first epoch is only measured";
                    reports.push(TenantReport::new(&name, enforce, problem));
                }
                // Continue with the other tenants, so that the next epoch begins now for all of
                // them.
                Err(error) => missing = missing.or(Some(MissingInput(format!("{name}: {error}")))),
            }
        }
        missing.map_or(Ok(()), Err)?;
        if participants.is_empty() {
            return Err(MissingInput("no tenant has been measured for a full epoch yet".to_owned()));
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

    /// Returns the cgroups that may be tenants. Cgroups of pinned VMs are excluded, because their
    /// pages cannot be moved.
    fn find_candidates(&self) -> Result<Vec<Candidate>, MissingInput> {
        let missing = |error: &dyn std::error::Error| MissingInput(units::chain(error));
        self.check_swap()?;
        let names = self.cgroups.names().map_err(|error| missing(&error))?;
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(MissingInput(format!(
                "symbiosis.cgroups: {} tenants exceed the limit of {TENANTS_PER_HOST_MAX}",
                names.len()
            )));
        }
        let vms = self.running_vms().map_err(|error| missing(&error))?;
        let mut candidates = Vec::new();
        for name in &names {
            let Ok(tenant) = Name::new(name) else {
                tracing::warn!(cgroup = name, "ignoring cgroup with an invalid tenant name");
                continue;
            };
            match self.to_candidate(tenant, &vms) {
                Err(_) if !self.cgroups.exists(name) => {}
                Err(error) => return Err(missing(&error)),
                Ok(candidate) => candidates.extend(candidate),
            }
        }
        Ok(candidates)
    }

    /// Returns a cgroup as a candidate; `None` if a pinned VM runs in it.
    fn to_candidate(&self, name: Name, vms: &[VmRecord]) -> Result<Option<Candidate>, SysfsError> {
        let counters = self.cgroups.counters(name.as_str(), self.remote.number())?;
        // An error is ignored here, because setting the limits then fails and is reported.
        let limits = self.cgroups.limits(name.as_str(), self.remote.number()).unwrap_or_default();
        let limit_mb_s = limits.read.into_iter().chain(limits.written).min().map(|bytes| bytes as f64 / 1e6);
        let processes = self.cgroups.processes(name.as_str(), CGROUP_PROCESSES_MAX)?;
        let vm = vms.iter().find(|vm| processes.contains(&vm.process.pid));
        let vm = vm.map(|vm| (vm.pinned, vm.local));
        let is_pinned = matches!(vm, Some((true, _)));
        Ok((!is_pinned).then_some(Candidate { name, vm, counters, limit_mb_s }))
    }

    /// Returns the recorded VMs, except VMs whose process has certainly ended.
    fn running_vms(&self) -> Result<Vec<VmRecord>, RecordsError> {
        let may_run = |record: &VmRecord| !matches!(process::ProcessHandle::open(&record.process), Ok(None));
        Ok(records::recorded_vms(&self.runtime_dir)?.into_iter().filter(may_run).collect())
    }

    /// Checks that the remote device is in use as swap. Otherwise pages above a limit could not be
    /// swapped out to it.
    fn check_swap(&self) -> Result<(), MissingInput> {
        let swaps = std::fs::read_to_string(&self.kernel.swaps);
        let swaps = swaps
            .map_err(|error| MissingInput(format!("cannot read {}: {error}", self.kernel.swaps.display())))?;
        if self.remote.is_swap(&swaps) {
            return Ok(());
        }
        Err(MissingInput(format!("symbiosis.remote: {} is not in use as swap", self.remote.path().display())))
    }

    fn to_participant(
        &self,
        name: Name,
        vm: Option<(bool, Bytes)>,
        counters: Counters,
        measured: TenantMeasurement,
    ) -> Participant {
        let settings = self.config.tenants.get(&name);
        let weight = self.weight(&name).or(settings.map(|settings| settings.weight)).unwrap_or(1.0);
        // The share of a VM never becomes smaller than the local memory of its reservation.
        let of_vm = vm.map_or(0, |(_, local)| local.get().div_ceil(Bytes::mib(1).get()));
        let memory_mib = settings.map_or(0, |settings| settings.least_mib).max(of_vm);
        let enforce = self.enforcement_of(&name, vm.is_some());
        let least = Share::new(memory_mib, 0);
        let (is_vm, memory_max) = (vm.is_some(), counters.memory_max);
        Participant { name, weight, enforce, is_vm, least, measured, memory_max }
    }

    /// Returns how a tenant's share is enforced. The setting does not apply to VMs, because their
    /// memory is never swapped out.
    fn enforcement_of(&self, name: &Name, is_vm: bool) -> EnforcementMethod {
        let configured = self.config.tenants.get(name).map_or(self.config.enforce, |tenant| tenant.enforce);
        if is_vm { EnforcementMethod::Tiered } else { configured }
    }

    /// Returns the weight that the manager has set for a tenant, if any. Before the manager has
    /// sent weights, the weight in the stored shares is used.
    fn weight(&self, name: &Name) -> Option<f64> {
        match self.state.weights() {
            Some(weights) => weights.get(name).copied(),
            None => Some(self.epochs.applied()?.tenants.get(name.as_str())?.weight),
        }
    }

    /// Decides new shares. Returns the decision and the previous shares.
    fn decide_shares(
        &mut self,
        participants: &[Participant],
        reports: &mut Vec<TenantReport>,
    ) -> Result<(Decision, Option<AppliedShares>), MissingInput> {
        let supply = self.config.supply;
        let members = participants
            .iter()
            .map(|tenant| self.to_market_member(tenant, supply))
            .collect::<Result<Vec<_>, _>>()?;
        let previous = self.epochs.applied().cloned();
        let decision =
            self.epochs.decide(supply, &members).map_err(|error| market_error(&error, participants))?;
        let has_tiering = self.monitor.has_fair_tiering();
        for (at, tenant) in participants.iter().enumerate() {
            let learner = self.meters[&tenant.name].learner();
            reports.push(TenantReport {
                weight: tenant.weight,
                fair: decision.fair[at],
                share: decision.shares[at],
                measured: Some(tenant.measured),
                demand_mb_s: learner.wanted(),
                gain: decision.gains[at],
                error: learner.error(),
                ..TenantReport::new(
                    &tenant.name,
                    tenant.enforce,
                    tenant.enforce.unenforced_reason(tenant.is_vm, has_tiering),
                )
            });
        }
        Ok((decision, previous))
    }

    fn to_market_member(
        &self,
        tenant: &Participant,
        supply: Supply,
    ) -> Result<MarketMember<TenantUtility>, MissingInput> {
        let memory_max = tenant.memory_max.map_or(f64::INFINITY, meter::to_mib);
        let utility = self.meters[&tenant.name].learner().utility(supply, memory_max);
        let utility = utility.map_err(|error| MissingInput(format!("{}: {error}", tenant.name)))?;
        Ok(MarketMember {
            name: tenant.name.as_str().into(),
            weight: tenant.weight,
            min: tenant.least,
            utility,
        })
    }

    /// Stores the decided shares durably, and then enforces them.
    fn apply_decision(
        &self,
        participants: &[Participant],
        decision: &Decision,
        reports: &mut [TenantReport],
    ) -> Result<(), MissingInput> {
        let applied = self.epochs.applied().expect("a decision was made before");
        self.persisted.save(applied).map_err(|error| MissingInput(units::chain(&error)))?;
        let swap = Swap { cgroups: &self.cgroups, device: self.remote.number() };
        let enforcer = |tenant: &Participant| -> &dyn Enforcer {
            match tenant.enforce {
                EnforcementMethod::Swap => &swap,
                EnforcementMethod::Tiered | EnforcementMethod::Advise => &AdviceEnforcer,
            }
        };
        let requests = participants.iter().zip(&decision.shares);
        let requests: Vec<LimitRequest<'_>> = requests
            .map(|(tenant, share)| LimitRequest {
                tenant: &tenant.name,
                share: *share,
                enforcer: enforcer(tenant),
            })
            .collect();
        let failed = enforce(&requests).map_err(MissingInput)?;
        for (tenant, problem) in failed {
            tracing::warn!(%tenant, problem, "cannot set share of tenant");
            reports
                .iter_mut()
                .filter(|report| report.name == tenant)
                .for_each(|report| report.problem.clone_from(&problem));
        }
        Ok(())
    }

    /// Returns the reports of tenants with unchanged shares: those of the last report or, if this
    /// agent has not decided shares yet, reports with the stored shares.
    fn unchanged_tenant_reports(&self) -> Vec<TenantReport> {
        let last = self.state.reports.last().map_or_else(Vec::new, |last| last.tenants);
        let last: Vec<_> = last.into_iter().filter(|tenant| tenant.measured.is_some()).collect();
        if !last.is_empty() {
            return last;
        }
        let Some(applied) = self.epochs.applied() else { return Vec::new() };
        let stored = applied.tenants.iter().filter_map(|(name, share)| Some((Name::new(name).ok()?, share)));
        let report = |(name, stored): (Name, &WeightedShare)| {
            let (weight, share) = (stored.weight, stored.share);
            TenantReport { weight, share, ..TenantReport::new(&name, self.enforcement_of(&name, false), "") }
        };
        stored.map(report).collect()
    }

    fn new_report(
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

/// Converts an error of the market to a message that contains the tenant's name.
fn market_error(error: &MarketError, participants: &[Participant]) -> MissingInput {
    let name = error.tenant().and_then(|at| participants.get(at)).map(|tenant| tenant.name.to_string());
    MissingInput(name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}")))
}
