//! Which pages tenants touch: by samples of the processor where it takes any, by DAMON of all that it saw too little of; and of everybody by DAMON where it
//! takes none.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use units::{
    Bytes, Name,
    limits::{TENANT_PROCESSES_MAX, TENANTS_WATCHED_MAX},
};

use super::Kept;
use crate::host::{
    cgroup::Cgroups,
    damon::{Damon, DamonError},
    process::{self, ProcessError},
    sampler::{Sampler, SamplerError},
    sysfs::Sysfs,
    watched::Watched,
};

/// What part of an epoch, one in so many, it may take to hear what DAMON saw.
const HEARING: u32 = 4;

/// All that sees.
#[derive(Debug)]
pub(super) struct Sight {
    cgroups: Cgroups,
    epoch: Duration,
    sampler: Option<Sampler>,
    /// Of whom it took enough samples in the last epoch.
    sampled: BTreeSet<Name>,
    damon: Damon,
    /// Those that it watches, in their order.
    watched: Vec<Name>,
    /// The last of them of whom something was heard.
    heard: Option<Name>,
    kept: Kept,
    boot_id: String,
}

impl Sight {
    /// Of tenants in these cgroups, on a machine whose kernel speaks in a tree such as `/sys`.
    ///
    /// # Errors
    /// Nobody knows which start of the machine this is.
    pub fn open(sys: &Path, cgroups: &Cgroups, epoch: Duration, kept: &Kept) -> Result<Self, ProcessError> {
        let boot_id = process::boot_id()?;
        Ok(Self {
            cgroups: cgroups.clone(),
            epoch,
            sampler: sampler(&Sysfs::at(sys), epoch),
            sampled: BTreeSet::new(),
            damon: Damon::at(sys, kept.was_watching(&boot_id)),
            watched: Vec::new(),
            heard: None,
            kept: kept.clone(),
            boot_id,
        })
    }

    /// An epoch begins.
    pub fn begin(&mut self) {
        if let Some(Err(error)) = self.sampler.as_mut().map(Sampler::begin) {
            self.without_sampler(&error);
        }
        if let Err(error) = self.watch() {
            tracing::debug!(error = units::chain(&error), "DAMON does not see which pages are touched");
        }
    }

    /// It ends: what was seen of tenants that have so much memory, wherever it is.
    pub fn end(&mut self, tenants: &[(Name, Bytes)]) -> BTreeMap<Name, Watched> {
        let sampled = self.sampled(tenants);
        self.sampled = sampled.keys().cloned().collect();
        let mut seen = self.heard();
        seen.extend(sampled);
        seen
    }

    /// Nobody is watched any more.
    pub fn leave(&mut self) {
        self.sampler = None;
        match self.damon.stop() {
            Ok(()) if !self.watched.is_empty() => self.kept.note_watching(None),
            Ok(()) => {}
            Err(error) => tracing::warn!(error = units::chain(&error), "DAMON does not end"),
        }
    }

    fn without_sampler(&mut self, error: &SamplerError) {
        tracing::warn!(error = units::chain(error), "the processor samples no more");
        self.sampler = None;
    }

    fn watch(&mut self) -> Result<(), DamonError> {
        self.watched = Vec::new();
        self.damon.is_free()?;
        let names = self.cgroups.names().unwrap_or_default();
        let names = names.iter().filter_map(|name| Name::new(name).ok());
        let names = names.filter(|name| !self.sampled.contains(name));
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
        let (names, processes): (Vec<Name>, Vec<Vec<u32>>) =
            all.into_iter().take(TENANTS_WATCHED_MAX).unzip();
        self.kept.note_watching(Some(&self.boot_id));
        let begun = self.damon.watch(&processes);
        if !self.damon.is_watching() {
            self.kept.note_watching(None);
        }
        begun?;
        self.watched = names;
        Ok(())
    }

    /// Of whom the processor took enough samples.
    fn sampled(&mut self, tenants: &[(Name, Bytes)]) -> BTreeMap<Name, Watched> {
        let taken = match self.sampler.as_mut().map(Sampler::take) {
            None => return BTreeMap::new(),
            Some(Ok(taken)) => taken,
            Some(Err(error)) => {
                self.without_sampler(&error);
                return BTreeMap::new();
            }
        };
        let seen = |(name, bytes): &(Name, Bytes)| {
            let processes = self.cgroups.processes(name.as_str()).ok()?;
            Some((name.clone(), taken.of(&processes, bytes.get())?))
        };
        tenants.iter().filter_map(seen).collect()
    }

    /// What DAMON saw.
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

/// The processor's, if it takes samples.
fn sampler(sys: &Sysfs, epoch: Duration) -> Option<Sampler> {
    match Sampler::open(sys, epoch) {
        Ok(sampler) => {
            tracing::info!(of = sampler.what(), "the processor samples which pages are touched");
            Some(sampler)
        }
        Err(SamplerError::None) => None,
        Err(error) => {
            tracing::warn!(error = units::chain(&error), "the processor samples nothing");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{cgroup, damon, sampler::faults::fault, watched::Eyes};

    /// Accesses that are there to be sampled are this process's, as those of a tenant `busy`; `idle` has none.
    #[test]
    fn of_whom_the_processor_takes_enough_samples_is_not_watched_by_damon_and_all_others_are() {
        let Some(sampler) = Sampler::of_faults(Duration::from_secs(10)) else { return };
        let (tenants, cgroups) = cgroup::made_up::cgroups(&["busy", "idle"]);
        tenants.files("busy", &[("cgroup.procs", &std::process::id().to_string())]);
        tenants.files("idle", &[("cgroup.procs", "1")]);
        let sys = damon::made_up::damon(2, &[("4096", "12288", "40")]);
        let watched = || {
            let files = "kernel/mm/damon/admin/kdamonds";
            let first = sys.sysfs.text(format!("{files}/0/contexts/0/targets/0/pid_target")).unwrap();
            (sys.sysfs.number(format!("{files}/nr_kdamonds")).unwrap(), first)
        };
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept::at(folder.path());
        let mut sight = Sight::open(&sys.path(""), &cgroups, Duration::from_secs(10), &kept).unwrap();
        sight.sampler = Some(sampler);
        let tenants = ["busy", "idle"].map(|name| (Name::new(name).unwrap(), Bytes::mib(100)));
        sight.begin();
        assert_eq!(watched(), (2, std::process::id().to_string()));
        for _ in 0..2 {
            fault(Duration::from_secs(2));
            let seen = sight.end(&tenants);
            let by: Vec<_> = tenants.iter().map(|(name, _)| seen.get(name).map(|seen| seen.by)).collect();
            assert_eq!(by, [Some(Eyes::Pebs), Some(Eyes::Damon)]);
            sight.begin();
            assert_eq!(watched(), (1, "1".to_owned()), "who is sampled is left alone");
        }
        sight.leave();
        assert_eq!(watched().0, 0);
        assert!(!kept.was_watching(&process::boot_id().unwrap()));
    }
}
