//! Access monitor: the processor for tenants with enough samples, DAMON for the others; for all
//! tenants, DAMON provides the rate of touched pages, because a processor counts accesses.

use std::{collections::BTreeMap, path::Path, time::Duration};

use units::{
    Bytes, Name,
    limits::{MONITORED_TENANTS_MAX, TENANT_PROCESSES_MAX},
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

/// Divisor of an epoch: the time to read DAMON's results.
const RESULT_TIME_DIVISOR: u32 = 4;
/// Ratio of memory accessed according to DAMON to memory with samples, above which samples are not
/// used: most of such a tenant's memory is accessed through other addresses than its own, as that
/// of a guest.
const UNDERSAMPLING_MAX: u64 = 16;

/// Access monitor of all tenants.
#[derive(Debug)]
pub(super) struct AccessMonitor {
    cgroups: Cgroups,
    epoch: Duration,
    sys: Sysfs,
    sampler: Option<Sampler>,
    /// State of the sampler, logged when it changes.
    sampler_state: String,
    /// Last estimate of accesses per visit to a page, by tenant.
    accesses_per_visit: BTreeMap<Name, f64>,
    damon: Damon,
    /// Tenants monitored by DAMON, in order.
    monitored: Vec<Name>,
    /// Device memory of each of them, which is not monitored, in bytes.
    unmonitored: BTreeMap<Name, u64>,
    /// Last tenant with results.
    last_monitored: Option<Name>,
    persisted: PersistedShares,
    boot_id: String,
}

impl AccessMonitor {
    /// Creates it for tenants in these cgroups, on a machine with a tree such as `/sys`.
    ///
    /// # Errors
    /// The boot id is unknown.
    pub fn open(
        sys: &Path,
        cgroups: &Cgroups,
        epoch: Duration,
        persisted: &PersistedShares,
    ) -> Result<Self, ProcessError> {
        let boot_id = process::boot_id()?;
        Ok(Self {
            cgroups: cgroups.clone(),
            epoch,
            sys: Sysfs::at(sys),
            sampler: None,
            sampler_state: String::new(),
            accesses_per_visit: BTreeMap::new(),
            damon: Damon::at(sys, persisted.was_monitoring(&boot_id)),
            monitored: Vec::new(),
            unmonitored: BTreeMap::new(),
            last_monitored: None,
            persisted: persisted.clone(),
            boot_id,
        })
    }

    /// Starts an epoch.
    pub fn begin_epoch(&mut self) {
        match self.start_sampling() {
            Ok(event) => self.log_sampler_state(event.to_owned()),
            Err(error) => self.drop_sampler(&error),
        }
        if let Err(error) = self.start_damon() {
            tracing::debug!(error = units::chain(&error), "DAMON not started");
        }
    }

    /// Ends an epoch, and returns the access profiles. `tenants` are those that samples may
    /// represent, with their memory, including swap: guests are not among them, because they access
    /// their memory through other addresses.
    pub fn end_epoch(&mut self, tenants: &[(Name, Bytes)]) -> BTreeMap<Name, AccessProfile> {
        // Before slower work.
        let sample_set = self.sampler.as_mut().map(Sampler::take).transpose();
        let sample_set = sample_set.unwrap_or_else(|error| {
            self.drop_sampler(&error);
            None
        });
        let mut profiles = self.damon_profiles();
        self.accesses_per_visit.retain(|name, _| tenants.iter().any(|(tenant, _)| tenant == name));
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
            Err(error) => tracing::warn!(error = units::chain(&error), "DAMON not stopped"),
        }
    }

    /// Drops the sampler until the next epoch, which opens it again.
    fn drop_sampler(&mut self, error: &SamplerError) {
        self.sampler = None;
        self.log_sampler_state(units::chain(error));
    }

    /// Logs the state of the sampler if it has changed.
    fn log_sampler_state(&mut self, sampler_state: String) {
        if sampler_state != self.sampler_state {
            tracing::info!(state = sampler_state, "state of the access sampler");
            self.sampler_state = sampler_state;
        }
    }

    /// Starts sampling on all processors; returns the event.
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
            let mut processes = self.cgroups.processes(name.as_str()).unwrap_or_default();
            processes.truncate(TENANT_PROCESSES_MAX);
            (!processes.is_empty()).then_some((name, processes))
        };
        let mut all: Vec<(Name, Vec<u32>)> = names.filter_map(monitored).collect();
        if all.is_empty() {
            return Ok(());
        }
        // Tenants without a result in the last epoch come first.
        let is_done =
            |(name, _): &(Name, Vec<u32>)| self.last_monitored.as_ref().is_some_and(|last| name <= last);
        let first = all.iter().position(|one| !is_done(one)).unwrap_or(0);
        all.rotate_left(first);
        // Mappings are examined only if there may be device memory to exclude.
        let devices = self.sys.numbered("bus/dax/devices", "dax").unwrap_or_default();
        let target = if devices.is_empty() { Target::whole } else { Target::of };
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

    /// Logs how much device memory of each tenant is not watched, where that has changed.
    fn log_unmonitored(&mut self, names: &[Name], processes: &[Vec<Target>]) {
        let bytes = |targets: &Vec<Target>| targets.iter().map(|target| target.device_bytes).sum::<u64>();
        for (name, targets) in names.iter().zip(processes) {
            let (now, earlier) = (bytes(targets), self.unmonitored.get(name).copied().unwrap_or(0));
            if now != earlier {
                tracing::info!(tenant = %name, bytes = %Bytes::new(now), "device memory of a tenant is not monitored");
            }
        }
        self.unmonitored = names.iter().cloned().zip(processes.iter().map(bytes)).collect();
    }

    /// Returns the profile of a tenant from samples, if there are enough, scaled to the accesses
    /// seen by DAMON.
    fn sampled_profile(
        &mut self,
        sample_set: &SampleSet,
        name: &Name,
        bytes: Bytes,
        damon: Option<&AccessProfile>,
    ) -> Option<AccessProfile> {
        let samples = sample_set.tenant(&self.cgroups.processes(name.as_str()).ok()?, bytes.get())?;
        let profile = samples.profile(self.accesses_per_visit.get(name).copied().unwrap_or(LINES_PER_PAGE));
        let Some(damon) = damon else { return Some(profile) };
        let touched = |profile: &AccessProfile| profile.touched_bytes().min(bytes.get());
        if touched(&profile) < touched(damon) / UNDERSAMPLING_MAX {
            return None;
        }
        let resident = |profile: &AccessProfile| profile.resident_fraction(bytes.get());
        let touches = damon.pages_per_second() * resident(damon) / resident(&profile);
        if touches <= 0.0 {
            return Some(profile);
        }
        let accesses = samples.accesses_per_visit(touches);
        self.accesses_per_visit.insert(name.clone(), accesses);
        Some(samples.profile(accesses))
    }

    /// Returns the access profiles of DAMON.
    fn damon_profiles(&mut self) -> BTreeMap<Name, AccessProfile> {
        let names = std::mem::take(&mut self.monitored);
        if names.is_empty() {
            return BTreeMap::new();
        }
        match self.damon.finish(self.epoch / RESULT_TIME_DIVISOR) {
            Ok(profiles) => {
                self.persisted.set_monitoring(None);
                let last_monitored =
                    names.into_iter().zip(profiles).filter_map(|(name, profiles)| Some((name, profiles?)));
                let last_monitored: Vec<(Name, AccessProfile)> = last_monitored.collect();
                self.last_monitored =
                    last_monitored.last().map(|(name, _)| name.clone()).or(self.last_monitored.take());
                last_monitored.into_iter().collect()
            }
            Err(error) => {
                tracing::warn!(error = units::chain(&error), "DAMON not stopped");
                BTreeMap::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{access_profile::AccessSource, cgroup, damon, memory::usage::PAGE, sampler::faults};

    const EPOCH: Duration = Duration::from_secs(5);

    /// The sampled event is page faults of this process, which is the tenant `busy`; `idle` has
    /// none.
    #[test]
    fn monitor_prefers_samples_and_falls_back_to_damon() {
        let _lock = faults::lock_faults();
        let Some(sampler) = faults::sampler(EPOCH) else { return };
        let (tenants, cgroups) = cgroup::fake::cgroups(&["busy", "idle"]);
        tenants.files("busy", &[("cgroup.procs", &std::process::id().to_string())]);
        tenants.files("idle", &[("cgroup.procs", "1")]);
        // It has 100 pages, each accessed in every second sample.
        let sys = damon::fake::damon(2, &[("4096", "413696", "20")]);
        let online = Sysfs::at("/sys").text("devices/system/cpu/online").unwrap();
        sys.files("devices/system/cpu", &[("online", &online)]);
        let folder = tempfile::tempdir().unwrap();
        let mut monitor =
            AccessMonitor::open(&sys.path(""), &cgroups, EPOCH, &PersistedShares::at(folder.path())).unwrap();
        monitor.sampler = Some(sampler);
        let named = ["busy", "idle"].map(|name| Name::new(name).unwrap());
        let mut epoch = |has: Bytes, work: Duration| {
            monitor.begin_epoch();
            faults::cause_faults(work);
            let mut profiles = monitor.end_epoch(&named.clone().map(|name| (name, has)));
            let touches =
                profiles[&named[0]].pages_per_second() * profiles[&named[0]].resident_fraction(has.get());
            (named.each_ref().map(|name| profiles.remove(name).map(|profiles| profiles.source)), touches)
        };
        // The kernel lowers the sampling frequency on a busy machine: more work then gives enough
        // samples.
        let mut sampled_epoch = |has: Bytes| {
            let works = [2, 4, 8, 16].map(Duration::from_secs);
            let mut epochs = works.into_iter().map(|work| epoch(has, work));
            epochs
                .find(|(by, _)| by[0] == Some(AccessSource::Pebs))
                .expect("16 s of page faults give 1,000 samples")
        };
        // Half of the addresses that DAMON saw accessed have pages, so half as many pages are
        // accessed.
        for (has, touches) in [(Bytes::mib(100), 1000.0), (Bytes::new(50 * PAGE), 500.0)] {
            let (by, profiles) = sampled_epoch(has);
            assert_eq!(by, [Some(AccessSource::Pebs), Some(AccessSource::Damon)]);
            assert!((profiles / touches - 1.0).abs() < 0.1, "{profiles} pages a second of {touches}");
        }
        // Most of it is accessed by other processes, as the memory of a guest.
        let region = "kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/0/tried_regions/0";
        sys.files(region, &[("end", "1073745920")]);
        assert_eq!(epoch(Bytes::mib(100), Duration::from_secs(2)).0, [Some(AccessSource::Damon); 2]);
        assert_eq!(monitor.sampler_state, "page faults");
        // After a change of processors, the sampler is opened again: this tree has no processor
        // that samples.
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
