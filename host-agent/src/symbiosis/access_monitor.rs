//! Monitor of the tenants' page accesses, by processor samples and by DAMON.
//!
//! Tenants with enough processor samples get a profile from these, other tenants a profile from
//! DAMON. Samples count accesses, not touched pages. They are therefore scaled to the rate of
//! touched pages that DAMON measures for the same tenant.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use units::{
    Bytes, Name,
    limits::{CGROUP_PROCESSES_MAX, MONITORED_TENANTS_MAX, TENANT_PROCESSES_MAX},
};

use super::PersistedShares;
use crate::host::{
    access_profile::AccessProfile,
    cgroup::Cgroups,
    damon::{Damon, DamonError, Target},
    process::{self, ProcessError},
    sampler::{LINES_PER_PAGE, SampleSet, Sampler, SamplerError},
    sysfs::Sysfs,
};
use crate::tenant_profiles::TenantProfiles;

/// Divisor of the epoch that gives the time limit for reading DAMON's results.
const RESULT_TIME_DIVISOR: u32 = 4;
/// Maximum ratio of the memory that DAMON reports as accessed to the memory in which the processor
/// sampled accesses. Above this ratio, the samples are discarded, because they miss most of the
/// accessed memory. For example, the host cannot sample the accesses of a guest.
const UNDERSAMPLING_RATIO_MAX: u64 = 16;

/// Monitor of the page accesses of all tenants.
#[derive(Debug)]
pub(super) struct AccessMonitor {
    cgroups: Cgroups,
    epoch: Duration,
    sys: Sysfs,
    sampler: Option<Sampler>,
    /// Description of the sampler's state, which is logged when it changes.
    sampler_state: String,
    /// Last estimate of the accesses per burst, for each tenant.
    accesses_per_burst: BTreeMap<Name, f64>,
    damon: Damon,
    /// Profiles that fair tiering measures. If there are none, this monitor uses DAMON.
    profiles: Option<Arc<TenantProfiles>>,
    /// Tenants that DAMON monitors in this epoch, in the order of its results.
    monitored: Vec<Name>,
    /// Device memory of each monitored tenant, in bytes. DAMON does not monitor this memory.
    unmonitored_bytes: BTreeMap<Name, u64>,
    /// Last tenant with a result of DAMON.
    last_monitored: Option<Name>,
    persisted: PersistedShares,
    boot_id: String,
}

impl AccessMonitor {
    /// Creates a monitor for tenants in these cgroups. `sys` is the root of sysfs. `profiles` are measured
    /// by fair tiering, if it uses DAMON.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn open(
        sys: &Path,
        cgroups: &Cgroups,
        epoch: Duration,
        persisted: &PersistedShares,
        profiles: Option<Arc<TenantProfiles>>,
    ) -> Result<Self, ProcessError> {
        let boot_id = process::boot_id()?;
        // DAMON of fair tiering must not be stopped.
        let is_own = profiles.is_none() && persisted.was_monitoring(&boot_id);
        Ok(Self {
            cgroups: cgroups.clone(),
            epoch,
            sys: Sysfs::at(sys),
            sampler: None,
            sampler_state: String::new(),
            accesses_per_burst: BTreeMap::new(),
            damon: Damon::at(sys, is_own),
            profiles,
            monitored: Vec::new(),
            unmonitored_bytes: BTreeMap::new(),
            last_monitored: None,
            persisted: persisted.clone(),
            boot_id,
        })
    }

    /// Starts to monitor page accesses in an epoch. Errors are logged.
    pub fn begin_epoch(&mut self) {
        match self.start_sampling() {
            Ok(event) => self.log_sampler_state(event.to_owned()),
            Err(error) => self.drop_sampler(&error),
        }
        if self.profiles.is_none()
            && let Err(error) = self.start_damon()
        {
            tracing::debug!(error = units::chain(&error), "cannot start DAMON");
        }
    }

    /// Returns whether fair tiering is enabled, which measures the profiles.
    pub const fn has_fair_tiering(&self) -> bool {
        self.profiles.is_some()
    }

    /// Ends an epoch, and returns the access profiles of tenants. `tenants` are the tenants for
    /// which samples may be used, with their memory including swap. VMs are not among them, because
    /// samples do not show the addresses of guests.
    pub fn end_epoch(&mut self, tenants: &[(Name, Bytes)]) -> BTreeMap<Name, AccessProfile> {
        // Stop sampling first: reading DAMON's results takes long.
        let sample_set = self.sampler.as_mut().map(Sampler::take).transpose();
        let sample_set = sample_set.unwrap_or_else(|error| {
            self.drop_sampler(&error);
            None
        });
        let mut profiles = match &self.profiles {
            Some(profiles) => profiles.recent(self.epoch),
            None => self.damon_profiles(),
        };
        self.accesses_per_burst.retain(|name, _| tenants.iter().any(|(tenant, _)| tenant == name));
        for (name, bytes) in tenants {
            let samples = sample_set
                .as_ref()
                .and_then(|sample_set| self.sampled_profile(sample_set, name, *bytes, profiles.get(name)));
            profiles.extend(samples.map(|samples| (name.clone(), samples)));
        }
        profiles
    }

    /// Stops monitoring.
    pub fn stop(&mut self) {
        self.sampler = None;
        match self.damon.stop() {
            Ok(()) if !self.monitored.is_empty() => self.persisted.set_monitoring(None),
            Ok(()) => {}
            Err(error) => tracing::warn!(error = units::chain(&error), "cannot stop DAMON"),
        }
    }

    /// Closes the sampler after an error. The next epoch opens it again.
    fn drop_sampler(&mut self, error: &SamplerError) {
        self.sampler = None;
        self.log_sampler_state(units::chain(error));
    }

    /// Logs the state of the sampler if it has changed.
    fn log_sampler_state(&mut self, sampler_state: String) {
        if sampler_state != self.sampler_state {
            tracing::info!(state = sampler_state, "state of the access sampler changed");
            self.sampler_state = sampler_state;
        }
    }

    /// Starts sampling on all processors, and returns a description of the sampled event.
    fn start_sampling(&mut self) -> Result<&'static str, SamplerError> {
        let sampler = match self.sampler.take().filter(|sampler| sampler.covers_processors_of(&self.sys)) {
            Some(sampler) => sampler,
            None => Sampler::open(&self.sys, self.epoch)?,
        };
        let sampler = self.sampler.insert(sampler);
        sampler.begin().map(|()| sampler.event_name())
    }

    fn start_damon(&mut self) -> Result<(), DamonError> {
        self.monitored = Vec::new();
        self.damon.check_available()?;
        let names = self.cgroups.names().unwrap_or_default();
        let names = names.iter().filter_map(|name| Name::new(name).ok());
        let monitored = |name: Name| {
            let processes = self.cgroups.processes(name.as_str(), TENANT_PROCESSES_MAX).unwrap_or_default();
            (!processes.is_empty()).then_some((name, processes))
        };
        let mut all: Vec<(Name, Vec<u32>)> = names.filter_map(monitored).collect();
        if all.is_empty() {
            return Ok(());
        }
        // Begin after the last tenant with a result, so that all tenants are monitored in turn.
        let is_done =
            |(name, _): &(Name, Vec<u32>)| self.last_monitored.as_ref().is_some_and(|last| name <= last);
        let first = all.iter().position(|tenant| !is_done(tenant)).unwrap_or(0);
        all.rotate_left(first);
        let target = Target::without_device_memory(&self.sys);
        let targets = |processes: Vec<u32>| processes.into_iter().map(target).collect();
        let first = all.into_iter().take(MONITORED_TENANTS_MAX);
        let (names, processes): (Vec<Name>, Vec<Vec<Target>>) =
            first.map(|(name, processes)| (name, targets(processes))).unzip();
        self.log_unmonitored(&names, &processes);
        self.persisted.set_monitoring(Some(&self.boot_id));
        let started = self.damon.start(&processes);
        if !self.damon.is_running() {
            self.persisted.set_monitoring(None);
        }
        started?;
        self.monitored = names;
        Ok(())
    }

    /// Logs how much device memory of each tenant is not monitored, if it has changed.
    fn log_unmonitored(&mut self, names: &[Name], processes: &[Vec<Target>]) {
        let bytes = |targets: &Vec<Target>| targets.iter().map(|target| target.device_bytes).sum::<u64>();
        for (name, targets) in names.iter().zip(processes) {
            let (now, earlier) = (bytes(targets), self.unmonitored_bytes.get(name).copied().unwrap_or(0));
            if now != earlier {
                tracing::info!(tenant = %name, bytes = %Bytes::new(now), "cannot monitor device memory of tenant");
            }
        }
        self.unmonitored_bytes = names.iter().cloned().zip(processes.iter().map(bytes)).collect();
    }

    /// Returns the profile of a tenant from samples, scaled to the rate of touched pages in DAMON's
    /// profile. `None` if there are too few samples.
    fn sampled_profile(
        &mut self,
        sample_set: &SampleSet,
        name: &Name,
        bytes: Bytes,
        damon: Option<&AccessProfile>,
    ) -> Option<AccessProfile> {
        let processes = self.cgroups.processes(name.as_str(), CGROUP_PROCESSES_MAX).ok()?;
        let samples = sample_set.tenant_samples(&processes, bytes.get())?;
        let profile = samples.profile(self.accesses_per_burst.get(name).copied().unwrap_or(LINES_PER_PAGE));
        let Some(damon) = damon else { return Some(profile) };
        let touched = |profile: &AccessProfile| profile.touched_bytes().min(bytes.get());
        if touched(&profile) < touched(damon) / UNDERSAMPLING_RATIO_MAX {
            return None;
        }
        let resident = |profile: &AccessProfile| profile.resident_fraction(bytes.get());
        let touches = damon.pages_per_second() * resident(damon) / resident(&profile);
        if touches <= 0.0 {
            return Some(profile);
        }
        let accesses = samples.accesses_per_burst(touches);
        self.accesses_per_burst.insert(name.clone(), accesses);
        Some(samples.profile(accesses))
    }

    /// Stops DAMON, and returns its access profiles.
    fn damon_profiles(&mut self) -> BTreeMap<Name, AccessProfile> {
        let names = std::mem::take(&mut self.monitored);
        if names.is_empty() {
            return BTreeMap::new();
        }
        match self.damon.finish(self.epoch / RESULT_TIME_DIVISOR) {
            Ok(profiles) => {
                self.persisted.set_monitoring(None);
                let results =
                    names.into_iter().zip(profiles).filter_map(|(name, profile)| Some((name, profile?)));
                let results: Vec<(Name, AccessProfile)> = results.collect();
                self.last_monitored =
                    results.last().map(|(name, _)| name.clone()).or(self.last_monitored.take());
                results.into_iter().collect()
            }
            Err(error) => {
                tracing::warn!(error = units::chain(&error), "cannot stop DAMON");
                BTreeMap::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{
        access_profile::AccessSource, cgroup, damon, memory::usage::PAGE_BYTES, sampler::faults,
    };

    const EPOCH: Duration = Duration::from_secs(5);

    /// Samples page faults instead of memory accesses. This process is the tenant `busy`; the
    /// tenant `idle` causes no page faults.
    #[test]
    fn monitor_prefers_samples_and_falls_back_to_damon() {
        let _lock = faults::lock_faults();
        let Some(sampler) = faults::sampler(EPOCH) else { return };
        let (tenants, cgroups) = cgroup::fake::cgroups(&["busy", "idle"]);
        tenants.files("busy", &[("cgroup.procs", &std::process::id().to_string())]);
        tenants.files("idle", &[("cgroup.procs", "1")]);
        // DAMON reports 100 pages of `busy`, each accessed in every second sample.
        let sys = damon::fake::damon(2, &[("4096", "413696", "20")]);
        let online = Sysfs::at("/sys").text("devices/system/cpu/online").unwrap();
        sys.files("devices/system/cpu", &[("online", &online)]);
        let folder = tempfile::tempdir().unwrap();
        let mut monitor =
            AccessMonitor::open(&sys.path(""), &cgroups, EPOCH, &PersistedShares::at(folder.path()), None)
                .unwrap();
        monitor.sampler = Some(sampler);
        let named = ["busy", "idle"].map(|name| Name::new(name).unwrap());
        let mut epoch = |memory: Bytes, work: Duration| {
            monitor.begin_epoch();
            faults::cause_faults(work);
            let mut profiles = monitor.end_epoch(&named.clone().map(|name| (name, memory)));
            let touches =
                profiles[&named[0]].pages_per_second() * profiles[&named[0]].resident_fraction(memory.get());
            (named.each_ref().map(|name| profiles.remove(name).map(|profile| profile.source)), touches)
        };
        // The kernel lowers the sampling rate on a busy machine, so repeat with more page faults
        // until there are enough samples.
        let mut sampled_epoch = |memory: Bytes| {
            let works = [2, 4, 8, 16].map(Duration::from_secs);
            let mut epochs = works.into_iter().map(|work| epoch(memory, work));
            epochs
                .find(|(sources, _)| sources[0] == Some(AccessSource::Pebs))
                .expect("16 s of page faults give 1,000 samples")
        };
        // If the tenant has memory for only 50 of the 100 pages, half as many page accesses are
        // expected.
        for (memory, expected) in [(Bytes::mib(100), 1000.0), (Bytes::new(50 * PAGE_BYTES), 500.0)] {
            let (sources, touches) = sampled_epoch(memory);
            assert_eq!(sources, [Some(AccessSource::Pebs), Some(AccessSource::Damon)]);
            assert!(
                (touches / expected - 1.0).abs() < 0.1,
                "{touches} pages per second, expected {expected}"
            );
        }
        // DAMON now reports 1 GiB as accessed, much more than the samples show, as for a guest.
        let region = "kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/0/tried_regions/0";
        sys.files(region, &[("end", "1073745920")]);
        assert_eq!(epoch(Bytes::mib(100), Duration::from_secs(2)).0, [Some(AccessSource::Damon); 2]);
        assert_eq!(monitor.sampler_state, "page faults");
        // A change of the online processors reopens the sampler, which fails, because the simulated
        // sysfs has no event source.
        sys.files("devices/system/cpu", &[("online", "0")]);
        monitor.begin_epoch();
        assert!(monitor.sampler_state.contains("PEBS or IBS"), "{}", monitor.sampler_state);
        assert_eq!(
            monitor.end_epoch(&[(named[0].clone(), Bytes::mib(100))])[&named[0]].source,
            AccessSource::Damon
        );
        monitor.stop();
        assert_eq!(sys.sysfs.number("kernel/mm/damon/admin/kdamonds/nr_kdamonds").unwrap(), 0);
    }
}
