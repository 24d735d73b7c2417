//! Early eviction on this host (Glitter): in every cycle, reads the counters of the tenants, decides above
//! which usage their memory is evicted, and evicts it before the tenants reach their limits. The tenants
//! then do not wait for their own evictions. The crate `tiering` makes the decisions; the module `host`
//! accesses the kernel.
//!
//! Tenants are cgroups with a memory limit and without VMs. One thread evicts for all tenants, in turn; the
//! class of a tenant determines how much is evicted in its turn. Without this thread, or if it waits for a
//! slow device, the kernel evicts memory at the limits as before. No state is stored.

mod io_class;
mod run;
mod tenant;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use tiering::{
    evict::{CLASSES, FlowClass, Policy},
    fair::TenantId,
};
use units::{
    Bytes, Name, Ns,
    limits::{RECLAIM_BYTES_PER_CALL_MAX, TENANTS_PER_HOST_MAX},
};

use self::tenant::{Cycle, Tenant};
pub use self::{io_class::IoPriority, run::CycleRunner};
use crate::{
    config::early_eviction::EarlyEviction as Config,
    eviction_report::{Report, TenantReport},
    host::{
        cgroup::{Cgroups, ReclaimResult},
        remote::{RemoteDevice, RemoteError},
        sysfs::{Sysfs, SysfsError},
        tiers::{KernelMigration, Tiers},
    },
    records::{self, RecordsError},
    tenant_cgroups::IgnoredCgroups,
};

/// Memory that is evicted in one turn of a tenant with the least urgent class. Each more urgent class gets
/// twice as much.
const TURN_BYTES_MIN: u64 = 256 << 10;
/// Shortest time between two checks of the usage.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Reason why nothing is decided in a cycle.
#[derive(Debug, thiserror::Error)]
pub enum CycleError {
    /// The swap device cannot be used.
    #[error("early_eviction.device")]
    Device(#[from] RemoteError),
    /// The device is not in use as swap.
    #[error("early_eviction.device: {} is not in use as swap", .0.display())]
    NotSwap(PathBuf),
    /// The kernel would demote memory instead of evicting it.
    #[error("the kernel demotes memory instead of evicting it: /sys/kernel/mm/numa/demotion_enabled is true")]
    Demotion,
    /// The tenants cannot be read.
    #[error("early_eviction.cgroups")]
    Cgroups(#[from] SysfsError),
    /// There are too many tenants.
    #[error("early_eviction.cgroups: {count} tenants exceed the limit of {TENANTS_PER_HOST_MAX}")]
    TooManyTenants {
        /// Number of tenants.
        count: usize,
    },
    /// The VMs of this host, whose memory is not evicted, cannot be read.
    #[error(transparent)]
    Vms(#[from] RecordsError),
}

/// Inputs of early eviction.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Settings.
    pub config: Config,
    /// Runtime directory of the agent, with the records of VMs.
    pub runtime_dir: PathBuf,
    /// Root of sysfs: `/sys`.
    pub sys: PathBuf,
    /// Root of procfs: `/proc`.
    pub proc: PathBuf,
}

/// Early eviction on one host.
#[derive(Debug)]
pub struct EarlyEviction {
    inputs: Inputs,
    cgroups: Cgroups,
    device: RemoteDevice,
    priority: IoPriority,
    policy: Policy,
    tenants: BTreeMap<Name, Tenant>,
    last_id: u32,
    ignored: IgnoredCgroups,
    /// Time of the last cycle.
    last: Option<Ns>,
}

impl EarlyEviction {
    /// Opens the swap device.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn open(inputs: Inputs) -> Result<Self, RemoteError> {
        let device = RemoteDevice::open(&inputs.config.device, &inputs.sys)?;
        Ok(Self::with(device, inputs))
    }

    fn with(device: RemoteDevice, inputs: Inputs) -> Self {
        Self {
            cgroups: Cgroups::at(&inputs.config.cgroups),
            priority: IoPriority::find(&Sysfs::at(&inputs.sys), device.number()),
            device,
            policy: Policy::new(inputs.config.settings).expect("the configuration limits the settings"),
            tenants: BTreeMap::new(),
            last_id: 0,
            ignored: IgnoredCgroups::default(),
            last: None,
            inputs,
        }
    }

    /// Begins a cycle: decides the thresholds and the classes. `now` is the time since the start on a
    /// monotonic clock.
    pub fn begin_cycle(&mut self, now: Ns) -> Report {
        match self.measure(now) {
            Ok(()) => self.decide(now),
            Err(error) => {
                self.restore_io_priorities();
                self.tenants.clear();
                Report { reason: units::chain(&error), tenants: Vec::new() }
            }
        }
    }

    /// Reads the counters of all tenants.
    fn measure(&mut self, now: Ns) -> Result<(), CycleError> {
        let proc = Sysfs::at(&self.inputs.proc);
        if !self.device.is_swap(&proc.text("swaps")?) {
            return Err(CycleError::NotSwap(self.device.path().to_owned()));
        }
        if demotes_memory(&Sysfs::at(&self.inputs.sys), &proc) {
            return Err(CycleError::Demotion);
        }
        let vm_cgroups =
            records::cgroups_of_vms::<CycleError>(&self.inputs.runtime_dir, &self.cgroups, &proc)?;
        let mut names = self.cgroups.names()?;
        names.retain(|name| !vm_cgroups.contains(name));
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(CycleError::TooManyTenants { count: names.len() });
        }
        let elapsed = self.last.replace(now).map_or(Ns::ZERO, |last| now.since(last));
        let mut before = std::mem::take(&mut self.tenants);
        let Self { inputs, cgroups, last_id, .. } = self;
        let settings = &inputs.config.settings;
        self.tenants = self.ignored.read_tenants(cgroups, names, |name| {
            observe(cgroups, name, &mut before, last_id, &Cycle { elapsed, settings })
        });
        for (name, tenant) in &mut before {
            restore_io_priority(&self.cgroups, &self.priority, name, tenant);
        }
        Ok(())
    }

    /// Decides the thresholds and classes of the tenants with a limit, and sets the priorities of their I/O.
    fn decide(&mut self, now: Ns) -> Report {
        let unlimited = self.tenants.iter_mut().filter(|(_, tenant)| tenant.sample().is_none());
        unlimited.for_each(|(name, tenant)| restore_io_priority(&self.cgroups, &self.priority, name, tenant));
        let limited =
            self.tenants.iter_mut().filter_map(|(name, tenant)| Some((tenant.sample()?, name, tenant)));
        let (samples, limited): (Vec<_>, Vec<_>) =
            limited.map(|(sample, name, tenant)| (sample, (name, tenant))).unzip();
        let decisions = self.policy.step(now, &samples);
        let mut reports = Vec::with_capacity(decisions.len());
        for ((name, tenant), decided) in limited.into_iter().zip(decisions) {
            tenant.threshold = decided.threshold;
            tenant.growth = decided.growth_bytes_per_s;
            tenant.class = decided.class;
            if self.inputs.config.io_classes && tenant.io_class != Some(decided.class) {
                set_io_class(&self.cgroups, &self.priority, name, tenant);
            }
            tenant.log_new_problem(name);
            let (counts, problem) = (tenant.counts, std::mem::take(&mut tenant.problem));
            reports.push(TenantReport { name: name.clone(), decided: *decided, counts, problem });
        }
        Report { reason: String::new(), tenants: reports }
    }

    /// Gives each tenant above its threshold a turn, the most urgent first. Returns the time until a tenant
    /// may exceed its threshold; zero if one does. The caller repeats this until the cycle ends.
    pub fn evict(&mut self) -> Duration {
        let mut turns: Vec<_> = self.tenants.iter_mut().filter(|(_, tenant)| !tenant.is_exhausted).collect();
        turns.sort_by_key(|(_, tenant)| tenant.class);
        let waits = turns.into_iter().map(|(name, tenant)| take_turn(&self.cgroups, name, tenant));
        waits.min().unwrap_or(Duration::MAX)
    }

    /// Restores the default priority of the I/O of all tenants.
    fn restore_io_priorities(&mut self) {
        for (name, tenant) in &mut self.tenants {
            restore_io_priority(&self.cgroups, &self.priority, name, tenant);
        }
    }
}

/// Reads the counters of a tenant. Removes it from the tenants of the last cycle if it was one of them.
fn observe(
    cgroups: &Cgroups,
    name: &Name,
    before: &mut BTreeMap<Name, Tenant>,
    last_id: &mut u32,
    cycle: &Cycle<'_>,
) -> Result<Tenant, SysfsError> {
    let inode = cgroups.inode(name.as_str())?;
    let counters = cgroups.eviction_counters(name.as_str())?;
    if let Some(mut tenant) = before.remove(name).filter(|tenant| tenant.inode == inode) {
        tenant.add_cycle(counters, cycle);
        return Ok(tenant);
    }
    *last_id = last_id.wrapping_add(1);
    Ok(Tenant::new(TenantId(*last_id), inode, counters))
}

/// Evicts memory above the threshold of a tenant, at most for one turn. Returns the time until its next turn.
fn take_turn(cgroups: &Cgroups, name: &Name, tenant: &mut Tenant) -> Duration {
    // A tenant that has ended is removed in the next cycle. The decision does not apply to its successor.
    if cgroups.inode(name.as_str()).ok() != Some(tenant.inode) {
        return Duration::MAX;
    }
    let Ok(usage) = cgroups.memory(name.as_str()) else { return Duration::MAX };
    let excess = usage.saturating_sub(tenant.threshold);
    // The kernel reclaims whole pages, and more than one at a time.
    if excess.get() < TURN_BYTES_MIN {
        return time_to_grow(tenant.threshold.saturating_sub(usage), tenant.growth);
    }
    let request = excess.min(turn_bytes(tenant.class));
    let started = Instant::now();
    let result = cgroups.reclaim(name.as_str(), request);
    tenant.requesting = tenant.requesting.after(Ns::from(started.elapsed()));
    match result {
        Ok(ReclaimResult::Complete) => {
            tenant.counts.evicted = tenant.counts.evicted.saturating_add(request);
            Duration::ZERO
        }
        Ok(ReclaimResult::Incomplete) => {
            let left = cgroups.memory(name.as_str()).unwrap_or(usage);
            tenant.counts.evicted = tenant.counts.evicted.saturating_add(usage.saturating_sub(left));
            tenant.is_exhausted = true;
            "the kernel evicts less memory than requested".clone_into(&mut tenant.problem);
            Duration::MAX
        }
        Err(error) => {
            tenant.is_exhausted = true;
            tenant.problem = units::chain(&error);
            Duration::MAX
        }
    }
}

/// Returns whether the kernel demotes memory to a lower tier instead of evicting it.
pub(crate) fn demotes_memory(sys: &Sysfs, proc: &Sysfs) -> bool {
    KernelMigration::read(sys, proc).demotes && Tiers::find(sys).is_ok()
}

/// Returns the memory that is evicted in a turn of a class.
fn turn_bytes(class: FlowClass) -> Bytes {
    Bytes::new((TURN_BYTES_MIN << (CLASSES - class.number())).min(RECLAIM_BYTES_PER_CALL_MAX))
}

/// Returns the time in which a tenant grows by `bytes` at a rate in bytes per second, at least
/// [`CHECK_INTERVAL_MIN`].
fn time_to_grow(bytes: Bytes, rate: Bytes) -> Duration {
    if rate == Bytes::ZERO {
        return Duration::MAX;
    }
    let ns = u128::from(bytes.get()) * u128::from(Ns::secs(1).0) / u128::from(rate.get());
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)).max(CHECK_INTERVAL_MIN)
}

/// Sets the priority of the I/O of a tenant by its class.
fn set_io_class(cgroups: &Cgroups, priority: &IoPriority, name: &Name, tenant: &mut Tenant) {
    let Some((file, value)) = priority.setting(tenant.class) else { return };
    match cgroups.set_io_priority(name.as_str(), file, &value) {
        Ok(()) => tenant.io_class = Some(tenant.class),
        Err(error) => tenant.problem = units::chain(&error),
    }
}

/// Restores the default priority of the I/O of a tenant, if its class was set.
fn restore_io_priority(cgroups: &Cgroups, priority: &IoPriority, name: &Name, tenant: &mut Tenant) {
    let (Some(_), Some((file, value))) = (tenant.io_class.take(), priority.default_setting()) else { return };
    match cgroups.set_io_priority(name.as_str(), file, &value) {
        Err(error) if cgroups.exists(name.as_str()) => {
            let error = units::chain(&error);
            tracing::warn!(tenant = %name, error, "cannot restore the priority of I/O");
        }
        Ok(()) | Err(_) => {}
    }
}
