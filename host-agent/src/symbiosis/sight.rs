//! Access monitor: the processor for tenants with enough samples, DAMON for the others; for all
//! tenants, DAMON provides the rate of touched pages, because a processor counts accesses.

use std::{collections::BTreeMap, path::Path, time::Duration};

use units::{
    Bytes, Name,
    limits::{MONITORED_TENANTS_MAX, TENANT_PROCESSES_MAX},
};

use super::Kept;
use crate::host::{
    cgroup::Cgroups,
    damon::{Damon, DamonError, Target},
    process::{self, ProcessError},
    sampler::{LINES, Sampler, SamplerError, Taken},
    sysfs::Sysfs,
    watched::Watched,
};

/// Divisor of an epoch: the time to read DAMON's results.
const HEARING: u32 = 4;
/// Who touched so many times as much by DAMON's word as there are samples of is not known by samples: most of its memory is accessed by other addresses than
/// its own, as a guest's is.
const PARTLY: u64 = 16;

/// All that sees.
#[derive(Debug)]
pub(super) struct Sight {
    cgroups: Cgroups,
    epoch: Duration,
    sys: Sysfs,
    sampler: Option<Sampler>,
    /// State of the sampler, logged when it changes.
    told: String,
    /// How many accesses of a tenant are one visit to a page, as was seen last.
    visits: BTreeMap<Name, f64>,
    damon: Damon,
    /// Those that it watches, in their order.
    watched: Vec<Name>,
    /// How much device memory each of them has, which is not watched.
    unwatched: BTreeMap<Name, u64>,
    /// Last tenant with results.
    heard: Option<Name>,
    kept: Kept,
    boot_id: String,
}

impl Sight {
    /// Creates it for tenants in these cgroups, on a machine with a tree such as `/sys`.
    ///
    /// # Errors
    /// The boot id is unknown.
    pub fn open(sys: &Path, cgroups: &Cgroups, epoch: Duration, kept: &Kept) -> Result<Self, ProcessError> {
        let boot_id = process::boot_id()?;
        Ok(Self {
            cgroups: cgroups.clone(),
            epoch,
            sys: Sysfs::at(sys),
            sampler: None,
            told: String::new(),
            visits: BTreeMap::new(),
            damon: Damon::at(sys, kept.was_watching(&boot_id)),
            watched: Vec::new(),
            unwatched: BTreeMap::new(),
            heard: None,
            kept: kept.clone(),
            boot_id,
        })
    }

    /// An epoch begins.
    pub fn begin(&mut self) {
        match self.sample() {
            Ok(what) => self.tell(what.to_owned()),
            Err(error) => self.without_sampler(&error),
        }
        if let Err(error) = self.watch() {
            tracing::debug!(error = units::chain(&error), "DAMON does not see which pages are touched");
        }
    }

    /// It ends: what was seen. Those tenants may be known by samples, that have so much memory, wherever it is: not those whose memory is a guest's, which
    /// accesses it by other addresses.
    pub fn end(&mut self, tenants: &[(Name, Bytes)]) -> BTreeMap<Name, Watched> {
        // before slower work
        let taken = self.sampler.as_mut().map(Sampler::take).transpose();
        let taken = taken.unwrap_or_else(|error| {
            self.without_sampler(&error);
            None
        });
        let mut seen = self.heard();
        self.visits.retain(|name, _| tenants.iter().any(|(tenant, _)| tenant == name));
        for (name, bytes) in tenants {
            let sampled = taken.as_ref().and_then(|taken| self.sampled(taken, name, *bytes, seen.get(name)));
            seen.extend(sampled.map(|sampled| (name.clone(), sampled)));
        }
        seen
    }

    /// Stops monitoring.
    pub fn leave(&mut self) {
        self.sampler = None;
        match self.damon.stop() {
            Ok(()) if !self.watched.is_empty() => self.kept.note_watching(None),
            Ok(()) => {}
            Err(error) => tracing::warn!(error = units::chain(&error), "DAMON does not end"),
        }
    }

    /// Until the next epoch begins: then it is tried anew.
    fn without_sampler(&mut self, error: &SamplerError) {
        self.sampler = None;
        self.tell(units::chain(error));
    }

    /// Logs the state of the sampler if it has changed.
    fn tell(&mut self, told: String) {
        if told != self.told {
            tracing::info!(told, "whether the processor samples which pages are accessed");
            self.told = told;
        }
    }

    /// Starts sampling on all processors; returns the event.
    fn sample(&mut self) -> Result<&'static str, SamplerError> {
        let sampler = match self.sampler.take().filter(|sampler| sampler.is_of(&self.sys)) {
            Some(sampler) => sampler,
            None => Sampler::open(&self.sys, self.epoch)?,
        };
        let sampler = self.sampler.insert(sampler);
        sampler.begin().map(|()| sampler.what())
    }

    fn watch(&mut self) -> Result<(), DamonError> {
        self.watched = Vec::new();
        self.damon.is_free()?;
        let names = self.cgroups.names().unwrap_or_default();
        let names = names.iter().filter_map(|name| Name::new(name).ok());
        let watched = |name: Name| {
            let mut processes = self.cgroups.processes(name.as_str()).unwrap_or_default();
            processes.truncate(TENANT_PROCESSES_MAX);
            (!processes.is_empty()).then_some((name, processes))
        };
        let mut all: Vec<(Name, Vec<u32>)> = names.filter_map(watched).collect();
        if all.is_empty() {
            return Ok(());
        }
        // Those that there was no time or no place for are the first this time.
        let is_heard = |(name, _): &(Name, Vec<u32>)| self.heard.as_ref().is_some_and(|last| name <= last);
        let first = all.iter().position(|one| !is_heard(one)).unwrap_or(0);
        all.rotate_left(first);
        // Mappings are examined only where there may be some to keep out.
        let devices = self.sys.numbered("bus/dax/devices", "dax").unwrap_or_default();
        let target = if devices.is_empty() { Target::whole } else { Target::of };
        let targets = |processes: Vec<u32>| processes.into_iter().map(target).collect();
        let first = all.into_iter().take(MONITORED_TENANTS_MAX);
        let (names, processes): (Vec<Name>, Vec<Vec<Target>>) =
            first.map(|(name, processes)| (name, targets(processes))).unzip();
        self.note_unwatched(&names, &processes);
        self.kept.note_watching(Some(&self.boot_id));
        let begun = self.damon.watch(&processes);
        if !self.damon.is_watching() {
            self.kept.note_watching(None);
        }
        begun?;
        self.watched = names;
        Ok(())
    }

    /// Logs how much device memory of each tenant is not watched, where that has changed.
    fn note_unwatched(&mut self, names: &[Name], processes: &[Vec<Target>]) {
        let bytes = |targets: &Vec<Target>| targets.iter().map(|target| target.device_bytes).sum::<u64>();
        for (name, targets) in names.iter().zip(processes) {
            let (now, before) = (bytes(targets), self.unwatched.get(name).copied().unwrap_or(0));
            if now != before {
                tracing::info!(tenant = %name, unwatched = %Bytes::new(now), "device memory of a tenant is not watched");
            }
        }
        self.unwatched = names.iter().cloned().zip(processes.iter().map(bytes)).collect();
    }

    /// Returns the samples of a tenant, if there are enough, for the accesses seen by DAMON.
    fn sampled(
        &mut self,
        taken: &Taken,
        name: &Name,
        bytes: Bytes,
        damon: Option<&Watched>,
    ) -> Option<Watched> {
        let sampled = taken.of(&self.cgroups.processes(name.as_str()).ok()?, bytes.get())?;
        let seen = sampled.watched(self.visits.get(name).copied().unwrap_or(LINES));
        let Some(damon) = damon else { return Some(seen) };
        let touched = |watched: &Watched| watched.touched_bytes().min(bytes.get());
        if touched(&seen) < touched(damon) / PARTLY {
            return None;
        }
        let there = |watched: &Watched| watched.part_there(bytes.get());
        let touches = damon.pages_per_second() * there(damon) / there(&seen);
        if touches <= 0.0 {
            return Some(seen);
        }
        let visit = sampled.visit(touches);
        self.visits.insert(name.clone(), visit);
        Some(sampled.watched(visit))
    }

    /// Accesses seen by DAMON.
    fn heard(&mut self) -> BTreeMap<Name, Watched> {
        let names = std::mem::take(&mut self.watched);
        if names.is_empty() {
            return BTreeMap::new();
        }
        match self.damon.take(self.epoch / HEARING) {
            Ok(seen) => {
                self.kept.note_watching(None);
                let heard = names.into_iter().zip(seen).filter_map(|(name, seen)| Some((name, seen?)));
                let heard: Vec<(Name, Watched)> = heard.collect();
                self.heard = heard.last().map(|(name, _)| name.clone()).or(self.heard.take());
                heard.into_iter().collect()
            }
            Err(error) => {
                tracing::warn!(error = units::chain(&error), "DAMON does not end");
                BTreeMap::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{cgroup, damon, memory::usage::PAGE, sampler::faults, watched::Eyes};

    const EPOCH: Duration = Duration::from_secs(5);

    /// The sampled event is this process's page faults: it is the tenant `busy`; `idle` has none.
    #[test]
    fn monitor_prefers_samples_and_falls_back_to_damon() {
        let _alone = faults::alone();
        let Some(sampler) = faults::sampler(EPOCH) else { return };
        let (tenants, cgroups) = cgroup::made_up::cgroups(&["busy", "idle"]);
        tenants.files("busy", &[("cgroup.procs", &std::process::id().to_string())]);
        tenants.files("idle", &[("cgroup.procs", "1")]);
        // It has 100 pages, and each is in every second look.
        let sys = damon::made_up::damon(2, &[("4096", "413696", "20")]);
        let online = Sysfs::at("/sys").text("devices/system/cpu/online").unwrap();
        sys.files("devices/system/cpu", &[("online", &online)]);
        let folder = tempfile::tempdir().unwrap();
        let mut sight = Sight::open(&sys.path(""), &cgroups, EPOCH, &Kept::at(folder.path())).unwrap();
        sight.sampler = Some(sampler);
        let named = ["busy", "idle"].map(|name| Name::new(name).unwrap());
        let mut epoch = |has: Bytes, work: Duration| {
            sight.begin();
            faults::fault(work);
            let mut seen = sight.end(&named.clone().map(|name| (name, has)));
            let touches = seen[&named[0]].pages_per_second() * seen[&named[0]].part_there(has.get());
            (named.each_ref().map(|name| seen.remove(name).map(|seen| seen.by)), touches)
        };
        // The kernel lowers the sampling frequency on a busy machine: more work then gives enough samples.
        let mut sampled_epoch = |has: Bytes| {
            let works = [2, 4, 8, 16].map(Duration::from_secs);
            let mut epochs = works.into_iter().map(|work| epoch(has, work));
            epochs.find(|(by, _)| by[0] == Some(Eyes::Pebs)).expect("16 s of page faults give 1,000 samples")
        };
        // Half of the addresses that DAMON saw accessed have pages, so half as many pages are
        // accessed.
        for (has, touches) in [(Bytes::mib(100), 1000.0), (Bytes::new(50 * PAGE), 500.0)] {
            let (by, seen) = sampled_epoch(has);
            assert_eq!(by, [Some(Eyes::Pebs), Some(Eyes::Damon)]);
            assert!((seen / touches - 1.0).abs() < 0.1, "{seen} pages a second of {touches}");
        }
        // Most of it is touched by others, as a guest's memory is.
        let region = "kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/0/tried_regions/0";
        sys.files(region, &[("end", "1073745920")]);
        assert_eq!(epoch(Bytes::mib(100), Duration::from_secs(2)).0, [Some(Eyes::Damon); 2]);
        assert_eq!(sight.told, "page faults");
        // One processor more or fewer, and all are asked anew: this tree has none that could be.
        sys.files("devices/system/cpu", &[("online", "0")]);
        sight.begin();
        assert!(sight.told.contains("PEBS or IBS"), "{}", sight.told);
        assert_eq!(sight.end(&[(named[0].clone(), Bytes::mib(100))])[&named[0]].by, Eyes::Damon);
        sight.leave();
        assert_eq!(sys.sysfs.number("kernel/mm/damon/admin/kdamonds/nr_kdamonds").unwrap(), 0);
    }
}
