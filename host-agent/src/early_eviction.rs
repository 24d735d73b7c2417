//! Early eviction on this host (Glitter): in every cycle, reads the counters of the tenants, decides above
//! which usage their memory is evicted, and evicts it before the tenants reach their limits. The tenants
//! then do not wait for their own evictions. The crate `tiering` makes the decisions; the module `host`
//! accesses the kernel.
//!
//! Tenants are cgroups with a memory limit and without VMs. One thread evicts for all tenants; their classes
//! determine their parts of its time. Without this thread, or if it waits for a slow device, the kernel
//! evicts memory at the limits as before. No state is stored.

mod io_class;
mod requests;
mod run;
mod tenant;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use tiering::{evict::Policy, fair::TenantId};
use units::{Bytes, Name, Ns, limits::TENANTS_PER_HOST_MAX};

pub use self::{io_class::IoPriority, run::CycleRunner};
use self::{requests::Request, tenant::Tenant};
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

/// Time after which [`EarlyEviction::evict`] begins no further request.
const PASS_TIME_MAX: Duration = Duration::from_millis(100);
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
    /// Smallest virtual time of the tenants with requests.
    least_virtual_time: Ns,
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
            least_virtual_time: Ns::ZERO,
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
                Report::blocked(units::chain(&error))
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
        self.find_io_priority();
        let excluded =
            records::cgroups_of_vms_and_agent::<CycleError>(&self.inputs.runtime_dir, &self.cgroups, &proc)?;
        let mut names = self.cgroups.names()?;
        names.retain(|name| !excluded.contains(name));
        if names.len() > TENANTS_PER_HOST_MAX {
            return Err(CycleError::TooManyTenants { count: names.len() });
        }
        let elapsed = self.last.replace(now).map_or(Ns::ZERO, |last| now.since(last));
        let mut before = std::mem::take(&mut self.tenants);
        let Self { cgroups, last_id, .. } = self;
        self.tenants = self
            .ignored
            .read_tenants(cgroups, names, |name| observe(cgroups, name, &mut before, last_id, elapsed));
        if self.inputs.config.io_classes {
            // An agent that was killed may have left a priority.
            let new = self.tenants.iter().filter(|(_, tenant)| tenant.is_new);
            new.for_each(|(name, _)| write_default_io_priority(&self.cgroups, &self.priority, name));
        }
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
            let (counts, problem) = (tenant.counts, tenant.problem().to_owned());
            reports.push(TenantReport { name: name.clone(), decided: *decided, counts, problem });
        }
        Report::decided(reports)
    }

    /// Evicts memory of tenants above their threshold, for about [`PASS_TIME_MAX`]. The tenants with the
    /// smallest virtual time come first. `now` is as for [`Self::begin_cycle`]. Returns the time until a
    /// tenant may exceed its threshold; zero if one does. The caller repeats this until the cycle ends.
    pub fn evict(&mut self, now: Ns) -> Duration {
        let mut next = Duration::MAX;
        let mut waiting = Vec::new();
        for (name, tenant) in &mut self.tenants {
            match find_excess(&self.cgroups, name, tenant, now) {
                Ok(_) => waiting.push((name, tenant)),
                Err(wait) => next = next.min(wait),
            }
        }
        waiting
            .iter_mut()
            .for_each(|(_, tenant)| tenant.requests.limit_virtual_time(self.least_virtual_time));
        waiting.sort_by_key(|(_, tenant)| (tenant.requests.virtual_time(), tenant.class));
        let Some((_, first)) = waiting.first() else { return next };
        self.least_virtual_time = first.requests.virtual_time();
        let end = self.least_virtual_time.after(requests::REQUEST_TIME);
        let started = Instant::now();
        for (name, tenant) in waiting {
            if tenant.requests.virtual_time() >= end || started.elapsed() >= PASS_TIME_MAX {
                break;
            }
            request(&self.cgroups, name, tenant, now.after(Ns::from(started.elapsed())));
        }
        Duration::ZERO
    }

    /// Finds the method of setting priorities again, because the scheduler of the device may have changed.
    fn find_io_priority(&mut self) {
        let priority = IoPriority::find(&Sysfs::at(&self.inputs.sys), self.device.number());
        if priority != self.priority {
            self.restore_io_priorities();
            self.priority = priority;
        }
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
    elapsed: Ns,
) -> Result<Tenant, SysfsError> {
    let inode = cgroups.inode(name.as_str())?;
    let counters = cgroups.eviction_counters(name.as_str())?;
    if let Some(mut tenant) = before.remove(name).filter(|tenant| tenant.inode == inode) {
        tenant.add_cycle(counters, elapsed);
        return Ok(tenant);
    }
    *last_id = last_id.wrapping_add(1);
    Ok(Tenant::new(TenantId(*last_id), inode, counters))
}

/// Returns the memory above the threshold of a tenant, or the time until there may be some.
fn find_excess(cgroups: &Cgroups, name: &Name, tenant: &Tenant, now: Ns) -> Result<Bytes, Duration> {
    let paused_for = tenant.requests.paused_for(now);
    if !paused_for.is_zero() {
        return Err(paused_for);
    }
    // A tenant that has ended is removed in the next cycle. The decision does not apply to its successor.
    if cgroups.inode(name.as_str()).ok() != Some(tenant.inode) {
        return Err(Duration::MAX);
    }
    let usage = cgroups.memory(name.as_str()).map_err(|_| Duration::MAX)?;
    let excess = usage.saturating_sub(tenant.threshold);
    // The kernel reclaims whole pages, and more than one at a time.
    if excess.get() < requests::REQUEST_BYTES_MIN {
        return Err(time_to_grow(tenant.threshold.saturating_sub(usage), tenant.growth));
    }
    Ok(excess)
}

/// Requests the kernel to evict memory of a tenant, if it is still above its threshold.
fn request(cgroups: &Cgroups, name: &Name, tenant: &mut Tenant, now: Ns) {
    let Ok(excess) = find_excess(cgroups, name, tenant, now) else { return };
    let requested = tenant.requests.request_size(excess);
    let reclaimed = || cgroups.reclaimed(name.as_str()).unwrap_or_default();
    let before = reclaimed();
    let started = Instant::now();
    let result = cgroups.reclaim(name.as_str(), requested);
    let elapsed = Ns::from(started.elapsed());
    tenant.requesting = tenant.requesting.after(elapsed);
    let (evicted, error) = match result {
        Ok(ReclaimResult::Complete) => (requested, None),
        Ok(ReclaimResult::Incomplete) => (reclaimed().saturating_sub(before).min(requested), None),
        Err(error) => (Bytes::ZERO, Some(error)),
    };
    tenant.counts.evicted = tenant.counts.evicted.saturating_add(evicted);
    let now = now.after(elapsed);
    tenant.requests.add(&Request { class: tenant.class, requested, evicted, elapsed, now });
    match error {
        Some(error) => tenant.problem = units::chain(&error),
        None if tenant.requests.is_failing() => {
            "the kernel evicts less memory than requested".clone_into(&mut tenant.problem);
        }
        None if tenant.requests.paused_for(now).is_zero() => tenant.problem.clear(),
        None => {}
    }
}

/// Returns whether the kernel demotes memory to a lower tier instead of evicting it.
pub(crate) fn demotes_memory(sys: &Sysfs, proc: &Sysfs) -> bool {
    KernelMigration::read(sys, proc).demotes && Tiers::find(sys).is_ok()
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
        Ok(()) => {
            tenant.io_class = Some(tenant.class);
            tenant.io_problem.clear();
        }
        Err(error) => tenant.io_problem = units::chain(&error),
    }
}

/// Restores the default priority of the I/O of a tenant, if its class was set.
fn restore_io_priority(cgroups: &Cgroups, priority: &IoPriority, name: &Name, tenant: &mut Tenant) {
    if tenant.io_class.take().is_some() {
        write_default_io_priority(cgroups, priority, name);
    }
}

/// Writes the default priority of the I/O of a tenant.
fn write_default_io_priority(cgroups: &Cgroups, priority: &IoPriority, name: &Name) {
    let Some((file, value)) = priority.default_setting() else { return };
    match cgroups.set_io_priority(name.as_str(), file, &value) {
        Err(error) if cgroups.exists(name.as_str()) => {
            let error = units::chain(&error);
            tracing::warn!(tenant = %name, error, "cannot restore the priority of I/O");
        }
        Ok(()) | Err(_) => {}
    }
}
