//! Fair tiering on this host (Equilibria): in every step, reads the counters of the tenants, decides
//! which tenants are demoted and how much they may promote, and moves their pages between local and
//! slower memory. The crate `tiering` makes the decisions; the module `host` accesses the kernel.
//!
//! Tenants are cgroups without VMs. The pages of VMs are never moved, because the placement of their
//! memory is part of their reservation. Nothing is moved while an input is missing. The agent stores
//! no state: a restarted agent starts from the usage that it observes.

mod accesses;
mod mover;
mod promoted_pages;
mod promoter;
mod run;
mod step;
mod tenant;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tiering::fair::{
    FAST, HostSample, Policy, Settings, TenantId, TenantSample, ThrashTable, ThrashTableSettings, TierSample,
};
use units::{Bytes, Name, Ns, SLICE, limits::TENANTS_PER_HOST_MAX};

pub use self::run::StepRunner;
use self::{
    accesses::TenantProcess,
    mover::{KernelMover, PageMover},
    promoter::Promoter,
    tenant::{SLOW, Tenant},
};
use crate::{
    config::{symbiosis::EnforcementMethod, tiering::Tiering as Config},
    host::{
        cgroup::Cgroups,
        process::{self, ProcessError},
        sysfs::{Sysfs, SysfsError},
        tiers::{KernelMigration, Tiers, TiersError},
    },
    records::{self, RecordsError},
    report_slot::ReportSlot,
    shares::{self, SharesState},
    tenant_cgroups::IgnoredCgroups,
    tenant_profiles::TenantProfiles,
    tiering_report::Report,
};

/// One in 2^6 promoted pages is observed to detect thrashing.
const SAMPLE_SHIFT: u32 = 6;

/// Reason why nothing is decided in a step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The nodes or their memory cannot be read, or there is no slower memory.
    #[error(transparent)]
    Tiers(#[from] TiersError),
    /// The tenants cannot be read.
    #[error("tiering.cgroups")]
    Cgroups(#[from] SysfsError),
    /// There are too many tenants.
    #[error("tiering.cgroups: {count} tenants exceed the limit of {TENANTS_PER_HOST_MAX}")]
    TooManyTenants {
        /// Number of tenants.
        count: usize,
    },
    /// The VMs of this host, whose pages must not be moved, cannot be read.
    #[error(transparent)]
    Vms(#[from] RecordsError),
    /// The kernel would reclaim pages instead of demoting them.
    #[error("the kernel does not demote pages: /sys/kernel/mm/numa/demotion_enabled is not true")]
    DemotionDisabled,
    /// No slice is available to the tenants.
    #[error("no slice of the reservation tiering.reservation is online")]
    NoSlices,
    /// The shares, which are the protections, are not known yet.
    #[error("waiting for the first shares of Symbiosis")]
    NoShares,
}

/// Directories of the kernel; tests use simulated files.
#[derive(Clone, Debug)]
pub struct KernelRoots {
    /// Root of sysfs: `/sys`.
    pub sys: PathBuf,
    /// Root of procfs: `/proc`.
    pub proc: PathBuf,
}

/// Inputs of fair tiering.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Settings.
    pub config: Config,
    /// Runtime directory of the agent, with the records of VMs.
    pub runtime_dir: PathBuf,
    /// Number of slices that the tenants may use, which the agent updates; `None` if slower memory does
    /// not consist of slices. All other slices belong to VMs.
    pub slices: Option<Arc<AtomicU64>>,
    /// Directories of the kernel.
    pub kernel: KernelRoots,
    /// Shares of Symbiosis, which are the default protections.
    pub shares: Arc<SharesState>,
    /// Access profiles of all tenants for Symbiosis; `None` if it is disabled. Only tenants with slower
    /// memory are then monitored.
    pub profiles: Option<Arc<TenantProfiles>>,
    /// Slot for the report of each step.
    pub reports: Arc<ReportSlot<Report>>,
}

/// Fair tiering on one host.
#[derive(Debug)]
pub struct FairTiering {
    inputs: Inputs,
    cgroups: Cgroups,
    mover: Box<dyn PageMover>,
    promoter: Promoter,
    policy: Policy,
    thrash: ThrashTable,
    tenants: BTreeMap<Name, Tenant>,
    last_id: u32,
    /// Latest shares of Symbiosis that are enforced; `None` until the first.
    shares: Option<BTreeMap<Name, Bytes>>,
    /// Processes of tenants at the last step.
    processes: BTreeSet<TenantProcess>,
    ignored: IgnoredCgroups,
    /// Time of the last step.
    last: Option<Ns>,
    /// Largest error of the counters of a cgroup.
    counter_error: Bytes,
    /// Number of steps, which rotates the order of promotions.
    steps: usize,
}

/// Host at the beginning of a step.
struct Observation {
    tiers: Tiers,
    /// Settings of the kernel.
    kernel: KernelMigration,
    host: HostSample,
    samples: Vec<TenantSample>,
}

impl FairTiering {
    /// Creates the state. Stops DAMON if an earlier agent ended while it used DAMON.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn open(inputs: Inputs) -> Result<Self, ProcessError> {
        let cgroups = Cgroups::at(&inputs.config.cgroups);
        let mover = Box::new(KernelMover { cgroups, proc: Sysfs::at(&inputs.kernel.proc) });
        Self::with(mover, inputs)
    }

    fn with(mover: Box<dyn PageMover>, inputs: Inputs) -> Result<Self, ProcessError> {
        let config = &inputs.config;
        let settings = Settings {
            promotion_bytes_per_s: Bytes::new(config.promotion_bytes_per_s),
            ..Settings::default()
        };
        let table = ThrashTableSettings { sample_shift: SAMPLE_SHIFT, ..ThrashTableSettings::default() };
        Ok(Self {
            cgroups: Cgroups::at(&config.cgroups),
            mover,
            promoter: Promoter::new(&inputs.kernel.sys, &inputs.runtime_dir, process::boot_id()?),
            policy: Policy::new(settings).expect("the configuration limits the promotion rate"),
            thrash: ThrashTable::new(table).expect("the sampling rate is in range"),
            tenants: BTreeMap::new(),
            last_id: 0,
            shares: None,
            processes: BTreeSet::new(),
            ignored: IgnoredCgroups::default(),
            last: None,
            counter_error: step::counter_error(&Sysfs::at(&inputs.kernel.sys)),
            steps: 0,
            inputs,
        })
    }

    /// Performs a step, and returns its report. `now` is the time since the start on a monotonic
    /// clock.
    pub fn step(&mut self, now: Ns) -> Report {
        self.steps = self.steps.wrapping_add(1);
        let report = match self.observe(now) {
            Ok(observation) => self.decide_and_move(now, &observation),
            Err(error) => {
                self.promoter.stop();
                self.last = None;
                Report::blocked(units::chain(&error))
            }
        };
        self.inputs.reports.store(report.clone());
        report
    }

    /// Stops monitoring. Pages remain where they are.
    fn stop(&mut self) {
        self.promoter.stop();
    }

    /// Reads the memory of the tiers, and the counters of the tenants.
    fn observe(&mut self, now: Ns) -> Result<Observation, StepError> {
        let (sys, proc) = (Sysfs::at(&self.inputs.kernel.sys), Sysfs::at(&self.inputs.kernel.proc));
        let kernel = KernelMigration::read(&sys, &proc);
        if !kernel.demotes {
            return Err(StepError::DemotionDisabled);
        }
        let tiers = Tiers::find(&sys)?;
        let excluded =
            records::cgroups_of_vms_and_agent::<StepError>(&self.inputs.runtime_dir, &self.cgroups, &proc)?;
        self.find_tenants(&excluded)?;
        let local = self.local_memory(&tiers)?;
        let slow = self.tier_sample(&tiers, &tiers.slow, SLOW, self.slow_memory_limit()?)?;
        let host = HostSample::new(now, &[local, slow]);
        self.update_shares();
        let protections = match &self.shares {
            Some(shares) => shares,
            None if self.inputs.profiles.is_some() => return Err(StepError::NoShares),
            None => &BTreeMap::new(),
        };
        let sample = |(name, tenant): (&Name, &Tenant)| {
            let settings = self.inputs.config.tenants.get(name).copied().unwrap_or_default();
            let protection = protections.get(name).copied().unwrap_or_default();
            tenant.sample(&tiers, settings, protection, self.thrash.counts(tenant.id))
        };
        let samples = self.tenants.iter().map(sample).collect();
        Ok(Observation { tiers, kernel, host, samples })
    }

    /// Reads the capacity and the free memory of local memory.
    fn local_memory(&self, tiers: &Tiers) -> Result<TierSample, TiersError> {
        self.tier_sample(tiers, &tiers.local, FAST, self.inputs.config.local)
    }

    /// Returns the slower memory that the tenants may use. Slices that must be released are not counted, so
    /// that demotion stops.
    fn slow_memory_limit(&self) -> Result<Option<Bytes>, StepError> {
        let Some(slices) = &self.inputs.slices else { return Ok(self.inputs.config.slow) };
        let bytes = Bytes::new(SLICE.get().saturating_mul(slices.load(Ordering::Relaxed)));
        if bytes == Bytes::ZERO {
            return Err(StepError::NoSlices);
        }
        Ok(Some(self.inputs.config.slow.map_or(bytes, |limit| limit.min(bytes))))
    }

    /// Reads the memory of a tier, of which the tenants share at most `limit`.
    fn tier_sample(
        &self,
        tiers: &Tiers,
        nodes: &BTreeSet<u32>,
        tier: usize,
        limit: Option<Bytes>,
    ) -> Result<TierSample, TiersError> {
        let (total, free) = self.available_memory(nodes)?;
        let capacity = limit.map_or(total, |limit| limit.min(total));
        let is_whole = capacity == total;
        let usage: Bytes = self.tenants.values().map(|tenant| tenant.usage(tiers)[tier]).sum();
        let unused = if is_whole { capacity } else { capacity.saturating_sub(usage) };
        Ok(TierSample { capacity, free: free.min(unused) })
    }

    /// Returns the total memory of nodes, and the memory that tenants can use. Page cache of other programs
    /// is included, because the kernel drops it when memory is needed.
    fn available_memory(&self, nodes: &BTreeSet<u32>) -> Result<(Bytes, Bytes), TiersError> {
        let memory = Tiers::memory_of(&self.inputs.kernel.sys, nodes)?;
        let files = |tenant: &Tenant| -> Bytes {
            nodes.iter().filter_map(|node| tenant.counters.files.get(node)).copied().sum()
        };
        let of_tenants = self.tenants.values().map(files).sum();
        Ok((memory.total, memory.free.saturating_add(memory.inactive_files.saturating_sub(of_tenants))))
    }

    /// Stores the local memory in the shares of Symbiosis that fair tiering enforces. An epoch without
    /// shares, such as the one after an error, does not change them.
    fn update_shares(&mut self) {
        let Some(report) = self.inputs.shares.reports.last() else { return };
        if report.state == shares::State::Blocked && report.tenants.is_empty() {
            return;
        }
        let is_enforced = |tenant: &shares::TenantReport| tenant.enforce == EnforcementMethod::Tiered;
        let share = |tenant: shares::TenantReport| (tenant.name, Bytes::mib(tenant.share.memory_mib()));
        self.shares = Some(report.tenants.into_iter().filter(is_enforced).map(share).collect());
    }

    /// Updates the tenants: reads their counters, adds new tenants, and removes ended ones.
    fn find_tenants(&mut self, of_vms: &BTreeSet<String>) -> Result<(), StepError> {
        let mut names = self.cgroups.names()?;
        names.retain(|name| !of_vms.contains(name));
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(StepError::TooManyTenants { count: names.len() });
        }
        let mut before = std::mem::take(&mut self.tenants);
        let (cgroups, last_id) = (&self.cgroups, &mut self.last_id);
        self.tenants = self
            .ignored
            .read_tenants(cgroups, names, |name| read_tenant(cgroups, name, before.remove(name), last_id));
        Ok(())
    }
}

/// Reads the counters of a tenant, which is `before` unless its cgroup was created again.
fn read_tenant(
    cgroups: &Cgroups,
    name: &Name,
    before: Option<Tenant>,
    last_id: &mut u32,
) -> Result<Tenant, SysfsError> {
    let inode = cgroups.inode(name.as_str())?;
    let counters = cgroups.tier_counters(name.as_str())?;
    let known = before.filter(|tenant| tenant.inode == inode);
    let mut tenant = known.unwrap_or_else(|| {
        *last_id = last_id.wrapping_add(1);
        Tenant::new(TenantId(*last_id), inode)
    });
    tenant.counters = counters;
    Ok(tenant)
}
